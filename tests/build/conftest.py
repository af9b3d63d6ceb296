"""Fixtures for the tests of finding compilers, building, caching and packaging."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machine import ROOT, Machine

from fusedcuda import _build, _jit, _toolchain
from fusedcuda._build import BuildError
from fusedcuda._toolchain import TorchInfo


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def about(tmp_path: Path) -> TorchInfo:
    """A torch for CUDA 13.0 in an otherwise empty site-packages."""
    return TorchInfo("2.11.0", "13.0", tmp_path / "site-packages")


def missing_toolchain() -> str | None:
    """Why no CUDA compiler can be used on this machine, or None."""
    try:
        _toolchain.find_toolchain(_toolchain.describe_torch(torch))
    except BuildError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real extension for Hopper: the installed one if of these sources, else a new one."""
    info = _jit.build_info()
    current = info.get("sources") == _build.sources_digest() and "9.0a" in info.get("archs", "")
    if current and _jit.PREBUILT.exists():
        return _jit.PREBUILT
    if reason := missing_toolchain():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("extension")
    command = ["build_ext", f"--build-lib={folder}", f"--build-temp={folder / 'objects'}"]
    subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=ROOT,
        env={**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0a", "FUSEDCUDA_BUILD": "1"},
        check=True,
    )
    return folder / "fusedcuda" / "_C.abi3.so"


@pytest.fixture
def real_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """The compilers and sources of this machine, for Hopper, with an empty cache."""
    if reason := missing_toolchain():
        pytest.skip(reason)
    before = dict(os.environ)
    machine = Machine(tmp_path, monkeypatch)
    monkeypatch.setattr(_toolchain, "DEFAULT_CUDA_HOME", Path("/usr/local/cuda"))
    monkeypatch.delenv("FUSEDCUDA_CSRC")
    monkeypatch.delenv("CUDA_HOME")
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "CC", "CXX"):
        if name in before:
            monkeypatch.setenv(name, before[name])
    return machine
