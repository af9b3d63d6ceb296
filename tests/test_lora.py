"""lora_linear and lora_mlp against float64. Cases with numbers: test_cases_lora.py."""

import layouts
import pytest
import torch
from linears import exact
from loras import Layer, check_lora, drawn_seed, eager, mask_of, random_layer
from reference import ACTIVATIONS, DTYPES
from torch import Tensor

import fusedcuda
from fusedcuda.ops import _lora_cuda, _lora_dropout, _lora_reference

HALVES = (torch.float16, torch.bfloat16)
BF16 = torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


# ---- Linear --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 5, 8, 16, 24, 64, 100, 256])
@every_dtype
def test_ranks(rank, dtype, device):
    check_lora(random_layer(70, n=48, k=128, rank=rank, dtype=dtype, device=device))


@pytest.mark.parametrize("rank", [1, 5, 16, 100])
@every_half
def test_factors_in_float32(dtype, rank, device):
    layer = random_layer(
        70, n=48, k=128, rank=rank, dtype=dtype, lora_dtype=torch.float32, device=device
    )
    check_lora(layer)
    # One of each: only the second factor is float32.
    check_lora(layer._replace(lora_a=layer.lora_a.to(dtype)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_dtype
def test_activations(dtype, activation, device):
    check_lora(random_layer(70, n=48, k=64, rank=8, dtype=dtype, device=device), 0.5, activation)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 13), (40, 479), (129, 20), (3424, 24)])
@every_dtype
def test_features_that_fit_no_tile(dtype, n, k, device):
    layer = random_layer(33, n=n, k=k, rank=6, dtype=dtype, device=device)
    check_lora(layer)
    check_lora(layer._replace(bias=None), 0.5, "silu")


@pytest.mark.parametrize("rows", [(), (1,), (16,), (2, 3), (2, 1, 5), (300,)], ids=str)
def test_leading_dimensions(rows, device):
    for dtype in (torch.float32, BF16):
        layer = random_layer(*(rows or (1,)), n=24, k=40, rank=4, dtype=dtype, device=device)
        if not rows:
            layer = layer._replace(x=layer.x[0])
            y = fusedcuda.lora_linear(layer.x, layer.weight, *layer[3:], 0.5, layer.bias)
            assert y.shape == (24,)
            continue
        assert check_lora(layer, 0.5, "gelu").shape == (*rows, 24)


@every_dtype
def test_layouts_of_the_operands(dtype, device):
    """Some take other kernels, which round in other places."""
    layer = random_layer(6, 5, n=24, k=40, rank=8, dtype=dtype, device=device)
    for change in (layouts.pitched, layouts.transposed, layouts.spread):
        for name in ("x", "weight", "lora_a", "lora_b"):
            given = layer._replace(**{name: change(getattr(layer, name))})
            check_lora(given)
    for shift in (1, 4):
        for name in Layer._fields:
            check_lora(layer._replace(**{name: layouts.shifted(getattr(layer, name), shift)}))


def test_layouts_of_the_incoming_gradient(device):
    layer = random_layer(6, 5, n=24, k=40, rank=8, dtype=BF16, device=device)
    dy = exact(6, 5, 24, dtype=BF16, device=device)
    for given in (layouts.pitched(dy), layouts.transposed(dy), dy[:1, :1].expand(6, 5, 24)):
        check_lora(layer, 0.5, "silu", dy=given)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "lora_a", "lora_b"])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_one_gradient_is_that_of_all_of_them(activation, wanted, device):
    layer = random_layer(40, n=24, k=40, rank=8, dtype=BF16, device=device)
    dy = exact(40, 24, dtype=BF16, device=device)

    def gradients(names: tuple[str, ...]) -> dict[str, Tensor]:
        given = Layer(*(t.detach().clone() for t in layer))
        leaves = [getattr(given, name).requires_grad_() for name in names]
        x, weight, bias, lora_a, lora_b = given
        y = fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias, activation)
        return dict(zip(names, torch.autograd.grad(y, leaves, dy), strict=True))

    alone, among_all = gradients((wanted,))[wanted], gradients(Layer._fields)[wanted]
    if wanted in ("weight", "bias"):  # cuBLASLt makes both at once, in another order
        torch.testing.assert_close(alone, among_all)
    else:
        assert torch.equal(alone, among_all)


@pytest.mark.parametrize("rows", [0, 3])
def test_empty(rows, device):
    for dtype in (torch.float32, BF16):
        for n, k in ((5, 4), (0, 4), (5, 0)):
            layer = random_layer(rows, n=n, k=k, rank=3, dtype=dtype, device=device)
            leaves = [t.requires_grad_() for t in layer]
            x, weight, bias, lora_a, lora_b = layer
            y = fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias, "silu")
            assert y.shape == (rows, n)
            if k == 0 and rows > 0:
                torch.testing.assert_close(y, torch.nn.functional.silu(bias.expand(rows, n)))
            for leaf, gradient in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
                assert gradient.shape == leaf.shape
                if rows == 0:
                    assert not gradient.any()


def test_the_scale_may_be_any_number(device):
    layer = random_layer(40, n=24, k=40, rank=8, dtype=BF16, device=device)
    for scale in (0, 1, 2.0, -0.25, 16):
        check_lora(layer, scale)


# ---- Dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["none", "gelu_tanh"])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@every_dtype
def test_dropout(dtype, dropout_p, activation, device):
    for k in (128, 44, 13):
        layer = random_layer(70, n=48, k=k, rank=16, dtype=dtype, device=device)
        check_lora(layer, 0.5, activation, dropout_p=dropout_p)


def test_dropout_only_in_training(device):
    x, weight, bias, lora_a, lora_b = random_layer(40, n=24, k=40, rank=8, device=device)
    plain = fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias)
    state = torch.get_rng_state()
    still = fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias, dropout_p=0.5)
    assert torch.equal(still, plain)
    assert torch.equal(torch.get_rng_state(), state)  # and nothing is drawn
    trained = [
        fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias, dropout_p=0.5, training=True)
        for _ in range(2)
    ]
    assert not torch.equal(trained[0], plain)
    assert not torch.equal(trained[0], trained[1])


def test_what_is_dropped():
    """As many as asked for, alike in all columns and rows; with another seed, others."""
    rows, columns = 2000, 1003
    masks = {
        (seed, p): _lora_dropout.keep_mask(torch.tensor([seed]), (rows, columns), p)
        for seed in (0, 1)
        for p in (0.1, 0.5)
    }
    for (_, p), mask in masks.items():
        for kept, samples in ((mask.double().mean(0), rows), (mask.double().mean(1), columns)):
            sigma = (p * (1 - p) / samples) ** 0.5
            assert (kept - (1 - p)).abs().max() < 5 * sigma
        assert (mask.double().mean() - (1 - p)).abs() < 5 * (p * (1 - p) / rows / columns) ** 0.5
    agree = (masks[0, 0.5] == masks[1, 0.5]).double().mean()
    assert (agree - 0.5).abs() < 5 * 0.5 / (rows * columns) ** 0.5
    # What is dropped with a small probability is dropped with a larger one, too.
    assert not (masks[0, 0.5] & ~masks[0, 0.1]).any()


def test_the_generator_gives_the_published_numbers():
    """Known answers of Random123: philox4x32 with 7 and 10 rounds."""
    zero, ones = torch.tensor(0), torch.tensor(0xFFFFFFFF)
    for value, rounds, expected in (
        (zero, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (ones, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (zero, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ones, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        words = _lora_dropout.philox([value] * 4, (value, value), rounds)
        assert tuple(words.tolist()) == expected


# ---- Paths ---------------------------------------------------------------------------------------


@pytest.fixture(params=_lora_cuda.PATHS)
def path(request: pytest.FixtureRequest):
    before = torch.ops.fusedcuda.lora_use(request.param)
    yield request.param
    assert torch.ops.fusedcuda.lora_use(before) == request.param


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@every_dtype
def test_paths(path, dtype, activation, dropout_p, device):
    layer = random_layer(70, n=48, k=44, rank=5, dtype=dtype, device=device)
    check_lora(layer, 0.5, activation, dropout_p=dropout_p)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@every_dtype
def test_what_cuda_is_put_together_of_equals_the_reference(path, dtype, activation, dropout_p):
    """The same operators on the CPU, where each is its reference: needs no GPU."""
    layer = random_layer(4, 7, n=24, k=44, rank=5, dtype=dtype)
    seed = torch.tensor([99]) if dropout_p else None
    code = fusedcuda.ops._activations.ACTIVATIONS[activation]
    options = (code, 0.5, dropout_p)
    close = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}

    def compare(name: str, *arguments: object) -> list[Tensor]:
        expected = getattr(_lora_reference, name)(*arguments)
        actual = getattr(_lora_cuda, name)(*arguments)
        torch.testing.assert_close(actual, expected, **close)
        return expected

    compare("lora_linear", *layer, seed, *options)
    y, t, *z = compare("lora_linear_forward", *layer, seed, *options)
    saved = z[0] if z else y if activation == "relu" else None
    dy = exact(4, 7, 24, dtype=dtype)
    x, weight, _, lora_a, lora_b = layer
    for mask in (0b11111, 0b11000, 0b00001, 0b00110, 0b10000, 0):
        close["atol"] = 32 * torch.finfo(dtype).eps
        compare(
            "lora_linear_backward", dy, x, weight, saved, t, lora_a, lora_b, seed, *options, mask
        )


def test_unknown_path_is_refused():
    with pytest.raises(ValueError, match=r"^lora_use: path must be one of auto, .*; got 'fast'"):
        torch.ops.fusedcuda.lora_use("fast")


# ---- MLP -----------------------------------------------------------------------------------------


def mlp_weights(
    device: str, dtype: torch.dtype, gated: bool
) -> tuple[Tensor, dict[str, fusedcuda.LoRAWeights]]:
    layers = {"up": (48, 40, 5), "down": (24, 48, 16)} | ({"gate": (48, 40, 3)} if gated else {})
    weights = {}
    for name, (n, k, rank) in layers.items():
        _, weight, bias, lora_a, lora_b = random_layer(
            1, n=n, k=k, rank=rank, dtype=dtype, device=device
        )
        weights[name] = fusedcuda.LoRAWeights(weight, lora_a, lora_b, 1 / rank, bias)
    return exact(2, 9, 40, dtype=dtype, device=device), weights


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation, gated, device):
    x, weights = mlp_weights(device, torch.float64, gated)

    def layer(name: str, x: Tensor) -> Tensor:
        weight, lora_a, lora_b, scale, bias, _ = weights[name]
        return eager(x, weight, bias, lora_a, lora_b, scale)

    act = ACTIVATIONS[activation]
    h = act(layer("gate", x)) * layer("up", x) if gated else act(layer("up", x))
    expected = layer("down", h)
    actual = fusedcuda.lora_mlp(x, activation=activation, **weights)
    torch.testing.assert_close(actual, expected)
    for dtype in (torch.float32, BF16):
        narrow = {
            name: w._replace(
                weight=w.weight.to(dtype),
                lora_a=w.lora_a.float(),
                lora_b=w.lora_b.float(),
                bias=w.bias.to(dtype),
            )
            for name, w in weights.items()
        }
        result = fusedcuda.lora_mlp(x.to(dtype), activation=activation, **narrow)
        tolerance = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            result.double(), expected, atol=tolerance * expected.abs().max().item(), rtol=tolerance
        )


@pytest.mark.parametrize("missing", ["up", "down", "gate"])
def test_mlp_without_one_of_the_adapters(missing, device):
    x, weights = mlp_weights(device, torch.float64, gated=True)
    without = weights | {missing: weights[missing]._replace(lora_a=None, lora_b=None)}
    zero = weights | {missing: weights[missing]._replace(scale=0.0)}
    torch.testing.assert_close(
        fusedcuda.lora_mlp(x, activation="silu", **without),
        fusedcuda.lora_mlp(x, activation="silu", **zero),
    )


def test_each_layer_of_an_mlp_draws_its_own_mask(device):
    x, weights = mlp_weights(device, torch.float64, gated=False)
    drop = {name: w._replace(dropout_p=0.5) for name, w in weights.items()}
    assert torch.equal(
        fusedcuda.lora_mlp(x, **drop), fusedcuda.lora_mlp(x, **weights)
    )  # not training
    first = drawn_seed(device)
    second = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    torch.manual_seed(0)
    actual = fusedcuda.lora_mlp(x, activation="none", training=True, **drop)
    h = x
    for name, seed in (("up", first), ("down", second)):
        weight, lora_a, lora_b, scale, bias, _ = weights[name]
        mask = mask_of(seed, h, 0.5).reshape(h.shape)
        h = eager(h, weight, bias, lora_a, lora_b, scale, dropped=lambda h, m=mask: 2 * h * m)
    torch.testing.assert_close(actual, h)
