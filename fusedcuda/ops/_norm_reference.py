"""References of the norm family: what each operator computes, shape functions, checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._operands import check_like, compute_dtype
from ._rows import check_number, check_rows, check_same_device, check_shape, check_vector

# --------------------------------------------------------------------------------------------------
# RMSNorm
# --------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    return rms_norm_forward(x, None, weight, eps, weight_offset)[0]


def rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float
) -> list[Tensor]:
    outputs = rms_norm_forward_fake(x, residual, weight, eps, weight_offset)
    h = _sum(x, residual, outputs)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    outputs[0].copy_(_scaled(h * rstd, weight, weight_offset))
    outputs[-1].copy_(rstd.squeeze(-1))
    return outputs


def rms_norm_backward(
    dy: Tensor,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    weight_offset: float,
    mask: int,
) -> list[Tensor]:
    outputs = rms_norm_backward_fake(dy, h, rstd, weight, dh, weight_offset, mask)
    dtype, rstd = rstd.dtype, rstd.unsqueeze(-1)
    dy, normed = dy.to(dtype), h.to(dtype) * rstd
    scaled = _scaled(dy, weight, weight_offset)
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return _store(outputs, [_plus(dx, dh), _sum_rows(dy * normed)], mask)


# --------------------------------------------------------------------------------------------------
# LayerNorm
# --------------------------------------------------------------------------------------------------


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return layer_norm_forward(x, None, weight, bias, eps)[0]


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> list[Tensor]:
    outputs = layer_norm_forward_fake(x, residual, weight, bias, eps)
    h = _sum(x, residual, outputs)
    mean = h.mean(-1, keepdim=True)
    centred = h - mean
    # Two passes: E[h^2] - E[h]^2 cancels where the mean is large against the spread.
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    outputs[0].copy_(_plus(_scaled(centred * rstd, weight), bias))
    outputs[-2].copy_(mean.squeeze(-1))
    outputs[-1].copy_(rstd.squeeze(-1))
    return outputs


def layer_norm_backward(
    dy: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dh: Tensor | None,
    mask: int,
) -> list[Tensor]:
    outputs = layer_norm_backward_fake(dy, h, mean, rstd, weight, bias, dh, mask)
    dtype, mean, rstd = rstd.dtype, mean.unsqueeze(-1), rstd.unsqueeze(-1)
    dy, normed = dy.to(dtype), (h.to(dtype) - mean) * rstd
    scaled = _scaled(dy, weight)
    along = normed * (scaled * normed).mean(-1, keepdim=True)
    dx = rstd * (scaled - scaled.mean(-1, keepdim=True) - along)
    return _store(outputs, [_plus(dx, dh), _sum_rows(dy * normed), _sum_rows(dy)], mask)


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def _sum(x: Tensor, residual: Tensor | None, outputs: list[Tensor]) -> Tensor:
    """What is normalised, widened: x, or the sum as it is rounded into the second output."""
    dtype = compute_dtype(x.dtype)
    if residual is None:
        return x.to(dtype)
    return outputs[1].copy_(x.to(dtype) + residual.to(dtype)).to(dtype)


def _scaled(values: Tensor, weight: Tensor | None, weight_offset: float = 0.0) -> Tensor:
    return values if weight is None else values * (weight.to(values.dtype) + weight_offset)


def _plus(values: Tensor, summand: Tensor | None) -> Tensor:
    return values if summand is None else values + summand.to(values.dtype)


def _sum_rows(terms: Tensor) -> Tensor:
    # With the number of rows given: -1 is ambiguous where the rows are empty.
    return terms.reshape(terms.shape[:-1].numel(), terms.shape[-1]).sum(0)


def _store(outputs: list[Tensor], gradients: list[Tensor], mask: int) -> list[Tensor]:
    """The gradients whose bit is set in ``mask``, each rounded once."""
    wanted = [gradient for bit, gradient in enumerate(gradients) if mask >> bit & 1]
    return [o.copy_(gradient) for o, gradient in zip(outputs, wanted, strict=True)]


# --------------------------------------------------------------------------------------------------
# Shape functions
# --------------------------------------------------------------------------------------------------


def rms_norm_fake(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    check_rms_norm(x, weight, eps, weight_offset)
    return x.new_empty(x.shape)


def rms_norm_forward_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float
) -> list[Tensor]:
    check_rms_norm(x, weight, eps, weight_offset, residual)
    return _empty_outputs(x, residual, num_statistics=1)


def rms_norm_backward_fake(
    dy: Tensor,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    weight_offset: float,
    mask: int,
) -> list[Tensor]:
    op = "rms_norm_backward"
    _check_backward(op, dy, h, dh, {"rstd": rstd}, {"weight": weight}, mask)
    return _empty_gradients(h, (weight,), mask)


def layer_norm_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    check_layer_norm(x, weight, bias, eps)
    return x.new_empty(x.shape)


def layer_norm_forward_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> list[Tensor]:
    check_layer_norm(x, weight, bias, eps, residual)
    return _empty_outputs(x, residual, num_statistics=2)


def layer_norm_backward_fake(
    dy: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dh: Tensor | None,
    mask: int,
) -> list[Tensor]:
    vectors = {"weight": weight, "bias": bias}
    _check_backward("layer_norm_backward", dy, h, dh, {"mean": mean, "rstd": rstd}, vectors, mask)
    return _empty_gradients(h, (weight, bias), mask)


def _empty_outputs(x: Tensor, residual: Tensor | None, num_statistics: int) -> list[Tensor]:
    rows = [x.new_empty(x.shape) for _ in range(1 if residual is None else 2)]
    dtype = compute_dtype(x.dtype)
    return rows + [x.new_empty(x.shape[:-1], dtype=dtype) for _ in range(num_statistics)]


def _empty_gradients(h: Tensor, vectors: tuple[Tensor | None, ...], mask: int) -> list[Tensor]:
    gradients = [h.new_empty(h.shape)] if mask & 1 else []
    for bit, vector in enumerate(vectors, start=1):
        if vector is not None and mask >> bit & 1:
            gradients.append(vector.new_empty(vector.shape))
    return gradients


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def check_rms_norm(x: Any, weight: Any, eps: Any, weight_offset: Any, residual: Any = None) -> None:
    _check_forward("rms_norm", x, residual, {"weight": weight}, eps)
    check_number("rms_norm", "weight_offset", weight_offset)
    if weight is None and weight_offset != 0:
        raise ValueError(
            f"rms_norm: weight_offset is added to the weight, so it must be 0 without a weight; "
            f"got {weight_offset}"
        )


def check_layer_norm(x: Any, weight: Any, bias: Any, eps: Any, residual: Any = None) -> None:
    _check_forward("layer_norm", x, residual, {"weight": weight, "bias": bias}, eps)


def _check_forward(op: str, x: Any, residual: Any, vectors: dict[str, Any], eps: Any) -> None:
    check_rows(op, "x", x)
    if residual is not None:
        check_rows(op, "residual", residual)
        check_like(op, "residual", residual, (x,))
    for name, vector in vectors.items():
        if vector is not None:
            check_vector(op, name, vector, "x", x)
    check_number(op, "eps", eps)


def _check_backward(
    op: str,
    dy: Tensor,
    h: Tensor,
    dh: Tensor | None,
    statistics: dict[str, Tensor],
    vectors: dict[str, Tensor | None],
    mask: int,
) -> None:
    check_rows(op, "h", h)
    check_like(op, "dy", dy, (h,))
    if dh is not None:
        check_like(op, "dh", dh, (h,))
    for name, values in statistics.items():
        check_shape(op, name, values, h.shape[:-1])
        check_same_device(op, name, values, "h", h)
        if values.dtype != compute_dtype(h.dtype):
            raise TypeError(
                f"{op}: {name} must be a {compute_dtype(h.dtype)} tensor; got {values.dtype}"
            )
    for bit, (name, vector) in enumerate(vectors.items(), start=1):
        if vector is not None:
            check_vector(op, name, vector, "h", h)
        elif mask >> bit & 1:
            raise ValueError(f"{op}: mask asks for the gradient of {name}, which is absent")
