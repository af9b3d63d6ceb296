"""The gradient of a bias beside products of cuBLASLt: summed where dz is made, on the GPU."""

from collections.abc import Iterator

import pytest
import torch
from launches import check_replays
from linears import backend, exact, operands
from reference import poison
from torch import Tensor

from fusedcuda.ops import _linear_act_reference as reference
from fusedcuda.ops._activations import ACTIVATIONS

ops = torch.ops.fusedcuda
pytestmark = pytest.mark.gpu

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KINDS = ("none", "relu", "silu")
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_KIND = pytest.mark.parametrize("activation", KINDS)


@pytest.fixture(autouse=True)
def cublaslt() -> Iterator[None]:
    with backend("cublaslt"):
        yield


def layer(*rows: int, n: int, dtype: torch.dtype, activation: str) -> list[Tensor | None]:
    """dy, x, weight and what the forward saved."""
    x, weight, bias = operands(*rows, n=n, k=16, dtype=dtype, device="cuda")
    _, *saved = ops.linear_act_forward(x, weight, bias, ACTIVATIONS[activation], False)
    dy = torch.randn(*rows, n, device="cuda").to(dtype)
    return [dy, x, weight, saved[0] if saved else None]


def gradients(given: list[Tensor | None], activation: str, mask: int) -> list[Tensor]:
    return ops.linear_act_backward(*given, ACTIVATIONS[activation], mask, False)


def check(given: list[Tensor | None], activation: str) -> None:
    """Alone and with the other gradients against float64, and the same bits in every run."""
    dy, weight, saved = (None if t is None else t.cpu() for t in (given[0], *given[2:]))
    rows = reference._matrix(dy, weight.dim() == 3)
    code = ACTIVATIONS[activation]
    dz = reference._activation_gradient(rows.to(reference.compute_dtype(dy.dtype)), saved, code)
    dz = dz.to(dy.dtype).double()
    arithmetic = 1e-13 if dy.dtype == torch.float64 else 4e-6
    allowed = torch.finfo(dy.dtype).eps * dz.sum(-2).abs() + arithmetic * dz.abs().sum(-2)
    poison("cuda", *[dy.nbytes] * 4)
    for mask in (reference.DBIAS, reference.DX | reference.DWEIGHT | reference.DBIAS):
        first = gradients(given, activation, mask)[-1]
        assert ((first.cpu().double() - dz.sum(-2)).abs() <= allowed).all()
        for _ in range(3):
            assert torch.equal(gradients(given, activation, mask)[-1], first)


@EVERY_DTYPE
@EVERY_KIND
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 3), (199, 127), (4096, 8), (513, 3072), (8192, 3072)], ids=str
)
def test_against_float64(shape, activation, dtype):
    m, n = shape
    check(layer(m, n=n, dtype=dtype, activation=activation), activation)


@EVERY_DTYPE
@EVERY_KIND
def test_incoming_gradients_of_any_layout(activation, dtype):
    _, *rest = layer(1000, n=136, dtype=dtype, activation=activation)
    for dy in (
        exact(1000, 144, dtype=dtype, device="cuda")[:, 8:],
        exact(1000, 137, dtype=dtype, device="cuda")[:, 1:],
        exact(136, 1000, dtype=dtype, device="cuda").t(),
        exact(1000, 1, dtype=dtype, device="cuda").expand(1000, 136),
    ):
        check([dy, *rest], activation)


@EVERY_DTYPE
@EVERY_KIND
def test_batches_of_weights(activation, dtype):
    x, weight, bias = operands(300, n=40, k=16, dtype=dtype, device="cuda", batch=(3,))
    _, *saved = ops.linear_act_forward(x, weight, bias, ACTIVATIONS[activation], False)
    dy = torch.randn(3, 300, 40, device="cuda").to(dtype)
    check([dy, x, weight, saved[0] if saved else None], activation)


@EVERY_KIND
def test_in_a_graph(activation):
    """The sums of the slices lie in the graph's own memory."""
    given = layer(8192, n=1024, dtype=torch.bfloat16, activation=activation)
    check_replays(lambda: gradients(given, activation, 0b111))


def test_two_layers():
    """db1 and db2; dz1 is written over dh."""
    x, w1, b1 = operands(4096, n=264, k=72, dtype=torch.bfloat16, device="cuda")
    _, w2, _ = operands(1, n=40, k=264, dtype=torch.bfloat16, device="cuda")
    code = ACTIVATIONS["silu"]
    h, saved = ops.linear_act_forward(x, w1, b1, code, False)
    dy = torch.randn(4096, 40, device="cuda").bfloat16()
    first = ops.mlp_backward(dy, x, w1, saved, h, w2, code, 0b11111, False)
    dz = (dy.double() @ w2.double()) * saved.double()
    sizes = torch.finfo(torch.bfloat16).eps * (dz.abs().sum(0) + 1)
    assert ((first[2].double() - dz.sum(0)).abs() <= sizes).all()
    torch.testing.assert_close(first[4].double(), dy.double().sum(0), rtol=0.01, atol=0.01)
    for _ in range(3):
        again = ops.mlp_backward(dy, x, w1, saved, h, w2, code, 0b11111, False)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    (db1,) = ops.mlp_backward(dy, x, w1, saved, h, w2, code, 0b00100, False)
    assert torch.equal(db1, first[2])
