"""RoPE: `python -m bench.bench_rope [--quick] [--filter REGEX] [--out DIR]`.

Shapes are logical, (B, H, S, D), in two memory layouts: `bhsd` is contiguous; `bshd` is a
transposed view of (B, S, H, D), which is what a projection of the hidden states gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench import cases, harness, plots
from bench.cases import (
    MODES,
    Case,
    Function,
    Target,
    Tensors,
    faster,
    fusedcuda_op,
    host_cases,
    liger_function,
    torch_providers,
    traffic,
    triton_op,
)

BF16 = torch.bfloat16

TARGETS: dict[str, tuple[Target, ...]] = {
    "rope bshd q32 k8 4x4096x128 bf16 forward": (faster("liger", 1.0), faster("best", 1.0)),
    "rope bshd q32 k8 4x4096x128 bf16 backward": (faster("liger", 1.0), faster("best", 1.0)),
}

new_case = partial(cases.new_case, targets=TARGETS)


# -- inputs ---------------------------------------------------------------------------------------


def tables(sequence: int, d: int, interleaved: bool, device: torch.device) -> Tensors:
    """cos and sin of (1, S, D) for base 10000, each frequency in both places of its pair."""
    frequency = 10000.0 ** (-torch.arange(0, d, 2, device=device) / d)
    angle = torch.outer(torch.arange(sequence, device=device), frequency)
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
    return angle.cos().to(BF16)[None], angle.sin().to(BF16)[None]


def operands(
    layout: str, heads: tuple[int, int], batch: int, sequence: int, d: int, interleaved: bool
) -> Callable[[torch.Generator], Tensors]:
    def heads_of(count: int, generator: torch.Generator) -> torch.Tensor:
        middle = (sequence, count) if layout == "bshd" else (count, sequence)
        x = torch.randn(batch, *middle, d, generator=generator, device=generator.device, dtype=BF16)
        return x.transpose(1, 2) if layout == "bshd" else x

    def draw(generator: torch.Generator) -> Tensors:
        q, k = (heads_of(count, generator) for count in heads)
        return q, k, *tables(sequence, d, interleaved, generator.device)

    return draw


def own_q_and_k(inputs: Tensors) -> Tensors:
    """For a peer that rotates in place: all providers share the inputs."""
    return tuple(t.clone() for t in inputs)


# -- the operations -------------------------------------------------------------------------------


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def eager_of(rotate: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    """The formula of Hugging Face's models, with their `rotate_half` or GPT-J's pairs."""

    def eager(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

    return eager


def rope(
    layout: str,
    mode: str,
    *,
    interleaved: bool = False,
    heads: tuple[int, int] = (32, 8),
    batch: int = 4,
    sequence: int = 4096,
    d: int = 128,
) -> Case:
    eager = eager_of(rotate_pairs if interleaved else rotate_half)
    x, k = ((batch, count, sequence, d) for count in heads)
    table = (1, sequence, d)
    liger = {} if interleaved else liger_function(
        "rope", "LigerRopeFunction", adapt=own_q_and_k,
        note="rotates bshd operands and gradients in place, and copies bhsd ones first",
    )  # fmt: skip
    variant = f"{'interleaved ' if interleaved else ''}{layout} q{heads[0]} k{heads[1]}"
    return new_case(
        "rope", variant, (batch, sequence, d), BF16, mode=mode,
        traffic=traffic(BF16, read=[x, k, table, table], write=[x, k]),  # either way
        make_inputs=operands(layout, heads, batch, sequence, d, interleaved),
        reference=eager,
        providers={
            "fusedcuda": fusedcuda_op("rope", interleaved=interleaved), **torch_providers(eager),
            "triton": triton_op("rope", "rope", interleaved=interleaved), **liger,
        },
        constants=2,
    )  # fmt: skip


# -- the list -------------------------------------------------------------------------------------


def host_table() -> list[Case]:
    """One token, 32 and 8 heads of 128. torch has no such op, so there is no native column."""
    x, k, table = (1, 32, 1, 128), (1, 8, 1, 128), (1, 1, 128)
    return host_cases(
        "rope", x, traffic(BF16, read=[x, k, table, table], write=[x, k]),
        operands("bshd", (32, 8), 1, 1, 128, interleaved=False), eager_of(rotate_half),
        constants=2,
    )  # fmt: skip


def build_cases() -> list[Case]:
    return [
        *(rope("bshd", mode) for mode in MODES),
        *host_table(),
        *(rope("bhsd", mode) for mode in MODES),
        *(rope("bshd", mode, interleaved=True) for mode in MODES),
        *(rope("bhsd", mode, interleaved=True) for mode in MODES),
        rope("bshd", "forward", batch=128, sequence=1),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main("rope", build_cases(), partial(plots.draw, family="rope"), arguments)


if __name__ == "__main__":
    sys.exit(main())
