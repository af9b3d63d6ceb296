"""The real norm kernels, run by the emulator of this folder, against the formulas in float64.

Sums and the gradients of weight and bias are exact, since operands are small integers and the
statistics given to the backward powers of two: they must be right to the last bit. What a mean or a
root goes into may be off by one rounding. NaN surrounds every row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from comparison import assert_exact, in_double, integers
from emulator import DTYPES
from norm_emulator import NormConfig, NormEmulator
from reference import ulp
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)

OPS = ("rms_norm", "layer_norm")
EVERY_OP = pytest.mark.parametrize("op", OPS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
REGISTER_DTYPES = pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)  # float64 is streamed
HALVES = (torch.float16, torch.bfloat16)
EPS = 0.25

Place = Callable[[Tensor], Tensor]


@pytest.fixture
def norm(build_family: Callable[[str], Path]) -> NormEmulator:
    return NormEmulator(build_family("norm"))


# ---- Operands ------------------------------------------------------------------------------------


def plain(x: Tensor) -> Tensor:
    return x.clone()


def pitched(offset: int, gap: int) -> Place:
    """Rows `gap` elements apart, the first one `offset` elements behind an aligned address."""

    def place(x: Tensor) -> Tensor:
        rows, columns = x.shape
        stride = columns + gap
        buffer = torch.full((offset + rows * stride,), torch.nan, dtype=x.dtype)
        # As short as it can be: what lies behind the last row may not even be read.
        buffer = buffer[: offset + (rows - 1) * stride + columns].clone()
        return buffer.as_strided((rows, columns), (stride, 1), offset).copy_(x)

    return place


def repeated(x: Tensor) -> Tensor:
    """The first row, once in memory, for all of them."""
    return x[:1].clone().expand(x.shape)


def rows_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return integers(rows, columns, dtype=dtype) + 3  # with a mean


def vectors_for(op: str, columns: int, dtype: torch.dtype) -> list[Tensor | None]:
    weight = integers(columns, dtype=dtype)
    return [weight, None if op == "rms_norm" else integers(columns, dtype=dtype)]


# ---- Checks --------------------------------------------------------------------------------------


def assert_rounded_once(name: str, actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Within half an ulp and, relative to the largest value, a few roundings of the arithmetic."""
    arithmetic = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps
    largest = max(float(expected.abs().max()), scale)
    error = (actual.double() - expected).abs()
    wrong = ~(error <= ulp(expected, actual.dtype) / 2 + 16 * arithmetic * largest)  # also NaN
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, the first at "
        f"{tuple(wrong.nonzero()[0].tolist())}: {actual[wrong][0]} instead of {expected[wrong][0]}"
    )


def doubles(operands: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if operand is None else in_double(operand) for operand in operands]


def check_forward(
    norm: NormEmulator,
    op: str,
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    statistics: bool = True,
) -> NormConfig:
    outputs = norm.forward(op, x, residual, weight, bias, EPS, weight_offset, statistics)
    h = x if residual is None else x + residual
    if residual is not None:
        assert_exact(f"{op} sum", outputs.pop(1), h)
    arguments = [*doubles([weight]), EPS, weight_offset]
    if op == "layer_norm":
        arguments = [*doubles([weight, bias]), EPS]
    expected = getattr(torch.ops.fusedcuda, f"{op}_forward")(in_double(h), None, *arguments)
    names = ("y", "rstd") if op == "rms_norm" else ("y", "mean", "rstd")
    assert len(outputs) == (len(names) if statistics else 1)
    for name, a, e in zip(names, outputs, expected, strict=False):
        assert_rounded_once(f"{op} {name}", a, e)
    return norm.config


def check_backward(
    norm: NormEmulator,
    op: str,
    dy: Tensor,
    h: Tensor,
    dh: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: int | None = None,
    weight_offset: float = 0.0,
) -> NormConfig:
    if mask is None:
        mask = 1 | (2 if weight is not None else 0) | (4 if bias is not None else 0)
    rows, dtype = len(h), torch.float64 if h.dtype == torch.float64 else torch.float32
    rstd = torch.exp2(torch.randint(-2, 2, (rows,))).to(dtype)
    mean = integers(rows, dtype=dtype) + 3 if op == "layer_norm" else None
    actual = norm.backward(op, dy, h, mean, rstd, weight, bias, dh, mask, weight_offset)
    operator = getattr(torch.ops.fusedcuda, f"{op}_backward")
    if op == "rms_norm":
        expected = operator(*doubles([dy, h, rstd, weight, dh]), weight_offset, mask)
    else:
        expected = operator(*doubles([dy, h, mean, rstd, weight, bias, dh]), mask)
    if mask & 1:
        assert_rounded_once(f"{op} dx", actual.pop(0), expected.pop(0), scale=50.0)
    for name, a, e in zip(("dweight", "dbias"), actual, expected, strict=False):
        assert_exact(f"{op} {name}", a, e)
    return norm.config


def check(
    norm: NormEmulator, op: str, rows: int, columns: int, dtype: torch.dtype, place: Place = plain
) -> tuple[NormConfig, NormConfig]:
    """Forward and backward, without and with what else goes in; the configurations without."""
    x, r = (place(rows_of(rows, columns, dtype)) for _ in range(2))
    vectors = vectors_for(op, columns, dtype)
    configs = check_forward(norm, op, x, None, *vectors), check_backward(norm, op, r, x)
    check_forward(norm, op, x, r, *vectors)
    check_backward(norm, op, r, x, place(rows_of(rows, columns, dtype)), *vectors)
    return configs


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
        assert (forward.path, backward.path) == ("register", "pipeline")
        assert forward.aligned == backward.aligned == (offset == 0)
        items |= {forward.items, backward.items}
        rows_per_block.add(forward.rows_per_block)
    assert items == ({1, 4} if op == "rms_norm" else {1, 2, 4})
    assert {1, 4, 8} <= rows_per_block


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


# ---- Clusters ------------------------------------------------------------------------------------


def columns_of_cluster(
    norm: NormEmulator, op: str, cluster: int, dtype: torch.dtype, offset: int, backward: bool
) -> int:
    """The fewest for so many blocks or more, so that the last may have nothing to do.

    With offset 0 the rows are aligned.
    """
    vec = 16 // dtype.itemsize
    for vectors in (256 * 2**k + 1 for k in range(10)):
        columns = vec * vectors - offset
        if norm.choose(op, 2, columns, dtype, backward).cluster >= cluster:
            return columns
    raise AssertionError(f"no rows for clusters of {cluster}")


@EVERY_OP
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("cluster", [2, 16])
def test_clusters(norm, op, cluster, offset) -> None:
    for backward in (False, True):
        columns = columns_of_cluster(norm, op, cluster, torch.float32, offset, backward)
        x, other = rows_of(2, columns, torch.float32), rows_of(2, columns, torch.float32)
        vectors = vectors_for(op, columns, torch.float32)
        if backward:
            config = check_backward(norm, op, other, x, None, *vectors)
        else:
            config = check_forward(norm, op, x, other, *vectors)
        assert config.path == "pipeline"
        assert config.cluster >= cluster


@EVERY_OP
@pytest.mark.parametrize("offset", [0, 1])
def test_clusters_that_take_several_rows(norm, op, offset) -> None:
    norm.shared_kilobytes_of_sm = 60
    for backward in (False, True):
        columns = columns_of_cluster(norm, op, 2, torch.float32, offset, backward)
        x, other = rows_of(5, columns, torch.float32), rows_of(5, columns, torch.float32)
        vectors = vectors_for(op, columns, torch.float32)
        for more in (None, x):
            if backward:
                config = check_backward(norm, op, other, x, more, *vectors)
            else:
                config = check_forward(norm, op, other, more, *vectors)
            assert config.cluster >= 2
            assert config.partials < 5


@EVERY_OP
@REGISTER_DTYPES
def test_several_clusters(norm, op, dtype) -> None:
    """Whose rows are not the same number, and shifted otherwise in each tensor."""
    norm.resident_clusters, norm.shared_kilobytes_of_sm = 2, 24
    norm.place = pitched(2, 3)
    for backward in (False, True):
        columns = columns_of_cluster(norm, op, 2, dtype, -1, backward)
        x, r, dh = (pitched(k, k)(rows_of(3, columns, dtype)) for k in (1, 0, 3))
        vectors = vectors_for(op, columns, dtype)
        if backward:
            config = check_backward(norm, op, r, x, dh, *vectors)
        else:
            config = check_forward(norm, op, x, r, *vectors)
        assert config.cluster >= 2
        assert config.partials == 2


# ---- Streams -------------------------------------------------------------------------------------


@EVERY_OP
@pytest.mark.parametrize("vectors", [4 * 513, 4 * 1024 + 1])
def test_rows_longer_than_registers(norm, op, vectors) -> None:
    """Of a GPU without clusters: more than usual blocks hold, more than any hold."""
    norm.clusters = False
    forward, backward = check(norm, op, 2, 4 * vectors, torch.float32)
    assert backward.path == "stream"
    assert forward.path == "stream" or vectors < 4 * 1024


@EVERY_OP
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_long_rows_of_16_bits(norm, op, dtype) -> None:
    norm.clusters = False
    columns = 8 * 4 * 1024 + 1
    x, residual = rows_of(1, columns, dtype), rows_of(1, columns, dtype)
    config = check_forward(norm, op, x, residual, *vectors_for(op, columns, dtype))
    assert config.path == "stream"


@EVERY_OP
@REGISTER_DTYPES
def test_little_shared_memory(norm, op, dtype) -> None:
    """Sums over the rows in slices, by a kernel of their own."""
    norm.num_sms, norm.shared_kilobytes_of_sm, norm.shared_kilobytes_of_block = 7, 2, 1
    vectors = vectors_for(op, 301, dtype)
    for rows in (15, 16, 17, 50):
        x, dy, dh = (rows_of(rows, 301, dtype) for _ in range(3))
        config = check_backward(norm, op, dy, x, dh, *vectors)
        assert config.path == "stream"
        assert config.partials == min(-(-rows // 16), 3)


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
