"""The real kernels of the dlrm family, run by the emulator of this folder, against the references.

Where the elements are small integers the arithmetic is exact, and every output must equal the
reference to the last bit: an element read or written in a wrong place fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import layouts
import pytest
import torch
from comparison import assert_exact, in_double, integers
from dlrm_emulator import DlrmEmulator
from emulator import DTYPES
from row_emulator import assert_rounded
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)
from fusedcuda.ops._operands import compute_dtype

HALVES = (torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ops = torch.ops.fusedcuda


@pytest.fixture
def dlrm(build_family: Callable[[str], Path]) -> DlrmEmulator:
    return DlrmEmulator(build_family("dlrm"))


# ---- Interaction ---------------------------------------------------------------------------------


def small(*shape: int, dtype: torch.dtype) -> Tensor:
    """Sums of 256 products stay exact in float32, and most of them in 16 bits."""
    return torch.randint(-2, 3, shape).to(dtype)


def vectors(batch: int, count: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return small(batch, columns, dtype=dtype), small(batch, count - 1, columns, dtype=dtype)


def width_of(dense: Tensor, embeddings: Tensor, pad: int = 8) -> int:
    count = embeddings.shape[1] + 1
    return -(-(dense.shape[1] + count * (count - 1) // 2) // pad) * pad


def check(
    dlrm: DlrmEmulator,
    dense: Tensor,
    embeddings: Tensor,
    upper: bool = False,
    pad: int = 8,
    grad: Tensor | None = None,
) -> None:
    """Forward and backward; the padding of the incoming gradient must not count."""
    width = width_of(dense, embeddings, pad)
    wide = [in_double(t) for t in (dense, embeddings)]
    expected = ops.dot_interaction(*wide, upper, width)
    actual = dlrm.dot_interaction(dense, embeddings, upper, width)
    assert_exact("dot_interaction", actual, expected)
    if grad is None:
        grad = small(dense.shape[0], width, dtype=dense.dtype)
        count = embeddings.shape[1] + 1
        grad[:, dense.shape[1] + count * (count - 1) // 2 :] = torch.nan
    gradients = dlrm.dot_interaction_backward(grad, dense, embeddings, upper)
    exact = ops.dot_interaction_backward(in_double(grad), *wide, upper)
    for name, a, e in zip(("dense", "embeddings"), gradients, exact, strict=True):
        assert_exact(f"gradient of {name}", a, e)


@pytest.mark.parametrize("upper", [False, True], ids=["tril", "triu"])
@pytest.mark.parametrize(
    "shape",
    [(27, 128), (27, 16), (27, 64), (2, 8), (1, 16), (16, 32), (32, 24), (33, 40), (9, 136)],
    ids=str,
)
@every_dtype
def test_shapes(dlrm, dtype, shape, upper) -> None:
    check(dlrm, *vectors(5, *shape, dtype), upper)
    assert dlrm.call.aligned
    assert dlrm.call.aligned_row
    assert dlrm.call.path == (1 if dtype in HALVES else 2)
    if dtype in HALVES:
        assert dlrm.call.tiles == (2 if shape[0] <= 32 else 4)


@every_dtype
def test_the_largest(dlrm, dtype) -> None:
    check(dlrm, *vectors(3, 64, 256, dtype))
    dlrm.shared_bytes_of_block = 99 << 10  # of compute capability 8.6
    check(dlrm, *vectors(3, 64, 256, dtype))


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 12, 17, 65, 100, 255])
@every_dtype
def test_columns_that_are_not_whole_pieces(dlrm, dtype, columns) -> None:
    check(dlrm, *vectors(4, 5, columns, dtype))
    assert dlrm.call.aligned == (columns * dtype.itemsize % 16 == 0)
    check(dlrm, *vectors(4, 35, columns, dtype), upper=True)


@pytest.mark.parametrize("count", [3, 15, 17, 31, 47, 63])
@every_dtype
def test_numbers_of_vectors_that_do_not_fill_tiles(dlrm, dtype, count) -> None:
    check(dlrm, *vectors(3, count, 16, dtype))


@pytest.mark.parametrize("pad", [1, 2, 3, 16, 128])
@every_dtype
def test_padding(dlrm, dtype, pad) -> None:
    dense, embeddings = vectors(4, 7, 16, dtype)
    check(dlrm, dense, embeddings, pad=pad)
    assert dlrm.call.aligned
    assert dlrm.call.aligned_row == (width_of(dense, embeddings, pad) * dtype.itemsize % 16 == 0)


@pytest.mark.parametrize("batch", [1, 2, 3, 13, 40, 110])
@pytest.mark.parametrize("num_sms", [1, 2, 132])
def test_samples_of_a_warp(dlrm, num_sms, batch) -> None:
    """None, one or several."""
    dlrm.num_sms = num_sms
    for count, columns in ((27, 128), (27, 16), (4, 8), (1, 8), (40, 128)):
        check(dlrm, *vectors(batch, count, columns, torch.bfloat16))
    if num_sms == 132:
        assert dlrm.call.threads == 32  # few samples: all SMs get some
        assert dlrm.call.blocks == batch


def test_samples_of_a_block(dlrm) -> None:
    """By threads: one or several."""
    for dtype in (torch.float32, torch.float64):
        check(dlrm, *vectors(1030, 3, 2, dtype))
        assert dlrm.call.blocks == 1024


@every_dtype
def test_strides(dlrm, dtype) -> None:
    """Vectors apart, samples inside, a sample repeated; off the boundary, and rows off it."""
    dense, embeddings = vectors(4, 6, 16, dtype)
    row = small(4, width_of(dense, embeddings), dtype=dtype)
    stacked = small(4, 8, 16, dtype=dtype)
    for d, e in (
        (stacked[:, 0], stacked[:, 2:7]),
        (dense, embeddings.transpose(0, 1).contiguous().transpose(0, 1)),
        (dense[:1].expand(4, 16), embeddings[:1].expand(4, 5, 16)),
        (dense, embeddings[:, :1].expand(4, 5, 16)),
    ):
        check(dlrm, d, e)
        assert dlrm.call.aligned
    for d, e in (
        (layouts.shifted(dense, 1), embeddings),
        (dense, layouts.shifted(embeddings, 1)),
        (layouts.pitched(dense), embeddings),
        (dense, layouts.pitched(embeddings)),
    ):
        check(dlrm, d, e)
        assert not dlrm.call.aligned
    for grad in (layouts.shifted(row, 1), layouts.pitched(row)):
        check(dlrm, dense, embeddings, grad=grad)
        assert dlrm.call.aligned
        assert not dlrm.call.aligned_row
    check(dlrm, dense, embeddings, grad=row[:1].expand_as(row))
    assert dlrm.call.aligned_row


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@every_dtype
def test_what_is_not_finite_stays_in_its_sample(dlrm, dtype, value) -> None:
    # So many that a warp comes back to the stage in which it had the sample.
    dense, embeddings = vectors(80, 20, 48, dtype)
    embeddings[3, 2, 7] = value
    width = width_of(dense, embeddings)
    output = dlrm.dot_interaction(dense, embeddings, False, width)
    expected = ops.dot_interaction(in_double(dense), in_double(embeddings), False, width)
    torch.testing.assert_close(output, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
    grad = torch.ones(80, width, dtype=dtype)
    grad[8, 48] = value  # of the product of the dense vector and the next
    gradients = dlrm.dot_interaction_backward(grad, dense, embeddings, False)
    for gradient in gradients:
        is_finite = gradient.isfinite().flatten(1).all(1)
        assert is_finite.tolist() == [sample not in (3, 8) for sample in range(80)]


@every_dtype
def test_no_samples(dlrm, dtype) -> None:
    check(dlrm, *vectors(0, 5, 16, dtype))
    assert dlrm.call.path == 0


# ---- Head ----------------------------------------------------------------------------------------


def rows(batch: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and weight whose products are in range, bias, and targets of which some are in between."""
    x, weight = integers(batch, columns, dtype=dtype), integers(columns, dtype=dtype)
    weight = weight * (torch.rand(columns) < 8 / columns)
    target = (torch.rand(batch) * 5).round() / 5
    return x, weight, integers(1, dtype=dtype), target.to(compute_dtype(dtype))


def check_head(
    dlrm: DlrmEmulator,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pos_weight: float = 1.0,
    reduction: int = 1,
) -> None:
    wide = [None if t is None else in_double(t) for t in (x, weight, bias, target)]
    actual = dlrm.forward(x, weight, bias, target, pos_weight, reduction)
    exact = ops.linear_sigmoid_bce_forward(*wide, pos_weight, reduction)
    assert_exact("logits", actual[1], exact[1])
    for name, a, e in zip(("loss", "logits", "dlogits"), actual, exact, strict=True):
        assert_rounded(name, a, e, ulps=4)


def check_head_backward(
    dlrm: DlrmEmulator, x: Tensor, weight: Tensor, masks: tuple[int, ...] = (7,), reduction: int = 0
) -> None:
    """With integers for the gradients of the logits, so that their sums are exact."""
    dlogits = integers(x.shape[0], dtype=compute_dtype(x.dtype))
    grad_loss = integers(*(() if reduction else dlogits.shape), dtype=dlogits.dtype)
    for mask in masks:
        actual = dlrm.backward(grad_loss, x, weight, dlogits, mask, reduction)
        wide = [in_double(t) for t in (grad_loss, x, weight, dlogits)]
        exact = ops.linear_sigmoid_bce_backward(*wide, mask, reduction)
        for a, e in zip(actual, exact, strict=True):
            assert_exact(f"gradients {mask}", a, e)


@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("columns", [256, 8, 1, 13, 257, 1000])
@every_dtype
def test_head(dlrm, dtype, columns, reduction) -> None:
    for batch in (1, 37, 300):
        x, weight, bias, target = rows(batch, columns, dtype)
        check_head(dlrm, x, weight, bias, target, reduction=reduction)
        check_head(dlrm, x, weight, None, target, pos_weight=2.5, reduction=reduction)
        is_aligned = columns * dtype.itemsize % 16 == 0
        assert dlrm.call.aligned == is_aligned


@pytest.mark.parametrize("columns", [256, 8, 1, 13, 257, 2048 + 16, 5000])
@every_dtype
def test_head_backward(dlrm, dtype, columns) -> None:
    for batch in (1, 37, 200):
        x, weight, *_ = rows(batch, columns, dtype)
        check_head_backward(dlrm, x, weight)
    check_head_backward(dlrm, *rows(32, columns, dtype)[:2], reduction=1)
    check_head_backward(dlrm, *rows(5, columns, dtype)[:2], reduction=2)
    by_vectors = columns * dtype.itemsize % 16 == 0 and dtype != torch.float64
    vec = 16 // dtype.itemsize if by_vectors else 1
    pieces = -(-columns // vec)
    assert -(-pieces // 32) <= dlrm.call.column_tiles <= -(-pieces // 8)


def test_gradients_that_are_asked_for(dlrm) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        check_head_backward(dlrm, *rows(70, 24, dtype)[:2], masks=tuple(range(1, 8)))


@every_dtype
def test_rows_of_the_head(dlrm, dtype) -> None:
    """Apart, repeated, off the boundary; the weight as well."""
    x, weight, bias, target = rows(37, 64, dtype)
    for given, other in (
        (integers(37, 128, dtype=dtype)[:, :64], weight),
        (x[:1].expand(37, 64), weight),
        (layouts.shifted(x, 1), weight),
        (layouts.pitched(x), weight),
        (x, layouts.shifted(weight, 1)),
    ):
        check_head(dlrm, given, other, bias, target)
        check_head_backward(dlrm, given, other)


def test_blocks_of_the_head(dlrm) -> None:
    """Rows of one round, of several, and fewer than the blocks could take."""
    blocks = set()
    for num_sms in (1, 3, 132):
        dlrm.num_sms = num_sms
        x, weight, bias, target = rows(600, 16, torch.bfloat16)
        check_head(dlrm, x, weight, bias, target)
        blocks.add(dlrm.call.blocks)
        check_head_backward(dlrm, x, weight)
    assert len(blocks) == 3


@every_dtype
def test_head_of_no_rows(dlrm, dtype) -> None:
    x, weight, bias, target = rows(0, 16, dtype)
    for reduction in (1, 2):
        loss = dlrm.forward(x, weight, bias, target, 1.0, reduction)[0]
        assert loss.isnan() if reduction == 1 else loss == 0
        check_head_backward(dlrm, x, weight, reduction=reduction)


@pytest.mark.parametrize("z", [-200.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 200.0])
def test_small_losses_and_gradients_keep_their_digits(dlrm, z) -> None:
    x, weight = torch.full((2, 1), z), torch.ones(1)
    target = torch.tensor([0.0, 1.0])
    loss, _, dlogits = dlrm.forward(x, weight, None, target, 1.0, 0)
    wide = torch.tensor([z, z], dtype=torch.float64)
    expected = torch.nn.functional.softplus(torch.tensor([z, -z], dtype=torch.float64))
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    slopes = signs * torch.sigmoid(signs * wide)
    for actual, exact in ((loss, expected), (dlogits, slopes)):
        torch.testing.assert_close(actual.double(), exact, rtol=4e-7, atol=1e-38)
