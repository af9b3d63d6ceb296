"""A forward pass and a training step of DLRM, and the five ways to run them that are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from bench.timing import GraphReplay
from examples.dlrm.models import FusedDLRM, PlainDLRM
from examples.traces import BACKWARD, FORWARD, OPTIMIZER
from fusedcuda.demo.criteo import CriteoRows
from fusedcuda.demo.dlrm import DlrmConfig
from fusedcuda.demo.measure import Batch

LEARNING_RATE = 1e-3
_WARM_UP = 3  # mode reduce-overhead: one to compile, one to record, one to replay

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=LEARNING_RATE, foreach=True),
    "adam-fused": partial(torch.optim.Adam, lr=LEARNING_RATE, fused=True),
    "sgd": partial(torch.optim.SGD, lr=LEARNING_RATE, foreach=True),
}


def optimizer_for(name: str, device: torch.device) -> Optimizer:
    """By name; on a GPU one that a CUDA graph can hold, for all providers alike."""
    capturable = {"capturable": True} if name.startswith("adam") and device.type == "cuda" else {}
    return partial(OPTIMIZERS[name], **capturable)


def train(
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    phase: Callable[[str], AbstractContextManager] = record_function,
) -> Tensor:
    """One training step, each part inside of its `phase`; the loss before the update."""
    optimizer.zero_grad(set_to_none=True)
    with phase(FORWARD):
        value = loss(batch.dense, batch.indices, batch.labels)
    with phase(BACKWARD):
        value.backward()
    with phase(OPTIMIZER):
        optimizer.step()
    return value.detach()


@dataclass
class Provider:
    """One way to run the model: logits without gradients, and a training step."""

    predict: Callable[[Batch], Tensor]
    step: Callable[[Batch], Tensor]


def eager(model: PlainDLRM, optimizer: Optimizer) -> Provider:
    return _provider(model, model.forward, model.loss, optimizer)


def compiled(model: PlainDLRM, optimizer: Optimizer, mode: str = "default") -> Provider:
    """Forward and backward by torch.compile; the optimizer is the same as everywhere."""
    compile_ = partial(torch.compile, mode=mode, dynamic=False)
    return _provider(model, compile_(model.forward), compile_(model.loss), optimizer)


def graphed(model: PlainDLRM, optimizer: Optimizer, batch: Batch) -> Provider:
    """The forward pass as one CUDA graph, and the training step, optimizer included, as another."""
    plain = eager(model, optimizer)
    return Provider(Graphed(plain.predict, batch), Graphed(plain.step, batch))


def _provider(
    model: PlainDLRM, forward: Callable[..., Tensor], loss: Loss, optimizer: Optimizer
) -> Provider:
    update = optimizer(model.parameters())

    @torch.no_grad()
    def predict(batch: Batch) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the last result is not needed any more
        return forward(batch.dense, batch.indices)

    def step(batch: Batch) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return train(loss, update, batch)

    return Provider(predict, step)


class Graphed:
    """`run` as a CUDA graph: a call copies the batch to where the graph reads it, and replays.

    To be made on the stream on which it is called, which must not be the default one: autograd
    runs a backward pass on the stream of its forward.
    """

    def __init__(self, run: Callable[[Batch], Tensor], example: Batch) -> None:
        # The graph reads and writes model and optimizer where they are, and keeps neither alive.
        self._run = run
        self._inputs = Batch(*(tensor.clone() for tensor in _tensors(example)))
        for _ in range(_WARM_UP):
            run(self._inputs)
        torch.cuda.synchronize()
        self._replay = GraphReplay([partial(run, self._inputs)], 1, torch.cuda.current_stream())

    def __call__(self, batch: Batch) -> Tensor:
        for target, source in zip(_tensors(self._inputs), _tensors(batch), strict=True):
            target.copy_(source)
        self._replay.launch()
        return cast(Tensor, self._replay.outputs[0])


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.dense, batch.indices, batch.labels


# -- providers ------------------------------------------------------------------------------------

EAGER, COMPILE, OVERHEAD = "eager", "compile", "compile reduce-overhead"
FUSED, GRAPH = "fusedcuda", "fusedcuda, CUDA graph"
PROVIDERS = (EAGER, COMPILE, OVERHEAD, FUSED, GRAPH)


def build(name: str, plain: PlainDLRM, optimizer: Optimizer, batch: Batch) -> Provider:
    """Warmed up, with a copy of `plain`'s parameters, so that none trains those of another."""
    kind = FusedDLRM if name in (FUSED, GRAPH) else PlainDLRM
    model = twin(plain, kind)
    if name == GRAPH:
        return graphed(model, optimizer, batch)
    provider = eager(model, optimizer)
    if name in (COMPILE, OVERHEAD):
        mode = "reduce-overhead" if name == OVERHEAD else "default"
        provider = compiled(model, optimizer, mode)
    for _ in range(_WARM_UP):
        provider.predict(batch)
        provider.step(batch)
    return provider


def twin(model: PlainDLRM, kind: type[PlainDLRM]) -> PlainDLRM:
    """A copy of the model as that kind: they differ in what they call, not in what they hold."""
    made = copy.deepcopy(model)
    made.__class__ = kind
    return made


# -- data -----------------------------------------------------------------------------------------


def batches_of(
    rows: CriteoRows,
    config: DlrmConfig,
    table_rows: int,
    size: int,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Batch]:
    """`count` batches of `size`; rows that are too few for them start over from the first."""
    chosen = torch.arange(count * size) % len(rows)
    dense = rows.dense(config.dense_width).to(device, dtype)
    indices = rows.table_indices(table_rows).to(device)
    labels = rows.labels.to(device, torch.float32)
    for part in chosen.to(device).split(size):
        yield Batch(dense[part], indices[part], labels[part])
