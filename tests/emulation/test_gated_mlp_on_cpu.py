"""The Hopper product of a gated MLP, run by the emulator of this folder, against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulator import HERE, EmulationError
from gated_mlp_emulator import GatedMlpEmulator
from reference import ACTIVATIONS
from row_emulator import assert_rounded
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
BF16 = torch.bfloat16


@pytest.fixture
def gated(build_family: Callable[[str], Path]) -> GatedMlpEmulator:
    return GatedMlpEmulator(build_family("gated_mlp"))


def operands(m: int, f: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """x, and the two halves of one weight."""
    w = (torch.randn(2 * f, k) / k**0.5).to(dtype)
    return torch.randn(m, k).to(dtype), w[:f], w[f:]


def check(
    gated: GatedMlpEmulator,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    activation: str = "silu",
    *,
    saves: bool = False,
    h: Tensor | None = None,
) -> None:
    gate, up = (x.double() @ w.double().T for w in (w_gate, w_up))
    h, *saved = gated.gated_product(x, w_gate, w_up, activation, saves=saves, h=h)
    # A sum of k products is not exact to the last bit of float32.
    size = (1 + gate.abs().max().item()) * (1 + up.abs().max().item())
    assert_rounded("h", h, ACTIVATIONS[activation](gate) * up, magnitude=4 * size)
    if saves:
        assert_rounded("gate_up", saved[0], torch.cat([gate, up], 1), magnitude=size)


@pytest.mark.parametrize("saves", [False, True], ids=["h", "gate_up"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(
    gated: GatedMlpEmulator, activation: str, dtype: torch.dtype, saves: bool
) -> None:
    check(gated, *operands(136, 72, 72, dtype), activation, saves=saves)


@pytest.mark.parametrize("saves", [False, True], ids=["h", "gate_up"])
@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (5, 72, 16), (64, 64, 64), (129, 40, 24), (257, 136, 64)], ids=str
)
def test_ragged_sizes(gated: GatedMlpEmulator, shape: tuple[int, int, int], saves: bool) -> None:
    check(gated, *operands(*shape), saves=saves)


@pytest.mark.parametrize("num_sms", [2, 6])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_blocks_with_many_tiles(gated: GatedMlpEmulator, num_sms: int, group: int) -> None:
    """More rounds of the stages than there are stages, odd and even numbers of tiles."""
    gated.num_sms, gated.group = num_sms, group
    check(gated, *operands(900, 136, 200), saves=True)


@pytest.mark.parametrize("k", [320, 456, 640])
def test_warpgroups_that_skip_each_others_rounds(gated: GatedMlpEmulator, k: int) -> None:
    """Tiles that fill the ring of stages, or more: a warpgroup does not see all of its rounds."""
    gated.num_sms = 2
    check(gated, *operands(900, 136, k), "relu")


def test_weights_in_different_places(gated: GatedMlpEmulator) -> None:
    """Of their own, and each with a pitch of its own; k is no multiple of eight."""
    x, w_gate, w_up = (
        torch.randn(rows, pitch).bfloat16()[:, 8:59]
        for rows, pitch in ((70, 64), (72, 80), (72, 88))
    )
    check(gated, x, w_gate, w_up, saves=True)
    check(gated, x, w_up, w_gate)


def test_rows_of_h_with_a_pitch(gated: GatedMlpEmulator) -> None:
    h = torch.empty(70, 96, dtype=BF16)[:, 8:80]
    check(gated, *operands(70, 72, 64), h=h)


def test_h_is_rounded_once(gated: GatedMlpEmulator) -> None:
    """It is made of the sums, not of what they are rounded to, whether that is saved or not."""
    given = operands(300, 136, 136)
    x, w_gate, w_up = (t.double() for t in given)
    expected = ACTIVATIONS["gelu"](x @ w_gate.T) * (x @ w_up.T)
    for saves in (False, True):
        h = gated.gated_product(*given, "gelu", saves=saves)[0]
        assert (h == expected.to(h.dtype)).double().mean() > 0.99


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_tanh"])
def test_values_that_are_not_finite(gated: GatedMlpEmulator, activation: str) -> None:
    x, w_gate, w_up = operands(8, 16, 16)
    x[1, 2], x[3, 4] = torch.nan, torch.inf
    w_gate[:, 4], w_up[:, 4] = 1, -1
    h, gate_up = gated.gated_product(x, w_gate, w_up, activation, saves=True)
    assert h[1].isnan().all()
    assert gate_up[1].isnan().all()
    assert (h[3] == -torch.inf).all()
    assert (gate_up[3, :16] == torch.inf).all()
    assert (gate_up[3, 16:] == -torch.inf).all()
    finite = [0, 2, 4, 5, 6, 7]
    assert h[finite].isfinite().all()


def test_what_the_kernel_cannot_read_is_refused(gated: GatedMlpEmulator) -> None:
    refused = pytest.raises(EmulationError, match="cannot run")
    x, w_gate, w_up = operands(16, 16, 24)
    with refused:  # rows that do not start at multiples of 16 bytes
        gated.gated_product(x[:, 4:], w_gate[:, 4:], w_up[:, 4:], "silu")
    with refused:
        gated.gated_product(*operands(16, 16, 20), "silu")
    with refused:
        gated.gated_product(*operands(16, 12, 16), "silu")
    with refused:
        gated.gated_product(*operands(16, 16, 16, torch.float32), "silu")


# ---- Other tiles ---------------------------------------------------------------------------------

TILES = (
    "turns 128x64 cluster 1",
    "turns 128x64 cluster 4",
    "turns 128x96 cluster 2",
    "turns 64x128 cluster 2",
    "together 128x128 cluster 2 buffers 4",
    "together 128x128 cluster 2",
    "together 256x64 cluster 2",
)


@pytest.mark.parametrize("saves", [False, True], ids=["h", "gate_up"])
@pytest.mark.parametrize("tile", range(len(TILES)), ids=TILES)
def test_tile(build_library: Callable[..., Path], tile: int, saves: bool) -> None:
    tiles = GatedMlpEmulator(build_library(HERE / "gated_mlp_tiles.cu"))
    tiles.tile = tile
    check(tiles, *operands(700, 264, 136), saves=saves)
