"""``explain`` of the gated_mlp family.

The layer is composed as it is on CUDA, by the same code, but the operators of which it consists
only say what they would launch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _explain_linear_act, _explain_pointwise, _jit
from ._explanation import Explainers, Explanation, Launch, Parts, ask, multiprocessors
from .ops import _gated_mlp_cuda as cuda
from .ops import _gated_mlp_reference as reference
from .ops import _linear_act_reference as linear_reference
from .ops import _pointwise_reference as pointwise_reference
from .ops import gated_mlp as family
from .ops import linear_act as linear_family
from .ops import pointwise
from .ops._activations import ACTIVATIONS, activation_code
from .ops._gated_mlp_reference import DDOWN, DGATE, DUP, DX

_WHY_NOT = "needs a Hopper GPU, and rows of x and of the weights that start on a 16-byte boundary"


def _explain_gated_mlp(arguments: dict[str, Any], backward: bool) -> Explanation:
    w_gate, w_up = family.split_pair(arguments["w_gate_up"])
    given = family.autocast(arguments["x"], w_gate, w_up, arguments["w_down"])
    code = activation_code("gated_mlp", arguments["activation"])
    reference.check_gated_mlp("gated_mlp", *given)
    records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    layer: tuple[Any, ...] = tuple(None if t is None else t.detach() for t in given)
    call, packed = (*layer, code), w_up is None
    operators = _Operators()
    with torch.no_grad(), operators:
        if not backward:
            forward = cuda.gated_mlp_forward if records else cuda.gated_mlp
            forward(*call)
        else:
            dy, gate_up, h = reference.gated_mlp_forward_fake(*call)
            kept_h = None if arguments["recompute"] else h
            mask = DX | DGATE | DDOWN | (0 if packed else DUP)
            call = (dy, *layer, gate_up, kept_h, packed, code, mask)
            cuda.gated_mlp_backward(*call)
    return operators.parts.explanation("gated_mlp")


class _Operators(TorchDispatchMode):
    """Where the operators of the family, of linear_act and of pointwise launch nothing.

    Each adds its plan to ``parts`` and returns memory that nobody has written to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operator.overloadpacket.__name__
        if operator is torch.ops.aten.clone.default:
            self._copy(args[0])
        explain = _EXPLAINED.get(name) if operator.namespace == "fusedcuda" else None
        if explain is None:
            return operator(*args, **(kwargs or {}))
        return explain(self.parts, *args)

    def _copy(self, x: Tensor) -> None:
        line = "  copied first, so that the elements of a row lie side by side"
        self.parts.add(_launch("copy", "copy"), [x, x], line)


def _launch(op: str, path: str) -> Launch:
    return {"op": op, "path": path, "kernels": 1, "copies": []}


# --------------------------------------------------------------------------------------------------
# Kernels of the family
# --------------------------------------------------------------------------------------------------


def _gated_product(
    parts: Parts, x: Tensor, w_gate: Tensor, w_up: Tensor, activation: int, saves: bool
) -> list[Tensor]:
    arguments = (x, w_gate, w_up, activation, saves)
    outputs = reference.gated_product_fake(*arguments)
    what = "gate and up in one product, multiplied before they are written"
    if saves:
        what += "; both are kept, too"
    return _kernel(parts, "gated_product", what, arguments, outputs)


def _gated_mlp_decode(
    parts: Parts, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: int
) -> list[Tensor]:
    arguments = (x, w_gate, w_up, w_down, activation)
    outputs = reference.gated_mlp_decode_fake(*arguments)
    what = "all three products in one launch, each weight read once"
    return _kernel(parts, "gated_mlp_decode", what, arguments, outputs)


def _kernel(
    parts: Parts, op: str, what: str, arguments: tuple[Any, ...], outputs: list[Tensor]
) -> list[Tensor]:
    """``outputs``, or ``[]`` where there is no kernel for ``arguments``."""
    _jit.load(family.FAMILY)
    text = getattr(torch.ops.fusedcuda, f"{op}_plan")(*arguments, multiprocessors())
    if not text:
        parts.lines.append(f"  {op}: has no kernel for these operands; it {_WHY_NOT}")
        return []
    plan = {"path": op, "kernels": 1, "copies": []} | json.loads(text)
    tensors = [t for t in (*arguments, *outputs) if isinstance(t, Tensor)]
    parts.add(plan, tensors, f"  {op}: {what}: {plan['blocks']} blocks")
    return outputs


# --------------------------------------------------------------------------------------------------
# Products
# --------------------------------------------------------------------------------------------------


def _linear_act(parts: Parts, *arguments: Any) -> Tensor:
    forward: tuple[Any, ...] = (*arguments, False)  # nothing of the product itself is kept
    call = _explain_linear_act._forward(*forward)
    parts.include(_explain_linear_act._explanation("", [call]))
    return call.written[0]


def _linear_act_backward(
    parts: Parts,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: None,
    activation: int,
    mask: int,
    low_precision: bool,
) -> list[Tensor]:
    call = _explain_linear_act._backward(dy, x, weight, [], activation, mask, low_precision)
    # The weight stands for its shape, and is not read.
    call = call._replace(read={"dy": dy, "x": x})
    parts.include(_explain_linear_act._explanation("", [call]))
    return call.written


def _linear_act_product(
    parts: Parts, output: Tensor, a: Tensor, b: Tensor, bias: None, adds: bool
) -> None:
    plan = ask(linear_family.FAMILY, output, a, b, bias, adds, plan="linear_act_product_plan")
    read: dict[str, Tensor | None] = {"a": a, "b": b, "output": output if adds else None}
    call = _explain_linear_act._Call(plan, read, [output])
    parts.include(_explain_linear_act._explanation("", [call]))


def _linear_act_extended(parts: Parts, *arguments: Any) -> list[Tensor]:
    _jit.load(linear_family.FAMILY)
    text = torch.ops.fusedcuda.linear_act_extended_plan(*arguments)
    if not text:
        return []
    x, weight, _, t, up, _ = arguments
    outputs = linear_reference.linear_act_extended_fake(*arguments)
    read: dict[str, Tensor | None] = {"x": x, "weight": weight, "t": t, "up": up}
    call = _explain_linear_act._Call(json.loads(text), read, outputs)
    parts.include(_explain_linear_act._explanation("", [call]))
    parts.lines.append(f"    with {t.shape[1]} more products in each sum: those of up")
    return outputs


# --------------------------------------------------------------------------------------------------
# Between the products
# --------------------------------------------------------------------------------------------------


def _pointwise(
    parts: Parts, function: Callable[..., Tensor], given: dict[str, Any], backward: bool
) -> None:
    *operands, activation = given.values()
    named = {**dict(zip(given, operands, strict=False)), "activation": _name_of(activation)}
    parts.lines.append(f"  {function.__name__}{', its gradient' if backward else ''}")
    parts.include(_explain_pointwise.EXPLAINERS[function](named, backward))


def _act_mul(parts: Parts, gate: Tensor, up: Tensor, activation: int) -> Tensor:
    given = {"gate": gate, "up": up, "activation": activation}
    _pointwise(parts, pointwise.act_mul, given, backward=False)
    return torch.empty_like(gate)


def _act_mul_packed(parts: Parts, gate_up: Tensor, activation: int) -> Tensor:
    given = {"gate_up": gate_up, "activation": activation}
    _pointwise(parts, pointwise.act_mul_packed, given, backward=False)
    return pointwise_reference.act_mul_packed_fake(gate_up, activation)


def _act_mul_packed_backward(
    parts: Parts, grad: Tensor, gate_up: Tensor, activation: int
) -> Tensor:
    given = {"gate_up": gate_up, "activation": activation}
    _pointwise(parts, pointwise.act_mul_packed, given, backward=True)
    return pointwise_reference.act_mul_packed_backward_fake(grad, gate_up, activation)


def _act_mul_packed_recompute(
    parts: Parts, grad: Tensor, gate_up: Tensor, activation: int
) -> list[Tensor]:
    """As the backward, with a tensor more that is written."""
    gradient = _act_mul_packed_backward(parts, grad, gate_up, activation)
    output = torch.empty_like(grad)
    parts.bytes_moved += output.nbytes
    parts.lines.append("    and act_mul_packed itself again: what was not kept")
    return [gradient, output]


def _name_of(activation: int) -> str:
    return next(name for name, code in ACTIVATIONS.items() if code == activation)


_EXPLAINED: dict[str, Callable[..., Any]] = {
    "gated_product": _gated_product,
    "gated_mlp_decode": _gated_mlp_decode,
    "linear_act": _linear_act,
    "linear_act_backward": _linear_act_backward,
    "linear_act_product_": _linear_act_product,
    "linear_act_extended": _linear_act_extended,
    "act_mul": _act_mul,
    "act_mul_packed": _act_mul_packed,
    "act_mul_packed_backward": _act_mul_packed_backward,
    "act_mul_packed_recompute": _act_mul_packed_recompute,
}

EXPLAINERS: Explainers = {family.gated_mlp: _explain_gated_mlp}
