"""RoPE on the CPU, as csrc/bindings/rope.cpp makes it of the kernel."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from emulator import DTYPES, Library, address
from torch import Tensor


class _Layout(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 4))


class _Table(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3))


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Layout) for name in ("q", "k", "q_output", "k_output")),
        *((name, _Table) for name in ("cos", "sin")),
        *((name, ctypes.c_int) for name in ("q_heads", "k_heads")),
        *((name, ctypes.c_int64) for name in ("batch", "length", "head_dim")),
        *((name, ctypes.c_int) for name in ("dtype", "table_dtype")),
        *((name, ctypes.c_int) for name in ("half_tables", "interleaved", "transposed")),
        ("num_sms", ctypes.c_int),
        *((name, ctypes.c_int) for name in ("vec", "heads_inside")),
        *((name, ctypes.c_int) for name in ("head_groups", "heads_per_thread")),
        ("column_tiles", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Plan:
    """What rope_config.h chose."""

    vec: int
    heads_inside: bool
    head_groups: int
    heads_per_thread: int
    column_tiles: int


class RopeEmulator(Library):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_sms = 1  # of the GPU that the grid is made for; few: a thread takes several heads
        self.plan = Plan(0, False, 0, 0, 0)  # of the last call

    def rope(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        *,
        transposed: bool = False,
        in_place: bool = False,
    ) -> list[Tensor]:
        """Like torch.ops.fusedcuda.rope on a GPU, rope_backward if `transposed`, or rope_."""

        def make_call(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_output: Tensor, k_output: Tensor
        ) -> ctypes.Structure:
            return _Call(
                q=_layout(q),
                k=_layout(k),
                q_output=_layout(q_output),
                k_output=_layout(k_output),
                cos=_table(cos),
                sin=_table(sin),
                q_heads=q.shape[1],
                k_heads=k.shape[1],
                batch=q.shape[0],
                length=q.shape[2],
                head_dim=q.shape[3],
                dtype=DTYPES.index(q.dtype),
                table_dtype=DTYPES.index(cos.dtype),
                half_tables=cos.shape[-1] != q.shape[-1],
                interleaved=interleaved,
                transposed=transposed,
                num_sms=self.num_sms,
            )

        def remember(call: ctypes.Structure) -> None:
            self.plan = Plan(
                call.vec,
                bool(call.heads_inside),
                call.head_groups,
                call.heads_per_thread,
                call.column_tiles,
            )

        outputs = [q, k] if in_place else [torch.empty_like(q), torch.empty_like(k)]
        return self.run("rope", make_call, [q, k, cos, sin], outputs, remember)


def _layout(x: Tensor) -> _Layout:
    return _Layout(address(x), (ctypes.c_int64 * 4)(*x.stride()))


def _table(table: Tensor) -> _Table:
    batch = table.stride(0) if table.dim() == 3 and table.shape[0] > 1 else 0
    return _Table(address(table), (ctypes.c_int64 * 3)(batch, *table.stride()[-2:]))
