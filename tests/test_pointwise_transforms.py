"""Gradients through torch.func's transforms, and numbers as operands."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcuda

silu = torch.nn.functional.silu


def test_grad_over_vmap(device):
    """Inside vmap a tensor of an outer grad level does not say that it needs a gradient."""
    x = torch.randn(5, 7, device=device)

    def loss(op):
        return lambda x: torch.func.vmap(lambda row: op(row, row))(x).sum()

    actual = torch.func.grad(loss(fusedcuda.act_mul))(x)
    expected = torch.func.grad(loss(lambda gate, up: silu(gate) * up))(x)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_an_ensemble_of_parameters(device, activation):
    """grad over vmap over the parameters, the way torch.func.stack_module_state is used."""
    x, biases = torch.randn(6, 4, device=device), torch.randn(3, 4, device=device)
    eager = torch.relu if activation == "relu" else silu

    def loss(op):
        return lambda biases: torch.func.vmap(lambda bias: op(x, bias))(biases).sum()

    actual = torch.func.grad(loss(lambda x, b: fusedcuda.bias_act(x, b, activation)))(biases)
    expected = torch.func.grad(loss(lambda x, b: eager(x + b)))(biases)
    torch.testing.assert_close(actual, expected)


def test_compiled_transforms_with_gradients_are_refused(device):
    x = torch.randn(5, 7, device=device)

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(
            lambda x: torch.func.vmap(lambda row: fusedcuda.act_mul(row, row))(x).sum()
        )(x)

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: fusedcuda.act_mul(x, x), (x,), (x,))[1]

    for function in (gradient, tangent):
        with pytest.raises(Exception, match=r"act_mul: torch\.func transforms inside"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(x)

    def batched(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: fusedcuda.act_mul(row, row))(x)

    with torch.no_grad():
        compiled = torch.compile(batched, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), batched(x))


def test_checkpoint_with_create_graph(device):
    """The saved tensors of a non-reentrant checkpoint can be unpacked once."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = checkpoint(lambda x: fusedcuda.bias_act(x, 0.5, "silu"), x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"bias_act: a second derivative"):
        gradient.sum().backward()


def test_numbers_are_not_rounded_to_the_tensor(device):
    """As in torch, a number keeps float32: 1e5 is inf in float16, 0.1 off by 4e-3 in bfloat16."""
    half = torch.full((8,), 1e-3, dtype=torch.float16, device=device)
    expected = (half.float() * 1e5).half()
    assert torch.equal(fusedcuda.act_scale_bias(half, 1e5, 0.0, "none"), expected)
    tiny = fusedcuda.act_mul(half * 0 + 1e4, 1e-8, "none")
    torch.testing.assert_close(tiny, torch.full_like(half, 1e-4), rtol=1e-3, atol=0.0)
    x = torch.rand(1000, device=device).bfloat16() + 1
    assert torch.equal(fusedcuda.act_mul(x, 0.1, "none"), (x.float() * 0.1).bfloat16())
    assert torch.equal(fusedcuda.add_mul_act(0.1, x, 1.0, "none"), (x.float() + 0.1).bfloat16())


def test_numbers_stay_on_the_host(device):
    x = torch.randn(8, device=device)
    with torch.device("meta"):
        assert fusedcuda.bias_act(x, 0.5).device == x.device


@pytest.mark.parametrize("name", ["grad", "y"])
def test_raw_gradients_refuse_what_does_not_fit(device, name):
    arguments = {"grad": torch.ones(3, 4), "y": torch.ones(3, 4)}
    operands = {"a": torch.ones(3, 4), "b": torch.ones(4)}
    for wrong in (torch.ones(4), torch.ones(2, 3, 4), torch.ones(3, 4).double()):
        given = {**arguments, name: wrong, **operands}
        with pytest.raises((ValueError, RuntimeError), match=r"add_relu_backward: .*(grad|y)"):
            torch.ops.fusedcuda.add_relu_backward(*(t.to(device) for t in given.values()), 3)
