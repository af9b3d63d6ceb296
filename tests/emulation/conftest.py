import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from emulator import HERE, build, find_compiler
from norm_emulator import NormEmulator
from pointwise_emulator import Emulator

from fusedcuda import _build


@pytest.fixture(scope="session")
def build_library(pytestconfig: pytest.Config) -> Callable[..., Path]:
    """Builds sources with the emulation, unless the same have been built before."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    folder = pytestconfig.cache.mkdir("emulation")
    return functools.cache(lambda *sources: build(sources, folder))


@pytest.fixture(scope="session")
def build_family(build_library: Callable[..., Path]) -> Callable[[str], Path]:
    """The library of the real kernels of a family (see emulator.py)."""
    return lambda family: build_library(
        *_build.kernel_sources(family), HERE / f"entry_{family}.cpp"
    )


@pytest.fixture(scope="session")
def emulator(build_family: Callable[[str], Path]) -> Emulator:
    return Emulator(build_family("pointwise"))


@pytest.fixture
def norm(build_family: Callable[[str], Path]) -> NormEmulator:
    return NormEmulator(build_family("norm"))
