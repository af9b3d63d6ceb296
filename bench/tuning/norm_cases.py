"""Calls and variants of the norm kernels, for `python -m bench.tuning.variants norm`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.tuning.inputs import ROW_ELEMENTS, ROW_LENGTHS, new, rows_of

# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {"as committed": {}}


def cases() -> dict[str, Callable[[], object]]:
    """Forward and backward by row length, then what differs from the plain case at 4096."""
    import fusedcuda

    raw = torch.ops.fusedcuda
    x, dy, dh = (new(ROW_ELEMENTS) for _ in range(3))
    weights, biases = new(max(ROW_LENGTHS)), new(max(ROW_LENGTHS))
    calls: dict[str, Callable[[], object]] = {}

    def add(columns: int) -> None:
        rows, grad = rows_of(x, columns), rows_of(dy, columns)
        weight, bias = weights[:columns], biases[:columns]
        _, rstd = raw.rms_norm_forward(rows, None, weight, 1e-6, 0.0)
        _, mean, layer_rstd = raw.layer_norm_forward(rows, None, weight, bias, 1e-5)
        calls.update({
            f"rms {columns}": lambda: fusedcuda.rms_norm(rows, weight),
            f"rms bwd {columns}": lambda: raw.rms_norm_backward(
                grad, rows, rstd, weight, None, 0.0, 0b11
            ),
            f"layer {columns}": lambda: fusedcuda.layer_norm(rows, weight, bias),
            f"layer bwd {columns}": lambda: raw.layer_norm_backward(
                grad, rows, mean, layer_rstd, weight, bias, None, 0b111
            ),
        })  # fmt: skip

    for columns in (*ROW_LENGTHS, 4097):
        add(columns)
    rows, residual, grad_h, weight = *(rows_of(t, 4096) for t in (x, dy, dh)), weights[:4096]
    _, h, rstd = raw.rms_norm_forward(rows, residual, weight, 1e-6, 0.0)
    one_token, fp32_weight = new(1, 4096), weight.float()
    return calls | {
        "add rms 4096": lambda: raw.rms_norm_forward(rows, residual, weight, 1e-6, 0.0),
        "add rms bwd 4096": lambda: raw.rms_norm_backward(
            residual, h, rstd, weight, grad_h, 0.0, 0b11
        ),
        "rms fp32 weight": lambda: fusedcuda.rms_norm(rows, fp32_weight),
        "rms 1x4096": lambda: fusedcuda.rms_norm(one_token, weight),
    }
