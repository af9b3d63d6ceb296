"""`python -m fusedcuda demo`: DLRM on Criteo rows, in plain PyTorch and with fusedcuda's ops.

Checks that loss and gradients agree and prints what a forward pass and a training step cost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from fusedcuda._build import BuildError
from fusedcuda.demo.check import compare
from fusedcuda.demo.criteo import CriteoRows, generate_rows, read_rows
from fusedcuda.demo.dlrm import CONFIGS, DLRM, DlrmConfig, fused_hidden, plain_hidden
from fusedcuda.demo.measure import Batch, Cost, Trainer
from fusedcuda.demo.progress import Progress
from fusedcuda.demo.report import (
    COMPILED,
    FUSED,
    PLAIN,
    agreement_table,
    cost_table,
    notes,
    verdict,
)

_BATCHES_IN_MEMORY = 4  # the steps cycle through as many different batches
_GPU_ROUNDS = 3  # each times every variant once, so that a drift of the clock hits all alike


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo with command-line arguments `argv` (default: sys.argv[1:]).

    Returns 0 if fusedcuda agrees with plain PyTorch, 1 if it does not, 2 if the data cannot be
    read, the device is not there, or its kernels cannot be compiled. Wrong arguments raise
    SystemExit(2), as argparse does.
    """
    options = _parse_arguments(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("demo: --device cuda: torch.cuda.is_available() is False", file=sys.stderr)
        print("      run `python -m fusedcuda doctor` to see why", file=sys.stderr)
        return 2
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    config = CONFIGS[options.config]
    batch = options.batch or (config.gpu_batch if on_gpu else config.cpu_batch)
    progress = Progress()
    try:
        rows, source = _load_rows(options, batch, progress)
    except (OSError, ValueError) as error:
        progress.clear()
        print(f"demo: {error}", file=sys.stderr)
        return 2
    try:
        with nullcontext() if on_gpu else _half_of_the_threads():
            return _run(options, config, rows, source, batch, on_gpu, progress)
    except BuildError as error:  # a GPU, but no compiler and nothing built at installation
        progress.clear()
        print(f"demo: {error}", file=sys.stderr)
        print("      --device cpu runs the demo without the kernels", file=sys.stderr)
        return 2


def _run(
    options: argparse.Namespace,
    config: DlrmConfig,
    rows: CriteoRows,
    source: str,
    batch: int,
    on_gpu: bool,
    progress: Progress,
) -> int:
    """Checks, measures and prints; returns the exit status."""
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = getattr(torch, options.dtype)
    batches = _make_batches(rows, config, options.table_rows, batch, device, dtype)
    first = batches[0]
    torch.manual_seed(options.seed)
    model = DLRM(config, options.table_rows).to(device, dtype)

    progress.stage("comparing with float64")
    comparisons = compare(model, first.dense, first.indices, first.labels, progress)
    progress.clear()
    print(f"DLRM ({options.config}) on {source}, batch {len(first.labels):,}, {options.dtype}")
    print(_describe_device(options.device, on_gpu))
    if options.compile and not on_gpu:
        print("--compile is left out: it is measured on a GPU only.")
    print(f"\n{agreement_table(comparisons)}\n", flush=True)
    agrees = all(item.ok for item in comparisons)
    if agrees:
        costs = _measure(model, batches, options.steps, options.compile and on_gpu, progress)
        progress.clear()
        print(cost_table(costs, config, len(first.labels), dtype.itemsize, on_gpu), end="\n\n")
        print(notes(costs, on_gpu), end="\n\n")
    print(verdict(comparisons))
    return 0 if agrees else 1


@contextmanager
def _half_of_the_threads() -> Iterator[None]:
    """Leaves cores to others: the CPU's threads wait for one another in a loop after every layer,
    so a single busy core would slow all of them down, measured 15 times on two cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _describe_device(requested: str, on_gpu: bool) -> str:
    if on_gpu:
        return torch.cuda.get_device_name()
    reason = "as asked" if requested == "cpu" else "no GPU found"
    return f"CPU reference kernels ({reason}): the checks are real, the times are no comparison."


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
        return value

    parser = argparse.ArgumentParser(
        prog="python -m fusedcuda demo",
        description="DLRM on Criteo rows, in plain PyTorch and with fusedcuda's ops: "
        "checks that loss and gradients agree and compares the cost.",
    )
    add = parser.add_argument
    add(
        "--data",
        metavar="FILE",
        help="Criteo rows: tab-separated as published or CSV with a header, plain or gzip "
        "(default: synthetic rows of the same format)",
    )
    add("--rows", type=positive, help="how many rows to use (default: 4 batches)")
    add("--config", choices=CONFIGS, default="kaggle", help="model sizes (default: kaggle)")
    add("--table-rows", type=positive, default=10_000, help="rows per embedding table (10000)")
    add("--batch", type=positive, help="rows per step (default: by config and device)")
    add("--steps", type=positive, default=10, help="timed steps per round (default: 10)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--seed", type=int, default=0, help="of the parameters and the synthetic rows (default: 0)")
    add("--compile", action="store_true", help="measure torch.compile as well (GPU only)")
    return parser.parse_args(argv)


def _load_rows(
    options: argparse.Namespace, batch: int, progress: Progress
) -> tuple[CriteoRows, str]:
    """The rows and a few words on where they come from."""
    count = options.rows or _BATCHES_IN_MEMORY * batch
    if options.data is None:
        progress.stage(f"generating {count:,} rows")
        return generate_rows(count, options.seed), f"{count:,} synthetic Criteo rows"
    progress.stage(f"reading {options.data}")
    rows = read_rows(options.data, count, lambda done: progress.tick(f"{done:,} rows"))
    return rows, f"{len(rows):,} rows of {options.data}"


def _make_batches(
    rows: CriteoRows,
    config: DlrmConfig,
    table_rows: int,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Batch]:
    """Whole batches only; a file with fewer rows than one batch becomes one smaller batch."""
    batch = min(batch, len(rows))
    whole = len(rows) // batch * batch
    dense = rows.dense(config.dense_width)[:whole].to(device, dtype)
    indices = rows.table_indices(table_rows)[:whole].to(device)
    labels = rows.labels[:whole].to(device, torch.float32)
    parts = zip(dense.split(batch), indices.split(batch), labels.split(batch), strict=True)
    return [Batch(*part) for part in parts]


def _measure(
    model: DLRM, batches: list[Batch], steps: int, use_compile: bool, progress: Progress
) -> dict[str, Cost]:
    forwards: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        PLAIN: partial(model, hidden=plain_hidden),
        FUSED: partial(model, hidden=fused_hidden),
    }
    if use_compile:
        # The lookup stays outside: torch.compile does not trace sparse gradients.
        score = torch.compile(model.score)
        forwards[COMPILED] = lambda dense, indices: score(dense, model.look_up(indices))
    trainers = {name: Trainer(model, forward) for name, forward in forwards.items()}
    for name, trainer in trainers.items():
        progress.stage(f"warming up {name}")
        trainer.warm_up(batches[0])
    rounds = _GPU_ROUNDS if batches[0].dense.is_cuda else 1
    for number in range(1, rounds + 1):
        for name, trainer in trainers.items():
            progress.stage(f"measuring {name}, round {number} of {rounds}")
            trainer.count_launches(batches[0])
            trainer.time_round(batches, steps, progress)
    return {name: trainer.cost for name, trainer in trainers.items()}
