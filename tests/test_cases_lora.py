"""Bugs that users of other projects reported of low-rank adapters, as numbers worked by hand."""

import pytest
import torch
from linears import operands
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedcuda
from fusedcuda.nn import LoRALinear
from fusedcuda.ops._lora_dropout import keep_mask

BF16 = torch.bfloat16
HALVES = (torch.float16, BF16)
FLOATS = (torch.float32, *HALVES)
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def tensor(values: list, dtype: torch.dtype, device: str, trained: bool = False) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).requires_grad_(trained)


def assert_equal(actual: Tensor, values: list, dtype: torch.dtype) -> None:
    expected = torch.tensor(values, dtype=dtype, device=actual.device)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected), (actual, expected)


# ---- 1: factors in float32 on a base of 16 bits --------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_float32_factors_over_16_bits(dtype, device):
    """unslothai/unsloth#320, #212; huggingface/peft#1515: the backward met two dtypes."""
    x = tensor([[1, 2]], dtype, device, trained=True)
    lora_a = tensor([[1, 1]], torch.float32, device, trained=True)
    lora_b = tensor([[1], [-1]], torch.float32, device, trained=True)
    eye = torch.eye(2, dtype=dtype, device=device)
    y = fusedcuda.lora_linear(x, eye, lora_a, lora_b, 0.5)
    assert_equal(y.detach(), [[2.5, 0.5]], dtype)
    y.backward(tensor([[1, 0]], dtype, device))
    assert_equal(x.grad, [[1.5, 0.5]], dtype)
    assert_equal(lora_a.grad, [[0.5, 1]], torch.float32)
    assert_equal(lora_b.grad, [[1.5], [0]], torch.float32)


# ---- 2: ranks that no tile has -------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 5, 8, 17, 24, 32, 100])
@every_float
def test_ranks(dtype, rank, device):
    """predibase/lorax#70: rank 32 was silently wrong; vllm-project/vllm#2847."""
    x = torch.ones(1, 16, dtype=dtype, device=device)
    lora_a, lora_b = x.new_ones(rank, 16), x.new_ones(16, rank)
    y = fusedcuda.lora_linear(x, x.new_zeros(16, 16), lora_a, lora_b, 0.5)
    assert_equal(y, [[8.0 * rank] * 16], dtype)


# ---- 3: features that no tile has ----------------------------------------------------------------


@pytest.mark.parametrize("k", [24, 20])
@pytest.mark.parametrize("n", [3424, 3696])
@every_float
def test_features(dtype, n, k, device):
    """vllm-project/vllm#4708, #5441: no kernel for features that a parallel split had made."""
    for rows in (3, 0):
        x = torch.ones(rows, k, dtype=dtype, device=device, requires_grad=True)
        lora_a = torch.ones(4, k, dtype=dtype, device=device, requires_grad=True)
        lora_b = torch.ones(n, 4, dtype=dtype, device=device, requires_grad=True)
        weight = torch.ones(n, k, dtype=dtype, device=device)
        y = fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.25)
        assert y.shape == (rows, n)
        assert (y == 2 * k).all()
        y.backward(torch.ones_like(y))
        assert (lora_b.grad == rows * 0.25 * k).all()
        assert (lora_a.grad == rows * 0.25 * n).all()
        assert (x.grad == 2 * n).all()


# ---- 4: B is zero at the start -------------------------------------------------------------------


@every_float
def test_b_of_zeros(dtype, device):
    """microsoft/LoRA#59, #167: a gradient of exactly zero is right, None or NaN is not."""
    x = tensor([[1, 2]], dtype, device, trained=True)
    lora_a = tensor([[1, 1]], dtype, device, trained=True)
    lora_b = tensor([[0], [0]], dtype, device, trained=True)
    eye = torch.eye(2, dtype=dtype, device=device)
    y = fusedcuda.lora_linear(x, eye, lora_a, lora_b, 1.0)
    assert torch.equal(y, fusedcuda.linear_act(x, eye))
    y.backward(torch.ones_like(y))
    assert_equal(lora_a.grad, [[0, 0]], dtype)
    assert_equal(lora_b.grad, [[3], [3]], dtype)
    assert_equal(x.grad, [[1, 1]], dtype)


@pytest.mark.parametrize("activation", ["none", "relu"])
@every_float
def test_a_fresh_layer_is_the_layer_without_an_adapter(dtype, activation, device):
    """Bit by bit; with a bias, too."""
    x, weight, bias = operands(40, n=48, k=64, dtype=dtype, device=device)
    linear = nn.Linear(64, 48, device=device, dtype=dtype)
    linear.weight.data, linear.bias.data = weight, bias  # exact sums, whoever adds them up
    expected = fusedcuda.linear_act(x, linear.weight, linear.bias, activation)
    layer = LoRALinear.from_linear(linear, 8, activation=activation)
    assert torch.equal(layer(x), expected)


# ---- 5: dropout ----------------------------------------------------------------------------------


def apply_with_first_dropped(device: str, function):
    """The seed is drawn on the device: there another number gives the pattern."""
    for number in range(1000):
        torch.manual_seed(number)
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
        if (~keep_mask(seed.cpu(), (1, 2), 0.5)).tolist() == [[True, False]]:
            torch.manual_seed(number)
            return function()
    raise AssertionError("no such seed")


@pytest.mark.parametrize("checkpointed", [False, True])
@every_float
def test_dropout(dtype, checkpointed, device):
    """unslothai/unsloth#23, #2319; paiml/aprender#2170: accepted, and ignored."""
    x = tensor([[2, 4]], dtype, device, trained=True)
    lora_a = tensor([[1, 1]], dtype, device, trained=True)
    lora_b = tensor([[1], [0]], dtype, device, trained=True)
    eye = torch.eye(2, dtype=dtype, device=device)

    def layer(x: Tensor, training: bool = True) -> Tensor:
        return fusedcuda.lora_linear(x, eye, lora_a, lora_b, 1.0, dropout_p=0.5, training=training)

    def train() -> Tensor:
        return checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)

    y = apply_with_first_dropped(device, train)
    assert_equal(y.detach(), [[10, 4]], dtype)
    y.backward(tensor([[1, 0]], dtype, device))
    assert_equal(lora_a.grad, [[0, 8]], dtype)
    assert_equal(x.grad, [[1, 2]], dtype)
    assert_equal(layer(x, training=False).detach(), [[8, 4]], dtype)


@every_float
def test_dropout_of_the_gradient(dtype, device):
    """foundation-model-stack/fms-acceleration#97: dx ignored the mask (case 113)."""
    x = tensor([[1, 2]], dtype, device, trained=True)
    lora_a, lora_b = tensor([[1, 1]], dtype, device), tensor([[1], [3]], dtype, device)
    zero = torch.zeros(2, 2, dtype=dtype, device=device)
    y = apply_with_first_dropped(
        device,
        lambda: fusedcuda.lora_linear(x, zero, lora_a, lora_b, 1.0, dropout_p=0.5, training=True),
    )
    assert_equal(y.detach(), [[4, 12]], dtype)
    y.backward(torch.ones_like(y))
    assert_equal(x.grad, [[0, 8]], dtype)


# ---- 6: bias -------------------------------------------------------------------------------------


@every_float
def test_bias(dtype, device):
    """vllm-project/vllm#28972; a bias of the branch (peft's lora_bias) is part of this one, scaled.

    Merged unscaled it would give [[18, 23]]: huggingface/peft#2486.
    """
    x, eye = tensor([[1, 2]], dtype, device), torch.eye(2, dtype=dtype, device=device)
    lora_a, lora_b = tensor([[1, 1]], dtype, device), tensor([[1], [0]], dtype, device)
    bias, branch_bias = tensor([10, 20], dtype, device), tensor([1, 1], dtype, device)
    y = fusedcuda.lora_linear(x, eye, lora_a, lora_b, 2.0, bias + 2 * branch_bias)
    assert_equal(y, [[19, 24]], dtype)


def test_bias_is_added_before_rounding(device):
    """257 rounds to 256, and 256 + 1 to 256 again; 258 is a bfloat16."""
    x = tensor([[1, 256]], BF16, device)
    ones = torch.ones(1, 2, dtype=BF16, device=device)
    lora_b = torch.zeros(1, 1, dtype=BF16, device=device)
    y = fusedcuda.lora_linear(x, ones, ones, lora_b, 1.0, ones[0, :1])
    assert_equal(y, [[258]], BF16)


# ---- 7: autocast ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast(dtype, device):
    """unslothai/unsloth#7020, AgileRL/AgileRL#598 (case 56): float32 met a weight of 16 bits."""
    x = torch.ones(2, 8, device=device, requires_grad=True)
    weight = torch.ones(4, 8, dtype=dtype, device=device)
    lora_a = torch.ones(3, 8, device=device, requires_grad=True)
    lora_b = torch.ones(4, 3, device=device, requires_grad=True)
    with torch.autocast(device, dtype=dtype):
        y = fusedcuda.lora_linear(x, weight, lora_a, lora_b, 2.0)
    assert_equal(y.detach(), [[56.0] * 4] * 2, dtype)
    y.sum().backward()
    for leaf in (x, lora_a, lora_b):
        assert leaf.grad.dtype == torch.float32
    assert (x.grad == 4 + 2 * 3 * 4).all()
    with pytest.raises(TypeError, match=r"^lora_linear: weight must be a torch.float32 tensor"):
        fusedcuda.lora_linear(x, weight, lora_a, lora_b, 2.0)


# ---- 8: checkpointing, frozen inputs, backward in place ------------------------------------------


@every_float
def test_frozen_input_and_backward_twice(dtype, device):
    """huggingface/peft#1142, unslothai/unsloth#895, axolotl-ai-cloud/axolotl#3800."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=dtype, device=device)
    weight = torch.randn(5, 6, dtype=dtype, device=device)
    lora_a = torch.randn(2, 6, dtype=dtype, device=device, requires_grad=True)
    lora_b = torch.randn(5, 2, dtype=dtype, device=device, requires_grad=True)
    before = x.clone()
    results = []
    for wrap in (False, True):
        lora_a.grad = lora_b.grad = None

        def layer(x: Tensor) -> Tensor:
            return fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, activation="silu")

        y = checkpoint(layer, x, use_reentrant=False) if wrap else layer(x)
        y.sum().backward(retain_graph=not wrap)
        results.append((lora_a.grad.clone(), lora_b.grad.clone()))
        if not wrap:
            y.sum().backward()
            assert torch.equal(lora_a.grad, 2 * results[0][0])
            assert torch.equal(lora_b.grad, 2 * results[0][1])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)
    assert torch.equal(x, before)
    assert x.grad is None


def test_checkpoint_of_a_gated_mlp(device):
    """facebookresearch/xformers#1126 (case 64), with adapters that add nothing."""
    options = {"dtype": torch.float64, "device": device}
    x = torch.tensor([[1.0, -1.0]], requires_grad=True, **options)
    gate = torch.eye(2, **options).requires_grad_()
    up = torch.tensor([[2.0, 0.0], [0.0, 3.0]], **options)
    down = torch.tensor([[1.0, 1.0]], **options)

    def with_adapter(weight: Tensor) -> fusedcuda.LoRAWeights:
        n, k = weight.shape
        zero = torch.zeros(n, 3, requires_grad=True, **options)
        return fusedcuda.LoRAWeights(weight, torch.ones(3, k, **options), zero)

    def mlp(x: Tensor) -> Tensor:
        layers = (with_adapter(up), with_adapter(down))
        return fusedcuda.lora_mlp(x, *layers, "silu", gate=with_adapter(gate))

    for wrap in (None, False, True):
        x.grad = gate.grad = None
        y = mlp(x) if wrap is None else checkpoint(mlp, x, use_reentrant=wrap)
        y.sum().backward()
        close = {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(y, torch.tensor([[2.26894]], **options), **close)
        expected = torch.tensor([[3.31746, -1.02381]], **options)
        torch.testing.assert_close(x.grad, expected, **close)
        expected = torch.tensor([[1.85534, -1.85534], [-0.216988, 0.216988]], **options)
        torch.testing.assert_close(gate.grad, expected, **close)


# ---- 9: torch.compile: test_lora_compile.py ------------------------------------------------------


# ---- 10: transposed and quantised weights --------------------------------------------------------


@every_float
def test_transposed_weight(dtype, device):
    """huggingface/peft#3531: the wrong axis, silently, where the weight is square."""
    stored = tensor([[0, 1], [2, 3]], dtype, device)
    lora_a, lora_b = tensor([[1, 0]], dtype, device), tensor([[1], [1]], dtype, device)
    x = tensor([[1, 2]], dtype, device)
    assert_equal(fusedcuda.lora_linear(x, stored.T, lora_a, lora_b, 1.0), [[5, 8]], dtype)
    merged = stored + (lora_b @ lora_a).T
    assert_equal(merged, [[1, 2], [2, 3]], dtype)
    assert_equal(fusedcuda.linear_act(x, merged.T), [[5, 8]], dtype)


def test_packed_weights_are_refused(device):
    """huggingface/peft#842: packed 4-bit parameters read as weights."""
    packed = torch.zeros(16, 1, dtype=torch.uint8, device=device)
    x, factor = torch.ones(1, 4, device=device), torch.ones(2, 4, device=device)
    with pytest.raises(TypeError, match=r"^lora_linear: weight must be .*; got torch.uint8"):
        fusedcuda.lora_linear(x, packed, factor, torch.ones(4, 2, device=device), 1.0)
    linear = nn.Linear(8, 4, device=device)
    linear.weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(TypeError, match=r"^LoRALinear: weight must be .* not packed or quantised"):
        LoRALinear.from_linear(linear, 2)


# ---- Scale ---------------------------------------------------------------------------------------


@every_float
def test_scale_is_alpha_by_rank(dtype, device):
    """Blaizzy/mlx-vlm#986, paiml/aprender#2189 (case 112): alpha itself would give 512."""
    base = nn.Linear(4, 2, bias=False, device=device, dtype=dtype)
    nn.init.zeros_(base.weight)
    layer = LoRALinear.from_linear(base, rank=8, alpha=16)
    nn.init.ones_(layer.lora_a)
    nn.init.ones_(layer.lora_b)
    assert_equal(layer(torch.ones(1, 4, device=device, dtype=dtype)).detach(), [[64, 64]], dtype)


@every_float
def test_scale_of_zero(dtype, device):
    x = torch.ones(3, 4, device=device, dtype=dtype)
    lora_a = torch.ones(2, 4, device=device, dtype=dtype, requires_grad=True)
    lora_b = torch.ones(5, 2, device=device, dtype=dtype, requires_grad=True)
    y = fusedcuda.lora_linear(x, x.new_ones(5, 4), lora_a, lora_b, 0.0)
    assert (y == 4).all()
    y.sum().backward()
    assert not lora_a.grad.any()
    assert not lora_b.grad.any()


def test_scale_of_rslora():
    """huggingface/peft#2733: alpha / sqrt(rank)."""
    assert LoRALinear(4, 4, rank=16, alpha=16, use_rslora=True).scale == 4.0
    assert LoRALinear(4, 4, rank=16, alpha=16).scale == 1.0
    assert LoRALinear(4, 4, rank=16).scale == 1.0


def test_merging_in_16_bits_loses_what_the_branch_has(device):
    """huggingface/peft#1388: not merged the sum is 2**-7, merged half of it."""
    base = nn.Linear(2, 1, bias=False, device=device, dtype=BF16)
    base.weight.data = tensor([[1, -1]], BF16, device)
    layer = LoRALinear.from_linear(base, rank=1)
    layer.lora_a.data.fill_(2.0**-8)
    layer.lora_b.data.fill_(1.0)
    x = torch.ones(1, 2, device=device, dtype=BF16)
    assert_equal(layer(x).detach(), [[2.0**-7]], BF16)
    layer.eval().merge()
    assert_equal(layer(x).detach(), [[2.0**-8]], BF16)


def test_relu_passes_nan(device):
    """pytorch/pytorch#7999 (case 1): a maximum would return 0."""
    x = tensor([[torch.nan]], torch.float32, device, trained=True)
    one = torch.ones(1, 1, device=device)
    y = fusedcuda.lora_linear(x, one, one, one, 1.0, activation="relu")
    assert y.isnan().all()
    y.backward(one)
    assert_equal(x.grad, [[2.0]], torch.float32)
