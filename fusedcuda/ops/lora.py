"""Linear layers with a low-rank adapter (LoRA): the branch at little more than the linear's price.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685. Kernels:
``csrc/kernels/lora*.cu``, and the products of ``fusedcuda/ops/linear_act.py``.

Common to ``lora_linear`` and ``lora_mlp``:

- ``x`` is ``(..., K)``: any leading dimensions, any strides. ``weight`` is ``(N, K)``, any strides:
  the transposed view of a ``[K, N]`` matrix is read where it lies. ``lora_a`` is ``(r, K)`` and
  ``lora_b`` ``(N, r)`` with a rank ``r`` from 1 to 512; up to 64 ranks take one pass over ``x``,
  more one for each 64. ``bias`` is ``(N,)`` or ``None``. The output is ``(..., N)``, contiguous.
- ``scale`` is what the branch is multiplied by: ``alpha / r``, or ``alpha / sqrt(r)``, not alpha.
  Under ``torch.compile`` each of its values is compiled for; one that changes from call to call is
  better a factor of ``lora_b``.
- One dtype for ``x``, ``weight``, ``bias`` and the output: float64, float32, float16 or bfloat16.
  ``lora_a`` and ``lora_b`` have it too or, where it has 16 bits, may be float32: they are rounded
  to it where they are multiplied, as under autocast, and their gradients come back in float32.
  Under autocast ``x``, ``weight`` and ``bias`` are cast first, as those of
  ``torch.nn.functional.linear`` are; nothing makes a float32 copy of ``x``.
- ``t = scale * dropout(x) @ lora_a.T`` is added up in float32 (float64 for float64) and rounded;
  the output is rounded once from float32 where the layer is one product, and once more in the
  middle where the branch is added to a finished one (``explain`` says which).
- ``dropout_p`` acts on the input of the branch, and only with ``training=True``; what is kept is
  multiplied by ``1 / (1 - dropout_p)``. The mask is a function of a seed, drawn from torch's
  generator of the device, and of the place of an element: it is never in memory, the backward makes
  it again, and so does activation checkpointing. The probability is rounded to 16 bits.
- Saved for backward: ``t`` (``r`` numbers a row), ``x`` for the gradients of ``lora_a`` and
  ``weight``, parameters, and with an activation ``z``, or of relu the output. Only the gradients
  that are asked for are computed. Nothing saved is written to. Differentiable once: a double
  backward raises.
- Memory, in elements, beyond that of the linear: ``M K`` of ``x`` for ``t``, and forward ``2 M N``
  where the branch is added afterwards; backward ``M N`` for the gradients of ``t`` and ``lora_b``
  where one pass over the incoming gradient makes both, else ``2 M N``; ``M K`` for ``lora_a``; and
  ``2 M K`` where the branch's part of the gradient of ``x`` is added afterwards, or with dropout,
  where it is made first, in one launch up to 16 ranks of 16-bit types, and added by the product
  (``4 M K`` where it is made in two). The pass for both is taken of 16-bit types on Hopper from 256
  rows on, if these start at multiples of 16 bytes, up to 32 ranks, or 64 if not a multiple of 8.
  It leaves partial sums of the gradient of ``t`` in float32: ``4 M r N / 512`` bytes of up to 16
  ranks, twice as many of more.
- ``TypeError``: an operand that is no floating tensor, or of a dtype that does not go with ``x``.
  ``ValueError``: a shape, device, rank or probability that does not fit, an unknown activation.
  The message names function and argument. Quantised or packed weights are refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._library import define, define_host
from . import _lora_autograd as autograd
from . import _lora_cuda as cuda
from . import _lora_reference as reference
from ._activations import activation_code
from ._call import Operator
from ._rows import batched_rows, call
from .linear_act import autocast, linear_act
from .pointwise import act_mul

FAMILY = "lora"


class LoRAWeights(NamedTuple):
    """What a linear layer of :func:`lora_mlp` has: an adapter, or ``None`` for both its factors."""

    weight: Tensor
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scale: float = 1.0
    bias: Tensor | None = None
    dropout_p: float = 0.0


# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    dropout_p: float = 0.0,
    training: bool = False,
) -> Tensor:
    """``act(x @ weight.T + bias + scale * (dropout(x) @ lora_a.T) @ lora_b.T)``.

    Shapes, dtypes, numerics, dropout, saved tensors, memory and errors: see the head of this
    module.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.eye(2)
    >>> lora_a, lora_b = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0], [-1.0]])
    >>> fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5)
    tensor([[2.5000, 0.5000]])
    """
    code = activation_code("lora_linear", activation)
    operands = cast(x, weight, bias, lora_a, lora_b)
    seed = _draw_seed("lora_linear", operands[0], dropout_p, training)
    y = call(_LORA_LINEAR, (*operands, seed), code, scale, dropout_p)
    return y[0] if isinstance(y, tuple) else y  # with a gradient, what is saved comes along


def lora_mlp(
    x: Tensor,
    up: LoRAWeights,
    down: LoRAWeights,
    activation: str = "gelu_tanh",
    *,
    gate: LoRAWeights | None = None,
    training: bool = False,
) -> Tensor:
    """``down(act(up(x)))``, or with a gate ``down(act(gate(x)) * up(x))``: each with its own LoRA.

    ``up``, ``down`` and ``gate`` are :class:`LoRAWeights`, ``(weight, lora_a, lora_b, scale, bias,
    dropout_p)``, or tuples like it, of which the end may be missing; ``lora_a=None`` and
    ``lora_b=None`` make a layer without an adapter. Ranks, scales and probabilities may differ, and
    each branch draws its own dropout mask.

    All else: see the head of this module, and :func:`fusedcuda.act_mul` for the gate.

    >>> x, one = torch.tensor([[1.0, -2.0]]), torch.eye(2)
    >>> fusedcuda.lora_mlp(x, (one,), (3 * one,), "relu")
    tensor([[3., 0.]])
    """
    activation_code("lora_mlp", activation)
    layers = {"up": up, "down": down} | ({} if gate is None else {"gate": gate})
    weights = {name: weights_of(name, layer) for name, layer in layers.items()}

    def apply(name: str, rows: Tensor, activation: str = "none") -> Tensor:
        weight, lora_a, lora_b, scale, bias, dropout_p = weights[name]
        try:
            if lora_a is None or lora_b is None:
                return linear_act(rows, weight, bias, activation)
            layer = (rows, weight, lora_a, lora_b, scale, bias, activation)
            return lora_linear(*layer, dropout_p=dropout_p, training=training)
        except (TypeError, ValueError) as error:
            raise type(error)(f"lora_mlp: {name}: {error}") from None

    if gate is None:
        return apply("down", apply("up", x, activation))
    return apply("down", act_mul(apply("gate", x), apply("up", x), activation))


def weights_of(name: str, layer: Any) -> LoRAWeights:
    if not isinstance(layer, (tuple, list)) or not 1 <= len(layer) <= len(LoRAWeights._fields):
        fields = ", ".join(LoRAWeights._fields)
        raise TypeError(f"lora_mlp: {name} must be a tuple ({fields}); got {type(layer).__name__}")
    weights = LoRAWeights(*layer)
    if (weights.lora_a is None) != (weights.lora_b is None):
        missing = "lora_a" if weights.lora_a is None else "lora_b"
        raise ValueError(f"lora_mlp: {name} has one factor of an adapter; {missing} is None")
    return weights


def cast(x: Any, weight: Any, bias: Any, lora_a: Any, lora_b: Any) -> tuple[Any, ...]:
    """The operands as autocast wants them: of an adapter only what is not float32 anyway."""
    x, weight, bias = autocast(x, weight, bias)

    def cast_factor(factor: Any) -> Any:
        if not isinstance(x, Tensor) or not isinstance(factor, Tensor):
            return factor
        is_master = factor.dtype == torch.float32 and x.dtype.itemsize == 2
        return factor if is_master else autocast(factor)[0]

    return x, weight, bias, cast_factor(lora_a), cast_factor(lora_b)


def _draw_seed(op: str, x: Any, dropout_p: Any, training: bool) -> Tensor | None:
    reference.check_dropout(op, dropout_p)
    if not training or dropout_p == 0 or not isinstance(x, Tensor):
        return None
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=x.device)


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------


def _define(schema: str, num_tensors: int, composed: bool = False) -> torch._ops.OpOverload:
    """The first ``num_tensors`` arguments are tensors. Under vmap samples are computed one by one.

    ``composed``: of other operators, on CUDA, too.
    """
    name = schema.split("(")[0]
    return define(
        FAMILY,
        schema,
        cpu=getattr(reference, name),
        fake=getattr(reference, f"{name}_fake"),
        vmap=batched_rows(name, vectors=range(num_tensors)),
        cuda=getattr(cuda, name) if composed else None,
    )


_LAYER = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor lora_a, Tensor lora_b, Tensor? seed, "
    "int activation, float scale, float dropout_p"
)
_lora_linear = _define(f"lora_linear({_LAYER}) -> Tensor", 6, composed=True)
# [y, t], and z if there is an activation other than relu.
_define(f"lora_linear_forward({_LAYER}) -> Tensor[]", 6, composed=True)
# The gradients whose bit is set in the mask: 0 of x, 1 of the weight, 2 of the bias, 3 of lora_a,
# 4 of lora_b. `saved` is z, or of relu the output. Of x only the shape is looked at where neither
# bit 1 nor bit 3 is set, of the weight where bit 0 is not: an expanded element may stand for it.
_define(
    "lora_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? saved, Tensor t, "
    "Tensor lora_a, Tensor lora_b, Tensor? seed, int activation, float scale, float dropout_p, "
    "int mask) -> Tensor[]",
    8,
    composed=True,
)
# The parts. The kernels of the first two are of 16-bit types; cuBLAS makes the others' products.
# x is a matrix, factor (r, K) with either dimension inner. t is (M, r rounded up to 8), of which
# the columns behind the rank are 0.
_define(
    "lora_down(Tensor x, Tensor factor, Tensor? seed, float scale, float dropout_p) -> Tensor", 3
)
# t.T @ dropout(x), or transposed; in float32 or in the dtype of x.
_define(
    "lora_up(Tensor t, Tensor x, Tensor? seed, int rank, float dropout_p, bool transposed, "
    "bool in_float32) -> Tensor",
    3,
)
_define("lora_dropout(Tensor x, Tensor seed, float dropout_p) -> Tensor", 2)
# [dropout(t @ factor)] of factor (columns of t, K), or [] where there is no kernel for that.
_define("lora_branch(Tensor t, Tensor factor, Tensor seed, float dropout_p) -> Tensor[]", 3)
# Of one pass over x, those of [scale * dropout(x) @ factor.T, t.T @ dropout(x) or transposed] that
# are asked for: of factor the first, in the shape of lora_down's result, of t the second; [] where
# there is no kernel for that. factor is (rank, K) by rows, or with t (rank rounded up to 8, K) by
# columns. Both are of x's dtype.
_define(
    "lora_pass(Tensor x, Tensor? factor, Tensor? t, Tensor? seed, int rank, float scale, "
    "float dropout_p, bool transposed, bool in_float32) -> Tensor[]",
    4,
)
# [x @ weight.T + bias + t @ up.T, t] with t = scale * x @ down.T, in one launch; [] where there is
# no kernel for that. x is a matrix, down (r, K); up (N, r rounded up to 8) lies as the weight does.
_define(
    "lora_product(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float scale) "
    "-> Tensor[]",
    5,
)
# The same with an activation, for few rows.
_define(
    "lora_decode(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float scale, "
    "int activation) -> Tensor[]",
    5,
)

# Host only. How the branch is added to the linear: returns what was chosen before.
define_host("lora_use(str path) -> str", cuda.use)
# What a call would launch, as JSON. Implemented in csrc/bindings/lora.cpp, read by explain().
define_host(
    "lora_down_plan(Tensor x, Tensor factor, Tensor? seed, float scale, float dropout_p, "
    "int num_sms) -> str"
)
define_host(
    "lora_up_plan(Tensor t, Tensor x, Tensor? seed, int rank, float dropout_p, bool transposed, "
    "bool in_float32, int num_sms) -> str"
)
define_host(
    "lora_branch_plan(Tensor t, Tensor factor, Tensor seed, float dropout_p, int num_sms) -> str"
)
define_host(
    "lora_pass_plan(Tensor x, Tensor? factor, Tensor? t, Tensor? seed, int rank, float scale, "
    "float dropout_p, bool transposed, bool in_float32, int num_sms) -> str"
)
define_host(
    "lora_product_plan(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float scale, "
    "int num_sms) -> str"
)
define_host(
    "lora_decode_plan(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float scale, "
    "int activation, int num_sms) -> str"
)

_LORA_LINEAR = Operator(
    "lora_linear",
    _lora_linear,
    autograd.LoRALinear,
    ("x", "weight", "bias", "lora_a", "lora_b", "seed"),
    lambda *arguments: reference.check_lora("lora_linear", *arguments),
)
