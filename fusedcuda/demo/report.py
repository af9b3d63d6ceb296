"""The tables that the demo prints."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from fusedcuda.demo.check import Comparison, worst_by_group
from fusedcuda.demo.dlrm import DlrmConfig
from fusedcuda.demo.measure import Cost, hidden_layer_bytes, step_bytes

PLAIN, FUSED, COMPILED = "plain PyTorch", "fusedcuda", "torch.compile"

_IDLE_WORTH_SAYING = 0.2


def agreement_table(comparisons: Sequence[Comparison]) -> str:
    """Errors of both variants, for each part of the model the tensor nearest to its limit."""
    rows = [["Error against float64 (relative)", PLAIN, FUSED, "allowed", ""]]
    for item in worst_by_group(comparisons):
        errors = [f"{value:.1e}" for value in (item.plain, item.fused, item.limit)]
        rows.append([f"  {item.name}", *errors, "ok" if item.ok else "WRONG"])
    return _table(rows)


def cost_table(
    costs: dict[str, Cost], config: DlrmConfig, batch: int, itemsize: int, on_gpu: bool
) -> str:
    """What a forward pass and a training step take, one column per variant.

    costs: by variant, PLAIN and FUSED first; batch: rows per step; itemsize: bytes per element.
    """
    plain, fused, *others = costs.values()
    launches = "kernel launches" if on_gpu else "operations"

    def count_row(attribute: str) -> list[str]:
        counts = [getattr(cost, attribute) for cost in costs.values()]
        return [f"  {launches}", *map(_count, counts), _count_change(counts[0], counts[1])]

    def bytes_row(label: str, formula: Callable[[bool], int]) -> list[str]:
        before, after = formula(False), formula(True)
        unknown = ["-"] * len(others)  # no formula for what a compiler decides
        change = _share_change(before, after)
        return [f"  {label}", _bytes(before), _bytes(after), *unknown, change]

    def time_row(label: str, attribute: str) -> list[str]:
        times = [getattr(cost, attribute) for cost in costs.values()]
        change = _speedup(times[0], times[1]) if on_gpu else "reference"
        return [f"  {label}", *map(_time, times), change]

    def forward_bytes(is_fused: bool) -> int:
        return hidden_layer_bytes(config, batch, itemsize, is_fused, training=False)

    def training_bytes(is_fused: bool) -> int:
        return hidden_layer_bytes(config, batch, itemsize, is_fused, training=True)

    def all_bytes(is_fused: bool) -> int:
        return step_bytes(config, batch, itemsize, is_fused)

    blank = [""] * (len(costs) + 1)
    rows = [
        ["Forward pass", *costs, "change"],
        count_row("forward_launches"),
        bytes_row("bytes moved by bias and ReLU", forward_bytes),
        time_row("time", "forward_ms"),
        ["Training step", *blank],
        count_row("step_launches"),
        bytes_row("bytes moved by bias and ReLU", training_bytes),
        bytes_row("bytes moved, all", all_bytes),
        time_row("time", "step_ms"),
    ]
    if plain.kernel_ms and fused.kernel_ms:
        rows.append(time_row("time in GPU kernels", "kernel_ms"))
    return _table(rows)


def notes(costs: dict[str, Cost], on_gpu: bool) -> str:
    """How to read the cost table, and what the training did."""
    plain, fused = costs[PLAIN], costs[FUSED]
    lines = [
        "Bytes are by formula: every operation reads its inputs and writes its output once.",
        "What fusedcuda saves: in backward ReLU's mask and the bias gradient share one pass, so a",
        "hidden layer's output is passed over 5 times in a step instead of 6. Forward has nothing",
        "to save: plain PyTorch's matmul adds the bias itself, and ReLU is one pass in both.",
    ]
    if not on_gpu:
        lines.append("Operations are aten and fusedcuda calls that compute, views not counted.")
    elif fused.kernel_ms:
        idle = 1 - statistics.median(fused.kernel_ms) / statistics.median(fused.step_ms)
        if idle > _IDLE_WORTH_SAYING:
            lines.append(
                f"The GPU waits for Python {idle:.0%} of the step; a larger --batch fills it."
            )
    losses = [
        f"{cost.losses[0]:.4f} -> {cost.losses[-1]:.4f} ({name})" for name, cost in costs.items()
    ]
    lines.append(f"Loss over {len(plain.losses)} training steps: {', '.join(losses)}.")
    return "\n".join(lines)


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Starts with PASS or FAIL; a failure names everything that disagrees."""
    wrong = [item.name for item in comparisons if not item.ok]
    if wrong:
        return (
            f"FAIL: fusedcuda disagrees with plain PyTorch in {', '.join(wrong)}.\n"
            "Nothing was measured: the time of a wrong result says nothing."
        )
    return f"PASS: logits, loss and {len(comparisons) - 2} gradients agree with plain PyTorch."


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _bytes(count: int) -> str:
    """Decimal units, as memory bandwidth is quoted: 1 MB = 10**6 bytes."""
    size, unit = next(
        (size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1, "B")) if count >= size
    )
    return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"


def _time(rounds: Sequence[float]) -> str:
    if not rounds:
        return "-"
    milliseconds = statistics.median(rounds)
    return f"{milliseconds:.3g} ms" if milliseconds < 999.5 else f"{milliseconds / 1e3:.3g} s"


def _count_change(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return "-"
    return "same" if before == after else f"{after - before:+,}"


def _share_change(before: int, after: int) -> str:
    return "same" if before == after else f"{100 * (after / before - 1):+.2g}%"


def _speedup(before: Sequence[float], after: Sequence[float]) -> str:
    """How many times faster; marked where the rounds of `before` differ by as much themselves."""
    if not before or not after:
        return "-"
    ratio = statistics.median(before) / statistics.median(after)
    noise = max(before) / min(before) - 1
    return f"{ratio:.2f}x" if abs(ratio - 1) > noise else f"{ratio:.2f}x (noise)"
