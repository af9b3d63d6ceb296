"""What a Triton kernel computes, read from its body and never from its name.

A kernel's name lists operators that it came from, which need not be in it: in
`triton_poi_fused_addmm_relu` there is no matmul, only the bias add.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

# Evaluations by the special-function unit, of one call. Division and erf are what they compile to.
_SPECIAL = {
    "exp": 1,
    "exp2": 1,
    "log": 1,
    "log2": 1,
    "rsqrt": 1,
    "sqrt": 1,
    "sin": 1,
    "cos": 1,
    "tanh": 2,
    "sigmoid": 2,
    "erf": 2,
    "div": 1,
    "pow": 2,
    "online softmax": 1,
}
_REDUCTIONS = {"sum", "max", "mean and variance", "online softmax", "product", "any"}
_ONCE_A_ROW = {"div", "log", "log2", "rsqrt", "sqrt"}
_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Mod: "mod"}
_CALLS = {
    "max2": "max",
    "min2": "min",
    "maximum": "max",
    "minimum": "min",
    "welford": "mean and variance",
    "welford_reduce": "mean and variance",
    "online_softmax_reduce": "online softmax",
    "dot": "matmul",
    "atomic_add": "scatter add",
    "where": "where",
    "rand": "random",
    "randn": "random",
    "randint64": "random",
    "div_floor_integer": "mod",
    "any": "any",
    "prod": "product",
    "sort_with_index": "sort",
    "associative_scan": "scan",
}
_SILENT = {  # moves data, or belongs to the indexing
    "arange", "broadcast_to", "device_assert", "full", "load", "program_id", "promote_to_tensor",
    "store", "to", "welford_combine", "zeros", "max_contiguous", "multiple_of", "cdiv", "range",
    "constexpr", "static_range", "num_programs", "make_block_ptr", "reshape", "trans", "int1",
    "float",
    "expand_dims", "static_assert", "isnan", "debug_barrier", "online_softmax_combine",
    "select_one", "advance",
}  # fmt: skip


@dataclass(frozen=True)
class Body:
    """ops: distinct operations in the order in which they occur first
    special: special-function evaluations for each element
    passes:  how often a loop goes over the reduced dimension; more than one reads inputs again
    gathers: loads at an index that was itself loaded
    """

    ops: tuple[str, ...]
    special: int
    passes: int
    gathers: int


@dataclass(frozen=True)
class _Step:
    """One statement: the names that it sets, and its value or the values that it stores."""

    targets: frozenset[str]
    value: ast.expr


def read_body(function: ast.FunctionDef) -> Body:
    """Counts what contributes to a stored value; indices, masks and bounds do not."""
    steps = [step for statement in _flat(function.body) if (step := _step(statement))]
    from_memory = _tainted(steps)
    needed = _contributors(steps, from_memory)
    zeros = {name for step in steps if _is_constant(step.value, 0) for name in step.targets}
    ops: dict[str, int] = {}
    gathers = 0
    for step in steps:
        if step.targets and not step.targets & needed:
            continue
        for node in _values(step.value, from_memory):
            label = _label(node, zeros, from_memory)
            if label:
                ops[label] = ops.get(label, 0) + 1
            if isinstance(node, ast.Call) and _name(node) == "load":
                gathers += bool(_names(node.args[0]) & from_memory)
    loops = sum(isinstance(node, ast.For) for node in ast.walk(function))
    # What follows a reduction happens once a row, which is nothing.
    reduces = bool(ops.keys() & _REDUCTIONS)
    special = sum(
        _SPECIAL.get(op, 0) * count
        for op, count in ops.items()
        if not (reduces and op in _ONCE_A_ROW)
    )
    return Body(_name_activations(ops, _has_logistic(steps)), special, loops, gathers)


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        inner = [*getattr(statement, "body", ()), *getattr(statement, "orelse", ())]
        if inner:
            yield from _flat(inner)
        else:
            yield statement


def _step(statement: ast.stmt) -> _Step | None:
    match statement:
        case ast.Assign(targets=[target], value=value):
            return _Step(frozenset(_names(target)), value)
        case ast.Expr(value=ast.Call(args=[_, value, *_]) as call):
            if _name(call) == "store":
                return _Step(frozenset(), value)
            if _name(call) == "atomic_add":
                return _Step(frozenset(), call)
    return None


def _contributors(steps: list[_Step], from_memory: set[str]) -> set[str]:
    """The names that stored values depend on, other than through an address."""
    needed: set[str] = set()
    while True:
        before = len(needed)
        for step in steps:
            if not step.targets or step.targets & needed:
                for node in _values(step.value, from_memory):
                    if isinstance(node, ast.Name):
                        needed.add(node.id)
        if len(needed) == before:
            return needed


def _tainted(steps: list[_Step]) -> set[str]:
    """The names whose value comes from memory."""
    found: set[str] = set()
    for step in steps:
        loads = any(_name(n) == "load" for n in ast.walk(step.value) if isinstance(n, ast.Call))
        if loads or _names(step.value) & found:
            found |= step.targets
    return found


def _values(value: ast.expr, from_memory: set[str]) -> Iterator[ast.AST]:
    """The expression's nodes, without addresses, masks and conditions on the position."""
    yield value
    if isinstance(value, ast.Call) and _name(value) == "load":
        return
    parts: list[ast.AST] = list(ast.iter_child_nodes(value))
    if isinstance(value, ast.Call) and _name(value) == "atomic_add":
        parts = [value.args[1]]
    elif isinstance(value, ast.Call) and _name(value) == "where":
        from_data = _names(value.args[0]) & from_memory
        parts = [*value.args] if from_data else [*value.args[1:]]
    for part in parts:
        if isinstance(part, ast.expr):
            yield from _values(part, from_memory)


def _label(node: ast.AST, zeros: set[str], from_memory: set[str]) -> str:
    match node:
        case ast.BinOp(op=operation):
            return _BINARY.get(type(operation), "")
        case ast.Call():
            name = _name(node)
            if name in _SILENT or (name == "where" and _is_mask(node)):
                return ""
            if name == "where" and not _names(node.args[0]) & from_memory:
                return "concat or pad"
            if name == "maximum" and _names(node) & zeros:
                return "relu"
            return _CALLS.get(name, name)
    return ""


def _is_constant(value: ast.expr, number: float) -> bool:
    match value:
        case ast.Constant(value=constant):
            return constant == number
        case ast.Call(args=[_, ast.Constant(value=constant), *_]):
            return _name(value) == "full" and constant == number
    return False


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _name(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _is_mask(call: ast.Call) -> bool:
    """`tl.where(rmask & xmask, value, neutral)` keeps a reduction inside of its bounds."""
    return bool(call.args) and all("mask" in name for name in _names(call.args[0]))


def _has_logistic(steps: list[_Step]) -> bool:
    """Whether something is divided by 1 + exp(...), as silu and its gradient do."""
    defined = {name: step.value for step in steps for name in step.targets}

    def value_of(node: ast.expr) -> ast.expr:
        return defined.get(node.id, node) if isinstance(node, ast.Name) else node

    def is_exp(node: ast.expr) -> bool:
        value = value_of(node)
        return isinstance(value, ast.Call) and _name(value) == "exp"

    for step in steps:
        match step.value:
            case ast.BinOp(op=ast.Div(), right=divisor):
                match value_of(divisor):
                    case ast.BinOp(op=ast.Add(), left=left, right=right):
                        if is_exp(left) and _is_constant(value_of(right), 1):
                            return True
    return False


def _name_activations(ops: dict[str, int], logistic: bool) -> tuple[str, ...]:
    """The known activations by their own name, with what they consist of left out."""
    found = dict(ops)

    def take(label: str, *parts: str) -> None:
        for part in parts:
            found.pop(part, None)
        found[label] = 1

    if "erf" in found:
        take("gelu (erf)", "erf")
    if "tanh" in found:
        take("gelu (tanh)" if ops.get("mul", 0) >= 4 else "tanh", "tanh")
    if "sigmoid" in found:
        take("silu" if ops.get("mul", 0) >= 1 else "sigmoid", "sigmoid")
    if logistic:
        take("silu", "exp", "div")
    return tuple(found)
