"""Which products and kernels a linear layer is made of, and that together they are right."""

import pytest
import torch
from fake_kernels import DERIVATIVE, unpack_mask
from fake_layer import FakeLayer
from linear_operands import (
    FUSED,
    LAYOUTS,
    PLAIN,
    TOLERANCE,
    check,
    expected,
    expected_gradients,
    kernels,
    random,
    shifted,
)

from fusedcuda.ops._activations import ACTIVATIONS, activation_gradient, apply_activation

# ---- Forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward(
    layer: FakeLayer, activation: str, has_bias: bool, saves: bool, dtype: torch.dtype
) -> None:
    x, weight = random(24, 32, dtype=dtype), random(40, 32, dtype=dtype)
    bias = random(40, dtype=dtype) if has_bias else None
    y, saved, steps = layer.forward(x, weight, bias, activation=activation, saves=saves)
    reference, z = expected(x, weight, bias, activation=activation)
    if len(steps) == 2 and saves and activation != "relu":
        assert saved is not None
        reference = apply_activation(saved.double(), ACTIVATIONS[activation])
    check(y, reference)
    if activation == "none":
        assert saved is None
        assert len(steps) == 1
    elif activation == "relu" and saves:
        assert saved is not None
        assert torch.equal(unpack_mask(saved, 40), z > 0)
    elif saves:
        assert saved is not None
        check(saved, z)
    # float32 is expected to fuse what costs nothing.
    half = dtype in (torch.float16, torch.bfloat16)
    single = dtype == torch.float32 and activation == "relu" and not saves
    fused = activation in FUSED and (half or single)
    assert len(steps) == (1 if fused or activation == "none" else 2)


def test_an_activation_in_the_epilogue_says_so(layer: FakeLayer) -> None:
    x, weight, bias = random(24, 32), random(40, 32), random(40)
    _, _, steps = layer.forward(x, weight, bias, activation="gelu_tanh", saves=True)
    (step,) = steps
    assert step["epilogue"] == "GELU_AUX_BIAS"
    assert step["fused"] is True
    assert step["why"] is None
    assert step["kernel"] == "cublasLtMatmul"
    assert step["tile"] == "128x128"
    assert step["algorithm"] == 66
    assert step["workspace_bytes"] == 256


def test_gelu_is_not_its_tanh_form(layer: FakeLayer) -> None:
    x, weight = random(24, 32, dtype=torch.float32), random(40, 32, dtype=torch.float32)
    exact, _, steps = layer.forward(x, weight, activation="gelu")
    tanh, _, _ = layer.forward(x, weight, activation="gelu_tanh")
    assert kernels(steps) == [PLAIN, "act_rows_kernel"]
    assert steps[1]["why"] == "cuBLASLt has no epilogue for this activation"
    assert (exact - tanh).abs().max() > 1e-4


@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_layouts_are_read_in_place(
    layer: FakeLayer, x_layout: str, weight_layout: str, batch: tuple[int, ...]
) -> None:
    x = LAYOUTS[x_layout](random(*batch, 17, 24))
    weight = LAYOUTS[weight_layout](random(*batch, 16, 24))
    bias = random(16)
    y, _, steps = layer.forward(x, weight, bias, activation="relu")
    check(y, expected(x, weight, bias, activation="relu")[0])
    assert kernels(steps) == ["RELU_BIAS"]


@pytest.mark.parametrize("m", [1, 2, 24])
@pytest.mark.parametrize("n", [1, 7, 24])
@pytest.mark.parametrize("k", [1, 13, 24])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "silu"])
def test_any_size(layer: FakeLayer, m: int, n: int, k: int, activation: str) -> None:
    x, weight, bias = random(m, k), random(n, k), random(n)
    y, _, steps = layer.forward(x, weight, bias, activation=activation)
    check(y, expected(x, weight, bias, activation=activation)[0])
    assert "torch.matmul" not in kernels(steps)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)], ids=["m", "n", "k"])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_empty(layer: FakeLayer, sizes: tuple[int, int, int], activation: str) -> None:
    m, n, k = sizes
    x, weight, bias = random(m, k), random(n, k), random(n)
    y, saved, _ = layer.forward(x, weight, bias, activation=activation, saves=True)
    check(y, expected(x, weight, bias, activation=activation)[0])
    gradients, _ = layer.backward(random(m, n), x, weight, saved, activation)
    assert not any(gradient.any() for name, gradient in gradients.items() if name != "dbias")
    assert not (gradients["dbias"].any() and m == 0)


def test_a_bias_goes_along_columns(layer: FakeLayer) -> None:
    x = weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    y, _, _ = layer.forward(x, weight, bias)
    assert torch.equal(y, bias.expand(4, 4))


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("layout", [LAYOUTS["contiguous"], LAYOUTS["odd pitch"]])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
def test_a_residual_is_added_before_the_activation(
    layer: FakeLayer, batch: tuple[int, ...], layout, activation: str
) -> None:
    x, weight, bias = random(*batch, 24, 32), random(*batch, 40, 32), random(40)
    residual = layout(random(*batch, 24, 40))
    y, _, steps = layer.forward(x, weight, bias, residual, activation)
    check(y, expected(x, weight, bias, residual, activation)[0])
    assert steps[0]["adds_c"] is True


@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "silu"])
def test_each_product_of_a_batch_has_its_bias(layer: FakeLayer, activation: str) -> None:
    x, weight, bias = random(3, 24, 32), random(3, 40, 32), random(3, 40)
    y, saved, _ = layer.forward(x, weight, bias, activation=activation, saves=True)
    reference, z = expected(x, weight, bias, activation=activation)
    check(y, reference)
    if activation == "relu":
        assert saved is not None
        assert torch.equal(unpack_mask(saved, 40), (z > 0).flatten(0, 1))


def test_biases_of_a_batch_that_cannot_be_aligned(layer: FakeLayer) -> None:
    x, weight, bias = random(3, 8, 16), random(3, 5, 16), random(3, 5)
    y, _, steps = layer.forward(x, weight, bias, activation="relu")
    check(y, expected(x, weight, bias, activation="relu")[0])
    assert kernels(steps) == ["torch.matmul", "act_rows_kernel"]
    assert steps[0]["why"] == "the biases of a batch are not 16-byte aligned"


@pytest.mark.parametrize("bias_shape", [(40,), (2, 40)])
def test_a_misaligned_bias_is_copied(layer: FakeLayer, bias_shape: tuple[int, ...]) -> None:
    x, weight, bias = random(2, 24, 32), random(2, 40, 32), shifted(random(*bias_shape))
    y, _, steps = layer.forward(x, weight, bias, activation="relu")
    check(y, expected(x, weight, bias, activation="relu")[0])
    assert kernels(steps) == ["cudaMemcpyAsync", "RELU_BIAS"]


def test_what_gelu_keeps_has_rows_of_multiples_of_8(layer: FakeLayer) -> None:
    x, weight, bias = random(24, 32), random(42, 32), random(42)
    _, saved, steps = layer.forward(x, weight, bias, activation="gelu_tanh", saves=True)
    assert saved is not None
    check(saved, expected(x, weight, bias)[0])
    assert kernels(steps) == ["BIAS", "act_rows_kernel"]
    assert "multiple of 8" in steps[1]["why"]
    _, _, steps = layer.forward(x, weight, bias, activation="gelu_tanh")
    assert kernels(steps) == ["GELU_BIAS"]  # nothing is kept


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
def test_the_derivative_can_be_kept_instead(layer: FakeLayer, activation: str) -> None:
    x, weight, bias, dy = random(24, 32), random(40, 32), random(40), random(24, 40)
    y, saved, steps = layer.forward(x, weight, bias, None, activation, saves=DERIVATIVE)
    reference, z = expected(x, weight, bias, activation=activation)
    check(y, reference)
    assert kernels(steps) == ["BIAS", "act_rows_kernel"]
    assert saved is not None
    z = z.to(x.dtype).double()
    check(saved, activation_gradient(torch.ones_like(z), z, ACTIVATIONS[activation]))
    gradients, _ = layer.backward(dy, x, weight, saved, activation, saves=DERIVATIVE)
    dz = (dy.double() * saved.double()).to(dy.dtype)
    for name, gradient in expected_gradients(dz, x, weight).items():
        check(gradients[name], gradient)


# ---- 8 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("eight_out", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("n", [48, 40])
def test_fp8(layer: FakeLayer, n: int, activation: str, eight_out: bool) -> None:
    x = random(24, 32).to(torch.float8_e4m3fn)
    weight = random(n, 32).to(torch.float8_e4m3fn)
    bias = random(n)
    x_scale, weight_scale = torch.tensor(0.5), torch.tensor(2.0)
    out_scale = torch.tensor(0.02) if eight_out else None  # some of the results saturate
    y, steps = layer.fp8_forward(x, weight, bias, (x_scale, weight_scale), activation, out_scale)
    z = x.double() @ weight.double().T + bias.double()
    reference = apply_activation(z, ACTIVATIONS[activation])
    if eight_out:
        reference = (reference / 0.02).clamp(-448, 448)
    tolerance = 0.07 if eight_out else 1.6e-2
    torch.testing.assert_close(y.double(), reference, rtol=tolerance, atol=0.1)
    assert y.dtype == (torch.float8_e4m3fn if eight_out else torch.bfloat16)
    if n % 16 != 0:
        assert steps[0]["kernel"] == "torch.matmul"
    elif activation == "none":
        assert kernels(steps) == ["BIAS"]
    elif activation == "relu":  # of 8 bits, the cheap ones are expected to be fused
        assert kernels(steps) == ["RELU_BIAS"]
    else:
        assert kernels(steps)[:2] == ["BIAS", "act_rows_kernel"]
        assert len(steps) == (3 if eight_out else 2)


# ---- When cuBLASLt says no -----------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [FakeLayer.without_algorithm, FakeLayer.fails_when_run])
@pytest.mark.parametrize(
    ("refused", "steps_left"),
    [
        (["RELU_AUX_BIAS"], ["BIAS", "act_rows_kernel"]),
        (["RELU_AUX_BIAS", "BIAS"], ["torch.matmul", "act_rows_kernel"]),
    ],
)
def test_forward_does_with_less(
    layer: FakeLayer, refusal, refused: list[str], steps_left: list[str]
) -> None:
    refusal(layer, *refused)
    x, weight, bias, residual = random(24, 32), random(40, 32), random(40), random(24, 40)
    y, saved, steps = layer.forward(x, weight, bias, residual, "relu", saves=True)
    reference, z = expected(x, weight, bias, residual, "relu")
    check(y, reference)
    assert saved is not None
    assert torch.equal(unpack_mask(saved, 40), z > 0)
    assert kernels(steps) == steps_left
    assert steps[-1]["why"] == "cuBLASLt has no algorithm for it"


def test_a_refusal_is_remembered(layer: FakeLayer) -> None:
    layer.fails_when_run("RELU_BIAS")
    x, weight, bias = random(24, 32), random(40, 32), random(40)
    layer.forward(x, weight, bias, activation="relu")
    searches = layer.searches()
    _, _, steps = layer.forward(x, weight, bias, activation="relu")
    assert kernels(steps) == ["BIAS", "act_rows_kernel"]
    assert layer.searches() == searches
