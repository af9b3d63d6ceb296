"""Peers of the lora family: how others put the branch into a layer.

They take x, lora_a, lora_b and the weight, in this order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

Tensor = torch.Tensor


class _Addmm(torch.autograd.Function):
    """The products of Unsloth's and Axolotl's layers: the branch is added by one more, in place.

    As in Axolotl's since 2026, the gradient of t is made once and nothing saved is written to; t
    is made again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lora_a: Tensor, lora_b: Tensor, weight: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, lora_a, lora_b, weight)
        ctx.scale = scale
        return F.linear(x, weight).addmm_(x @ lora_a.T, lora_b.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_a, lora_b, weight = ctx.saved_tensors
        dt = dy @ lora_b
        dx = (dy @ weight).addmm_(dt, lora_a, alpha=ctx.scale)
        dlora_a = (dt.T @ x).mul_(ctx.scale)
        dlora_b = (dy.T @ (x @ lora_a.T)).mul_(ctx.scale)
        return dx, dlora_a, dlora_b, None, None


def addmm_layer(*tensors: Tensor, scale: float) -> Tensor:
    return _Addmm.apply(*tensors, scale)


def extended_layer(x: Tensor, lora_a: Tensor, extended: Tensor) -> Tensor:
    """One product of [x | t] and `extended`, [weight | scale * lora_b | 0]; forward only."""
    (m, k), rank = x.shape, lora_a.shape[0]
    rows = x.new_empty(m, extended.shape[1])
    rows[:, :k] = x
    rows[:, k + rank :] = 0
    torch.mm(x, lora_a.T, out=rows[:, k : k + rank])
    return rows @ extended.T


def peft_layer(
    x: Tensor, lora_a: Tensor, lora_b: Tensor, weight: Tensor, *, scale: float, dropout_p: float
) -> Tensor:
    """The installed package's layer, called with the tensors of the case as its parameters."""
    key = (tuple(weight.shape), weight.dtype, lora_a.shape[0], dropout_p)
    if key not in _peft_layers:
        _peft_layers[key] = _new_peft_layer(weight, lora_a.shape[0], scale, dropout_p)
    parameters = {
        "base_layer.weight": weight,
        "lora_A.default.weight": lora_a,
        "lora_B.default.weight": lora_b,
    }
    return torch.func.functional_call(_peft_layers[key], parameters, (x,))


def _new_peft_layer(weight: Tensor, rank: int, scale: float, dropout_p: float) -> torch.nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    n, k = weight.shape
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, dtype=weight.dtype))
        config = LoraConfig(
            r=rank, lora_alpha=scale * rank, lora_dropout=dropout_p, target_modules=["0"]
        )
        return inject_adapter_in_model(config, model)[0].train()


_peft_layers: dict[tuple[Any, ...], torch.nn.Module] = {}
