"""``explain`` of the pointwise family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._explanation import Explainers, Explanation, ask, multiprocessors
from .ops import pointwise
from .ops._activations import activation_code
from .ops._call import Operator
from .ops._operands import is_number, resolve

_ACCESS = {
    "absent": "not written",
    "number": "a number in the launch parameters",
    "splat": "one value for a row of a vector",
    "vector": "16-byte vectors",
    "unaligned": "element by element, neighbours in memory",
    "element": "element by element, strided or repeated",
}
_SUMS = ("columns", "rows", "total")


def _explain(operator: Operator, arguments: dict[str, Any], backward: bool) -> Explanation:
    if "activation" in arguments:
        activation_code(operator.name, arguments["activation"])
    given = {name: arguments[name] for name in operator.operands}
    resolved = resolve(operator.name, given)
    if operator.check is not None:
        operator.check(*resolved)
    mask = _gradients_computed(operator.name, given, resolved) if backward else 0

    names = ("gate", "up") if operator.name == "act_mul_packed" else operator.operands
    gradients = tuple(f"gradient of {name}" for name in names)
    tensors = (*names, "grad", *gradients) if backward else (*names, "output")
    plans = ask(pointwise.FAMILY, operator.name, resolved, multiprocessors(), mask)
    launches = tuple({**plan, "tensors": tensors, "kernels": _kernels(plan)} for plan in plans)
    lines = [line for launch in launches for line in _describe(launch)]
    return Explanation(
        operator.name, launches, _bytes_moved(operator.name, resolved, mask), tuple(lines)
    )


EXPLAINERS: Explainers = {
    function: partial(_explain, operator) for function, operator in pointwise.OPERATORS.items()
}


def _kernels(plan: dict[str, Any]) -> int:
    """One, and a small second one for what is left behind the vectors or to finish sums."""
    if plan["path"] == "empty":
        return 0
    has_sums = any(kind in _SUMS for kind in plan.get("gradients", ()))
    return 1 + has_sums + (plan["rest"] > 0)


def _describe(launch: dict[str, Any]) -> list[str]:
    blocks = "x".join(str(b) for b in launch["blocks"])
    vec = launch["vec"]
    width = f"{vec} elements at once" if vec > 1 else "single elements"
    lines = [f"  {launch['path']}: {blocks} blocks of {launch['threads']} threads, {width}"]
    for name, access in zip(launch["tensors"], launch["access"], strict=True):
        if access != "absent":
            lines.append(f"    {name}: {_ACCESS[access]}")
    if launch["rest"]:
        lines.append(f"    the last {launch['rest']} element(s): one by one, by a second kernel")
    for name, kind in zip(launch["tensors"], launch.get("gradients", ()), strict=False):
        if kind in _SUMS:
            lines.append(f"    gradient of {name}: summed ({kind}), finished by a second kernel")
    return lines


def _gradients_computed(name: str, given: dict[str, Any], operands: list[Tensor]) -> int:
    """Which gradients the backward has to compute, as a mask; some tensors get theirs for free."""
    if name == "act_mul_packed":
        return 0b11
    mask = sum(1 << index for index, t in enumerate(given.values()) if isinstance(t, Tensor))
    shape = torch.broadcast_shapes(*(t.shape for t in operands))
    if name in pointwise.SUMS and operands[0].shape == operands[1].shape:
        mask &= ~0b10  # both summands get the same tensor
    if name == "act_scale_bias" and operands[2].shape == shape:
        mask &= ~0b100  # a full bias gets the incoming gradient itself
    return mask


def _bytes_moved(name: str, operands: list[Tensor], mask: int) -> int:
    """Bytes by formula: each tensor once, with the elements it has; numbers are free."""
    itemsize = operands[0].element_size()
    if name == "act_mul_packed":
        half = operands[0].numel() // 2
        return half * (5 if mask else 3) * itemsize
    output = torch.broadcast_shapes(*(t.shape for t in operands)).numel()
    sizes = [0 if is_number(t) else t.numel() for t in operands]
    if not mask:
        return (sum(sizes) + output) * itemsize
    # add_relu reads its output in place of the operands; the bias of act_scale_bias is not read.
    read = {"add_relu": [output], "act_scale_bias": sizes[:2]}.get(name, sizes)
    written = [size for index, size in enumerate(sizes) if mask >> index & 1]
    return (sum(read) + output + sum(written)) * itemsize
