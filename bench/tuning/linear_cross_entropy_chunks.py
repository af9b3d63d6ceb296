"""Time and peak memory of linear + cross-entropy over chunk, sum and backend.

`python -m bench.tuning.linear_cross_entropy_chunks [SECONDS]`: forward and backward in bf16 of the
two shapes of TARGETS, contenders in turn, milliseconds of the median round. Behind each: GiB beside
the operands, cuBLASLt's workspace not counted, and TFLOP/s of its three products.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator

import torch

import fusedcuda
from bench.bench_linear_cross_entropy import LLAMA_8B, MHV, SMALL, Setting
from bench.cases import forced

CHUNKS = (512, 1024, 2048, 2816, 4096, 8192)


def contenders() -> Iterator[Setting]:
    for chunk, accumulate, backend in itertools.product(
        CHUNKS, ("weight", "fp32"), ("measured", "cublaslt")
    ):
        if chunk < max(CHUNKS) or accumulate == "weight":  # one chunk has no sum
            yield Setting(chunk, accumulate, backend)


def step(leaves: list[torch.Tensor], target: torch.Tensor, setting: Setting) -> None:
    x, weight = leaves
    how = {"chunk": setting.chunk, "accumulate": setting.accumulate}
    layer = forced("linear_act_use", setting.backend, fusedcuda.linear_cross_entropy)
    torch.autograd.grad(layer(x, weight, target, **how), leaves)


def peak_gib(leaves: list[torch.Tensor], target: torch.Tensor, setting: Setting) -> float:
    step(leaves, target, setting)  # searches for algorithms, keeps the workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(leaves, target, setting)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def milliseconds(leaves: list[torch.Tensor], target: torch.Tensor, setting: Setting) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(2):
        step(leaves, target, setting)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 2


def sweep(shape: MHV, seconds: float) -> None:
    fusedcuda.load("linear_act")
    m, h, v = shape
    leaves = [torch.randn(m, h, device="cuda"), torch.randn(v, h, device="cuda") * h**-0.5]
    leaves = [t.bfloat16().requires_grad_() for t in leaves]
    target = torch.randint(v, (m,), device="cuda")
    found = {setting: peak_gib(leaves, target, setting) for setting in contenders()}
    times: dict[Setting, list[float]] = {setting: [] for setting in found}
    deadline = time.time() + seconds
    while time.time() < deadline:
        for setting, samples in times.items():
            samples.append(milliseconds(leaves, target, setting))
    print(f"{m}x{h}x{v}: {len(times[next(iter(times))])} rounds")
    for setting, samples in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        ms = statistics.median(samples)
        tflops = 6 * m * h * v / ms / 1e9
        print(
            f"  {setting.chunk:5} rows, {setting.accumulate:6}, {setting.backend:8}: "
            f"{ms:7.3f} ms, {found[setting]:.3f} GiB, {tflops:.0f} TFLOP/s"
        )


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    for shape in (LLAMA_8B, SMALL):
        sweep(shape, seconds / 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
