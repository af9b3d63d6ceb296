"""What the pointwise ops refuse, and that each message says which op, what and why."""

import re

import pytest
import refusals
import torch
from reference import ACTIVATIONS, ADD_RELU, BROADCASTING, OPS, Op, by_name

import fusedcuda


def refuses(op: Op, error: type[Exception], *mentions: str):
    return refusals.refuses(op.name, error, *mentions)


@pytest.mark.parametrize("op", [op for op in OPS if op is not ADD_RELU], ids=by_name)
@pytest.mark.parametrize("activation", ["swish", "ReLU", "gelu_new", "", None, 1], ids=repr)
def test_unknown_activation(op, activation, device):
    with refuses(op, ValueError, repr(activation), *ACTIVATIONS):
        op(*op.random_operands(4, 8, device=device), activation=activation)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.bool, torch.uint8, torch.complex64], ids=str
)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_unsupported_dtype(op, dtype, device):
    """Also where only one operand has it, and where torch would promote it."""
    for position, operand in enumerate(op.operands):
        operands = op.random_operands(4, 8, device=device)
        operands[position] = torch.ones(operands[position].shape, dtype=dtype, device=device)
        with refuses(op, TypeError, operand, str(dtype)):
            op(*operands)
    with refuses(op, TypeError, str(dtype)):
        op(*[torch.ones(4, 8, dtype=dtype, device=device) for _ in op.operands])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bit_floats_are_refused(dtype, device):
    x = torch.ones(4, 8, device=device).to(dtype)
    with refuses(ADD_RELU, TypeError, "a", str(dtype)):
        ADD_RELU(x, x)


@pytest.mark.parametrize("wrong", [1j, "1", None, [1.0]], ids=repr)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_operands_that_are_no_tensor_and_no_number(op, wrong):
    for position, operand in enumerate(op.operands):
        operands = op.random_operands(4, 8)
        operands[position] = wrong
        with refuses(op, TypeError, operand, type(wrong).__name__):
            op(*operands)


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_numbers_alone(op):
    with refuses(op, TypeError, *op.operands):
        op(*[1.0] * len(op.operands))


@pytest.mark.parametrize("shape", [(3, 8), (4, 7), (2, 4, 9), (8, 4)], ids=str)
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_shapes_that_do_not_broadcast(op, shape, device):
    for position, operand in enumerate(op.operands):
        operands = op.random_operands(4, 8, device=device)
        operands[position] = torch.ones(shape, device=device)
        with refuses(op, ValueError, operand, str(shape), "(4, 8)"):
            op(*operands)
        operands[position].requires_grad_()
        with refuses(op, ValueError, operand, str(shape), "(4, 8)"):
            op(*operands)


@pytest.mark.parametrize("shape", [(), (1,), (4, 7), (3, 0, 5)], ids=str)
def test_packed_needs_an_even_last_dimension(shape, device):
    x = torch.ones(shape, device=device)
    with pytest.raises(ValueError, match=rf"^act_mul_packed: .*gate_up.*{re.escape(str(shape))}"):
        fusedcuda.act_mul_packed(x)
    with pytest.raises(ValueError, match=rf"^act_mul_packed: .*{re.escape(str(shape))}"):
        fusedcuda.act_mul_packed(x.requires_grad_())


@pytest.mark.gpu
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_different_devices(op):
    for position, operand in enumerate(op.operands):
        operands = op.random_operands(4, 8, device="cuda")
        operands[position] = operands[position].cpu()
        with refuses(op, ValueError, operand, "cpu", "cuda:0"):
            op(*operands)


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_different_devices_without_a_gpu(op):
    """The meta device stands in for a second one."""
    for position, operand in enumerate(op.operands):
        operands = op.random_operands(4, 8)
        operands[position] = operands[position].to("meta")
        with refuses(op, ValueError, operand, "cpu", "meta"):
            op(*operands)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_sparse_tensors_are_refused(op):
    operands = op.random_operands(4, 8)
    operands[0] = operands[0].to_sparse()
    with pytest.raises((TypeError, NotImplementedError, RuntimeError, ValueError)):
        op(*operands)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_a_call_goes_on_working_after_an_error(op, device):
    operands = op.random_operands(4, 8, device=device)
    with pytest.raises(TypeError):
        op(operands[0].long(), *operands[1:])
    torch.testing.assert_close(op(*operands), op.eager(*operands))
    if device == "cuda":
        torch.cuda.synchronize()
