"""A short run through every kernel and access, for compute-sanitizer (`make sanitize`).

Under memcheck a launch takes a hundred times as long, so this is one small case of each kind
instead of the whole suite. Sizes are chosen to end inside vectors, warps, tiles and blocks.
"""

import pytest
import torch
from torch import Tensor

import fusedcuda

DTYPES = (torch.bfloat16, torch.float32, torch.float64)

# Shapes of an operand beside a full one of [37, 264]: each takes another way through the kernels.
OPERANDS = {
    "full": (37, 264),
    "row": (264,),
    "column": (37, 1),
    "scalar": (),
}


def gradients(function, *operands: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in operands]
    output = function(*leaves)
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device)
    return [output, *torch.autograd.grad((output * weights.view_as(output)).sum(), leaves)]


def check(function, *operands: Tensor) -> None:
    """The card against the CPU reference, on the same inputs."""
    expected = gradients(function, *(x.cpu() for x in operands))
    for actual, reference in zip(gradients(function, *operands), expected, strict=True):
        tolerance = {"rtol": 2e-2, "atol": 5e-2} if actual.dtype == torch.bfloat16 else {}
        if actual.dtype == torch.float32:
            tolerance = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(actual.cpu(), reference, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPERANDS)
def test_operands(kind, dtype):
    x = torch.randn(37, 264, device="cuda", dtype=dtype)
    other = torch.randn(OPERANDS[kind], device="cuda", dtype=dtype)
    check(fusedcuda.add_relu, x, other)
    check(lambda a, b: fusedcuda.bias_act(a, b, "gelu"), x, other)
    check(lambda a, b: fusedcuda.act_mul(a, b, "gelu_tanh"), x, other)
    check(lambda a, b, c: fusedcuda.add_mul_act(a, b, c, "tanh"), x, other, x)
    check(lambda a, b, c: fusedcuda.act_scale_bias(a, b, c, "silu"), x, other, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype):
    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    check(fusedcuda.add_relu, new(1001), new(1001))  # a rest behind the last vector
    check(fusedcuda.add_relu, new(1002)[1:], new(1001))  # off the 16-byte boundary
    check(fusedcuda.bias_act, new(19, 33), new(33))  # odd rows
    check(fusedcuda.bias_act, new(5, 7, 16), new(7, 1))  # a sum over outer and inner dimensions
    check(fusedcuda.bias_act, new(40, 24).t(), new(40))  # transposed
    check(fusedcuda.bias_act, new(3, 4000), new(3, 1))  # rows longer than a block
    check(fusedcuda.act_mul_packed, new(9, 2 * 48))
    check(fusedcuda.act_mul_packed, new(9, 2 * 13))
    check(fusedcuda.add_relu, new(1), new(1))
