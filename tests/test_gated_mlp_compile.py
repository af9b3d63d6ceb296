"""gated_mlp under torch.compile: one graph, no more compilations than needed."""

import pytest
import torch
import torch._dynamo.testing
from gated_mlps import either_weight, fused, random_layer
from torch import Tensor

from fusedcuda.nn import GatedMLP


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="inductor"):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("recompute", [False, True])
@either_weight
def test_outputs_and_gradients_equal_eager(packed, recompute, device):
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        given = random_layer(9, k=40, f=24, dtype=dtype, device=device).operands(packed).values()

        def function(*tensors: Tensor) -> Tensor:
            return fused(*tensors, recompute=recompute)

        results = []
        for call in (function, compiled(function)[0]):
            leaves = [t.detach().clone().requires_grad_() for t in given]
            y = call(*leaves)
            results.append([y.detach(), *torch.autograd.grad(y.sum(), leaves)])
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)
        with torch.no_grad():
            assert torch.equal(compiled(function)[0](*given), function(*given))


@either_weight
def test_compilations(packed, device):
    """One for one row, one for all other numbers of rows; none for other weights."""
    call, counter = compiled(fused)
    for rows in (1, 7, 128, 33):
        layer = random_layer(rows, k=40, f=24, device=device)
        leaves = [t.requires_grad_() for t in layer.operands(packed).values()]
        y, expected = call(*leaves), fused(*leaves)
        assert torch.equal(y, expected)
        for one, other in zip(
            torch.autograd.grad(y.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 2


def test_some_of_the_gradients(device):
    given = random_layer(9, k=40, f=24, device=device).operands(True).values()
    x, w_gate_up, w_down = (t.detach() for t in given)
    for trained in ((x,), (w_down,), (x, w_gate_up)):
        torch._dynamo.reset()
        for tensor in (x, w_gate_up, w_down):
            tensor.requires_grad_(any(tensor is t for t in trained))
        results = [
            torch.autograd.grad(call(x, w_gate_up, w_down).sum(), trained)
            for call in (fused, compiled(fused)[0])
        ]
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)


@pytest.mark.parametrize("recompute", [False, True])
def test_module(recompute, device):
    module = GatedMLP(16, 24, recompute=recompute, device=device)
    x = torch.randn(5, 16, device=device)
    call, counter = compiled(module)
    torch.testing.assert_close(call(x), module(x))
    call(x).sum().backward()
    assert counter.frame_count == 1
    assert all(p.grad is not None for p in module.parameters())
