"""Low-rank adapters in plain torch, and the comparison with float64 that their tests share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from linears import RoundedGradient, bend, exact, in_roundings, largest, slope, weights
from reference import ACTIVATIONS, check_function, rounded, ulp
from torch import Tensor

import fusedcuda
from fusedcuda.ops import _lora_cuda
from fusedcuda.ops._activations import ACTIVATIONS as CODES
from fusedcuda.ops._lora_dropout import keep_factor, keep_mask
from fusedcuda.ops._lora_reference import NONE, pitch_of, saves_z
from fusedcuda.ops._rows import as_matrix

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
    run_on: str | None = None,
    path: str | None = None,
) -> Tensor:
    """`check_function` of lora_linear. t and its gradient are rounded in the middle.

    ``run_on``: the device that computes lora_linear, if not that of ``layer``, where all that it is
    compared with is computed. ``path``: how the branch comes to the linear, see
    `_lora_cuda.PATHS`, if not as the device does it.
    """
    x, dtype = layer.x, layer.x.dtype
    device = run_on or str(x.device)
    mask = None
    if dropout_p > 0:
        mask = mask_of(drawn_seed(device), x, dropout_p)

    def dropped(x: Tensor) -> Tensor:
        return drop(x, mask, dropout_p)

    path = path or path_of(layer, activation, device)
    # One launch of everything rounds as one product does.
    one_sum = path in _lora_cuda.IN_ONE_PRODUCT
    sums = Sums(layer, scale, activation, mask, dropout_p, "extended" if one_sum else path)
    if dy is None:
        dy = torch.randn(*x.shape[:-1], layer.weight.shape[0], device=x.device).to(dtype)
        dy = sums.settled(dy)

    def fused(*tensors: Any) -> Tensor:
        there = [None if t is None else t.to(device) for t in tensors]
        x, weight, bias, lora_a, lora_b = there
        torch.manual_seed(0)
        y = fusedcuda.lora_linear(
            x, weight, lora_a, lora_b, scale, bias, activation, dropout_p=dropout_p, training=True
        )
        assert y.is_contiguous()
        return y.to(layer.x.device)

    def reference(x: Tensor, weight: Tensor, bias: Any, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        u = RoundedGradient.apply(dropped(x) @ rounded(lora_a, dtype).mT, dtype)
        t = rounded(u * scale, dtype)
        z = F.linear(x, weight, bias) + t @ rounded(lora_b, dtype).mT
        return act_with_saved_z(z, activation, dtype)

    return check_function(
        "lora_linear",
        fused,
        lambda *tensors: eager(*tensors, scale, activation, dropped),
        layer._asdict(),
        reference=reference,
        wrt=wrt,
        grad_outputs=[dy],
        magnitudes={"output 0": sums.output(), **sums.gradients(dy)},
    )


def path_of(layer: Layer, activation: str, device: str) -> str:
    """How lora_linear adds the branch: on the CPU in one sum, on CUDA by the shape."""
    if torch.device(device).type == "cpu":
        return "extended"
    path = _lora_cuda.choose_path()
    if path not in _lora_cuda.IN_ONE_PRODUCT:
        return path
    x, weight, bias, _, lora_b = (None if t is None else t.detach().to(device) for t in layer)
    t = x.new_zeros(as_matrix(x).shape[0], pitch_of(lora_b.shape[1]))
    in_product = NONE if saves_z(CODES[activation]) else CODES[activation]
    factor = _lora_cuda.padded(lora_b, t, dim=1)
    return (
        "extended" if _ops.linear_act_extended(x, weight, bias, t, factor, in_product) else "apart"
    )


class Sums:
    """The sums of the absolute values that are added up, and what roundings in the middle do.

    Those that the reference makes as well, of t, of dz and of the gradient of t, are rounded the
    other way once in a while: one of a sum (``flips``). One that only the path makes, of the linear
    (apart) or of the branch (residual) before both are added, moves z, the slope of the activation
    there and so every dz (``moves``), and the sign of a relu where z is nearer to 0 than that.
    """

    def __init__(
        self,
        layer: Layer,
        scale: float,
        activation: str,
        mask: Tensor | None,
        dropout_p: float,
        path: str,
    ) -> None:
        self.layer, self.scale, self.activation = layer, scale, activation
        self.dtype = layer.x.dtype
        self.dropped = mask is not None
        self.keep = keep_factor(dropout_p) if self.dropped else 1.0
        self.rows = as_matrix(layer.x.detach().double())
        self.kept = as_matrix(drop(layer.x.detach().double(), mask, dropout_p))
        self.weight, self.lora_a, self.lora_b = (
            t.detach().double() for t in (layer.weight, layer.lora_a, layer.lora_b)
        )
        self.bias = None if layer.bias is None else layer.bias.detach().double()
        self.t = self.kept @ self.lora_a.mT * scale
        base = F.linear(self.rows, self.weight, self.bias)
        branch = rounded(self.t, self.dtype) @ rounded(self.lora_b, self.dtype).mT
        self.z = base + branch
        first = {"apart": base, "residual": branch}.get(path)
        self.moved = torch.zeros_like(base)
        if first is not None:
            self.moved = (rounded(first, self.dtype) - first).abs()
        # The rounded z is at most this far from z, and so is that of the reference.
        self.reach = self.moved + self._half_an_ulp(self.z.abs() + self.moved)
        within = torch.where(self.moved > 0, self.reach, 0.0)
        sides = [slope(self.z + side * within, activation) for side in (-1, -0.5, 0, 0.5, 1)]
        slopes = torch.stack(sides)
        self.slope = slopes[2]
        self.steep = slopes.abs().amax(0).clamp(min=1)
        self.slope_moves = slopes.amax(0) - slopes.amin(0)

    def settled(self, dy: Tensor) -> Tensor:
        """``dy``, but zero where neither ours nor eager's rounding is better, only another one.

        So where a relu's z is nearer to 0 than the path moves it, and where dz is so near the
        middle of two 16-bit numbers that the last bit of float32 decides between them. Of few
        elements, one that is rounded the other way is most of the error, ours or eager's.
        """
        if self.activation == "none" or self.dtype.itemsize > 2:
            return dy
        if self.activation == "relu":
            undecided = self.slope_moves > 0
        else:
            at = slope(self.z.to(self.dtype).double(), self.activation)
            dz = as_matrix(dy.double()) * at
            step = ulp(dz, self.dtype)
            from_middle = ((dz / step).frac().abs() - 0.5).abs() * step
            undecided = from_middle <= 16 * torch.finfo(torch.float32).eps * dz.abs()
        return dy.masked_fill(undecided.reshape(dy.shape), 0.0)

    def output(self) -> Tensor:
        sums = self.rows.abs() @ self.weight.abs().mT + self.t.abs() @ self.lora_b.abs().mT
        sums = sums + largest(self._flips(self.t), -1) * largest(self.lora_b.abs(), -1).mT
        if self.bias is not None:
            sums = sums + self.bias.abs()
        sums = (sums + self._excused(self.reach)) * self.steep
        return sums.reshape(*self.layer.x.shape[:-1], self.weight.shape[0])

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        dy, kept, t = as_matrix(dy.double()), self.kept.abs(), self.t.abs()
        rows, weight, lora_a, lora_b = (
            operand.abs() for operand in (self.rows, self.weight, self.lora_a, self.lora_b)
        )
        scale = abs(self.scale)
        dz = dy * self.slope
        dt = dz @ self.lora_b * self.scale
        flips_dz, flips_dt = self._flips(dz), self._flips(dt)
        flips_dz += self._excused(dy.abs() * bend(self.z, self.activation, self.dtype))
        if self.activation == "none":
            flips_dz = torch.zeros_like(dz)

        # What moves: dz by another slope, after which it is rounded, and so on to dt.
        moved_dz = dy.abs() * self.slope_moves
        moves_dz = moved_dz + ulp(dz.abs() + moved_dz, self.dtype) * (moved_dz > 0)
        moved_dt = spread(moves_dz, lora_b.mT) * scale
        rounds_dt = ulp(dt.abs() + moved_dt, self.dtype) * (moved_dt > 0)
        moves_dt = moved_dt + rounds_dt
        through_branch = (self.lora_b @ self.lora_a).mT.abs() * scale * self.keep
        moves_dx = spread(moves_dz, weight.mT) + spread(moves_dz, through_branch)
        moves_dx = moves_dx + spread(rounds_dt, lora_a.mT) * self.keep

        # dx may be two products: that of the linear is rounded, and where some of the other one is
        # dropped, this one too, before and after it is multiplied by the keep factor.
        linear, branch = dz @ self.weight, dt @ self.lora_a
        rounds_dx = self._half_an_ulp(linear)
        if self.dropped:
            rounds_dx = rounds_dx + self._half_an_ulp(branch) * self.keep
            rounds_dx = rounds_dx + self._half_an_ulp(branch * self.keep)

        dt_sums = (dz.abs() @ lora_b + largest(flips_dz, -1) * largest(lora_b, -2)) * scale
        return {
            "x": (
                dz.abs() @ weight
                + largest(flips_dz, -1) * largest(weight, -2)
                + (dt_sums @ lora_a + largest(flips_dt, -1) * largest(lora_a, -2)) * self.keep
                + self._excused(moves_dx + rounds_dx)
            ).reshape(self.layer.x.shape),
            "weight": (
                dz.abs().mT @ rows
                + largest(flips_dz, -2).mT * largest(rows, -2)
                + self._excused(spread(moves_dz.mT, rows.mT))
            ),
            "bias": (
                dz.abs().sum(0)
                + largest(flips_dz, -2).squeeze(-2)
                + self._excused(spread(moves_dz.mT, torch.ones_like(dz[:, :1]).mT).squeeze(-1))
            ),
            "lora_a": (
                dt_sums.mT @ kept
                + largest(flips_dt, -2).mT * largest(kept, -2)
                + self._excused(spread(moves_dt.mT, kept.mT))
            ),
            "lora_b": (
                dz.abs().mT @ t
                + largest(flips_dz, -2).mT * largest(t, -2)
                + largest(dz.abs(), -2).mT * largest(self._flips(self.t), -2)
                + self._excused(spread(moves_dz.mT, t.mT))
            ),
        }

    def _half_an_ulp(self, value: Tensor) -> Tensor:
        """The error of rounding what is computed as ``value``, also just below a power of two."""
        return ulp(value.abs() * (1 + torch.finfo(self.dtype).eps), self.dtype) / 2

    def _excused(self, error: Tensor) -> Tensor:
        return in_roundings(error, self.dtype)

    def _flips(self, value: Tensor) -> Tensor:
        return self._excused(ulp(value, self.dtype))


def spread(errors: Tensor, factors: Tensor) -> Tensor:
    """How far ``errors`` (M, N), the largest that each may be, move their sums with (K, N) factors.

    All of them in one direction; or, as they are independent and as often up as down, six times the
    root of the sum of their squares, which one sum in 30 million exceeds (Hoeffding's inequality:
    ``2 * exp(-6**2 / 2)``).
    """
    return torch.minimum(errors @ factors.mT, 6 * (errors.square() @ factors.square().mT).sqrt())
