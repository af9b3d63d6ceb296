"""Reads the Python module that Inductor writes for a graph: what it launches, on which buffers.

The module is parsed, not searched with patterns: comments, line breaks and names may change. What
is not known and touches a buffer is an error, so that a launch cannot be missed in silence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from .adapter import FormatNotRecognised

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """A buffer as a call sees it, perhaps through a view."""

    buffer: str
    shape: Shape | None = None


@dataclass(frozen=True)
class Call:
    """One launch: a Triton kernel by its name, an extern kernel or operator by its path."""

    target: str
    is_triton: bool
    operands: tuple[tuple[str, Operand], ...]  # parameter (or position) and buffer
    outputs: tuple[str, ...]
    sizes: tuple[int, ...] = ()  # of a Triton kernel: its iteration space
    constants: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    calls: tuple[Call, ...]
    kernels: dict[str, ast.FunctionDef]  # Triton kernels by name
    signatures: dict[str, dict[str, str]]  # of them: parameter -> type, `*fp32`
    aliases: dict[str, str]  # buffer -> the one whose memory it is
    shapes: dict[str, Shape]
    dtypes: dict[str, str]


# Calls that touch buffers and launch nothing.
_HOST_ONLY = {
    "assert_alignment",
    "assert_size_stride",
    "args.clear",
    "copy_if_misaligned",
    "get_raw_stream",
    "print",
    "run_intermediate_hooks",
    "torch.cuda.set_device",
}
_VIEWS = {"alloc_from_pool", "reinterpret_tensor"}
_EMPTY = ("empty_strided", "torch.empty")
_EXTERN = ("extern_kernels.", "torch.ops.", "aten.", "inductor_ops.", "_quantized.")
_TRITON_WRITES = ("in_out_ptr", "out_ptr")


def parse(source: str) -> Module:
    """The launches of a module's `call`, in order."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise FormatNotRecognised(f"Inductor's module does not parse: {error}") from None
    kernels: dict[str, ast.FunctionDef] = {}
    signatures: dict[str, dict[str, str]] = {}
    for name, text in _triton_sources(tree):
        function = _only_kernel(text, name)
        kernels[name] = function
        signatures[name] = _signature(function)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    if not functions:
        raise FormatNotRecognised("Inductor's module has no function `call`")
    reader = _Reader(kernels, signatures)
    # With partitions, `call` of the Runner calls the functions partition_0, ...: those launch.
    partitions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("partition_")
    ]
    for function in partitions or functions[-1:]:
        reader.read(function.body)
    _read_inputs(tree, reader)
    return Module(
        tuple(reader.calls), kernels, signatures, reader.aliases, reader.shapes, reader.dtypes
    )


def _triton_sources(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and text of each kernel: `name = async_compile.triton('name', '''text''')`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _path(node.func) == "async_compile.triton":
            name, text = (ast.literal_eval(argument) for argument in node.args[:2])
            yield name, text


def _only_kernel(text: str, name: str) -> ast.FunctionDef:
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise FormatNotRecognised(f"no function in the source of {name}")
    return functions[-1]


def _signature(function: ast.FunctionDef) -> dict[str, str]:
    """The types of a kernel's parameters, from the metadata in its decorator."""
    for decorator in function.decorator_list:
        for keyword in getattr(decorator, "keywords", ()):
            if keyword.arg == "triton_meta" and isinstance(keyword.value, ast.Dict):
                for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "signature":
                        return dict(ast.literal_eval(value))
    raise FormatNotRecognised(f"the kernel {function.name} has no signature")


class _Reader:
    """Walks the statements of `call` in order and keeps what each name stands for."""

    def __init__(
        self, kernels: dict[str, ast.FunctionDef], signatures: dict[str, dict[str, str]]
    ) -> None:
        self.kernels = kernels
        self.signatures = signatures
        self.calls: list[Call] = []
        self.aliases: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}

    def read(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.With():
                    self.read(statement.body)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=value):
                    if isinstance(value, ast.Call):  # x, y = operator(...)
                        self._call(value, tuple(n.id for n in names if isinstance(n, ast.Name)))
                case ast.Expr(value=ast.Call() as call):
                    self._call(call, ())
                case ast.Delete() | ast.Return() | ast.Assign() | ast.Expr() | ast.Pass():
                    pass
                case ast.If() | ast.For() | ast.Try():
                    raise FormatNotRecognised("control flow in Inductor's `call`")
                case _:
                    pass

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Name(id=other):
                self._alias(name, other, self.shapes.get(other))
            case ast.Subscript(value=ast.Name(id=other)):  # one of an operator's results
                self.aliases[name] = self.aliases.get(other, other)
            case ast.Call():
                path = _path(value.func)
                if path.startswith(_EMPTY):
                    self.shapes[name] = _shape(value.args[0])
                    if len(value.args) > 2:
                        self.dtypes[name] = _path(value.args[2]).removeprefix("torch.")
                elif path in _VIEWS:
                    operand = self._operand(value)
                    if operand is not None:
                        self._alias(name, operand.buffer, operand.shape)
                else:
                    self._call(value, (name,))

    def _alias(self, name: str, other: str, shape: Shape | None) -> None:
        self.aliases[name] = self.aliases.get(other, other)
        if other in self.dtypes:
            self.dtypes[name] = self.dtypes[other]
        if shape is not None:
            self.shapes[name] = shape

    def _call(self, call: ast.Call, outputs: tuple[str, ...]) -> None:
        path = _path(call.func)
        name, _, method = path.rpartition(".")
        if method == "run" and name in self.kernels:
            self._triton(call, name)
        elif path.startswith(_EXTERN) or method in ("copy_", "run"):
            self._extern(call, path, outputs)
        elif path in _HOST_ONLY or path.startswith(("start_graph", "end_graph", "AsyncCompile")):
            pass
        elif method == "sum":  # the second stage of a reduction that two kernels share
            self._extern(call, "aten.sum", outputs)
        elif _buffers_in(call) & (self.shapes.keys() | self.aliases.keys()):
            raise FormatNotRecognised(f"Inductor's `call` uses {path or ast.unparse(call.func)}")

    def _triton(self, call: ast.Call, name: str) -> None:
        parameters = [argument.arg for argument in self.kernels[name].args.args]
        operands, outputs, sizes = [], [], []
        for parameter, argument in zip(parameters, call.args, strict=False):
            if isinstance(argument, ast.Constant) and isinstance(argument.value, int):
                if parameter.endswith("numel"):  # not an offset into random numbers
                    sizes.append(argument.value)
                continue
            operand = self._operand(argument)
            if operand is None:
                continue
            operands.append((parameter, operand))
            if parameter.startswith(_TRITON_WRITES):
                outputs.append(operand.buffer)
        if not operands:
            raise FormatNotRecognised(f"the launch of {name} has no buffers")
        self.calls.append(Call(name, True, tuple(operands), tuple(outputs), tuple(sizes)))

    def _extern(self, call: ast.Call, path: str, outputs: tuple[str, ...]) -> None:
        operands: list[tuple[str, Operand]] = []
        written = list(outputs)
        constants: dict[str, object] = {}
        if path.endswith(".copy_") and isinstance(call.func, ast.Attribute):
            target = self._operand(call.func.value)
            if target is not None:
                written.append(target.buffer)
        if path == "aten.sum":
            operands = [("0", Operand(name)) for name in sorted(_buffers_in(call.func))]
        arguments = [(str(i), value) for i, value in enumerate(call.args)]
        arguments += [(keyword.arg or "", keyword.value) for keyword in call.keywords]
        for key, value in arguments:
            parts = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            for part in parts:
                operand = self._operand(part)
                if operand is not None and key == "out":
                    written.append(operand.buffer)
                elif operand is not None:
                    operands.append((key, operand))
                elif isinstance(part, ast.Constant):
                    constants[key] = part.value
        self.calls.append(
            Call(path, False, tuple(operands), tuple(dict.fromkeys(written)), (), constants)
        )

    def _operand(self, value: ast.expr) -> Operand | None:
        match value:
            case ast.Name(id=name):
                return Operand(name, self.shapes.get(name))
            case ast.Call(args=[inner, shape, *_]) if _path(value.func) in _VIEWS:
                operand = self._operand(inner)
                return None if operand is None else Operand(operand.buffer, _shape(shape))
            case ast.Subscript(value=ast.Name(id=name)):
                return Operand(name)
        return None


def _read_inputs(tree: ast.Module, reader: _Reader) -> None:
    """Shapes and dtypes of the inputs, from the part of the module that benchmarks it."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                if _path(call.func) == "rand_strided":
                    reader.shapes[name] = _shape(call.args[0])
                    for keyword in call.keywords:
                        if keyword.arg == "dtype":
                            reader.dtypes[name] = _path(keyword.value).removeprefix("torch.")


def _shape(node: ast.expr) -> Shape:
    try:
        return tuple(int(size) for size in ast.literal_eval(node))
    except (ValueError, TypeError):
        raise FormatNotRecognised(
            f"a shape that is not a tuple of numbers: {ast.unparse(node)}"
        ) from None


def _buffers_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _path(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute, empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_path(value)}.{name}"
    return ""


def elements(shape: Shape | None) -> int:
    return prod(shape) if shape is not None else 0
