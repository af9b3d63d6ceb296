"""Calls and variants of the lora kernels, for `python -m bench.tuning.variants lora`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch

from bench.tuning.inputs import new

# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {
    "as committed": {},
    "three stages": {"kLoraStages = 4;": "kLoraStages = 3;"},
    "six stages": {"kLoraStages = 4;": "kLoraStages = 6;"},
    "32 rows a block": {"for (int of_block = 64;": "for (int of_block = 32;"},
    "8 KB of x a stage": {"8192 / config.rows_of_stage": "4096 / config.rows_of_stage"},
    "one block an SM of the sums": {"int64_t{2} * device.num_sms": "int64_t{1} * device.num_sms"},
    "ten rounds of Philox": {"kPhiloxRounds = 7;": "kPhiloxRounds = 10;"},
    # Of few rows in one launch: how weights are read, and how many are under way.
    "weights through L1": {
        "return load_of_others(reinterpret_cast<const uint4*>(from));": (
            "return *reinterpret_cast<const uint4*>(from);"
        )
    },
    "two steps ahead": {"kFewRowsAhead = 4;": "kFewRowsAhead = 2;"},
    "six steps ahead": {"kFewRowsAhead = 4;": "kFewRowsAhead = 6;"},
    "eight warps": {"kFewRowsWarps = 16;": "kFewRowsWarps = 8;"},
    "clusters of two": {"while (log2 < 2 &&": "while (log2 < 1 &&"},
    "clusters of eight": {"while (log2 < 2 &&": "while (log2 < 3 &&"},
}
BATCH = 8192  # rows of x
FEW = (16, 4096, 4096)  # rows, outputs and columns where all is one launch
COPIES = 8  # of its weight: together they do not fit into the L2


def products(k: int, rank: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """t, and the gradients of both factors; with a factor of `dtype`."""
    raw = torch.ops.fusedcuda
    x, factor = new(BATCH, k), new(rank, k, dtype=dtype)
    other = new(k, rank, dtype=dtype).T
    in_float32 = dtype == torch.float32
    name = f"{k} r{rank}{' fp32' if in_float32 else ''}"
    t = raw.lora_down(x, factor, None, 1.0, 0.0)
    return {
        f"t {name}": lambda: raw.lora_down(x, factor, None, 1.0, 0.0),
        f"dt {name}": lambda: raw.lora_down(x, other, None, 1.0, 0.0),
        f"dA {name}": lambda: raw.lora_up(t, x, None, rank, 0.0, False, in_float32),
        f"dB {name}": lambda: raw.lora_up(t, x, None, rank, 0.0, True, in_float32),
    }


def few_rows(m: int, n: int, k: int, rank: int) -> Callable[[], object]:
    x, down, up = new(m, k), new(rank, k), new(n, rank)
    weights = cycle([new(n, k) for _ in range(COPIES)])
    return lambda: torch.ops.fusedcuda.lora_decode(x, next(weights), None, down, up, 1.0, 0)


def cases() -> dict[str, Callable[[], object]]:
    raw = torch.ops.fusedcuda
    x, factor, few = new(BATCH, 4096), new(16, 4096), new(16, 4096)
    seed = torch.ones(1, dtype=torch.int64, device=x.device)
    return {
        **products(4096, 16, torch.bfloat16),
        **products(4096, 16, torch.float32),
        **products(4096, 64, torch.bfloat16),
        **products(14336, 16, torch.bfloat16),
        "t 4096 r16 dropout": lambda: raw.lora_down(x, factor, seed, 1.0, 0.1),
        "t 4096 r16, 16 rows": lambda: raw.lora_down(few, factor, None, 1.0, 0.0),
        "few rows r16": few_rows(*FEW, 16),
        "dropout": lambda: raw.lora_dropout(x, seed, 0.1),
    }
