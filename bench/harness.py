"""Runs and records every case of a family: each `bench_<family>.py` ends in a call of `main`.

`bench/measure.py` says how a case is measured, `bench/timing.py` holds the clocks, and
`bench/report.py` the file format.

The measuring runs in a child process, which appends to the CSV after every case: an error that
costs the CUDA context costs one case, since the parent starts another child for the rest.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bench import device, report, tables
from bench.cases import Case
from bench.measure import measure, one_line, spread
from bench.timing import Backend, CudaBackend, copy_bandwidth

QUICK_BUDGET_S = 165
FULL_BUDGET_S = 345
EXIT_DEVICE_LOST = 70
MAX_RESTARTS = 5
LONGEST_WAIT_S = 3600.0  # for the turn
WORKER_VARIABLE = "FUSEDCUDA_BENCH_WORKER"
TURN_VARIABLE = "FUSEDCUDA_BENCH_TURN"


# -- all cases ------------------------------------------------------------------------------------


class Progress:
    """Which cases were begun, in a file, so that a new worker goes on after the one that died."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begun(self) -> set[str]:
        return set(self.path.read_text().splitlines()) if self.path.exists() else set()

    def begin(self, label: str) -> None:
        with self.path.open("a") as file:
            file.write(label + "\n")
            file.flush()
            os.fsync(file.fileno())


def run_cases(
    cases: Sequence[Case],
    backend: Backend,
    table: report.Table,
    progress: Progress,
    *,
    rounds: int,
    deadline: float,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Measures what is not yet in the table. False when the device was lost on the way."""
    begun = progress.begun()
    recorded = table.labels()
    began_at = clock()
    for number, case in enumerate(cases, 1):
        if case.label in recorded:
            continue
        if case.label in begun:
            table.add_failure(case, "the process died in this case")
            continue
        if clock() > deadline:
            table.add_failure(case, "skipped: out of time")
            continue
        progress.begin(case.label)
        healthy = True
        try:
            results = measure(case, backend, rounds)
            table.add(case, results, spread, backend, device.gpu_state())
            line = tables.progress_line(case, results)
        except Exception as error:
            healthy = backend.healthy()
            table.add_failure(case, one_line(error))
            line = one_line(error)
        seconds = clock() - began_at
        print(f"[{number}/{len(cases)} {seconds:4.0f} s] {case.label}: {line}", flush=True)
        if not (healthy and backend.healthy()):
            return False
    return True


@contextmanager
def turn() -> Iterator[float]:
    """Waits for the file that the variable names, if it names one; yields the seconds waited.

    So the workers of several families can be started at once: each imports and creates its context,
    15 s or so, while another one measures.
    """
    path = os.environ.get(TURN_VARIABLE)
    if not path:
        yield 0.0
        return
    began = time.time()
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield time.time() - began


@contextmanager
def taking_turns() -> Iterator[None]:
    """Within it, started processes that ask for their `turn` have it one after the other."""
    with tempfile.NamedTemporaryFile(prefix="fusedcuda-turn-") as file:
        os.environ[TURN_VARIABLE] = file.name
        try:
            yield
        finally:
            del os.environ[TURN_VARIABLE]


def work(family: str, cases: Sequence[Case], options: argparse.Namespace) -> int:
    """The child process: one CUDA context, all cases that are left."""
    backend = CudaBackend()
    out = Path(options.out)
    table = report.Table(out / f"{family}.csv", torch.cuda.get_device_name())
    environment = device.environment(torch.cuda.get_device_name(), backend.l2_bytes)
    with turn() as waited, backend.on_stream():
        deadline = float(os.environ[WORKER_VARIABLE]) + waited
        table.add_copy(copy_bandwidth(backend), environment, device.gpu_state())
        backend.release()
        finished = run_cases(
            cases, backend, table, Progress(progress_path(out, family)),
            rounds=options.rounds, deadline=deadline,
        )  # fmt: skip
        if finished:
            table.add_copy(copy_bandwidth(backend), environment, device.gpu_state())
    return 0 if finished else EXIT_DEVICE_LOST


def progress_path(out: Path, family: str) -> Path:
    return out / f".{family}.progress"


def supervise(
    command: Sequence[str], deadline: float, grace: float = 60.0,
    run: Callable[..., subprocess.CompletedProcess] = subprocess.run,
) -> bool:  # fmt: skip
    """Starts workers until one goes through to the end, or time or patience is over."""
    environment = os.environ | {WORKER_VARIABLE: str(deadline)}
    if TURN_VARIABLE in os.environ:
        grace += LONGEST_WAIT_S
    for attempt in range(MAX_RESTARTS + 1):
        left = deadline + grace - time.time()
        if left <= 0:
            break
        try:
            code = run(command, env=environment, timeout=left).returncode
        except subprocess.TimeoutExpired:
            print("bench: out of time; reporting what was measured", flush=True)
            return False
        if code == 0:
            return True
        if code != EXIT_DEVICE_LOST and code >= 0:  # its own error, printed above, would come again
            return False
        print(f"bench: lost the device ({code}); worker {attempt + 2} goes on", flush=True)
    return False


# -- command line ---------------------------------------------------------------------------------


def parser(program: str, description: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--quick", action="store_true", help="the main cases, under three minutes")
    parser.add_argument("--filter", metavar="REGEX", default="", help="only cases that match")
    parser.add_argument("--without", metavar="REGEX", default="",
                        help="leave out the providers that match")  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="default: bench/results/<gpu>, or with "
                        "--quick or --filter build/bench/<gpu>")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="interleaved rounds (5, with --quick 3)")
    parser.add_argument("--budget", type=float, metavar="SECONDS",
                        help="after which no case is started")  # fmt: skip
    parser.add_argument(
        "--missing",
        action="store_true",
        help="only what the CSV in --out has no time of; the rest stays",
    )
    parser.add_argument("--report", action="store_true",
                        help="no measuring: tables and plots from the CSV in --out")  # fmt: skip
    return parser


def arguments_of(options: argparse.Namespace, budget: float | None) -> list[str]:
    """The command line that says what `options` say, with this budget."""
    values = {"filter": options.filter, "without": options.without, "out": options.out,
              "rounds": options.rounds, "budget": budget}  # fmt: skip
    flags = [f"--{name}" for name in ("quick", "missing", "report") if getattr(options, name)]
    return flags + [f"--{name}={value}" for name, value in values.items() if value]


def parse(family: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser(f"python -m bench.bench_{family}").parse_args(arguments)
    options.rounds = max(3, options.rounds or (3 if options.quick else 5))
    options.budget = options.budget or (QUICK_BUDGET_S if options.quick else FULL_BUDGET_S)
    return options


def select(cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    chosen = [
        case
        for case in cases
        if (case.quick or not options.quick) and re.search(options.filter, case.label)
    ]
    if not options.without:
        return chosen
    return [
        replace(
            case,
            providers={
                name: provider
                for name, provider in case.providers.items()
                if not re.search(options.without, name)
            },
        )
        for case in chosen
    ]


def to_measure(family: str, cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    """Of the selected cases: all, or with `--missing` those without a time in the CSV."""
    table = Path(options.out or "") / f"{family}.csv"
    if not options.missing or not options.out or not table.exists():
        return list(cases)
    have = report.measured_cases(report.read(table))
    return [case for case in cases if case.label not in have]


def main(
    family: str,
    cases: Sequence[Case],
    draw_plots: Callable[[report.Summary, Path], list[Path]],
    arguments: Sequence[str] | None = None,
    remark: str = "",
) -> int:
    """Parses the command line and measures; `remark` is a paragraph of the family's table."""
    started = time.time()
    options = parse(family, arguments)
    if options.report:
        if not options.out:
            print(f"bench_{family}: --report needs --out DIR, where {family}.csv is")
            return 2
        return finish(family, cases, draw_plots, Path(options.out), remark)
    if not torch.cuda.is_available():
        print(f"bench_{family}: no CUDA device found; this benchmark measures a GPU")
        return 2
    if not options.out:
        gpu = device.short_name(torch.cuda.get_device_name())
        partial = options.quick or options.filter
        options.out = str(Path("build/bench" if partial else "bench/results") / gpu)
    selected = select(cases, options)
    if WORKER_VARIABLE in os.environ:
        return work(family, selected, options)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    progress_path(out, family).unlink(missing_ok=True)
    count = len(to_measure(family, selected, options))
    table = out / f"{family}.csv"
    if options.missing and table.exists():
        report.keep_measured(table)
    else:
        table.unlink(missing_ok=True)
    print(f"bench_{family}: {count} cases, {options.rounds} rounds, into {out}", flush=True)
    command = [sys.executable, "-m", f"bench.bench_{family}", *arguments_of(options, None)]
    completed = supervise(command, started + options.budget)
    progress_path(out, family).unlink(missing_ok=True)
    code = finish(family, cases, draw_plots, out, remark)
    print(f"bench_{family}: {time.time() - started:.0f} s")
    return code if completed else 1


def finish(
    family: str,
    cases: Sequence[Case],
    draw_plots: Callable[[report.Summary, Path], list[Path]],
    out: Path,
    remark: str = "",
) -> int:
    """Reads the CSV back and writes the tables and plots; the CSV is the only source."""
    path = out / f"{family}.csv"
    if not path.exists():
        print(f"bench_{family}: nothing was measured, there is no {path}")
        return 1
    summary = report.Summary(report.read(path), cases)
    plots: list[Path] = []
    try:
        plots = draw_plots(summary, out)
    except Exception as error:  # a table without its picture is still a result
        print(f"bench_{family}: no plots: {one_line(error)}")
    (out / f"{family}.md").write_text(tables.markdown(family, summary, plots, remark))
    print(tables.terminal(summary))
    return 0
