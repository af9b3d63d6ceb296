"""Thin modules over the functions: they hold parameters and the activation's name, nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .ops._activations import activation_code
from .ops.pointwise import act_mul, act_mul_packed, bias_act


class BiasAct(nn.Module):
    """``act(x + bias)`` over the last dimension; the tail of a bias-free ``torch.nn.Linear``.

    Parameter ``bias`` of shape ``[num_features]``, zeros at the start; named as in
    ``torch.nn.Linear``, so its value can be loaded from one. Input and output ``[...,
    num_features]``.
    """

    def __init__(
        self,
        num_features: int,
        activation: str = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_code("BiasAct", activation)
        self.num_features = num_features
        self.activation = activation
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return bias_act(x, self.bias, self.activation)

    def extra_repr(self) -> str:
        return f"{self.num_features}, activation={self.activation!r}"


class ActMul(nn.Module):
    """``act(gate) * up`` of two tensors, or of the halves of one packed tensor ``[..., 2d]``."""

    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        activation_code("ActMul", activation)
        self.activation = activation

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        if up is None:
            return act_mul_packed(gate, self.activation)
        return act_mul(gate, up, self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
