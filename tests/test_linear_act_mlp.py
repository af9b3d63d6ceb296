"""Values and gradients of linear_residual and mlp against float64."""

import pytest
import torch
from layouts import pitched, shifted, spread, transposed
from linears import BATCHED, check_linear, check_mlp, exact, operands
from reference import ACTIVATIONS, DTYPES, leaf
from torch import Tensor

import fusedcuda

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
HALF_AND_FLOAT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


# ---------------------------------------------------------------------------- linear_residual


@EVERY_DTYPE
def test_residual(dtype, device):
    for rows in ((), (33,), (2, 5)):
        x, weight, bias = operands(*rows, n=24, k=16, dtype=dtype, device=device)
        residual = torch.randn(*rows, 24, device=device).to(dtype)
        check_linear(x, weight, bias, residual=residual)
        check_linear(x, weight, None, residual=residual)
    x, weight, bias = operands(5, n=12, k=16, dtype=dtype, device=device, batch=BATCHED)
    check_linear(x, weight, bias, residual=torch.randn(3, 5, 12, device=device).to(dtype))


@HALF_AND_FLOAT
def test_layouts_of_the_residual(dtype, device):
    given = operands(3, 4, n=24, k=16, dtype=dtype, device=device)
    residual = torch.randn(3, 4, 24, device=device).to(dtype)
    for layout in (pitched, transposed, spread, lambda t: shifted(t, 1)):
        check_linear(*given, residual=layout(residual))
    for expanded in (residual[0, 0, 0], residual[0, 0], residual[:, :, :1]):
        check_linear(*given, residual=expanded.expand(3, 4, 24))


def test_the_residual_is_added_before_rounding(device):
    """1 + 2^-9 is no bfloat16 number: rounded first, the difference would be lost."""
    one = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    x = torch.full((8, 1), 1 + 2**-4, dtype=torch.bfloat16, device=device)
    product = fusedcuda.linear_act(x, x).double()
    y = fusedcuda.linear_residual(x, x, None, -one)
    exactly = (1 + 2**-4) ** 2 - 1
    assert (product - 1 != exactly).all()
    assert torch.equal(y, torch.full_like(y, exactly))


def test_the_gradient_of_the_residual_is_the_incoming_one(device):
    given = [leaf(t) for t in (*operands(5, n=8, k=16, device=device), exact(5, 8, device=device))]
    dy = torch.randn(5, 8, device=device)
    *_, dresidual = torch.autograd.grad(fusedcuda.linear_residual(*given), given, dy)
    assert torch.equal(dresidual, dy)


# ---------------------------------------------------------------------------- mlp


def two_layers(*rows: int, n: int, hidden: int, k: int, dtype, device) -> list[Tensor]:
    first = operands(*rows, n=hidden, k=k, dtype=dtype, device=device)
    return [*first, *operands(1, n=n, k=hidden, dtype=dtype, device=device)[1:]]


@EVERY_DTYPE
@EVERY_ACTIVATION
def test_mlp(activation, dtype, device):
    given = two_layers(33, n=20, hidden=64, k=40, dtype=dtype, device=device)
    check_mlp(*given, activation)
    x, w1, _, w2, _ = given
    check_mlp(x, w1, None, w2, None, activation)


@HALF_AND_FLOAT
def test_shapes_of_mlp(dtype, device):
    for rows, n, hidden, k in (
        ((), 5, 8, 3),
        ((2, 3), 1, 16, 13),
        ((5,), 8, 1, 8),
        ((16,), 16, 16, 16),
        ((2, 0, 3), 4, 8, 5),
        ((1,), 129, 40, 8),
    ):
        for activation in ("relu", "gelu_tanh", "silu"):
            given = two_layers(*rows, n=n, hidden=hidden, k=k, dtype=dtype, device=device)
            check_mlp(*given, activation)


@HALF_AND_FLOAT
def test_layouts_of_mlp(dtype, device):
    x, w1, b1, w2, b2 = two_layers(3, 4, n=8, hidden=24, k=16, dtype=dtype, device=device)
    for layout in (pitched, transposed, spread):
        given = (layout(x), layout(w1), spread(b1), layout(w2), shifted(b2, 1))
        check_mlp(*given, "relu", dy=layout(exact(3, 4, 8, dtype=dtype, device=device)))
        check_mlp(*given, "gelu_tanh", dy=exact(8, dtype=dtype, device=device).expand(3, 4, 8))


def test_mlp_is_two_layers(device):
    x, w1, b1, w2, b2 = two_layers(7, n=8, hidden=24, k=16, dtype=torch.float32, device=device)
    for activation in ACTIVATIONS:
        h = fusedcuda.linear_act(x, w1, b1, activation)
        expected = fusedcuda.linear_act(h, w2, b2)
        torch.testing.assert_close(fusedcuda.mlp(x, w1, b1, w2, b2, activation), expected)
    torch.testing.assert_close(
        fusedcuda.mlp(x, w1, b1, w2, b2), fusedcuda.mlp(x, w1, b1, w2, b2, "gelu_tanh")
    )
