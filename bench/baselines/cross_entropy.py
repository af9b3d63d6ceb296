# ruff: noqa: N803  (constexpr arguments are in capitals, as everywhere in Triton)
"""Triton kernels of cross-entropy: the forward makes the gradient, if asked over the logits.

One program a row takes the row in pieces, twice: for the log-sum-exp, then for the gradient. The
backward scales by the incoming gradient, and reads nothing where that is one.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
import triton.testing

tuned = partial(
    triton.autotune,
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps)
        for block, warps in [(4096, 8), (8192, 8), (8192, 16), (16384, 32)]
    ],
    key=["n"],
    do_bench=partial(triton.testing.do_bench, warmup=3, rep=15),
)


@tuned()
@triton.jit
def loss_kernel(logits, target, losses, n, ignored, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    label = tl.load(target + row)
    loss = row_lse(logits + row * n, n, at, BLOCK)
    if label == ignored:
        loss = 0.0
    else:
        loss -= tl.load(logits + row * n + label).to(tl.float32)
    tl.store(losses + row, loss)


# Restored after each trial: the tuner may be given the logits themselves as the gradient.
@tuned(restore_value=["gradient"])
@triton.jit
def loss_and_gradient_kernel(
    logits, target, valid, losses, gradient, n, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    label = tl.load(target + row)
    weight = 1.0 / tl.load(valid)
    lse = row_lse(logits + row * n, n, at, BLOCK)
    loss = 0.0
    if label == ignored:
        weight = 0.0
    else:
        loss = lse - tl.load(logits + row * n + label).to(tl.float32)
    tl.debug_barrier()  # the label's logit is read before anyone writes there
    for start in range(0, n, BLOCK):
        inside = start + at < n
        x = tl.load(logits + row * n + start + at, inside, 0).to(tl.float32)
        hit = tl.where(start + at == label, 1.0, 0.0)
        tl.store(gradient + row * n + start + at, (tl.exp(x - lse) - hit) * weight, inside)
    tl.store(losses + row, loss)


@triton.jit
def row_lse(logits, n, at, BLOCK: tl.constexpr):
    # Every lane keeps its own maximum and sum; they meet once, after the last piece.
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(logits + start + at, start + at < n, float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, x)
        # -inf minus -inf: a lane that has seen nothing yet
        shrink = tl.where(peak == higher, 1.0, tl.exp(peak - higher))
        total = total * shrink + tl.where(x == float("-inf"), 0.0, tl.exp(x - higher))
        peak = higher
    highest = tl.max(peak)
    return highest + tl.log(tl.sum(total * tl.exp(peak - highest)))


@triton.jit
def scale_kernel(gradient, factor, elements, BLOCK: tl.constexpr):
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(gradient + at, at < elements, 0).to(tl.float32)
        tl.store(gradient + at, value * scale, at < elements)


class CrossEntropy(torch.autograd.Function):
    """The mean over the rows whose target is not `ignore_index`."""

    @staticmethod
    def forward(ctx, logits, target, ignore_index, in_place):
        n = logits.shape[-1]
        rows = logits.numel() // n
        losses = logits.new_empty(rows, dtype=torch.float32)
        valid = (target != ignore_index).sum().float()
        if ctx.needs_input_grad[0]:
            gradient = logits.detach() if in_place else torch.empty_like(logits)
            loss_and_gradient_kernel[(rows,)](
                logits, target, valid, losses, gradient, n, ignore_index
            )
            ctx.save_for_backward(gradient)
        else:
            loss_kernel[(rows,)](logits, target, losses, n, ignore_index)
        return losses.sum() / valid

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        elements, block = gradient.numel(), 4096
        scale_kernel[(triton.cdiv(elements, block),)](gradient, grad_loss, elements, BLOCK=block)
        return gradient, None, None, None


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, in_place: bool = False
) -> torch.Tensor:
    return CrossEntropy.apply(logits, target, ignore_index, in_place)
