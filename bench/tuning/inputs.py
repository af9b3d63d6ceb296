"""Random operands on the card for the cases of `bench.tuning`."""

from __future__ import annotations

import torch

# Row lengths at which the kernels' shape changes, each with 2^28 elements (512 MB in bf16).
ROW_LENGTHS = (1024, 4096, 8192, 16384, 65536, 262144)
ROW_ELEMENTS = 2**28


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def rows_of(flat: torch.Tensor, columns: int) -> torch.Tensor:
    """A view as rows of this length, so that all lengths share one buffer."""
    return flat[: flat.numel() // columns * columns].view(-1, columns)
