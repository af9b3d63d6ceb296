"""Pictures of a summary: speed against size, speed-up over eager, memory, host time.

They need matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from pathlib import Path

from bench.cases import MATMUL, QUACK_ELSEWHERE
from bench.report import OURS, Entry, Summary
from bench.tables import GRAD_MODES, host_operations

ACCENT = "#0a66c2"
INK, MUTED, RULE = "#222222", "#777777", "#e3e3e3"
# What a layer cannot do without; no peers.
YARDSTICKS = (MATMUL, "linear alone")
# Peers are greys: dark for the strongest. Line style and marker tell them apart without colour.
STYLES = {
    OURS: {"color": ACCENT, "linewidth": 2.4, "marker": "o", "zorder": 5},
    "compile": {"color": "#444444", "linewidth": 1.4, "marker": "s", "linestyle": "-"},
    "triton": {"color": "#808080", "linewidth": 1.4, "marker": "^", "linestyle": "--"},
    "liger": {"color": "#999999", "linewidth": 1.4, "marker": "v", "linestyle": "-."},
    "liger_packed": {"color": "#b3b3b3", "linewidth": 1.4, "marker": "<", "linestyle": "-."},
    "quack": {"color": "#5c5c5c", "linewidth": 1.4, "marker": "P", "linestyle": (0, (3, 1))},
    QUACK_ELSEWHERE: {"color": "#5c5c5c", "marker": "P", "linestyle": "none"},
    "eager": {"color": "#bdbdbd", "linewidth": 1.4, "marker": "D", "linestyle": ":"},
    "compile max-autotune": {"color": "#666666", "marker": "X", "linestyle": "-"},
    "concatenated": {"color": "#a6a6a6", "marker": "h", "linestyle": ":"},
    "compile concatenated": {"color": "#666666", "marker": "d", "linestyle": "-"},
    "torch.linear_cross_entropy": {"color": "#666666", "marker": "h", "linestyle": "-"},
    "addmm_activation": {"color": "#a6a6a6", "marker": "p", "linestyle": "--"},
    "addmm": {"color": "#a6a6a6", "marker": "p", "linestyle": "--"},
    "peft": {"color": "#808080", "marker": "h", "linestyle": ":"},
    "K-extension": {"color": "#5c5c5c", "marker": "d", "linestyle": "-"},
    **{name: {"color": "#888888", "marker": "|"} for name in YARDSTICKS},
    "native": {"color": "#d4d4d4", "marker": "*"},
}

NAMES = {"compile": "torch.compile", "triton": "Triton, autotuned", "eager": "eager PyTorch",
         "liger": "Liger", "liger_packed": "Liger, packed", "quack": "QuACK",
         QUACK_ELSEWHERE: "QuACK, not interleaved", "native": "one native op",
         MATMUL: "the matrix product alone", "linear alone": "the linear alone",
         "addmm": "addmm into the output",
         "addmm_activation": "torch._addmm_activation",
         "concatenated": "eager, packed weight",
         "compile concatenated": "torch.compile, packed weight",
         "compile max-autotune": "torch.compile, max-autotune"}  # fmt: skip
MODE_TITLES = {"inference": "torch.inference_mode", "no_grad": "torch.no_grad",
               "grad": "with gradients"}  # fmt: skip


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({
        "figure.dpi": 150, "savefig.bbox": "tight", "savefig.pad_inches": 0.15,
        "font.size": 10, "font.family": "DejaVu Sans", "axes.titlesize": 11,
        "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlepad": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED,
        "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": RULE, "grid.linewidth": 0.8,
        "legend.frameon": False, "lines.markersize": 4.5,
    })  # fmt: skip
    return pyplot


def draw(
    summary: Summary,
    out: Path,
    *,
    family: str,
    names: Mapping[str, str] | None = None,
    with_memory: bool = False,
) -> list[Path]:
    """Writes what the summary has data for, and returns the files; `names` go before NAMES.

    `with_memory`: also the peaks of memory, of a family that is about those.
    """
    plt = pyplot()
    written = []
    labels = {provider: provider for provider in STYLES} | NAMES | dict(names or {})
    pictures = {"throughput": throughput, "speedup": speedup, "host": host}
    for group in summary.further_groups():
        pictures[f"{group}_speedup"] = partial(speedup, group=group)
    if with_memory:
        pictures["memory"] = memory
    for name, plot in pictures.items():
        figure = plot(plt, summary, labels)
        if figure is not None:
            path = out / f"{family}_{name}.png"
            figure.savefig(path)
            plt.close(figure)
            written.append(path)
    return written


def human(elements: float) -> str:
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if elements >= size:
            return f"{elements / size:.0f}{unit}"
    return f"{elements:.0f}"


def throughput(plt, summary: Summary, labels: Mapping[str, str]):
    """TB/s against size, one panel per series, the measured copy as the ceiling."""
    panels = summary.panels()
    if not panels:
        return None
    columns = min(len(panels), 2)
    rows = ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(5.2 * columns, 3.9 * rows),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, entries) in zip(axes.flat, panels.items(), strict=False):
        for provider in reversed(STYLES):
            points = [(int(e.x_value), y) for e in entries if (y := e.tb_per_s(provider))]
            if points:
                axis.plot(*zip(*points, strict=True), label=labels[provider], **STYLES[provider])
        if ceiling := summary.copy_tb_per_s:
            axis.axhline(ceiling, color=INK, linestyle=(0, (5, 4)), linewidth=1)
            axis.annotate(
                f"copy {ceiling:.2f} TB/s", (0.01, ceiling), xytext=(0, 4), fontsize=9,
                xycoords=("axes fraction", "data"), textcoords="offset points", color=INK,
            )  # fmt: skip
        sizes = list(dict.fromkeys(int(e.x_value) for e in entries))
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [human(size) for size in sizes])
        axis.tick_params(axis="x", labelsize=9)
        axis.minorticks_off()
        axis.set_xlabel(entries[0].x_label)
        axis.set_title(title)
        axis.margins(y=0.1)  # room for the words on the ceiling
        axis.set_ylim(bottom=0)
    for axis in axes[:, 0]:
        axis.set_ylabel("TB/s (reads + writes)")
    by_label = {}
    for axis in axes.flat:
        handles, names = axis.get_legend_handles_labels()
        by_label |= dict(zip(names, handles, strict=True))
    ordered = [labels[p] for p in STYLES if labels[p] in by_label]
    figure.legend(
        [by_label[name] for name in ordered], ordered, loc="outside upper center",
        ncols=len(ordered), fontsize=9,
    )  # fmt: skip
    caption(figure, summary, "GPU time, rotated buffers")
    return figure


def speedup(plt, summary: Summary, labels: Mapping[str, str], group: str = "main"):
    """How many times faster than eager."""
    text = "times faster than eager PyTorch"
    figure = against_eager(plt, summary, labels, "gpu_cold", text, group)
    if figure is not None:
        caption(figure, summary, "GPU time, cold buffers")
    return figure


def memory(plt, summary: Summary, labels: Mapping[str, str]):
    """How many times less memory than eager."""
    text = "times less memory than eager PyTorch"
    figure = against_eager(plt, summary, labels, "peak_memory", text)
    if figure is not None:
        caption(figure, summary, "peak of a call, beyond its inputs")
    return figure


def against_eager(
    plt, summary: Summary, labels: Mapping[str, str], metric: str, text: str, group: str = "main"
):
    """A bar for fusedcuda and a mark for each peer: what eager takes over what they take."""
    entries = [e for e in summary.group(group) if e.ratio("eager", metric)]
    if not entries:
        return None
    size = (8.4, 0.27 * len(entries) + 1.1)
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    rows = range(len(entries))
    values = [e.ratio("eager", metric) for e in entries]
    axis.barh(rows, values, 0.62, color=ACCENT, label=OURS)
    for row, (entry, value) in enumerate(zip(entries, values, strict=True)):
        least = min(filter(None, (entry.time(p, metric) for p in STYLES)))
        right = max(value, entry.time("eager", metric) / least)
        axis.annotate(
            f"{value:.2f}x", (right, row), xytext=(8, 0), textcoords="offset points",
            va="center", fontsize=8, color=ACCENT, fontweight="bold",
        )  # fmt: skip
    # The products alone are a yardstick of time: what they leave out is what takes memory.
    without = (OURS, "eager", *(YARDSTICKS if metric == "peak_memory" else ()))
    for provider in (p for p in STYLES if p not in without):
        marks = [
            (entry.time("eager", metric) / taken, row)
            for row, entry in enumerate(entries)
            if (taken := entry.time(provider, metric))
        ]
        if marks:
            style = STYLES[provider]
            is_line = style["marker"] == "|"
            axis.scatter(
                *zip(*marks, strict=True), s=90 if is_line else 34, marker=style["marker"],
                color=style["color"], edgecolors=None if is_line else "white",
                linewidths=1.6 if is_line else 0.8, zorder=4, label=labels[provider],
            )  # fmt: skip
    axis.axvline(1, color=INK, linestyle=(0, (5, 4)), linewidth=1)
    axis.invert_yaxis()
    axis.set_yticks(rows, [bar_label(e) for e in entries], fontsize=8.5)
    axis.tick_params(axis="y", length=0, labelcolor=INK)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.1, y=0.01)
    axis.set_xlim(left=0)
    axis.set_xlabel(f"{text} (dashed)")
    handles, names = axis.get_legend_handles_labels()
    figure.legend(
        handles[-1:] + handles[:-1], names[-1:] + names[:-1], loc="outside upper center",
        ncols=len(names), fontsize=9,
    )  # fmt: skip
    return figure


def bar_label(entry: Entry) -> str:
    return entry.label.removesuffix(" forward")


def host(plt, summary: Summary, labels: Mapping[str, str]):
    """Bars: microseconds to enqueue one call, beside a native op of the same arity."""
    operations = host_operations(summary)
    modes = [m for m in GRAD_MODES if any(m in by_mode for by_mode in operations.values())]
    if not modes:
        return None
    providers = [
        p for p in (OURS, "native", "eager", "compile")
        if any(e.time(p, "host") for e in summary.group("host"))
    ]  # fmt: skip
    if not providers:  # cases without a time, of which there may have been none left
        return None
    figure, axes = plt.subplots(
        1,
        len(modes),
        figsize=(3.9 * len(modes), 3.3),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    width = 0.8 / len(providers)
    for axis, mode in zip(axes[0], modes, strict=True):
        for index, provider in enumerate(providers):
            bars = [
                (i + (index - (len(providers) - 1) / 2) * width, value)
                for i, by_mode in enumerate(operations.values())
                if mode in by_mode and (value := by_mode[mode].time(provider, "host"))
            ]
            if bars:
                axis.bar(
                    *zip(*bars, strict=True), width * 0.92, color=STYLES[provider]["color"],
                    label=labels[provider],
                )  # fmt: skip
        axis.set_xticks(range(len(operations)), operations, rotation=30, ha="right", fontsize=8.5)
        axis.tick_params(axis="x", length=0, labelcolor=INK)
        axis.grid(axis="x", visible=False)
        axis.set_title(MODE_TITLES[mode])
    axes[0][0].set_ylabel("us per call, host")
    axes[0][0].legend(loc="upper left", fontsize=8.5)
    top = axes[0][0].get_ylim()[1]
    axes[0][0].set_ylim(0, top * 1.25)
    caption(figure, summary, "bf16, small operands, enqueue time only")
    return figure


def caption(figure, summary: Summary, text: str) -> None:
    versions = f"{summary.fixed['gpu_name']}, torch {summary.environment.get('torch')}"
    below = -0.1 / figure.get_figheight()  # inches
    figure.text(0.005, below, f"{versions}. {text}.", fontsize=8, color=MUTED, va="top")
