"""The result of the DLRM study: tables for the terminal, the page, and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.plots import STYLES
from bench.tables import markdown_table
from examples.dlrm.step import COMPILE, EAGER, FUSED, GRAPH, OVERHEAD, PROVIDERS
from examples.results import (
    COUNTED,
    MEASURED,
    NOT_MEASURED,
    Results,
    cell,
    print_table,
    times_faster,
)
from examples.traces import ELEMENTWISE, KINDS, PHASES, WHOLE_STEP

# (case, faster provider, slower one, at least so many times, what is timed)
TARGETS = (
    ("kaggle 65536", FUSED, COMPILE, 1.9, "predict"),
    ("mlperf-v1 65536", FUSED, COMPILE, 1.6, "predict"),
    ("kaggle 128", GRAPH, OVERHEAD, 2.0, "predict"),
)


def amount(
    results: Results,
    case: str,
    provider: str,
    source: str,
    phases: Sequence[str] = (*PHASES, WHOLE_STEP),
    kinds: Sequence[str] = KINDS,
) -> float | None:
    """Bytes, or microseconds, of these phases and kinds; None where there is no such number."""
    found = [
        value
        for phase in phases
        for kind in kinds
        if (value := results.value(case, provider, f"{phase}: {kind}", source)) is not None
    ]
    return sum(found) if found else None


def share(results: Results, case: str, provider: str, source: str, phase: str) -> str:
    """Of the elementwise work of a phase in all work of the step; the phases add up."""
    whole = amount(results, case, provider, source)
    if whole is None:
        return "-"
    # A step launched as one graph has no phases.
    if amount(results, case, provider, source, [phase]) is None:
        return "-"
    part = amount(results, case, provider, source, [phase], [ELEMENTWISE]) or 0.0
    return f"{part / whole:.1%}"


# -- rows of tables -------------------------------------------------------------------------------

COUNT_HEADER = ("", "provider", "launches", "moved", *(f"elementwise, {p}" for p in PHASES))


def count_rows(cases: Sequence[str], results: Results) -> list[list[str]]:
    rows = []
    for case in cases:
        for provider in (EAGER, COMPILE, FUSED):
            moved = amount(results, case, provider, COUNTED)
            if moved is None:
                continue
            launches = [
                results.value(case, provider, f"{phase} launches", COUNTED) for phase in PHASES
            ]
            shares = [share(results, case, provider, COUNTED, phase) for phase in PHASES]
            split = " + ".join(cell(count, "{:.0f}") for count in launches)
            rows.append([case, provider, split, f"{moved / 1e6:,.0f} MB", *shares])
    return rows


SHARE_HEADER = ("", "provider", "kernel us", *(f"elementwise, {p}" for p in PHASES), WHOLE_STEP)


def share_rows(cases: Sequence[str], results: Results) -> list[list[str]]:
    return [
        [
            case, provider, cell(amount(results, case, provider, MEASURED), "{:,.0f}"),
            *(share(results, case, provider, MEASURED, phase) for phase in (*PHASES, WHOLE_STEP)),
        ]
        for case in cases
        for provider in PROVIDERS
        if amount(results, case, provider, MEASURED) is not None
    ]  # fmt: skip


TIME_HEADER = ("", "provider", "forward us", "of compile", "step us", "of compile", "kernels",
               "host launches", "graph launches")  # fmt: skip


def time_rows(cases: Sequence[str], results: Results) -> list[list[str]]:
    rows = []
    for case in cases:
        for provider in PROVIDERS:
            if results.value(case, provider, "step") is None:
                continue
            cells = [case, provider]
            for metric in ("predict", "step"):
                noise = results.value(case, "A/A", metric) or 0.0
                ratio = results.ratio(case, COMPILE, provider, metric)
                us = results.value(case, provider, metric)
                cells += [cell(us, "{:,.1f}"), times_faster(ratio, noise)]
            for metric in ("kernels", "host launches", "graph launches"):
                cells.append(cell(results.value(case, provider, metric), "{:.0f}"))
            rows.append(cells)
    return rows


def target_rows(results: Results) -> list[list[str]]:
    rows = []
    for case, fast, slow, wanted, metric in TARGETS:
        ratio = results.ratio(case, slow, fast, metric)
        verdict = NOT_MEASURED if ratio is None else "met" if ratio >= wanted else "missed"
        text = f"forward, {fast} against {slow}"
        rows.append([case, text, f"{wanted:.1f}x", times_faster(ratio), verdict])
    return rows


def print_tables(cases: Sequence[str], results: Results) -> None:
    print_table(
        "A training step by its operators (forward + backward + optimizer); elementwise work as a "
        "share of all bytes",
        COUNT_HEADER, count_rows(cases, results),
    )  # fmt: skip
    if times := time_rows(cases, results):
        print_table("Time, back to back", TIME_HEADER, times)
        print_table("Elementwise kernels as a share of all kernel time", SHARE_HEADER,
                    share_rows(cases, results))  # fmt: skip
    else:
        print("\nTimes and the share of kernel time: not measured, there is no GPU here.")
    for row in results.errors():
        print(f"{row.case}, {row.provider}: {row.note}")


def settings(results: Results, source: str) -> str:
    """Those of all cases at once where they are the same."""
    rows = [r for r in results.rows.values() if r.provider == "settings" and r.source == source]
    cases: dict[str, list[str]] = {}
    for row in rows:
        cases.setdefault(row.note, []).append(row.case)
    if len(cases) < 2:
        return next(iter(cases), NOT_MEASURED)
    return "; ".join(f"{note} ({', '.join(names)})" for note, names in cases.items())


# -- the page -------------------------------------------------------------------------------------


def markdown(results: Results, pictures: Sequence[str]) -> str:
    cases = list(dict.fromkeys(row.case for row in results.rows.values()))
    times, shares = time_rows(cases, results), share_rows(cases, results)
    lines = [
        "# DLRM: eager, torch.compile, fusedcuda",
        "",
        "Written by `python -m examples.dlrm --out docs/case_studies` "
        "([source](../../examples/dlrm)); models and sizes: "
        "[models.py](../../examples/dlrm/models.py). Both models have one table for all "
        "categories and padded columns, so what differs is fusion: bias and ReLU in the matrix "
        "product (`linear_act`), the lookup of 26 rows and their products with the 27th vector to "
        "one padded row (`embedding_interaction`), the last layer with its loss "
        "(`linear_sigmoid_bce`).",
        "",
        f"Measured on: {results.measured_on()}.",
        "",
        *(f"![{name}]({name})\n" for name in pictures),
        "## What a training step launches and moves",
        "",
        "Counted at full size without running it: operators of eager PyTorch and fusedcuda on the "
        "meta device, kernels of torch.compile in the code that Inductor writes for an H200. Each "
        "reads its inputs once and writes its output once; the backward of `linear_act` counts as "
        "the three kernels that it is at least: derivative with bias gradient, and two products. "
        "The launches are forward + backward + optimizer. The shares are those of elementwise "
        "work in all bytes of the step, so the three add up.",
        "",
        f"Optimizer, tables and dtype: {settings(results, COUNTED)}. The update of dense tables "
        "is elementwise: the larger the tables and the smaller the batch, the more it is of the "
        "step.",
        "",
        *markdown_table(COUNT_HEADER, count_rows(cases, results)),
        "## Elementwise kernels in the time of a step",
        "",
        "The number that the lecture's profile leaves open: time of elementwise kernels over that "
        "of all kernels, by the phase that launched them, from a torch.profiler trace. What is "
        "replayed as one graph has no phases.",
        "",
        *(markdown_table(SHARE_HEADER, shares) if shares else [f"{NOT_MEASURED}.", ""]),
        "## Time",
        "",
        "Microseconds a call, enqueued back to back over four batches, the host included; medians "
        "of interleaved rounds. `~` marks what is smaller than the difference of eager to itself. "
        f"The optimizer is not compiled. Settings: {settings(results, MEASURED)}.",
        "",
        *(markdown_table(TIME_HEADER, times) if times else [f"{NOT_MEASURED}.", ""]),
        "## Targets",
        "",
        *markdown_table(("case", "what", "at least", "measured", "verdict"), target_rows(results)),
    ]
    if errors := results.errors():
        lines += ["## Failed", ""]
        lines += [f"- {row.case}, {row.provider}: {row.note}" for row in errors] + [""]
    return "\n".join(lines)


# -- pictures -------------------------------------------------------------------------------------

COLOURS = dict(zip(KINDS, ("#0a66c2", "#5aa9e6", "#e07a1f", "#b8b8b8", "#7d7d7d", "#d9d9d9",
                           "#eeeeee"), strict=True))  # fmt: skip


def draw(plt: Any, results: Results) -> dict[str, Any]:
    cases = list(dict.fromkeys(row.case for row in results.rows.values()))
    figures = {"bytes": _stacks(plt, results, cases, COUNTED, (EAGER, COMPILE, FUSED))}
    if time_rows(cases, results):
        figures["kernels"] = _stacks(plt, results, cases, MEASURED, PROVIDERS)
        figures["speedup"] = _speedups(plt, results, cases)
    return {name: figure for name, figure in figures.items() if figure is not None}


def _stacks(
    plt: Any, results: Results, cases: Sequence[str], source: str, providers: Sequence[str]
) -> Any:
    """A bar for each provider: its step by kind of work, over that of eager PyTorch."""
    cases = [case for case in cases if amount(results, case, EAGER, source)]
    if not cases:
        return None
    figure, axes = plt.subplots(
        len(cases), 1, figsize=(8, 0.35 * len(providers) * len(cases) + 1.2), sharex=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, case in zip(axes[:, 0], cases, strict=True):
        whole = amount(results, case, EAGER, source) or 1.0
        for kind in KINDS:
            left = [
                (amount(results, case, p, source, kinds=KINDS[: KINDS.index(kind)]) or 0) / whole
                for p in providers
            ]
            sizes = [(amount(results, case, p, source, kinds=[kind]) or 0) / whole
                     for p in providers]  # fmt: skip
            axis.barh(providers, sizes, 0.7, left=left, color=COLOURS[kind], label=kind)
        axis.set_title(case)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
    words = {COUNTED: "bytes", MEASURED: "kernel time"}[source]
    axes[-1, 0].set_xlabel(f"{words} of a training step, eager PyTorch = 1")
    _legend_above(figure, axes[0, 0])
    return figure


def _speedups(plt: Any, results: Results, cases: Sequence[str]) -> Any:
    """Forward and step of each provider, as times faster than eager PyTorch."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    greys = {COMPILE: STYLES["compile"]["color"], OVERHEAD: STYLES["triton"]["color"],
             FUSED: "#5aa9e6", GRAPH: "#0a66c2"}  # fmt: skip
    width = 0.8 / len(greys)
    for axis, (metric, title) in zip(
        axes, {"predict": "forward", "step": "training step"}.items(), strict=True
    ):
        for index, (provider, colour) in enumerate(greys.items()):
            bars = [
                (place + (index - 1.5) * width, ratio)
                for place, case in enumerate(cases)
                if (ratio := results.ratio(case, EAGER, provider, metric))
            ]
            if bars:
                axis.bar(*zip(*bars, strict=True), width * 0.9, color=colour, label=provider)
        axis.axhline(1, color="#222222", linestyle=(0, (5, 4)), linewidth=1)
        axis.set_xticks(range(len(cases)), cases, rotation=25, ha="right", fontsize=8)
        axis.set_title(title)
    axes[0].set_ylabel("times faster than eager")
    _legend_above(figure, axes[0])
    return figure


def _legend_above(figure: Any, axis: Any) -> None:
    """That of one of the axes, in a line above all of them: in them it would lie on the bars."""
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=8)
