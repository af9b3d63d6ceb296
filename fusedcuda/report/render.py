"""The report as text for a terminal and as Markdown: the same sections, two kinds of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .result import Report
from .units import megabytes, signed

_MOST_ROWS = 12


@dataclass(frozen=True)
class Section:
    """A title, sentences, and a table if there are rows. Columns marked `>` are flush right."""

    title: str
    lines: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


# Said wherever swaps are listed.
OPAQUE = (
    "An op of fusedcuda counts as one kernel that reads its operands and writes its results; "
    "fusedcuda.explain(op, ...) says what it launches."
)


def text(report: Report) -> str:
    return "\n\n".join([heading(report), report.verdict, *map(section_text, sections(report))])


def section_text(section: Section) -> str:
    body = [section.title, *(f"  {line}" for line in section.lines)]
    if section.rows:
        body.append(_aligned(section.columns, section.rows))
    return "\n".join(body)


def markdown(report: Report) -> str:
    parts = [f"# {_escape(heading(report))}", f"**{_escape(report.verdict)}**"]
    for section in sections(report):
        parts.append(f"## {section.title}")
        if section.lines:
            parts.append("\n".join(f"- {_escape(line)}" for line in section.lines))
        if section.rows:
            parts.append(_pipes(section.columns, section.rows))
    return "\n\n".join(parts) + "\n"


def heading(report: Report) -> str:
    how = "measured on" if report.measured else "predicted for"
    what = "forward and backward" if report.backward else "forward"
    return (
        f"{report.subject}: {what}, mode {report.mode}, {how} {report.device}, torch {report.torch}"
    )


def sections(report: Report) -> list[Section]:
    return [
        _variants(report),
        _kernels(report),
        _breaks(report),
        _swaps(report),
        _advice(report),
        _graphs(report),
        Section("How these numbers were made", report.notes),
    ]


def _variants(report: Report) -> Section:
    rows = [
        [
            item.name,
            str(item.kernels),
            megabytes(item.bytes),
            microseconds(item.gpu_us),
            microseconds(item.host_us),
        ]
        for item in report.variants
    ]
    lines = []
    if report.bytes_measured is not None:
        lines = [f"HBM bytes of the compiled step by ncu: {megabytes(report.bytes_measured)}"]
    columns = ["", ">kernels", ">bytes (model)", ">GPU us", ">host us"]
    return Section("Side by side", lines, columns, rows)


def _kernels(report: Report) -> Section:
    columns = [
        ">#", "kind", "computes", ">n", "shape", "dtype", ">in", ">out", ">us", "bound by",
        ">of peak", ">share", "source",
    ]  # fmt: skip
    rows = [
        [
            str(kernel.first),
            kernel.kind,
            shorten(", ".join(kernel.ops), 44),
            str(kernel.count),
            "x".join(map(str, kernel.shape)),
            kernel.dtype,
            megabytes(kernel.bytes_in),
            megabytes(kernel.bytes_out),
            microseconds(kernel.us),
            kernel.bound,
            f"{kernel.peak:.0%}",
            f"{kernel.share:.1%}",
            shorten_path(kernel.where),
        ]
        for kernel in report.kernels
    ]
    return Section("Kernels in launch order", (), columns, rows)


def _breaks(report: Report) -> Section:
    if not report.breaks:
        return Section("Where fusion broke", ["Nowhere: no kernel reads what another one wrote."])
    columns = ["reason", ">n", "written by", "read by", ">bytes", ">avoidable", ">us", "source"]
    shown = report.breaks[:_MOST_ROWS]
    rows = [
        [
            item.code,
            str(item.count),
            shorten(item.producer, 30),
            shorten(item.consumer, 30),
            megabytes(item.bytes),
            megabytes(item.saved) if item.saved else "-",
            microseconds(item.saved_us) if item.saved else "-",
            shorten_path(item.where),
        ]
        for item in shown
    ]
    whys = {item.why: f"{item.code}: {item.why}. Fix: {item.fix}." for item in shown}
    lines = list(whys.values())
    if len(report.breaks) > _MOST_ROWS:
        lines.append(f"{len(report.breaks) - _MOST_ROWS} smaller ones are left out here.")
    return Section("Where fusion broke", lines, columns, rows)


def _swaps(report: Report) -> Section:
    if not report.swaps:
        return Section("What to use", ["No part of the model is one that fusedcuda has an op for."])
    columns = ["pattern", "op", ">n", ">kernels", ">bytes", ">us", "use it", ">error", "source"]
    rows = [
        [
            item.rule,
            f"fusedcuda.{item.op}",
            str(len(item.where)),
            f"{-item.kernels:+d}",
            signed(-item.bytes),
            f"{0.0 - round(item.us, 1):+.1f}",
            "yes" if item.use else "no",
            "-" if item.error is None else f"{item.error:.1e}",
            shorten_path(", ".join(dict.fromkeys(item.where))),
        ]
        for item in report.swaps
    ]
    how = "timed on this GPU" if any(item.measured for item in report.swaps) else "predicted"
    lines = [
        f"Each alone in the compiled step, {how}; the effect is that on the whole step.",
        OPAQUE,
    ]
    return Section("What to use", lines, columns, rows)


def _advice(report: Report) -> Section:
    lines = [f"{item.topic}: {item.text}" for item in report.advice]
    return Section("When not to fuse", lines or ["Nothing stands against it here."])


def _graphs(report: Report) -> Section:
    lines = [f"CUDA graphs: {'replayed' if report.cuda_graphs.used else 'not used'}, "
             f"{report.cuda_graphs.text}"]  # fmt: skip
    if not report.graph_breaks:
        lines.append("No graph breaks.")
    for item in report.graph_breaks:
        place = item.where or "unknown line"
        lines.append(f"Graph break at {place}: {item.code or item.reason}")
        lines.append(f"    {item.reason}. Fix: {item.fix}")
    return Section("Graph breaks and CUDA graphs", lines)


# ---- Cells and tables ----------------------------------------------------------------------------


def microseconds(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def shorten(value: str, length: int) -> str:
    return value if len(value) <= length else value[: length - 3] + "..."


def shorten_path(place: str) -> str:
    """The last two parts of each path are enough to find it."""
    return ", ".join("/".join(part.split("/")[-2:]) for part in place.split(", "))


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = [column.lstrip(">") for column in columns]
    right = [column.startswith(">") for column in columns]
    table = [names, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(names))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _pipes(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = " | ".join(column.lstrip(">") for column in columns)
    rule = "|".join("---:" if column.startswith(">") else "---" for column in columns)
    body = [" | ".join(_escape(cell) for cell in row) for row in rows]
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {line} |" for line in body)])


def _escape(value: str) -> str:
    """Text that Markdown shows as it is: names from a model may have any character."""
    for character in "\\`*_<>|[]":
        value = value.replace(character, f"\\{character}")
    return value.replace("\n", " ")
