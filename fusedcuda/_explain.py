"""``explain``: what a call would launch, before it is made."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _jit
from .ops import pointwise
from .ops._activations import activation_code
from .ops._operands import is_number, resolve

_H200_SMS = 132

_ACCESS = {
    "absent": "not written",
    "number": "a number in the launch parameters",
    "splat": "one value for a row of a vector",
    "vector": "16-byte vectors",
    "element": "element by element",
}


@dataclass(frozen=True)
class Explanation:
    """The launches of one call. ``str()`` is for people, ``launches`` and ``plan`` for programs.

    ``plan`` is the first launch: ``path`` ("linear", "broadcast", "columns", "rows" or "empty"),
    ``access`` of each tensor (operands, then output; for a backward: operands, incoming gradient,
    gradients), ``vec`` elements a thread handles at once, ``threads``, ``blocks``, ``rows``,
    ``columns``, and for a backward ``gradients`` ("full", "columns", "rows", "total", "none") and
    ``workspace`` in elements.
    """

    function: str
    launches: tuple[dict[str, Any], ...]
    bytes_moved: int

    @property
    def plan(self) -> dict[str, Any]:
        return self.launches[0]

    @property
    def kernels(self) -> int:
        """Kernels launched: one a plan, and a small second one where gradients are summed."""
        sums = ("columns", "rows", "total")
        return sum(
            1 + any(kind in sums for kind in launch.get("gradients", ()))
            for launch in self.launches
        )

    def __str__(self) -> str:
        lines = [
            f"{self.function}: {self.kernels} kernel(s), {self.bytes_moved / 1e6:.3f} MB moved"
        ]
        for launch in self.launches:
            blocks = "x".join(str(b) for b in launch["blocks"])
            lines.append(
                f"  {launch['path']}: {blocks} blocks of {launch['threads']} threads, "
                f"{_width(launch['vec'])}"
            )
            for name, access in zip(launch["tensors"], launch["access"], strict=True):
                if access != "absent":
                    lines.append(f"    {name}: {_ACCESS[access]}")
            for name, kind in zip(launch["tensors"], launch.get("gradients", ()), strict=False):
                if kind not in ("none", "full"):
                    lines.append(
                        f"    gradient of {name}: summed ({kind}), finished by a second kernel"
                    )
        return "\n".join(lines)


def explain(
    function: Callable[..., Tensor], *operands: Any, backward: bool = False, **kwargs: Any
) -> Explanation:
    """What ``function(*operands, **kwargs)`` would launch: kernel, vector width, grid, bytes.

    Works without a GPU once the family is compiled (it loads it if needed): CPU tensors stand for
    CUDA tensors of their shape and layout. The grid is that of the current GPU, or of an H200 (132
    multiprocessors) where there is none. ``backward=True`` explains the backward with gradients for
    every tensor operand.

    >>> print(fusedcuda.explain(fusedcuda.bias_act, x, bias, "gelu"))

    Raises ``TypeError`` for a function that is not an operator of fusedcuda, and what the call
    itself would raise.
    """
    operator = pointwise.operator_of(function)
    if operator is None:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"explain: {name} is not an operator of fusedcuda")
    try:
        call = inspect.signature(function).bind(*operands, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {operator.name}: {error}") from None
    call.apply_defaults()
    if "activation" in call.arguments:
        activation_code(operator.name, call.arguments["activation"])
    given = {name: call.arguments[name] for name in operator.operands}
    resolved = resolve(operator.name, given)
    packed = operator.name == "act_mul_packed"
    if operator.check is not None:
        operator.check(*resolved)
    mask = _gradients_computed(operator.name, given, resolved) if backward else 0

    _jit.load(pointwise.FAMILY)
    on_gpu = torch.cuda.is_available()
    num_sms = torch.cuda.get_device_properties().multi_processor_count if on_gpu else _H200_SMS
    plans = torch.ops.fusedcuda.pointwise_plan(operator.name, resolved, num_sms, mask)
    names = ("gate", "up") if packed else operator.operands
    gradients = tuple(f"gradient of {name}" for name in names)
    tensors = (*names, "grad", *gradients) if backward else (*names, "output")
    launches = tuple({**plan, "tensors": tensors} for plan in json.loads(plans))
    return Explanation(operator.name, launches, _bytes_moved(operator.name, resolved, mask))


def _width(elements: int) -> str:
    return f"{elements} elements at once" if elements > 1 else "single elements"


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
