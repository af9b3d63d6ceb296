"""The real norm kernels, run by the emulator of this folder, against the formulas in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from comparison import integers
from norm_checks import (
    EPS,
    EVERY_DTYPE,
    EVERY_OP,
    REGISTER_DTYPES,
    check,
    check_backward,
    check_forward,
    pitched,
    repeated,
    rows_of,
    vectors_for,
)
from torch import Tensor

# ---- Operands of every kind ----------------------------------------------------------------------


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("columns", [40, 37])
def test_optional_operands(norm, op, dtype, columns) -> None:
    x, residual, dy, dh = (rows_of(5, columns, dtype) for _ in range(4))
    weight, bias = vectors_for(op, columns, dtype)
    weights = (None, weight, weight.float())
    biases = (None,) if bias is None else (None, bias, bias.float())
    for r, w, b in itertools.product((None, residual), weights, biases):
        check_forward(norm, op, x, r, w, b)
    for d, w, b in itertools.product((None, dh), weights, biases):
        there = 1 | (2 if w is not None else 0) | (4 if b is not None else 0)
        for mask in range(1, 8):
            if mask & there == mask:
                check_backward(norm, op, dy, x, d, w, b, mask)


@EVERY_DTYPE
@pytest.mark.parametrize("columns", [40, 37])
def test_weight_offset(norm, dtype, columns) -> None:
    x, dy = rows_of(9, columns, dtype), rows_of(9, columns, dtype)
    for weight in (integers(columns, dtype=dtype), integers(columns, dtype=torch.float32)):
        check_forward(norm, "rms_norm", x, None, weight, weight_offset=1.5)
        check_backward(norm, "rms_norm", dy, x, None, weight, weight_offset=1.5)


@EVERY_OP
@EVERY_DTYPE
def test_statistics_that_nobody_wants(norm, op, dtype) -> None:
    check_forward(norm, op, rows_of(5, 24, dtype), statistics=False)


@EVERY_OP
@EVERY_DTYPE
def test_the_sum_is_rounded_before_it_is_normalised(norm, op, dtype) -> None:
    x, residual = (torch.randn(7, 64).to(dtype) for _ in range(2))
    check_forward(norm, op, x, 64 * residual)


# ---- Rows and columns ----------------------------------------------------------------------------


@EVERY_OP
@EVERY_DTYPE
def test_every_number_of_columns(norm, op, dtype) -> None:
    """Less than a vector, all remainders, and several rows a block whose last ones do not exist."""
    for columns in (*range(1, 18), 63, 64, 255, 256, 257):
        check(norm, op, 3, columns, dtype)


@EVERY_OP
@REGISTER_DTYPES
@pytest.mark.parametrize("columns", [16, 13])
def test_numbers_of_rows(norm, op, dtype, columns) -> None:
    seen = set()
    for rows in (1, 31, 32, 33, 64, 127):
        for config in check(norm, op, rows, columns, dtype):
            assert config.items == 1
            seen.add(rows % config.rows_per_block == 0)
    assert seen == {False, True}


@EVERY_OP
@pytest.mark.parametrize(("columns", "dtype"), [(1000, torch.float32), (2048, torch.bfloat16)])
def test_many_warps_in_a_block(norm, op, columns, dtype) -> None:
    """Several rows of several warps: the slots of their reduction take more than a line."""
    check(norm, op, 9, columns, dtype)


@EVERY_OP
@REGISTER_DTYPES
@pytest.mark.parametrize("offset", [0, 1])
def test_items_and_threads(norm, op, dtype, offset) -> None:
    """Several rows a block to one; one vector a thread by few columns, and by few rows."""
    vec = 16 // dtype.itemsize
    norm.shared_kilobytes_of_sm = 100
    items, rows_per_block = set(), set()
    for rows, vectors in ((5, 31), (5, 32), (5, 33), (1, 512), (7, 540)):
        forward, backward = check(norm, op, rows, vectors * vec - offset, dtype)
        in_phases = offset > 0 and forward.items > 1 and forward.threads_per_row >= 32
        assert forward.path == ("pipeline" if in_phases else "register")
        assert backward.path == "pipeline"
        assert forward.aligned == backward.aligned == (offset == 0)
        items |= {forward.items, backward.items}
        rows_per_block.add(forward.rows_per_block)
    assert items == ({1, 4} if op == "rms_norm" else {1, 2, 4})
    assert {1 if offset == 0 else 2, 4, 8} <= rows_per_block


# ---- Memory --------------------------------------------------------------------------------------


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("columns", [7, 64, 270])
def test_offsets_and_gaps(norm, op, dtype, columns) -> None:
    """Rows that begin anywhere, each tensor's somewhere else, inputs and outputs."""
    vec = 16 // dtype.itemsize
    x, r, dh = (rows_of(4, columns, dtype) for _ in range(3))
    vectors = vectors_for(op, columns, dtype)
    for offset in range(vec):
        at = [pitched((offset + 1) * k % vec, offset % 3 * k) for k in range(1, 5)]
        norm.place = at[3]
        check_forward(norm, op, at[0](x), None, *vectors)
        check_forward(norm, op, at[0](x), at[1](r), *vectors)
        check_backward(norm, op, at[0](r), at[1](x), None, *vectors)
        check_backward(norm, op, at[1](r), at[0](x), at[2](dh), *vectors)


@EVERY_OP
@REGISTER_DTYPES
@pytest.mark.parametrize("tensor", range(6))
def test_one_tensor_off_the_alignment(norm, op, dtype, tensor) -> None:
    """Enough to make the others' vectors of no use: an operand, an output, a weight."""

    def at(number: int, x: Tensor | None) -> Tensor | None:
        return pitched(1, 0)(x) if number == tensor and x is not None else x

    x, r, dh = (at(k, rows_of(4, 64, dtype)) for k in range(3))
    norm.place = pitched(1, 0) if tensor == 3 else torch.empty_like
    weight, bias = vectors_for(op, 64, dtype)
    weight = at(4, weight.unsqueeze(0)).squeeze(0)
    bias = None if bias is None else at(5, bias.unsqueeze(0)).squeeze(0)
    forward = check_forward(norm, op, x, r, weight, bias)
    assert forward.aligned == (tensor == 2 or (tensor == 5 and bias is None))
    assert check_backward(norm, op, r, x, dh, weight, bias).aligned == (tensor > 3)


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("columns", [61, 64])
def test_aligned_rows_with_gaps(norm, op, dtype, columns) -> None:
    for config in check(norm, op, 5, columns, dtype, pitched(0, 128 - columns)):
        assert config.aligned == (columns == 64)


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("columns", [61, 64])
def test_one_row_for_all(norm, op, dtype, columns) -> None:
    """An expanded tensor, such as the gradient of a sum: rows whose stride is 0."""
    x, dy, dh = (rows_of(40, columns, dtype) for _ in range(3))
    vectors = vectors_for(op, columns, dtype)
    check_forward(norm, op, repeated(x), repeated(dh), *vectors)
    check_backward(norm, op, repeated(dy), x, None, *vectors)
    check_backward(norm, op, dy, repeated(x), repeated(dh), *vectors)


# ---- Persistent blocks ---------------------------------------------------------------------------


@EVERY_OP
@REGISTER_DTYPES
@pytest.mark.parametrize("offset", [0, 1])
def test_stages(norm, op, dtype, offset) -> None:
    """Blocks that take more sets of rows than they have stages, and fewer."""
    columns = 3 * 16 // dtype.itemsize - offset
    x, dy, dh = (rows_of(310, columns, dtype) for _ in range(3))
    vectors = vectors_for(op, columns, dtype)
    stages = set()
    for kilobytes in (4, 12, 14):
        norm.shared_kilobytes_of_sm = kilobytes
        for rows, more in ((40, None), (310, None), (310, dh)):
            config = check_backward(norm, op, dy[:rows], x[:rows], more, *vectors)
            assert config.path == "pipeline"
            assert config.rows_per_block > 1
            stages.add(config.stages)
        assert config.partials * config.rows_per_block * (config.stages + 1) < rows
    assert stages >= {1, 2}


@EVERY_OP
def test_the_gpu_at_hand(norm, op) -> None:
    """It takes what is chosen by what norm_device_traits() says of it."""
    norm.num_sms = 0
    for rows, columns in ((135, 61), (3, 4099)):
        check(norm, op, rows, columns, torch.bfloat16)


# ---- Nothing -------------------------------------------------------------------------------------


@EVERY_OP
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_empty(norm, op, shape) -> None:
    """The kernels are not started; what is written is the binding's affair."""
    x = torch.empty(shape)
    norm.forward(op, x, x.clone(), None, None, EPS)
    assert norm.config.path == "empty"
    mean = None if op == "rms_norm" else torch.empty(shape[0])
    norm.backward(op, x, x.clone(), mean, torch.empty(shape[0]), None, None, None, 1)
    assert norm.config.path == "empty"
