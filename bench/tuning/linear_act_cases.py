"""Calls and variants of linear_act's kernels that are no products of tiles, for
`python -m bench.tuning.variants linear_act`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch

from bench.tuning.inputs import new
from fusedcuda.ops._activations import ACTIVATIONS


def one_output(rows: int, blocks: int) -> dict[str, str]:
    """Of the gradient of one output: rows that a thread loads ahead, and blocks of an SM."""
    return {
        "kOneOutputRowsAhead = 6;": f"kOneOutputRowsAhead = {rows};",
        "kOneOutputBlocksOfSm = 3;": f"kOneOutputBlocksOfSm = {blocks};",
    }


# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {
    "as committed": {},
    "two rows ahead, four blocks": one_output(2, 4),
    "four rows ahead": one_output(4, 3),
    "four rows ahead, four blocks": one_output(4, 4),
    "six rows ahead, two blocks": one_output(6, 2),
    "eight rows ahead, two blocks": one_output(8, 2),
    "eight rows a thread at least": {"kFewestRows = 2;": "kFewestRows = 8;"},
    "parts by whole lines": {"> 4 * kWarpSize ? 8 : kWarpSize;": "> 0 ? kWarpSize : 8;"},
}
SHAPES = ((65536, 256), (2048, 256), (8192, 4096), (16, 4096))
COLD_BYTES = 192 << 20  # of x, whose copies take turns: three times the L2


def gradient(m: int, k: int, activation: str) -> Callable[[], object]:
    """All of the gradient of a layer of one output."""
    raw, code = torch.ops.fusedcuda, ACTIVATIONS[activation]
    rows = [new(m, k) for _ in range(max(1, COLD_BYTES // (2 * m * k)))]
    weight, dy = new(1, k), new(m, 1)
    _, *saved = raw.linear_act_forward(rows[0], weight, None, code, False)
    kept, x = saved[0] if saved else None, cycle(rows)
    return lambda: raw.linear_act_backward(dy, next(x), weight, kept, code, 7, False)


def cases() -> dict[str, Callable[[], object]]:
    return {
        f"{m}x{k} {activation}": gradient(m, k, activation)
        for m, k in SHAPES
        for activation in ("none", "relu", "silu")
    }
