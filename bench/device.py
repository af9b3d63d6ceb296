"""What a result depends on besides the code: GPU, clocks, versions, commit. Only ever read."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

DATASHEET_TB_PER_S = {"h200": 4.8}

THROTTLE_REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "software thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
}


def short_name(gpu: str) -> str:
    """`NVIDIA A100-SXM4-80GB` -> a100, `NVIDIA GeForce RTX 4090` -> rtx4090."""
    words = [w for w in gpu.split() if w.lower() not in {"nvidia", "tesla", "geforce"}]
    model = []
    for word in words:
        if re.fullmatch(r"\d+GB|HBM\w*|PCIe|SXM\d*|NVL", word):
            break
        model.append(word.split("-")[0])
    return re.sub(r"[^a-z0-9]", "", "".join(model).lower()) or "gpu"


def throttle_names(bits: int) -> list[str]:
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def gpu_state() -> dict[str, object]:
    """Clocks, power, temperature and throttle reasons by NVML; empty where pynvml is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties().uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "mem_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_w": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "throttle": throttle_names(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
    except Exception as error:  # clocks are a note beside the numbers: never a reason to stop
        return {"unavailable": f"{type(error).__name__}: {error}"}


def commit() -> str:
    """FUSEDCUDA_COMMIT where the measured copy has no repository, else git's short hash."""
    if given := os.environ.get("FUSEDCUDA_COMMIT"):
        return given
    try:
        here = Path(__file__).parent
        command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def fusedcuda_version() -> str:
    try:
        import fusedcuda

        return fusedcuda.__version__
    except Exception as error:
        return f"not importable: {type(error).__name__}"


def environment(gpu: str, l2_bytes: int) -> dict[str, object]:
    return {
        "gpu": gpu,
        "l2_mb": round(l2_bytes / 1e6, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": package_version("triton"),
        "liger": package_version("liger-kernel"),
        "datasheet_tb_per_s": DATASHEET_TB_PER_S.get(short_name(gpu)),
    }
