"""Modules with low-rank adapters; ``fusedcuda.nn`` has their names."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .ops._activations import activation_code
from .ops._lora_reference import MAX_RANK, product
from .ops.linear_act import linear_act
from .ops.lora import LoRAWeights, lora_linear, lora_mlp

_ADAPTER = "default"


class LoRALinear(nn.Module):
    """``act(x @ weight.T + bias + scale * dropout(x) @ A.T @ B.T)``, by :func:`lora_linear`.

    ``base_layer`` is a ``torch.nn.Linear`` whose parameters require no gradient; ``lora_A`` and
    ``lora_B`` hold the factors, ``(rank, in_features)`` and ``(out_features, rank)``, under the
    name of the one adapter: the state dict is that of a layer of the ``peft`` package,
    ``base_layer.weight``, ``lora_A.default.weight``, ``lora_B.default.weight``. These modules hold
    the parameters; they are not called, and so hooks of theirs are not either.

    ``scale`` is ``alpha / rank`` or, with ``use_rslora``, ``alpha / sqrt(rank)``; ``alpha=None``
    stands for the rank. A starts as that of ``torch.nn.Linear``, B as zero. The factors are float32
    over a base of 16 bits unless ``lora_dtype`` says otherwise. ``dropout`` acts on the branch's
    input while training.

    ``merge()`` puts ``scale * B @ A`` into the weight, for inference, and keeps the weight that was
    there, for ``unmerge()``, which restores every bit; ``merge(keep_base=False)`` saves that
    memory, and ``unmerge()`` subtracts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        alpha: float | None = None,
        bias: bool = True,
        activation: str = "none",
        dropout: float = 0.0,
        use_rslora: bool = False,
        lora_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        base = nn.Linear(in_features, out_features, bias, device, dtype)
        self._adapt(base, rank, alpha, activation, dropout, use_rslora, lora_dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        rank: int,
        alpha: float | None = None,
        activation: str = "none",
        dropout: float = 0.0,
        use_rslora: bool = False,
        lora_dtype: torch.dtype | None = None,
    ) -> LoRALinear:
        """An adapter for ``linear``, which becomes the base layer itself, and is frozen."""
        weight = getattr(linear, "weight", None)
        if not isinstance(linear, nn.Linear) or not isinstance(weight, Tensor):
            raise TypeError(
                f"LoRALinear: linear must be a torch.nn.Linear; got {type(linear).__name__}"
            )
        expected = (linear.out_features, linear.in_features)
        if not weight.is_floating_point() or tuple(weight.shape) != expected:
            raise TypeError(
                f"LoRALinear: weight must be a floating tensor of shape {expected}, not packed or "
                f"quantised; got {weight.dtype} of shape {tuple(weight.shape)}"
            )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._adapt(linear, rank, alpha, activation, dropout, use_rslora, lora_dtype)
        module.train(linear.training)
        return module

    def _adapt(
        self,
        base: nn.Linear,
        rank: int,
        alpha: float | None,
        activation: str,
        dropout: float,
        use_rslora: bool,
        lora_dtype: torch.dtype | None,
    ) -> None:
        activation_code("LoRALinear", activation)
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"LoRALinear: rank must be 1 to {MAX_RANK}; got {rank}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"LoRALinear: dropout must be a probability, 0 to 1; got {dropout}")
        alpha = rank if alpha is None else alpha
        self.activation = activation
        self.rank = rank
        self.dropout = dropout
        self.scale = alpha / math.sqrt(rank) if use_rslora else alpha / rank
        self.base_layer = base.requires_grad_(False)
        weight = base.weight
        if lora_dtype is None:
            lora_dtype = torch.float32 if weight.dtype.itemsize == 2 else weight.dtype
        where: Any = {"bias": False, "device": weight.device, "dtype": lora_dtype}
        self.lora_A = nn.ModuleDict({_ADAPTER: nn.Linear(base.in_features, rank, **where)})
        self.lora_B = nn.ModuleDict({_ADAPTER: nn.Linear(rank, base.out_features, **where)})
        self._unmerged: Tensor | None = None
        self.merged = False
        self.reset_lora_parameters()

    def reset_lora_parameters(self) -> None:
        """The start values: a branch that adds nothing."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    @property
    def lora_a(self) -> Tensor:
        return _factor(self.lora_A)

    @property
    def lora_b(self) -> Tensor:
        return _factor(self.lora_B)

    @property
    def weights(self) -> LoRAWeights:
        """As :func:`fusedcuda.lora_mlp` takes them."""
        if self.merged:
            self._refuse_training()
            return LoRAWeights(self.weight, bias=self.bias)
        return LoRAWeights(
            self.weight, self.lora_a, self.lora_b, self.scale, self.bias, self.dropout
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            self._refuse_training()
            return linear_act(x, self.weight, self.bias, self.activation)
        return lora_linear(
            x,
            self.weight,
            self.lora_a,
            self.lora_b,
            self.scale,
            self.bias,
            self.activation,
            dropout_p=self.dropout,
            training=self.training,
        )

    def delta_weight(self) -> Tensor:
        """``scale * B @ A``, in float32 (float64 of a float64 layer)."""
        wide = torch.promote_types(self.lora_a.dtype, torch.float32)
        return product(self.lora_b.to(wide), self.lora_a.to(wide)) * self.scale

    @torch.no_grad()
    def merge(self, keep_base: bool = True) -> None:
        """Add the adapter to the weight, rounded once; nothing if that has been done."""
        if self.merged:
            return
        if keep_base:
            self._unmerged = self.weight.detach().clone()
        self._add_to_weight(self.delta_weight())
        self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take the adapter out of the weight again; nothing if it is not in there."""
        if not self.merged:
            return
        if self._unmerged is not None:
            self.weight.copy_(self._unmerged)
            self._unmerged = None
        else:
            self._add_to_weight(-self.delta_weight())
        self.merged = False

    def _add_to_weight(self, delta: Tensor) -> None:
        self.weight.copy_(self.weight.to(delta.dtype) + delta)

    def _refuse_training(self) -> None:
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "LoRALinear: the adapter is merged into the weight, so it would get no gradient; "
                "call unmerge() before training, or eval()"
            )

    def extra_repr(self) -> str:
        return (
            f"rank={self.rank}, scale={self.scale:g}, activation={self.activation!r}, "
            f"dropout={self.dropout:g}" + (", merged" if self.merged else "")
        )


def _factor(adapters: nn.ModuleDict) -> Tensor:
    weight = adapters[_ADAPTER].weight
    assert isinstance(weight, Tensor)
    return weight


class LoRAMLP(nn.Module):
    """``down_proj(act(up_proj(x)))``, or gated ``down_proj(act(gate_proj(x)) * up_proj(x))``.

    By :func:`fusedcuda.lora_mlp`. ``up_proj``, ``down_proj`` and ``gate_proj`` are
    :class:`LoRALinear` modules without an activation of their own, or any of them a
    ``torch.nn.Linear`` without an adapter; they hold the parameters and run as one: hooks of theirs
    are not called.

    The constructor makes all of them with one rank; :meth:`from_layers` takes existing layers.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        rank: int,
        alpha: float | None = None,
        out_features: int | None = None,
        gated: bool = False,
        bias: bool = True,
        activation: str = "gelu_tanh",
        dropout: float = 0.0,
        use_rslora: bool = False,
        lora_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if out_features is None:
            out_features = in_features
        options: Any = {
            "alpha": alpha,
            "bias": bias,
            "dropout": dropout,
            "use_rslora": use_rslora,
            "lora_dtype": lora_dtype,
            "device": device,
            "dtype": dtype,
        }
        up = LoRALinear(in_features, hidden_features, rank, **options)
        down = LoRALinear(hidden_features, out_features, rank, **options)
        gate = LoRALinear(in_features, hidden_features, rank, **options) if gated else None
        self._compose(up, down, gate, activation)

    @classmethod
    def from_layers(
        cls,
        up: nn.Module,
        down: nn.Module,
        gate: nn.Module | None = None,
        activation: str = "gelu_tanh",
    ) -> LoRAMLP:
        """Of :class:`LoRALinear` modules, each with its own rank, or linear layers without one."""
        for name, layer in {"up": up, "down": down, "gate": gate}.items():
            if isinstance(layer, LoRALinear) and layer.activation != "none":
                raise ValueError(
                    f"LoRAMLP: {name} must have no activation of its own; got {layer.activation!r}"
                )
            if layer is not None and not isinstance(layer, (LoRALinear, nn.Linear)):
                raise TypeError(
                    f"LoRAMLP: {name} must be a LoRALinear or a torch.nn.Linear; "
                    f"got {type(layer).__name__}"
                )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._compose(up, down, gate, activation)
        module.train(up.training)
        return module

    def _compose(
        self, up: nn.Module, down: nn.Module, gate: nn.Module | None, activation: str
    ) -> None:
        activation_code("LoRAMLP", activation)
        self.activation = activation
        self.gate_proj = gate
        self.up_proj = up
        self.down_proj = down

    def forward(self, x: Tensor) -> Tensor:
        gate = None if self.gate_proj is None else _weights_of(self.gate_proj)
        return lora_mlp(
            x,
            _weights_of(self.up_proj),
            _weights_of(self.down_proj),
            self.activation,
            gate=gate,
            training=self.training,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _weights_of(layer: nn.Module) -> LoRAWeights:
    if isinstance(layer, LoRALinear):
        return layer.weights
    assert isinstance(layer, nn.Linear)
    return LoRAWeights(layer.weight, bias=layer.bias)
