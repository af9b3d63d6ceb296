"""The product of a gated MLP on Hopper, alone, against float64."""

import layouts
import pytest
import torch
import torch.nn.functional as F
from launches import check_replays, need_hopper, on_another_stream
from linears import exact, weights
from reference import ACTIVATIONS, check_function, poison
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS as CODES

ops = torch.ops.fusedcuda
BF16 = torch.bfloat16
HALVES = (torch.float16, BF16)
pytestmark = pytest.mark.gpu
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
either = pytest.mark.parametrize("saves", [False, True], ids=["h", "gate_up"])


@pytest.fixture(autouse=True, scope="module")
def hopper() -> None:
    need_hopper("gated_mlp")


def operands(m: int, f: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """x, and the two halves of one weight. What they add up to is exact in float32."""
    w = weights(2 * f, k, dtype=dtype, device="cuda")
    return exact(m, k, dtype=dtype, device="cuda"), w[:f], w[f:]


def check(
    x: Tensor, w_gate: Tensor, w_up: Tensor, activation: str = "silu", saves: bool = False
) -> None:
    (m, _), f, dtype = x.shape, w_gate.shape[0], x.dtype
    poison("cuda", 2 * m * f, 4 * m * f)
    outputs = ops.gated_product(x, w_gate, w_up, CODES[activation], saves)
    assert len(outputs) == 1 + saves, "there is no kernel"
    assert all(t.is_contiguous() for t in outputs)

    def eager(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        return ACTIVATIONS[activation](F.linear(x, w_gate)) * F.linear(x, w_up)

    given = {"x": x, "w_gate": w_gate, "w_up": w_up}
    check_function("gated_product", lambda *_: outputs[0], eager, given, wrt=())
    if saves:
        gate, up = (F.linear(x.double(), w.double()).to(dtype) for w in (w_gate, w_up))
        assert torch.equal(outputs[1], torch.cat([gate, up], dim=1))


@either
@every_half
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype, saves):
    check(*operands(300, 264, 136, dtype), activation, saves)


# Around the sizes of tiles (64 columns, 256 rows a cluster), of stages (64 values of k) and of the
# ring of stages.
@pytest.mark.parametrize("m", [1, 64, 127, 256, 257, 1000])
@pytest.mark.parametrize("f", [8, 64, 136, 520])
@pytest.mark.parametrize("k", [8, 64, 72, 512])
def test_ragged_sizes(m, f, k):
    given = operands(m, f, k)
    check(*given)
    check(*given, saves=True)


# More tiles than there are multiprocessors, odd and even numbers of them for a block; long k.
@either
@pytest.mark.parametrize(
    ("m", "f", "k"),
    [
        (8192, 14336, 4096),
        (2048, 8192, 2048),
        (65537, 136, 72),
        (4096, 3080, 64),
        (128, 1024, 8192),
    ],
)
def test_large_sizes(m, f, k, saves, memory):
    memory(40)
    check(*operands(m, f, k), saves=saves)


@every_half
def test_weights_in_different_places(dtype):
    """Of their own, and each with a pitch of its own; k is no multiple of eight."""
    x, w_gate, w_up = (
        (scale * exact(rows, pitch, dtype=dtype, device="cuda"))[:, 8:487]
        for rows, pitch, scale in ((300, 488, 1), (136, 496, 1 / 16), (136, 512, 1 / 16))
    )
    for saves in (False, True):
        check(x, w_gate, w_up, "gelu", saves)
        check(x, w_up, w_gate, "gelu", saves)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_h_is_rounded_once(activation):
    """It is made of the sums, not of what they are rounded to, whether that is saved or not."""
    given = operands(1000, 520, 200)
    (h,) = ops.gated_product(*given, CODES[activation], False)
    assert torch.equal(ops.gated_product(*given, CODES[activation], True)[0], h)
    x, w_gate, w_up = (t.double() for t in given)
    expected = ACTIVATIONS[activation](x @ w_gate.T) * (x @ w_up.T)
    # Of rounded sums 68 to 84 % would be equal.
    assert (h == expected.to(h.dtype)).double().mean() > 0.99


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_values_that_are_not_finite(activation):
    x, w_gate, w_up = operands(64, 64, 64)
    x[3, 5], x[7, 2] = torch.nan, torch.inf
    w_gate[:, 2], w_up[:, 2] = 1, -1
    h, gate_up = ops.gated_product(x, w_gate, w_up, CODES[activation], True)
    assert h[3].isnan().all()
    assert gate_up[3].isnan().all()
    assert (h[7] == -torch.inf).all()
    assert h.isfinite().sum() == 62 * 64


def test_what_there_is_no_kernel_for():
    x, w_gate, w_up = operands(300, 136, 64)
    for refused in (
        (layouts.shifted(x, 1), w_gate, w_up),
        (x, layouts.shifted(w_gate, 1), w_up),
        (x, w_gate, layouts.transposed(w_up)),
        (x[:0], w_gate, w_up),
        (x, w_gate[:130], w_up[:130]),
        (x[:, :0], w_gate[:, :0], w_up[:, :0]),
        tuple(t.float() for t in (x, w_gate, w_up)),
    ):
        assert ops.gated_product(*refused, CODES["silu"], True) == []


def test_repeatable_to_the_last_bit():
    given = operands(4096, 3072, 1024)
    first = ops.gated_product(*given, CODES["silu"], True)
    for _ in range(5):
        again = ops.gated_product(*given, CODES["silu"], True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_in_a_graph():
    given = operands(2048, 1024, 480)
    check_replays(lambda: ops.gated_product(*given, CODES["silu"], True))


def test_on_another_stream():
    given = operands(2048, 1024, 480)
    expected = ops.gated_product(*given, CODES["silu"], True)
    calls = on_another_stream(
        lambda: [ops.gated_product(*given, CODES["silu"], True) for _ in range(10)]
    )
    for outputs in calls:
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
