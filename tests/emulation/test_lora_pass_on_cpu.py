"""One pass over x for t, for the gradient of a factor, or both, run by the emulator of this folder.

The elements are small integers, so that the arithmetic is exact, and the outputs must equal the
reference to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparison import assert_exact
from emulator import DTYPES, HERE, Library, address
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)
from fusedcuda.ops._lora_dropout import keep_factor
from fusedcuda.ops._lora_reference import pitch_of

BF16 = torch.bfloat16
RANKS = (1, 5, 8, 16, 33, 64)
every_half = pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
ops = torch.ops.fusedcuda


class _Call(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in ("dtype", "up_dtype", "num_sms", "columns", "rank", "transposed")
        ),
        *((n, ctypes.c_int64) for n in ("rows", "x_stride", "factor_stride", "threshold")),
        *((n, ctypes.c_void_p) for n in ("x", "factor", "t", "seed", "down", "up")),
        ("down_scale", ctypes.c_float),
        ("up_scale", ctypes.c_float),
    )


class Emulator(Library):
    num_sms = 3

    def run_pass(
        self,
        x: Tensor,
        rank: int,
        *,
        factor: Tensor | None = None,
        t: Tensor | None = None,
        seed: Tensor | None = None,
        scale: float = 1.0,
        dropout_p: float = 0.0,
        transposed: bool = False,
        in_float32: bool = False,
    ) -> list[Tensor]:
        """Of ``factor`` `down`, of ``t`` `up`."""
        (rows, columns), keep = x.shape, 1.0 if seed is None else keep_factor(dropout_p)
        up_dtype = torch.float32 if in_float32 else x.dtype

        def call(x: Tensor, factor: Tensor, t: Tensor, seed: Tensor, *outputs: Tensor) -> _Call:
            down, up = (address(given) for given in outputs)
            return _Call(
                *(DTYPES.index(x.dtype), DTYPES.index(up_dtype), self.num_sms),
                *(columns, rank, transposed, rows, x.stride(0)),
                *(0 if factor is None else factor.stride(0), round(dropout_p * 65536)),
                *(address(given) for given in (x, factor, t, seed)),
                *(down, up, scale * keep, keep),
            )

        shape = (columns, rank) if transposed else (rank, columns)
        outputs = [
            None if factor is None else x.new_empty(rows, pitch_of(rank)),
            None if t is None else x.new_empty(shape, dtype=up_dtype),
        ]
        found = self.run("lora_pass", call, [x, factor, t, seed], outputs)
        return [output for output in found if output is not None]


@pytest.fixture
def emulator(build_library: Callable[..., Path]) -> Emulator:
    return Emulator(build_library(HERE / "lora_pass.cu"))


def small(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def of_rank(rows: int, rank: int, dtype: torch.dtype = BF16) -> Tensor:
    """With the columns behind the rank that the operators leave, of zeros."""
    return torch.nn.functional.pad(small(rows, rank, dtype=dtype), (0, pitch_of(rank) - rank))


def check_both(
    emulator: Emulator, x: Tensor, rank: int, scale: float = 0.5, in_float32: bool = False
) -> None:
    t = of_rank(x.shape[0], rank, x.dtype)
    factor = of_rank(x.shape[1], rank, x.dtype)
    options = {"scale": scale, "transposed": True, "in_float32": in_float32}
    down, up = emulator.run_pass(x, rank, factor=factor, t=t, **options)
    expected = ops.lora_down(x, factor[:, :rank].T, None, scale, 0.0)
    assert_exact("down", down, expected)
    assert_exact("up", up, ops.lora_up(t, x, None, rank, 0.0, True, in_float32))


def check_down(emulator: Emulator, x: Tensor, rank: int, seed: Tensor | None, p: float) -> None:
    factor = small(rank, x.shape[1], dtype=x.dtype)
    (down,) = emulator.run_pass(x, rank, factor=factor, seed=seed, dropout_p=p)
    assert_exact("down", down, ops.lora_down(x, factor, seed, 1.0, p))


def check_up(
    emulator: Emulator, x: Tensor, rank: int, seed: Tensor | None, p: float, in_float32: bool
) -> None:
    t = of_rank(x.shape[0], rank, x.dtype)
    (up,) = emulator.run_pass(x, rank, t=t, seed=seed, dropout_p=p, in_float32=in_float32)
    assert_exact("up", up, ops.lora_up(t, x, seed, rank, p, False, in_float32))


@pytest.mark.parametrize("rank", RANKS)
@every_half
def test_both(emulator: Emulator, dtype: torch.dtype, rank: int) -> None:
    check_both(emulator, small(150, 264, dtype=dtype), rank, in_float32=rank % 2 == 0)


@pytest.mark.parametrize("num_sms", [1, 2, 5, 7, 132])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (64, 256), (65, 520), (600, 776)])
def test_tiles_of_a_block(emulator: Emulator, rows: int, columns: int, num_sms: int) -> None:
    """Blocks with parts of columns, with all of them and more than one, and with one tile."""
    emulator.num_sms = num_sms
    check_both(emulator, small(rows, columns), 16)


def test_pitched_rows(emulator: Emulator) -> None:
    check_both(emulator, small(100, 136)[:, :128], 8)


@pytest.mark.parametrize("seed", [None, 42], ids=["all", "dropout"])
@pytest.mark.parametrize("rank", RANKS)
@every_half
def test_one_of_them(emulator: Emulator, dtype: torch.dtype, rank: int, seed: int | None) -> None:
    """What is kept is multiplied by 2: exact."""
    x, p = small(150, 264, dtype=dtype), 0.0 if seed is None else 0.5
    given = None if seed is None else torch.tensor([seed])
    check_down(emulator, x, rank, given, p)
    check_up(emulator, x, rank, given, p, in_float32=True)
    check_up(emulator, x, rank, given, p, in_float32=False)


def test_mask_is_that_of_the_elements(emulator: Emulator) -> None:
    """One row at a time is multiplied by the unit matrix, which shows what is kept."""
    seed = torch.tensor([-123456789012345])
    x = torch.ones(200, 64, dtype=BF16)
    kept = ops.lora_dropout(x, seed, 0.1) != 0
    eye = torch.eye(64, dtype=BF16)
    (down,) = emulator.run_pass(x, 64, factor=eye, seed=seed, dropout_p=0.1)
    assert torch.equal(down != 0, kept)
    x = torch.ones(64, 520, dtype=BF16)
    kept = ops.lora_dropout(x, seed, 0.1) != 0
    (up,) = emulator.run_pass(x, 64, t=eye, seed=seed, dropout_p=0.1)
    assert torch.equal(up != 0, kept)


def test_infinity_stays_in_its_row_and_column(emulator: Emulator) -> None:
    x = small(100, 264)
    x[70, 260] = torch.inf
    t, factor = of_rank(100, 5), of_rank(264, 5)
    t[:, :5], factor[:, :5] = 1, 1
    down, up = emulator.run_pass(x, 5, factor=factor, t=t, transposed=True)
    assert down.isfinite().all(1).tolist() == [row != 70 for row in range(100)]
    assert up.isfinite().all(1).tolist() == [column != 260 for column in range(264)]
    assert (down[:, 5:] == 0).all()
