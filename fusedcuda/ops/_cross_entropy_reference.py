"""References of the cross-entropy family: the CPU kernels, argument checks, shape functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._operands import compute_dtype
from ._rows import check_number, check_rows, check_same_device, check_shape, check_vector

OP = "cross_entropy"

# The order is that of enum class Reduction in csrc/kernels/cross_entropy.h; a test compares them.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_NONE, _MEAN = REDUCTIONS["none"], REDUCTIONS["mean"]

# Logits widened at a time: float32 copies of all of them could be larger than the model.
_CHUNK = 1 << 22


class _Options(NamedTuple):
    """What all rows of a call share, in the order of the operators' arguments."""

    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: int


class _Rows(NamedTuple):
    """Some rows of a call, in the dtype that the formula is computed in."""

    span: slice
    logits: Tensor  # [rows, V], capped
    slope: Tensor | None  # [rows, V], derivative of the cap; None without one
    target: Tensor  # [rows, 1]; 0 where it is ignored
    valid: Tensor  # [rows, 1]
    hit: Tensor  # [rows, 1], (1 - label_smoothing) * weight of the target
    spread: Tensor  # [V], label_smoothing / V * weight of each class


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    with_gradient: bool,
) -> list[Tensor]:
    options = _Options(weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    check(logits, target, *options)
    check_classes(OP, target, ignore_index, logits.shape[-1])
    dtype = compute_dtype(logits.dtype)
    entropy, penalty = (logits.new_empty(target.numel(), dtype=dtype) for _ in range(2))
    statistics = logits.new_empty(statistics_shape(target), dtype=dtype)
    for rows in _chunks(logits, target, options):
        peak = rows.logits.amax(dim=-1, keepdim=True)
        total = (rows.logits - peak).exp().sum(dim=-1, keepdim=True)
        log_sum = total.log()
        # Not lse - x: beside a large peak, lse has lost the digits of log_sum.
        distance = (peak - rows.logits) + log_sum
        row = rows.hit * distance.gather(-1, rows.target)
        if label_smoothing:
            row = row + (rows.spread * distance).sum(dim=-1, keepdim=True)
        lse = peak + log_sum
        entropy[rows.span] = torch.where(rows.valid, row, 0.0).squeeze(-1)
        penalty[rows.span] = torch.where(rows.valid, z_loss * lse.square(), 0.0).squeeze(-1)
        statistics.view(-1, 2)[rows.span] = torch.cat([peak, total], dim=-1)

    normalizer = _normalizer(target, options, dtype)
    loss = _reduce(entropy, penalty, normalizer, reduction).view(loss_shape(target, reduction))
    if not with_gradient:
        return [loss, statistics, normalizer]
    one = torch.ones_like(loss)
    gradient = cross_entropy_backward(one, logits, target, statistics, normalizer, *options)
    return [loss, statistics, normalizer, gradient]


def cross_entropy_rows_(
    logits: Tensor,
    losses: Tensor,
    statistics: Tensor,
    target: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    with_gradient: bool,
) -> None:
    shared = (None, ignore_index, label_smoothing, z_loss, softcap)
    alone: tuple[Any, ...] = (logits, target, *shared, _NONE, False)
    loss, pairs, _ = cross_entropy_forward(*alone)
    losses.copy_(loss)
    statistics.copy_(pairs)
    if with_gradient:
        one = losses.new_ones(loss_shape(target, reduction))
        saved = (logits, target, statistics, normalizer)
        together: tuple[Any, ...] = (one, *saved, *shared, reduction)
        logits.copy_(cross_entropy_backward(*together))


def cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    normalizer: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> Tensor:
    options = _Options(weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    check(logits, target, *options)
    _check_saved(grad_loss, logits, target, statistics, normalizer, reduction)
    gradient = logits.new_empty(logits.shape)
    matrix = gradient.view(-1, logits.shape[-1])
    grads = grad_loss.expand(target.shape).reshape(-1, 1)
    pairs = statistics.reshape(-1, 2)
    for rows in _chunks(logits, target, options):
        grad = grads[rows.span]
        peak, total = pairs[rows.span].split(1, dim=-1)
        of_entropy = grad / normalizer[0] if reduction == _MEAN else grad
        of_penalty = grad / normalizer[1] if reduction == _MEAN else grad
        by_lse = of_entropy * (rows.hit + rows.spread.sum())
        by_lse = by_lse + of_penalty * 2 * z_loss * (peak + total.log())
        row = by_lse / total * (rows.logits - peak).exp()
        if label_smoothing:
            row -= of_entropy * rows.spread
        row.scatter_add_(-1, rows.target, -of_entropy * rows.hit)
        if rows.slope is not None:
            row *= rows.slope
        matrix[rows.span] = torch.where(rows.valid, row, 0.0)
    return gradient


def cross_entropy_backward_(
    gradient: Tensor,
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    normalizer: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    unless_one: bool,
) -> None:
    options = _Options(weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    _check_like_logits("gradient", gradient, logits)
    if unless_one and reduction == _NONE:
        raise ValueError(f'{OP}_backward_: unless_one is for "mean" and "sum"')
    if unless_one and grad_loss == 1:
        return
    gradient.copy_(
        cross_entropy_backward(grad_loss, logits, target, statistics, normalizer, *options)
    )


def _chunks(logits: Tensor, target: Tensor, options: _Options) -> Iterator[_Rows]:
    dtype = compute_dtype(logits.dtype)
    num_classes = logits.shape[-1]
    weight = logits.new_ones(num_classes) if options.weight is None else options.weight
    weight = weight.to(dtype)
    spread = options.label_smoothing / num_classes * weight
    matrix, targets = logits.reshape(-1, num_classes), target.reshape(-1, 1)
    step = max(1, _CHUNK // num_classes)
    for start in range(0, matrix.shape[0], step):
        span = slice(start, start + step)
        x, slope = matrix[span].to(dtype), None
        if options.softcap:
            tanh = torch.tanh(x / options.softcap)
            x, slope = options.softcap * tanh, 1 - tanh.square()
        valid = targets[span] != options.ignore_index
        classes = torch.where(valid, targets[span], 0).long()
        hit = (1 - options.label_smoothing) * weight[classes]
        yield _Rows(span, x, slope, classes, valid, hit, spread)


def _normalizer(target: Tensor, options: _Options, dtype: torch.dtype) -> Tensor:
    """The class weights of the valid targets added up, and their number; nothing for "none"."""
    valid = target != options.ignore_index
    count = valid.sum().to(dtype)
    if options.reduction == _NONE:
        return count.new_empty(0)
    if options.weight is None:
        return torch.stack([count, count])
    weights = options.weight.to(dtype)[target[valid].long()]
    # All gradients are divided by the sum, and share its error.
    return torch.stack([weights.sum(dtype=torch.float64).to(dtype), count])


def _reduce(entropy: Tensor, penalty: Tensor, normalizer: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return entropy + penalty
    if reduction == _MEAN:
        return entropy.sum() / normalizer[0] + penalty.sum() / normalizer[1]
    return entropy.sum() + penalty.sum()


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def check(
    logits: Any,
    target: Any,
    weight: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    reduction: int,
    with_gradient: bool = False,
) -> None:
    """``TypeError`` or ``ValueError`` unless the arguments make a call; the targets' values aside.

    ``softcap`` 0 stands for none.
    """
    check_rows(OP, "logits", logits)
    if logits.shape[-1] == 0:
        raise ValueError(
            f"{OP}: logits must have at least one class in the last dimension; "
            f"got shape {tuple(logits.shape)}"
        )
    check_target(OP, target, "logits", logits)
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{OP}: target must have shape {tuple(logits.shape[:-1])}, as the classes are in the "
            f"last dimension of logits (torch: in dimension 1); got {tuple(target.shape)}"
        )
    if weight is not None:
        check_vector(OP, "weight", weight, "logits", logits)
    check_ignore_index(OP, ignore_index)
    check_numbers(label_smoothing, z_loss, softcap or None)
    if reduction not in REDUCTIONS.values():
        raise ValueError(f"{OP}: reduction must be 0, 1 or 2; got {reduction}")


def check_target(op: str, target: Any, rows_name: str, rows: Tensor) -> None:
    """Integers on the device of ``rows``, or ``TypeError``, ``ValueError``."""
    if not isinstance(target, Tensor) or target.dtype not in (torch.int32, torch.int64):
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"{op}: target must be an int32 or int64 tensor of classes; got {got}")
    check_same_device(op, "target", target, rows_name, rows)


def check_ignore_index(op: str, ignore_index: Any) -> None:
    if not isinstance(ignore_index, (int, torch.SymInt)):
        raise TypeError(f"{op}: ignore_index must be an int; got {type(ignore_index).__name__}")


def check_numbers(label_smoothing: Any, z_loss: Any, softcap: Any, op: str = OP) -> None:
    """``TypeError`` or ``ValueError`` unless each is a number in its range; no softcap is None."""
    check_number(op, "label_smoothing", label_smoothing)
    check_number(op, "z_loss", z_loss)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1]; got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"{op}: z_loss must be finite and not negative; got {z_loss}")
    if softcap is None:
        return
    check_number(op, "softcap", softcap)
    if not 0 < softcap < math.inf:
        raise ValueError(f"{op}: softcap must be finite and positive, or None; got {softcap}")


def reduction_code(reduction: Any, op: str = OP) -> int:
    """Code of ``reduction``; ``ValueError`` with the valid names if there is none."""
    code = REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
    if code is None:
        raise ValueError(
            f"{op}: reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}"
        )
    return code


def check_classes(op: str, target: Tensor, ignore_index: int, num_classes: int) -> None:
    """``IndexError`` unless each target is a class or ignored; looks at the values."""
    wrong = (target != ignore_index) & ((target < 0) | (target >= num_classes))
    if wrong.any():
        position = tuple(wrong.nonzero()[0].tolist())
        raise IndexError(
            f"{op}: target must be in [0, {num_classes}) or ignore_index ({ignore_index}); "
            f"got {target[position].item()} at {position}"
        )


def _check_saved(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    normalizer: Tensor,
    reduction: int,
) -> None:
    op, dtype = f"{OP}_backward", compute_dtype(logits.dtype)
    check_shape(op, "grad_loss", grad_loss, loss_shape(target, reduction))
    check_shape(op, "statistics", statistics, statistics_shape(target))
    check_shape(op, "normalizer", normalizer, normalizer_shape(reduction))
    saved = {"grad_loss": grad_loss, "statistics": statistics, "normalizer": normalizer}
    for name, tensor in saved.items():
        check_same_device(op, name, tensor, "logits", logits)
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}; got {tensor.dtype}")


def _check_like_logits(name: str, tensor: Tensor, logits: Tensor) -> None:
    op = f"{OP}_backward_"
    check_shape(op, name, tensor, logits.shape)
    check_same_device(op, name, tensor, "logits", logits)
    if tensor.dtype != logits.dtype:
        raise TypeError(f"{op}: {name} must be {logits.dtype} as logits is; got {tensor.dtype}")


# --------------------------------------------------------------------------------------------------
# Shape functions
# --------------------------------------------------------------------------------------------------


def loss_shape(target: Tensor, reduction: int) -> torch.Size:
    return target.shape if reduction == _NONE else torch.Size()


def statistics_shape(target: Tensor) -> torch.Size:
    return torch.Size((*target.shape, 2))


def normalizer_shape(reduction: int) -> tuple[int]:
    return (0,) if reduction == _NONE else (2,)


def forward_fake(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    with_gradient: bool,
) -> list[Tensor]:
    check(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    dtype = compute_dtype(logits.dtype)
    shapes = (loss_shape(target, reduction), statistics_shape(target), normalizer_shape(reduction))
    outputs = [logits.new_empty(shape, dtype=dtype) for shape in shapes]
    return [*outputs, logits.new_empty(logits.shape)] if with_gradient else outputs


def rows_fake(logits: Tensor, *args: Any) -> None:
    pass


def backward_fake(grad_loss: Tensor, logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def backward_inplace_fake(gradient: Tensor, *args: Any) -> None:
    pass
