"""Pointwise chains: bias, activation, scale and product in one pass over the memory.

The first rung of fusion. Eager PyTorch runs ``relu((a + b) * c)`` as three kernels that move eight
tensors through memory; one kernel moves four. Kernels: ``csrc/kernels/pointwise*.cu``.

Common to all functions here:

- Operands broadcast and promote as in torch; all but the first of a call may be Python numbers.
  Dtypes: float64, float32, float16, bfloat16. Computed in float32 (float64 for float64) and rounded
  once, to the output's dtype.
- The output is laid out like the first operand that has the broadcast shape, and is contiguous if
  none has it.
- ``activation`` is one of none, relu, relu_squared, sigmoid, tanh, gelu (erf), gelu_tanh, silu.
- Gradients have their operand's shape and dtype. Those of broadcast operands are summed in float32,
  in a fixed order, in the launch that computes the others plus a small one. Differentiable once: a
  double backward raises.
- ``TypeError``: an operand that is neither a floating tensor nor a real number. ``ValueError``: an
  unknown activation, shapes that do not broadcast, tensors on different devices. The message names
  the function and operand.
- "Memory" below counts tensors of the output's size read and written; smaller operands are free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._library import define, define_host, first_order_only
from . import _pointwise_reference as reference
from ._activations import ACTIVATIONS, activation_code
from ._call import Operator, call
from ._operands import batched

FAMILY = "pointwise"

# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


def add_relu(a: Tensor, b: Tensor | float) -> Tensor:
    """``relu(a + b)``: a residual or a bias, then ReLU. NaN passes through.

    Memory: reads 2, writes 1 (eager: 3 and 2). Backward: reads 2, writes 1, which ``a`` and ``b``
    share. Saved for backward: the output, and the operands smaller than it.

    >>> fusedcuda.add_relu(torch.tensor([1.0, -2.0]), 0.5)
    tensor([1.5000, 0.0000])
    """
    return call(_ADD_RELU, (a, b))


def add_mul_act(
    a: Tensor, b: Tensor | float, c: Tensor | float, activation: str = "relu"
) -> Tensor:
    """``act((a + b) * c)``.

    Memory: reads 3, writes 1 (eager: 5 and 3). Backward: reads 4, writes 2 (``a`` and ``b`` share
    one). Saved for backward: ``a``, ``b``, ``c``.
    """
    return call(_ADD_MUL_ACT, (a, b, c), activation_code("add_mul_act", activation))


def act_scale_bias(
    x: Tensor, scale: Tensor | float, bias: Tensor | float, activation: str = "relu"
) -> Tensor:
    """``act(x) * scale + bias``, e.g. a folded batch norm after an activation.

    Memory: reads 3, writes 1 (eager: 5 and 3). Backward: reads 3, writes 2; the gradient of
    ``bias`` is the incoming one, copied or summed. Saved for backward: ``x``, ``scale``, ``bias``
    (for its shape).
    """
    return call(_ACT_SCALE_BIAS, (x, scale, bias), activation_code("act_scale_bias", activation))


def bias_act(x: Tensor, bias: Tensor | float, activation: str = "relu") -> Tensor:
    """``act(x + bias)``, e.g. the tail of a linear layer: ``bias`` ``[N]``, ``x`` ``[..., N]``.

    Memory: reads 1, writes 1. Backward: reads 2, writes 1, and sums the gradient of ``bias`` on the
    way, where eager makes another pass over the tensor for it. Saved for backward: the output for
    relu, else ``x``; and ``bias``.
    """
    code = activation_code("bias_act", activation)
    if code == ACTIVATIONS["relu"]:
        return call(_BIAS_RELU, (x, bias))
    return call(_BIAS_ACT, (x, bias), code)


def act_mul(gate: Tensor, up: Tensor | float, activation: str = "silu") -> Tensor:
    """``act(gate) * up``: the gate of SwiGLU (silu), GEGLU (gelu), ReGLU (relu), GLU (sigmoid).

    Memory: reads 2, writes 1 (eager: 3 and 2). Backward: reads 3, writes 2. Saved for backward:
    ``gate``, ``up``. Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    return call(_ACT_MUL, (gate, up), activation_code("act_mul", activation))


def act_mul_packed(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``act(gate_up[..., :d]) * gate_up[..., d:]``: ``[..., 2d]`` to ``[..., d]``.

    For one GEMM that computes gate and up side by side. The halves are read in place, whatever
    their alignment, and the backward writes one packed gradient; nothing is split, copied or
    concatenated. The output is contiguous.

    Memory: reads 2 and writes 1 tensor of the output's size; backward reads 3, writes 2.
    Saved for backward: ``gate_up``. An odd or missing last dimension is a ``ValueError``.
    """
    return call(_ACT_MUL_PACKED, (gate_up,), activation_code("act_mul_packed", activation))


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------


def _define(schema: str) -> torch._ops.OpOverload:
    """One forward operator; operands and name are read off the schema."""
    name, operands = _parse(schema)
    return define(
        FAMILY,
        schema,
        cpu=getattr(reference, name),
        fake=reference.output_fake(name, operands),
        vmap=batched(name, len(operands)),
    )


def _define_backward(schema: str, num_gradients: int) -> torch._ops.OpOverload:
    """One gradient operator, with a gradient for each of its last ``num_gradients`` tensors."""
    name, tensors = _parse(schema)
    return define(
        FAMILY,
        schema,
        cpu=getattr(reference, name),
        fake=reference.gradients_fake(num_gradients),
        vmap=batched(name, len(tensors), num_gradients),
    )


def _parse(schema: str) -> tuple[str, tuple[str, ...]]:
    """Name and tensor arguments of a schema."""
    name, arguments = schema.split(")")[0].split("(")
    return name, tuple(a.split()[1] for a in arguments.split(", ") if a.startswith("Tensor "))


_add_relu = _define("add_relu(Tensor a, Tensor b) -> Tensor")
_add_mul_act = _define("add_mul_act(Tensor a, Tensor b, Tensor c, int activation) -> Tensor")
_act_scale_bias = _define(
    "act_scale_bias(Tensor x, Tensor scale, Tensor bias, int activation) -> Tensor"
)
_bias_act = _define("bias_act(Tensor x, Tensor bias, int activation) -> Tensor")
_act_mul = _define("act_mul(Tensor gate, Tensor up, int activation) -> Tensor")
_act_mul_packed = define(
    FAMILY,
    "act_mul_packed(Tensor gate_up, int activation) -> Tensor",
    cpu=reference.act_mul_packed,
    fake=reference.act_mul_packed_fake,
    vmap=batched("act_mul_packed", 1),
)

_add_relu_backward = _define_backward(
    "add_relu_backward(Tensor grad, Tensor y, Tensor a, Tensor b, int mask) -> Tensor[]", 2
)
_add_mul_act_backward = _define_backward(
    "add_mul_act_backward(Tensor grad, Tensor a, Tensor b, Tensor c, int activation, int mask)"
    " -> Tensor[]",
    3,
)
_act_scale_bias_backward = _define_backward(
    "act_scale_bias_backward(Tensor grad, Tensor x, Tensor scale, Tensor bias, int activation, "
    "int mask) -> Tensor[]",
    3,
)
_bias_act_backward = _define_backward(
    "bias_act_backward(Tensor grad, Tensor x, Tensor bias, int activation, int mask) -> Tensor[]", 2
)
_act_mul_backward = _define_backward(
    "act_mul_backward(Tensor grad, Tensor gate, Tensor up, int activation, int mask) -> Tensor[]", 2
)
_act_mul_packed_backward = define(
    FAMILY,
    "act_mul_packed_backward(Tensor grad, Tensor gate_up, int activation) -> Tensor",
    cpu=reference.act_mul_packed_backward,
    fake=reference.act_mul_packed_backward_fake,
    vmap=batched("act_mul_packed_backward", 2),
)
# [gradient, output]: the backward makes again what the forward did not keep, in the same pass.
define(
    FAMILY,
    "act_mul_packed_recompute(Tensor grad, Tensor gate_up, int activation) -> Tensor[]",
    cpu=reference.act_mul_packed_recompute,
    fake=reference.act_mul_packed_recompute_fake,
)

# --------------------------------------------------------------------------------------------------
# Differentiable forms
# --------------------------------------------------------------------------------------------------


def _gradients(
    ctx: Any,
    backward: torch._ops.OpOverload,
    operands: tuple[Tensor, ...],
    *args: Any,
    skip: int | None = None,
) -> list[Tensor | None]:
    """What ``backward(*args, mask)`` gives for the operands that need it; ``None`` for ``skip``."""
    wanted = [
        need and index != skip for index, need in enumerate(ctx.needs_input_grad[: len(operands)])
    ]
    if not any(wanted):
        return [None] * len(operands)
    computed = iter(backward(*args, sum(want << index for index, want in enumerate(wanted))))
    # A 0-d CPU operand beside CUDA tensors gets its gradient where it lives; for all others .to
    # does nothing.
    return [
        next(computed).to(operand.device) if want else None
        for operand, want in zip(operands, wanted, strict=True)
    ]


def _share_gradient(ctx: Any, a: Tensor, b: Tensor) -> bool:
    """Whether the summands ``a`` and ``b`` both need a gradient and it is the same tensor."""
    need_both = ctx.needs_input_grad[0] and ctx.needs_input_grad[1]
    return need_both and a.shape == b.shape and a.device == b.device


class _AddRelu(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _add_relu(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # The gradient needs the operands' shapes only: the output stands in for the full ones,
        # which may then be freed.
        ctx.save_for_backward(output, *(output if t.shape == output.shape else t for t in inputs))

    @staticmethod
    @first_order_only("add_relu")
    def backward(
        ctx: Any, grad: Tensor, y: Tensor, a: Tensor, b: Tensor
    ) -> tuple[Tensor | None, ...]:
        shared = _share_gradient(ctx, a, b)
        gradients = _gradients(
            ctx, _add_relu_backward, (a, b), grad, y, a, b, skip=1 if shared else None
        )
        return (gradients[0], gradients[0]) if shared else tuple(gradients)


class _BiasAct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor, activation: int) -> Tensor:
        return _bias_act(x, bias, activation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *operands, ctx.activation = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    @first_order_only("bias_act")
    def backward(ctx: Any, grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
        shared = _share_gradient(ctx, x, bias)
        args = (grad, x, bias, ctx.activation)
        gradients = _gradients(
            ctx, _bias_act_backward, (x, bias), *args, skip=1 if shared else None
        )
        return (gradients[0], gradients[0] if shared else gradients[1], None)


class _AddMulAct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor, activation: int) -> Tensor:
        return _add_mul_act(a, b, c, activation)

    setup_context = _BiasAct.setup_context

    @staticmethod
    @first_order_only("add_mul_act")
    def backward(
        ctx: Any, grad: Tensor, a: Tensor, b: Tensor, c: Tensor
    ) -> tuple[Tensor | None, ...]:
        shared = _share_gradient(ctx, a, b)
        args = (grad, a, b, c, ctx.activation)
        gradients = _gradients(
            ctx, _add_mul_act_backward, (a, b, c), *args, skip=1 if shared else None
        )
        return (gradients[0], gradients[0] if shared else gradients[1], gradients[2], None)


class _ActScaleBias(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, bias: Tensor, activation: int) -> Tensor:
        return _act_scale_bias(x, scale, bias, activation)

    setup_context = _BiasAct.setup_context

    @staticmethod
    @first_order_only("act_scale_bias")
    def backward(
        ctx: Any, grad: Tensor, x: Tensor, scale: Tensor, bias: Tensor
    ) -> tuple[Tensor | None, ...]:
        # A full bias gets the incoming gradient itself.
        unchanged = (
            ctx.needs_input_grad[2] and bias.shape == grad.shape and bias.device == grad.device
        )
        args = (grad, x, scale, bias, ctx.activation)
        gradients = _gradients(
            ctx, _act_scale_bias_backward, (x, scale, bias), *args, skip=2 if unchanged else None
        )
        return (gradients[0], gradients[1], grad if unchanged else gradients[2], None)


class _ActMul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor, activation: int) -> Tensor:
        return _act_mul(gate, up, activation)

    setup_context = _BiasAct.setup_context

    @staticmethod
    @first_order_only("act_mul")
    def backward(ctx: Any, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor | None, ...]:
        return (
            *_gradients(ctx, _act_mul_backward, (gate, up), grad, gate, up, ctx.activation),
            None,
        )


class _ActMulPacked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate_up: Tensor, activation: int) -> Tensor:
        return _act_mul_packed(gate_up, activation)

    setup_context = _BiasAct.setup_context

    @staticmethod
    @first_order_only("act_mul_packed")
    def backward(ctx: Any, grad: Tensor, gate_up: Tensor) -> tuple[Tensor | None, ...]:
        return _act_mul_packed_backward(grad, gate_up, ctx.activation), None


_ADD_RELU = Operator("add_relu", _add_relu, _AddRelu, ("a", "b"))
_ADD_MUL_ACT = Operator("add_mul_act", _add_mul_act, _AddMulAct, ("a", "b", "c"))
_ACT_SCALE_BIAS = Operator("act_scale_bias", _act_scale_bias, _ActScaleBias, ("x", "scale", "bias"))
_BIAS_ACT = Operator("bias_act", _bias_act, _BiasAct, ("x", "bias"))
_BIAS_RELU = Operator("bias_act", _add_relu, _AddRelu, ("x", "bias"))
_ACT_MUL = Operator("act_mul", _act_mul, _ActMul, ("gate", "up"))
_ACT_MUL_PACKED = Operator(
    "act_mul_packed", _act_mul_packed, _ActMulPacked, ("gate_up",), reference.check_packed
)

# The operator behind each public function.
OPERATORS: dict[Callable[..., Tensor], Operator] = {
    add_relu: _ADD_RELU,
    add_mul_act: _ADD_MUL_ACT,
    act_scale_bias: _ACT_SCALE_BIAS,
    bias_act: _BIAS_ACT,
    act_mul: _ACT_MUL,
    act_mul_packed: _ACT_MUL_PACKED,
}

# Those that start with a sum of two operands, whose gradients are the same.
SUMS = ("add_relu", "bias_act", "add_mul_act")

# Host only: what a call would launch, as JSON. Implemented in csrc/bindings/pointwise.cpp, read by
# explain().
define_host("pointwise_plan(str op, Tensor[] operands, int num_sms, int mask) -> str")
