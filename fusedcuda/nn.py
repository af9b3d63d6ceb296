"""Thin modules over the functions: they hold parameters and options, nothing else.

Those that torch has too are subclasses of torch's, with the same parameters: either loads the
other's state dict, and code that asks for ``isinstance(module, torch.nn.LayerNorm)`` still works.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from ._nn_gated_mlp import GatedMLP as GatedMLP
from ._nn_linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from ._nn_lora import LoRALinear as LoRALinear
from ._nn_lora import LoRAMLP as LoRAMLP
from .ops._activations import activation_code
from .ops._operands import compute_dtype
from .ops.cross_entropy import cross_entropy
from .ops.linear_act import linear_act, mlp
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


class LinearAct(nn.Module):
    """``act(x @ weight.T + bias)``, by :func:`fusedcuda.linear_act`.

    Parameters, their names and their start values are those of ``torch.nn.Linear``: either loads
    the other's state dict. (It is no subclass, so that code which replaces linear layers does not
    drop the activation.)

    Tensor cores read rows that begin on a 16-byte boundary; at ``in_features=479`` a product in 16
    bits takes four times as long as at 480, so the op copies such a weight, and such an ``x``, to
    padded rows first. ``pad_rows=True`` saves the copy of the weight: its rows then lie a multiple
    of 8 elements apart, for good. The parameter is a view of a wider matrix, with the shape and the
    values that it would have anyway, which moving, casting, copying and loading the module keep.
    But it is not contiguous, which optimizers with ``fused=True`` (those on the CPU compute
    nonsense), safetensors and ``parameters_to_vector`` do not expect, and ``foreach`` optimizers
    are slower for all parameters. Rows of ``x`` are best padded where ``x`` is made.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        pad_rows: bool = False,
    ) -> None:
        super().__init__()
        activation_code("LinearAct", activation)
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        self.pad_rows = pad_rows
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self._pad()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return linear_act(x, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"activation={self.activation!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearAct:
        super()._apply(fn, recurse)
        self._pad()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # in which a copied parameter is contiguous
        self._pad()

    def _pad(self) -> None:
        """Give the rows of the weight their pitch, if it is to have one and has lost it."""
        weight = self._parameters.get("weight")
        if not self.pad_rows or type(weight) is not nn.Parameter:
            return
        columns = weight.shape[-1]
        padded = (columns + 7) // 8 * 8
        if columns == padded or weight.stride(0) % 8 == 0:
            return
        wide = weight.new_zeros(weight.shape[0], padded)[:, :columns]
        # The parameter stays the same object, for optimizers and tied layers.
        weight.data = wide.copy_(weight.detach())


class MLP(nn.Module):
    """``fc2(act(fc1(x)))``, by :func:`fusedcuda.mlp`.

    ``fc1`` and ``fc2`` are :class:`LinearAct` modules, ``fc1`` with the activation. They hold the
    parameters, and run as one: hooks of theirs are not called. ``out_features=None`` stands for
    ``in_features``; ``pad_rows`` as in :class:`LinearAct`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        activation: str = "gelu_tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        pad_rows: bool = False,
    ) -> None:
        super().__init__()
        activation_code("MLP", activation)
        if out_features is None:
            out_features = in_features

        def layer(columns: int, rows: int, activation: str) -> LinearAct:
            return LinearAct(columns, rows, bias, activation, device, dtype, pad_rows=pad_rows)

        self.fc1 = layer(in_features, hidden_features, activation)
        self.fc2 = layer(hidden_features, out_features, "none")

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        return mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, fc1.activation)


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
