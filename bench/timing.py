"""Clocks: GPU time by CUDA graph replay over rotated buffers, host time, peak memory, copy speed.

The protocol is fixed here for every family:

- GPU time is that of a captured graph holding many calls, divided by their number, so that the
  host and the gaps between launches stay out. A replay takes about two milliseconds.
- Cold: call after call uses another set of buffers, outputs included, until the sets together
  exceed three times the L2 cache. Warm: one set of buffers.
- Host time is that of enqueueing alone, the best of several rounds.
- A backward pass is captured alone: its forward ran before, on the stream of the capture.
  Autograd runs each backward node on the stream of its forward, so all of a measurement happens
  on one side stream; a forward on the default stream would break the capture.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Protocol

import torch

Call = Callable[[], object]

L2_MULTIPLE = 3
MAX_COPIES = 1024  # below about 180 KB a set, the buffers together stay under 3x L2; rows say so
REPLAY_US = 2000.0
ASSUMED_BYTES_PER_US = 4e6  # only sizes the graphs, equally for every provider
SHORTEST_CALL_US = 2.0
EVENT_TIMED_CALLS = 200  # stays under the 1024 launches that a stream queues


class Replay(Protocol):
    calls: int
    method: str

    def launch(self) -> None: ...


class Backend(Protocol):
    """What the harness needs from a device; the tests put a scripted one in its place."""

    device: str

    def copies(self, bytes_per_call: int) -> int: ...
    def l2_multiple(self, bytes_per_call: int, copies: int) -> float: ...
    def record(self, calls: Sequence[Call], cycles: int) -> Replay: ...
    def record_uncaptured(self, calls: Sequence[Call], cycles: int) -> Replay: ...
    def sample(self, replay: Replay, count: int) -> list[float]: ...
    def host_us(self, call: Call, count: int) -> float: ...
    def peak_bytes(self, call: Call) -> int: ...
    def release(self) -> None: ...
    def healthy(self) -> bool: ...


def copies_for(bytes_per_call: int, l2_bytes: int) -> int:
    """Sets of buffers that together exceed the L2 cache three times over; never fewer than two."""
    return min(max(2, ceil(L2_MULTIPLE * l2_bytes / max(bytes_per_call, 1))), MAX_COPIES)


def cycles_for(bytes_per_call: int, copies: int) -> int:
    """How often a graph goes through the sets, so that one replay takes about REPLAY_US."""
    call_us = max(bytes_per_call / ASSUMED_BYTES_PER_US, SHORTEST_CALL_US)
    return max(1, ceil(REPLAY_US / (copies * call_us)))


class GraphReplay:
    """A captured graph, and the outputs its calls write to."""

    method = "cuda graph"

    def __init__(self, calls: Sequence[Call], cycles: int, stream: torch.cuda.Stream) -> None:
        self.calls = len(calls) * cycles
        self.graph = torch.cuda.CUDAGraph()
        # One output slot per set, kept until the rotation comes back to it: freed at once, every
        # call would write to the same block and a cold measurement would have warm stores.
        self.outputs: list[object] = [None] * len(calls)
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(
                self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                for _ in range(cycles):
                    for index, call in enumerate(calls):
                        self.outputs[index] = None
                        self.outputs[index] = call()
        except BaseException:
            # A capture that fails at its end leaves the allocator recording into the pool, and
            # every later capture of the process would fail with it.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            raise

    def launch(self) -> None:
        self.graph.replay()


class EventReplay:
    """For calls that cannot be captured: the GPU sleeps until the host has enqueued them all."""

    method = "events"

    def __init__(self, calls: Sequence[Call], cycles: int) -> None:
        self.sequence = (list(calls) * cycles)[:EVENT_TIMED_CALLS]
        self.calls = len(self.sequence)
        self._run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._run()
        enqueue_seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        self.sleep_cycles = int(1.5 * enqueue_seconds * 2e9)

    def _run(self) -> None:
        for call in self.sequence:
            call()

    def hold_gpu(self) -> None:
        torch.cuda._sleep(self.sleep_cycles)

    def launch(self) -> None:
        self._run()


class CudaBackend:
    """The clocks on the current CUDA device. Use inside `on_stream()`."""

    device = "cuda"

    def __init__(self) -> None:
        self.l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self.stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            yield

    def copies(self, bytes_per_call: int) -> int:
        return copies_for(bytes_per_call, self.l2_bytes)

    def l2_multiple(self, bytes_per_call: int, copies: int) -> float:
        return bytes_per_call * copies / self.l2_bytes

    def record(self, calls: Sequence[Call], cycles: int) -> Replay:
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        try:
            return GraphReplay(calls, cycles, self.stream)
        except Exception as error:
            torch.cuda.synchronize()
            reason = str(error).strip().split("\n", 1)[0]
            print(f"    not capturable, timed with events: {reason}", flush=True)
            return EventReplay(calls, cycles)

    def record_uncaptured(self, calls: Sequence[Call], cycles: int) -> Replay:
        return EventReplay(calls, cycles)

    def sample(self, replay: Replay, count: int) -> list[float]:
        """Microseconds per call of `count` replays, after one that is not counted."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        replay.launch()
        for start, end in events:
            if isinstance(replay, EventReplay):
                replay.hold_gpu()
            start.record()
            replay.launch()
            end.record()
            if isinstance(replay, EventReplay):
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / replay.calls for start, end in events]

    def host_us(self, call: Call, count: int) -> float:
        """Microseconds to enqueue one call, over `count` calls on an idle GPU."""
        for _ in range(min(count, 50)):
            call()
        torch.cuda.synchronize()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) / count * 1e6
        finally:
            if was_enabled:
                gc.enable()
            torch.cuda.synchronize()

    def peak_bytes(self, call: Call) -> int:
        """Memory that one call allocates at its peak, its result included."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del result
        return peak

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def healthy(self) -> bool:
        """False after an error that the CUDA context does not survive."""
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
        except Exception:
            return False
        return True


def copy_bandwidth(backend: Backend, rounds: int = 3, bytes_per_tensor: int = 2**30) -> list[float]:
    """Samples of the device-to-device copy, in TB/s, reads plus writes: the ceiling of a table."""
    elements = bytes_per_tensor // 2
    pairs = [
        [torch.randn(elements, device=backend.device, dtype=torch.bfloat16) for _ in range(2)]
        for _ in range(2)
    ]
    calls = [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]
    moved = 2 * elements * 2
    # Not from a graph: there a copy is a node for the copy engine, at two thirds of the speed.
    replay = backend.record_uncaptured(calls, cycles_for(moved, len(calls)))
    samples = [us for _ in range(rounds) for us in backend.sample(replay, 5)]
    return [moved / us / 1e6 for us in samples]
