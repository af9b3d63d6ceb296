"""Peers of the linear_cross_entropy family. They take x, the weight and the target."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

# With as many rows as features QuACK 0.6.5 takes a chunk for a square weight and stops.
QUACK_CHUNK = 2048


def liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """In chunks that Liger chooses: so that their logits take what x does."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]


def quack(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(x, weight, target, chunk_size=QUACK_CHUNK)
