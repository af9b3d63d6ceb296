"""What is measured: a case, its providers, bytes and targets, and the parts cases are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import prod

import torch

Tensors = tuple[torch.Tensor, ...]
Shape = Sequence[int]
Function = Callable[..., "torch.Tensor | Tensors"]

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def shape_name(shape: Shape) -> str:
    return "x".join(map(str, shape))


# -- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes a call can move: each input read once, each output written once."""

    bytes: int
    formula: str

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, f"{self.formula} + {other.formula}")


def traffic(dtype: torch.dtype, *, read: Sequence[Shape], write: Sequence[Shape] = ()) -> Traffic:
    """Traffic of one pass, with a formula such as `2 B * (read 8x4 + 4, write 8x4)`."""
    size = dtype.itemsize
    parts = [
        f"{verb} {' + '.join(map(shape_name, shapes))}"
        for verb, shapes in (("read", read), ("write", write))
        if shapes
    ]
    elements = sum(map(prod, [*read, *write]))
    return Traffic(elements * size, f"{size} B * ({', '.join(parts)})")


def for_mode(mode: str, *, forward: Traffic, backward: Traffic) -> Traffic:
    return {"forward": forward, "backward": backward, "both": forward + backward}[mode]


# -- providers ------------------------------------------------------------------------------------


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Provider:
    """One implementation of a case.

    `build` imports, compiles or wraps it, and may raise: the row then carries the message.
    A peer with another calling convention gets its inputs through `adapt`, outside the timing,
    and its results are brought back for the comparison by `restore`.
    """

    build: Callable[[], Function]
    adapt: Callable[[Tensors], Tensors] = unchanged
    restore: Callable[[Tensors], Tensors] = unchanged
    note: str = ""
    checked: bool = True  # False for a native op that is only a yardstick and computes less


def imported(module: str, name: str, **keywords: object) -> Callable[[], Function]:
    """A `build` that imports a function when the case runs, and binds its keywords."""

    def build() -> Function:
        function = getattr(import_module(module), name)
        return partial(function, **keywords) if keywords else function

    return build


def fusedcuda_op(name: str, **keywords: object) -> Provider:
    return Provider(imported("fusedcuda", name, **keywords))


def forced(use: str, choice: str, function: Function) -> Function:
    """`function` under what ``torch.ops.fusedcuda.<use>`` chooses for as long as it runs."""

    def under_choice(*tensors, **options):
        operator = getattr(torch.ops.fusedcuda, use)
        before = operator(choice)
        try:
            return function(*tensors, **options)
        finally:
            operator(before)

    return under_choice


def triton_op(family: str, name: str, **keywords: object) -> Provider:
    return Provider(imported(f"bench.baselines.{family}", name, **keywords))


def where_installed(module: str, name: str, provider: Provider) -> dict[str, Provider]:
    """A peer that is left out, rather than reported as failed, where its package is missing."""
    return {name: provider} if find_spec(module) else {}


def liger_function(module: str, name: str, *last: object, **fields) -> dict[str, Provider]:
    """Liger's `autograd.Function` of that name; `last` are the arguments after the inputs."""

    def build() -> Function:
        function = getattr(import_module(f"liger_kernel.ops.{module}"), name)
        return lambda *inputs: function.apply(*inputs, *last)

    return where_installed("liger_kernel", "liger", Provider(build, **fields))


def compiled(function: Function) -> Function:
    """`torch.compile` in its default mode for static shapes.

    Dynamo's cache is emptied first: graphs that earlier cases compiled from the same code would
    add guards to every call, and from the eighth shape on it would give up and run eagerly.
    Inductor's own cache stays, so that a graph that was compiled before costs only its tracing.
    """
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def torch_providers(eager: Function) -> dict[str, Provider]:
    return {"eager": Provider(lambda: eager), "compile": Provider(lambda: compiled(eager))}


# -- targets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """`peer`'s time over fusedcuda's must be at least `ratio`; peer `best` is the fastest one."""

    metric: str
    peer: str
    ratio: float
    text: str


def faster(peer: str, ratio: float, metric: str = "gpu_cold") -> Target:
    return Target(metric, peer, ratio, f">= {ratio:.2f}x {peer}")


def within(peer: str, factor: float, metric: str = "host") -> Target:
    return Target(metric, peer, 1 / factor, f"<= {factor:.2f}x the time of {peer}")


# A provider that computes only the matrix products of a case: a yardstick, and no peer.
MATMUL = "matmul alone"

HOST_TARGETS = {
    "inference": within("native", 1.05),
    "no_grad": within("native", 1.05),
    "grad": within("native", 1.6),
}

# A peer that does not install everywhere: its times on an H200 with the versions below, from a
# process of its own. Reports show the ratio and say that the two were not interleaved.
QUACK_ELSEWHERE = "QuACK (TARGETS.md)"
QUACK_SOURCE = "QuACK 0.6.5, torch 2.11.0+cu130, one H200, another process on 2026-11-29"


# -- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row group of the table. `mode` is what is timed: forward, backward, or both.

    `reference` is the eager composition; in float64 it is also what every provider is checked
    against. A backward differentiates by all inputs but the last `constants`. A `host_only` case
    measures the enqueue time of a forward call under `grad_mode` (inference, no_grad or grad) and
    nothing else. `published` holds a peer's microseconds from elsewhere; `panel` titles the plot
    in which the case is a point at `x_value`.
    """

    kernel: str
    label: str
    dtype: torch.dtype
    traffic: Traffic
    make_inputs: Callable[[torch.Generator], Tensors]
    reference: Function
    providers: Mapping[str, Provider]
    mode: str = "forward"
    group: str = "main"
    x_name: str = "shape"
    x_label: str = "shape"
    x_value: str = ""
    panel: str = ""
    constants: int = 0
    host_only: bool = False
    grad_mode: str = "no_grad"
    targets: tuple[Target, ...] = ()
    published: Mapping[str, float] = field(default_factory=dict)
    quick: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)


def random(
    shapes: Sequence[Shape], dtype: torch.dtype | Sequence[torch.dtype], offset: int = 0
) -> Callable[[torch.Generator], Tensors]:
    """Normal operands; `offset` shifts each by that many elements from its 16-byte boundary."""
    dtypes = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else dtype

    def draw(generator: torch.Generator) -> Tensors:
        flat = (
            torch.randn(prod(s) + offset, generator=generator, device=generator.device, dtype=t)
            for s, t in zip(shapes, dtypes, strict=True)
        )
        return tuple(t[offset:].view(*shape) for t, shape in zip(flat, shapes, strict=True))

    return draw


def new_case(
    kernel: str,
    variant: str,
    shape: Shape,
    dtype: torch.dtype,
    *,
    targets: Mapping[str, tuple[Target, ...]],
    quack_us: Mapping[str, float] | None = None,
    **fields,
) -> Case:
    """A case whose label is made of its parts; by it targets and QuACK's times are found."""
    mode = fields.setdefault("mode", "forward")
    words = (kernel, variant, shape_name(shape), DTYPE_NAMES[dtype], mode)
    label = " ".join(word for word in words if word)
    elsewhere = (quack_us or {}).get(label)
    if elsewhere and "quack" not in fields["providers"]:
        fields["published"] = {QUACK_ELSEWHERE: elsewhere}
    own = targets.get(label, ())
    fields = {"x_value": shape_name(shape), "targets": own, "quick": bool(own)} | fields
    return Case(kernel, label, dtype, **fields)


# -- rows -----------------------------------------------------------------------------------------

MODES = ("forward", "backward")
ROW_ELEMENTS = 2**28  # of every point in a plot of speed against the length of a row
ODD_SHAPES = [(65536, 4097), (4096, 50257)]


def row_panel(kernel: str, columns: int, mode: str) -> dict[str, str]:
    """Makes a case a point in the plot of its speed against the length of a row."""
    return {
        "x_name": "columns", "x_label": "columns", "x_value": str(columns),
        "panel": f"{kernel} {mode}, bf16",
    }  # fmt: skip


def row_sweep(operation: Callable[..., Case], columns: Sequence[int], **fields) -> list[Case]:
    """A case per row length and mode, all of as many elements."""
    return [
        operation(
            (ROW_ELEMENTS // n, n), torch.bfloat16, mode,
            **row_panel(operation.__name__, n, mode), **fields,
        )
        for n in columns
        for mode in MODES
    ]  # fmt: skip


ALIGNED = "fusedcuda, aligned"
# An odd row length may cost a fifth of the speed. Few peers take one, so the yardstick is fusedcuda
# itself with one column less, in the same rounds.
ODD_TARGET = faster(ALIGNED, 0.8)


def one_column_less(tensors: Tensors) -> Tensors:
    return tuple(t[..., :-1].contiguous() for t in tensors)


def aligned_twin(ours: Provider, adapt: Callable[[Tensors], Tensors] = one_column_less) -> Provider:
    note = "the same call without the last column, rows then 16-byte aligned; not a peer"
    return Provider(ours.build, adapt, note=note, checked=False)


# -- host time ------------------------------------------------------------------------------------


def host_cases(
    kernel: str,
    shape: Shape,
    moved: Traffic,
    make_inputs: Callable[[torch.Generator], Tensors],
    eager: Function,
    *,
    ours: Provider | None = None,
    native: Function | None = None,
    native_name: str = "",
    constants: int = 0,
) -> list[Case]:
    """One call per grad mode at a size where only the host counts, beside a native op if any."""
    dtype = torch.bfloat16
    native_provider = Provider(lambda: native, checked=False, note=native_name)
    return [
        Case(
            kernel,
            f"{kernel} host time {grad_mode} {shape_name(shape)} {DTYPE_NAMES[dtype]}",
            dtype,
            traffic=moved,
            make_inputs=make_inputs,
            reference=eager,
            providers={
                "fusedcuda": ours or fusedcuda_op(kernel),
                **({"native": native_provider} if native else {}),
                **torch_providers(eager),
            },
            group="host",
            x_name="grad_mode",
            x_label="grad mode",
            x_value=grad_mode,
            constants=constants,
            host_only=True,
            grad_mode=grad_mode,
            targets=(target,) if native else (),
            quick=True,
        )
        for grad_mode, target in HOST_TARGETS.items()
    ]
