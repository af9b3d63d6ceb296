"""The modules of fusedcuda.nn: parameters, names and nothing else."""

import io

import pytest
import torch
from reference import ACTIVATIONS

import fusedcuda
from fusedcuda.nn import ActMul, BiasAct


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_modules_equal_the_functions(activation, device):
    x = torch.randn(5, 16, device=device)
    layer = BiasAct(16, activation, device=device)
    torch.nn.init.normal_(layer.bias)
    assert torch.equal(layer(x), fusedcuda.bias_act(x, layer.bias, activation))
    gated = ActMul(activation)
    assert torch.equal(gated(x, x + 1), fusedcuda.act_mul(x, x + 1, activation))
    assert torch.equal(gated(x), fusedcuda.act_mul_packed(x, activation))


def test_the_bias_of_a_linear_layer_can_be_loaded(device):
    linear = torch.nn.Linear(8, 16, device=device)
    layer = BiasAct(16, device=device)
    assert torch.count_nonzero(layer.bias) == 0
    layer.load_state_dict({"bias": linear.bias.detach()})
    x = torch.randn(4, 8, device=device)
    without_bias = torch.nn.functional.linear(x, linear.weight)
    torch.testing.assert_close(layer(without_bias), torch.relu(linear(x)))


def test_the_bias_is_trained(device):
    layer = BiasAct(16, "gelu", device=device, dtype=torch.float64)
    assert [(name, p.dtype, p.shape) for name, p in layer.named_parameters()] == [
        ("bias", torch.float64, (16,))
    ]
    layer(torch.randn(4, 16, dtype=torch.float64, device=device)).sum().backward()
    assert torch.count_nonzero(layer.bias.grad) == 16


def test_repr_and_saving():
    model = torch.nn.Sequential(BiasAct(8, "silu"), ActMul("gelu"))
    assert "BiasAct(8, activation='silu')" in repr(model)
    assert "ActMul(activation='gelu')" in repr(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(3, 8)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("make", [lambda: BiasAct(8, "swish"), lambda: ActMul("swish")])
def test_an_unknown_activation_is_refused_when_the_module_is_made(make):
    with pytest.raises(ValueError, match=r"^(BiasAct|ActMul): activation .*'swish'"):
        make()
