"""Every way in which two operands can lie in memory, through the real kernels on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import layouts
import pytest
import torch
from comparison import NUM_OPERANDS, Operand, check_backward, check_forward, integers
from pointwise_emulator import OPS, Emulator, Launch
from torch import Tensor

VECTOR = {torch.bfloat16: 8, torch.float32: 4, torch.float64: 1}


@dataclass(frozen=True)
class Layout:
    """Two operands, and what their launches must be: (path, whether any tensor is in vectors)."""

    make: Callable[[Callable[..., Tensor]], tuple[Tensor, Operand]]
    forward: tuple[str, bool]
    backward: tuple[str, bool]


def pitched_by_vectors(x: Tensor) -> Tensor:
    """Rows that start at multiples of 16 bytes, with NaN between them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan, dtype=x.dtype)
    wide[..., :-8] = x
    return wide[..., :-8]


LINEAR, FLAT = ("linear", True), ("flat", True)
BROADCAST, SCALAR_BROADCAST = ("broadcast", True), ("broadcast", False)
COLUMNS, SCALAR_COLUMNS = ("columns", True), ("columns", False)
ROWS, SCALAR_ROWS = ("rows", True), ("rows", False)

LAYOUTS = {
    "full": Layout(lambda new: (new(9, 64), new(9, 64)), LINEAR, BROADCAST),
    "full with a rest": Layout(lambda new: (new(7, 43), new(7, 43)), LINEAR, BROADCAST),
    "one block and a rest": Layout(lambda new: (new(2051), new(2051)), LINEAR, BROADCAST),
    "one element": Layout(lambda new: (new(1), new(1)), LINEAR, SCALAR_BROADCAST),
    "row": Layout(lambda new: (new(37, 40), new(40)), BROADCAST, COLUMNS),
    "odd row": Layout(lambda new: (new(37, 41), new(41)), FLAT, SCALAR_COLUMNS),
    "long row": Layout(lambda new: (new(3, 4104), new(4104)), BROADCAST, COLUMNS),
    "long odd row": Layout(lambda new: (new(3, 2101), new(2101)), FLAT, SCALAR_COLUMNS),
    "column": Layout(lambda new: (new(37, 40), new(37, 1)), BROADCAST, ROWS),
    "odd column": Layout(lambda new: (new(37, 41), new(37, 1)), FLAT, SCALAR_ROWS),
    "column, long rows": Layout(lambda new: (new(3, 4104), new(3, 1)), BROADCAST, ROWS),
    "column, long odd rows": Layout(lambda new: (new(3, 2101), new(3, 1)), FLAT, SCALAR_ROWS),
    "column of many rows": Layout(lambda new: (new(700, 8), new(700, 1)), BROADCAST, ROWS),
    "scalar": Layout(lambda new: (new(37, 40), new()), BROADCAST, ROWS),
    "scalar, odd": Layout(lambda new: (new(37, 41), new()), BROADCAST, SCALAR_ROWS),
    "number": Layout(lambda new: (new(37, 40), 3.0), LINEAR, BROADCAST),
    "number, pitched": Layout(lambda new: (layouts.pitched(new(37, 40)), 3.0), FLAT, FLAT),
    "row shorter than a vector": Layout(lambda new: (new(301, 3), new(3)), FLAT, SCALAR_COLUMNS),
    "column of rows shorter than a vector": Layout(
        lambda new: (new(301, 3), new(301, 1)), FLAT, SCALAR_ROWS
    ),
    "NCHW": Layout(lambda new: (new(3, 5, 4, 6), new(5, 1, 1)), BROADCAST, ROWS),
    "NCHW, odd": Layout(lambda new: (new(3, 5, 3, 3), new(5, 1, 1)), FLAT, SCALAR_ROWS),
    "NCHW, planes smaller than a vector": Layout(
        lambda new: (new(30, 5, 1, 3), new(5, 1, 1)), FLAT, SCALAR_ROWS
    ),
    "NCHW, large odd planes": Layout(
        lambda new: (new(2, 3, 37, 41), new(3, 1, 1)), FLAT, SCALAR_ROWS
    ),
    "channels-last": Layout(
        lambda new: (layouts.channels_last(new(3, 8, 4, 5)), new(8, 1, 1)), BROADCAST, COLUMNS
    ),
    "channels-last, odd": Layout(
        lambda new: (layouts.channels_last(new(3, 5, 4, 5)), new(5, 1, 1)),
        FLAT,
        SCALAR_COLUMNS,
    ),
    "middle": Layout(lambda new: (new(5, 6, 7), new(5, 1, 7)), FLAT, SCALAR_COLUMNS),
    "middle, short rows": Layout(lambda new: (new(5, 30, 3), new(5, 1, 3)), FLAT, SCALAR_COLUMNS),
    "middle, long odd rows": Layout(
        lambda new: (new(3, 4, 301), new(3, 1, 301)), FLAT, SCALAR_COLUMNS
    ),
    "columns of two dimensions": Layout(
        lambda new: (new(5, 4, 301)[..., :300], new(4, 300)), FLAT, SCALAR_COLUMNS
    ),
    "middle, in vectors": Layout(lambda new: (new(5, 6, 8), new(5, 1, 8)), BROADCAST, COLUMNS),
    "outer and inner": Layout(lambda new: (new(5, 6, 8), new(6, 1)), BROADCAST, ROWS),
    "both transposed": Layout(
        lambda new: (layouts.transposed(new(24, 40)), layouts.transposed(new(24, 40))),
        LINEAR,
        BROADCAST,
    ),
    "one transposed": Layout(
        lambda new: (new(24, 40), layouts.transposed(new(24, 40))),
        FLAT,
        SCALAR_BROADCAST,  # the two gradients are written in different orders
    ),
    "transposed, row": Layout(
        lambda new: (layouts.transposed(new(24, 40)), new(40)), BROADCAST, ROWS
    ),
    "transposed, column": Layout(
        lambda new: (layouts.transposed(new(24, 40)), new(24, 1)), BROADCAST, COLUMNS
    ),
    "row reversed in memory": Layout(
        lambda new: (layouts.reversed_dimensions(new(6, 5, 16)), new(5, 16)),
        FLAT,
        SCALAR_ROWS,
    ),
    "row transposed": Layout(
        lambda new: (new(6, 5, 16), layouts.transposed(new(5, 16))),
        FLAT,
        SCALAR_COLUMNS,
    ),
    "pitched by vectors": Layout(
        lambda new: (pitched_by_vectors(new(19, 40)), new(40)), BROADCAST, COLUMNS
    ),
    "pitched by odd rows": Layout(lambda new: (new(19, 43)[:, :40], new(40)), FLAT, SCALAR_COLUMNS),
    "pitched": Layout(lambda new: (layouts.pitched(new(19, 40)), new(40)), FLAT, SCALAR_COLUMNS),
    "every second element": Layout(
        lambda new: (layouts.spread(new(19, 40)), new(19, 1)), FLAT, SCALAR_ROWS
    ),
    "shifted": Layout(lambda new: (layouts.shifted(new(9, 64), 1), new(9, 64)), FLAT, FLAT),
    "shifted with a rest": Layout(
        lambda new: (layouts.shifted(new(2051), 1), new(2051)), FLAT, FLAT
    ),
    "shifted, odd row": Layout(
        lambda new: (layouts.shifted(new(37, 41), 1), new(41)), FLAT, SCALAR_COLUMNS
    ),
    "shifted, odd column": Layout(
        lambda new: (layouts.shifted(new(37, 41), 1), new(37, 1)), FLAT, SCALAR_ROWS
    ),
    "row shifted": Layout(
        lambda new: (new(37, 40), layouts.shifted(new(40), 1)), FLAT, SCALAR_COLUMNS
    ),
    "expanded": Layout(lambda new: (new(37, 40), new(40).expand(37, 40)), BROADCAST, BROADCAST),
    "four dimensions": Layout(lambda new: (new(3, 4, 5, 8), new(3, 1, 5, 1)), BROADCAST, ROWS),
}


def assert_covers(path: str, in_vectors: bool, launch: Launch, dtype: torch.dtype) -> None:
    """Assert that a launch is what the layout wants to cover."""
    if dtype == torch.float64 and path in ("linear", "flat"):
        path = "broadcast"
    assert (launch.path, launch.vec) == (path, VECTOR[dtype] if in_vectors else 1)


@pytest.mark.parametrize("dtype", VECTOR, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(emulator: Emulator, name: str, op: str, dtype: torch.dtype) -> None:
    layout = LAYOUTS[name]
    x, other = layout.make(lambda *shape: integers(*shape, dtype=dtype))
    operands = [x, other, other][: NUM_OPERANDS[op]]
    assert_covers(*layout.forward, check_forward(emulator, op, *operands), dtype)
    (launch,) = check_backward(emulator, op, *operands)
    assert_covers(*layout.backward, launch, dtype)
