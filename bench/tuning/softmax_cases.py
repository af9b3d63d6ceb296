"""Calls and variants of the softmax kernels, for `python -m bench.tuning.variants softmax`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.tuning.inputs import ROW_ELEMENTS, ROW_LENGTHS, new, rows_of

# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {"as committed": {}}


def cases() -> dict[str, Callable[[], object]]:
    """Forward and backward by row length."""
    import fusedcuda

    raw = torch.ops.fusedcuda
    x, dy = new(ROW_ELEMENTS), new(ROW_ELEMENTS)
    y = x.sigmoid()  # the backward's time does not depend on what a forward would have given
    calls: dict[str, Callable[[], object]] = {}

    def add(columns: int) -> None:
        rows, grad, output = (rows_of(t, columns) for t in (x, dy, y))
        calls[f"fwd {columns}"] = lambda: fusedcuda.softmax(rows)
        calls[f"bwd {columns}"] = lambda: raw.softmax_backward(grad, output, 1.0)

    for columns in (*ROW_LENGTHS, 4097):
        add(columns)
    rows, grad, output = (rows_of(t, 16384) for t in (x, dy, y))
    return calls | {
        "log fwd 16384": lambda: fusedcuda.log_softmax(rows),
        "log bwd 16384": lambda: raw.log_softmax_backward(grad, output, 1.0),
    }
