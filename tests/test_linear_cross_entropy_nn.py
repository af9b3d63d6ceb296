"""fusedcuda.nn.LinearCrossEntropy."""

import copy

import pytest
import torch
from linear_losses import OPTIONS, eager
from torch import nn

import fusedcuda
from fusedcuda.nn import LinearCrossEntropy


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_function_of_its_parameters(name, bias, device):
    options = {**OPTIONS[name], "reduction": "sum", "ignore_index": 3}
    layer = LinearCrossEntropy(16, 9, bias, device, chunk=4, accumulate="weight", **options)
    x = torch.randn(2, 5, 16, device=device)
    target = torch.randint(9, (2, 5), device=device)
    loss = layer(x, target)
    expected = eager(x, layer.weight, layer.bias, target, **options)
    torch.testing.assert_close(loss, expected)
    assert (layer.bias is not None) == bias
    parameters = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    )


@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_go_both_ways(bias):
    layer, linear = LinearCrossEntropy(16, 9, bias), nn.Linear(16, 9, bias)
    assert list(layer.state_dict()) == list(linear.state_dict())
    layer.load_state_dict(linear.state_dict())
    assert torch.equal(layer.weight, linear.weight)
    linear.load_state_dict(LinearCrossEntropy(16, 9, bias).state_dict())
    assert isinstance(layer, nn.Linear)


def test_it_starts_as_a_linear_layer():
    torch.manual_seed(1)
    layer = LinearCrossEntropy(16, 9)
    torch.manual_seed(1)
    linear = nn.Linear(16, 9)
    assert torch.equal(layer.weight, linear.weight)
    assert torch.equal(layer.bias, linear.bias)


def test_a_weight_tied_to_an_embedding(device):
    embedding = nn.Embedding(9, 16, device=device)
    layer = LinearCrossEntropy(16, 9, bias=False, device=device)
    layer.weight = embedding.weight
    tokens = torch.randint(9, (7,), device=device)
    layer(embedding(tokens), tokens).backward()
    own = embedding.weight.detach().requires_grad_()
    fusedcuda.linear_cross_entropy(own[tokens], own, tokens).backward()
    torch.testing.assert_close(embedding.weight.grad, own.grad)


def test_what_it_says_of_itself():
    layer = LinearCrossEntropy(16, 9, bias=False, reduction="none", chunk=128)
    assert repr(layer) == (
        "LinearCrossEntropy(in_features=16, out_features=9, bias=False, reduction='none', "
        "chunk=128)"
    )
    assert copy.deepcopy(layer).chunk == 128


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("reduction must", {"reduction": "avg"}),
        ("chunk must", {"chunk": 0}),
        ("accumulate must", {"accumulate": "bf16"}),
        ("z_loss must", {"z_loss": -1.0}),
    ],
)
def test_options_are_checked_when_it_is_made(words, options):
    with pytest.raises(ValueError, match=f"^LinearCrossEntropy: {words}"):
        LinearCrossEntropy(16, 9, **options)
