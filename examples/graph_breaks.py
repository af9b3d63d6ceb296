"""Graph breaks and CUDA graphs: what a print costs, and what replaying a graph saves.

A small model with a print between its two halves, and the same model with the print guarded. Shown
of each: the graph breaks as `fusedcuda.report` finds them, with line and fix; the kernels and bytes
of its compiled code; and, on a GPU, a forward pass in eager PyTorch, torch.compile's default mode
and mode reduce-overhead: launches of kernels and of CUDA graphs (cudaGraphLaunch) counted in the
profiler's trace, and the time. Without a GPU nothing is timed.

  python -m examples.graph_breaks                   # a few seconds
  python -m examples.graph_breaks --out results     # CSV, page and plot, on a GPU traces as well
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedcuda
from bench.measure import AGAIN, one_line
from bench.plots import ACCENT, MUTED
from bench.tables import markdown_table
from bench.timing import CudaBackend
from examples import results as study
from examples.results import (
    COUNTED,
    MEASURED,
    NOT_MEASURED,
    PREDICTED,
    Results,
    cell,
    print_table,
    times_faster,
)
from examples.stopwatch import in_turns
from examples.traces import profiled
from fusedcuda.report.result import GraphBreak, Report

NAME = "graph_breaks"
CUDA = torch.device("cuda")
SEPARATOR = " => "  # in a note: between a line of the model and what to do about it
BATCH, WIDTH, LAYERS = 64, 1024, 8  # launch-bound: little work a kernel


# -- the model, before and after ------------------------------------------------------------------


def half() -> nn.Sequential:
    """Half of the layers."""
    layers = [[nn.Linear(WIDTH, WIDTH), nn.GELU()] for _ in range(LAYERS // 2)]
    return nn.Sequential(*(module for pair in layers for module in pair))


class WithPrint(nn.Module):
    """A print left in `forward`: the compiled graph has to end before it and begin anew after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = half(), half()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        # On a GPU this waits until the number is there.
        print("activations:", x.abs().mean())
        return self.second(x)


class Guarded(WithPrint):
    """The same with the fix that the report proposes: eager runs print, compiled ones do not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not torch.compiler.is_compiling():
            print("activations:", x.abs().mean())
        return self.second(x)


MODELS: dict[str, Callable[[], nn.Module]] = {"with the print": WithPrint, "guarded": Guarded}
EAGER, DEFAULT, OVERHEAD = "eager", "compile", "compile reduce-overhead"
PROVIDERS = (EAGER, DEFAULT, OVERHEAD)


@contextlib.contextmanager
def quietly() -> Iterator[io.StringIO]:
    """Keeps what the model prints out of the table; yields it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield printed


# -- what the report says -------------------------------------------------------------------------


def report(make: Callable[[], nn.Module]) -> Report:
    """Of the forward pass as Inductor compiles it for an H200; nothing is run."""
    with torch.device("meta"):
        model, x = make(), torch.empty(BATCH, WIDTH)
    with quietly():
        return fusedcuda.report(model, x, offline="h200")


def add_report(case: str, found: Report, results: Results) -> None:
    compiled = found.variant("compiled")
    graphs = len(found.graph_breaks) + 1
    for metric, value in (("graphs", graphs), ("kernels", compiled.kernels)):
        results.add(case, DEFAULT, metric, value, "", COUNTED)
    results.add(case, DEFAULT, "bytes", compiled.bytes, "bytes", COUNTED)
    results.add(case, DEFAULT, "step", compiled.gpu_us, "us", PREDICTED)
    for number, item in enumerate(found.graph_breaks):
        results.add(case, DEFAULT, f"break {number}", 1, "", COUNTED, note=break_text(item))


def break_text(item: GraphBreak) -> str:
    path, _, line = item.where.rpartition(":")
    return f"{Path(path).name}:{line}: {item.code}{SEPARATOR}{item.fix}"


def same_results() -> float:
    """The largest difference between both models' outputs, eagerly on the CPU."""
    torch.manual_seed(0)
    before, after = WithPrint(), Guarded()
    after.load_state_dict(before.state_dict())
    x = torch.randn(BATCH, WIDTH)
    with torch.no_grad(), quietly():
        return (before(x) - after(x)).abs().max().item()


# -- measurement ----------------------------------------------------------------------------------


def measure(options: argparse.Namespace, results: Results) -> None:
    backend = CudaBackend()
    x = torch.randn(BATCH, WIDTH, device=CUDA)
    with backend.on_stream(), torch.no_grad():
        calls = {}
        for case, make in MODELS.items():
            for provider in PROVIDERS:
                torch.manual_seed(0)
                try:
                    run = partial(forward, compile_as(provider, make().to(CUDA)), x)
                    with quietly():
                        for _ in range(3):  # compile, record, replay
                            run()
                        trace = profiled(run, trace_path(options.out, case, provider))
                except Exception as error:
                    results.add(case, provider, "step", None, "us", MEASURED, note=one_line(error))
                    continue
                calls[f"{case}|{provider}"] = [run]
                for metric, value in (
                    ("kernels", len(trace.kernels)),
                    ("host launches", trace.launches),
                    ("graph launches", trace.graph_launches),
                ):
                    results.add(case, provider, metric, value, "", MEASURED)
                results.add(case, provider, "kernel time", trace.us, "us", MEASURED)
        with quietly():
            times = in_turns(backend, calls, options.rounds) if calls else {}
    for name, samples in times.items():
        case, _, provider = name.partition("|")
        if provider.endswith(AGAIN):
            first = times[name.removesuffix(AGAIN)]
            results.add("A/A", "all", "step", study.spread_of(first, samples), "share", MEASURED)
        else:
            results.add(case, provider, "step", None, "us", MEASURED, samples=samples)


def compile_as(provider: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    if provider == EAGER:
        return model
    mode = "reduce-overhead" if provider == OVERHEAD else "default"
    return torch.compile(model, mode=mode, dynamic=False)


def forward(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch.compiler.cudagraph_mark_step_begin()  # the last result is not needed any more
    return model(x)


def trace_path(out: Path | None, case: str, provider: str) -> Path:
    name = f"{NAME} {case} {provider}.json.gz".replace(" ", "_")
    return (out or Path("build")) / "traces" / name


# -- the result -----------------------------------------------------------------------------------

REPORT_HEADER = ("", "graphs", "kernels", "bytes", "GPU us, predicted")
TIME_HEADER = ("", "provider", "us", "of eager", "kernel us", "kernels", "host launches",
               "cudaGraphLaunch")  # fmt: skip


def report_rows(results: Results) -> list[list[str]]:
    return [
        [
            case,
            *(cell(results.value(case, DEFAULT, m, COUNTED), "{:.0f}")
              for m in ("graphs", "kernels")),
            cell((results.value(case, DEFAULT, "bytes", COUNTED) or 0) / 1e6, "{:.1f} MB"),
            cell(results.value(case, DEFAULT, "step", PREDICTED), "{:.1f}"),
        ]
        for case in MODELS
    ]  # fmt: skip


def breaks(results: Results) -> list[list[str]]:
    """Model, line and fix of each graph break."""
    found = [row for row in results.rows.values() if row.metric.startswith("break ")]
    return [[row.case, *row.note.split(SEPARATOR, 1)] for row in found]


def time_rows(results: Results) -> list[list[str]]:
    noise = results.value("A/A", "all", "step") or 0.0
    return [
        [
            case, provider, cell(results.value(case, provider, "step"), "{:.1f}"),
            times_faster(results.ratio(case, EAGER, provider, "step"), noise),
            cell(results.value(case, provider, "kernel time"), "{:.1f}"),
            *(cell(results.value(case, provider, metric), "{:.0f}")
              for metric in ("kernels", "host launches", "graph launches")),
        ]
        for case in MODELS
        for provider in PROVIDERS
        if results.value(case, provider, "step") is not None
    ]  # fmt: skip


def print_tables(results: Results) -> None:
    print_table("The compiled forward pass, by fusedcuda.report", REPORT_HEADER,
                report_rows(results))  # fmt: skip
    for case, line, fix in breaks(results):
        print(f"  {case}: {line}\n    {fix}")
    if times := time_rows(results):
        print_table("Measured, back to back", TIME_HEADER, times)
    else:
        print("\nLaunches and times: not measured, there is no GPU here.")
    for row in results.errors():
        print(f"{row.case}, {row.provider}: {row.note}")


def markdown(results: Results, pictures: Sequence[str]) -> str:
    times = time_rows(results)
    lines = [
        "# Graph breaks and CUDA graphs",
        "",
        "Written by `python -m examples.graph_breaks --out docs/case_studies` "
        f"([source](../../examples/graph_breaks.py)): {LAYERS} layers of width {WIDTH}, batch "
        f"{BATCH}, float32, with a print between its halves and with the print guarded.",
        "",
        f"Measured on: {results.measured_on()}.",
        "",
        *(f"![{name}]({name})\n" for name in pictures),
        "## What the report finds",
        "",
        "Inductor's code for an H200, read without one; the time is predicted. What crosses the "
        "break goes through memory, and the mean that is printed takes kernels of its own.",
        "",
        *markdown_table(REPORT_HEADER, report_rows(results)),
        *markdown_table(
            ("model", "line", "fix"),
            [[case, f"`{line}`", fix] for case, line, fix in breaks(results)],
        ),
        "A break inside of a Python loop is worse than this one: torch 2.11 then compiles nothing "
        "of the function.",
        "",
        "## What is launched, and the time",
        "",
        "One forward pass in torch.profiler's trace: `host launches` are calls that launch a "
        "kernel or a graph, `cudaGraphLaunch` those of graphs. Microseconds are those of calls "
        "enqueued back to back, the host included, `kernel us` the sum of the kernels alone. The "
        "print also waits for the GPU, in every pass that does print.",
        "",
        *(markdown_table(TIME_HEADER, times) if times else [f"{NOT_MEASURED}.", ""]),
    ]  # fmt: skip
    if errors := results.errors():
        lines += ["## Failed", ""]
        lines += [f"- {row.case}, {row.provider}: {row.note}" for row in errors] + [""]
    return "\n".join(lines)


def draw(plt: Any, results: Results) -> dict[str, Any]:
    """Bars of the time, the part of the kernels in front; nothing without a measurement."""
    rows = [
        (f"{case}, {provider}", us, results.value(case, provider, "kernel time") or 0.0)
        for case in MODELS
        for provider in PROVIDERS
        if (us := results.value(case, provider, "step"))
    ]
    if not rows:
        return {}
    names, whole, kernels = zip(*rows, strict=True)
    figure, axis = plt.subplots(figsize=(8, 0.4 * len(rows) + 1), layout="constrained")
    axis.barh(names, whole, 0.6, color="#d9d9d9", label="time of a call")
    axis.barh(names, kernels, 0.3, color=ACCENT, label="of its kernels")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("us")
    axis.legend(fontsize=8)
    figure.text(0.005, -0.05, f"Measured on: {results.measured_on()}", fontsize=8, color=MUTED)
    return {"time": figure}


def main(argv: Sequence[str] | None = None) -> int:
    parser = study.script_parser(NAME, __doc__)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    options = parser.parse_args(argv)
    results = Results.of_folder(options.out, NAME)
    print(f"Both models agree: the largest difference is {same_results():g}.")
    for case, make in MODELS.items():
        add_report(case, report(make), results)
    if options.device != "cpu" and torch.cuda.is_available():
        measure(options, results)
    print_tables(results)
    if options.out:
        study.write(options.out, NAME, results, markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
