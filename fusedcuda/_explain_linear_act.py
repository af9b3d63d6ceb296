"""``explain`` of the linear_act family."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._explanation import Explainers, Explanation, ask
from .ops import _linear_act_fp8_reference as fp8
from .ops import _linear_act_reference as reference
from .ops import linear_act as family
from .ops._activations import activation_code
from .ops._linear_act_reference import NONE


class _Call(NamedTuple):
    """One of an operator: its plan, and the tensors that it reads and writes."""

    plan: dict[str, Any]
    read: dict[str, Tensor | None]
    written: list[Tensor]


def _explain_linear(name: str, arguments: dict[str, Any], backward: bool) -> Explanation:
    """Of linear_act and linear_residual."""
    operands = [arguments[key] for key in ("x", "weight", "bias")]
    low_precision = arguments["allow_low_precision_reduction"]
    activation = activation_code(name, arguments.get("activation", "none"))
    x, weight, bias, residual = family.autocast(*operands, arguments.get("residual"))
    reference.check_linear(name, x, weight, bias, residual)
    if name == "linear_residual":
        reference.check_operand(name, "residual", residual, x)  # which may not be absent
    reference.check_options(name, activation, low_precision)
    if not backward:
        saves = _records_gradient(x, weight, bias, residual)
        call = _forward(x, weight, bias, residual, activation, low_precision, saves)
        return _explanation(name, [call])
    dy, *saved = reference.linear_act_forward_fake(x, weight, bias, activation, low_precision)
    mask = _mask(True, True, bias is not None)
    return _explanation(name, [_backward(dy, x, weight, saved, activation, mask, low_precision)])


def _explain_mlp(arguments: dict[str, Any], backward: bool) -> Explanation:
    operands = [arguments[key] for key in ("x", "w1", "b1", "w2", "b2")]
    low_precision = arguments["allow_low_precision_reduction"]
    activation = activation_code("mlp", arguments["activation"])
    x, w1, b1, w2, b2 = family.autocast(*operands)
    reference.check_two_layers("mlp", x, w1, b1, w2, b2)
    reference.check_options("mlp", activation, low_precision)
    h, *saved = reference.linear_act_forward_fake(x, w1, b1, activation, low_precision)
    if not backward:
        saves = _records_gradient(x, w1, b1, w2, b2)
        return _explanation(
            "mlp",
            [
                _forward(x, w1, b1, None, activation, low_precision, saves),
                _forward(h, w2, b2, None, NONE, low_precision, False),
            ],
        )
    first_layer = _mask(True, True, b1 is not None)
    second_layer = _mask(True, True, b2 is not None)
    dy = reference.linear_act_fake(h, w2, b2, None, NONE, low_precision)
    if activation == NONE:  # nothing to chain
        upper = _backward(dy, h, w2, [], NONE, second_layer, low_precision)
        lower = _backward(h, x, w1, [], NONE, first_layer, low_precision)
        return _explanation("mlp", [upper, lower])
    read: dict[str, Any] = {"dy": dy, "x": x, "w1": w1, "saved": saved[0], "h": h, "w2": w2}
    options: tuple[Any, ...] = (
        activation,
        first_layer | (second_layer & 0b110) << 2,
        low_precision,
    )
    plan = ask(family.FAMILY, *read.values(), *options, plan="mlp_backward_plan")
    written = reference.mlp_backward_fake(*read.values(), *options)
    return _explanation("mlp", [_Call(plan, read, written)])


def _explain_fp8(arguments: dict[str, Any], backward: bool) -> Explanation:
    if backward:
        raise RuntimeError("linear_act_fp8: records no gradient, so it has no backward")
    names = ("x", "weight", "bias", "x_scale", "weight_scale", "out_scale")
    read: dict[str, Any] = {name: arguments[name] for name in names}
    out_dtype = arguments["out_dtype"]
    activation = activation_code("linear_act_fp8", arguments["activation"])
    operands: tuple[Any, ...] = (*read.values(), out_dtype)
    fp8.check_fp8(*operands)
    options: tuple[Any, ...] = (activation, out_dtype)
    plan = ask(family.FAMILY, *read.values(), *options, plan="linear_act_fp8_plan")
    output = fp8.linear_act_fp8_fake(*read.values(), *options)
    return _explanation("linear_act_fp8", [_Call(plan, read, [output])])


EXPLAINERS: Explainers = {
    family.linear_act: partial(_explain_linear, "linear_act"),
    family.linear_residual: partial(_explain_linear, "linear_residual"),
    family.mlp: _explain_mlp,
    family.linear_act_fp8: _explain_fp8,
}


def _mask(*bits: bool) -> int:
    return sum(bit << position for position, bit in enumerate(bits))


def _records_gradient(*operands: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    low_precision: bool,
    saves: bool,
) -> _Call:
    read = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    plan = ask(family.FAMILY, *read.values(), activation, low_precision, saves)
    written = reference.linear_act_forward_fake(x, weight, bias, activation, low_precision)
    return _Call(plan, read, written if saves else written[:1])


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: list[Tensor],
    activation: int,
    mask: int,
    low_precision: bool,
) -> _Call:
    read: dict[str, Any] = {"dy": dy, "x": x, "weight": weight}
    read["saved"] = saved[0] if saved else None
    options: tuple[Any, ...] = (activation, mask, low_precision)
    plan = ask(family.FAMILY, *read.values(), *options, plan="linear_act_backward_plan")
    return _Call(plan, read, reference.linear_act_backward_fake(*read.values(), *options))


# --------------------------------------------------------------------------------------------------
# In words
# --------------------------------------------------------------------------------------------------


def _explanation(name: str, calls: list[_Call]) -> Explanation:
    launches = tuple({**call.plan, "kernels": _kernels(call.plan)} for call in calls)
    lines = [line for call in calls for line in _describe(call.plan)]
    return Explanation(name, launches, sum(_bytes_moved(call) for call in calls), tuple(lines))


def _kernels(plan: dict[str, Any]) -> int:
    return sum(step["kernels"] for step in plan["steps"]) + len(plan["copies"])


def _bytes_moved(call: _Call) -> int:
    copies = [tensor for name in call.plan["copies"] if (tensor := call.read[name]) is not None]
    read = [tensor for tensor in call.read.values() if tensor is not None]
    if not call.plan["steps"]:
        return 0
    return sum(t.nbytes for t in (*read, *call.written)) + sum(2 * t.nbytes for t in copies)


def _describe(plan: dict[str, Any]) -> list[str]:
    if not plan["steps"]:
        return ["  empty: nothing to do"]
    times = f"{plan['batch']} x " if plan["batch"] > 1 else ""
    lines = [f"  {plan['op']}: {times}{plan['m']} x {plan['n']} from {plan['k']} products each"]
    for name in plan["copies"]:
        lines.append(f"    {name}: copied first, so that its rows or its columns lie side by side")
    for step in plan["steps"]:
        lines.append(f"    {step['what']}: {_how(step)}")
        if step["why"]:
            lines.append(f"      apart, because {step['why']}")
    return lines


def _how(step: dict[str, Any]) -> str:
    parts = [step["kernel"]]
    if step["epilogue"]:
        parts.append(f"epilogue {step['epilogue']}")
    if step["adds_c"]:
        parts.append("residual added")
    if step["tile"]:
        parts.append(f"tile {step['tile']}")
    if step["split_k"] > 1:
        parts.append(f"split in {step['split_k']} along k, added up by a kernel of its own")
    if step["workspace_bytes"]:
        parts.append(f"{step['workspace_bytes'] / 2**20:.2g} MiB of workspace")
    if step["algorithm"] is not None:
        parts.append(f"algorithm {step['algorithm']}{', tuned' if step['tuned'] else ''}")
    return ", ".join(parts)
