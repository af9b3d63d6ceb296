"""The gradient of layers of one output, by the kernel for it."""

from functools import partial

import pytest
import torch
from launches import check_replays
from linears import check_kernel, check_linear, check_mlp, exact, operands
from reference import poison
from torch import Tensor

import fusedcuda
from fusedcuda.ops._activations import ACTIVATIONS

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
HALVES = pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
KINDS = pytest.mark.parametrize("activation", ["none", "relu", "silu"])  # of what is saved
DX, DWEIGHT, DBIAS = 1, 2, 4

check = partial(check_kernel, "one_output_bwd_kernel", n=1, backward=True)


@HALVES
@pytest.mark.parametrize("k", [1, 5, 8, 256, 479, 1000, 4096])
def test_inputs(dtype, k):
    for activation in ACTIVATIONS:
        check(m=300, k=k, activation=activation, dtype=dtype)


@pytest.mark.parametrize("m", [1, 5, 96, 97, 2048])
@pytest.mark.parametrize("k", [8, 13, 264])
def test_rows(m, k):
    for activation in ("none", "relu", "gelu_tanh"):
        check(m=m, k=k, activation=activation)


@pytest.mark.parametrize(("m", "k"), [(65536, 256), (65537, 264), (8192, 4096), (16, 50257)])
def test_large_sizes(m, k):
    check(m=m, k=k)
    check(m=m, k=k, activation="none")


@HALVES
@KINDS
def test_layouts(activation, dtype):
    """Rows with a pitch, off the boundary; a weight whose elements lie apart; dy likewise."""
    x, weight, bias = operands(300, n=1, k=64, dtype=dtype, device="cuda")
    wide = exact(300, 96, dtype=dtype, device="cuda")
    column = (exact(64, 3, dtype=dtype, device="cuda") / 8)[:, 1:2]
    for given, other in (
        (wide[:, 16:80], weight),
        (wide[:, 3:67], weight),
        (exact(300, 71, dtype=dtype, device="cuda")[:, :64], weight),
        (x, column.T),
        (wide[:, 16:80].T.contiguous().T, weight),  # by columns: not this kernel
        (x[:1].expand(300, 64), weight),
    ):
        check_linear(given, other, bias, activation)
    for dy in (wide[:, 5:6], wide[:1, :1].expand(300, 1)):
        check_linear(x, weight, bias, activation, dy=dy)
    check_linear(x.view(3, 100, 64), weight, None, activation)


@KINDS
@pytest.mark.parametrize(
    "wrt",
    [["x"], ["weight"], ["bias"], ["x", "weight"], ["x", "bias"], ["weight", "bias"]],
    ids=str,
)
def test_gradients_alone(wrt, activation):
    for m, k in ((5000, 256), (70, 13)):
        check_linear(*operands(m, n=1, k=k, dtype=BF16, device="cuda"), activation, wrt=wrt)


def given_layer(m: int, k: int, activation: str, dtype: torch.dtype = BF16) -> list[Tensor | None]:
    """dy, x, weight and what the forward saved."""
    x, weight, bias = operands(m, n=1, k=k, dtype=dtype, device="cuda")
    code = ACTIVATIONS[activation]
    _, *saved = torch.ops.fusedcuda.linear_act_forward(x, weight, bias, code, False)
    dy = torch.randn(m, 1, device="cuda").to(dtype)
    return [dy, x, weight, saved[0] if saved else None]


def gradients(given: list[Tensor | None], activation: str, mask: int = 7) -> list[Tensor]:
    code = ACTIVATIONS[activation]
    return torch.ops.fusedcuda.linear_act_backward(*given, code, mask, False)


@KINDS
@pytest.mark.parametrize(("m", "k"), [(65536, 256), (2048, 256), (8192, 4096), (333, 1001)])
def test_every_run_has_the_same_bits(m, k, activation):
    """Also of the gradients alone, as the rows are divided among the same threads."""
    given = given_layer(m, k, activation)
    expected = gradients(given, activation)
    for _ in range(3):
        poison("cuda", *(t.nbytes for t in expected), 1 << 22)
        again = gradients(given, activation)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    for mask in (DX, DWEIGHT, DX | DWEIGHT, DX | DBIAS, DWEIGHT | DBIAS):
        wanted = [t for i, t in enumerate(expected) if mask >> i & 1]
        alone = gradients(given, activation, mask)
        assert all(torch.equal(a, b) for a, b in zip(alone, wanted, strict=True))


@KINDS
def test_in_a_graph(activation):
    """The sums of the blocks lie in the graph's own memory."""
    given = given_layer(8192, 512, activation)
    check_replays(lambda: gradients(given, activation))


@KINDS
def test_the_sum_of_all_outputs(activation):
    """Its gradient is one element, repeated."""
    leaves = operands(1000, n=1, k=256, dtype=BF16, device="cuda")
    leaves = [t.requires_grad_() for t in leaves]
    fusedcuda.linear_act(*leaves, activation).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in leaves]
    fusedcuda.linear_act(*wide, activation).sum().backward()
    for ours, theirs in zip(leaves, wide, strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0.02, atol=0.004 * scale)


@KINDS
def test_no_rows(activation):
    dx, dweight, dbias = gradients(given_layer(0, 64, activation), activation)
    assert dx.shape == (0, 64)
    assert not dweight.any()
    assert not dbias.any()


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_the_last_of_two_layers(activation):
    x, w1, b1 = operands(2048, n=136, k=64, dtype=BF16, device="cuda")
    _, w2, b2 = operands(1, n=1, k=136, dtype=BF16, device="cuda")
    explained = fusedcuda.explain(fusedcuda.mlp, x, w1, b1, w2, b2, activation, backward=True)
    assert "one_output_bwd_kernel" in str(explained)
    check_mlp(x, w1, b1, w2, b2, activation)
