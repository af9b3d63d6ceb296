"""The layers of the lora family on CUDA: which operators a call consists of.

Three parts: ``t`` by the skinny kernel (``_down``), the product with the branch in it
(``_product``, ``_product_dx``), and the gradients of the factors (``_up``). The second has several
paths, of which ``choose_path`` takes one; ``torch.ops.fusedcuda.lora_use`` forces another.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    t = _down(as_matrix(x), lora_a, seed, scale, dropout_p)
    return _product(x, weight, bias, t, lora_b, activation, saves=False)[0]


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
    t = _down(as_matrix(x), lora_a, seed, scale, dropout_p)
    y, *z = _product(x, weight, bias, t, lora_b, activation, saves=saves_z(activation))
    return [y, t, *z]


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
    if mask & (DX | DA):
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
        gradients.append(_up(t, rows, lora_b, rank, None, 0.0, transposed=True))
    return gradients


# --------------------------------------------------------------------------------------------------
# The product with the branch in it
# --------------------------------------------------------------------------------------------------

# How the branch comes to the linear:
#   extended: in the same product, as more of what is added up (linear_act_extended); apart where
#     that has no kernel, or a slower one
#   apart: added to the finished product (two more passes over the output)
#   residual: made first, and added where the product is rounded (one write, one read)
PATHS = ("auto", "extended", "apart", "residual")
_chosen = "auto"


def use(path: str) -> str:
    """Forces a path from now on; returns what was chosen before."""
    global _chosen
    if path not in PATHS:
        raise ValueError(f"lora_use: path must be one of {', '.join(PATHS)}; got {path!r}")
    before, _chosen = _chosen, path
    return before


def choose_path() -> str:
    """The path of :func:`_product`."""
    return "extended" if _chosen == "auto" else _chosen


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
    if path == "extended":
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
    if choose_path() == "extended" and seed is None:
        dx = _ops.linear_act_extended.default(dz, weight.T, None, dt, factor.T, NONE)
        if dx:
            return dx[0]
    (dx,) = _ops.linear_act_backward.default(dz, x, weight, None, NONE, DX, False)
    if seed is None:
        return _add_branch(dt, factor.T, dx)
    as_matrix(dx).add_(_ops.lora_dropout.default(torch.mm(dt, factor), seed, dropout_p))
    return dx


def _add_branch(t: Tensor, factor: Tensor, base: Tensor) -> Tensor:
    """``base + t @ factor.T``, added before it is rounded.

    (Not by torch.addmm, whose cuBLAS rounds the product first: measured on an H200, in fp16 and
    bf16, also where all rows are aligned.)
    """
    branch = _ops.linear_act.default(t, factor, None, as_matrix(base), NONE, False)
    return branch.view(base.shape)


def padded(factor: Tensor, t: Tensor, dim: int) -> Tensor:
    """A factor as it is multiplied by ``t``: of its dtype, and with as many ranks.

    cuBLAS takes four times as long where the ranks are no multiple of 8 (67 us instead of 16 for
    5 of them; shared/TARGETS.md, H200).
    """
    rank, ranks = factor.shape[dim], t.shape[1]
    if rank == ranks:
        return factor.to(t.dtype)
    shape = list(factor.shape)
    shape[dim] = ranks
    wide = t.new_zeros(shape)
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


def why_down_by_cublas(x: Tensor, factor: Tensor, has_dropout: bool) -> str | None:
    """Why t is cuBLAS's product, or None where it is our own kernel's."""
    if not has_kernel(x.dtype):
        return f"{x.dtype} has no kernel of its own"
    # Measured on an H200, 8192 x 4096 bf16, 16 ranks: 19 us, and our kernel 34. With ranks that
    # are no multiple of 8 cuBLAS takes 67 (shared/TARGETS.md), and it has no dropout.
    many = x.shape[0] >= 1024 and factor.shape[0] % 8 == 0 and not has_dropout
    if many and _has_aligned_rows(x) and _has_aligned_rows(factor):
        return "faster for many rows and ranks that are a multiple of 8"
    return None


def why_up_by_cublas(
    t: Tensor, x: Tensor, parameter: Tensor, rank: int, has_dropout: bool
) -> str | None:
    """Why a factor's gradient is cuBLAS's product, or None where it is our own kernel's."""
    if not has_kernel(x.dtype):
        return f"{x.dtype} has no kernel of its own"
    # Measured on an H200, 8192 x 4096 bf16: 16 ranks 22 us, and our kernel 30 (64 ranks 22 and 55;
    # of 16 rows 2.5 and 4.9). With 5 ranks cuBLAS takes 50 to 55, ours 25; and it has no dropout,
    # and no gradient in float32 of 16-bit factors.
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
    if why_up_by_cublas(t, x, parameter, rank, seed is not None) is None:
        in_float32 = parameter.dtype == torch.float32
        return _ops.lora_up.default(t, x, seed, rank, dropout_p, transposed, in_float32)
    if seed is not None:
        x = _ops.lora_dropout.default(x, seed, dropout_p)
    narrow = t[:, :rank]
    dy, rows = (x, narrow) if transposed else (narrow, x)
    if not has_kernel(x.dtype):
        return torch.mm(dy.T, rows)
    # The gradient of a linear layer's weight, of which only the shape is looked at.
    layer = parameter.new_empty(()).expand(dy.shape[1], rows.shape[1])
    return _ops.linear_act_backward.default(dy, rows, layer, None, NONE, DWEIGHT, False)[0]
