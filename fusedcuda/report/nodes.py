"""Reading and replacing nodes of Dynamo's graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

import fusedcuda

from .adapter import node_value

ADD = (operator.add, operator.iadd, torch.add, "add")
MUL = (operator.mul, operator.imul, torch.mul, "mul")
LINEAR = (torch._C._nn.linear, F.linear)
RELU = (F.relu, torch.relu, "relu")
SILU = (F.silu, "silu", torch._C._nn.silu)
SIGMOID = (torch.sigmoid, F.sigmoid, "sigmoid")
TANH = (torch.tanh, F.tanh, "tanh")
GELU = (torch._C._nn.gelu, F.gelu)
SOFTMAX = (F.softmax, torch.softmax, "softmax")
RMS_NORM = (F.rms_norm, torch.rms_norm)
LAYER_NORM = (F.layer_norm, torch.layer_norm)


def is_(node: Any, targets: tuple[Any, ...]) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op in ("call_function", "call_method")
        and any(node.target is target or node.target == target for target in targets)
    )


def shape_of(node: Any) -> tuple[int, ...] | None:
    value = node_value(node) if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    value = node_value(node) if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def only_user(node: Any, user: fx.Node) -> bool:
    return isinstance(node, fx.Node) and list(node.users) == [user]


def activation_of(node: fx.Node) -> str | None:
    """fusedcuda's name of the activation that a node is."""
    if is_(node, GELU):
        return "gelu_tanh" if argument(node, 1, "approximate", "none") == "tanh" else "gelu"
    names = ((RELU, "relu"), (SILU, "silu"), (SIGMOID, "sigmoid"), (TANH, "tanh"))
    return next((name for targets, name in names if is_(node, targets)), None)


def has(op: str) -> bool:
    return hasattr(fusedcuda, op)


def call(graph: fx.Graph, op: str, *args: Any, **kwargs: Any) -> fx.Node:
    return graph.call_function(getattr(fusedcuda, op), args, kwargs)


def put(new: fx.Node, old: fx.Node) -> None:
    """`new` in the place of `old`, for what Dynamo noted on it too: later rules read its shape."""
    new.meta.update(old.meta)
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def operands_of(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Both orders of a binary operator's operands."""
    first, second = node.args[0], argument(node, 1, "other")
    yield first, second
    yield second, first
