"""Layers of few inputs, by the kernel for them."""

from functools import partial

import pytest
import torch
from linears import check_kernel

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


check = partial(check_kernel, "linear_narrow_kernel")


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
