"""The real softmax kernels, run by the emulator of this folder, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulator import DTYPES
from layouts import pitched, shifted
from row_emulator import RowConfig, assert_rounded
from softmax_emulator import SoftmaxEmulator
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture
def softmax(build_family: Callable[[str], Path]) -> SoftmaxEmulator:
    return SoftmaxEmulator(build_family("softmax"))


def check(softmax: SoftmaxEmulator, x: Tensor, scale: float = 1.0) -> tuple[RowConfig, RowConfig]:
    """Both functions and their gradients; returns what forward and backward chose."""
    ops = torch.ops.fusedcuda
    dy = torch.randn(x.shape).to(x.dtype)
    for log, name in ((False, "softmax"), (True, "log_softmax")):
        y = softmax.softmax(x, scale, log=log)
        forward = softmax.config
        assert_rounded(name, y, getattr(ops, name)(x.double(), scale))
        dx = softmax.backward(dy, y, scale, log=log)
        expected = getattr(ops, f"{name}_backward")(dy.double(), y.double(), scale)
        assert_rounded(f"{name}_backward", dx, expected, magnitude=max(1.0, abs(scale)))
    return forward, softmax.config


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 63, 64, 127, 256, 1000])
def test_sizes(softmax, columns, dtype) -> None:
    """Several rows a warp or a block, and a last block that has rows to spare."""
    forward, _ = check(softmax, torch.randn(5, columns).to(dtype) * 3)
    assert forward.path == ("stream" if dtype == torch.float64 else "register")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    ("vectors", "items", "bwd_items", "clusters"),
    [
        (32, 1, 1, (1, 1)),
        (33, 4, 4, (1, 1)),
        (1000, 4, 4, (1, 1)),
        (1500, 8, 4, (1, 1)),
        (2060, 8, 4, (1, 2)),
        (4100, 8, 4, (4, 4)),
    ],
)
def test_vectors_of_a_thread(softmax, vectors, items, bwd_items, clusters, dtype) -> None:
    forward, backward = check(softmax, torch.randn(2, vectors * (16 // dtype.itemsize)).to(dtype))
    assert (forward.aligned, backward.aligned) == (True, True)
    assert (forward.items, backward.items) == (items, bwd_items)
    assert (forward.cluster, backward.cluster) == clusters


def test_few_rows_get_many_threads(softmax) -> None:
    softmax.num_sms = 8
    forward, _ = check(softmax, torch.randn(3, 2048).to(torch.bfloat16))
    assert (forward.items, forward.threads_per_row) == (1, 256)


@pytest.mark.parametrize("columns", [4097, 16391, 33001])
def test_cluster_of_unaligned_rows(softmax, columns) -> None:
    """Rows that begin anywhere in a vector, shared by several blocks."""
    forward, backward = check(softmax, torch.randn(2, columns).to(torch.bfloat16))
    assert (forward.items, forward.aligned, backward.aligned) == (4, False, False)
    assert (forward.cluster > 1) == (columns > 8192)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [pitched, lambda x: shifted(x, 1), lambda x: x[:, 1:]])
def test_rows_apart_from_their_outputs(softmax, layout, dtype) -> None:
    """Inputs and outputs that are aligned differently."""
    for columns in (9, 300, 1030):
        forward, _ = check(softmax, layout(torch.randn(3, columns).to(dtype)))
        assert not forward.aligned


def test_expanded_gradient(softmax) -> None:
    y = softmax.softmax(torch.randn(4, 513), 1.0)
    dy = torch.randn(1, 513).expand(4, 513)
    expected = torch.ops.fusedcuda.softmax_backward(dy.double(), y.double(), 1.0)
    assert_rounded("softmax_backward", softmax.backward(dy, y, 1.0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beyond_registers(softmax, dtype) -> None:
    """Without clusters; the stream kernels keep nothing of a row."""
    softmax.clusters = False
    for columns in (40000, 40003):
        forward, backward = check(softmax, torch.randn(2, columns).to(dtype))
        assert forward.path == backward.path == "stream"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.7, 0.125, 30.0])
def test_scale(softmax, scale, dtype) -> None:
    for columns in (5, 130):
        check(softmax, torch.randn(3, columns).to(dtype), scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [3, 300, 1500])
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.0])
def test_values_that_are_not_finite(softmax, columns, scale, dtype) -> None:
    """Rows that hold, or are nothing but, infinities, NaN and the lowest number."""
    lowest = torch.finfo(dtype).min
    special = torch.tensor([-math.inf, math.inf, math.nan, lowest, -lowest])
    rows = torch.randn(10, columns)
    rows[:5] = special[:, None]
    rows[5:, -1] = special
    x = rows.to(dtype)
    for log in (False, True):
        if log and abs(scale) == 1.0:
            # The reference's own logarithm of sums of differences beyond the range is not finite.
            x = x[[0, 1, 2, 5, 6, 7]]
        expected = (torch.log_softmax if log else torch.softmax)(scale * x.double(), dim=-1)
        assert_rounded("softmax", softmax.softmax(x, scale, log=log), expected)
