"""What the Triton row kernels share: tuning over warps only, and how many programs fill the GPU.

One config is one compilation per row length, on a core that is often slow, so there are few: the
block is the row, or a fixed piece of it, and only the warps are tried.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.testing

WHOLE_ROW_LIMIT = 32768  # longer rows do not fit a program's registers, and are taken in pieces
PIECE = 8192


def block_of(columns: int) -> int:
    return triton.next_power_of_2(columns) if columns <= WHOLE_ROW_LIMIT else PIECE


def fitting(configs: list[triton.Config], arguments: dict, **keywords) -> list[triton.Config]:
    """8 to 64 elements a thread, as far as there are such configs."""
    block = (arguments | keywords)["BLOCK"]
    kept = [c for c in configs if 8 <= block // (32 * c.num_warps) <= 64]
    return kept or configs[:1]


# Flushes the L2 before each call; a tenth of the default time is enough to rank a few configs.
tuned = partial(
    triton.autotune,
    configs=[triton.Config({}, num_warps=warps) for warps in (1, 4, 8, 16, 32)],
    prune_configs_by={"early_config_prune": fitting},
    do_bench=partial(triton.testing.do_bench, warmup=3, rep=15),
)


def programs_for(rows: int, block: int, device: torch.device) -> int:
    """Programs of a persistent kernel: enough rows in flight, and few partial sums of each."""
    per_multiprocessor = max(1, min(16, 16384 // block))
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(rows, multiprocessors * per_multiprocessor)
