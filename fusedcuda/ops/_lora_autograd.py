"""Differentiable form of the lora family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import first_order_only
from ._lora_reference import DA, DWEIGHT, DX, RELU, saves_z

_ops = torch.ops.fusedcuda
_NUM_ARGUMENTS = 9
_DIFFERENTIABLE = 5  # x, weight, bias, lora_a, lora_b


class LoRALinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_ops.lora_linear_forward.default(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, lora_a, lora_b, seed, ctx.activation, ctx.scale, ctx.dropout_p = inputs
        y, t, *z = output
        ctx.mark_non_differentiable(t, *z)
        ctx.set_materialize_grads(False)
        ctx.mask = sum(
            want << bit for bit, want in enumerate(ctx.needs_input_grad[:_DIFFERENTIABLE])
        )
        saved = z[0] if saves_z(ctx.activation) else y if ctx.activation == RELU else None
        ctx.save_for_backward(
            x if ctx.mask & (DWEIGHT | DA) else None,
            weight if ctx.mask & DX else None,
            saved,
            t,
            lora_a,
            lora_b,
            seed,
        )

    @staticmethod
    @first_order_only("lora_linear")
    def backward(
        ctx: Any,
        dy: Tensor | None,
        x: Tensor | None,
        weight: Tensor | None,
        saved: Tensor | None,
        t: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        seed: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        if dy is None or ctx.mask == 0:
            return (None,) * _NUM_ARGUMENTS
        in_features = lora_a.shape[1]
        computed = iter(
            _ops.lora_linear_backward.default(
                dy,
                _given(x, dy, *dy.shape[:-1], in_features),
                _given(weight, dy, dy.shape[-1], in_features),
                saved,
                t,
                lora_a,
                lora_b,
                seed,
                ctx.activation,
                ctx.scale,
                ctx.dropout_p,
                ctx.mask,
            )
        )
        gradients = [
            next(computed) if ctx.mask >> bit & 1 else None for bit in range(_DIFFERENTIABLE)
        ]
        return *gradients, *(None,) * (_NUM_ARGUMENTS - _DIFFERENTIABLE)


def _given(tensor: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """``tensor``; where it was not saved, as only its shape matters, one element expanded to it."""
    return like.new_empty(()).expand(shape) if tensor is None else tensor
