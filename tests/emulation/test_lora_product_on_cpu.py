"""A linear layer with its adapter in one launch, run by the emulator of this folder.

Where the elements are small integers the arithmetic is exact, and the outputs must equal the
reference to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapted import exact_layer, integers
from comparison import assert_exact
from emulator import DTYPES, HERE, Library, address
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)
from fusedcuda.ops._lora_reference import pitch_of

BF16 = torch.bfloat16


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("dtype", "num_sms", "rank", "k_is_inner")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k")),
        *((n, ctypes.c_void_p) for n in ("x", "weight", "bias", "down", "up", "t", "output")),
        ("scale", ctypes.c_float),
    )


class Emulator(Library):
    num_sms = 2  # one cluster: the emulator has no launches of several that wait for each other
    k_is_inner = True

    def lora_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> list[Tensor]:
        (m, k), n, rank = x.shape, weight.shape[0], down.shape[0]
        stored = [w if self.k_is_inner else w.T.contiguous() for w in (weight, up)]

        def call(*tensors: Tensor) -> ctypes.Structure:
            sizes = (DTYPES.index(x.dtype), self.num_sms, rank, self.k_is_inner, m, n, k)
            x_, weight_, bias_, down_, up_, y, t = (address(given) for given in tensors)
            return _Call(*sizes, x_, weight_, bias_, down_, up_, t, y, scale)

        outputs = [x.new_empty(m, n), x.new_empty(m, pitch_of(rank))]
        return self.run("lora_product", call, [x, stored[0], bias, down, stored[1]], outputs)


@pytest.fixture
def emulator(build_library: Callable[..., Path]) -> Emulator:
    return Emulator(build_library(HERE / "lora_product.cu"))


def check(
    emulator: Emulator, m: int, n: int, k: int, rank: int, dtype: torch.dtype = BF16, bias=False
) -> None:
    given = exact_layer(m, n, k, rank, dtype, bias)
    y, t = emulator.lora_product(*given)
    exact_y, exact_t = torch.ops.fusedcuda.lora_product(*given)
    assert_exact("t", t, exact_t)
    assert_exact("y", y, exact_y)


@pytest.mark.parametrize("rank", [1, 5, 8, 9, 16])
def test_ranks(emulator: Emulator, rank: int) -> None:
    check(emulator, 300, 264, 136, rank, bias=True)


@pytest.mark.parametrize("m", [1, 15, 16, 17, 127, 129, 700])
def test_rows(emulator: Emulator, m: int) -> None:
    """Warps and tiles whose rows are not all there; more and fewer of them than blocks."""
    check(emulator, m, 72, 72, 16)


@pytest.mark.parametrize(("n", "k"), [(8, 8), (256, 64), (264, 72), (520, 40), (1032, 328)])
def test_columns(emulator: Emulator, n: int, k: int) -> None:
    check(emulator, 140, n, k, 12, torch.float16)


def test_weight_by_columns(emulator: Emulator) -> None:
    emulator.k_is_inner = False
    check(emulator, 300, 264, 136, 7, bias=True)


def test_what_is_not_finite_stays_in_its_row(emulator: Emulator) -> None:
    """Ranks that do not exist are zero, not infinity times zero."""
    x, weight, down = (integers(rows, 72, BF16) for rows in (40, 40, 3))
    x[20, 5] = torch.inf
    up = torch.nn.functional.pad(integers(40, 3, BF16), (0, 5))
    y, t = emulator.lora_product(x, weight, None, down, up, 1.0)
    others = torch.arange(40) != 20
    for output in (t, y):
        assert output[others].isfinite().all()
    assert (t[:, 3:] == 0).all()
    assert not y[20].isfinite().all()
