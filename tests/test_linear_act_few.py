"""Products of few rows of a linear layer on CUDA, against float64; the plans: test_..._plan.py."""

from collections.abc import Iterator

import pytest
import torch
from launches import captured
from linears import check_linear, operands
from reference import ACTIVATIONS, poison

import fusedcuda

ops = torch.ops.fusedcuda
BF16 = torch.bfloat16
pytestmark = pytest.mark.gpu
every_half = pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)


@pytest.fixture(autouse=True)
def few_rows() -> Iterator[None]:
    fusedcuda.load("linear_act")
    before = ops.linear_act_use("few_rows")
    yield
    ops.linear_act_use(before)


def check(
    m: int, n: int, k: int, activation: str = "none", dtype: torch.dtype = BF16, bias: bool = True
) -> None:
    x, weight, given_bias = operands(m, n=n, k=k, dtype=dtype, device="cuda")
    given = (x, weight, given_bias if bias else None, activation)
    assert "linear_few_kernel" in str(fusedcuda.explain(fusedcuda.linear_act, *given))
    poison("cuda", 2 * m * n)
    check_linear(*given, wrt=())


@every_half
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    check(5, 264, 520, activation, dtype)


# Around tiles of 16 rows of x and of the weight, steps of 32 columns, clusters of 1 to 8 blocks.
@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("n", [1, 16, 133, 2000])
@pytest.mark.parametrize("k", [8, 40, 1032, 2048, 4104])
def test_ragged_sizes(m, n, k):
    check(m, n, k)


@every_half
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 4096, 4096), (16, 14336, 4096), (16, 4096, 14336), (64, 4096, 4096), (3, 128256, 2048)],
)
def test_models(m, n, k, dtype):
    check(m, n, k, dtype=dtype, bias=False)


def test_values_that_are_not_finite_stay_in_their_rows():
    x, weight, _ = operands(9, n=264, k=520, dtype=BF16, device="cuda")
    clean = fusedcuda.linear_act(x, weight)
    x[1, 519], weight[7] = torch.nan, torch.nan
    y = fusedcuda.linear_act(x, weight)
    assert y[1].isnan().all()
    assert y[:, 7].isnan().all()
    rows, columns = torch.arange(9) != 1, torch.arange(264) != 7
    assert torch.equal(y[rows][:, columns], clean[rows][:, columns])


def test_a_layer_follows_what_its_input_comes_from():
    """It may start before the kernel ahead of it has ended, and the next one before it has."""
    x, weight, bias = operands(16, n=4096, k=4096, dtype=BF16, device="cuda")
    first = fusedcuda.linear_act(x, weight, bias)
    torch.cuda.synchronize()
    expected = fusedcuda.linear_act(first, weight, bias)
    torch.cuda.synchronize()
    for _ in range(50):
        y = fusedcuda.linear_act(fusedcuda.linear_act(x, weight, bias), weight, bias)
        assert torch.equal(y, expected)


def test_graph_capture():
    x, weight, bias = operands(12, n=1000, k=520, dtype=BF16, device="cuda")
    graph, y = captured(lambda: fusedcuda.linear_act(x, weight, bias, "silu"))
    for _ in range(2):
        x.copy_(x.roll(1, 0))
        graph.replay()
        assert torch.equal(y, fusedcuda.linear_act(x, weight, bias, "silu"))
