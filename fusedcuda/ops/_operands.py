"""What elementwise families share: operand checks, type promotion, output layout, batching."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def resolve(op: str, operands: dict[str, Any]) -> list[Tensor]:
    """Check ``operands`` of ``op`` and bring them to one dtype, as torch's type promotion would.

    Python numbers become 0-d CPU tensors, which the kernels read on the host.
    Raises ``TypeError`` for what is neither a number nor a floating tensor, ``ValueError`` for
    mixed devices and for shapes that do not broadcast; each message names the operand.
    """
    tensors = {}
    for name, value in operands.items():
        if isinstance(value, Tensor):
            check_dtype(op, name, value)
            tensors[name] = value
        elif not isinstance(value, numbers.Real):
            raise TypeError(
                f"{op}: {name} must be a tensor or a real number; got {type(value).__name__}"
            )
    if not tensors:
        raise TypeError(f"{op}: at least one of {', '.join(operands)} must be a tensor")
    check_devices(op, tensors)
    check_shapes(op, tensors)
    # As in torch, 0-d tensors only decide the dtype when there is nothing larger, and numbers are
    # not rounded to it: they keep the precision that the formula is computed in.
    deciding = [t for t in tensors.values() if t.dim() > 0] or list(tensors.values())
    dtype = deciding[0].dtype
    for tensor in deciding[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    only_numbers = all(is_number(t) for t in tensors.values())
    number_dtype = dtype if only_numbers else compute_dtype(dtype)
    return [
        value.to(dtype)
        if isinstance(value, Tensor)
        else torch.tensor(value, dtype=number_dtype, device="cpu")
        for value in operands.values()
    ]


def check_dtype(op: str, name: str, tensor: Tensor) -> None:
    """``TypeError`` unless the kernels have the dtype."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: {name} must be a float64, float32, float16 or bfloat16 tensor; "
            f"got {tensor.dtype}"
        )


def check_devices(op: str, tensors: dict[str, Tensor]) -> None:
    """``ValueError`` unless all tensors share a device; 0-d CPU ones go with all, as in torch."""
    placed = {
        name: t.device for name, t in tensors.items() if t.dim() > 0 or t.device.type != "cpu"
    }
    if len(set(placed.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in placed.items())
        raise ValueError(f"{op}: tensors must be on one device; got {listed}")


def check_shapes(op: str, tensors: dict[str, Tensor]) -> None:
    """``ValueError`` naming every shape unless they broadcast together."""
    try:
        torch.broadcast_shapes(*(t.shape for t in tensors.values()))
    except RuntimeError:
        listed = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"{op}: shapes do not broadcast together: {listed}") from None


def is_number(tensor: Tensor) -> bool:
    """Whether the kernels take the value of ``tensor`` on the host: it is 0-d and on the CPU."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def empty_output(*operands: Tensor) -> Tensor:
    """Uninitialised output: the one layout rule of reference, shape function and kernel.

    Like the first operand that already has the broadcast shape (``torch.empty_like``), contiguous
    if none has it. A 0-d CPU operand beside CUDA operands never decides.
    """
    leading = _leading(operands)
    check_dtype("fusedcuda", "operands", leading)
    shape = torch.broadcast_shapes(*(t.shape for t in operands))
    for tensor in operands:
        if tensor.shape == shape and tensor.device == leading.device:
            return torch.empty_like(tensor, dtype=leading.dtype)
    return torch.empty(shape, dtype=leading.dtype, device=leading.device)


def _leading(tensors: Sequence[Tensor]) -> Tensor:
    """The operand whose dtype and device are the call's: the first that is not a number."""
    return next((t for t in tensors if not is_number(t)), tensors[0])


def check_like(op: str, name: str, tensor: Tensor, operands: Sequence[Tensor]) -> None:
    """``ValueError`` unless ``tensor`` has the shape, dtype and device of the operands' result."""
    leading = _leading(operands)
    shape = torch.broadcast_shapes(*(t.shape for t in operands))
    if tensor.shape != shape or tensor.dtype != leading.dtype or tensor.device != leading.device:
        raise ValueError(
            f"{op}: {name} must be a {leading.dtype} tensor of shape {tuple(shape)} on "
            f"{leading.device}; got {tensor.dtype}, {tuple(tensor.shape)}, {tensor.device}"
        )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: what the kernels compute in before they round once."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(*operands: Tensor) -> list[Tensor]:
    """``operands`` in the dtype that the formula is computed in."""
    return [t.to(compute_dtype(t.dtype)) for t in operands]


def store(value: Tensor, output: Tensor) -> Tensor:
    """Round ``value`` once into ``output``."""
    return output.copy_(value)


def store_gradients(
    gradients: Sequence[Tensor], operands: Sequence[Tensor], mask: int
) -> list[Tensor]:
    """The gradients in ``mask``: summed over broadcast dimensions, then rounded once."""
    return [
        store(gradient.sum_to_size(operand.shape), empty_gradient(operand, gradient.device))
        for index, (gradient, operand) in enumerate(zip(gradients, operands, strict=True))
        if mask >> index & 1
    ]


def empty_gradient(operand: Tensor, device: torch.device) -> Tensor:
    """Uninitialised gradient; that of a 0-d CPU operand is computed on the others' device."""
    return torch.empty_like(operand, device=device)


def batched(name: str, num_tensors: int, num_gradients: int = 0) -> Callable[..., Any]:
    """Batching rule (``torch.library.register_vmap``) of an elementwise operator.

    Its first ``num_tensors`` arguments are tensors that broadcast. Each gets the batch dimension in
    front and is expanded to it (no copy), so that a gradient operator, which returns one tensor for
    each of its last ``num_gradients`` tensors whose bit is set in its last argument, gives one
    gradient a sample.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        op = getattr(torch.ops.fusedcuda, name).default
        leading = _leading(args[:num_tensors])
        samples, aligned = [], []
        rank = max(
            t.dim() - (d is not None) for t, d in zip(args[:num_tensors], in_dims, strict=False)
        )
        for tensor, dim in zip(args[:num_tensors], in_dims, strict=False):
            # Expanded, a number is none any more and has to be like the others.
            moved = tensor.to(leading).unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
            sample = moved.shape[1:]
            samples.append(sample)
            moved = moved.reshape(moved.shape[0], *(1,) * (rank - len(sample)), *sample)
            aligned.append(moved.expand(info.batch_size, *moved.shape[1:]))
        result = op(*aligned, *args[num_tensors:])
        if isinstance(result, Tensor):
            return result, 0
        mask = args[-1]
        wanted = [s for index, s in enumerate(samples[-num_gradients:]) if mask >> index & 1]
        gradients = [g.reshape(g.shape[0], *s) for g, s in zip(result, wanted, strict=True)]
        return gradients, [0] * len(gradients)

    return rule
