"""The dlrm family in plain torch, its operands, and the comparison with float64 of its tests."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from reference import assert_as_good_as_eager, check_function
from torch import Tensor

import fusedcuda

ORDERS = ("tril", "triu")

# ---- Interaction ---------------------------------------------------------------------------------


def eager_interaction(
    dense: Tensor, embeddings: Tensor, *, order: str = "tril", pad: int = 8
) -> Tensor:
    """As facebookresearch's DLRM (or TorchRec) has it, with zeros behind."""
    vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
    count = vectors.shape[1]
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    lower = [(i, j) for i in range(count) for j in range(i)]
    upper = [(i, j) for i in range(count) for j in range(i + 1, count)]
    pairs = torch.tensor(lower if order == "tril" else upper, dtype=torch.long)
    i, j = pairs.view(-1, 2).unbind(1)
    row = torch.cat([dense, products[:, i, j]], dim=1)
    return F.pad(row, (0, -row.shape[1] % pad))


def random_vectors(
    batch: int, count: int, columns: int, *, dtype=torch.float32, device="cpu"
) -> tuple[Tensor, Tensor]:
    shapes = ((batch, columns), (batch, count - 1, columns))
    dense, embeddings = (torch.randn(s, dtype=dtype, device=device) for s in shapes)
    return dense, embeddings


def check_interaction(
    dense: Tensor, embeddings: Tensor, grad: Tensor | None = None, **options: Any
) -> Tensor:
    """Output and gradients by the rule of reference.py."""
    given = (dense, embeddings)
    # With absolute values, every sum is that of the absolute values of its terms.
    wide = [t.detach().double().abs().requires_grad_() for t in given]
    output = eager_interaction(*wide, **options)
    if grad is None:
        grad = torch.randn(output.shape, dtype=dense.dtype, device=dense.device)
    of_dense, of_embeddings = torch.autograd.grad(output, wide, grad.double().abs())
    return check_function(
        "dot_interaction",
        lambda *vectors: fusedcuda.dot_interaction(*vectors, **options),
        lambda *vectors: eager_interaction(*vectors, **options),
        {"dense": dense, "embeddings": embeddings},
        grad_outputs=[grad],
        magnitudes={
            "output 0": output.detach(), "dense": of_dense, "embeddings": of_embeddings,
        },
    )  # fmt: skip


# ---- Interaction of rows of a table --------------------------------------------------------------


def eager_lookup(dense: Tensor, weight: Tensor, indices: Tensor, **options: Any) -> Tensor:
    return eager_interaction(dense, F.embedding(indices, weight), **options)


def random_lookup(
    batch: int, count: int, columns: int, *, rows: int = 50, dtype=torch.float32, device="cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense vectors, a table, and indices, many of which name the first of its rows."""
    new = {"dtype": dtype, "device": device}
    indices = torch.randint(rows, (batch, count - 1), device=device)
    indices *= torch.rand(indices.shape, device=device) < 0.8
    return torch.randn(batch, columns, **new), torch.randn(rows, columns, **new), indices


def check_lookup(
    dense: Tensor, weight: Tensor, indices: Tensor, grad: Tensor | None = None, **options: Any
) -> Tensor:
    """Output and gradients by the rule of reference.py.

    The gradient of what was looked up is rounded before it is added up, as torch's is. So it has to
    be that of `dot_interaction`, which has tests of its own, and the sums are compared with its.
    """
    wide = [t.detach().double().abs().requires_grad_() for t in (dense, weight)]
    output = eager_lookup(*wide, indices, **options)
    if grad is None:
        grad = torch.randn(output.shape, dtype=dense.dtype, device=dense.device)
    (of_dense,) = torch.autograd.grad(output, wide[:1], grad.double().abs())
    result = check_function(
        "embedding_interaction",
        lambda *tensors: fusedcuda.embedding_interaction(*tensors, indices, **options),
        lambda *tensors: eager_lookup(*tensors, indices, **options),
        {"dense": dense, "weight": weight},
        wrt=["dense"],
        grad_outputs=[grad],
        magnitudes={"output 0": output.detach(), "dense": of_dense},
    )

    leaves = [t.detach().requires_grad_() for t in (dense, weight)]
    again = fusedcuda.embedding_interaction(*leaves, indices, **options)
    (of_weight,) = torch.autograd.grad(again, leaves[1:], grad)
    looked_up = F.embedding(indices, weight).requires_grad_()
    output = fusedcuda.dot_interaction(dense, looked_up, **options)
    (of_rows,) = torch.autograd.grad(output, looked_up, grad)
    check_table_gradient(of_weight, of_rows, indices)
    return result


def check_table_gradient(actual: Tensor, of_rows: Tensor, indices: Tensor) -> None:
    """That it is the sum of the gradients of the rows."""
    rows, columns = actual.shape
    wide = of_rows.double().reshape(-1, columns)
    expected, magnitude = wide.new_zeros(2, rows, columns)
    expected.index_add_(0, indices.reshape(-1), wide)
    magnitude.index_add_(0, indices.reshape(-1), wide.abs())
    eager = torch.ops.aten.embedding_dense_backward(of_rows, indices, rows, -1, False)
    computed = torch.float64 if actual.dtype == torch.float64 else torch.float32
    name = "embedding_interaction gradient of weight"
    assert_as_good_as_eager(name, actual, eager, expected, magnitude, computed)


# ---- Head ----------------------------------------------------------------------------------------


def eager_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    reduction: str = "mean",
    pos_weight: float | None = None,
) -> Tensor:
    """torch's linear layer, and its loss in float32, or float64 for float64."""
    logits = F.linear(x, weight.view(1, -1), bias).squeeze(-1)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.binary_cross_entropy_with_logits(
        logits.to(dtype),
        target.view(logits.shape).to(dtype),
        reduction=reduction,
        pos_weight=None if pos_weight is None else torch.tensor(pos_weight, device=x.device),
    )


def random_head(
    *shape: int, dtype=torch.float32, device="cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight (1, K), bias and labels, most of them 0; the logits are about 1."""
    new = {"dtype": dtype, "device": device}
    weight = torch.randn(1, shape[-1], **new) / shape[-1] ** 0.5
    target = (torch.rand(shape[:-1], device=device) < 0.3).float()
    return torch.randn(shape, **new), weight, torch.randn(1, **new), target


def check_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    wrt: Sequence[str] | None = None,
    **options: Any,
) -> Tensor:
    """Loss and gradients by the rule of reference.py."""
    in_double = x.dtype == torch.float64
    is_reduced = options.get("reduction", "mean") != "none"
    grad = torch.randn(
        () if is_reduced else x.shape[:-1],
        dtype=torch.float64 if in_double else torch.float32,
        device=x.device,
    )
    if wrt is None:
        wrt = ["x", "weight"] if bias is None else ["x", "weight", "bias"]
    # A derivative of the loss by a logit is at most 1, or pos_weight.
    most = grad.abs().double().expand(x.shape[:-1]) * max(options.get("pos_weight") or 1, 1)
    if options.get("reduction", "mean") == "mean":
        most = most / max(most.numel(), 1)
    rows = x.detach().double().abs().reshape(-1, x.shape[-1])
    return check_function(
        "linear_sigmoid_bce",
        lambda x, w, b: fusedcuda.linear_sigmoid_bce(x, w, b, target, **options),
        lambda x, w, b: eager_head(x, w, b, target, **options),
        {"x": x, "weight": weight, "bias": bias},
        wrt=wrt,
        grad_outputs=[grad],
        magnitudes={
            "weight": (most.reshape(1, -1) @ rows).view(weight.shape),
            "bias": most.sum().view(1),
        },
    )
