"""From launches and their costs to the report: rows, breaks, when not to fuse, the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .breaks import ALIGNMENT, HORIZONTAL, FusionBreak, fusion_breaks, odd_dimensions
from .breaks import GraphBreak as FoundBreak
from .cost import COMPUTE, SPECIAL, START, Cost, matmul_rate
from .device import Device
from .kernels import Launch
from .recording import Frame, RecordedGraph
from .result import (
    Advice,
    Break,
    CudaGraphs,
    GraphBreak,
    Kernel,
    Report,
    Span,
    Swap,
    Variant,
    is_single_op,
)
from .units import megabytes

GRAPH_MODES = ("reduce-overhead", "max-autotune")
_WORTH_US = 0.5
_WORTH_SHARE = 0.002
_SMALL_SHARE = 0.05


@dataclass(frozen=True)
class Step:
    """A step as it was lowered. costs: one for each launch, predicted or measured."""

    graphs: Sequence[RecordedGraph]
    launches: Sequence[Launch]
    costs: Sequence[Cost]

    @property
    def gpu_us(self) -> float:
        return sum(cost.us for cost in self.costs)

    @property
    def bytes(self) -> int:
        return sum(launch.bytes for launch in self.launches)


@dataclass(frozen=True)
class Subject:
    """What the report is of."""

    name: str
    device: Device
    torch: str
    mode: str
    backward: bool


def build(
    subject: Subject,
    step: Step,
    variants: list[Variant],
    swaps: list[Swap],
    graph_breaks: list[FoundBreak],
    notes: list[str],
    *,
    cuda_graphs: CudaGraphs | None = None,
    measured: bool = False,
    bytes_measured: int | None = None,
) -> Report:
    kernels, timeline = _kernels(step, subject.device)
    found = fusion_breaks(step.launches, step.graphs)
    breaks = _breaks(step, found, subject.device)
    graphs = cuda_graphs or _cuda_graphs(step.graphs, subject.mode)
    host = next(item for item in variants if item.name == "compiled").host_us or 0.0
    launch_bound = not graphs.used and host > step.gpu_us
    return Report(
        subject=subject.name,
        device=subject.device.name,
        torch=subject.torch,
        mode=subject.mode,
        backward=subject.backward,
        measured=measured,
        verdict=_verdict(step, breaks, swaps, graph_breaks, graphs, launch_bound),
        kernels=kernels,
        timeline=timeline,
        breaks=breaks,
        swaps=swaps,
        advice=_advice(step, found, swaps, subject.device, host if launch_bound else None),
        graph_breaks=[
            GraphBreak(item.reason, where(item.frame), code_of(item.frame), item.fix)
            for item in graph_breaks
        ],
        cuda_graphs=graphs,
        variants=variants,
        notes=notes,
        bytes_measured=bytes_measured,
    )


def where(frame: Frame | None) -> str:
    """`file:line`, short where the file is under the current directory."""
    if frame is None:
        return ""
    path = Path(frame.file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{frame.line}"


def code_of(frame: Frame | None) -> str:
    return frame.code if frame is not None else ""


def worth_it(saved_us: float, step_us: float) -> bool:
    """More than the model can be trusted for."""
    return saved_us > max(_WORTH_US, _WORTH_SHARE * step_us)


# ---- Kernels -------------------------------------------------------------------------------------


def _kernels(step: Step, device: Device) -> tuple[list[Kernel], list[Span]]:
    """Rows in the order in which their first launch runs, and every launch as a span."""
    rows: dict[tuple[object, ...], list[int]] = {}
    for position, launch in enumerate(step.launches):
        key = (launch.phase, launch.name, launch.ops, launch.shape, launch.dtype, launch.frame)
        rows.setdefault(key, []).append(position)
    spans: dict[int, Span] = {}
    start = 0.0
    row_of = {position: row for row, group in enumerate(rows.values()) for position in group}
    for position, cost in enumerate(step.costs):
        spans[position] = Span(row_of[position], round(start, 3), round(cost.us, 3))
        start += cost.us
    kernels = [_row(step, group, device) for group in rows.values()]
    return kernels, list(spans.values())


def _row(step: Step, group: list[int], device: Device) -> Kernel:
    first = step.launches[group[0]]
    costs = [step.costs[position] for position in group]
    us = sum(cost.us for cost in costs)
    bound = costs[0].bound
    flops = sum(step.launches[position].flops for position in group)
    rate = matmul_rate(first, device)
    moved = sum(cost.hbm + cost.l2 for cost in costs) / device.copy_tb_s
    peak = (flops / rate if bound == COMPUTE else moved) / us / 1e6 if us else 0.0
    return Kernel(
        first=group[0],
        phase=first.phase,
        name=first.name.replace("_for_cpu", ""),
        kind=first.kind,
        ops=list(first.ops),
        count=len(group),
        where=where(first.frame),
        code=code_of(first.frame),
        shape=list(first.shape),
        dtype=first.dtype,
        bytes_in=sum(step.launches[position].bytes_in for position in group),
        bytes_out=sum(step.launches[position].bytes_out for position in group),
        us=round(us, 3),
        bound=bound,
        peak=round(peak, 4),
        share=round(us / step.gpu_us, 4) if step.gpu_us else 0.0,
    )


# ---- Breaks --------------------------------------------------------------------------------------


def _breaks(step: Step, found: Sequence[FusionBreak], device: Device) -> list[Break]:
    """Those of one reason between alike kernels in one row, the largest first."""
    rows: dict[tuple[str, ...], list[FusionBreak]] = {}
    for item in found:
        first, second = step.launches[item.producer], step.launches[item.consumer]
        alone = item.reason in (ALIGNMENT, HORIZONTAL)
        key = (item.code, item.reason.why, label(first), "" if alone else label(second))
        rows.setdefault(key, []).append(item)
    result = []
    for (_, why, producer, consumer), items in rows.items():
        saved = sum(item.saved for item in items)
        at = {where(step.launches[item.consumer].frame): None for item in items}
        result.append(
            Break(
                code=items[0].code,
                count=len(items),
                producer=producer,
                consumer=consumer,
                where=", ".join(place for place in at if place),
                bytes=sum(item.bytes for item in items),
                saved=saved,
                saved_us=round(_saved_us(step, items, device), 2),
                why=why,
                fix=items[0].reason.fix,
                said="; ".join(dict.fromkeys(item.said for item in items if item.said)),
            )
        )
    return sorted(result, key=lambda row: (row.saved_us, row.bytes), reverse=True)


def _saved_us(step: Step, items: Sequence[FusionBreak], device: Device) -> float:
    """The bytes at the speed at which they go: those that the L2 cache holds save less."""
    us = 0.0
    for item in items:
        cost = step.costs[item.consumer]
        in_cache = cost.l2 / max(cost.hbm + cost.l2, 1)
        rate = in_cache * device.l2_tb_s + (1 - in_cache) * device.copy_tb_s
        us += item.saved / rate / 1e6
    return us


def label(launch: Launch) -> str:
    """A kernel in a few words: what it does."""
    return ", ".join(launch.ops) if len(launch.ops) <= 4 else ", ".join(launch.ops[:4]) + ", ..."


# ---- CUDA graphs ---------------------------------------------------------------------------------


def _cuda_graphs(graphs: Sequence[RecordedGraph], mode: str) -> CudaGraphs:
    skipped = [graph.cuda_graph_skip for graph in graphs if graph.cuda_graph_skip]
    if mode not in GRAPH_MODES:
        text = f"not asked for (mode {mode!r}); mode='reduce-overhead' replays the step as a graph"
        if skipped:
            text += f", and would leave out {len(skipped)} of {len(graphs)}: {skipped[0]}"
        return CudaGraphs(False, text)
    if skipped:
        text = (
            f"{len(skipped)} of {len(graphs)} graphs left out: {'; '.join(dict.fromkeys(skipped))}"
        )
        return CudaGraphs(len(skipped) < len(graphs), text)
    return CudaGraphs(True, f"{len(graphs)} graph(s), nothing in the way of a replay")


# ---- When not to fuse ----------------------------------------------------------------------------


def _advice(
    step: Step,
    found: Sequence[FusionBreak],
    swaps: Sequence[Swap],
    device: Device,
    launch_bound_us: float | None,
) -> list[Advice]:
    """In the order in which to look when fusing brought less than the bytes promised."""
    advice = []
    cached = sum(cost.l2 for cost in step.costs)
    if cached > _SMALL_SHARE * step.bytes:
        at_copy = cached / device.copy_tb_s / 1e6
        at_l2 = cached / device.l2_tb_s / 1e6
        text = (
            f"{megabytes(cached)} of the {megabytes(step.bytes)} that the kernels read and write "
            f"were touched just before and are still in the {device.l2_mb:.0f} MB L2 cache. Fusing "
            f"those reads away saves at most {at_l2:.1f} us, not the {at_copy:.1f} us of "
            "memory traffic."
        )
        advice.append(Advice("L2 cache", text))
    slow = _named(step, SPECIAL)
    if slow:
        us = sum(step.costs[position].us for position in slow)
        text = (
            f"{_kernels_named(step, slow)}: {us:.1f} us, set by exponentials and the like "
            f"({device.special_t_s:.1f}e12 a second), not by bytes. Fewer bytes do not help there."
        )
        advice.append(Advice("special functions", text))
    if launch_bound_us is not None:
        text = (
            f"Launching takes the CPU about {launch_bound_us:.0f} us, the kernels take the GPU "
            f"{step.gpu_us:.0f} us. First mode='reduce-overhead' or a larger batch, then fusion."
        )
        advice.append(Advice("launch-bound", text))
    short = _named(step, START)
    if len(short) > len(step.launches) / 4:
        us = sum(step.costs[position].us for position in short)
        text = (
            f"{len(short)} of {len(step.launches)} kernels take less than a launch of work, "
            f"{us:.1f} us together: there, a fused kernel saves its launches and hardly any bytes."
        )
        advice.append(Advice("short kernels", text))
    advice += _bound_by_matmul(step, found, device)
    slow_float32 = [
        launch
        for launch in step.launches
        if launch.is_matmul and launch.dtype == "float32" and matmul_rate(launch, device) < 100
    ]
    if slow_float32:
        text = (
            f"{len(slow_float32)} float32 matmul(s) run without the tensor cores. "
            "torch.set_float32_matmul_precision('high') or bfloat16 brings more than any fusion."
        )
        advice.append(Advice("float32", text))
    looped = [
        position
        for position, launch in enumerate(step.launches)
        if launch.passes > 1 and launch.kind == "reduction"
    ]
    if looped:
        text = (
            f"{_kernels_named(step, looped)}: goes over its rows "
            f"{max(step.launches[position].passes for position in looped)} times, as Inductor "
            "keeps too little of a row in registers. Anything fused into it needs more of them."
        )
        advice.append(Advice("registers", text))
    for swap in swaps:
        if not swap.use:
            advice.append(Advice(f"fusedcuda.{swap.op}", swap.why))
    return advice


def _bound_by_matmul(step: Step, found: Sequence[FusionBreak], device: Device) -> list[Advice]:
    """Matmuls whose epilogue would save next to nothing of their own time."""
    small: list[tuple[Launch, float, float]] = []
    for item in found:
        matmul, cost = step.launches[item.producer], step.costs[item.producer]
        saved = _saved_us(step, [item], device)
        if matmul.is_matmul and item.saved and saved < _SMALL_SHARE * cost.us:
            small.append((matmul, cost.us, saved))
    if not small:
        return []
    matmul, us, saved = max(small, key=lambda entry: entry[1])
    text = (
        f"{len(small)} matmul(s) where an epilogue saves less than {_SMALL_SHARE:.0%}: the "
        f"largest, {'x'.join(map(str, matmul.shape))}, takes {us:.0f} us, and what follows it "
        f"would save {saved:.1f} us of that ({saved / us:.1%})."
    )
    return [Advice("compute-bound", text)]


def _named(step: Step, bound: str) -> list[int]:
    return [position for position, cost in enumerate(step.costs) if cost.bound == bound]


def _kernels_named(step: Step, positions: Sequence[int]) -> str:
    labels = list(dict.fromkeys(label(step.launches[position]) for position in positions))
    shown = "; ".join(labels[:3])
    return shown if len(labels) <= 3 else f"{shown}; and {len(labels) - 3} more"


# ---- The verdict ---------------------------------------------------------------------------------


def _verdict(
    step: Step,
    breaks: Sequence[Break],
    swaps: Sequence[Swap],
    graph_breaks: Sequence[FoundBreak],
    graphs: CudaGraphs,
    launch_bound: bool,
) -> str:
    launches = step.launches
    matmuls = sum(launch.is_matmul for launch in launches)
    single = sum(is_single_op(launch.kind, launch.ops) for launch in launches)
    avoidable = sum(item.saved for item in breaks) / max(step.bytes, 1)
    parts = [
        _count(len(launches), "kernel"),
        _count(matmuls, "GEMM"),
        f"{single} single-op",
        _count(len(graph_breaks), "graph break"),
        f"CUDA graph: {'yes' if graphs.used else 'no'}",
    ]
    best = _next_step(step, breaks, swaps, graph_breaks, launch_bound)
    return (
        f"{', '.join(parts)}. Fusing could avoid {avoidable:.0%} of {megabytes(step.bytes)}. "
        f"Best next step: {best}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _next_step(
    step: Step,
    breaks: Sequence[Break],
    swaps: Sequence[Swap],
    graph_breaks: Sequence[FoundBreak],
    launch_bound: bool,
) -> str:
    if graph_breaks:
        return f"remove the graph break at {where(graph_breaks[0].frame) or 'an unknown line'}"
    if launch_bound:
        return "mode='reduce-overhead', as launching takes longer than the kernels"
    odd = next((odd_dimensions(launch) for launch in step.launches if odd_dimensions(launch)), "")
    if odd:
        return f"pad {odd} of a matmul to a multiple of 8"
    useful = [swap for swap in swaps if swap.use]
    if useful:
        swap = max(useful, key=lambda item: item.us)
        place = f" at {swap.where[0]}" if swap.where and swap.where[0] else ""
        return f"fusedcuda.{swap.op}{place} ({-swap.us:+.1f} us)"
    avoidable = [item for item in breaks if item.saved]
    if avoidable and worth_it(avoidable[0].saved_us, step.gpu_us):
        first = avoidable[0]
        return f"{first.code} after {first.producer} ({-first.saved_us:+.1f} us if it were fused)"
    return "none here: what is left is bound by the matmuls or already fused"
