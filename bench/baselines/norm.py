# ruff: noqa: N803  (constexpr arguments are in capitals, as everywhere in Triton)
"""Triton kernels of the norm family in the form of the classic tutorial: one program a row.

RMSNorm and LayerNorm are one kernel, since RMSNorm is LayerNorm without mean and bias. The weight
gradients take two stages: persistent programs keep a sum of their rows each, and a reduction over
these follows. Operands are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bench.baselines._rows import WHOLE_ROW_LIMIT, block_of, programs_for, tuned


@triton.jit
def store_normed(y, weight, bias, at, inside, centred, rstd):
    value = centred * rstd * tl.load(weight + at, inside, 0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at, inside, 0).to(tl.float32)
    tl.store(y + at, value, inside)


@tuned(key=["n"])
@triton.jit
def norm_kernel(
    x, residual, weight, bias, y, h, mean_out, rstd_out, n, eps,
    CENTRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * n + at, inside, 0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * n + at, inside, 0).to(tl.float32)
        rounded = value.to(h.dtype.element_ty)
        tl.store(h + row * n + at, rounded, inside)
        value = rounded.to(tl.float32)
    if CENTRE:
        mean = tl.sum(value) / n
        tl.store(mean_out + row, mean)
        value = tl.where(inside, value - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(value * value) / n + eps)
    tl.store(rstd_out + row, rstd)
    store_normed(y + row * n, weight, bias, at, inside, value, rstd)


@tuned(key=["n"])
@triton.jit
def long_norm_kernel(
    x, residual, weight, bias, y, h, mean_out, rstd_out, n, eps,
    CENTRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for rows that do not fit: sums first, then the row again, from the L2 if lucky."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    source = x + row * n
    total = tl.zeros((BLOCK,), tl.float32)
    if residual is not None or CENTRE:
        for start in range(0, n, BLOCK):
            inside = start + at < n
            value = tl.load(source + start + at, inside, 0).to(tl.float32)
            if residual is not None:
                value += tl.load(residual + row * n + start + at, inside, 0).to(tl.float32)
                rounded = value.to(h.dtype.element_ty)
                tl.store(h + row * n + start + at, rounded, inside)
                value = rounded.to(tl.float32)
            total += value
    if residual is not None:
        source = h + row * n
    mean = 0.0
    if CENTRE:
        mean = tl.sum(total) / n
        tl.store(mean_out + row, mean)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + at < n
        value = tl.load(source + start + at, inside, 0).to(tl.float32)
        value = tl.where(inside, value - mean, 0.0)
        squares += value * value
    rstd = tl.rsqrt(tl.sum(squares) / n + eps)
    tl.store(rstd_out + row, rstd)
    for start in range(0, n, BLOCK):
        inside = start + at < n
        value = tl.load(source + start + at, inside, 0).to(tl.float32) - mean
        store_normed(y + row * n, weight, bias, start + at, inside, value, rstd)


@tuned(key=["n"])
@triton.jit
def norm_bwd_kernel(
    dy, h, weight, dh, mean_in, rstd_in, dx, dweight, dbias, rows, n,
    CENTRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < n
    scale = tl.load(weight + at, inside, 0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * n + at
        grad = tl.load(dy + here, inside, 0).to(tl.float32)
        normed = tl.load(h + here, inside, 0).to(tl.float32)
        rstd = tl.load(rstd_in + row)
        if CENTRE:
            normed -= tl.load(mean_in + row)
            bias_sum += grad
        normed *= rstd
        weight_sum += grad * normed
        grad *= scale
        value = grad - normed * (tl.sum(grad * normed) / n)
        if CENTRE:
            value -= tl.sum(grad) / n
        value *= rstd
        if dh is not None:
            value += tl.load(dh + here, inside, 0).to(tl.float32)
        tl.store(dx + here, value, inside)
    partial = tl.program_id(0).to(tl.int64) * n + at
    tl.store(dweight + partial, weight_sum, inside)
    if CENTRE:
        tl.store(dbias + partial, bias_sum, inside)


class Norm(torch.autograd.Function):
    """y, or with a residual (y, h); LayerNorm if there is a bias, else RMSNorm."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        n = x.shape[-1]
        rows = x.numel() // n
        y, mean, rstd = torch.empty_like(x), None, x.new_empty(rows, dtype=torch.float32)
        h = x if residual is None else torch.empty_like(x)
        if bias is not None:
            mean = torch.empty_like(rstd)
        kernel = norm_kernel if n <= WHOLE_ROW_LIMIT else long_norm_kernel
        kernel[(rows,)](
            x, residual, weight, bias, y, h, mean, rstd, n, eps,
            CENTRE=bias is not None, BLOCK=block_of(n),
        )  # fmt: skip
        ctx.save_for_backward(h, weight, mean, rstd)
        ctx.has_residual = residual is not None
        return (y, h) if ctx.has_residual else y

    @staticmethod
    def backward(ctx, dy, dh=None):
        h, weight, mean, rstd = ctx.saved_tensors
        n = h.shape[-1]
        if n > WHOLE_ROW_LIMIT:
            raise NotImplementedError(f"rows of {n} do not fit a program with its weight gradient")
        rows, block = h.numel() // n, block_of(n)
        programs = programs_for(rows, block, h.device)
        dx = torch.empty_like(h)
        dweight = h.new_empty((programs, n), dtype=torch.float32)
        dbias = None if mean is None else torch.empty_like(dweight)
        norm_bwd_kernel[(programs,)](
            dy, h, weight, dh, mean, rstd, dx, dweight, dbias, rows, n,
            CENTRE=mean is not None, BLOCK=block,
        )  # fmt: skip
        dweight = dweight.sum(0).to(weight.dtype)
        dbias = None if dbias is None else dbias.sum(0).to(weight.dtype)
        return dx, dx if ctx.has_residual else None, dweight, dbias, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return Norm.apply(x, None, weight, None, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return Norm.apply(x, residual, weight, None, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    return Norm.apply(x, None, weight, bias, eps)
