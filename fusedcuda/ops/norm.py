"""Normalisation of rows: RMSNorm and LayerNorm over the last dimension, with the residual add.

A row is read once and written once; the statistics, and in the backward the gradients of weight and
bias, are made on the way. Kernels: ``csrc/kernels/norm*.cu``.

Common to both functions:

- ``x`` is ``[..., N]``: any leading dimensions, any strides. ``weight`` and ``bias`` are ``[N]`` or
  ``None``. Dtypes: float64, float32, float16, bfloat16; ``weight`` and ``bias`` may each have
  another one than ``x``.
- Computed in float32 (float64 for float64 ``x``), weight and bias included, and rounded once, to
  the dtype of ``x``; so is the gradient of ``x``. Outputs are contiguous. (Models that round the
  normalised row before they multiply by a 16-bit weight differ by that rounding.) Autocast changes
  nothing: the arithmetic is in float32 anyway, and the output keeps the dtype of ``x``, where torch
  would return float32.
- ``residual``, a tensor of the shape, dtype and device of ``x``, is added first. The result is then
  ``(y, h)`` with ``h = x + residual`` rounded to their dtype and ``y`` the norm of that rounded
  ``h``. Both outputs may be used further, or one; ``x`` and ``residual`` are sent one gradient.
- Gradients of ``weight`` and ``bias`` have their dtype and are summed in float32 (float64 for
  float64 ``x``), in a fixed order, and only where they are asked for. Differentiable once: a double
  backward raises.
- Saved for backward: ``x`` (with ``residual`` ``h``, which is an output anyway), ``weight``, and
  in float32 (float64) one ``rstd`` a row, for LayerNorm also one ``mean``.
- Memory, in bytes an element of ``x``, of ``s`` bytes: forward ``2 s``, with ``residual`` ``4 s``;
  backward ``3 s``, and ``4 s`` where both outputs of the residual form are used. The gradients of
  ``weight`` and ``bias`` take no other pass. Rows whose elements do not lie side by side, or whose
  leading dimensions do not merge into one, are copied first (``2 s`` for each such tensor).
- ``TypeError``: an operand that is not a floating tensor, an option that is not a number.
  ``ValueError``: a shape or device that does not fit. The message names function and argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from .._library import define, define_host, first_order_only
from . import _norm_reference as reference
from ._call import Operator
from ._rows import batched_rows, call

FAMILY = "norm"

# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: None = None,
    weight_offset: float = 0.0,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` over the last dimension.

    ``weight_offset=1`` is for models that store the weight less one, such as Gemma; the sum is
    taken in float32. It must be 0 without a weight. ``eps`` is a number: what torch takes for
    ``eps=None`` is ``torch.finfo(torch.float32).eps`` for all but float64 tensors.

    Shapes, ``residual``, numerics, saved tensors, memory and errors: see the head of this module.
    Source: Zhang & Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.

    >>> fusedcuda.rms_norm(torch.tensor([[3.0, 4.0]]))
    tensor([[0.8485, 1.1314]])
    """
    if residual is None:
        y = call(_RMS_NORM, (x, weight), eps, weight_offset)
        return y[0] if isinstance(y, tuple) else y  # with a gradient, rstd comes along
    y, h, *_ = call(_ADD_RMS_NORM, (x, residual, weight), eps, weight_offset)
    return y, h


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: None = None,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension.

    The variance is the biased one, from the deviations (never ``E[x^2] - E[x]^2``, which cancels
    where the mean is large). ``weight`` and ``bias`` may each be absent.

    Shapes, ``residual``, numerics, saved tensors, memory and errors: see the head of this module.
    Source: Ba, Kiros & Hinton, Layer Normalization, arXiv:1607.06450.

    >>> fusedcuda.layer_norm(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.0000,  1.0000]])
    """
    if residual is None:
        y = call(_LAYER_NORM, (x, weight, bias), eps)
        return y[0] if isinstance(y, tuple) else y  # with a gradient, mean and rstd come along
    y, h, *_ = call(_ADD_LAYER_NORM, (x, residual, weight, bias), eps)
    return y, h


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------


def _define(schema: str, vectors: tuple[int, ...], sums: int = 0) -> torch._ops.OpOverload:
    """One operator; ``vectors`` and ``sums`` as in :func:`batched_rows`."""
    name = schema.split("(")[0]
    return define(
        FAMILY,
        schema,
        cpu=getattr(reference, name),
        fake=getattr(reference, f"{name}_fake"),
        vmap=batched_rows(name, vectors, sums),
    )


_rms_norm = _define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset) -> Tensor", vectors=(1,)
)
# [y, rstd], or with a residual [y, h, rstd].
_rms_norm_forward = _define(
    "rms_norm_forward(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset)"
    " -> Tensor[]",
    vectors=(2,),
)
# The gradients whose bit is set in the mask: 0 of h, which includes dh, 1 of the weight.
_rms_norm_backward = _define(
    "rms_norm_backward(Tensor dy, Tensor h, Tensor rstd, Tensor? weight, Tensor? dh, "
    "float weight_offset, int mask) -> Tensor[]",
    vectors=(3,),
    sums=0b10,
)
_layer_norm = _define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", vectors=(1, 2)
)
# [y, mean, rstd], or with a residual [y, h, mean, rstd].
_layer_norm_forward = _define(
    "layer_norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps)"
    " -> Tensor[]",
    vectors=(2, 3),
)
# Bits of the mask: 0 the gradient of h, which includes dh, 1 of the weight, 2 of the bias.
_layer_norm_backward = _define(
    "layer_norm_backward(Tensor dy, Tensor h, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, Tensor? dh, int mask) -> Tensor[]",
    vectors=(4, 5),
    sums=0b110,
)

# --------------------------------------------------------------------------------------------------
# Differentiable forms
# --------------------------------------------------------------------------------------------------


def _save(ctx: Any, h: Tensor, statistics: tuple[Tensor, ...], *vectors: Tensor | None) -> None:
    """For the backward. An output that nobody uses has ``None`` for its gradient, not zeros."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*statistics)
    ctx.save_for_backward(h, *statistics, *vectors)


def _gradients(
    backward: Callable[[Tensor, int], list[Tensor]],
    dy: Tensor | None,
    dh: Tensor | None,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of h and of the vectors, those that are ``wanted``, from ``backward(dy, mask)``."""
    if dy is None:  # only the sum was used
        return [dh if wanted[0] else None, *(None for _ in wanted[1:])]
    computed = iter(backward(dy, sum(want << bit for bit, want in enumerate(wanted))))
    return [next(computed) if want else None for want in wanted]


def _rms_norm_gradients(
    ctx: Any,
    grads: tuple[Tensor | None, Tensor | None],
    saved: tuple[Tensor, ...],
    wanted: tuple[bool, bool],
) -> list[Tensor | None]:
    dh, (h, rstd, weight) = grads[1], saved

    def backward(dy: Tensor, mask: int) -> list[Tensor]:
        return _rms_norm_backward(dy, h, rstd, weight, dh, ctx.weight_offset, mask)

    return _gradients(backward, *grads, wanted)


class _RMSNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, eps: float, weight_offset: float
    ) -> tuple[Tensor, ...]:
        return tuple(_rms_norm_forward(x, None, weight, eps, weight_offset))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.weight_offset = inputs
        _save(ctx, x, output[1:], weight)

    @staticmethod
    @first_order_only("rms_norm")
    def backward(ctx: Any, dy: Tensor | None, *saved: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_weight, *_ = ctx.needs_input_grad
        return *_rms_norm_gradients(ctx, (dy, None), saved, (need_x, need_weight)), None, None


class _AddRMSNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
    ) -> tuple[Tensor, ...]:
        return tuple(_rms_norm_forward(x, residual, weight, eps, weight_offset))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, weight, _, ctx.weight_offset = inputs
        _save(ctx, output[1], output[2:], weight)

    @staticmethod
    @first_order_only("rms_norm", num_gradients=2)
    def backward(
        ctx: Any, dy: Tensor | None, dh: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_weight, *_ = ctx.needs_input_grad
        wanted = (need_x or need_residual, need_weight)
        dx, dweight = _rms_norm_gradients(ctx, (dy, dh), saved, wanted)
        return dx if need_x else None, dx if need_residual else None, dweight, None, None


def _layer_norm_gradients(
    grads: tuple[Tensor | None, Tensor | None],
    saved: tuple[Tensor, ...],
    wanted: tuple[bool, bool, bool],
) -> list[Tensor | None]:
    dh, (h, mean, rstd, weight, bias) = grads[1], saved

    def backward(dy: Tensor, mask: int) -> list[Tensor]:
        return _layer_norm_backward(dy, h, mean, rstd, weight, bias, dh, mask)

    return _gradients(backward, *grads, wanted)


class _LayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, ...]:
        return tuple(_layer_norm_forward(x, None, weight, bias, eps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _ = inputs
        _save(ctx, x, output[1:], weight, bias)

    @staticmethod
    @first_order_only("layer_norm")
    def backward(ctx: Any, dy: Tensor | None, *saved: Tensor) -> tuple[Tensor | None, ...]:
        return *_layer_norm_gradients((dy, None), saved, ctx.needs_input_grad[:3]), None


class _AddLayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, ...]:
        return tuple(_layer_norm_forward(x, residual, weight, bias, eps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, weight, bias, _ = inputs
        _save(ctx, output[1], output[2:], weight, bias)

    @staticmethod
    @first_order_only("layer_norm", num_gradients=2)
    def backward(
        ctx: Any, dy: Tensor | None, dh: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_weight, need_bias, _ = ctx.needs_input_grad
        wanted = (need_x or need_residual, need_weight, need_bias)
        dx, dweight, dbias = _layer_norm_gradients((dy, dh), saved, wanted)
        return dx if need_x else None, dx if need_residual else None, dweight, dbias, None


def _check_add_rms_norm(x: Any, residual: Any, weight: Any, eps: Any, weight_offset: Any) -> None:
    reference.check_rms_norm(x, weight, eps, weight_offset, residual)


def _check_add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> None:
    reference.check_layer_norm(x, weight, bias, eps, residual)


# Host only: what a call would launch, as JSON. Implemented in csrc/bindings/norm.cpp, read by
# explain().
define_host(
    "norm_plan(str op, Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, bool is_backward, "
    "int num_sms) -> str"
)

_RMS_NORM = Operator("rms_norm", _rms_norm, _RMSNorm, ("x", "weight"), reference.check_rms_norm)
_ADD_RMS_NORM = Operator(
    "rms_norm", _rms_norm_forward, _AddRMSNorm, ("x", "residual", "weight"), _check_add_rms_norm
)
_LAYER_NORM = Operator(
    "layer_norm", _layer_norm, _LayerNorm, ("x", "weight", "bias"), reference.check_layer_norm
)
_ADD_LAYER_NORM = Operator(
    "layer_norm",
    _layer_norm_forward,
    _AddLayerNorm,
    ("x", "residual", "weight", "bias"),
    _check_add_layer_norm,
)
