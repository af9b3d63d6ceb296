"""DLRM on Criteo rows: eager PyTorch, torch.compile and fusedcuda, forward and a training step.

For each case: do the two models agree, what does a step launch and move by phase and kind of work,
and, on a GPU, how long does it take each way. Without a GPU the check runs at reduced sizes and the
counts are those of the full size; nothing is timed.

  python -m examples.dlrm                                        # three cases
  python -m examples.dlrm --case kaggle:65536 kaggle:128         # others
  python -m examples.dlrm --all --data day_0.gz --out results    # real rows; page, plots, traces
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.measure import AGAIN, one_line
from bench.timing import CudaBackend
from examples import results as study
from examples.dlrm import page, step
from examples.dlrm.check import compare
from examples.dlrm.counts import Work, count_compiled, count_step
from examples.dlrm.models import FusedDLRM, PlainDLRM, missing_ops, reduced
from examples.results import COUNTED, MEASURED, Results
from examples.stopwatch import in_turns
from examples.traces import PHASES, WHOLE_STEP, profiled
from fusedcuda.demo.check import Comparison
from fusedcuda.demo.criteo import CriteoRows, generate_rows, read_rows
from fusedcuda.demo.dlrm import CONFIGS
from fusedcuda.demo.progress import Progress
from fusedcuda.demo.report import agreement_table

NAME = "dlrm"
CUDA = torch.device("cuda")
BATCHES = 4  # different ones, which the steps cycle through
CHECK_BATCH, CHECK_TABLE_ROWS = 64, 50  # on the CPU


@dataclass(frozen=True)
class Case:
    config: str
    batch: int

    def __str__(self) -> str:
        return f"{self.config} {self.batch}"


CASES = (Case("lecture-main", 128), Case("kaggle", 65536), Case("mlperf-v1", 65536))
ALL_CASES = (
    Case("lecture-small", 64),
    Case("lecture-main", 128),
    Case("kaggle", 128),
    Case("kaggle", 65536),
    Case("terabyte", 2048),
    Case("mlperf-v1", 65536),
)


def _listed(cases: Sequence[Case]) -> str:
    return ", ".join(f"{case.config}:{case.batch}" for case in cases)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all cases agree, 1 if one does not, 2 if the data cannot be read."""
    options = parse(argv)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    results = Results.of_folder(options.out, NAME)
    progress = Progress()
    try:
        rows = load_rows(options, on_gpu)
    except (OSError, ValueError) as error:
        print(f"dlrm: {error}", file=sys.stderr)
        return 2
    print(headline(options, on_gpu, len(rows)))
    for sentence in missing_ops(CONFIGS[case.config] for case in options.case):
        print(sentence)
    agrees = True
    for case in options.case:
        progress.stage(f"{case}: checking")
        comparisons = check(case, rows, options, on_gpu)
        progress.clear()
        agrees &= say_agreement(case, comparisons)
        progress.stage(f"{case}: counting")
        count(case, options, results)
        progress.clear()
        if on_gpu and all(item.ok for item in comparisons):
            measure(case, rows, options, results, progress)
    page.print_tables([str(case) for case in options.case], results)
    if options.out:
        study.write(options.out, NAME, results, page.markdown, page.draw)
    return 0 if agrees else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def case(text: str) -> Case:
        config, _, batch = text.partition(":")
        if config not in CONFIGS or not (batch or "0").isdigit():
            raise argparse.ArgumentTypeError(
                f"expected NAME:BATCH, where NAME is one of {', '.join(CONFIGS)}, found {text!r}"
            )
        return Case(config, int(batch or CONFIGS[config].gpu_batch))

    parser = study.script_parser(NAME, __doc__)
    add = parser.add_argument
    add("--case", nargs="+", type=case, default=CASES, metavar="NAME:BATCH",
        help=f"of {', '.join(CONFIGS)} (default: {_listed(CASES)})")  # fmt: skip
    add("--all", dest="case", action="store_const", const=ALL_CASES,
        help=f"the cases of the page: {_listed(ALL_CASES)}")  # fmt: skip
    add("--data", metavar="FILE", help="Criteo rows, as `python -m fusedcuda demo` reads them "
        "(default: synthetic ones)")  # fmt: skip
    add("--optimizer", choices=step.OPTIMIZERS, default="adam", help="default: adam, dense, as in "
        "the lecture")  # fmt: skip
    add("--table-rows", type=int, default=10_000, help="of each of the 26 tables (default: 10000)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="what is counted and, on a GPU, run (default: bfloat16; the check on a CPU is always "
        "in float64)")  # fmt: skip
    add("--device", choices=("auto", "cpu"), default="auto")
    add("--no-compile", action="store_true", help="leave torch.compile's code out of the counts")
    return parser.parse_args(argv)


def headline(options: argparse.Namespace, on_gpu: bool, rows: int) -> str:
    source = options.data or "generated"
    where = torch.cuda.get_device_name() if on_gpu else "CPU: counts at full size, no times"
    return f"DLRM, {rows:,} rows ({source}), optimizer {options.optimizer}; {where}"


def load_rows(options: argparse.Namespace, on_gpu: bool) -> CriteoRows:
    largest = max(case.batch for case in options.case) if on_gpu else CHECK_BATCH
    if options.data:
        return read_rows(options.data, BATCHES * largest)
    return generate_rows(BATCHES * largest)


# -- one case -------------------------------------------------------------------------------------


def check(
    case: Case, rows: CriteoRows, options: argparse.Namespace, on_gpu: bool
) -> list[Comparison]:
    """On a GPU as it is; on the CPU with narrow layers, a small batch, and in float64."""
    config = CONFIGS[case.config]
    device = CUDA if on_gpu else torch.device("cpu")
    dtype = getattr(torch, options.dtype) if on_gpu else torch.float64
    table_rows, batch = options.table_rows, case.batch
    if not on_gpu:
        config, table_rows, batch = reduced(config), CHECK_TABLE_ROWS, CHECK_BATCH
    torch.manual_seed(0)
    model = PlainDLRM(config, table_rows).to(device, dtype)
    (first,) = step.batches_of(rows, config, table_rows, batch, 1, device, dtype)
    return compare(model, first)


def say_agreement(case: Case, comparisons: Sequence[Comparison]) -> bool:
    wrong = [item.name for item in comparisons if not item.ok]
    if wrong:
        print(f"{case}: WRONG: {', '.join(wrong)}\n{agreement_table(comparisons)}")
    else:
        print(f"{case}: logits, loss and {len(comparisons) - 2} gradients agree")
    return not wrong


def count(case: Case, options: argparse.Namespace, results: Results) -> None:
    config, dtype = CONFIGS[case.config], getattr(torch, options.dtype)
    optimizer = step.optimizer_for(options.optimizer, torch.device("meta"))
    sizes = (config, options.table_rows, case.batch, dtype)
    work = {step.EAGER: count_step(PlainDLRM, *sizes, optimizer),
            step.FUSED: count_step(FusedDLRM, *sizes, optimizer)}  # fmt: skip
    if not options.no_compile:
        update = [item for item in work[step.EAGER] if item.phase == PHASES[-1]]
        work[step.COMPILE] = count_compiled(*sizes) + update
    for provider, items in work.items():
        add_counts(str(case), provider, items, results)
    add_settings(case, options, COUNTED, results)


def add_counts(case: str, provider: str, work: Sequence[Work], results: Results) -> None:
    for phase in PHASES:
        items = [item for item in work if item.phase == phase]
        launches = sum(item.launches for item in items)
        results.add(case, provider, f"{phase} launches", launches, "", COUNTED)
        by_kind = {item.kind: 0 for item in items}
        for item in items:
            by_kind[item.kind] += item.bytes
        for kind, moved in by_kind.items():
            results.add(case, provider, f"{phase}: {kind}", moved, "bytes", COUNTED)


def add_settings(case: Case, options: argparse.Namespace, source: str, results: Results) -> None:
    """What a number of this case depends on beside its name."""
    text = f"{options.optimizer} over tables of {options.table_rows:,} rows, {options.dtype}"
    if source == MEASURED:
        text += f", rows: {Path(options.data).name if options.data else 'generated'}"
    results.add(str(case), "settings", "settings", 1, "", source, note=text)


def measure(
    case: Case,
    rows: CriteoRows,
    options: argparse.Namespace,
    results: Results,
    progress: Progress,
) -> None:
    """Times and traces of every provider that can be built; the others leave their error."""
    backend = CudaBackend()
    config, dtype = CONFIGS[case.config], getattr(torch, options.dtype)
    optimizer = step.optimizer_for(options.optimizer, CUDA)
    torch._dynamo.reset()
    torch.manual_seed(0)
    add_settings(case, options, MEASURED, results)
    with backend.on_stream():
        plain = PlainDLRM(config, options.table_rows).to(CUDA, dtype)
        batches = list(
            step.batches_of(rows, config, options.table_rows, case.batch, BATCHES, CUDA, dtype)
        )
        ready = {}
        for name in step.PROVIDERS:
            progress.stage(f"{case}: preparing {name}")
            try:
                ready[name] = step.build(name, plain, optimizer, batches[0])
                trace_provider(case, name, ready[name], batches[0], options.out, results)
            except Exception as error:
                ready.pop(name, None)
                results.add(str(case), name, "step", None, "us", MEASURED, note=one_line(error))
        for metric in ("predict", "step"):
            progress.stage(f"{case}: timing {metric}")
            calls = {
                name: [partial(getattr(provider, metric), batch) for batch in batches]
                for name, provider in ready.items()
            }
            add_times(str(case), metric, in_turns(backend, calls, options.rounds), results)
    del ready, calls, plain
    backend.release()
    progress.clear()


def add_times(case: str, metric: str, times: dict[str, list[float]], results: Results) -> None:
    for name, samples in times.items():
        if name.endswith(AGAIN):
            first = times[name.removesuffix(AGAIN)]
            noise = study.spread_of(first, samples)
            results.add(case, "A/A", metric, noise, "share", MEASURED)
        else:
            results.add(case, name, metric, None, "us", MEASURED, samples=samples)


def trace_provider(
    case: Case,
    name: str,
    provider: step.Provider,
    batch: step.Batch,
    out: Path | None,
    results: Results,
) -> None:
    """One step under the profiler: its trace in `out`, its kernels by phase and kind."""
    folder = (out or Path("build")) / "traces"
    path = folder / f"{case} {name}.json.gz".replace(",", "").replace(" ", "_")
    run: Callable[[], object] = partial(provider.step, batch)
    found = profiled(run, path)
    results.add(str(case), name, "kernels", len(found.kernels), "", MEASURED)
    results.add(str(case), name, "host launches", found.launches, "", MEASURED)
    results.add(str(case), name, "graph launches", found.graph_launches, "", MEASURED)
    for phase in (*PHASES, ""):
        for kind, us in found.us_by(phase).items():
            results.add(str(case), name, f"{phase or WHOLE_STEP}: {kind}", us, "us", MEASURED)


if __name__ == "__main__":
    sys.exit(main())
