"""Calls on a GPU: on another stream than the current one, in a graph, and without waiting."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

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


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
