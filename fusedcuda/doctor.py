"""`python -m fusedcuda doctor`: what is here, what is missing, and the command that fixes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from . import _build, _cache, _jit, _toolchain
from ._build import BuildError

Status = Literal["ok", "note", "problem"]

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Check:
    """One line of the report; `fix` is a command or an instruction."""

    name: str
    status: Status
    detail: str
    fix: str | None = None


@dataclass(frozen=True)
class Report:
    """What the doctor found. Prints as a table; `ok` is False if CUDA tensors cannot be used."""

    checks: tuple[Check, ...]
    verdict: str

    @property
    def ok(self) -> bool:
        return all(check.status != "problem" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "checks": [asdict(check) for check in self.checks],
        }

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            lines.append(f"{check.status:8} {check.name:14} {check.detail}")
            if check.fix:
                lines.append(f"{'':8} {'':14} -> {check.fix}")
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__


def doctor() -> Report:
    """Examines GPU, torch, compilers, the built extension and the cache; starts no compilation."""
    about = _toolchain.describe_torch(torch)
    capabilities = _toolchain.visible_capabilities(torch)
    extension = _extension(capabilities)
    # Without a GPU, or with kernels already built, a missing compiler stops nothing.
    compiler_needed = bool(capabilities) and extension.status != "ok"
    checks = [
        _gpu(about, capabilities),
        _torch(about, capabilities),
        extension,
        *_compilers(about, "problem" if compiler_needed else "note"),
        _architectures(about, capabilities, "problem" if compiler_needed else "note"),
        _cublaslt(about),
        _cache_folder("problem" if compiler_needed else "note"),
    ]
    return Report(tuple(checks), _verdict(checks, capabilities, extension))


def _verdict(checks: list[Check], capabilities: list[tuple[int, int]], extension: Check) -> str:
    if any(check.status == "problem" for check in checks):
        return "CUDA tensors cannot be used until the problems above are fixed."
    if not capabilities:
        return "No GPU is usable here: every op runs its CPU reference."
    if extension.status == "ok":
        return "The CUDA kernels are built and ready."
    return "The CUDA kernels will be compiled at their first use (up to a minute each, once)."


def _gpu(about: _toolchain.TorchInfo, capabilities: list[tuple[int, int]]) -> Check:
    if capabilities:
        gpus = [torch.cuda.get_device_properties(i) for i in range(len(capabilities))]
        names = [f"{gpu.name} (sm_{gpu.major}{gpu.minor})" for gpu in gpus]
        return Check("GPU", "ok", ", ".join(names))
    if not _NVIDIA_DRIVER.exists():
        return Check("GPU", "note", "none (no NVIDIA driver is loaded)")
    if about.cuda is None:
        return Check("GPU", "problem", "an NVIDIA driver is loaded, but this torch has no CUDA")
    return Check(
        "GPU",
        "problem",
        f"an NVIDIA driver is loaded, but torch finds no GPU: {_cuda_init_error()}",
        "nvidia-smi  # shows whether the driver works; in a container: docker run --gpus all",
    )


def _cuda_init_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else "it reports 0 devices"


def _torch(about: _toolchain.TorchInfo, capabilities: list[tuple[int, int]]) -> Check:
    place = about.site_packages / "torch"
    if about.cuda:
        return Check("torch", "ok", f"{about.version} with CUDA {about.cuda}, in {place}")
    detail = f"{about.version} without CUDA, in {place}"
    if _NVIDIA_DRIVER.exists():
        return Check("torch", "problem", detail, _toolchain.CUDA_TORCH_COMMAND)
    return Check("torch", "note", detail)


def _extension(capabilities: list[tuple[int, int]]) -> Check:
    """The ahead-of-time extension: loaded and right for these GPUs, or why not."""
    info = _jit.build_info()
    if _jit.prebuilt.error:
        return Check("extension", "note", _jit.prebuilt.error, _reinstall())
    if not _jit.prebuilt.families:
        reason = info.get("reason", "no build was tried")
        return Check("extension", "note", f"not built at installation ({reason})", _reinstall())
    built = f"built for {info['archs']} with nvcc {info['nvcc']}, torch {info['torch']}"
    archs = _build.parse_archs(info["archs"])
    for capability in capabilities:
        if not any(arch.runs_on(capability) for arch in archs):
            missing = _build.native_arch(capability)
            return Check(
                "extension",
                "problem",
                f"{built}: none of it runs on this GPU (sm_{missing.number})",
                f"TORCH_CUDA_ARCH_LIST={missing} {_reinstall()}",
            )
    if info["sources"] != _build.sources_digest():
        return Check("extension", "ok", f"{built}, from older sources than now", _reinstall())
    return Check("extension", "ok", built)


def _reinstall() -> str:
    root = Path(__file__).resolve().parent.parent
    checkout = f"-e '{root}'" if (root / "setup.py").exists() else "--force-reinstall ."
    return f"pip install --no-build-isolation --no-cache-dir --no-deps {checkout}"


def _compilers(about: _toolchain.TorchInfo, if_missing: Status) -> Iterator[Check]:
    """nvcc, the C++ compiler and ninja, each by itself so that all that is missing shows."""
    notes: list[str] = []

    def nvcc() -> str:
        home = _toolchain.require_cuda_home(about, notes)
        release, version = _toolchain.nvcc_version(home / "bin" / "nvcc")
        _toolchain.check_versions(home / "bin" / "nvcc", version, about, notes)
        return f"CUDA {release}, {home / 'bin' / 'nvcc'}"

    def cxx() -> str:
        return " ".join(_toolchain.find_cxx())

    yield _attempt("nvcc", nvcc, if_missing)
    for note in notes:
        yield Check("nvcc", "note", note)
    yield _attempt("C++ compiler", cxx, if_missing)
    yield _attempt("ninja", lambda: str(_toolchain.find_ninja() / "ninja"), if_missing)


def _architectures(
    about: _toolchain.TorchInfo, capabilities: list[tuple[int, int]], if_missing: Status
) -> Check:
    requested = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not requested and not capabilities:
        return Check("architectures", "note", "nothing to compile for: no GPU")

    def archs() -> str:
        chosen, changed = _build.jit_archs(requested, capabilities), None
        if home := _toolchain.find_cuda_home(about, []):
            chosen, changed = _build.fit_to_nvcc(chosen, _toolchain.nvcc_archs(home), "this nvcc")
        origin = "TORCH_CUDA_ARCH_LIST" if requested else "the GPUs here"
        return changed or f"{_build.format_archs(chosen)} (from {origin})"

    return _attempt("architectures", archs, if_missing)


def _cublaslt(about: _toolchain.TorchInfo) -> Check:
    home = _toolchain.find_cuda_home(about, [])
    found = _toolchain.find_cublaslt(about, home)
    if found is None:
        return Check(
            "cuBLASLt", "note", "not found; linear_act needs it: pip install nvidia-cublas"
        )
    if found.problem:
        return Check("cuBLASLt", "note", f"{found.problem} (for linear_act)")
    return Check("cuBLASLt", "ok", f"{found.library}, header {found.header}")


def _cache_folder(if_unusable: Status) -> Check:
    return _attempt("cache", lambda: _cache.describe(_cache.cache_root()), if_unusable)


def _attempt(name: str, examine: Callable[[], str], if_missing: Status) -> Check:
    try:
        return Check(name, "ok", examine())
    except BuildError as error:
        return Check(name, if_missing, str(error))
