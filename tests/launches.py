"""Calls on a GPU: on another stream than the current one, in a graph, and without waiting."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from reference import poison
from torch import Tensor

import fusedcuda

Results = TypeVar("Results")


def need_hopper(family: str) -> None:
    """Loads a family whose kernels are for the tensor cores of an H100 or H200."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    fusedcuda.load(family)


def on_another_stream(function: Callable[[], Results]) -> Results:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = function()
    torch.cuda.current_stream().wait_stream(stream)
    return results


def captured(function: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A graph of the call, and what a replay writes to. The call is made before it is captured."""
    on_another_stream(lambda: [function() for _ in range(3)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def check_replays(function: Callable[[], Sequence[Tensor]]) -> None:
    """Replays of the call in a graph write what it returns, to the last bit, whatever is in memory
    that was freed since."""
    expected = function()
    graph, outputs = captured(function)
    for _ in range(3):
        for output in outputs:
            output.fill_(torch.nan)
        poison("cuda", *[1 << 20] * 8)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
