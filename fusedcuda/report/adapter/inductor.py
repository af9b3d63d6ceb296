"""Inductor: what it makes of a graph, written down while it does or without compiling it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx

from ..recording import RecordedGraph, Refusal
from .dynamo import CapturedGraph
from .hooks import FormatNotRecognised
from .pretend import fake_like
from .schedule import record


@contextlib.contextmanager
def recording(run_code: bool) -> Iterator[list[RecordedGraph]]:
    """Every graph that Inductor lowers inside is added to the list that this yields.

    With `run_code=False` the code is written but not compiled, so that no GPU is needed.
    """
    import torch._inductor.config
    from torch._functorch import config as functorch_config
    from torch._inductor import scheduler
    from torch._inductor.graph import GraphLowering

    recorded: list[RecordedGraph] = []
    refusals: list[Refusal] = []
    codegen, refuse = GraphLowering.codegen, scheduler.WhyNoFuse.__call__

    def note(self: Any, reason: str, *args: Any) -> None:
        refusals.append(Refusal(self.name1, self.name2, reason % args if args else reason))
        refuse(self, reason, *args)

    def write(self: Any) -> Any:
        refusals.clear()
        written = codegen(self)
        recorded.append(record(self, written[0].value, tuple(dict.fromkeys(refusals))))
        return written

    def stop(self: Any) -> Any:
        self.codegen()
        raise _Written

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(scheduler.WhyNoFuse, "__call__", note))
        stack.enter_context(mock.patch.object(GraphLowering, "codegen", write))
        if not run_code:
            stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", stop))
        # From a cache nothing is lowered, and there is nothing to see.
        off = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
        stack.enter_context(torch._inductor.config.patch(off))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield recorded


class _Written(BaseException):
    """Ends a compilation once the code is written. Not an Exception: torch would wrap it."""


def lower(graph: CapturedGraph, backward: bool, mode: str = "default") -> list[RecordedGraph]:
    """What Inductor would run for one captured graph; to be called inside `pretend_cuda`.

    The graph is traced on fake CPU tensors and moved to CUDA before it is lowered: in between,
    torch computes small constants for real, and its autograd asks the CUDA driver for streams.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config

    recorded: list[RecordedGraph] = []
    needs_grad = backward and any(isinstance(x, Tensor) and x.requires_grad for x in graph.inputs)
    module = _on_device(graph.module, "cpu")
    inputs = [fake_like(x, "cpu") if isinstance(x, Tensor) else x for x in graph.inputs]

    def inner(traced: fx.GraphModule, examples: list[Any], **options: Any) -> Callable[..., Any]:
        _move_traced(traced, examples)
        with recording(run_code=False) as written, contextlib.suppress(_Written):
            compile_fx.compile_fx_inner(traced, examples, **options)
        if len(written) != 1:
            raise FormatNotRecognised(f"Inductor wrote {len(written)} modules for one graph")
        recorded.extend(written)
        return _never_run

    settings = torch._inductor.list_mode_options(mode) if mode != "default" else {}
    settings = {name: value for name, value in settings.items() if "autotune" not in name}
    with (
        torch.set_grad_enabled(needs_grad),
        config.patch(settings),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
    ):
        try:
            compile_fx.compile_fx(module, inputs, inner_compile=cast(Any, inner))
        except RuntimeError as error:
            if "not linked with support for cuda" in str(error):
                raise RuntimeError(_NEEDS_CUDA_BUILD) from error
            raise
    return recorded


_NEEDS_CUDA_BUILD = (
    "report: this model draws random numbers or is indexed in a way that Inductor traces with CUDA "
    "tensors, for which a torch built with CUDA is needed (a GPU is not)"
)


def _never_run(*_: Any) -> Any:
    raise AssertionError("code for a GPU that is not here was called")


_never_run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's calling convention


def _on_device(module: fx.GraphModule, device: str) -> fx.GraphModule:
    """A copy of a Dynamo graph that makes its tensors on `device`, with its constants there."""
    tensors = [*module.parameters(), *module.buffers()]
    moved = copy.deepcopy(module, {id(x): fake_like(x, device) for x in tensors})

    def swap(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type in ("cpu", "cuda"):
            return torch.device(device)
        return device if value in ("cuda", "cuda:0") else value

    for part in moved.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, swap)
                node.kwargs = fx.node.map_aggregate(node.kwargs, swap)
            part.recompile()
    return moved


def _move_traced(module: fx.GraphModule, examples: list[Any]) -> None:
    """Moves a traced graph to CUDA in place: in place, so that views keep sharing storage."""
    cuda = torch.device("cuda:0")

    def move(value: Any) -> Any:
        if isinstance(value, torch._subclasses.FakeTensor):
            value.fake_device = cuda
        return value

    def swap(value: Any) -> Any:
        return cuda if value == torch.device("cpu") else value

    torch.utils._pytree.tree_map(move, examples)
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                torch.utils._pytree.tree_map(move, node.meta.get("val"))
                node.args = fx.node.map_aggregate(node.args, swap)
                node.kwargs = fx.node.map_aggregate(node.kwargs, swap)
            part.recompile()


def trace_eager(graph: CapturedGraph, backward: bool) -> list[tuple[str, fx.GraphModule]]:
    """The aten operators that eager PyTorch runs for a graph, with their fake results.

    To be called inside `pretend_cuda`.
    """
    from torch._functorch import config as functorch_config
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import default_partition

    needs_grad = backward and any(isinstance(x, Tensor) and x.requires_grad for x in graph.inputs)
    found: list[tuple[str, fx.GraphModule]] = []

    def keep(phase: str) -> Callable[..., Any]:
        def compiler(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            found.append((phase, module))
            return _never_run

        return compiler

    with (
        torch.set_grad_enabled(needs_grad),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
    ):
        aot_module_simplified(
            _on_device(graph.module, "cpu"),
            [fake_like(x, "cpu") if isinstance(x, Tensor) else x for x in graph.inputs],
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            inference_compiler=keep("forward"),
            partition_fn=default_partition,
            decompositions={},
        )
    return found


def compile_graph(graph: CapturedGraph, mode: str) -> Callable[..., Any]:
    """A Dynamo graph compiled by Inductor, to be run: what a backend of torch.compile returns."""
    from torch._inductor import compile_fx

    patches = None if mode == "default" else torch._inductor.list_mode_options(mode)
    compiled = compile_fx.compile_fx(graph.module, graph.inputs, config_patches=patches)
    return cast(Callable[..., Any], compiled)
