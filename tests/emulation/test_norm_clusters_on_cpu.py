"""The norm kernels for rows that take several blocks, or that a block walks along."""

from __future__ import annotations

import math

import pytest
import torch
from norm_checks import (
    EVERY_OP,
    HALVES,
    REGISTER_DTYPES,
    check,
    check_backward,
    check_forward,
    pitched,
    rows_of,
    vectors_for,
)
from norm_emulator import NormEmulator

# ---- Clusters ------------------------------------------------------------------------------------


def columns_of_cluster(
    norm: NormEmulator, op: str, cluster: int, dtype: torch.dtype, offset: int, backward: bool
) -> int:
    """The fewest for so many blocks or more, so that the last may have nothing to do.

    With offset 0 the rows are aligned.
    """
    vec = 16 // dtype.itemsize
    for vectors in (256 * 2**k + 1 for k in range(10)):
        columns = vec * vectors - offset
        if norm.choose(op, 2, columns, dtype, backward).cluster >= cluster:
            return columns
    raise AssertionError(f"no rows for clusters of {cluster}")


@EVERY_OP
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("cluster", [2, 16])
def test_clusters(norm, op, cluster, offset) -> None:
    for backward in (False, True):
        columns = columns_of_cluster(norm, op, cluster, torch.float32, offset, backward)
        x, other = rows_of(2, columns, torch.float32), rows_of(2, columns, torch.float32)
        vectors = vectors_for(op, columns, torch.float32)
        if backward:
            config = check_backward(norm, op, other, x, None, *vectors)
        else:
            config = check_forward(norm, op, x, other, *vectors)
        assert config.path == "pipeline"
        assert config.cluster >= cluster


@EVERY_OP
@pytest.mark.parametrize("offset", [0, 1])
def test_clusters_that_take_several_rows(norm, op, offset) -> None:
    norm.shared_kilobytes_of_sm = 60
    for backward in (False, True):
        columns = columns_of_cluster(norm, op, 2, torch.float32, offset, backward)
        x, other = rows_of(5, columns, torch.float32), rows_of(5, columns, torch.float32)
        vectors = vectors_for(op, columns, torch.float32)
        for more in (None, x):
            if backward:
                config = check_backward(norm, op, other, x, more, *vectors)
            else:
                config = check_forward(norm, op, other, more, *vectors)
            assert config.cluster >= 2
            assert config.partials < 5


@EVERY_OP
@REGISTER_DTYPES
def test_several_clusters(norm, op, dtype) -> None:
    """Whose rows are not the same number, and shifted otherwise in each tensor."""
    norm.resident_clusters, norm.shared_kilobytes_of_sm = 2, 24
    norm.place = pitched(2, 3)
    for backward in (False, True):
        columns = columns_of_cluster(norm, op, 2, dtype, -1, backward)
        x, r, dh = (pitched(k, k)(rows_of(3, columns, dtype)) for k in (1, 0, 3))
        vectors = vectors_for(op, columns, dtype)
        if backward:
            config = check_backward(norm, op, r, x, dh, *vectors)
        else:
            config = check_forward(norm, op, x, r, *vectors)
        assert config.cluster >= 2
        assert config.partials == 2


@pytest.mark.parametrize("with_dh", [False, True])
def test_sums_of_layer_norm_in_the_widest_clusters(norm, with_dh) -> None:
    """The backward keeps dy, not its product with the weight, for four vectors a thread."""
    columns = 2 * 512 * 16 * 4 + 4
    x, dy, dh = (rows_of(3, columns, torch.float32) for _ in range(3))
    vectors = vectors_for("layer_norm", columns, torch.float32)
    config = check_backward(norm, "layer_norm", dy, x, dh if with_dh else None, *vectors)
    assert (config.path, config.items, config.cluster) == ("pipeline", 4, 16)


# ---- Streams -------------------------------------------------------------------------------------


@EVERY_OP
@pytest.mark.parametrize("vectors", [4 * 513, 4 * 1024 + 1])
def test_rows_longer_than_registers(norm, op, vectors) -> None:
    """Of a GPU without clusters: more than usual blocks hold, more than any hold."""
    norm.clusters = False
    forward, backward = check(norm, op, 2, 4 * vectors, torch.float32)
    assert backward.path == "stream"
    assert forward.path == "stream" or vectors < 4 * 1024


@EVERY_OP
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_long_rows_of_16_bits(norm, op, dtype) -> None:
    norm.clusters = False
    columns = 8 * 4 * 1024 + 1
    x, residual = rows_of(1, columns, dtype), rows_of(1, columns, dtype)
    config = check_forward(norm, op, x, residual, *vectors_for(op, columns, dtype))
    assert config.path == "stream"


@EVERY_OP
@REGISTER_DTYPES
def test_little_shared_memory(norm, op, dtype) -> None:
    """Sums over the rows in slices, by a kernel of their own."""
    norm.num_sms, norm.shared_kilobytes_of_sm, norm.shared_kilobytes_of_block = 7, 2, 1
    vectors = vectors_for(op, 301, dtype)
    for rows in (15, 16, 17, 50):
        x, dy, dh = (rows_of(rows, 301, dtype) for _ in range(3))
        config = check_backward(norm, op, dy, x, dh, *vectors)
        assert config.path == "stream"
        assert config.partials == min(-(-rows // 16), 3)


# ---- Phases --------------------------------------------------------------------------------------


@EVERY_OP
@REGISTER_DTYPES
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_rows_in_phases(norm, op, dtype, gap) -> None:
    """Groups of blocks that begin in a phase, with one, and that see several of them."""
    vec = 16 // dtype.itemsize
    columns = 4 * 32 * vec + 1  # more than a warp holds
    place = norm.place = pitched(1, gap)
    for num_sms, rows in ((1, 5), (2, 24), (3, 9)):
        norm.num_sms, norm.shared_kilobytes_of_sm = num_sms, 60
        x, dy, dh = (place(rows_of(rows, columns, dtype)) for _ in range(3))
        vectors = vectors_for(op, columns, dtype)
        for more in (None, dh):
            config = check_forward(norm, op, x, more, *vectors)
            assert (config.path, config.aligned, config.cluster) == ("pipeline", False, 1)
            config = check_backward(norm, op, dy, x, more, *vectors)
            # RMSNorm's backward is faster without.
            phases = vec // math.gcd(columns + gap, vec) if op == "layer_norm" else 1
            blocks = config.partials - phases + 1
            assert 1 <= blocks <= phases * -(-rows // phases)


# ---- Few columns ---------------------------------------------------------------------------------


@EVERY_OP
@REGISTER_DTYPES
def test_a_thread_a_row(norm, op, dtype) -> None:
    norm.num_sms = 1
    for rows, columns in ((5, 1), (4500, 1), (1030, 3)):
        forward, backward = check(norm, op, rows, columns, dtype)
        assert (forward.path, backward.path) == ("register", "register")
        assert backward.partials == min(-(-rows // (2048 if columns == 1 else 512)), 2)
