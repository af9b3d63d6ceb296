# ruff: noqa: N803  (constexpr arguments are in capitals, as everywhere in Triton)
"""Triton kernels of softmax over contiguous rows: one program a row, a long row in pieces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bench.baselines._rows import WHOLE_ROW_LIMIT, block_of, tuned


@tuned(key=["n"])
@triton.jit
def softmax_kernel(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * n + at, inside, float("-inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value))
    tl.store(y + row * n + at, value / tl.sum(value), inside)


@tuned(key=["n"])
@triton.jit
def long_softmax_kernel(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    # Every lane keeps its own maximum and sum; they meet once, after the last piece.
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + row * n + start + at, start + at < n, float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, value)
        total = total * tl.exp(peak - higher) + tl.exp(value - higher)
        peak = higher
    highest = tl.max(peak)
    scale = 1 / tl.sum(total * tl.exp(peak - highest))
    for start in range(0, n, BLOCK):
        inside = start + at < n
        value = tl.load(x + row * n + start + at, inside, 0).to(tl.float32)
        tl.store(y + row * n + start + at, tl.exp(value - highest) * scale, inside)


@tuned(key=["n"])
@triton.jit
def softmax_bwd_kernel(dy, y, dx, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    grad = tl.load(dy + row * n + at, inside, 0).to(tl.float32)
    value = tl.load(y + row * n + at, inside, 0).to(tl.float32)
    tl.store(dx + row * n + at, value * (grad - tl.sum(grad * value)), inside)


@tuned(key=["n"])
@triton.jit
def long_softmax_bwd_kernel(dy, y, dx, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + at < n
        grad = tl.load(dy + row * n + start + at, inside, 0).to(tl.float32)
        products += grad * tl.load(y + row * n + start + at, inside, 0).to(tl.float32)
    total = tl.sum(products)
    for start in range(0, n, BLOCK):
        inside = start + at < n
        grad = tl.load(dy + row * n + start + at, inside, 0).to(tl.float32)
        value = tl.load(y + row * n + start + at, inside, 0).to(tl.float32)
        tl.store(dx + row * n + start + at, value * (grad - total), inside)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        y, n = torch.empty_like(x), x.shape[-1]
        kernel = softmax_kernel if n <= WHOLE_ROW_LIMIT else long_softmax_kernel
        kernel[(x.numel() // n,)](x, y, n, BLOCK=block_of(n))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        dx, n = torch.empty_like(y), y.shape[-1]
        kernel = softmax_bwd_kernel if n <= WHOLE_ROW_LIMIT else long_softmax_bwd_kernel
        kernel[(y.numel() // n,)](dy, y, dx, n, BLOCK=block_of(n))
        return dx


def softmax(x: torch.Tensor) -> torch.Tensor:
    return Softmax.apply(x)
