"""Measures cuBLASLt's algorithms for the products of a program, and keeps those that are faster."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _cache, _cublaslt, _jit

# Below this a difference is noise, and another algorithm is not worth another rounding.
REQUIRED_GAIN = 0.03

_ROUNDS = 5
_SECONDS_PER_ROUND = 2e-3
_MOST_BUFFERS = 64


@dataclass(frozen=True)
class Tuned:
    """The outcome for one product."""

    product: str  # such as "65536 x 1024 x 480 bfloat16 RELU_BIAS"
    candidates: int
    recommended_us: float
    best_us: float
    changed: bool

    def __str__(self) -> str:
        gain = self.recommended_us / self.best_us - 1
        outcome = f"{gain:.1%} faster with another algorithm" if self.changed else "left as it is"
        return (
            f"{self.product}: {self.recommended_us:.1f} us recommended, {self.best_us:.1f} us the "
            f"best of {self.candidates}: {outcome}"
        )


@contextlib.contextmanager
def tune(*, candidates: int = 16, verbose: bool = True) -> Iterator[list[Tuned]]:
    """Tunes the matrix products that run inside the ``with`` block, when it ends.

    For each product of the ``linear_act`` family that cuBLASLt computed, the best ``candidates``
    algorithms by cuBLASLt's own order are timed on operands that are not in the cache. One that is
    more than 3 % faster than the recommended one is used from then on, and saved beside the
    compiled kernels (``python -m fusedcuda doctor`` names the folder) for programs that run with
    ``FUSEDCUDA_TUNE=load``. An algorithm may add up in another order, so results may differ in
    their last bits from those before. With ``torch.use_deterministic_algorithms(True)`` nothing is
    tuned.

    >>> with fusedcuda.tune() as results:
    ...     model(batch).sum().backward()

    Args:
        candidates: how many algorithms to time for each product.
        verbose: print a line for each product to stderr.

    Yields:
        A list that holds a :class:`Tuned` for each product after the block.
    """
    _jit.load(_cublaslt.FAMILY)
    known = {entry["problem"] for entry in _cublaslt.problems()}
    results: list[Tuned] = []
    yield results
    new = [entry for entry in _cublaslt.problems() if entry["problem"] not in known]
    results.extend(_tune_all(new, candidates, verbose))


def start_from_environment() -> None:
    """FUSEDCUDA_TUNE=load uses saved choices; =1 also tunes, at exit, what has none yet."""
    # Choices belong to a card, and naming it initialises CUDA, which is left to the program.
    torch.cuda._lazy_call(use_saved)
    if os.environ["FUSEDCUDA_TUNE"] != "load":
        atexit.register(_tune_at_exit)


def use_saved() -> None:
    """Takes the algorithms that were chosen on this card with this version of cuBLAS."""
    if torch.are_deterministic_algorithms_enabled():
        return
    for problem, choice in _read(choices_file()).items():
        _cublaslt.choose(problem, choice["algorithm"])


def choices_file() -> Path:
    """Where the choices for the current card and version of cuBLAS are kept."""
    card = torch.cuda.get_device_name().replace(" ", "-").replace("/", "-")
    return _cache.cache_root() / f"cublaslt-{card}-{_cublaslt.version()}.json"


def _tune_at_exit() -> None:
    if not torch.cuda.is_initialized():
        return
    saved = _read(choices_file())
    new = [entry for entry in _cublaslt.problems() if entry["problem"] not in saved]
    _tune_all(new, candidates=16, verbose=True)


def _tune_all(entries: Sequence[dict[str, Any]], candidates: int, verbose: bool) -> list[Tuned]:
    if torch.are_deterministic_algorithms_enabled():
        if verbose and entries:
            _cache.say("not tuning: torch.use_deterministic_algorithms(True) is set")
        return []
    results = []
    choices = {}
    for entry in entries:
        tuned, algorithm = _tune_one(entry, candidates)
        _cublaslt.choose(entry["problem"], algorithm if tuned.changed else "")
        # Saved also where nothing changes, so that it is not measured again.
        choices[entry["problem"]] = {
            "algorithm": algorithm if tuned.changed else "",
            "product": tuned.product,
            "recommended_us": tuned.recommended_us,
            "best_us": tuned.best_us,
        }
        results.append(tuned)
        if verbose:
            _cache.say(str(tuned))
    if choices:
        _save(choices_file(), choices)
    return results


def _tune_one(entry: dict[str, Any], count: int) -> tuple[Tuned, str]:
    """The outcome, and the fastest algorithm."""
    names = [c["algorithm"] for c in _cublaslt.candidates(entry["problem"], count)]
    times = measure(entry, names)
    best = min(range(len(names)), key=times.__getitem__)
    tuned = Tuned(
        product=describe(entry),
        candidates=len(names),
        recommended_us=times[0],
        best_us=times[best],
        changed=times[best] < (1 - REQUIRED_GAIN) * times[0],
    )
    return tuned, names[best]


def describe(entry: dict[str, Any]) -> str:
    dtype = next(t for t, code in _cublaslt.TYPES.items() if code == entry["type"])
    batch = f"{entry['batch']} x " if entry["batch"] > 1 else ""
    sizes = f"{entry['m']} x {entry['n']} x {entry['k']}"
    return f"{batch}{sizes} {str(dtype).removeprefix('torch.')} {entry['epilogue']}"


# ---- Files ---------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        _cache.say(f"ignoring {path}, which is damaged; tuning writes it anew")
        return {}


def _save(path: Path, choices: dict[str, Any]) -> None:
    """Adds to a file that other processes may read or write at the same time."""
    with _cache.build_lock(path.with_suffix(".lock"), "the choices of algorithms"):
        text = json.dumps({**_read(path), **choices}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text + "\n")
        os.replace(file.name, path)


# ---- Timing --------------------------------------------------------------------------------------


def measure(entry: dict[str, Any], algorithms: Sequence[str]) -> list[float]:
    """Microseconds of each algorithm, its operands not in the cache."""
    operands = _make_operands(entry)
    graphs = [_capture(entry["problem"], algorithm, operands) for algorithm in algorithms]
    once = _milliseconds(graphs[0], 1)
    replays = max(1, round(1000 * _SECONDS_PER_ROUND / max(once, 1e-3)))
    times: list[list[float]] = [[] for _ in graphs]
    # In turns, so that a change of the clocks meets all of them.
    for _ in range(_ROUNDS):
        for graph, own in zip(graphs, times, strict=True):
            own.append(1000 * _milliseconds(graph, replays) / (replays * len(operands)))
    return [sorted(own)[len(own) // 2] for own in times]


def _make_operands(entry: dict[str, Any]) -> list[list[Tensor]]:
    """Sets of operands that together are too much for the cache to keep one until its next turn."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    count = min(_MOST_BUFFERS, 1 + 2 * cache // sum(entry["bytes"]))
    workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    dtype = next(t for t, code in _cublaslt.TYPES.items() if code == entry["type"])
    return [[*(_random(size, dtype) for size in entry["bytes"]), workspace] for _ in range(count)]


def _random(size: int, dtype: torch.dtype) -> Tensor:
    """Bytes of ordinary numbers: zeros would draw less power, random bits would be NaN."""
    elements = -(-size // dtype.itemsize)
    return torch.randn(elements, device="cuda").to(dtype).view(torch.uint8)


def _capture(
    problem: str, algorithm: str, operands: Sequence[Sequence[Tensor]]
) -> torch.cuda.CUDAGraph:
    """A graph of one product for each set of operands: launches cost the host nothing."""
    _cublaslt.run(problem, algorithm, operands[0])  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensors in operands:
            _cublaslt.run(problem, algorithm, tensors)
    return graph


def _milliseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
