"""Values and gradients of linear_act against float64: sizes, layouts, what is saved."""

import math

import pytest
import torch
import torch.nn.functional as F
from layouts import pitched, reversed_dimensions, shifted, spread, transposed
from linears import (
    BATCHED,
    bend,
    check_linear,
    eager,
    exact,
    operands,
    slope,
    weights,
)
from reference import ACTIVATIONS, DTYPES, leaf, poison
from torch import Tensor, inf, nan

import fusedcuda

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
# One whose bit mask is saved, one whose z is, one that saves nothing.
KINDS = ("relu", "gelu_tanh", "none")
EVERY_KIND = pytest.mark.parametrize("activation", KINDS)
HALF_AND_FLOAT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


# ---------------------------------------------------------------------------- sizes


@EVERY_DTYPE
@EVERY_ACTIVATION
def test_every_activation_and_dtype(activation, dtype, device):
    x, weight, bias = operands(37, n=24, k=40, dtype=dtype, device=device)
    check_linear(x, weight, bias, activation)
    check_linear(x, weight, None, activation)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 13, 64, 479])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 129, 256])
@HALF_AND_FLOAT
def test_rows_and_columns(dtype, n, k, device):
    """Among them those that cuBLASLt refuses: one row or column, odd pitches."""
    activation = KINDS[(n + k) % 3]
    for m in (1, 2, 7, 33, 128) if device == "cuda" else (1, 33):
        check_linear(*operands(m, n=n, k=k, dtype=dtype, device=device), activation)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(4096, 512, 13), (2048, 1024, 479), (2048, 1024, 480), (1024, 3072, 768), (16, 4096, 4096)],
)
@HALF_AND_FLOAT
def test_layers_of_models(dtype, m, n, k):
    for activation in KINDS:
        check_linear(*operands(m, n=n, k=k, dtype=dtype, device="cuda"), activation)


@EVERY_KIND
@EVERY_DTYPE
def test_square_layers(dtype, activation, device):
    """Nothing but the values tells rows from columns, or the weight from its transpose."""
    for size in (8, 24):
        x, weight, bias = operands(size, n=size, k=size, dtype=dtype, device=device)
        check_linear(x, weight, bias, activation)
        check_linear(x, weight, bias, residual=exact(size, size, dtype=dtype, device=device))


@EVERY_KIND
def test_leading_dimensions(activation, device):
    for rows in ((), (5,), (2, 3), (2, 1, 3, 2), (1, 1)):
        x, weight, bias = operands(*rows, n=9, k=16, device=device)
        y = check_linear(x, weight, bias, activation)
        assert y.shape == (*rows, 9)


@EVERY_ACTIVATION
def test_one_bias_value_a_column(activation, device):
    """Without products the output is act(bias), in each row."""
    bias = torch.linspace(-3, 3, 7, device=device)
    y = fusedcuda.linear_act(
        torch.zeros(7, 5, device=device), bias.new_zeros(7, 5), bias, activation
    )
    torch.testing.assert_close(y, ACTIVATIONS[activation](bias).expand(7, 7))


@pytest.mark.parametrize(
    "shapes",
    [((0, 5), (3, 5)), ((2, 0, 5), (3, 5)), ((4, 0), (3, 0)), ((4, 5), (0, 5)), ((0, 0), (0, 0))],
    ids=str,
)
@EVERY_DTYPE
@EVERY_KIND
def test_an_empty_dimension(activation, dtype, shapes, device):
    """Sums of nothing are 0 and not what was in memory; without K there still is the bias."""
    x, weight = (leaf(torch.randn(shape, device=device).to(dtype)) for shape in shapes)
    bias = leaf(torch.randn(weight.shape[0], device=device).to(dtype))
    poison(device, 2 * weight.numel(), 4 * weight.numel(), 2 * bias.numel(), 4 * bias.numel())
    y = fusedcuda.linear_act(x, weight, bias, activation)
    expected = ACTIVATIONS[activation](bias.detach()).expand(y.shape)
    assert y.shape == (*x.shape[:-1], weight.shape[0])
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    theirs = [leaf(t) for t in (x, weight, bias)]
    by_torch = torch.autograd.grad(eager(*theirs, activation), theirs, dy)
    torch.testing.assert_close(torch.autograd.grad(y, (x, weight, bias), dy), by_torch)
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------- batches of weights


@EVERY_KIND
@EVERY_DTYPE
def test_batched_weights(dtype, activation, device):
    for rows in ((), (5,), (2, 4)):
        given = operands(*rows, n=12, k=16, dtype=dtype, device=device, batch=BATCHED)
        check_linear(*given, activation)
        check_linear(*given[:2], None, activation)


@HALF_AND_FLOAT
def test_square_batches(dtype, device):
    """Batch, rows and columns are as many: only the values tell them apart."""
    check_linear(*operands(3, n=3, k=3, dtype=dtype, device=device, batch=BATCHED), "relu")
    check_linear(*operands(8, n=8, k=8, dtype=dtype, device=device, batch=(8,)), "silu")


@EVERY_DTYPE
def test_one_bias_for_a_batch_of_weights(dtype, device):
    """Its gradient is the sum of those that one bias for each weight gets."""
    x, weight, biases = operands(5, n=12, k=16, dtype=dtype, device=device, batch=BATCHED)
    bias = biases[0]
    for activation in KINDS:
        check_linear(x, weight, bias, activation, wrt=["x", "weight"])
        shared, each = leaf(bias), leaf(bias.expand(3, 12))
        dy = torch.randn(3, 5, 12, device=device).to(dtype)
        y = fusedcuda.linear_act(x, weight, shared, activation)
        (dbias,) = torch.autograd.grad(y, shared, dy)
        (dbiases,) = torch.autograd.grad(
            fusedcuda.linear_act(x, weight, each, activation), each, dy
        )
        torch.testing.assert_close(dbias, dbiases.sum(0), rtol=0, atol=0)


@HALF_AND_FLOAT
def test_a_batch_in_another_order(dtype, device):
    x, weight, bias = operands(5, n=12, k=16, dtype=dtype, device=device, batch=BATCHED)
    for layout in (transposed, pitched, reversed_dimensions):
        check_linear(layout(x), layout(weight), bias, "gelu_tanh")
        check_linear(
            x, weight, layout(bias), "relu", dy=layout(exact(3, 5, 12, dtype=dtype, device=device))
        )
    check_linear(x[:1].expand(3, -1, -1), weight, bias, "silu")
    check_linear(x, weight[:1].expand(3, -1, -1), bias, "silu")


# ---------------------------------------------------------------------------- layouts


@EVERY_KIND
@EVERY_DTYPE
def test_layouts_of_the_weight(dtype, activation, device):
    x, weight, bias = operands(9, n=24, k=16, dtype=dtype, device=device)
    wide = torch.cat([weights(24, 3, dtype=dtype, device=device), weight], dim=1)
    for layout in (transposed(weight), pitched(weight), spread(weight), wide[:, 3:]):
        assert not layout.is_contiguous()
        check_linear(x, layout, bias, activation)


@EVERY_KIND
@HALF_AND_FLOAT
def test_layouts_of_x(dtype, activation, device):
    """Rows with a pitch, columns that lie side by side, leading dimensions that do not merge."""
    x, weight, bias = operands(3, 4, 5, n=9, k=24, dtype=dtype, device=device)
    for layout in (pitched, transposed, spread, reversed_dimensions):
        check_linear(layout(x), weight, bias, activation)
    flat = x.flatten(0, 1).flatten(0, 1)
    padded = torch.nn.functional.pad(flat, (0, 8), value=nan)[:, :24]
    check_linear(padded, weight, bias, activation)
    check_linear(flat.t().contiguous().t(), weight, bias, activation)
    check_linear(flat[::2], weight, bias, activation)
    check_linear(flat[:1].expand(6, 24), weight, bias, activation)


@EVERY_KIND
@HALF_AND_FLOAT
def test_layouts_of_the_incoming_gradient(dtype, activation, device):
    given = operands(3, 4, n=24, k=16, dtype=dtype, device=device)
    dy = exact(3, 4, 24, dtype=dtype, device=device)
    for layout in (pitched, transposed, spread, reversed_dimensions):
        check_linear(*given, activation, dy=layout(dy))
    for expanded in (dy[0, 0, 0], dy[0, 0], dy[:, :, :1], dy[:1]):
        check_linear(*given, activation, dy=expanded.expand(3, 4, 24))


@EVERY_KIND
@HALF_AND_FLOAT
def test_alignment(dtype, activation, device):
    """Each operand in turn off the 16-byte boundary, a bias that is a slice among them."""
    x, weight, bias = operands(16, n=24, k=32, dtype=dtype, device=device)
    dy = exact(16, 24, dtype=dtype, device=device)
    for offset in (1, 2, 4) if device == "cuda" else (1,):
        for name in ("x", "weight", "bias", "dy", "all"):
            moved = {"x": x, "weight": weight, "bias": bias, "dy": dy}
            for one in moved if name == "all" else [name]:
                moved[one] = shifted(moved[one], offset)
            check_linear(*list(moved.values())[:3], activation, dy=moved["dy"])
    many = exact(100, dtype=dtype, device=device)
    check_linear(x, weight, many[3:27], activation)
    check_linear(x, weight, many[::4][:24], activation)
    check_linear(x, weight, many[:1].expand(24), activation)


@EVERY_DTYPE
def test_inputs_are_left_alone(dtype, device):
    given = [leaf(t) for t in operands(6, n=8, k=16, dtype=dtype, device=device)]
    residual, dy = (exact(6, 8, dtype=dtype, device=device) for _ in range(2))
    before = [t.detach().clone() for t in (*given, residual, dy)]
    for activation in KINDS:
        torch.autograd.grad(fusedcuda.linear_act(*given, activation), given, dy)
    torch.autograd.grad(fusedcuda.linear_residual(*given, residual), given, dy)
    for tensor, copy in zip((*given, residual, dy), before, strict=True):
        assert torch.equal(tensor, copy)


# ---------------------------------------------------------------------------- values


@EVERY_DTYPE
def test_gelu_is_not_gelu_tanh(dtype, device):
    """At z = 2.7 they are 4.7e-4 apart: more than one rounding of float16, forward and backward."""
    x = leaf(torch.full((8, 1), 2.7, device=device, dtype=dtype))
    weight = torch.ones(8, 1, device=device, dtype=dtype)
    for activation in ("gelu", "gelu_tanh"):
        y = fusedcuda.linear_act(x, weight, activation=activation)
        (dx,) = torch.autograd.grad(y.sum(), x)
        wide = leaf(x.double())
        expected = ACTIVATIONS[activation](wide)
        (gradient,) = torch.autograd.grad(expected.sum(), wide)
        tolerance = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), expected.expand(8, 8), rtol=tolerance, atol=0)
        # In float32 there are also the roundings of the dozen operations that the derivative
        # consists of: together 1.1 eps on one CPU, less on others.
        tolerance *= 4 if dtype == torch.float32 else 1
        torch.testing.assert_close(dx.double(), 8 * gradient, rtol=tolerance, atol=0)
    gap = F.gelu(x.double()) - F.gelu(x.double(), approximate="tanh")
    assert 4e-4 < gap.abs().max() < 5e-4


@EVERY_ACTIVATION
def test_one_rounding_of_the_reference(activation):
    """The activation is applied to what was added up in float32, not to what that rounds to."""
    x, weight, bias = operands(64, n=64, k=40, dtype=torch.bfloat16)
    z = F.linear(x.double(), weight.double(), bias.double())
    expected = ACTIVATIONS[activation](z.float()).bfloat16()
    actual = fusedcuda.linear_act(x, weight, bias, activation)
    assert (actual != expected).sum() <= 8  # float32 and float64 may round apart
    twice = ACTIVATIONS[activation](z.bfloat16().float()).bfloat16()
    assert activation in ("none", "relu") or (actual != twice).sum() > 100


@EVERY_ACTIVATION
@HALF_AND_FLOAT
def test_values_that_are_not_finite(dtype, activation, device):
    """A NaN goes through every activation, relu's gradient included, and stays in its row."""
    x, weight, bias = operands(5, n=16, k=8, dtype=dtype, device=device)
    x[1, 3] = nan
    given = [leaf(t) for t in (x, weight, bias)]
    y = fusedcuda.linear_act(*given, activation)
    (dx,) = torch.autograd.grad(y, given[:1], torch.ones_like(y))
    assert y[1].isnan().all()
    assert y[[0, 2, 3, 4]].isfinite().all()
    theirs = leaf(x)
    by_torch = eager(theirs, weight, bias, activation)
    (expected,) = torch.autograd.grad(by_torch, theirs, torch.ones_like(y))
    assert torch.equal(dx.isnan(), expected.isnan())
    torch.testing.assert_close(dx[1], expected[1], equal_nan=True)


@EVERY_ACTIVATION
def test_infinite_sums(activation, device):
    x = torch.tensor([[inf], [-inf], [1.0]], device=device)
    y = fusedcuda.linear_act(x, torch.ones(4, 1, device=device), activation=activation)
    above = {"sigmoid": 1.0, "tanh": 1.0}.get(activation, inf)
    assert torch.equal(y[0], torch.full_like(y[0], above))
    below = {"none": -inf, "tanh": -1.0}.get(activation, 0.0)
    if activation not in ("gelu", "gelu_tanh", "silu"):  # minus infinity times zero, in torch too
        assert torch.equal(y[1], torch.full_like(y[1], below))
    assert y[2].isfinite().all()


@pytest.mark.parametrize("k", [8, 479, 4096])
@HALF_AND_FLOAT
def test_sums_of_rounded_values(dtype, k, device):
    """Values with all their bits: the sum has to be kept in float32."""
    x, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (33, 40))
    bias = torch.randn(40, device=device).to(dtype)
    y = fusedcuda.linear_act(x, weight, bias).double()
    exactly = F.linear(x.double(), weight.double(), bias.double())
    sums = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    allowed = torch.finfo(dtype).eps / 2 * exactly.abs() + 4 * torch.finfo(torch.float32).eps * sums
    assert ((y - exactly).abs() <= allowed).all()


@HALF_AND_FLOAT
def test_the_bias_gradient_is_summed_in_float32(dtype, device):
    """4096 ones: in bfloat16 the sum would stay at 256."""
    x, weight = torch.zeros(4096, 8, device=device), torch.zeros(16, 8, device=device)
    given = [leaf(t.to(dtype)) for t in (x, weight, torch.ones(16, device=device))]
    for activation in ("none", "relu"):
        y = fusedcuda.linear_act(*given, activation)
        (dbias,) = torch.autograd.grad(y, given[2:], torch.ones_like(y))
        assert torch.equal(dbias, torch.full_like(dbias, 4096))


@EVERY_DTYPE
def test_low_precision_reduction_is_a_permission(dtype, device):
    """It may cost accuracy, never the result; and it reaches the backward."""
    given = [leaf(t) for t in operands(16, n=16, k=512, dtype=dtype, device=device)]
    for activation in KINDS:
        y = fusedcuda.linear_act(*given, activation, allow_low_precision_reduction=True)
        expected = eager(*given, activation)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        dy = torch.randn_like(y)
        torch.testing.assert_close(
            torch.autograd.grad(y, given, dy),
            torch.autograd.grad(expected, given, dy),
            rtol=5e-2,
            atol=5e-2 * math.sqrt(16),
        )


# ---------------------------------------------------------------------------- what is saved


def bits_of(mask: Tensor, columns: int) -> Tensor:
    n = torch.arange(columns, device=mask.device)
    return (mask[:, n // 8] >> (n % 8).to(torch.uint8) & 1).bool()


@pytest.mark.parametrize("n", [1, 7, 8, 127, 128, 129, 300])
@HALF_AND_FLOAT
def test_relu_saves_a_bit_an_element(dtype, n, device):
    """Rows of 16-byte multiples; bit n % 8 of byte n / 8 says that z > 0."""
    for rows, batch in (((9,), ()), ((2, 3), ()), ((4,), BATCHED)):
        x, weight, bias = operands(*rows, n=n, k=16, dtype=dtype, device=device, batch=batch)
        y, mask = torch.ops.fusedcuda.linear_act_forward(
            x, weight, bias, fusedcuda.ops._activations.ACTIVATIONS["relu"], False
        )
        assert mask.dtype == torch.uint8
        assert mask.shape == (math.prod((*batch, *rows)), -(-n // 128) * 16)
        z = eager(x.double(), weight.double(), bias.double())
        assert torch.equal(bits_of(mask, n), (z > 0).reshape(-1, n))
        torch.testing.assert_close(y, torch.relu(z).to(dtype))


@HALF_AND_FLOAT
def test_what_other_activations_save(dtype, device):
    """z in float32, act'(z) in 16 bits: at z, or at the z that another kernel has stored."""
    codes = fusedcuda.ops._activations.ACTIVATIONS
    for activation, code in codes.items():
        given = operands(2, 5, n=24, k=16, dtype=dtype, device=device)
        _, *saved = torch.ops.fusedcuda.linear_act_forward(*given, code, False)
        assert len(saved) == (activation != "none")
        if activation not in ("none", "relu"):
            z = eager(*(t.double() for t in given))
            assert saved[0].is_contiguous()
            if dtype == torch.float32:
                assert torch.equal(saved[0], z.to(dtype))
            else:
                error = (saved[0].double() - slope(z, activation)).abs()
                assert (error <= bend(z, activation, dtype)).all()


@EVERY_ACTIVATION
def test_the_raw_operator_adds_a_residual_before_the_activation(activation, device):
    x, weight, bias = operands(5, n=24, k=16, device=device)
    residual = exact(5, 24, device=device)
    code = fusedcuda.ops._activations.ACTIVATIONS[activation]
    y = torch.ops.fusedcuda.linear_act(x, weight, bias, residual, code, False)
    torch.testing.assert_close(y, ACTIVATIONS[activation](F.linear(x, weight, bias) + residual))
