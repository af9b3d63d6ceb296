"""Linear layers with their bias, activation or residual add in the epilogue of the matrix product.

What is between two matrix products costs no pass over memory: forward, bias and activation (or
residual) are applied before the result leaves the chip; backward, the derivative of the activation
and the sum for the bias ride along where the product allows it. Kernels: cuBLASLt's and
``csrc/kernels/linear_act*.cu``.

Common to ``linear_act``, ``linear_residual`` and ``mlp``:

- ``x`` is ``(..., K)``: any leading dimensions, any strides. ``weight`` is ``(N, K)``, any strides:
  the transposed view of a ``[K, N]`` matrix is read where it lies. ``bias`` is ``(N,)`` or
  ``None``. The output is ``(..., N)``, contiguous.
- Batches: a ``weight`` of shape ``(B, N, K)`` takes ``x`` of shape ``(B, ..., K)`` and a ``bias``
  of shape ``(B, N)``, or ``(N,)`` for all (``mlp`` has no batches of weights).
- One dtype for all tensors and the output: float64, float32, float16 or bfloat16. Under autocast
  they are cast first, as those of ``torch.nn.functional.linear`` are (float64 is left alone).
- Added up in float32 (float64 for float64; TF32 where ``torch.backends.cuda.matmul`` allows it) and
  rounded once; where the activation is a kernel of its own, as ``explain`` says, also before it.
  ``allow_low_precision_reduction=True`` lets a product that is split along ``K`` add its parts in
  16 bits, as torch's flags of that name do.
- ``activation``: none, relu, relu_squared, sigmoid, tanh, gelu (erf), gelu_tanh or silu.
- Saved for backward: of ``z = x @ weight.T + bias`` one bit an element for relu, nothing for none,
  else ``act'(z)`` in 16 bits, ``z`` itself in float32 and float64; and ``x`` only for the gradient
  of ``weight``, ``weight`` only for that of ``x``. ``dz = dy * act'(z)`` is rounded before it is
  multiplied, and ``dbias`` is the sum in float32 of the rounded ``dz`` (one ``bias`` of a batch of
  weights: the sum of its rounded gradients). Only the gradients that are asked for are computed.
  Differentiable once: a double backward raises.
- Memory, in elements: forward ``M K + N K + M N`` with ``M`` rows of ``x``, and ``M N`` (relu:
  ``M N / 8`` bytes) more where that is saved; backward each operand once for each of the two
  products, and what was saved (16-bit layers of one output: ``x`` and its gradient once).
- ``TypeError``: an operand that is no floating tensor, or of another dtype. ``ValueError``: a shape
  or device that does not fit, an unknown activation. The message names function and argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._library import define, define_host, functorch_active
from . import _linear_act_autograd as autograd
from . import _linear_act_fp8_reference as fp8
from . import _linear_act_reference as reference
from ._activations import activation_code
from ._call import Operator
from ._linear_act_batching import (
    batched_backward,
    batched_forward,
    batched_mlp_backward,
)
from ._linear_act_reference import NONE
from ._rows import call

FAMILY = "linear_act"

# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    allow_low_precision_reduction: bool = False,
) -> Tensor:
    """``act(x @ weight.T + bias)``.

    Shapes, batches, dtypes, numerics, saved tensors, memory and errors: see the head of this
    module.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> fusedcuda.linear_act(x, weight, activation="relu")
    tensor([[3., 0.]])
    """
    code = activation_code("linear_act", activation)
    operands = (*autocast(x, weight, bias), None)
    y = call(_LINEAR_ACT, operands, code, allow_low_precision_reduction)
    return y[0] if isinstance(y, tuple) else y  # with a gradient, what is saved comes along


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    allow_low_precision_reduction: bool = False,
) -> Tensor:
    """``x @ weight.T + bias + residual``: added in float32 and rounded once.

    ``residual`` has the shape and dtype of the output, any strides; its gradient is the incoming
    one itself. All else: see the head of this module.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> fusedcuda.linear_residual(x, weight, None, torch.tensor([[10.0, 10.0]]))
    tensor([[13.,  9.]])
    """
    if residual is None:
        raise TypeError("linear_residual: residual must be a tensor; got NoneType")
    operands = autocast(x, weight, bias, residual)
    return call(_LINEAR_RESIDUAL, operands, NONE, allow_low_precision_reduction)


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str = "gelu_tanh",
    *,
    allow_low_precision_reduction: bool = False,
) -> Tensor:
    """``act(x @ w1.T + b1) @ w2.T + b2``: two layers, whose backward is one chain.

    ``w1`` is ``(H, K)`` and ``w2`` is ``(N, H)``. As :func:`linear_act` of :func:`linear_act`, but
    backward, where that is faster, the derivative of the activation and ``db1`` are made where the
    gradient of the hidden layer is, which is then rounded once, with the derivative. Saved beside
    the first layer's ``z``: the hidden layer, for the gradient of ``w2``.

    All else: see the head of this module.

    >>> x, one = torch.tensor([[1.0, -2.0]]), torch.eye(2)
    >>> fusedcuda.mlp(x, one, None, 3 * one, None, "relu")
    tensor([[3., 0.]])
    """
    code = activation_code("mlp", activation)
    operands = autocast(x, w1, b1, w2, b2)
    y = call(_MLP, operands, code, allow_low_precision_reduction)
    return y[0] if isinstance(y, tuple) else y  # with a gradient, what is saved comes along


def linear_act_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor | None = None,
) -> Tensor:
    """``act((x * x_scale) @ (weight * weight_scale).T + bias)`` of 8-bit operands; forward only.

    ``x`` ``(..., K)`` and ``weight`` ``(N, K)`` are float8_e4m3fn, ``bias`` ``(N,)`` is bfloat16.
    The scales are float32 tensors of one element, one for each operand, on its device; they are
    read there, so nothing waits for them. Added up in float32 and rounded once, to bfloat16, or
    with ``out_dtype=torch.float8_e4m3fn`` to that: then ``out_scale`` has to be given, and the
    output is the result divided by it, saturated at the largest finite value, 448.

    Records no gradient: where one is needed it raises ``RuntimeError`` (under ``torch.no_grad()``
    none is). ``TypeError``: a dtype that is not the one named here. ``ValueError``: a shape or
    device that does not fit, an unknown activation. Memory, in bytes: ``M K + N K``, and ``M N`` of
    the output.

    >>> x = torch.ones(1, 16).to(torch.float8_e4m3fn)
    >>> scale = torch.tensor(0.5)
    >>> fusedcuda.linear_act_fp8(x, x, x_scale=scale, weight_scale=scale)
    tensor([[4.]], dtype=torch.bfloat16)
    """
    code = activation_code("linear_act_fp8", activation)
    operands = (x, weight, bias, x_scale, weight_scale, out_scale)
    if torch.compiler.is_compiling():
        fp8.check_fp8(*operands, out_dtype)
    _refuse_gradients("linear_act_fp8", x, weight, bias, x_scale, weight_scale, out_scale)
    try:
        return _linear_act_fp8(*operands, code, out_dtype)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        fp8.check_fp8(*operands, out_dtype)
        raise


_is_any_autocast_on = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast(*operands: Any) -> tuple[Any, ...]:
    """``operands`` as torch's linear layers get them: cast where autocast is on for the first."""
    if not _is_any_autocast_on():
        return operands  # a fifth of the time of what follows
    device = operands[0].device.type if isinstance(operands[0], Tensor) else "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in operands
    )


def _refuse_gradients(op: str, *operands: Any) -> None:
    if not torch.is_grad_enabled():
        return
    if any(isinstance(t, Tensor) and t.requires_grad for t in operands):
        raise RuntimeError(
            f"{op}: an operand requires a gradient, and {op} records none; call it under "
            "torch.no_grad()"
        )
    if forward_ad._current_level >= 0 or functorch_active():
        raise NotImplementedError(
            f"{op}: records no gradient, so it works in torch.func transforms under "
            "torch.no_grad() only, and not in forward mode"
        )


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------


def _define(schema: str, vmap: Any) -> torch._ops.OpOverload:
    name = schema.split("(")[0]
    return define(
        FAMILY,
        schema,
        cpu=getattr(reference, name),
        fake=getattr(reference, f"{name}_fake"),
        vmap=vmap,
    )


_linear_act = _define(
    "linear_act(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation, "
    "bool low_precision) -> Tensor",
    batched_forward("linear_act"),
)
# [y, saved], or [y] without an activation. Of relu, saved is the bit mask of z > 0: bit n % 8 of
# byte n / 8 of rows of mask_row_bytes(N) bytes, one a row of x. Of the others it is act'(z) in 16
# bits, z in float32 and float64, rounded.
_define(
    "linear_act_forward(Tensor x, Tensor weight, Tensor? bias, int activation, bool low_precision)"
    " -> Tensor[]",
    batched_forward("linear_act_forward"),
)
# The gradients whose bit is set in the mask: 0 of x, 1 of the weight, 2 of the bias, (N,) or, of a
# batch, (B, N). Only the shape of x is looked at where bit 1 is not set, only that of the weight
# where bit 0 is not: an expanded element may stand for either.
_define(
    "linear_act_backward(Tensor dy, Tensor x, Tensor weight, Tensor? saved, int activation, "
    "int mask, bool low_precision) -> Tensor[]",
    batched_backward,
)
# act(x @ weight.T + t @ up.T + bias) in one product, for the lora family: t (M, R) has a row for
# each of x, up (N, R) is stored as the weight. [] where there is no kernel for that, or a slower
# one.
define(
    FAMILY,
    "linear_act_extended(Tensor x, Tensor weight, Tensor? bias, Tensor t, Tensor up, "
    "int activation) -> Tensor[]",
    cpu=reference.linear_act_extended,
    fake=reference.linear_act_extended_fake,
)
# a @ b.T + bias into memory that is there or, with adds, added to what it holds; for the
# linear_cross_entropy family. output (M, N) has the dtype of a, or float32 where a has 16 bits; its
# rows may lie apart. a (M, K) and b (N, K) are stored by rows or by columns. A bias goes with
# neither adds nor float32.
define(
    FAMILY,
    "linear_act_product_(Tensor(a!) output, Tensor a, Tensor b, Tensor? bias, bool adds) -> ()",
    cpu=reference.linear_act_product_,
    fake=reference.linear_act_product_fake,
)
# Bits of the mask: 0 the gradient of x, 1 of w1, 2 of b1, 3 of w2, 4 of b2. As above, only the
# shape is looked at of x where bit 1 is not set, of w1 where bit 0, and of h where bit 3 is not.
_define(
    "mlp_backward(Tensor dy, Tensor x, Tensor w1, Tensor saved, Tensor h, Tensor w2, "
    "int activation, int mask, bool low_precision) -> Tensor[]",
    batched_mlp_backward,
)
_linear_act_fp8 = define(
    FAMILY,
    "linear_act_fp8(Tensor x, Tensor weight, Tensor? bias, Tensor x_scale, Tensor weight_scale, "
    "Tensor? out_scale, int activation, ScalarType? out_dtype) -> Tensor",
    cpu=fp8.linear_act_fp8,
    fake=fp8.linear_act_fp8_fake,
)

# Host only: what a call would launch, as JSON. Implemented in csrc/bindings/linear_act.cpp, read by
# explain().
define_host("linear_act_use(str backend) -> str")
define_host(
    "linear_act_plan(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation, "
    "bool low_precision, bool saves) -> str"
)
define_host(
    "linear_act_backward_plan(Tensor dy, Tensor x, Tensor weight, Tensor? saved, int activation, "
    "int mask, bool low_precision) -> str"
)
define_host(
    "linear_act_extended_plan(Tensor x, Tensor weight, Tensor? bias, Tensor t, Tensor up, "
    "int activation) -> str"
)
define_host(
    "linear_act_product_plan(Tensor output, Tensor a, Tensor b, Tensor? bias, bool adds) -> str"
)
define_host(
    "mlp_backward_plan(Tensor dy, Tensor x, Tensor w1, Tensor saved, Tensor h, Tensor w2, "
    "int activation, int mask, bool low_precision) -> str"
)
define_host(
    "linear_act_fp8_plan(Tensor x, Tensor weight, Tensor? bias, Tensor x_scale, "
    "Tensor weight_scale, Tensor? out_scale, int activation, ScalarType? out_dtype) -> str"
)

# --------------------------------------------------------------------------------------------------
# From function to operator
# --------------------------------------------------------------------------------------------------


def _check_linear_act(x: Any, weight: Any, bias: Any, residual: Any, *options: Any) -> None:
    reference.check_linear("linear_act", x, weight, bias)
    reference.check_options("linear_act", *options)


def _check_linear_residual(x: Any, weight: Any, bias: Any, residual: Any, *options: Any) -> None:
    reference.check_linear("linear_residual", x, weight, bias, residual)
    reference.check_options("linear_residual", *options)


def _check_mlp(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, *options: Any) -> None:
    reference.check_two_layers("mlp", x, w1, b1, w2, b2)
    reference.check_options("mlp", *options)


_OPERANDS = ("x", "weight", "bias", "residual")
_LINEAR_ACT = Operator("linear_act", _linear_act, autograd.LinearAct, _OPERANDS, _check_linear_act)
_LINEAR_RESIDUAL = Operator(
    "linear_residual", _linear_act, autograd.LinearResidual, _OPERANDS, _check_linear_residual
)
_MLP_OPERANDS = ("x", "w1", "b1", "w2", "b2")
_TWO_LAYERS: Any = autograd.TwoLayers()
_MLP = Operator("mlp", _TWO_LAYERS, autograd.MLP, _MLP_OPERANDS, _check_mlp)
