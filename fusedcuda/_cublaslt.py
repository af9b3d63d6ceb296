"""cuBLASLt as linear_act sees it: which epilogues it fuses, and its algorithms, for tuning.

The operators are implemented in ``csrc/bindings/linear_act_tuning.h``. Problems and algorithms are
named by hexadecimal digits, which mean the same in every process with the same cuBLAS version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._library import define_host

FAMILY = "linear_act"

# What `make probe` measured on an H200. Other GPUs get the same: it is the best that is known.
SUPPORT = Path(__file__).parent / "data" / "cublaslt_h200.json"

# cudaDataType_t
TYPES = {
    torch.float64: 1,
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
}

# How products of these are computed: cudaDataType_t and cublasComputeType_t. TF32 is float32 where
# torch allows that.
ARITHMETIC = {
    "float64": (1, 70),
    "float32": (0, 68),
    "tf32": (0, 77),
    "float16": (2, 68),
    "bfloat16": (14, 68),
    "float8_e4m3fn": (28, 68),
}

# cublasLtEpilogue_t
EPILOGUES = {
    "BIAS": 4,
    "RELU": 2,
    "RELU_BIAS": 6,
    "RELU_AUX": 130,
    "RELU_AUX_BIAS": 134,
    "GELU": 32,
    "GELU_BIAS": 36,
    "GELU_AUX": 160,
    "GELU_AUX_BIAS": 164,
    "DRELU": 136,
    "DRELU_BGRAD": 152,
    "DGELU": 192,
    "DGELU_BGRAD": 208,
    "BGRADB": 512,
}

define_host("cublaslt_version() -> int")
define_host("cublaslt_fuses(int type, int compute, int epilogue, bool fused) -> ()")
define_host("cublaslt_problems() -> str")
define_host("cublaslt_candidates(str problem, int count) -> str")
define_host("cublaslt_run(str problem, str algorithm, Tensor[] operands) -> ()")
define_host("cublaslt_choose(str problem, str algorithm) -> ()")


def configure() -> None:
    """What the kernels are told when they have been loaded: measured support, tuned choices."""
    key = "CompositeExplicitAutograd"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fusedcuda::cublaslt_fuses", key):
        return  # built from other sources, in which the family has no cuBLASLt
    use_support(SUPPORT)
    if os.environ.get("FUSEDCUDA_TUNE", "0") != "0":
        from . import _tune

        _tune.start_from_environment()


def use_support(path: Path) -> None:
    """Reads the table of the probe; without one, the kernels' own expectations hold."""
    if not path.exists():
        return
    for name, epilogues in json.loads(path.read_text())["epilogues"].items():
        for epilogue, measured in epilogues.items():
            _set_support(*ARITHMETIC[name], EPILOGUES[epilogue], measured["fused"])


def _set_support(cuda_type: int, compute: int, epilogue: int, fused: bool) -> None:
    torch.ops.fusedcuda.cublaslt_fuses(cuda_type, compute, epilogue, fused)


def version() -> int:
    """Of the library in use, such as 130101 for 13.1.1."""
    return torch.ops.fusedcuda.cublaslt_version()


def problems() -> list[dict[str, Any]]:
    """What has been asked for on the current device, most recent first."""
    return json.loads(torch.ops.fusedcuda.cublaslt_problems())


def candidates(problem: str, count: int) -> list[dict[str, Any]]:
    """Algorithms for a problem, in the order in which cuBLASLt recommends them."""
    return json.loads(torch.ops.fusedcuda.cublaslt_candidates(problem, count))


def run(problem: str, algorithm: str, operands: Sequence[Tensor]) -> None:
    """One product; ``operands`` as ``problems()`` gives their bytes, then a workspace."""
    torch.ops.fusedcuda.cublaslt_run(problem, algorithm, list(operands))


def choose(problem: str, algorithm: str) -> None:
    """The algorithm for a problem from now on; "" goes back to the recommendation."""
    torch.ops.fusedcuda.cublaslt_choose(problem, algorithm)
