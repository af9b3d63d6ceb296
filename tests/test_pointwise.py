"""Values and gradients of the pointwise ops, against float64."""

import itertools

import pytest
import torch
from reference import (
    ACT_MUL,
    ACT_MUL_PACKED,
    ACT_SCALE_BIAS,
    ADD_MUL_ACT,
    ADD_RELU,
    BIAS_ACT,
    BROADCASTING,
    DTYPES,
    OPS,
    Op,
    assert_as_good_as_eager,
    by_name,
    check,
    leaf,
    ulp,
)

OPS_AND_ACTIVATIONS = [
    pytest.param(op, activation, id=f"{op.name}-{activation}")
    for op in OPS
    for activation in op.activations
]


def subsets(count: int) -> list[tuple[int, ...]]:
    """No operand, each operand alone, each pair, ... all of them."""
    return [
        chosen for size in range(count + 1) for chosen in itertools.combinations(range(count), size)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "activation"), OPS_AND_ACTIVATIONS)
def test_output_and_gradients(op, activation, dtype, device):
    operands = op.random_operands(37, 50, dtype=dtype, device=device)
    for wrt in subsets(len(operands)):
        check(op, operands, activation, wrt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("op", "activation"), [case for case in OPS_AND_ACTIVATIONS if case.values[0] in BROADCASTING]
)
def test_gradients_of_vectors(op, activation, dtype, device):
    """Every operand but the first is a vector along the last dimension, as a bias is."""
    first, *others = op.random_operands(61, 48, dtype=dtype, device=device)
    vectors = [other[0].clone() for other in others]
    for wrt in subsets(len(op.operands)):
        check(op, [first, *vectors], activation, wrt)


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_a_long_sum_keeps_fp32_accuracy(op, device):
    """A 16-bit accumulator of ones sticks at 256 (bf16) or 2048 (fp16)."""
    rows = 4096
    for dtype in (torch.bfloat16, torch.float16):
        first = torch.ones(rows, 8, dtype=dtype, device=device)
        others = [torch.ones(8, dtype=dtype, device=device, requires_grad=True)]
        if len(op.operands) == 3:
            others.append(torch.ones(8, dtype=dtype, device=device, requires_grad=True))
        op(first, *others).sum().backward()
        slope = 2 if op is ADD_MUL_ACT else 1  # d relu((1 + 1) * c) / dc
        assert others[-1].grad.tolist() == [rows * slope] * 8
        assert others[0].grad.tolist() == [rows] * 8


@pytest.mark.parametrize("shape", [(1, 70_000), (70_000, 1), (3, 5, 40_001)], ids=str)
def test_reductions_over_everything_accumulate_as_torch_does(shape, device):
    operands = ADD_MUL_ACT.random_operands(*shape, device=device)
    operands[1] = torch.tensor(0.5, device=device)
    operands[2] = torch.tensor([0.25] * shape[-1], device=device)
    check(ADD_MUL_ACT, operands, "gelu")


# Where an activation is flat, bent or steep, and the tails where exp overflows in fp32 (88.7).
LANDMARKS = (0.0, 1e-4, 0.1, 0.5, 1.0, 1.2785, 3.0, 5.0, 8.0, 11.0, 13.24, 20.0, 60.0, 89.0, 104.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "activation"), OPS_AND_ACTIVATIONS)
def test_landmarks_of_the_activations(op, activation, dtype, device):
    x = torch.tensor([sign * v for v in LANDMARKS for sign in (1, -1)], dtype=dtype, device=device)
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    operands = {
        ADD_RELU: [x, zero],
        ADD_MUL_ACT: [x, zero, one],
        ACT_SCALE_BIAS: [x, one, zero],
        BIAS_ACT: [x, zero],
        ACT_MUL: [x, one],
        ACT_MUL_PACKED: [torch.cat([x, one])],
    }[op]
    check(op, operands, activation, grad_output=one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "activation", ["relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "none"]
)
def test_every_finite_half_precision_value(activation, dtype, device):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    x = x[x.isfinite() & (x.abs() < 1e4)].to(device)
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    out = check(ACT_SCALE_BIAS, [x, one, zero], activation, wrt=[0], grad_output=one)
    if activation != "none":
        negative = x < -200  # the left tails are exactly zero or -1, never a small lie
        limit = -1.0 if activation == "tanh" else 0.0
        assert (out[negative] == limit).all()


@pytest.mark.parametrize(("op", "activation"), OPS_AND_ACTIVATIONS)
def test_nan_is_not_lost(op, activation, device):
    for position, index in itertools.product(range(len(op.operands)), (0, 3)):
        operands = op.random_operands(4, 4, device=device)
        operands[position].view(-1)[index] = torch.nan
        out = op(*operands, activation=activation)
        eager = op.eager(*operands, activation=activation)
        assert out.isnan().sum() == 1
        assert torch.equal(out.isnan(), eager.isnan())


@pytest.mark.parametrize("op", [ADD_RELU, BIAS_ACT, ADD_MUL_ACT, ACT_SCALE_BIAS], ids=by_name)
def test_relu_gradient_at_nan_inf_and_zero_is_that_of_torch(op, device):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 2.0, -2.0] * 4)
    x = x.to(device).requires_grad_()
    others = {ADD_RELU: [0.0], BIAS_ACT: [0.0], ADD_MUL_ACT: [0.0, 1.0], ACT_SCALE_BIAS: [1.0, 0.0]}
    (grad,) = torch.autograd.grad(op(x, *others[op]).sum(), x)
    (expected,) = torch.autograd.grad(torch.relu(x).sum(), x)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
@pytest.mark.parametrize("op", [BIAS_ACT, ADD_MUL_ACT, ACT_SCALE_BIAS, ACT_MUL], ids=by_name)
def test_an_infinite_gradient_of_a_clipped_element_is_zero(op, activation, device):
    """relu selects, it does not multiply: inf * 0 would be NaN and spread from a masked loss."""
    x = leaf(torch.tensor([-2.0, -0.0, 0.0, 3.0] * 4, device=device))
    others = {BIAS_ACT: [0.0], ADD_MUL_ACT: [0.0, 1.0], ACT_SCALE_BIAS: [1.0, 0.0], ACT_MUL: [1.0]}
    grad_output = torch.full_like(x, torch.inf)
    (grad,) = torch.autograd.grad(op(x, *others[op], activation=activation), x, grad_output)
    assert grad.tolist() == [0, 0, 0, torch.inf] * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "relu_squared", "sigmoid", "tanh"])
def test_infinities_are_those_of_torch(activation, dtype, device):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype, device=device)
    one = torch.ones_like(x)
    torch.testing.assert_close(
        ACT_MUL(x, one, activation=activation),
        ACT_MUL.eager(x, one, activation=activation),
        equal_nan=True,
        rtol=0,
        atol=0,
    )


def test_overflow_of_the_output_is_infinite(device):
    """The sum and the product fit in fp32, the result does not fit in fp16."""
    big = torch.full((16,), 60_000.0, dtype=torch.float16, device=device)
    assert (ADD_RELU(big, big) == torch.inf).all()
    assert (BIAS_ACT(-big, -big, activation="none") == -torch.inf).all()
    assert (ACT_MUL(big, big, activation="relu") == torch.inf).all()
    # And an intermediate result that would overflow in fp16 does not.
    assert (ADD_MUL_ACT(big, big, torch.full_like(big, 0.25)) == 30_000).all()


def test_the_output_is_rounded_once(device):
    """(1 + 2^-8) needs more bits than bf16 has, so rounding it first loses the whole answer."""
    a = torch.ones(16, dtype=torch.bfloat16, device=device)
    b = torch.full_like(a, 2.0**-8)
    out = ACT_SCALE_BIAS(a + 0, 1.0 + 2.0**-7, -1.0, activation="none")
    assert (out == 2.0**-7).all()
    assert (ADD_MUL_ACT(a, b, torch.full_like(a, 3.0), activation="none") == 3.015625).all()


def test_wide_range_of_magnitudes(device):
    """Huge and tiny elements side by side: no element may be judged by its neighbours."""
    for dtype in (torch.float32, torch.bfloat16):
        exponents = torch.randint(-60, 60, (4096,), device=device)
        a = torch.ldexp(torch.rand(4096, device=device) + 1, exponents).to(dtype)
        b = torch.rand(4096, device=device).to(dtype)
        expected = a.double() * b.double()
        out = ACT_MUL(a, b, activation="relu").double()
        assert ((out - expected).abs() <= ulp(expected, dtype)).all()


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_results_are_the_same_bits_in_every_run(op, device, deterministic_algorithms):
    dtype = torch.float32
    operands = op.random_operands(1537, 257, dtype=dtype, device=device)
    if len(operands) > 1:
        operands[-1] = operands[-1][0].clone()
    if len(operands) > 2:
        operands[-2] = operands[-2][:, :1].clone()
    leaves = [leaf(operand) for operand in operands]
    grad_output = torch.randn(1537, 257, dtype=dtype, device=device)

    def run():
        out = op(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad_output)]

    first = run()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    deterministic_algorithms()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize(
    ("left", "right"), [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=str
)
def test_mixed_dtypes_promote_as_in_torch(left, right, device):
    """The output has torch.result_type, each gradient the dtype of its operand."""
    for op in (ADD_MUL_ACT, ACT_SCALE_BIAS):
        operands = op.random_operands(9, 40, dtype=left, device=device)
        operands[1] = operands[1].to(right)
        check(op, operands, "gelu")
        operands[2] = operands[2][0].to(right)
        check(op, operands, "silu")
    for op in (ADD_RELU, BIAS_ACT, ACT_MUL):
        first, second = op.random_operands(9, 40, dtype=left, device=device)
        check(op, [first, second.to(right)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_dimensional_tensors_promote_as_in_torch(dtype, device):
    """A 0-d tensor or a number does not widen a tensor that has dimensions."""
    x = torch.randn(6, 16, dtype=dtype, device=device)
    wide = torch.tensor(0.75, dtype=torch.float64, device=device)
    out = check(ACT_SCALE_BIAS, [x, wide, torch.tensor([0.5], dtype=dtype, device=device)], "tanh")
    assert out.dtype == dtype
    assert check(ADD_MUL_ACT, [wide, x, 2.0]).dtype == dtype
    assert ADD_RELU(x, 1).dtype == dtype
    assert ADD_RELU(wide, wide).dtype == torch.float64


def test_the_default_activations():
    """relu everywhere, silu for the gated forms: part of the signature, so pinned."""
    import fusedcuda

    x, y = torch.randn(2, 64)
    relu, silu = torch.relu, torch.nn.functional.silu
    assert_close = torch.testing.assert_close
    assert_close(fusedcuda.add_mul_act(x, y, 2.0), relu((x + y) * 2))
    assert_close(fusedcuda.act_scale_bias(x, 2.0, y), relu(x) * 2 + y)
    assert_close(fusedcuda.bias_act(x, y), relu(x + y))
    assert_close(fusedcuda.act_mul(x, y), silu(x) * y)
    assert_close(fusedcuda.act_mul_packed(torch.cat([x, y])), silu(x) * y)
    assert_close(fusedcuda.add_mul_act(a=x, b=y, c=2.0, activation="tanh"), torch.tanh((x + y) * 2))


class TestTheRuleItself:
    """`check` must refuse what is wrong and accept what is right."""

    @staticmethod
    def broken(formula) -> Op:
        class Broken(Op):
            def __call__(self, *operands, activation="relu"):
                return formula(*operands)

        return Broken("broken", ("x", "bias"), lambda act, x, bias: act(x + bias))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_accepts_one_rounding_at_the_end(self, dtype):
        def right(x, bias):
            return torch.relu(x.double() + bias.double()).to(x.dtype)

        check(self.broken(right), [torch.randn(64, 64).to(dtype), torch.randn(64).to(dtype)])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_refuses_one_wrong_element(self, dtype):
        def wrong(x, bias):
            out = torch.relu(x + bias)
            mask = torch.zeros_like(out)
            mask[63, 5] = 0.05
            return out + mask

        with pytest.raises(AssertionError, match="element 4037"):
            check(self.broken(wrong), [torch.randn(64, 64).to(dtype), torch.randn(64).to(dtype)])

    def test_refuses_an_element_that_was_not_written(self):
        def wrong(x, bias):
            out = torch.relu(x + bias)
            return torch.where(torch.arange(64) < 63, out, torch.nan)

        with pytest.raises(AssertionError, match="is nan"):
            check(self.broken(wrong), [torch.randn(4, 64), torch.randn(64)])

    def test_refuses_a_missing_row_in_a_sum(self):
        def wrong(x, bias):
            return torch.cat([torch.relu(x[:-1] + bias), torch.relu(x[-1:] + bias.detach())])

        with pytest.raises(AssertionError, match="gradient of bias"):
            check(self.broken(wrong), [torch.rand(1000, 8), torch.rand(8)])

    def test_refuses_half_the_precision(self):
        x = torch.randn(4096)
        exact = x.double()
        # A magnitude that keeps the rule for single elements out of the way.
        with pytest.raises(AssertionError, match="error"):
            assert_as_good_as_eager("x", x * (1 + 2e-6), x, exact, exact.abs() * 10, x.dtype)
