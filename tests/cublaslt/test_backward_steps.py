"""Which products and kernels the gradients are made of, and that together they are right."""

import pytest
import torch
from fake_kernels import DERIVATIVE, MASK, pack_mask
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
    pitched,
    random,
    shifted,
)
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS, activation_gradient, apply_activation

# The sums of dy, and those of dz in the pass that makes it.
SUMS, DZ_AND_DBIAS = "column_sums_kernel", "act_rows_bwd_sum_kernel"
ONE_OUTPUT = "one_output_bwd_kernel"

# ---- Backward ------------------------------------------------------------------------------------


def kept(z: Tensor, activation: str) -> Tensor | None:
    """What the forward saves of z."""
    if activation == "none":
        return None
    return pack_mask(z.flatten(0, -2) > 0) if activation == "relu" else z


def rounded_dz(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    dz = activation_gradient(dy.double(), z.double(), ACTIVATIONS[activation])
    return dz.to(dy.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward(
    layer: FakeLayer, activation: str, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight = random(*batch, 24, 32, dtype=dtype), random(*batch, 40, 32, dtype=dtype)
    dy, z = random(*batch, 24, 40, dtype=dtype), random(*batch, 24, 40, dtype=dtype)
    gradients, steps = layer.backward(dy, x, weight, kept(z, activation), activation)
    reference = expected_gradients(rounded_dz(dy, z, activation), x, weight)
    for name, gradient in gradients.items():
        check(gradient, reference[name])
    if activation != "none":
        assert kernels(steps) == [DZ_AND_DBIAS, PLAIN, PLAIN]
        assert steps[0]["what"] == "dz, dbias"
    elif dtype in (torch.float16, torch.bfloat16):
        assert kernels(steps) == ["BGRADB", PLAIN]
    else:
        assert kernels(steps) == [SUMS, PLAIN, PLAIN]


@pytest.mark.parametrize(
    ("wanted", "made_by"),
    [
        (["dx"], [PLAIN]),
        (["dweight"], [PLAIN]),
        (["dbias"], [SUMS]),
        (["dweight", "dbias"], ["BGRADB"]),
        (["dx", "dbias"], [SUMS, PLAIN]),
    ],
)
def test_only_what_is_wanted(layer: FakeLayer, wanted: list[str], made_by: list[str]) -> None:
    x, weight, dy = random(24, 32), random(40, 32), random(24, 40)
    gradients, steps = layer.backward(dy, x, weight, wanted=wanted)
    reference = expected_gradients(dy, x, weight)
    for name in wanted:
        check(gradients[name], reference[name])
    assert kernels(steps) == made_by


@pytest.mark.parametrize(
    ("wanted", "made_by", "first"),
    [
        (["dx"], ["act_rows_kernel", PLAIN], "dz"),
        (["dweight"], ["act_rows_kernel", PLAIN], "dz"),
        (["dbias"], [DZ_AND_DBIAS], "dbias"),
        (["dweight", "dbias"], [DZ_AND_DBIAS, PLAIN], "dz, dbias"),
        (["dx", "dbias"], [DZ_AND_DBIAS, PLAIN], "dz, dbias"),
    ],
)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_only_what_is_wanted_of_an_activation(
    layer: FakeLayer, activation: str, wanted: list[str], made_by: list[str], first: str
) -> None:
    x, weight, dy, z = random(24, 32), random(40, 32), random(24, 40), random(24, 40)
    gradients, steps = layer.backward(dy, x, weight, kept(z, activation), activation, wanted)
    reference = expected_gradients(rounded_dz(dy, z, activation), x, weight)
    for name in wanted:
        check(gradients[name], reference[name])
    assert kernels(steps) == made_by
    assert steps[0]["what"] == first


@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("dy_layout", ["contiguous", "pitched", "odd pitch", "misaligned"])
def test_layouts_of_backward(
    layer: FakeLayer, dy_layout: str, x_layout: str, weight_layout: str
) -> None:
    x, weight = LAYOUTS[x_layout](random(17, 24)), LAYOUTS[weight_layout](random(16, 24))
    dy, z = LAYOUTS[dy_layout](random(17, 16)), random(17, 16)
    for activation in ("none", "gelu"):
        gradients, steps = layer.backward(dy, x, weight, kept(z, activation), activation)
        reference = expected_gradients(rounded_dz(dy, z, activation), x, weight)
        for name, gradient in gradients.items():
            check(gradient, reference[name])
        assert "torch.matmul" not in kernels(steps)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 9])
def test_backward_of_few_features(layer: FakeLayer, n: int) -> None:
    x, weight, dy = random(64, 40), random(n, 40), random(64, n)
    gradients, steps = layer.backward(dy, x, weight)
    reference = expected_gradients(dy, x, weight)
    for name, gradient in gradients.items():
        check(gradient, reference[name])
    if n == 1:
        assert kernels(steps) == [SUMS, PLAIN, PLAIN]


# ---- One output ----------------------------------------------------------------------------------


def check_one_output(
    layer: FakeLayer, dy: Tensor, x: Tensor, weight: Tensor, activation: str = "none",
    wanted: tuple[str, ...] = ("dx", "dweight", "dbias"),
) -> list[str]:  # fmt: skip
    """Of a layer that keeps the derivative, as 16-bit types do."""
    z = random(*dy.shape, dtype=dy.dtype)
    saves, saved, dz = 0, None, dy
    if activation == "relu":
        saves, saved, dz = MASK, pack_mask(z > 0), torch.where(z > 0, dy, 0.0)
    elif activation != "none":
        saves, saved, dz = DERIVATIVE, z, dy * z
    gradients, steps = layer.backward(dy, x, weight, saved, activation, wanted, saves)
    reference = expected_gradients(dz, x, weight)
    for name, gradient in gradients.items():
        check(gradient, reference[name])
    return kernels(steps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("bits", range(1, 8))
def test_one_output(layer: FakeLayer, bits: int, activation: str, dtype: torch.dtype) -> None:
    """In one pass, unless only the sum of dz is wanted."""
    layer.use("measured")
    wanted = tuple(name for i, name in enumerate(("dx", "dweight", "dbias")) if bits >> i & 1)
    given = [random(*shape, dtype=dtype) for shape in ((70, 1), (70, 40), (1, 40))]
    made_by = check_one_output(layer, *given, activation, wanted)
    if wanted == ("dbias",):
        assert made_by == [SUMS if activation == "none" else DZ_AND_DBIAS]
    else:
        assert made_by == [ONE_OUTPUT]


@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_layouts_of_one_output(layer: FakeLayer, x_layout: str) -> None:
    layer.use("measured")
    x, dy, weight = LAYOUTS[x_layout](random(17, 24)), random(17, 1), random(1, 24)
    made_by = [SUMS, PLAIN, PLAIN] if x_layout == "column-major" else [ONE_OUTPUT]
    assert check_one_output(layer, dy, x, weight) == made_by
    # dx has no need of x.
    assert check_one_output(layer, dy, x, weight, wanted=("dx", "dbias")) == [ONE_OUTPUT]
    for other in (pitched(random(24, 1), 2).T, shifted(weight)):
        assert check_one_output(layer, pitched(dy, 4), x, other) == made_by


def test_one_output_of_no_rows(layer: FakeLayer) -> None:
    layer.use("measured")
    given = random(0, 1), random(0, 24), random(1, 24)
    assert check_one_output(layer, *given) == [ONE_OUTPUT]


def test_what_the_pass_over_one_output_is_not_for(layer: FakeLayer) -> None:
    def made_by(*batch: int, n: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        shapes = ((*batch, 16, n), (*batch, 16, 24), (*batch, n, 24))
        return check_one_output(layer, *(random(*shape, dtype=dtype) for shape in shapes))

    layer.use("measured")
    assert made_by() == made_by(1) == [ONE_OUTPUT]
    for other in (made_by(3), made_by(n=2), made_by(dtype=torch.float32)):
        assert ONE_OUTPUT not in other
    for backend in ("hopper", "cublaslt"):
        layer.use(backend)
        assert made_by() == [SUMS, PLAIN, PLAIN]


@pytest.mark.parametrize("refusal", [FakeLayer.without_algorithm, FakeLayer.fails_when_run])
def test_backward_does_with_less(layer: FakeLayer, refusal) -> None:
    refusal(layer, "BGRADB", "DEFAULT")
    x, weight, dy, z = random(24, 32), random(40, 32), random(24, 40), random(24, 40)
    gradients, steps = layer.backward(dy, x, weight, z, "silu")
    reference = expected_gradients(rounded_dz(dy, z, "silu"), x, weight)
    for name, gradient in gradients.items():
        check(gradient, reference[name])
    assert kernels(steps) == [DZ_AND_DBIAS, "torch.matmul", "torch.matmul"]


# ---- Two layers ----------------------------------------------------------------------------------

WANTED = ("dx", "dw1", "db1", "dw2", "db2")


def check_mlp(
    layer: FakeLayer,
    activation: str,
    wanted: tuple[str, ...] = WANTED,
    hidden: int = 40,
    outputs: int = 16,
) -> list[str]:
    x, w1, w2 = random(24, 32), random(hidden, 32), random(outputs, hidden)
    z = expected(x, w1)[0].to(x.dtype)
    h = apply_activation(z.double(), ACTIVATIONS[activation]).to(x.dtype)
    dy = random(24, outputs)
    gradients, steps = layer.mlp_backward(dy, x, w1, kept(z, activation), h, w2, activation, wanted)
    dh = dy.double() @ w2.double()
    dz = activation_gradient(dh, z.double(), ACTIVATIONS[activation])
    reference = {
        "dx": dz @ w1.double(),
        "dw1": dz.mT @ x.double(),
        "db1": dz.sum(0),
        "dw2": dy.double().mT @ h.double(),
        "db2": dy.double().sum(0),
    }
    assert sorted(gradients) == sorted(wanted)
    for name, gradient in gradients.items():
        check(gradient, reference[name])
    return kernels(steps)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_backward(layer: FakeLayer, activation: str) -> None:
    steps = check_mlp(layer, activation)
    if activation in FUSED:
        middle = "DRELU_BGRAD" if activation == "relu" else "DGELU_BGRAD"
        assert steps == ["BGRADB", middle, PLAIN, PLAIN]
    elif activation == "none":
        assert steps == ["BGRADB", PLAIN, "BGRADB", PLAIN]
    else:
        assert steps == ["BGRADB", PLAIN, DZ_AND_DBIAS, PLAIN, PLAIN]


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("bits", range(1, 32))
def test_mlp_backward_of_any_of_them(layer: FakeLayer, bits: int, activation: str) -> None:
    wanted = tuple(name for i, name in enumerate(WANTED) if bits >> i & 1)
    check_mlp(layer, activation, wanted)


def test_mlp_backward_without_the_sum_in_the_epilogue(layer: FakeLayer) -> None:
    layer.without_algorithm("DRELU_BGRAD")
    assert check_mlp(layer, "relu") == ["BGRADB", "DRELU", "BGRADB", PLAIN]


def test_mlp_backward_without_epilogues(layer: FakeLayer) -> None:
    layer.without_algorithm("DRELU_BGRAD", "DRELU", "BGRADB")
    steps = check_mlp(layer, "relu")
    assert steps == [SUMS, PLAIN, PLAIN, DZ_AND_DBIAS, PLAIN, PLAIN]


def test_mlp_backward_of_an_odd_hidden_size(layer: FakeLayer) -> None:
    assert DZ_AND_DBIAS in check_mlp(layer, "gelu_tanh", hidden=42)


def test_mlp_backward_of_one_output(layer: FakeLayer) -> None:
    """Both gradients of the second layer's parameters in one pass over h."""
    layer.use("measured")
    steps = check_mlp(layer, "silu", outputs=1)
    assert steps == [ONE_OUTPUT, PLAIN, DZ_AND_DBIAS, PLAIN, PLAIN]
    assert ONE_OUTPUT not in check_mlp(layer, "silu", ("dx", "dw1", "db1", "db2"), outputs=1)
