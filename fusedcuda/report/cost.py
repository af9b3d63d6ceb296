"""Predicted time of each launch: bytes, floating-point operations and special functions by rate.

A model, so that a report can be made without the GPU. What a kernel reads counts at the speed of
the L2 cache if so little was touched since the last access that it must still be there. The time
is the slowest of the kernel's resources plus a fixed start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .device import Device
from .kernels import Launch

_ROW_IN_L1 = 65536

HBM, L2, COMPUTE, SPECIAL, START = (
    "memory",
    "L2 cache",
    "tensor cores",
    "special functions",
    "launch",
)


@dataclass(frozen=True)
class Cost:
    """Of one launch. us: microseconds; hbm, l2: bytes by where they come from or go to."""

    us: float
    bound: str
    hbm: int
    l2: int


def predict(launches: Sequence[Launch], device: Device) -> list[Cost]:
    cache = _Cache(device.l2_mb * 1e6)
    return [_cost(launch, cache, device) for launch in launches]


def _cost(launch: Launch, cache: _Cache, device: Device) -> Cost:
    hit = sum(cache.read(launch, name, size) for name, size in launch.reads.items())
    for name, size in launch.writes.items():
        cache.touch(launch, name, size)
    hbm, l2 = launch.bytes - hit, hit
    times = {
        HBM: hbm / device.copy_tb_s / 1e6 + l2 / device.l2_tb_s / 1e6 + _again(launch, device),
        COMPUTE: launch.flops / matmul_rate(launch, device) / 1e6,
        SPECIAL: launch.special / device.special_t_s / 1e6,
    }
    bound = max(times, key=lambda name: times[name])
    if launch.flops:
        # A tile is written when its products are done, which the next one hardly overlaps.
        times[COMPUTE] += launch.bytes_out / device.copy_tb_s / 1e6
    slowest = max(times.values())
    if slowest < device.launch_us:
        bound = START
    elif bound == HBM and l2 / device.l2_tb_s > hbm / device.copy_tb_s:
        bound = L2
    return Cost(device.launch_us + slowest, bound, hbm, l2)


def matmul_rate(launch: Launch, device: Device) -> float:
    """TFLOP/s of a matmul or convolution of its dtype, with TF32 where torch would use it."""
    if launch.dtype == "float32":
        if launch.kind == "convolution":
            allowed = torch.backends.cudnn.allow_tf32
        else:
            allowed = torch.get_float32_matmul_precision() != "highest"
        return device.tflops["tf32" if allowed else "float32"]
    return device.tflops.get(launch.dtype, device.tflops["float32"])


def _again(launch: Launch, device: Device) -> float:
    """Microseconds that loops after the first take to read their row once more.

    It is mostly in the L1 cache still. Measured on an H200: rows of 8 kB cost a tenth more, those
    of 128 kB almost half, as much as if they came from the L2 cache.
    """
    if launch.kind != "reduction" or launch.passes < 2:
        return 0.0
    row_bytes = launch.bytes_in * launch.shape[-1] / max(prod(launch.shape), 1)
    rate = device.l1_tb_s if row_bytes <= _ROW_IN_L1 else device.l2_tb_s
    return (launch.passes - 1) * launch.bytes_in / rate / 1e6


class _Cache:
    """Which buffers the L2 cache still holds, by how much was touched since."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.touched = 0
        self.last: dict[tuple[int, str, str], int] = {}

    def read(self, launch: Launch, name: str, size: int) -> int:
        """Bytes of it that are found in the cache."""
        key = (launch.graph, launch.phase, name)
        since = self.touched - self.last[key] if key in self.last else None
        self.touch(launch, name, size)
        return size if since is not None and since + size <= self.capacity else 0

    def touch(self, launch: Launch, name: str, size: int) -> None:
        self.touched += size
        self.last[launch.graph, launch.phase, name] = self.touched


@dataclass(frozen=True)
class Totals:
    """Of a step. kernels: launches; host_us: what the CPU needs to launch them."""

    kernels: int
    bytes: int
    gpu_us: float
    host_us: float

    @property
    def step_us(self) -> float:
        """The slower of the two, as they overlap."""
        return max(self.gpu_us, self.host_us)


def totals(launches: Sequence[Launch], costs: Sequence[Cost], host_us: float) -> Totals:
    return Totals(
        len(launches),
        sum(launch.bytes for launch in launches),
        sum(cost.us for cost in costs),
        len(launches) * host_us,
    )
