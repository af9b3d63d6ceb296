"""Dynamo: the graphs of a model, why they end, and what it notes on their nodes."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..recording import Frame


@dataclass(frozen=True)
class CapturedGraph:
    module: fx.GraphModule
    inputs: list[Any]


@dataclass(frozen=True)
class CapturedBreak:
    reason: str
    frame: Frame | None


@dataclass
class Capture:
    graphs: list[CapturedGraph] = field(default_factory=list)
    breaks: list[CapturedBreak] = field(default_factory=list)


def capture(function: Callable[..., Any], *inputs: Any) -> Capture:
    """Runs `function` once under Dynamo, and its graphs eagerly.

    Everything that was compiled before is compiled anew when it is called next: a function that
    was compiled too often would be left out here.
    """
    from torch._dynamo.utils import counters

    found = Capture()

    def collect(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found.graphs.append(CapturedGraph(module, list(example_inputs)))
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            found.breaks.append(CapturedBreak(reason.reason, _user_frame(reason.user_stack)))
        return module.forward

    torch._dynamo.reset()
    before = dict(counters["graph_break"])
    try:
        torch.compile(function, backend=collect, dynamic=False)(*inputs)
    finally:
        torch._dynamo.reset()
    located = {first_line(item.reason) for item in found.breaks}
    for text, count in counters["graph_break"].items():  # those that leave no graph behind
        if count > before.get(text, 0) and first_line(text) not in located:
            found.breaks.append(CapturedBreak(text, frame_in(text)))
    return found


@contextlib.contextmanager
def many_compilations() -> Iterator[None]:
    """Inside, one function may be compiled by as many backends as there are rules to try."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


_PACKAGE = Path(__file__).parents[2]
# The line that called an operator of these is the one to know, not the one inside.
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(_PACKAGE / "ops"), str(_PACKAGE / "nn.py"))


def _is_users(path: str) -> bool:
    return not path.startswith(("<", *_NOT_THE_USERS))


def _user_frame(stack: list[traceback.FrameSummary]) -> Frame | None:
    for entry in reversed(list(stack)):
        if _is_users(entry.filename):
            return Frame(entry.filename, entry.lineno or 0, (entry.line or "").strip())
    return None


_STACK_LINE = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n\s*([^\n]+))?')


def frame_in(text: str) -> Frame | None:
    """The innermost line of the user's code in a printed stack."""
    found = [match for match in _STACK_LINE.finditer(text) if _is_users(match[1])]
    return Frame(found[-1][1], int(found[-1][2]), (found[-1][3] or "").strip()) if found else None


def node_value(node: fx.Node) -> Any:
    """The fake tensor that Dynamo computed for a node."""
    return node.meta.get("example_value", node.meta.get("val"))


def node_frame(node: fx.Node) -> Frame | None:
    """The line of the user's code that a node comes from."""
    return frame_in(node.meta.get("stack_trace") or "")
