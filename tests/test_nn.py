"""The modules of fusedcuda.nn: parameters, names and nothing else."""

import io
import re

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


# ---------------------------------------------------------------------------- modules torch has


def random_parameters(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


NORM_MODULES = [
    pytest.param(name, options, id=f"{name}-{options}")
    for name, options in (
        ("RMSNorm", {}),
        ("RMSNorm", {"eps": 1e-3}),
        ("RMSNorm", {"elementwise_affine": False}),
        ("LayerNorm", {}),
        ("LayerNorm", {"eps": 1e-3}),
        ("LayerNorm", {"bias": False}),
        ("LayerNorm", {"elementwise_affine": False}),
    )
]


@pytest.mark.parametrize(("name", "options"), NORM_MODULES)
def test_state_dicts_go_both_ways(name, options, device):
    ours = random_parameters(getattr(fusedcuda.nn, name)(16, device=device, **options))
    theirs = random_parameters(getattr(torch.nn, name)(16, device=device, **options))
    x = torch.randn(3, 5, 16, device=device)
    before = ours(x)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs(x), before)
    random_parameters(theirs)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, type(theirs))


@pytest.mark.parametrize(("name", "options"), NORM_MODULES)
def test_fresh_modules_equal_torchs(name, options, device):
    x = torch.randn(3, 16, device=device)
    ours, theirs = (
        getattr(module, name)([16], device=device, **options) for module in (fusedcuda.nn, torch.nn)
    )
    torch.testing.assert_close(ours(x), theirs(x))
    for a, b in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_rms_norm_without_an_eps(dtype, device):
    """So small that eps is most of the denominator: it has to be the one torch takes."""
    x = torch.randn(3, 16, dtype=dtype, device=device) * (1e-8 if dtype == torch.float64 else 1e-4)
    ours, theirs = (m.RMSNorm(16, device=device, dtype=dtype) for m in (fusedcuda.nn, torch.nn))
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norm_modules_with_a_residual(name, device):
    layer = random_parameters(getattr(fusedcuda.nn, name)(16, device=device))
    x, residual = torch.randn(2, 3, 16, device=device)
    y, h = layer(x, residual)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, layer(h))
    (y * h).sum().backward()
    assert all(torch.count_nonzero(p.grad) == 16 for p in layer.parameters())


def test_the_weight_offset_is_part_of_the_weight(device):
    x = torch.randn(3, 16, device=device)
    layer = fusedcuda.nn.RMSNorm(16, weight_offset=1.0, device=device)
    assert torch.count_nonzero(layer.weight) == 0
    torch.testing.assert_close(layer(x), torch.nn.RMSNorm(16, device=device)(x))
    torch.nn.init.normal_(layer.weight)
    expected = torch.nn.functional.rms_norm(x, (16,), layer.weight + 1)
    torch.testing.assert_close(layer(x), expected)
    layer.reset_parameters()
    assert torch.count_nonzero(layer.weight) == 0
    assert "weight_offset=1.0" in repr(layer)
    with pytest.raises(ValueError, match=r"^RMSNorm: weight_offset .*1\.0"):
        fusedcuda.nn.RMSNorm(16, elementwise_affine=False, weight_offset=1.0)


@pytest.mark.parametrize("shape", [(4, 16), [2, 4, 16], ()], ids=str)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_one_normalised_dimension(name, shape):
    got = re.escape(str(tuple(shape)))
    with pytest.raises(ValueError, match=rf"^{name}: normalized_shape .*got {got}"):
        getattr(fusedcuda.nn, name)(shape)


def test_cross_entropy_loss(device):
    logits = torch.randn(6, 10, device=device)
    target = torch.tensor([0, 9, 3, -1, 3, 5], device=device)
    options = {"ignore_index": -1, "label_smoothing": 0.1}
    weight = torch.rand(10, device=device)
    for reduction in ("none", "mean", "sum"):
        for class_weight in (None, weight):
            ours, theirs = (
                m.CrossEntropyLoss(class_weight, reduction=reduction, **options)
                for m in (fusedcuda.nn, torch.nn)
            )
            torch.testing.assert_close(ours(logits, target), theirs(logits, target))
            theirs.load_state_dict(ours.state_dict())
    loss = fusedcuda.nn.CrossEntropyLoss(z_loss=0.1, softcap=5.0)
    expected = fusedcuda.cross_entropy(logits, target.clamp(min=0), z_loss=0.1, softcap=5.0)
    assert torch.equal(loss(logits, target.clamp(min=0)), expected)
