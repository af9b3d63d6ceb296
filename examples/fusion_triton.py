# ruff: noqa: N803  (constexpr arguments are in capitals, as everywhere in Triton)
"""relu(x) * scale + bias in Triton; bench/baselines/pointwise.py has the other one of the study."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bench.baselines.pointwise import activate, tuned


@tuned(key=["n", "columns"])
@triton.jit
def act_scale_bias_kernel(x, scale, bias, out, n, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    column = at % columns
    y = activate(tl.load(x + at, inside).to(tl.float32), "relu")
    y = y * tl.load(scale + column, inside).to(tl.float32)
    y = y + tl.load(bias + column, inside).to(tl.float32)
    tl.store(out + at, y, inside)


def act_scale_bias(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`x` [..., N] contiguous, `scale` and `bias` [N]."""
    out = torch.empty_like(x)
    n = x.numel()
    act_scale_bias_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](
        x, scale, bias, out, n, scale.numel()
    )
    return out
