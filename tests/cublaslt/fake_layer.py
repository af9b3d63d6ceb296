"""The cuBLASLt layer and the steps of linear_act against a fake cuBLASLt, on CPU tensors.

`fake_cublaslt.cpp` takes the place of the library, `entry.cpp` calls the layer, and
`fake_kernels.py` is the rest.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fake_kernels import (
    CALLBACKS,
    DTYPES,
    MASK,
    PRE_ACTIVATION,
    Backward,
    Factor,
    Forward,
    Fp8Forward,
    GemmFactor,
    Layer,
    Matrix,
    MlpBackward,
    Pointer,
    Product,
    address,
    mask_row_bytes,
)
from torch import Tensor

from fusedcuda._cublaslt import ARITHMETIC
from fusedcuda._cublaslt import EPILOGUES as ALL_EPILOGUES
from fusedcuda.ops._activations import ACTIVATIONS

# cublasLtEpilogue_t
EPILOGUES = {
    "DEFAULT": 1,
    "BIAS": 4,
    "RELU": 2,
    "RELU_BIAS": 6,
    "RELU_AUX_BIAS": 134,
    "GELU_BIAS": 36,
    "GELU_AUX_BIAS": 164,
    "DRELU": 136,
    "DRELU_BGRAD": 152,
    "DGELU_BGRAD": 208,
    "BGRADB": 512,
}


def factor(tensor: Tensor) -> ctypes.Structure:
    """(rows, k) or (batch, rows, k), with one of the last two dimensions inner."""
    k_is_inner = tensor.stride(-1) == 1
    stride = tensor.stride(-2 if k_is_inner else -1)
    batch_stride = tensor.stride(0) if tensor.dim() == 3 else 0
    return Factor(GemmFactor(address(tensor), stride, k_is_inner), batch_stride)


def matrix(tensor: Tensor | None) -> ctypes.Structure:
    if tensor is None:
        return Matrix()
    batch_stride = tensor.stride(0) if tensor.dim() == 3 else 0
    return Matrix(address(tensor), tensor.stride(-2), batch_stride)


class FakeLayer:
    """One plan cache over the fake cuBLASLt."""

    def __init__(self, entry: ctypes.CDLL, fake: ctypes.CDLL, capacity: int = 64) -> None:
        self.entry, self.fake = entry, fake
        entry.cache_create.restype = Pointer
        entry.cache_size.restype = ctypes.c_size_t
        fake.fake_mistake.restype = ctypes.c_char_p
        fake.fake_reset()
        entry.forget_support()
        self.use("cublaslt")
        self.cache = Pointer(entry.cache_create(ctypes.c_size_t(capacity)))

    def close(self) -> None:
        self.entry.cache_destroy(self.cache)

    def use(self, backend: str) -> None:
        """One of the names of linear_act_use."""
        self.entry.use_backend(("measured", "hopper", "cublaslt").index(backend))

    def searches(self) -> int:
        """How often cuBLASLt was asked for algorithms."""
        return self.fake.fake_searches()

    def size(self) -> int:
        return self.entry.cache_size(self.cache)

    def matmul(self, problem: ctypes.Structure, operands: ctypes.Structure) -> int | None:
        """The status of cuBLASLt, or None where it has no algorithm."""
        error = ctypes.create_string_buffer(1000)
        arguments = (ctypes.byref(problem), ctypes.byref(operands), error)
        status = self.entry.matmul(self.cache, *arguments, ctypes.c_size_t(len(error)))
        if status == -2:
            raise RuntimeError(error.value.decode())
        return None if status == -1 else status

    def candidate(self, problem: ctypes.Structure) -> int:
        """Which of cuBLASLt's candidates the plan has."""
        return self.entry.plan_tile(self.cache, ctypes.byref(problem)) - 20

    def choose(self, problem: ctypes.Structure, number: int) -> None:
        """That candidate from now on; -1: what cuBLASLt recommends."""
        if self.entry.choose(self.cache, ctypes.byref(problem), number) != 0:
            raise ValueError(number)

    def find_again(self, problem: ctypes.Structure, count: int) -> None:
        self.entry.find_again(self.cache, ctypes.byref(problem), count)

    def use_support(self, path: Path) -> None:
        """What a table of the probe says is fused."""
        for name, epilogues in json.loads(path.read_text())["epilogues"].items():
            for epilogue, measured in epilogues.items():
                kind = (*ARITHMETIC[name], ALL_EPILOGUES[epilogue])
                self.entry.set_support(*kind, measured["fused"])

    def without_algorithm(self, *epilogues: str) -> None:
        for name in epilogues:
            self.fake.fake_without_algorithm(EPILOGUES[name])

    def fails_when_run(self, *epilogues: str) -> None:
        for name in epilogues:
            self.fake.fake_fails_when_run(EPILOGUES[name])

    def _run(self, function: str, call: ctypes.Structure) -> list[dict[str, Any]]:
        text = ctypes.create_string_buffer(1 << 14)
        size = ctypes.c_size_t(len(text))
        entry = getattr(self.entry, function)
        if entry(self.cache, ctypes.byref(call), CALLBACKS, text, size) != 0:
            raise RuntimeError(text.value.decode())
        return json.loads(text.value)

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        activation: str = "none",
        saves: bool | int = False,
    ) -> tuple[Tensor, Tensor | None, list[dict[str, Any]]]:
        """(y, saved, steps). ``saves``: one of SavedForBackward, or what the binding chooses."""
        kind = saved_kind(activation) if saves is True else int(saves)
        batch, m, n, k = _sizes(x, weight)
        y = x.new_full((*x.shape[:-1], n), torch.nan)
        saved = None
        if kind == MASK:
            saved = torch.full((batch * m, mask_row_bytes(n)), 255, dtype=torch.uint8)
        elif kind != 0:
            saved = torch.full_like(y, torch.nan)
        aligned = x.new_empty(batch * n)
        call = Forward(
            layer=Layer(DTYPES.index(x.dtype), batch, m, n, k),
            activation=ACTIVATIONS[activation],
            x=factor(x),
            weight=factor(weight),
            bias=address(bias),
            bias_batch=n if bias is not None and bias.dim() == 2 else 0,
            aligned_bias=address(aligned),
            residual=matrix(residual),
            output=matrix(y),
            saves=kind,
            saved=address(saved),
        )
        return y, saved, self._run("forward", call)

    def fp8_forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scales: tuple[Tensor, Tensor],
        activation: str = "none",
        out_scale: Tensor | None = None,
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """(y, steps); y in 8 bits if there is an out_scale."""
        _, m, n, k = _sizes(x, weight)
        wide = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        narrow = torch.full((m, n), torch.nan).to(torch.float8_e4m3fn)
        inverse = None if out_scale is None else out_scale.reciprocal()
        call = Fp8Forward(
            linear=Forward(
                layer=Layer(DTYPES.index(torch.bfloat16), 1, m, n, k),
                activation=ACTIVATIONS[activation],
                x=factor(x),
                weight=factor(weight),
                bias=address(bias),
                output=matrix(wide),
            ),
            x_scale=address(scales[0]),
            weight_scale=address(scales[1]),
            eight_bits=None if out_scale is None else address(narrow),
            out_scale=address(out_scale),
            inverse=address(inverse),
        )
        steps = self._run("fp8_forward", call)
        return wide if out_scale is None else narrow, steps

    def product(
        self, output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, adds: bool = False
    ) -> list[dict[str, Any]]:
        """The steps that write ``a @ b.T + bias`` to the output, or add it to what that holds."""
        _, m, n, k = _sizes(a, b)
        aligned = a.new_empty(n)
        call = Product(
            linear=Forward(
                layer=Layer(DTYPES.index(a.dtype), 1, m, n, k),
                x=factor(a),
                weight=factor(b),
                bias=address(bias),
                aligned_bias=address(aligned),
                residual=matrix(output if adds else None),
                output=matrix(output),
            ),
            in_float32=a.dtype.itemsize == 2 and output.dtype == torch.float32,
        )
        return self._run("product", call)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        saved: Tensor | None = None,
        activation: str = "none",
        wanted: Sequence[str] = ("dx", "dweight", "dbias"),
        saves: int | None = None,
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        call, gradients, _dz = _backward_call(dy, x, weight, saved, activation, wanted)
        if saves is not None:
            call.saves = saves
        return gradients, self._run("backward", call)

    def mlp_backward(
        self,
        dy: Tensor,
        x: Tensor,
        w1: Tensor,
        saved: Tensor | None,
        h: Tensor,
        w2: Tensor,
        activation: str,
        wanted: Sequence[str] = ("dx", "dw1", "db1", "dw2", "db2"),
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        names = {"dx": "dx", "dw1": "dweight", "db1": "dbias"}
        first, gradients, dz = _backward_call(
            torch.empty_like(h), x, w1, saved, activation, [names[w] for w in wanted if w in names]
        )
        gradients = {new: gradients[old] for new, old in names.items() if new in wanted}
        if "dw2" in wanted:
            gradients["dw2"] = torch.full(w2.shape, torch.nan, dtype=x.dtype)
        if "db2" in wanted:
            gradients["db2"] = x.new_full(w2.shape[:1], torch.nan)
        call = MlpBackward(
            first=first,
            dy=matrix(dy),
            h=factor(h),
            w2=factor(w2),
            out_features=w2.shape[0],
            dw2=address(gradients.get("dw2")),
            db2=address(gradients.get("db2")),
        )
        steps = self._run("mlp_backward", call)
        del dz  # was written to until here
        return gradients, steps


def saved_kind(activation: str) -> int:
    return {"none": 0, "relu": MASK}.get(activation, PRE_ACTIVATION)


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    batch = weight.shape[0] if weight.dim() == 3 else 1
    return batch, x.shape[-2], weight.shape[-2], weight.shape[-1]


def _backward_call(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    activation: str,
    wanted: Sequence[str],
) -> tuple[ctypes.Structure, dict[str, Tensor], Tensor]:
    batch, m, n, k = _sizes(x, weight)
    dz = torch.full(dy.shape, torch.nan, dtype=dy.dtype)
    shapes = {"dx": x.shape, "dweight": weight.shape, "dbias": weight.shape[:-1]}
    gradients = {name: x.new_full(shapes[name], torch.nan) for name in wanted}
    call = Backward(
        layer=Layer(DTYPES.index(x.dtype), batch, m, n, k),
        activation=ACTIVATIONS[activation],
        dy=matrix(dy),
        dz=matrix(dz),
        x=factor(x),
        weight=factor(weight),
        saves=saved_kind(activation),
        saved=address(saved),
        dx=address(gradients.get("dx")),
        dweight=address(gradients.get("dweight")),
        dbias=address(gradients.get("dbias")),
    )
    return call, gradients, dz
