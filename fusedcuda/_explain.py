"""``explain``: what a call would launch, before it is made."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from ._explanation import Explainers, Explanation

# The modules of the families, which only a call of explain() needs: a quarter of the time that it
# takes to import fusedcuda.
_MODULES = (
    "pointwise",
    "rows",
    "rope",
    "linear_act",
    "dlrm",
    "lora",
    "gated_mlp",
    "linear_cross_entropy",
)


@functools.cache
def _explainers() -> Explainers:
    found: Explainers = {}
    for name in _MODULES:
        found |= importlib.import_module(f"._explain_{name}", __package__).EXPLAINERS
    return found


def explain(
    function: Callable[..., Any], *operands: Any, backward: bool = False, **kwargs: Any
) -> Explanation:
    """What ``function(*operands, **kwargs)`` would launch: kernel, vector width, grid, bytes.

    Works without a GPU once the family is compiled (it loads it if needed): CPU tensors stand for
    CUDA tensors of their shape and layout. The plan is made for the current GPU, or for an H200
    (132 multiprocessors) where there is none. ``backward=True`` explains the backward with
    gradients for every tensor operand that can have one, and incoming gradients laid out like the
    outputs. What the text says of a path names the reason where it is not the fastest one.

    Bytes are counted by formula: each tensor once, with the elements it has, and copies that have
    to be made. What there is one of a row, such as statistics and targets, does not count.

    >>> print(fusedcuda.explain(fusedcuda.bias_act, x, bias, "gelu"))

    Raises ``TypeError`` for a function that is not an operator of fusedcuda, and what the call
    itself would raise.
    """
    explainer = _explainer_of(function)
    name = getattr(function, "__name__", repr(function))
    if explainer is None:
        raise TypeError(f"explain: {name} is not an operator of fusedcuda")
    try:
        call = inspect.signature(function).bind(*operands, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {name}: {error}") from None
    call.apply_defaults()
    return explainer(call.arguments, backward)


def _explainer_of(function: Any) -> Callable[[dict[str, Any], bool], Explanation] | None:
    try:
        return _explainers().get(function)
    except TypeError:  # not hashable
        return None
