"""What a case study keeps: one CSV of numbers, from which its page and its pictures are made.

A number is counted (from the operators that ran, or from Inductor's code), predicted (by a model of
the H200) or measured on a GPU. A machine without a GPU counts and predicts anew and leaves what was
measured elsewhere as it is, so a page can be written again anywhere.
"""

from __future__ import annotations

import argparse
import csv
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import device
from bench.report import percentiles
from bench.tables import grid

COUNTED, PREDICTED, MEASURED = "counted", "predicted", "measured"
NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class Row:
    """One number. low and high: the 20th and 80th percentile of its samples, if it has several.

    note: what has to be said with it; the message of an error where there is no number.
    """

    case: str
    provider: str
    metric: str
    unit: str
    source: str
    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    gpu: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.case, self.provider, self.metric, self.source


class Results:
    """The rows of one study, found by case, provider and metric."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows = {row.key: row for row in rows}

    @staticmethod
    def of_folder(folder: Path | None, name: str) -> Results:
        """What was measured before, if `folder` has a CSV of this name; nothing else of it."""
        path = folder and folder / f"{name}.csv"
        if path is None or not path.exists():
            return Results()
        return Results([row for row in read(path) if row.source == MEASURED])

    def add(
        self,
        case: str,
        provider: str,
        metric: str,
        value: float | None,
        unit: str,
        source: str,
        *,
        samples: Sequence[float] = (),
        note: str = "",
    ) -> None:
        """A number, or the middle one of `samples`; in the place of an earlier one of its name."""
        low = high = None
        if samples:
            value, low, high = percentiles(samples)
        row = Row(case, provider, metric, unit, source, value, low, high, note, *_origin(source))
        self.rows[row.key] = row

    def row(self, case: str, provider: str, metric: str, source: str = MEASURED) -> Row | None:
        return self.rows.get((case, provider, metric, source))

    def value(self, case: str, provider: str, metric: str, source: str = MEASURED) -> float | None:
        row = self.row(case, provider, metric, source)
        return row.value if row else None

    def ratio(self, case: str, slow: str, fast: str, metric: str) -> float | None:
        """How many times faster `fast` was measured to be."""
        above, below = (self.value(case, provider, metric) for provider in (slow, fast))
        return above / below if above and below else None

    def errors(self) -> list[Row]:
        return [row for row in self.rows.values() if row.value is None and row.note]

    def measured_on(self) -> str:
        """`NVIDIA H200, torch 2.11.0, commit 1234567, 2026-01-31`, or that nothing was measured."""
        found = {
            f"{row.gpu}, torch {row.torch}, commit {row.commit}, {row.date}"
            for row in self.rows.values()
            if row.source == MEASURED
        }
        return "; ".join(sorted(found)) or NOT_MEASURED

    def save(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
            writer.writeheader()
            for row in self.rows.values():
                cells = asdict(row)
                for name in ("value", "low", "high"):
                    if cells[name] is not None:
                        cells[name] = f"{cells[name]:.10g}"
                writer.writerow(cells)


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [Row(**{name: _cell(name, text) for name, text in row.items()}) for row in
                csv.DictReader(file)]  # fmt: skip


def _cell(name: str, text: str) -> Any:
    if name in ("value", "low", "high"):
        return float(text) if text else None
    return text


def _origin(source: str) -> tuple[str, str, str, str]:
    """GPU, torch, commit and date of what is measured: a count does not depend on the day."""
    if source != MEASURED:
        return "", torch.__version__, "", ""
    return _machine()


@functools.cache
def _machine() -> tuple[str, str, str, str]:
    today = time.strftime("%Y-%m-%d", time.gmtime())
    return torch.cuda.get_device_name(), torch.__version__, device.commit(), today


# -- words ----------------------------------------------------------------------------------------


def cell(value: float | None, form: str = "") -> str:
    """In the given form, or else with three significant digits."""
    if value is None:
        return "-"
    return (form or ("{:.3g}" if value < 999.5 else "{:,.0f}")).format(value)


def times_faster(value: float | None, noise: float = 0.0) -> str:
    """`1.62x`; with `~` where the difference is not larger than that of one provider to itself."""
    if value is None:
        return "-"
    return f"{'~' if abs(value - 1) <= noise else ''}{value:.2f}x"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    # The grid leaves its last column as it is, for remarks; these tables have none.
    print("\n".join(["", title, *grid([[*row, ""] for row in (header, *rows)])]), flush=True)


# -- the script -----------------------------------------------------------------------------------


def script_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"write {name}.csv, {name}.md and plots there; what was measured before stays",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved rounds on a GPU (default: 5)"
    )
    return parser


def write(
    folder: Path,
    name: str,
    results: Results,
    page: Callable[[Results, Sequence[str]], str],
    draw: Callable[[Any, Results], dict[str, Any]],
) -> None:
    """The CSV, the pictures by name of `draw(pyplot, results)`, and the page that shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    results.save(folder / f"{name}.csv")
    pictures = []
    try:
        from bench.plots import pyplot

        plt = pyplot()
    except ImportError:
        print("\nNo plots: matplotlib is not installed (pip install matplotlib).")
    else:
        for picture, figure in draw(plt, results).items():
            pictures.append(f"{name}_{picture}.png")
            figure.savefig(folder / pictures[-1])
            plt.close(figure)
    (folder / f"{name}.md").write_text(page(results, pictures), encoding="utf-8")
    print(
        f"\nWritten: {', '.join(str(folder / x) for x in (f'{name}.csv', f'{name}.md', *pictures))}"
    )


def spread_of(first: Sequence[float], again: Sequence[float]) -> float:
    """How far two measurements of the same thing are apart: what a difference has to exceed."""
    return abs(median(first) / median(again) - 1)
