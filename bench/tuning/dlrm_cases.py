"""Calls and variants of the dlrm kernels, for `python -m bench.tuning.variants dlrm`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.tuning.inputs import new

# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {
    "as committed": {},
    "two stages": {"kDotStages = 1;": "kDotStages = 2;"},
    "three stages": {"kDotStages = 1;": "kDotStages = 3;"},
    "more registers": {"kFewTilesBlocks = 6;": "kFewTilesBlocks = 5;"},
    "smaller tiles of the sort": {"kSortItems = 18;": "kSortItems = 12;"},
    "pieces of 32 items": {"kRunItems = 64;": "kRunItems = 32;"},
    "pieces of 128 items": {"kRunItems = 64;": "kRunItems = 128;"},
    "128 threads of the sum": {
        "kRunThreads = 64;": "kRunThreads = 128;",
        "kRunBlocksOfSm = 8;": "kRunBlocksOfSm = 4;",
    },
    "eight rows of the head": {"kBceRows = 4;": "kBceRows = 8;"},
    "more blocks of the head": {"kBceBlocksOfSm = 3;": "kBceBlocksOfSm = 4;"},
    "four rows of its gradient": {"kOneOutputRowsAhead = 6;": "kOneOutputRowsAhead = 4;"},
    "more blocks of its gradient": {
        "kOneOutputRowsAhead = 6;": "kOneOutputRowsAhead = 4;",
        "kOneOutputBlocksOfSm = 3;": "kOneOutputBlocksOfSm = 4;",
    },
    "fewer blocks of its gradient": {
        "kOneOutputRowsAhead = 6;": "kOneOutputRowsAhead = 8;",
        "kOneOutputBlocksOfSm = 3;": "kOneOutputBlocksOfSm = 2;",
    },
}
BATCH, TABLE_ROWS = 65536, 260_000


def interactions(columns: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    raw = torch.ops.fusedcuda
    width = -(-(columns + 351) // 8) * 8
    dense, embeddings = new(BATCH, columns, dtype=dtype), new(BATCH, 26, columns, dtype=dtype)
    grad = new(BATCH, width, dtype=dtype)
    name = f"27x{columns} {dtype.itemsize * 8} bits"
    return {
        name: lambda: raw.dot_interaction(dense, embeddings, False, width),
        f"{name} bwd": lambda: raw.dot_interaction_backward(grad, dense, embeddings, False),
    }


def lookups(columns: int) -> dict[str, Callable[[], object]]:
    raw = torch.ops.fusedcuda
    width = -(-(columns + 351) // 8) * 8
    dense, weight, grad = new(BATCH, columns), new(TABLE_ROWS, columns), new(BATCH, width)
    indices = torch.randint(TABLE_ROWS, (BATCH, 26), device=weight.device)
    operands, of_rows = (dense, weight, indices, False), new(BATCH, 26, columns)
    name = f"27x{columns} rows of a table"
    return {
        name: lambda: raw.embedding_interaction(*operands, width),
        f"{name} bwd": lambda: raw.embedding_interaction_backward(grad, *operands, 3),
        f"{name} sum": lambda: raw.embedding_dense_backward(of_rows, indices, TABLE_ROWS),
    }


def cases() -> dict[str, Callable[[], object]]:
    """The interactions of the published models, and MLPerf's head."""
    raw = torch.ops.fusedcuda
    x, weight, bias = new(BATCH, 256), new(1, 256), new(1)
    values = new(BATCH, dtype=torch.float32)
    target, one = values.sigmoid(), values.new_ones(())
    return {
        **interactions(128, torch.bfloat16),
        **interactions(64, torch.bfloat16),
        **interactions(16, torch.bfloat16),
        **interactions(128, torch.float32),
        **lookups(128),
        **lookups(16),
        "head": lambda: raw.linear_sigmoid_bce_forward(x, weight, bias, target, 1.0, 1),
        "head bwd": lambda: raw.linear_sigmoid_bce_backward(one, x, weight, values, 7, 1),
    }
