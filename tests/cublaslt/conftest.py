import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from fake_layer import FakeLayer
from torch.utils import cpp_extension

from fusedcuda import _build, _toolchain

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cublaslt_header() -> Path:
    about = _toolchain.describe_torch(torch)
    found = _toolchain.find_cublaslt(about, _toolchain.find_cuda_home(about, []))
    if found is None or found.header is None:
        pytest.skip("needs cublasLt.h")
    return found.header


def _compile(source: Path, header: Path, folder: Path, options: Sequence[str] = ()) -> Path:
    """A library of one C++ file and the headers of csrc."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    home = _toolchain.find_cuda_home(_toolchain.describe_torch(torch), [])
    if compiler is None or home is None:
        pytest.skip("needs a C++ compiler and the headers of CUDA")
    library = folder / f"{source.stem}.so"
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [f"-I{_build.csrc_dir()}", f"-I{home / 'include'}"]
    command += ["-idirafter", str(header.parent), str(source), "-o", str(library), "-ldl"]
    command += options
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="session")
def fake_library(cublaslt_header: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    return _compile(HERE / "fake_cublaslt.cpp", cublaslt_header, folder)


@pytest.fixture(scope="session")
def entry_library(cublaslt_header: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compile(HERE / "entry.cpp", cublaslt_header, tmp_path_factory.mktemp("entry"))


@pytest.fixture(scope="session")
def torch_steps(cublaslt_header: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The steps that torch makes, for CPU tensors."""
    options = _build.host_flags([])
    options += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    options += [f"-L{path}" for path in cpp_extension.library_paths()]
    folder = tmp_path_factory.mktemp("torch")
    options += ["-ltorch_cpu", "-ltorch", "-lc10"]
    return ctypes.CDLL(str(_compile(HERE / "torch_steps.cpp", cublaslt_header, folder, options)))


@pytest.fixture(scope="session")
def libraries(fake_library: Path, entry_library: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    entry = ctypes.CDLL(str(entry_library))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDCUDA_CUBLASLT", str(fake_library))
        entry.version()  # looks the functions up, once
    return entry, ctypes.CDLL(str(fake_library))


@pytest.fixture
def layer(libraries: tuple[ctypes.CDLL, ctypes.CDLL]) -> Iterator[FakeLayer]:
    fake_layer = FakeLayer(*libraries)
    yield fake_layer
    fake_layer.close()
