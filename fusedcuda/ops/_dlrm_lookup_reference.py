"""References of the interaction of rows of a table: CPU kernels, argument checks, shape functions.

What is said of dense, of the order of products and of the width is that of ``dot_interaction``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ._dlrm_reference import (
    check_dense,
    check_grad,
    check_limits,
    check_width,
    dot_interaction,
    dot_interaction_backward,
)
from ._operands import widen
from ._rows import check_floating, check_same_device

_LOOKUP = "embedding_interaction"
_LOOKUP_BACKWARD = f"{_LOOKUP}_backward"
_TABLE_BACKWARD = "embedding_dense_backward"


def embedding_interaction(
    dense: Tensor, weight: Tensor, indices: Tensor, upper: bool, width: int
) -> Tensor:
    check_embedding_interaction(dense, weight, indices, upper, width)
    return dot_interaction(dense, look_up(_LOOKUP, weight, indices), upper, width)


def embedding_interaction_backward(
    grad: Tensor, dense: Tensor, weight: Tensor, indices: Tensor, upper: bool, mask: int
) -> list[Tensor]:
    _check_lookup_backward(grad, dense, weight, indices)
    embeddings = look_up(_LOOKUP_BACKWARD, weight, indices)
    gradients = dot_interaction_backward(grad, dense, embeddings, upper)
    return [gradient for bit, gradient in enumerate(gradients) if mask >> bit & 1]


def embedding_dense_backward(grad: Tensor, indices: Tensor, rows: int) -> Tensor:
    _check_table_backward(grad, indices, rows)
    _check_rows_exist(_TABLE_BACKWARD, indices, rows)
    (wide,) = widen(grad)
    columns = grad.shape[-1]
    sums = wide.new_zeros(rows, columns)
    sums.index_add_(0, indices.reshape(-1), wide.reshape(indices.numel(), columns))
    return sums.to(grad.dtype)


def look_up(op: str, weight: Any, indices: Any) -> Tensor:
    """The rows of ``weight``; on the CPU ``IndexError`` names an index that is none."""
    check_floating(op, "weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must have shape (V, E); got {tuple(weight.shape)}")
    _check_indices(op, indices, "weight", weight)
    _check_table(op, weight, indices)
    if indices.device.type == "cpu":
        _check_rows_exist(op, indices, weight.shape[0])
    return F.embedding(indices, weight)


def embedding_interaction_fake(
    dense: Tensor, weight: Tensor, indices: Tensor, upper: bool, width: int
) -> Tensor:
    check_embedding_interaction(dense, weight, indices, upper, width)
    return dense.new_empty(dense.shape[0], width)


def embedding_interaction_backward_fake(
    grad: Tensor, dense: Tensor, weight: Tensor, indices: Tensor, upper: bool, mask: int
) -> list[Tensor]:
    _check_lookup_backward(grad, dense, weight, indices)
    shapes = (dense.shape, (*indices.shape, dense.shape[1]))
    return [dense.new_empty(shape) for bit, shape in enumerate(shapes) if mask >> bit & 1]


def embedding_dense_backward_fake(grad: Tensor, indices: Tensor, rows: int) -> Tensor:
    _check_table_backward(grad, indices, rows)
    return grad.new_empty(rows, grad.shape[-1])


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def check_lookup(op: str, dense: Any, weight: Any, indices: Any) -> None:
    """``TypeError`` or ``ValueError`` unless these name the vectors of some samples."""
    check_dense(op, dense, "weight", weight)
    batch, columns = dense.shape
    if weight.dim() != 2 or weight.shape[1] != columns:
        raise ValueError(
            f"{op}: weight must have shape (V, {columns}) to go with dense of shape "
            f"{tuple(dense.shape)}; got {tuple(weight.shape)}"
        )
    _check_indices(op, indices, "weight", weight)
    _check_table(op, weight, indices)
    if indices.dim() != 2 or indices.shape[0] != batch:
        raise ValueError(
            f"{op}: indices must have shape ({batch}, F - 1) to go with dense of shape "
            f"{tuple(dense.shape)}; got {tuple(indices.shape)}"
        )
    check_limits(op, dense, indices)


def check_embedding_interaction(
    dense: Any, weight: Any, indices: Any, upper: bool, width: int
) -> None:
    check_lookup(_LOOKUP, dense, weight, indices)
    check_width(f"{_LOOKUP}: width", dense, indices, width)


def _check_lookup_backward(grad: Any, dense: Any, weight: Any, indices: Any) -> None:
    check_lookup(_LOOKUP_BACKWARD, dense, weight, indices)
    check_grad(_LOOKUP_BACKWARD, grad, dense, indices)


def _check_table_backward(grad: Any, indices: Any, rows: int) -> None:
    op = _TABLE_BACKWARD
    check_floating(op, "grad", grad)
    _check_indices(op, indices, "grad", grad)
    if grad.shape[:-1] != indices.shape or grad.dim() < 2:
        raise ValueError(
            f"{op}: grad must have the shape of indices, {tuple(indices.shape)}, and one more "
            f"dimension; got {tuple(grad.shape)}"
        )
    if rows < 0:
        raise ValueError(f"{op}: rows must not be negative; got {rows}")


def _check_indices(op: str, indices: Any, name: str, tensor: Tensor) -> None:
    if not isinstance(indices, Tensor):
        raise TypeError(f"{op}: indices must be a tensor; got {type(indices).__name__}")
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: indices must be an int64 or int32 tensor; got {indices.dtype}")
    check_same_device(op, "indices", indices, name, tensor)


def _check_table(op: str, weight: Tensor, indices: Tensor) -> None:
    if weight.shape[0] == 0 and indices.numel() > 0:
        raise ValueError(f"{op}: weight must have a row for the indices; got {tuple(weight.shape)}")


def _check_rows_exist(op: str, indices: Tensor, rows: int) -> None:
    """``IndexError`` unless each index is a row; looks at the values."""
    wrong = (indices < 0) | (indices >= rows)
    if wrong.any():
        position = tuple(wrong.nonzero()[0].tolist())
        raise IndexError(
            f"{op}: indices must be in [0, {rows}), the rows of weight; "
            f"got {indices[position].item()} at {position}"
        )
