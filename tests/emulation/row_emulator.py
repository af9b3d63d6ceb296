"""What the emulators of families that reduce over the last dimension share (rows.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from emulator import DTYPES, Library, address
from torch import Tensor


class Rows(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int),
        ("num_sms", ctypes.c_int),
        ("clusters", ctypes.c_int),
    )


class Matrix(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))

    @classmethod
    def of(cls, x: Tensor | None) -> Matrix:
        return cls() if x is None else cls(address(x), x.stride(0))


class Chosen(ctypes.Structure):
    _fields_ = (
        ("path", ctypes.c_char_p),
        *(
            (name, ctypes.c_int)
            for name in ("aligned", "items", "threads_per_row", "rows_per_block", "cluster")
        ),
    )


@dataclass(frozen=True)
class RowConfig:
    """What the family's chooser chose."""

    path: str = ""
    aligned: bool = False
    items: int = 0
    threads_per_row: int = 0
    rows_per_block: int = 0
    cluster: int = 0

    @classmethod
    def of(cls, chosen: Chosen) -> RowConfig:
        values = [getattr(chosen, field[0]) for field in Chosen._fields_[2:]]
        return cls(chosen.path.decode(), bool(chosen.aligned), *values)


class RowLibrary(Library):
    """Emulates the kernels of a family on matrices (rows, columns)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Of the GPU that the configuration is chosen for. Few, so that few rows are many rows.
        self.num_sms = 1
        self.clusters = True
        self.config = RowConfig()  # of the last call

    def rows_of(self, x: Tensor) -> Rows:
        return Rows(DTYPES.index(x.dtype), *x.shape, self.num_sms, self.clusters)

    def remember(self, call: ctypes.Structure) -> None:
        self.config = RowConfig.of(call.chosen)


def assert_rounded(
    name: str, actual: Tensor, expected: Tensor, ulps: float = 1, magnitude: float = 1
) -> None:
    """``actual`` is what float64 gives, but for arithmetic in float32 and that many roundings.

    ``magnitude``: of the terms whose difference an element may be, as a factor of 1.
    """
    step = torch.finfo(actual.dtype).eps
    error = 4e-6 if actual.dtype != torch.float64 else 1e-13
    torch.testing.assert_close(
        actual.double(),
        expected,
        rtol=ulps * step + error,
        atol=error * magnitude,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )
