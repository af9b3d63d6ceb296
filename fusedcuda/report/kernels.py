"""The launches of a graph, with all that is known of each: from Inductor's module and schedule.

The module says what runs, in which order and on which buffers; the schedule how many bytes of them
are touched, and from which line of the model it came. Each is the check of the other: a launch
without a node, or a node without a launch, means that one of them was not understood.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from math import isqrt, prod

from .adapter import FormatNotRecognised
from .body import Body, read_body
from .recording import Frame, Node, RecordedGraph
from .wrapper import Call, Module, Shape, parse

_HEURISTICS = {
    "pointwise": "pointwise",
    "reduction": "reduction",
    "cooperative_reduction": "reduction",
    "persistent_reduction": "persistent reduction",
    "split_scan": "reduction",
    "template": "template",
    "foreach": "pointwise",
    "user_autotune": "custom",
}
MATMULS = {"mm", "addmm", "bmm", "baddbmm", "bias_addmm", "_addmm_activation", "addmv", "mv"}
GATHERS = {"embedding", "index", "index_select", "gather"}  # read as much as they write
_ATTENTION = "scaled_dot_product"


@dataclass(frozen=True)
class Launch:
    """One kernel of a step.

    reads, writes: bytes by buffer, in place both. shape: what it iterates over, or m x n x k.
    special: special-function evaluations in all. passes: reads of its inputs, by its loops.
    """

    graph: int
    phase: str
    name: str
    kind: str
    ops: tuple[str, ...]
    shape: Shape
    dtype: str
    reads: dict[str, int]
    writes: dict[str, int]
    flops: int = 0
    special: int = 0
    passes: int = 1
    gathers: int = 0
    frame: Frame | None = None
    node: str = ""

    @property
    def bytes_in(self) -> int:
        return sum(self.reads.values())

    @property
    def bytes_out(self) -> int:
        return sum(self.writes.values())

    @property
    def bytes(self) -> int:
        return self.bytes_in + self.bytes_out

    @property
    def is_matmul(self) -> bool:
        return self.kind == "matmul"


def join(recorded: RecordedGraph, graph: int = 0) -> list[Launch]:
    """The launches of one recorded graph in order; raises `FormatNotRecognised` if in doubt."""
    module = parse(recorded.source)
    unused = {name for name in module.kernels if all(c.target != name for c in module.calls)}
    if unused:
        raise FormatNotRecognised(f"no launch found of {', '.join(sorted(unused))}")
    works = [node for node in recorded.nodes if _launches(node)]
    nodes = _assign(module, works)
    missed = [node.name for node in works if node.name not in {n.name for n in nodes if n}]
    if missed:
        raise FormatNotRecognised(f"no launch found for the schedule's {', '.join(missed)}")
    launches = []
    previous: Node | None = None
    for call, node in zip(module.calls, nodes, strict=True):
        # The second kernel of one node: what it touches is in the node's count already.
        counted = None if node is None or node is previous else node
        launches.append(_launch(recorded, module, call, node, counted, graph))
        previous = node or previous
    return launches


def _launches(node: Node) -> bool:
    return "Nop" not in node.kind and bool(node.reads or node.writes)


def _assign(module: Module, nodes: list[Node]) -> list[Node | None]:
    """The node of each call. A call without one has to follow a call of the same node."""
    left = {node.name: node for node in nodes}
    found: list[Node | None] = []
    for call in module.calls:
        written = set(call.outputs)
        match = next((n for n in left.values() if written & set(n.outputs)), None)
        if match is None:
            match = next((n for n in left.values() if written & set(n.mutates)), None)
        if match is None and not any(found):
            raise FormatNotRecognised(f"no node of the schedule for the launch of {call.target}")
        if match is not None:
            del left[match.name]
        found.append(match or found[-1])
    return found


def _launch(
    recorded: RecordedGraph,
    module: Module,
    call: Call,
    node: Node | None,
    counted: Node | None,
    graph: int,
) -> Launch:
    reads = dict(counted.reads) if counted else {}
    writes = dict(counted.writes) if counted else {}
    frame = node.frame if node else None
    common = {"graph": graph, "phase": recorded.phase, "reads": reads, "writes": writes}
    common |= {"frame": frame, "node": node.name if node else ""}
    if call.is_triton:
        function = module.kernels[call.target]
        body = read_body(function)
        heuristic = _heuristic(function)
        moves_only = heuristic == "pointwise" and not body.ops and not body.gathers
        kind = "copy" if moves_only else heuristic
        return Launch(
            name=call.target,
            kind=kind,
            ops=_triton_ops(body, bool(reads)),
            shape=call.sizes,
            dtype=_triton_dtype(module.signatures[call.target]),
            flops=_template_flops(recorded, call) if kind == "template" else 0,
            special=body.special * prod(call.sizes),
            passes=max(body.passes, 1),
            gathers=body.gathers,
            **common,  # type: ignore[arg-type]
        )
    name = _extern_name(call.target)
    if _plain(name) in GATHERS:
        picked = sum(writes.values())
        common["reads"] = {buffer: min(size, picked) for buffer, size in reads.items()}
    operands = [operand for _, operand in call.operands]
    sizes = [_shape_of(recorded, module, item.buffer, item.shape) for item in operands]
    dtype = _dtype_of(recorded, module, [item.buffer for item in operands])
    if "convolution" in name:
        output = _shape_of(recorded, module, call.outputs[0], None) if call.outputs else ()
        kind, shape, flops = "convolution", sizes[0], _convolution_flops(name, sizes, output)
    else:
        kind, shape, flops = _extern_work(name, call, sizes)
    return Launch(
        name=name,
        kind=kind,
        ops=_extern_ops(name, call),
        shape=shape,
        dtype=dtype,
        flops=flops,
        **common,  # type: ignore[arg-type]
    )


def _template_flops(recorded: RecordedGraph, call: Call) -> int:
    """Of a matmul that is a Triton template: mk * kn * mn is the square of mkn."""
    named = dict(call.operands)
    buffers = [named[name].buffer for name in ("arg_A", "arg_B") if name in named]
    buffers += call.outputs[:1]
    shapes = [recorded.buffers.get(buffer, ((), ""))[0] for buffer in buffers]
    if len(shapes) != 3 or any(len(shape) != 2 for shape in shapes):
        return 0
    return 2 * isqrt(prod(prod(shape) for shape in shapes))


def _triton_ops(body: Body, reads: bool) -> tuple[str, ...]:
    gather = ("gather",) if body.gathers else ()
    return (*gather, *body.ops) or (("copy",) if reads else ("fill",))


def _heuristic(function: ast.FunctionDef) -> str:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute):
            if decorator.func.attr in _HEURISTICS:
                return _HEURISTICS[decorator.func.attr]
            raise FormatNotRecognised(f"a Triton kernel of the kind {decorator.func.attr}")
    raise FormatNotRecognised(f"the kernel {function.name} is of no known kind")


_TRITON_TYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def _triton_dtype(signature: dict[str, str]) -> str:
    """The narrowest floating type of the tensors: what the data is kept in."""
    types = [kind.lstrip("*") for kind in signature.values() if kind.startswith("*")]
    floats = [_TRITON_TYPES[kind] for kind in types if kind in _TRITON_TYPES]
    order = ("bfloat16", "float16", "float32", "float64")
    return min(floats, key=order.index) if floats else (types[0] if types else "")


def _extern_name(path: str) -> str:
    """`torch.ops.aten._foo.default` -> `aten::_foo`, `extern_kernels.mm` -> `mm`."""
    parts = path.split(".")
    if parts[0] == "torch" and len(parts) >= 4:
        return f"{parts[2]}::{parts[3]}"
    return parts[1] if parts[0] == "extern_kernels" else "::".join(parts[:2])


def _plain(name: str) -> str:
    return name.rpartition("::")[2]


def _extern_ops(name: str, call: Call) -> tuple[str, ...]:
    plain = _plain(name)
    if plain in MATMULS:
        bias = ("bias add",) if plain in ("addmm", "bias_addmm", "baddbmm") else ()
        return ("matmul", *bias)
    if _ATTENTION in plain:
        return ("attention backward" if "backward" in plain else "attention",)
    return (name.replace("_for_cpu", "") if "::" in name else plain,)


def _extern_work(name: str, call: Call, sizes: list[Shape]) -> tuple[str, Shape, int]:
    """Kind, shape and floating-point operations of a call into a library or a custom operator."""
    plain = _plain(name)
    if plain in MATMULS:
        matrices = [size for size in sizes if len(size) >= 2][-2:]
        if len(matrices) == 2:
            (*batch, m, k), (*_, n) = matrices
            return "matmul", (*batch, m, n, k), 2 * prod(batch) * m * n * k
        return "matmul", (), 0
    if _ATTENTION in plain:
        query = next((size for size in sizes if len(size) == 4), (0, 0, 0, 0))
        samples, heads, length, width = query
        causal = 2 if True in call.constants.values() else 1
        work = 4 * samples * heads * length * length * width // causal
        return "attention", query, work * 5 // 2 if "backward" in plain else work
    if plain in ("copy_",) or name.endswith("copy_"):
        return "copy", sizes[0] if sizes else (), 0
    if name.startswith("fusedcuda::") and plain.startswith(_FUSED_MATMULS):
        return "custom", *_fused_matmul(plain, call, sizes)
    is_torch = "::" not in name or name.startswith(("aten::", "prims::", "inductor"))
    return "extern" if is_torch else "custom", max(sizes, key=prod, default=()), 0


def _convolution_flops(name: str, sizes: list[Shape], output: Shape) -> int:
    """Two a product: each output element takes one filter."""
    if "backward" in name:  # the incoming gradient, the input, the filters; two gradients
        output, (_, *per_element) = sizes[0], sizes[2]
        return 4 * prod(output) * prod(per_element)
    _, *per_element = sizes[1]
    return 2 * prod(output) * prod(per_element)


# Ops of fusedcuda that are matmuls, or mostly.
_FUSED_MATMULS = (
    "linear_act", "linear_cross_entropy_forward", "linear_cross_entropy_backward", "mlp_backward",
    "lora_linear", "gated_mlp",
)  # fmt: skip


def _fused_matmul(plain: str, call: Call, sizes: list[Shape]) -> tuple[Shape, int]:
    """m x n x k and the work of fusedcuda's own matmuls; a backward has several of them. The last
    integer of a call is the mask of the gradients that are wanted.
    """
    integers = [value for value in call.constants.values() if type(value) is int]
    mask = integers[-1] if integers else 0
    if plain.startswith("gated_mlp"):
        return _gated_mlp(plain, mask, sizes)
    if plain == "mlp_backward":  # dy, x, w1, saved, h, w2: two matmuls in each of two layers
        (*rows, _), (hidden, k), (n, _) = sizes[0], sizes[2], sizes[-1]
        m = prod(rows)
        return (m, n, k), 4 * m * hidden * (n + k)
    gradients = (mask & 3).bit_count()  # of x and of the weight: one matmul each
    if plain.startswith("linear_cross_entropy"):  # the logits, and what is made of them
        x, weight = sizes[:2] if plain.endswith("forward") else sizes[1:3]
        (*rows, k), n, matmuls = x, weight[0], 1 + gradients
    elif plain == "lora_linear_backward":  # dy, x, weight; the factors are next to nothing
        (*rows, n), k, matmuls = sizes[0], sizes[1][-1], gradients
    elif plain == "linear_act_backward":  # dy, x, weight
        (*rows, n), k = sizes[0], sizes[1][-1]
        matmuls = gradients if integers else 2
    else:
        (*rows, k), n, matmuls = sizes[0], sizes[1][-2], 1
    return (prod(rows), n, k), 2 * prod(rows) * n * k * matmuls


def _gated_mlp(plain: str, mask: int, sizes: list[Shape]) -> tuple[Shape, int]:
    """Of x, the weight of gate and up or both of them, and w_down; a backward has dy before."""
    if plain == "gated_mlp_backward":
        # Only with everything given are the operands known by their places.
        if len(sizes) < 6:
            return (), 0
        (*rows, n), (*_, k), *weights = sizes
        hidden = next(shape[1] for shape in weights if len(shape) == 2 and shape[0] == n)
        of_down = (mask & 7 > 0) + (mask & 8 > 0)
        of_both = 2 * (mask & 1) + (mask & 2 > 0) + (mask & 4 > 0)
    else:
        (*rows, k), n, hidden = sizes[0], sizes[-1][0], sizes[-1][1]
        of_down, of_both = 1, 2
    m = prod(rows)
    return (m, n, k), 2 * m * hidden * (of_down * n + of_both * k)


def _shape_of(recorded: RecordedGraph, module: Module, buffer: str, seen: Shape | None) -> Shape:
    if seen is not None:
        return seen
    if buffer in module.shapes:
        return module.shapes[buffer]
    return recorded.buffers.get(buffer, ((), ""))[0]


def _dtype_of(recorded: RecordedGraph, module: Module, buffers: list[str]) -> str:
    known = (module.dtypes.get(b) or recorded.buffers.get(b, ((), ""))[1] for b in buffers)
    return next((dtype for dtype in known if dtype in _TRITON_TYPES.values()), "")
