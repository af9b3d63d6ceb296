"""Operands for the norm kernels that the emulator of this folder runs, and the formulas in float64.

Sums and the gradients of weight and bias are exact, since operands are small integers and the
statistics given to the backward powers of two: they must be right to the last bit. What a mean or a
root goes into may be off by one rounding. NaN surrounds every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
