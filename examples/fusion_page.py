"""The result of the fusion arithmetic: the table, the page, and the picture with the L2 knee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.plots import ACCENT, INK, MUTED, NAMES, STYLES
from bench.tables import markdown_table
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

FORMS = ("unfused", "fused")
PEERS = ("eager", "compile", "triton", "fusedcuda")


def size_name(nbytes: int) -> str:
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


# -- tables ---------------------------------------------------------------------------------------

PREDICTED_HEADER = ("a tensor of", "launches", "bytes", "unfused us", "fused us", "cold", "warm")


def predicted_rows(text: str, sizes: Sequence[int], results: Results) -> list[list[str]]:
    rows = []
    for nbytes in sizes:
        label = f"{text} {size_name(nbytes)}"
        before, after = (results.value(label, form, "launches", COUNTED) for form in FORMS)
        moved, least = (results.value(label, form, "bytes", COUNTED) for form in FORMS)
        if before is None or after is None or not moved or not least:
            continue
        rows.append([
            size_name(nbytes), f"{before:.0f} -> {after:.0f}", f"{moved / least:.2f}x",
            *(cell(results.value(label, form, "cold", PREDICTED)) for form in FORMS),
            *(times_faster(predicted_ratio(results, label, state)) for state in ("cold", "warm")),
        ])  # fmt: skip
    return rows


def predicted_ratio(results: Results, label: str, state: str) -> float | None:
    slow, fast = (results.value(label, form, state, PREDICTED) for form in FORMS)
    return slow / fast if slow and fast else None


MEASURED_HEADER = ("a tensor of", *(f"{name} us" for name in PEERS), "eager/fusedcuda",
                   "predicted", "warm", "predicted")  # fmt: skip


def measured_rows(text: str, sizes: Sequence[int], results: Results) -> list[list[str]]:
    rows = []
    for nbytes in sizes:
        label = f"{text} {size_name(nbytes)}"
        if results.value(label, "fusedcuda", "cold") is None:
            continue
        ratios = []
        for state in ("cold", "warm"):
            noise = results.value(label, "A/A", state) or 0.0
            ratio = results.ratio(label, "eager", "fusedcuda", state)
            ratios += [times_faster(ratio, noise),
                       times_faster(predicted_ratio(results, label, state))]  # fmt: skip
        times = [cell(results.value(label, name, "cold")) for name in PEERS]
        rows.append([size_name(nbytes), *times, *ratios])
    return rows


HBM_HEADER = ("", "provider", "counted", "HBM, by ncu")


def hbm_rows(text: str, sizes: Sequence[int], results: Results) -> list[list[str]]:
    rows = []
    for nbytes in sizes:
        label = f"{text} {size_name(nbytes)}"
        for provider in PEERS:
            measured = results.value(label, provider, "HBM bytes")
            if measured is not None:
                form = "unfused" if provider == "eager" else "fused"
                counted = results.value(label, form, "bytes", COUNTED)
                rows.append([label, provider, f"{(counted or 0) / 1e6:,.1f} MB",
                             f"{measured / 1e6:,.1f} MB"])  # fmt: skip
    return rows


def print_tables(texts: Sequence[str], sizes: Sequence[int], results: Results) -> None:
    for text in texts:
        print_table(f"{text}: predicted for an H200, bf16; fused over unfused, cold and warm",
                    PREDICTED_HEADER, predicted_rows(text, sizes, results))  # fmt: skip
        if measured := measured_rows(text, sizes, results):
            print_table(f"{text}: measured", MEASURED_HEADER, measured)
        if hbm := hbm_rows(text, sizes, results):
            print_table(f"{text}: bytes", HBM_HEADER, hbm)
    for row in results.errors():
        print(f"{row.case}, {row.provider}: {row.note}")


# -- the page -------------------------------------------------------------------------------------


def markdown(
    texts: Sequence[str], sizes: Sequence[int], results: Results, pictures: Sequence[str]
) -> str:
    lines = [
        "# Fusion arithmetic",
        "",
        "Written by `python -m examples.fusion_arithmetic --out docs/case_studies` "
        "([source](../../examples/fusion_arithmetic.py)). Three operators against one kernel, in "
        "bfloat16, from 1 KB to 1 GB a tensor; `s` and `b` are vectors of 512.",
        "",
        f"Measured on: {results.measured_on()}.",
        "",
        *(f"![{name}]({name})\n" for name in pictures),
        "The bytes promise the same factor at every size. What becomes of it:",
        "",
        "- **Small tensors**: a launch costs more than its bytes. The factor is that of the "
        "launches, 3.",
        "- **In the L2 cache**: what one operator wrote the next one finds there, so the bytes "
        "that fusing saves are the cheap ones, while the operands still come from memory: less is "
        "gained than the bytes say. The knee is where the tensors together fill the cache. Warm, "
        "when the operands lie there as well, the fused form may fit and the unfused one, which "
        "has two tensors more, not.",
        "- **Beyond it**: all bytes come from memory, and the factor is that of the bytes.",
        "",
        "Predicted by [cost.py](../../fusedcuda/report/cost.py), the model of the fusion report: "
        "1.5 us a launch, 4.25 TB/s from memory, 7 TB/s from the L2 cache of 50 MB. Cold: the "
        "operands come from memory. Warm: the same call ran before on the same tensors.",
        "",
    ]
    for text in texts:
        measured = measured_rows(text, sizes, results)
        hbm = hbm_rows(text, sizes, results)
        lines += [
            f"## {text}",
            "",
            "Predicted; `bytes` is unfused over fused, the last two columns how many times faster "
            "the fused form is.",
            "",
            *markdown_table(PREDICTED_HEADER, predicted_rows(text, sizes, results)),
            "Measured, by CUDA graph replay over rotated buffers (cold) or one set (warm):",
            "",
            *(markdown_table(MEASURED_HEADER, measured) if measured else [f"{NOT_MEASURED}.", ""]),
            "Bytes from and to memory in one cold call:",
            "",
            *(markdown_table(HBM_HEADER, hbm) if hbm else [f"{NOT_MEASURED}.", ""]),
        ]
    if errors := results.errors():
        lines += ["## Failed", ""]
        lines += [f"- {row.case}, {row.provider}: {row.note}" for row in errors] + [""]
    return "\n".join(lines)


# -- the picture ----------------------------------------------------------------------------------


def draw(
    plt: Any, texts: Sequence[str], sizes: Sequence[int], knees: Mapping[str, Mapping[str, float]],
    results: Results,
) -> dict[str, Any]:  # fmt: skip
    """A column for each expression: time against size, and below it what fusing gains."""
    figure, axes = plt.subplots(
        2, len(texts), figsize=(5.6 * len(texts), 7), sharex=True, sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for column, text in enumerate(texts):
        above, below = axes[:, column]
        _times(above, text, sizes, results)
        _gains(below, text, sizes, results)
        above.set_title(text)
        for style, (form, at) in zip((":", "--"), knees[text].items(), strict=True):
            for axis in (above, below):
                axis.axvline(at, color=MUTED, linestyle=style, linewidth=1)
            below.annotate(
                f"L2 full, {form}", (at, 0.02), xycoords=("data", "axes fraction"), fontsize=7,
                rotation=90, ha="right", va="bottom", color=MUTED,
            )  # fmt: skip
        below.set_xlabel("bytes of one tensor, bf16")
        below.set_xticks(sizes[::2], [size_name(size) for size in sizes[::2]], rotation=40,
                         ha="right", fontsize=8)  # fmt: skip
        below.minorticks_off()
    axes[0, 0].set_ylabel("us")
    axes[1, 0].set_ylabel("times faster, fused over unfused")
    axes[0, 0].legend(fontsize=8, loc="upper left")
    axes[1, 0].legend(fontsize=8, loc="upper right")
    figure.text(0.005, -0.02, f"Measured on: {results.measured_on()}", fontsize=8, color=MUTED)
    return {"sizes": figure}


def _points(
    results: Results, text: str, sizes: Sequence[int], provider: str, state: str, source: str
) -> list[tuple[int, float]]:
    labels = {size: f"{text} {size_name(size)}" for size in sizes}
    found = [(s, results.value(label, provider, state, source)) for s, label in labels.items()]
    return [(size, value) for size, value in found if value is not None]


def _times(axis: Any, text: str, sizes: Sequence[int], results: Results) -> None:
    for form, colour in (("unfused", INK), ("fused", ACCENT)):
        points = _points(results, text, sizes, form, "cold", PREDICTED)
        axis.plot(*zip(*points, strict=True), color=colour, linestyle="--", linewidth=1.2,
                  label=f"{form}, predicted")  # fmt: skip
    for provider in PEERS:
        if points := _points(results, text, sizes, provider, "cold", MEASURED):
            label = NAMES.get(provider, provider)
            axis.plot(*zip(*points, strict=True), label=label, **STYLES[provider])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")


def _gains(axis: Any, text: str, sizes: Sequence[int], results: Results) -> None:
    labels = {size: f"{text} {size_name(size)}" for size in sizes}
    for state, style in (("cold", "--"), ("warm", ":")):
        predicted = [(s, r) for s, label in labels.items()
                     if (r := predicted_ratio(results, label, state))]  # fmt: skip
        axis.plot(*zip(*predicted, strict=True), color=INK, linestyle=style, linewidth=1.2,
                  label=f"predicted, {state}")  # fmt: skip
        measured = [(s, r) for s, label in labels.items()
                    if (r := results.ratio(label, "eager", "fusedcuda", state))]  # fmt: skip
        if measured:
            marker = {"cold": "o", "warm": "^"}[state]
            axis.plot(*zip(*measured, strict=True), color=ACCENT, marker=marker,
                      label=f"fusedcuda, {state}")  # fmt: skip
    axis.axhline(1, color=MUTED, linewidth=0.8)
    axis.set_ylim(0, 4)  # the launches promise 3; above it is room for the legend
