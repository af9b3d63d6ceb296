"""The same values in another place or another order in memory."""

from collections.abc import Callable

import torch
from torch import Tensor


def shifted(x: Tensor, elements: int) -> Tensor:
    """The same values, that many elements after the start of an allocation."""
    buffer = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    return buffer[elements:].view(x.shape).copy_(x)


def _nothing(x: Tensor) -> float:
    """What lies between elements: whoever reads it is found out. As an index it is out of range."""
    return torch.nan if x.is_floating_point() else -1


def pitched(x: Tensor) -> Tensor:
    """The same values in the middle of rows that are two elements longer."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 2), _nothing(x))
    wide[..., 1:-1] = x
    return wide[..., 1:-1]


def transposed(x: Tensor) -> Tensor:
    """The same values with the first and the last dimension swapped in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def spread(x: Tensor) -> Tensor:
    """The same values at every second element."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), _nothing(x))
    wide[..., ::2] = x
    return wide[..., ::2]


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def reversed_dimensions(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


LAYOUTS = [pitched, transposed, spread, channels_last, reversed_dimensions]


def layout_name(layout: Callable[[Tensor], Tensor]) -> str:
    return layout.__name__
