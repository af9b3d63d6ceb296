"""Cross-entropy from torch's own ops, and the comparison of the fused op with it."""

from typing import Any

import torch
import torch.nn.functional as F
from reference import check_function
from torch import Tensor

import fusedcuda

# Every term of the loss, alone and together; weights and targets come from `random_problem`.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "weighted_smoothing": {"weight": True, "label_smoothing": 0.3},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "everything": {"weight": True, "label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 5.0},
}


def eager_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """In float32, or float64 for float64 logits, as someone would write it without the fused op."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    loss = F.cross_entropy(
        x.reshape(-1, x.shape[-1]),
        target.reshape(-1).long(),
        weight=None if weight is None else weight.to(x.dtype),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    loss = loss.view(target.shape) if reduction == "none" else loss
    if not z_loss:
        return loss
    valid = target != ignore_index
    penalty = torch.where(valid, z_loss * torch.logsumexp(x, dim=-1).square(), 0.0)
    if reduction == "none":
        return loss + penalty
    return loss + (penalty.sum() / valid.sum() if reduction == "mean" else penalty.sum())


def random_problem(
    *shape: int, device: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits, targets with about a quarter ignored, and the options with class weights filled in.

    The logits are between -2 and 2, so that no row is one large element: its rounding would decide
    how the errors of two gradients compare. The first row always counts. A quarter of the classes
    weigh 0, but not the target of the first row. `weight` may be the dtype of the weights.
    """
    options = dict(options)
    logits = (4 * torch.rand(shape, device=device) - 2).to(dtype)
    classes = shape[-1]
    target = torch.randint(classes, shape[:-1], device=device)
    ignored = torch.rand(target.shape, device=device) < 0.25
    target[ignored] = options.get("ignore_index", -100)
    if target.numel():
        target.view(-1)[0] = classes - 1
    if weight := options.pop("weight", None):
        weights = torch.rand(classes, device=device) + 0.5
        weights[torch.rand(classes, device=device) < 0.25] = 0
        weights[-1] = 0.75
        options["weight"] = weights.to(weight if isinstance(weight, torch.dtype) else dtype)
    return logits, target, options


def check_loss(
    logits: Tensor,
    target: Tensor,
    incoming: Tensor | float | None = None,
    inplace_backward: bool = False,
    **options: Any,
) -> None:
    """Loss and gradient against float64; `incoming` is the gradient of the loss, random if None."""
    reduction = options.get("reduction", "mean")
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    shape = target.shape if reduction == "none" else ()
    if not isinstance(incoming, Tensor):
        random = torch.randn(shape, dtype=dtype, device=logits.device)
        incoming = random if incoming is None else torch.full_like(random, incoming)

    def fused(logits: Tensor) -> Tensor:
        if not inplace_backward:
            return fusedcuda.cross_entropy(logits, target, **options)
        copy = logits.clone(memory_format=torch.preserve_format)
        return fusedcuda.cross_entropy(copy, target, inplace_backward=True, **options)

    check_function(
        "cross_entropy",
        fused,
        lambda logits: eager_cross_entropy(logits, target, **options),
        {"logits": logits},
        grad_outputs=[incoming],
    )
