"""What is compiled and with which flags: the one list that setup.py and the JIT build share.

Imports only the standard library, because setup.py reads it before torch is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# One word per family, the same stem in csrc/kernels, csrc/bindings, fusedcuda/ops, tests and bench.
FAMILIES = (
    "pointwise",
    "norm",
    "softmax",
    "cross_entropy",
    "rope",
    "linear_act",
    "dlrm",
    "lora",
    "gated_mlp",
    "linear_cross_entropy",
)

# Families whose bindings include cublasLt.h, which not every toolkit and torch comes with.
NEED_CUBLASLT = ("linear_act",)

# What an ahead-of-time build covers when no GPU is visible and TORCH_CUDA_ARCH_LIST is not set:
# every data-centre and desktop generation since Ampere, as far as the nvcc at hand knows it.
# 9.0+PTX lets the driver compile for what lies between Hopper and 12.0, 12.0+PTX for what follows.
DEFAULT_ARCHS = "8.0;8.6;8.9;9.0a;9.0+PTX;10.0;12.0+PTX"

# The oldest torch whose stable ABI the bindings use (2.10); it also makes any unstable torch header
# an error, so the macro doubles as a lint.
TORCH_TARGET_VERSION = "0x020a000000000000"

# Host code only checks arguments and launches: -O1 halves its compile time and costs nothing.
# Hidden symbols keep two versions of a family apart in one process (a kernel edited in a notebook).
_HOST_FLAGS = (
    "-O1",
    "-g0",
    "-std=c++17",
    "-fvisibility=hidden",
    "-DUSE_CUDA",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
)
_NVCC_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fvisibility=hidden")
# Ahead of time there is time for line tables, which profilers show beside the machine code. Just in
# time somebody waits: optimise with all cores (10.5 s instead of 26.7 on 16 slow ones).
_AOT_FLAGS = ("-lineinfo",)
_JIT_FLAGS = ("--split-compile=0",)

_BYTES_PER_JOB = 2 * 2**30  # one nvcc process with several architectures


class BuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says why and what to do."""


# ---- Sources -------------------------------------------------------------------------------------


def csrc_dir() -> Path:
    """The folder of the C++ sources: inside an installed package, or beside it in a checkout.

    FUSEDCUDA_CSRC names another one, for an experiment with a copy of the whole tree.
    """
    if override := os.environ.get("FUSEDCUDA_CSRC"):
        return Path(override).resolve()
    package = Path(__file__).resolve().parent
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def kernel_source(family: str) -> Path:
    """The CUDA source of a family: its kernels and launchers, or, where it has more, the first."""
    return csrc_dir() / "kernels" / f"{family}.cu"


def kernel_sources(family: str) -> tuple[Path, ...]:
    """The CUDA sources of a family: of many kernels they are in parts, compiled side by side.

    Every ``<family>_*.cu`` beside the first is a part.
    """
    first = kernel_source(family)
    return (first, *sorted(first.parent.glob(f"{family}_*.cu")))


def binding_source(family: str) -> Path:
    """The C++ source that connects the launchers of a family to torch."""
    return csrc_dir() / "bindings" / f"{family}.cpp"


def include_dirs(csrc: Path) -> tuple[Path, ...]:
    """What the sources in `csrc` name their headers relative to."""
    return (csrc / "kernels", csrc / "bindings")


def headers() -> list[Path]:
    """Every header of csrc: a change in any of them rebuilds."""
    return sorted(p for p in csrc_dir().rglob("*") if p.suffix in (".h", ".cuh"))


def sources_digest() -> str:
    """Identifies the state of all sources, to notice an extension built from older ones."""
    files = sorted(path for path in csrc_dir().rglob("*") if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def check_family(caller: str, family: str) -> None:
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{caller}: unknown kernel family {family!r}; there is {known}")


# ---- Architectures -------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Arch:
    """One entry of TORCH_CUDA_ARCH_LIST, such as 8.6, 9.0a or 9.0+PTX."""

    major: int
    minor: int
    suffix: str = ""  # "a": this architecture only; "f": its family
    ptx: bool = False  # also embed PTX, which the driver compiles for newer GPUs

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        return f"{self.major}{self.minor}"

    @property
    def sm(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    @property
    def capability(self) -> tuple[int, int]:
        return (self.major, self.minor)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability can run what this entry builds."""
        if self.suffix == "a":
            return capability == self.capability
        same_major = capability[0] == self.major and capability >= self.capability
        return same_major or (self.ptx and capability >= self.capability)


def parse_archs(text: str) -> list[Arch]:
    """Reads an architecture list in torch's spelling, and also sm_90, 90 and commas."""
    archs = []
    for word in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d)([af]?)(\+PTX)?", word, re.IGNORECASE)
        if not match:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={text!r}: {word!r} is not an architecture. Write compute "
                "capabilities separated by semicolons, e.g. TORCH_CUDA_ARCH_LIST='8.0;9.0a' "
                "(A100 8.0, RTX 4090 8.9, H100 and H200 9.0a, B200 10.0; +PTX for newer GPUs)"
            )
        major, minor, suffix, ptx = match.groups()
        archs.append(Arch(int(major), int(minor), suffix.lower(), bool(ptx)))
    return list(dict.fromkeys(archs))


def native_arch(capability: tuple[int, int]) -> Arch:
    """What to build for a GPU that is here: from Hopper on with its own special instructions."""
    return Arch(*capability, suffix="a" if capability >= (9, 0) else "")


def fit_to_nvcc(
    archs: Sequence[Arch], nvcc_archs: Iterable[str], nvcc: str
) -> tuple[list[Arch], str | None]:
    """Drops what this nvcc cannot build (`nvcc_archs`: what --list-gpu-code prints).

    One that is newer than all it knows becomes PTX of the newest, which the driver compiles.
    Returns the remaining list and a sentence about what was changed, or None.
    """
    known = {parse_archs(name)[0].capability for name in nvcc_archs}
    newest = max(known)
    kept = [arch for arch in archs if arch.capability in known]
    dropped = [arch for arch in archs if arch.capability not in known]
    if any(arch.capability > newest for arch in dropped):
        kept = [a for a in kept if a != Arch(*newest)] + [Arch(*newest, ptx=True)]
    names = ", ".join(a.sm for a in dropped)
    if not kept:
        raise BuildError(
            f"{nvcc} cannot build {names}: it knows {' '.join(sorted(nvcc_archs))}. "
            "Use a CUDA toolkit that supports this GPU, or set TORCH_CUDA_ARCH_LIST to another one"
        )
    note = (
        f"{nvcc} cannot build {names}; building {format_archs(kept)} instead" if dropped else None
    )
    return kept, note


def format_archs(archs: Iterable[Arch]) -> str:
    return ";".join(str(arch) for arch in archs)


# ---- Flags ---------------------------------------------------------------------------------------


def gencode_flags(archs: Sequence[Arch]) -> list[str]:
    """nvcc's -gencode flags. sm_90 is left out beside sm_90a: the same GPUs run both."""
    special = {arch.capability for arch in archs if arch.suffix == "a"}
    flags = []
    for arch in archs:
        virtual = f"compute_{arch.number}{arch.suffix}"
        if arch.suffix or arch.capability not in special:
            flags.append(f"-gencode=arch={virtual},code={arch.sm}")
        if arch.ptx:
            flags.append(f"-gencode=arch={virtual},code={virtual}")
    return flags


def nvcc_flags(archs: Sequence[Arch], *, jit: bool = False) -> list[str]:
    return [*_NVCC_FLAGS, *(_JIT_FLAGS if jit else _AOT_FLAGS), *gencode_flags(archs)]


def host_flags(archs: Sequence[Arch]) -> list[str]:
    """Flags of the C++ units; they embed the architectures for the "no kernel image" message."""
    return [*_HOST_FLAGS, f'-DFUSEDCUDA_ARCHS="{format_archs(archs)}"']


def aot_archs(requested: str | None, capabilities: Iterable[tuple[int, int]]) -> list[Arch]:
    """What an ahead-of-time build is for: the request, the GPUs here, or the default list."""
    if requested and requested != "native":
        return parse_archs(requested)
    visible = sorted(set(capabilities))
    if not visible:
        return parse_archs(DEFAULT_ARCHS)
    return [native_arch(c) for c in visible] + [replace(Arch(*visible[-1]), ptx=True)]


def jit_archs(requested: str | None, capabilities: Iterable[tuple[int, int]]) -> list[Arch]:
    """What a just-in-time build is for: the request, or exactly the GPUs that are here."""
    if requested and requested != "native":
        return parse_archs(requested)
    visible = sorted(set(capabilities))
    if not visible:
        raise BuildError(
            "no GPU is visible and TORCH_CUDA_ARCH_LIST is not set, so there is nothing to compile "
            "for. To compile anyway: export TORCH_CUDA_ARCH_LIST=9.0a (H100 and H200)"
        )
    return [native_arch(c) for c in visible]


# ---- Parallelism ---------------------------------------------------------------------------------


def max_jobs(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Parallel compilers that fit this machine; ninja sees neither container limits nor memory."""
    jobs = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        jobs = min(jobs, float(quota) / float(period))  # "max" is not a number: no limit
    except (OSError, ValueError):
        pass
    try:
        available = re.search(r"MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text())
    except OSError:
        available = None
    if available:
        jobs = min(jobs, int(available.group(1)) * 1024 / _BYTES_PER_JOB)
    return max(1, int(jobs))
