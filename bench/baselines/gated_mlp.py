"""Peers of the gated_mlp family. They take x, the weights of gate and up, and that of down."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

Tensor = torch.Tensor


def liger_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The forward of Liger's LigerSwiGLUMLP: its kernel between three products of torch."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    h = LigerSiLUMulFunction.apply(F.linear(x, w_gate), F.linear(x, w_up))
    return F.linear(h, w_down)


def quack_mlp(x: Tensor, w_interleaved: Tensor, w_down: Tensor) -> Tensor:
    """QuACK's layer, whose weight has the rows of gate and up in turn."""
    from quack.mlp import mlp_func

    return mlp_func(x, w_interleaved, w_down, "swiglu")
