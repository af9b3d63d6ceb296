"""What is measured: a case, the providers that compete in it, its bytes and its targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

Tensors = tuple[torch.Tensor, ...]
Shape = Sequence[int]

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def shape_name(shape: Shape) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes a call can move: each input read once, each output written once."""

    bytes: int
    formula: str

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, f"{self.formula} + {other.formula}")


def traffic(dtype: torch.dtype, *, read: Sequence[Shape], write: Sequence[Shape]) -> Traffic:
    """Traffic of one pass, with a formula such as `2 B * (read 8x4 + 4, write 8x4)`."""
    elements = sum(map(prod, read)) + sum(map(prod, write))
    reads, writes = (" + ".join(map(shape_name, shapes)) for shapes in (read, write))
    size = dtype.itemsize
    return Traffic(elements * size, f"{size} B * (read {reads}, write {writes})")


def for_mode(mode: str, *, forward: Traffic, backward: Traffic) -> Traffic:
    return {"forward": forward, "backward": backward, "both": forward + backward}[mode]


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Provider:
    """One implementation of a case.

    `build` imports, compiles or wraps it, and may raise: the row then carries the message.
    A peer with another calling convention gets its inputs through `adapt`, outside the timing,
    and its results are brought back for the comparison by `restore`.
    """

    build: Callable[[], Callable[..., torch.Tensor]]
    adapt: Callable[[Tensors], Tensors] = unchanged
    restore: Callable[[Tensors], Tensors] = unchanged
    note: str = ""
    checked: bool = True  # False for a native op that is only a yardstick and computes less


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


@dataclass(frozen=True)
class Case:
    """One row group of the table. `mode` is what is timed: forward, backward, or both.

    `reference` is the eager composition; in float64 it is also what every provider is checked
    against. A `host_only` case measures the enqueue time of a forward call under `grad_mode`
    (inference, no_grad or grad) and nothing else.
    """

    kernel: str
    label: str
    dtype: torch.dtype
    traffic: Traffic
    make_inputs: Callable[[torch.Generator], Tensors]
    reference: Callable[..., torch.Tensor]
    providers: Mapping[str, Provider]
    mode: str = "forward"
    group: str = "main"
    x_name: str = "shape"
    x_label: str = "shape"
    x_value: str = ""
    host_only: bool = False
    grad_mode: str = "no_grad"
    targets: tuple[Target, ...] = ()
    quick: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.compile` in its default mode for static shapes.

    The cache is emptied first: graphs that earlier cases compiled from the same code would add
    guards to every call, and from the eighth shape on Dynamo would give up and run eagerly.
    """
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)
