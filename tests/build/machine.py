"""A made-up machine for tests of the build: stub compilers, an empty environment, a private cache.

The stub nvcc compiles the toy kernel as C++, so that a build takes a moment and needs no toolkit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import toy_family

from fusedcuda import _toolchain

ROOT = Path(__file__).parent.parent.parent

_NVCC = """\
#!{python}
import os, subprocess, sys, time
arguments = sys.argv[1:]
if "--version" in arguments:
    print("Cuda compilation tools, release {version}, V{version}.88")
elif "--list-gpu-code" in arguments:
    print("\\n".join({archs!r}.split()))
elif "--dryrun" in arguments:
    print("#$ TOP={home}/bin/..", file=sys.stderr)
else:
    with open({log!r}, "a") as log:
        print(os.getpid(), "MAX_JOBS=" + os.environ.get("MAX_JOBS", ""), *arguments, file=log)
    output = arguments[arguments.index("-o") + 1]
    source = next(a for a in arguments if a.endswith(".cu"))
    includes = [a for a in arguments if a.startswith("-I")]
{body}
    command = ["g++", "-x", "c++", "-D__global__=", "-fPIC", "-c", source, "-o", output, *includes]
    command += ["-MD", "-MF", arguments[arguments.index("-MF") + 1]]  # tells ninja the headers
    sys.exit(subprocess.run(command).returncode)
"""


class Machine:
    """A CUDA toolkit, sources and a cache under one folder; the environment points to them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        self.home = root / "cuda"
        self.cache = root / "cache"
        self.bin = root / "bin"
        self.bin.mkdir(parents=True)
        self.csrc = toy_family.write(root / "csrc")
        for name in list(os.environ):
            if name.startswith(("CUDA_", "TORCH_", "FUSEDCUDA_", "XDG_")):
                monkeypatch.delenv(name)
        for name in ("CONDA_PREFIX", "CC", "CXX", "MAX_JOBS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("LC_ALL", "C")  # plain quotes in compiler messages
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        monkeypatch.setenv("CUDA_HOME", str(self.home))
        monkeypatch.setenv("FUSEDCUDA_CSRC", str(self.csrc))
        monkeypatch.setenv("FUSEDCUDA_CACHE_DIR", str(self.cache))
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
        monkeypatch.setattr(_toolchain, "DEFAULT_CUDA_HOME", root / "no-such-toolkit")
        self.install_nvcc()

    def install_nvcc(
        self,
        home: Path | None = None,
        version: str = torch.version.cuda or "13.0",
        archs: str = "sm_80 sm_86 sm_89 sm_90 sm_100 sm_120",
        body: str = "",
    ) -> Path:
        """A toolkit with headers; `body` runs before the stub compiles."""
        home = home or self.home
        (home / "include").mkdir(parents=True, exist_ok=True)
        (home / "include" / "cuda_runtime.h").touch()
        text = _NVCC.format(
            python=sys.executable,
            version=version,
            archs=archs,
            home=home,
            log=str(self.root / "nvcc.log"),
            body=textwrap.indent(textwrap.dedent(body), "    "),
        )
        return self.script(home / "bin" / "nvcc", text)

    def remove_nvcc(self) -> None:
        """No toolkit anywhere, also not the one that pip may have installed beside torch."""
        self.monkeypatch.delenv("CUDA_HOME")
        nowhere = property(lambda torch_info: self.root / "no-such-toolkit")
        self.monkeypatch.setattr(_toolchain.TorchInfo, "pip_toolkit", nowhere)

    def script(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def compilations(self) -> list[str]:
        """The command lines with which the stub nvcc compiled something."""
        log = self.root / "nvcc.log"
        return log.read_text().splitlines() if log.exists() else []

    def python(self, code: str, folder: Path = ROOT) -> subprocess.Popen[str]:
        """Another process on this machine, with `fusedcuda` and the toy op's schema at hand."""
        prologue = """
            import torch, fusedcuda
            from fusedcuda import _jit
            _toy = torch.library.Library("fusedcuda_toy", "DEF")
            _toy.define("answer() -> int")
            answer = torch.ops.fusedcuda_toy.answer
        """
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(prologue) + textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )


def result(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err
