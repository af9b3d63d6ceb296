"""Softmax family: `python -m bench.bench_softmax [--quick] [--filter REGEX] [--out DIR]`.

The cases come first in the order in which they matter: when time runs out, the last are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch

from bench import cases, harness, plots
from bench.cases import (
    ALIGNED,
    MODES,
    ODD_SHAPES,
    ODD_TARGET,
    Case,
    Function,
    Provider,
    Shape,
    Target,
    aligned_twin,
    faster,
    for_mode,
    fusedcuda_op,
    host_cases,
    imported,
    liger_function,
    random,
    row_sweep,
    torch_providers,
    traffic,
    triton_op,
    where_installed,
)

BF16, FP32 = torch.bfloat16, torch.float32

TARGETS: dict[str, tuple[Target, ...]] = {
    "softmax 65536x4096 bf16 forward": (faster("best", 1.0),),
    "softmax 65536x4096 bf16 backward": (faster("best", 1.0),),
    "softmax 16384x16384 bf16 forward": (faster("best", 1.0),),
    "softmax 16384x16384 bf16 backward": (faster("best", 1.0),),
    "softmax 4096x65536 bf16 forward": (faster("best", 1.0),),
    "softmax 4096x65536 bf16 backward": (faster("best", 1.15),),
    **{f"softmax odd {r}x{c} bf16 {mode}": (ODD_TARGET,) for r, c in ODD_SHAPES for mode in MODES},
}
QUACK_US = {
    "softmax 65536x4096 bf16 forward": 258, "softmax 65536x4096 bf16 backward": 368,
    "softmax 16384x16384 bf16 forward": 259, "softmax 16384x16384 bf16 backward": 395,
    "softmax 4096x65536 bf16 forward": 256, "softmax 4096x65536 bf16 backward": 450,
}  # fmt: skip

new_case = partial(cases.new_case, targets=TARGETS, quack_us=QUACK_US)


def softmax_eager(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def log_softmax_eager(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


def row_case(
    kernel: str,
    eager: Function,
    peers: dict[str, Provider],
    shape: Shape,
    dtype: torch.dtype,
    mode: str,
    variant: str = "",
    **fields,
) -> Case:
    ours = fusedcuda_op(kernel)
    providers = {"fusedcuda": ours, **torch_providers(eager), **peers}
    if variant == "odd":
        providers[ALIGNED] = aligned_twin(ours)
    return new_case(
        kernel, variant, shape, dtype, mode=mode,
        traffic=for_mode(
            mode,
            forward=traffic(dtype, read=[shape], write=[shape]),
            backward=traffic(dtype, read=[shape, shape], write=[shape]),
        ),
        make_inputs=random([shape], dtype),
        reference=eager,
        providers=providers, **fields,
    )  # fmt: skip


def softmax(shape: Shape, dtype: torch.dtype, mode: str, **fields) -> Case:
    peers = {
        "triton": triton_op("softmax", "softmax"),
        **liger_function("softmax", "LigerSoftmaxFunction"),
        **where_installed("quack", "quack", Provider(imported("quack", "softmax"))),
    }
    return row_case("softmax", softmax_eager, peers, shape, dtype, mode, **fields)


def log_softmax(shape: Shape, dtype: torch.dtype, mode: str, **fields) -> Case:
    return row_case("log_softmax", log_softmax_eager, {}, shape, dtype, mode, **fields)


def build_cases() -> list[Case]:
    small = (4, 4096)
    return [
        *row_sweep(softmax, [4096, 16384, 65536]),
        *host_cases(
            "softmax", small, traffic(BF16, read=[small], write=[small]), random([small], BF16),
            softmax_eager, native=softmax_eager, native_name="torch.softmax",
        ),
        *(softmax(shape, BF16, mode, variant="odd") for shape in ODD_SHAPES for mode in MODES),
        *(log_softmax((16384, 16384), BF16, mode) for mode in MODES),
        *row_sweep(softmax, [1024, 32768, 262144], group="sweep"),
        *(softmax((32768, 4096), FP32, mode) for mode in MODES),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main("softmax", build_cases(), partial(plots.draw, family="softmax"), arguments)


if __name__ == "__main__":
    sys.exit(main())
