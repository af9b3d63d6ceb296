"""How linear_cross_entropy chooses its chunks, and the formula of its memory."""

import gc
import math

import pytest
import torch
from linear_losses import random_problem
from reference import leaf

import fusedcuda
from fusedcuda.ops import _linear_cross_entropy_chunks as chunks
from fusedcuda.ops._linear_cross_entropy_chunks import (
    Problem,
    choose_chunk,
    fitting_chunk,
    fixed_chunk,
    pitch_of,
)

GIB = 2**30
WORKSPACE = 32 << 20  # of cuBLASLt, kept from call to call
ALL = 7


def problem(
    rows: int = 8192,
    features: int = 4096,
    classes: int = 128_256,
    dtype: torch.dtype = torch.bfloat16,
    in_float32: bool = True,
    mask: int = ALL,
) -> Problem:
    return Problem(rows, features, classes, dtype, in_float32, mask)


def test_the_formula():
    """That of the docstring, with V rounded up."""
    rows, features, classes = 1000, 64, 50_257
    dx, weight = rows * features, 50_264 * features
    for itemsize, dtype in ((2, torch.bfloat16), (2, torch.float16), (4, torch.float32)):
        for chunk in (128, 300, 1000):
            logits = itemsize * chunk * 50_264
            by_weight = problem(rows, features, classes, dtype, in_float32=False)
            expected = itemsize * (dx + weight) + logits
            assert by_weight.peak_bytes(chunk) == expected
            wide = problem(rows, features, classes, dtype)
            if itemsize == 2 and chunk < rows:
                expected = 2 * dx + 4 * weight + max(logits, 2 * weight)
            assert wide.peak_bytes(chunk) == expected
            assert problem(rows, features, classes, dtype, mask=0).peak_bytes(chunk) == logits


@pytest.mark.parametrize(
    ("sizes", "chunk", "in_float32", "limit"),
    [
        ((8192, 4096, 128_256), 4096, False, 2.2),
        ((8192, 4096, 128_256), 512, False, 1.2),
        ((8192, 2048, 32_000), 4096, False, 0.55),
        ((8192, 2048, 32_000), 2816, True, 0.55),
    ],
)
def test_the_settings_that_are_measured(sizes, chunk, in_float32, limit):
    """bench/bench_linear_cross_entropy.py: within so many GiB, cuBLASLt's workspace included."""
    assert problem(*sizes, in_float32=in_float32).peak_bytes(chunk) + WORKSPACE <= limit * GIB


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("rows", [1, 100, 4096, 8192, 10_000, 65_536])
def test_chunks_are_whole_tiles_and_nearly_even(rows, in_float32):
    for limit in (GIB, 2 * GIB, 3 * GIB, 8 * GIB, 100 * GIB):
        call = problem(rows, in_float32=in_float32)
        chunk = fitting_chunk(call, limit)
        assert chunk == rows or chunk % 128 == 0
        last = rows - (math.ceil(rows / chunk) - 1) * chunk
        assert chunk - last < 128 * math.ceil(rows / chunk)


def test_the_fewest_chunks_that_fit():
    by_weight = problem(in_float32=False)
    for limit in (4 * GIB, 3 * GIB, 2.2 * GIB, 1.5 * GIB):
        chunk = fitting_chunk(by_weight, limit)
        assert by_weight.peak_bytes(chunk) <= limit
        count = math.ceil(by_weight.rows / chunk)
        if count > 1:
            assert by_weight.peak_bytes(by_weight.chunk_of(count - 1)) > limit
    assert fitting_chunk(by_weight, 4 * GIB) == 8192
    assert fitting_chunk(by_weight, 0) == 512


def test_a_sum_in_float32_bounds_what_chunks_can_save():
    """Below it smaller chunks need as much, so they are not taken."""
    call = problem(rows=65_536)
    least = call.peak_bytes(512)
    chunk = fitting_chunk(call, 0)
    assert call.peak_bytes(chunk) == least
    assert call.peak_bytes(chunk + 128) > least
    # With no more rows than twice the features, one chunk needs as much as two, and no sum.
    assert fitting_chunk(problem(), 0) == 8192


def test_the_fixed_rule():
    assert fixed_chunk(problem(in_float32=False)) == 4096
    assert fixed_chunk(problem(8192, 2048, 32_000, in_float32=False)) == 2048
    assert fixed_chunk(problem(8192, 64, 50_257, in_float32=False)) == 1024
    assert fixed_chunk(problem()) == 8192  # no more memory than with a sum in float32
    assert fixed_chunk(problem(rows=65_536)) == 4096
    assert fixed_chunk(problem(mask=0)) == 4096


def test_where_the_fixed_rule_is_taken(monkeypatch, deterministic_algorithms):
    """On the CPU; on a GPU in a capture, and where results must not depend on what is free."""
    call, cuda = problem(in_float32=False), torch.device("cuda", 0)
    monkeypatch.setattr(chunks, "_free_bytes", lambda device: 8 * GIB)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert choose_chunk(call, torch.device("cpu")) == 4096
    assert choose_chunk(call, cuda) == 8192
    capturing = True
    assert choose_chunk(call, cuda) == 4096
    capturing = False
    assert choose_chunk(problem(64), cuda) == 64  # small: nobody is asked
    deterministic_algorithms()
    assert choose_chunk(call, cuda) == 4096


def test_half_of_what_is_free(monkeypatch):
    call, cuda = problem(in_float32=False), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for free in (3 * GIB, 5 * GIB, 7 * GIB):
        monkeypatch.setattr(chunks, "_free_bytes", lambda device, free=free: free)
        assert choose_chunk(call, cuda) == fitting_chunk(call, free // 2)


def test_what_torch_keeps_is_free_too(monkeypatch):
    stats = {"reserved_bytes.all.current": 700, "allocated_bytes.all.current": 500}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert chunks._free_bytes(torch.device("cuda", 0)) == 1200


def test_rows_of_logits_begin_at_multiples_of_16_bytes():
    assert [pitch_of(n) for n in (1, 8, 50_257, 128_256)] == [8, 8, 50_264, 128_256]


# ---------------------------------------------------------------------------- on the card


def peak_memory(function) -> int:
    gc.collect()  # what goes now is not in the difference
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fp32", "weight"])
@pytest.mark.parametrize("chunk", [512, 1000, 2048, "auto"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wrt", ["", "x", "weight", "x weight"])
def test_the_peak_is_that_of_the_formula(wrt, reduction, chunk, accumulate):
    """Forward and backward, with an incoming gradient that is not 1."""
    rows, classes, features = 2048, 32_003, 512
    operands, target = random_problem(
        rows, classes=classes, features=features, dtype=torch.bfloat16, device="cuda", bias=False
    )
    x, weight = (leaf(operands[name], name in wrt.split()) for name in ("x", "weight"))
    how = {"chunk": chunk, "accumulate": accumulate, "reduction": reduction}

    def step() -> None:
        loss = fusedcuda.linear_cross_entropy(x, weight, target, **how)
        if wrt:
            torch.autograd.grad(3 * loss.sum(), [t for t in (x, weight) if t.requires_grad])

    step()  # cuBLASLt's workspace
    mask = ("x" in wrt.split()) | ("weight" in wrt.split()) << 1
    call = Problem(rows, features, classes, torch.bfloat16, accumulate == "fp32", mask)
    used = rows if chunk == "auto" else chunk  # with all the memory of the card
    forward_alone = call._replace(mask=0).peak_bytes(used)
    expected = max(call.peak_bytes(used), forward_alone)
    # torch's allocator hands out up to 1 MiB more than it is asked for: of the logits and of the
    # gradients of x and weight. (And there is what there is one of a row.)
    assert expected <= peak_memory(step) <= expected + (3 << 20) + 64 * rows
