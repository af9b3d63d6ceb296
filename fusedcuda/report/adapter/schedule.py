"""Inductor's final schedule of a graph as plain data: nodes, bytes, and where they came from."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from ..recording import Node, RecordedGraph, Refusal
from .dynamo import first_line, frame_in


def record(graph: Any, source: str, refusals: tuple[Refusal, ...]) -> RecordedGraph:
    nodes = [_node(node) for node in graph.scheduler.nodes]
    members = {
        part.get_name(): node.get_name()
        for node in graph.scheduler.nodes
        for part in node.get_nodes()
    }
    return RecordedGraph(
        phase="backward" if graph.is_backward else "forward",
        source=source,
        nodes=tuple(nodes),
        members=members,
        buffers=_buffers(graph),
        outputs=tuple(graph.get_output_names()),
        refusals=refusals,
        cuda_graph_skip=_cuda_graph_skip(graph),
        torch=torch.__version__,
    )


def _node(node: Any) -> Node:
    operations = [part.node for part in node.get_nodes() if part.node is not None]
    origins = {origin for operation in operations for origin in operation.get_origins()}
    targets = {str(origin.target) for origin in origins if origin.op == "call_function"}
    frames = (frame_in(origin.meta.get("stack_trace") or "") for origin in _in_order(origins))
    reads, writes = _traffic(node)
    return Node(
        name=node.get_name(),
        kind=type(node).__name__,
        outputs=tuple(node.get_buffer_names()),
        reads=reads,
        writes=writes,
        mutates=_mutated(node),
        origins=tuple(sorted(targets)),
        frame=next((frame for frame in frames if frame is not None), None),
    )


def _traffic(node: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes read and written by buffer.

    Inductor's own count takes the whole buffer for whatever a fused node touches. Here an access
    counts the elements that its index reaches, so that a slice is not the whole tensor, and a
    gather or scatter counts as many as it has indices: an embedding does not read its table.
    """
    reads = dict(node.get_read_write_buffer_accesses(include_reads=True, include_writes=False))
    writes = dict(node.get_read_write_buffer_accesses(include_reads=False, include_writes=True))
    parts = [part for part in node.get_nodes() if hasattr(part, "_body")]
    if not parts:  # an extern call: all of its operands
        return reads, writes
    scattered: set[str] = set()
    ordered: dict[str, int] = {}
    for counted, accesses in ((reads, "reads"), (writes, "writes")):
        direct: dict[str, dict[str, int]] = {}
        indirect: dict[str, list[int]] = {}
        for part in parts:
            indexed: dict[str, int] = {}
            for dep in getattr(part.read_writes, accesses):
                if dep.name not in counted or type(dep).__name__ != "MemoryDep":
                    continue
                if dep.is_indirect():
                    indexed[dep.name] = indexed.get(dep.name, 0) + int(_numel(part))
                else:
                    normal = dep.normalize()
                    direct.setdefault(dep.name, {})[str(normal)] = int(normal.get_numel())
            for name, elements in indexed.items():
                indirect.setdefault(name, []).append(elements)
        for name in list(counted):
            elements = sum(direct.get(name, {}).values()) + max(indirect.get(name, [0]))
            if elements:
                counted[name] = min(counted[name], elements * _itemsize(name))
            elif accesses == "reads":  # without an index it stands for an order, not for a load
                ordered[name] = counted.pop(name)
        if accesses == "writes":
            scattered = set(indirect)
    if scattered:  # what is added to in place is read where it is written, not all of it
        for name in _mutated(node):
            if name in ordered:
                reads[name] = min(ordered[name], max(writes[output] for output in scattered))
    return reads, writes


def _mutated(node: Any) -> tuple[str, ...]:
    return tuple({name: None for out in node.get_outputs() for name in out.get_mutations()})


def _numel(part: Any) -> Any:
    elements = 1
    for sizes in part.get_ranges()[:2]:
        for size in sizes:
            elements *= size
    return elements


def _itemsize(name: str) -> int:
    from torch._inductor.virtualized import V

    return int(V.graph.get_dtype(name).itemsize)


def _in_order(origins: set[fx.Node]) -> list[fx.Node]:
    """Last in the graph first: a fused kernel is filed under the line that it finishes."""
    if not origins:
        return []
    position = {node: index for index, node in enumerate(next(iter(origins)).graph.nodes)}
    return sorted(origins, key=lambda node: position.get(node, -1), reverse=True)


def _buffers(graph: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {}
    for name, buffer in {**graph.graph_inputs, **graph.name_to_buffer}.items():
        # Not all have one size: some operators return several tensors, some none.
        with contextlib.suppress(NotImplementedError, AttributeError, TypeError):
            shape = tuple(int(size) for size in buffer.get_size())
            found[name] = (shape, str(buffer.get_dtype()).removeprefix("torch."))
    return found


def _cuda_graph_skip(graph: Any) -> str | None:
    reason = graph.disable_cudagraphs_reason
    others = sorted({str(device) for device in graph.device_node_mapping} - {"cuda:0"})
    if reason is None and others:
        reason = f"tensors on another device: {', '.join(others)}"
    if reason is None and graph.mutated_inputs:
        reason = f"inputs are written to: {', '.join(sorted(graph.mutated_inputs))}"
    return None if reason is None else first_line(str(reason))
