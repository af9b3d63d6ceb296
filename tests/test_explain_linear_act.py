"""What `fusedcuda.explain` makes of the plans of linear layers. The plans here are made up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from linears import operands
from reference import leaf
from torch import Tensor

from fusedcuda import (
    _explain_linear_act,
    explain,
    linear_act,
    linear_act_fp8,
    linear_residual,
    mlp,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ACTIVATIONS = {"none": 0, "relu": 1, "gelu_tanh": 6}


def step(what: str, **known: Any) -> dict[str, Any]:
    unknown = {"kernel": "cublasLtMatmul", "epilogue": None, "adds_c": False, "tile": None}
    unknown |= {"split_k": 0, "workspace_bytes": 0, "algorithm": None, "tuned": False}
    unknown |= {"fused": True, "why": None, "kernels": 1}
    return {"what": what} | unknown | known


def plan(op: str, *steps: dict[str, Any], copies: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"op": op, "m": 4, "n": 6, "k": 8, "batch": 1, "steps": steps, "copies": copies}


@pytest.fixture
def planned(monkeypatch) -> Callable[..., list[tuple[Any, ...]]]:
    """Called with plans, it answers with them in turn; gives what was asked, name first."""

    def answer(*plans: dict[str, Any]) -> list[tuple[Any, ...]]:
        remaining, asked = iter(plans), []

        def ask(family: str, *arguments: Any, plan: str = "linear_act_plan") -> dict[str, Any]:
            assert family == "linear_act"
            asked.append((plan, *arguments))
            return next(remaining)

        monkeypatch.setattr(_explain_linear_act, "ask", ask)
        return asked

    return answer


def given(**options: Any) -> list[Tensor]:
    return operands(4, n=6, k=8, dtype=BF16, **options)


def nbytes(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors)


def test_one_fused_product(planned):
    fused = step("y", epilogue="RELU_BIAS", tile="64x64", workspace_bytes=1 << 25, algorithm=66)
    asked = planned(plan("linear_act", fused))
    x, weight, bias = given()
    explanation = explain(linear_act, x, weight, bias, "relu")
    name, *tensors, residual, activation, low_precision, saves = asked[0]
    assert name == "linear_act_plan"
    assert all(a is b for a, b in zip(tensors, (x, weight, bias), strict=True))
    assert (residual, activation, low_precision, saves) == (None, 1, False, False)
    assert explanation.function == "linear_act"
    assert explanation.kernels == 1
    assert explanation.bytes_moved == nbytes(x, weight, bias) + 4 * 6 * 2
    assert explanation.plan["steps"][0]["tile"] == "64x64"
    assert str(explanation).splitlines()[1:] == [
        "  linear_act: 4 x 6 from 8 products each",
        "    y: cublasLtMatmul, epilogue RELU_BIAS, tile 64x64, 32 MiB of workspace, algorithm 66",
    ]


@pytest.mark.parametrize(("activation", "saved"), [("none", 0), ("relu", 4 * 16), ("silu", 48)])
def test_what_is_saved_is_written(activation, saved, planned):
    x, weight, bias = given()
    for trained, saves in ((leaf(weight), True), (weight, False)):
        asked = planned(plan("linear_act", step("y")))
        explanation = explain(linear_act, x, trained, bias, activation)
        assert asked[0][-1] is saves
        expected = nbytes(x, weight, bias) + 4 * 6 * 2 + saved * saves
        assert explanation.bytes_moved == expected
    asked = planned(plan("linear_act", step("y")))
    with torch.no_grad():
        explain(linear_act, x, leaf(weight), bias, activation)
    assert asked[0][-1] is False


def test_steps_apart_say_why(planned):
    steps = (
        step("z", epilogue="BIAS", split_k=4, kernels=2),
        step("y", kernel="act_rows_kernel", fused=False, why="there is no epilogue for silu"),
    )
    planned(plan("linear_act", *steps, copies=("x",)))
    x, weight, bias = given()
    explanation = explain(linear_act, x, weight, bias, "silu")
    assert explanation.kernels == 4  # the parts of the split product are added up, x is copied
    assert explanation.bytes_moved == nbytes(x, weight, bias) + 4 * 6 * 2 + 2 * x.nbytes
    assert str(explanation).splitlines()[2:] == [
        "    x: copied first, so that its rows or its columns lie side by side",
        "    z: cublasLtMatmul, epilogue BIAS, split in 4 along k, added up by a kernel of its own",
        "    y: act_rows_kernel",
        "      apart, because there is no epilogue for silu",
    ]


def test_residual(planned):
    x, weight, bias = given()
    residual = torch.ones(4, 6, dtype=BF16)
    asked = planned(plan("linear_act", step("y", adds_c=True, algorithm=0, tuned=True)))
    explanation = explain(linear_residual, x, weight, bias, residual)
    assert "y: cublasLtMatmul, residual added, algorithm 0, tuned" in str(explanation)
    assert asked[0][4] is residual
    assert explanation.bytes_moved == nbytes(x, weight, bias, residual) + 4 * 6 * 2
    asked = planned(plan("linear_act_backward", step("dx")))
    explain(linear_residual, x, weight, None, residual, backward=True)
    assert asked[0][0] == "linear_act_backward_plan"
    assert asked[0][4:] == (None, 0, 0b011, False)


def test_backward(planned):
    x, weight, bias = given()
    asked = planned(plan("linear_act_backward", step("dz"), step("dweight"), step("dx")))
    explanation = explain(
        linear_act, x, weight, bias, "relu", allow_low_precision_reduction=True, backward=True
    )
    name, dy, _, _, saved, *options = asked[0]
    assert name == "linear_act_backward_plan"
    assert (dy.shape, saved.shape, saved.dtype) == ((4, 6), (4, 16), torch.uint8)
    assert options == [1, 0b111, True]
    assert explanation.kernels == 3
    gradients = nbytes(x, weight, bias)
    assert explanation.bytes_moved == nbytes(x, weight, saved, dy) + gradients


def test_sums_of_parts_are_two_kernels(planned):
    sums = "act_rows_bwd_sum_kernel, sum_partials_kernel"
    made = step("dz, dbias", kernel=sums, fused=False, workspace_bytes=1 << 19, kernels=2)
    planned(plan("linear_act_backward", made, step("dweight"), step("dx")))
    explanation = explain(linear_act, *given(), "silu", backward=True)
    assert explanation.kernels == 4
    assert f"    dz, dbias: {sums}, 0.5 MiB of workspace" in str(explanation).splitlines()


def mlp_operands() -> list[Tensor]:
    return [*given(), *operands(1, n=3, k=6, dtype=BF16)[1:]]


def test_mlp(planned):
    x, w1, b1, w2, b2 = mlp_operands()
    asked = planned(plan("linear_act", step("y")), plan("linear_act", step("y")))
    explanation = explain(mlp, leaf(x), w1, b1, w2, b2)
    assert [(call[5], call[7]) for call in asked] == [(6, True), (0, False)]
    assert asked[1][1].shape == (4, 6)
    assert explanation.kernels == 2
    assert len(explanation.launches) == 2
    hidden, y = 4 * 6 * 2, 4 * 3 * 2
    assert explanation.bytes_moved == nbytes(x, w1, b1, w2, b2) + 3 * hidden + y


def test_backward_of_mlp(planned):
    x, w1, b1, w2, b2 = mlp_operands()
    asked = planned(plan("mlp_backward", *(step(name) for name in ("dw2", "dz1", "dw1", "dx"))))
    explanation = explain(mlp, x, w1, b1, w2, None, "relu", backward=True)
    name, dy, _, _, saved, h, _, *options = asked[0]
    assert name == "mlp_backward_plan"
    assert (dy.shape, saved.shape, h.shape) == ((4, 3), (4, 16), (4, 6))
    assert options == [1, 0b01111, False]
    assert explanation.kernels == 4
    assert explanation.bytes_moved == nbytes(x, w1, w2, dy, saved, h) + nbytes(x, w1, b1, w2)

    one_layer = plan("linear_act_backward", step("dweight"), step("dx"))
    asked = planned(one_layer, one_layer)
    assert explain(mlp, x, w1, None, w2, b2, "none", backward=True).kernels == 4
    assert [call[0] for call in asked] == ["linear_act_backward_plan"] * 2
    assert [call[4:] for call in asked] == [(None, 0, 0b111, False), (None, 0, 0b011, False)]


def test_fp8(planned):
    x, weight = torch.ones(4, 8).to(FP8), torch.ones(6, 8).to(FP8)
    scale = torch.ones(())
    scales = {"x_scale": scale, "weight_scale": scale}
    asked = planned(plan("linear_act_fp8", step("y", epilogue="GELU")))
    out = {"out_dtype": FP8, "out_scale": scale}
    explanation = explain(linear_act_fp8, x, weight, activation="gelu_tanh", **scales, **out)
    assert asked[0][0] == "linear_act_fp8_plan"
    assert asked[0][-2:] == (6, FP8)
    assert explanation.bytes_moved == nbytes(x, weight) + 3 * 4 + 4 * 6
    with pytest.raises(RuntimeError, match=r"^linear_act_fp8: records no gradient"):
        explain(linear_act_fp8, x, weight, **scales, backward=True)
    with pytest.raises(ValueError, match=r"^linear_act_fp8: out_scale"):
        explain(linear_act_fp8, x, weight, **scales, out_dtype=FP8)


def test_batches_are_counted_out(planned):
    planned(plan("linear_act", step("y")) | {"batch": 3})
    x, weight, bias = given(batch=(3,))
    assert "linear_act: 3 x 4 x 6 from 8 products each" in str(explain(linear_act, x, weight, bias))


def test_autocast_is_part_of_the_call(planned):
    asked = planned(plan("linear_act", step("y")))
    with torch.autocast("cpu", dtype=BF16):
        explain(linear_act, *operands(4, n=6, k=8))
    assert all(tensor.dtype == BF16 for tensor in asked[0][1:4])


def test_nothing_to_do(planned):
    planned(plan("linear_act"))
    x, weight, bias = given()
    explanation = explain(linear_act, x[:0], weight, bias)
    assert (explanation.kernels, explanation.bytes_moved) == (0, 0)
    assert "empty: nothing to do" in str(explanation)


def test_what_the_call_refuses_explain_refuses():
    x, weight, bias = given()
    for function, arguments, options, message in (
        (linear_act, (x, weight[:, :7], bias), {}, "^linear_act: weight must have shape"),
        (linear_act, (x, weight, bias, "swish"), {}, "^linear_act: activation .*'swish'"),
        (linear_act, (x, weight.float()), {}, "^linear_act: weight must be a torch.bfloat16"),
        (linear_residual, (x, weight, bias, x), {}, "^linear_residual: residual must have shape"),
        (linear_residual, (x, weight, bias, None), {}, "^linear_residual: residual must be a"),
        (mlp, (x, weight, bias, weight, bias), {}, "^mlp: w2 must have shape"),
        (mlp, (x, weight), {}, "^explain: mlp: missing"),
        (
            linear_act,
            (x, weight),
            {"allow_low_precision_reduction": "no"},
            "^linear_act: allow_low_precision_reduction must be a bool",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            explain(function, *arguments, **options)
