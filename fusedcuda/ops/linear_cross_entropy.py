"""A linear layer and the cross-entropy of what comes out of it, without ever holding all logits.

The last layer of a language model makes a row of logits, one for each of a hundred thousand
classes, of every token: more memory than the rest of the step. Here they exist for a chunk of rows
at a time, in ``x``'s dtype. Exact: every logit is computed and counts.

Sources: the loss is that of :func:`fusedcuda.cross_entropy`, whose module cites its terms; the
chunks are those of Liger Kernel's ``LigerFusedLinearCrossEntropyLoss`` (arXiv:2410.10989), here
with the sums that cross them in float32. What a call consists of:
``_linear_cross_entropy_chunks.py``; kernels: those of ``linear_act`` and ``cross_entropy``, and
``csrc/kernels/linear_cross_entropy.cu``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import define, functorch_active
from . import _linear_cross_entropy_autograd as autograd
from . import _linear_cross_entropy_chunks as chunks
from . import _linear_cross_entropy_reference as reference
from ._call import Operator
from ._cross_entropy_reference import check_numbers, reduction_code
from ._rows import batched_rows, call
from .linear_act import autocast

FAMILY = OP = reference.OP


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int | str = "auto",
    accumulate: str = "fp32",
) -> Tensor:
    """``cross_entropy(x @ weight.T + bias, target)``, with the logits of a chunk of rows at a time.

    Shapes: ``x`` ``(..., H)``, any strides; ``weight`` ``(V, H)``, any strides; ``target``
    ``(...)``; ``bias`` ``(V,)``. Dtypes: one for ``x``, ``weight`` and ``bias``, float64, float32,
    float16 or bfloat16 (under autocast they are cast first, as those of
    ``torch.nn.functional.linear`` are); ``target`` int32 or int64. The loss is float32 (float64 for
    float64), of the shape of ``target`` for "none" and 0-d otherwise. Differentiable once, in
    ``x``, ``weight`` and ``bias``; only the gradients that are asked for are computed, without any
    the logits are only read for the loss.

    ``ignore_index``, ``reduction``, ``label_smoothing``, ``z_loss``, ``softcap``, NaN and targets
    out of range: as :func:`fusedcuda.cross_entropy`, which sees logits that have been added up in
    float32 and rounded to the dtype of ``x`` (as torch's linear layer does). Their gradient is
    rounded to it too, before it is multiplied. Nothing waits for the GPU.

    ``chunk``: rows at a time, or "auto". ``accumulate``: what the gradient of ``weight`` is added
    up in over the chunks, "fp32", or "weight" for the dtype of ``weight``: then it is rounded once
    more for each chunk after the first, and there is no second, larger copy of it. With one chunk
    both are the same. Memory in bytes, beside the operands, with ``M`` rows, chunks of ``c``,
    ``s`` bytes an element, and ``V`` rounded up to a multiple of 8::

        s M H  +  s V H  +  s c V                          "weight", or one chunk
        s M H  +  4 V H  +  max(s c V, s V H)              "fp32" of 16-bit types
                                                           (no gradients: s c V)

    "auto" takes the fewest chunks for which that is at most half of the memory that is free, as the
    driver and torch's allocator say; on the CPU, in a CUDA graph and with
    ``torch.use_deterministic_algorithms`` one of ``max(1024, H)`` rows, or all rows where that
    takes no more memory. Smaller chunks are slower: each reads ``weight`` twice, and reads and
    writes the sum of its gradient. Chunks move the last bits of a result; with a number for
    ``chunk`` these are the same in every call.

    FLOPs: ``6 M V H`` forward and backward together (``2 M V H`` without gradients), as long as the
    forward can make the gradients: "mean" and "sum" of float32 and bfloat16. It then makes them for
    an incoming gradient of 1, and the backward hands them out, scaled in place if it is another one
    (which rounds once more). ``8 M V H`` otherwise, as the backward makes the logits once more and
    multiplies them by the incoming gradient first: "none", where each row has its own; float16,
    where gradients that are not scaled yet may underflow; float64; ``torch.func``; a second
    backward. Memory traffic beside the products: 4 bytes a logit of a 16-bit type (2 forward and 4
    backward where the logits are made again).

    Saved for backward: ``x``, ``weight``, ``bias``, ``target``, two float32 a row, and where the
    forward makes them the gradients. No operand is written to. Where ``V`` is no multiple of 8 the
    gradient of ``weight``, unless it is rounded from a sum in float32, is a contiguous view of
    memory with up to 7 rows more.

    Raises ``TypeError`` for a dtype or a type, ``ValueError`` for a shape, a device, a number out
    of range or an unknown word, ``IndexError`` on the CPU for a target out of range. The message
    names the argument.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> fusedcuda.linear_cross_entropy(x, weight, torch.tensor([0]))
    tensor(1.3133)
    """
    code = reduction_code(reduction, OP)
    check_numbers(label_smoothing, z_loss, softcap, OP)
    how = (reference.chunk_code(chunk), reference.sums_in_float32(accumulate))
    x, weight, bias = autocast(x, weight, bias)
    return call(
        choose_operator(x, code),
        (x, weight, bias, target),
        ignore_index,
        label_smoothing,
        z_loss,
        softcap or 0.0,
        code,
        *how,
        0,
    )[0]


def makes_gradients_ahead(dtype: torch.dtype, reduction: int) -> bool:
    """Whether the forward can make them: for an incoming gradient of 1, to be scaled if need be.

    In float16 that of a mean over many rows underflows until the scale of the loss comes in, and
    float64 is for gradcheck, which the backward proper should face.
    """
    return reduction != reference.NONE and dtype in (torch.float32, torch.bfloat16)


def choose_operator(x: Any, reduction: int) -> Operator:
    """By what the backward does; without a gradient they are one."""
    if not makes_gradients_ahead(getattr(x, "dtype", torch.float64), reduction):
        return RECOMPUTED
    if torch.compiler.is_compiling():
        return TRACED
    return RECOMPUTED if functorch_active() else AHEAD


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------

_LAYER = "Tensor x, Tensor weight, Tensor? bias, Tensor target"
_OPTIONS = (
    "int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction, "
    "int chunk, bool in_float32, int mask"
)

# [loss, statistics, normalizer], as cross_entropy_forward makes them, and the gradients whose bit
# is set in the mask, for an incoming gradient of 1: 0 of x, 1 of the weight, 2 of the bias. chunk 0
# is "auto". Under vmap samples are computed one by one.
_forward = define(
    FAMILY,
    f"linear_cross_entropy_forward({_LAYER}, {_OPTIONS}) -> Tensor[]",
    cpu=chunks.linear_cross_entropy_forward,
    fake=reference.forward_fake,
    vmap=batched_rows("linear_cross_entropy_forward", vectors=range(4)),
    cuda=chunks.linear_cross_entropy_forward,
)
define(
    FAMILY,
    f"linear_cross_entropy_backward(Tensor grad_loss, {_LAYER}, Tensor statistics, "
    f"Tensor normalizer, {_OPTIONS}) -> Tensor[]",
    cpu=chunks.linear_cross_entropy_backward,
    fake=reference.backward_fake,
    vmap=batched_rows("linear_cross_entropy_backward", vectors=range(7)),
    cuda=chunks.linear_cross_entropy_backward,
)
# gradient *= factor, unless that is 1, which is decided where it lives.
define(
    FAMILY,
    "linear_cross_entropy_scale_(Tensor(a!) gradient, Tensor factor) -> ()",
    cpu=reference.linear_cross_entropy_scale_,
    fake=reference.scale_fake,
)

_OPERANDS = ("x", "weight", "bias", "target")
RECOMPUTED, AHEAD, TRACED = (
    Operator(OP, _forward, function, _OPERANDS, reference.check)
    for function in (autograd.Recomputed, autograd.Ahead, autograd.Traced)
)
