"""What the tests for compute-sanitizer share: a run on the card against the CPU's."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Rows by the way they take through csrc/kernels/common/row.h.
ROWS = {
    "several rows a block": (37, 24),
    "a row in one vector a thread": (3, 1000),
    "a row in several vectors a thread": (137, 1032),  # more rows than the GPU has SMs
    "a row in the blocks of a cluster": (3, 32768),
    "not whole vectors": (137, 1001),
    "not whole vectors, cluster": (3, 32765),
    "one column": (5, 1),
    "nothing": (0, 24),
}
every_row = pytest.mark.parametrize("shape", ROWS.values(), ids=ROWS)


def new(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def gradients(
    function: Callable[..., Tensor | Sequence[Tensor]], *operands: Tensor
) -> list[Tensor]:
    """The outputs, and the gradients of all floating operands."""
    given = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
    outputs = function(*given)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weights = [
        torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        for y in outputs
    ]
    leaves = [x for x in given if x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


def check(function: Callable[..., Tensor | Sequence[Tensor]], *operands: Tensor) -> None:
    """The card against the CPU reference, on the same inputs."""
    expected = gradients(function, *(x.cpu() for x in operands))
    for actual, reference in zip(gradients(function, *operands), expected, strict=True):
        tolerance = {"rtol": 2e-2, "atol": 5e-2} if actual.dtype == torch.bfloat16 else {}
        if actual.dtype == torch.float32:
            tolerance = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(actual.cpu(), reference, equal_nan=True, **tolerance)


def on_both(operator: Callable[..., Tensor], *arguments: object) -> Tensor:
    """What it returns on CUDA; on the CPU it is the same but for roundings."""
    there = [a.cpu() if isinstance(a, Tensor) else a for a in arguments]
    result, expected = operator(*arguments), operator(*there)
    torch.testing.assert_close(
        result.cpu(), expected, rtol=0.016, atol=1e-2 * expected.abs().max().item()
    )
    return result
