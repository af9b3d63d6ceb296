"""The lora family on the CPU, as csrc/bindings/lora.cpp makes it of the kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from emulator import DTYPES, Library, address
from torch import Tensor

from fusedcuda.ops._lora_dropout import keep_factor
from fusedcuda.ops._lora_reference import pitch_of

_DOWN, _UP, _DROPOUT, _BRANCH = range(4)


def _fields(kind: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names)


class _Call(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int, "op", "dtype", "other_dtype", "num_sms"),
        *_fields(ctypes.c_int64, "shared_bytes_of_block", "shared_bytes_of_sm", "rows"),
        *_fields(ctypes.c_int, "columns", "rank"),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("factor", ctypes.c_void_p),
        ("factor_stride", ctypes.c_int64),
        *_fields(ctypes.c_int, "rank_is_inner", "transposed"),
        ("scale", ctypes.c_double),
        ("seed", ctypes.c_void_p),
        ("threshold", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "t", "output"),
        *_fields(ctypes.c_int, "aligned_x", "aligned_factor", "rows_of_stage", "columns_of_stage"),
        *_fields(ctypes.c_int, "chunks", "splits"),
        ("tiles", ctypes.c_int64),
    )


class LoraEmulator(Library):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_sms = 2  # of the GPU that the grid is made for
        self.shared_bytes_of_block, self.shared_bytes_of_sm = 227 << 10, 228 << 10
        self.call = _Call()  # the last one, with what was chosen

    def _remember(self, call: ctypes.Structure) -> None:
        assert isinstance(call, _Call)
        self.call = call

    def _given(
        self, x: Tensor, seed: Tensor | None, scale: float, dropout_p: float
    ) -> dict[str, object]:
        return {
            "dtype": DTYPES.index(x.dtype),
            "num_sms": self.num_sms,
            "shared_bytes_of_block": self.shared_bytes_of_block,
            "shared_bytes_of_sm": self.shared_bytes_of_sm,
            "rows": x.shape[0],
            "columns": x.shape[1],
            "x": address(x),
            "x_stride": x.stride(0),
            "scale": scale if seed is None else scale * keep_factor(dropout_p),
            "seed": address(seed),
            "threshold": round(dropout_p * 65536),
        }

    def lora_down(
        self, x: Tensor, factor: Tensor, seed: Tensor | None, scale: float, dropout_p: float
    ) -> Tensor:
        rank_is_inner = factor.stride(1) != 1

        def make_call(
            x: Tensor, factor: Tensor, seed: Tensor | None, t: Tensor
        ) -> ctypes.Structure:
            return _Call(
                op=_DOWN,
                other_dtype=DTYPES.index(factor.dtype),
                rank=factor.shape[0],
                factor=address(factor),
                factor_stride=factor.stride(1 if rank_is_inner else 0),
                rank_is_inner=rank_is_inner,
                output=address(t),
                **self._given(x, seed, scale, dropout_p),
            )

        outputs = [x.new_empty(x.shape[0], pitch_of(factor.shape[0]))]
        return self.run("lora_down", make_call, [x, factor, seed], outputs, self._remember)[0]

    def lora_up(
        self,
        t: Tensor,
        x: Tensor,
        seed: Tensor | None,
        rank: int,
        dropout_p: float,
        transposed: bool,
        in_float32: bool,
    ) -> Tensor:
        def make_call(
            t: Tensor, x: Tensor, seed: Tensor | None, output: Tensor
        ) -> ctypes.Structure:
            return _Call(
                op=_UP,
                other_dtype=DTYPES.index(output.dtype),
                rank=rank,
                t=address(t),
                transposed=transposed,
                output=address(output),
                **self._given(x, seed, 1.0, dropout_p),
            )

        shape = (x.shape[1], rank) if transposed else (rank, x.shape[1])
        outputs = [x.new_empty(shape, dtype=torch.float32 if in_float32 else x.dtype)]
        return self.run("lora_up", make_call, [t, x, seed], outputs, self._remember)[0]

    def lora_dropout(self, x: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
        def make_call(x: Tensor, seed: Tensor, output: Tensor) -> ctypes.Structure:
            given = self._given(x, seed, 1.0, dropout_p)
            return _Call(op=_DROPOUT, output=address(output), **given)

        outputs = [x.new_empty(x.shape)]
        return self.run("lora_dropout", make_call, [x, seed], outputs, self._remember)[0]

    def lora_branch(self, t: Tensor, factor: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
        def make_call(t: Tensor, factor: Tensor, seed: Tensor, output: Tensor) -> ctypes.Structure:
            return _Call(
                op=_BRANCH,
                rank=factor.shape[1],
                factor=address(factor),
                factor_stride=factor.stride(0),
                output=address(output),
                **self._given(t, seed, 1.0, dropout_p),
            )

        outputs = [t.new_empty(t.shape[0], factor.shape[1])]
        return self.run("lora_branch", make_call, [t, factor, seed], outputs, self._remember)[0]
