"""Operands, layouts and expectations of the tests of steps."""

import torch
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS, apply_activation

FUSED = ("relu", "gelu_tanh")  # what cuBLASLt has an epilogue for
PLAIN = "cublasLtMatmul"  # without epilogue
ON_BIAS_ROWS = ["torch.copy_", PLAIN]  # the bias, and the product that is added to it
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def pitched(tensor: Tensor, pitch: int = 8) -> Tensor:
    """The same rows, further apart."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + pitch), 7.0, dtype=tensor.dtype)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def column_major(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def shifted(tensor: Tensor) -> Tensor:
    """The same elements, one element behind an aligned address."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def expected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """(y, z) in float64."""
    z = x.double() @ weight.double().mT
    if bias is not None:
        z = z + bias.double().unsqueeze(-2)
    if residual is not None:
        z = z + residual.double()
    return apply_activation(z, ACTIVATIONS[activation]), z


def check(actual: Tensor, reference: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    scale = max(1.0, float(reference.abs().max())) if reference.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), reference, rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def kernels(steps: list[dict]) -> list[str]:
    """Such as ["GELU_BIAS"] or ["BIAS", "act_rows_kernel"]."""
    return [step["epilogue"] or step["kernel"] for step in steps]


LAYOUTS = {
    "contiguous": lambda t: t,
    "pitched": pitched,
    "odd pitch": lambda t: pitched(t, 3),
    "column-major": column_major,
    "misaligned": shifted,
}


def expected_gradients(dz: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    dz = dz.double()
    return {
        "dx": dz @ weight.double(),
        "dweight": dz.mT @ x.double(),
        "dbias": dz.sum(-2),
    }
