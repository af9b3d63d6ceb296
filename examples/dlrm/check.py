"""Do the two models agree? Loss, logits and the gradient of each parameter, against float64.

In float64 the ops have to agree with plain PyTorch but for the order of sums. In a narrow dtype
both models are wrong by a little; the plain one's error sets the limit for the other's.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from examples.dlrm.models import FusedDLRM, PlainDLRM
from examples.dlrm.step import twin
from fusedcuda.demo.check import Comparison
from fusedcuda.demo.measure import Batch

_ORDER_OF_SUMS = 1e-13  # relative, in float64


def compare(plain: PlainDLRM, batch: Batch) -> list[Comparison]:
    """One Comparison for the logits, one for the loss, and one for the gradient of each parameter.

    Both are run as they are, and the plain model in float64 as well. A ReLU whose input rounding
    carries across 0 changes gradients by more than rounding does; that happens to both alike in a
    large batch, and in float64 not at all, which is what a small one is for.
    """
    exact = _values(copy.deepcopy(plain).double(), _double(batch))
    before = _values(plain, batch)
    after = _values(twin(plain, FusedDLRM), batch)
    eps = max(torch.finfo(batch.dense.dtype).eps, _ORDER_OF_SUMS)
    return [
        Comparison(name, _error(before[name], value), _error(after[name], value), eps)
        for name, value in exact.items()
    ]


def _values(model: PlainDLRM, batch: Batch) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        logits = model(batch.dense, batch.indices)
    loss = model.loss(batch.dense, batch.indices, batch.labels)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"logits": logits, "loss": loss.detach(), **gradients}


def _double(batch: Batch) -> Batch:
    return Batch(batch.dense.double(), batch.indices, batch.labels.double())


def _error(value: Tensor | None, exact: Tensor | None) -> float:
    """|value - exact| / |exact|; infinite where there is none, or not a number."""
    if value is None or exact is None:
        return math.inf
    difference = torch.linalg.vector_norm(value.double() - exact)
    error = (difference / torch.linalg.vector_norm(exact)).item()
    return math.inf if math.isnan(error) else error
