"""What the families that reduce over the last dimension share: the call, argument checks, batching.

A *row* is one slice along the last dimension; the leading dimensions are free. The arguments of a
row operator are rows (of x's shape), values of a row (x's shape without the last dimension), and
vectors that all rows share (a weight).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._call import Operator, dispatch, dispatch_traced
from ._operands import check_dtype

# --------------------------------------------------------------------------------------------------
# The call
# --------------------------------------------------------------------------------------------------


def call(operator: Operator, tensors: tuple[Any, ...], *options: Any) -> Any:
    """The raw operator, or its differentiable form when one of ``tensors`` asks for a gradient.

    ``None`` stands for a tensor that is absent. Nothing is checked before: the operator refuses
    what it cannot compute, and ``operator.check(*tensors, *options)`` then finds the words.
    """
    assert operator.check is not None
    if torch.compiler.is_compiling():
        # The checks are made once, while tracing.
        operator.check(*tensors, *options)
        return dispatch_traced(operator, tensors, *options)
    try:
        needs_gradient = False
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                needs_gradient = True
        return dispatch(operator, tensors, needs_gradient, *options)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        operator.check(*tensors, *options)
        raise


def as_matrix(x: Tensor) -> Tensor:
    """The leading dimensions as one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# --------------------------------------------------------------------------------------------------
# Checks: each message names the op, the argument, what was expected and what came
# --------------------------------------------------------------------------------------------------


def check_floating(op: str, name: str, tensor: Any) -> None:
    """``TypeError`` unless ``tensor`` is a tensor of a dtype that the kernels have."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor; got {type(tensor).__name__}")
    check_dtype(op, name, tensor)


def check_rows(op: str, name: str, tensor: Any) -> None:
    """A floating tensor with a last dimension to reduce over, or ``TypeError``, ``ValueError``."""
    check_floating(op, name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"{op}: {name} must have at least one dimension; got a 0-d tensor")


def check_same_device(op: str, name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    """``ValueError`` unless both tensors are on one device."""
    if tensor.device != x.device:
        raise ValueError(
            f"{op}: {name} must be on {x.device} as {x_name} is; got one on {tensor.device}"
        )


def check_vector(op: str, name: str, tensor: Any, x_name: str, x: Tensor) -> None:
    """One floating value for each element of a row of ``x``, on its device."""
    check_floating(op, name, tensor)
    check_same_device(op, name, tensor, x_name, x)
    if tensor.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} must have shape {tuple(x.shape[-1:])}, the last dimension of {x_name}; "
            f"got {tuple(tensor.shape)}"
        )


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int]) -> None:
    """``ValueError`` unless ``tensor`` has the shape ``expected``."""
    if tensor.shape != torch.Size(expected):
        raise ValueError(
            f"{op}: {name} must have shape {tuple(expected)}; got {tuple(tensor.shape)}"
        )


def check_number(op: str, name: str, value: Any) -> None:
    """``TypeError`` unless ``value`` is a Python number."""
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number; got {type(value).__name__}")


# --------------------------------------------------------------------------------------------------
# Batching
# --------------------------------------------------------------------------------------------------


def batched_rows(
    name: str, vectors: Sequence[int] = (), sums: int = 0
) -> Callable[..., tuple[Any, Any]]:
    """Batching rule (``torch.library.register_vmap``) of a row operator.

    The batch dimension becomes one more leading dimension. That does not work where samples have
    their own vectors (``vectors`` are the positions of these arguments) or where the operator adds
    up over the rows (``sums``: the bits of the mask, its last argument, that ask for a sum); there
    the samples are computed one by one.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        op = getattr(torch.ops.fusedcuda, name).default
        own_vectors = any(in_dims[i] is not None for i in vectors)
        if own_vectors or (sums and args[-1] & sums):
            results = [
                op(
                    *(
                        arg if dim is None else arg.select(dim, sample)
                        for arg, dim in zip(args, in_dims, strict=True)
                    )
                )
                for sample in range(info.batch_size)
            ]
            if isinstance(results[0], Tensor):
                return torch.stack(results), 0
            stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
            return stacked, [0] * len(stacked)
        moved = [
            arg
            if index in vectors or not isinstance(arg, Tensor)
            else arg.expand(info.batch_size, *arg.shape)
            if dim is None
            else arg.movedim(dim, 0)
            for index, (arg, dim) in enumerate(zip(args, in_dims, strict=True))
        ]
        result = op(*moved)
        return result, 0 if isinstance(result, Tensor) else [0] * len(result)

    return rule
