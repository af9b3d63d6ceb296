"""What a gated MLP of few rows would launch; it needs the compiled family but no GPU."""

import json
from typing import Any

import layouts
import pytest
import torch
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS

BF16 = torch.bfloat16
H200_SMS = 132
SILU = ACTIVATIONS["silu"]
_ops = torch.ops.fusedcuda
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("gated_mlp")


def operands(m: int, k: int, f: int, n: int | None = None, dtype: torch.dtype = BF16) -> Operands:
    w = torch.empty(2 * f, k, dtype=dtype)
    w_down = torch.empty(k if n is None else n, f, dtype=dtype)
    return torch.empty(m, k, dtype=dtype), w[:f], w[f:], w_down


def plan_text(*given: Tensor, num_sms: int = H200_SMS) -> str:
    return _ops.gated_mlp_decode_plan(*given, SILU, num_sms)


def decode(m: int, k: int, f: int, **options: int) -> dict[str, Any]:
    return json.loads(plan_text(*operands(m, k, f), **options))


@pytest.mark.parametrize("m", [1, 8, 9, 16])
def test_a_block_on_each_multiprocessor_with_a_long_ring(m):
    plan = decode(m, 4096, 14336)
    assert plan["blocks"] == H200_SMS
    assert plan["rows"] == (8 if m <= 8 else 16)
    assert plan["rounds"] == 14  # 13 of 8 rows of w_gate and of w_up each, and what is left
    assert plan["passes"] == (2 if m <= 8 else 4)
    # 40 KB have to be on their way, and what is more only fills the ring while a block waits for h.
    assert 40 < plan["under_way"] * 16 <= 48
    assert plan["stages"] * 16 >= 190
    assert plan["shared_bytes"] <= 227 << 10


def test_fewer_multiprocessors_take_more_rounds():
    assert decode(1, 2048, 8192, num_sms=66)["rounds"] == 16
    assert decode(1, 2048, 8192, num_sms=66)["blocks"] == 66


@pytest.mark.parametrize(("m", "most"), [(8, 8192), (16, 4096)])
def test_the_most_columns_of_x_that_registers_hold(m, most):
    assert plan_text(*operands(m, most, 3072))
    assert plan_text(*operands(m, most + 8, 3072)) == ""
    assert plan_text(*operands(m + 1, most, 3072)) == ""


def test_where_there_is_a_kernel():
    x, w_gate, w_up, w_down = operands(3, 72, 136, 5)
    pitched = [torch.empty(t.shape[0], t.shape[1] + 8, dtype=BF16) for t in (x, w_gate, w_down)]
    for given in (
        (x, w_gate, w_up, w_down),
        (x, w_gate.clone(), w_up, w_down),
        (pitched[0][:, :72], pitched[1][:, :72], w_up, pitched[2][:, :136]),
        (x[:1].expand(1, 72), w_gate, w_up, w_down),
        tuple(t.half() for t in (x, w_gate, w_up, w_down)),
        operands(16, 8, 8, 1),
    ):
        assert plan_text(*given)


def test_where_there_is_none():
    x, w_gate, w_up, w_down = operands(3, 72, 136, 40)
    for given in (
        (layouts.shifted(x, 1), w_gate, w_up, w_down),
        (x, layouts.shifted(w_gate, 1), w_up, w_down),
        (x, w_gate, layouts.shifted(w_up, 1), w_down),
        (x, w_gate, w_up, layouts.shifted(w_down, 1)),
        (layouts.spread(x), w_gate, w_up, w_down),
        (x, layouts.transposed(w_gate), w_up, w_down),
        (x, w_gate, w_up, layouts.transposed(w_down)),
        (x[:1].expand(3, 72), w_gate, w_up, w_down),
        operands(3, 68, 136),
        operands(3, 72, 132),
        operands(17, 72, 136),
        operands(0, 72, 136),
        operands(3, 72, 0),
        operands(3, 0, 136),
        operands(3, 72, 136, 0),
        operands(3, 72, 136, dtype=torch.float32),
    ):
        assert plan_text(*given) == ""


def test_operands_that_do_not_go_together():
    x, w_gate, w_up, w_down = operands(3, 72, 136, 40)
    for given, message in (
        ((x[0], w_gate, w_up, w_down), r"x must be a matrix \(M, K\); got shape \(72,\)"),
        ((x, w_gate[0], w_up, w_down), r"w_gate must be a matrix \(F, K\); got shape \(72,\)"),
        ((x, w_gate, w_up, w_down[0]), r"w_down must be a matrix \(N, F\); got shape \(136,\)"),
        (
            (x, w_gate[:, :64], w_up, w_down),
            r"w_gate must have shape \(136, 72\); got \(136, 64\)",
        ),
        ((x, w_gate, w_up[:8], w_down), r"w_up must have shape \(136, 72\); got \(8, 72\)"),
        ((x, w_gate, w_up, w_down.T), r"w_down must have shape \(136, 136\); got \(136, 40\)"),
        ((x, w_gate, w_up.half(), w_down), "w_up must have the dtype of x"),
        ((x.int(), w_gate, w_up, w_down), "x must be a float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=f"gated_mlp_decode: {message}"):
            plan_text(*given)
    with pytest.raises(RuntimeError, match="activation must be a code from 0 to 7; got 8"):
        _ops.gated_mlp_decode_plan(x, w_gate, w_up, w_down, 8, H200_SMS)
