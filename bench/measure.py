"""Measures one case: checks every provider against float64, then times them interleaved.

All providers of a case run in one process on the same inputs. Each round times every one of them,
and the first of them twice: a difference smaller than that spread of A against A is noise. A
provider that raises or is wrong keeps its place in the table, with the message instead of a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

import torch
import torch._functorch.config

from bench.cases import Case, Function, Provider, Tensors
from bench.timing import Backend, Call, Replay, cycles_for

SAMPLES_PER_ROUND = 5
HOST_CALLS = 100  # times the launches of one call, fewer than the 1024 that a stream queues
HOST_ONLY_CALLS = 300
HOST_ONLY_ROUNDS = 9
HOST_MAX_GPU_US = 100.0  # above it the host is never what one waits for
AGAIN = " (again)"  # the second slot of the first provider: the spread of A against A


def one_line(error: BaseException) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:300]


@dataclass
class Result:
    """What one provider did in one case. Times are in microseconds, one entry per sample."""

    provider: str
    cold: list[list[float]] = field(default_factory=list)  # one list per round
    warm: list[list[float]] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # one value per round
    peak_bytes: int | None = None
    method: str = ""
    note: str = ""
    error: str = ""


@dataclass
class Slot:
    """A provider that passed its check, ready to be timed."""

    result: Result
    calls: list[Call]
    cold: Replay | None = None
    warm: Replay | None = None


# -- what is called -------------------------------------------------------------------------------


def bind(case: Case, function: Function, inputs: Tensors, seed: int) -> Call:
    """The call that is timed, as a function of nothing that returns a tuple of tensors."""
    if case.mode == "forward" and case.grad_mode != "grad":
        return lambda: as_tuple(function(*inputs))
    leaves, arguments = with_leaves(case, inputs)
    if case.mode == "forward":
        return lambda: as_tuple(function(*arguments))
    if case.mode == "both":
        # Of copies, since some write the gradient over what they are given.
        outputs = as_tuple(function(*(t.clone() for t in arguments)))
        grad_outputs = gradients_like(outputs, seed)
        return lambda: torch.autograd.grad(as_tuple(function(*arguments)), leaves, grad_outputs)
    outputs = as_tuple(function(*arguments))
    grad_outputs = gradients_like(outputs, seed)
    # The graph is kept alive: replays read what the forward saved long after this call.
    return lambda: torch.autograd.grad(outputs, leaves, grad_outputs, retain_graph=True)


def as_tuple(value: torch.Tensor | Tensors) -> Tensors:
    return (value,) if isinstance(value, torch.Tensor) else value


def with_leaves(case: Case, inputs: Tensors) -> tuple[Tensors, Tensors]:
    """The inputs to differentiate by, and all arguments: these and the constants after them."""
    count = len(inputs) - case.constants
    leaves = tuple(t.detach().requires_grad_() for t in inputs[:count])
    return leaves, leaves + inputs[count:]


def gradients_like(outputs: Tensors, seed: int) -> Tensors:
    """Random gradients, each laid out like its output; of a scalar loss one, as in training."""
    # Far from the seeds of the inputs: drawn with the same one, the gradient would equal the input.
    generator = torch.Generator(outputs[0].device).manual_seed(seed + 1_000_003)
    return tuple(
        # Drawn in fp32, so that two dtypes of one output, say of a loss, get the same gradient.
        torch.empty_like(t).copy_(torch.randn(t.shape, generator=generator, device=t.device))
        if t.ndim
        else torch.ones_like(t)
        for t in map(torch.Tensor.detach, outputs)
    )


def expected_values(case: Case, inputs: Tensors, seed: int) -> tuple[Tensors, Tensors]:
    """The eager composition's values in float64, and in the dtype of the case."""
    native = bind(case, case.reference, inputs, seed)()
    doubles = tuple(t.detach().double() if t.is_floating_point() else t for t in inputs)
    if case.mode == "forward":
        return as_tuple(case.reference(*doubles)), native
    leaves, arguments = with_leaves(case, doubles)
    outputs = as_tuple(case.reference(*arguments))
    # Drawn in the dtypes of the eager outputs, so that both passes start from the same gradient.
    templates = as_tuple(case.reference(*inputs))
    grad_outputs = tuple(t.double() for t in gradients_like(templates, seed))
    return torch.autograd.grad(outputs, leaves, grad_outputs), native


@torch.no_grad()
def check(case: Case, values: Tensors, exact: Tensors, native: Tensors) -> None:
    """Errors of at most four times eager's own, by norm and by largest element, plus four ulp.

    A gate before timing, not the test suite: wrong formulas, lost rows and NaN do not pass.
    """
    if len(values) != len(exact):
        raise AssertionError(f"returned {len(values)} tensors, expected {len(exact)}")
    slack = 4 * torch.finfo(case.dtype).eps
    for index, (value, want, eager) in enumerate(zip(values, exact, native, strict=True)):
        if value.shape != want.shape or value.dtype != eager.dtype:
            raise AssertionError(
                f"result {index} is {value.dtype} {tuple(value.shape)}, "
                f"expected {eager.dtype} {tuple(want.shape)}"
            )
        if want.numel() == 0:
            continue
        scales = {"norm": want.norm().item(), "largest element": want.abs().max().item()}
        difference, eager_difference = (t.double() - want for t in (value, eager))
        for name, scale in scales.items():
            size = torch.norm if name == "norm" else lambda t: t.abs().max()
            error, eager_error = (size(t).item() for t in (difference, eager_difference))
            limit = 4 * eager_error + slack * scale
            if not error <= limit:
                raise AssertionError(
                    f"result {index} is wrong: {name} of the error {error:.3g}, limit {limit:.3g}"
                )


def grad_context(case: Case) -> AbstractContextManager:
    if case.mode != "forward" or case.grad_mode == "grad":
        # AOTAutograd may hand buffers of the forward to the backward, which then runs only once;
        # a backward that is timed alone has to run many times over one forward.
        return torch._functorch.config.patch(donated_buffer=case.mode != "backward")
    return torch.inference_mode() if case.grad_mode == "inference" else torch.no_grad()


# -- one case -------------------------------------------------------------------------------------


def measure(case: Case, backend: Backend, rounds: int) -> list[Result]:
    """All providers of a case, interleaved; the first timed one a second time, as `... (again)`."""
    copies = 1 if case.host_only else backend.copies(case.traffic.bytes)
    try:
        input_sets = [draw_inputs(case, backend, seed) for seed in range(copies)]
        with grad_context(case):
            return measure_on(case, backend, rounds, input_sets)
    finally:
        input_sets = []
        backend.release()


def measure_on(
    case: Case, backend: Backend, rounds: int, input_sets: Sequence[Tensors]
) -> list[Result]:
    exact, native = expected_values(case, input_sets[0], seed=0)
    results, slots = [], []
    for name, provider in case.providers.items():
        result = Result(name, note=provider.note)
        results.append(result)
        try:
            slots.append(prepare(case, provider, result, input_sets, exact, native))
        except Exception as error:
            result.error = one_line(error)
    del exact, native
    if not slots:
        return results
    # The check's float64 memory: while a graph is captured the allocator cannot take it back.
    backend.release()
    again = Slot(Result(slots[0].result.provider + AGAIN), slots[0].calls)
    results.append(again.result)
    slots.append(again)
    if not case.host_only:
        slots = time_gpu(case, backend, rounds, slots)
    time_host(case, backend, rounds, slots)
    return results


def draw_inputs(case: Case, backend: Backend, seed: int) -> Tensors:
    return case.make_inputs(torch.Generator(backend.device).manual_seed(seed))


def prepare(
    case: Case,
    provider: Provider,
    result: Result,
    input_sets: Sequence[Tensors],
    exact: Tensors,
    native: Tensors,
) -> Slot:
    function = provider.build()
    calls = [
        bind(case, function, provider.adapt(inputs), seed) for seed, inputs in enumerate(input_sets)
    ]
    values = tuple(calls[0]())
    if provider.checked:
        check(case, provider.restore(values), exact, native)
    return Slot(result, calls)


def time_gpu(case: Case, backend: Backend, rounds: int, slots: list[Slot]) -> list[Slot]:
    moved = case.traffic.bytes
    ready = []
    for slot in slots:
        try:
            slot.result.peak_bytes = backend.peak_bytes(slot.calls[0])
            slot.cold = backend.record(slot.calls, cycles_for(moved, len(slot.calls)))
            slot.warm = backend.record(slot.calls[:1], cycles_for(moved, 1))
            slot.result.method = slot.cold.method
            ready.append(slot)
        except Exception as error:
            slot.result.error = one_line(error)
    for number in range(rounds):
        order = order_of_round(ready, number, rounds)
        for slot in order:
            slot.result.cold.append(backend.sample(slot.cold, SAMPLES_PER_ROUND))
        for slot in order:
            slot.result.warm.append(backend.sample(slot.warm, SAMPLES_PER_ROUND))
    return ready


def order_of_round(slots: Sequence[Slot], number: int, rounds: int) -> list[Slot]:
    """Another one is the first in every round, and the one that is timed twice is not its own
    neighbour: at the card's power limit a product that follows itself finds a slower clock than one
    that follows another."""
    order = [slot for slot in slots if not slot.result.provider.endswith(AGAIN)]
    again = [slot for slot in slots if slot.result.provider.endswith(AGAIN)]
    middle = (len(order) + 1) // 2
    order[middle:middle] = again
    first = number * len(order) // rounds
    return order[first:] + order[:first]


def time_host(case: Case, backend: Backend, rounds: int, slots: list[Slot]) -> None:
    """Best of rounds, since whatever else the machine does only ever adds to a host time."""
    count = HOST_CALLS
    if case.host_only:
        count, rounds = HOST_ONLY_CALLS, max(rounds, HOST_ONLY_ROUNDS)
    elif not slots or median(flat(slots[0].result.warm)) > HOST_MAX_GPU_US:
        return
    for _ in range(rounds):
        for slot in slots:
            slot.result.host.append(backend.host_us(slot.calls[0], count))


def flat(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [value for one_round in rounds for value in one_round]


def spread(results: Sequence[Result], metric: str) -> float | None:
    """A against A: the larger of the medians' difference and the typical difference of a round."""
    again = next((r for r in results if r.provider.endswith(AGAIN)), None)
    if again is None:
        return None
    first = next(r for r in results if r.provider + AGAIN == again.provider)
    a, b = getattr(first, metric), getattr(again, metric)
    if not a or not b:
        return None
    if metric == "host":
        return abs(min(a) / min(b) - 1)
    by_round = [abs(median(x) / median(y) - 1) for x, y in zip(a, b, strict=True)]
    return max(abs(median(flat(a)) / median(flat(b)) - 1), median(by_round))
