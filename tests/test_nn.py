"""The modules of fusedcuda.nn: parameters, names and nothing else."""

import copy
import io
import re

import pytest
import torch
from reference import ACTIVATIONS

import fusedcuda
from fusedcuda.nn import MLP, ActMul, BiasAct, LinearAct


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


@pytest.mark.parametrize(
    ("name", "sizes"), [("BiasAct", (8,)), ("ActMul", ()), ("LinearAct", (8, 8)), ("MLP", (8, 8))]
)
def test_an_unknown_activation_is_refused_when_the_module_is_made(name, sizes):
    with pytest.raises(ValueError, match=rf"^{name}: activation .*'swish'"):
        getattr(fusedcuda.nn, name)(*sizes, activation="swish")


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


# ---------------------------------------------------------------------------- linear layers


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_modules_equal_the_functions(activation, device):
    x = torch.randn(2, 3, 13, device=device)
    layer = LinearAct(13, 6, activation=activation, device=device)
    expected = fusedcuda.linear_act(x, layer.weight, layer.bias, activation)
    assert torch.equal(layer(x), expected)
    torch.testing.assert_close(
        layer(x),
        ACTIVATIONS[activation](torch.nn.functional.linear(x, layer.weight, layer.bias)),
    )
    two = MLP(13, 8, 5, activation=activation, device=device)
    torch.testing.assert_close(two(x), two.fc2(two.fc1(x)))
    assert two(x).shape == (2, 3, 5)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_load_each_other(bias, device):
    """Names, shapes and, from one seed, start values are those of torch.nn.Linear."""
    torch.manual_seed(0)
    ours = LinearAct(13, 6, bias, device=device)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(13, 6, bias, device=device)
    x = torch.randn(4, 13, device=device)
    for mine, other in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert mine[0] == other[0]
        assert torch.equal(mine[1], other[1])
    torch.testing.assert_close(ours(x), theirs(x))
    for pad_rows in (True, False):
        ours = random_parameters(LinearAct(13, 6, bias, device=device, pad_rows=pad_rows))
        theirs.load_state_dict(ours.state_dict())
        assert theirs.weight.is_contiguous()
        torch.testing.assert_close(ours(x), theirs(x))
        random_parameters(theirs)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x), theirs(x))


def test_mlp_loads_two_linear_layers(device):
    layers = {"fc1": torch.nn.Linear(13, 8), "fc2": torch.nn.Linear(8, 13)}
    theirs = torch.nn.ModuleDict(layers).to(device)
    ours = MLP(13, 8, device=device)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 13, device=device)
    gelu_tanh = torch.nn.GELU(approximate="tanh")
    expected = theirs["fc2"](gelu_tanh(theirs["fc1"](x)))
    torch.testing.assert_close(ours(x), expected)
    assert [name for name, _ in MLP(4, 8, bias=False).named_parameters()] == [
        "fc1.weight",
        "fc2.weight",
    ]


def test_repr_of_linear_layers():
    assert repr(LinearAct(13, 6, bias=False, activation="silu")) == (
        "LinearAct(13, 6, bias=False, activation='silu')"
    )
    assert "(fc1): LinearAct(13, 8, bias=True, activation='gelu_tanh')" in repr(MLP(13, 8, 5))
    assert "(fc2): LinearAct(8, 5, bias=True, activation='none')" in repr(MLP(13, 8, 5))


def padded(device: str, **options) -> LinearAct:
    layer = LinearAct(13, 6, activation="relu", device=device, pad_rows=True, **options)
    assert (layer.weight.shape, layer.weight.stride()) == ((6, 13), (16, 1))
    return layer


def through_a_file(layer: LinearAct) -> LinearAct:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.to(torch.float64),
        lambda layer: layer.bfloat16().float(),
        lambda layer: layer.requires_grad_(False),
        lambda layer: layer.to("meta").to_empty(device="cpu"),
        copy.deepcopy,
        through_a_file,
    ],
)
def test_padded_rows_stay_padded(change, device):
    layer = change(padded(device))
    assert layer.weight.stride() == (16, 1)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.is_leaf
    x = torch.randn(4, 13, dtype=layer.weight.dtype, device=layer.weight.device)
    random_parameters(layer)
    torch.testing.assert_close(
        layer(x), torch.relu(torch.nn.functional.linear(x, layer.weight, layer.bias))
    )


def test_a_parameter_stays_the_same_object(device):
    """Optimizers and tied layers hold it."""
    layer = padded(device)
    before = layer.weight
    layer.to(torch.float64)
    assert layer.weight is before
    tied = torch.nn.Linear(13, 6, device=device)
    tied.weight = layer.weight
    both = copy.deepcopy(torch.nn.ModuleList([layer, tied]))
    assert both[0].weight is both[1].weight


def test_rows_that_something_made_contiguous_are_as_good(device):
    """load_state_dict(assign=True) does; the layer pads them again when it is moved."""
    layer = padded(device)
    theirs = torch.nn.Linear(13, 6, device=device)
    layer.load_state_dict(theirs.state_dict(), assign=True)
    assert layer.weight.stride() == (13, 1)
    x = torch.randn(4, 13, device=device)
    torch.testing.assert_close(layer(x), torch.relu(theirs(x)))
    assert layer.float().weight.stride() == (16, 1)
    torch.testing.assert_close(layer(x), torch.relu(theirs(x)))


def test_which_rows_are_padded(device):
    assert LinearAct(16, 6, device=device, pad_rows=True).weight.is_contiguous()
    assert LinearAct(13, 6, device=device).weight.is_contiguous()
    both = MLP(13, 9, device=device, pad_rows=True)
    assert (both.fc1.weight.stride(0), both.fc2.weight.stride(0)) == (16, 16)
    assert LinearAct(0, 6, device=device, pad_rows=True).weight.shape == (6, 0)


@pytest.mark.gpu
def test_rows_stay_padded_on_their_way_to_the_gpu():
    assert LinearAct(13, 6, pad_rows=True).to("cuda").weight.stride() == (16, 1)
    assert LinearAct(13, 6).to("cuda").weight.stride() == (13, 1)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("foreach", [False, True])
def test_padded_layers_are_trained_like_others(optimizer, foreach, device):
    torch.manual_seed(0)
    ours = MLP(13, 9, 5, activation="relu", device=device, pad_rows=True)
    theirs = torch.nn.Sequential(
        torch.nn.Linear(13, 9, device=device),
        torch.nn.ReLU(),
        torch.nn.Linear(9, 5, device=device),
    )
    theirs[0].load_state_dict(ours.fc1.state_dict())
    theirs[2].load_state_dict(ours.fc2.state_dict())
    steps = [
        getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, foreach=foreach)
        for model in (ours, theirs)
    ]
    for _ in range(3):
        x = torch.randn(16, 13, device=device)
        for model, step in zip((ours, theirs), steps, strict=True):
            step.zero_grad()
            model(x).square().sum().backward()
            step.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    assert ours.fc1.weight.stride() == (16, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
def test_fused_optimizers_refuse_padded_parameters_or_are_right(optimizer):
    """Never silently wrong on CUDA."""
    layer = padded("cuda")
    reference = copy.deepcopy(layer.weight.detach().contiguous()).requires_grad_()
    layer.weight.grad = torch.randn_like(reference)
    reference.grad = layer.weight.grad.clone()
    make = getattr(torch.optim, optimizer)
    make([reference], lr=0.1).step()
    try:
        make([layer.weight], lr=0.1, fused=True).step()
    except RuntimeError:
        return
    torch.testing.assert_close(layer.weight, reference)


def test_gradients_of_padded_layers(device):
    x = torch.randn(4, 13, device=device)
    layer = padded(device)
    theirs = torch.nn.Linear(13, 6, device=device)
    theirs.load_state_dict(layer.state_dict())
    for _ in range(2):
        layer(x).sum().backward()
        torch.relu(theirs(x)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, theirs.weight.grad)
    assert layer.weight.grad.is_contiguous()
