"""The GPUs that the report can predict for, with the numbers that its model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """A GPU as the cost model sees it.

    Rates are what kernels reach, measured where a figure was available, not the data sheet's.

    copy_tb_s:    reads plus writes of a device-to-device copy, TB/s
    l2_tb_s:      the same for data that stays in the L2 cache
    l1_tb_s:      the same for rows that a block reads twice in a row
    l2_mb:        of the L2 cache, what a kernel's output can count on
    tflops:       dense matmul by dtype; float32 without TF32
    special_t_s:  10^12 special-function evaluations (exp, rsqrt, ...) per second
    launch_us:    what a kernel takes beside its work, in a CUDA graph
    host_us:      host time of one launch by compiled code outside of a CUDA graph
    """

    key: str
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_gb: int
    l2_mb: float
    copy_tb_s: float
    l2_tb_s: float
    l1_tb_s: float
    tflops: dict[str, float]
    special_t_s: float
    launch_us: float
    host_us: float
    eager_host_us: float
    shared_bytes: int = 232448

    def properties(self) -> dict[str, Any]:
        """What torch.cuda.get_device_properties would say."""
        return {
            "name": self.name,
            "major": self.capability[0],
            "minor": self.capability[1],
            "multi_processor_count": self.multiprocessors,
            "total_memory": self.memory_gb << 30,
            "warp_size": 32,
            "regs_per_multiprocessor": 65536,
            "max_threads_per_multi_processor": 2048,
            "max_threads_per_block": 1024,
            "shared_memory_per_block": 49152,
            "shared_memory_per_block_optin": self.shared_bytes,
            "shared_memory_per_multiprocessor": self.shared_bytes + 1024,
            "L2_cache_size": int(self.l2_mb * 1e6),
            "gcnArchName": "",
        }

    def hints(self) -> dict[str, Any]:
        """What Inductor writes into its kernels about the GPU."""
        major, minor = self.capability
        return {
            "type": "cuda",
            "index": 0,
            "multi_processor_count": self.multiprocessors,
            "cc": 10 * major + minor,
            "major": major,
            "regs_per_multiprocessor": 65536,
            "max_threads_per_multi_processor": 2048,
            "max_threads_per_block": 1024,
            "warp_size": 32,
        }


H200 = Device(
    key="h200",
    name="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    memory_gb=141,
    l2_mb=50.0,
    copy_tb_s=4.25,  # measured: 4.25 to 4.30
    l2_tb_s=7.0,
    l1_tb_s=20.0,
    tflops={"float64": 55.0, "float32": 50.0, "tf32": 350.0, "float16": 700.0, "bfloat16": 700.0},
    special_t_s=132 * 16 * 1.755e9 / 1e12,  # 16 a clock and multiprocessor
    launch_us=1.5,
    host_us=6.0,
    eager_host_us=8.0,
)

DEVICES = {device.key: device for device in (H200,)}
