"""The parts of a model that a fusedcuda op computes in one pass, one function each."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from .nodes import (
    ADD,
    LAYER_NORM,
    LINEAR,
    MUL,
    RMS_NORM,
    SOFTMAX,
    activation_of,
    argument,
    call,
    dtype_of,
    has,
    is_,
    only_user,
    operands_of,
    put,
    shape_of,
)

Replace = Callable[[fx.Graph], None]
# Name of what was found, the op, and how to put it there.
Match = tuple[str, str, Replace]
Rule = Callable[[Any], Match | None]


def _norm(node: Any) -> Match | None:
    """rms_norm or layer_norm over the last dimension, with the addition before it, if any."""
    is_rms = is_(node, RMS_NORM)
    if not (is_rms or is_(node, LAYER_NORM)):
        return None
    x, sizes = node.args[0], argument(node, 1, "normalized_shape")
    shape = shape_of(x)
    if shape is None or tuple(sizes) != shape[-1:]:
        return None
    operands: tuple[Any, ...]
    weight = argument(node, 2, "weight")
    if is_rms:
        eps = argument(node, 3, "eps")
        dtype = dtype_of(x) or torch.float32
        operands = (weight, torch.finfo(dtype).eps if eps is None else eps)
    else:
        operands = (weight, argument(node, 3, "bias"), argument(node, 4, "eps", 1e-5))
    op = "rms_norm" if is_rms else "layer_norm"
    added = _sum_of_two(x)

    def replace(graph: fx.Graph) -> None:
        if added is None:
            put(call(graph, op, x, *operands), node)
            return
        pair = call(graph, op, added[0], *operands, residual=added[1])
        y, h = (graph.call_function(operator.getitem, (pair, index)) for index in (0, 1))
        put(y, node)
        put(h, x)

    return ("norm with residual" if added else "norm"), op, replace


def _sum_of_two(node: Any) -> tuple[Any, Any] | None:
    """The operands of an addition of two tensors of one shape and dtype, first used by `node`."""
    if not is_(node, ADD):
        return None
    first, second = next(operands_of(node))
    if (
        shape_of(first) is None
        or shape_of(first) != shape_of(second)
        or dtype_of(first) != dtype_of(second)
    ):
        return None
    # The norm has to come before the other uses of the sum, which get it from there.
    order = {user: position for position, user in enumerate(node.graph.nodes)}
    users = sorted(node.users, key=order.__getitem__)
    is_norm = is_(users[0], (*RMS_NORM, *LAYER_NORM))
    return (first, second) if is_norm else None


def _gated(node: Any) -> Match | None:
    """act(gate) * up."""
    if not is_(node, MUL):
        return None
    for activated, up in operands_of(node):
        name = activation_of(activated) if only_user(activated, node) else None
        if name is None or shape_of(up) is None or shape_of(up) != shape_of(activated.args[0]):
            continue

        def replace(graph: fx.Graph, operands: Any = (activated.args[0], up, name)) -> None:
            put(call(graph, "act_mul", *operands), node)

        return "gated product", "act_mul", replace
    return None


def _gated_mlp(node: Any) -> Match | None:
    """linear(act(linear(x)) * linear(x)), where nothing else reads what is in between."""
    if not (_is_plain_linear(node) and has("gated_mlp")):
        return None
    hidden = node.args[0]
    if not (is_(hidden, MUL) and only_user(hidden, node)):
        return None
    for activated, up in operands_of(hidden):
        name = activation_of(activated) if only_user(activated, hidden) else None
        if name is None:
            continue
        gate = activated.args[0]
        if not (_is_plain_linear(gate) and only_user(gate, activated)):
            continue
        if not (_is_plain_linear(up) and only_user(up, hidden) and gate.args[0] is up.args[0]):
            continue
        weights = (gate.args[1], up.args[1])

        def replace(
            graph: fx.Graph, operands: Any = (up.args[0], weights, node.args[1], name)
        ) -> None:
            put(call(graph, "gated_mlp", *operands), node)

        return "gated MLP", "gated_mlp", replace
    return None


def _is_plain_linear(node: Any) -> bool:
    return is_(node, LINEAR) and argument(node, 2, "bias") is None


def _linear_act(node: Any) -> Match | None:
    """act(linear(x)) where nothing else reads what is in between."""
    name = activation_of(node)
    if name is None or not has("linear_act"):
        return None
    linear = node.args[0]
    if not (is_(linear, LINEAR) and only_user(linear, node)):
        return None
    operands = (*linear.args[:2], argument(linear, 2, "bias"))

    def replace(graph: fx.Graph) -> None:
        put(call(graph, "linear_act", *operands, name), node)

    return "linear with activation", "linear_act", replace


def _linear_residual(node: Any) -> Match | None:
    """linear(x) + residual, both of one shape."""
    if not (is_(node, ADD) and has("linear_residual")):
        return None
    for linear, residual in operands_of(node):
        if not (is_(linear, LINEAR) and only_user(linear, node)):
            continue
        if shape_of(residual) != shape_of(linear) or dtype_of(residual) != dtype_of(linear):
            continue
        operands = (*linear.args[:2], argument(linear, 2, "bias"), residual)

        def replace(graph: fx.Graph, operands: Any = operands) -> None:
            put(call(graph, "linear_residual", *operands), node)

        return "linear with residual", "linear_residual", replace
    return None


def _lora(node: Any) -> Match | None:
    """base + scale * linear(t): the scale goes to t, which is narrow, the sum into the matmul."""
    if not (is_(node, ADD) and has("linear_residual")):
        return None
    for base, branch in operands_of(node):
        if not (is_(branch, MUL) and only_user(branch, node)) or shape_of(base) is None:
            continue
        for linear, scale in operands_of(branch):
            if not isinstance(scale, int | float):
                continue
            if not (is_(linear, LINEAR) and only_user(linear, branch)):
                continue
            if (shape_of(base), dtype_of(base)) != (shape_of(linear), dtype_of(linear)):
                continue
            if argument(linear, 2, "bias") is not None:
                continue

            def replace(
                graph: fx.Graph, linear: Any = linear, scale: Any = scale, base: Any = base
            ) -> None:
                narrow, weight = linear.args[:2]
                scaled = graph.call_function(operator.mul, (narrow, scale))
                put(call(graph, "linear_residual", scaled, weight, None, base), node)

            return "LoRA branch", "linear_residual", replace
    return None


def _lora_linear(node: Any) -> Match | None:
    """linear(x) + scale * linear(linear(x)), where nothing else reads what is in between."""
    if not (is_(node, ADD) and has("lora_linear")):
        return None
    for base, branch in operands_of(node):
        if not (is_(base, LINEAR) and only_user(base, node)):
            continue
        if not (is_(branch, MUL) and only_user(branch, node)):
            continue
        for up, scale in operands_of(branch):
            if not (isinstance(scale, int | float) and _is_plain_linear(up)):
                continue
            down = up.args[0]
            if not (only_user(up, branch) and _is_plain_linear(down) and only_user(down, up)):
                continue
            same = {dtype_of(each) for each in (base, up, down, base.args[1], up.args[1])}
            if down.args[0] is not base.args[0] or len(same) > 1:
                continue
            factors = (down.args[1], up.args[1], float(scale))

            def replace(graph: fx.Graph, base: Any = base, factors: Any = factors) -> None:
                operands = (*base.args[:2], *factors, argument(base, 2, "bias"))
                put(call(graph, "lora_linear", *operands), node)

            return "linear with LoRA", "lora_linear", replace
    return None


def _softmax(node: Any) -> Match | None:
    if not is_(node, SOFTMAX):
        return None
    x, dim = node.args[0], argument(node, 1, "dim")
    shape = shape_of(x)
    if shape is None or dim not in (-1, len(shape) - 1) or node.kwargs.get("dtype") is not None:
        return None

    def replace(graph: fx.Graph) -> None:
        put(call(graph, "softmax", x), node)

    return "softmax", "softmax", replace


def _cross_entropy(node: Any) -> Match | None:
    """F.cross_entropy of classes in the last dimension; an upcast before it is not needed."""
    found = _loss_of_rows(node)
    if found is None:
        return None
    logits, target, options = found

    def replace(graph: fx.Graph) -> None:
        put(call(graph, "cross_entropy", logits, target, **options), node)

    return "cross-entropy", "cross_entropy", replace


def _linear_cross_entropy(node: Any) -> Match | None:
    """The same of a linear layer's output that nothing else reads."""
    found = _loss_of_rows(node)
    if found is None or not has("linear_cross_entropy"):
        return None
    logits, target, options = found
    upcast = node.args[0]
    read_once = only_user(logits, node if logits is upcast else upcast)
    if not (is_(logits, LINEAR) and read_once and only_user(upcast, node)) or "weight" in options:
        return None
    operands = (*logits.args[:2], target, argument(logits, 2, "bias"))

    def replace(graph: fx.Graph) -> None:
        put(call(graph, "linear_cross_entropy", *operands, **options), node)

    return "linear with cross-entropy", "linear_cross_entropy", replace


def _loss_of_rows(node: Any) -> tuple[Any, Any, dict[str, Any]] | None:
    """Logits, targets and the other options of an F.cross_entropy that fusedcuda has."""
    if not is_(node, (F.cross_entropy,)):
        return None
    logits, target = node.args[0], argument(node, 1, "target")
    shape, targets = shape_of(logits), shape_of(target)
    if shape is None or len(shape) != 2 or targets is None or len(targets) != 1:
        return None
    if is_(logits, ("float",)) or (is_(logits, ("to",)) and torch.float32 in logits.args):
        logits = logits.args[0]
    elif dtype_of(logits) != torch.float32:
        return None  # torch's loss has the dtype of the logits, fusedcuda's is float32
    positions = {"weight": 2, "ignore_index": 4, "reduction": 6, "label_smoothing": 7}
    given = {name: argument(node, position, name) for name, position in positions.items()}
    return logits, target, {name: value for name, value in given.items() if value is not None}


def _chain(node: Any) -> Match | None:
    """act((a + b) * c)."""
    name = activation_of(node)
    product: Any = node.args[0] if node.args else None
    if name is None or not (is_(product, MUL) and only_user(product, node)):
        return None
    for total, c in operands_of(product):
        if is_(total, ADD) and only_user(total, product):
            a, b = next(operands_of(total))
            shapes = {shape_of(operand) for operand in (a, b, c)}
            if len(shapes) > 1 or None in shapes:
                continue

            def replace(graph: fx.Graph, operands: Any = (a, b, c)) -> None:
                put(call(graph, "add_mul_act", *operands, name), node)

            return "pointwise chain", "add_mul_act", replace
    return None


def _rotated(node: Any) -> tuple[Any, Any, Any] | None:
    """(x, cos, sin) where a node is x * cos + rotate_half(x) * sin."""
    if not is_(node, ADD):
        return None
    for plain, turned in operands_of(node):
        if not (is_(plain, MUL) and is_(turned, MUL)):
            continue
        for half, sin in operands_of(turned):
            for x, cos in operands_of(plain):
                if _is_rotate_half(half, x):
                    return x, cos, sin
    return None


def _is_rotate_half(node: Any, x: Any) -> bool:
    """cat((-x[..., d/2:], x[..., :d/2]), -1)."""
    if not is_(node, (torch.cat, torch.concat)):
        return False
    parts, dim = node.args[0], argument(node, 1, "dim", 0)
    shape = shape_of(x)
    if shape is None or len(parts) != 2 or dim not in (-1, len(shape) - 1):
        return False
    negated, kept = parts
    if not is_(negated, (operator.neg, torch.neg, "neg")):
        return False
    half = shape[-1] // 2
    return _slice_of(negated.args[0], x) == (half, None) and _slice_of(kept, x) in (
        (None, half),
        (0, half),
    )


def _slice_of(node: Any, x: Any) -> tuple[Any, Any] | None:
    """Bounds of x[..., start:stop] or of one half of chunk(2, -1)."""
    if not is_(node, (operator.getitem,)):
        return None
    source, index = node.args
    shape = shape_of(x) or (0,)
    if source is x and isinstance(index, tuple) and index[0] is Ellipsis and len(index) == 2:
        return (index[1].start, index[1].stop)
    if is_(source, (torch.chunk, "chunk")) and source.args[0] is x and isinstance(index, int):
        return ((None, shape[-1] // 2), (shape[-1] // 2, None))[index]
    return None


def _rope(node: Any) -> Match | None:
    """The rotation of queries, together with that of the keys by the same tables."""
    query = _rotated(node)
    if query is None or len(shape_of(query[0]) or ()) != 4:
        return None
    nodes = list(node.graph.nodes)
    for other in nodes[nodes.index(node) + 1 :]:
        key = _rotated(other)
        if key is None or key[1:] != query[1:]:
            continue
        tables = [_table(graph_node, query[0]) for graph_node in query[1:]]
        if None in tables or nodes.index(key[0]) > nodes.index(node):
            return None

        def replace(
            graph: fx.Graph, other: Any = other, operands: Any = (query[0], key[0], *tables)
        ) -> None:
            pair = call(graph, "rope", *operands)
            for index, replaced in enumerate((node, other)):
                put(graph.call_function(operator.getitem, (pair, index)), replaced)

        return "rotary embedding", "rope", replace
    return None


def _table(node: Any, x: Any) -> Any:
    """A table of cosines as rope takes it: (S, D), or (B, S, D) before it was unsqueezed."""
    shape = shape_of(node)
    if shape is not None and len(shape) == 2:
        return node
    if is_(node, ("unsqueeze", torch.unsqueeze)) and argument(node, 1, "dim") in (0, 1):
        inner = node.args[0]
        return inner if len(shape_of(inner) or ()) in (2, 3) else None
    return None


# By the name that the rule gives to what it found.
RULES: dict[str, Rule] = {
    "gated MLP": _gated_mlp,
    "linear with LoRA": _lora_linear,
    "linear with cross-entropy": _linear_cross_entropy,
    "linear with activation": _linear_act,
    "LoRA branch": _lora,
    "linear with residual": _linear_residual,
    "norm with residual": _norm,
    "norm": _norm,
    "rotary embedding": _rope,
    "gated product": _gated,
    "cross-entropy": _cross_entropy,
    "softmax": _softmax,
    "pointwise chain": _chain,
}
