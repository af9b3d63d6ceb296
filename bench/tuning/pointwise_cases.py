"""Calls and variants of the pointwise kernels, for `python -m bench.tuning.variants pointwise`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.tuning.inputs import new

# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {
    "as committed": {},
    "sum tile 64": {"kSumTileX = 32": "kSumTileX = 64"},
    "sum blocks 8 and 8": {"? 5 : 4;": "? 8 : 8;"},
    "sum partials: one load": {"constexpr int kUnroll = 4;": "constexpr int kUnroll = 1;"},
    "no dependent launch": {"attributes.ptxVersion >= 90": "attributes.ptxVersion >= 900"},
}


def cases() -> dict[str, Callable[[], object]]:
    """Calls on random bf16 tensors far larger than the L2."""
    import fusedcuda

    raw = torch.ops.fusedcuda
    x, grad, bias = new(65536, 1024), new(65536, 1024), new(1024)
    y = fusedcuda.bias_act(x, bias)
    wide, wide_grad, row = new(16384, 4096), new(16384, 4096), new(4096)
    packed, packed_grad = new(8192, 28672), new(8192, 14336)
    shifted, aligned = new(2**26 + 1)[1:], new(2**26)
    small = [new(1024, 1024, dtype=torch.float32) for _ in range(3)]
    return {
        "bias relu": lambda: fusedcuda.bias_act(x, bias),
        "bias gelu": lambda: fusedcuda.bias_act(x, bias, "gelu"),
        "scale bias": lambda: fusedcuda.act_scale_bias(wide, row, row),
        "packed": lambda: fusedcuda.act_mul_packed(packed),
        "bias relu bwd": lambda: raw.add_relu_backward(grad, y, y, bias, 0b11),
        "bias gelu_tanh bwd": lambda: raw.bias_act_backward(grad, x, bias, 6, 0b11),
        "scale bias bwd": lambda: raw.act_scale_bias_backward(wide_grad, wide, row, row, 1, 0b111),
        "packed bwd": lambda: raw.act_mul_packed_backward(packed_grad, packed, 7),
        "shifted": lambda: fusedcuda.add_relu(shifted, aligned),
        "4 MB fp32": lambda: fusedcuda.add_mul_act(*small),
    }
