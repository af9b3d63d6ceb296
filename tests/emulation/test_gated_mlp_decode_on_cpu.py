"""The one launch of a gated MLP of few rows, run by the emulator of this folder.

Where the elements are small integers the arithmetic is exact, and the outputs must equal the
reference to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layouts
import pytest
import torch
from comparison import assert_exact
from emulator import HERE
from gated_mlp_decode_emulator import GatedMlpDecodeEmulator
from reference import ACTIVATIONS
from row_emulator import assert_rounded
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)
from fusedcuda.ops._activations import ACTIVATIONS as CODES

HALVES = (torch.float16, torch.bfloat16)
BF16 = torch.bfloat16
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)

Operands = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture
def decode(build_library: Callable[..., Path]) -> GatedMlpDecodeEmulator:
    return GatedMlpDecodeEmulator(build_library(HERE / "gated_mlp_decode.cu"))


def integers(m: int, k: int, f: int, n: int, dtype: torch.dtype = BF16) -> Operands:
    """Few of them are not zero, so that h is exact as well."""

    def draw(rows: int, columns: int) -> Tensor:
        kept = torch.rand(rows, columns) < min(1.0, 24 / columns)
        return (torch.randint(-2, 3, (rows, columns)) * kept).to(dtype)

    return draw(m, k), draw(f, k), draw(f, k), draw(n, f)


def normal(m: int, k: int, f: int, n: int, dtype: torch.dtype = BF16) -> Operands:
    x, w_gate, w_up, w_down = torch.randn(m, k), *torch.randn(2, f, k), torch.randn(n, f)
    return x.to(dtype), *((w / k**0.5).to(dtype) for w in (w_gate, w_up)), w_down.to(dtype)


def check(decode: GatedMlpDecodeEmulator, *operands: Tensor) -> None:
    h, y = decode.gated_mlp_decode(*operands, "relu")
    x, w_gate, w_up, _ = operands
    relu = CODES["relu"]
    (exact_h,) = torch.ops.fusedcuda.gated_product(x, w_gate, w_up, relu, False)
    (exact_y,) = torch.ops.fusedcuda.gated_mlp_decode(*operands, relu)
    assert_exact("h", h, exact_h)
    assert_exact("y", y, exact_y)


# ---- Values --------------------------------------------------------------------------------------


@every_half
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 15, 16])
def test_rows(decode: GatedMlpDecodeEmulator, m: int, dtype: torch.dtype) -> None:
    check(decode, *integers(m, 264, 104, 40, dtype))


@pytest.mark.parametrize(
    ("m", "k", "f", "n"),
    [
        (1, 8, 8, 1),
        (3, 16, 24, 5),
        (2, 504, 56, 50),  # a stage but for 8 columns
        (2, 512, 48, 48),
        (2, 520, 72, 49),
        (2, 1544, 88, 17),  # three stages and 8 columns
    ],
)
def test_sizes(decode: GatedMlpDecodeEmulator, m: int, k: int, f: int, n: int) -> None:
    """Fewer rows than blocks, rounds that are not full, tiles of few rows."""
    check(decode, *integers(m, k, f, n))


@pytest.mark.parametrize("num_sms", [1, 2, 5, 8])
def test_blocks(decode: GatedMlpDecodeEmulator, num_sms: int) -> None:
    decode.num_sms = num_sms
    check(decode, *integers(4, 136, 200, 70))
    assert decode.call.rounds == -(-200 // (8 * num_sms))
    assert decode.call.down_tiles == -(-70 // (16 * num_sms))


@pytest.mark.parametrize(("m", "k"), [(1, 8192), (9, 4096)])
def test_the_most_columns_that_fit_registers(
    decode: GatedMlpDecodeEmulator, m: int, k: int
) -> None:
    decode.num_sms = 2
    check(decode, *integers(m, k, 24, 20))
    assert not decode.gated_mlp_decode(*integers(m, k + 8, 8, 8), "relu")


@pytest.mark.parametrize(("m", "f"), [(9, 4104), (16, 4600), (3, 8200)])
def test_parts_of_h(decode: GatedMlpDecodeEmulator, m: int, f: int) -> None:
    """More of it than fits registers: passes over the rows of w_down, whose sums are added up."""
    decode.num_sms = 4
    check(decode, *integers(m, 16, f, 70))
    assert decode.call.passes > 1
    assert decode.call.down_tiles == 2


@pytest.mark.parametrize(("f", "passes"), [(24, 1), (504, 1), (520, 2), (1000, 2), (3000, 2)])
def test_the_end_of_h_has_time(decode: GatedMlpDecodeEmulator, f: int, passes: int) -> None:
    """All columns of h fit registers, but there is a first part without the last rounds."""
    check(decode, *integers(2, 16, f, 20))
    assert decode.call.passes == passes


def test_counters_of_rounds(decode: GatedMlpDecodeEmulator) -> None:
    """As many as there are passes; parts of h begin and end within rounds."""
    decode.num_sms = 7
    check(decode, *integers(9, 16, 8600, 20))
    assert (decode.call.passes, decode.call.rounds, decode.call.rounds_counted) == (3, 154, 52)


@pytest.mark.parametrize(("stages", "under_way"), [(1, 1), (2, 1), (3, 2), (3, 3), (5, 3), (12, 1)])
def test_short_rings(decode: GatedMlpDecodeEmulator, stages: int, under_way: int) -> None:
    decode.stages, decode.under_way = stages, under_way
    check(decode, *integers(2, 1100 // 8 * 8, 104, 60))


@every_half
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(decode: GatedMlpDecodeEmulator, activation: str, dtype: torch.dtype) -> None:
    operands = normal(5, 520, 72, 24, dtype)
    x, w_gate, w_up, w_down = (t.double() for t in operands)
    h, y = decode.gated_mlp_decode(*operands, activation)
    gate, up = x @ w_gate.T, x @ w_up.T
    size = (1 + gate.abs().max().item()) * (1 + up.abs().max().item())
    assert_rounded("h", h, ACTIVATIONS[activation](gate) * up, magnitude=4 * size)
    assert_rounded("y", y, h.double() @ w_down.T, magnitude=h.double().abs().sum(1).max().item())


def test_values_that_are_not_finite_stay_in_their_rows(decode: GatedMlpDecodeEmulator) -> None:
    x, w_gate, w_up, w_down = integers(9, 520, 72, 30)
    x[1, 519], x[8, 3] = torch.nan, torch.inf
    w_gate[:, 3], w_up[:, 3] = 1, 1
    w_down[7] = torch.nan
    h, y = decode.gated_mlp_decode(x, w_gate, w_up, w_down.clamp(0, 1) + 1, "relu")
    assert h[1].isnan().any()
    assert (h[8] == torch.inf).all()
    finite = [0, 2, 3, 4, 5, 6, 7]
    assert h[finite].isfinite().all()
    kept = [row for row in range(30) if row != 7]
    assert y[:, 7].isnan().all()
    assert y[finite][:, kept].isfinite().all()
    assert (y[8, kept] == torch.inf).all()


# ---- What is given -------------------------------------------------------------------------------


def test_weights_in_different_places(decode: GatedMlpDecodeEmulator) -> None:
    """Halves of one matrix, and each with a pitch of its own."""
    x, w_gate, w_up, w_down = integers(3, 136, 56, 40)
    both = torch.cat([w_gate, w_up])
    check(decode, x, both[:56], both[56:], w_down)
    pitched = [torch.nn.functional.pad(t, (8, 8 * i)) for i, t in enumerate((x, w_gate, w_up))]
    x, w_gate, w_up = (t[:, 8:144] for t in pitched)
    check(decode, x, w_gate, w_up, torch.nn.functional.pad(w_down, (0, 8))[:, :56])


def test_what_the_kernel_cannot_read_is_refused(decode: GatedMlpDecodeEmulator) -> None:
    x, w_gate, w_up, w_down = integers(3, 136, 56, 40)
    for change in (lambda t: layouts.shifted(t, 1), lambda t: torch.nn.functional.pad(t, (0, 4))):
        for i in range(4):
            operands = [x, w_gate, w_up, w_down]
            operands[i] = change(operands[i])[:, : operands[i].shape[1]]
            assert not decode.gated_mlp_decode(*operands, "relu")
    assert not decode.gated_mlp_decode(*integers(3, 20, 56, 40), "relu")
    assert not decode.gated_mlp_decode(*integers(3, 24, 52, 40), "relu")
    assert not decode.gated_mlp_decode(*integers(17, 24, 56, 40), "relu")
    assert not decode.gated_mlp_decode(*integers(0, 24, 56, 40), "relu")
    assert not decode.gated_mlp_decode(*integers(3, 24, 56, 40, torch.float32), "relu")


# ---- Counters ------------------------------------------------------------------------------------


def test_counters_are_left_as_they_were(decode: GatedMlpDecodeEmulator) -> None:
    """Which the entry checks; so launches follow each other, with those of a slot or of a call."""
    for slot in (0, 5, 1023):
        decode.slot = slot
        check(decode, *integers(3, 24, 104, 40))
    given = torch.zeros(16, dtype=torch.int32)
    operands = integers(3, 24, 104, 40)
    for _ in range(2):
        _, y = decode.gated_mlp_decode(*operands, "relu", counters=given)
        assert_exact("y", y, torch.ops.fusedcuda.gated_mlp_decode(*operands, CODES["relu"])[0])
    assert not given.any()
