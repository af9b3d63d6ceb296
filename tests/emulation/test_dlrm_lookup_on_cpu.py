"""The interaction of rows of a table, run by the emulator of this folder, against the reference.

As in test_dlrm_on_cpu.py the elements are small integers and every output must be exact.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layouts
import pytest
import torch
from comparison import assert_exact, in_double
from dlrm_emulator import DlrmEmulator
from emulator import DTYPES, EmulationError
from test_dlrm_on_cpu import HALVES, small
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ops = torch.ops.fusedcuda
ROWS = 37


@pytest.fixture
def dlrm(build_family: Callable[[str], Path]) -> DlrmEmulator:
    return DlrmEmulator(build_family("dlrm"))


def operands(
    batch: int, count: int, columns: int, dtype: torch.dtype, rows: int = ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense vectors, a table, and indices of which some are its first and its last row."""
    indices = torch.randint(0, rows, (batch, count - 1))
    indices.view(-1)[:2] = torch.tensor([0, rows - 1])[: indices.numel()]
    return small(batch, columns, dtype=dtype), small(rows, columns, dtype=dtype), indices


def check(
    dlrm: DlrmEmulator,
    dense: Tensor,
    weight: Tensor,
    indices: Tensor,
    upper: bool = False,
    pad: int = 8,
    masks: tuple[int, ...] = (3,),
) -> None:
    elements = dense.shape[1] + indices.shape[1] * (indices.shape[1] + 1) // 2
    width = -(-elements // pad) * pad
    wide = (in_double(dense), in_double(weight), indices)
    expected = ops.embedding_interaction(*wide, upper, width)
    actual = dlrm.embedding_interaction(dense, weight, indices, upper, width)
    assert_exact("embedding_interaction", actual, expected)
    grad = small(dense.shape[0], width, dtype=dense.dtype)
    exact = ops.embedding_interaction_backward(in_double(grad), *wide, upper, 3)
    for mask in masks:
        gradients = dlrm.embedding_interaction_backward(grad, dense, weight, indices, upper, mask)
        wanted = [e for bit, e in enumerate(exact) if mask >> bit & 1]
        for a, e in zip(gradients, wanted, strict=True):
            assert_exact(f"gradients {mask}", a, e)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("upper", [False, True], ids=["tril", "triu"])
@pytest.mark.parametrize(
    "shape",
    [(27, 128), (27, 16), (27, 64), (2, 8), (1, 16), (16, 32), (32, 24), (33, 40), (9, 136)],
    ids=str,
)
@every_dtype
def test_shapes(dlrm, dtype, shape, upper, index_dtype) -> None:
    dense, weight, indices = operands(5, *shape, dtype)
    check(dlrm, dense, weight, indices.to(index_dtype), upper)
    assert dlrm.call.aligned
    assert dlrm.call.path == (1 if dtype in HALVES else 2)


@every_dtype
def test_the_largest(dlrm, dtype) -> None:
    check(dlrm, *operands(3, 64, 256, dtype))
    dlrm.shared_bytes_of_block = 99 << 10
    check(dlrm, *operands(3, 64, 256, dtype))


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 12, 17, 65, 100, 255])
@every_dtype
def test_columns_that_are_not_whole_pieces(dlrm, dtype, columns) -> None:
    check(dlrm, *operands(4, 5, columns, dtype))
    assert dlrm.call.aligned == (columns * dtype.itemsize % 16 == 0)
    check(dlrm, *operands(4, 35, columns, dtype), upper=True)


@pytest.mark.parametrize("count", [3, 15, 17, 31, 32, 33, 34, 47, 63, 64])
@every_dtype
def test_numbers_of_vectors(dlrm, dtype, count) -> None:
    """Of which a lane has no index, one or two."""
    for columns in (16, 24, 5):
        check(dlrm, *operands(3, count, columns, dtype))


@pytest.mark.parametrize("batch", [1, 2, 3, 13, 40, 110])
@pytest.mark.parametrize("num_sms", [1, 2, 132])
def test_samples_of_a_warp(dlrm, num_sms, batch) -> None:
    """None, one or several: indices of the next one are read ahead, and none behind the last."""
    dlrm.num_sms = num_sms
    for count, columns in ((27, 128), (27, 16), (4, 8), (40, 128), (27, 15)):
        check(dlrm, *operands(batch, count, columns, torch.bfloat16))


def test_samples_of_a_block(dlrm) -> None:
    for dtype in (torch.float32, torch.float64):
        check(dlrm, *operands(1030, 3, 2, dtype))
        assert dlrm.call.blocks == 1024


@every_dtype
def test_strides(dlrm, dtype) -> None:
    """Indices anywhere; rows apart or the same; a table off the boundary."""
    dense, weight, indices = operands(4, 7, 16, dtype)
    for given in (
        layouts.transposed(indices),
        layouts.spread(indices),
        layouts.pitched(indices),
        layouts.shifted(indices.int(), 1),
        indices[:1].expand(4, 6),
        indices[:, :1].expand(4, 6),
    ):
        check(dlrm, dense, weight, given)
        assert dlrm.call.aligned
    for table in (small(ROWS, 48, dtype=dtype)[:, 16:32], weight[:1].expand(ROWS, 16)):
        check(dlrm, dense, table, indices)
        assert dlrm.call.aligned
    for table in (layouts.shifted(weight, 1), layouts.pitched(weight)):
        check(dlrm, dense, table, indices)
        assert not dlrm.call.aligned
    one = weight[:1]
    check(dlrm, dense, one, torch.zeros_like(indices))


def test_gradients_that_are_asked_for(dlrm) -> None:
    for dtype in DTYPES:
        for columns in (16, 15):
            check(dlrm, *operands(9, 5, columns, dtype), masks=(1, 2, 3))


@pytest.mark.parametrize("wrong", [ROWS, -1, 2**31, 2**40, -(2**63)])
@every_dtype
def test_indices_that_are_no_rows_fail_an_assertion(dlrm, dtype, wrong) -> None:
    for count, columns, position in ((27, 16, 25), (40, 16, 38), (5, 7, 0)):
        dense, weight, indices = operands(6, count, columns, dtype)
        width = columns + count * (count - 1) // 2
        grad = small(6, width, dtype=dtype)
        indices[4, position] = wrong
        with pytest.raises(EmulationError, match="an index is no row of the table"):
            dlrm.embedding_interaction(dense, weight, indices, False, width)
        with pytest.raises(EmulationError, match="an index is no row of the table"):
            dlrm.embedding_interaction_backward(grad, dense, weight, indices, False, 3)


@every_dtype
def test_no_samples(dlrm, dtype) -> None:
    check(dlrm, *operands(0, 5, 16, dtype))
    assert dlrm.call.path == 0
