"""Batching rules of the linear_act family (``torch.library.register_vmap``).

The samples become more rows of ``x`` where they share the weight, and a batch of weights where they
do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._linear_act_reference import NONE, RELU


def batched_forward(name: str) -> Callable[..., tuple[Any, Any]]:
    """Of an operator of ``x, weight, bias, more tensors of the output's shape, options``."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        x, weight, bias, *rest = (
            _to_front(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True)
        )
        folds = weight.dim() == 4  # each sample has a batch of weights itself
        shared = not folds and in_dims[1] is None and in_dims[2] is None
        if shared:
            weight, bias = args[1:3]
        elif folds:
            if bias is not None and bias.dim() == 2:
                bias = bias.unsqueeze(1).expand(-1, weight.shape[1], -1)
            x, weight, bias, *rest = (_fold(t) for t in (x, weight, bias, *rest))
        result = getattr(torch.ops.fusedcuda, name).default(x, weight, bias, *rest)
        if isinstance(result, Tensor):
            return _unfold(result, info.batch_size) if folds else result, 0
        y, *saved = result
        y = _unfold(y, info.batch_size) if folds else y
        # The rows of a bit mask are those of all samples.
        is_mask = rest[-2] == RELU
        saved = [_unfold(t, info.batch_size) if folds or is_mask else t for t in saved]
        return [y, *saved], [0] * (1 + len(saved))

    return rule


def batched_backward(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[list[Tensor], list[int]]:
    """Of ``linear_act_backward``."""
    *_, activation, mask, low_precision = args
    dy, x, weight, saved = (
        _to_front(arg, dim, info.batch_size) for arg, dim in zip(args[:4], in_dims[:4], strict=True)
    )
    folds = weight.dim() == 4  # each sample has a batch of weights itself
    if not folds and in_dims[2] is None and mask == 0b001:
        weight = args[2]  # only sums over the rows tell the samples apart
    elif folds:
        dy, x, weight = (_fold(t) for t in (dy, x, weight))
    if saved is not None and (folds or activation == RELU):
        saved = _fold(saved)
    gradients = torch.ops.fusedcuda.linear_act_backward.default(
        dy, x, weight, saved, activation, mask, low_precision
    )
    if folds:
        gradients = [_unfold(gradient, info.batch_size) for gradient in gradients]
    return gradients, [0] * len(gradients)


def batched_mlp_backward(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[list[Tensor], list[int]]:
    """Of ``mlp_backward``: the two layers one after the other."""

    def backward(*layer: Any) -> list[Tensor]:
        dims = tuple(0 if isinstance(arg, Tensor) else None for arg in layer)
        return batched_backward(info, dims, *layer)[0]

    samples = (_to_front(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True))
    gradients = two_layers_backward(backward, *samples)
    return gradients, [0] * len(gradients)


def two_layers_backward(
    backward: Callable[..., list[Tensor]],
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    saved: Tensor | None,
    h: Tensor,
    w2: Tensor,
    activation: int,
    mask: int,
    low_precision: bool,
) -> list[Tensor]:
    """``mlp_backward`` as that of one layer and of the other, as far as each is needed."""
    first_layer, second_layer = mask & 0b111, mask >> 2 & 0b110
    needs_dh = int(first_layer != 0)
    gradients = backward(dy, h, w2, None, NONE, needs_dh | second_layer, low_precision)
    if not needs_dh:
        return gradients
    dh, *upper = gradients
    return [*backward(dh, x, w1, saved, activation, first_layer, low_precision), *upper]


def _to_front(arg: Any, dim: int | None, size: int) -> Any:
    """A tensor with the samples in front, expanded (no copy) if there is one for all of them."""
    if not isinstance(arg, Tensor):
        return arg
    return arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)


def _fold(arg: Any) -> Any:
    """The samples and the dimension behind them as one."""
    return arg.flatten(0, 1) if isinstance(arg, Tensor) else arg


def _unfold(tensor: Tensor, size: int) -> Tensor:
    return tensor.unflatten(0, (size, tensor.shape[0] // size))
