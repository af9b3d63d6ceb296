"""Layers of few inputs by the kernel for them, which is taken only where it is asked for."""

from collections.abc import Iterator

import pytest
import torch
from linears import check_linear, operands
from reference import poison

import fusedcuda

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
ops = torch.ops.fusedcuda


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    fusedcuda.load("linear_act")
    before = ops.linear_act_use("narrow")
    yield
    ops.linear_act_use(before)


def check(m: int, n: int, k: int, activation: str = "relu", dtype: torch.dtype = BF16) -> None:
    x, weight, bias = operands(m, n=n, k=k, dtype=dtype, device="cuda")
    steps = str(fusedcuda.explain(fusedcuda.linear_act, x, weight, bias, activation))
    assert "linear_narrow_kernel" in steps
    poison("cuda", 2 * m * n, 2 * m * k, 2 * n * k)
    check_linear(x, weight, bias, activation)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("k", [1, 2, 9, 13, 16])
def test_inputs(dtype, k):
    for activation in ("none", "relu", "gelu", "gelu_tanh", "silu", "relu_squared"):
        check(300, 136, k, activation, dtype)


@pytest.mark.parametrize("m", [1, 15, 1000])
@pytest.mark.parametrize("n", [8, 40, 520])
def test_ragged_sizes(m, n):
    check(m, n, 13)
    check(m, n, 13, "gelu_tanh")


@pytest.mark.parametrize(("m", "n", "k"), [(65536, 512, 13), (65537, 512, 16), (2048, 512, 13)])
def test_large_sizes(m, n, k):
    check(m, n, k)
