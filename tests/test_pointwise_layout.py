"""Shapes, strides, alignment and broadcasting of the pointwise ops."""

import itertools

import pytest
import torch
from layouts import LAYOUTS, layout_name, pitched, shifted, spread
from reference import (
    ACT_MUL,
    ACT_MUL_PACKED,
    ACT_SCALE_BIAS,
    ADD_MUL_ACT,
    ADD_RELU,
    BIAS_ACT,
    BROADCASTING,
    OPS,
    by_name,
    check,
    gradients,
)

HALF_AND_FLOAT = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

# The shape of an operand that broadcasts against (N, C, S, W).
N, C, S, W = 3, 4, 5, 24
PATTERNS = {
    "full": (N, C, S, W),
    "zero_dimensional": (),
    "single": (1,),
    "last_dimension": (W,),
    "row": (1, 1, 1, W),
    "leading_column": (N, C, S, 1),
    "batch": (N, 1, 1, 1),
    "channel": (C, 1, 1),
    "sequence": (1, S, 1),
    "batch_and_last": (N, 1, 1, W),
    "all_but_batch": (C, S, W),
    "outer_pair": (N, C, 1, 1),
    "inner_pair": (S, W),
}

# ---------------------------------------------------------------------------- broadcasting


@HALF_AND_FLOAT
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_each_operand_in_each_pattern(op, pattern, dtype, device):
    for position in range(len(op.operands)):
        operands = op.random_operands(N, C, S, W, dtype=dtype, device=device)
        operands[position] = torch.randn(PATTERNS[pattern], dtype=dtype, device=device)
        check(op, operands, op.activations[-1])


@pytest.mark.parametrize(
    ("left", "right"), list(itertools.combinations_with_replacement(PATTERNS, 2)), ids=str
)
def test_two_broadcast_operands(left, right, device):
    """No operand of act_mul, and only one of the others, need have the shape of the output."""
    b, c = torch.randn(PATTERNS[left], device=device), torch.randn(PATTERNS[right], device=device)
    a = torch.randn(N, C, S, W, device=device)
    check(ADD_MUL_ACT, [a, b, c], "tanh")
    check(ACT_SCALE_BIAS, [a, c, b], "sigmoid")
    check(ACT_MUL, [b, c], "gelu")


@HALF_AND_FLOAT
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_rows_against_columns(op, dtype, device):
    """The output has a shape that none of the operands has."""
    row = torch.randn(40, dtype=dtype, device=device)
    column = torch.randn(33, 1, dtype=dtype, device=device)
    third = [torch.randn(1, 1, dtype=dtype, device=device)] * (len(op.operands) - 2)
    out = check(op, [column, row, *third])
    assert out.is_contiguous()
    check(op, [row, column, *third])


@pytest.mark.parametrize("number", [0, 1, -3, 0.75, True])
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_python_numbers(op, number, device):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for position in range(len(op.operands)):
            operands = op.random_operands(7, 32, dtype=dtype, device=device)
            operands[position] = number
            check(op, operands)


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_all_operands_but_one_are_numbers(op, device):
    for position in range(len(op.operands)):
        operands = [0.1, -0.7, 1.3][: len(op.operands)]
        operands[position] = torch.randn(6, 11, device=device)
        check(op, operands)


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_a_zero_dimensional_cpu_tensor_acts_as_a_number(op, device):
    """As in torch, whatever the device of the others; its gradient comes back to the CPU."""
    for position in range(len(op.operands)):
        operands = op.random_operands(5, 16, device=device)
        operands[position] = torch.tensor(0.5)
        check(op, operands)


@HALF_AND_FLOAT
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_zero_dimensional_and_single_element_outputs(op, dtype, device):
    operands = op.random_operands(1, dtype=dtype, device=device)
    check(op, operands)
    if op is not ACT_MUL_PACKED:
        out = check(op, [operand[0] for operand in operands])
        assert out.shape == ()


# ---------------------------------------------------------------------------- empty tensors


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (3, 0, 16), (0, 0), (2, 3, 0, 5)], ids=str)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_empty(op, shape, device):
    operands = op.random_operands(*shape, device=device)
    out, grads = gradients(op, operands, range(len(operands)), None)
    assert out.shape == shape
    assert [grad.shape for grad in grads.values()] == [operand.shape for operand in operands]
    if device == "cuda":
        torch.cuda.synchronize()  # a refused launch would be reported here


@pytest.mark.parametrize("vector", [(), (1,), (16,), (1, 1, 16), (1, 0, 1), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_a_sum_over_nothing_is_zero(op, vector, device):
    operands = op.random_operands(3, 0, 16, device=device)
    operands[-1] = torch.randn(vector, device=device)
    _, grads = gradients(op, operands, range(len(operands)), None)
    assert torch.equal(grads[len(operands) - 1], torch.zeros(vector, device=device))


# ---------------------------------------------------------------------------- sizes and alignment


@HALF_AND_FLOAT
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_every_width(op, dtype, device):
    for width in range(1, 131):
        operands = op.random_operands(3, width, dtype=dtype, device=device)
        if len(operands) > 1:
            operands[-1] = operands[-1][0]
        check(op, operands)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 46, 255, 257, 1023, 4099])
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_odd_rows_of_columns(op, width, device):
    """A leading-column operand, so that no row may be taken for a part of another."""
    operands = op.random_operands(17, width, dtype=torch.float16, device=device)
    if len(operands) > 1:
        operands[-1] = operands[-1][:, :1].clone()
    check(op, operands, op.activations[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_storage_offsets(op, offset, dtype, device):
    """Each operand in turn, then all of them, off the 16-byte boundary; also as a vector."""
    for shape in ((4, 64), (5, 33)):
        operands = op.random_operands(*shape, dtype=dtype, device=device)
        for position in range(len(operands)):
            moved = list(operands)
            moved[position] = shifted(operands[position], offset)
            check(op, moved)
        check(op, [shifted(operand, offset) for operand in operands])
        if len(operands) > 1:
            check(op, [operands[0], *(shifted(operand[0], offset) for operand in operands[1:])])


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_sizes_around_a_block(op, device):
    sizes = [2**k + d for k in (8, 9, 10, 11, 12, 13) for d in (-1, 0, 1)]
    for size in sizes:
        check(op, op.random_operands(size, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("rows", [*range(1, 34), 63, 64, 65, 127, 129, 255, 257, 1023, 1025])
def test_every_number_of_rows_is_summed(rows, device):
    """The last partial sum must not be left out, whatever the number of rows."""
    ones = torch.ones(rows, 24, device=device)
    for shape in ((24,), (), (rows, 1), (1, 1)):
        _, grads = gradients(BIAS_ACT, [ones, torch.ones(shape, device=device)], [1], None)
        expected = rows * 24 / max(1, grads[1].numel())
        assert (grads[1] == expected).all()


@pytest.mark.parametrize(
    "shape", [(65_537, 4), (2, 65_537, 3), (65_537, 1, 2), (70_001, 9)], ids=str
)
def test_more_rows_than_a_grid_dimension_holds(shape, device):
    """grid.y and grid.z end at 65535."""
    operands = ADD_MUL_ACT.random_operands(*shape, dtype=torch.bfloat16, device=device)
    operands[1] = operands[1][..., :1].clone()
    operands[2] = operands[2][..., :1, :].clone()
    check(ADD_MUL_ACT, operands)
    bias = torch.randn(shape[-1], dtype=torch.bfloat16, device=device)
    check(BIAS_ACT, [pitched(operands[0]), bias], "silu")


def test_many_dimensions(device):
    """Twelve dimensions, permuted so that none can be merged with its neighbour."""
    order = torch.randperm(12).tolist()
    a, b, c = ADD_MUL_ACT.random_operands(*[2] * 12, device=device)
    alternating = b[tuple(slice(0, 1 + i % 2) for i in range(12))]
    check(ADD_MUL_ACT, [a.permute(order), alternating, c], "gelu")
    check(ADD_RELU, [a, b.permute(order)])
    check(ACT_MUL_PACKED, [a.permute(order)], "silu")
    gradient = torch.randn([2] * 12, device=device).permute(order)
    check(ACT_SCALE_BIAS, [a, alternating, c.permute(order)], grad_output=gradient)


# ---------------------------------------------------------------------------- strides of the inputs


@HALF_AND_FLOAT
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_layouts_of_the_operands(op, layout, dtype, device):
    operands = op.random_operands(3, 4, 5, 16, dtype=dtype, device=device)
    for position in range(len(operands)):
        changed = list(operands)
        changed[position] = layout(operands[position])
        check(op, changed)
    check(op, [layout(operand) for operand in operands], op.activations[-1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_layouts_with_a_vector(op, layout, device):
    first, *others = op.random_operands(3, 4, 5, 16, device=device)
    for vector in ((16,), (4, 1, 1), (5, 1)):
        operands = [layout(first), *(torch.randn(vector, device=device) for _ in others)]
        check(op, operands)


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_a_strided_vector(op, device):
    """A bias that is a column of a matrix, or a vector read backwards in pairs."""
    first, *others = op.random_operands(6, 32, device=device)
    column = torch.randn(32, 3, device=device)[:, 1]
    check(op, [first, *(column for _ in others)])
    check(op, [first, *(spread(torch.randn(32, device=device)) for _ in others)])


@HALF_AND_FLOAT
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_expanded_operands(op, dtype, device):
    """Stride 0 where the shape is full: the gradient has that full shape."""
    for base in ((1, 1, 1), (5, 1, 1), (1, 6, 1), (1, 1, 16), (1, 6, 16), (5, 1, 16)):
        for position in range(len(op.operands)):
            operands = op.random_operands(5, 6, 16, dtype=dtype, device=device)
            operands[position] = torch.randn(base, dtype=dtype, device=device).expand(5, 6, 16)
            check(op, operands)
    operands = [torch.randn(1, dtype=dtype, device=device).expand(5, 16) for _ in op.operands]
    check(op, operands)


def test_overlapping_windows(device):
    """unfold gives a view in which elements share memory."""
    windows = torch.randn(40, device=device).unfold(0, 16, 1)
    check(ADD_RELU, [windows, torch.randn(25, 16, device=device)])
    check(ACT_MUL_PACKED, [windows], "silu")


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_the_inputs_are_not_changed_and_not_returned(op, device):
    for activation in op.activations:
        operands = op.random_operands(4, 16, device=device)
        before = [operand.clone() for operand in operands]
        out, grads = gradients(
            lambda *leaves, name=activation: op(*leaves, activation=name),
            operands,
            range(len(operands)),
            None,
        )
        assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))
        # Two gradients may be one tensor, as in torch's own addition, but never an input's memory.
        fixed = {t.untyped_storage().data_ptr() for t in (*operands, out)}
        assert len(fixed) == len(operands) + 1
        assert all(grad.untyped_storage().data_ptr() not in fixed for grad in grads.values())


# ---------------------------------------------------------------------------- layout of the results


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_the_output_has_the_layout_of_the_first_full_operand(op, device):
    operands = op.random_operands(3, 4, 5, 16, device=device)
    for first in (operands[0], *(layout(operands[0]) for layout in LAYOUTS)):
        out = op(first, *operands[1:])
        assert out.stride() == torch.empty_like(first).stride()
        vectors = [torch.randn(16, device=device) for _ in operands[2:]]
        out = op(torch.randn(16, device=device), first, *vectors)
        assert out.stride() == torch.empty_like(first).stride()


def test_the_packed_output_has_half_the_last_dimension(device):
    for shape in ((2,), (5, 2), (3, 4, 22), (1, 1, 6), (2, 0)):
        assert ACT_MUL_PACKED(torch.randn(shape, device=device)).shape == (
            *shape[:-1],
            shape[-1] // 2,
        )


# ---------------------------------------------------------------------------- layout of grad_output


@HALF_AND_FLOAT
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_layouts_of_grad_output(op, layout, dtype, device):
    gradient = layout(torch.randn(3, 4, 5, 16, dtype=dtype, device=device))
    operands = op.random_operands(3, 4, 5, 16, dtype=dtype, device=device)
    check(op, operands, grad_output=gradient)
    if len(operands) > 1:
        operands[-1] = torch.randn(16, dtype=dtype, device=device)
        check(op, operands, grad_output=gradient)


@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_storage_offset_of_grad_output(op, offset, device):
    gradient = shifted(torch.randn(4, 48, dtype=torch.bfloat16, device=device), offset)
    operands = op.random_operands(4, 48, dtype=torch.bfloat16, device=device)
    check(op, operands, grad_output=gradient)


@pytest.mark.parametrize("base", [(1, 1), (6, 1), (1, 48)], ids=str)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_expanded_grad_output(op, base, device):
    """What .sum(), .sum(0) and .sum(1) send back: more elements than are stored."""
    gradient = torch.randn(base, device=device).expand(6, 48)
    operands = op.random_operands(6, 48, device=device)
    check(op, operands, grad_output=gradient)
    if len(operands) > 1:
        check(op, [operands[0], *(o[0] for o in operands[1:])], grad_output=gradient)


# ---------------------------------------------------------------------------- the packed form


@pytest.mark.parametrize("half", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 101, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_packed_widths(half, dtype, device):
    for shape in ((half,), (1, half), (7, half), (2, 3, half)):
        for activation in ("silu", "gelu"):
            check(
                ACT_MUL_PACKED,
                ACT_MUL_PACKED.random_operands(*shape, dtype=dtype, device=device),
                activation,
            )


def test_packed_gradient_is_one_tensor(device):
    gate_up = torch.randn(9, 2 * 24, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(ACT_MUL_PACKED(gate_up, activation="silu").sum(), gate_up)
    assert grad.shape == gate_up.shape
    assert grad.is_contiguous()


@HALF_AND_FLOAT
def test_packed_equals_the_two_halves(dtype, device):
    """The halves as strided views, without a copy, give the same bits."""
    gate_up = torch.randn(31, 2 * 50, dtype=dtype, device=device)
    gate, up = gate_up.chunk(2, -1)
    packed, packed_grads = gradients(ACT_MUL_PACKED, [gate_up], [0], None)
    separate, grads = gradients(ACT_MUL, [gate, up], [0, 1], None)
    assert torch.equal(packed, separate)
    assert torch.equal(packed_grads[0], torch.cat([grads[0], grads[1]], -1))


def test_packed_in_a_wider_matrix(device):
    """A row pitch that is not the width, as in one projection that yields more than gate and up."""
    for pitch, start in ((100, 0), (101, 1), (104, 8), (99, 3)):
        wide = torch.randn(17, pitch, dtype=torch.bfloat16, device=device)
        check(ACT_MUL_PACKED, [wide[:, start : start + 96]], "silu")
