"""Variants of the pointwise kernels: text replacements, built in parallel, timed in turn.

    python -m bench.tuning.variants            # on the card, from the repository's root

Edit VARIANTS, run, and write what each gave into bench/results/<gpu>/pointwise_notes.md. A build is
a copy of csrc under build/variants, so an interrupted run leaves the sources alone.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "build" / "variants"

# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {
    "as committed": {},
    "sum tile 64": {"kSumTileX = 32": "kSumTileX = 64"},
    "sum blocks 8 and 8": {"? 5 : 4;": "? 8 : 8;"},
    "sum partials: one load": {"constexpr int kUnroll = 4;": "constexpr int kUnroll = 1;"},
    "no dependent launch": {"attributes.ptxVersion >= 90": "attributes.ptxVersion >= 900"},
}


def cases() -> dict[str, Callable[[], object]]:
    """Calls on random bf16 tensors far larger than the L2."""
    import fusedcuda

    raw = torch.ops.fusedcuda

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, grad, bias = new(65536, 1024), new(65536, 1024), new(1024)
    y = fusedcuda.bias_act(x, bias)
    wide, wide_grad, row = new(16384, 4096), new(16384, 4096), new(4096)
    packed, packed_grad = new(8192, 28672), new(8192, 14336)
    shifted, aligned = new(2**26 + 1)[1:], new(2**26)
    small = [torch.randn(1024, 1024, device="cuda") for _ in range(3)]
    return {
        "bias relu": lambda: fusedcuda.bias_act(x, bias),
        "bias gelu": lambda: fusedcuda.bias_act(x, bias, "gelu"),
        "scale bias": lambda: fusedcuda.act_scale_bias(wide, row, row),
        "packed": lambda: fusedcuda.act_mul_packed(packed),
        "bias relu bwd": lambda: raw.add_relu_backward(grad, y, y, bias, 0b11),
        "bias gelu_tanh bwd": lambda: raw.bias_act_backward(grad, x, bias, 6, 0b11),
        "scale bias bwd": lambda: raw.act_scale_bias_backward(wide_grad, wide, row, row, 1, 0b111),
        "packed bwd": lambda: raw.act_mul_packed_backward(packed_grad, packed, 7),
        "shifted": lambda: fusedcuda.add_relu(shifted, aligned),
        "4 MB fp32": lambda: fusedcuda.add_mul_act(*small),
    }


def microseconds(call: Callable[[], object]) -> float:
    """A call's time in a CUDA graph of many, the median of seven replays."""
    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    count = max(4, min(400, int(2000 / max(start.elapsed_time(end) * 1e3, 1))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    times = []
    for _ in range(7):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def prepare(index: int, replacements: dict[str, str]) -> Path:
    """A copy of csrc with the replacements; each has to occur somewhere."""
    folder = BUILDS / str(index)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", folder)
    for old, new in replacements.items():
        files = [path for path in folder.rglob("*") if path.is_file() and old in path.read_text()]
        if not files:
            raise SystemExit(f"{old!r} does not occur in csrc")
        for path in files:
            path.write_text(path.read_text().replace(old, new))
    return folder


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "FUSEDCUDA_CSRC": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    folders = [prepare(index, replacements) for index, replacements in enumerate(VARIANTS.values())]
    builds = [start(f, "-c", "import fusedcuda; fusedcuda.load('pointwise')") for f in folders]
    for build in builds:
        build.communicate()
    for name, folder in zip(VARIANTS, folders, strict=True):
        output, _ = start(folder, "-m", "bench.tuning.variants", "--measure").communicate()
        try:
            results = json.loads(output.strip().rsplit("\n", 1)[-1])
        except ValueError:
            print(f"{name:24s} failed", flush=True)
            continue
        row = " | ".join(f"{case} {us:.2f}" for case, us in results.items())
        print(f"{name:24s} | {row}", flush=True)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        print(json.dumps({case: microseconds(call) for case, call in cases().items()}))
    else:
        main()
