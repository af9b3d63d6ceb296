"""The time of a call as its user sees it, on top of the clocks of bench/timing.py.

The benchmarks of single kernels keep the host out. Here it is the subject: a step of a small batch
waits for Python, and CUDA graphs are about nothing else. So calls are enqueued one after the other,
as in a training loop, and the time between the first and the last is divided by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from math import ceil

from bench.measure import AGAIN
from bench.timing import Backend

Call = Callable[[], object]

SAMPLE_US = 20_000.0
MAX_CALLS = 512
SAMPLES_PER_ROUND = 3


class BackToBack:
    """`calls` in turn, as fast as the host enqueues them."""

    method = "back to back"

    def __init__(self, calls: Sequence[Call], count: int) -> None:
        self.calls = count
        self._sequence = list(islice(cycle(calls), count))

    def launch(self) -> None:
        for call in self._sequence:
            call()


def in_turns(
    backend: Backend, providers: Mapping[str, Sequence[Call]], rounds: int
) -> dict[str, list[float]]:
    """Microseconds a call, of each provider in every round; the first one twice, as `... (again)`.

    A provider's calls are the same work on different inputs.
    """
    first = next(iter(providers))
    replays = {}
    for name, calls in [*providers.items(), (first + AGAIN, providers[first])]:
        (once,) = backend.sample(BackToBack(calls, len(calls)), 1)
        replays[name] = BackToBack(calls, min(MAX_CALLS, max(len(calls), ceil(SAMPLE_US / once))))
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name] += backend.sample(replay, SAMPLES_PER_ROUND)
    return times
