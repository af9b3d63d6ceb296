"""The tables: a short one for the terminal, the full one in markdown, a line of progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.cases import QUACK_SOURCE, Case
from bench.report import OURS, Entry, Summary

if TYPE_CHECKING:
    from bench.measure import Result

TERMINAL_LINES = 60
GRAD_MODES = ("inference", "no_grad", "grad")


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def microseconds(value: float | None) -> str:
    return number(value, 2 if value is not None and value < 100 else 1)


def times(entry: Entry, peer: str, metric: str = "gpu_cold") -> str:
    """A ratio to a peer; `~` where it is within the spread of A against A, `*` not interleaved."""
    ratio = entry.ratio(peer, metric)
    if ratio is None:
        return "-"
    noise = "~" if entry.is_noise(ratio, metric) else ""
    return f"{noise}{ratio:.2f}x{'' if entry.interleaved(peer, metric) else '*'}"


def percent_of_copy(entry: Entry, summary: Summary, provider: str = OURS) -> str:
    speed, copy = entry.tb_per_s(provider), summary.copy_tb_per_s
    return number(100 * speed / copy, 0, "%") if speed and copy else "-"


def target_text(entry: Entry) -> str:
    parts = []
    for target in entry.targets:
        warm = " warm" if target.metric == "gpu_warm" else ""
        parts.append(f"{target.text}{warm}: {entry.verdict(target)}")
    return "; ".join(parts)


def progress_line(case: Case, results: Sequence[Result]) -> str:
    shown = []
    for result in results:
        if result.provider.endswith("(again)"):
            continue
        samples = [x for r in result.cold for x in r]
        if result.error:
            shown.append(f"{result.provider} FAILED ({result.error[:60]})")
        elif samples:
            shown.append(f"{result.provider} {microseconds(median(samples))}")
        elif result.host:
            shown.append(f"{result.provider} {microseconds(min(result.host))}")
    return ", ".join(shown) + (" us host" if case.host_only else " us")


def grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first to the left, the last as it is, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def host_operations(summary: Summary) -> dict[str, dict[str, Entry]]:
    """Host entries by kernel, then by grad mode."""
    operations: dict[str, dict[str, Entry]] = {}
    for entry in summary.group("host"):
        operations.setdefault(entry.kernel, {})[entry.x_value] = entry
    return operations


# -- terminal -------------------------------------------------------------------------------------


def terminal(summary: Summary) -> str:
    copy = number(summary.copy_tb_per_s)
    lines = ["", f"{summary.fixed['gpu_name']}: copy {copy} TB/s; GPU times with cold buffers"]
    lines += gpu_lines(summary) + sweep_lines(summary) + host_lines(summary)
    failures = [
        f"  {entry.label}: {provider}: {error}"[:150]
        for entry in summary.entries.values()
        for provider, error in entry.errors.items()
    ]
    if failures:
        room = max(3, TERMINAL_LINES - len(lines) - 5)
        lines += ["", "failed or skipped", *failures[:room]]
        if len(failures) > room:
            lines.append(f"  and {len(failures) - room} more, in the CSV")
    lines += ["", "~ or noise: smaller than the spread of fusedcuda against itself (A/A)"]
    if summary.published():
        lines.append("*: the peer's time is from another process, not interleaved")
    return "\n".join(lines)


def gpu_lines(summary: Summary) -> list[str]:
    rows = [("", "us", "TB/s", "copy", "eager", "best peer", "", "A/A", "target")]
    for entry in summary.group("main"):
        if entry.time(OURS, "gpu_cold") is None:
            continue
        best = entry.best_peer("gpu_cold")
        rows.append((
            entry.label, microseconds(entry.time(OURS, "gpu_cold")),
            number(entry.tb_per_s(OURS)), percent_of_copy(entry, summary),
            times(entry, "eager"), times(entry, "best"), best[0] if best else "-",
            number(100 * entry.spread.get("gpu_cold", 0.0), 1, "%"), target_text(entry),
        ))  # fmt: skip
    return grid(rows) if len(rows) > 1 else []


def sweep_lines(summary: Summary) -> list[str]:
    lines = []
    for panel, entries in summary.panels().items():
        ratios = [r for e in entries if (r := e.ratio("best", "gpu_cold"))]
        if ratios:
            lines.append(
                f"{panel}, {len(ratios)} sizes: {min(ratios):.2f}x to {max(ratios):.2f}x "
                f"the best peer, median {median(ratios):.2f}x"
            )
    return ["", *lines] if lines else []


def host_lines(summary: Summary) -> list[str]:
    rows = [("host us per call (native op)", *GRAD_MODES, "target")]
    for kernel, by_mode in host_operations(summary).items():
        cells, verdicts = [], []
        for mode in GRAD_MODES:
            entry = by_mode.get(mode)
            ours = entry and entry.time(OURS, "host")
            native = entry and entry.time("native", "host")
            cells.append(f"{microseconds(ours)} ({microseconds(native)})")
            if entry and native and ours:
                verdicts += [f"{ours / native:.2f}x {entry.verdict(t)}" for t in entry.targets]
        rows.append((kernel, *cells, ", ".join(verdicts)))
    return ["", *grid(rows)] if len(rows) > 1 else []


# -- markdown -------------------------------------------------------------------------------------


GROUP_TITLES = {
    "rows": "Numbers of rows",
    "dlrm": "The layers of MLPerf's DLRM",
    "lorafusion": "The layers of LoRAFusion",
}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    body = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|", *body, ""]


def markdown(family: str, summary: Summary, plots: Sequence[Path], remark: str = "") -> str:
    environment = summary.environment
    sheet = environment.get("datasheet_tb_per_s")
    lines = [
        f"# {family} on {summary.fixed['gpu_name']}",
        "",
        f"fusedcuda {summary.fixed['fusedcuda_version']} ({summary.fixed['commit']}), "
        f"torch {environment.get('torch')}, triton {environment.get('triton')}, "
        f"Liger {environment.get('liger')}.",
        "",
        "GPU time is a CUDA graph's, per call, the median of interleaved rounds. Cold: the buffers "
        f"rotate over at least three times the L2 ({environment.get('l2_mb')} MB), or the row says "
        "how much. Warm: one set of buffers. Bytes are the fewest that the operation can move. "
        "Copy speed at the start and the end of each process: "
        f"{', '.join(f'{c:.2f}' for c in summary.copies)} TB/s"
        f"{f'; datasheet {sheet} TB/s' if sheet else ''}. Every result was "
        "checked against float64 first. `~` and `noise` mark what is smaller than the difference "
        "of fusedcuda to itself, measured twice in the same rounds. The providers of a case are "
        "of one process; cases may be of several, at the commits above.",
        "",
        *(
            f"{name}: not measured here, but elsewhere ({QUACK_SOURCE}); a ratio to it bears `*` "
            "or the words `not interleaved`.\n"
            for name in sorted(summary.published())
        ),
        *([remark, ""] if remark else []),
    ]
    lines += [f"![{path.stem}]({path.name})\n" for path in plots]
    lines += target_section(summary)
    lines += gpu_section(summary, "main", "GPU time, one case a block")
    lines += gpu_section(summary, "sweep", "Sizes")
    for group in summary.further_groups():
        lines += gpu_section(summary, group, GROUP_TITLES.get(group, group))
    lines += host_section(summary)
    lines += failure_section(summary)
    lines += ["## The card", "", "Read before and after; nothing was set.", ""]
    for state in summary.gpu_states:
        lines.append(f"- {', '.join(f'{key} {value}' for key, value in state.items())}")
    return "\n".join(lines) + "\n"


def target_section(summary: Summary) -> list[str]:
    rows = []
    for entry in summary.entries.values():
        for target in entry.targets:
            ratio = entry.ratio(target.peer, target.metric)
            is_host = target.metric == "host"
            shown = 1 / ratio if ratio and is_host else ratio
            spread = 100 * entry.spread.get(target.metric, 0.0)
            rows.append((
                entry.label, target.metric.replace("_", " "), target.text, number(shown, 3, "x"),
                number(spread, 1, "%"), entry.verdict(target),
            ))  # fmt: skip
    header = ("case", "metric", "target", "measured", "A/A", "verdict")
    return ["## Targets", "", *markdown_table(header, rows)] if rows else []


def gpu_section(summary: Summary, group: str, title: str) -> list[str]:
    rows = []
    for entry in summary.group(group):
        for provider in entry.times:
            if provider.endswith("(again)"):
                continue
            cold = entry.times[provider].get("gpu_cold")
            rows.append((
                entry.label if provider == next(iter(entry.times)) else "", provider,
                microseconds(cold and cold[0]),
                f"{microseconds(cold[1])}-{microseconds(cold[2])}"
                if cold and provider not in entry.published else "-",
                number(entry.tb_per_s(provider)), percent_of_copy(entry, summary, provider),
                microseconds(entry.time(provider, "gpu_warm")),
                microseconds(entry.time(provider, "host")),
                number(entry.time(provider, "peak_memory"), 1),
                "" if provider == OURS else times(entry, provider),
            ))  # fmt: skip
    header = ("case", "provider", "cold us", "p20-p80", "TB/s", "of copy", "warm us", "host us",
              "peak MB", "fusedcuda is")  # fmt: skip
    if not rows:
        return []
    cases: dict[str, list[str]] = {}  # by what is said of a provider
    for entry in summary.group(group):
        for provider, note in entry.notes.items():
            cases.setdefault(f"{provider}: {note}", []).append(entry.label)
    notes = [
        f"- {found[0]}: {note}" if len(found) == 1 else f"- {note} ({len(found)} cases)"
        for note, found in cases.items()
    ]
    notes += [
        f"- {entry.label}: the buffers together are only {entry.l2_multiple:.1f}x the L2"
        for entry in summary.group(group)
        if entry.l2_multiple is not None and entry.l2_multiple < 3
    ]
    formulas = [f"- {e.label}: {e.formula} = {e.bytes / 1e6:,.1f} MB" for e in summary.group(group)]
    details = ["<details><summary>Bytes</summary>", "", *formulas, "", "</details>", ""]
    return [f"## {title}", "", *markdown_table(header, rows), *notes, "", *details]


def host_section(summary: Summary) -> list[str]:
    providers = list(
        dict.fromkeys(
            p for e in summary.group("host") for p in e.times if not p.endswith("(again)")
        )
    )
    rows = [
        (entry.label, *(microseconds(entry.time(p, "host")) for p in providers), target_text(entry))
        for entry in summary.group("host")
    ]
    if not rows:
        return []
    native = {e.kernel: e.notes.get("native", "-") for e in summary.group("host")}
    pairs = ", ".join(f"{name} for {kernel}" for kernel, name in native.items())
    text = f"Microseconds to enqueue one call, the best of interleaved rounds. Native: {pairs}."
    return ["## Host time", "", text, "", *markdown_table(("case", *providers, "target"), rows)]


def failure_section(summary: Summary) -> list[str]:
    rows = [
        (entry.label, provider, error.replace("|", "\\|"))
        for entry in summary.entries.values()
        for provider, error in entry.errors.items()
    ]
    header = ("case", "provider", "message")
    return ["## Failed or skipped", "", *markdown_table(header, rows)] if rows else []
