"""A layer of few inputs (linear_act_narrow.cuh), run by the emulator of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layouts
import pytest
import torch
from emulator import EmulationError
from linear_act_emulator import NARROW, LinearActEmulator, Saves
from reference import ACTIVATIONS
from test_linear_act_on_cpu import HALVES, check, operands


@pytest.fixture
def linear(build_family: Callable[[str], Path]) -> LinearActEmulator:
    return LinearActEmulator(build_family("linear_act"))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 13, 15, 16])
def test_inputs(linear: LinearActEmulator, dtype: torch.dtype, k: int) -> None:
    """Rows that start anywhere, or in pairs of elements; a last product with fewer than 16."""
    check(linear, *operands(70, 40, k, dtype), "relu", kind=NARROW)


@pytest.mark.parametrize("m", [1, 8, 15, 16, 17, 1000])
@pytest.mark.parametrize("n", [8, 24, 32, 72, 520])
def test_ragged_sizes(linear: LinearActEmulator, m: int, n: int) -> None:
    """Warps without columns or rows; several rounds of rows of few multiprocessors."""
    for linear.num_sms in (1, 3):
        check(linear, *operands(m, n, 13, torch.bfloat16), kind=NARROW)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(linear: LinearActEmulator, activation: str) -> None:
    given = operands(70, 136, 13, torch.bfloat16)
    check(linear, *given, activation, kind=NARROW)
    if activation != "none":
        saves = Saves.MASK if activation == "relu" else Saves.DERIVATIVE
        check(linear, *given, activation, saves=saves, kind=NARROW)


def test_layouts(linear: LinearActEmulator) -> None:
    x, weight, bias = operands(70, 40, 14, torch.bfloat16)
    check(linear, x, weight, None, kind=NARROW)
    for change in (layouts.pitched, lambda t: layouts.shifted(t, 1)):
        check(linear, x, change(weight), bias, kind=NARROW)
        with pytest.raises(EmulationError, match="cannot run this"):  # x is read as one array
            check(linear, change(x), weight, bias, kind=NARROW)
    wide = torch.empty(70, 48, dtype=torch.bfloat16)[:, :40]
    check(linear, x, weight, bias, "silu", output=wide, kind=NARROW)


def test_what_is_not_finite_stays_in_its_row(linear: LinearActEmulator) -> None:
    x, weight, bias = operands(20, 40, 13, torch.bfloat16)
    x[5, 12] = torch.inf
    (y,) = linear.linear_act(x, weight, bias, "none", kind=NARROW)
    others = torch.arange(20) != 5
    assert y[others].isfinite().all()
    assert not y[5].isfinite().any()
