"""The pointwise operators on the CPU, as csrc/bindings/pointwise.cpp makes them of the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from emulator import DTYPES, Library
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS
from fusedcuda.ops._operands import empty_output

# In the order of enum class PointwiseOp.
OPS = ("bias_act", "add_mul_act", "act_scale_bias", "act_mul")
_CODES = (*OPS, "act_mul_recompute")


class _Launch(ctypes.Structure):
    _fields_ = (
        ("path", ctypes.c_char_p),
        ("gradients", ctypes.c_char_p * 3),
        ("vec", ctypes.c_int),
        ("num_partials", ctypes.c_int),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("number", ctypes.c_double),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_int),
        ("activation", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("wanted", ctypes.c_uint),
        ("num_sms", ctypes.c_int),
        ("max_grid_y", ctypes.c_int),
        ("num_dims", ctypes.c_int),
        ("num_tensors", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("tensors", ctypes.POINTER(_Tensor)),
        ("launches", _Launch * 3),
        ("num_launches", ctypes.c_int),
    )


@dataclass(frozen=True)
class Launch:
    """What pointwise_config.h chose for one launch."""

    path: str
    gradients: tuple[str, ...]
    vec: int
    num_partials: int


class Emulator(Library):
    """The pointwise kernels."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_sms = 4  # of the GPU that the grids are made for
        self.max_grid_y = 65535
        self.launches: list[Launch] = []  # of the last call

    def forward(self, op: str, activation: str, *operands: Tensor | float) -> Tensor:
        """Like torch.ops.fusedcuda.<op> on a GPU; a 0-d tensor is one there, not a number."""
        output = empty_output(*(x for x in operands if isinstance(x, Tensor)))
        (result,) = self._call(op, activation, operands, [output], output.shape, wanted=0)
        return result

    def backward(
        self,
        op: str,
        activation: str,
        grad: Tensor,
        *operands: Tensor | float,
        wanted: Sequence[int],
        shapes: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Gradients of the operands in `wanted`, which look like them, or like `shapes`."""
        like = shapes or operands
        outputs = [torch.empty_like(like[k]) if k in wanted else 0.0 for k in range(len(operands))]
        mask = sum(1 << k for k in wanted)
        return self._call(op, activation, [*operands, grad], outputs, grad.shape, mask)

    def packed(self, activation: str, gate_up: Tensor) -> Tensor:
        halves = gate_up.chunk(2, dim=-1)
        output = torch.empty(halves[0].shape, dtype=gate_up.dtype)
        (result,) = self._call("act_mul", activation, halves, [output], output.shape, wanted=0)
        return result

    def packed_backward(self, activation: str, grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        outputs = torch.empty(gate_up.shape, dtype=gate_up.dtype).chunk(2, dim=-1)
        results = self._call("act_mul", activation, [gate, up, grad], outputs, grad.shape, 0b11)
        return torch.cat(results, dim=-1)

    def packed_recompute(self, activation: str, grad: Tensor, gate_up: Tensor) -> list[Tensor]:
        """[gradient, output]"""
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty(gate_up.shape, dtype=gate_up.dtype)
        outputs = (*gradient.chunk(2, dim=-1), torch.empty(gate.shape, dtype=gate_up.dtype))
        inputs = [gate, up, 0.0, grad]
        *halves, output = self._call(
            "act_mul_recompute", activation, inputs, outputs, grad.shape, 0b111
        )
        return [torch.cat(halves, dim=-1), output]

    def _call(
        self,
        op: str,
        activation: str,
        inputs: Sequence[Tensor | float],
        outputs: Sequence[Tensor | float],
        shape: torch.Size,
        wanted: int,
    ) -> list[Tensor]:
        """The tensors among `outputs`; a gradient that is not wanted is a number there."""

        def make_call(*tensors: Tensor | float) -> _Call:
            described = (_Tensor * len(tensors))()
            for entry, tensor in zip(described, tensors, strict=True):
                if isinstance(tensor, Tensor):
                    entry.data = tensor.data_ptr()
                    entry.strides = _int64s(tensor.expand(shape).stride())
                else:
                    entry.number = tensor
            return _Call(
                op=_CODES.index(op),
                activation=ACTIVATIONS[activation],
                dtype=DTYPES.index(next(x.dtype for x in tensors if isinstance(x, Tensor))),
                wanted=wanted,
                num_sms=self.num_sms,
                max_grid_y=self.max_grid_y,
                num_dims=len(shape),
                num_tensors=len(tensors),
                sizes=_int64s(shape),
                tensors=described,
            )

        return self.run(op, make_call, inputs, outputs, self._keep_launches)

    def _keep_launches(self, call: _Call) -> None:
        self.launches = [
            Launch(
                launch.path.decode(),
                tuple(kind.decode() for kind in launch.gradients if kind),
                launch.vec,
                launch.num_partials,
            )
            for launch in call.launches[: call.num_launches]
        ]


def _int64s(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)
