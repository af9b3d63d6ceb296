"""References of the lora family: the CPU kernels, shape functions, checks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._activations import ACTIVATIONS, activation_gradient, apply_activation
from ._linear_act_reference import (
    check_operand,
    linear_act_extended,
    linear_act_extended_fake,
    product,
)
from ._lora_dropout import keep_factor, keep_mask
from ._operands import compute_dtype
from ._rows import (
    as_matrix,
    check_floating,
    check_number,
    check_rows,
    check_same_device,
    check_shape,
)

NONE, RELU = ACTIVATIONS["none"], ACTIVATIONS["relu"]

MAX_RANK = 512
# Rows of t are so many elements apart, or a multiple: 16 bytes of a 16-bit type.
PITCH = 8

# Bits of the mask of gradients.
DX, DWEIGHT, DBIAS, DA, DB = (1 << bit for bit in range(5))

# --------------------------------------------------------------------------------------------------
# Layers
# --------------------------------------------------------------------------------------------------


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    activation: int,
    scale: float,
    dropout_p: float,
) -> Tensor:
    return lora_linear_forward(
        x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p
    ).pop(0)


def lora_linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    activation: int,
    scale: float,
    dropout_p: float,
) -> list[Tensor]:
    outputs = lora_linear_forward_fake(
        x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p
    )
    rows = as_matrix(x)
    t = outputs[1].copy_(lora_down(rows, lora_a, seed, scale, dropout_p))
    z = product(rows, weight.mT)
    if bias is not None:
        z = z + bias.to(z.dtype)
    z = z + product(t[:, : lora_a.shape[0]], lora_b.to(x.dtype).mT)
    z = z.reshape(outputs[0].shape)
    outputs[0].copy_(apply_activation(z, activation))
    if saves_z(activation):
        outputs[2].copy_(z)
    return outputs


def lora_linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    t: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    activation: int,
    scale: float,
    dropout_p: float,
    mask: int,
) -> list[Tensor]:
    outputs = lora_linear_backward_fake(
        dy, x, weight, saved, t, lora_a, lora_b, seed, activation, scale, dropout_p, mask
    )
    dz = dy
    if saved is not None:
        wide = compute_dtype(dy.dtype)
        dz = activation_gradient(dy.to(wide), saved.to(wide), activation).to(dy.dtype)
    dz, rows, rank = as_matrix(dz), as_matrix(x), lora_a.shape[0]
    dt = lora_down(dz, lora_b.mT, None, scale, 0.0)
    remaining = iter(outputs)
    if mask & DX:
        branch = product(dt[:, :rank], lora_a.to(x.dtype))
        if seed is not None:
            branch = lora_dropout(branch, seed, dropout_p)  # of float32: not rounded
        output = next(remaining)
        output.copy_((product(dz, weight) + branch).reshape(output.shape))
    if mask & DWEIGHT:
        next(remaining).copy_(product(dz.mT, rows))
    if mask & DBIAS:
        next(remaining).copy_(dz.to(compute_dtype(dz.dtype)).sum(0))
    if mask & DA:
        next(remaining).copy_(_transposed_product(dt, rows, rank, seed, dropout_p))
    if mask & DB:
        next(remaining).copy_(_transposed_product(t, dz, rank, None, 0.0).mT)
    return outputs


# --------------------------------------------------------------------------------------------------
# Skinny products
# --------------------------------------------------------------------------------------------------


def lora_down(
    x: Tensor, factor: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    t = lora_down_fake(x, factor, seed, scale, dropout_p)
    if seed is not None:
        x = torch.where(keep_mask(seed, x.shape, dropout_p), x, 0.0)
        scale = scale * keep_factor(dropout_p)
    rank = factor.shape[0]
    t[:, :rank] = product(x, factor.to(x.dtype).mT) * scale
    t[:, rank:] = 0
    return t


def lora_up(
    t: Tensor,
    x: Tensor,
    seed: Tensor | None,
    rank: int,
    dropout_p: float,
    transposed: bool,
    in_float32: bool,
) -> Tensor:
    output = lora_up_fake(t, x, seed, rank, dropout_p, transposed, in_float32)
    value = _transposed_product(t, x, rank, seed, dropout_p)
    return output.copy_(value.mT if transposed else value)


def lora_dropout(x: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    output = lora_dropout_fake(x, seed, dropout_p)
    value = x.to(compute_dtype(x.dtype)) * keep_factor(dropout_p)
    return output.copy_(torch.where(keep_mask(seed, x.shape, dropout_p), value, 0.0))


def lora_branch(t: Tensor, factor: Tensor, seed: Tensor, dropout_p: float) -> list[Tensor]:
    (output,) = lora_branch_fake(t, factor, seed, dropout_p)
    value = product(t, factor) * keep_factor(dropout_p)
    return [output.copy_(torch.where(keep_mask(seed, output.shape, dropout_p), value, 0.0))]


def lora_pass(
    x: Tensor,
    factor: Tensor | None,
    t: Tensor | None,
    seed: Tensor | None,
    rank: int,
    scale: float,
    dropout_p: float,
    transposed: bool,
    in_float32: bool,
) -> list[Tensor]:
    lora_pass_fake(x, factor, t, seed, rank, scale, dropout_p, transposed, in_float32)
    outputs = []
    if factor is not None:
        outputs.append(lora_down(x, factor[:rank], seed, scale, dropout_p))
    if t is not None:
        outputs.append(lora_up(t, x, seed, rank, dropout_p, transposed, in_float32))
    return outputs


def _transposed_product(
    t: Tensor, x: Tensor, rank: int, seed: Tensor | None, dropout_p: float
) -> Tensor:
    """``t.T @ dropout(x)`` of the first ``rank`` columns of ``t``, not rounded."""
    factor = 1.0
    if seed is not None:
        x = torch.where(keep_mask(seed, x.shape, dropout_p), x, 0.0)
        factor = keep_factor(dropout_p)
    return product(t[:, :rank].mT, x) * factor


def lora_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
) -> list[Tensor]:
    return lora_decode(x, weight, bias, down, up, scale, NONE)


def lora_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    activation: int,
) -> list[Tensor]:
    t = lora_down(x, down, None, scale, 0.0)
    return [*linear_act_extended(x, weight, bias, t, up, activation), t]


def pitch_of(rank: int) -> int:
    """Columns of t: the rank, and zeros behind it."""
    return -(-rank // PITCH) * PITCH


# --------------------------------------------------------------------------------------------------
# Shape functions
# --------------------------------------------------------------------------------------------------


def lora_linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    activation: int,
    scale: float,
    dropout_p: float,
) -> Tensor:
    check_lora("lora_linear", x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def lora_linear_forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    activation: int,
    scale: float,
    dropout_p: float,
) -> list[Tensor]:
    y = lora_linear_fake(x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p)
    t = x.new_empty(math.prod(x.shape[:-1]), pitch_of(lora_a.shape[0]))
    return [y, t, x.new_empty(y.shape)] if saves_z(activation) else [y, t]


def lora_linear_backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    t: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    activation: int,
    scale: float,
    dropout_p: float,
    mask: int,
) -> list[Tensor]:
    op = "lora_linear_backward"
    check_lora(op, x, weight, None, lora_a, lora_b, seed, activation, scale, dropout_p)
    output_shape = (*x.shape[:-1], weight.shape[0])
    for name, tensor in (("dy", dy), ("saved", saved)):
        if tensor is not None:
            check_operand(op, name, tensor, x)
            check_shape(op, name, tensor, output_shape)
    if (saved is None) != (activation == NONE):
        raise ValueError(f"{op}: saved must be given with an activation, and only with one")
    check_operand(op, "t", t, x)
    check_shape(op, "t", t, (math.prod(x.shape[:-1]), pitch_of(lora_a.shape[0])))
    outputs = (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[:1]),
        lora_a.new_empty(lora_a.shape),
        lora_b.new_empty(lora_b.shape),
    )
    return [output for bit, output in enumerate(outputs) if mask >> bit & 1]


def lora_down_fake(
    x: Tensor, factor: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    op = "lora_down"
    check_matrix(op, "x", x)
    check_adapter(op, "factor", factor, x)
    _check_rank(op, "factor", factor.shape[0])
    check_shape(op, "factor", factor, (factor.shape[0], x.shape[1]))
    _check_seed(op, seed, x)
    return x.new_empty(x.shape[0], pitch_of(factor.shape[0]))


def lora_up_fake(
    t: Tensor,
    x: Tensor,
    seed: Tensor | None,
    rank: int,
    dropout_p: float,
    transposed: bool,
    in_float32: bool,
) -> Tensor:
    op = "lora_up"
    check_matrix(op, "x", x)
    check_operand(op, "t", t, x)
    _check_rank(op, "t", rank)
    check_shape(op, "t", t, (x.shape[0], pitch_of(rank)))
    _check_seed(op, seed, x)
    shape = (x.shape[1], rank) if transposed else (rank, x.shape[1])
    return x.new_empty(shape, dtype=torch.float32 if in_float32 else x.dtype)


def lora_pass_fake(
    x: Tensor,
    factor: Tensor | None,
    t: Tensor | None,
    seed: Tensor | None,
    rank: int,
    scale: float,
    dropout_p: float,
    transposed: bool,
    in_float32: bool,
) -> list[Tensor]:
    op = "lora_pass"
    check_matrix(op, "x", x)
    _check_rank(op, "factor", rank)
    if factor is None and t is None:
        raise ValueError(f"{op}: factor or t must be given")
    _check_seed(op, seed, x)
    outputs = []
    if factor is not None:
        check_operand(op, "factor", factor, x)
        check_shape(op, "factor", factor, (rank if t is None else pitch_of(rank), x.shape[1]))
        outputs.append(x.new_empty(x.shape[0], pitch_of(rank)))
    if t is not None:
        check_operand(op, "t", t, x)
        check_shape(op, "t", t, (x.shape[0], pitch_of(rank)))
        outputs.append(lora_up_fake(t, x, seed, rank, dropout_p, transposed, in_float32))
    return outputs


def lora_product_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
) -> list[Tensor]:
    return lora_decode_fake(x, weight, bias, down, up, scale, NONE)


def lora_decode_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    activation: int,
) -> list[Tensor]:
    t = lora_down_fake(x, down, None, scale, 0.0)
    return [*linear_act_extended_fake(x, weight, bias, t, up, activation), t]


def lora_branch_fake(t: Tensor, factor: Tensor, seed: Tensor, dropout_p: float) -> list[Tensor]:
    op = "lora_branch"
    check_matrix(op, "t", t)
    check_operand(op, "factor", factor, t)
    if factor.dim() != 2 or factor.shape[0] != t.shape[1]:
        raise ValueError(
            f"{op}: factor must have shape ({t.shape[1]}, K); got {tuple(factor.shape)}"
        )
    _check_seed(op, seed, t)
    return [t.new_empty(t.shape[0], factor.shape[1])]


def lora_dropout_fake(x: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    check_matrix("lora_dropout", "x", x)
    _check_seed("lora_dropout", seed, x)
    return x.new_empty(x.shape)


def saves_z(activation: int) -> bool:
    """Whether z is kept for the gradient: not where there is none of it, or the output will do."""
    return activation not in (NONE, RELU)


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def check_lora(
    op: str,
    x: Any,
    weight: Any,
    bias: Any,
    lora_a: Any,
    lora_b: Any,
    seed: Any,
    activation: int,
    scale: Any,
    dropout_p: Any,
) -> None:
    check_rows(op, "x", x)
    check_operand(op, "weight", weight, x)
    in_features = x.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != in_features:
        raise ValueError(
            f"{op}: weight must have shape (N, {in_features}) to go with x of shape "
            f"{tuple(x.shape)}; got {tuple(weight.shape)} (pass weight.T if it is stored by inputs)"
        )
    if bias is not None:
        check_operand(op, "bias", bias, x)
        check_shape(op, "bias", bias, weight.shape[:1])
    check_adapter(op, "lora_a", lora_a, x)
    if lora_a.dim() != 2 or lora_a.shape[1] != in_features:
        raise ValueError(
            f"{op}: lora_a must have shape (r, {in_features}); got {tuple(lora_a.shape)}"
        )
    _check_rank(op, "lora_a", lora_a.shape[0])
    check_adapter(op, "lora_b", lora_b, x)
    check_shape(op, "lora_b", lora_b, (weight.shape[0], lora_a.shape[0]))
    check_number(op, "scale", scale)
    check_dropout(op, dropout_p)
    _check_seed(op, seed, x)


def check_dropout(op: str, dropout_p: Any) -> None:
    check_number(op, "dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be a probability, 0 to 1; got {dropout_p}")


def check_adapter(op: str, name: str, tensor: Any, x: Tensor) -> None:
    """A tensor of x's dtype or, over a 16-bit x, of float32."""
    check_floating(op, name, tensor)
    check_same_device(op, name, tensor, "x", x)
    if tensor.dtype == x.dtype:
        return
    in_16_bits = x.dtype.itemsize == 2
    if tensor.dtype != torch.float32 or not in_16_bits:
        float32 = " or float32" if in_16_bits else ""
        raise TypeError(f"{op}: {name} must be a {x.dtype}{float32} tensor; got {tensor.dtype}")


def check_matrix(op: str, name: str, tensor: Any) -> None:
    check_floating(op, name, tensor)
    if tensor.dim() != 2:
        raise ValueError(f"{op}: {name} must be a matrix; got shape {tuple(tensor.shape)}")


def _check_rank(op: str, name: str, rank: int) -> None:
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{op}: {name} must be of a rank from 1 to {MAX_RANK}; got {rank}")


def _check_seed(op: str, seed: Any, x: Tensor) -> None:
    if seed is None:
        return
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(f"{op}: seed must be an int64 tensor of one element")
    check_same_device(op, "seed", seed, "x", x)
