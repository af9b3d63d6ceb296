"""Do the fused layers compute what the plain ones do? Both are held against a float64 run.

Low precision makes both wrong by a little, so the plain model's own error sets the limit: the
fused one may have at most twice that, plus a few units of rounding.

Gradients need one more step. ReLU's derivative jumps at 0, so a pre-activation that rounding moves
across 0 changes a gradient by far more than rounding does. The float64 gradients are therefore
taken with the on/off pattern of the run they judge. The forward pass has no such jump; it is
compared with an ordinary float64 run, which also vouches for the pattern.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fusedcuda.demo.dlrm import DLRM, HiddenLayer, click_loss, fused_hidden, plain_hidden
from fusedcuda.demo.progress import Progress

_ALLOWED_RATIO = 2.0
_ALLOWED_EPS = 4.0


@dataclass(frozen=True)
class Comparison:
    """Errors of one quantity relative to its float64 value: |x - x64| / |x64|, Euclidean norms."""

    name: str
    plain: float
    fused: float
    eps: float  # spacing of the run's dtype at 1.0

    @property
    def limit(self) -> float:
        return _ALLOWED_RATIO * self.plain + _ALLOWED_EPS * self.eps

    @property
    def share(self) -> float:
        """The fused error as a share of its limit; infinite where either is not a number."""
        share = self.fused / self.limit
        return math.inf if math.isnan(share) else share

    @property
    def ok(self) -> bool:
        return self.share <= 1.0


@dataclass(frozen=True)
class _Run:
    """What one forward and backward pass left behind; all values in float64."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor | None]  # by parameter name
    patterns: list[Tensor]  # output > 0 of each hidden layer


def compare(
    model: DLRM, dense: Tensor, indices: Tensor, labels: Tensor, progress: Progress
) -> list[Comparison]:
    """One Comparison each for logits, loss and the gradient of every parameter.

    dense [B, dense_width] in the model's dtype, indices int64 [B, 26], labels [B].
    The model keeps its parameters; its `.grad` fields are cleared.
    """
    progress.tick("plain PyTorch")
    plain = _run(model, dense, indices, labels, plain_hidden)
    progress.tick("fusedcuda")
    fused = _run(model, dense, indices, labels, fused_hidden)
    exact = (copy.deepcopy(model).double(), dense.double(), indices, labels)
    progress.tick("float64, 1 of 3")
    reference = _run(*exact, plain_hidden)
    progress.tick("float64, 2 of 3")
    plain_reference = _run(*exact, _hidden_with_patterns(plain.patterns))
    progress.tick("float64, 3 of 3")
    fused_reference = _run(*exact, _hidden_with_patterns(fused.patterns))

    eps = torch.finfo(dense.dtype).eps
    results = [
        Comparison(
            name,
            _relative_error(getattr(plain, name), getattr(reference, name)),
            _relative_error(getattr(fused, name), getattr(reference, name)),
            eps,
        )
        for name in ("logits", "loss")
    ]
    for name in reference.gradients:
        plain_error = _relative_error(plain.gradients[name], plain_reference.gradients[name])
        fused_error = _relative_error(fused.gradients[name], fused_reference.gradients[name])
        results.append(Comparison(name, plain_error, fused_error, eps))
    return results


def worst_by_group(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The comparison nearest to its limit, or furthest beyond it, of each part of the model."""
    groups: dict[str, Comparison] = {}
    for item in comparisons:
        group = _GROUPS.get(item.name.partition(".")[0], item.name)
        if group not in groups or item.share > groups[group].share:
            groups[group] = replace(item, name=group)
    return list(groups.values())


_GROUPS = {
    "table": "gradients, embeddings",
    "bottom": "gradients, bottom MLP",
    "top": "gradients, top MLP",
    "output": "gradients, output layer",
}


def _run(model: DLRM, dense: Tensor, indices: Tensor, labels: Tensor, hidden: HiddenLayer) -> _Run:
    patterns = []

    def recording(x: Tensor, layer: nn.Linear) -> Tensor:
        output = hidden(x, layer)
        patterns.append(output.detach() > 0)
        return output

    model.zero_grad(set_to_none=True)
    logits = model(dense, indices, recording)
    loss = click_loss(logits, labels)
    loss.backward()
    gradients = {name: _values(p.grad) for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return _Run(logits.detach().double(), loss.detach().double(), gradients, patterns)


def _hidden_with_patterns(patterns: list[Tensor]) -> HiddenLayer:
    remaining: Iterator[Tensor] = iter(patterns)

    def hidden(x: Tensor, layer: nn.Linear) -> Tensor:
        return nn.functional.linear(x, layer.weight, layer.bias) * next(remaining)

    return hidden


def _values(gradient: Tensor | None) -> Tensor | None:
    """The gradient in float64; of a sparse one, the rows that occur in the batch."""
    if gradient is None:
        return None
    gradient = gradient.double()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _relative_error(value: Tensor | None, exact: Tensor | None) -> float:
    """|value - exact| / |exact|; a gradient that is missing altogether is infinitely wrong."""
    if value is None or exact is None:
        return math.inf
    difference = torch.linalg.vector_norm(value - exact)
    norm = torch.linalg.vector_norm(exact)
    return (difference / norm if norm > 0 else difference).item()
