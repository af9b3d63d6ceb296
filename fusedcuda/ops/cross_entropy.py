"""Cross-entropy of logits with class indices, forward and backward, over the last dimension.

What is computed, for a row of logits ``x`` with ``V`` classes and the target ``t``, with class
weights ``w`` (1 if absent), ``x' = softcap * tanh(x / softcap)`` (``x`` without a cap), and
``lse = log(sum(exp(x')))``, found on one pass over the row (online softmax, Milakov & Gimelshein,
arXiv:1805.02867)::

    entropy = (1 - label_smoothing) * w[t] * (lse - x'[t])
              + label_smoothing / V * sum over c of w[c] * (lse - x'[c])
    penalty = z_loss * lse^2

A row whose target is ``ignore_index`` counts as nothing, whatever its logits: loss 0, gradient 0.
``reduction`` "none" gives ``entropy + penalty`` a row, "sum" their sum, "mean" the sum of the
entropies divided by that of ``w[t]`` (as torch does) plus the mean of the penalties.

Sources: label smoothing Szegedy et al., arXiv:1512.00567, as torch defines it; z-loss PaLM,
arXiv:2204.02311; soft cap Gemma 2, arXiv:2408.00118. Kernels: ``csrc/kernels/cross_entropy.cu``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import define, define_host, first_order_only, functorch_active
from . import _cross_entropy_reference as reference
from ._call import Operator
from ._rows import batched_rows, call

FAMILY = "cross_entropy"
NONE = reference.REDUCTIONS["none"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` with z-loss, soft cap and the least memory traffic.

    Shapes: ``logits`` ``(..., V)``, any strides; ``target`` ``(...)``; ``weight`` ``(V,)``. (The
    form of torch with the classes in dimension 1 of several is refused: move them to the end.)
    Dtypes: ``logits`` and ``weight`` float64, float32, float16 or bfloat16, not necessarily the
    same; ``target`` int32 or int64. The loss is float32 (float64 for float64 logits), of the shape
    of ``target`` for "none" and 0-d otherwise. The gradient has the dtype of the logits; it is
    computed in float32 with the incoming gradient and rounded once, so that a scaled loss keeps
    what would underflow in float16. There is no gradient for ``weight``. Differentiable once.

    As in torch: the mean over no row at all is NaN, a row of ``-inf``, or with ``+inf`` or NaN,
    gives NaN, and a target outside of ``[0, V)`` that is not ``ignore_index`` raises an
    ``IndexError`` on the CPU and fails a device-side assert on a GPU. Nothing waits for the GPU.

    Memory traffic, in bytes a logit of a 16-bit type, forward and backward together:

    - "mean" and "sum": 4. The forward reads the logits and writes their gradient; the backward
      hands it out. Where the incoming gradient is not 1 (a scaled or weighted loss) the backward
      makes it again, exactly: 8.
    - "none", float64, under ``torch.compile`` and ``torch.func``: 6. The forward reads the logits,
      the backward reads them again and writes the gradient.
    - ``inplace_backward=True``: 6 as well, and no memory for the gradient: the backward writes it
      over the logits. They must not be used afterwards; autograd notices where they are. A second
      backward raises. Ignored under ``torch.compile`` and ``torch.func``.

    Saved for backward: ``logits``, ``target``, ``weight``, two float32 a row, and for "mean" and
    "sum", unless ``inplace_backward``, the gradient.

    Raises ``TypeError`` for a dtype or a type, ``ValueError`` for a shape, a device or a number out
    of range, ``RuntimeError`` for a ``weight`` that requires a gradient and for logits that
    ``inplace_backward`` may not write to (a leaf, a view of one, or rows that share memory). The
    message names the argument.

    >>> fusedcuda.cross_entropy(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0]))
    tensor(2.4076)
    """
    code = reference.reduction_code(reduction)
    if not (softcap is None and isinstance(label_smoothing, float) and isinstance(z_loss, float)):
        reference.check_numbers(label_smoothing, z_loss, softcap)
    return call(
        choose_operator(logits, code, inplace_backward),
        (logits, target, weight),
        ignore_index,
        label_smoothing,
        z_loss,
        softcap or 0.0,
        code,
        False,
    )[0]


def choose_operator(logits: Tensor, reduction: int, inplace_backward: bool) -> Operator:
    """By what the backward does; without a gradient they are one."""
    # Dynamo and functorch want to see every output and no side effect.
    if torch.compiler.is_compiling() or functorch_active():
        return RECOMPUTED
    if inplace_backward:
        return IN_PLACE
    # float64 is for gradcheck, which the backward of a scaled loss should face.
    if reduction == NONE or getattr(logits, "dtype", None) is torch.float64:
        return RECOMPUTED
    return AHEAD


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------

_OPTIONS = (
    "Tensor? weight, int ignore_index, float label_smoothing, float z_loss, float softcap, "
    "int reduction"
)
_SAVED = "Tensor grad_loss, Tensor logits, Tensor target, Tensor statistics, Tensor normalizer"

# [loss, statistics, normalizer] and, with_gradient, the gradient of the logits for an incoming
# gradient of 1. statistics (..., 2): of each row, the maximum of x' and the sum of
# exp(x' - maximum). (Not their lse: rounded, it would make the gradient several times less exact.)
# normalizer: the class weights of the valid targets added up, and their number; nothing for
# reduction "none". softcap 0 stands for none. Under vmap samples are computed one by one, as each
# is reduced alone.
_forward = define(
    FAMILY,
    f"cross_entropy_forward(Tensor logits, Tensor target, {_OPTIONS}, bool with_gradient)"
    " -> Tensor[]",
    cpu=reference.cross_entropy_forward,
    fake=reference.forward_fake,
    vmap=batched_rows("cross_entropy_forward", vectors=range(3)),
)
# The same of some of the rows: given the normalizer of all of them, it writes their losses (never
# added up) and their statistics and, with_gradient, the gradient over the logits.
define(
    FAMILY,
    "cross_entropy_rows_(Tensor(a!) logits, Tensor(b!) losses, Tensor(c!) statistics, "
    "Tensor target, Tensor normalizer, int ignore_index, float label_smoothing, float z_loss, "
    "float softcap, int reduction, bool with_gradient) -> ()",
    cpu=reference.cross_entropy_rows_,
    fake=reference.rows_fake,
)
_backward = define(
    FAMILY,
    f"cross_entropy_backward({_SAVED}, {_OPTIONS}) -> Tensor",
    cpu=reference.cross_entropy_backward,
    fake=reference.backward_fake,
    vmap=batched_rows("cross_entropy_backward", vectors=range(6)),
)
# Writes the gradient into a tensor, which may be the logits; with unless_one only if grad_loss is
# not 1, which is decided where grad_loss lives.
_backward_ = define(
    FAMILY,
    f"cross_entropy_backward_(Tensor(a!) gradient, {_SAVED}, {_OPTIONS}, bool unless_one) -> ()",
    cpu=reference.cross_entropy_backward_,
    fake=reference.backward_inplace_fake,
)


def _check_weight(ctx: Any) -> None:
    if ctx.needs_input_grad[2]:
        raise RuntimeError(
            "cross_entropy: weight requires a gradient, but there is none for it; "
            "pass weight.detach()"
        )


class _Recomputed(torch.autograd.Function):
    """The backward reads the logits again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(_forward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _check_weight(ctx)
        logits, target, weight, *options, _ = inputs
        _, statistics, normalizer = output
        ctx.options = options
        ctx.mark_non_differentiable(statistics, normalizer)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, target, statistics, normalizer, weight)

    @staticmethod
    @first_order_only("cross_entropy")
    def backward(ctx: Any, grad: Tensor | None, *saved: Tensor) -> tuple[Tensor | None, ...]:
        if grad is None:  # the loss is not used further
            return None, *_NO_GRADIENTS
        return _backward(grad, *saved, *ctx.options), *_NO_GRADIENTS


class _InPlace(torch.autograd.Function):
    """The backward overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor]:
        _check_weight(ctx)
        logits, target, weight, *options, _ = args
        if ctx.needs_input_grad[0]:
            _check_writable(logits)
        loss, statistics, normalizer = _forward(*args)
        ctx.options = options
        ctx.overwritten = False
        ctx.save_for_backward(logits, target, statistics, normalizer, weight)
        return (loss,)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError(
                "cross_entropy: a second backward was asked for, but inplace_backward=True wrote "
                "the gradient over the logits in the first"
            )
        gradients = _overwrite_logits(ctx, grad)
        ctx.overwritten = True
        return gradients


@first_order_only("cross_entropy")
def _overwrite_logits(ctx: Any, grad: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
    logits = saved[0].detach()
    _backward_(logits, grad, *saved, *ctx.options, False)
    # Whoever else has saved the logits must not find a gradient in their place unnoticed.
    torch.autograd.graph.increment_version(logits)
    return logits, *_NO_GRADIENTS


def _check_writable(logits: Tensor) -> None:
    """``RuntimeError`` for logits that autograd would not let an in-place operator write to."""
    base = logits if logits._base is None else logits._base
    if base.is_leaf:
        what = "a leaf" if base is logits else "a view of a leaf"
        raise RuntimeError(
            f"cross_entropy: inplace_backward=True would overwrite logits, which are {what}; "
            "it is for logits that another operator has just made"
        )
    if any(size > 1 and not step for size, step in zip(logits.shape, logits.stride(), strict=True)):
        raise RuntimeError(
            "cross_entropy: inplace_backward=True cannot write to logits that are expanded; "
            f"got strides {logits.stride()} for shape {tuple(logits.shape)}"
        )


class _Ahead(torch.autograd.Function):
    """The forward makes the gradient too."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor]:
        _check_weight(ctx)
        logits, target, weight, *options, _ = args
        loss, statistics, normalizer, gradient = _forward(*args[:-1], True)
        ctx.options = options
        ctx.handed_out = False
        # Saved, not kept: checkpointing and offloading see what is saved only.
        ctx.save_for_backward(logits, target, statistics, normalizer, weight, gradient)
        return (loss,)

    @staticmethod
    @first_order_only("cross_entropy")
    def backward(ctx: Any, grad: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, gradient = saved
        if ctx.handed_out:  # in a first backward, whose result others hold now
            return _backward(grad, *tensors, *ctx.options), *_NO_GRADIENTS
        ctx.handed_out = True
        # .data has its own version: what is written here is no reason to call it stale.
        gradient = gradient.data
        _backward_(gradient, grad, *tensors, *ctx.options, True)
        return gradient, *_NO_GRADIENTS


# For all arguments of the functions but the logits.
_NO_GRADIENTS = (None,) * 8

_OPERANDS = ("logits", "target", "weight")
RECOMPUTED, IN_PLACE, AHEAD = (
    Operator("cross_entropy", _forward, function, _OPERANDS, reference.check)
    for function in (_Recomputed, _InPlace, _Ahead)
)

# Host only: what a call would launch, as JSON. Implemented in csrc/bindings/cross_entropy.cpp, read
# by explain().
define_host(
    "cross_entropy_plan(Tensor logits, Tensor? weight, float label_smoothing, float softcap, "
    "int reduction, bool with_gradient, bool is_backward, bool in_place, bool unless_one, "
    "int num_sms) -> str"
)
