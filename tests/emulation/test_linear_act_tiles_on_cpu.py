"""The Hopper product with other tiles and clusters than linear_act chooses today."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulator import HERE, Library, address
from linear_act_emulator import Saves, empty_saved
from row_emulator import assert_rounded
from torch import Tensor

TILES = (
    "turns 128x128 cluster 1",
    "turns 128x128 cluster 4",
    "turns 64x256 cluster 4",
    "turns 64x192 cluster 2",
    "together 128x256 cluster 2",
    "together 256x128 cluster 2",
    "turns 128x128 cluster 4, n inner",
)


class _Call(ctypes.Structure):
    _fields_ = (
        ("tile", ctypes.c_int),
        ("num_sms", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("m", "n", "k")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "bias", "mask", "output")),
    )


@pytest.fixture
def tiles(build_library: Callable[..., Path]) -> Library:
    return Library(build_library(HERE / "linear_act_tiles.cu"))


@pytest.mark.parametrize("tile", range(len(TILES)), ids=TILES)
def test_tile(tiles: Library, tile: int) -> None:
    m, n, k = 700, 264, 136
    x, weight = torch.randn(m, k).bfloat16(), (torch.randn(n, k) / 12).bfloat16()
    bias, output = torch.randn(n).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16)
    stored = weight if tile != 6 else weight.T.contiguous()

    def call(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mask: Tensor) -> ctypes.Structure:
        pointers = (address(t) for t in (x, weight, bias, mask, y))
        return _Call(tile, 4, m, n, k, *pointers)

    mask = empty_saved(Saves.MASK, m, n, x.dtype)
    y, _ = tiles.run("linear_act", call, [x, stored, bias], [output, mask])
    z = x.double() @ weight.double().T + bias.double()
    assert_rounded("y", y, z.relu(), magnitude=1 + z.abs().max().item())
