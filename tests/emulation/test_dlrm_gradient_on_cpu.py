"""The gradient of a table, run by the emulator of this folder, against the reference.

Where the elements are small integers every sum is exact and must equal the reference to the last
bit: an item that is sorted to a wrong place, left out or taken twice fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layouts
import pytest
import torch
from comparison import assert_exact, in_double
from dlrm_emulator import DlrmEmulator
from emulator import DTYPES, EmulationError
from test_dlrm_on_cpu import small
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ops = torch.ops.fusedcuda
TILE, PIECE = 18 * 256, 64  # items that a block sorts, and that are added up one after the other
ZEROS, SORTED = 1, 2  # paths


@pytest.fixture
def dlrm(build_family: Callable[[str], Path]) -> DlrmEmulator:
    return DlrmEmulator(build_family("dlrm"))


def check(dlrm: DlrmEmulator, grad: Tensor, indices: Tensor, rows: int) -> Tensor:
    expected = ops.embedding_dense_backward(in_double(grad), indices, rows)
    actual = dlrm.embedding_dense_backward(grad, indices, rows)
    assert_exact("gradient of the table", actual, expected)
    return actual


def check_random(
    dlrm: DlrmEmulator, items: int, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> None:
    check(dlrm, small(items, columns, dtype=dtype), torch.randint(rows, (items,)), rows)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("columns", [1, 5, 8, 16, 24, 128])
@every_dtype
def test_columns(dlrm, dtype, columns, index_dtype) -> None:
    indices = torch.randint(100, (700,), dtype=index_dtype)
    check(dlrm, small(700, columns, dtype=dtype), indices, 100)
    whole = columns % (16 // dtype.itemsize) == 0
    assert dlrm.call.aligned == whole
    if dtype != torch.float64:  # of half a piece
        check(dlrm, layouts.shifted(small(700, columns, dtype=dtype), 1), indices, 100)
        assert not dlrm.call.aligned


@pytest.mark.parametrize("items", [1, 2, 31, 33, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049])
def test_numbers_of_items(dlrm, items) -> None:
    """Around the ends of pieces, of the first level and of the second."""
    for rows in (1, 2, 3, 40, 5000):
        check_random(dlrm, items, rows, 3)


@pytest.mark.parametrize("items", [TILE - 1, TILE, TILE + 1, 3 * TILE + 77])
def test_numbers_of_tiles(dlrm, items) -> None:
    for rows in (1, 7, 300, 70_000):
        check_random(dlrm, items, rows, 1)


def test_many_tiles(dlrm) -> None:
    """More than the threads that scan them."""
    check_random(dlrm, 257 * TILE + 1, 3, 1)


@pytest.mark.parametrize(
    ("rows", "passes", "bits"),
    [(1, 1, 1), (2, 1, 1), (3, 1, 2), (256, 1, 8), (257, 1, 9), (511, 1, 9), (512, 1, 9),
     (513, 2, 5), (100_000, 2, 9), (260_000, 2, 9), ((1 << 18) + 1, 3, 7), (1 << 25, 3, 9)],
)  # fmt: skip
def test_rows(dlrm, rows, passes, bits) -> None:
    """Each digit, its ends and those of the table; rows without an index are zeros."""
    steps = [step for step in (1 << k for k in range(26)) if step < rows]
    ends = torch.tensor([0, rows - 1, *steps, *(s - 1 for s in steps), *(rows - s for s in steps)])
    indices = torch.cat([ends, torch.randint(rows, (3000,))])[torch.randperm(3000 + len(ends))]
    check(dlrm, small(len(indices), 1, dtype=torch.bfloat16), indices, rows)
    assert (dlrm.call.path, dlrm.call.passes, dlrm.call.digit_bits) == (SORTED, passes, bits)


@every_dtype
def test_one_row_of_all(dlrm, dtype) -> None:
    """A run that is longer than two levels of pieces, at both ends of the table and inside."""
    items = 3 * PIECE * PIECE // 2 + 5
    grad = small(items, 8, dtype=dtype)
    for row in (0, 7, 999):
        check(dlrm, grad, torch.full((items,), row), 1000)
    assert dlrm.call.levels == 3
    check(dlrm, grad, torch.full((items,), 0), 1)


@pytest.mark.parametrize("first", [1, 63, 64, 65, 128, 1000, 2047, 2048, 2049])
def test_two_rows(dlrm, first) -> None:
    """Whose border is anywhere in a piece, and which alternate before they are sorted."""
    items = 4200
    grad = small(items, 4, dtype=torch.float16)
    indices = torch.tensor([8] * first + [3] * (items - first))
    for given in (indices, indices.flip(0), indices[torch.randperm(items)]):
        check(dlrm, grad, given, 10)


def test_hot_rows_among_others(dlrm) -> None:
    for share in (0.3, 0.9):
        indices = torch.randint(2000, (9000,))
        indices *= torch.rand(9000) > share
        check(dlrm, small(9000, 8, dtype=torch.bfloat16), indices, 2000)


def test_runs_of_a_piece(dlrm) -> None:
    """As long as a piece, one more, one less: they begin and end at each place of a piece."""
    for length in (PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, PIECE // 2):
        rows = 6000 // length + 1
        indices = torch.arange(6000) // length
        check(dlrm, small(6000, 2, dtype=torch.float32), indices, rows)
        check(dlrm, small(6000, 2, dtype=torch.float32), indices.flip(0), rows)


def test_all_rows_differ(dlrm) -> None:
    """Every row is a copy, of what is at another place."""
    for count in (1, 33, 5000):
        order = torch.randperm(count)
        grad = torch.randn(count, 8, dtype=torch.bfloat16)
        actual = dlrm.embedding_dense_backward(grad, order, count)
        assert torch.equal(actual[order], grad)


@every_dtype
def test_no_items(dlrm, dtype) -> None:
    """Zeros to the last byte, of a size that is no multiple of 16."""
    for rows, columns in ((1, 1), (5, 3), (70_001, 1), (300, 128)):
        check_random(dlrm, 0, rows, columns, dtype)
        assert (dlrm.call.path, dlrm.call.workspace_bytes) == (ZEROS, 0)


def test_a_large_table_of_few_items(dlrm) -> None:
    """Filled by all blocks, however many multiprocessors there are."""
    for num_sms in (1, 2, 132):
        dlrm.num_sms = num_sms
        check_random(dlrm, 5, 400_003, 3, torch.bfloat16)


@every_dtype
def test_rounding_and_repetition(dlrm, dtype) -> None:
    """Rounded once; the same bits on any GPU, and whatever the order of blocks and threads."""
    items = 5000
    grad, indices = torch.randn(items, 16, dtype=dtype), torch.randint(60, (items,))
    indices *= torch.rand(items) > 0.5
    actual = dlrm.embedding_dense_backward(grad, indices, 60)
    exact = ops.embedding_dense_backward(in_double(grad), indices, 60)
    magnitude = ops.embedding_dense_backward(in_double(grad).abs(), indices, 60)
    # A piece adds up to 64 terms one after the other: 64 half units of float32, or of float64.
    error = 4e-6 if dtype != torch.float64 else 1e-14
    allowed = torch.finfo(dtype).eps * exact.abs() + error * magnitude
    assert ((actual.double() - exact).abs() <= allowed).all()
    for num_sms in (2, 132):
        dlrm.num_sms = num_sms
        assert torch.equal(dlrm.embedding_dense_backward(grad, indices, 60), actual)


def test_the_order_of_additions_is_that_of_the_items(dlrm) -> None:
    """Inside a piece: what a large summand swallows depends on what was added before it."""
    large = 2.0**24
    grad = torch.tensor([large, 1.0, 1.0, -large, 1.0, 1.0]).view(6, 1)
    indices = torch.tensor([3, 3, 3, 3, 3, 3])
    assert dlrm.embedding_dense_backward(grad, indices, 4)[3].item() == 2
    others = torch.tensor([9, 3, 0, 3, 9, 3, 3, 0, 3, 3, 9])
    spread = torch.ones(11, 1)
    spread[others == 3] = grad
    assert dlrm.embedding_dense_backward(spread, others, 10)[3].item() == 2


@pytest.mark.parametrize("wrong", [50, -1, 2**31, 2**40, -(2**63)])
def test_indices_that_are_no_rows_fail_an_assertion(dlrm, wrong) -> None:
    indices = torch.randint(50, (TILE + 9,))
    indices[-1] = wrong
    with pytest.raises(EmulationError, match="an index is no row of the table"):
        dlrm.embedding_dense_backward(torch.ones(TILE + 9, 1), indices, 50)
