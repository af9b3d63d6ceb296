"""The norms on the CPU, as csrc/bindings/norm.cpp makes them of the kernels.

Tensors are matrices here, (rows, columns), whose columns are neighbours in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from emulator import address
from row_emulator import Chosen, Matrix, RowConfig, RowLibrary, Rows
from torch import Tensor

# In the order of enum class NormKind.
KINDS = ("rms_norm", "layer_norm")


class _Parameter(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("is_float32", ctypes.c_bool))

    @classmethod
    def of(cls, vector: Tensor | None) -> _Parameter:
        return cls() if vector is None else cls(address(vector), vector.dtype == torch.float32)


class _Call(ctypes.Structure):
    _fields_ = (
        ("rows", Rows),
        *((name, ctypes.c_int) for name in ("backward", "kind", "only_choose")),
        *((name, Matrix) for name in ("x", "residual", "sum", "y", "dy", "dh", "dx")),
        *((name, _Parameter) for name in ("weight", "bias", "dweight", "dbias")),
        *((name, ctypes.c_double) for name in ("weight_offset", "eps")),
        *((name, ctypes.c_void_p) for name in ("mean", "rstd")),
        ("resident_clusters", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("shared_bytes_of_sm", "shared_bytes_of_block")),
        ("chosen", Chosen),
        ("stages", ctypes.c_int),
        ("partials", ctypes.c_int64),
    )


@dataclass(frozen=True)
class NormConfig(RowConfig):
    stages: int = 0
    partials: int = 0  # of the sums over the rows; in the pipeline one for a set of blocks


class NormEmulator(RowLibrary):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # More of the GPU. With num_sms = 0 it is the one that norm_device_traits() finds.
        self.resident_clusters = 1  # of every size
        self.shared_kilobytes_of_sm = 228
        self.shared_kilobytes_of_block = 227
        self.place: Callable[[Tensor], Tensor] = torch.empty_like  # makes y, sum and dx
        self.config = NormConfig()

    def forward(
        self,
        op: str,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
        statistics: bool = True,
    ) -> list[Tensor]:
        """Like torch.ops.fusedcuda.<op>_forward on a GPU; <op> without `statistics`."""

        def make_call(
            x: Tensor,
            residual: Tensor | None,
            weight: Tensor | None,
            bias: Tensor | None,
            y: Tensor,
            total: Tensor | None,
            mean: Tensor | None,
            rstd: Tensor | None,
        ) -> ctypes.Structure:
            return self._call(
                op,
                x,
                residual=Matrix.of(residual),
                sum=Matrix.of(total),
                y=Matrix.of(y),
                weight=_Parameter.of(weight),
                bias=_Parameter.of(bias),
                weight_offset=weight_offset,
                eps=eps,
                mean=address(mean),
                rstd=address(rstd),
            )

        empty = torch.empty(x.shape, dtype=x.dtype)
        values = torch.empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        outputs = [
            self.place(empty),
            None if residual is None else self.place(empty),
            torch.empty_like(values) if statistics and op == "layer_norm" else None,
            torch.empty_like(values) if statistics else None,
        ]
        return self.run(op, make_call, [x, residual, weight, bias], outputs, self.remember)

    def backward(
        self,
        op: str,
        dy: Tensor,
        h: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dh: Tensor | None,
        mask: int,
        weight_offset: float = 0.0,
    ) -> list[Tensor]:
        """Like torch.ops.fusedcuda.<op>_backward on a GPU."""

        def make_call(
            dy: Tensor,
            h: Tensor,
            mean: Tensor | None,
            rstd: Tensor,
            weight: Tensor | None,
            dh: Tensor | None,
            dx: Tensor | None,
            dweight: Tensor | None,
            dbias: Tensor | None,
        ) -> ctypes.Structure:
            return self._call(
                op,
                h,
                backward=True,
                dy=Matrix.of(dy),
                dh=Matrix.of(dh),
                dx=Matrix.of(dx),
                weight=_Parameter.of(weight),
                dweight=_Parameter.of(dweight),
                dbias=_Parameter.of(dbias),
                weight_offset=weight_offset,
                mean=address(mean),
                rstd=address(rstd),
            )

        outputs = [
            self.place(torch.empty(h.shape, dtype=h.dtype)) if mask & 1 else None,
            torch.empty_like(weight) if mask & 2 else None,
            torch.empty_like(bias) if mask & 4 else None,
        ]
        inputs = [dy, h, mean, rstd, weight, dh]
        return self.run(f"{op}_backward", make_call, inputs, outputs, self.remember)

    def choose(
        self, op: str, rows: int, columns: int, dtype: torch.dtype, backward: bool
    ) -> NormConfig:
        """The configuration for tensors without gaps."""
        x = torch.empty((), dtype=dtype).expand(rows, columns)
        call = self._call(op, x, backward=backward, only_choose=True)
        call.x = Matrix()
        self.library.emulate(ctypes.byref(call), None, ctypes.c_size_t(0))
        self.remember(call)
        return self.config

    def _call(self, op: str, x: Tensor, **fields: object) -> ctypes.Structure:
        return _Call(
            rows=self.rows_of(x),
            kind=KINDS.index(op),
            x=Matrix.of(x),
            resident_clusters=self.resident_clusters,
            shared_bytes_of_sm=self.shared_kilobytes_of_sm << 10,
            shared_bytes_of_block=self.shared_kilobytes_of_block << 10,
            **fields,
        )

    def remember(self, call: ctypes.Structure) -> None:
        row = RowConfig.of(call.chosen)
        self.config = NormConfig(**vars(row), stages=call.stages, partials=call.partials)
