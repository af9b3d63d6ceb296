"""Values and gradients of rms_norm and layer_norm against float64: dtypes, sizes, layouts."""

import itertools

import pytest
import torch
from layouts import LAYOUTS, layout_name, pitched, shifted, spread, transposed
from norms import EPS, LAYER_NORM, NORMS, RMS_NORM, check_norm
from reference import DTYPES, by_name, leaf
from torch import inf, nan

import fusedcuda

EVERY_NORM = pytest.mark.parametrize("norm", NORMS, ids=by_name)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HALVES_AND_FLOAT = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
WITH_AND_WITHOUT_RESIDUAL = pytest.mark.parametrize("residual", [False, True])

NARROW = (1, 2, 3, 7, 8, 63, 64, 127, 1000, 1024)
WIDE = (3072, 4097, 5120, 6144, 7168, 8192, 16384, 32768, 50257, 65536, 131072, 262144)


# ---------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("n", NARROW)
@EVERY_DTYPE
@WITH_AND_WITHOUT_RESIDUAL
@EVERY_NORM
def test_narrow_rows(norm, residual, dtype, n, device):
    # Of the shortest rows few: one with next to no spread would decide how the eager op's error
    # compares, by luck.
    m = 7 if n <= 8 else 33
    check_norm(norm, *norm.random_operands(m, n, dtype=dtype, device=device, residual=residual))


@pytest.mark.parametrize("n", WIDE)
@HALVES_AND_FLOAT
@EVERY_NORM
def test_wide_rows(norm, dtype, n, device):
    """On the CPU once for each width: the reference has no paths to choose from."""
    if device == "cpu" and dtype != torch.bfloat16:
        pytest.skip("the widths matter to the CUDA kernels")
    for residual in (False, True) if device == "cuda" else (True,):
        operands = norm.random_operands(3, n, dtype=dtype, device=device, residual=residual)
        check_norm(norm, *operands)


@pytest.mark.parametrize("m", [0, 1, 2, 7, 133, 199])
@EVERY_DTYPE
@EVERY_NORM
def test_numbers_of_rows(norm, dtype, m, device):
    for n, residual in itertools.product((37, 64), (False, True)):
        check_norm(norm, *norm.random_operands(m, n, dtype=dtype, device=device, residual=residual))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [n for n in (*NARROW, *WIDE) if n <= 8192])
@HALVES_AND_FLOAT
@EVERY_NORM
def test_many_rows(norm, dtype, n):
    check_norm(norm, *norm.random_operands(4096, n, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 4, 5), (1, 1, 9), (3, 0, 4)], ids=str)
@EVERY_NORM
def test_leading_dimensions(norm, shape, device):
    for residual in (False, True):
        outputs = check_norm(norm, *norm.random_operands(*shape, device=device, residual=residual))
        assert (outputs[1] if residual else outputs).shape == shape


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0), (0, 5), (2, 0, 5)], ids=str)
@EVERY_NORM
def test_nothing_to_normalise(norm, shape, device):
    """No launch; the gradients of the vectors are sums of nothing, not what was in memory."""
    operands = [leaf(t) for t in norm.random_operands(*shape, device=device)]
    y, h = norm(*operands)
    grads = torch.autograd.grad([y, h], operands, [torch.ones_like(y), torch.ones_like(h)])
    assert y.shape == h.shape == shape
    for operand, grad in zip(operands, grads, strict=True):
        assert torch.equal(grad, torch.zeros_like(operand))
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------- weight, bias, eps


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@EVERY_DTYPE
@EVERY_NORM
def test_vectors_of_another_dtype(norm, dtype, weight_dtype, device):
    """They are not rounded to the dtype of x, and their gradients come back in their own."""
    for n in (64, 65):
        x, residual, *_ = norm.random_operands(33, n, dtype=dtype, device=device)
        check_norm(norm, x, residual, *norm.random_vectors(n, weight_dtype, device))


@HALVES_AND_FLOAT
def test_weight_and_bias_of_different_dtypes(dtype, device):
    x, _, weight, bias = LAYER_NORM.random_operands(33, 64, dtype=dtype, device=device)
    check_norm(LAYER_NORM, x, None, weight.half(), bias.bfloat16())
    check_norm(LAYER_NORM, x, None, weight.float(), bias.double())


@HALVES_AND_FLOAT
@EVERY_NORM
def test_absent_vectors(norm, dtype, device):
    operands = norm.random_operands(33, 64, dtype=dtype, device=device)
    absent = range(len(norm.vectors))
    for missing in itertools.chain.from_iterable(
        itertools.combinations(absent, count) for count in range(len(absent) + 1)
    ):
        vectors = [None if i in missing else v for i, v in enumerate(operands[2:])]
        check_norm(norm, operands[0], None, *vectors)
        check_norm(norm, *operands[:2], *vectors)


@pytest.mark.parametrize("weight_offset", [1.0, -0.25])
@EVERY_DTYPE
def test_weight_offset(dtype, weight_offset, device):
    operands = RMS_NORM.random_operands(33, 64, dtype=dtype, device=device)
    check_norm(RMS_NORM, *operands, weight_offset=weight_offset)
    check_norm(RMS_NORM, operands[0], None, operands[2].float(), weight_offset=weight_offset)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 0.5])
@EVERY_NORM
def test_eps(norm, eps, device):
    x, *rest = norm.random_operands(5, 64, dtype=torch.float64, device=device)
    check_norm(norm, x, *rest, eps=eps)
    check_norm(norm, x * 1e-3, None, *rest[1:], eps=eps)


def test_default_eps(device):
    """1e-6 for rms_norm and 1e-5 for layer_norm, on rows where it makes a difference."""
    x = torch.randn(3, 16, device=device, dtype=torch.float64) * 1e-3
    torch.testing.assert_close(fusedcuda.rms_norm(x), RMS_NORM.eager(x, None, None, eps=1e-6))
    expected = LAYER_NORM.eager(x, None, None, None, eps=1e-5)
    torch.testing.assert_close(fusedcuda.layer_norm(x), expected)


# ---------------------------------------------------------------------------- values


@HALVES_AND_FLOAT
@EVERY_NORM
def test_rows_of_zeros(norm, dtype, device):
    x, _, *vectors = norm.random_operands(4, 33, dtype=dtype, device=device)
    x[1::2] = 0
    y = check_norm(norm, x, None, *vectors)
    bias = vectors[1] if norm is LAYER_NORM else torch.zeros_like(x[1])
    assert torch.equal(y[1], bias)
    if norm is LAYER_NORM:
        # Rows of one value, whose mean is exact.
        assert torch.equal(norm(torch.full_like(x, 3.0), None, *vectors), bias.expand_as(x))


@EVERY_NORM
def test_squares_beyond_float16(norm, device):
    x, residual, *vectors = norm.random_operands(9, 128, dtype=torch.float16, device=device)
    check_norm(norm, x * 4000, residual * 4000, *vectors)


@pytest.mark.parametrize("mean", [30.0, 1e3, 1e4, -1e5])
@pytest.mark.parametrize(("m", "n"), [(40, 5), (3, 64), (1, 255)])
def test_a_mean_that_is_large_against_the_spread(mean, m, n, device):
    """One pass over E[x^2] - E[x]^2 would leave nothing of the variance.

    Too few elements to compare with the eager op: how the mean is rounded decides for both.
    """
    x, _, *vectors = LAYER_NORM.random_operands(m, n, device=device)
    x = x + mean
    y = check_norm(LAYER_NORM, x, None, *vectors)
    x, weight, bias = (t.double() for t in (x, *vectors))
    expected = LAYER_NORM.formula(x, None, weight, bias, dtype=torch.float32)
    # A few ulps of the mean, in units of the row's spread: a hundredth of what one pass gets wrong.
    ulps_of_the_mean = 4 * torch.finfo(torch.float32).eps * abs(mean)
    allowed = ulps_of_the_mean * LAYER_NORM.rstd(x) * weight.abs() + 1e-5 * (1 + expected.abs())
    assert ((y - expected).abs() <= allowed).all()


@pytest.mark.parametrize("special", [inf, -inf, nan])
@HALVES_AND_FLOAT
@WITH_AND_WITHOUT_RESIDUAL
@EVERY_NORM
def test_rows_that_are_not_finite_are_as_in_torch(norm, residual, dtype, special, device):
    """And no other row is touched by them, forward or backward."""
    operands = norm.random_operands(5, 40, dtype=dtype, device=device, residual=residual)
    operands[0][1, 7] = special
    operands[0][3, 39] = special
    leaves = [leaf(t) for t in operands if t is not None]
    given = leaves if residual else [leaves[0], None, *leaves[1:]]
    y, by_torch = norm(*given), norm.eager(*given)
    (dx,) = torch.autograd.grad(y, leaves[:1], torch.ones_like(y)) if not residual else (None,)
    if residual:
        y, by_torch = y[0], by_torch[0]
    torch.testing.assert_close(y, by_torch, equal_nan=True)
    assert y[::2].isfinite().all()
    assert y[1].isnan().any()
    assert y[3].isnan().any()
    if dx is not None:
        assert dx[::2].isfinite().all()
        assert dx[1].isnan().any()


# ---------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@HALVES_AND_FLOAT
@EVERY_NORM
def test_layouts(norm, dtype, layout, device):
    """Of every row operand and of the incoming gradients, one at a time and all at once."""
    operands = norm.random_operands(3, 4, 5, 24, dtype=dtype, device=device)
    grads = [torch.randn_like(operands[0]) for _ in range(2)]
    for chosen in ([0], [1], [2], [3], [0, 1, 2, 3]):
        rows = [layout(t) if i in chosen else t for i, t in enumerate((*operands[:2], *grads))]
        check_norm(norm, *rows[:2], *operands[2:], grad_outputs=rows[2:])


@pytest.mark.parametrize("n", [8, 24, 33, 256])
@HALVES_AND_FLOAT
@EVERY_NORM
def test_alignment(norm, dtype, n, device):
    """Each operand in turn at every offset from a 16-byte boundary, and all of them together."""
    operands = norm.random_operands(5, n, dtype=dtype, device=device)
    grads = [torch.randn_like(operands[0]) for _ in range(2)]
    tensors = [*operands, *grads]
    offsets = (1, 2, 3, 4, 7) if device == "cuda" else (1,)
    for offset in offsets:
        for chosen in (*([i] for i in range(len(tensors))), range(len(tensors))):
            moved = [shifted(t, offset) if i in chosen else t for i, t in enumerate(tensors)]
            check_norm(norm, *moved[: len(operands)], grad_outputs=moved[len(operands) :])


@EVERY_NORM
def test_vectors_with_strides(norm, device):
    x, residual, *vectors = norm.random_operands(6, 64, device=device)
    check_norm(norm, x, residual, *(spread(v) for v in vectors))
    check_norm(norm, x, residual, *(v[:1].expand(64) for v in vectors))


@EVERY_NORM
def test_expanded_rows(norm, device):
    """One row for all, rows repeated in groups, and one value for a row."""
    for shape, size in (((1, 48), (9, 48)), ((4, 1, 48), (4, 5, 48)), ((9, 1), (9, 48))):
        x = torch.randn(shape, device=device).expand(size)
        _, residual, *vectors = norm.random_operands(*size, device=device)
        check_norm(norm, x, residual, *vectors)
        check_norm(norm, residual, x, *vectors)


@EVERY_NORM
def test_expanded_gradients(norm, device):
    operands = norm.random_operands(6, 7, 40, device=device)
    one = torch.randn((), device=device)
    for grad in (one.expand(6, 7, 40), torch.randn(40, device=device).expand(6, 7, 40)):
        check_norm(norm, *operands, grad_outputs=[grad, grad])
        check_norm(norm, operands[0], None, *operands[2:], grad_outputs=[grad])


@EVERY_NORM
def test_rows_of_a_larger_matrix(norm, device):
    """As a slice of a packed projection comes: one row stride, no copy needed."""
    wide = torch.randn(5, 7, 3 * 64, device=device, dtype=torch.bfloat16)
    _, _, *vectors = norm.random_operands(5, 7, 64, dtype=torch.bfloat16, device=device)
    q, k, _ = wide.split(64, dim=-1)
    check_norm(norm, q, k, *vectors)
    check_norm(norm, pitched(q), transposed(k), *vectors)


@EVERY_NORM
def test_inputs_are_left_alone(norm, device):
    operands = [leaf(t) for t in norm.random_operands(6, 40, device=device)]
    before = [t.detach().clone() for t in operands]
    grads = [torch.randn_like(operands[0]) for _ in range(2)]
    grads_before = [g.clone() for g in grads]
    torch.autograd.grad(norm(*operands), operands, grads)
    for tensor, copy in zip([*operands, *grads], [*before, *grads_before], strict=True):
        assert torch.equal(tensor, copy)


@EVERY_DTYPE
@EVERY_NORM
def test_the_residual_form_is_the_norm_of_the_rounded_sum(norm, dtype, device):
    """Bit for bit, forward and, with both outputs used, backward."""
    x, residual, *vectors = (
        leaf(t) for t in norm.random_operands(9, 200, dtype=dtype, device=device)
    )
    y, h = norm(x, residual, *vectors)
    assert torch.equal(h, x + residual)
    alone = leaf(h)
    assert torch.equal(y, norm(alone, None, *vectors))
    dy = torch.randn_like(y)
    fused = torch.autograd.grad(y, [x, *vectors], dy)
    separate = torch.autograd.grad(norm(alone, None, *vectors), [alone, *vectors], dy)
    for a, b in zip(fused, separate, strict=True):
        assert torch.equal(a, b)


@EVERY_NORM
def test_eps_reaches_the_backward_through_rstd(norm, device):
    """With rows so small that eps is most of the denominator."""
    x, _, *vectors = norm.random_operands(6, 40, dtype=torch.float64, device=device)
    check_norm(norm, (x - 0.5) * 1e-3, None, *vectors, eps=EPS)
