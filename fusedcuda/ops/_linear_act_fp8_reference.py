"""Reference of linear_act_fp8, its shape function and its checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._activations import apply_activation
from ._linear_act_reference import check_dtype, output_shape, product
from ._rows import check_same_device, check_shape

FP8 = torch.float8_e4m3fn


def linear_act_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_scale: Tensor | None,
    activation: int,
    out_dtype: torch.dtype | None,
) -> Tensor:
    y = linear_act_fp8_fake(
        x, weight, bias, x_scale, weight_scale, out_scale, activation, out_dtype
    )
    z = product(x, weight.mT) * (x_scale.view(()) * weight_scale.view(()))
    if bias is not None:
        z = z + bias.float()
    value = apply_activation(z, activation)
    if out_scale is not None:
        largest = torch.finfo(FP8).max
        value = (value / out_scale.view(())).clamp(-largest, largest)
    return y.copy_(value)


def linear_act_fp8_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_scale: Tensor | None,
    activation: int,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out_dtype = out_dtype or torch.bfloat16
    check_fp8(x, weight, bias, x_scale, weight_scale, out_scale, out_dtype)
    return x.new_empty(output_shape(x, weight), dtype=out_dtype)


def check_fp8(
    x: Any,
    weight: Any,
    bias: Any,
    x_scale: Any,
    weight_scale: Any,
    out_scale: Any,
    out_dtype: Any,
) -> None:
    op = "linear_act_fp8"
    for name, tensor, dtype in (
        ("x", x, FP8),
        ("weight", weight, FP8),
        ("bias", bias, torch.bfloat16),
        ("x_scale", x_scale, torch.float32),
        ("weight_scale", weight_scale, torch.float32),
        ("out_scale", out_scale, torch.float32),
    ):
        if tensor is None and name in ("bias", "out_scale"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor; got {type(tensor).__name__}")
        check_dtype(op, name, tensor, dtype)
        check_same_device(op, name, tensor, "x", x)
        if name.endswith("_scale") and (tensor.dim() > 1 or tensor.numel() != 1):
            raise ValueError(
                f"{op}: {name} must have one element, shape () or (1,); got {tuple(tensor.shape)}"
            )
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: x and weight must have shapes (..., K) and (N, K); got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if bias is not None:
        check_shape(op, "bias", bias, weight.shape[:1])
    if out_dtype not in (torch.bfloat16, FP8):
        raise TypeError(f"{op}: out_dtype must be torch.bfloat16 or {FP8}; got {out_dtype}")
    if (out_scale is not None) != (out_dtype == FP8):
        raise ValueError(
            f"{op}: out_scale goes with out_dtype={FP8}, which needs one; got "
            f"{'none' if out_scale is None else 'one'} with out_dtype={out_dtype}"
        )
