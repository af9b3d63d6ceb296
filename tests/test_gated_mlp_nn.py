"""The module GatedMLP: its parameters are those of a Llama, and those of a module it is made of."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import fusedcuda
from fusedcuda.nn import GatedMLP

BF16 = torch.bfloat16
NAMES = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


class LlamaMLP(nn.Module):
    """As the transformers package has it."""

    def __init__(self, hidden: int, intermediate: int, act_fn: nn.Module, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_parameters(device):
    module = GatedMLP(16, 24, device=device, dtype=BF16)
    assert list(module.state_dict()) == NAMES
    assert {
        n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    } == {
        "gate_proj.weight": ((24, 16), BF16, True),
        "up_proj.weight": ((24, 16), BF16, True),
        "down_proj.weight": ((16, 24), BF16, True),
    }
    assert all(p.device.type == device for p in module.parameters())
    bound = 16**-0.5  # the start values of torch.nn.Linear
    assert 0.5 * bound < module.gate_proj.weight.abs().max() <= bound


def test_state_dicts_go_both_ways_with_a_llama(device):
    theirs = LlamaMLP(16, 24, nn.SiLU()).to(device)
    ours = GatedMLP(16, 24, device=device)
    x = torch.randn(2, 5, 16, device=device)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
    theirs.load_state_dict(GatedMLP(16, 24, device=device).state_dict())


def test_state_dict_of_the_transformers_package():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = SimpleNamespace(
        hidden_size=16, intermediate_size=24, hidden_act="silu", mlp_bias=False, pretraining_tp=1
    )
    theirs = modeling.LlamaMLP(config)
    ours = GatedMLP(16, 24)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 16)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(GatedMLP.from_module(theirs)(x), theirs(x))


def test_it_equals_the_function_and_copies_no_weight(device, monkeypatch):
    module = GatedMLP(16, 24, "gelu", device=device)
    x = torch.randn(5, 16, device=device)
    gate, up, down = module.parameters()
    assert torch.equal(module(x), fusedcuda.gated_mlp(x, (gate, up), down, "gelu"))
    given = []
    monkeypatch.setattr("fusedcuda._nn_gated_mlp.gated_mlp", lambda *a, **k: given.append((a, k)))
    module(x)
    (((_, weights, w_down, activation), options),) = given
    assert (weights[0] is gate, weights[1] is up, w_down is down) == (True, True, True)
    assert (activation, options) == ("gelu", {"recompute": False})


@pytest.mark.parametrize("recompute", [False, True])
def test_training(recompute, device):
    theirs = LlamaMLP(16, 24, nn.SiLU()).to(device)
    ours = GatedMLP.from_module(copy.deepcopy(theirs), recompute=recompute)
    x = torch.randn(5, 16, device=device)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


ACTIVATIONS = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_from_module_takes_the_layers_and_the_activation(activation, device):
    theirs = LlamaMLP(16, 24, ACTIVATIONS[activation]).to(device).eval()
    ours = GatedMLP.from_module(theirs)
    assert ours.activation == activation
    assert not ours.training
    layers = [(m.gate_proj, m.up_proj, m.down_proj) for m in (ours, theirs)]
    assert all(mine is other for mine, other in zip(*layers, strict=True))
    x = torch.randn(5, 16, device=device)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("SiLUActivation", "silu"),
        ("GELUActivation", "gelu"),
        ("GELUTanh", "gelu_tanh"),
        ("PytorchGELUTanh", "gelu_tanh"),
        ("NewGELUActivation", "gelu_tanh"),
        ("ReLUSquaredActivation", "relu_squared"),
    ],
)
def test_activations_of_the_transformers_package(name, activation):
    of_that_name = type(name, (nn.Module,), {})()
    assert GatedMLP.from_module(LlamaMLP(16, 24, of_that_name)).activation == activation


def test_what_from_module_refuses():
    with pytest.raises(ValueError, match=r"^GatedMLP: gate_proj must have no bias.*; got one"):
        GatedMLP.from_module(LlamaMLP(4, 6, nn.SiLU(), bias=True))
    with pytest.raises(ValueError, match=r"^GatedMLP: activation must be given.*; got Softplus"):
        GatedMLP.from_module(LlamaMLP(4, 6, nn.Softplus()))
    with pytest.raises(TypeError, match=r"^GatedMLP: gate_proj must be a .*; got NoneType"):
        GatedMLP.from_module(nn.Linear(4, 6))
    module = LlamaMLP(4, 6, nn.SiLU())
    module.up_proj = nn.Identity()
    with pytest.raises(TypeError, match=r"^GatedMLP: up_proj must be a .*Linear; got Identity"):
        GatedMLP.from_module(module)
    module = LlamaMLP(4, 6, nn.SiLU())
    packed = torch.zeros(12, 1, dtype=torch.uint8)
    module.down_proj.weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(TypeError, match=r"down_proj.weight must be .*\(4, 6\), not packed"):
        GatedMLP.from_module(module)
    unknown = LlamaMLP(4, 6, nn.Softplus())
    assert GatedMLP.from_module(unknown, "relu").activation == "relu"


def test_what_the_constructor_refuses():
    with pytest.raises(ValueError, match=r"^GatedMLP: bias must be False, .*; got True"):
        GatedMLP(4, 6, bias=True)
    with pytest.raises(ValueError, match=r"^GatedMLP: activation must be one of .*'swish'"):
        GatedMLP(4, 6, "swish")


def test_copies_and_saving():
    module = GatedMLP(16, 24, "gelu_tanh", recompute=True)
    x = torch.randn(3, 16)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), module(x))
    assert "activation='gelu_tanh', recompute=True" in repr(module)
    assert "recompute" not in repr(GatedMLP(4, 6))
    assert module.to(BF16)(x.to(BF16)).dtype == BF16
