"""Differentiable forms of the dlrm family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import first_order_only

_ops = torch.ops.fusedcuda
_OF_DENSE, _OF_ROWS = 1, 2  # bits of the mask of embedding_interaction_backward


class DotInteraction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(dense: Tensor, embeddings: Tensor, upper: bool, width: int) -> Tensor:
        output: Tensor = _ops.dot_interaction.default(dense, embeddings, upper, width)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dense, embeddings, ctx.upper, _ = inputs
        ctx.save_for_backward(dense, embeddings)

    @staticmethod
    @first_order_only("dot_interaction")
    def backward(
        ctx: Any, grad: Tensor, dense: Tensor, embeddings: Tensor
    ) -> tuple[Tensor | None, ...]:
        backward = _ops.dot_interaction_backward.default
        return *backward(grad, dense, embeddings, ctx.upper), None, None


class EmbeddingInteraction(torch.autograd.Function):
    @staticmethod
    def forward(dense: Tensor, weight: Tensor, indices: Tensor, upper: bool, width: int) -> Tensor:
        output: Tensor = _ops.embedding_interaction.default(dense, weight, indices, upper, width)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dense, weight, indices, ctx.upper, _ = inputs
        ctx.save_for_backward(dense, weight, indices)

    @staticmethod
    @first_order_only("embedding_interaction")
    def backward(
        ctx: Any, grad: Tensor, dense: Tensor, weight: Tensor, indices: Tensor
    ) -> tuple[Tensor | None, ...]:
        of_dense, of_weight = ctx.needs_input_grad[:2]
        mask = of_dense * _OF_DENSE | of_weight * _OF_ROWS
        backward = _ops.embedding_interaction_backward.default
        computed = backward(grad, dense, weight, indices, ctx.upper, mask)
        dense_grad = computed[0] if of_dense else None
        weight_grad = None
        if of_weight:
            sum_up = _ops.embedding_dense_backward.default
            weight_grad = sum_up(computed[-1], indices, weight.shape[0])
        return dense_grad, weight_grad, None, None, None


class LinearSigmoidBce(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(_ops.linear_sigmoid_bce_forward.default(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        if ctx.needs_input_grad[3]:
            raise RuntimeError(
                "linear_sigmoid_bce: target requires a gradient, but there is none for it; "
                "pass target.detach()"
            )
        x, weight, _, _, _, ctx.reduction = inputs
        _, logits, dlogits = output
        ctx.mark_non_differentiable(logits, dlogits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, dlogits)

    @staticmethod
    @first_order_only("linear_sigmoid_bce")
    def backward(ctx: Any, grad: Tensor | None, *saved: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        if grad is None or not any(wanted):  # the loss is not used further
            return (None,) * 6
        mask = sum(want << bit for bit, want in enumerate(wanted))
        backward = _ops.linear_sigmoid_bce_backward.default
        computed = iter(backward(grad, *saved, mask, ctx.reduction))
        return *(next(computed) if want else None for want in wanted), None, None, None
