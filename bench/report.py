"""The CSV of a family, and what is read from it: ratios, spreads, targets.

One CSV row is one provider, case and metric, in the columns of Liger-Kernel's benchmark file plus
`pct_peak`, `torch_version` and `commit`. Everything else about a row (bytes, spread of A against
A, clocks, errors) is JSON in `extra_benchmark_config_str`. The tables and plots are made from the
CSV alone (`bench/tables.py`, `bench/plots.py`), so they can be made again on any machine.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import torch

from bench import device
from bench.cases import DTYPE_NAMES, MATMUL, Case, Target

if TYPE_CHECKING:
    from bench.measure import Result
    from bench.timing import Backend

COLUMNS = [
    "kernel_name", "kernel_provider", "kernel_operation_mode", "metric_name", "metric_unit",
    "x_name", "x_label", "x_value", "y_value_50", "y_value_20", "y_value_80",
    "extra_benchmark_config_str", "gpu_name", "timestamp", "fusedcuda_version", "pct_peak",
    "torch_version", "commit",
]  # fmt: skip

OURS = "fusedcuda"
COPY = "device_copy"
PUBLISHED = "published"  # the method of a time that this process did not measure
METRICS = {"cold": "gpu_cold", "warm": "gpu_warm", "host": "host"}
UNITS = {"gpu_cold": "us", "gpu_warm": "us", "host": "us", "peak_memory": "MB", "status": ""}


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p20, p80."""
    if len(values) == 1:
        return (values[0],) * 3
    fifths = quantiles(values, n=5, method="inclusive")
    return median(values), fifths[0], fifths[3]


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


class Table:
    """Appends to the CSV, row by row, and remembers nothing that is not in it."""

    def __init__(self, path: Path, gpu: str) -> None:
        self.path = path
        self.copy_tb_per_s: float | None = None
        self.fixed = {
            "gpu_name": gpu,
            "fusedcuda_version": device.fusedcuda_version(),
            "torch_version": torch.__version__,
            "commit": device.commit(),
        }

    def labels(self) -> set[str]:
        if not self.path.exists():
            return set()
        return {case for row in read(self.path) if (case := case_of(row))}

    def write(self, rows: Iterable[dict[str, object]]) -> None:
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            writer.writerows(self.fixed | {"timestamp": stamp} | row for row in rows)

    def add_copy(
        self, tb_per_s: Sequence[float], environment: dict[str, object], state: dict[str, object]
    ) -> None:
        p50, p20, p80 = percentiles(tb_per_s)
        self.copy_tb_per_s = self.copy_tb_per_s or p50
        self.write([{
            "kernel_name": COPY, "kernel_provider": "torch", "kernel_operation_mode": "forward",
            "metric_name": "bandwidth", "metric_unit": "TB/s", "x_name": "bytes",
            "x_label": "bytes copied", "x_value": 2**30, "y_value_50": round(p50, 4),
            "y_value_20": round(p20, 4), "y_value_80": round(p80, 4), "pct_peak": 100,
            "extra_benchmark_config_str": json.dumps({"environment": environment, "gpu": state}),
        }])  # fmt: skip

    def add(
        self,
        case: Case,
        results: Sequence[Result],
        spread: Callable[[Sequence[Result], str], float | None],
        backend: Backend,
        state: dict[str, object],
    ) -> None:
        copies = 1 if case.host_only else backend.copies(case.traffic.bytes)
        shared: dict[str, object] = {"copies": copies}
        if not case.host_only:
            shared["l2_multiple"] = round(backend.l2_multiple(case.traffic.bytes, copies), 2)
        rows = []
        for result in results:
            extra = shared | {"note": result.note, "method": result.method}
            if result.error:
                rows.append(self.row(case, result.provider, "status", [], {"error": result.error}))
                continue
            for field_name, metric in METRICS.items():
                samples = getattr(result, field_name)
                if metric != "host":
                    samples = [value for one_round in samples for value in one_round]
                if not samples:
                    continue
                own = extra | {"spread": rounded(spread(results, field_name))}
                if metric == "gpu_cold":
                    own |= {"formula": case.traffic.formula, "gpu": state}
                rows.append(self.row(case, result.provider, metric, samples, own))
            if result.peak_bytes is not None:
                rows.append(
                    self.row(case, result.provider, "peak_memory", [result.peak_bytes / 1e6], extra)
                )
        rows += [
            self.row(case, peer, "gpu_cold", [us], {"method": PUBLISHED})
            for peer, us in case.published.items()
        ]
        self.write(rows)

    def add_failure(self, case: Case, message: str) -> None:
        self.write([self.row(case, OURS, "status", [], {"error": message})])

    def row(
        self, case: Case, provider: str, metric: str, samples: Sequence[float], extra: dict
    ) -> dict[str, object]:
        described = {
            "case": case.label, "group": case.group, "dtype": DTYPE_NAMES[case.dtype],
            "bytes": case.traffic.bytes,
        }  # fmt: skip
        row: dict[str, object] = {
            "kernel_name": case.kernel, "kernel_provider": provider,
            "kernel_operation_mode": case.mode, "metric_name": metric,
            "metric_unit": UNITS[metric], "x_name": case.x_name, "x_label": case.x_label,
            "x_value": case.x_value,
        }  # fmt: skip
        if samples:
            p50, p20, p80 = percentiles(samples)
            if metric == "host":
                p50 = min(samples)  # the least disturbed round; p20 and p80 show the others
            names = ("y_value_50", "y_value_20", "y_value_80")
            row |= {name: round(y, 4) for name, y in zip(names, (p50, p20, p80), strict=True)}
            if metric.startswith("gpu"):
                tb_per_s = case.traffic.bytes / p50 / 1e6
                described["tb_per_s"] = round(tb_per_s, 4)
                if sheet := device.DATASHEET_TB_PER_S.get(
                    device.short_name(self.fixed["gpu_name"])
                ):
                    described["pct_datasheet"] = round(100 * tb_per_s / sheet, 1)
                if self.copy_tb_per_s:
                    row["pct_peak"] = round(100 * tb_per_s / self.copy_tb_per_s, 1)
        described |= case.extra | {k: v for k, v in extra.items() if v not in ("", None)}
        return row | {"extra_benchmark_config_str": json.dumps(described)}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def case_of(row: dict[str, str]) -> str | None:
    return json.loads(row["extra_benchmark_config_str"]).get("case")


def measured_cases(rows: Sequence[dict[str, str]]) -> set[str | None]:
    """Those with a time of fusedcuda; None stands for the copy speed of a process."""
    ours = (row for row in rows if row["kernel_provider"] == "fusedcuda")
    return {None, *(case_of(row) for row in ours if row["metric_name"] != "status")}


def keep_measured(path: Path) -> None:
    """Takes the cases that failed or were skipped out of the CSV, so that they are measured."""
    rows = read(path)
    kept = measured_cases(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in rows if case_of(row) in kept)


# -- what the rows say ----------------------------------------------------------------------------


@dataclass
class Entry:
    """A case as read back: times by provider and metric, and the spread of A against A."""

    label: str
    kernel: str
    mode: str
    group: str
    dtype: str
    x_value: str
    bytes: int
    x_label: str = ""
    panel: str = ""
    formula: str = ""
    l2_multiple: float | None = None
    times: dict[str, dict[str, tuple[float, float, float]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    targets: tuple[Target, ...] = ()

    def time(self, provider: str, metric: str) -> float | None:
        value = self.times.get(provider, {}).get(metric)
        return value[0] if value else None

    def peers(self, metric: str) -> dict[str, float]:
        return {
            name: values[metric][0]
            for name, values in self.times.items()
            if metric in values
            and name != MATMUL
            and not name.startswith(OURS)
            and not name.endswith("(again)")
        }

    def best_peer(self, metric: str) -> tuple[str, float] | None:
        return min(self.peers(metric).items(), key=lambda item: item[1], default=None)

    def ratio(self, peer: str, metric: str) -> float | None:
        """The peer's time over ours: above one, fusedcuda is faster."""
        ours = self.time(OURS, metric)
        best = self.best_peer(metric)
        theirs = (best and best[1]) if peer == "best" else self.time(peer, metric)
        return theirs / ours if ours and theirs else None

    def interleaved(self, peer: str, metric: str) -> bool:
        """Whether the peer was measured here, in the same rounds."""
        best = self.best_peer(metric)
        return (best[0] if peer == "best" and best else peer) not in self.published

    def is_noise(self, ratio: float, metric: str) -> bool:
        """A difference smaller than that of A against A is no claim."""
        return abs(ratio - 1) <= self.spread.get(metric, 0.0)

    def tb_per_s(self, provider: str, metric: str = "gpu_cold") -> float | None:
        us = self.time(provider, metric)
        return self.bytes / us / 1e6 if us else None

    def verdict(self, target: Target) -> str:
        ratio = self.ratio(target.peer, target.metric)
        if ratio is None:
            return "not measured"
        aside = "" if self.interleaved(target.peer, target.metric) else " (not interleaved)"
        if ratio >= target.ratio:
            return "met" + aside
        is_close = target.ratio - ratio <= self.spread.get(target.metric, 0.0)
        return ("noise" if is_close else "missed") + aside


class Summary:
    """All entries of a CSV, in the order in which they were measured."""

    def __init__(self, rows: Sequence[dict[str, str]], cases: Sequence[Case]) -> None:
        by_label = {case.label: case for case in cases}
        self.entries: dict[str, Entry] = {}
        self.copies: list[float] = []
        self.environment: dict[str, object] = {}
        self.gpu_states: list[dict[str, object]] = []
        self.fixed = {k: rows[0][k] for k in ("gpu_name", "fusedcuda_version")}
        self.fixed["commit"] = ", ".join(dict.fromkeys(row["commit"] for row in rows))
        for row in rows:
            extra = json.loads(row["extra_benchmark_config_str"])
            if row["kernel_name"] == COPY:
                self.copies.append(float(row["y_value_50"]))
                self.environment = extra["environment"]
                self.gpu_states.append(extra["gpu"])
                continue
            case = by_label.get(extra["case"])
            entry = self.entries.setdefault(
                extra["case"],
                Entry(
                    extra["case"], row["kernel_name"], row["kernel_operation_mode"],
                    extra["group"], extra["dtype"], row["x_value"], extra["bytes"],
                    row["x_label"], case.panel if case else "",
                    targets=case.targets if case else (),
                ),
            )  # fmt: skip
            self._add(entry, row, extra)

    @staticmethod
    def _add(entry: Entry, row: dict[str, str], extra: dict) -> None:
        provider, metric = row["kernel_provider"], row["metric_name"]
        if "error" in extra:
            entry.errors[provider] = extra["error"]
            return
        y = tuple(float(row[f"y_value_{p}"]) for p in (50, 20, 80))
        entry.times.setdefault(provider, {})[metric] = y
        entry.formula = extra.get("formula", entry.formula)
        entry.l2_multiple = extra.get("l2_multiple", entry.l2_multiple)
        if "note" in extra:
            entry.notes[provider] = extra["note"]
        if extra.get("method") == PUBLISHED:
            entry.published.add(provider)
        if "spread" in extra:
            entry.spread[metric] = extra["spread"]

    @property
    def copy_tb_per_s(self) -> float | None:
        return self.copies[0] if self.copies else None

    def published(self) -> set[str]:
        return set().union(*(entry.published for entry in self.entries.values()))

    def panels(self) -> dict[str, list[Entry]]:
        """The entries that are points of a plot, by its title, in the order of their sizes."""
        panels: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            if entry.panel:
                panels.setdefault(entry.panel, []).append(entry)
        return {title: sorted(es, key=lambda e: int(e.x_value)) for title, es in panels.items()}

    def group(self, name: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.group == name]

    def further_groups(self) -> list[str]:
        """Those of a family's own, such as the layers of a published model."""
        groups = dict.fromkeys(entry.group for entry in self.entries.values())
        return [name for name in groups if name not in ("main", "sweep", "host")]
