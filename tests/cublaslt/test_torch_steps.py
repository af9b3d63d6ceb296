"""What torch does of a linear layer, called as the binding calls it, on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from fake_kernels import (
    CUDA_TYPES,
    DTYPES,
    BiasRows,
    Matrix,
    Operands,
    Problem,
    Quantize,
    address,
)
from linear_operands import LAYOUTS, pitched
from torch import Tensor, inf, nan

HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


def run(library: ctypes.CDLL, name: str, call: ctypes.Structure, *more: Any) -> None:
    error = ctypes.create_string_buffer(1000)
    function = getattr(library, name)
    if function(ctypes.byref(call), *more, error, ctypes.c_size_t(len(error))) != 0:
        raise RuntimeError(error.value.decode())


def product(
    library: ctypes.CDLL,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Of (batch, m, k) and (batch, n, k)."""
    batch, m, k = a.shape
    n = b.shape[1]
    out_dtype = out_dtype or (torch.bfloat16 if a.dtype == FP8 else a.dtype)
    output = torch.full((batch, m, n), nan, dtype=out_dtype)
    codes = {dtype: code for code, dtype in CUDA_TYPES.items()}
    a_inner, b_inner = a.stride(2) == 1, b.stride(2) == 1
    problem = Problem(
        **{"m": m, "n": n, "k": k, "batch": batch},
        a_stride=a.stride(1 if a_inner else 2),
        b_stride=b.stride(1 if b_inner else 2),
        c_stride=0 if c is None else c.stride(1),
        output_stride=n,
        a_batch=a.stride(0),
        b_batch=b.stride(0),
        c_batch=0 if c is None else c.stride(0),
        output_batch=m * n,
        bias_batch=n if bias is not None and bias.dim() == 2 else 0,
        a_k_is_inner=a_inner,
        b_k_is_inner=b_inner,
        type=codes[a.dtype],
        output_type=codes[out_dtype],
        scaled_factors=scales is not None,
    )
    operands = Operands(
        **{"a": address(a), "b": address(b), "c": address(c), "bias": address(bias)},
        output=address(output),
        a_scale=address(scales[0]) if scales else None,
        b_scale=address(scales[1]) if scales else None,
    )
    run(library, "product", problem, ctypes.byref(operands))
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_products(torch_steps: ctypes.CDLL, layout, dtype: torch.dtype) -> None:
    a, b = (layout(torch.randint(-8, 9, shape).to(dtype)) for shape in ((3, 7, 13), (3, 5, 13)))
    bias, c = torch.randint(-8, 9, (3, 5)).to(dtype), torch.randint(-8, 9, (3, 7, 5)).to(dtype)
    z = a.double() @ b.double().mT
    assert torch.equal(product(torch_steps, a, b), z.to(dtype))
    with_bias = z + bias.double().unsqueeze(1)
    assert torch.equal(product(torch_steps, a, b, bias), with_bias.to(dtype))
    with_one = z + bias[0].double()
    assert torch.equal(product(torch_steps, a, b, bias[0]), with_one.to(dtype))
    expected = (with_bias + c.double()).to(dtype)
    assert torch.equal(product(torch_steps, a, b, bias, pitched(c, 3)), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_is_added_up_is_rounded_once(torch_steps: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Also under autocast, which would have the product in 16 bits."""
    a = torch.tensor([[[2048.0, 1.0]]], dtype=dtype)
    one, residual = torch.ones(1, 1, 2, dtype=dtype), torch.full((1, 1, 1), 16.0, dtype=dtype)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            y = product(torch_steps, a, one, torch.full((1,), -2064.0, dtype=dtype), residual)
        assert y.item() == 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_factors_of_16_bits_with_a_sum_in_float32(
    torch_steps: ctypes.CDLL, dtype: torch.dtype
) -> None:
    a, b = torch.full((1, 1, 2), 1.0, dtype=dtype), torch.full((1, 1, 2), 0.5, dtype=dtype)
    before = torch.full((1, 1, 1), 4096.0)
    after = product(torch_steps, a, b, c=before, out_dtype=torch.float32)
    assert after.dtype == torch.float32
    assert after.item() == 4097


def test_float32_stays_float32_under_autocast(torch_steps: ctypes.CDLL) -> None:
    a, b = torch.full((1, 1, 1), 1 + 2.0**-20), torch.ones(1, 1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(torch_steps, a, b).item() == 1 + 2.0**-20


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_to_multiply(torch_steps: ctypes.CDLL, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    bias = torch.arange(float(n)).bfloat16()
    a, b = torch.zeros(1, m, k).bfloat16(), torch.zeros(1, n, k).bfloat16()
    assert torch.equal(product(torch_steps, a, b, bias), bias.expand(1, m, n))


def test_scaled_factors_of_8_bits(torch_steps: ctypes.CDLL) -> None:
    a, b = (torch.randint(-8, 9, shape).to(FP8) for shape in ((1, 7, 13), (1, 5, 13)))
    scales = torch.tensor(0.1), torch.tensor([3.0])
    bias = torch.randint(-8, 9, (5,)).bfloat16()
    z = a.double() @ b.double().mT * (scales[0].double() * scales[1].double()) + bias.double()
    torch.testing.assert_close(product(torch_steps, a, b, bias, scales=scales), z.bfloat16())


def test_quantize_saturates(torch_steps: ctypes.CDLL) -> None:
    """Also what is infinite, and not what is NaN."""
    given = torch.tensor([1.0, -3.5, 224.0, 300.0, -1e30, inf, -inf, nan, 0.0]).bfloat16()
    target = torch.zeros(9).to(FP8)
    scale = torch.tensor([0.5])
    call = Quantize(address(given), address(target), address(scale), 9)
    run(torch_steps, "quantize", call)
    expected = torch.tensor([2.0, -7.0, 448.0, 448.0, -448.0, 448.0, -448.0, nan, 0.0])
    torch.testing.assert_close(target.float(), expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_bias(torch_steps: ctypes.CDLL, dtype: torch.dtype) -> None:
    for bias in (torch.randn(5).to(dtype), torch.randn(3, 5).to(dtype)):
        output = pitched(torch.full((3, 7, 5), nan, dtype=dtype), 3)
        batch_stride = 5 if bias.dim() == 2 else 0
        matrix = Matrix(address(output), output.stride(1), output.stride(0))
        call = BiasRows(address(bias), batch_stride, matrix, 3, 7, 5)
        run(torch_steps, "bias_rows", call, DTYPES.index(dtype))
        assert torch.equal(output, bias.view(-1, 1, 5).expand(3, 7, 5))
