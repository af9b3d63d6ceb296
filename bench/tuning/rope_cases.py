"""Calls and variants of the RoPE kernel, for `python -m bench.tuning.variants rope`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.tuning.inputs import new

# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {"as committed": {}}
POSITIONS = 4096


def cases() -> dict[str, Callable[[], object]]:
    """32 and 8 heads of 128, 4 x 4096 positions, in both layouts and both pairings."""
    raw = torch.ops.fusedcuda
    bhsd = new(4, 32, POSITIONS, 128), new(4, 8, POSITIONS, 128)
    bshd = tuple(new(4, POSITIONS, heads, 128).transpose(1, 2) for heads in (32, 8))
    token = tuple(new(128, 1, heads, 128).transpose(1, 2) for heads in (32, 8))
    cos, sin = new(POSITIONS, 128), new(POSITIONS, 128)
    half = cos[:, :64].contiguous(), sin[:, :64].contiguous()
    return {
        "bshd": lambda: raw.rope(*bshd, cos, sin, False),
        "bshd bwd": lambda: raw.rope_backward(*bshd, cos, sin, False),
        "bshd pairs": lambda: raw.rope(*bshd, cos, sin, True),
        "bshd half tables": lambda: raw.rope(*bshd, *half, False),
        "bshd in place": lambda: raw.rope_(*bshd, cos, sin, False),
        "bhsd": lambda: raw.rope(*bhsd, cos, sin, False),
        "bhsd bwd": lambda: raw.rope_backward(*bhsd, cos, sin, False),
        "bhsd pairs": lambda: raw.rope(*bhsd, cos, sin, True),
        "one token": lambda: raw.rope(*token, cos[:1], sin[:1], False),
    }
