"""Dropout without a mask in memory: which elements are kept is a function of seed and place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Philox4x32 with 7 rounds, the fewest that pass all of TestU01's BigCrush: Salmon et al., Parallel
# Random Numbers: As Easy as 1, 2, 3 (2011). The same as in csrc/kernels/common/philox.cuh.
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: list[Tensor], key: tuple[Tensor, Tensor], rounds: int = _ROUNDS) -> Tensor:
    """Four random words of 32 bits, in int64, along a new last dimension."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The product modulo 2^64 has all bits of that of two words, whatever the sign bit means.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def keep_mask(seed: Tensor, shape: Sequence[int], dropout_p: float) -> Tensor:
    """Which elements of a matrix dropout keeps.

    Eight neighbours of a row share a call of the generator, whose counter is (group, row): 16
    random bits each, which drop the element if they are below ``dropout_p * 2**16``, rounded.
    """
    rows, columns = shape
    row = torch.arange(rows).unsqueeze(1)
    group = torch.arange(-(-columns // 8)).unsqueeze(0)
    seed = seed.reshape(())
    key = (seed & _WORD, seed >> 32 & _WORD)
    zero = torch.zeros((), dtype=torch.int64)
    words = philox([group, row & _WORD, row >> 32 & _WORD, zero], key)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(1)
    return halves[:, :columns] >= round(dropout_p * 65536)


def keep_factor(dropout_p: float) -> float:
    """What the kept elements are multiplied by."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
