"""What a DLRM has between and behind its linear layers: interaction, and head with loss.

Source: Naumov et al., Deep Learning Recommendation Model, arXiv:1906.00091. Kernels:
``csrc/kernels/dlrm.cu``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._library import define, define_host
from . import _dlrm_lookup_reference as lookup
from . import _dlrm_reference as reference
from ._call import Operator
from ._cross_entropy_reference import REDUCTIONS
from ._dlrm_autograd import DotInteraction, EmbeddingInteraction, LinearSigmoidBce
from ._operands import compute_dtype
from ._rows import batched_rows, call, check_number
from .linear_act import autocast

FAMILY = "dlrm"

_ORDERS = {"tril": False, "triu": True}

# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


def dot_interaction(
    dense: Tensor,
    embeddings: Tensor | Sequence[Tensor],
    *,
    order: str = "tril",
    pad: int = 8,
) -> Tensor:
    """The dense vector of each sample, then the dot products of all pairs of its vectors.

    - ``dense`` is ``(B, E)``, the first of the ``F`` vectors; ``embeddings`` are the others,
      ``(B, F - 1, E)``, read where they lie if their elements are neighbours in memory, or a list
      of ``F - 1`` tensors ``(B, E)``, which is stacked first. ``F`` up to 64, ``E`` up to 256.
    - The output is ``(B, E + F (F - 1) / 2)``, widened by zeros to a multiple of ``pad`` (1 to
      128): the linear layer behind it is several times slower where that is no multiple of 8.
    - ``order``: "tril" has the products (1, 0), (2, 0), (2, 1), (3, 0), ..., as the DLRM of
      facebookresearch and NVIDIA's; "triu" (0, 1), (0, 2), ..., (1, 2), ..., as TorchRec.
    - One dtype: float64, float32, float16 or bfloat16. Added up in float32 (float64 for float64)
      and rounded once; the dense vector is copied. Under autocast the vectors are cast first, as
      those of ``torch.bmm`` are. Tensor cores take 16-bit types; whole vectors of 16 bytes are
      fastest.

    Memory: reads every vector once and writes the output once. Backward reads the vectors and the
    incoming gradient once and writes the gradients of the vectors once. Saved for backward:
    ``dense`` and ``embeddings``. Differentiable once.

    ``TypeError``: an operand that is no floating tensor, or dtypes that differ. ``ValueError``:
    shapes, devices, ``order`` or ``pad`` that do not fit.

    >>> dense, embeddings = torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]])
    >>> fusedcuda.dot_interaction(dense, embeddings, pad=1)
    tensor([[ 1.,  2., 11., 17., 39.]])
    """
    upper = is_upper(order)
    dense, embeddings = autocast(dense, stack_vectors(dense, embeddings))
    width = output_width(dense, embeddings, pad)
    return call(DOT_INTERACTION, (dense, embeddings), upper, width)


def embedding_interaction(
    dense: Tensor,
    weight: Tensor,
    indices: Tensor,
    *,
    order: str = "tril",
    pad: int = 8,
) -> Tensor:
    """``dot_interaction(dense, torch.nn.functional.embedding(indices, weight))`` in one kernel.

    The rows are read from the table where the products are made; what was looked up, ``(B, F - 1,
    E)``, is never in memory.

    - ``dense`` is ``(B, E)``. ``weight`` is ``(V, E)``, one table for all features (several are put
      one behind the other, and each index is that of its table plus where the table starts).
      ``indices`` are ``(B, F - 1)``, int64 or int32, any strides, from 0 to ``V - 1``. ``F`` up to
      64, ``E`` up to 256; ``V`` as large as memory.
    - Output, ``order``, ``pad`` and dtypes are those of :func:`dot_interaction`. Rows of whole,
      aligned pieces of 16 bytes are fastest; a table whose columns are not neighbours in memory is
      copied first.
    - The gradient of ``weight`` is dense and of its dtype, added up in float32 (float64 for
      float64) from the gradients of the rows, rounded to that dtype, in a fixed order: the indices
      are sorted for it. (2^31 indices or more, or a table of more rows than that, are left to
      torch's operator, which sorts as well.) There are no ``padding_idx``, ``max_norm``,
      ``scale_grad_by_freq`` or ``sparse``.
    - Under autocast a table of another dtype is not cast as a whole, but looked up by torch before
      the rows are cast: then this is ``dot_interaction`` of what was looked up.

    Memory: reads ``dense``, the indices and the rows that they name once and writes the output
    once. Backward reads them and the incoming gradient once and writes the gradients of ``dense``
    and of the rows, which are read again to be added up; either is left out where nobody asks for
    it. Saved for backward: ``dense``, ``weight`` and ``indices``. Differentiable once.

    ``TypeError``: an operand that is no floating tensor, dtypes that differ, or ``indices`` of
    another dtype. ``ValueError``: shapes, devices, ``order`` or ``pad`` that do not fit. An index
    that is no row, also a negative one, is an ``IndexError`` on the CPU and fails a device-side
    assert on a GPU. Nothing waits for the GPU.

    >>> dense, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 6.0], [3.0, 4.0]])
    >>> fusedcuda.embedding_interaction(dense, weight, torch.tensor([[1, 0]]), pad=1)
    tensor([[ 1.,  2., 11., 17., 39.]])
    """
    op = "embedding_interaction"
    upper = is_upper(order, op)
    if is_cast_by_autocast(dense, weight):
        embeddings = lookup.look_up(op, weight, indices)
        return dot_interaction(dense, embeddings, order=order, pad=pad)
    (dense,) = autocast(dense)
    width = lookup_width(dense, weight, indices, pad)
    return call(EMBEDDING_INTERACTION, (dense, weight, indices), upper, width)


def linear_sigmoid_bce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    reduction: str = "mean",
    pos_weight: float | None = None,
    return_logits: bool = False,
) -> Any:
    """A linear layer of one output and its binary cross-entropy: ``x`` is read once.

    ``loss = (1 - y) softplus(z) + pos_weight y softplus(-z)`` of ``z = x @ weight + bias`` and
    ``y = target``, as ``binary_cross_entropy_with_logits`` has it, in a form in which nothing
    cancels.

    - ``x`` is ``(..., K)``, any strides; ``weight`` ``(K,)`` or ``(1, K)`` as that of
      ``torch.nn.Linear(K, 1)``; ``bias`` ``(1,)`` or ``None``: of one dtype, float64, float32,
      float16 or bfloat16. Under autocast they are cast first, as those of
      ``torch.nn.functional.linear`` are.
    - ``target`` is ``(...)`` or ``(..., 1)``, values from 0 to 1 of any real dtype; another one
      than float32 (float64 for float64 ``x``) is converted first. It gets no gradient.
    - ``reduction``: "mean", "sum" or "none". ``pos_weight`` is a number.
    - The loss is float32 (float64 for float64 ``x``) and so are the logits, which are not rounded
      to the dtype of ``x`` before; with ``return_logits`` the result is ``(loss, logits)``. The
      logits are for metrics: they carry no gradient. Sums are added up in a fixed order.

    Memory: forward reads ``x``; backward reads it again for the gradient of ``weight`` and writes
    its gradient. Saved for backward: ``x``, ``weight`` and the gradients of the logits, a number a
    row. Differentiable once.

    ``TypeError``: a dtype or a type. ``ValueError``: a shape, a device, ``reduction``, or a
    ``pos_weight`` that is negative or not finite. ``RuntimeError``: a ``target`` that requires a
    gradient.

    >>> x, weight, target = torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, -1.0]), torch.ones(1)
    >>> fusedcuda.linear_sigmoid_bce(x, weight, None, target)
    tensor(1.3133)
    """
    code = reduction_code(reduction)
    factor = 1.0 if pos_weight is None else pos_weight
    check_number("linear_sigmoid_bce", "pos_weight", factor)
    operands = autocast(x, weight, bias)
    loss, logits, _ = call(
        LINEAR_SIGMOID_BCE, (*operands, fit_target(operands[0], target)), factor, code
    )
    return (loss, logits) if return_logits else loss


# --------------------------------------------------------------------------------------------------
# Arguments as the operators take them
# --------------------------------------------------------------------------------------------------


def is_upper(order: Any, op: str = "dot_interaction") -> bool:
    """Whether ``order`` is that of the upper triangle; ``ValueError`` if it is none at all."""
    upper = _ORDERS.get(order) if isinstance(order, str) else None
    if upper is None:
        raise ValueError(f"{op}: order must be one of {', '.join(_ORDERS)}; got {order!r}")
    return upper


def stack_vectors(dense: Any, embeddings: Any) -> Any:
    """``embeddings`` as one tensor."""
    if not isinstance(embeddings, (list, tuple)):
        return embeddings
    for i, tensor in enumerate(embeddings):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"dot_interaction: embeddings[{i}] must be a tensor; got {type(tensor).__name__}"
            )
        if isinstance(dense, Tensor) and tensor.shape != dense.shape:
            raise ValueError(
                f"dot_interaction: embeddings[{i}] must have the shape of dense, "
                f"{tuple(dense.shape)}; got {tuple(tensor.shape)}"
            )
    if not embeddings:
        return dense.unsqueeze(1)[:, :0] if isinstance(dense, Tensor) else embeddings
    return torch.stack(tuple(embeddings), dim=1)


def output_width(dense: Any, embeddings: Any, pad: Any) -> int:
    """Elements of an output row."""
    op = "dot_interaction"
    return _width(
        op, dense, embeddings, pad, partial(reference.check_vectors, op, dense, embeddings)
    )


def lookup_width(dense: Any, weight: Any, indices: Any, pad: Any) -> int:
    """The same where ``indices`` name the vectors."""
    op = "embedding_interaction"
    return _width(op, dense, indices, pad, partial(lookup.check_lookup, op, dense, weight, indices))


def _width(op: str, dense: Any, others: Any, pad: Any, check: Callable[[], None]) -> int:
    if not isinstance(pad, int) or not 1 <= pad <= reference.MAX_PADDING:
        raise ValueError(
            f"{op}: pad must be an integer from 1 to {reference.MAX_PADDING}; got {pad!r}"
        )
    try:
        elements = reference.row_elements(others.shape[1] + 1, dense.shape[1])
    except (AttributeError, IndexError):
        check()
        raise
    return -(-elements // pad) * pad


def is_cast_by_autocast(dense: Any, weight: Any) -> bool:
    """Whether autocast would cast the whole table for the few rows of it that are looked up."""
    if not (isinstance(dense, Tensor) and isinstance(weight, Tensor)):
        return False
    device = dense.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return False
    return weight.dtype not in (torch.float64, torch.get_autocast_dtype(device))


def reduction_code(reduction: Any) -> int:
    """Code of ``reduction``; ``ValueError`` with the valid names if there is none."""
    code = REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
    if code is None:
        raise ValueError(
            f"linear_sigmoid_bce: reduction must be one of {', '.join(REDUCTIONS)}; "
            f"got {reduction!r}"
        )
    return code


def fit_target(x: Any, target: Any) -> Any:
    """``target`` with a value for each row of ``x``, in the dtype of the loss."""
    if not isinstance(target, Tensor) or not isinstance(x, Tensor):
        return target
    if target.dim() == x.dim() and target.dim() > 0 and target.shape[-1] == 1:
        target = target.squeeze(-1)
    dtype = compute_dtype(x.dtype)
    if target.dtype is dtype or target.dtype.is_complex:
        return target
    return target.to(dtype)


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------


def _batched(name: str, num_tensors: int) -> Any:
    """Batching rule (``torch.library.register_vmap``): the samples are more of the batch."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        tensors = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args[:num_tensors], in_dims, strict=False)
        ]
        batch = tensors[0].shape[1]
        op = getattr(torch.ops.fusedcuda, name).default
        result = op(*(x.flatten(0, 1) for x in tensors), *args[num_tensors:])
        if isinstance(result, Tensor):
            return result.unflatten(0, (info.batch_size, batch)), 0
        unflattened = [x.unflatten(0, (info.batch_size, batch)) for x in result]
        return unflattened, [0] * len(unflattened)

    return rule


_dot_interaction = define(
    FAMILY,
    "dot_interaction(Tensor dense, Tensor embeddings, bool upper, int width) -> Tensor",
    cpu=reference.dot_interaction,
    fake=reference.dot_interaction_fake,
    vmap=_batched("dot_interaction", 2),
)
# [gradient of dense, gradient of embeddings]
define(
    FAMILY,
    "dot_interaction_backward(Tensor grad, Tensor dense, Tensor embeddings, bool upper)"
    " -> Tensor[]",
    cpu=reference.dot_interaction_backward,
    fake=reference.dot_interaction_backward_fake,
    vmap=_batched("dot_interaction_backward", 3),
)
_embedding_interaction = define(
    FAMILY,
    "embedding_interaction(Tensor dense, Tensor weight, Tensor indices, bool upper, int width)"
    " -> Tensor",
    cpu=lookup.embedding_interaction,
    fake=lookup.embedding_interaction_fake,
)
# The gradients whose bit is set in the mask: 0 of dense, 1 of what was looked up.
define(
    FAMILY,
    "embedding_interaction_backward(Tensor grad, Tensor dense, Tensor weight, Tensor indices, "
    "bool upper, int mask) -> Tensor[]",
    cpu=lookup.embedding_interaction_backward,
    fake=lookup.embedding_interaction_backward_fake,
)
# The gradient of a table of so many rows, from those of what was looked up.
define(
    FAMILY,
    "embedding_dense_backward(Tensor grad, Tensor indices, SymInt rows) -> Tensor",
    cpu=lookup.embedding_dense_backward,
    fake=lookup.embedding_dense_backward_fake,
)
# [loss, logits, gradients of the logits]: the last of each row's own loss, before it is reduced.
# Under vmap samples are computed one by one, as each is reduced alone.
_forward = define(
    FAMILY,
    "linear_sigmoid_bce_forward(Tensor x, Tensor weight, Tensor? bias, Tensor target, "
    "float pos_weight, int reduction) -> Tensor[]",
    cpu=reference.linear_sigmoid_bce_forward,
    fake=reference.linear_sigmoid_bce_forward_fake,
    vmap=batched_rows("linear_sigmoid_bce_forward", vectors=range(4)),
)
# The gradients whose bit is set in the mask: 0 of x, 1 of the weight, 2 of the bias.
define(
    FAMILY,
    "linear_sigmoid_bce_backward(Tensor grad_loss, Tensor x, Tensor weight, Tensor dlogits, "
    "int mask, int reduction) -> Tensor[]",
    cpu=reference.linear_sigmoid_bce_backward,
    fake=reference.linear_sigmoid_bce_backward_fake,
    vmap=batched_rows("linear_sigmoid_bce_backward", vectors=range(4)),
)

# Host only: what a call would launch, as JSON. Implemented in csrc/bindings/dlrm.cpp, read by
# explain().
define_host(
    "dot_interaction_plan(Tensor dense, Tensor embeddings, bool upper, int width, "
    "bool is_backward, int num_sms) -> str"
)
define_host(
    "embedding_interaction_plan(Tensor dense, Tensor weight, Tensor indices, bool upper, "
    "int width, bool is_backward, int num_sms) -> str"
)
define_host(
    "embedding_dense_backward_plan(Tensor grad, Tensor indices, SymInt rows, int num_sms) -> str"
)
define_host(
    "linear_sigmoid_bce_plan(Tensor x, Tensor weight, int reduction, int mask, int num_sms) -> str"
)

DOT_INTERACTION = Operator(
    "dot_interaction",
    _dot_interaction,
    DotInteraction,
    ("dense", "embeddings"),
    reference.check_interaction,
)
EMBEDDING_INTERACTION = Operator(
    "embedding_interaction",
    _embedding_interaction,
    EmbeddingInteraction,
    ("dense", "weight", "indices"),
    lookup.check_embedding_interaction,
)
LINEAR_SIGMOID_BCE = Operator(
    "linear_sigmoid_bce",
    _forward,
    LinearSigmoidBce,
    ("x", "weight", "bias", "target"),
    reference.check_head,
)
