"""The real RoPE kernel, run by the emulator of this folder, against the CPU reference.

The elements are small integers, so that the arithmetic is exact and every output must equal the
reference to the last bit: an element read or written in a wrong place fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layouts
import pytest
import torch
from comparison import assert_exact, in_double, integers
from emulator import DTYPES
from rope_emulator import RopeEmulator
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)

HALVES = (torch.float16, torch.bfloat16)
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@pytest.fixture
def rope(build_family: Callable[[str], Path]) -> RopeEmulator:
    return RopeEmulator(build_family("rope"))


def bhsd(b: int, h: int, s: int, d: int, dtype: torch.dtype) -> Tensor:
    return integers(b, h, s, d, dtype=dtype)


def bshd(b: int, h: int, s: int, d: int, dtype: torch.dtype) -> Tensor:
    return integers(b, s, h, d, dtype=dtype).transpose(1, 2)


def sbhd(b: int, h: int, s: int, d: int, dtype: torch.dtype) -> Tensor:
    return integers(s, b, h, d, dtype=dtype).permute(1, 2, 0, 3)


def tables(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return integers(*shape, dtype=dtype), integers(*shape, dtype=dtype)


def check(
    rope: RopeEmulator, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> None:
    """Forward, backward and, where that is possible, in place."""
    wide = [in_double(t) for t in (q, k, cos, sin)]
    for transposed, op in ((False, "rope"), (True, "rope_backward")):
        expected = getattr(torch.ops.fusedcuda, op)(*wide, interleaved)
        actual = rope.rope(q, k, cos, sin, interleaved, transposed=transposed)
        for name, a, e in zip("qk", actual, expected, strict=True):
            assert_exact(f"{op} {name}", a, e)
    if 0 in (*q.stride(), *k.stride()):
        return
    expected = torch.ops.fusedcuda.rope(*wide, interleaved)
    for name, a, e in zip(
        "qk", rope.rope(q, k, cos, sin, interleaved, in_place=True), expected, strict=True
    ):
        assert_exact(f"rope_ {name}", a, e)


@INTERLEAVED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [bhsd, bshd, sbhd])
def test_layouts_and_tables(rope, layout, dtype, interleaved) -> None:
    """The vector path (but for float64), with tables of both dtypes that the kernel has."""
    b, s, d = 2, 5, 32
    table_dtypes = {dtype, torch.float32} if dtype in HALVES else {dtype}
    for table_dtype in table_dtypes:
        for width in (d, d // 2):
            for shape in ((s, width), (1, s, width), (b, s, width)):
                cos, sin = tables(*shape, dtype=table_dtype)
                q, k = layout(b, 6, s, d, dtype), layout(b, 2, s, d, dtype)
                check(rope, q, k, cos, sin, interleaved)
                assert rope.plan.vec == (1 if dtype == torch.float64 else 16 // dtype.itemsize)
                assert rope.plan.heads_inside == (layout is not bhsd)


@INTERLEAVED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [2, 6, 10, 24, 80, 96])
def test_head_dims(rope, d, dtype, interleaved) -> None:
    for layout in (bhsd, bshd):
        for width in (d, d // 2):
            q, k = layout(2, 3, 4, d, dtype), layout(2, 1, 4, d, dtype)
            check(rope, q, k, *tables(4, width, dtype=dtype), interleaved)
            aligned = dtype != torch.float64 and d // 2 % (16 // dtype.itemsize) == 0
            assert (rope.plan.vec > 1) == aligned


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 8), (33, 1), (5, 0), (0, 3)])
@pytest.mark.parametrize("layout", [bhsd, bshd])
def test_heads(rope, layout, heads) -> None:
    """Numbers that do not divide among the threads; one position or many."""
    for dtype, d in ((torch.bfloat16, 16), (torch.float32, 6)):
        for length in (1, 19):
            q, k = (layout(2, h, length, d, dtype) for h in heads)
            check(rope, q, k, *tables(2, length, d, dtype=dtype), False)


@pytest.mark.parametrize("heads", [(16, 4), (19, 2), (11, 0)])
@pytest.mark.parametrize("layout", [bhsd, bshd])
def test_more_heads_a_thread_than_it_has_in_flight(rope, layout, heads) -> None:
    rope.num_sms = 0  # no wave of blocks to fill, so that the heads are not divided among blocks
    for dtype, d, in_flight in ((torch.bfloat16, 1024, 2), (torch.float32, 510, 8)):
        q, k = (layout(1, h, 12, d, dtype) for h in heads)
        check(rope, q, k, *tables(12, d, dtype=dtype), False)
        assert rope.plan.heads_per_thread > in_flight


def test_heads_in_groups_of_blocks(rope) -> None:
    q, k = bhsd(2, 16, 12, 256, torch.bfloat16), bhsd(2, 3, 12, 256, torch.bfloat16)
    groups = set()
    for num_sms in (1, 2, 132):
        rope.num_sms = num_sms
        check(rope, q, k, *tables(12, 256, dtype=torch.bfloat16), False)
        groups.add(rope.plan.head_groups)
    assert len(groups) == 3


@INTERLEAVED
def test_rows_longer_than_a_block(rope, interleaved) -> None:
    for dtype, d in ((torch.bfloat16, 2 * 8 * 300), (torch.float32, 2 * 301)):
        q, k = bhsd(1, 2, 2, d, dtype), bshd(1, 1, 2, d, dtype)
        check(rope, q, k, *tables(2, d, dtype=dtype), interleaved)
        assert rope.plan.column_tiles == 2


@INTERLEAVED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(rope, dtype, interleaved) -> None:
    """Rows that are shifted, apart, scattered or repeated; of any of the tensors."""

    def expanded(x: Tensor) -> Tensor:
        return x[:, :1, :1, :1].expand(x.shape) if x.dim() == 4 else x[:1, :1].expand(x.shape)

    def shifted(x: Tensor) -> Tensor:
        return layouts.shifted(x, 1)

    plain = [bhsd(2, 3, 4, 32, dtype), bhsd(2, 2, 4, 32, dtype), *tables(4, 32, dtype=dtype)]
    for change in (expanded, shifted, layouts.pitched, layouts.spread, layouts.transposed):
        for position in range(4):
            operands = list(plain)
            operands[position] = change(operands[position])
            check(rope, *operands, interleaved)
            assert rope.plan.vec == 1
    packed = integers(2, 4, 5, 32, dtype=dtype)  # q and k of one projection
    q, k = packed[:, :, :3].transpose(1, 2), packed[:, :, 3:].transpose(1, 2)
    check(rope, q, k, *plain[2:], interleaved)
    assert (rope.plan.vec == 1) == (dtype == torch.float64)


@INTERLEAVED
def test_strides_and_starts_that_are_nearly_aligned(rope, interleaved) -> None:
    """Rows 68 bytes apart of which the first is aligned; a table at a multiple of 8 bytes."""

    def apart(x: Tensor) -> Tensor:
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 2, dtype=x.dtype)
        wide[..., :-2] = x
        return wide[..., :-2]

    dtype = torch.bfloat16
    plain = [bhsd(2, 3, 4, 32, dtype), bhsd(2, 2, 4, 32, dtype), *tables(4, 32, dtype=dtype)]
    for position in range(4):
        operands = list(plain)
        operands[position] = apart(operands[position])
        check(rope, *operands, interleaved)
        assert rope.plan.vec == 1
    check(rope, *plain[:3], layouts.shifted(plain[3], 4), interleaved)
    assert rope.plan.vec == 1


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)], ids=str)
def test_empty(rope, shape) -> None:
    q, k = bhsd(*shape, torch.float32), bhsd(*shape, torch.float32)
    check(rope, q, k, *tables(shape[2], shape[3], dtype=torch.float32), False)
