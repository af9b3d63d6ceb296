"""What a training step launches and moves, by phase and kind of work, without running it.

On the meta device a step costs nothing at any size, and a dispatch mode sees each operator that a
GPU would launch. An operator is taken to read each input and to write each output once. What
torch.compile makes of the model comes from `fusedcuda.report`, which reads Inductor's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusedcuda
from examples.dlrm.models import PlainDLRM
from examples.dlrm.step import Optimizer, train
from examples.traces import COPY, ELEMENTWISE, GATHER, MATMUL, REDUCTION, kind_of
from fusedcuda.demo.dlrm import NUM_TABLES, DlrmConfig
from fusedcuda.demo.measure import Batch, computes
from fusedcuda.report.kernels import GATHERS


@dataclass(frozen=True)
class Work:
    """One operator, or one kernel of compiled code."""

    phase: str
    name: str
    kind: str
    bytes: int
    launches: int = 1


class Counter(TorchDispatchMode):
    """Writes down all that computes while `phase` says which part of the step it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        yield
        self._phase = ""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        written = _mutated(func, args)
        name = func._schema.name
        if name == "fusedcuda::linear_act_backward":
            self.work += linear_act_backward(self._phase, args, result)
        elif computes(func):
            moved = moved_bytes(func, args, kwargs or {}, result, written)
            self.work.append(Work(self._phase, name, kind_of(name), moved))
        return result


def linear_act_backward(phase: str, args: Sequence[Any], gradients: Sequence[Tensor]) -> list[Work]:
    """This op as the kernels it is: both of its products read what the first of them wrote."""
    dy, x, weight, saved, _, wanted, *_ = args
    name = "fusedcuda::linear_act_backward"
    work = []
    if saved is not None:  # dy * act'(z), the sum for the bias on the way
        derivative = 2 * touched(dy) + touched(saved)
        work.append(Work(phase, f"{name}: derivative", ELEMENTWISE, derivative))
    products = [other for bit, other in ((1, weight), (2, x)) if wanted & bit]
    for other, gradient in zip(products, gradients, strict=False):
        moved = touched(dy) + touched(other) + touched(gradient)
        work.append(Work(phase, f"{name}: product", MATMUL, moved))
    return work


def moved_bytes(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Any,
    written: Sequence[Tensor],
) -> int:
    read = sum(map(touched, _tensors([args, kwargs])))
    out = sum(map(touched, _tensors(result))) if computes(func) and not written else 0
    name = func._schema.name.rpartition("::")[2]
    if name in GATHERS:  # of its source it reads as much as it writes
        source = touched(args[0])
        read += min(source, out) - source
    if name.startswith("embedding_interaction"):  # of its table as much as is looked up
        given = dict(
            zip([argument.name for argument in func._schema.arguments], args, strict=False)
        )
        table = given["weight"]
        looked_up = given["indices"].numel() * table.shape[1] * table.itemsize
        read += min(touched(table), looked_up) - touched(table)
    return read + out + sum(map(touched, written))


def touched(tensor: Tensor) -> int:
    """Bytes of its distinct elements: an expanded tensor is as small as what it was made from."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.itemsize if tensor.numel() else 0


def _mutated(func: torch._ops.OpOverload, args: Sequence[Any]) -> list[Tensor]:
    """The arguments that an in-place operator writes, as its schema says."""
    arguments = zip(func._schema.arguments, args, strict=False)
    return _tensors([value for argument, value in arguments if argument.is_write])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# -- a step ---------------------------------------------------------------------------------------


def meta_batch(config: DlrmConfig, batch: int, dtype: torch.dtype) -> Batch:
    with torch.device("meta"):
        return Batch(
            torch.empty(batch, config.dense_width, dtype=dtype),
            torch.empty(batch, NUM_TABLES, dtype=torch.int64),
            torch.empty(batch),
        )


def count_step(
    model: type[PlainDLRM],
    config: DlrmConfig,
    table_rows: int,
    batch: int,
    dtype: torch.dtype,
    optimizer: Optimizer,
) -> list[Work]:
    """Forward, backward and update of one batch; the model in `dtype`."""
    with torch.device("meta"):
        made = model(config, table_rows).to(dtype)
    update = optimizer(made.parameters())
    inputs = meta_batch(config, batch, dtype)
    train(made.loss, update, inputs)  # the optimizer makes its state in its first step
    with Counter() as counter:
        train(made.loss, update, inputs, counter.phase)
    return [work for work in counter.work if work.phase]


class _Loss(nn.Module):
    """The part of a step that is compiled, as a module whose parameters get gradients."""

    def __init__(self, model: PlainDLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        return self.model.loss(dense, indices, labels)


def count_compiled(
    config: DlrmConfig, table_rows: int, batch: int, dtype: torch.dtype
) -> list[Work]:
    """Forward and backward as Inductor compiles them for an H200; the optimizer is not compiled."""
    with torch.device("meta"):
        model = _Loss(PlainDLRM(config, table_rows).to(dtype))
    inputs = meta_batch(config, batch, dtype)
    report = fusedcuda.report(
        model, inputs.dense, inputs.indices, inputs.labels, backward=True, offline="h200"
    )
    return [
        Work(kernel.phase, kernel.name, kind_of_compiled(kernel.kind, kernel.ops, kernel.name),
             kernel.bytes_in + kernel.bytes_out, kernel.count)
        for kernel in report.kernels
    ]  # fmt: skip


def kind_of_compiled(kind: str, ops: Sequence[str], name: str) -> str:
    """The same words for a kernel of Inductor's, by the operations in its body."""
    if kind == "extern":
        return kind_of(name)
    if kind in ("matmul", "template"):
        return MATMUL
    if "reduction" in kind:
        return REDUCTION
    if {"gather", "scatter add"} & set(ops):
        return GATHER
    return COPY if kind == "copy" or set(ops) <= {"concat or pad"} else ELEMENTWISE
