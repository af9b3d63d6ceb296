"""A step in torch's profiler: which kernels ran, in which phase, and what kind of work they were.

The phase of a kernel is the `record_function` block around its launch, found by time: a backward
pass is launched from autograd's own thread while the block of the main thread is open. What a
kernel does is told by its name and by the operator that launched it, for neither is enough: an
`aten::addmm` may launch a matrix product, the sum of its parts and a copy, and of the name
`elementwise_kernel<...>` there are copies, too.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
# One graph of all three is launched once: its kernels cannot be told apart by their launches.
WHOLE_STEP = "whole step"

MATMUL, ELEMENTWISE, REDUCTION = "matmul", "elementwise", "reduction"
GATHER, COPY, FUSED, OTHER = "gather, scatter", "copy, fill", "fused op", "other"
KINDS = (MATMUL, FUSED, ELEMENTWISE, REDUCTION, GATHER, COPY, OTHER)

_ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")

# The first pattern found in a kernel's name says what it is. Triton's names list what a kernel was
# made from, so a gather that took a ReLU along counts as a gather.
_BY_KERNEL = [
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (FUSED, r"dot_interaction|linear_sigmoid_bce"),
        (MATMUL, r"gemm|gemv|nvjet|cutlass|xmma|matmul|splitk|triton_tem_|dot_kernel"),
        (
            GATHER,
            r"indexselect|indexfunc|index_elementwise|gather|scatter|embedding|radix"
            r"|triton_poi_\w*(index|embedding)",
        ),
        (
            COPY,
            r"copy_kernel|copy_device|catarray|fillfunctor|pad_rows|^mem(cpy|set)"
            r"|triton_poi_fused_((new_)?zeros|cat|clone|copy|fill)_\d+$",
        ),
        (ELEMENTWISE, r"elementwise|multi_tensor_apply|triton_(poi|for)_|act_rows|relu_mask"),
        (REDUCTION, r"reduce|triton_(red|per)_|partials|column_sums|one_output|softmax"),
    )
]

# By the operator goes what has a name of no pattern, and all that runs on the CPU. Without the
# namespace, underscores around it, and the words forward and backward at its end.
_BY_OPERATOR = {
    FUSED: {"dot_interaction", "embedding_interaction", "linear_sigmoid_bce"},
    MATMUL: {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear_act", "linear_residual"},
    GATHER: {"embedding", "embedding_dense", "index_select", "index_add", "index", "index_put"},
    REDUCTION: {"sum", "mean", "binary_cross_entropy_with_logits"},
    COPY: {
        *("copy", "to_copy", "clone", "cat", "stack", "fill", "zero", "zeros", "zeros_like"),
        *("ones", "ones_like", "new_zeros", "slice", "select", "constant_pad_nd"),
    },
    ELEMENTWISE: {
        *("add", "sub", "rsub", "mul", "div", "neg", "abs", "exp", "log", "log1p", "sqrt", "pow"),
        *("reciprocal", "addcmul", "addcdiv", "lerp", "minimum", "maximum", "where", "sigmoid"),
        *("relu", "threshold", "clamp", "clamp_min", "clamp_max"),
    },
}


def kind_of(operator: str, kernel: str = "") -> str:
    """What a kernel does; of an operator without kernels, as on the CPU, what most of it does."""
    for kind, pattern in _BY_KERNEL:
        if pattern.search(kernel):
            return kind
    name = re.sub(r"(_backward|_forward)$", "", operator.rpartition("::")[2].strip("_"))
    if name.startswith(("foreach_", "fused_")):  # of an optimizer
        return ELEMENTWISE
    return next((kind for kind, names in _BY_OPERATOR.items() if name in names), OTHER)


@dataclass(frozen=True)
class Kernel:
    """One launch. phase: of PHASES, or empty outside of them."""

    name: str
    us: float
    operator: str
    phase: str

    @property
    def kind(self) -> str:
        return kind_of(self.operator, self.name)


@dataclass(frozen=True)
class StepTrace:
    """kernels: in the order of their start. calls: of the CUDA API, by name."""

    kernels: Sequence[Kernel]
    calls: Counter[str]

    @property
    def us(self) -> float:
        return sum(kernel.us for kernel in self.kernels)

    @property
    def graph_launches(self) -> int:
        return self.calls["cudaGraphLaunch"]

    @property
    def launches(self) -> int:
        """Launches by the host: of single kernels and of graphs."""
        return sum(count for name, count in self.calls.items() if "Launch" in name)

    def us_by(self, phase: str) -> dict[str, float]:
        """Microseconds of a phase by kind."""
        found = dict.fromkeys(KINDS, 0.0)
        for kernel in self.kernels:
            if kernel.phase == phase:
                found[kernel.kind] += kernel.us
        return {kind: us for kind, us in found.items() if us}


def profiled(run: Callable[[], object], path: Path) -> StepTrace:
    """Runs it once under the profiler; the Chrome trace is left at `path`, a .json.gz."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))  # compresses by the name's ending
    return read(json.loads(gzip.decompress(path.read_bytes())))


def read(trace: dict[str, Any]) -> StepTrace:
    """The kernels of a Chrome trace as torch's profiler writes it."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    by_category: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_category.setdefault(event.get("cat", ""), []).append(event)
    api = by_category.get("cuda_runtime", []) + by_category.get("cuda_driver", [])
    launches = {event["args"].get("correlation"): event for event in api}
    operators = {
        event["args"].get("External id"): event["name"] for event in by_category.get("cpu_op", [])
    }
    blocks = [e for e in by_category.get("user_annotation", []) if e["name"] in PHASES]

    def phase(launch: dict[str, Any] | None) -> str:
        if launch is None:
            return ""
        at = launch["ts"]
        inside = (b["name"] for b in blocks if b["ts"] <= at <= b["ts"] + b["dur"])
        return next(inside, "")

    on_gpu = [e for category in _ON_THE_GPU for e in by_category.get(category, [])]
    kernels = [
        Kernel(
            event["name"],
            float(event["dur"]),
            operators.get(event["args"].get("External id"), ""),
            phase(launches.get(event["args"].get("correlation"))),
        )
        for event in sorted(on_gpu, key=lambda event: event["ts"])
    ]
    return StepTrace(kernels, Counter(event["name"] for event in api))
