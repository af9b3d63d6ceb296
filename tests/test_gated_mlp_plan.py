"""What the gated_mlp family would launch, by its plans; it needs the compiled family but no GPU."""

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


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("gated_mlp")


def operands(m: int, f: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    w = torch.empty(2 * f, k, dtype=dtype)
    return torch.empty(m, k, dtype=dtype), w[:f], w[f:]


def plan_text(x: Tensor, w_gate: Tensor, w_up: Tensor, saves: bool = False) -> str:
    return _ops.gated_product_plan(x, w_gate, w_up, SILU, saves, H200_SMS)


def product(m: int, f: int, k: int) -> dict[str, Any]:
    return json.loads(plan_text(*operands(m, f, k)))


# ---- gated_product -------------------------------------------------------------------------------


def test_the_product_fills_the_card():
    plan = product(8192, 14336, 4096)
    assert plan["blocks"] == H200_SMS
    assert (plan["tile_rows"], plan["tile_columns"], plan["cluster"]) == (128, 96, 2)
    assert (plan["m"], plan["f"], plan["k"]) == (8192, 14336, 4096)


def test_the_product_has_no_more_blocks_than_tiles():
    assert product(256, 64, 8)["blocks"] == 2
    assert product(257, 64, 8)["blocks"] == 3
    assert product(1, 65 * 64, 8)["blocks"] == 65
    assert product(1025, 96, 8)["blocks"] == 10


def test_of_few_rows_a_block_is_alone():
    plan = product(1024, 14336, 4096)
    assert (plan["tile_rows"], plan["tile_columns"], plan["cluster"]) == (128, 64, 1)


def test_the_product_says_whether_it_saves():
    for saves in (False, True):
        assert json.loads(plan_text(*operands(64, 64, 64), saves))["saves"] is saves


def test_where_the_product_has_a_kernel():
    x, w_gate, w_up = operands(300, 136, 72)
    wide = torch.empty(300, 80, dtype=BF16)
    for given in (
        (x, w_gate, w_up),
        (wide[:, :72], w_gate, w_up),
        (wide[:, :67], w_gate[:, :67], w_up[:, :67]),  # 67 values, but rows of 80 and 72
        (x[:1].expand(1, 72), w_gate, w_up),
        (x, w_gate.clone(), w_up),
        tuple(t.half() for t in (x, w_gate, w_up)),
    ):
        assert plan_text(*given)


def test_where_the_product_has_none():
    x, w_gate, w_up = operands(300, 136, 72)
    for given in (
        (layouts.shifted(x, 1), w_gate, w_up),
        (x, layouts.shifted(w_gate, 1), w_up),
        (x, w_gate, layouts.shifted(w_up, 1)),
        (layouts.spread(x), w_gate, w_up),
        (x, layouts.transposed(w_gate), w_up),
        (x, w_gate, layouts.transposed(w_up)),
        (x[:1].expand(300, 72), w_gate, w_up),
        operands(300, 136, 67),
        operands(300, 132, 72),
        operands(0, 136, 72),
        operands(300, 0, 72),
        operands(300, 136, 0),
        operands(300, 136, 72, torch.float32),
        operands(300, 136, 72, torch.float64),
    ):
        assert plan_text(*given) == ""


def test_operands_that_do_not_go_together():
    x, w_gate, w_up = operands(300, 136, 72)
    for given, message in (
        ((x[0], w_gate, w_up), r"x must be a matrix \(M, K\); got shape \(72,\)"),
        ((x, w_gate[:, :64], w_up), r"w_gate must have shape \(136, 72\); got \(136, 64\)"),
        ((x, w_gate[0], w_up), r"w_gate must have shape \(F, 72\); got \(72,\)"),
        ((x, w_gate, w_up[:128]), r"w_up must have shape \(136, 72\); got \(128, 72\)"),
        ((x, w_gate, w_up.half()), "w_up must have the dtype of x"),
        ((x.int(), w_gate, w_up), "x must be a float64, float32, float16 or bfloat16 tensor"),
    ):
        with pytest.raises(RuntimeError, match=f"gated_product: {message}"):
            plan_text(*given)
    with pytest.raises(RuntimeError, match="activation must be a code from 0 to 7; got 8"):
        _ops.gated_product_plan(x, w_gate, w_up, 8, False, H200_SMS)
