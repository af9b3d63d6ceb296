"""What CUDA's lora layers are put together of, against float64, on the CPU: needs no GPU.

The layers of `fusedcuda.ops._lora_cuda` call operators that have a reference each. Here they take
the place of the CPU kernels, so that `check_lora` sees each path with the roundings that it makes.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from loras import check_lora, random_layer
from torch import Tensor

import fusedcuda
from fusedcuda.ops import _lora_cuda

LAYERS = ("lora_linear", "lora_linear_forward", "lora_linear_backward")
PATHS = tuple(path for path in _lora_cuda.PATHS if path != "auto")
HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def composed(path: str) -> Iterator[None]:
    """On the CPU, too, a layer is what it is on CUDA, and takes this path."""
    library = torch.library.Library("fusedcuda", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are overridden
        for name in LAYERS:
            library.impl(name, getattr(_lora_cuda, name), "CPU", allow_override=True)
    before = torch.ops.fusedcuda.lora_use(path)
    try:
        yield
    finally:
        torch.ops.fusedcuda.lora_use(before)
        library._destroy()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with composed(request.param):
        yield request.param


def fine_bias(n: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 2**-14, with which no sum fits into 16 bits.

    Without them float16 holds most of the linear as it is: eager would make no error there, which
    is luck and no standard.
    """
    bias = (torch.randn(n) * 2**10).round().clamp(-2047, 2047)
    return (bias * 2**-14).to(dtype)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("factors", ["float32", "16 bits"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_paths(path, dtype, factors, activation, dropout_p):
    lora_dtype = torch.float32 if factors == "float32" else dtype
    for rank in (5, 16, 72):
        for k in (136, 13):
            for rows in (16, 1100):
                layer = random_layer(rows, n=40, k=k, rank=rank, dtype=dtype, lora_dtype=lora_dtype)
                layer = layer._replace(bias=fine_bias(40, dtype))
                check_lora(layer, 0.5, activation, dropout_p=dropout_p, path=path)


@pytest.mark.parametrize("dropout_p", [0.1, 0.9])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu_squared", "tanh"])
def test_other_activations_and_probabilities(path, activation, dropout_p):
    """Where the keep factor is no power of two: what is kept of the gradient is rounded twice."""
    for dtype in HALVES:
        layer = random_layer(70, n=48, k=44, rank=16, dtype=dtype)._replace(
            bias=fine_bias(48, dtype)
        )
        check_lora(layer, -0.3, activation, dropout_p=dropout_p, path=path)


def test_the_layers_are_composed_only_within(monkeypatch):
    calls, product = [], _lora_cuda._product

    def counted(*given, **options) -> list[Tensor]:
        calls.append(_lora_cuda.choose_path())
        return product(*given, **options)

    monkeypatch.setattr(_lora_cuda, "_product", counted)
    x, weight, bias, lora_a, lora_b = random_layer(3, n=4, k=5, rank=2)

    def call() -> Tensor:
        return fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias)

    expected = call()
    assert calls == []
    with composed("residual"):
        torch.testing.assert_close(call(), expected)
    call()
    assert calls == ["residual"]
    assert _lora_cuda.choose_path() == "decode"
