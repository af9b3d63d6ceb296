"""The forward that saves, and the backward, of layers of all sizes: our product against cuBLASLt's.

`python -m bench.tuning.linear_act_training [SECONDS [ROWS...]]`: bf16, CUDA graphs over cold
buffers, contenders in turn, microseconds of the median round. "measured" is what the rules take.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

import fusedcuda
from bench.cases import forced
from bench.timing import Call, CudaBackend, Replay, cycles_for
from bench.tuning.inputs import new
from fusedcuda.ops._activations import activation_code

BACKENDS = ("measured", "hopper", "cublaslt")
ROWS = (128, 512, 2048, 8192, 65536)
LAYERS = (  # K, N
    *((256, 128), (512, 256), (480, 1024), (1024, 512), (1024, 1024), (4096, 256), (4096, 1024)),
    *((768, 3072), (1024, 4096)),
)
ALL_GRADIENTS = 0b111


class Shape(NamedTuple):
    activation: str
    m: int
    k: int
    n: int


def shapes(rows: Sequence[int]) -> Iterator[Shape]:
    for activation in ("relu", "gelu_tanh"):
        for k, n in LAYERS:
            for m in rows:
                yield Shape(activation, m, k, n)


def operands(shape: Shape, count: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """x, weight, bias and dy, each time others."""
    for _ in range(count):
        m, k, n = shape.m, shape.k, shape.n
        yield new(m, k), new(n, k), new(n), new(m, n)


def calls(
    shape: Shape, backend: str, sets: list[tuple[torch.Tensor, ...]]
) -> dict[str, list[Call]]:
    code = activation_code("linear_act", shape.activation)
    forward = forced("linear_act_use", backend, torch.ops.fusedcuda.linear_act_forward.default)
    backward = forced("linear_act_use", backend, torch.ops.fusedcuda.linear_act_backward.default)

    def of_set(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor
    ) -> tuple[Call, Call]:
        saved = forward(x, weight, bias, code, False)[1]
        return (
            lambda: forward(x, weight, bias, code, False),
            lambda: backward(dy, x, weight, saved, code, ALL_GRADIENTS, False),
        )

    pairs = [of_set(*tensors) for tensors in sets]
    return {"forward": [pair[0] for pair in pairs], "backward": [pair[1] for pair in pairs]}


def measure(shape: Shape, clock: CudaBackend, seconds: float) -> dict[tuple[str, str], float]:
    size = 2 * (shape.m * (shape.k + 2 * shape.n) + shape.n * shape.k)
    copies = clock.copies(size)
    sets = list(operands(shape, copies))
    # Kept for as long as their graphs are replayed: they own what was saved.
    recorded = {backend: calls(shape, backend, sets) for backend in BACKENDS}
    replays: dict[tuple[str, str], Replay] = {}
    for backend, modes in recorded.items():
        for mode, those in modes.items():
            replays[mode, backend] = clock.record(those, cycles_for(size, copies))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in replays}
    deadline = time.time() + seconds
    while time.time() < deadline or not all(times.values()):
        for key, replay in replays.items():
            times[key] += clock.sample(replay, 3)
    return {key: statistics.median(samples) for key, samples in times.items()}


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    fusedcuda.load("linear_act")
    clock = CudaBackend()
    every = list(shapes([int(word) for word in sys.argv[2:]] or ROWS))
    columns = "".join(f"{name:>10}" for name in BACKENDS)
    print(f"{'M x N x K':28}|{'forward':^30}|{'backward':^30}\n{'':28}|{columns}|{columns}")
    with clock.on_stream():
        for shape in every:
            times = measure(shape, clock, seconds / len(every))
            line = f"{shape.activation:10}{shape.m:>6} x{shape.n:>5} x{shape.k:>4}"
            for mode in ("forward", "backward"):
                line += "|" + "".join(f"{times[mode, backend]:10.2f}" for backend in BACKENDS)
            print(line, flush=True)
            clock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
