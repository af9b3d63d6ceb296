"""The activations every family shares: codes, values and derivatives, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The order is that of enum class Activation in csrc/kernels/common/activation.h; a test compares
# the two.
ACTIVATIONS: dict[str, int] = {
    "none": 0,
    "relu": 1,
    "relu_squared": 2,
    "sigmoid": 3,
    "tanh": 4,
    "gelu": 5,
    "gelu_tanh": 6,
    "silu": 7,
}
_NAMES = tuple(ACTIVATIONS)

# gelu_tanh(z) = z * sigmoid(2 * _GELU_ALPHA * (z + _GELU_BETA * z^3)), Hendrycks & Gimpel,
# arXiv:1606.08415.
_GELU_ALPHA = math.sqrt(2.0 / math.pi)
_GELU_BETA = 0.044715


def activation_code(op: str, activation: str) -> int:
    """Code of ``activation``; ``ValueError`` naming ``op`` and the valid names if there is none."""
    code = ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if code is None:
        raise ValueError(f"{op}: activation must be one of {', '.join(_NAMES)}; got {activation!r}")
    return code


def apply_activation(z: Tensor, code: int) -> Tensor:
    """``act(z)`` in the dtype of ``z``."""
    match _NAMES[code]:
        case "none":
            return z
        case "relu":
            return torch.relu(z)
        case "relu_squared":
            return torch.relu(z).square()
        case "sigmoid":
            return torch.sigmoid(z)
        case "tanh":
            return torch.tanh(z)
        case "gelu":
            # torch's gelu(inf) is NaN on the CPU.
            return 0.5 * z * torch.erfc(-z * math.sqrt(0.5))
        case "gelu_tanh":
            return torch.nn.functional.gelu(z, approximate="tanh")
        case _:
            return torch.nn.functional.silu(z)


def activation_gradient(upstream: Tensor, z: Tensor, code: int) -> Tensor:
    """``upstream * act'(z)`` in the dtype of ``z``.

    As in torch, a ReLU selects instead of multiplying (an infinite gradient of a clipped element is
    0, not NaN), and a NaN passes it with derivative one.
    """
    match _NAMES[code]:
        case "none":
            return upstream
        case "relu":
            return torch.where(z <= 0, 0.0, upstream)
        case "relu_squared":
            return torch.where(z <= 0, 0.0, 2.0 * z * upstream)
        case "sigmoid":
            s = torch.sigmoid(z)
            return upstream * s * _complement(z, s)
        case "tanh":
            return upstream * (1.0 - torch.tanh(z).square())
        case "gelu":
            cdf = 0.5 * torch.erfc(-z * math.sqrt(0.5))
            return upstream * (cdf + z * torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi))
        case "gelu_tanh":
            u = 2.0 * _GELU_ALPHA * (z + _GELU_BETA * z**3)
            slope = 2.0 * _GELU_ALPHA * (1.0 + 3.0 * _GELU_BETA * z * z)
            s = torch.sigmoid(u)
            return upstream * (s + z * s * _complement(u, s) * slope)
        case _:
            s = torch.sigmoid(z)
            return upstream * (s + z * s * _complement(z, s))


def _complement(u: Tensor, s: Tensor) -> Tensor:
    """``1 - s`` of ``s = sigmoid(u)``: ``sigmoid(-u)`` where the difference would cancel.

    Where it does not, the errors of the two factors of ``s * (1 - s)`` cancel instead.
    """
    return torch.where(s < 2 / 3, 1.0 - s, torch.sigmoid(-u))
