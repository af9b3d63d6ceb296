"""What the same step takes without a compiler: a kernel for each operator that computes."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from .adapter import node_value
from .kernels import GATHERS, MATMULS, Launch

# Operators that touch no element beside those whose schema says that they return a view.
_NO_WORK = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "_reshape_alias")


def launches(graphs: list[tuple[str, fx.GraphModule]]) -> list[Launch]:
    """The operators of graphs that were traced without decompositions."""
    found = []
    for number, (phase, module) in enumerate(graphs):
        for node in module.graph.nodes:
            if _computes(node):
                found.append(_launch(node, number, phase))
    return found


def _computes(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    is_view = any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )
    name = schema.name.rpartition("::")[2]
    return not is_view and not name.startswith(_NO_WORK) and bool(_tensors(node_value(node)))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _launch(node: fx.Node, graph: int, phase: str) -> Launch:
    name = node.target._schema.name.rpartition("::")[2]  # type: ignore[union-attr]
    sources = [source for source in node.all_input_nodes if _tensors(node_value(source))]
    # A view is where its base is: the cache model goes by the name.
    reads = {
        _base(source): sum(x.nbytes for x in _tensors(node_value(source))) for source in sources
    }
    outputs = _tensors(node_value(node))
    if name in GATHERS:
        reads = {source: min(size, outputs[0].nbytes) for source, size in reads.items()}
    matrices = [x.shape for source in sources for x in _tensors(node_value(source))]
    return Launch(
        graph=graph,
        phase=phase,
        name=name,
        kind="matmul" if name in MATMULS else "eager",
        ops=(name,),
        shape=tuple(outputs[0].shape),
        dtype=str(outputs[0].dtype).removeprefix("torch."),
        reads=reads,
        writes={node.name: sum(x.nbytes for x in outputs)},
        flops=_flops(name, [tuple(shape) for shape in matrices], node),
    )


def _base(node: fx.Node) -> str:
    while (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and not _computes(node)
        and node.all_input_nodes
    ):
        node = node.all_input_nodes[0]
    return node.name


def _flops(name: str, shapes: list[tuple[int, ...]], node: fx.Node) -> int:
    if name in MATMULS:
        matrices = [shape for shape in shapes if len(shape) >= 2][-2:]
        if len(matrices) == 1:  # a matrix times itself
            matrices *= 2
        return 2 * prod(matrices[0]) * matrices[1][-1]
    if "scaled_dot_product" in name:
        *batch, length, width = shapes[0]
        work = 4 * prod(batch) * length * length * width // (2 if True in node.args else 1)
        return work * 5 // 2 if "backward" in name else work
    return 0
