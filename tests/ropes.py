"""RoPE in plain torch, its operands, and the comparison with float64 that its tests share."""

from collections.abc import Sequence

import torch
from reference import check_function
from torch import Tensor

import fusedcuda


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def widened(table: Tensor, dim: int, interleaved: bool) -> Tensor:
    """A table with a value for each element, and a dimension for the heads."""
    if table.shape[-1] != dim:
        table = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
    return table.unsqueeze(-3)


def eager(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """As Hugging Face's models have it, in the dtype of q and k."""
    rotate = rotate_neighbours if interleaved else rotate_half
    cos, sin = (widened(t.to(q.dtype), q.shape[-1], interleaved) for t in (cos, sin))
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def complex_rotation(x: Tensor, angle: Tensor, *, interleaved: bool = False) -> Tensor:
    """Another way to the same values: pairs as complex numbers, times exp(i * angle)."""
    x = x.double()
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_real(turned)
    return (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)


def angles(length: int, dim: int, base: float = 10000.0) -> Tensor:
    """(length, dim / 2), in float64."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequency)


def bhsd(b: int, h: int, s: int, d: int, make=torch.randn, **options) -> Tensor:
    return make(b, h, s, d, **options)


def bshd(b: int, h: int, s: int, d: int, make=torch.randn, **options) -> Tensor:
    """The transposed view of what a projection of the hidden states gives."""
    return make(b, s, h, d, **options).transpose(1, 2)


def packed(b: int, h: int, s: int, d: int, make=torch.randn, **options) -> Tensor:
    """A part of the heads of a larger projection."""
    return make(b, s, h + 2, d, **options)[:, :, 1:-1].transpose(1, 2)


LAYOUTS = (bhsd, bshd, packed)


def layout_name(layout) -> str:
    return layout.__name__


def random_tables(*shape: int, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of random angles; of full width, they differ between the members of a pair."""
    angle = 6.3 * torch.rand(shape, dtype=torch.float64)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def check(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    wrt: Sequence[str] = ("q", "k"),
    grad_outputs: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and gradients by the rule of reference.py; the layout of the outputs.

    The tables are exact: only their values in the dtype they have count.
    """

    def fused(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return fusedcuda.rope(q, k, cos, sin, interleaved=interleaved)

    def formula(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return eager(q, k, cos.to(q.device), sin.to(q.device), interleaved=interleaved)

    # The terms of each sum, which may cancel.
    magnitude = [x.double().abs().amax() * 1.5 + torch.zeros_like(x.double()) for x in (q, k)]
    outputs = check_function(
        "rope",
        fused,
        formula,
        {"q": q, "k": k},
        wrt=wrt,
        grad_outputs=grad_outputs,
        magnitudes={"output 0": magnitude[0], "output 1": magnitude[1]},
    )
    for x, y in zip((q, k), outputs, strict=True):
        assert y.stride() == torch.empty_like(x).stride()
    return outputs
