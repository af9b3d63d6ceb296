"""Softmax and its logarithm over the last dimension, with a factor on the logits.

A row is read once and written once, whatever its length: the maximum and the sum are found on the
way in (online softmax, Milakov & Gimelshein, arXiv:1805.02867) and the row stays on the chip.
Kernels: ``csrc/kernels/softmax.cu``.

- ``x``: ``(..., N)`` of float64, float32, float16 or bfloat16, any strides. The output has the
  dtype of ``x``, also under autocast, and is contiguous. Computed in float32 (float64 for float64)
  and rounded once.
- As in torch, a row that is all ``-inf``, or that holds ``+inf`` or NaN, becomes NaN.
- Memory: forward 4 bytes an element of a 16-bit type, backward 6 (the gradient and the output are
  read). Saved for backward: the output, so the gradient is that of the output as it was rounded.
  Differentiable once: a double backward raises.
- ``TypeError``: ``x`` is no floating tensor, or ``scale`` no number. ``ValueError``: ``x`` has no
  dimension. The message names the function and the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._library import define, define_host, first_order_only
from ._call import Operator
from ._operands import check_like, widen
from ._rows import batched_rows, call, check_number, check_rows

FAMILY = "softmax"

# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


def softmax(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """``softmax(scale * x)`` over the last dimension.

    >>> fusedcuda.softmax(torch.tensor([0.0, 1.0]), scale=2.0)
    tensor([0.1192, 0.8808])
    """
    if not isinstance(scale, float):
        check_number("softmax", "scale", scale)
    return call(_SOFTMAX, (x,), scale)


def log_softmax(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """``log_softmax(scale * x)`` over the last dimension.

    >>> fusedcuda.log_softmax(torch.tensor([0.0, 1.0]))
    tensor([-1.3133, -0.3133])
    """
    if not isinstance(scale, float):
        check_number("log_softmax", "scale", scale)
    return call(_LOG_SOFTMAX, (x,), scale)


# --------------------------------------------------------------------------------------------------
# References
# --------------------------------------------------------------------------------------------------


def _reference(op: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reference(x: Tensor, scale: float) -> Tensor:
        output = _fake(op)(x, scale)
        return output.copy_(function(scale * widen(x)[0], dim=-1))

    return reference


def _backward_reference(op: str, gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reference(dy: Tensor, y: Tensor, scale: float) -> Tensor:
        output = _backward_fake(op)(dy, y, scale)
        return output.copy_(scale * gradient(*widen(dy, y)))

    return reference


def _softmax_gradient(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (dy * y).sum(dim=-1, keepdim=True))


def _log_softmax_gradient(dy: Tensor, y: Tensor) -> Tensor:
    return dy - y.exp() * dy.sum(dim=-1, keepdim=True)


def _fake(op: str) -> Callable[..., Tensor]:
    def fake(x: Tensor, scale: float) -> Tensor:
        check_rows(op, "x", x)
        return x.new_empty(x.shape)

    return fake


def _backward_fake(op: str) -> Callable[..., Tensor]:
    def fake(dy: Tensor, y: Tensor, scale: float) -> Tensor:
        check_rows(f"{op}_backward", "y", y)
        check_like(f"{op}_backward", "dy", dy, (y,))
        return y.new_empty(y.shape)

    return fake


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------


def _define(op: str, function: Callable[..., Tensor]) -> Any:
    return define(
        FAMILY,
        f"{op}(Tensor x, float scale) -> Tensor",
        cpu=_reference(op, function),
        fake=_fake(op),
        vmap=batched_rows(op),
    )


def _define_backward(op: str, gradient: Callable[..., Tensor]) -> Any:
    return define(
        FAMILY,
        f"{op}_backward(Tensor dy, Tensor y, float scale) -> Tensor",
        cpu=_backward_reference(op, gradient),
        fake=_backward_fake(op),
        vmap=batched_rows(f"{op}_backward"),
    )


_softmax = _define("softmax", torch.softmax)
_log_softmax = _define("log_softmax", torch.log_softmax)
_softmax_backward = _define_backward("softmax", _softmax_gradient)
_log_softmax_backward = _define_backward("log_softmax", _log_softmax_gradient)


class _Softmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return _softmax(x, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.scale = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    @first_order_only("softmax")
    def backward(ctx: Any, dy: Tensor, y: Tensor) -> tuple[Tensor, None]:
        return _softmax_backward(dy, y, ctx.scale), None


class _LogSoftmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return _log_softmax(x, scale)

    setup_context = _Softmax.setup_context

    @staticmethod
    @first_order_only("log_softmax")
    def backward(ctx: Any, dy: Tensor, y: Tensor) -> tuple[Tensor, None]:
        return _log_softmax_backward(dy, y, ctx.scale), None


def _operator(op: str, raw: Any, function: type[torch.autograd.Function]) -> Operator:
    return Operator(op, raw, function, ("x",), lambda x, scale: check_rows(op, "x", x))


_SOFTMAX = _operator("softmax", _softmax, _Softmax)
_LOG_SOFTMAX = _operator("log_softmax", _log_softmax, _LogSoftmax)

# Host only: what a call would launch, as JSON. Implemented in csrc/bindings/softmax.cpp, read by
# explain().
define_host("softmax_plan(Tensor x, bool is_backward, int num_sms) -> str")
