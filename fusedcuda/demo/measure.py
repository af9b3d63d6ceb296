"""What a step costs: kernel launches, bytes by formula, time."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcuda.demo.dlrm import DLRM, NUM_TABLES, NUM_VECTORS, DlrmConfig, click_loss
from fusedcuda.demo.progress import Progress

_WARM_UP_STEPS = 3
_LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Batch:
    """B rows on the device: dense [B, dense_width], indices int64 [B, 26], labels float32 [B]."""

    dense: Tensor
    indices: Tensor
    labels: Tensor


@dataclass
class Cost:
    """One variant's measurements.

    launches: kernels on a GPU, operations on the CPU; None where the profiler saw none
    *_ms:     milliseconds, one entry per round; kernel_ms adds up a training step's kernels and is
              empty on the CPU
    losses:   of the training steps of the last round, in order
    """

    forward_launches: int | None = None
    step_launches: int | None = None
    forward_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    kernel_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Trainer:
    """Runs one variant of a model, `forward(dense, indices) -> logits`, with SGD.

    Every timed round starts from the parameters the model had when the trainer was made.
    """

    def __init__(self, model: DLRM, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.model = model
        self.forward = forward
        self.cost = Cost()
        self._initial = {name: value.clone() for name, value in model.state_dict().items()}
        # A group of its own for the table: next to a sparse gradient SGD would update every
        # parameter of the group in a launch of its own.
        dense = [p for name, p in model.named_parameters() if name != "table.weight"]
        groups: list[dict[str, Any]] = [{"params": [model.table.weight]}, {"params": dense}]
        self._optimizer = torch.optim.SGD(groups, lr=_LEARNING_RATE)

    def reset(self) -> None:
        self.model.load_state_dict(self._initial)

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        return self.forward(batch.dense, batch.indices)

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward and update; returns the loss before the update."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = click_loss(self.forward(batch.dense, batch.indices), batch.labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def warm_up(self, batch: Batch) -> None:
        for _ in range(_WARM_UP_STEPS):
            self.predict(batch)
            self.step(batch)

    def count_launches(self, batch: Batch) -> None:
        if not batch.dense.is_cuda:
            self.cost.forward_launches = count_operations(lambda: self.predict(batch))
            self.cost.step_launches = count_operations(lambda: self.step(batch))
            return
        forward = profile_kernels(lambda: self.predict(batch))
        step = profile_kernels(lambda: self.step(batch))
        if step:
            self.cost.forward_launches, self.cost.step_launches = len(forward), len(step)
            self.cost.kernel_ms.append(sum(step) / 1e3)

    def time_round(self, batches: list[Batch], steps: int, progress: Progress) -> None:
        """Adds the median time of `steps` forward passes and of as many training steps."""
        self.reset()
        chosen = [batches[i % len(batches)] for i in range(steps)]
        forward_ms, _ = _time_each(self.predict, chosen, progress)
        step_ms, losses = _time_each(self.step, chosen, progress)
        self.cost.forward_ms.append(statistics.median(forward_ms))
        self.cost.step_ms.append(statistics.median(step_ms))
        self.cost.losses = [loss.item() for loss in losses]


def _time_each(
    run: Callable[[Batch], Tensor], batches: list[Batch], progress: Progress
) -> tuple[list[float], list[Tensor]]:
    """Milliseconds of each call, and what it returned."""
    times, outputs = [], []
    if not batches[0].dense.is_cuda:
        for done, batch in enumerate(batches, start=1):
            start = time.perf_counter()
            outputs.append(run(batch))
            times.append((time.perf_counter() - start) * 1e3)
            progress.tick(f"{done} of {len(batches)}")
        return times, outputs
    # Events between the calls: the host never waits, as in a real training loop.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    marks[0].record()
    for batch, mark in zip(batches, marks[1:], strict=True):
        outputs.append(run(batch))
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)], outputs


def profile_kernels(run: Callable[[], object]) -> list[float]:
    """Microseconds of each kernel that `run` launches; empty where the profiler sees none."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return kernel_durations(json.loads(path.read_text()))


def kernel_durations(trace: dict) -> list[float]:
    """Microseconds of each kernel in a Chrome trace; copies and memsets are not kernels."""
    return [event["dur"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]


class _OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += computes(func)
        return func(*args, **(kwargs or {}))


# Operations that touch no element, beside those whose schema says that they return a view.
_NO_WORK = ("empty", "new_empty", "_unsafe_view", "_sparse_coo_tensor", "_indices", "_values")


def computes(func: torch._ops.OpOverload) -> bool:
    """Whether this is an aten or fusedcuda operation that reads or writes elements."""
    namespace, name = func._schema.name.split("::")
    results = func._schema.returns
    makes_tensors = any("Tensor" in str(result.type) for result in results)
    # Those on a list of tensors in place (_foreach_add_) return nothing.
    writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
    is_view = any(result.alias_info and not result.alias_info.is_write for result in results)
    is_ours = namespace in ("aten", "fusedcuda")  # not the profiler's marks, for instance
    works = (makes_tensors or writes) and not is_view
    return is_ours and works and not name.startswith(_NO_WORK)


def count_operations(run: Callable[[], object]) -> int:
    """Number of aten and fusedcuda operations that `run` dispatches and that compute something."""
    with _OperationCounter() as counter:
        run()
    return counter.count


def hidden_layer_bytes(
    config: DlrmConfig, batch: int, itemsize: int, fused: bool, training: bool
) -> int:
    """Bytes that bias and ReLU of the hidden layers move, beside the matmuls.

    Each layer makes passes over its [batch, outputs]. Forward: read and write, in both variants;
    addmm has added plain PyTorch's bias already, so relu alone is left to it. Backward: the mask
    reads the gradient and the output and writes the result, 3 passes. The bias gradient costs
    plain PyTorch one more, to read that result again; fusedcuda adds it up on the way.
    """
    passes = 2
    if training:
        passes += 3 if fused else 4
    elements = batch * sum(outputs for _, outputs in config.linear_shapes[:-1])
    return passes * elements * itemsize


def step_bytes(config: DlrmConfig, batch: int, itemsize: int, fused: bool) -> int:
    """Bytes that a whole training step moves if no operation finds its inputs in a cache.

    Every operation reads each input and writes each output once. Biases, the table's offsets and
    the loss are left out: together less than a percent.
    """
    shapes = config.linear_shapes
    vectors = batch * NUM_VECTORS * config.embedding_dim
    looked_up = batch * NUM_TABLES * config.embedding_dim
    weights = sum(inputs * outputs for inputs, outputs in shapes)

    # Each of forward, weight gradient and input gradient touches input, weight and output once;
    # the first layer needs no input gradient.
    matmul = [inputs * outputs + batch * (inputs + outputs) for inputs, outputs in shapes]
    elements = 3 * sum(matmul) - matmul[0]
    # Gather; backward copies the gradient out of its place between the dense vector's; the update
    # reads it and reads and writes the rows.
    elements += (2 + 2 + 3) * looked_up
    # The dense weights' update: read weight and gradient, write weight.
    elements += 3 * weights
    # Interaction: concatenate, multiply, and in backward two multiplications.
    products = vectors * NUM_VECTORS * config.embedding_dim
    if config.interaction == "dot":
        products = batch * NUM_VECTORS**2
        pairs = batch * (NUM_VECTORS * (NUM_VECTORS - 1) // 2)
        # Select the pairs and join them to the dense vector; backward clears, then scatters.
        elements += 2 * pairs + 2 * batch * config.interaction_width
        elements += products + 3 * pairs
        # The dense vector's two gradients are added.
        elements += 3 * batch * config.embedding_dim
    elements += 2 * vectors + (2 * vectors + products)
    # The two gradients of the one tensor that is multiplied by itself are added as well.
    elements += 2 * (products + 2 * vectors) + 3 * vectors
    ids = 2 * 8 * batch * NUM_TABLES
    return elements * itemsize + ids + hidden_layer_bytes(config, batch, itemsize, fused, True)
