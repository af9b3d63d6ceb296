"""Thin modules over the functions: they hold parameters and options, nothing else.

Those that torch has too are subclasses of torch's, with the same parameters: either loads the
other's state dict, and code that asks for ``isinstance(module, torch.nn.LayerNorm)`` still works.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor, nn

from .ops._activations import activation_code
from .ops._operands import compute_dtype
from .ops.cross_entropy import cross_entropy
from .ops.norm import layer_norm, rms_norm
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


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension, by :func:`fusedcuda.rms_norm`.

    ``normalized_shape`` is the size of that dimension, as a number or a sequence of one; more than
    one is a ``ValueError``. ``eps=None`` means what it means to torch, ``torch.finfo(dtype).eps``
    of the dtype that is computed in: float64 for float64 inputs, float32 for all others.
    ``weight_offset`` is added to the weight, which starts at ``1 - weight_offset``.

    Called with ``residual`` it returns ``(y, x + residual)``.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        if weight_offset != 0 and not elementwise_affine:
            raise ValueError(
                "RMSNorm: weight_offset is added to the weight, so it must be 0 with "
                f"elementwise_affine=False; got {weight_offset}"
            )
        self.weight_offset = weight_offset  # before torch's constructor, which resets the weight
        super().__init__(
            _last_dimension("RMSNorm", normalized_shape), eps, elementwise_affine, device, dtype
        )

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1 - self.weight_offset)

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        eps = self.eps
        if eps is None:
            eps = torch.finfo(compute_dtype(x.dtype)).eps
        return rms_norm(x, self.weight, eps, residual=residual, weight_offset=self.weight_offset)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset != 0 else ""
        return super().extra_repr() + offset


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, by :func:`fusedcuda.layer_norm`.

    ``normalized_shape`` is the size of that dimension, as a number or a sequence of one; more than
    one is a ``ValueError``. Called with ``residual`` it returns ``(y, x + residual)``.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            _last_dimension("LayerNorm", normalized_shape),
            eps,
            elementwise_affine,
            bias,
            device,
            dtype,
        )

    @overload
    def forward(self, input: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, input: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return layer_norm(input, self.weight, self.bias, self.eps, residual=residual)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` of logits ``(..., V)``, by :func:`fusedcuda.cross_entropy`.

    The options of torch's module without the deprecated ``size_average`` and ``reduce``, and those
    of the function. The classes are the last dimension of the logits, whatever their rank; torch's
    module takes the second one.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self.z_loss = z_loss
        self.softcap = softcap
        self.inplace_backward = inplace_backward

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            inplace_backward=self.inplace_backward,
        )


def _last_dimension(module: str, normalized_shape: int | Sequence[int]) -> int:
    """``normalized_shape`` as the one number it has to be."""
    if not isinstance(normalized_shape, Sequence):
        return operator.index(normalized_shape)
    if len(normalized_shape) != 1:
        raise ValueError(
            f"{module}: normalized_shape must be the size of the last dimension, which is all that "
            f"is normalised over; got {tuple(normalized_shape)}"
        )
    return normalized_shape[0]
