# ruff: noqa: N803  (constexpr arguments are in capitals, as everywhere in Triton)
"""A Triton matrix product with bias and activation in its epilogue; forward only."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
import triton.testing
from triton.language.extra import libdevice

GROUP = 8  # rows of tiles that are gone through column by column


def tile(rows: int, columns: int, k: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BM": rows, "BN": columns, "BK": k}, num_warps=warps, num_stages=stages)


# The tiles that win on Hopper among Triton's own, and one each for short rows and short k.
tuned = partial(
    triton.autotune,
    configs=[
        tile(128, 256, 64, 8, 3),
        tile(128, 128, 64, 8, 4),
        tile(128, 128, 64, 4, 4),
        tile(64, 256, 32, 4, 4),
        tile(128, 128, 16, 4, 2),
        tile(16, 128, 128, 4, 4),
    ],
    key=["m", "n", "k"],
    do_bench=partial(triton.testing.do_bench, warmup=3, rep=15),
)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.maximum(z, 0)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1 + libdevice.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    return z


@tuned()
@triton.jit
def linear_act_kernel(
    x, weight, bias, y, m, n, k, x_stride, weight_stride,
    ACTIVATION: tl.constexpr, GROUP_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.cdiv(n, BN)
    first = program // (GROUP_ROWS * columns) * GROUP_ROWS
    rows = min(tl.cdiv(m, BM) - first, GROUP_ROWS)
    within = program % (GROUP_ROWS * columns)
    row = (first + within % rows) * BM + tl.arange(0, BM)
    column = (within // rows) * BN + tl.arange(0, BN)
    at_k = tl.arange(0, BK)
    from_x = x + row[:, None].to(tl.int64) * x_stride + at_k[None, :]
    from_weight = weight + column[None, :].to(tl.int64) * weight_stride + at_k[:, None]
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        inside = start + at_k < k
        a = tl.load(from_x + start, (row[:, None] < m) & inside[None, :], 0)
        b = tl.load(from_weight + start, (column[None, :] < n) & inside[:, None], 0)
        sums = tl.dot(a, b, sums)
    z = sums + tl.load(bias + column, column < n, 0)[None, :].to(tl.float32)
    to = y + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(to, activate(z, ACTIVATION), (row[:, None] < m) & (column[None, :] < n))


def linear_act(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
) -> torch.Tensor:
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)

    def grid(config: dict) -> tuple[int]:
        return (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),)

    linear_act_kernel[grid](
        x, weight, bias, y, m, n, k, x.stride(0), weight.stride(0),
        ACTIVATION=activation, GROUP_ROWS=GROUP,
    )  # fmt: skip
    return y
