"""The report without a GPU: the code that Inductor writes for one that is not here, and a model.

Nothing is run on data. Weights may be on the meta device, so a model that does not fit into this
machine can be looked at too.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import adapter, eager, swap
from .adapter import Capture, CapturedGraph
from .analysis import Step, Subject, build, where, worth_it
from .breaks import graph_break
from .cost import predict, totals
from .device import DEVICES, Device
from .kernels import join
from .result import Report, Swap, Variant
from .units import signed

Progress = Callable[[str], None]


def find_device(key: str) -> Device:
    device = DEVICES.get(key.lower())
    if device is None:
        known = ", ".join(repr(name) for name in DEVICES)
        raise ValueError(f"report: offline: expected one of {known}, found {key!r}")
    return device


def report_offline(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    name: str,
    mode: str,
    backward: bool,
    device: Device,
    progress: Progress,
) -> Report:
    """What `fusedcuda.report(..., offline=...)` returns."""
    adapter.check_hooks()
    with adapter.pretend_cuda(device):
        progress("tracing the model")
        captured = capture_fake(function, inputs, backward)
        progress("lowering it")
        step = lower(captured.graphs, backward, mode, device)
        progress("counting what eager PyTorch launches")
        traced = [
            part for graph in captured.graphs for part in adapter.trace_eager(graph, backward)
        ]
        plain = eager.launches(traced)
        swaps, fused = try_swaps(captured.graphs, step, backward, mode, device, progress)
    variants = [
        variant("eager", plain, predict(plain, device), device.eager_host_us),
        variant("compiled", step.launches, step.costs, device.host_us),
    ]
    if any(item.use for item in swaps):
        variants.append(
            variant("compiled + fusedcuda", fused.launches, fused.costs, device.host_us)
        )
    subject = Subject(name, device, torch.__version__, mode, backward)
    breaks = [graph_break(item.reason, item.frame) for item in captured.breaks]
    return build(subject, step, variants, swaps, breaks, _notes(device, mode, bool(breaks)))


def _notes(device: Device, mode: str, has_breaks: bool) -> list[str]:
    notes = [
        f"Predicted for {device.name}, on a machine that need not have one: kernels, order and "
        "bytes are those of Inductor's code, times come from a model "
        f"({device.copy_tb_s} TB/s, {device.tflops['bfloat16']:.0f} TFLOP/s in bf16, "
        f"{device.launch_us} us a kernel).",
        "What Inductor decides by timing is not in it: padding of matmuls, Triton templates. All "
        "tensors are taken to be on the GPU. More than 100% of peak is data that is still in the "
        "L2 cache.",
    ]
    if mode == "max-autotune":
        notes.append(
            "mode='max-autotune' may fuse epilogues into templates that are not seen here."
        )
    if has_breaks:
        notes.append(
            "Operators that run between the graphs are launched one by one and not counted. A "
            "value that is read from a tensor there, as by .item(), is taken as 1."
        )
    return notes


def variant(name: str, launches: Sequence[Any], costs: Sequence[Any], host_us: float) -> Variant:
    total = totals(launches, costs, host_us)
    return Variant(
        name, total.kernels, total.bytes, round(total.gpu_us, 2), round(total.host_us, 1)
    )


def lower(graphs: Sequence[CapturedGraph], backward: bool, mode: str, device: Device) -> Step:
    recorded = [item for graph in graphs for item in adapter.lower(graph, backward, mode)]
    launches = [launch for number, item in enumerate(recorded) for launch in join(item, number)]
    # Backward graphs run in the opposite order.
    forward = [launch for launch in launches if launch.phase == "forward"]
    phases = sorted({item.graph for item in launches if item.phase == "backward"}, reverse=True)
    ordered = forward + [item for number in phases for item in launches if item.graph == number]
    return Step(recorded, ordered, predict(ordered, device))


# ---- The model, without its values ---------------------------------------------------------------


def capture_fake(function: Callable[..., Any], inputs: Sequence[Any], backward: bool) -> Capture:
    """Dynamo's graphs of the function with every tensor replaced by a fake one on the GPU."""
    fake = _fake_function(function)
    arguments = torch.utils._pytree.tree_map(_fake, list(inputs))
    with torch.set_grad_enabled(backward):
        found = adapter.capture(fake, *arguments)
    if not found.graphs:
        raise ValueError("report: the model computes nothing that torch.compile can see")
    if backward and not any(
        isinstance(x, Tensor) and x.requires_grad for graph in found.graphs for x in graph.inputs
    ):
        raise ValueError("report: backward=True, but no input or parameter requires a gradient")
    return found


def _fake(value: Any) -> Any:
    return adapter.fake_like(value) if isinstance(value, Tensor) else value


def _fake_function(function: Any) -> Any:
    """Modules with fake parameters; of functions and methods, the modules that they hold."""
    if isinstance(function, nn.Module):
        return _fake_module(getattr(function, "_orig_mod", function))
    if isinstance(function, functools.partial):
        held = torch.utils._pytree.tree_map(_fake_held, (function.args, function.keywords))
        return functools.partial(_fake_function(function.func), *held[0], **held[1])
    if isinstance(function, types.MethodType):
        return types.MethodType(function.__func__, _fake_held(function.__self__))
    if isinstance(function, types.FunctionType) and function.__closure__:
        cells = tuple(
            types.CellType(_fake_held(cell.cell_contents)) for cell in function.__closure__
        )
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made
    return function


def _fake_held(value: Any) -> Any:
    return _fake_module(value) if isinstance(value, nn.Module) else _fake(value)


def _fake_module(module: nn.Module) -> nn.Module:
    """A copy whose tensors are fake: parameters, buffers, and tensors that are plain attributes."""
    tensors = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        tensors += [value for value in vars(part).values() if isinstance(value, Tensor)]
    return copy.deepcopy(module, {id(tensor): adapter.fake_like(tensor) for tensor in tensors})


# ---- What fusedcuda would change -----------------------------------------------------------------


def try_swaps(
    graphs: Sequence[CapturedGraph],
    before: Step,
    backward: bool,
    mode: str,
    device: Device,
    progress: Progress,
) -> tuple[list[Swap], Step]:
    """Each rule alone, lowered anew, so that what an opaque op costs its neighbours is counted too.

    Returns the swaps, best first, and the step with all of those that are worth it.
    """
    places: dict[str, list[swap.Site]] = {}
    for graph in graphs:
        for site in swap.find(graph):
            places.setdefault(site.rule, []).append(site)
    tried = []
    for rule, sites in places.items():
        progress(f"trying fusedcuda.{sites[0].op}")
        after = _swapped(graphs, [rule], backward, mode, device)
        tried.append(_outcome(rule, sites, before, after))
    # Where two exclude one another, the one that saves more comes first.
    tried.sort(key=lambda item: (item.use, item.us), reverse=True)
    used = [item.rule for item in tried if item.use]
    fused = before
    if used:
        progress("lowering it with fusedcuda")
        fused = _swapped(graphs, used, backward, mode, device)
    return tried, fused


def _swapped(
    graphs: Sequence[CapturedGraph], rules: Sequence[str], backward: bool, mode: str, device: Device
) -> Step:
    return lower([swap.apply(graph, rules)[0] for graph in graphs], backward, mode, device)


def _outcome(rule: str, sites: Sequence[swap.Site], before: Step, after: Step) -> Swap:
    kernels = len(before.launches) - len(after.launches)
    saved = before.bytes - after.bytes
    us = before.gpu_us - after.gpu_us
    use = worth_it(us, before.gpu_us)
    effect = f"{-kernels:+d} kernels, {signed(-saved)}, {0.0 - round(us, 1):+.1f} us"
    if use:
        why = effect
    elif us > 0 and (kernels or saved):
        why = f"too little to count on ({effect}, of {before.gpu_us:,.0f} us)"
    elif kernels < 0 or saved < 0:
        why = f"not here ({effect}): Inductor fuses what is around it, and an operator is opaque"
    else:
        why = f"not here ({effect}): the compiled step makes as few passes"
    op = sites[0].op
    return Swap(
        rule, op, [where(site.frame) for site in sites], kernels, saved, round(us, 2), use, why
    )
