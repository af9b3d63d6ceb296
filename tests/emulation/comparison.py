"""Emulated kernels against the CPU references, in float64.

`check_forward` and `check_backward` draw small integers, so that every intermediate result and sum
is exact in float32 and the outputs must equal the rounded references to the last bit: one element
read or written in a wrong place, or left out of a sum, fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pointwise_emulator import Emulator, Launch
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)
from fusedcuda.ops._activations import ACTIVATIONS

NUM_OPERANDS = {"bias_act": 2, "add_mul_act": 3, "act_scale_bias": 3, "act_mul": 2}

Operand = Tensor | float


def in_double(operand: Operand) -> Tensor:
    return torch.as_tensor(operand, dtype=torch.float64)


def reference(op: str, activation: str, *operands: Operand) -> Tensor:
    function = getattr(torch.ops.fusedcuda, op)
    return function(*map(in_double, operands), ACTIVATIONS[activation])


def reference_gradients(
    op: str, activation: str, grad: Tensor, operands: Sequence[Operand], wanted: Sequence[int]
) -> list[Tensor]:
    function = getattr(torch.ops.fusedcuda, f"{op}_backward")
    mask = sum(1 << k for k in wanted)
    return function(in_double(grad), *map(in_double, operands), ACTIVATIONS[activation], mask)


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


def assert_exact(name: str, actual: Tensor, expected: Tensor) -> None:
    expected = expected.to(actual.dtype)
    wrong = actual != expected  # NaN differs from everything
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, the first at "
        f"{tuple(wrong.nonzero()[0].tolist())}: {actual[wrong][0]} instead of {expected[wrong][0]}"
    )


def check_forward(emulator: Emulator, op: str, *operands: Operand) -> Launch:
    output = emulator.forward(op, "relu", *operands)
    assert_exact(f"{op} output", output, reference(op, "relu", *operands))
    (launch,) = emulator.launches
    return launch


def check_backward(
    emulator: Emulator,
    op: str,
    *operands: Operand,
    wanted: Sequence[int] | None = None,
    grad: Tensor | None = None,
) -> list[Launch]:
    if wanted is None:
        wanted = [k for k, operand in enumerate(operands) if isinstance(operand, Tensor)]
    if grad is None:
        output = reference(op, "none", *operands)
        dtype = next(x.dtype for x in operands if isinstance(x, Tensor))
        grad = torch.empty_like(output, dtype=dtype).copy_(integers(*output.shape, dtype=dtype))
    # As in the binding, the value of a bias behind the activation is not read.
    values = [*operands[:2], 0.0] if op == "act_scale_bias" else operands
    gradients = emulator.backward(op, "relu", grad, *values, wanted=wanted, shapes=operands)
    expected = reference_gradients(op, "relu", grad, operands, wanted)
    for k, actual, exact in zip(wanted, gradients, expected, strict=True):
        assert_exact(f"{op} gradient {k} of {list(wanted)}", actual, exact)
    return emulator.launches
