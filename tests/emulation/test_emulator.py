"""The emulator itself: what the tests of the kernels rely on must be found when it is there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from comparison import integers
from emulator import HERE, EmulationError, Emulator, GuardedStorage, build

Run = Callable[..., list[float]]


@pytest.fixture(scope="module")
def run(emulator: Emulator, pytestconfig: pytest.Config) -> Run:
    """Runs a kernel of broken_kernels.cu; raises EmulationError with what the emulator found."""
    folder = pytestconfig.cache.mkdir("emulation")
    library = ctypes.CDLL(str(build([HERE / "broken_kernels.cu"], folder)))

    def run(name: str, descending: bool = False) -> list[float]:
        data = (ctypes.c_float * 64)()
        error = ctypes.create_string_buffer(1000)
        library.run_kernel(name.encode(), descending, data, error)
        if error.value:
            raise EmulationError(error.value.decode())
        return list(data)

    return run


def test_a_correct_kernel(run: Run) -> None:
    """Blocks run twice, the second on the results of the first; the order makes no difference."""
    values = torch.arange(64.0)
    for _ in range(2):
        values = values.flip(0) + values.view(2, 32).sum(1).repeat_interleave(32)
    assert run("correct") == run("correct", descending=True) == values.tolist()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("reads_past_the_end", r"thread \(63, 0, 0\) touches memory outside of every tensor"),
        ("writes_before_the_start", r"thread \(0, 0, 0\) touches memory outside of every tensor"),
        ("misaligned_vector", r"thread \(2, 0, 0\) has undefined behaviour"),
        ("index_past_an_array", r"thread \(60, 0, 0\) has undefined behaviour"),
        (
            "barrier_in_a_branch",
            r"thread \(5, 0, 0\) has ended.*\(6, 0, 0\) waits at the barrier",
        ),
        (
            "shuffle_in_a_branch",
            r"\(39, 0, 0\) waits at the shuffle.*\(40, 0, 0\) has ended",
        ),
        ("two_barriers", r"threads do not meet: thread \(31, 0, 0\) .* thread \(32, 0, 0\)"),
        ("does_not_wait", r"thread \(0, 0, 0\) touches memory before the previous kernel ends"),
    ],
)
def test_errors_are_found_and_the_next_kernel_runs(run: Run, kernel: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        run(kernel)
    assert run("correct") == run("correct", descending=True)


@pytest.mark.parametrize("kernel", ["missing_barrier", "last_block_wins"])
def test_races_depend_on_the_order(run: Run, kernel: str) -> None:
    assert run(kernel) != run(kernel, descending=True)


def test_a_call_whose_orders_differ_is_refused(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = emulator._call_in_order

    def racing(*arguments: object, descending: bool) -> list[torch.Tensor]:
        return [x + descending for x in honest(*arguments, descending=descending)]

    monkeypatch.setattr(emulator, "_call_in_order", racing)
    x = integers(9, dtype=torch.float32)
    with pytest.raises(EmulationError, match="depends on the order of blocks or threads"):
        emulator.forward("bias_act", "relu", x, x)


@pytest.mark.parametrize("byte", [-1, 0, 33, 34])
def test_changes_beside_a_tensor_are_seen(emulator: Emulator, byte: int) -> None:
    """17 elements of 2 bytes: before, in and behind them. (A NaN there would change nothing.)"""
    tensor = torch.zeros(17, dtype=torch.bfloat16)
    storage = tensor.untyped_storage()
    with GuardedStorage(emulator.library, storage, is_output=False) as memory:
        memory.check("op")
        assert memory.like(tensor).tolist() == tensor.tolist()
        ctypes.memset(memory.bytes.data_ptr() + byte, 1, 1)
        with pytest.raises(EmulationError, match=r"an input changed|wrote beside a tensor"):
            memory.check("op")


def test_memory_of_outputs_starts_as_nan(emulator: Emulator) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.zeros(5, dtype=dtype)
        with GuardedStorage(emulator.library, tensor.untyped_storage(), is_output=True) as memory:
            assert memory.like(tensor).isnan().all()


def test_inputs_of_one_storage_stay_together(emulator: Emulator) -> None:
    packed = integers(3, 32, dtype=torch.float32)
    assert torch.equal(emulator.packed("none", packed), packed[:, :16] * packed[:, 16:])
