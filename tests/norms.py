"""RMSNorm and LayerNorm in plain torch, and the comparison with float64 that their tests share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from reference import as_tuple, check_function, rounded
from torch import Tensor

import fusedcuda

EPS = 1e-5


@dataclass(frozen=True)
class Norm:
    """One op in three forms: calling it runs fusedcuda, `eager` torch's op, `formula` the formula.

    Each takes x, residual, weight and bias (RMSNorm: no bias), of which all but x may be None, and
    gives y, or y and the sum where there is a residual.
    """

    name: str
    vectors: tuple[str, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        return ("x", "residual", *self.vectors)

    def __call__(self, x, residual=None, *vectors, eps=EPS, **offset) -> Any:
        fused = getattr(fusedcuda, self.name)
        return fused(x, *vectors, eps=eps, residual=residual, **offset)

    def eager(self, x, residual=None, *vectors, eps=EPS, weight_offset=0.0) -> Any:
        h = x if residual is None else x + residual
        # torch has no kernel for some pairs of dtypes.
        cast = [None if v is None else v.to(h.dtype) for v in vectors]
        if weight_offset:
            cast[0] = cast[0] + weight_offset
        y = getattr(F, self.name)(h, h.shape[-1:], *cast, eps=eps)
        return y if residual is None else (y, h)

    def formula(
        self, x, residual=None, weight=None, bias=None, *, dtype, eps=EPS, weight_offset=0.0
    ) -> Any:
        """In the precision of x; the sum is rounded to `dtype`, as the one that is returned is."""
        h = x if residual is None else rounded(x + residual, dtype)
        y = self.centred(h) * self.rstd(h, eps)
        y = y if weight is None else y * (weight + weight_offset)
        y = y if bias is None else y + bias
        return y if residual is None else (y, h)

    def centred(self, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True) if self is LAYER_NORM else h

    def rstd(self, h: Tensor, eps: float = EPS) -> Tensor:
        return torch.rsqrt(self.centred(h).square().mean(-1, keepdim=True) + eps)

    def random_vectors(self, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
        return [torch.randn(size, dtype=dtype, device=device) for _ in self.vectors]

    def random_operands(
        self, *shape: int, dtype=torch.float32, device="cpu", residual=True
    ) -> list[Tensor | None]:
        """x, residual and vectors; the rows have a mean."""
        x = 2 * torch.randn(shape, dtype=dtype, device=device) + 0.5
        vectors = self.random_vectors(shape[-1], dtype, device)
        return [x, torch.randn_like(x) if residual else None, *vectors]


RMS_NORM = Norm("rms_norm", ("weight",))
LAYER_NORM = Norm("layer_norm", ("weight", "bias"))
NORMS = (RMS_NORM, LAYER_NORM)


def magnitudes(
    norm: Norm,
    operands: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    eps: float,
    weight_offset: float,
) -> dict[str, Tensor]:
    """The sums of the absolute values of what is added up to an output or a gradient."""
    x, residual, *vectors = (None if t is None else t.detach().double() for t in operands)
    h = x if residual is None else x + residual
    dy, dh = (None if g is None else g.abs().double() for g in (*grads, None)[:2])
    weight = torch.ones_like(h) if vectors[0] is None else (vectors[0] + weight_offset).abs()
    bias = vectors[1] if norm is LAYER_NORM else None
    rstd = norm.rstd(h, eps)
    row = h.abs()
    if norm is LAYER_NORM:
        row = row + h.mean(-1, keepdim=True).abs()
    row = row * rstd
    dy = torch.zeros_like(h) if dy is None else dy
    scaled = dy * weight
    dx = rstd * (scaled + row * (scaled * row).mean(-1, keepdim=True))
    if norm is LAYER_NORM:
        dx = dx + rstd * scaled.mean(-1, keepdim=True)
    dx = dx if dh is None else dx + dh
    over_rows = tuple(range(h.dim() - 1))
    return {
        "output 0": row * weight + (0 if bias is None else bias.abs()),
        "x": dx,
        "residual": dx,
        "weight": (dy * row).sum(over_rows),
        "bias": dy.sum(over_rows),
    }


def check_norm(
    norm: Norm,
    *operands: Tensor | None,
    eps: float = EPS,
    weight_offset: float = 0.0,
    grad_outputs: Sequence[Tensor | None] | None = None,
) -> Any:
    """`check_function` with gradients for every operand that is there; returns the outputs."""
    dtype = operands[0].dtype
    options = {"weight_offset": weight_offset} if weight_offset else {}
    if grad_outputs is None:
        count = 1 if operands[1] is None else 2
        grad_outputs = [torch.randn_like(operands[0]) for _ in range(count)]

    def bound(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        return lambda *tensors: function(*tensors, eps=eps, **options, **more)

    outputs = check_function(
        norm.name,
        bound(norm),
        bound(norm.eager),
        dict(zip(norm.operands, operands, strict=True)),
        reference=bound(norm.formula, dtype=dtype),
        grad_outputs=grad_outputs,
        magnitudes=magnitudes(norm, operands, grad_outputs, eps, weight_offset),
    )
    assert all(output.is_contiguous() for output in as_tuple(outputs))
    return outputs


def values(*rows: list[float], device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(rows, dtype=dtype, device=device)


def near(actual: Tensor, expected, tolerance: float = 1e-5) -> None:
    """`expected` is known to about six digits."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    expected = expected.expand(actual.shape) if expected.dim() < actual.dim() else expected
    actual = actual.detach().cpu().double()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def exactly(actual: Tensor, expected) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
    assert torch.equal(actual.detach(), expected.expand(actual.shape))
