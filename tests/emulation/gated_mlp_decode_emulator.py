"""A gated MLP of few rows on the CPU, as csrc/bindings/gated_mlp_decode.h launches it."""

from __future__ import annotations

import ctypes

from emulator import DTYPES, Library, address
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("dtype", "activation", "num_sms", "slot")),
        *((name, ctypes.c_int) for name in ("m", "k", "f", "n")),
        *((name, ctypes.c_void_p) for name in ("x", "w_gate", "w_up", "w_down", "h", "y")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("x", "w_gate", "w_up", "w_down")),
        ("counters", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("stages", "under_way")),
        *((name, ctypes.c_int) for name in ("can_run", "rounds", "rounds_counted", "passes")),
        ("down_tiles", ctypes.c_int),
    )


class GatedMlpDecodeEmulator(Library):
    """`num_sms`: of the GPU; a block runs on each, and all of them at the same time."""

    num_sms = 3
    stages = 0  # of the ring, at most; 0: as many as there is room for
    under_way = 0  # of them, at most; 0: what is chosen
    slot = 0  # of the counters
    call = _Call()  # the last one, with what was chosen

    def gated_mlp_decode(
        self,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        activation: str,
        *,
        counters: Tensor | None = None,
    ) -> list[Tensor]:
        """[h, y]; [] where there is no kernel for this."""
        (m, k), (n, f) = x.shape, w_down.shape

        def make_call(
            x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, h: Tensor, y: Tensor
        ) -> ctypes.Structure:
            read = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
            return _Call(
                dtype=DTYPES.index(x.dtype),
                activation=list(ACTIVATIONS).index(activation),
                num_sms=self.num_sms,
                slot=self.slot,
                **{"m": m, "k": k, "f": f, "n": n},
                **{name: address(matrix) for name, matrix in {**read, "h": h, "y": y}.items()},
                **{f"{name}_stride": matrix.stride(0) for name, matrix in read.items()},
                counters=address(counters),
                stages=self.stages,
                under_way=self.under_way,
            )

        outputs = [x.new_empty(m, f), x.new_empty(m, n)]
        found = self.run(
            "gated_mlp_decode", make_call, [x, w_gate, w_up, w_down], outputs, self._remember
        )
        return found if self.call.can_run else []

    def _remember(self, call: ctypes.Structure) -> None:
        assert isinstance(call, _Call)
        self.call = call
