"""The last layer of a language model with its loss; ``fusedcuda.nn`` has its name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .ops import _linear_cross_entropy_reference as reference
from .ops._cross_entropy_reference import check_numbers, reduction_code
from .ops.linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropy(nn.Linear):
    """``cross_entropy(x @ weight.T + bias, target)``, by :func:`fusedcuda.linear_cross_entropy`.

    A ``torch.nn.Linear`` that is called with targets and returns the loss: its parameters, their
    names and their start values are the layer's, so that either loads the other's state dict, and
    the weight may be tied to an embedding's. ``out_features`` are the classes. The options are
    those of the function.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        chunk: int | str = "auto",
        accumulate: str = "fp32",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        reduction_code(reduction, "LinearCrossEntropy")
        check_numbers(label_smoothing, z_loss, softcap, "LinearCrossEntropy")
        reference.chunk_code(chunk, "LinearCrossEntropy")
        reference.sums_in_float32(accumulate, "LinearCrossEntropy")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.chunk = chunk
        self.accumulate = accumulate

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            chunk=self.chunk,
            accumulate=self.accumulate,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduction={self.reduction!r}, chunk={self.chunk!r}"
