"""HBM bytes of a step as Nsight Compute counts them, where it is installed.

ncu runs a program from its start, so the model is made again in a process of its own, which marks
one compiled step with the profiler's start and stop.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_TIMEOUT_SECONDS = 600


def find_ncu() -> str | None:
    return shutil.which("ncu")


def measure_bytes(ncu: str, target: str, mode: str, backward: bool) -> dict[str, int]:
    """Bytes by metric of one compiled step of the model that `target` makes."""
    program = [sys.executable, "-m", "fusedcuda.report.ncu", target, mode, str(int(backward))]
    run = subprocess.run(
        [*command(ncu), *program], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
    )
    if run.returncode != 0:
        last = (run.stderr or run.stdout).strip().splitlines()[-1:] or ["no output"]
        raise RuntimeError(f"report: ncu ended with {run.returncode}: {last[0]}")
    return read_bytes(run.stdout)


def command(ncu: str) -> list[str]:
    """Counts from cudaProfilerStart on, without touching the clocks, in plain bytes as CSV."""
    return [
        ncu, "--csv", "--print-units", "base", "--metrics", ",".join(METRICS),
        "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none",
    ]  # fmt: skip


def read_bytes(output: str) -> dict[str, int]:
    """The sums over all kernels in ncu's CSV, which follows lines of the program itself."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError("report: ncu printed no table; it may lack the right to read counters")
    found = dict.fromkeys(METRICS, 0)
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        name = row.get("Metric Name")
        if name in found:
            found[name] += int(float(row["Metric Value"].replace(",", "")))
    return found


def main(arguments: Sequence[str]) -> int:
    """The program under ncu."""
    import torch

    from .cli import load_target, on_gpu
    from .measure import step

    target, mode, backward = arguments
    model, inputs = on_gpu(*load_target(target))
    compiled = torch.compile(model, mode=mode, dynamic=False)
    for _ in range(3):
        step(compiled, inputs, backward == "1")
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    step(compiled, inputs, backward == "1")
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
