"""Parts of a model that a fusedcuda op computes in one pass, found in Dynamo's graph and replaced.

A rule finds nodes and replaces them by one call; whether that is faster is for the caller to find
out, by lowering or timing the result. Only ops of the installed fusedcuda are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from .adapter import CapturedGraph, node_frame
from .recording import Frame
from .rules import RULES


@dataclass(frozen=True)
class Site:
    """One place where a rule applies: what is there, and which op takes its place."""

    rule: str
    op: str
    frame: Frame | None


def find(graph: CapturedGraph) -> list[Site]:
    """Every match of every rule. Some exclude one another: a sum is in a norm or in a matmul."""
    return [site for rule in RULES for site in apply(graph, [rule])[1]]


def apply(graph: CapturedGraph, rules: Sequence[str]) -> tuple[CapturedGraph, list[Site]]:
    """A copy of the graph with the matches of `rules` replaced, in this order, and where."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.module.graph, {}))
    module = fx.GraphModule(graph.module, copied)
    sites = []
    for rule in rules:
        for node in list(copied.nodes):
            if node not in copied.nodes:  # taken by an earlier match
                continue
            match = RULES[rule](node)
            if match is None or match[0] != rule:
                continue
            _, op, replace = match
            sites.append(Site(rule, op, node_frame(node)))
            with copied.inserting_before(node):
                replace(copied)
            copied.eliminate_dead_code()
    module.recompile()
    return CapturedGraph(module, graph.inputs), sites
