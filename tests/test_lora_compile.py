"""The lora family under torch.compile: one graph, no more compilations than needed."""

import pytest
import torch
import torch._dynamo.testing
from loras import random_layer
from torch import Tensor

import fusedcuda
from fusedcuda.nn import LoRALinear, LoRAMLP


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="inductor"):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_outputs_and_gradients_equal_eager(activation, device):
    for dtype, lora_dtype in ((torch.float32, None), (torch.bfloat16, torch.float32)):
        torch._dynamo.reset()
        given = random_layer(
            9, n=24, k=40, rank=5, dtype=dtype, lora_dtype=lora_dtype, device=device
        )

        def function(*tensors: Tensor) -> Tensor:
            x, weight, bias, lora_a, lora_b = tensors
            return fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias, activation)

        results = []
        for call in (function, compiled(function)[0]):
            leaves = [t.detach().clone().requires_grad_() for t in given]
            y = call(*leaves)
            results.append([y.detach(), *torch.autograd.grad(y.sum(), leaves)])
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)
        with torch.no_grad():
            assert torch.equal(compiled(function)[0](*given), function(*given))


def test_compilations(device):
    """One for one row, one for all other numbers of rows; none for other values of the factors."""

    def function(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        return fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, activation="gelu")

    call, counter = compiled(function)
    for rows in (1, 7, 128, 33):
        x, weight, _, lora_a, lora_b = random_layer(rows, n=24, k=40, rank=5, device=device)
        leaves = (lora_a.requires_grad_(), lora_b.requires_grad_())
        y, expected = call(x, weight, *leaves), function(x, weight, *leaves)
        assert torch.equal(y, expected)
        for a, b in zip(
            torch.autograd.grad(y.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 2


def test_a_scale_that_changes_as_a_factor(device):
    """As the documentation has it: no compilation for each value."""

    def function(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return fusedcuda.lora_linear(x, weight, a, b * scale, 1.0)

    call, counter = compiled(function)
    x, weight, _, lora_a, lora_b = random_layer(9, n=24, k=40, rank=5, device=device)
    for scale in (0.5, 0.25, 2.0, 0.125):
        y = call(x, weight, lora_a, lora_b, scale)
        assert torch.equal(y, fusedcuda.lora_linear(x, weight, lora_a, lora_b, scale))
    assert counter.frame_count == 2


def test_dropout_masks_of_forward_and_backward_agree(device):
    """The gradient of x, all in ones, shows the mask that the output was computed with."""
    k = 64
    x = torch.ones(50, k, device=device, requires_grad=True)
    weight = torch.zeros(k, k, device=device)
    eye = torch.eye(k, device=device)

    def function(x: Tensor) -> Tensor:
        return fusedcuda.lora_linear(x, weight, eye, eye, 1.0, dropout_p=0.5, training=True)

    call, _ = compiled(function)
    outputs = []
    for _ in range(2):
        y = call(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(y, gradient)
        assert {*y.unique().tolist()} == {0.0, 2.0}
        outputs.append(y)
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("gated", [False, True])
def test_modules(gated, device):
    mlp = LoRAMLP(16, 24, 4, gated=gated, activation="silu", device=device)
    linear = LoRALinear(16, 8, 4, activation="gelu", device=device)
    for parameter in (*mlp.parameters(), *linear.parameters()):
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 16, device=device)
    for module in (mlp, linear):
        call, counter = compiled(module)
        torch.testing.assert_close(call(x), module(x))
        call(x).sum().backward()
        assert counter.frame_count == 1
        trained = [p for p in module.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained)
