"""The gated MLP (SwiGLU, GEGLU, ReGLU): gate and up in one pass over the input.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202. Kernels:
``csrc/kernels/gated_mlp.cu``, the products of ``fusedcuda/ops/linear_act.py`` and the gated product
of ``fusedcuda/ops/pointwise.py``. Which of them a call takes is decided in
``fusedcuda/ops/_gated_mlp_cuda.py``; ``explain`` says it, and ``torch.ops.fusedcuda.gated_mlp_use``
forces one of its paths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import define, define_host
from . import _gated_mlp_autograd as autograd
from . import _gated_mlp_cuda as cuda
from . import _gated_mlp_reference as reference
from ._activations import activation_code
from ._call import Operator
from ._rows import batched_rows, call
from .linear_act import autocast

FAMILY = "gated_mlp"

# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


def gated_mlp(
    x: Tensor,
    w_gate_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    activation: str = "silu",
    *,
    recompute: bool = False,
) -> Tensor:
    """``(act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T``.

    - ``x`` is ``(..., K)``: any leading dimensions, any strides. ``w_gate_up`` is ``(2 F, K)``, the
      rows of the gate and behind them those of up, or a pair ``(w_gate, w_up)`` of weights
      ``(F, K)``, which are read where they are: neither form is copied into the other.
      ``w_down`` is ``(N, F)``. The output is ``(..., N)``, contiguous.
    - ``activation``: silu, gelu (erf), gelu_tanh, relu, relu_squared, sigmoid, tanh or none.
    - One dtype for all tensors and the output: float64, float32, float16 or bfloat16. Under
      autocast they are cast first, as those of ``torch.nn.functional.linear`` are.
    - Numerics: all sums are of float32 (float64 for float64). The hidden layer
      ``h = act(gate) * up`` is rounded once, and so is the output; where gate and up are products
      of their own (paths "apart" and "concatenated"), so are they. Backward, the gradients of
      ``h``, gate and up are rounded once each, and taken at the rounded gate and up.
    - Saved for backward, with ``M`` rows of ``x``: ``2 M F`` elements of gate and up, side by side;
      ``h``, ``M F``, for the gradient of ``w_down``; ``x`` for those of gate and up; parameters.
      ``recompute=True`` keeps no ``h``, a third of the memory: it is made again, from the rounded
      gate and up, in the pass of the backward that makes their gradients. Only what a gradient that
      is asked for needs is kept, and only these are computed. Nothing saved is written to.
      Differentiable once: a double backward raises.
    - Memory moved, in elements: forward ``M K + 2 F K + N F + M N``, and ``2 M F`` of ``h`` in
      between (hardly any where all is one launch, of up to 8 rows without a gradient, 16 of a pair
      of weights). Gate and up add ``2 M F`` where they are saved, ``4 M F`` where they are products
      of their own. Backward: what the products read and write, and ``5 M F`` of the pass between
      them (``recompute``: ``6 M F``).
    - ``TypeError``: an operand that is no floating tensor, or of another dtype. ``ValueError``: a
      shape or device that does not fit, an unknown activation. The message names the argument, as
      ``w_gate_up``, or ``w_gate`` and ``w_up`` of a pair.

    >>> x, one = torch.tensor([[1.0, -2.0]]), torch.eye(2)
    >>> fusedcuda.gated_mlp(x, (one, 3 * one), one, "relu")
    tensor([[3., 0.]])
    """
    code = activation_code("gated_mlp", activation)
    operator = _RECOMPUTING if recompute else _GATED_MLP
    y = call(operator, autocast(x, *split_pair(w_gate_up), w_down), code)
    return y[0] if isinstance(y, tuple) else y  # with a gradient, what is saved comes along


def split_pair(w_gate_up: Any) -> tuple[Any, Any]:
    """As the operators take it: a packed weight and ``None``, or the weights of gate and of up."""
    if not isinstance(w_gate_up, (tuple, list)):
        return w_gate_up, None
    if len(w_gate_up) != 2 or w_gate_up[1] is None:
        names = ", ".join(type(w).__name__ for w in w_gate_up)
        raise TypeError(
            f"gated_mlp: w_gate_up must be a tensor or a pair of tensors (w_gate, w_up); "
            f"got ({names})"
        )
    return w_gate_up[0], w_gate_up[1]


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------

# The weights are w_gate (F, K) and w_up (F, K); or w_gate (2 F, K), rows of both, without w_up.
_OPERANDS = "Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down"


def _define_layer(schema: str, weights: range, sums: int = 0) -> torch._ops.OpOverload:
    """An operator that consists of others on CUDA; ``weights`` are the positions of its weights.

    ``sums``: see :func:`_rows.batched_rows`.
    """
    name = schema.split("(")[0]
    return define(
        FAMILY,
        schema,
        cpu=getattr(reference, name),
        fake=getattr(reference, f"{name}_fake"),
        vmap=batched_rows(name, vectors=weights, sums=sums),
        cuda=getattr(cuda, name),
    )


_gated_mlp = _define_layer(f"gated_mlp({_OPERANDS}, int activation) -> Tensor", range(1, 4))
# [y, gate_up, h]: gate_up (..., 2 F) and h (..., F), contiguous.
_define_layer(f"gated_mlp_forward({_OPERANDS}, int activation) -> Tensor[]", range(1, 4))
# The gradients whose bit is set in the mask: 0 of x, 1 of w_gate, 2 of w_up, 3 of w_down. `packed`
# says whether w_gate is the weight of both. What a gradient is made of has to be given: weights for
# that of x, x for those of w_gate and w_up, gate_up and w_down for all three; h for that of w_down,
# or gate_up, from which it is then made again.
_define_layer(
    "gated_mlp_backward(Tensor dy, Tensor? x, Tensor? w_gate, Tensor? w_up, Tensor? w_down, "
    "Tensor? gate_up, Tensor? h, bool packed, int activation, int mask) -> Tensor[]",
    range(2, 5),
    sums=reference.DGATE | reference.DUP | reference.DDOWN,
)

# The kernels, of 16-bit types. x is a matrix (M, K), w_gate and w_up are (F, K), w_down is (N, F);
# the elements of their rows lie side by side, the rows anywhere. Both return [] where there is no
# kernel for such operands.
#
# [h] or, with `saves`, [h, gate_up]: h (M, F) = act(x @ w_gate.T) * (x @ w_up.T) from the sums in
# float32, rounded once; gate_up (M, 2 F) are the sums, rounded.
define(
    FAMILY,
    "gated_product(Tensor x, Tensor w_gate, Tensor w_up, int activation, bool saves) -> Tensor[]",
    cpu=reference.gated_product,
    fake=reference.gated_product_fake,
)
# [y] of up to 16 rows in one launch.
define(
    FAMILY,
    "gated_mlp_decode(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, int activation) "
    "-> Tensor[]",
    cpu=reference.gated_mlp_decode,
    fake=reference.gated_mlp_decode_fake,
)

# Host only. Which path calls take from now on: returns what was chosen before.
define_host("gated_mlp_use(str path) -> str", cuda.use)
# What a call would launch, as JSON; "" where there is no kernel for it. Implemented in
# csrc/bindings, read by explain().
define_host(
    "gated_product_plan(Tensor x, Tensor w_gate, Tensor w_up, int activation, bool saves, "
    "int num_sms) -> str"
)
define_host(
    "gated_mlp_decode_plan(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, int activation, "
    "int num_sms) -> str"
)

# --------------------------------------------------------------------------------------------------
# From function to operator
# --------------------------------------------------------------------------------------------------


def _check(x: Any, w_gate: Any, w_up: Any, w_down: Any, activation: int) -> None:
    reference.check_gated_mlp("gated_mlp", x, w_gate, w_up, w_down)


_NAMES = ("x", "w_gate", "w_up", "w_down")
_GATED_MLP = Operator("gated_mlp", _gated_mlp, autograd.GatedMLP, _NAMES, _check)
_RECOMPUTING = Operator("gated_mlp", _gated_mlp, autograd.RecomputingGatedMLP, _NAMES, _check)
