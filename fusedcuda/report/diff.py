"""Two reports of the same subject: which numbers changed, which kernels came and went."""

from __future__ import annotations

from collections import Counter

from .render import Section, section_text
from .result import Report


def diff(old: Report, new: Report) -> str:
    """As text. Numbers that are the same in both are left out."""
    before, after = old.numbers(), new.numbers()
    rows = [
        [name, _number(before[name]), _number(after[name]), _change(before[name], after[name])]
        for name in before
        if before[name] != after[name]
    ]
    lines = _warnings(old, new)
    gone, come = Counter(_kernels(old)), Counter(_kernels(new))
    lines += [f"- {count} x {name}" for name, count in (gone - come).items()]
    lines += [f"+ {count} x {name}" for name, count in (come - gone).items()]
    if not rows and not lines:
        lines = ["Nothing changed."]
    return section_text(Section("Compared with before", lines, ["", ">before", ">now", ">"], rows))


def _warnings(old: Report, new: Report) -> list[str]:
    """What makes the two hard to compare."""
    found = []
    for name in ("subject", "device", "torch", "mode", "backward", "measured"):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            found.append(f"not the same {name}: {was} before, {now} now")
    return found


def _kernels(report: Report) -> dict[str, int]:
    found: Counter[str] = Counter()
    for kernel in report.kernels:
        shape = "x".join(map(str, kernel.shape))
        found[f"{kernel.kind}: {', '.join(kernel.ops)} {shape}"] += kernel.count
    return dict(found)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else f"{after - before:+g}"
