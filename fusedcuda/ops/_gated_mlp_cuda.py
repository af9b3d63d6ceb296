"""The layers of the gated_mlp family on CUDA: which operators a call consists of.

``candidates`` is the rule: the paths that are tried, one after the other. A path whose kernel does
not exist for the operands is passed over; the last one takes everything.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from ._composition import PathChoice, weight_gradient
from ._gated_mlp_reference import DDOWN, DGATE, DUP, DX, check_gated_mlp, halves
from ._linear_act_reference import NONE
from ._rows import as_matrix

_ops = torch.ops.fusedcuda

# --------------------------------------------------------------------------------------------------
# Paths
# --------------------------------------------------------------------------------------------------

# How the hidden layer comes about:
#   decode: with the output, in one launch that reads each weight once; up to 16 rows
#   fused: gate and up in one product, which multiplies them before it writes
#   apart: a product each for gate and up, and act_mul
#   concatenated: one product for both, and act_mul_packed; of a packed weight
PATHS = ("auto", "decode", "fused", "apart", "concatenated")
_path = PathChoice("gated_mlp_use", PATHS)  # one that is forced is taken where it can be
use = _path.use

# Up to so many rows all of it is one launch: of a packed weight, and of separate ones, of which the
# other paths read one behind the other. Measured on an H200, 4096 x 14336 bf16: one row 85 us,
# eight 89, 16 rows 93.9 (apart 95.0, concatenated 92.2, torch.compile of a packed weight 91.1).
DECODE_ROWS, MOST_DECODE_ROWS = 8, 16
# With more, the kernel that multiplies gate and up before it writes, where it has tiles (128 x 64)
# for most multiprocessors. Measured on an H200, 14336 x 4096 bf16, microseconds of the kernel and
# of cuBLASLt's products with act_mul: 128 rows 65 and 73, 512 rows 163 and 169, 8192 rows 2407 and
# 2600; the whole layer of 64 rows 123 and 105: tiles that are half empty are slower than full ones.
FEW_ROWS = 64
FEWEST_TILES = 92


def candidates(x: Tensor, features: int, packed: bool, saves: bool) -> tuple[str, ...]:
    """The paths to try in turn, for a matrix ``x`` and ``features`` of the hidden layer.

    ``packed``: gate and up share a weight. ``saves``: they are kept for the backward.
    """
    tiles = ceil(x.shape[0] / 128) * ceil(features / 64)
    few = x.shape[0] <= FEW_ROWS or tiles < FEWEST_TILES
    possible = {
        "decode": has_kernels(x.dtype) and x.shape[0] <= MOST_DECODE_ROWS and not saves,
        "fused": has_kernels(x.dtype),
        "apart": True,
        "concatenated": packed,
    }
    if _path.forced is not None:
        wanted = [_path.forced]
    else:
        in_one_launch = x.shape[0] <= (DECODE_ROWS if packed else MOST_DECODE_ROWS)
        wanted = ["decode"] if in_one_launch else [] if few else ["fused"]
        # Gate and up apart are slow to write where the rows of up start off a 16-byte boundary.
        if few or features * x.element_size() % 16 != 0:
            wanted.append("concatenated")
    return *(path for path in wanted if possible[path]), "apart"


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether "decode" and "fused" are there: for 16-bit types, of the layouts they can read."""
    return dtype.itemsize == 2


# --------------------------------------------------------------------------------------------------
# Forward
# --------------------------------------------------------------------------------------------------


def gated_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, activation: int
) -> Tensor:
    check_gated_mlp("gated_mlp", x, w_gate, w_up, w_down)
    rows = rows_of(x)
    for path in candidates(rows, w_down.shape[1], w_up is None, saves=False):
        if path == "decode":
            operands = (rows, *halves(w_gate, w_up), w_down)
            found = _ops.gated_mlp_decode.default(*operands, activation)
            if found:
                return found[0].view(*x.shape[:-1], w_down.shape[0])
        elif hidden := _hidden(path, rows, w_gate, w_up, activation, saves=False):
            return _linear(hidden[0], w_down).view(*x.shape[:-1], w_down.shape[0])
    raise AssertionError("the last path takes everything")


def gated_mlp_forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, activation: int
) -> list[Tensor]:
    check_gated_mlp("gated_mlp", x, w_gate, w_up, w_down)
    rows = rows_of(x)
    for path in candidates(rows, w_down.shape[1], w_up is None, saves=True):
        if hidden := _hidden(path, rows, w_gate, w_up, activation, saves=True):
            h, gate_up = hidden
            outputs = (_linear(h, w_down), gate_up, h)
            return [t.view(*x.shape[:-1], t.shape[1]) for t in outputs]
    raise AssertionError("the last path takes everything")


def _hidden(
    path: str,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    activation: int,
    saves: bool,
) -> list[Tensor]:
    """``[h]`` or, with ``saves``, ``[h, gate_up]``; ``[]`` where the path has no kernel for it."""
    if path == "fused":
        return _ops.gated_product.default(x, *halves(w_gate, w_up), activation, saves)
    if path == "concatenated":
        gate_up = _linear(x, w_gate)
    elif saves:
        weights = halves(w_gate, w_up)
        gate_up = x.new_empty(x.shape[0], 2 * weights[0].shape[0])
        for weight, half in zip(weights, gate_up.chunk(2, dim=-1), strict=True):
            _ops.linear_act_product_.default(half, x, weight, None, False)
    else:
        gate, up = (_linear(x, weight) for weight in halves(w_gate, w_up))
        return [_ops.act_mul.default(gate, up, activation)]
    h = _ops.act_mul_packed.default(gate_up, activation)
    return [h, gate_up] if saves else [h]


# --------------------------------------------------------------------------------------------------
# Backward
# --------------------------------------------------------------------------------------------------


def gated_mlp_backward(
    dy: Tensor,
    x: Tensor | None,
    w_gate: Tensor | None,
    w_up: Tensor | None,
    w_down: Tensor | None,
    gate_up: Tensor | None,
    h: Tensor | None,
    packed: bool,
    activation: int,
    mask: int,
) -> list[Tensor]:
    leading, dy = dy.shape[:-1], rows_of(dy)
    gate_up, h = (None if t is None else as_matrix(t) for t in (gate_up, h))
    gradients = []
    if mask & (DX | DGATE | DUP):
        assert w_down is not None
        assert gate_up is not None
        makes_h = bool(mask & DDOWN) and h is None
        dgate_up, *made = _gradient_of_gate_up(dy, w_down, gate_up, activation, makes_h)
        h = made[0] if makes_h else h
    if mask & DX:
        assert w_gate is not None
        gradients.append(_product_dx(dgate_up, w_gate, w_up).view(*leading, w_gate.shape[1]))
    if mask & (DGATE | DUP):
        assert x is not None
        parts = (dgate_up,) if packed else dgate_up.chunk(2, dim=-1)
        wanted = (part for bit, part in zip((DGATE, DUP), parts, strict=False) if mask & bit)
        gradients += [weight_gradient(part, rows_of(x), dy.dtype) for part in wanted]
    if mask & DDOWN:
        if h is None:  # nothing else is asked for
            assert gate_up is not None
            h = _ops.act_mul_packed.default(gate_up, activation)
        gradients.append(weight_gradient(dy, h, dy.dtype))
    return gradients


def _gradient_of_gate_up(
    dy: Tensor, w_down: Tensor, gate_up: Tensor, activation: int, makes_h: bool
) -> list[Tensor]:
    """Side by side as they are; and with ``makes_h`` the hidden layer, by the way."""
    dh = _linear(dy, w_down.T)
    if makes_h:
        return _ops.act_mul_packed_recompute.default(dh, gate_up, activation)
    return [_ops.act_mul_packed_backward.default(dh, gate_up, activation)]


def _product_dx(dgate_up: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    """``dgate @ w_gate + dup @ w_up``

    One product where the weights are packed, or where a kernel adds up over both; else two, of
    which the first one is rounded before the second one is added to it.
    """
    if w_up is None:
        return _linear(dgate_up, w_gate.T)
    dgate, dup = dgate_up.chunk(2, dim=-1)
    if dx := _ops.linear_act_extended.default(dgate, w_gate.T, None, dup, w_up.T, NONE):
        return dx[0]
    return _linear(dup, w_up.T, residual=_linear(dgate, w_gate.T))


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    """As a matrix whose rows have their elements side by side: it is read more than once."""
    rows = as_matrix(x)
    has_rows = rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]
    return rows if has_rows else rows.contiguous()


def _linear(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """``x @ weight.T``, of any strides, and ``residual`` added before it is rounded."""
    return _ops.linear_act.default(x, weight, None, residual, NONE, False)
