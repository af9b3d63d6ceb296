"""Fixtures shared by every test: the device, the seed, and what to skip where there is no GPU."""

import os
import random
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch

SEED_VARIABLE = "FUSEDCUDA_TEST_SEED"


def pytest_configure(config: pytest.Config) -> None:
    # In the environment, so that the workers of pytest-xdist draw the same inputs.
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**31)))


def pytest_report_header(config: pytest.Config) -> str:
    return f"inputs are drawn from {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    wanted = 1 if item.get_closest_marker("gpu") else 0
    if marker := item.get_closest_marker("gpus"):
        wanted = marker.args[0]
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} CUDA device(s), found {torch.cuda.device_count()}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def fresh_inputs(request: pytest.FixtureRequest) -> None:
    """New random inputs in every run, the same ones for a test that is repeated with its seed."""
    seed = int(os.environ[SEED_VARIABLE])
    print(f"to repeat: {SEED_VARIABLE}={seed} pytest '{request.node.nodeid}'")
    torch.manual_seed(seed ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def deterministic_algorithms() -> Iterator[Callable[[], None]]:
    """Called in a test, it turns torch's deterministic algorithms on until the test's end."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)
