"""What a LoRA layer launches, by torch's profiler: `python -m bench.tuning.lora_trace [FOLDER]`.

A forward and a backward of bf16 layers, 16 ranks: many rows, the same with dropout, 16 rows. A line
a kernel, in the order of their start, with its microseconds (warm, one step); with FOLDER a trace
for chrome://tracing or Perfetto each.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import record_function

import fusedcuda
from bench.tuning.inputs import new
from examples.traces import BACKWARD, FORWARD, profiled

FEATURES, RANK, WARMUPS = 4096, 16, 5
LAYERS = {"8192_rows": (8192, 0.0), "8192_rows_dropout": (8192, 0.1), "16_rows": (16, 0.0)}


def trace(name: str, rows: int, dropout_p: float, folder: Path) -> None:
    x, dy = new(rows, FEATURES).requires_grad_(), new(rows, FEATURES)
    weight = new(FEATURES, FEATURES)
    factors = [(new(*s) * 0.01).requires_grad_() for s in ((RANK, FEATURES), (FEATURES, RANK))]

    def step() -> None:
        with record_function(FORWARD):
            y = fusedcuda.lora_linear(x, weight, *factors, 2.0, dropout_p=dropout_p, training=True)
        with record_function(BACKWARD):
            torch.autograd.grad(y, [x, *factors], dy)

    for _ in range(WARMUPS):
        step()
    found = profiled(step, folder / f"lora_{name}.json.gz")
    print(f"{name}: {len(found.kernels)} launches, {found.us:.1f} us")
    for kernel in found.kernels:
        print(f"  {kernel.phase:9}{kernel.us:8.1f}  {kernel.name[:100]}")


def main() -> int:
    fusedcuda.load("lora")
    fusedcuda.load("linear_act")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        for name, (rows, dropout_p) in LAYERS.items():
            trace(name, rows, dropout_p, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
