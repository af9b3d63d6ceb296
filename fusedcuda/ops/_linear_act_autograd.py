"""Differentiable forms of the linear_act family.

What is saved follows from the gradients that are asked for; a tensor of which the backward needs
only the shape is not kept alive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import first_order_only
from ._linear_act_batching import two_layers_backward
from ._linear_act_reference import NONE

_ops = torch.ops.fusedcuda


def _bits(*wanted: bool) -> int:
    return sum(want << bit for bit, want in enumerate(wanted))


def _spread(computed: list[Tensor], wanted: tuple[bool, ...]) -> list[Tensor | None]:
    """One place for each of ``wanted``, filled with what was computed for those that are."""
    remaining = iter(computed)
    return [next(remaining) if want else None for want in wanted]


def _given(tensor: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """``tensor``; where it was not saved, as only its shape matters, one element expanded to it."""
    return like.new_empty(()).expand(shape) if tensor is None else tensor


def _columns(*tensors: Tensor | None) -> int:
    """Those of the tensors that were saved; any number will do where none was."""
    return next((t.shape[-1] for t in tensors if t is not None), 0)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], saved: Tensor | None) -> None:
    """For :func:`_linear_gradients`; an output that nobody uses has ``None`` for its gradient."""
    x, weight, bias, _, ctx.activation, ctx.low_precision = inputs
    need_x, need_weight, *_ = ctx.needs_input_grad
    ctx.set_materialize_grads(False)
    ctx.is_batched = weight.dim() == 3
    ctx.shares_bias = ctx.is_batched and bias is not None and bias.dim() == 1
    ctx.save_for_backward(x if need_weight else None, weight if need_x else None, saved)


def _linear_gradients(
    ctx: Any, dy: Tensor, x: Tensor | None, weight: Tensor | None, saved: Tensor | None
) -> list[Tensor | None]:
    """Gradients of x, weight and bias; None for those that nobody asked for."""
    wanted = ctx.needs_input_grad[:3]
    if not any(wanted):
        return [None, None, None]
    in_features = _columns(x, weight)
    batch = dy.shape[:1] if ctx.is_batched else ()
    computed = _ops.linear_act_backward.default(
        dy,
        _given(x, dy, *dy.shape[:-1], in_features),
        _given(weight, dy, *batch, dy.shape[-1], in_features),
        saved,
        ctx.activation,
        _bits(*wanted),
        ctx.low_precision,
    )
    dx, dweight, dbias = _spread(computed, wanted)
    if dbias is not None and ctx.shares_bias:
        dbias = dbias.sum(0)
    return [dx, dweight, dbias]


class LinearAct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        no_residual: None,
        activation: int,
        low_precision: bool,
    ) -> tuple[Tensor, ...]:
        return tuple(_ops.linear_act_forward.default(x, weight, bias, activation, low_precision))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *saved = output
        ctx.mark_non_differentiable(*saved)
        _save_linear(ctx, inputs, saved[0] if saved else None)

    @staticmethod
    @first_order_only("linear_act")
    def backward(ctx: Any, dy: Tensor | None, *saved: Tensor) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        return *_linear_gradients(ctx, dy, *saved), None, None, None


class LinearResidual(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        activation: int,
        low_precision: bool,
    ) -> Tensor:
        return _ops.linear_act.default(x, weight, bias, residual, activation, low_precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save_linear(ctx, inputs, None)

    @staticmethod
    @first_order_only("linear_residual")
    def backward(ctx: Any, dy: Tensor | None, *saved: Tensor) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        dresidual = dy if ctx.needs_input_grad[3] else None
        return *_linear_gradients(ctx, dy, *saved), dresidual, None, None


class MLP(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        activation: int,
        low_precision: bool,
    ) -> tuple[Tensor, ...]:
        h, *saved = _ops.linear_act_forward.default(x, w1, b1, activation, low_precision)
        return _ops.linear_act.default(h, w2, b2, None, NONE, low_precision), h, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, w1, _, w2, _, ctx.activation, ctx.low_precision = inputs
        _, h, *saved = output
        need_x, need_w1, need_b1, need_w2, *_ = ctx.needs_input_grad
        first_layer = need_x or need_w1 or need_b1
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(h, *saved)
        ctx.save_for_backward(
            x if need_w1 else None,
            w1 if need_x else None,
            saved[0] if saved and first_layer else None,
            h if need_w2 else None,
            w2 if first_layer else None,
        )

    @staticmethod
    @first_order_only("mlp")
    def backward(
        ctx: Any,
        dy: Tensor | None,
        x: Tensor | None,
        w1: Tensor | None,
        saved: Tensor | None,
        h: Tensor | None,
        w2: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:5]
        if dy is None or not any(wanted):
            return (None,) * 7
        rows, in_features, hidden = dy.shape[:-1], _columns(x, w1), _columns(h, w2)
        operands = (
            dy,
            _given(x, dy, *rows, in_features),
            _given(w1, dy, hidden, in_features),
            saved,
            _given(h, dy, *rows, hidden),
            _given(w2, dy, dy.shape[-1], hidden),
        )
        options = (ctx.activation, _bits(*wanted), ctx.low_precision)
        if saved is None:  # nothing to chain: no activation, or only one layer to do
            one_layer = _ops.linear_act_backward.default
            computed = two_layers_backward(one_layer, *operands, *options)
        else:
            computed = _ops.mlp_backward.default(*operands, *options)
        return *_spread(computed, wanted), None, None


class TwoLayers:
    """In the place of an operator: what ``mlp`` calls where no gradient is recorded."""

    def __call__(
        self,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        activation: int,
        low_precision: bool,
    ) -> Tensor:
        h = _ops.linear_act.default(x, w1, b1, None, activation, low_precision)
        return _ops.linear_act.default(h, w2, b2, None, NONE, low_precision)

    _op = __call__  # as torch._ops.OpOverload has it
