"""References of the dlrm family: the CPU kernels, argument checks, shape functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._cross_entropy_reference import REDUCTIONS
from ._linear_act_reference import product
from ._operands import compute_dtype, widen
from ._rows import check_floating, check_number, check_rows, check_same_device, check_shape

NONE, _MEAN = REDUCTIONS["none"], REDUCTIONS["mean"]

# The limits of csrc/kernels/dlrm.h.
MAX_VECTORS = 64
MAX_COLUMNS = 256
MAX_PADDING = 128

# --------------------------------------------------------------------------------------------------
# Interaction
# --------------------------------------------------------------------------------------------------


def dot_interaction(dense: Tensor, embeddings: Tensor, upper: bool, width: int) -> Tensor:
    check_interaction(dense, embeddings, upper, width)
    vectors = _vectors(dense, embeddings)
    i, j = _pairs(vectors.shape[1], upper)
    products = product(vectors, vectors.mT)[:, i, j]
    row = torch.cat([vectors[:, 0], products], dim=1)
    output = dense.new_zeros(dense.shape[0], width)
    output[:, : row.shape[1]] = row
    return output


def dot_interaction_backward(
    grad: Tensor, dense: Tensor, embeddings: Tensor, upper: bool
) -> list[Tensor]:
    _check_interaction_backward(grad, dense, embeddings)
    vectors = _vectors(dense, embeddings)
    batch, count, columns = vectors.shape
    i, j = _pairs(count, upper)
    (wide,) = widen(grad)
    products = wide[:, columns : columns + i.numel()]
    dz = vectors.new_zeros(batch, count, count)
    dz[:, i, j] = products
    dz[:, j, i] = products
    gradient = product(dz, vectors)
    gradient[:, 0] += wide[:, :columns]
    return [
        dense.new_empty(dense.shape).copy_(gradient[:, 0]),
        embeddings.new_empty(embeddings.shape).copy_(gradient[:, 1:]),
    ]


def _vectors(dense: Tensor, embeddings: Tensor) -> Tensor:
    return torch.cat(widen(dense.unsqueeze(1), embeddings), dim=1)


def _pairs(count: int, upper: bool) -> tuple[Tensor, Tensor]:
    """The indices of the products' vectors, in the order of an output row."""
    if upper:
        i, j = torch.triu_indices(count, count, 1)
    else:
        i, j = torch.tril_indices(count, count, -1)
    return i, j


def row_elements(vectors: int, columns: int) -> int:
    """Elements of an output row in front of its padding."""
    return columns + vectors * (vectors - 1) // 2


def check_vectors(op: str, dense: Any, embeddings: Any) -> None:
    """``TypeError`` or ``ValueError`` unless these are the vectors of some samples."""
    check_dense(op, dense, "embeddings", embeddings)
    batch, columns = dense.shape
    if embeddings.dim() != 3 or embeddings.shape[0] != batch or embeddings.shape[2] != columns:
        raise ValueError(
            f"{op}: embeddings must have shape ({batch}, F - 1, {columns}) to go with dense of "
            f"shape {tuple(dense.shape)}; got {tuple(embeddings.shape)}"
        )
    check_limits(op, dense, embeddings)


def check_dense(op: str, dense: Any, name: str, others: Any) -> None:
    """Of ``dense`` by itself, and what ``others`` have in common with it."""
    check_floating(op, "dense", dense)
    check_floating(op, name, others)
    if others.dtype != dense.dtype:
        raise TypeError(
            f"{op}: {name} must be a {dense.dtype} tensor as dense is; got {others.dtype}"
        )
    check_same_device(op, name, others, "dense", dense)
    if dense.dim() != 2:
        raise ValueError(f"{op}: dense must have shape (B, E); got {tuple(dense.shape)}")


def check_limits(op: str, dense: Tensor, others: Tensor) -> None:
    vectors, columns = others.shape[1] + 1, dense.shape[1]
    if not 1 <= columns <= MAX_COLUMNS:
        raise ValueError(f"{op}: vectors must have 1 to {MAX_COLUMNS} elements; got {columns}")
    if vectors > MAX_VECTORS:
        raise ValueError(f"{op}: there may be {MAX_VECTORS} vectors, dense included; got {vectors}")


def check_interaction(dense: Any, embeddings: Any, upper: bool, width: int) -> None:
    check_vectors("dot_interaction", dense, embeddings)
    check_width("dot_interaction: width", dense, embeddings, width)


def _check_interaction_backward(grad: Any, dense: Any, embeddings: Any) -> None:
    op = "dot_interaction_backward"
    check_vectors(op, dense, embeddings)
    check_grad(op, grad, dense, embeddings)


def check_grad(op: str, grad: Any, dense: Tensor, others: Tensor) -> None:
    check_floating(op, "grad", grad)
    check_same_device(op, "grad", grad, "dense", dense)
    if grad.dtype != dense.dtype or grad.dim() != 2 or grad.shape[0] != dense.shape[0]:
        raise ValueError(
            f"{op}: grad must be a {dense.dtype} tensor of shape ({dense.shape[0]}, width); "
            f"got {grad.dtype}, {tuple(grad.shape)}"
        )
    check_width(f"{op}: the width of grad", dense, others, grad.shape[1])


def check_width(what: str, dense: Tensor, others: Tensor, width: int) -> None:
    vectors, columns = others.shape[1] + 1, dense.shape[1]
    least = row_elements(vectors, columns)
    if not least <= width < least + MAX_PADDING:
        raise ValueError(
            f"{what} must be {least} to {least + MAX_PADDING - 1}: {columns} elements, the "
            f"products of {vectors} vectors, and padding; got {width}"
        )


def dot_interaction_fake(dense: Tensor, embeddings: Tensor, upper: bool, width: int) -> Tensor:
    check_interaction(dense, embeddings, upper, width)
    return dense.new_empty(dense.shape[0], width)


def dot_interaction_backward_fake(
    grad: Tensor, dense: Tensor, embeddings: Tensor, upper: bool
) -> list[Tensor]:
    _check_interaction_backward(grad, dense, embeddings)
    return [dense.new_empty(dense.shape), embeddings.new_empty(embeddings.shape)]


# --------------------------------------------------------------------------------------------------
# Head
# --------------------------------------------------------------------------------------------------

_HEAD = "linear_sigmoid_bce"


def linear_sigmoid_bce_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pos_weight: float,
    reduction: int,
) -> list[Tensor]:
    check_head(x, weight, bias, target, pos_weight, reduction)
    wide_x, wide_weight = widen(x, weight)
    logits = product(wide_x, wide_weight.reshape(-1, 1)).squeeze(-1)
    if bias is not None:
        logits = logits + bias.to(logits.dtype).reshape(())
    # Every term is positive for targets in [0, 1]: nothing cancels.
    negative, positive = 1 - target, pos_weight * target
    tail = torch.log1p(torch.exp(-logits.abs()))
    loss = negative * (logits.clamp(min=0) + tail) + positive * ((-logits).clamp(min=0) + tail)
    dlogits = negative * torch.sigmoid(logits) - positive * torch.sigmoid(-logits)
    if reduction != NONE:
        loss = loss.mean() if reduction == _MEAN else loss.sum()
    return [loss, logits, dlogits]


def linear_sigmoid_bce_backward(
    grad_loss: Tensor, x: Tensor, weight: Tensor, dlogits: Tensor, mask: int, reduction: int
) -> list[Tensor]:
    _check_head_backward(grad_loss, x, weight, dlogits, reduction)
    dz = dlogits * grad_loss
    if reduction == _MEAN:
        dz = dz / dz.numel()
    wide_x, wide_weight = widen(x, weight)
    gradients = []
    if mask & 1:
        gradients.append((dz.unsqueeze(-1) * wide_weight.reshape(-1)).to(x.dtype))
    if mask & 2:
        dweight = product(dz.reshape(1, -1), wide_x.reshape(-1, x.shape[-1]))
        gradients.append(dweight.to(weight.dtype).reshape(weight.shape))
    if mask & 4:
        gradients.append(dz.sum().to(weight.dtype).reshape(1))
    return gradients


def check_head(
    x: Any, weight: Any, bias: Any, target: Any, pos_weight: Any, reduction: int
) -> None:
    _check_weight(_HEAD, x, weight, reduction)
    if bias is not None:
        _check_parameter(_HEAD, "bias", bias, x)
        check_shape(_HEAD, "bias", bias, (1,))
    check_floating(_HEAD, "target", target)
    if target.dtype != compute_dtype(x.dtype):
        raise TypeError(f"{_HEAD}: target must be {compute_dtype(x.dtype)}; got {target.dtype}")
    check_same_device(_HEAD, "target", target, "x", x)
    if target.shape != x.shape[:-1]:
        leading = tuple(x.shape[:-1])
        raise ValueError(
            f"{_HEAD}: target must have shape {leading} or {(*leading, 1)}, one value for each row "
            f"of x; got {tuple(target.shape)}"
        )
    check_number(_HEAD, "pos_weight", pos_weight)
    if not 0 <= pos_weight < math.inf:
        raise ValueError(f"{_HEAD}: pos_weight must be finite and not negative; got {pos_weight}")


def _check_weight(op: str, x: Any, weight: Any, reduction: int) -> None:
    check_rows(op, "x", x)
    columns = x.shape[-1]
    if columns == 0:
        raise ValueError(
            f"{op}: x must have at least one element in its last dimension; "
            f"got shape {tuple(x.shape)}"
        )
    _check_parameter(op, "weight", weight, x)
    if tuple(weight.shape) not in ((columns,), (1, columns)):
        raise ValueError(
            f"{op}: weight must have shape ({columns},) or (1, {columns}); "
            f"got {tuple(weight.shape)}"
        )
    if reduction not in REDUCTIONS.values():
        raise ValueError(f"{op}: reduction must be 0, 1 or 2; got {reduction}")


def _check_parameter(op: str, name: str, tensor: Any, x: Tensor) -> None:
    check_floating(op, name, tensor)
    check_same_device(op, name, tensor, "x", x)
    if tensor.dtype != x.dtype:
        raise TypeError(f"{op}: {name} must be a {x.dtype} tensor as x is; got {tensor.dtype}")


def _check_head_backward(
    grad_loss: Tensor, x: Tensor, weight: Tensor, dlogits: Tensor, reduction: int
) -> None:
    op, dtype = f"{_HEAD}_backward", compute_dtype(x.dtype)
    _check_weight(op, x, weight, reduction)
    check_shape(op, "dlogits", dlogits, x.shape[:-1])
    check_shape(op, "grad_loss", grad_loss, loss_shape(x, reduction))
    for name, tensor in (("dlogits", dlogits), ("grad_loss", grad_loss)):
        check_same_device(op, name, tensor, "x", x)
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}; got {tensor.dtype}")


def loss_shape(x: Tensor, reduction: int) -> torch.Size:
    return x.shape[:-1] if reduction == NONE else torch.Size()


def linear_sigmoid_bce_forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pos_weight: float,
    reduction: int,
) -> list[Tensor]:
    check_head(x, weight, bias, target, pos_weight, reduction)
    dtype = compute_dtype(x.dtype)
    shapes = (loss_shape(x, reduction), x.shape[:-1], x.shape[:-1])
    return [x.new_empty(shape, dtype=dtype) for shape in shapes]


def linear_sigmoid_bce_backward_fake(
    grad_loss: Tensor, x: Tensor, weight: Tensor, dlogits: Tensor, mask: int, reduction: int
) -> list[Tensor]:
    _check_head_backward(grad_loss, x, weight, dlogits, reduction)
    shapes = (x.shape, weight.shape, torch.Size((1,)))
    return [x.new_empty(shape) for bit, shape in enumerate(shapes) if mask >> bit & 1]
