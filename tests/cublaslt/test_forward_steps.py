"""Which products and kernels a linear layer is made of, and that together they are right."""

import pytest
import torch
from fake_kernels import DERIVATIVE, unpack_mask
from fake_layer import FakeLayer
from linear_operands import (
    FUSED,
    LAYOUTS,
    ON_BIAS_ROWS,
    PLAIN,
    TOLERANCE,
    check,
    expected,
    expected_gradients,
    kernels,
    pitched,
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
    fused = activation in FUSED and (half or single) and not (activation == "relu" and saves)
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
    x = LAYOUTS[x_layout](random(*batch, 40, 24))
    weight = LAYOUTS[weight_layout](random(*batch, 16, 24))
    bias = random(16)
    y, _, steps = layer.forward(x, weight, bias, activation="relu")
    check(y, expected(x, weight, bias, activation="relu")[0])
    if {x_layout, weight_layout} & {"odd pitch", "misaligned"}:
        assert kernels(steps) == [*ON_BIAS_ROWS, "act_rows_kernel"]
    else:
        assert kernels(steps) == ["RELU_BIAS"]
    y, _, steps = layer.forward(x, weight, activation="relu")
    check(y, expected(x, weight, activation="relu")[0])
    assert kernels(steps) == ["RELU"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "n", "k"),
    [((), 24, 16), ((), 7, 16), ((), 12, 16), ((), 24, 13), ((), 1, 2), ((3,), 12, 16)],
    ids=str,
)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "silu"])
def test_a_product_is_not_rounded_before_its_bias(
    layer: FakeLayer, activation: str, batch: tuple[int, ...], n: int, k: int, dtype: torch.dtype
) -> None:
    """Of 2049 both types keep 2048, or 2050: less 2048 that would be 0, or 2."""
    x = torch.zeros(*batch, 9, k).to(dtype)
    x[..., -2:] = torch.tensor([2048.0, 1.0])
    weight, bias = torch.ones(*batch, n, k).to(dtype), torch.full((*batch, n), -2048.0)
    expect = apply_activation(torch.tensor(1.0), ACTIVATIONS[activation]).to(dtype)
    for given in ((x, weight), (shifted(x), weight), (pitched(x, 3), pitched(weight, 8))):
        for saves in (False, DERIVATIVE if activation != "none" else False):
            y, _, _ = layer.forward(*given, bias.to(dtype), None, activation, saves)
            assert torch.equal(y, expect.expand(y.shape))
        residual = torch.full_like(y, 16.0)
        y, _, _ = layer.forward(*given, bias.to(dtype) - 16.0, residual)
        assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_of_one_output_is_a_kernel_of_its_own(layer: FakeLayer, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*shape).to(dtype) for shape in ((24, 16), (1, 16), (1,)))
    y, _, steps = layer.forward(x, weight, bias, activation="silu")
    check(y, expected(x, weight, bias, activation="silu")[0])
    assert kernels(steps) == ["dot_rows_kernel", "act_rows_kernel"]
    assert "rounds such a product" in steps[0]["why"]
    _, _, steps = layer.forward(x, weight)  # nothing is added
    assert kernels(steps) == [PLAIN]


def test_rows_of_the_bias_say_why(layer: FakeLayer) -> None:
    x, weight, bias = random(24, 13), random(40, 13), random(40)
    _, _, steps = layer.forward(x, weight, bias, activation="silu")
    assert kernels(steps) == [*ON_BIAS_ROWS, "act_rows_kernel"]
    assert "multiples of 16 bytes" in steps[0]["why"]
    assert steps[2]["why"] == "cuBLASLt has no epilogue for this activation"
    assert [step["adds_c"] for step in steps] == [False, False, False]  # which is the residual


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


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_mask_of_a_relu_is_that_of_torch(layer: FakeLayer, dtype: torch.dtype) -> None:
    """The gradient passes where z is positive or NaN, not where it is 0 of either sign."""
    x = torch.tensor([[0.0], [-0.0], [1.0], [-1.0], [torch.nan], [torch.inf], [-torch.inf]])
    y, saved, steps = layer.forward(
        x.to(dtype), torch.ones(8, 1, dtype=dtype), activation="relu", saves=True
    )
    assert saved is not None
    passes = torch.tensor([False, False, True, False, True, True, False])
    assert torch.equal(unpack_mask(saved, 8), passes.unsqueeze(1).expand(7, 8))
    assert torch.equal(y.isnan(), x.isnan().expand(7, 8))
    assert kernels(steps) == [PLAIN, "act_rows_kernel"]
    assert "where a ReLU's input is 0" in steps[1]["why"]


def test_biases_of_a_batch_that_cannot_be_aligned(layer: FakeLayer) -> None:
    x, weight, bias = random(3, 8, 16), random(3, 5, 16), random(3, 5)
    y, _, steps = layer.forward(x, weight, bias, activation="relu")
    check(y, expected(x, weight, bias, activation="relu")[0])
    assert kernels(steps) == [*ON_BIAS_ROWS, "act_rows_kernel"]
    assert steps[0]["why"] == "the biases of a batch are not 16-byte aligned"


@pytest.mark.parametrize("bias_shape", [(40,), (2, 40)])
def test_a_misaligned_bias_is_copied(layer: FakeLayer, bias_shape: tuple[int, ...]) -> None:
    x, weight, bias = random(2, 24, 32), random(2, 40, 32), shifted(random(*bias_shape))
    y, _, steps = layer.forward(x, weight, bias, activation="relu")
    check(y, expected(x, weight, bias, activation="relu")[0])
    assert kernels(steps) == ["cudaMemcpyAsync", "RELU_BIAS"]


def test_what_gelu_keeps_has_rows_of_multiples_of_8(layer: FakeLayer) -> None:
    x, weight = random(24, 32), random(42, 32)
    _, saved, steps = layer.forward(x, weight, activation="gelu_tanh", saves=True)
    assert saved is not None
    check(saved, expected(x, weight)[0])
    assert kernels(steps) == [PLAIN, "act_rows_kernel"]
    assert "multiple of 8" in steps[1]["why"]
    _, _, steps = layer.forward(x, weight, activation="gelu_tanh")
    assert kernels(steps) == ["GELU"]  # nothing is kept


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
    ("refused", "has_residual", "steps_left"),
    [
        (["GELU_AUX_BIAS"], True, ["BIAS"]),
        (["GELU_AUX_BIAS"], False, ["BIAS"]),
        (["GELU_AUX_BIAS", "BIAS"], True, ["torch.matmul"]),
        (["GELU_AUX_BIAS", "BIAS"], False, ON_BIAS_ROWS),
        (["GELU_AUX_BIAS", "BIAS", "DEFAULT"], False, ["torch.matmul"]),
    ],
)
def test_forward_does_with_less(
    layer: FakeLayer, refusal, refused: list[str], has_residual: bool, steps_left: list[str]
) -> None:
    refusal(layer, *refused)
    x, weight, bias = random(24, 32), random(40, 32), random(40)
    residual = random(24, 40) if has_residual else None
    y, saved, steps = layer.forward(x, weight, bias, residual, "gelu_tanh", saves=True)
    assert saved is not None
    check(saved, expected(x, weight, bias, residual)[1])
    check(y, apply_activation(saved.double(), ACTIVATIONS["gelu_tanh"]))
    assert kernels(steps) == [*steps_left, "act_rows_kernel"]
    assert steps[-1]["why"] == "cuBLASLt has no algorithm for it"


def test_a_refusal_is_remembered(layer: FakeLayer) -> None:
    layer.fails_when_run("RELU_BIAS")
    x, weight, bias = random(24, 32), random(40, 32), random(40)
    layer.forward(x, weight, bias, activation="relu")
    searches = layer.searches()
    _, _, steps = layer.forward(x, weight, bias, activation="relu")
    assert kernels(steps) == ["BIAS", "act_rows_kernel"]
    assert layer.searches() == searches
