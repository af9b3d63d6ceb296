"""The gated MLP in plain torch, and the comparison with float64 that its tests share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from linears import RoundedGradient, exact, in_roundings, slope, weights
from loras import spread
from reference import ACTIVATIONS, check_function, poison, rounded, ulp
from torch import Tensor

import fusedcuda
from fusedcuda.ops import _gated_mlp_cuda as cuda
from fusedcuda.ops._activations import ACTIVATIONS as CODES
from fusedcuda.ops._linear_act_reference import NONE
from fusedcuda.ops._rows import as_matrix

_ops = torch.ops.fusedcuda
PACKED = ("x", "w_gate_up", "w_down")
SEPARATE = ("x", "w_gate", "w_up", "w_down")

either_weight = pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])


class Layer(NamedTuple):
    x: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor

    @property
    def w_gate_up(self) -> Tensor:
        return torch.cat([self.w_gate, self.w_up])

    def operands(self, packed: bool) -> dict[str, Tensor]:
        """By the names that they have for the function."""
        if packed:
            return {"x": self.x, "w_gate_up": self.w_gate_up, "w_down": self.w_down}
        return self._asdict()


def random_layer(
    *rows: int,
    k: int,
    f: int,
    n: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Layer:
    """Numbers with which gate and up are added up without rounding, see :func:`linears.exact`."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return Layer(
        exact(*rows, k, **options),
        weights(f, k, **options),
        weights(f, k, **options),
        weights(k if n is None else n, f, **options),
    )


def eager(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str = "silu"
) -> Tensor:
    """As the models of the transformers package compute it: five roundings."""
    h = ACTIVATIONS[activation](F.linear(x, w_gate)) * F.linear(x, w_up)
    return F.linear(h, w_down)


def fused(*operands: Tensor, activation: str = "silu", recompute: bool = False) -> Tensor:
    """gated_mlp of x, a packed weight or two, and w_down."""
    x, *inner, w_down = operands
    w_gate_up = inner[0] if len(inner) == 1 else (inner[0], inner[1])
    return fusedcuda.gated_mlp(x, w_gate_up, w_down, activation, recompute=recompute)


@contextmanager
def forced(path: str) -> Iterator[None]:
    """gated_mlp takes this path where it can."""
    before = _ops.gated_mlp_use(path)
    try:
        yield
    finally:
        assert _ops.gated_mlp_use(before) == path


def check_gated_mlp(
    layer: Layer,
    activation: str = "silu",
    *,
    packed: bool = False,
    recompute: bool = False,
    dy: Tensor | None = None,
    wrt: Sequence[str] | None = None,
    run_on: str | None = None,
    ways: tuple[str, bool] | None = None,
) -> Tensor:
    """`check_function` of gated_mlp, whose hidden layer and its gradients are rounded once.

    ``dy``: as :func:`linears.exact` makes it. ``wrt``: names of :meth:`Layer.operands`. ``run_on``:
    the device that computes gated_mlp, if not that of ``layer``. ``ways``: what
    :func:`ways_of` would find out.
    """
    dtype = layer.x.dtype
    device = run_on or str(layer.x.device)
    tensors = layer.operands(packed)
    needs_gradient = wrt is None or bool(wrt)
    path, one_dx = ways or ways_of(layer, activation, packed, needs_gradient, device)
    if dy is None:
        dy = exact(
            *layer.x.shape[:-1], layer.w_down.shape[0], dtype=dtype, device=str(layer.x.device)
        )

    def on_device(*operands: Tensor) -> Tensor:
        there = (t.to(device) for t in operands)
        y = fused(*there, activation=activation, recompute=recompute)
        assert y.is_contiguous()
        return y.to(layer.x.device)

    def by_eager(x: Tensor, *others: Tensor) -> Tensor:
        *inner, w_down = others
        gate_and_up = inner[0].chunk(2) if packed else inner
        return eager(x, *gate_and_up, w_down, activation)

    def reference(x: Tensor, *others: Tensor) -> Tensor:
        *inner, w_down = others
        gate, up = (F.linear(x, w) for w in (inner[0].chunk(2) if packed else inner))
        # Gradients are those at the rounded gate and up, and rounded.
        kept = [RoundedGradient.apply(rounded(z, dtype), dtype) for z in (gate, up)]
        again = ACTIVATIONS[activation](kept[0]) * kept[1]
        h = ACTIVATIONS[activation](gate) * up
        h = again + (h - again).detach()
        return F.linear(RoundedGradient.apply(rounded(h, dtype), dtype), w_down)

    sums = _Sums(layer, activation, path, recompute, one_dx)
    return check_function(
        "gated_mlp",
        on_device,
        by_eager,
        tensors,
        reference=reference,
        wrt=wrt,
        grad_outputs=[dy],
        magnitudes={"output 0": sums.output(), **sums.gradients(dy)},
    )


def ways_of(
    layer: Layer, activation: str, packed: bool, saves: bool, device: str
) -> tuple[str, bool]:
    """The path of the hidden layer, and whether the gradient of x is one product."""
    if torch.device(device).type == "cpu":
        return "fused", True
    x, w_gate, w_up, w_down = (t.detach().to(device) for t in layer)
    rows, code = cuda.rows_of(x), CODES[activation]
    if packed:
        w_gate, w_up = torch.cat([w_gate, w_up]).chunk(2)
    taken = None
    for path in cuda.candidates(rows, w_gate.shape[0], packed, saves):
        found = {
            "decode": lambda: _ops.gated_mlp_decode(rows, w_gate, w_up, w_down, code),
            "fused": lambda: _ops.gated_product(rows, w_gate, w_up, code, saves),
        }.get(path, lambda: True)()
        if found:
            taken = path
            break
    assert taken is not None
    if packed:
        return taken, True
    dgate, dup = rows.new_zeros(rows.shape[0], 2 * w_gate.shape[0]).chunk(2, dim=-1)
    return taken, bool(_ops.linear_act_extended(dgate, w_gate.T, None, dup, w_up.T, NONE))


class _Sums:
    """The sums of the absolute values that are added up, and what roundings in the middle do.

    h and the gradients of gate and up are rounded as the reference rounds them, but from float32:
    once in a while the other way (``flips``). Where gate and up are products of their own, or h is
    made again of what was saved of them, h is that of the rounded ones (``moves``).
    """

    def __init__(
        self, layer: Layer, activation: str, path: str, recompute: bool, one_dx: bool
    ) -> None:
        self.layer, self.activation, self.dtype = layer, activation, layer.x.dtype
        self.rows = as_matrix(layer.x.detach().double())
        self.w_gate, self.w_up, self.w_down = (t.detach().double() for t in layer[1:])
        gate, up = self.rows @ self.w_gate.mT, self.rows @ self.w_up.mT
        act = ACTIVATIONS[activation]
        self.gate, self.up = (z.to(self.dtype).double() for z in (gate, up))
        self.h = act(gate) * up
        of_rounded = act(self.gate) * self.up
        flips = ulp(torch.maximum(self.h.abs(), of_rounded.abs()), self.dtype)
        self.moves_h = (of_rounded - self.h).abs() + flips
        self.moves_kept_h = self.moves_h
        if path in ("decode", "fused"):
            self.moves_h = flips
        if not recompute:
            self.moves_kept_h = self.moves_h
        self.one_dx = one_dx

    def output(self) -> Tensor:
        w_down = self.w_down.abs()
        sums = self.h.abs() @ w_down.mT + self._excused(spread(self.moves_h, w_down))
        return sums.reshape(*self.layer.x.shape[:-1], self.w_down.shape[0])

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        dy = as_matrix(dy.double())
        dh = (dy @ self.w_down).to(self.dtype).double()
        dgate = dh * slope(self.gate, self.activation) * self.up
        dup = dh * ACTIVATIONS[self.activation](self.gate)
        rows, w_gate, w_up = self.rows.abs(), self.w_gate.abs(), self.w_up.abs()
        flips_dgate, flips_dup = (ulp(d, self.dtype) for d in (dgate, dup))
        moves_dx = spread(flips_dgate, w_gate.mT) + spread(flips_dup, w_up.mT)
        if not self.one_dx:
            first = dgate @ self.w_gate
            moves_dx = moves_dx + ulp(first, self.dtype)
        dx = dgate.abs() @ w_gate + dup.abs() @ w_up + self._excused(moves_dx)

        def of_weight(d: Tensor, flips: Tensor) -> Tensor:
            return d.abs().mT @ rows + self._excused(spread(flips.mT, rows.mT))

        dw_gate, dw_up = of_weight(dgate, flips_dgate), of_weight(dup, flips_dup)
        moves_down = spread(dy.abs().mT, self.moves_kept_h.mT)
        return {
            "x": dx.reshape(self.layer.x.shape),
            "w_gate": dw_gate,
            "w_up": dw_up,
            "w_gate_up": torch.cat([dw_gate, dw_up]),
            "w_down": dy.abs().mT @ self.h.abs() + self._excused(moves_down),
        }

    def _excused(self, error: Tensor) -> Tensor:
        return in_roundings(error, self.dtype)


# ---- Few rows: raw operators on CUDA -------------------------------------------------------------

Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def inference_operands(
    m: int, k: int, f: int, n: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Operands:
    """x, the two halves of one weight, w_down. What gate and up add up to is exact in float32."""
    w = weights(2 * f, k, dtype=dtype, device="cuda")
    w_down = weights(k if n is None else n, f, dtype=dtype, device="cuda")
    return exact(m, k, dtype=dtype, device="cuda"), w[:f], w[f:], w_down


def inference(op: str, *given: Tensor, activation: int) -> Tensor:
    found = getattr(_ops, op)(*given, activation)
    assert len(found) == 1, "there is no kernel"
    return found[0]


def check_inference(op: str, *given: Tensor, activation: str = "silu") -> None:
    """`check_function` of a raw operator. h is rounded in the middle."""
    x, w_gate, w_up, w_down = given
    poison("cuda", 2 * x.shape[0] * w_down.shape[1], 2 * x.shape[0] * w_down.shape[0])
    y = inference(op, *given, activation=CODES[activation])
    assert y.is_contiguous()
    act = ACTIVATIONS[activation]

    def eager(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return F.linear(act(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)

    def hidden(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        return rounded(act(F.linear(x, w_gate)) * F.linear(x, w_up), y.dtype)

    def reference(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return F.linear(hidden(x, w_gate, w_up), w_down)

    # h is rounded from float32, once in a while the other way than from float64.
    h = hidden(*(t.double() for t in (x, w_gate, w_up))).abs()
    absolute = w_down.double().abs()
    flips = spread(ulp(h, y.dtype), absolute)
    magnitude = h @ absolute.mT + in_roundings(flips, y.dtype)
    named = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    check_function(
        op,
        lambda *_: y,
        eager,
        named,
        reference=reference,
        wrt=(),
        magnitudes={"output 0": magnitude},
    )
