"""The emulator itself: what the tests of the kernels rely on must be found when it is there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparison import integers
from emulator import HERE, EmulationError, GuardedStorage
from pointwise_emulator import Emulator
from torch import Tensor

Run = Callable[..., Tensor]


@pytest.fixture(scope="module")
def toys(build_library: Callable[..., Path]) -> ctypes.CDLL:
    stems = ("threads", "shared_memory", "clusters", "mailboxes", "grids", "run")
    return ctypes.CDLL(str(build_library(*(HERE / "toys" / f"{stem}.cu" for stem in stems))))


@pytest.fixture(scope="module")
def run(toys: ctypes.CDLL) -> Run:
    """Runs a toy (toys/toys.h); raises EmulationError with what the emulator found."""

    def run(name: str, descending: bool = False) -> Tensor:
        data = torch.empty(64)
        error = ctypes.create_string_buffer(1000)
        toys.set_reversed(descending)
        address = ctypes.c_void_p(data.data_ptr())
        if toys.run_toy(name.encode(), address, error, ctypes.c_size_t(len(error))):
            raise EmulationError(error.value.decode())
        return data

    return run


# ---- What works ----------------------------------------------------------------------------------

NUMBERS = torch.arange(64.0)
WARPS = NUMBERS.view(2, 32)


def twice_reversed_with_sums() -> Tensor:
    """Blocks run one after the other, the second on the results of the first."""
    values = NUMBERS
    for _ in range(2):
        values = values.flip(0) + values.view(2, 32).sum(1).repeat_interleave(32)
    return values


def shuffled() -> Tensor:
    lane = torch.arange(32)
    up = torch.where(lane < 3, lane, lane - 3)
    down = torch.where(lane % 16 < 12, lane + 4, lane)
    return (WARPS[:, 5:6] + 64 * WARPS[:, up] + 64 * 64 * WARPS[:, down]).flatten()


def voted() -> Tensor:
    """Bits 10 and up of the ballot on multiples of 10, then a half for any and a quarter for all.

    The multiples are lanes 0, 10, 20, 30 of the first warp, and 8, 18, 28 of the second.
    """
    first = 2**0 + 2**10 + 2**20 + 0.25
    return torch.tensor([first, 2**8 + 2**18 + 0.5]).repeat_interleave(32)


def counted() -> Tensor:
    return torch.cat([torch.tensor([2.0 * 2 * 64]), NUMBERS[1:]])


SWAPPED = torch.cat([NUMBERS[32:], NUMBERS[:32]])

RESULTS = {
    "correct": twice_reversed_with_sums(),
    "barrier_before_waiting": NUMBERS.flip(0),
    "float_shuffles": shuffled(),
    "double_shuffles": shuffled(),
    "votes": voted(),
    "synced_warp": WARPS.flip(1).flatten(),
    "counts": counted(),
    "reads_static_first": torch.full((64,), torch.nan),
    "reads_dynamic_first": torch.full((64,), torch.nan),
    "dynamic": NUMBERS.flip(0),
    "much_dynamic": NUMBERS.flip(0),
    "copies_in_groups": 101 * NUMBERS,
    "overwrites_what_was_read": NUMBERS + 100,
    "exchange_floats": SWAPPED,
    "exchange_doubles": SWAPPED,
    "exchange_pairs": SWAPPED + 1,
    "exchange_without_cluster": NUMBERS,
    "shares_per_block": 101 * WARPS.flip(1).flatten(),
    "mail_floats": SWAPPED,
    "mail_doubles": SWAPPED,
    "mail_to_both": (WARPS[0] + 100 * WARPS[1]).repeat(2),
    "mailboxes_in_turns": SWAPPED + 5,
    "one_mailbox_with_barriers": SWAPPED + 5,
    "exchange_through_memory": SWAPPED,
}


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("kernel", RESULTS)
def test_correct_kernels(run: Run, kernel: str, descending: bool) -> None:
    torch.testing.assert_close(
        run(kernel, descending), RESULTS[kernel], rtol=0, atol=0, equal_nan=True
    )


# ---- What is found -------------------------------------------------------------------------------


ERRORS = {
    "reads_past_the_end": r"thread \(63, 0, 0\) touches memory outside of every tensor",
    "writes_before_the_start": r"touches memory outside of every tensor",
    "misaligned_vector": r"thread \(2, 0, 0\) has undefined behaviour",
    "index_past_an_array": r"has undefined behaviour",
    "traps": r"thread \(7, 0, 0\) traps",
    "failed_assertion": r"fails an assertion in line \d+: data\[threadIdx.x\] < 50",
    "barrier_in_a_branch": r"thread \(5, 0, 0\) has ended.*\(6, 0, 0\) waits at the barrier",
    "two_barriers": r"threads do not meet: thread \(31, 0, 0\) .* thread \(32, 0, 0\)",
    "does_not_wait": r"touches memory before the previous kernel ends",
    "shuffle_in_a_branch": r"\(39, 0, 0\) waits for its warp in line \d+, .*\(40, 0, 0\) has ended",
    "shuffle_of_half_a_warp": r"leaves lanes out of a warp's operation",
    "sync_warp_in_a_branch": r"\(19, 0, 0\) waits for its warp .*\(20, 0, 0\) has ended",
    "past_dynamic": r"thread \(63, 0, 0\) touches memory outside .* shared memory",
    "past_odd_dynamic": r"the threads wrote behind their dynamic shared memory",
    "does_not_wait_for_copies": r"ends with copies that nobody has waited for",
    "does_not_commit": r"ends with copies that nobody has waited for",
    "copies_from_misaligned": r"thread \(3, 0, 0\) copies from or to an address",
    "copies_to_misaligned": r"thread \(3, 0, 0\) copies from or to an address",
    "copies_to_global": r"thread \(3, 0, 0\) copies asynchronously to what is not shared",
    "copies_past_the_end": r"thread \(3, 0, 0\) touches memory outside of every tensor",
    "copies_without_waiting": r"\(3, 0, 0\) touches memory before the previous kernel ends",
    "sends_to_unstarted": r"stores to a block that may not have started",
    "sends_to_ended": r"may store into shared memory after the last thread has ended",
    "sends_past_the_last": r"stores to a block that its cluster does not have",
    "sends_to_static": r"by an address outside of its dynamic shared memory",
    "arrives_twice": r"calls cluster_arrive\(\) twice",
    "waits_without_arriving": r"thread \(9, 0, 0\) calls cluster_wait\(\) without",
    "ends_without_waiting": r"ends without cluster_wait\(\)",
    "thread_does_not_arrive": r"waits at the cluster's barrier, thread \(9, 0, 0\) has ended",
    "block_does_not_arrive": r"waits at the cluster's barrier, .* has ended.* in block \(1, 0, 0\)",
    "one_mailbox": r"sends for a mailbox's next round before every thread there has waited",
    "one_set_of_slots": r"sends to a slot before every thread there has waited",
    "sends_mail_before_init": r"uses a mailbox before a cluster barrier that follows its init",
    "sends_mail_between_init_and_wait": r"uses a mailbox before a cluster barrier",
    "init_after_arriving": r"uses a mailbox before a cluster barrier",
    "initializes_twice": r"thread \(0, 0, 0\) initializes a mailbox twice",
    "expects_too_little": r"leaves a mailbox with more bytes than it expects",
    "expects_too_much": r"mail does not come: .* mailbox .* where 128 of 132 bytes arrived",
    "expects_nothing": r"waits for its mailbox at byte 0, where 128 bytes arrived that nobody",
    "expects_negative": r"expects less than one byte",
    "expects_twice": r"thread \(0, 0, 0\) expects the bytes of a round twice",
    "sends_mail_twice": r"sends to a slot before every thread there has waited",
    "waits_for_another_round": r"thread \(9, 0, 0\) waits for a mailbox with the parity of another",
    "one_thread_does_not_wait": r"not every thread waited for its mailbox in block",
    "ends_while_it_expects": r"end while values are on their way to their mailbox in block",
    "sends_mail_to_ended": r"sends to a block that has ended|end while values are on their way",
    "sends_mail_past_the_last": r"sends to a block that its cluster does not have",
    "sends_mail_to_static": r"has a mailbox or a slot outside of its dynamic shared memory",
    "has_static_mailbox": r"has a mailbox or a slot outside of its dynamic shared memory",
    "sends_misaligned_mail": r"has a mailbox or a slot that is not aligned",
    "overwrites_a_mailbox": r"uses a mailbox that has been overwritten",
    "polls_in_vain": r"thread \(9, 0, 0\) polls memory that nobody writes any more",
    "overwrites_a_mailbox_at_last": r"the threads overwrote a mailbox in block",
}


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("kernel", ERRORS)
def test_errors_are_found_and_the_next_kernel_runs(run: Run, kernel: str, descending: bool) -> None:
    with pytest.raises(EmulationError, match=ERRORS[kernel]):
        run(kernel, descending)
    assert torch.equal(run("correct"), RESULTS["correct"])


@pytest.mark.parametrize(
    "kernel",
    [
        "missing_barrier",
        "last_block_wins",
        "unsynced_warp",
        "rounds_in_any_order",
        "reads_the_first_too_early",
        "reads_the_second_too_early",
        "overwrites_too_early",
        "reads_before_waiting",
        "sends_after_arriving",
        "sends_before_all_have_read",
        "reads_mail_before_waiting",
        "takes_a_barrier_for_mail",
        "overwrites_unread_mail",
        "reads_another_block_too_early",
    ],
)
def test_races_depend_on_the_order(run: Run, kernel: str) -> None:
    ascending, descending = run(kernel), run(kernel, descending=True)
    assert not torch.equal(ascending.view(torch.int32), descending.view(torch.int32))


INVALID_VALUE, INVALID_CONFIGURATION, INVALID_CLUSTER_SIZE = 1, 9, 912


@pytest.mark.parametrize(
    ("blocks", "cluster", "shared_bytes", "prepared", "unprepared"),
    [
        (16, 8, 48 << 10, 0, 0),
        (16, 1, (48 << 10) + 1, 0, INVALID_VALUE),
        (16, 1, 227 << 10, 0, INVALID_VALUE),
        (16, 1, (227 << 10) + 1, INVALID_VALUE, INVALID_VALUE),
        (16, 16, 0, 0, INVALID_CLUSTER_SIZE),
        (32, 32, 0, INVALID_CLUSTER_SIZE, INVALID_CLUSTER_SIZE),
        (12, 8, 0, INVALID_CONFIGURATION, INVALID_CONFIGURATION),
    ],
)
def test_launches_that_a_gpu_refuses(
    toys: ctypes.CDLL, blocks: int, cluster: int, shared_bytes: int, prepared: int, unprepared: int
) -> None:
    """What a kernel is allowed stays allowed, so the plain launch comes first, on fresh terms."""
    size = ctypes.c_size_t(shared_bytes)
    toys.forget_allowances()
    assert toys.launch_unprepared(blocks, cluster, size) == unprepared
    assert toys.launch_prepared(blocks, cluster, size) == prepared


# ---- What the Python side adds -------------------------------------------------------------------


def test_a_call_whose_orders_differ_is_refused(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = emulator._run_in_order

    def racing(*arguments: object, descending: bool) -> list[Tensor]:
        return [x + descending for x in honest(*arguments, descending=descending)]

    monkeypatch.setattr(emulator, "_run_in_order", racing)
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


def test_only_elements_of_an_output_may_change(emulator: Emulator) -> None:
    """Also of one that is an input, as in operators that work in place."""
    wide = torch.zeros(4, 6)
    output = wide[:, :4]
    with GuardedStorage(emulator.library, wide.untyped_storage(), is_output=False) as memory:
        memory.like(output).fill_(1)
        memory.forget(output)
        memory.check("op")
        memory.like(wide)[2, 5] = 1
        memory.forget(output)
        with pytest.raises(EmulationError, match="an input changed, or something between"):
            memory.check("op")


def test_memory_of_outputs_starts_as_nan(emulator: Emulator) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.zeros(5, dtype=dtype)
        with GuardedStorage(emulator.library, tensor.untyped_storage(), is_output=True) as memory:
            assert memory.like(tensor).isnan().all()


def test_inputs_of_one_storage_stay_together(emulator: Emulator) -> None:
    packed = integers(3, 32, dtype=torch.float32)
    assert torch.equal(emulator.packed("none", packed), packed[:, :16] * packed[:, 16:])
