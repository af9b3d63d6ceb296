"""The hand-written products of Hopper, where they are asked for, against float64."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from launches import check_replays
from linears import backend, check_kernel, check_linear, check_mlp, exact, operands, weights
from reference import ACTIVATIONS, leaf
from torch import Tensor

import fusedcuda

ops = torch.ops.fusedcuda
BF16 = torch.bfloat16
HALVES = (torch.float16, BF16)
pytestmark = pytest.mark.gpu
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    with backend("hopper"):
        yield


check = partial(check_kernel, "linear_act_kernel_sm90")


@every_half
@every_activation
def test_every_activation(activation, dtype):
    check(300, 264, 136, activation, dtype)


# Around the sizes of tiles (128 or 256 columns, 256 rows a cluster), of stages (64 values of k) and
# of the ring of stages; more tiles than there are multiprocessors; long and short k.
@pytest.mark.parametrize("m", [1, 64, 127, 256, 257, 1000])
@pytest.mark.parametrize("n", [8, 128, 136, 520])
@pytest.mark.parametrize("k", [8, 64, 72, 512])
def test_ragged_sizes(m, n, k):
    check(m, n, k)
    check(m, n, k, "gelu_tanh")


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(65536, 512, 16), (65536, 1024, 480), (8192, 3072, 768), (4096, 4096, 4096), (65537, 136, 72)],
)
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_large_sizes(m, n, k, activation):
    check(m, n, k, activation)


@pytest.mark.parametrize("k", [1, 13, 479, 513])
def test_rows_that_are_padded(k):
    for activation in ("relu", "silu"):
        check(300, 136, k, activation)


def test_rows_with_a_pitch():
    x, weight, bias = operands(300, n=136, k=479, dtype=BF16, device="cuda")

    def pitched(t: Tensor) -> Tensor:
        wide = torch.full((t.shape[0], 488), torch.nan, dtype=BF16, device="cuda")
        wide[:, :479] = t
        return wide[:, :479]

    check_linear(pitched(x), pitched(weight), bias, "relu")


@every_half
def test_weight_stored_by_inputs(dtype):
    x, _, bias = operands(300, n=264, k=136, dtype=dtype, device="cuda")
    weight = weights(136, 264, dtype=dtype, device="cuda").t()
    for activation in ("none", "relu", "gelu"):
        check_linear(x, weight, bias, activation)


@every_half
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("rank", [8, 16, 104])
def test_a_second_pair_of_factors(dtype, rank, by_columns):
    x, weight, bias = operands(1000, n=264, k=136, dtype=dtype, device="cuda")
    t, up, _ = operands(1000, n=264, k=rank, dtype=dtype, device="cuda")
    if by_columns:
        weight, up = (f.t().contiguous().t() for f in (weight, up))
    (y,) = ops.linear_act_extended(x, weight, bias, t, up, 0)
    z = x.double() @ weight.double().t() + t.double() @ up.double().t() + bias.double()
    torch.testing.assert_close(y, z.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    # The copy engine takes no rows that begin off a 16-byte boundary.
    assert ops.linear_act_extended(x[:, 1:], weight[:, 1:], bias, t, up, 0) == []


def test_bias_that_is_not_aligned():
    x, weight, bias = operands(300, n=136, k=64, dtype=BF16, device="cuda")
    check_linear(x, weight, torch.cat([bias[:1], bias])[1:], "relu")
    check_linear(x, weight, None, "relu")


@pytest.mark.parametrize("wrt", [["x"], ["weight"], ["bias"], ["x", "bias"], ["weight", "bias"]])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_gradients_one_by_one(activation, wrt):
    x, weight, bias = operands(300, n=136, k=72, dtype=BF16, device="cuda")
    check_linear(x, weight, bias, activation, wrt=wrt)


def test_incoming_gradients_of_any_layout():
    x, weight, bias = operands(300, n=136, k=72, dtype=BF16, device="cuda")
    for dy in (
        exact(136, 300, dtype=BF16, device="cuda").t(),
        exact(300, 1, dtype=BF16, device="cuda").expand(300, 136),
        exact(300, 144, dtype=BF16, device="cuda")[:, 8:],
    ):
        check_linear(x, weight, bias, "gelu_tanh", dy=dy)


@every_half
def test_two_layers(dtype):
    for activation in ("relu", "silu", "gelu_tanh"):
        x, w1, b1 = operands(300, n=264, k=72, dtype=dtype, device="cuda")
        _, w2, b2 = operands(1, n=40, k=264, dtype=dtype, device="cuda")
        check_mlp(x, w1, b1, w2, b2, activation)


def test_values_that_are_not_finite():
    x, weight, bias = operands(64, n=64, k=64, dtype=BF16, device="cuda")
    x[3, 5], x[7, 2] = torch.nan, torch.inf
    weight[:, 2] = 1
    trained = leaf(x)
    y = fusedcuda.linear_act(trained, weight, bias, "relu")
    assert y[3].isnan().all()
    assert (y[7] == torch.inf).all()
    (dx,) = torch.autograd.grad(y, trained, torch.ones_like(y))
    torch.testing.assert_close(dx[3], weight.sum(0))  # a NaN is not negative


def test_repeatable_to_the_last_bit():
    x, weight, bias = (leaf(t) for t in operands(4096, n=1024, k=480, dtype=BF16, device="cuda"))
    dy = torch.randn(4096, 1024, device="cuda").to(BF16)

    def run() -> list[Tensor]:
        y = fusedcuda.linear_act(x, weight, bias, "gelu_tanh")
        return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_in_a_graph_and_beside_other_work():
    given = [leaf(t) for t in operands(2048, n=1024, k=480, dtype=BF16, device="cuda")]
    dy = exact(2048, 1024, dtype=BF16, device="cuda")

    def run() -> list[Tensor]:
        y = fusedcuda.linear_act(*given, "relu")
        return [y.detach(), *torch.autograd.grad(y, given, dy)]

    check_replays(run)
