"""What entry.cpp is called with, and torch functions in place of the kernels not cuBLASLt's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcuda.ops._activations import activation_gradient, apply_activation

# In the order of enum class DType.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# enum class SavedForBackward
MASK, PRE_ACTIVATION, DERIVATIVE = 1, 2, 3
# cudaDataType_t
CUDA_TYPES = {
    1: torch.float64,
    0: torch.float32,
    2: torch.float16,
    14: torch.bfloat16,
    28: torch.float8_e4m3fn,
}


def _structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Pointer, Int, Long, Bool = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_bool

Problem = _structure(
    "Problem",
    **dict.fromkeys(["m", "n", "k", "batch", "a_stride", "b_stride", "c_stride"], Long),
    **dict.fromkeys(["output_stride", "aux_stride", "a_batch", "b_batch", "c_batch"], Long),
    **dict.fromkeys(["output_batch", "bias_batch", "aux_batch"], Long),
    **dict.fromkeys(["a_k_is_inner", "b_k_is_inner", "type", "output_type", "compute"], Int),
    **dict.fromkeys(["epilogue", "a_alignment", "b_alignment", "c_alignment"], Int),
    **dict.fromkeys(["output_alignment", "scaled_factors", "scaled_output"], Int),
    **dict.fromkeys(["low_precision_reduction", "device"], Int),
)
Operands = _structure(
    "Operands",
    **dict.fromkeys(["a", "b", "c", "output", "bias", "aux"], Pointer),
    **dict.fromkeys(["a_scale", "b_scale", "output_scale"], Pointer),
)
Matrix = _structure("Matrix", data=Pointer, stride=Long, batch_stride=Long)
GemmFactor = _structure("GemmFactor", data=Pointer, stride=Long, k_is_inner=Bool)
Factor = _structure("Factor", matrix=GemmFactor, batch_stride=Long)
Layer = _structure(
    "Layer", dtype=Int, batch=Long, m=Long, n=Long, k=Long, allows_tf32=Bool, low=Bool, device=Int
)
Forward = _structure(
    "Forward",
    layer=Layer,
    activation=Int,
    x=Factor,
    weight=Factor,
    bias=Pointer,
    bias_batch=Long,
    aligned_bias=Pointer,
    residual=Matrix,
    output=Matrix,
    padded_x=Pointer,
    padded_weight=Pointer,
    saves=Int,
    saved=Pointer,
)
Fp8Forward = _structure(
    "Fp8Forward",
    linear=Forward,
    **dict.fromkeys(["x_scale", "weight_scale", "eight_bits", "out_scale", "inverse"], Pointer),
)
Product = _structure("Product", linear=Forward, in_float32=Bool)
Backward = _structure(
    "Backward",
    layer=Layer,
    activation=Int,
    dy=Matrix,
    dz=Matrix,
    x=Factor,
    weight=Factor,
    saves=Int,
    saved=Pointer,
    dx=Pointer,
    dweight=Pointer,
    dbias=Pointer,
    padded_x=Pointer,
    padded_weight=Pointer,
    padded_dx=Pointer,
)
MlpBackward = _structure(
    "MlpBackward",
    first=Backward,
    dy=Matrix,
    h=Factor,
    w2=Factor,
    out_features=Long,
    dw2=Pointer,
    db2=Pointer,
)
ActRowsCall = _structure(
    "ActRowsCall",
    **dict.fromkeys(["dtype", "activation", "backward", "saves"], Int),
    **dict.fromkeys(["m", "n", "input_stride", "output_stride"], Long),
    **dict.fromkeys(["input", "output", "saved"], Pointer),
)
Quantize = _structure("Quantize", source=Pointer, target=Pointer, scale=Pointer, count=Long)
BiasRows = _structure(
    "BiasRows", bias=Pointer, bias_batch=Long, output=Matrix, batch=Long, m=Long, n=Long
)
ColumnSumsCall = _structure("ColumnSumsCall", rows=ActRowsCall, batch=Long, sums=Pointer)
OneOutputCall = _structure(
    "OneOutputCall",
    **dict.fromkeys(["dtype", "saves"], Int),
    **dict.fromkeys(["rows", "columns", "dy_stride", "x_stride", "weight_step"], Long),
    dx_stride=Long,
    **dict.fromkeys(["dy", "saved", "x", "weight", "dx", "dweight", "dbias"], Pointer),
)
BiasRowsCall = _structure(
    "BiasRowsCall",
    dtype=Int,
    **dict.fromkeys(["batch", "m", "n", "bias_batch", "stride", "batch_stride"], Long),
    bias=Pointer,
    output=Pointer,
)

# ---- Memory --------------------------------------------------------------------------------------


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def at(
    data: int | None, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """The tensor of this layout at an address; empty ones have none."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 in shape or data is None:
        return torch.empty(shape, dtype=dtype)
    raw = (ctypes.c_char * (elements * dtype.itemsize)).from_address(data)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


def mask_row_bytes(n: int) -> int:
    return (n + 127) // 128 * 16


def pack_mask(positive: Tensor) -> Tensor:
    """(rows, n) of bool as bits."""
    rows, n = positive.shape
    bits = torch.zeros(rows, mask_row_bytes(n) * 8, dtype=torch.int64)
    bits[:, :n] = positive
    weights = 2 ** torch.arange(8)
    return (bits.view(rows, -1, 8) * weights).sum(-1).to(torch.uint8)


def unpack_mask(mask: Tensor, n: int) -> Tensor:
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2)[..., :n].bool()


# ---- In place of kernels -------------------------------------------------------------------------


def _act_rows(pointer: Any) -> None:
    call = pointer.contents
    dtype, shape = DTYPES[call.dtype], (call.m, call.n)
    _write_act_rows(call, at(call.output, dtype, shape, (call.output_stride, 1)))


def _write_act_rows(call: Any, output: Tensor) -> None:
    dtype, shape = DTYPES[call.dtype], (call.m, call.n)
    values = at(call.input, dtype, shape, (call.input_stride, 1)).double()
    bits = (call.m, mask_row_bytes(call.n))
    saved = at(call.saved, torch.uint8, bits, (bits[1], 1))
    if call.saves in (PRE_ACTIVATION, DERIVATIVE):
        saved = at(call.saved, dtype, shape, (call.n, 1))
    if not call.backward:
        output.copy_(apply_activation(values, call.activation))
        if call.saves == MASK:
            saved.copy_(pack_mask(~(values <= 0)))
        elif call.saves == DERIVATIVE:
            saved.copy_(activation_gradient(torch.ones_like(values), values, call.activation))
        else:
            assert call.saves == 0
    elif call.saves == MASK:
        output.copy_(torch.where(unpack_mask(saved, call.n), values, 0.0))
    elif call.saves == DERIVATIVE:
        output.copy_(values * saved.double())
    else:
        output.copy_(activation_gradient(values, saved.double(), call.activation))


def _product(problem_pointer: Any, operands_pointer: Any) -> None:
    p, o = problem_pointer.contents, operands_pointer.contents
    dtype = CUDA_TYPES[p.type]

    def operand(data: int | None, rows: int, stride: int, batch: int, k_is_inner: int) -> Tensor:
        strides = (batch, stride, 1) if k_is_inner else (batch, 1, stride)
        return at(data, dtype, (p.batch, rows, p.k), strides).double()

    a = operand(o.a, p.m, p.a_stride, p.a_batch, p.a_k_is_inner)
    b = operand(o.b, p.n, p.b_stride, p.b_batch, p.b_k_is_inner)
    z = a @ b.mT
    if p.scaled_factors:
        z *= at(o.a_scale, torch.float32, (1,), (1,)) * at(o.b_scale, torch.float32, (1,), (1,))
    dtype = CUDA_TYPES[p.output_type]
    shape = (p.batch, p.m, p.n)
    if o.bias is not None:
        z += at(o.bias, dtype, shape, (p.bias_batch, 0, 1)).double()
    if p.c_stride > 0:
        z += at(o.c, dtype, shape, (p.c_batch, p.c_stride, 1)).double()
    at(o.output, dtype, shape, (p.output_batch, p.output_stride, 1)).copy_(z)


def _column_sums(pointer: Any) -> None:
    call, rows = pointer.contents, pointer.contents.rows
    dtype, shape = DTYPES[rows.dtype], (rows.m, rows.n)
    values = at(rows.input, dtype, shape, (rows.input_stride, 1))
    if rows.saves != 0:
        assert rows.backward
        dz = torch.empty(shape, dtype=dtype)
        _write_act_rows(rows, dz)
        if rows.output is not None:
            at(rows.output, dtype, shape, (rows.output_stride, 1)).copy_(dz)
        values = dz
    sums = values.double().reshape(call.batch, rows.m // call.batch, rows.n).sum(1)
    at(call.sums, dtype, (call.batch, rows.n), (rows.n, 1)).copy_(sums)


def _quantize(pointer: Any) -> None:
    call = pointer.contents
    values = at(call.source, torch.bfloat16, (call.count,), (1,)).double()
    scale = at(call.scale, torch.float32, (1,), (1,)).double()
    target = at(call.target, torch.float8_e4m3fn, (call.count,), (1,))
    target.copy_((values / scale).clamp(-448, 448))


def _bias_rows(pointer: Any) -> None:
    call = pointer.contents
    dtype, shape = DTYPES[call.dtype], (call.batch, call.m, call.n)
    bias = at(call.bias, dtype, shape, (call.bias_batch, 0, 1))
    at(call.output, dtype, shape, (call.batch_stride, call.stride, 1)).copy_(bias)


def _one_output(pointer: Any) -> None:
    call = pointer.contents
    dtype, shape = DTYPES[call.dtype], (call.rows, call.columns)
    dz = at(call.dy, dtype, (call.rows, 1), (call.dy_stride, 1)).double()
    if call.saves == MASK:
        bits = (call.rows, mask_row_bytes(1))
        dz = torch.where(unpack_mask(at(call.saved, torch.uint8, bits, (bits[1], 1)), 1), dz, 0.0)
    elif call.saves == DERIVATIVE:
        dz = dz * at(call.saved, dtype, (call.rows, 1), (1, 1)).double()
    else:
        assert call.saves == 0
    dz = dz.to(dtype).double()
    if call.dx is not None:
        weight = at(call.weight, dtype, (1, call.columns), (0, call.weight_step)).double()
        at(call.dx, dtype, shape, (call.dx_stride, 1)).copy_(dz * weight)
    if call.dweight is not None:
        x = at(call.x, dtype, shape, (call.x_stride, 1)).double()
        at(call.dweight, dtype, shape[1:], (1,)).copy_((dz * x).sum(0))
    if call.dbias is not None:
        at(call.dbias, dtype, (1,), (1,)).copy_(dz.sum(0))


_CALLBACKS = (
    ctypes.CFUNCTYPE(None, ctypes.POINTER(ActRowsCall))(_act_rows),
    ctypes.CFUNCTYPE(None, ctypes.POINTER(Problem), ctypes.POINTER(Operands))(_product),
    ctypes.CFUNCTYPE(None, ctypes.POINTER(ColumnSumsCall))(_column_sums),
    ctypes.CFUNCTYPE(None, ctypes.POINTER(Quantize))(_quantize),
    ctypes.CFUNCTYPE(None, ctypes.POINTER(BiasRowsCall))(_bias_rows),
    ctypes.CFUNCTYPE(None, ctypes.POINTER(OneOutputCall))(_one_output),
)
CALLBACKS = (Pointer * len(_CALLBACKS))(
    *(ctypes.cast(callback, Pointer) for callback in _CALLBACKS)
)
