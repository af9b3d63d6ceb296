"""The skinny products of an adapter: one pass of the Hopper kernel against the other ways.

`python -m bench.tuning.lora_passes [SECONDS [ROWS...]]`: bf16, CUDA graphs over cold buffers,
contenders in turn, microseconds of the median round. "t": scale * x @ lora_a.T; "up": the gradient
of lora_a; "both": the gradients of t and of lora_b, of dz. "ours": lora_down and lora_up.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

import fusedcuda
from bench.timing import Call, CudaBackend, Replay, cycles_for
from bench.tuning.inputs import new
from fusedcuda.ops._lora_reference import pitch_of

ROWS = (512, 1024, 2048, 4096, 8192, 32768)
COLUMNS = (1024, 4096, 14336)
RANKS = (5, 8, 16, 32, 64)
SCALE, DROPOUT = 2.0, 0.1
ops = torch.ops.fusedcuda


class Shape(NamedTuple):
    rows: int
    columns: int
    rank: int


class Operands(NamedTuple):
    x: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor  # with ranks of zeros up to a multiple of 8
    t: torch.Tensor
    seed: torch.Tensor


def shapes(rows: Sequence[int]) -> Iterator[Shape]:
    for columns in COLUMNS:
        for m in rows:
            for rank in RANKS:
                if rank == 16 or columns == 4096:
                    yield Shape(m, columns, rank)


def operands(shape: Shape) -> Operands:
    rows, columns, rank = shape
    padded = [new(size, pitch_of(rank)) for size in (columns, rows)]
    for matrix in padded:
        matrix[:, rank:] = 0
    seed = torch.randint(2**63 - 1, (1,), device="cuda")
    return Operands(new(rows, columns), new(rank, columns), *padded, seed)


def contenders(shape: Shape, o: Operands) -> dict[str, Call]:
    x, lora_a, lora_b, t, seed = o
    rank = shape.rank
    narrow_t, narrow_b = t[:, :rank], lora_b[:, :rank]

    def one_pass(factor, t, seed=None, transposed=False):
        p = 0.0 if seed is None else DROPOUT
        return ops.lora_pass.default(x, factor, t, seed, rank, SCALE, p, transposed, False)

    def apart_by_cublas():
        x.new_empty(x.shape[0], rank).addmm_(x, narrow_b, beta=0, alpha=SCALE)
        return torch.mm(x.T, narrow_t)

    def apart_by_ours():
        ops.lora_down.default(x, narrow_b.T, None, SCALE, 0.0)
        return ops.lora_up.default(t, x, None, rank, 0.0, True, False)

    return {
        "t pass": lambda: one_pass(lora_a, None),
        "t cublas": lambda: (
            t.addmm_(x, lora_a.T, beta=0, alpha=SCALE) if rank % 8 == 0 else torch.mm(x, lora_a.T)
        ),
        "t ours": lambda: ops.lora_down.default(x, lora_a, None, SCALE, 0.0),
        "up pass": lambda: one_pass(None, t),
        "up cublas": lambda: torch.mm(narrow_t.T, x),
        "up ours": lambda: ops.lora_up.default(t, x, None, rank, 0.0, False, False),
        "both pass": lambda: one_pass(lora_b.T, t, transposed=True),
        "both cublas": apart_by_cublas,
        "both ours": apart_by_ours,
        "t dropped pass": lambda: one_pass(lora_a, None, seed),
        "t dropped ours": lambda: ops.lora_down.default(x, lora_a, seed, SCALE, DROPOUT),
        "up dropped pass": lambda: one_pass(None, t, seed),
        "up dropped ours": lambda: ops.lora_up.default(t, x, seed, rank, DROPOUT, False, False),
    }


def measure(shape: Shape, clock: CudaBackend, seconds: float) -> dict[str, float]:
    size = 2 * shape.rows * shape.columns
    copies = clock.copies(size)
    sets = [operands(shape) for _ in range(copies)]
    calls = [contenders(shape, o) for o in sets]
    replays: dict[str, Replay] = {
        name: clock.record([of_set[name] for of_set in calls], cycles_for(size, copies))
        for name in calls[0]
    }
    times: dict[str, list[float]] = {name: [] for name in replays}
    deadline = time.time() + seconds
    while time.time() < deadline or not all(times.values()):
        for name, replay in replays.items():
            times[name] += clock.sample(replay, 3)
    return {name: statistics.median(samples) for name, samples in times.items()}


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    fusedcuda.load("lora")
    clock = CudaBackend()
    every = list(shapes([int(word) for word in sys.argv[2:]] or ROWS))
    plain, dropped = ("pass", "cublas", "ours"), ("pass", "ours")
    groups = {"t": plain, "up": plain, "both": plain, "t dropped": dropped, "up dropped": dropped}
    heads = "".join(f"|{name:^{8 * len(ways)}}" for name, ways in groups.items())
    columns = "".join("|" + "".join(f"{way:>8}" for way in ways) for ways in groups.values())
    print(f"{'rows x columns, ranks':24}{heads}\n{'':24}{columns}")
    with clock.on_stream():
        for shape in every:
            times = measure(shape, clock, seconds / len(every))
            line = f"{shape.rows:>6} x{shape.columns:>6}, {shape.rank:>3}".ljust(24)
            for name, ways in groups.items():
                line += "|" + "".join(f"{times[f'{name} {way}']:8.2f}" for way in ways)
            print(line, flush=True)
            clock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
