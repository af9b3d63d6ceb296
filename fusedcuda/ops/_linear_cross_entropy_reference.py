"""References of the linear_cross_entropy family: argument checks, shape functions, the scaling."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _cross_entropy_reference as entropy
from ._linear_act_reference import check_linear
from ._operands import compute_dtype
from ._rows import check_same_device, check_shape

OP = "linear_cross_entropy"
NONE = entropy.REDUCTIONS["none"]

# Bits of the mask: the gradients that are wanted.
DX, DWEIGHT, DBIAS = 1, 2, 4

ACCUMULATE = ("fp32", "weight")
AUTO = 0  # rows of a chunk that are left open


def linear_cross_entropy_scale_(gradient: Tensor, factor: Tensor) -> None:
    dtype = compute_dtype(gradient.dtype)
    check_same_device(f"{OP}_scale_", "factor", factor, "gradient", gradient)
    check_shape(f"{OP}_scale_", "factor", factor, ())
    if factor != 1:
        gradient.copy_(gradient.to(dtype) * factor)


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def check(
    x: Any,
    weight: Any,
    bias: Any,
    target: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    reduction: int,
    chunk: int,
    in_float32: bool,
    mask: int,
) -> None:
    """``TypeError`` or ``ValueError`` unless the arguments make a call; the targets' values aside.

    ``softcap`` 0 stands for none, ``chunk`` 0 for one that is left open.
    """
    check_linear(OP, x, weight, bias)
    if weight.dim() != 2:
        raise ValueError(
            f"{OP}: weight must have shape (V, {x.shape[-1]}); got {tuple(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(
            f"{OP}: weight must have at least one class in the first dimension; "
            f"got shape {tuple(weight.shape)}"
        )
    entropy.check_target(OP, target, "x", x)
    check_shape(OP, "target", target, x.shape[:-1])
    entropy.check_ignore_index(OP, ignore_index)
    entropy.check_numbers(label_smoothing, z_loss, softcap or None, OP)


def chunk_code(chunk: Any, op: str = OP) -> int:
    """Rows of a chunk, 0 for "auto"."""
    if chunk == "auto":
        return AUTO
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        what = repr(chunk) if isinstance(chunk, str) else type(chunk).__name__
        raise TypeError(f'{op}: chunk must be a number of rows or "auto"; got {what}')
    if chunk < 1:
        raise ValueError(f'{op}: chunk must be at least one row, or "auto"; got {chunk}')
    return chunk


def sums_in_float32(accumulate: Any, op: str = OP) -> bool:
    if accumulate not in ACCUMULATE:
        raise ValueError(
            f"{op}: accumulate must be one of {', '.join(ACCUMULATE)}; got {accumulate!r}"
        )
    return bool(accumulate == "fp32")


# --------------------------------------------------------------------------------------------------
# Shape functions
# --------------------------------------------------------------------------------------------------


def forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    chunk: int,
    in_float32: bool,
    mask: int,
) -> list[Tensor]:
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction, chunk, in_float32, mask)
    check(x, weight, bias, target, *options)
    dtype = compute_dtype(x.dtype)
    shapes = (
        entropy.loss_shape(target, reduction),
        entropy.statistics_shape(target),
        entropy.normalizer_shape(reduction),
    )
    outputs = [x.new_empty(shape, dtype=dtype) for shape in shapes]
    return outputs + _empty_gradients(x, weight, mask)


def backward_fake(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    statistics: Tensor,
    normalizer: Tensor,
    *options: Any,
) -> list[Tensor]:
    check(x, weight, bias, target, *options)
    return _empty_gradients(x, weight, options[-1])


def scale_fake(gradient: Tensor, factor: Tensor) -> None:
    pass


def _empty_gradients(x: Tensor, weight: Tensor, mask: int) -> list[Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return [x.new_empty(shape) for bit, shape in enumerate(shapes) if mask >> bit & 1]
