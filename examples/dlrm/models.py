"""DLRM twice: in plain PyTorch, and with fusedcuda's ops in three places.

The sizes are those of `fusedcuda.demo.dlrm.CONFIGS`:

| name          | tables, width, interaction | bottom MLP         | top MLP                |
|---------------|----------------------------|--------------------|------------------------|
| lecture-small | 26 x 16, outer product     | 13-32-16           | 32-1                   |
| lecture-main  | 26 x 16, outer product     | 13-512-256-64-16   | 512-256-1              |
| kaggle        | 26 x 16, dot products      | 13-512-256-64-16   | 512-256-1              |
| terabyte      | 26 x 64, dot products      | 13-512-256-64      | 512-512-256-1          |
| mlperf-v1     | 26 x 128, dot products     | 13-512-256-128     | 1024-1024-512-256-1    |

The plain model is the strongest one in plain PyTorch, not the first that comes to mind: all tables
in one, gathered in one launch; the 13 integers padded to 16 and the interaction's 367, 415 or 479
columns to a multiple of 8, without which a product in bfloat16 takes several times as long. What is
left between the two is fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

import fusedcuda
from fusedcuda.demo.dlrm import DLRM, DlrmConfig, click_loss

OPS = ("linear_act", "embedding_interaction", "linear_sigmoid_bce")


class PlainDLRM(DLRM):
    """`forward` gives the logits [B], `loss` the mean loss against labels float32 [B]."""

    def __init__(self, config: DlrmConfig, table_rows: int) -> None:
        super().__init__(config, table_rows)
        # torch.compile and CUDA graphs take dense gradients only, so everybody gets them.
        self.table.sparse = False

    def loss(self, dense: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        return click_loss(self(dense, indices), labels)


class FusedDLRM(PlainDLRM):
    """The same parameters and results; an op that this fusedcuda lacks is done in plain PyTorch."""

    def forward(self, dense: Tensor, indices: Tensor, *_: Any) -> Tensor:
        hidden = self._hidden(dense, indices)
        logits: Tensor = self.output(hidden)
        return logits.squeeze(1)

    def loss(self, dense: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        head = op("linear_sigmoid_bce")
        if head is None:
            return super().loss(dense, indices, labels)
        # The last layer has one output: a matrix-vector product with the loss at its end.
        hidden = self._hidden(dense, indices)
        return head(hidden, self.output.weight, self.output.bias, labels)

    def _hidden(self, dense: Tensor, indices: Tensor) -> Tensor:
        """What the last layer reads."""
        vector = self._mlp(self.bottom, dense)
        return self._mlp(self.top, self._look_up_and_interact(vector, indices))

    def _mlp(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in cast(list[nn.Linear], layers):
            # Bias and ReLU while the product is still on the chip; kept for backward: a bit each.
            x = fusedcuda.linear_act(x, layer.weight, layer.bias, "relu")
        return x

    def _look_up_and_interact(self, dense: Tensor, indices: Tensor) -> Tensor:
        interaction = op("embedding_interaction")
        if interaction is None or self.interaction != "dot":
            return self._interact(dense, self.look_up(indices))
        # A vector and 26 rows of the table in, one padded row out: neither these [B, 26, E] nor the
        # [B, 27, 27] products in memory.
        return interaction(dense, self.table.weight, indices + self.offsets)


def op(name: str) -> Callable[..., Tensor] | None:
    return getattr(fusedcuda, name, None)


def missing_ops(configs: Iterable[DlrmConfig]) -> list[str]:
    """A sentence for each part of the models that fusedcuda does not take over."""
    parts = [f"fusedcuda.{name} is not in this version: that part is plain PyTorch."
             for name in OPS if op(name) is None]  # fmt: skip
    if any(config.interaction == "outer" for config in configs):
        parts.append("The lecture's outer product is one bmm of the library in both models.")
    return parts


def reduced(config: DlrmConfig) -> DlrmConfig:
    """The same layers, narrow enough to check on a CPU in a moment."""

    def narrow(widths: tuple[int, ...], limit: int) -> tuple[int, ...]:
        return tuple(min(width, limit) for width in widths)

    width = 4 if config.interaction == "outer" else 16
    bottom = (*narrow(config.bottom[:-1], 32), min(config.embedding_dim, width))
    return replace(config, bottom=bottom, top=narrow(config.top, 32))
