"""The layers of the lora family on CUDA: which operators a call consists of.

Three parts: ``t`` (``_down``), the product with the branch in it (``_product``, ``_product_dx``),
and the gradients of the factors (``_up``). The second has several paths, of which ``choose_path``
takes one; ``torch.ops.fusedcuda.lora_use`` forces another. The first of them makes ``t`` as well.
The others are skinny products, by one pass over a matrix (lora_pass, which makes the gradients of
``t`` and ``lora_b`` together: ``_dt_and_db``), by cuBLAS, or by the kernels for every layout
(lora_down, lora_up), in this order where a table of measurements says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._composition import PathChoice, weight_gradient
from ._linear_act_reference import NONE
from ._lora_reference import (
    DA,
    DB,
    DBIAS,
    DWEIGHT,
    DX,
    check_lora,
    pitch_of,
    saves_z,
)
from ._rows import as_matrix

_ops = torch.ops.fusedcuda

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
    check_lora("lora_linear", x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p)
    operands = (x, weight, bias, lora_a, lora_b, seed)
    return _layer(*operands, activation, scale, dropout_p, saves=False)[0]


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
    check_lora("lora_linear", x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p)
    operands = (x, weight, bias, lora_a, lora_b, seed)
    return _layer(*operands, activation, scale, dropout_p, saves=saves_z(activation))


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
    dz = dy.contiguous()  # read up to five times
    if saved is not None:
        (dz,) = _ops.bias_act_backward.default(dz, saved, _ZERO, activation, 0b01)
    rank, rows = lora_a.shape[0], as_matrix(dz)
    gradients = []
    found = _fused_dx(rows, weight, lora_a, lora_b, seed, scale) if mask & DX else []
    db = None
    if found:
        dx, dt = found
        gradients.append(dx.view(x.shape))
    elif mask & (DX | DA):
        if both := _dt_and_db(rows, t, lora_b, scale) if mask & DB else []:
            dt, db = both
        else:
            dt = _down(rows, lora_b.T, None, scale, 0.0)
        if mask & DX:
            gradients.append(_product_dx(dz, x, weight, dt, lora_a, seed, dropout_p))
    if mask & (DWEIGHT | DBIAS):
        gradients += _ops.linear_act_backward.default(
            dz, x, weight, None, NONE, mask & (DWEIGHT | DBIAS), False
        )
    if mask & DA:
        gradients.append(_up(dt, as_matrix(x), lora_a, rank, seed, dropout_p, transposed=False))
    if mask & DB:
        if db is None:
            db = _up(t, rows, lora_b, rank, None, 0.0, transposed=True)
        gradients.append(db)
    return gradients


# --------------------------------------------------------------------------------------------------
# The product with the branch in it
# --------------------------------------------------------------------------------------------------

# How the branch comes to the linear:
#   decode: all of it, t included, is one launch for few rows (lora_decode); extended where that has
#     no kernel
#   fused: all of it, t included, is one launch (lora_product); extended where that has no kernel.
#     Only where it is forced: 1 to 3 % slower than extended (bench/results/h200/lora_notes.md)
#   extended: in the same product, as more of what is added up (linear_act_extended); apart where
#     that has no kernel, or a slower one
#   apart: added to the finished product (two more passes over the output)
#   residual: made first, and added where the product is rounded (one write, one read)
PATHS = ("auto", "decode", "fused", "extended", "apart", "residual")
IN_ONE_PRODUCT = ("decode", "fused", "extended")
_path = PathChoice("lora_use", PATHS)
use = _path.use


def choose_path() -> str:
    """The path to try first."""
    return _path.forced or "decode"


def _layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    activation: int,
    scale: float,
    dropout_p: float,
    saves: bool,
) -> list[Tensor]:
    """``[act(z), t]``, or ``[act(z), t, z]`` with ``saves``."""
    rows = as_matrix(x)
    in_launch = NONE if saves else activation
    if launch := one_launch(rows, lora_a.shape[0], seed, in_launch):
        adapter = fused_arguments(lora_a, padded(lora_b, x, dim=1), scale)
        if launch == "lora_decode":
            found = _ops.lora_decode.default(rows, weight, bias, *adapter, in_launch)
        else:
            found = _ops.lora_product.default(rows, weight, bias, *adapter)
        if found:
            z, t = found
            z = z.view(*x.shape[:-1], weight.shape[0])
            return [_ops.bias_act.default(z, _ZERO, activation), t, z] if saves else [z, t]
    t = _down(rows, lora_a, seed, scale, dropout_p)
    y, *z = _product(x, weight, bias, t, lora_b, activation, saves)
    return [y, t, *z]


def _fused_dx(
    dz: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    scale: float,
) -> list[Tensor]:
    """``[dz @ weight + dt @ lora_a, dt]`` of a matrix, or ``[]``."""
    if one_launch(dz, lora_a.shape[0], seed, NONE) != "lora_product":
        return []
    up = padded(lora_a, dz, dim=0).T
    return _ops.lora_product.default(dz, weight.T, None, *fused_arguments(lora_b.T, up, scale))


PRODUCT_RANKS = 16  # that its warps have sums for
DECODE_ROWS, DECODE_RANKS = 32, 64  # likewise


def one_launch(x: Tensor, rank: int, seed: Tensor | None, activation: int) -> str | None:
    """The operator that is tried to make ``t`` as well, of a matrix ``x``."""
    if seed is not None or not has_kernel(x.dtype):
        return None
    path = choose_path()
    if path == "decode" and x.shape[0] <= DECODE_ROWS and rank <= DECODE_RANKS:
        return "lora_decode"
    if path == "fused" and rank <= PRODUCT_RANKS and activation == NONE:
        return "lora_product"
    return None


def fused_arguments(down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
    """``down``, ``up`` and ``scale`` of one launch: ranks in rows of the dtype of ``up``."""
    return down.to(up.dtype).contiguous(), up, scale


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    t: Tensor,
    lora_b: Tensor,
    activation: int,
    saves: bool,
) -> list[Tensor]:
    """``[act(z)]``, or ``[act(z), z]`` with ``saves``: z = x @ weight.T + bias + t @ lora_b.T."""
    factor = padded(lora_b, t, dim=1)
    path = choose_path()
    in_product = NONE if saves else activation
    if path in IN_ONE_PRODUCT:
        z = _ops.linear_act_extended.default(x, weight, bias, t, factor, in_product)
        if z and saves:
            return [_ops.bias_act.default(z[0], _ZERO, activation), z[0]]
        if z:
            return z
    if path == "residual":
        branch = torch.mm(t, factor.T).view(*x.shape[:-1], weight.shape[0])
        z = [_ops.linear_act.default(x, weight, bias, branch, in_product, False)]
        if not saves:
            return z
    else:
        base = _ops.linear_act.default(x, weight, bias, None, NONE, False)
        z = [_add_branch(t, factor, base)]
    if activation == NONE:
        return z
    y = _ops.bias_act.default(z[0], _ZERO, activation)
    return [y, *z] if saves else [y]


def _product_dx(
    dz: Tensor,
    x: Tensor,
    weight: Tensor,
    dt: Tensor,
    lora_a: Tensor,
    seed: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """``dz @ weight + dropout(dt @ lora_a)``, in the shape of ``x``, which is not read."""
    factor = padded(lora_a, dt, dim=0)
    if choose_path() in IN_ONE_PRODUCT and seed is None:
        dx = _ops.linear_act_extended.default(dz, weight.T, None, dt, factor.T, NONE)
        if dx:
            return dx[0]
    if seed is not None:
        # Added in the product: a sum of its own would read both and write one of them again.
        branch = _dropped_branch(dt, factor, seed, dropout_p)
        return _ops.linear_act.default(dz, weight.T, None, branch.view(x.shape), NONE, False)
    (dx,) = _ops.linear_act_backward.default(dz, x, weight, None, NONE, DX, False)
    return _add_branch(dt, factor.T, dx)


def _dropped_branch(dt: Tensor, factor: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    """``dropout(dt @ factor)``: in one launch up to 16 ranks."""
    if has_kernel(dt.dtype):
        branch = _ops.lora_branch.default(dt, factor, seed, dropout_p)
        if branch:
            return branch[0]
    return _ops.lora_dropout.default(torch.mm(dt, factor), seed, dropout_p)


def _add_branch(t: Tensor, factor: Tensor, base: Tensor) -> Tensor:
    """``base + t @ factor.T``, added before it is rounded.

    (Not by torch.addmm, whose cuBLAS rounds the product first: measured on an H200, in fp16 and
    bf16, also where all rows are aligned.)
    """
    branch = _ops.linear_act.default(t, factor, None, as_matrix(base), NONE, False)
    return branch.view(base.shape)


def padded(factor: Tensor, like: Tensor, dim: int) -> Tensor:
    """A factor as it is multiplied by ``t``: of its dtype, with ranks of zeros to a multiple of 8.

    cuBLAS takes four times as long where the ranks are no multiple of 8 (67 us instead of 16 for
    5 of them; shared/TARGETS.md, H200).
    """
    rank, ranks = factor.shape[dim], pitch_of(factor.shape[dim])
    if rank == ranks:
        return factor.to(like.dtype)
    shape = list(factor.shape)
    shape[dim] = ranks
    wide = like.new_zeros(shape)
    wide.narrow(dim, 0, rank).copy_(factor)
    return wide


# --------------------------------------------------------------------------------------------------
# Skinny products
# --------------------------------------------------------------------------------------------------

# A number that kernels take from the host.
_ZERO = torch.zeros(())


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether the skinny products are our own: of 16-bit types. cuBLAS makes the others."""
    return dtype.itemsize == 2


# One pass over x (lora_pass), for rows of several tiles. Measured on an H200 with
# bench/tuning/lora_passes.py (bench/results/h200/lora_passes.txt): bf16, 512 to 32768 rows of 1024,
# 4096 and 14336 elements, 5 to 64 ranks; and before, 256 rows of 4096 and 16 ranks: t 5.0 us where
# cuBLAS takes 6.2, both gradients 6.0 and 9.6. (With dropout 2048 x 1024 is the one shape that
# lora_down makes faster, in 6.4 us instead of 7.1.)
PASS_ROWS, PASS_RANKS = 256, 64
# Both gradients of dz: 25 us of 8192 x 4096 and 16 ranks, where two products of cuBLAS's take 41
# (70 and 115 of 14336 columns); with 64 ranks 44 and 40, and with ranks that are no multiple of 8
# cuBLAS takes 129.
PASS_BOTH_RANKS = 32


def down_by_pass(x: Tensor, factor: Tensor, has_dropout: bool) -> bool:
    """Whether t is made by lora_pass where that can be."""
    rank, rows = factor.shape[0], x.shape[0]
    if not _pass_can_be(x, rank) or not _has_boxes(factor, x.dtype):
        return False
    # Where cuBLAS can make it, 16 ranks of 4096 columns: 7.0 us of 1024 rows and the pass 5.3; 12.6
    # and 11.3 of 4096 rows, 18.2 and 20.4 of 8192; with 64 ranks 11.4 and 14.0 of 4096 rows. (Of
    # 1024 columns it is 4.5 and 4.7 of 2048 rows, 4.9 and 5.4 of 4096.)
    return has_dropout or rank % 8 != 0 or rows <= (4096 if rank <= 32 else 2048)


def up_by_pass(t: Tensor, x: Tensor, parameter: Tensor, rank: int, has_dropout: bool) -> bool:
    """Whether a factor's gradient is made by lora_pass where that can be."""
    if not _pass_can_be(x, rank):
        return False
    # Where cuBLAS can, 16 ranks of 4096 columns: 7.3 us of 2048 rows and the pass 8.1; 13.7 and
    # 12.3 of 4096 rows, 21.7 and 20.6 of 8192, 66 and 68 of 32768; 56 and 60 of 8192 x 14336.
    small = 4096 <= x.shape[0] <= 16384 and x.shape[1] <= 5120
    faster = small and rank <= 16
    return faster or why_up_by_cublas(t, x, parameter, rank, has_dropout) is None


def both_by_pass(dz: Tensor, lora_b: Tensor) -> bool:
    """Whether the gradients of t and lora_b are made together where that can be."""
    rank = lora_b.shape[1]
    # Ranks that are no multiple of 8 are padded, in rows that are as the pass wants them.
    fits = rank % 8 != 0 or (rank <= PASS_BOTH_RANKS and _has_boxes(lora_b, dz.dtype))
    return fits and _pass_can_be(dz, rank)


def _pass_can_be(x: Tensor, rank: int) -> bool:
    many = x.shape[0] >= PASS_ROWS
    return has_kernel(x.dtype) and many and rank <= PASS_RANKS and _has_boxes(x, x.dtype)


def _has_boxes(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether the copy engine reads ``matrix`` as it is or, of another dtype, rounded to this."""
    is_rounded = matrix.dtype != dtype  # to rows without gaps
    aligned = matrix.shape[1] % 8 == 0 if is_rounded else _has_aligned_rows(matrix)
    return matrix.stride(1) == 1 and aligned


def why_down_by_cublas(x: Tensor, factor: Tensor, has_dropout: bool) -> str | None:
    """Why t, if not by lora_pass, is cuBLAS's product, or None where it is lora_down's."""
    if not has_kernel(x.dtype):
        return f"{x.dtype} has no kernel of its own"
    # Measured on an H200, 8192 x 4096 bf16, 16 ranks: 19 us, and lora_down 34. With ranks that
    # are no multiple of 8 cuBLAS takes 67 (shared/TARGETS.md), and it has no dropout.
    many = x.shape[0] >= 1024 and factor.shape[0] % 8 == 0 and not has_dropout
    if many and _has_aligned_rows(x) and _has_aligned_rows(factor):
        return "faster for many rows and ranks that are a multiple of 8"
    return None


def why_up_by_cublas(
    t: Tensor, x: Tensor, parameter: Tensor, rank: int, has_dropout: bool
) -> str | None:
    """Why a factor's gradient is cuBLAS's product, or None where it is our own kernels'."""
    if not has_kernel(x.dtype):
        return f"{x.dtype} has no kernel of its own"
    # Measured on an H200, 8192 x 4096 bf16: 16 ranks 22 us, lora_pass 21 and lora_up 30 (64 ranks
    # 22, 28 and 57; of 2048 rows 7.3, 8.1 and 15). With 5 ranks cuBLAS takes 55, ours 20 and 26;
    # and it has no dropout, and no gradient in float32 of 16-bit factors.
    fits = rank == t.shape[1] and parameter.dtype == x.dtype and not has_dropout
    if fits and _has_aligned_rows(x):
        return "faster for ranks that are a multiple of 8"
    return None


def _has_aligned_rows(matrix: Tensor) -> bool:
    inner, outer = sorted(matrix.stride())
    offset = int(matrix.storage_offset())
    return inner == 1 and (outer | offset) * matrix.element_size() % 16 == 0


def _down(x: Tensor, factor: Tensor, seed: Tensor | None, scale: float, dropout_p: float) -> Tensor:
    """:func:`_lora_reference.lora_down`"""
    if down_by_pass(x, factor, seed is not None):
        found = _ops.lora_pass.default(*down_arguments(x, factor, seed, scale, dropout_p))
        if found:
            return found[0]
    if why_down_by_cublas(x, factor, seed is not None) is None:
        return _ops.lora_down.default(x, factor, seed, scale, dropout_p)
    if seed is not None:
        x = _ops.lora_dropout.default(x, seed, dropout_p)
    rank, ranks = factor.shape[0], pitch_of(factor.shape[0])
    # Only ranks that do not exist are filled: a kernel less for the usual ones.
    t = (x.new_empty if rank == ranks else x.new_zeros)(x.shape[0], ranks)
    t[:, :rank].addmm_(x, factor.to(x.dtype).T, beta=0, alpha=scale)
    return t


def _up(
    t: Tensor,
    x: Tensor,
    parameter: Tensor,
    rank: int,
    seed: Tensor | None,
    dropout_p: float,
    transposed: bool,
) -> Tensor:
    """:func:`_lora_reference.lora_up`, in the dtype of ``parameter``."""
    in_float32 = parameter.dtype == torch.float32
    if up_by_pass(t, x, parameter, rank, seed is not None):
        arguments = up_arguments(t, x, parameter, rank, seed, dropout_p, transposed)
        found = _ops.lora_pass.default(*arguments)
        if found:
            return found[0]
    if why_up_by_cublas(t, x, parameter, rank, seed is not None) is None:
        return _ops.lora_up.default(t, x, seed, rank, dropout_p, transposed, in_float32)
    if seed is not None:
        x = _ops.lora_dropout.default(x, seed, dropout_p)
    narrow = t[:, :rank]
    dy, rows = (x, narrow) if transposed else (narrow, x)
    if not has_kernel(x.dtype):
        return torch.mm(dy.T, rows)
    return weight_gradient(dy, rows, parameter.dtype)


def _dt_and_db(dz: Tensor, t: Tensor, lora_b: Tensor, scale: float) -> list[Tensor]:
    """``[dz @ lora_b * scale, dz.T @ t]`` by one pass over dz, or ``[]``."""
    if not both_by_pass(dz, lora_b):
        return []
    return _ops.lora_pass.default(*both_arguments(dz, t, lora_b, scale))


def down_arguments(
    x: Tensor, factor: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[object, ...]:
    """Of lora_pass: t alone. (The factor is small: rounding it is 2 us.)"""
    rank = factor.shape[0]
    return (x, factor.to(x.dtype), None, seed, rank, scale, dropout_p, False, False)


def up_arguments(
    t: Tensor,
    x: Tensor,
    parameter: Tensor,
    rank: int,
    seed: Tensor | None,
    dropout_p: float,
    transposed: bool,
) -> tuple[object, ...]:
    """Of lora_pass: a factor's gradient alone."""
    in_float32 = parameter.dtype == torch.float32
    return (x, None, t, seed, rank, 1.0, dropout_p, transposed, in_float32)


def both_arguments(dz: Tensor, t: Tensor, lora_b: Tensor, scale: float) -> tuple[object, ...]:
    """Of lora_pass: the gradients of t and of lora_b."""
    factor, in_float32 = padded(lora_b, dz, dim=1).T, lora_b.dtype == torch.float32
    return (dz, factor, t, None, lora_b.shape[1], scale, 0.0, True, in_float32)
