"""References of the linear_act family: what each operator computes, shape functions, checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._activations import ACTIVATIONS, activation_gradient, apply_activation
from ._operands import compute_dtype
from ._rows import check_floating, check_rows, check_same_device, check_shape

NONE, RELU = ACTIVATIONS["none"], ACTIVATIONS["relu"]

# Bits of the mask of gradients.
DX, DWEIGHT, DBIAS = (1 << bit for bit in range(3))

# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------

# How a product is reduced (low_precision) is the CUDA kernels' concern.


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    low_precision: bool,
) -> Tensor:
    y = linear_act_fake(x, weight, bias, residual, activation, low_precision)
    z = _pre_activation(x, weight, bias)
    if residual is not None:
        z = z + residual.to(z.dtype)
    return y.copy_(apply_activation(z, activation))


def linear_act_extended(
    x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, up: Tensor, activation: int
) -> list[Tensor]:
    outputs = linear_act_extended_fake(x, weight, bias, t, up, activation)
    z = _pre_activation(x, weight, bias)
    z = z + (t.to(z.dtype) @ up.to(z.dtype).T).view(z.shape)
    outputs[0].copy_(apply_activation(z, activation))
    return outputs


def linear_act_product_(
    output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, adds: bool
) -> None:
    linear_act_product_fake(output, a, b, bias, adds)
    z = _pre_activation(a, b, bias)
    output.copy_(z + output.to(z.dtype) if adds else z)


def linear_act_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: int, low_precision: bool
) -> list[Tensor]:
    outputs = linear_act_forward_fake(x, weight, bias, activation, low_precision)
    z = _pre_activation(x, weight, bias)
    outputs[0].copy_(apply_activation(z, activation))
    if activation == RELU:
        # As torch's, the gradient passes where z is NaN.
        outputs[1].copy_(_pack(~(z <= 0).reshape(outputs[1].shape[0], z.shape[-1])))
    elif activation != NONE:
        slope = activation_gradient(torch.ones_like(z), z, activation)
        outputs[1].copy_(slope if saves_derivative(x.dtype) else z)
    return outputs


def linear_act_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    activation: int,
    mask: int,
    low_precision: bool,
) -> list[Tensor]:
    outputs = linear_act_backward_fake(dy, x, weight, saved, activation, mask, low_precision)
    batched = weight.dim() == 3
    grad = _matrix(dy, batched)
    dz = _activation_gradient(grad.to(compute_dtype(dy.dtype)), saved, activation).to(dy.dtype)
    _store_gradients(outputs, dz, _matrix(x, batched), weight, mask)
    return outputs


def mlp_backward(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    saved: Tensor,
    h: Tensor,
    w2: Tensor,
    activation: int,
    mask: int,
    low_precision: bool,
) -> list[Tensor]:
    outputs = mlp_backward_fake(dy, x, w1, saved, h, w2, activation, mask, low_precision)
    grad = _matrix(dy, batched=False)
    dh = product(grad, w2)  # stays in float32: the second layer's gradient and act' are one step
    dz = _activation_gradient(dh, saved, activation).to(dy.dtype)
    lower = (mask & 0b111).bit_count()
    _store_gradients(outputs[:lower], dz, _matrix(x, batched=False), w1, mask & 0b111)
    _store_gradients(outputs[lower:], grad, _matrix(h, batched=False), w2, mask >> 2 & 0b110)
    return outputs


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def mask_row_bytes(n: int) -> int:
    """Bytes of a row of the bit mask that a ReLU of ``n`` columns saves: rows start at 128 bits."""
    return (n + 127) // 128 * 16


def saves_derivative(dtype: torch.dtype) -> bool:
    """Whether the derivative of an activation is saved rather than where it is to be taken.

    In 16 bits: a product of the backward then multiplies by it on the fly (gemm_scale.cuh).
    """
    return dtype in (torch.float16, torch.bfloat16)


def _matrix(rows: Tensor, batched: bool) -> Tensor:
    """The leading dimensions as one; of a batch, those behind the first."""
    batch = rows.shape[:1] if batched else ()
    return rows.reshape(*batch, math.prod(rows.shape[len(batch) : -1]), rows.shape[-1])


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the precision that the kernels add up in, whatever autocast says."""
    dtype = compute_dtype(b.dtype)
    with torch.autocast(a.device.type, enabled=False):
        return torch.matmul(a.to(dtype), b.to(dtype))


def _pre_activation(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, not rounded, in the shape of the output."""
    z = product(_matrix(x, weight.dim() == 3), weight.mT)
    if bias is not None:
        z = z + (bias.unsqueeze(-2) if bias.dim() == 2 else bias).to(z.dtype)
    return z.reshape(output_shape(x, weight))


def _activation_gradient(dy: Tensor, saved: Tensor | None, activation: int) -> Tensor:
    """``dy * act'(z)`` in the precision and the shape of ``dy``, a matrix or a batch of them."""
    if saved is None:
        return dy
    if activation == RELU:
        return torch.where(_unpack(saved, dy.shape[-1]).reshape(dy.shape), dy, 0.0)
    values = saved.reshape(dy.shape).to(dy.dtype)
    return (
        dy * values
        if saves_derivative(saved.dtype)
        else activation_gradient(dy, values, activation)
    )


def _store_gradients(
    outputs: Sequence[Tensor], dz: Tensor, x: Tensor, weight: Tensor, mask: int
) -> None:
    """Of x, weight and bias, from the rounded dz; what no gradient needs is not read."""
    remaining = iter(outputs)
    if mask & DX:
        output = next(remaining)
        output.copy_(product(dz, weight).reshape(output.shape))
    if mask & DWEIGHT:
        next(remaining).copy_(product(dz.mT, x))
    if mask & DBIAS:
        next(remaining).copy_(dz.to(compute_dtype(dz.dtype)).sum(-2))


def _pack(bits: Tensor) -> Tensor:
    """A row of booleans as bytes: bit ``n % 8`` of byte ``n // 8``."""
    rows, columns = bits.shape
    wide = bits.new_zeros(rows, mask_row_bytes(columns), 8, dtype=torch.uint8)
    wide.flatten(1)[:, :columns] = bits
    return (wide << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _unpack(mask: Tensor, columns: int) -> Tensor:
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1)[:, :columns].bool()


# --------------------------------------------------------------------------------------------------
# Shape functions
# --------------------------------------------------------------------------------------------------


def output_shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], weight.shape[-2])


def linear_act_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    low_precision: bool,
) -> Tensor:
    check_linear("linear_act", x, weight, bias, residual)
    return x.new_empty(output_shape(x, weight))


def linear_act_extended_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, up: Tensor, activation: int
) -> list[Tensor]:
    check_linear("linear_act_extended", x, weight, bias)
    check_linear("linear_act_extended", t, up, None)
    return [x.new_empty(output_shape(x, weight))]


def linear_act_product_fake(
    output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, adds: bool
) -> None:
    op = "linear_act_product_"
    check_linear(op, a, b, bias)
    check_same_device(op, "output", output, "a", a)
    check_shape(op, "output", output, output_shape(a, b))
    in_float32 = a.dtype.itemsize == 2 and output.dtype == torch.float32
    if output.dtype != a.dtype and not in_float32:
        raise TypeError(
            f"{op}: output must be {a.dtype} as a is, or float32 where that has 16 bits; "
            f"got {output.dtype}"
        )
    if bias is not None and (adds or in_float32):
        raise ValueError(f"{op}: bias goes with an output of the dtype of a that is not added to")


def linear_act_forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: int, low_precision: bool
) -> list[Tensor]:
    check_linear("linear_act_forward", x, weight, bias)
    y = x.new_empty(output_shape(x, weight))
    if activation == NONE:
        return [y]
    if activation != RELU:
        return [y, x.new_empty(y.shape)]
    return [y, x.new_empty(_mask_shape(y), dtype=torch.uint8)]


def linear_act_backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    activation: int,
    mask: int,
    low_precision: bool,
) -> list[Tensor]:
    op = "linear_act_backward"
    check_linear(op, x, weight, None)
    check_operand(op, "dy", dy, x)
    check_shape(op, "dy", dy, output_shape(x, weight))
    _check_saved(op, saved, dy, activation)
    return _empty_gradients(x, weight, mask)


def mlp_backward_fake(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    saved: Tensor,
    h: Tensor,
    w2: Tensor,
    activation: int,
    mask: int,
    low_precision: bool,
) -> list[Tensor]:
    op = "mlp_backward"
    check_two_layers(op, x, w1, None, w2, None)
    check_operand(op, "h", h, x)
    check_shape(op, "h", h, output_shape(x, w1))
    check_operand(op, "dy", dy, x)
    check_shape(op, "dy", dy, output_shape(h, w2))
    _check_saved(op, saved, h, activation)
    return _empty_gradients(x, w1, mask & 0b111) + _empty_gradients(h, w2, mask >> 2 & 0b110)


def _empty_gradients(x: Tensor, weight: Tensor, mask: int) -> list[Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:-1])
    return [x.new_empty(shape) for bit, shape in enumerate(shapes) if mask >> bit & 1]


def _mask_shape(y: Tensor) -> tuple[int, int]:
    return math.prod(y.shape[:-1]), mask_row_bytes(y.shape[-1])


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def check_linear(op: str, x: Any, weight: Any, bias: Any, residual: Any = None) -> None:
    check_rows(op, "x", x)
    check_operand(op, "weight", weight, x)
    in_features = x.shape[-1]
    if weight.dim() not in (2, 3) or weight.shape[-1] != in_features:
        raise ValueError(
            f"{op}: weight must have shape (N, {in_features}) or (B, N, {in_features}) to go with "
            f"x of shape {tuple(x.shape)}; got {tuple(weight.shape)}"
        )
    batch = weight.shape[:-2]
    if batch and (x.dim() < 2 or x.shape[:1] != batch):
        raise ValueError(
            f"{op}: x must have shape ({batch[0]}, ..., {in_features}) to go with a batch of "
            f"weights of shape {tuple(weight.shape)}; got {tuple(x.shape)}"
        )
    if bias is not None:
        _check_bias(op, "bias", bias, x, weight)
    if residual is not None:
        check_operand(op, "residual", residual, x)
        check_shape(op, "residual", residual, output_shape(x, weight))


def check_options(op: str, activation: int, allow_low_precision_reduction: Any) -> None:
    if not isinstance(allow_low_precision_reduction, bool):
        raise TypeError(
            f"{op}: allow_low_precision_reduction must be a bool; "
            f"got {type(allow_low_precision_reduction).__name__}"
        )


def check_two_layers(op: str, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> None:
    check_rows(op, "x", x)
    in_features = x.shape[-1]
    for layer, (weight, bias) in enumerate(((w1, b1), (w2, b2)), start=1):
        check_operand(op, f"w{layer}", weight, x)
        if weight.dim() != 2 or weight.shape[1] != in_features:
            before = f"x of shape {tuple(x.shape)}" if layer == 1 else f"w1 {tuple(w1.shape)}"
            raise ValueError(
                f"{op}: w{layer} must have shape (N, {in_features}) to go with {before}; "
                f"got {tuple(weight.shape)}"
            )
        if bias is not None:
            _check_bias(op, f"b{layer}", bias, x, weight)
        in_features = weight.shape[0]


def check_operand(op: str, name: str, tensor: Any, x: Tensor) -> None:
    """A floating tensor of the dtype and on the device of ``x``."""
    check_floating(op, name, tensor)
    check_same_device(op, name, tensor, "x", x)
    if tensor.dtype != x.dtype:
        raise TypeError(f"{op}: {name} must be a {x.dtype} tensor as x is; got {tensor.dtype}")


def check_dtype(op: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be a {dtype} tensor; got {tensor.dtype}")


def _check_bias(op: str, name: str, bias: Any, x: Tensor, weight: Tensor) -> None:
    check_operand(op, name, bias, x)
    *batch, out_features, _ = weight.shape
    if bias.shape != weight.shape[-2:-1] and bias.shape != weight.shape[:-1]:
        of_batch = f" or {(*batch, out_features)}" if batch else ""
        raise ValueError(
            f"{op}: {name} must have shape ({out_features},){of_batch}; got {tuple(bias.shape)}"
        )


def _check_saved(op: str, saved: Tensor | None, y: Tensor, activation: int) -> None:
    """What the forward kept of z, for an output of the shape and dtype of ``y``."""
    if (saved is None) != (activation == NONE):
        what = "no tensor without an activation" if activation == NONE else "a tensor"
        got = "None" if saved is None else "one"
        raise ValueError(f"{op}: saved must be {what}; got {got}")
    if saved is None:
        return
    check_same_device(op, "saved", saved, "x", y)
    is_mask = activation == RELU
    check_dtype(op, "saved", saved, torch.uint8 if is_mask else y.dtype)
    check_shape(op, "saved", saved, _mask_shape(y) if is_mask else y.shape)
