"""The modules LoRALinear and LoRAMLP: parameters and their names, what is frozen, merging."""

import copy
import io

import pytest
import torch
from torch import nn

import fusedcuda
from fusedcuda.nn import LoRALinear, LoRAMLP

BF16 = torch.bfloat16
PEFT_NAMES = [
    "base_layer.weight",
    "base_layer.bias",
    "lora_A.default.weight",
    "lora_B.default.weight",
]


def random_adapter(layer: LoRALinear) -> LoRALinear:
    nn.init.normal_(layer.lora_a, std=0.1)
    nn.init.normal_(layer.lora_b, std=0.1)
    return layer


def test_parameters_are_those_of_peft(device):
    layer = LoRALinear(16, 8, 4, device=device, dtype=BF16)
    assert list(layer.state_dict()) == PEFT_NAMES
    assert {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in layer.named_parameters()} == {
        "base_layer.weight": ((8, 16), BF16, False),
        "base_layer.bias": ((8,), BF16, False),
        "lora_A.default.weight": ((4, 16), torch.float32, True),
        "lora_B.default.weight": ((8, 4), torch.float32, True),
    }
    assert all(p.is_leaf and p.device.type == device for p in layer.parameters())
    assert not layer.lora_b.any()
    bound = 1 / 16**0.5
    assert 0.5 * bound < layer.lora_a.abs().max() <= bound
    assert LoRALinear(16, 8, 4, dtype=BF16, lora_dtype=BF16).lora_a.dtype == BF16
    assert LoRALinear(16, 8, 4, dtype=torch.float64).lora_a.dtype == torch.float64
    assert LoRALinear(16, 8, 4, bias=False).bias is None


def test_state_dicts_go_both_ways_with_the_peft_package():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"])
    theirs = peft.inject_adapter_in_model(config, nn.Sequential(nn.Linear(16, 8)))[0]
    ours = random_adapter(LoRALinear(16, 8, 4, alpha=8))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 16)
    torch.testing.assert_close(theirs(x), ours(x))
    nn.init.normal_(theirs.lora_B["default"].weight)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(theirs(x), ours(x))


def test_it_equals_the_function(device):
    x = torch.randn(5, 16, device=device)
    layer = random_adapter(LoRALinear(16, 8, 4, 2.0, activation="silu", device=device))
    expected = fusedcuda.lora_linear(
        x, layer.weight, layer.lora_a, layer.lora_b, 0.5, layer.bias, "silu"
    )
    assert torch.equal(layer(x), expected)


def test_only_the_adapter_is_trained(device):
    layer = random_adapter(LoRALinear(16, 8, 4, device=device))
    before = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.randn(5, 16, device=device)).square().sum().backward()
    optimizer.step()
    changed = {name for name, value in layer.state_dict().items() if (value != before[name]).any()}
    assert changed == {"lora_A.default.weight", "lora_B.default.weight"}


def test_from_linear_takes_the_layer_itself(device):
    linear = nn.Linear(16, 8, device=device).eval()
    layer = LoRALinear.from_linear(linear, 4, dropout=0.5)
    assert layer.base_layer is linear
    assert not layer.training
    assert not any(p.requires_grad for p in linear.parameters())
    x = torch.randn(5, 16, device=device)
    torch.testing.assert_close(layer(x), linear(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16], ids=str)
def test_merging(dtype, device):
    layer = random_adapter(LoRALinear(16, 8, 4, 2.0, device=device, dtype=dtype)).eval()
    x = torch.randn(5, 16, device=device, dtype=dtype)
    before, weight = layer(x), layer.weight.clone()
    expected = (weight.double() + 0.5 * layer.lora_b.double() @ layer.lora_a.double()).to(dtype)
    for keep_base in (True, False):
        for _ in range(2):  # the second time there is nothing to do
            layer.merge(keep_base)
        assert layer.merged
        torch.testing.assert_close(layer.weight.detach(), expected)
        tolerance = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(layer(x), before, atol=tolerance, rtol=tolerance)
        for _ in range(2):
            layer.unmerge()
        assert not layer.merged
        if keep_base:
            assert torch.equal(layer.weight, weight)
        else:
            torch.testing.assert_close(layer.weight.detach(), weight, atol=tolerance, rtol=0)
    assert not layer.weight.requires_grad


def test_a_merged_adapter_is_not_trained(device):
    layer = random_adapter(LoRALinear(16, 8, 4, device=device))
    x = torch.randn(5, 16, device=device)
    layer.merge()
    with pytest.raises(RuntimeError, match=r"^LoRALinear: the adapter is merged .* unmerge\(\)"):
        layer(x)
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    layer.unmerge()
    layer.train()(x).sum().backward()
    assert layer.lora_b.grad.any()


def test_dropout_is_that_of_training(device):
    layer = random_adapter(LoRALinear(64, 8, 4, dropout=0.5, device=device))
    x = torch.randn(5, 64, device=device)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_copies_and_saving():
    model = random_adapter(LoRALinear(16, 8, 4, 8, activation="gelu", dropout=0.1)).eval()
    x = torch.randn(3, 16)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))
        assert [p.requires_grad for p in other.parameters()] == [False, False, True, True]
    shown = repr(model)
    assert "rank=4, scale=2, activation='gelu', dropout=0.1" in shown
    assert "merged" not in shown
    model.merge()
    assert "merged" in repr(model)
    assert model.to(BF16)(x.to(BF16)).dtype == BF16


@pytest.mark.parametrize("gated", [False, True])
def test_mlp(gated, device):
    mlp = LoRAMLP(16, 24, 4, alpha=8, gated=gated, activation="silu", device=device)
    layers = [mlp.up_proj, mlp.down_proj, *([mlp.gate_proj] if gated else [])]
    for layer in layers:
        random_adapter(layer)
    assert mlp.down_proj.base_layer.out_features == 16
    x = torch.randn(2, 3, 16, device=device)
    act = nn.functional.silu
    h = act(mlp.gate_proj(x)) * mlp.up_proj(x) if gated else act(mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), mlp.down_proj(h))
    mlp(x).sum().backward()
    assert sum(p.grad is not None for p in mlp.parameters()) == 2 * len(layers)
    names = [name for name in mlp.state_dict() if name.startswith("up_proj.")]
    assert names == [f"up_proj.{name}" for name in PEFT_NAMES]
    for layer in layers:
        layer.merge()
    with pytest.raises(RuntimeError, match="unmerge"):
        mlp(x)
    torch.testing.assert_close(mlp.eval()(x), mlp.down_proj(h), atol=1e-5, rtol=1e-5)


def test_mlp_of_layers_with_other_ranks_or_none(device):
    up = random_adapter(LoRALinear(16, 24, 4, device=device))
    gate = random_adapter(LoRALinear(16, 24, 7, 3.0, use_rslora=True, device=device))
    down = nn.Linear(24, 5, device=device)
    mlp = LoRAMLP.from_layers(up, down, gate, "gelu")
    assert (mlp.up_proj, mlp.down_proj, mlp.gate_proj) == (up, down, gate)
    x = torch.randn(3, 16, device=device)
    torch.testing.assert_close(mlp(x), down(nn.functional.gelu(gate(x)) * up(x)))
