import pytest
from emulator import CSRC, HERE, Emulator, build, find_compiler


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> Emulator:
    """The real kernels on the CPU; built once for these sources."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    folder = pytestconfig.cache.mkdir("emulation")
    return Emulator(build([CSRC / "kernels" / "pointwise.cu", HERE / "entry.cpp"], folder))
