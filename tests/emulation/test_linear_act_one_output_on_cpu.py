"""The gradient of a layer of one output in one pass, by the emulator against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from linear_act_emulator import LinearActEmulator, Saves, SumsConfig, packed_mask
from row_emulator import assert_rounded
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
KINDS = (Saves.NONE, Saves.MASK, Saves.DERIVATIVE)
EVERY_DTYPE = pytest.mark.parametrize("dtype", HALVES, ids=str)
EVERY_SAVED = pytest.mark.parametrize("saves", KINDS, ids=lambda saves: saves.name.lower())


@pytest.fixture
def linear(build_family: Callable[[str], Path]) -> LinearActEmulator:
    return LinearActEmulator(build_family("linear_act"))


def operands(m: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x and weight."""
    return tuple(torch.randn(size).to(dtype) for size in ((m, 1), (m, k), (1, k)))


def check(
    linear: LinearActEmulator,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    saves: Saves = Saves.NONE,
    *,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    dx: Tensor | None = None,
) -> None:
    saved, slope = None, torch.ones(dy.shape, dtype=torch.float64)
    if saves is Saves.MASK:
        positive = torch.rand(dy.shape) < 0.6
        saved, slope = packed_mask(positive), positive.double()
    elif saves is Saves.DERIVATIVE:
        saved = torch.randn(dy.shape).to(dy.dtype)
        slope = saved.double()
    # The product of two numbers of 16 bits is exact in float64: rounded once, as in the kernel.
    dz = (dy.double() * slope).to(dy.dtype).double()
    terms = dz * x.double()
    expected = [dz * weight.double(), terms.sum(0), dz.sum(0)]
    largest = [1.0, terms.abs().sum(0).max().item(), dz.abs().sum().item()]
    wants_dx, wants_dweight, wants_dbias = wanted
    actual = linear.one_output_backward(
        dy, x if wants_dweight else None, weight if wants_dx else None, saved, saves=saves,
        bias=wants_dbias, dx=dx,
    )  # fmt: skip
    names = ("dx", "dweight", "dbias")
    given = [row for row in zip(names, expected, largest, wanted, strict=True) if row[3]]
    for result, (name, exact, magnitude, _) in zip(actual, given, strict=True):
        assert_rounded(name, result, exact, magnitude=1 + magnitude / 16)


@EVERY_SAVED
@EVERY_DTYPE
@pytest.mark.parametrize("k", [1, 5, 8, 256, 1000, 4096])
def test_sizes(linear: LinearActEmulator, k: int, dtype: torch.dtype, saves: Saves) -> None:
    for m in (1, 5, 97):
        check(linear, *operands(m, k, dtype), saves)
        assert linear.sums_config.vectors == (k % 8 == 0)


@EVERY_SAVED
@pytest.mark.parametrize("k", [5, 8, 256])
def test_many_rows(linear: LinearActEmulator, k: int, saves: Saves) -> None:
    """Several rounds of several blocks; the last one of each is not whole."""
    linear.num_sms = 2
    for m in (2048, 2051):
        check(linear, *operands(m, k, torch.bfloat16), saves)
        if k == 256:
            assert linear.sums_config.slices == 6


@EVERY_SAVED
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
def test_gradients_that_are_asked_for(linear: LinearActEmulator, bits: int, saves: Saves) -> None:
    wanted = (bool(bits & 1), bool(bits & 2), bool(bits & 4))
    for m, k in ((300, 64), (37, 13)):
        check(linear, *operands(m, k, torch.bfloat16), saves, wanted=wanted)


@EVERY_DTYPE
def test_layouts(linear: LinearActEmulator, dtype: torch.dtype) -> None:
    """Rows with a pitch, off the boundary; a column as the weight; dy anywhere, also repeated."""
    m, k = 150, 64
    dy, x, weight = operands(m, k, dtype)
    wide = torch.randn(m, 96).to(dtype)
    for given, vectors in (
        (wide[:, 16:80], True),
        (wide[:, 3:67], False),
        (torch.randn(m, 71).to(dtype)[:, :k], False),
        (torch.randn(m * k + 1).to(dtype)[1:].view(m, k), False),
    ):
        check(linear, dy, given, weight)
        assert linear.sums_config.vectors == vectors
    column = torch.randn(k, 3).to(dtype)[:, 1:2]
    for given in (column.T, torch.randn(1, k + 1).to(dtype)[:, 1:]):
        check(linear, dy, x, given)
        assert linear.sums_config.vectors
    for given in (torch.randn(m, 5).to(dtype)[:, 2:3], dy[:1].expand(m, 1)):
        check(linear, given, x, weight)
    check(linear, dy, x, weight, dx=torch.empty(m, 80, dtype=dtype)[:, 8:72])


def test_what_is_not_finite_stays_in_its_row(linear: LinearActEmulator) -> None:
    """Rows behind the last are never added, and a masked gradient is 0 whatever it was."""
    for m in (1, 70, 131):
        dy, x, weight = operands(m, 64, torch.bfloat16)
        x[-1, 3] = torch.inf
        dy[-1] = 1
        dx, dweight, dbias = linear.one_output_backward(dy, x, weight)
        assert dweight[3] == torch.inf
        assert all(t.isfinite().all() for t in (dx, dweight[4:], dbias))
        dy[-1] = torch.inf
        nothing = packed_mask(torch.zeros(m, 1, dtype=torch.bool))
        x[-1, 3] = 1
        for t in linear.one_output_backward(dy, x, weight, nothing, saves=Saves.MASK):
            assert not t.any()


def test_the_gradient_is_rounded_before_it_is_used(linear: LinearActEmulator) -> None:
    """As the products read it from memory: 1 + 2^-8 - 2^-15 is 1 in bfloat16."""
    dy = torch.tensor([1 + 2**-7, -1.0]).bfloat16().repeat(32)[:, None]
    saved = torch.tensor([1 - 2**-8, 1.0]).bfloat16().repeat(32)[:, None]
    x, weight = torch.ones(64, 8).bfloat16(), torch.full((1, 8), 3.0).bfloat16()
    dx, *sums = linear.one_output_backward(dy, x, weight, saved, saves=Saves.DERIVATIVE)
    assert torch.equal(dx.abs(), torch.full((64, 8), 3.0).bfloat16())
    assert not any(t.any() for t in sums)


def test_no_rows(linear: LinearActEmulator) -> None:
    for k in (64, 13):
        dx, dweight, dbias = linear.one_output_backward(*operands(0, k, torch.bfloat16))
        assert dx.shape == (0, k)
        assert not dweight.any()
        assert not dbias.any()


# ---- Configuration -------------------------------------------------------------------------------


def test_many_rows_fill_the_card_once(linear: LinearActEmulator) -> None:
    """65536 x 256: blocks of 8 rows of threads, with 21 rows a thread in all but the last."""
    config = linear.choose_one_output(65536, 256)
    assert config == SumsConfig(True, 32, 1, 391, 391 * 257 * 4)
    config = linear.choose_one_output(8192, 4096)
    assert config == SumsConfig(True, 32, 16, 24, 24 * 4097 * 4)


def test_few_rows_are_added_up_at_once(linear: LinearActEmulator) -> None:
    """Two rounds of a block, without a second kernel; more are spread over the card."""
    assert linear.choose_one_output(16, 4096) == SumsConfig(True, 32, 16, 1, 0)
    assert linear.choose_one_output(96, 256) == SumsConfig(True, 32, 1, 1, 0)
    assert linear.choose_one_output(97, 256).slices == 7
    assert linear.choose_one_output(2048, 256).slices == 128
    assert linear.choose_one_output(0, 256) == SumsConfig(True, 32, 1, 1, 0)


def test_without_sums_all_blocks_are_taken(linear: LinearActEmulator) -> None:
    assert linear.choose_one_output(96, 256, wanted=("dx",)) == SumsConfig(True, 32, 1, 6, 0)
    assert linear.choose_one_output(65536, 256, wanted=("dx",)).workspace_bytes == 0


def test_rows_of_any_length_fit(linear: LinearActEmulator) -> None:
    for k in (1, 7, 8, 24, 264, 1000, 50257, 1 << 20):
        for m in (1, 100, 5000, 1 << 20):
            config = linear.choose_one_output(m, k)
            width = config.threads_along * (8 if config.vectors else 1)
            assert config.column_blocks * width >= k > (config.column_blocks - 1) * width
            assert 1 <= config.slices * config.column_blocks <= max(396, config.column_blocks)
