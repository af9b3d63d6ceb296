"""The real kernels of the lora family, run by the emulator of this folder, against the references.

The elements are small integers, so that the arithmetic is exact, and every output must equal the
reference to the last bit: an element read or written in a wrong place fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layouts
import pytest
import torch
from comparison import assert_exact
from emulator import DTYPES
from lora_emulator import LoraEmulator
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)
from fusedcuda.ops._lora_reference import pitch_of

HALVES = (torch.float16, torch.bfloat16)
RANKS = (1, 3, 5, 8, 16, 24, 64, 65, 100, 256)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
ops = torch.ops.fusedcuda


@pytest.fixture
def lora(build_family: Callable[[str], Path]) -> LoraEmulator:
    return LoraEmulator(build_family("lora"))


def small(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def seed_of(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64)


def check_down(
    lora: LoraEmulator,
    x: Tensor,
    factor: Tensor,
    seed: Tensor | None = None,
    scale: float = 0.5,
    dropout_p: float = 0.0,
) -> None:
    actual = lora.lora_down(x, factor, seed, scale, dropout_p)
    assert_exact("lora_down", actual, ops.lora_down(x, factor, seed, scale, dropout_p))


def check_up(
    lora: LoraEmulator,
    x: Tensor,
    rank: int,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    transposed: bool = False,
    in_float32: bool = False,
) -> None:
    t = small(x.shape[0], pitch_of(rank), dtype=x.dtype)
    t[:, rank:] = 0
    options = (seed, rank, dropout_p, transposed, in_float32)
    assert_exact("lora_up", lora.lora_up(t, x, *options), ops.lora_up(t, x, *options))


# ---- t -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor_dtype", ["same", "float32"])
@pytest.mark.parametrize("rank", RANKS)
@every_half
def test_down(lora, dtype, rank, factor_dtype) -> None:
    kept = dtype if factor_dtype == "same" else torch.float32
    x = small(37, 264, dtype=dtype)
    check_down(lora, x, small(rank, 264, dtype=kept))
    assert lora.call.aligned_x
    assert lora.call.aligned_factor
    assert lora.call.chunks == -(-rank // 64)
    check_down(lora, x, small(264, rank, dtype=kept).T)
    assert lora.call.aligned_factor == (rank * kept.itemsize % 16 == 0)


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 20, 127, 128, 129, 479])
@every_half
def test_columns_that_are_not_whole_pieces_or_stages(lora, dtype, columns) -> None:
    x = small(20, columns, dtype=dtype)
    check_down(lora, x, small(5, columns, dtype=dtype))
    assert lora.call.aligned_x == (columns % 8 == 0)
    check_down(lora, x, small(8, columns, dtype=torch.float32))
    check_down(lora, x, small(columns, 16, dtype=dtype).T)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 100, 129])
@pytest.mark.parametrize("num_sms", [1, 2, 4, 132])
def test_rows_and_parts_of_the_columns(lora, num_sms, rows) -> None:
    """Few rows have their columns split over blocks, many take 64 rows a block."""
    lora.num_sms = num_sms
    check_down(lora, small(rows, 1024), small(16, 1024))
    assert lora.call.rows_of_stage in (16, 32, 64)
    if num_sms == 132:
        assert lora.call.rows_of_stage == 16
        assert lora.call.splits == 8  # of 128 columns
    if num_sms == 1:
        assert lora.call.rows_of_stage == 64
        assert lora.call.splits == 1


@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_less_shared_memory(lora, factor_dtype) -> None:
    """Of compute capability 8.6: stages are shorter."""
    lora.shared_bytes_of_block, lora.shared_bytes_of_sm = 99 << 10, 100 << 10
    x = small(256, 300)
    for factor in (small(64, 300, dtype=factor_dtype), small(300, 64, dtype=factor_dtype).T):
        check_down(lora, x, factor)
        assert lora.call.rows_of_stage == 64
        assert lora.call.columns_of_stage < 128
    check_up(lora, x, 64)
    assert lora.call.rows_of_stage == 32


def test_layouts(lora) -> None:
    x, factor = small(40, 136), small(16, 136)
    for change in (layouts.pitched, lambda t: layouts.shifted(t, 1)):
        check_down(lora, change(x), factor)
        check_down(lora, x, change(factor))
        check_up(lora, change(x), 16)
    check_down(lora, x[:1].expand(40, -1), factor)


def test_no_rows_and_no_columns(lora) -> None:
    for rows, columns in ((0, 8), (3, 0), (0, 0)):
        check_down(lora, small(rows, columns), small(5, columns))
        check_up(lora, small(rows, columns), 5)


def test_infinity_stays_in_its_row_and_out_of_the_padding(lora) -> None:
    x = small(20, 64)
    x[3, 5] = torch.inf
    t = lora.lora_down(x, torch.ones(5, 64, dtype=x.dtype), None, 1.0, 0.0)
    assert t.isfinite().all(1).tolist() == [row != 3 for row in range(20)]
    assert (t[:, 5:] == 0).all()


def test_float32_factor_is_rounded_to_16_bits(lora) -> None:
    x = torch.eye(16, dtype=torch.bfloat16)
    factor = torch.randn(8, 16)
    expected = factor.to(torch.bfloat16).T
    for given in (factor, factor.T.contiguous().T):
        assert_exact("lora_down", lora.lora_down(x, given, None, 1.0, 0.0), expected)


# ---- Gradients of the factors --------------------------------------------------------------------


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", RANKS)
@every_half
def test_up(lora, dtype, rank, transposed, in_float32) -> None:
    check_up(lora, small(77, 200, dtype=dtype), rank, None, 0.0, transposed, in_float32)


@pytest.mark.parametrize("columns", [1, 7, 20, 127, 129, 479])
@every_half
def test_up_of_columns_that_are_not_whole_pieces_or_panels(lora, dtype, columns) -> None:
    for transposed in (False, True):
        check_up(lora, small(33, columns, dtype=dtype), 6, transposed=transposed)


@pytest.mark.parametrize("num_sms", [1, 2, 132])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 500, 1000])
def test_parts_of_the_rows(lora, rows, num_sms) -> None:
    lora.num_sms = num_sms
    check_up(lora, small(rows, 128), 16, in_float32=True)
    assert lora.call.splits == min(2 * num_sms, -(-rows // 64))


# ---- Dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [8, 128, 136, 479])
@every_half
def test_products_drop_what_the_reference_drops(lora, dtype, columns) -> None:
    """What is kept is multiplied by 2: exact."""
    x, seed = small(70, columns, dtype=dtype), seed_of(2**63 - 2)
    check_down(lora, x, small(5, columns, dtype=dtype), seed, 1.0, 0.5)
    check_up(lora, x, 5, seed, 0.5, in_float32=True)
    assert not lora.lora_down(x, small(5, columns, dtype=dtype), seed, 1.0, 1.0).any()


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("columns", [1, 7, 8, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(lora, dtype, columns, dropout_p) -> None:
    x, seed = torch.randn(33, columns).to(dtype), seed_of(123456789012345)
    expected = ops.lora_dropout(x, seed, dropout_p)
    for given in (x, layouts.pitched(x), layouts.shifted(x, 1)):
        assert_exact("lora_dropout", lora.lora_dropout(given, seed, dropout_p), expected)


@pytest.mark.parametrize("columns", [8, 24, 40, 264])
@pytest.mark.parametrize("ranks", [1, 7, 8, 16])
@every_half
def test_branch(lora, dtype, ranks, columns) -> None:
    """Warps without columns or rows; several rounds of rows of few multiprocessors."""
    seed, factor = seed_of(-7), small(ranks, columns, dtype=dtype)
    for rows in (1, 16, 70, 1000):
        t = small(rows, ranks, dtype=dtype)
        (expected,) = ops.lora_branch(t, factor, seed, 0.5)
        for given in (factor, layouts.pitched(factor), layouts.shifted(factor, 1)):
            assert_exact("lora_branch", lora.lora_branch(t, given, seed, 0.5), expected)


@pytest.mark.parametrize("dropout_p", [0.0, 1e-6, 0.1, 0.99, 1 - 2**-16])
def test_mask_of_a_branch_is_that_of_the_elements(lora, dropout_p) -> None:
    seed, eye = seed_of(123456789012345), torch.eye(16, dtype=torch.bfloat16)
    ones = torch.ones(16, 64, dtype=eye.dtype)
    kept = ops.lora_dropout(ones, seed, dropout_p)
    assert_exact("lora_branch", lora.lora_branch(eye, ones, seed, dropout_p), kept)


def test_what_is_dropped_is_zero_whatever_it_was(lora) -> None:
    t, factor = small(32, 8), small(8, 64)
    factor[3] = torch.inf
    branch = lora.lora_branch(t, factor, seed_of(5), 0.5)
    kept = ops.lora_dropout(torch.ones_like(branch), seed_of(5), 0.5) != 0
    assert (branch[~kept] == 0).all()
    assert not branch[kept].isfinite().all()


def test_mask_of_a_product_is_that_of_the_elements(lora) -> None:
    """One row at a time is multiplied by the unit matrix, which shows what is kept."""
    for dropout_p in (0.1, 0.3):
        seed = seed_of(42)
        x = torch.ones(100, 64, dtype=torch.bfloat16)
        kept = ops.lora_dropout(x, seed, dropout_p) != 0
        t = lora.lora_down(x, torch.eye(64, dtype=x.dtype), seed, 1.0, dropout_p)
        assert torch.equal(t != 0, kept)
        eye = torch.eye(100, 104, dtype=x.dtype)
        up = lora.lora_up(eye, x, seed, 100, dropout_p, False, True)
        assert torch.equal(up != 0, kept)
