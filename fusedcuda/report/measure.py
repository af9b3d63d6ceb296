"""The report on a GPU: the compiled step recorded while it is compiled, then profiled.

All that needs a GPU is behind `Clock`; the rest is tested with a scripted one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from . import adapter, eager, offline, swap
from .adapter import Capture, CapturedGraph
from .analysis import GRAPH_MODES, Step, Subject, build, where, worth_it
from .breaks import graph_break
from .cost import Cost, predict
from .device import DEVICES, H200, Device
from .kernels import Launch, join
from .result import CudaGraphs, Report, Swap, Variant

Run = Callable[[], object]

_WARM_UP = 3  # mode reduce-overhead: one to compile, one to record, one to replay
_ROUNDS = 5


@dataclass(frozen=True)
class Trace:
    """One step on the GPU: name and microseconds of each kernel in order."""

    kernels: Sequence[tuple[str, float]]
    graph_launches: int = 0

    @property
    def us(self) -> float:
        return sum(us for _, us in self.kernels)


class Clock(Protocol):
    """What is measured, of a step that was run before."""

    def device(self) -> Device: ...
    def trace(self, run: Run) -> Trace: ...
    def host_us(self, run: Run) -> float: ...


def report_measured(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    name: str,
    mode: str,
    backward: bool,
    clock: Clock,
    progress: Callable[[str], None],
    bytes_measured: int | None = None,
) -> Report:
    """What `fusedcuda.report` returns where there is a GPU."""
    adapter.check_hooks()
    device = clock.device()
    progress("tracing the model")
    with adapter.pretend_cuda(device):
        captured = offline.capture_fake(function, inputs, backward)
        traced = [
            part for graph in captured.graphs for part in adapter.trace_eager(graph, backward)
        ]
        plain = eager.launches(traced)
        sites = [site for graph in captured.graphs for site in swap.find(graph)]
    # From here on nothing may reset Dynamo: the steps are timed in turns, each compiled once.
    with adapter.many_compilations():
        return _measure(
            function, inputs, captured, plain, sites,
            Subject(name, device, torch.__version__, mode, backward),
            clock, progress, bytes_measured,
        )  # fmt: skip


def _measure(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    captured: Capture,
    plain: Sequence[Launch],
    sites: Sequence[swap.Site],
    subject: Subject,
    clock: Clock,
    progress: Callable[[str], None],
    bytes_measured: int | None,
) -> Report:
    device, mode, backward = subject.device, subject.mode, subject.backward
    progress("compiling")
    run = partial(step, torch.compile(function, mode=mode, dynamic=False), inputs, backward)
    with adapter.recording(run_code=True) as recorded:
        for _ in range(_WARM_UP):
            run()
    launches = [launch for number, item in enumerate(recorded) for launch in join(item, number)]
    progress("profiling the compiled step")
    trace = clock.trace(run)
    costs, notes = _measured_costs(launches, predict(launches, device), trace)
    lowered = Step(recorded, launches, costs)
    compiled = Variant("compiled", len(trace.kernels), lowered.bytes, trace.us, clock.host_us(run))

    progress("profiling eager")
    plainly = partial(step, function, inputs, backward)
    plainly()
    eager_trace = clock.trace(plainly)
    first = Variant(
        "eager", len(eager_trace.kernels), sum(launch.bytes for launch in plain), eager_trace.us,
        clock.host_us(plainly),
    )  # fmt: skip
    swaps, fused = _time_swaps(
        function, inputs, sites, lowered, compiled, run, mode, backward, clock, progress
    )
    variants = [first, compiled, *([fused] if fused else [])]
    notes.insert(
        0,
        f"Kernels profiled one by one on {device.name}; bytes are those of Inductor's code. "
        f"Peaks: {device.copy_tb_s:.2f} TB/s for a copy, measured now.",
    )
    breaks = [graph_break(item.reason, item.frame) for item in captured.breaks]
    return build(
        subject, lowered, variants, swaps, breaks, notes,
        cuda_graphs=_graphs(trace, lowered, mode),
        measured=True, bytes_measured=bytes_measured,
    )  # fmt: skip


def step(function: Callable[..., Any], inputs: Sequence[Any], backward: bool) -> list[Tensor]:
    """One step; returns what it computed, gradients last."""
    if not backward:
        with torch.no_grad():
            return [x for x in tree_leaves(function(*inputs)) if isinstance(x, Tensor)]
    held = getattr(function, "_orig_mod", function)
    leaves = [x for x in tree_leaves(list(inputs)) if isinstance(x, Tensor) and x.requires_grad]
    if isinstance(held, nn.Module):
        leaves += [x for x in held.parameters() if x.requires_grad]
    outputs = [x for x in tree_leaves(function(*inputs)) if isinstance(x, Tensor)]
    differentiable = [x for x in outputs if x.requires_grad]
    ones = [torch.ones_like(x) for x in differentiable]
    grads = torch.autograd.grad(differentiable, leaves, ones, allow_unused=True)
    return [*(x.detach() for x in outputs), *(x for x in grads if x is not None)]


def _graphs(trace: Trace, lowered: Step, mode: str) -> CudaGraphs | None:
    """What the trace says; None where graphs were not asked for, which needs no trace."""
    if mode not in GRAPH_MODES:
        return None
    if trace.graph_launches:
        return CudaGraphs(True, f"{trace.graph_launches} cudaGraphLaunch a step in the trace")
    reasons = [graph.cuda_graph_skip for graph in lowered.graphs if graph.cuda_graph_skip]
    reason = reasons[0] if reasons else "TORCH_LOGS=cudagraphs prints the reason"
    return CudaGraphs(False, f"no cudaGraphLaunch in the trace: {reason}")


# ---- Times for launches --------------------------------------------------------------------------


def _measured_costs(
    launches: Sequence[Launch], predicted: Sequence[Cost], trace: Trace
) -> tuple[list[Cost], list[str]]:
    times = align(launches, predicted, trace)
    if times is None:
        note = (
            f"The trace has {len(trace.kernels)} kernels in another order than the code's "
            f"{len(launches)}: the times of single kernels are predicted, the sums measured."
        )
        return list(predicted), [note]
    return [replace(cost, us=us) for cost, us in zip(predicted, times, strict=True)], []


def align(
    launches: Sequence[Launch], predicted: Sequence[Cost], trace: Trace
) -> list[float] | None:
    """Microseconds of each launch, or None where the trace is not one of these launches.

    A Triton kernel has its own name in the trace. What a library launches has names of its own
    and may be several kernels: those between two Triton kernels belong to the calls between them,
    one each if there are as many, else shared out as predicted.
    """
    ours = {launch.name for launch in launches if launch.name.startswith("triton_")}
    expected = [launch.name for launch in launches if launch.name in ours]
    if [name for name, _ in trace.kernels if name in ours] != expected:
        return None
    times = [0.0] * len(launches)
    position = 0
    between: list[float] = []

    def settle(end: int) -> bool:
        calls = list(range(position, end))
        if len(between) == len(calls):
            shares = between
        elif calls:
            whole = sum(predicted[call].us for call in calls)
            shares = [sum(between) * predicted[call].us / whole for call in calls]
        else:  # copies into a graph's inputs, for instance
            return True
        if not between and calls:
            return False
        for call, us in zip(calls, shares, strict=True):
            times[call] = us
        return True

    for name, us in trace.kernels:
        if name not in ours:
            between.append(us)
            continue
        end = next(i for i in range(position, len(launches)) if launches[i].name == name)
        if not settle(end):
            return None
        times[end] = us
        position, between = end + 1, []
    return times if settle(len(launches)) else None


# ---- fusedcuda in the model's place --------------------------------------------------------------


def _time_swaps(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    sites: Sequence[swap.Site],
    lowered: Step,
    compiled: Variant,
    run: Run,
    mode: str,
    backward: bool,
    clock: Clock,
    progress: Callable[[str], None],
) -> tuple[list[Swap], Variant | None]:
    """Each rule alone, compiled and timed in turns with the compiled step."""
    places: dict[str, list[swap.Site]] = {}
    for site in sites:
        places.setdefault(site.rule, []).append(site)
    reference = step(function, inputs, backward)
    swaps = []
    for rule, found in places.items():
        progress(f"timing fusedcuda.{found[0].op}")
        other, after = _swapped_run(function, inputs, [rule], mode, backward)
        error = largest_error(other(), reference)
        before_us, after_us, noise = in_turns(clock, run, other)
        saved = before_us - after_us
        use = saved > noise and worth_it(saved, before_us)
        count = len(clock.trace(other).kernels)
        moved = sum(launch.bytes for launch in after())
        why = f"{before_us:.1f} us -> {after_us:.1f} us (rounds differ by {noise:.1f} us)"
        swaps.append(
            Swap(
                rule,
                found[0].op,
                [where(site.frame) for site in found],
                compiled.kernels - count,
                lowered.bytes - moved,
                round(saved, 2),
                use,
                why if use else f"not here: {why}",
                True,
                error,
            )
        )
    swaps.sort(key=lambda item: (item.use, item.us), reverse=True)
    used = [item.rule for item in swaps if item.use]
    if not used:
        return swaps, None
    progress("profiling it with fusedcuda")
    other, after = _swapped_run(function, inputs, used, mode, backward)
    trace = clock.trace(other)
    moved = sum(launch.bytes for launch in after())
    name = "compiled + fusedcuda"
    return swaps, Variant(name, len(trace.kernels), moved, trace.us, clock.host_us(other))


def _swapped_run(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    rules: Sequence[str],
    mode: str,
    backward: bool,
) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Launch]]]:
    """The step with the rules applied, warmed up, and what it launches by its code."""

    def backend(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        changed, _ = swap.apply(CapturedGraph(module, examples), rules)
        return adapter.compile_graph(changed, mode)

    run = partial(step, torch.compile(function, backend=backend, dynamic=False), inputs, backward)
    with adapter.recording(run_code=True) as recorded:
        for _ in range(_WARM_UP):
            run()
    return run, lambda: [x for number, item in enumerate(recorded) for x in join(item, number)]


def largest_error(results: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest difference over the largest value, of the worst of the results."""
    worst = 0.0
    for value, expected in zip(results, reference, strict=True):
        if expected.is_floating_point() and expected.numel():
            scale = expected.double().abs().max().item() or 1.0
            worst = max(worst, (value.double() - expected.double()).abs().max().item() / scale)
    return worst


def in_turns(clock: Clock, first: Run, second: Run) -> tuple[float, float, float]:
    """Medians of both, and how far the rounds of the first are apart: no smaller gain counts."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for run, found in zip((first, second), times, strict=True):
            found.append(clock.trace(run).us)
    spread = max(times[0]) - min(times[0])
    return statistics.median(times[0]), statistics.median(times[1]), spread


# ---- The GPU -------------------------------------------------------------------------------------


class CudaClock:
    """The current CUDA device, by torch's profiler and by events."""

    def device(self) -> Device:
        """The known device of this name with the copy speed of this one; or one scaled to it."""
        properties = torch.cuda.get_device_properties()
        name = torch.cuda.get_device_name()
        known = next((item for key, item in DEVICES.items() if key in name.lower()), None)
        if known is None:
            scale = properties.multi_processor_count / H200.multiprocessors
            known = replace(
                H200,
                key=name,
                name=name,
                capability=(properties.major, properties.minor),
                multiprocessors=properties.multi_processor_count,
                memory_gb=properties.total_memory >> 30,
                l2_mb=properties.L2_cache_size / 1e6,
                tflops={dtype: rate * scale for dtype, rate in H200.tflops.items()},
                special_t_s=H200.special_t_s * scale,
            )
        return replace(known, copy_tb_s=self._copy_tb_s())

    def trace(self, run: Run) -> Trace:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            return read_trace(json.loads(path.read_text()))

    def host_us(self, run: Run) -> float:
        """The least time that the CPU takes to launch a step, of several."""
        best = float("inf")
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
        torch.cuda.synchronize()
        return best * 1e6

    def _copy_tb_s(self) -> float:
        source, target = (torch.empty(2**29, dtype=torch.int16, device="cuda") for _ in range(2))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS + 1)]
        target.copy_(source)
        marks[0].record()
        for mark in marks[1:]:
            target.copy_(source)
            mark.record()
        torch.cuda.synchronize()
        fastest = min(a.elapsed_time(b) for a, b in pairwise(marks))
        return 2 * source.nbytes / fastest / 1e9


def read_trace(trace: dict[str, Any]) -> Trace:
    """Of a Chrome trace: the kernels in order, and how many CUDA graphs were launched."""
    events = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    events.sort(key=lambda event: event["ts"])
    launches = sum(event.get("name") == "cudaGraphLaunch" for event in trace["traceEvents"])
    return Trace([(event["name"], float(event["dur"])) for event in events], launches)
