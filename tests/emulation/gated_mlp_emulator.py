"""The product of a gated MLP on the CPU, as csrc/bindings/gated_mlp.cpp launches it."""

from __future__ import annotations

import ctypes

import torch
from emulator import DTYPES, Library, address
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("dtype", "activation", "num_sms", "group", "tile")),
        *((name, ctypes.c_int64) for name in ("m", "f", "k")),
        *((name, ctypes.c_void_p) for name in ("x", "w_gate", "w_up", "h", "gate_up")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("x", "w_gate", "w_up", "h")),
    )


class GatedMlpEmulator(Library):
    """`num_sms`: of the GPU, few of which make a block compute several tiles."""

    num_sms = 4
    group = 0  # rows of clusters of tiles that are computed together; 0 to choose
    tile = 0  # which of gated_mlp_tiles.cu

    def gated_product(
        self,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        activation: str,
        *,
        saves: bool = False,
        h: Tensor | None = None,
    ) -> list[Tensor]:
        """[h], or with `saves` [h, gate_up]."""
        (m, k), f = x.shape, w_gate.shape[0]
        h = torch.empty(m, f, dtype=x.dtype) if h is None else h
        gate_up = torch.empty(m, 2 * f, dtype=x.dtype) if saves else None

        def call(
            x: Tensor, w_gate: Tensor, w_up: Tensor, h: Tensor, gate_up: Tensor | None
        ) -> ctypes.Structure:
            matrices = {"x": x, "w_gate": w_gate, "w_up": w_up, "h": h}
            return _Call(
                dtype=DTYPES.index(x.dtype),
                activation=list(ACTIVATIONS).index(activation),
                num_sms=self.num_sms,
                group=self.group,
                tile=self.tile,
                m=m,
                f=f,
                k=k,
                gate_up=address(gate_up),
                **{name: address(matrix) for name, matrix in matrices.items()},
                **{f"{name}_stride": matrix.stride(0) for name, matrix in matrices.items()},
            )

        return self.run("gated_product", call, [x, w_gate, w_up], [h, gate_up])
