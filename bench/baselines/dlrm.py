# ruff: noqa: N803  (constexpr arguments are in capitals, as everywhere in Triton)
"""Triton kernels of the interaction, forward and backward, and of the head's forward.

A program takes one sample of the interaction, whose vectors are padded to a power of two for
`tl.dot`; or some rows of the head. The number of warps is tuned.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
import triton.testing

tuned = partial(
    triton.autotune,
    configs=[triton.Config({}, num_warps=warps) for warps in (1, 2, 4)],
    do_bench=partial(triton.testing.do_bench, warmup=3, rep=15),
)


# -- interaction ----------------------------------------------------------------------------------


@triton.jit
def load_vectors(
    dense, embeddings, vector, column, COUNT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All vectors of a sample; zeros where there are none."""
    inside = (vector < COUNT)[:, None] & (column < COLUMNS)[None, :]
    first = (vector == 0)[:, None]
    at = (vector - 1)[:, None] * COLUMNS + column[None, :]
    of_dense = tl.load(dense + column[None, :] + 0 * at, inside & first, 0)
    return tl.where(first, of_dense, tl.load(embeddings + at, inside & (vector > 0)[:, None], 0))


@tuned(key=["COUNT", "COLUMNS"])
@triton.jit
def interaction_kernel(
    dense, embeddings, output,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    VECTORS: tl.constexpr, ELEMENTS: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    vector, column = tl.arange(0, VECTORS), tl.arange(0, ELEMENTS)
    dense += sample * COLUMNS
    embeddings += sample * (COUNT - 1) * COLUMNS
    output += sample * WIDTH
    v = load_vectors(dense, embeddings, vector, column, COUNT, COLUMNS)
    products = tl.dot(v, tl.trans(v)).to(v.dtype)
    i, j = vector[:, None], vector[None, :]
    tl.store(output + COLUMNS + i * (i - 1) // 2 + j, products, (j < i) & (i < COUNT))
    tl.store(output + column, tl.load(dense + column, column < COLUMNS, 0), column < COLUMNS)
    padding = COLUMNS + COUNT * (COUNT - 1) // 2 + tl.arange(0, PADDING)
    tl.store(output + padding, tl.zeros((PADDING,), v.dtype), padding < WIDTH)


@tuned(key=["COUNT", "COLUMNS"])
@triton.jit
def interaction_bwd_kernel(
    grad, dense, embeddings, dense_grad, embeddings_grad,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    VECTORS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    vector, column = tl.arange(0, VECTORS), tl.arange(0, ELEMENTS)
    grad += sample * WIDTH
    v = load_vectors(
        dense + sample * COLUMNS, embeddings + sample * (COUNT - 1) * COLUMNS, vector, column,
        COUNT, COLUMNS,
    )  # fmt: skip
    i, j = vector[:, None], vector[None, :]
    high, low = tl.maximum(i, j), tl.minimum(i, j)
    place = COLUMNS + high * (high - 1) // 2 + low
    z = tl.load(grad + place, (i != j) & (high < COUNT), 0)
    gradient = tl.dot(z, v)
    direct = tl.load(grad + column, column < COLUMNS, 0).to(tl.float32)
    gradient += tl.where(i == 0, direct[None, :], 0)
    inside = (column < COLUMNS)[None, :]
    to_dense = dense_grad + sample * COLUMNS + column[None, :] + 0 * i
    tl.store(to_dense, gradient, inside & (i == 0))
    to = embeddings_grad + (sample * (COUNT - 1) + i - 1) * COLUMNS + column[None, :]
    tl.store(to, gradient, inside & (i > 0) & (i < COUNT))


def padded(n: int) -> int:
    """A size that `tl.dot` takes."""
    return max(16, triton.next_power_of_2(n))


class DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense, embeddings):
        ctx.save_for_backward(dense, embeddings)
        batch, count, columns = embeddings.shape[0], embeddings.shape[1] + 1, embeddings.shape[2]
        width = -(-(columns + count * (count - 1) // 2) // 8) * 8
        output = torch.empty(batch, width, dtype=dense.dtype, device=dense.device)
        interaction_kernel[(batch,)](
            dense, embeddings, output, COUNT=count, COLUMNS=columns, WIDTH=width,
            VECTORS=padded(count), ELEMENTS=padded(columns), PADDING=8,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx, grad):
        dense, embeddings = ctx.saved_tensors
        count, columns = embeddings.shape[1] + 1, embeddings.shape[2]
        gradients = torch.empty_like(dense), torch.empty_like(embeddings)
        interaction_bwd_kernel[(dense.shape[0],)](
            grad, dense, embeddings, *gradients, COUNT=count, COLUMNS=columns,
            WIDTH=grad.shape[1], VECTORS=padded(count), ELEMENTS=padded(columns),
        )  # fmt: skip
        return gradients


def dot_interaction(dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Contiguous 16-bit operands; lower triangle, padded to a multiple of 8."""
    return DotInteraction.apply(dense, embeddings)


# -- head -----------------------------------------------------------------------------------------


@tuned(key=["columns"])
@triton.jit
def head_kernel(
    x, weight, bias, target, losses, dlogits, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    values = tl.load(x + at, inside, 0).to(tl.float32)
    w = tl.load(weight + column, column < columns, 0).to(tl.float32)
    z = tl.sum(values * w[None, :], axis=1) + tl.load(bias).to(tl.float32)
    y = tl.load(target + row, row < rows, 0)
    tail = tl.log(1 + tl.exp(-tl.abs(z)))
    loss = (1 - y) * (tl.maximum(z, 0) + tail) + y * (tl.maximum(-z, 0) + tail)
    tl.store(losses + row, loss, row < rows)
    tl.store(dlogits + row, tl.sigmoid(z) - y, row < rows)


def linear_sigmoid_bce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """The mean loss, and a gradient a row that nobody reads here; the sum is torch's kernel."""
    rows, columns = x.shape
    losses, dlogits = torch.empty(2, rows, dtype=torch.float32, device=x.device).unbind()
    block = 16
    head_kernel[(triton.cdiv(rows, block),)](
        x, weight, bias, target, losses, dlogits, rows, columns,
        ROWS=block, COLUMNS=triton.next_power_of_2(columns),
    )  # fmt: skip
    return losses.mean()
