"""From a public function to a raw operator: gradient or not, checks only where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._library import apply_function, functorch_active
from ._operands import resolve


class Operator(NamedTuple):
    name: str
    raw: torch._ops.OpOverload
    function: type[torch.autograd.Function]
    operands: tuple[str, ...]
    # Of the operands together, beyond what resolve() knows.
    check: Callable[..., None] | None = None


def call(operator: Operator, operands: tuple[Any, ...], *activation: int) -> Tensor:
    """The raw operator, or its differentiable form when an operand asks for a gradient.

    Written for the common case, tensors of one dtype; whatever does not fit is resolved afterwards,
    so that the checks cost nothing when there is nothing to complain about.
    """
    if torch.compiler.is_compiling():
        # The checks are made once, while tracing.
        return dispatch_traced(operator, _resolve(operator, operands), *activation)
    try:
        dtype = operands[0].dtype
        needs_gradient = False
        for operand in operands:
            if operand.dtype is not dtype:
                raise TypeError("mixed dtypes")
            needs_gradient = needs_gradient or operand.requires_grad
        return dispatch(operator, operands, needs_gradient, *activation)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        resolved = _resolve(operator, operands)
        if all(new is old for new, old in zip(resolved, operands, strict=True)):
            raise
    return dispatch(operator, resolved, any(t.requires_grad for t in resolved), *activation)


def dispatch(
    operator: Operator, tensors: Sequence[Tensor | None], needs_gradient: bool, *options: Any
) -> Any:
    """The raw operator, or its differentiable form where there is a gradient to record."""
    # Under functorch a tensor may need a gradient of an outer level without saying so, and in
    # forward mode Function.apply is what refuses dual tensors.
    if torch.is_grad_enabled() and (needs_gradient or functorch_active()):
        return apply_function(operator.function, *tensors, *options)
    if forward_ad._current_level >= 0:
        return operator.function.apply(*tensors, *options)
    # What raw(...) calls, half a microsecond cheaper.
    return operator.raw._op(*tensors, *options)


def dispatch_traced(operator: Operator, tensors: Sequence[Tensor | None], *options: Any) -> Any:
    """:func:`dispatch` for Dynamo."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return operator.function.apply(*tensors, *options)
    if forward_ad._current_level >= 0 or (functorch_active() and torch.is_grad_enabled()):
        # Dynamo would inline the raw operator here and lose the gradient or the tangent.
        raise NotImplementedError(
            f"{operator.name}: torch.func transforms inside torch.compile work under "
            "torch.no_grad() only; compile without the transform, or transform without compiling"
        )
    return operator.raw(*tensors, *options)


def _resolve(operator: Operator, operands: tuple[Any, ...]) -> list[Tensor]:
    resolved = resolve(operator.name, dict(zip(operator.operands, operands, strict=True)))
    if operator.check is not None:
        operator.check(*resolved)
    return resolved
