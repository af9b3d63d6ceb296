"""Finds what a build needs: the CUDA toolkit, a C++ compiler, ninja, and torch's cuBLASLt.

Every finder takes what it looks at as an argument or from os.environ, so that tests can give it a
made-up machine. torch is imported by `import_cpp_extension` only.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ._build import NEED_CUBLASLT, BuildError, max_jobs

DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
CUDA_TORCH_COMMAND = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
)


@dataclass(frozen=True)
class TorchInfo:
    """The facts about the installed torch that a build depends on."""

    version: str
    cuda: str | None  # "13.0"; None for a CPU-only build
    site_packages: Path

    @property
    def cuda_major(self) -> str:
        return (self.cuda or "").split(".")[0]

    @property
    def pip_toolkit(self) -> Path:
        """Where NVIDIA's pip packages put the toolkit parts that torch depends on."""
        return self.site_packages / "nvidia" / f"cu{self.cuda_major}"

    def nvcc_command(self) -> str:
        """The command that installs a matching nvcc with pip."""
        return f"pip install 'cuda-toolkit[nvcc,cccl]=={self.cuda}.*'"


def describe_torch(torch: ModuleType) -> TorchInfo:
    return TorchInfo(
        version=torch.__version__,
        cuda=torch.version.cuda,
        site_packages=Path(torch.__file__ or "").resolve().parent.parent,
    )


def visible_capabilities(torch: ModuleType) -> list[tuple[int, int]]:
    """The compute capability of each GPU that this process can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_capability(index) for index in range(count)]


@dataclass(frozen=True)
class Toolchain:
    """A compiler set that can build the kernels."""

    cuda_home: Path
    nvcc_release: str  # such as 13.0.88
    nvcc_version: tuple[int, int]
    nvcc_archs: tuple[str, ...]
    cxx: str
    cxx_version: str
    ninja_dir: Path
    cublaslt: CublasLt | None = None
    notes: tuple[str, ...] = ()  # worth telling the user, but no obstacle

    @property
    def nvcc(self) -> Path:
        return self.cuda_home / "bin" / "nvcc"

    @property
    def include_flags(self) -> list[str]:
        """Where host units find cublasLt.h. pip's folder has all of CUDA's headers: it goes last,
        so that it does not shadow those of the toolkit."""
        if self.cublaslt is None or self.cublaslt.header is None:
            return []
        return ["-idirafter", str(self.cublaslt.header.parent)]

    def missing_for(self, family: str) -> str | None:
        """What a family needs beyond a compiler and is not here, or None."""
        if family not in NEED_CUBLASLT:
            return None
        if self.cublaslt is None:
            return "cuBLASLt was not found: pip install nvidia-cublas"
        return self.cublaslt.problem


def find_toolchain(torch: TorchInfo) -> Toolchain:
    """Everything a build needs, or a BuildError that names what is missing and the remedy."""
    if sys.platform != "linux":
        raise BuildError(
            f"the CUDA kernels build on Linux only, and this is {sys.platform}. "
            "The CPU reference of every op works here; on Windows, use WSL2 for the kernels"
        )
    if torch.cuda is None:
        raise BuildError(
            f"torch {torch.version} is a CPU-only build. To get CUDA: {CUDA_TORCH_COMMAND}"
        )
    notes: list[str] = []
    home = require_cuda_home(torch, notes)
    release, version = nvcc_version(home / "bin" / "nvcc")
    check_versions(home / "bin" / "nvcc", version, torch, notes)
    cxx, cxx_version = find_cxx()
    return Toolchain(
        cuda_home=home,
        nvcc_release=release,
        nvcc_version=version,
        nvcc_archs=nvcc_archs(home),
        cxx=cxx,
        cxx_version=cxx_version,
        ninja_dir=find_ninja(),
        cublaslt=find_cublaslt(torch, home),
        notes=tuple(notes),
    )


# ---- nvcc ----------------------------------------------------------------------------------------


def find_cuda_home(torch: TorchInfo, notes: list[str]) -> Path | None:
    """The toolkit that nvcc belongs to; a CUDA_HOME that is not one is noted and passed over."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            if is_toolkit(Path(value)):
                return Path(os.path.realpath(value))
            notes.append(
                f"{variable}={value!r} is not a CUDA toolkit (it lacks bin/nvcc or "
                "include/cuda_runtime.h); looking elsewhere"
            )
    for home in _usual_places(torch):
        if is_toolkit(home):
            return Path(os.path.realpath(home))
    return None


def require_cuda_home(torch: TorchInfo, notes: list[str]) -> Path:
    home = find_cuda_home(torch, notes)
    if home is None:
        raise BuildError(
            "nvcc was not found (looked in CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, "
            f"CONDA_PREFIX and {torch.pip_toolkit}). Install the CUDA {torch.cuda} toolkit and set "
            f"CUDA_HOME, or: {torch.nvcc_command()}"
        )
    return home


def _usual_places(torch: TorchInfo) -> Iterator[Path]:
    if nvcc := shutil.which("nvcc"):
        yield Path(os.path.realpath(nvcc)).parent.parent
        # What is on PATH may be a wrapper script elsewhere: the real nvcc says where it lives.
        dryrun = _output([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull])
        if top := re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE):
            yield Path(top.group(1))
    yield DEFAULT_CUDA_HOME
    if prefix := os.environ.get("CONDA_PREFIX"):
        yield Path(prefix)
    yield torch.pip_toolkit


def is_toolkit(home: Path) -> bool:
    """nvcc alone is not enough: it may be a wrapper, or its headers may be missing (conda)."""
    include = (home / "include", home / "targets" / "x86_64-linux" / "include")
    has_headers = any((folder / "cuda_runtime.h").is_file() for folder in include)
    return has_headers and os.access(home / "bin" / "nvcc", os.X_OK)


def nvcc_version(nvcc: Path) -> tuple[str, tuple[int, int]]:
    text = _output([str(nvcc), "--version"]).strip()
    release = re.search(r"release (\d+)\.(\d+)(?:, V(\S+))?", text)
    if not release:
        raise BuildError(f"{nvcc} --version does not name a release; it printed: {text[:200]!r}")
    major, minor, full = release.groups()
    return full or f"{major}.{minor}", (int(major), int(minor))


def nvcc_archs(home: Path) -> tuple[str, ...]:
    """What this nvcc can build for, such as sm_80 and sm_90."""
    return tuple(_output([str(home / "bin" / "nvcc"), "--list-gpu-code"]).split())


def check_versions(
    nvcc: Path, version: tuple[int, int], torch: TorchInfo, notes: list[str]
) -> None:
    """CUDA promises compatibility within a major version: another major is an error."""
    found = "{}.{}".format(*version)
    if str(version[0]) != torch.cuda_major:
        raise BuildError(
            f"{nvcc} is CUDA {found}, but torch {torch.version} is built with CUDA {torch.cuda}: "
            "the major versions must agree. Point CUDA_HOME to a CUDA "
            f"{torch.cuda_major}.x toolkit, or: {torch.nvcc_command()}"
        )
    if found != torch.cuda:
        notes.append(f"nvcc is CUDA {found} and torch's CUDA is {torch.cuda}; the same major works")


# ---- Host compiler and ninja ---------------------------------------------------------------------


def find_cxx() -> tuple[str, str]:
    """The C++ compiler that torch's build uses (CXX, else c++) and its version."""
    cxx = os.environ.get("CXX", "c++")
    if not shutil.which(cxx):
        raise BuildError(f"no C++ compiler ({cxx} was not found): apt-get install g++, or set CXX")
    return cxx, _output([cxx, "-dumpfullversion", "-dumpversion"]).strip()


def host_compiler_env(
    toolchain: Toolchain, gcc_limits: Mapping[str, tuple[tuple, tuple]]
) -> dict[str, str]:
    """CC and CXX of an older gcc where the default one is too new for nvcc; empty where it is not.

    `gcc_limits` is torch's table: CUDA version -> (oldest gcc, first gcc that is too new).
    """
    cuda = "{}.{}".format(*toolchain.nvcc_version)
    is_gcc = "clang" not in _output([toolchain.cxx, "--version"])
    version = re.match(r"\d+", toolchain.cxx_version)
    if cuda not in gcc_limits or not is_gcc or not version:
        return {}
    first_too_new = gcc_limits[cuda][1]
    newest = first_too_new[0] - (1 if len(first_too_new) < 2 or first_too_new[1] == 0 else 0)
    if int(version.group()) <= newest:
        return {}
    for major in range(newest, 8, -1):
        if shutil.which(f"g++-{major}") and shutil.which(f"gcc-{major}"):
            return {"CC": f"gcc-{major}", "CXX": f"g++-{major}"}
    raise BuildError(
        f"g++ {toolchain.cxx_version} is newer than CUDA {cuda} supports (up to {newest}): "
        f"apt-get install g++-{newest} && export CC=gcc-{newest} CXX=g++-{newest}"
    )


def find_ninja() -> Path:
    """The folder of ninja: pip's package works even where the environment's bin is not on PATH."""
    try:
        import ninja

        return Path(ninja.BIN_DIR)
    except (ImportError, AttributeError):
        pass
    if found := shutil.which("ninja"):
        return Path(found).parent
    raise BuildError("ninja was not found: pip install ninja")


# ---- Setting up torch's build --------------------------------------------------------------------


@contextmanager
def build_environment(
    toolchain: Toolchain, torch: TorchInfo, cpp_extension: ModuleType
) -> Iterator[list[str]]:
    """Points torch's build machinery to this toolchain; yields the linker flags it needs for that.

    torch splits paths that contain a space, and pip's toolkit has libcudart.so.13 but no
    libcudart.so: links in a temporary folder help in both cases.
    """
    roomy = (tempfile.gettempdir(), "/tmp", "/var/tmp")
    parent = next((p for p in roomy if " " not in p), None)
    with tempfile.TemporaryDirectory(prefix="fusedcuda-", dir=parent) as name:
        links = Path(name)
        runtime = _cuda_runtime(toolchain.cuda_home, torch)
        if runtime:
            (links / "libcudart.so").symlink_to(runtime)
        environment = {
            "PATH": f"{toolchain.ninja_dir}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "MAX_JOBS": os.environ.get("MAX_JOBS") or str(max_jobs()),
            **host_compiler_env(toolchain, cpp_extension.CUDA_GCC_VERSIONS),
        }
        with (
            environment_variables(environment),
            attributes(
                cpp_extension,
                CUDA_HOME=_without_space(toolchain.cuda_home, links / "cuda"),
                TORCH_LIB_PATH=_without_space(torch.site_packages / "torch/lib", links / "torch"),
            ),
        ):
            yield [f"-L{links}"]


def import_cpp_extension() -> ModuleType:
    """torch's build machinery, without its remarks about a CUDA_HOME that is not used here."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return importlib.import_module("torch.utils.cpp_extension")


def _cuda_runtime(home: Path, torch: TorchInfo) -> Path | None:
    name = f"libcudart.so.{torch.cuda_major}"
    toolkit = (home / "lib64", home / "lib", home / "targets/x86_64-linux/lib")
    folders = (*toolkit, torch.pip_toolkit / "lib")
    return next((f / name for f in folders if (f / name).exists()), None)


def _without_space(path: Path, link: Path) -> str:
    if " " not in str(path):
        return str(path)
    link.symlink_to(path)
    return str(link)


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the time of a `with` block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def attributes(target: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of a module or object for the time of a `with` block."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


# ---- cuBLASLt ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CublasLt:
    """The cuBLASLt that torch uses, and the header that describes it."""

    library: Path
    header: Path | None

    @property
    def problem(self) -> str | None:
        if self.header:
            return None
        return (
            f"found {self.library} but no cublasLt.h: pip install nvidia-cublas, or "
            "conda install libcublas-dev"
        )


def find_cublaslt(
    torch: TorchInfo, cuda_home: Path | None, maps: Path = Path("/proc/self/maps")
) -> CublasLt | None:
    """The copy that torch has loaded into this process, else the one it would load."""
    loaded = re.findall(r"(/\S.*/libcublasLt\.so\.\d+\S*)$", maps.read_text(), re.MULTILINE)
    name = f"libcublasLt.so.{torch.cuda_major}"
    pip_folders = (torch.pip_toolkit, torch.site_packages / "nvidia" / "cublas")
    toolkits = [home for home in (cuda_home, os.environ.get("CONDA_PREFIX")) if home]
    places = [p / "lib" / name for p in pip_folders]
    places += [Path(home) / lib / name for home in toolkits for lib in ("lib64", "lib")]
    library = next((p for p in map(Path, [*loaded, *places]) if p.exists()), None)
    if library is None:
        return None
    beside = library.parent.parent
    includes = [Path(home) / "include" for home in toolkits]
    includes += [Path(home) / "targets" / "x86_64-linux" / "include" for home in toolkits]
    includes += [beside / "include", *(p / "include" for p in pip_folders)]
    header = next((i / "cublasLt.h" for i in includes if (i / "cublasLt.h").is_file()), None)
    return CublasLt(library, header)


def _output(command: list[str]) -> str:
    """What a tool prints on either stream; a tool that cannot be started prints nothing."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout + run.stderr
