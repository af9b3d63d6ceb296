"""Differentiable forms of the gated_mlp family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import first_order_only
from ._gated_mlp_reference import DDOWN, DGATE, DUP, DX

_ops = torch.ops.fusedcuda
_DIFFERENTIABLE = 4  # x, w_gate, w_up, w_down


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], keeps_h: bool) -> None:
    """What the gradients that are asked for are made of, as ``gated_mlp_backward`` takes it."""
    x, w_gate, w_up, w_down, ctx.activation = inputs
    _, gate_up, h = output
    ctx.mark_non_differentiable(gate_up, h)
    ctx.set_materialize_grads(False)
    ctx.packed = w_up is None
    ctx.mask = sum(want << bit for bit, want in enumerate(ctx.needs_input_grad[:_DIFFERENTIABLE]))
    below = ctx.mask & (DX | DGATE | DUP)
    makes_h = ctx.mask & DDOWN and not keeps_h
    ctx.save_for_backward(
        x if ctx.mask & (DGATE | DUP) else None,
        w_gate if ctx.mask & DX else None,
        w_up if ctx.mask & DX else None,
        w_down if below else None,
        gate_up if below or makes_h else None,
        h if ctx.mask & DDOWN and keeps_h else None,
    )


class GatedMLP(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, activation: int
    ) -> tuple[Tensor, ...]:
        return tuple(_ops.gated_mlp_forward.default(x, w_gate, w_up, w_down, activation))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output, keeps_h=True)

    @staticmethod
    @first_order_only("gated_mlp")
    def backward(ctx: Any, dy: Tensor | None, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None or ctx.mask == 0:
            return (None,) * (_DIFFERENTIABLE + 1)
        options = (ctx.packed, ctx.activation, ctx.mask)
        computed = iter(_ops.gated_mlp_backward.default(dy, *saved, *options))
        gradients = (
            next(computed) if ctx.mask >> bit & 1 else None for bit in range(_DIFFERENTIABLE)
        )
        return *gradients, None


class RecomputingGatedMLP(GatedMLP):
    """Without the hidden layer among what is saved."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output, keeps_h=False)
