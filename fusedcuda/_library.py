"""The operator library ``torch.ops.fusedcuda``: schemas, stubs that compile, and the call path.

Schemas live in Python so that the package works without a compiler and without a GPU; a compiled
library only adds CUDA kernels (``STABLE_TORCH_LIBRARY_IMPL``), so loading a second one, such as an
edited kernel in a notebook, replaces kernels instead of redefining operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "fusedcuda"

_definitions = torch.library.Library(NAMESPACE, "DEF")
_stubs: dict[str, torch.library.Library] = {}
_families: dict[str, list[str]] = {}


def define(
    family: str,
    schema: str,
    *,
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define one operator of ``family`` and return its overload.

    ``cpu`` is the reference implementation and the CPU kernel, ``fake`` the shape function for
    ``torch.compile``, ``vmap`` a batching rule as ``torch.library.register_vmap`` takes it.
    ``cuda`` is for an operator that consists of calls of others; all others are in the compiled
    library. The autograd keys fall through: the raw operators are not differentiable, the public
    functions wrap them in ``torch.autograd.Function`` (2 us a call cheaper than the default
    autograd fallback, which would otherwise look at every argument).
    """
    name = schema.split("(")[0]
    qualified = f"{NAMESPACE}::{name}"
    _definitions.define(schema)
    _definitions.impl(name, cpu, "CPU")
    _definitions.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(qualified, fake, lib=_definitions)
    if vmap is not None:
        torch.library.register_vmap(qualified, vmap, lib=_definitions)
    if cuda is not None:
        _definitions.impl(name, cuda, "CUDA")
    else:
        _families.setdefault(family, []).append(name)
    return getattr(torch.ops.fusedcuda, name).default


def define_host(schema: str, function: Callable[..., Any] | None = None) -> None:
    """Define an operator without CPU reference or gradient, such as a plan query.

    Only the compiled library implements it, unless ``function`` does.
    """
    _definitions.define(schema)
    if function is not None:
        _definitions.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")


def install_stubs(family: str) -> None:
    """Register CUDA kernels that compile ``family`` on their first call and call the result."""
    stubs = torch.library.Library(NAMESPACE, "IMPL")
    for name in _families[family]:
        stubs.impl(name, _compile_and_call(family, name), "CUDA")
    _stubs[family] = stubs


def release_stubs(family: str) -> None:
    """Remove the stubs of ``family``; called just before compiled kernels are loaded."""
    stubs = _stubs.pop(family, None)
    if stubs is not None:
        stubs._destroy()


def _compile_and_call(family: str, name: str) -> Callable[..., Any]:
    def stub(*args: Any) -> Any:
        from . import _jit

        _jit.load(family)
        return getattr(torch.ops.fusedcuda, name).default(*args)

    return stub


functorch_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without the signature inspection it repeats on every call.

    For a Function with ``setup_context`` that inspection costs more than the kernel launch (26 us
    against 8 us a call on a slow core). It is only needed under functorch transforms. (Dynamo wants
    to see ``function.apply``; the callers take care of that.)
    """
    if functorch_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def first_order_only(
    op: str, num_gradients: int = 1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for ``backward(ctx, *grads, *saved)`` of ``op``: a second derivative raises.

    ``backward`` gets the first ``num_gradients`` incoming gradients, of which some may be ``None``;
    outputs behind those are statistics, which have none.

    Stricter than torch's ``once_differentiable``, which only notices when the incoming gradient
    requires one and lets a gradient penalty lose its second-order term.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: torch.Tensor | None) -> Any:
            # saved_tensors are unpacked once: checkpointing allows no second time.
            sources = (*grads[:num_gradients], *ctx.saved_tensors)
            gradients = backward(ctx, *sources)
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return gradients
            return tuple(
                _FirstOrderOnly.apply(op, g, *sources) if isinstance(g, torch.Tensor) else g
                for g in gradients
            )

        return checked

    return decorate


class _FirstOrderOnly(torch.autograd.Function):
    """Ties a gradient to the tensors it was computed from, so that a second backward fails."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, gradient: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return gradient.detach().view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.op}: a second derivative was asked for (create_graph=True), but the fused "
            "operators are differentiable once. Use the unfused torch operators where you need "
            "second derivatives."
        )
