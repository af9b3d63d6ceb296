"""Linear + cross-entropy in plain torch, and the comparison with float64 that its tests share."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from linears import exact, in_roundings, largest, weights
from losses import eager_cross_entropy
from reference import check_function, rounded, ulp
from torch import Tensor

import fusedcuda
from fusedcuda.ops._cross_entropy_reference import REDUCTIONS
from fusedcuda.ops.linear_cross_entropy import makes_gradients_ahead

# Every term of the loss, alone and together.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "everything": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 5.0},
}


def random_problem(
    *rows: int,
    classes: int,
    features: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    ignore_index: int = -100,
    bias: bool = True,
) -> tuple[dict[str, Tensor | None], Tensor]:
    """x, weight and bias, whose logits are added up without rounding, and targets.

    About a quarter of the targets is ignored, but not the first one.
    """
    operands = {
        "x": exact(*rows, features, dtype=dtype, device=device),
        "weight": weights(classes, features, dtype=dtype, device=device),
        "bias": exact(classes, dtype=dtype, device=device) if bias else None,
    }
    target = torch.randint(classes, rows, device=device)
    target[torch.rand(rows, device=device) < 0.25] = ignore_index
    if target.numel():
        target.view(-1)[0] = classes - 1
    return operands, target


def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rows_of_step: int | None = None,
    **options: Any,
) -> Tensor:
    """``rows_of_step``: autograd adds the gradients of so many rows each up in their dtype."""
    if rows_of_step is None:
        return eager_cross_entropy(F.linear(x, weight, bias), target, **options)
    rows = x.reshape(-1, x.shape[-1]).split(rows_of_step)
    logits = torch.cat([F.linear(some, weight, bias) for some in rows])
    return eager_cross_entropy(logits.view(*target.shape, -1), target, **options)


class RoundedAtOne(torch.autograd.Function):
    """The tensor as it is; its gradient as if it had been stored in ``dtype`` for an incoming
    gradient of 1 instead of ``incoming``."""

    @staticmethod
    def forward(ctx, value: Tensor, dtype: torch.dtype, incoming: float) -> Tensor:
        ctx.dtype, ctx.incoming = dtype, incoming
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        made = (grad / ctx.incoming).to(ctx.dtype).to(grad.dtype)
        return made * ctx.incoming, None, None


def check_linear_loss(
    operands: dict[str, Tensor | None],
    target: Tensor,
    incoming: Tensor | float | None = None,
    *,
    chunk: int | str = "auto",
    accumulate: str = "fp32",
    wrt: tuple[str, ...] | None = None,
    **options: Any,
) -> Tensor:
    """`check_function` of linear_cross_entropy. Logits and their gradient are rounded on the way.

    `incoming`: the gradient of the loss, at random if None.
    """
    x = operands["x"]
    assert x is not None
    dtype, reduction = x.dtype, options.get("reduction", "mean")
    of_loss = torch.float64 if dtype == torch.float64 else torch.float32
    shape = target.shape if reduction == "none" else ()
    if not isinstance(incoming, Tensor):
        random = torch.randn(shape, dtype=of_loss, device=x.device)
        incoming = random if incoming is None else torch.full_like(random, incoming)
    ahead = makes_gradients_ahead(dtype, REDUCTIONS[reduction])
    made_for = incoming.item() if ahead else 1.0

    def fused(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        how = {"chunk": chunk, "accumulate": accumulate}
        return fusedcuda.linear_cross_entropy(x, weight, target, bias, **how, **options)

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = RoundedAtOne.apply(rounded(F.linear(x, weight, bias), dtype), dtype, made_for)
        return eager_cross_entropy(logits, target, **options)

    sums = Sums(operands, target, incoming, options)
    in_steps = chunk if accumulate == "weight" and isinstance(chunk, int) else None
    return check_function(
        "linear_cross_entropy",
        fused,
        lambda x, weight, bias: eager(x, weight, bias, target, in_steps, **options),
        operands,
        reference=reference,
        wrt=[name for name in wrt or operands if operands[name] is not None],
        grad_outputs=[incoming],
        magnitudes=sums.gradients(made_for if ahead else None, in_steps),
    )


class Sums:
    """The sums of the absolute values that are added up, and what roundings on the way do."""

    def __init__(
        self,
        operands: dict[str, Tensor | None],
        target: Tensor,
        incoming: Tensor,
        options: dict[str, Any],
    ) -> None:
        x, weight, bias = (None if t is None else t.detach().double() for t in operands.values())
        assert x is not None
        assert weight is not None
        self.shape, self.dtype = x.shape, operands["x"].dtype
        self.x, self.weight = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight
        logits = rounded(F.linear(self.x, weight, bias), self.dtype).requires_grad_()
        loss = eager_cross_entropy(logits, target.reshape(-1), **options)
        incoming = incoming.double().reshape(loss.shape)
        (self.dlogits,) = torch.autograd.grad(loss, logits, incoming)
        # Where p - 1 is nearly 0, its error is still that of p.
        counts = (target != options.get("ignore_index", -100)).reshape(-1, 1)
        share = incoming.abs().reshape(-1, 1)
        if options.get("reduction", "mean") == "mean":
            share = share / counts.sum()
        probability = logits.detach().softmax(-1)
        self.terms = self.dlogits.abs() + torch.where(counts, share * probability, 0.0)

    def gradients(self, scaled_by: float | None, rows_of_step: int | None) -> dict[str, Tensor]:
        """``scaled_by``: made for an incoming gradient of 1, rounded, and multiplied by that.
        ``rows_of_step``: the gradient of the weight is rounded after so many rows.
        """
        x, weight, terms = self.x.abs(), self.weight.abs(), self.terms
        # One of a sum is rounded the other way once in a while.
        flips = in_roundings(ulp(self.dlogits, self.dtype), self.dtype)
        sums = {
            "x": terms @ weight + largest(flips, -1) * largest(weight, -2),
            "weight": terms.mT @ x + largest(flips, -2).mT * largest(x, -2),
            "bias": terms.sum(0) + largest(flips, -2).squeeze(-2),
        }
        made = {
            "x": self.dlogits @ self.weight,
            "weight": self.dlogits.mT @ self.x,
            "bias": self.dlogits.sum(0),
        }
        if scaled_by not in (None, 1.0):
            for name, gradient in made.items():
                # Half an ulp before it is multiplied, which is one where that takes it to the
                # power of two below.
                sums[name] = sums[name] + in_roundings(ulp(gradient, self.dtype), self.dtype)
        if rows_of_step is not None:
            so_far = torch.zeros_like(made["weight"])
            for start in range(0, self.x.shape[0], rows_of_step):
                step = slice(start, start + rows_of_step)
                so_far = so_far + self.dlogits[step].mT @ self.x[step]
                rounds = in_roundings(ulp(so_far, self.dtype), self.dtype)
                sums["weight"] = sums["weight"] + rounds
        sums["x"] = sums["x"].reshape(self.shape)
        return sums
