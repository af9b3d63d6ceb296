"""Variants of a family's kernels: text replacements in csrc, built in parallel, timed in turn.

    python -m bench.tuning.variants FAMILY [--filter REGEX]     # on the card, from the root

`bench/tuning/<family>_cases.py` has the calls and VARIANTS, which is there to be edited: run, and
write what each variant gave into bench/results/<gpu>/<family>_notes.md. A build is a copy of csrc
under build/variants of which only this family is compiled, so an interrupted run leaves the sources
alone. With --measure it times the csrc that FUSEDCUDA_CSRC names, for instance under a profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch

from fusedcuda._build import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "build" / "variants"
Calls = Mapping[str, Callable[[], object]]


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


def measure(calls: Calls) -> dict[str, float]:
    """Every call's time; one that a variant breaks has none, and the others still do."""
    times = {}
    for name, call in calls.items():
        try:
            times[name] = microseconds(call)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return times


def prepare(folder: Path, csrc: Path, replacements: Mapping[str, str]) -> Path:
    """A copy of csrc with the replacements; each has to occur somewhere."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(csrc, folder)
    for old, new in replacements.items():
        files = [path for path in folder.rglob("*") if path.is_file() and old in path.read_text()]
        if not files:
            raise SystemExit(f"{old!r} does not occur in {csrc}")
        for path in files:
            path.write_text(path.read_text().replace(old, new))
    return folder


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "FUSEDCUDA_CSRC": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def table_line(name: str, width: int, columns: Sequence[str], times: Mapping[str, float]) -> str:
    cells = (f"{times[c]:.2f}" if c in times else "-" for c in columns)
    return "  ".join(
        [name.ljust(width), *(cell.rjust(len(c)) for cell, c in zip(cells, columns, strict=True))]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tuning.variants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--filter", metavar="REGEX", default="", help="only cases that match")
    parser.add_argument("--measure", action="store_true",
                        help="build and time no variants; print the times as JSON")  # fmt: skip
    options = parser.parse_args(arguments)
    module = import_module(f"bench.tuning.{options.family}_cases")
    if options.measure:
        calls = {n: c for n, c in module.cases().items() if re.search(options.filter, n)}
        print(json.dumps(measure(calls)))
        return
    variants: dict[str, dict[str, str]] = module.VARIANTS
    folders = [
        prepare(BUILDS / options.family / str(index), ROOT / "csrc", replacements)
        for index, replacements in enumerate(variants.values())
    ]
    load = f"import fusedcuda; fusedcuda.load({options.family!r})"
    for build in [start(folder, "-c", load) for folder in folders]:
        build.communicate()
    width, columns = max(map(len, variants)), None
    for name, folder in zip(variants, folders, strict=True):
        output, _ = start(
            folder, "-m", "bench.tuning.variants", options.family, "--measure",
            f"--filter={options.filter}",
        ).communicate()  # fmt: skip
        try:
            times = json.loads(output.strip().rsplit("\n", 1)[-1])
        except ValueError:
            print(f"{name.ljust(width)}  failed", flush=True)
            continue
        if columns is None:
            columns = list(times)
            print("  ".join(["us".ljust(width), *columns]))
        print(table_line(name, width, columns, times), flush=True)


if __name__ == "__main__":
    main()
