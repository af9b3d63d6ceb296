# ruff: noqa: N803  (constexpr arguments are in capitals, as everywhere in Triton)
"""A Triton kernel of RoPE on q and k in one launch, by strides, autotuned over its tile.

A program takes a tile of positions and heads, of q or of k; the tables hold both halves.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
import triton.testing

CONFIGS = [
    triton.Config({"POSITIONS": positions, "HEADS": heads}, num_warps=warps)
    for positions, heads, warps in [(1, 8, 4), (2, 8, 4), (4, 8, 8), (1, 32, 8), (16, 1, 4),
                                    (32, 1, 8)]
]  # fmt: skip


@triton.autotune(
    configs=CONFIGS,
    key=["sequence", "q_heads", "k_heads", "q_h"],
    do_bench=partial(triton.testing.do_bench, warmup=3, rep=15),
)
@triton.jit
def rope_kernel(
    q, k, cos, sin, q_out, k_out, sequence, q_heads, k_heads, table_b, table_s,
    q_b, q_h, q_s, k_b, k_h, k_s,
    HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, POSITIONS * HEADS)
    position = tl.program_id(0) * POSITIONS + lane // HEADS
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(q_heads, HEADS)
    if tile >= q_tiles:
        tile -= q_tiles
        rotate_tile(
            k + batch * k_b, k_out + batch * k_b, cos + batch * table_b, sin + batch * table_b,
            position, tile * HEADS + lane % HEADS, sequence, k_heads, k_h, k_s, table_s,
            HALF, PADDED, INTERLEAVED, BACKWARD,
        )  # fmt: skip
    else:
        rotate_tile(
            q + batch * q_b, q_out + batch * q_b, cos + batch * table_b, sin + batch * table_b,
            position, tile * HEADS + lane % HEADS, sequence, q_heads, q_h, q_s, table_s,
            HALF, PADDED, INTERLEAVED, BACKWARD,
        )  # fmt: skip


@triton.jit
def rotate_tile(
    x, out, cos, sin, position, head, sequence, heads, stride_h, stride_s, table_s,
    HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, PADDED)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    inside = ((position < sequence) & (head < heads))[:, None] & (pair < HALF)[None, :]
    row = (head.to(tl.int64) * stride_h + position.to(tl.int64) * stride_s)[:, None]
    table = (position * table_s)[:, None]
    x1 = tl.load(x + row + first[None, :], inside, 0).to(tl.float32)
    x2 = tl.load(x + row + second[None, :], inside, 0).to(tl.float32)
    cos1 = tl.load(cos + table + first[None, :], inside, 0).to(tl.float32)
    cos2 = tl.load(cos + table + second[None, :], inside, 0).to(tl.float32)
    sin1 = tl.load(sin + table + first[None, :], inside, 0).to(tl.float32)
    sin2 = tl.load(sin + table + second[None, :], inside, 0).to(tl.float32)
    if BACKWARD:  # the transpose
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    tl.store(out + row + first[None, :], y1, inside)
    tl.store(out + row + second[None, :], y2, inside)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    interleaved: bool, backward: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, q_heads, sequence, d = q.shape
    k_heads = k.shape[1]
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)  # laid out as q and k

    def grid(meta: dict) -> tuple[int, int, int]:
        tiles = triton.cdiv(q_heads, meta["HEADS"]) + triton.cdiv(k_heads, meta["HEADS"])
        return triton.cdiv(sequence, meta["POSITIONS"]), tiles, batch

    rope_kernel[grid](
        q, k, cos, sin, q_out, k_out, sequence, q_heads, k_heads,
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), *q.stride()[:3], *k.stride()[:3],
        HALF=d // 2, PADDED=triton.next_power_of_2(d // 2),
        INTERLEAVED=interleaved, BACKWARD=backward,
    )  # fmt: skip
    return q_out, k_out


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate(q, k, cos, sin, interleaved, backward=False)

    @staticmethod
    def backward(ctx, dq, dk):
        return *rotate(dq, dk, *ctx.saved_tensors, ctx.interleaved, backward=True), None, None, None


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, H, S, D) and k (B, Hk, S, D) of any strides, dense; cos and sin (1 or B, S, D)."""
    return Rope.apply(q, k, cos, sin, interleaved)
