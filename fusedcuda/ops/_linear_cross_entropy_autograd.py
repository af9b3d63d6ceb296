"""Differentiable forms of linear_cross_entropy: three ways to the gradients.

Their products cost as much as those of the forward cost twice, and need the logits. So the forward
makes them on the way, for an incoming gradient of 1, where that is likely and can be repaired
(``Ahead``, ``Traced``); elsewhere the backward makes the logits once more (``Recomputed``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import first_order_only

_ops = torch.ops.fusedcuda
_OP = "linear_cross_entropy"
_NUM_ARGUMENTS = 12
_DIFFERENTIABLE = 3  # x, weight, bias


def _mask(ctx: Any) -> int:
    return sum(bool(want) << bit for bit, want in enumerate(ctx.needs_input_grad[:_DIFFERENTIABLE]))


def _gradients(mask: int, computed: Any) -> tuple[Tensor | None, ...]:
    """One for each argument, of which those in the mask have been computed."""
    remaining = iter(computed)
    found = [next(remaining) if mask >> bit & 1 else None for bit in range(_DIFFERENTIABLE)]
    return *found, *(None,) * (_NUM_ARGUMENTS - _DIFFERENTIABLE)


class Recomputed(torch.autograd.Function):
    """The backward makes the logits again, from what of a row is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_ops.linear_cross_entropy_forward.default(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *operands, ctx.options = *inputs[:4], inputs[4:-1]
        _, statistics, normalizer = output
        ctx.mark_non_differentiable(statistics, normalizer)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, statistics, normalizer)

    @staticmethod
    @first_order_only(_OP)
    def backward(ctx: Any, grad: Tensor | None, *saved: Tensor) -> tuple[Tensor | None, ...]:
        if grad is None:  # the loss is not used further
            return (None,) * _NUM_ARGUMENTS
        return _backward(ctx, grad, *saved)


class Ahead(torch.autograd.Function):
    """The forward makes the gradients too; the first backward hands them out."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor]:
        *operands, ctx.options = *arguments[:4], arguments[4:-1]
        made = _ops.linear_cross_entropy_forward.default(*arguments[:-1], _mask(ctx))
        loss, statistics, normalizer, *gradients = made
        ctx.handed_out = False
        # Saved, not kept: checkpointing and offloading see what is saved only.
        ctx.save_for_backward(*operands, statistics, normalizer, *gradients)
        return (loss,)

    @staticmethod
    @first_order_only(_OP)
    def backward(ctx: Any, grad: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.handed_out:  # in a first backward, whose results others hold now
            return _backward(ctx, grad, *saved[:6])
        ctx.handed_out = True
        # .data has its own version: what is written here is no reason to call it stale.
        gradients = [gradient.data for gradient in saved[6:]]
        for gradient in gradients:
            _ops.linear_cross_entropy_scale_.default(gradient, grad)
        return _gradients(_mask(ctx), gradients)


class Traced(torch.autograd.Function):
    """As Ahead, for Dynamo, which wants to see every output and no side effect.

    The compiler makes of the scaling one pass over each gradient, in place where it can.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor]:
        made = _ops.linear_cross_entropy_forward.default(*arguments[:-1], _mask(ctx))
        ctx.save_for_backward(*made[3:])
        return (made[0],)

    @staticmethod
    @first_order_only(_OP)
    def backward(ctx: Any, grad: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [(g.to(grad.dtype) * grad).to(g.dtype) for g in gradients]
        return _gradients(_mask(ctx), scaled)


def _backward(ctx: Any, grad: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    mask = _mask(ctx)
    computed = _ops.linear_cross_entropy_backward.default(grad, *saved, *ctx.options, mask)
    return _gradients(mask, computed)
