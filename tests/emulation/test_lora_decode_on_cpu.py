"""A linear layer of few rows with its adapter in one launch, run by the emulator of this folder.

Where the elements are small integers the arithmetic is exact, and the outputs must equal the
reference to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapted import exact_layer, integers
from comparison import assert_exact
from emulator import DTYPES, HERE, Library, address
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)
from fusedcuda.ops._activations import ACTIVATIONS
from fusedcuda.ops._lora_reference import pitch_of

BF16 = torch.bfloat16
CHOSEN = ("chosen_cluster", "clusters", "tiles", "own_tiles", "steps")


class _Call(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in ("dtype", "activation", "num_sms", "rank", "cluster_log2")
        ),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "up_stride", "shared_bytes")),
        *((n, ctypes.c_void_p) for n in ("x", "weight", "bias", "down", "up", "t", "output")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in CHOSEN),
    )


class Emulator(Library):
    num_sms = 4
    cluster_log2 = -1  # chosen
    shared_bytes = 0  # of a block, if they are not an H200's

    def lora_decode(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        activation: int,
    ) -> list[Tensor]:
        (m, k), n, rank = x.shape, weight.shape[0], down.shape[0]

        def call(*tensors: Tensor) -> ctypes.Structure:
            options = (DTYPES.index(x.dtype), activation, self.num_sms, rank, self.cluster_log2)
            x_, weight_, bias_, down_, up_, y, t = (address(given) for given in tensors)
            return _Call(*options, m, n, k, up.stride(0), self.shared_bytes,
                         x_, weight_, bias_, down_, up_, t, y, scale)  # fmt: skip

        def remember(made: ctypes.Structure) -> None:
            self.chosen = {name: getattr(made, name) for name in CHOSEN}

        outputs = [x.new_empty(m, n), x.new_empty(m, pitch_of(rank))]
        return self.run("lora_decode", call, [x, weight, bias, down, up], outputs, remember)


@pytest.fixture
def emulator(build_library: Callable[..., Path]) -> Emulator:
    return Emulator(build_library(HERE / "lora_decode.cu"))


def check(
    emulator: Emulator,
    m: int,
    n: int,
    k: int,
    rank: int = 16,
    dtype: torch.dtype = BF16,
    bias: bool = True,
    activation: str = "none",
) -> None:
    given = (*exact_layer(m, n, k, rank, dtype, bias), ACTIVATIONS[activation])
    y, t = emulator.lora_decode(*given)
    exact_y, exact_t = torch.ops.fusedcuda.lora_decode(*given)
    assert_exact("t", t, exact_t)
    assert_exact("y", y, exact_y)


@pytest.mark.parametrize("rank", [1, 5, 8, 9, 16, 17, 64])
def test_ranks(emulator: Emulator, rank: int) -> None:
    check(emulator, 5, 200, 520, rank)


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 32])
def test_rows(emulator: Emulator, m: int) -> None:
    check(emulator, m, 136, 264, bias=False)


@pytest.mark.parametrize("log2", [0, 1, 2, 3])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (15, 32), (17, 40), (257, 1032), (1000, 256)])
def test_clusters(emulator: Emulator, n: int, k: int, log2: int) -> None:
    """Blocks with and without columns of their own; fewer and more rows than warps have at once."""
    emulator.cluster_log2 = log2
    check(emulator, 3, n, k, 12, torch.float16)
    assert emulator.chosen["chosen_cluster"] == 1 << log2


def test_several_groups_of_tiles(emulator: Emulator) -> None:
    """Shared memory for the sums of a few tiles at a time."""
    emulator.cluster_log2, emulator.shared_bytes, emulator.num_sms = 1, 40 << 10, 2
    check(emulator, 16, 1000, 264)
    chosen = emulator.chosen
    assert chosen["tiles"] > chosen["own_tiles"] * chosen["chosen_cluster"]


@pytest.mark.parametrize(("sms", "tiles"), [(4, 16), (5, 13), (7, 10), (22, 3), (64, 1)])
def test_shares_of_warps(emulator: Emulator, sms: int, tiles: int) -> None:
    """Whole tiles and the common one, or pieces of them: up to nine warps' parts of a sum."""
    emulator.num_sms, emulator.cluster_log2 = sms, 0
    check(emulator, 4, 1024, 1024)
    assert emulator.chosen["tiles"] == tiles


@pytest.mark.parametrize("activation", ["relu"])
def test_activation(emulator: Emulator, activation: str) -> None:
    check(emulator, 9, 72, 72, 3, activation=activation)


def test_what_is_not_finite_stays_in_its_row(emulator: Emulator) -> None:
    """Ranks and columns that do not exist are zero, not infinity times zero."""
    x, weight, down = (integers(rows, 72, BF16) for rows in (6, 40, 3))
    x[2, 5] = torch.inf
    up = torch.nn.functional.pad(integers(40, 3, BF16), (0, 5))
    y, t = emulator.lora_decode(x, weight, None, down, up, 1.0, ACTIVATIONS["none"])
    others = torch.arange(6) != 2
    for output in (t, y):
        assert output[others].isfinite().all()
    assert (t[:, 3:] == 0).all()
    assert not y[2].isfinite().all()
