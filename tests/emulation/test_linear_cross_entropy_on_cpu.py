"""The real kernel of linear_cross_entropy, run by the emulator of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulator import DTYPES
from layouts import shifted
from linear_cross_entropy_emulator import LinearCrossEntropyEmulator
from torch import Tensor

from fusedcuda.ops._operands import compute_dtype


@pytest.fixture
def family(build_family: Callable[[str], Path]) -> LinearCrossEntropyEmulator:
    return LinearCrossEntropyEmulator(build_family("linear_cross_entropy"))


def check(family: LinearCrossEntropyEmulator, gradient: Tensor, factor: float) -> None:
    by = torch.tensor(factor, dtype=compute_dtype(gradient.dtype))
    expected = (gradient.to(by.dtype) * by).to(gradient.dtype)
    assert torch.equal(family.scale(gradient, by), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 1024, 8191, 8192, 8197, 40000])
def test_sizes(family, count, dtype) -> None:
    """One vector, rests behind the last one, threads with fewer than four, several rounds."""
    for factor in (0.5, -0.3, 0.0):
        check(family, torch.randn(count).to(dtype), factor)
    assert family.vec == (1 if dtype == torch.float64 else 16 // dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned(family, dtype) -> None:
    for count in (1, 9, 3000):
        check(family, shifted(torch.randn(1, count).to(dtype), 1)[0], 3.0)
        assert family.vec == 1


@pytest.mark.parametrize("num_sms", [1, 3])
def test_the_grid_is_one_wave(family, num_sms) -> None:
    """Blocks come round again, so that a factor of 1 is found out by few of them."""
    family.num_sms = num_sms
    check(family, torch.randn(300_000).bfloat16(), 1.5)
    assert family.blocks == min(8 * num_sms, 300_000 // (8 * 4 * 256) + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_moves_nothing(family, dtype) -> None:
    """Not even what a product with 1 would change: a NaN keeps its bits."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    gradient = torch.full((100,), -1, dtype=bits).view(dtype)
    one = torch.ones((), dtype=compute_dtype(dtype))
    assert torch.equal(family.scale(gradient, one).view(bits), gradient.view(bits))


def test_nothing_to_scale(family) -> None:
    check(family, torch.empty(0), 2.0)
    assert family.blocks == 0
