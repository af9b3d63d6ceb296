# ruff: noqa: N803  (constexpr arguments are in capitals, as everywhere in Triton)
"""Triton kernels of the pointwise family, autotuned over block size and warps.

Each computes in fp32 and rounds once, as fusedcuda does, and takes contiguous operands only. The
tuning happens in the first call of a shape, before anything is timed.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
import triton.testing

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in [
        (512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 8),
    ]
]  # fmt: skip

# Flushes the L2 before each call; a tenth of the default time is enough to rank eight configs.
tuned = partial(
    triton.autotune, configs=CONFIGS, do_bench=partial(triton.testing.do_bench, warmup=3, rep=15)
)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)  # a comparison, so that NaN stays
    elif ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "none", "unknown activation")
        y = x
    return y


@tuned(key=["n"])
@triton.jit
def add_mul_act_kernel(a, b, c, out, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(a + at, inside).to(tl.float32) + tl.load(b + at, inside).to(tl.float32)
    x = activate(x * tl.load(c + at, inside).to(tl.float32), ACTIVATION)
    tl.store(out + at, x, inside)


def add_mul_act(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, activation: str = "relu"
) -> torch.Tensor:
    out = torch.empty_like(a)
    n = a.numel()
    add_mul_act_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](
        a, b, c, out, n, ACTIVATION=activation
    )
    return out


@tuned(key=["n", "columns"])
@triton.jit
def bias_act_kernel(x, bias, out, n, columns, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    y = tl.load(x + at, inside).to(tl.float32) + tl.load(bias + at % columns, inside).to(tl.float32)
    tl.store(out + at, activate(y, ACTIVATION), inside)


def bias_act(x: torch.Tensor, bias: torch.Tensor, activation: str = "relu") -> torch.Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    bias_act_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](
        x, bias, out, n, bias.numel(), ACTIVATION=activation
    )
    return out


@tuned(key=["rows", "d"])
@triton.jit
def silu_mul_packed_kernel(gate_up, out, rows, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < d
    gate = tl.load(gate_up + row * 2 * d + at, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * d + d + at, inside).to(tl.float32)
    tl.store(out + row * d + at, gate * tl.sigmoid(gate) * up, inside)


@tuned(key=["rows", "d"])
@triton.jit
def silu_mul_packed_bwd_kernel(grad_out, gate_up, grad, rows, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < d
    dy = tl.load(grad_out + row * d + at, inside).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * d + at, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * d + d + at, inside).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(grad + row * 2 * d + at, dy * up * s * (1 + gate * (1 - s)), inside)
    tl.store(grad + row * 2 * d + d + at, dy * gate * s, inside)


class SiluMulPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: torch.Tensor) -> torch.Tensor:
        d = gate_up.shape[-1] // 2
        rows = gate_up.numel() // (2 * d)
        out = gate_up.new_empty((*gate_up.shape[:-1], d))
        silu_mul_packed_kernel[lambda meta: (rows, triton.cdiv(d, meta["BLOCK"]))](
            gate_up, out, rows, d
        )
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx, grad_out: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        d = gate_up.shape[-1] // 2
        rows = gate_up.numel() // (2 * d)
        grad = torch.empty_like(gate_up)
        silu_mul_packed_bwd_kernel[lambda meta: (rows, triton.cdiv(d, meta["BLOCK"]))](
            grad_out, gate_up, grad, rows, d
        )
        return grad


def silu_mul_packed(gate_up: torch.Tensor) -> torch.Tensor:
    return SiluMulPacked.apply(gate_up)
