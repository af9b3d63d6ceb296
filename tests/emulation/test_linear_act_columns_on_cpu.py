"""Sums of columns, alone and in the pass that makes dz, by the emulator against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from linear_act_emulator import LinearActEmulator, Saves, SumsConfig, packed_mask
from reference import ACTIVATIONS
from row_emulator import assert_rounded
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1), (7, 3), (199, 127), (4096, 8), (513, 3072))
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_SAVED = pytest.mark.parametrize("saves", Saves, ids=lambda saves: saves.name.lower())


@pytest.fixture
def linear(build_family: Callable[[str], Path]) -> LinearActEmulator:
    return LinearActEmulator(build_family("linear_act"))


def saved_of(
    saves: Saves, m: int, n: int, dtype: torch.dtype, activation: str = "silu"
) -> tuple[str, Tensor | None, Tensor]:
    """The activation, what was saved of z, and act'(z) in float64."""
    if saves is Saves.NONE:
        return "none", None, torch.ones(m, n, dtype=torch.float64)
    if saves is Saves.MASK:
        positive = torch.rand(m, n) < 0.6
        return "relu", packed_mask(positive), positive.double()
    values = torch.randn(m, n).to(dtype)
    if saves is Saves.DERIVATIVE:
        return activation, values, values.double()
    z = values.double().requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[activation](z).sum(), z)
    return activation, values, slope


def check(
    linear: LinearActEmulator,
    dy: Tensor,
    saves: Saves,
    *,
    batch: int = 1,
    activation: str = "silu",
    output: Tensor | None = None,
) -> Tensor:
    """dz against float64, and the sums against those of the dz that was written."""
    m, n = dy.shape
    activation, saved, slope = saved_of(saves, m, n, dy.dtype, activation)
    summed = dy
    if saves is Saves.NONE:
        (sums,) = linear.column_sums(dy, batch=batch)
    else:
        output = torch.empty(m, n, dtype=dy.dtype) if output is None else output
        dz, sums = linear.column_sums(
            dy, activation, saved, saves=saves, batch=batch, output=output
        )
        assert_rounded("dz", dz, dy.double() * slope, magnitude=4)
        summed = dz
        (alone,) = linear.column_sums(dy, activation, saved, saves=saves, batch=batch)
        assert torch.equal(alone, sums)  # without room for dz
    terms = summed.double().view(batch, -1, n)
    assert_rounded("sums", sums, terms.sum(1), magnitude=1 + terms.abs().sum(1).max().item() / 16)
    return sums


@EVERY_SAVED
@EVERY_SHAPE
@EVERY_DTYPE
def test_column_sums(
    linear: LinearActEmulator, dtype: torch.dtype, shape: tuple[int, int], saves: Saves
) -> None:
    check(linear, torch.randn(shape).to(dtype), saves)


@EVERY_SAVED
@pytest.mark.parametrize("num_sms", [1, 16])
def test_slices(linear: LinearActEmulator, saves: Saves, num_sms: int) -> None:
    """Many rounds of loads, and one; the last is not whole."""
    linear.num_sms = num_sms
    check(linear, torch.randn(1201, 256).bfloat16(), saves)
    most = 76 if saves is Saves.PRE_ACTIVATION else 38
    assert linear.sums_config.slices == min(3 * num_sms, most)


@EVERY_SAVED
@EVERY_DTYPE
def test_rows_with_a_pitch(linear: LinearActEmulator, dtype: torch.dtype, saves: Saves) -> None:
    """In whole vectors, and not."""
    for m, n, pitch, offset in ((150, 64, 96, 16), (150, 64, 71, 0), (150, 33, 64, 16)):
        dy = torch.randn(m, pitch).to(dtype)[:, offset : offset + n]
        output = torch.empty(m, pitch, dtype=dtype)[:, offset : offset + n]
        check(linear, dy, saves, output=output)
        if dtype != torch.float64:  # whose vectors are elements
            assert linear.sums_config.vectors == (pitch == 96)


@EVERY_SAVED
def test_rows_that_are_not_aligned(linear: LinearActEmulator, saves: Saves) -> None:
    dy = torch.randn(70 * 64 + 1).bfloat16()[1:].view(70, 64)
    check(linear, dy, saves)
    assert not linear.sums_config.vectors


@EVERY_SAVED
@EVERY_DTYPE
def test_batches(linear: LinearActEmulator, dtype: torch.dtype, saves: Saves) -> None:
    for m, n in ((1, 40), (170, 40), (33, 7)):
        check(linear, torch.randn(3 * m, n).to(dtype), saves, batch=3)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
@EVERY_DTYPE
def test_activations(linear: LinearActEmulator, dtype: torch.dtype, activation: str) -> None:
    check(linear, torch.randn(37, 24).to(dtype), Saves.PRE_ACTIVATION, activation=activation)


@pytest.mark.parametrize("saves", [Saves.MASK, Saves.PRE_ACTIVATION, Saves.DERIVATIVE], ids=str)
def test_in_place(linear: LinearActEmulator, saves: Saves) -> None:
    """As two layers have it: dz is written over dh."""
    dy = torch.randn(300, 64).bfloat16()
    activation, saved, _ = saved_of(saves, 300, 64, dy.dtype)
    apart = torch.empty_like(dy)
    expected = linear.column_sums(dy, activation, saved, saves=saves, output=apart)
    in_place = linear.column_sums(dy, activation, saved, saves=saves, output=dy)
    assert all(torch.equal(a, b) for a, b in zip(in_place, expected, strict=True))


def test_the_sum_is_that_of_the_rounded_gradient(linear: LinearActEmulator) -> None:
    """What the products of the gradient read: 1 + 2^-8 - 2^-15 is 1 in bfloat16."""
    dy = torch.tensor([1 + 2**-7, -1.0]).bfloat16().repeat(32)[:, None].expand(64, 8).contiguous()
    saved = torch.tensor([1 - 2**-8, 1.0]).bfloat16().repeat(32)[:, None].expand(64, 8).contiguous()
    (sums,) = linear.column_sums(dy, "silu", saved, saves=Saves.DERIVATIVE)
    assert not sums.any()


def test_no_rows_and_no_columns(linear: LinearActEmulator) -> None:
    (sums,) = linear.column_sums(torch.empty(0, 24))
    assert torch.equal(sums, torch.zeros(1, 24))
    (sums,) = linear.column_sums(torch.empty(24, 0))
    assert sums.shape == (1, 0)


# ---- Configuration -------------------------------------------------------------------------------


def test_a_large_matrix_fills_the_card_once(linear: LinearActEmulator) -> None:
    """8192 x 3072 bf16: 12 blocks of 256 columns, and 3 blocks on each of 132 SMs."""
    config = linear.choose_column_sums(8192, 3072, torch.bfloat16, saves=Saves.DERIVATIVE)
    assert config == SumsConfig(True, 32, 12, 33, 33 * 3072 * 4)
    assert 0.9 * 396 <= config.column_blocks * config.slices <= 396


@pytest.mark.parametrize(
    ("n", "dtype", "threads", "blocks"),
    [
        (3072, torch.bfloat16, 32, 12),
        (3072, torch.float32, 32, 24),
        (3072, torch.float64, 32, 96),
        (264, torch.bfloat16, 8, 5),  # 33 vectors: 40 places, where 32 along would have 64
        (384, torch.bfloat16, 16, 3),
        (8, torch.bfloat16, 1, 1),
        (24, torch.bfloat16, 4, 1),
        (127, torch.bfloat16, 32, 4),  # element by element
        (1, torch.float32, 1, 1),
    ],
)
def test_threads_along_a_row(
    linear: LinearActEmulator, n: int, dtype: torch.dtype, threads: int, blocks: int
) -> None:
    config = linear.choose_column_sums(8192, n, dtype)
    assert (config.threads_along, config.column_blocks) == (threads, blocks)


def test_few_rows_are_added_up_at_once(linear: LinearActEmulator) -> None:
    """Two rounds of a block: 8 rows of threads, 4 loads each. No workspace, no second kernel."""
    for m, slices in ((1, 1), (64, 1), (65, 3), (640, 20)):
        config = linear.choose_column_sums(m, 3072, torch.bfloat16)
        assert config.slices == slices
        assert config.workspace_bytes == (slices > 1) * slices * 3072 * 4


def test_batches_and_many_columns_take_the_place_of_slices(linear: LinearActEmulator) -> None:
    assert linear.choose_column_sums(8192, 3072, torch.bfloat16, batch=4).slices == 8
    assert linear.choose_column_sums(8192, 3072, torch.bfloat16, batch=400).slices == 1
    assert linear.choose_column_sums(4096, 200000, torch.bfloat16).slices == 1
