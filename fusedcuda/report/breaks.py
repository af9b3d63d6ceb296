"""Where fusion broke: tensors that one kernel writes and the next one reads, and why.

Each reason is a code, a sentence and a fix. The code follows from what the two kernels are. Between
two kernels of Inductor's own it comes from the scheduler's words, if it said any: it is silent
about pairs that it never tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from .kernels import Launch
from .recording import Frame, RecordedGraph


@dataclass(frozen=True)
class Reason:
    code: str
    why: str
    fix: str
    avoidable: bool  # by another way of writing it, on this hardware, without changing the model


GEMM = Reason(
    "GEMM boundary",
    "the matmul is a library call, and Inductor fuses nothing into those",
    "fusedcuda.linear_act, or linear_residual for an addition; mode='max-autotune' fuses where a "
    "Triton matmul wins",
    True,
)
GEMM_INPUT = Reason(
    "GEMM input",
    "a matmul reads each element of its operand many times, so it has to be in memory",
    "none: it could only be made by the epilogue of the kernel before",
    False,
)
GEMM_ROWS = Reason(
    "GEMM to reduction",
    "a reduction needs whole rows, of which a matmul's block holds a part",
    "none; an addition in between can go into the matmul: fusedcuda.linear_residual",
    False,
)
GEMM_SEVERAL = Reason(
    "GEMM boundary",
    "the kernel joins the results of several matmuls, which all go through memory",
    "a sum: fusedcuda.linear_residual adds one result inside the other matmul; a gated product: "
    "one matmul with both weights side by side, then fusedcuda.act_mul_packed",
    True,
)
GEMM_LAYOUT = Reason(
    "GEMM boundary",
    "the kernel after the matmul reads it in another order or shape",
    "none in general: the epilogue of a matmul sees each element once, in its own place",
    False,
)
GEMM_GEMM = Reason(
    "GEMM to GEMM",
    "the second matmul needs whole rows of the first one's result",
    "none, unless the rows in between are short enough to stay on the chip",
    False,
)
ATTENTION = Reason(
    "attention boundary",
    "attention is one library kernel; what is before and after it goes through memory",
    "torch.nn.attention.flex_attention takes a change of the scores inside; none for the rest",
    False,
)
EXTERN = Reason(
    "extern call",
    "one of the two is a library call, and Inductor fuses nothing into those",
    "an operator that Inductor generates code for, if there is one",
    False,
)
CUSTOM = Reason(
    "custom op",
    "a custom operator is opaque: nothing fuses into it",
    "use the operator's own arguments for what surrounds it (residual=, activation=, scale=)",
    False,
)
REDUCTION = Reason(
    "reduction",
    "the result needs all elements of a dimension that the first kernel splits over blocks",
    "one pass if a row fits on the chip: fusedcuda.rms_norm, layer_norm, softmax, cross_entropy",
    True,
)
SIZE = Reason(
    "size",
    "the two kernels go over different numbers of elements",
    "one kernel of its own, if the shapes are those of a fusedcuda op",
    True,
)
INDEX = Reason(
    "index mismatch",
    "the second kernel reads in another order than the first one writes",
    "make the layouts agree: a transposed weight or a contiguous() in another place",
    True,
)
ORDER = Reason(
    "order",
    "another kernel has to run in between",
    "move the use next to the definition, or fuse through the kernel in between",
    True,
)
PRESSURE = Reason(
    "register pressure",
    "the fused kernel would spill registers",
    "none: two kernels are faster",
    False,
)
COPY = Reason(
    "layout copy",
    "a copy for another layout or dtype, with no computation",
    "give the operator before it the layout or dtype that the one after it needs",
    True,
)
DEVICE = Reason(
    "device copy",
    "the tensor crosses to another device",
    "create it on the GPU, once, outside of the step",
    True,
)
SCHEDULER = Reason(
    "scheduler",
    "Inductor did not fuse the two, without saying why",
    "TORCH_LOGS=fusion prints what it tried",
    True,
)
ALIGNMENT = Reason(
    "alignment",
    "a 16-bit matmul with a dimension that is no multiple of 8 cannot load 16 bytes at once",
    "pad the dimension once, when the weight is made: fusedcuda.nn.LinearAct keeps its weight so",
    True,
)
HORIZONTAL = Reason(
    "horizontal",
    "alike kernels that do not depend on one another each have a launch",
    "torch._inductor.config.combo_kernels = True, or one batched operator",
    True,
)
GRAPH_BREAK = Reason(
    "graph break",
    "what crosses the end of a graph has to be in memory",
    "see the graph breaks below",
    True,
)

# In the order of preference: a pair may have been refused for several reasons.
_WORDS = (
    ("register spilling", PRESSURE),
    ("device mismatch", DEVICE),
    ("numel/rnumel mismatch (reduce)", REDUCTION),
    ("reduction", REDUCTION),
    ("numel", SIZE),
    ("tiling", INDEX),
    ("memory deps did not match", INDEX),
    ("no shared data", INDEX),
    ("intermediate nodes", ORDER),
    ("ancestor", ORDER),
)


@dataclass(frozen=True)
class FusionBreak:
    """A tensor between two launches (by position), or a launch that costs more than it must.

    bytes: of the write and this read; saved: what fusing would not move
    """

    buffer: str
    producer: int
    consumer: int
    bytes: int
    saved: int
    reason: Reason
    said: str = ""  # the scheduler's own words

    @property
    def code(self) -> str:
        return self.reason.code


def fusion_breaks(launches: Sequence[Launch], graphs: Sequence[RecordedGraph]) -> list[FusionBreak]:
    found: list[FusionBreak] = []
    for consumer, launch in enumerate(launches):
        for buffer in launch.reads:
            producer = _producer(launches, consumer, buffer)
            if producer is not None:
                graph = graphs[launch.graph]
                found.append(_between(launches, producer, consumer, buffer, graph))
    found += _across_graphs(launches, graphs)
    found += _alignment(launches) + _horizontal(launches)
    return sorted(found, key=lambda item: item.saved or item.bytes // 1000, reverse=True)


def _producer(launches: Sequence[Launch], consumer: int, buffer: str) -> int | None:
    """The last launch before that wrote this buffer, in the same graph."""
    for position in range(consumer - 1, -1, -1):
        earlier = launches[position]
        if earlier.graph != launches[consumer].graph:
            return None
        if buffer in earlier.writes:
            return position
    return None


def _between(
    launches: Sequence[Launch], producer: int, consumer: int, buffer: str, graph: RecordedGraph
) -> FusionBreak:
    first, second = launches[producer], launches[consumer]
    written, read = first.writes[buffer], second.reads[buffer]
    reason, said = _reason(first, second, graph)
    # A tensor that others need as well is written in any case.
    needed = buffer in graph.outputs or any(
        buffer in other.reads for other in launches[consumer + 1 :] if other.graph == second.graph
    )
    saved = 0 if not reason.avoidable else read if needed else written + read
    return FusionBreak(buffer, producer, consumer, written + read, saved, reason, said)


def _across_graphs(
    launches: Sequence[Launch], graphs: Sequence[RecordedGraph]
) -> list[FusionBreak]:
    """What a forward graph hands to the next one. Its name differs there; its size does not."""
    found = []
    forward = [number for number, graph in enumerate(graphs) if graph.phase == "forward"]
    for first, second in pairwise(forward):
        made = {
            size: (position, buffer)
            for position, launch in enumerate(launches)
            for buffer, size in launch.writes.items()
            if launch.graph == first and buffer in graphs[first].outputs
        }
        for position, launch in enumerate(launches):
            for buffer, size in launch.reads.items():
                is_input = _producer(launches, position, buffer) is None
                if launch.graph == second and is_input and size in made:
                    producer, name = made.pop(size)
                    could, _ = _reason(launches[producer], launch, graphs[second])
                    saved = 2 * size if could.avoidable else 0
                    found.append(
                        FusionBreak(name, producer, position, 2 * size, saved, GRAPH_BREAK)
                    )
    return found


def _reason(first: Launch, second: Launch, graph: RecordedGraph) -> tuple[Reason, str]:
    kinds = {first.kind, second.kind}
    said = _said(first.node, second.node, graph)
    if first.is_matmul and second.is_matmul:
        return GEMM_GEMM, said
    if first.is_matmul and second.kind in ("pointwise", "copy", "template"):
        return _after_matmul(first, second), said
    if first.is_matmul and "reduction" in second.kind:
        return GEMM_ROWS, said
    if "attention" in kinds:
        return ATTENTION, said
    if "custom" in kinds:
        return CUSTOM, said
    if second.is_matmul:
        return GEMM_INPUT, said
    if kinds & {"extern", "convolution"}:
        return EXTERN, said
    if "copy" in kinds:
        return COPY, said
    if "reduction" in first.kind and "reduction" in second.kind:
        return REDUCTION, said
    for words, reason in _WORDS:
        if words in said:
            return reason, said
    reduces = any("reduction" in launch.kind for launch in (first, second))
    return (REDUCTION if reduces else SCHEDULER), said


def _after_matmul(matmul: Launch, second: Launch) -> Reason:
    """Whether the kernel could be the matmul's epilogue."""
    large = [size for size in second.reads.values() if size >= min(matmul.writes.values())]
    is_elementwise = prod(second.shape) == prod(matmul.shape[:-1])
    if not is_elementwise or second.gathers or "concat or pad" in second.ops:
        return GEMM_LAYOUT
    return GEMM_SEVERAL if len(large) > 1 and "mul" in second.ops else GEMM


def _said(first: str, second: str, graph: RecordedGraph) -> str:
    """The scheduler's reasons for a pair, those for the nodes fused into either included."""
    members = graph.members
    reasons = [
        item.reason
        for item in graph.refusals
        if members.get(item.first, item.first) == first
        and members.get(item.second, item.second) == second
    ]
    return "; ".join(dict.fromkeys(reasons))


def _alignment(launches: Sequence[Launch]) -> list[FusionBreak]:
    return [
        FusionBreak("", position, position, launch.bytes, 0, ALIGNMENT, odd_dimensions(launch))
        for position, launch in enumerate(launches)
        if odd_dimensions(launch)
    ]


def odd_dimensions(launch: Launch) -> str:
    """`K=479` where a 16-bit matmul has dimensions that keep it from loading 16 bytes at once.

    Batches of small matrices are left out: their sizes are those of the model, not of a weight.
    """
    if not launch.is_matmul or launch.dtype not in ("float16", "bfloat16") or len(launch.shape) > 3:
        return ""
    names = ("M", "N", "K")
    # One row or column is a matrix-vector product, and M is never the contiguous dimension.
    odd = [
        f"{name}={size}"
        for name, size in zip(names, launch.shape, strict=False)
        if name != "M" and size > 1 and size % 8
    ]
    return " ".join(odd)


def _horizontal(launches: Sequence[Launch]) -> list[FusionBreak]:
    """Runs of three or more like launches of which none reads what another one wrote."""
    found, start = [], 0
    for end in range(1, len(launches) + 1):
        if end < len(launches) and _alike(launches[start:end], launches[end]):
            continue
        if end - start >= 3:
            moved = sum(launch.bytes for launch in launches[start:end])
            said = f"{end - start} launches"
            found.append(FusionBreak("", start, end - 1, moved, 0, HORIZONTAL, said))
        start = end
    return found


def _alike(run: Sequence[Launch], launch: Launch) -> bool:
    first = run[0]
    same = (first.graph, first.kind, first.ops, first.shape) == (
        launch.graph,
        launch.kind,
        launch.ops,
        launch.shape,
    )
    return (
        same
        and first.kind in ("pointwise", "copy", "persistent reduction")
        and not any(set(earlier.writes) & set(launch.reads) for earlier in run)
    )


# ---- Graph breaks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphBreak:
    reason: str
    frame: Frame | None
    fix: str


_FIXES = (
    ("`print`", "guard it with `if not torch.compiler.is_compiling():`, or print after the step"),
    ("builtin operator `print", "print after the step, or not while compiling"),
    ("Tensor.item", "keep the value in a tensor; torch._dynamo.config.capture_scalar_outputs=True"),
    ("item()", "keep the value in a tensor; torch._dynamo.config.capture_scalar_outputs=True"),
    ("data-dependent", "torch.where for values, torch.cond for branches"),
    ("Data-dependent", "torch.where for values, torch.cond for branches"),
    ("logging", "log after the step, or torch._dynamo.config.ignore_logger_methods"),
    ("numpy", "the torch function of the same name"),
    ("skip", "register it with torch.library.custom_op and a fake kernel"),
    ("graph_break", "delete the call to torch._dynamo.graph_break()"),
    ("dynamic shape", "a fixed size: pad, or a mask instead of a selection"),
    ("nonzero", "a mask instead of the selected elements; their number depends on the data"),
)


def graph_break(reason: str, frame: Frame | None) -> GraphBreak:
    """The first line of torch's reason, and a fix by what it names."""
    fix = next(
        (fix for words, fix in _FIXES if words in reason),
        "take it out of the compiled part, or write it with torch operators",
    )
    text = reason.strip().split("\n", 1)[0]
    detail = next((line for line in reason.splitlines() if "Explanation:" in line), "")
    return GraphBreak(
        f"{text}: {detail.split('Explanation:')[-1].strip()}".rstrip(": "), frame, fix
    )
