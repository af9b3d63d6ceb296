"""softmax and log_softmax: values, gradients, layouts, special values, errors."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS, layout_name, shifted
from reference import (
    DTYPES,
    assert_as_good_as_eager,
    by_name,
    check_function,
    leaf,
    poison,
)
from torch import Tensor, inf, nan

import fusedcuda


@dataclass(frozen=True)
class Op:
    """A fused op: calling it runs fusedcuda; `eager` is torch's, `gradient` the formula."""

    name: str
    torch_name: str
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return getattr(fusedcuda, self.name)(x, scale=scale)

    def eager(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return getattr(F, self.name)(x * scale, dim=-1)

    def eager_backward(self, dy: Tensor, y: Tensor, scale: float) -> Tensor:
        backward = getattr(torch.ops.aten, f"_{self.torch_name}_backward_data")
        return backward(dy, y, -1, y.dtype) * scale


def row_sum(x: Tensor) -> Tensor:
    return x.sum(dim=-1, keepdim=True)


# The third argument is the sum over the row: with dy and its product with y as they are, it gives
# the gradient; with absolute values, the magnitude of the terms that were added up.
SOFTMAX = Op("softmax", "softmax", lambda dy, y, total: y * (dy - total))
LOG_SOFTMAX = Op("log_softmax", "log_softmax", lambda dy, y, total: dy - y.exp() * total)
OPS = (SOFTMAX, LOG_SOFTMAX)

every_op = pytest.mark.parametrize("op", OPS, ids=by_name)


def logits(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Between -2 and 2, so that no row is one large element.

    The rounding of that one would decide how the fused and the eager gradient compare.
    """
    return (4 * torch.rand(shape, device=device) - 2).to(dtype)


def check(op: Op, x: Tensor, scale: float = 1.0, dy: Tensor | None = None) -> None:
    """The output against float64, and the gradient against that of the output as it was rounded."""
    check_function(op.name, lambda x: op(x, scale), lambda x: op.eager(x, scale), {"x": x}, wrt=[])
    x = leaf(x)
    y = op(x, scale)
    dy = torch.randn_like(y) if dy is None else dy
    poison(y.device, y.numel() * y.element_size())
    (dx,) = torch.autograd.grad(y, x, dy)
    y = y.detach()
    eager = op.eager_backward(dy.contiguous(), y, scale)
    dy, y = dy.double(), y.double()
    sums = (row_sum(dy * y), row_sum((dy * y).abs()))
    if op is LOG_SOFTMAX:
        sums = (row_sum(dy), row_sum(dy.abs()))
    expected = scale * op.gradient(dy, y, sums[0])
    magnitude = abs(scale) * op.gradient(dy.abs(), y, -sums[1])
    label = f"{op.name} gradient of x"
    assert_as_good_as_eager(label, dx, eager, expected, magnitude, x.dtype)


WIDTHS = [1, 2, 3, 7, 8, 63, 64, 127, 1000, 1024, 4097]
LARGE_WIDTHS = [8192, 16384, 30522, 32768, 50257, 65536, 128256, 131072, 262144]


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_output_and_gradient(op, dtype, width, device):
    for rows in (0, 1, 7, 199 if width < 1000 else 19):
        x = logits(rows, width, device=device, dtype=dtype)
        check(op, x)
        check(op, x, scale=0.125)


@pytest.mark.gpu
@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", LARGE_WIDTHS)
def test_large_rows(op, dtype, width):
    for rows in (1, 7, max(1, (1 << 24) // width)):
        check(op, logits(rows, width, device="cuda", dtype=dtype), scale=0.5)


@pytest.mark.gpu
@every_op
def test_4096_rows(op):
    for width in (*WIDTHS, 8192, 16384):
        check(op, logits(4096, width, device="cuda", dtype=torch.bfloat16))


@every_op
@pytest.mark.parametrize("scale", [1, 2.5, 0.0, -1.0, 1e-3], ids=str)
def test_scale(op, scale, device):
    """Any number, an int as well; the sign and zero have their meaning."""
    check(op, torch.randn(3, 65, device=device), scale)


@every_op
def test_leading_dimensions_are_free(op, device):
    for shape in ((5,), (2, 3, 4, 5), (2, 0, 5), (1, 1, 1)):
        x = torch.randn(shape, device=device)
        assert op(x).shape == x.shape
        check(op, x)


# ---------------------------------------------------------------------------- layouts


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_layouts(op, dtype, layout, device):
    x = logits(3, 5, 4, 66, device=device, dtype=dtype)
    check(op, layout(x), dy=layout(torch.randn_like(x)))
    check(op, layout(x), dy=torch.randn_like(x))
    assert op(layout(x)).is_contiguous()


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_rows(op, dtype, device):
    for elements in (1, 2, 3, 5):
        for width in (64, 65, 1031):
            x, dy = (logits(7, width, device=device, dtype=dtype) for _ in range(2))
            check(op, shifted(x, elements), dy=dy)
            check(op, x, dy=shifted(dy, elements))


@every_op
def test_expanded_input_and_gradient(op, device):
    row = torch.randn(40, device=device)
    check(op, row.expand(6, 40))
    check(op, torch.randn(6, 1, device=device).expand(6, 40))
    x = torch.randn(6, 40, device=device)
    for dy in (row.expand(6, 40), torch.ones((), device=device).expand(6, 40)):
        check(op, x, dy=dy)


# ---------------------------------------------------------------------------- special values


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_and_special_values_are_those_of_torch(op, dtype, device):
    rows = [
        [0, 1, -inf, 2],
        [-inf, -inf, -inf, -inf],
        [-inf, -inf, -inf, 3],
        [inf, 0, 1, 2],
        [inf, -inf, inf, 0],
        [nan, 0, 1, 2],
        [nan, -inf, inf, 0],
        [1, 1, 1, 1],
    ]
    for width in (4, 100, 1500):
        x = torch.tensor(rows, dtype=dtype, device=device)
        x = torch.cat([x, x[:, :1].expand(-1, width - 4)], dim=1)
        torch.testing.assert_close(op(x), op.eager(x), equal_nan=True)
        torch.testing.assert_close(op(x.flip(1)), op.eager(x.flip(1)), equal_nan=True)


@every_op
def test_a_masked_class_gets_no_gradient(op, device):
    x = torch.tensor([[0.0, 1.0, -inf, 2.0], [1.0, 1.0, 1.0, 1.0]], device=device)
    dy = torch.randn(2, 4, device=device)
    if op is LOG_SOFTMAX:
        dy[0, 2] = 0  # as where the masked class is never looked at
    ours, theirs = leaf(x), leaf(x)
    op(ours).backward(dy)
    op.eager(theirs).backward(dy)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ours.grad[0, 2] == 0


@every_op
def test_large_and_shifted_logits(op, device):
    """exp of the logits themselves would overflow, or be 0 in every place."""
    x = torch.randn(5, 300, device=device)
    for offset in (1e4, -1e4, 3e38, -3e38):
        torch.testing.assert_close(op(x + offset), op.eager(x + offset))
    spread = torch.linspace(-200, 200, 120, device=device).repeat(2, 1)
    check(op, spread)


# ---------------------------------------------------------------------------- errors


@every_op
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_refused(op, requires_grad, device):
    for wrong in (torch.ones(4, 4, dtype=torch.int64), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(TypeError, match=rf"^{op.name}: x .*{wrong.dtype}"):
            op(wrong.to(device))
    with pytest.raises(TypeError, match=rf"^{op.name}: x .*list"):
        op([1.0])
    with pytest.raises(ValueError, match=rf"^{op.name}: x .*dimension"):
        op(torch.ones((), device=device, requires_grad=requires_grad))
    for scale in ("1", None, torch.ones(()), 1j):
        with pytest.raises(TypeError, match=rf"^{op.name}: scale .*{type(scale).__name__}"):
            op(torch.ones(4, device=device, requires_grad=requires_grad), scale)


@every_op
def test_the_raw_backward_checks_its_arguments(op, device):
    raw = getattr(torch.ops.fusedcuda, f"{op.name}_backward")
    y = torch.ones(3, 4, device=device)
    for dy in (torch.ones(3, 5), torch.ones(4), torch.ones(3, 4, dtype=torch.float64)):
        with pytest.raises((ValueError, RuntimeError), match=f"{op.name}_backward: dy"):
            raw(dy.to(device), y, 1.0)
