"""References of the pointwise family: what each operator computes, and shape functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._activations import ACTIVATIONS, activation_gradient, apply_activation
from ._operands import (
    check_devices,
    check_dtype,
    check_like,
    check_shapes,
    empty_gradient,
    empty_output,
    store,
    store_gradients,
    widen,
)


def add_relu(a: Tensor, b: Tensor) -> Tensor:
    return bias_act(a, b, ACTIVATIONS["relu"])


def add_mul_act(a: Tensor, b: Tensor, c: Tensor, activation: int) -> Tensor:
    output = empty_output(a, b, c)
    a, b, c = widen(a, b, c)
    return store(apply_activation((a + b) * c, activation), output)


def act_scale_bias(x: Tensor, scale: Tensor, bias: Tensor, activation: int) -> Tensor:
    output = empty_output(x, scale, bias)
    x, scale, bias = widen(x, scale, bias)
    return store(apply_activation(x, activation) * scale + bias, output)


def bias_act(x: Tensor, bias: Tensor, activation: int) -> Tensor:
    output = empty_output(x, bias)
    x, bias = widen(x, bias)
    return store(apply_activation(x + bias, activation), output)


def act_mul(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    output = empty_output(gate, up)
    gate, up = widen(gate, up)
    return store(apply_activation(gate, activation) * up, output)


def act_mul_packed(gate_up: Tensor, activation: int) -> Tensor:
    output = act_mul_packed_fake(gate_up, activation)
    gate, up = widen(*gate_up.chunk(2, dim=-1))
    return store(apply_activation(gate, activation) * up, output)


# The gradient operators return one tensor for each operand whose bit is set in ``mask``, in the
# operands' order.


def add_relu_backward(grad: Tensor, y: Tensor, a: Tensor, b: Tensor, mask: int) -> list[Tensor]:
    # y stands for a + b: it is positive exactly where the sum, rounded, is. a and b only lend their
    # shapes.
    check_like("add_relu_backward", "grad", grad, (a, b))
    check_like("add_relu_backward", "y", y, (a, b))
    grad, y = widen(grad, y)
    dz = torch.where(y <= 0, 0.0, grad)
    return store_gradients((dz, dz), (a, b), mask)


def add_mul_act_backward(
    grad: Tensor, a: Tensor, b: Tensor, c: Tensor, activation: int, mask: int
) -> list[Tensor]:
    operands = (a, b, c)
    check_like("add_mul_act_backward", "grad", grad, operands)
    grad, a, b, c = widen(grad, a, b, c)
    dz = activation_gradient(grad, (a + b) * c, activation)
    return store_gradients((dz * c, dz * c, dz * (a + b)), operands, mask)


def act_scale_bias_backward(
    grad: Tensor, x: Tensor, scale: Tensor, bias: Tensor, activation: int, mask: int
) -> list[Tensor]:
    operands = (x, scale, bias)
    check_like("act_scale_bias_backward", "grad", grad, operands)
    grad, x, scale = widen(grad, x, scale)
    dx = activation_gradient(grad * scale, x, activation)
    return store_gradients((dx, grad * apply_activation(x, activation), grad), operands, mask)


def bias_act_backward(
    grad: Tensor, x: Tensor, bias: Tensor, activation: int, mask: int
) -> list[Tensor]:
    operands = (x, bias)
    check_like("bias_act_backward", "grad", grad, operands)
    grad, x, bias = widen(grad, x, bias)
    dz = activation_gradient(grad, x + bias, activation)
    return store_gradients((dz, dz), operands, mask)


def act_mul_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: int, mask: int
) -> list[Tensor]:
    operands = (gate, up)
    check_like("act_mul_backward", "grad", grad, operands)
    grad, gate, up = widen(grad, gate, up)
    dgate = activation_gradient(grad * up, gate, activation)
    return store_gradients((dgate, grad * apply_activation(gate, activation)), operands, mask)


def act_mul_packed_backward(grad: Tensor, gate_up: Tensor, activation: int) -> Tensor:
    packed = act_mul_packed_backward_fake(grad, gate_up, activation)
    grad, gate, up = widen(grad, *gate_up.chunk(2, dim=-1))
    dgate = activation_gradient(grad * up, gate, activation)
    return store(torch.cat([dgate, grad * apply_activation(gate, activation)], dim=-1), packed)


def act_mul_packed_recompute(grad: Tensor, gate_up: Tensor, activation: int) -> list[Tensor]:
    return [
        act_mul_packed_backward(grad, gate_up, activation),
        act_mul_packed(gate_up, activation),
    ]


# --------------------------------------------------------------------------------------------------
# Shape functions
# --------------------------------------------------------------------------------------------------


def output_fake(name: str, operands: tuple[str, ...]) -> Callable[..., Tensor]:
    def fake(*args: Any) -> Tensor:
        tensors: dict[str, Tensor] = dict(zip(operands, args, strict=False))
        check_devices(name, tensors)
        check_shapes(name, tensors)
        return empty_output(*tensors.values())

    return fake


def gradients_fake(num_operands: int) -> Callable[..., list[Tensor]]:
    def fake(grad: Tensor, *args: Any) -> list[Tensor]:
        mask = args[-1]
        operands = [t for t in args if isinstance(t, Tensor)][-num_operands:]
        return [empty_gradient(t, grad.device) for i, t in enumerate(operands) if mask >> i & 1]

    return fake


def check_packed(gate_up: Tensor) -> None:
    """``ValueError`` unless gate and up lie side by side in the last dimension."""
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2 != 0:
        raise ValueError(
            f"act_mul_packed: the last dimension of gate_up must be even, gate and up side by "
            f"side; got shape {tuple(gate_up.shape)}"
        )


def act_mul_packed_fake(gate_up: Tensor, activation: int) -> Tensor:
    check_dtype("act_mul_packed", "gate_up", gate_up)
    check_packed(gate_up)
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def act_mul_packed_backward_fake(grad: Tensor, gate_up: Tensor, activation: int) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def act_mul_packed_recompute_fake(grad: Tensor, gate_up: Tensor, activation: int) -> list[Tensor]:
    return [
        act_mul_packed_backward_fake(grad, gate_up, activation),
        act_mul_packed_fake(gate_up, activation),
    ]
