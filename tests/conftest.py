"""Fixtures shared by every test: the device, the seed, and what to skip where there is no GPU."""

import gc
import os
import random
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from reference import need_gpu_memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusedcuda
from fusedcuda import _jit, _toolchain

SEED_VARIABLE = "FUSEDCUDA_TEST_SEED"


def pytest_configure(config: pytest.Config) -> None:
    # In the environment, so that the workers of pytest-xdist draw the same inputs.
    if os.environ.setdefault(SEED_VARIABLE, "0") == "random":
        os.environ[SEED_VARIABLE] = str(random.SystemRandom().randrange(2**31))
    # Each worker would start a thread for every core.
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))


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
    """A test draws the same inputs whichever tests run before it; other ones for another seed."""
    seed = int(os.environ[SEED_VARIABLE])
    print(f"to repeat: {SEED_VARIABLE}={seed} pytest '{request.node.nodeid}'")
    torch.manual_seed(seed ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def deterministic_algorithms() -> Iterator[Callable[[], None]]:
    """Called in a test, it turns torch's deterministic algorithms on until the test's end."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def load_family() -> Callable[[str], None]:
    """Loads a family, prebuilt or compiled now; for an H100 or H200 where no GPU is visible."""

    def load(family: str) -> None:
        toolkit = _toolchain.find_cuda_home(_toolchain.describe_torch(torch), [])
        if toolkit is None and not _jit.PREBUILT.exists():
            pytest.skip("neither compiled kernels nor a CUDA compiler")
        with pytest.MonkeyPatch.context() as environment:
            if not torch.cuda.is_available():
                environment.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
            fusedcuda.load(family)

    return load


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of one process; enough to be handed a DTensor."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("mesh") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def memory() -> Iterator[Callable[[float], None]]:
    """Skips where the card lacks the memory, and gives it back after the test."""
    yield need_gpu_memory
    gc.collect()
    torch.cuda.empty_cache()
