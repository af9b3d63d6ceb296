"""Linear + cross-entropy, chunk by chunk: which operators a call consists of, and its memory.

The logits of a chunk of rows are made, become their own gradient where they lie, and are multiplied
once more for each gradient that is wanted; the next chunk takes their place. A chunk is a handful
of operators, whose time on the host hides behind that of its products: so the loop is here, the
same for every device, and only its parts are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _cross_entropy_reference as entropy
from . import _linear_cross_entropy_reference as reference
from ._linear_cross_entropy_reference import DBIAS, DWEIGHT, DX, NONE, OP
from ._operands import compute_dtype
from ._rows import as_matrix

_ops = torch.ops.fusedcuda

# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------

# Rows of a chunk are whole tiles of the products.
_TILE_ROWS = 128
# What "auto" goes down to. The sum of the weight's gradient is read and written once a chunk, at
# 4.2 TB/s as long as all three products of 110 rows at 700 TFLOP/s (in float32 of 220).
_LEAST_ROWS = 512
# The fixed rule's smallest chunk.
_FIXED_ROWS = 1024
# Logits that are not worth a question to the driver.
_SMALL_BYTES = 64 << 20


class Problem(NamedTuple):
    """The sizes of a call, and what it makes."""

    rows: int
    features: int
    classes: int
    dtype: torch.dtype
    in_float32: bool  # the sum of the weight's gradient over the chunks
    mask: int  # gradients that are wanted

    def chunk_of(self, chunks: int) -> int:
        """Rows of one of so many chunks, in whole tiles."""
        rows = math.ceil(self.rows / chunks)
        return min(self.rows, math.ceil(rows / _TILE_ROWS) * _TILE_ROWS)

    def has_wide_sum(self, chunk: int) -> bool:
        """Whether the gradient of the weight is added up in float32 before it is rounded."""
        several = chunk < self.rows
        return bool(self.mask & DWEIGHT) and self.in_float32 and several and self.dtype.itemsize < 4

    def logits_bytes(self, chunk: int) -> int:
        return self.dtype.itemsize * chunk * pitch_of(self.classes)

    def peak_bytes(self, chunk: int) -> int:
        """Most that a call holds beside its operands, but for what there is one of a row."""
        element = self.dtype.itemsize
        weight = self.features * pitch_of(self.classes)
        dx = element * self.rows * self.features if self.mask & DX else 0
        dweight = element * weight if self.mask & DWEIGHT else 0
        logits = self.logits_bytes(chunk)
        if not self.has_wide_sum(chunk):
            return dx + dweight + logits
        # The sum is rounded when there are no logits any more.
        return dx + 4 * weight + max(logits, dweight)


def pitch_of(classes: int) -> int:
    """Elements from one row of logits to the next, and rows of the weight's gradient: tensor cores
    want multiples of 16 bytes, and cuBLASLt multiples of 8 of everything (50257 rows of 768 take it
    687 us, 50264 take 432)."""
    return math.ceil(classes / 8) * 8


def rows_of_chunk(problem: Problem, chunk: int, device: torch.device) -> int:
    """``chunk`` as the caller gives it, or what is chosen for 0; no more rows than there are."""
    return max(1, min(chunk or choose_chunk(problem, device), problem.rows))


def choose_chunk(problem: Problem, device: torch.device) -> int:
    """Rows of a chunk where the caller leaves that open.

    The fewest chunks that fit into half of the memory that is free, so that other results may
    follow. Where that is no answer, or would make a result depend on it, the fixed rule: on the
    CPU, in a CUDA graph, and with ``torch.use_deterministic_algorithms``.
    """
    if problem.logits_bytes(problem.rows) <= _SMALL_BYTES:
        return problem.rows
    if (
        device.type != "cuda"
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.is_current_stream_capturing()
    ):
        return fixed_chunk(problem)
    return fitting_chunk(problem, _free_bytes(device) // 2)


def fixed_chunk(problem: Problem) -> int:
    """As many rows as there are features, so that the logits take what the weight does.

    All rows at once where that takes no more memory, as it saves the sum in float32.
    """
    rows = max(_FIXED_ROWS, problem.features)
    chunk = problem.chunk_of(math.ceil(problem.rows / rows))
    at_once = problem.peak_bytes(problem.rows) <= problem.peak_bytes(chunk)
    return problem.rows if at_once else chunk


def fitting_chunk(problem: Problem, limit: int) -> int:
    """The largest chunk within ``limit`` bytes; if there is none, the largest of those that need
    the least: below some size the sum in float32 is what needs it.
    """
    best = chunk = problem.rows
    chunks = 1
    while problem.peak_bytes(best) > limit and chunk > _LEAST_ROWS:
        chunks += 1
        chunk = problem.chunk_of(chunks)
        if problem.peak_bytes(chunk) < problem.peak_bytes(best):
            best = chunk
    return best


def _free_bytes(device: torch.device) -> int:
    """What the driver has left and what torch's allocator keeps. Asking does not wait."""
    stats = torch.cuda.memory_stats(device)
    kept = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
    return torch.cuda.mem_get_info(device)[0] + kept


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------


def linear_cross_entropy_forward(
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
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction)
    reference.check(x, weight, bias, target, *options, chunk, in_float32, mask)
    if target.device.type == "cpu":
        entropy.check_classes(OP, target, ignore_index, weight.shape[0])
    layer = _Layer(x, weight, bias, mask, chunk, in_float32)
    targets = target.reshape(-1)
    dtype = compute_dtype(x.dtype)
    losses = x.new_empty(targets.shape, dtype=dtype)
    statistics = x.new_empty((*targets.shape, 2), dtype=dtype)
    normalizer = _normalizer(targets, ignore_index, reduction, dtype)

    def differentiate(rows: slice, logits: Tensor) -> None:
        parts = (losses[rows], statistics[rows], targets[rows])
        _ops.cross_entropy_rows_(logits, *parts, normalizer, *options, mask != 0)

    layer.for_each_chunk(differentiate)
    loss = losses.view(target.shape)
    if reduction != NONE:
        loss = losses.sum()
        if reduction == entropy.REDUCTIONS["mean"]:
            loss = loss / normalizer[0]  # NaN where no row counts, as in torch
    return [loss, statistics.view(*target.shape, 2), normalizer, *layer.gradients()]


def linear_cross_entropy_backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    statistics: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    chunk: int,
    in_float32: bool,
    mask: int,
) -> list[Tensor]:
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction)
    reference.check(x, weight, bias, target, *options, chunk, in_float32, mask)
    layer = _Layer(x, weight, bias, mask, chunk, in_float32)
    targets, pairs = target.reshape(-1), statistics.reshape(-1, 2)
    grads = grad_loss.reshape(-1)

    def differentiate(rows: slice, logits: Tensor) -> None:
        grad = grads[rows] if reduction == NONE else grad_loss
        saved = (logits, targets[rows], pairs[rows], normalizer)
        _ops.cross_entropy_backward_(logits, grad, *saved, None, *options, False)

    layer.for_each_chunk(differentiate)
    return layer.gradients()


def _normalizer(target: Tensor, ignore_index: int, reduction: int, dtype: torch.dtype) -> Tensor:
    """As cross_entropy's, without class weights: the number of valid targets, twice."""
    if reduction == NONE:
        return target.new_empty(0, dtype=dtype)
    return (target != ignore_index).sum().to(dtype).repeat(2)


class _Layer:
    """The operands of a call as matrices, the logits of one chunk, and the gradients so far."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mask: int,
        chunk: int,
        in_float32: bool,
    ) -> None:
        self.shape = x.shape
        self.x = readable(as_matrix(x))
        self.weight = readable(weight)
        self.bias = bias
        rows, features = self.x.shape
        self.problem = Problem(rows, features, weight.shape[0], x.dtype, in_float32, mask)
        self.chunk = rows_of_chunk(self.problem, chunk, x.device)
        self.dx = self.dweight = self.dbias = None
        self.pitch = pitch_of(self.problem.classes)
        if mask & DX:
            self.dx = x.new_empty(self.x.shape)
        if mask & DWEIGHT:
            dtype = torch.float32 if self.problem.has_wide_sum(self.chunk) else x.dtype
            # The first chunk writes what the others add to.
            make = weight.new_empty if self.problem.rows > 0 else weight.new_zeros
            self.dweight = make((self.pitch, features), dtype=dtype)
        if mask & DBIAS:
            self.dbias = x.new_zeros(weight.shape[:1], dtype=compute_dtype(x.dtype))

    def for_each_chunk(self, differentiate: Callable[[slice, Tensor], None]) -> None:
        """Makes the logits of each chunk; ``differentiate(rows, logits)`` makes their gradient of
        them, in place where gradients are wanted, which is then added to those of the operands.
        """
        rows, classes = self.problem.rows, self.problem.classes
        memory = self.x.new_empty(self.chunk, self.pitch)
        if self.dweight is not None and self.pitch > classes:
            memory[:, classes:].zero_()  # multiplied along, for rows that nobody gets
        for start in range(0, rows, self.chunk):
            span = slice(start, min(start + self.chunk, rows))
            padded = memory[: span.stop - start]
            logits = padded[:, :classes]
            _ops.linear_act_product_(logits, self.x[span], self.weight, self.bias, False)
            differentiate(span, logits)
            self._add_gradients(span, logits, padded)

    def _add_gradients(self, rows: slice, dlogits: Tensor, padded: Tensor) -> None:
        if self.dx is not None:
            _ops.linear_act_product_(self.dx[rows], dlogits, self.weight.t(), None, False)
        if self.dweight is not None:
            factors = (padded.t(), self.x[rows].t())
            _ops.linear_act_product_(self.dweight, *factors, None, rows.start > 0)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def gradients(self) -> list[Tensor]:
        """Those of the mask, in the dtype of the operands."""
        dx = None if self.dx is None else self.dx.view(self.shape)
        dweight = None if self.dweight is None else self.dweight[: self.problem.classes]
        made = (dx, dweight, self.dbias)
        return [gradient.to(self.x.dtype) for gradient in made if gradient is not None]


def readable(matrix: Tensor) -> Tensor:
    """As it is if its rows or its columns lie side by side and apart; else a copy, made once."""
    rows, columns = matrix.shape
    of_row, of_column = matrix.stride()
    by_rows = of_column == 1 and of_row >= columns
    by_columns = of_row == 1 and of_column >= rows
    return matrix if by_rows or by_columns else matrix.contiguous()
