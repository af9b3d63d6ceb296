"""The two launches of a gated MLP of few rows, run by the emulator of this folder.

Where the elements are small integers the arithmetic is exact, and the outputs must equal the
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
from fusedcuda.ops._activations import ACTIVATIONS

HALVES = (torch.float16, torch.bfloat16)


class _Call(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int) for n in ("dtype", "activation", "num_sms", "m", "k", "f", "n")),
        *((n, ctypes.c_void_p) for n in ("x", "w_gate", "w_up", "w_down", "h", "y")),
    )


class Emulator(Library):
    num_sms = 4

    def gated_mlp_few(self, *operands: Tensor) -> list[Tensor]:
        """[h, y]"""
        x, w_gate, _, w_down = operands
        (m, k), f, n = x.shape, w_gate.shape[0], w_down.shape[0]

        def call(*tensors: Tensor) -> ctypes.Structure:
            relu = list(ACTIVATIONS).index("relu")
            sizes = (DTYPES.index(x.dtype), relu, self.num_sms, m, k, f, n)
            return _Call(*sizes, *(address(given) for given in tensors))

        return self.run("gated_mlp_few", call, operands, [x.new_empty(m, f), x.new_empty(m, n)])


@pytest.fixture
def emulator(build_library: Callable[..., Path]) -> Emulator:
    return Emulator(build_library(HERE / "gated_mlp_few.cu"))


def integers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Few of them are not zero, so that h is exact as well."""
    kept = torch.rand(rows, columns) < min(1.0, 24 / columns)
    return (torch.randint(-2, 3, (rows, columns)) * kept).to(dtype)


def check(emulator: Emulator, m: int, k: int, f: int, n: int, dtype=torch.bfloat16) -> None:
    shapes = ((m, k), (f, k), (f, k), (n, f))
    operands = [integers(*shape, dtype) for shape in shapes]
    h, y = emulator.gated_mlp_few(*operands)
    relu = ACTIVATIONS["relu"]
    (exact_h,) = torch.ops.fusedcuda.gated_product(*operands[:3], relu, False)
    (exact_y,) = torch.ops.fusedcuda.gated_mlp_few(*operands, relu)
    assert_exact("h", h, exact_h)
    assert_exact("y", y, exact_y)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("m", [1, 8, 16, 17, 40, 64])
def test_rows(emulator: Emulator, m: int, dtype: torch.dtype) -> None:
    check(emulator, m, 264, 104, 40, dtype)


@pytest.mark.parametrize(
    ("k", "f", "n"),
    [(8, 8, 1), (32, 8, 17), (72, 24, 5), (1032, 136, 50), (40, 1048, 300)],
)
def test_columns(emulator: Emulator, k: int, f: int, n: int) -> None:
    """Clusters of one block and of several; tiles whose rows are not all there."""
    check(emulator, 5, k, f, n)


def test_more_tiles_than_blocks(emulator: Emulator) -> None:
    emulator.num_sms = 1
    check(emulator, 3, 72, 520, 264)
