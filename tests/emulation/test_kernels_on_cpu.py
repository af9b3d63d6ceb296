"""The real kernels, run by the emulator of this folder, against the CPU references."""

from __future__ import annotations

import itertools

import layouts
import pytest
import torch
from comparison import (
    NUM_OPERANDS,
    assert_exact,
    check_backward,
    check_forward,
    integers,
    reference,
    reference_gradients,
)
from emulator import DTYPES
from pointwise_emulator import OPS, Emulator
from reference import ACTIVATIONS, ulp
from torch import Tensor

# ---- Values: every formula, activation and dtype -------------------------------------------------


def assert_rounded_once(name: str, actual: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """An ulp, and a few roundings of the arithmetic relative to `magnitude`, the absolute terms."""
    arithmetic = torch.finfo(torch.promote_types(actual.dtype, torch.float32)).eps
    allowed = ulp(expected, actual.dtype) + 16 * arithmetic * magnitude.clamp(min=1.0)
    error = (actual.double() - expected).abs()
    wrong = ~(error <= allowed)  # NaN is wrong
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements, such as "
        f"{actual[wrong][0].item()} instead of {expected[wrong][0].item()}"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("op", OPS)
def test_values(emulator: Emulator, op: str, activation: str, dtype: torch.dtype) -> None:
    shape = (11, 40)
    x, *others = (2 * torch.randn(shape, dtype=dtype) for _ in range(NUM_OPERANDS[op]))
    bound = reference(op, activation, x, *others).abs()
    if op == "act_scale_bias":
        bound = bound + others[1].double().abs()  # the sum may cancel
    output = emulator.forward(op, activation, x, *others)
    assert_rounded_once("output", output, reference(op, activation, x, *others), bound)

    rows = [other[0] for other in others]
    grad = torch.randn(shape, dtype=dtype)
    wanted = range(NUM_OPERANDS[op])
    gradients = emulator.backward(op, activation, grad, x, *rows, wanted=wanted)
    wide = [x, *(row.expand(shape) for row in rows)]
    terms = reference_gradients(op, activation, grad, wide, wanted)
    for k, (gradient, term) in enumerate(zip(gradients, terms, strict=True)):
        expected = term.sum_to_size(gradient.shape)
        # What cancels in a derivative are terms as large as the gradient times the operands.
        factor = wide[-1].double().abs().amax() * x.double().abs().amax()
        magnitude = (term.abs() + grad.double().abs() * factor).sum_to_size(gradient.shape)
        assert_rounded_once(f"gradient {k}", gradient, expected, magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(emulator: Emulator, activation: str, dtype: torch.dtype) -> None:
    x = torch.tensor([torch.inf, torch.nan, 0.0, -0.0, 1e4, -1e4, -torch.inf] * 5, dtype=dtype)
    output = emulator.forward("bias_act", activation, x, torch.zeros_like(x))
    expected = reference("bias_act", activation, x, torch.zeros_like(x)).to(dtype)
    # At -inf some activations are 0 * inf: torch's NaN, or the limit 0.
    at_minus_infinity = output[6::7]
    limit = torch.where(expected[6::7].isnan(), 0.0, expected[6::7])
    assert ((at_minus_infinity == limit) | at_minus_infinity.isnan()).all()
    output[6::7] = expected[6::7] = 0
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding(emulator: Emulator, dtype: torch.dtype) -> None:
    """Every 16-bit value, alone and in a sum that has to be rounded; also tests the emulation."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for other in (torch.zeros_like(x), x[torch.randperm(len(x))]):
        output = emulator.forward("bias_act", "none", x, other)
        expected = (x.float() + other.float()).to(dtype)
        torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


# ---- Gradients -----------------------------------------------------------------------------------


def subsets(n: int) -> list[tuple[int, ...]]:
    return [s for size in range(1, n + 1) for s in itertools.combinations(range(n), size)]


@pytest.mark.parametrize("shapes", [((40,), (40,)), ((37, 1), ()), ((), ()), ((37, 40), (37, 1))])
@pytest.mark.parametrize("op", OPS)
def test_each_subset_of_the_gradients(emulator: Emulator, op: str, shapes: tuple) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, *others = (integers(*shape, dtype=dtype) for shape in ((37, 40), *shapes))
        operands = [x, *others][: NUM_OPERANDS[op]]
        for wanted in subsets(len(operands)):
            check_backward(emulator, op, *operands, wanted=wanted)


def test_sums_over_different_dimensions_take_a_launch_each(emulator: Emulator) -> None:
    for dtype in DTYPES:
        x = integers(37, 40, dtype=dtype)
        row, column = integers(40, dtype=dtype), integers(37, 1, dtype=dtype)
        launches = check_backward(emulator, "act_scale_bias", x, column, row)
        assert [launch.path for launch in launches] == ["rows", "columns"]
        sides = [integers(*shape, dtype=dtype) for shape in ((5, 1, 1), (6, 1), (8,))]
        check_forward(emulator, "add_mul_act", *sides)
        assert len(check_backward(emulator, "add_mul_act", *sides)) == 3


def test_sums_laid_out_differently_take_a_launch_each(emulator: Emulator) -> None:
    x = integers(6, 5, 16, dtype=torch.float32)
    scale, bias = (integers(5, 16, dtype=torch.float32) for _ in range(2))
    launches = check_backward(emulator, "act_scale_bias", x, scale, layouts.transposed(bias))
    assert [launch.path for launch in launches] == ["columns", "columns"]


def test_a_total_beside_many_rows_takes_a_launch_of_its_own(emulator: Emulator) -> None:
    x, column, scalar = (
        integers(*shape, dtype=torch.bfloat16) for shape in ((4100, 8), (4100, 1), ())
    )
    (launch,) = check_backward(emulator, "act_scale_bias", x[:4000], column[:4000], scalar)
    assert launch.gradients == ("full", "rows", "total")
    first, second = check_backward(emulator, "act_scale_bias", x, column, scalar)
    assert first.gradients == ("full", "rows", "none")
    assert second.gradients == ("none", "none", "total")


@pytest.mark.parametrize("op", OPS)
def test_incoming_gradient_in_another_layout(emulator: Emulator, op: str) -> None:
    def new(*shape: int) -> Tensor:
        return integers(*shape, dtype=torch.bfloat16)

    for grad in (
        new().expand(24, 40),
        new(24, 1).expand(24, 40),
        new(40).expand(24, 40),
        layouts.transposed(new(24, 40)),
        layouts.pitched(new(24, 40)),
    ):
        for other in (new(24, 40), new(40), new(24, 1), new()):
            operands = [new(24, 40), other, other][: NUM_OPERANDS[op]]
            check_backward(emulator, op, *operands, grad=grad)


def test_add_relu_takes_its_gradient_from_the_output(emulator: Emulator) -> None:
    for dtype in DTYPES:
        a, b = integers(37, 40, dtype=dtype), integers(40, dtype=dtype)
        y, grad = torch.relu(a + b), integers(37, 40, dtype=dtype)
        actual = emulator.backward("bias_act", "relu", grad, y, 0.0, wanted=(0, 1), shapes=(a, b))
        expected = torch.where(y > 0, grad, 0.0).double()
        assert_exact("gradient of a", actual[0], expected)
        assert_exact("gradient of b", actual[1], expected.sum(0))


# ---- Numbers and packed operands -----------------------------------------------------------------


@pytest.mark.parametrize("other", [(37, 40), (40,), (37, 1), ()], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_numbers_in_every_place(emulator: Emulator, op: str, other: tuple[int, ...]) -> None:
    for dtype in (torch.float16, torch.float64):
        for numbers in subsets(NUM_OPERANDS[op]):
            if len(numbers) == NUM_OPERANDS[op]:
                continue
            shapes = iter(((37, 40), other, (37, 40)))
            operands = [
                float(2 + k) if k in numbers else integers(*next(shapes), dtype=dtype)
                for k in range(NUM_OPERANDS[op])
            ]
            check_forward(emulator, op, *operands)
            check_backward(emulator, op, *operands)


@pytest.mark.parametrize("shape", [(9, 80), (3, 5, 48), (9, 26), (9, 2), (16,), (2, 4112)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(emulator: Emulator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    packed = integers(*shape, dtype=dtype)
    for gate_up in (packed, layouts.pitched(packed), layouts.shifted(packed, 8)):
        gate, up = gate_up.chunk(2, dim=-1)
        output = emulator.packed("relu", gate_up)
        assert_exact("packed output", output, reference("act_mul", "relu", gate, up))
        grad = integers(*gate.shape, dtype=dtype)
        gradient = emulator.packed_backward("relu", grad, gate_up)
        expected = reference_gradients("act_mul", "relu", grad, (gate, up), (0, 1))
        assert_exact("packed gradient", gradient, torch.cat(expected, dim=-1))
        for kept in (grad, layouts.pitched(grad)):
            both = emulator.packed_recompute("relu", kept, gate_up)
            assert torch.equal(both[0], gradient)
            assert torch.equal(both[1], output)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_that_are_made_again(
    emulator: Emulator, activation: str, dtype: torch.dtype
) -> None:
    gate_up, grad = 2 * torch.randn(11, 80, dtype=dtype), torch.randn(11, 40, dtype=dtype)
    gradient, output = emulator.packed_recompute(activation, grad, gate_up)
    assert torch.equal(gradient, emulator.packed_backward(activation, grad, gate_up))
    expected = reference("act_mul", activation, *gate_up.chunk(2, dim=-1))
    assert_rounded_once("output", output, expected, expected.abs())


# ---- Sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_width(emulator: Emulator, dtype: torch.dtype) -> None:
    for width in range(1, 41):
        x, other = (integers(9, width, dtype=dtype) for _ in range(2))
        check_forward(emulator, "act_mul", x, other)
        for operand in (other, other[0], other[:, :1]):
            check_forward(emulator, "act_mul", x, operand)
            check_backward(emulator, "act_mul", x, operand)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tail_of_a_flat_walk(emulator: Emulator, dtype: torch.dtype) -> None:
    """Storage off the boundary, for every number of elements behind the last whole block."""
    path = "flat" if dtype != torch.float64 else "broadcast"
    for size in (*range(1, 18), *range(2041, 2066)):
        x, other = integers(size, dtype=dtype), integers(size, dtype=dtype)
        for operands in ((layouts.shifted(x, 1), other), (x, layouts.shifted(other, 3))):
            launch = check_forward(emulator, "act_mul", *operands)
            assert size == 1 or launch.path == path
            check_backward(emulator, "act_mul", *operands)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_width_off_the_boundary(emulator: Emulator, dtype: torch.dtype) -> None:
    """Rows that end in the middle of a thread's elements, once or several times."""
    for width in range(1, 25):
        x = layouts.shifted(integers(29, width, dtype=dtype), 1)
        plane = layouts.shifted(integers(4, 3, 5, width, dtype=dtype), 1)
        for first, other in (
            (x, integers(width, dtype=dtype)),
            (x, integers(29, 1, dtype=dtype)),
            (plane, integers(3, 1, 1, dtype=dtype)),
            (plane, integers(3, 1, width, dtype=dtype)),
            (layouts.pitched(x), layouts.spread(integers(29, width, dtype=dtype))),
            (x, layouts.transposed(integers(29, width, dtype=dtype))),
        ):
            check_forward(emulator, "act_mul", first, other)
            check_backward(emulator, "act_mul", first, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_partial_sums(
    emulator: Emulator, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "num_sms", 132)
    x = integers(5000, 24, dtype=dtype)
    for shape, partials in (((24,), 100), ((5000, 1), 1), ((), 100)):
        (launch,) = check_backward(emulator, "act_mul", x, integers(*shape, dtype=dtype))
        assert launch.num_partials >= partials
    for long in (x.view(3, -1), integers(3, 40_001, dtype=dtype)):
        (launch,) = check_backward(emulator, "act_mul", long, integers(3, 1, dtype=dtype))
        assert launch.num_partials >= 30
    odd = integers(5000, 25, dtype=dtype)
    for shape in ((25,), ()):
        (launch,) = check_backward(emulator, "act_mul", odd, integers(*shape, dtype=dtype))
        assert launch.num_partials >= 100


def test_more_rows_than_a_grid_has_in_y(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = integers(70001, 3, dtype=torch.bfloat16)
    for shape in ((3,), (70001, 1)):
        check_forward(emulator, "act_mul", x, integers(*shape, dtype=x.dtype))
        check_backward(emulator, "act_mul", x, integers(*shape, dtype=x.dtype))
    # 65536 blocks of rows would take a minute: the same with a limit of 5.
    monkeypatch.setattr(emulator, "max_grid_y", 5)
    x = integers(3000, 40, dtype=torch.bfloat16)
    check_forward(emulator, "act_mul", x, x[0])
    check_backward(emulator, "act_mul", x, layouts.shifted(x, 1))


def test_dimensions_that_do_not_merge(emulator: Emulator) -> None:
    """Eight dimensions, every second one broadcast: index arithmetic over all of them."""
    for dtype in (torch.bfloat16, torch.float32):
        x = integers(*(2, 3) * 4, dtype=dtype)
        for other in (integers(*(2, 1) * 4, dtype=dtype), integers(*(1, 3) * 4, dtype=dtype)):
            check_forward(
                emulator, "add_mul_act", x, other, x.movedim(0, 3).contiguous().movedim(3, 0)
            )
            check_backward(emulator, "add_mul_act", x, other, other)
