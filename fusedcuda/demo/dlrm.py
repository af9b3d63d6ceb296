"""DLRM, the recommendation model of the demo, with one switch: how a hidden layer is computed.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv:1906.00091. The 13 integers go through the bottom MLP, the 26 categories through embedding
tables; the interaction multiplies these 27 vectors with one another, the top MLP scores the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

import fusedcuda
from fusedcuda.demo.criteo import CATEGORY_COLUMNS, INTEGER_COLUMNS

NUM_TABLES = len(CATEGORY_COLUMNS)
NUM_VECTORS = NUM_TABLES + 1  # the tables' and the bottom MLP's

# The switch: (input [B, in], layer) -> relu(layer(input)) [B, out].
HiddenLayer = Callable[[Tensor, nn.Linear], Tensor]


def plain_hidden(x: Tensor, layer: nn.Linear) -> Tensor:
    """A hidden layer in plain PyTorch: addmm, which adds the bias on the way, then relu.

    Backward: relu's mask is one pass, the bias gradient another.
    """
    return nn.functional.relu(layer(x))


def fused_hidden(x: Tensor, layer: nn.Linear) -> Tensor:
    """The same layer with fusedcuda: a bare matmul, then bias and relu in one kernel.

    Backward: relu's mask and the bias gradient share one pass.
    """
    return fusedcuda.bias_act(nn.functional.linear(x, layer.weight), layer.bias, "relu")


@dataclass(frozen=True)
class DlrmConfig:
    """Sizes of one published DLRM.

    bottom and top list the widths of the hidden layers; the bottom MLP ends in the embedding's
    width, the top MLP in one more layer of width 1 without an activation.
    """

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: str = "dot"  # "dot": the 351 inner products; "outer": one outer product
    cpu_batch: int = 512
    gpu_batch: int = 65536

    @property
    def embedding_dim(self) -> int:
        return self.bottom[-1]

    @property
    def dense_width(self) -> int:
        return _round_up_to_8(len(INTEGER_COLUMNS))

    @property
    def interaction_width(self) -> int:
        if self.interaction == "outer":
            return (NUM_VECTORS * self.embedding_dim) ** 2
        pairs = NUM_VECTORS * (NUM_VECTORS - 1) // 2
        return _round_up_to_8(self.embedding_dim + pairs)

    @property
    def linear_shapes(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of every linear layer, bottom to top; the last has no activation."""
        bottom = [self.dense_width, *self.bottom]
        top = [self.interaction_width, *self.top, 1]
        return [*pairwise(bottom), *pairwise(top)]


def _round_up_to_8(width: int) -> int:
    # With an odd number of columns a bf16 matmul cannot use 16-byte loads and cuBLAS falls back to
    # a kernel several times slower, so inputs get columns of zeros; in both variants alike.
    return (width + 7) // 8 * 8


CONFIGS = {
    "kaggle": DlrmConfig(bottom=(512, 256, 64, 16), top=(512, 256)),
    "terabyte": DlrmConfig(bottom=(512, 256, 64), top=(512, 512, 256)),
    "mlperf-v1": DlrmConfig(bottom=(512, 256, 128), top=(1024, 1024, 512, 256)),
    "lecture-small": DlrmConfig(
        bottom=(32, 16), top=(32,), interaction="outer", cpu_batch=64, gpu_batch=64
    ),
    "lecture-main": DlrmConfig(
        bottom=(512, 256, 64, 16), top=(512, 256), interaction="outer", cpu_batch=128, gpu_batch=128
    ),
}


class DLRM(nn.Module):
    """The model; both variants use this one module, so they share every parameter.

    The 26 tables of `table_rows` rows are stored one after the other in a single one, so that a
    batch is gathered in one launch; its gradient is sparse.
    """

    offsets: Tensor  # int64 [26]: where each table starts
    pairs: Tensor  # int64 [351]: the products below the diagonal of the flattened 27 x 27
    padding: Tensor  # [1, 0 to 7] zeros

    def __init__(self, config: DlrmConfig, table_rows: int) -> None:
        super().__init__()
        self.interaction = config.interaction
        self.table = nn.Embedding(NUM_TABLES * table_rows, config.embedding_dim, sparse=True)
        nn.init.normal_(self.table.weight, std=config.embedding_dim**-0.5)
        linears = [nn.Linear(inputs, outputs) for inputs, outputs in config.linear_shapes]
        self.bottom = nn.ModuleList(linears[: len(config.bottom)])
        self.top = nn.ModuleList(linears[len(config.bottom) : -1])
        self.output = linears[-1]
        self._add_constant("offsets", torch.arange(NUM_TABLES) * table_rows)
        row, column = torch.tril_indices(NUM_VECTORS, NUM_VECTORS, offset=-1)
        self._add_constant("pairs", row * NUM_VECTORS + column)
        padding = config.interaction_width - config.embedding_dim - len(self.pairs)
        self._add_constant("padding", torch.zeros(1, max(padding, 0)))

    def _add_constant(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)

    def forward(self, dense: Tensor, indices: Tensor, hidden: HiddenLayer = plain_hidden) -> Tensor:
        """Click logits [B] from `dense` [B, dense_width] and table rows `indices` int64 [B, 26]."""
        return self.score(dense, self.look_up(indices), hidden)

    def look_up(self, indices: Tensor) -> Tensor:
        """[B, 26, E]: one row of each table."""
        return self.table(indices + self.offsets)

    def score(self, dense: Tensor, embedded: Tensor, hidden: HiddenLayer = plain_hidden) -> Tensor:
        """What follows the lookup: logits [B] from `dense` and `embedded` [B, 26, E]."""
        x = dense
        for layer in cast(list[nn.Linear], self.bottom):
            x = hidden(x, layer)
        x = self._interact(x, embedded)
        for layer in cast(list[nn.Linear], self.top):
            x = hidden(x, layer)
        logits: Tensor = self.output(x)
        return logits.squeeze(1)

    def _interact(self, dense: Tensor, embedded: Tensor) -> Tensor:
        vectors = torch.cat([dense.unsqueeze(1), embedded], dim=1)
        if self.interaction == "outer":
            flat = vectors.flatten(1)
            return torch.bmm(flat.unsqueeze(2), flat.unsqueeze(1)).flatten(1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        padding = self.padding.expand(len(dense), -1)
        return torch.cat([dense, products.index_select(1, self.pairs), padding], dim=1)


def click_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits [B] against labels [B], in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
