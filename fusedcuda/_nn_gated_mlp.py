"""The gated MLP of Llama and its relatives as a module; ``fusedcuda.nn`` has its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .ops._activations import activation_code
from .ops.gated_mlp import gated_mlp

_LAYERS = ("gate_proj", "up_proj", "down_proj")

# By the name of their class, in torch or in the transformers package, whose tanh forms of GELU are
# all one function. (torch's GELU is two.)
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu_squared",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}


class GatedMLP(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))``, by :func:`fusedcuda.gated_mlp`.

    ``gate_proj``, ``up_proj`` and ``down_proj`` are ``torch.nn.Linear`` layers without a bias, so
    the state dict is that of ``LlamaMLP`` of the transformers package and of its relatives
    (Mistral, Qwen, Gemma): ``gate_proj.weight`` and ``up_proj.weight`` of shape ``(intermediate,
    hidden)``, ``down_proj.weight`` of shape ``(hidden, intermediate)``. They hold the parameters,
    which are read where they are, and are not called; so hooks of theirs are not either.

    ``recompute=True`` keeps less for the backward, see :func:`fusedcuda.gated_mlp`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        *,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("GatedMLP: bias must be False, gated_mlp has none; got True")
        where: Any = {"bias": False, "device": device, "dtype": dtype}
        gate, up = (nn.Linear(hidden_size, intermediate_size, **where) for _ in range(2))
        down = nn.Linear(intermediate_size, hidden_size, **where)
        self._compose(gate, up, down, activation, recompute)

    @classmethod
    def from_module(
        cls, module: nn.Module, activation: str | None = None, *, recompute: bool = False
    ) -> GatedMLP:
        """Of a module with linear layers ``gate_proj``, ``up_proj`` and ``down_proj``.

        The layers become those of the new module themselves: nothing is copied. The activation is
        what the class of ``module.act_fn`` says, unless it is given. ``TypeError``: a layer that is
        missing, no ``torch.nn.Linear``, or quantised. ``ValueError``: a layer with a bias, or an
        activation that is not given and not known.
        """
        gate, up, down = (_layer_of(module, name) for name in _LAYERS)
        activation = _activation_of(module) if activation is None else activation
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._compose(gate, up, down, activation, recompute)
        new.train(module.training)
        return new

    def _compose(
        self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str, recompute: bool
    ) -> None:
        activation_code("GatedMLP", activation)
        self.activation = activation
        self.recompute = recompute
        self.gate_proj = gate
        self.up_proj = up
        self.down_proj = down

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.gate_proj.weight, self.up_proj.weight)
        return gated_mlp(
            x, weights, self.down_proj.weight, self.activation, recompute=self.recompute
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}" + (", recompute=True" if self.recompute else "")


def _layer_of(module: nn.Module, name: str) -> nn.Linear:
    layer = getattr(module, name, None)
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or not isinstance(weight, Tensor):
        raise TypeError(f"GatedMLP: {name} must be a torch.nn.Linear; got {type(layer).__name__}")
    expected = (layer.out_features, layer.in_features)
    if not weight.is_floating_point() or tuple(weight.shape) != expected:
        raise TypeError(
            f"GatedMLP: {name}.weight must be a floating tensor of shape {expected}, not packed or "
            f"quantised; got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    if layer.bias is not None:
        raise ValueError(f"GatedMLP: {name} must have no bias, gated_mlp has none; got one")
    return layer


def _activation_of(module: nn.Module) -> str:
    function = getattr(module, "act_fn", None)
    if isinstance(function, nn.GELU):
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    name = type(function).__name__
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"GatedMLP: activation must be given, since act_fn of {type(module).__name__} is none "
            f"of {', '.join(_ACTIVATIONS)}; got {name}"
        )
    return _ACTIVATIONS[name]
