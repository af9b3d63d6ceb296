"""What the layers that are made of other operators on CUDA share: a path, a weight's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ._linear_act_reference import DWEIGHT, NONE

_ops = torch.ops.fusedcuda


class PathChoice:
    """The path that a layer takes from now on: its own rule's ("auto"), or one that is forced."""

    def __init__(self, op: str, paths: tuple[str, ...]) -> None:
        self._op, self._paths, self._chosen = op, paths, "auto"

    @property
    def forced(self) -> str | None:
        return None if self._chosen == "auto" else self._chosen

    def use(self, path: str) -> str:
        """What ``torch.ops.fusedcuda.<op>`` does: chooses; returns what was chosen before."""
        if path not in self._paths:
            known = ", ".join(self._paths)
            raise ValueError(f"{self._op}: path must be one of {known}; got {path!r}")
        before, self._chosen = self._chosen, path
        return before


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``dy.T @ x``, the gradient of a linear layer's weight of that dtype."""
    # Of the weight only shape and dtype are looked at.
    weight = dy.new_empty((), dtype=dtype).expand(dy.shape[1], x.shape[1])
    (gradient,) = _ops.linear_act_backward.default(dy, x, weight, None, NONE, DWEIGHT, False)
    return gradient
