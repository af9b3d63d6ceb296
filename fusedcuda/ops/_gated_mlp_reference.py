"""References of the gated_mlp family: the CPU kernels, shape functions, checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _pointwise_reference as pointwise
from ._activations import apply_activation
from ._linear_act_reference import check_operand, product
from ._rows import as_matrix, check_rows, check_shape

# Bits of the mask of gradients: of x, w_gate (of both weights where they are packed), w_up, w_down.
DX, DGATE, DUP, DDOWN = (1 << bit for bit in range(4))

# --------------------------------------------------------------------------------------------------
# The layer
# --------------------------------------------------------------------------------------------------


def gated_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, activation: int
) -> Tensor:
    return gated_mlp_forward(x, w_gate, w_up, w_down, activation)[0]


def gated_mlp_forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, activation: int
) -> list[Tensor]:
    y, gate_up, h = outputs = gated_mlp_forward_fake(x, w_gate, w_up, w_down, activation)
    hidden = gated_product(as_matrix(x), *halves(w_gate, w_up), activation, saves=True)
    h.copy_(hidden[0].view(h.shape))
    gate_up.copy_(hidden[1].view(gate_up.shape))
    y.copy_(product(as_matrix(h), w_down.mT).view(y.shape))
    return outputs


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
    outputs = gated_mlp_backward_fake(
        dy, x, w_gate, w_up, w_down, gate_up, h, packed, activation, mask
    )
    remaining = iter(outputs)
    dy = as_matrix(dy)
    if mask & (DX | DGATE | DUP):
        assert w_down is not None
        assert gate_up is not None
        dh = product(dy, w_down).to(dy.dtype)
        dgate_up = pointwise.act_mul_packed_backward(dh, as_matrix(gate_up), activation)
    if mask & DX:
        assert w_gate is not None
        weight = w_gate if w_up is None else torch.cat([w_gate, w_up])
        dx = next(remaining)
        dx.copy_(product(dgate_up, weight).view(dx.shape))
    if mask & (DGATE | DUP):
        assert x is not None
        parts = (dgate_up, None) if packed else dgate_up.chunk(2, dim=-1)
        for bit, part in zip((DGATE, DUP), parts, strict=True):
            if mask & bit:
                assert part is not None
                next(remaining).copy_(product(part.mT, as_matrix(x)))
    if mask & DDOWN:
        if h is None:
            assert gate_up is not None
            h = pointwise.act_mul_packed(gate_up, activation)
        next(remaining).copy_(product(dy.mT, as_matrix(h)))
    return outputs


# --------------------------------------------------------------------------------------------------
# Its kernels
# --------------------------------------------------------------------------------------------------


def gated_product(
    x: Tensor, w_gate: Tensor, w_up: Tensor, activation: int, saves: bool
) -> list[Tensor]:
    outputs = gated_product_fake(x, w_gate, w_up, activation, saves)
    gate, up = product(x, w_gate.mT), product(x, w_up.mT)
    outputs[0].copy_(apply_activation(gate, activation) * up)
    if saves:
        outputs[1].copy_(torch.cat([gate, up], dim=-1))
    return outputs


def gated_mlp_decode(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: int
) -> list[Tensor]:
    (y,) = outputs = gated_mlp_decode_fake(x, w_gate, w_up, w_down, activation)
    (h,) = gated_product(x, w_gate, w_up, activation, saves=False)
    y.copy_(product(h, w_down.mT))
    return outputs


def halves(w_gate: Tensor, w_up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights of gate and up, of which a packed one has the rows."""
    if w_up is not None:
        return w_gate, w_up
    gate, up = w_gate.chunk(2)
    return gate, up


# --------------------------------------------------------------------------------------------------
# Shape functions
# --------------------------------------------------------------------------------------------------


def gated_mlp_fake(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, activation: int
) -> Tensor:
    check_gated_mlp("gated_mlp", x, w_gate, w_up, w_down)
    return x.new_empty(*x.shape[:-1], w_down.shape[0])


def gated_mlp_forward_fake(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, activation: int
) -> list[Tensor]:
    y = gated_mlp_fake(x, w_gate, w_up, w_down, activation)
    features = w_down.shape[1]
    return [y, *(x.new_empty(*x.shape[:-1], size) for size in (2 * features, features))]


def gated_mlp_backward_fake(
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
    op = "gated_mlp_backward"
    given: dict[str, Tensor | None] = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    given |= {"gate_up": gate_up, "h": h}
    for name, tensor in given.items():
        if tensor is not None:
            check_operand(op, name, tensor, dy)

    def shape_of(name: str, use: str) -> torch.Size:
        tensor = given[name]
        if tensor is None:
            raise ValueError(f"{op}: {name} must be given for the gradient of {use}; got None")
        return tensor.shape

    outputs = []
    if mask & (DX | DGATE | DUP):
        both = shape_of("gate_up", "gate and up")[-1]
        shape_of("w_down", "gate and up")
    if mask & DX:
        columns = shape_of("w_gate", "x")[1]
        outputs.append(dy.new_empty(*dy.shape[:-1], columns))
    for bit in (DGATE, DUP):
        if mask & bit:
            columns = shape_of("x", "w_gate and w_up")[-1]
            outputs.append(dy.new_empty(both if packed else both // 2, columns))
    if mask & DDOWN:
        features = shape_of("gate_up", "w_down")[-1] // 2 if h is None else h.shape[-1]
        outputs.append(dy.new_empty(dy.shape[-1], features))
    return outputs


def gated_product_fake(
    x: Tensor, w_gate: Tensor, w_up: Tensor, activation: int, saves: bool
) -> list[Tensor]:
    _check_gate_and_up("gated_product", x, w_gate, w_up)
    (rows, _), features = x.shape, w_gate.shape[0]
    widths = (features, 2 * features) if saves else (features,)
    return [x.new_empty(rows, width) for width in widths]


def gated_mlp_decode_fake(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: int
) -> list[Tensor]:
    _check_gate_and_up("gated_mlp_decode", x, w_gate, w_up)
    _check_down("gated_mlp_decode", x, w_down, w_gate.shape[0])
    return [x.new_empty(x.shape[0], w_down.shape[0])]


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def check_gated_mlp(op: str, x: Any, w_gate: Any, w_up: Any, w_down: Any) -> None:
    check_rows(op, "x", x)
    if w_up is not None:
        _check_gate_and_up(op, x, w_gate, w_up)
        features = w_gate.shape[0]
    else:
        check_operand(op, "w_gate_up", w_gate, x)
        if w_gate.dim() != 2 or w_gate.shape[0] % 2 != 0 or w_gate.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: w_gate_up must have shape (2 * F, {x.shape[-1]}), the rows of the gate and "
                f"those of up, to go with x of shape {tuple(x.shape)}; got {tuple(w_gate.shape)}"
            )
        features = w_gate.shape[0] // 2
    _check_down(op, x, w_down, features)


def _check_gate_and_up(op: str, x: Any, w_gate: Any, w_up: Any) -> None:
    check_operand(op, "w_gate", w_gate, x)
    check_operand(op, "w_up", w_up, x)
    if w_gate.dim() != 2 or w_gate.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: w_gate must have shape (F, {x.shape[-1]}) to go with x of shape "
            f"{tuple(x.shape)}; got {tuple(w_gate.shape)}"
        )
    check_shape(op, "w_up", w_up, w_gate.shape)


def _check_down(op: str, x: Any, w_down: Any, features: int) -> None:
    check_operand(op, "w_down", w_down, x)
    if w_down.dim() != 2 or w_down.shape[1] != features:
        raise ValueError(
            f"{op}: w_down must have shape (N, {features}), {features} being the rows of gate and "
            f"of up; got {tuple(w_down.shape)}"
        )
