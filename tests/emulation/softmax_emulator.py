"""Softmax on the CPU, as csrc/bindings/softmax.cpp makes it of the kernels."""

from __future__ import annotations

import ctypes

import torch
from row_emulator import Chosen, Matrix, RowLibrary, Rows
from torch import Tensor


class _Call(ctypes.Structure):
    _fields_ = (
        ("rows", Rows),
        *((name, Matrix) for name in ("x", "dy", "y", "dx")),
        ("scale", ctypes.c_double),
        ("log", ctypes.c_int),
        ("backward", ctypes.c_int),
        ("chosen", Chosen),
    )


class SoftmaxEmulator(RowLibrary):
    def softmax(self, x: Tensor, scale: float, *, log: bool = False) -> Tensor:
        def call(x: Tensor, y: Tensor) -> ctypes.Structure:
            return _Call(rows=self.rows_of(x), x=Matrix.of(x), y=Matrix.of(y), scale=scale, log=log)

        output = torch.empty(x.shape, dtype=x.dtype)
        (y,) = self.run("softmax", call, [x], [output], self.remember)
        return y

    def backward(self, dy: Tensor, y: Tensor, scale: float, *, log: bool = False) -> Tensor:
        def call(dy: Tensor, y: Tensor, dx: Tensor) -> ctypes.Structure:
            return _Call(
                rows=self.rows_of(y),
                dy=Matrix.of(dy),
                y=Matrix.of(y),
                dx=Matrix.of(dx),
                scale=scale,
                log=log,
                backward=True,
            )

        output = torch.empty(y.shape, dtype=y.dtype)
        (dx,) = self.run("softmax_backward", call, [dy, y], [output], self.remember)
        return dx
