"""What CUDA's gated MLP is put together of, against float64, on the CPU: needs no GPU.

The layer of `fusedcuda.ops._gated_mlp_cuda` calls operators that have a reference each. Here it
takes the place of the CPU kernels, so that `check_gated_mlp` sees each path with the roundings that
it makes.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gated_mlps import check_gated_mlp, either_weight, forced, fused, random_layer
from reference import DTYPES
from torch import Tensor

import fusedcuda
from fusedcuda.ops import _composition
from fusedcuda.ops import _gated_mlp_cuda as cuda

LAYERS = ("gated_mlp", "gated_mlp_forward", "gated_mlp_backward")
# Those that return nothing where there is no kernel.
KERNELS = ("gated_product", "gated_mlp_decode", "linear_act_extended")
PATHS = tuple(path for path in cuda.PATHS if path != "auto")


@contextmanager
def composed(path: str, has_kernels: bool = True) -> Iterator[None]:
    """On the CPU, too, the layer is what it is on CUDA, and takes this path."""
    library = torch.library.Library("fusedcuda", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are overridden
        for name in LAYERS:
            library.impl(name, getattr(cuda, name), "CPU", allow_override=True)
        for name in () if has_kernels else KERNELS:
            library.impl(name, lambda *arguments: [], "CPU", allow_override=True)
    try:
        with forced(path):
            yield
    finally:
        library._destroy()


def taken(path: str, rows: int, dtype: torch.dtype, packed: bool, saves: bool) -> str:
    """What becomes of a forced path where there are kernels."""
    possible = {
        "decode": dtype.itemsize == 2 and rows <= cuda.MOST_DECODE_ROWS and not saves,
        "fused": dtype.itemsize == 2,
        "apart": True,
        "concatenated": packed,
    }
    return path if possible[path] else "apart"


@pytest.mark.parametrize("recompute", [False, True])
@either_weight
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paths(dtype, path, packed, recompute):
    with composed(path):
        for rows, k, f, n in ((16, 72, 136, 40), (200, 40, 57, 33)):
            layer = random_layer(rows, k=k, f=f, n=n, dtype=dtype)
            for wrt in (None, ()):
                way = taken(path, rows, dtype, packed, saves=wrt is None)
                options: dict[str, Any] = {"packed": packed, "wrt": wrt, "ways": (way, True)}
                check_gated_mlp(layer, recompute=recompute, **options)


@either_weight
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "relu_squared"])
def test_without_kernels(activation, packed):
    for dtype in (torch.float16, torch.bfloat16):
        for path in PATHS:
            with composed(path, has_kernels=False):
                for rows in (16, 150):
                    layer = random_layer(rows, k=72, f=136, n=40, dtype=dtype)
                    ways = ("apart", packed)
                    check_gated_mlp(layer, activation, packed=packed, ways=ways)
                    check_gated_mlp(layer, activation, packed=packed, wrt=(), ways=ways)


class Recorded:
    """torch.ops.fusedcuda, with the names of the operators that are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(torch.ops.fusedcuda, name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    recorded = Recorded()
    for module in (cuda, _composition):
        monkeypatch.setattr(module, "_ops", recorded)
    return recorded.calls


@pytest.mark.parametrize("recompute", [False, True])
@either_weight
def test_only_what_is_asked_for_is_computed(packed, recompute, calls):
    """One pass between the products, of which there is one to h, and one for each gradient."""
    through_h = ["linear_act", "act_mul_packed_backward"]
    of_weight = [*through_h, "linear_act_backward"]
    expected = {
        ("x",): [*through_h, "linear_act" if packed else "linear_act_extended"],
        ("w_gate_up",): of_weight,
        ("w_gate",): of_weight,
        ("w_up",): of_weight,
        ("w_down",): [*["act_mul_packed"] * recompute, "linear_act_backward"],
        ("w_down", "x"): [
            "linear_act",
            "act_mul_packed_recompute" if recompute else "act_mul_packed_backward",
            "linear_act" if packed else "linear_act_extended",
            "linear_act_backward",
        ],
    }
    layer = random_layer(70, k=24, f=16, dtype=torch.bfloat16)
    names = list(layer.operands(packed))
    for wrt, operators in expected.items():
        if not set(wrt) <= set(names):
            continue
        operands = layer.operands(packed)
        for name in wrt:
            operands[name] = operands[name].detach().requires_grad_()
        with composed("fused"):
            y = fused(*operands.values(), recompute=recompute)
            assert calls == ["gated_product", "linear_act"]
            calls.clear()
            y.sum().backward()
        assert calls == operators, wrt
        calls.clear()


def test_the_layer_is_composed_only_within(monkeypatch):
    calls, hidden = [], cuda._hidden

    def counted(path: str, *given: Any, **options: Any) -> list[Tensor]:
        calls.append(path)
        return hidden(path, *given, **options)

    monkeypatch.setattr(cuda, "_hidden", counted)
    layer = random_layer(3, k=5, f=4)

    def call() -> Tensor:
        return fusedcuda.gated_mlp(layer.x, layer.w_gate_up, layer.w_down)

    expected = call()
    assert calls == []
    with composed("concatenated"):
        torch.testing.assert_close(call(), expected)
    call()
    assert calls == ["concatenated"]
