"""Linear layers with an adapter, whose sums are exact, for the kernels that make them at once."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcuda.ops._lora_reference import pitch_of

# x, weight, bias, down, up, scale
Adapted = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, float]


def integers(rows: int, columns: int, dtype: torch.dtype, kept: float = 1.0) -> Tensor:
    return (torch.randint(-2, 3, (rows, columns)) * (torch.rand(rows, columns) < kept)).to(dtype)


def exact_layer(m: int, n: int, k: int, rank: int, dtype: torch.dtype, bias: bool) -> Adapted:
    """Few elements are not zero."""
    sparse = min(1.0, 24 / k)
    x, weight, down = (integers(r, k, dtype, sparse) for r in (m, n, rank))
    up = torch.zeros(n, pitch_of(rank), dtype=dtype)
    up[:, :rank] = integers(n, rank, dtype)
    return x, weight, integers(1, n, dtype)[0] if bias else None, down, up, 0.5
