"""Low-rank adapters in plain torch, and the comparison with float64 that their tests share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from linears import RoundedGradient, bend, exact, in_roundings, largest, slope, weights
from reference import ACTIVATIONS, check_function, rounded, ulp
from torch import Tensor

import fusedcuda
from fusedcuda.ops._lora_dropout import keep_factor, keep_mask

_ops = torch.ops.fusedcuda
NAMES = ("x", "weight", "bias", "lora_a", "lora_b")


class Layer(NamedTuple):
    """The operands of a layer, in the order of the raw operators."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor
    lora_b: Tensor


def random_layer(
    *rows: int,
    n: int,
    k: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    lora_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Layer:
    """Numbers that are added up without rounding, see :func:`linears.exact`."""
    lora_dtype = lora_dtype or dtype
    return Layer(
        exact(*rows, k, dtype=dtype, device=device),
        weights(n, k, dtype=dtype, device=device),
        exact(n, dtype=dtype, device=device),
        weights(rank, k, dtype=lora_dtype, device=device),
        weights(n, rank, dtype=lora_dtype, device=device),
    )


def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str = "none",
    dropped: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """As the peft package computes it: four roundings, or two of them in float32."""
    t = F.linear(dropped(x).to(lora_a.dtype), lora_a)
    branch = F.linear(t.to(lora_b.dtype), lora_b) * scale
    return ACTIVATIONS[activation]((F.linear(x, weight, bias) + branch).to(x.dtype))


def drop(x: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    if mask is None:
        return x
    return torch.where(mask.reshape(x.shape), x, 0.0) * keep_factor(dropout_p)


def mask_of(seed: Tensor, x: Tensor, dropout_p: float) -> Tensor:
    rows = x.numel() // max(x.shape[-1], 1)
    return keep_mask(seed.cpu(), (rows, x.shape[-1]), dropout_p).to(x.device)


def drawn_seed(device: str) -> Tensor:
    """The seed that a call draws after ``torch.manual_seed(0)``."""
    torch.manual_seed(0)
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def act_with_saved_z(z: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """``act(z)``, whose gradient is that at the rounded z, and rounded."""
    if activation == "none":
        return z
    z = RoundedGradient.apply(z, dtype)
    at = slope(z.detach().to(dtype).to(z.dtype), activation)
    return ACTIVATIONS[activation](z).detach() + at * (z - z.detach())


def check_lora(
    layer: Layer,
    scale: float = 0.5,
    activation: str = "none",
    *,
    dropout_p: float = 0.0,
    dy: Tensor | None = None,
    wrt: Sequence[str] | None = None,
) -> Tensor:
    """`check_function` of lora_linear. t and its gradient are rounded in the middle."""
    x, dtype = layer.x, layer.x.dtype
    mask = None
    if dropout_p > 0:
        mask = mask_of(drawn_seed(x.device.type), x, dropout_p)
    if dy is None:
        dy = torch.randn(*x.shape[:-1], layer.weight.shape[0], device=x.device).to(dtype)

    def dropped(x: Tensor) -> Tensor:
        return drop(x, mask, dropout_p)

    def fused(*tensors: Any) -> Tensor:
        x, weight, bias, lora_a, lora_b = tensors
        torch.manual_seed(0)
        return fusedcuda.lora_linear(
            x, weight, lora_a, lora_b, scale, bias, activation, dropout_p=dropout_p, training=True
        )

    def reference(x: Tensor, weight: Tensor, bias: Any, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        u = RoundedGradient.apply(dropped(x) @ rounded(lora_a, dtype).mT, dtype)
        t = rounded(u * scale, dtype)
        z = F.linear(x, weight, bias) + t @ rounded(lora_b, dtype).mT
        return act_with_saved_z(z, activation, dtype)

    y = check_function(
        "lora_linear",
        fused,
        lambda *tensors: eager(*tensors, scale, activation, dropped),
        layer._asdict(),
        reference=reference,
        wrt=wrt,
        grad_outputs=[dy],
        magnitudes=magnitudes_of(layer, scale, activation, dropped, dy),
    )
    assert y.is_contiguous()
    return y


def magnitudes_of(
    layer: Layer,
    scale: float,
    activation: str,
    dropped: Callable[[Tensor], Tensor],
    dy: Tensor,
) -> dict[str, Tensor]:
    """The sums of the absolute values that are added up, and what one rounding the other way does.

    Roundings in the middle: of t, of dz and of the gradient of t; and of z, or of the linear before
    the branch is added, where the path has several kernels.
    """
    dtype = layer.x.dtype
    rows, weight, bias, lora_a, lora_b = (
        None if t is None else t.detach().double().flatten(0, -2) if t is layer.x else t.double()
        for t in layer
    )
    kept = dropped(layer.x.double()).flatten(0, -2)
    dy = dy.double().flatten(0, -2)

    def one_rounding(value: Tensor) -> Tensor:
        return in_roundings(ulp(value, dtype), dtype)

    t = kept @ lora_a.mT * scale
    base = F.linear(rows, weight, bias)
    z = base + t @ lora_b.mT
    steep = slope(z, activation).abs().clamp(min=1)
    dz = dy * slope(z, activation)
    dt = dz @ lora_b * scale
    flips_dz = one_rounding(dz) + in_roundings(dy.abs() * bend(z, activation, dtype), dtype)
    if activation == "none":
        flips_dz = torch.zeros_like(dz)
    flips_t, flips_dt = one_rounding(t), one_rounding(dt)
    sums = rows.abs() @ weight.abs().mT + t.abs() @ lora_b.abs().mT
    sums = sums + largest(flips_t, -1) * largest(lora_b.abs(), -1).mT
    if bias is not None:
        sums = sums + bias.abs()
    dt_sums = dz.abs() @ lora_b.abs() * scale + largest(flips_dz, -1) * largest(lora_b.abs(), -2)
    two_roundings = one_rounding(base) + one_rounding(z)
    shape = (*layer.x.shape[:-1], weight.shape[0])
    return {
        "output 0": ((sums + two_roundings) * steep).reshape(shape),
        "x": (
            dz.abs() @ weight.abs()
            + dt_sums @ lora_a.abs()
            + largest(flips_dz, -1) * largest(weight.abs(), -2)
            + largest(flips_dt, -1) * largest(lora_a.abs(), -2)
            + one_rounding(dz @ weight)
        ).reshape(layer.x.shape),
        "weight": dz.abs().mT @ rows.abs() + largest(flips_dz, -2).mT * largest(rows.abs(), -2),
        "bias": dz.abs().sum(0) + largest(flips_dz, -2).squeeze(-2),
        "lora_a": dt_sums.mT @ kept.abs() + largest(flips_dt, -2).mT * largest(kept.abs(), -2),
        "lora_b": (
            dz.abs().mT @ t.abs()
            + largest(flips_dz, -2).mT * largest(t.abs(), -2)
            + largest(dz.abs(), -2).mT * largest(flips_t, -2)
        ),
    }
