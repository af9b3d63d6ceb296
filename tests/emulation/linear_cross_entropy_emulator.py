"""The linear_cross_entropy family on the CPU, as its binding makes it of the kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

from emulator import DTYPES, Library, address
from torch import Tensor


class _Call(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int),
        ("num_sms", ctypes.c_int),
        ("count", ctypes.c_int64),
        ("gradient", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("vec", ctypes.c_int),
        ("blocks", ctypes.c_int64),
    )


class LinearCrossEntropyEmulator(Library):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_sms = 1  # of the GPU that the grid is made for
        self.vec = self.blocks = 0  # of the last call

    def scale(self, gradient: Tensor, factor: Tensor) -> Tensor:
        """What becomes of `gradient`, which itself stays as it is."""

        def call(gradient: Tensor, factor: Tensor, written: Tensor) -> ctypes.Structure:
            return _Call(
                dtype=DTYPES.index(gradient.dtype),
                num_sms=self.num_sms,
                count=gradient.numel(),
                gradient=address(written),
                factor=address(factor),
            )

        def remember(call: ctypes.Structure) -> None:
            self.vec, self.blocks = call.vec, call.blocks

        inputs, outputs = [gradient, factor], [gradient]
        return self.run("linear_cross_entropy_scale_", call, inputs, outputs, remember)[0]
