"""linear_act_fp8: values in both output types, scales, layouts, what it refuses."""

from functools import partial

import pytest
import refusals
import torch
import torch.nn.functional as F
from layouts import pitched, shifted
from linears import slope
from reference import ACTIVATIONS, ulp
from torch import Tensor, inf, nan

import fusedcuda

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
LARGEST = 448.0


def eighths(*shape: int, device: str) -> Tensor:
    """Of both signs, up to 2; they and their sums are exact."""
    return (torch.randint(-16, 17, shape, device=device) / 8).to(FP8)


def operands(*rows: int, n: int, k: int, device: str) -> dict[str, Tensor]:
    return {
        "x": eighths(*rows, k, device=device),
        "weight": eighths(n, k, device=device),
        "bias": eighths(n, device=device).to(BF16),
        "x_scale": torch.tensor(0.5, device=device),
        "weight_scale": torch.tensor([0.25], device=device),
    }


def sums(x, weight, bias=None, *, x_scale, weight_scale) -> Tensor:
    """What the activation is applied to, in float64."""
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    scale = x_scale.double().reshape(()) * weight_scale.double().reshape(())
    return F.linear(wide[0] * scale, *wide[1:])


def check(*, activation: str = "none", **given: Tensor | None) -> Tensor:
    """Both output types against float64, to one rounding.

    Where the activation or the conversion is a kernel of its own, what comes before is rounded to
    bfloat16 too.
    """
    y = fusedcuda.linear_act_fp8(**given, activation=activation)
    z = sums(**given)
    expected = ACTIVATIONS[activation](z)
    assert (y.shape, y.dtype) == (expected.shape, BF16)
    assert y.is_contiguous()
    before = ulp(z, BF16) / 2 * slope(z, activation).abs()
    assert ((y.double() - expected).abs() <= ulp(expected, BF16) + before + 1e-5).all()

    out_scale = torch.tensor(0.125, device=y.device)
    in_fp8 = fusedcuda.linear_act_fp8(
        **given, activation=activation, out_dtype=FP8, out_scale=out_scale
    )
    assert (in_fp8.shape, in_fp8.dtype) == (expected.shape, FP8)
    scaled = (expected / 0.125).clamp(-LARGEST, LARGEST)
    # Three bits behind the leading one; below 2^-6 a fixed distance.
    step = torch.maximum(ulp(scaled, torch.float32) * 2**20, torch.full_like(scaled, 2.0**-9))
    before = (before + ulp(expected, BF16) / 2) / 0.125
    assert ((in_fp8.double() - scaled).abs() <= step / 2 + before + 1e-4).all()
    return y


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values(activation, device):
    given = operands(32, n=48, k=64, device=device)
    check(**given, activation=activation)
    check(**given | {"bias": None}, activation=activation)


@pytest.mark.parametrize(("n", "k"), [(16, 16), (1, 16), (16, 1), (9, 33), (128, 256)])
def test_shapes(n, k, device):
    for rows in ((16,), (), (1,), (2, 3), (7,), (0,)):
        check(**operands(*rows, n=n, k=k, device=device))
    if device == "cuda":
        torch.cuda.synchronize()


def test_square_layers(device):
    for size in (16, 32):
        check(**operands(size, n=size, k=size, device=device), activation="relu")


def test_without_products(device):
    given = operands(3, n=16, k=0, device=device)
    assert torch.equal(check(**given), given["bias"].expand(3, 16))


def test_layouts(device):
    given = operands(4, 8, n=32, k=32, device=device)
    x, weight = given["x"], given["weight"]
    turned = weight.t().contiguous().t()
    wide = torch.cat([x, x], dim=-1)[..., 16:48]
    for changed in (
        {"weight": turned},
        {"x": wide},
        {"x": x.transpose(0, 1)},
        {"x": x[:1].expand(4, 8, 32)},
        {"x": shifted(x, 1), "weight": shifted(weight, 1)},
        {"bias": shifted(given["bias"], 1)},
        {"bias": pitched(given["bias"])},
    ):
        check(**given | changed, activation="silu")


def test_scales(device):
    """A number on the device, 0-d or of one element; zero and large ones have their meaning."""
    given = operands(16, n=16, k=32, device=device)
    for x_scale, weight_scale in ((1.0, 1.0), (3.0, 0.01), (0.0, 1.0), (1e-3, 1e3)):
        scales = {
            "x_scale": torch.full((1,), x_scale, device=device),
            "weight_scale": torch.tensor(weight_scale, device=device),
        }
        check(**given | scales)


def test_outputs_of_8_bits_saturate(device):
    """Conversion alone would make NaN of what is too large; NaN stays one."""
    one, scale = torch.ones(16, 16, device=device), torch.ones((), device=device)
    x = (one * 30).to(FP8)
    out = {"out_dtype": FP8, "x_scale": scale, "weight_scale": scale}
    y = fusedcuda.linear_act_fp8(x, x, **out, out_scale=scale)
    assert torch.equal(y.float(), one * LARGEST)
    y = fusedcuda.linear_act_fp8(x, (-one * 30).to(FP8), **out, out_scale=scale)
    assert torch.equal(y.float(), -one * LARGEST)
    y = fusedcuda.linear_act_fp8(x, x, **out, out_scale=scale * 16 * 900 / 64)
    assert torch.equal(y.float(), one * 64)
    with_nan = x.float().clone()
    with_nan[2, 3] = nan
    y = fusedcuda.linear_act_fp8(with_nan.to(FP8), x, **out, out_scale=scale)
    assert y[2].float().isnan().all()
    assert torch.equal(y[0].float(), one[0] * LARGEST)
    infinite = torch.full((16,), inf, dtype=BF16, device=device)
    y = fusedcuda.linear_act_fp8(x, x, infinite, **out, out_scale=scale)
    assert torch.equal(y.float(), one * LARGEST)


def test_sums_are_kept_in_float32(device):
    x = torch.ones(16, 4096, device=device).to(FP8)
    scale = torch.ones((), device=device)
    y = fusedcuda.linear_act_fp8(x, x, x_scale=scale, weight_scale=scale)
    assert torch.equal(y, torch.full_like(y, 4096))


# ---------------------------------------------------------------------------- torch's machinery


def test_opcheck(device):
    """Without the check of the schema, which multiplies 8-bit numbers: torch cannot."""
    given = operands(4, n=16, k=32, device=device)
    tensors = list(given.values())
    for out_dtype, out_scale in ((BF16, None), (None, None), (FP8, given["x_scale"])):
        torch.library.opcheck(
            torch.ops.fusedcuda.linear_act_fp8.default,
            (*tensors, out_scale, 1, out_dtype),
            test_utils=("test_autograd_registration", "test_faketensor"),
        )


def test_compiled(device):
    torch._dynamo.reset()
    given = operands(4, n=16, k=32, device=device)
    compiled = torch.compile(fusedcuda.linear_act_fp8, fullgraph=True, backend="aot_eager")
    for out in ({}, {"out_dtype": FP8, "out_scale": given["x_scale"]}):
        actual = compiled(**given, activation="gelu_tanh", **out)
        expected = fusedcuda.linear_act_fp8(**given, activation="gelu_tanh", **out)
        assert torch.equal(actual.float(), expected.float())
    torch._dynamo.reset()


def test_autocast_changes_nothing(device):
    given = operands(4, n=16, k=32, device=device)
    expected = fusedcuda.linear_act_fp8(**given)
    with torch.autocast(device, dtype=torch.float16):
        actual = fusedcuda.linear_act_fp8(**given)
    assert torch.equal(actual, expected)
    assert actual.dtype == BF16


# ---------------------------------------------------------------------------- errors


refuses = partial(refusals.refuses, "linear_act_fp8")


def test_no_gradient_is_lost_silently(device):
    given = operands(4, n=16, k=32, device=device)
    for name in ("bias", "x_scale", "weight_scale"):
        trained = given | {name: given[name].clone().requires_grad_()}
        with refuses(RuntimeError, "requires a gradient", "no_grad"):
            fusedcuda.linear_act_fp8(**trained)
        with torch.no_grad():
            assert torch.equal(
                fusedcuda.linear_act_fp8(**trained), fusedcuda.linear_act_fp8(**given)
            )
    samples = given["x"].expand(3, 4, 32)
    with refuses(NotImplementedError, "torch.func", "no_grad"):
        torch.func.vmap(lambda x: fusedcuda.linear_act_fp8(**given | {"x": x}))(samples)


def test_dtypes(device):
    given = operands(4, n=16, k=32, device=device)
    for name, wrong in (
        ("x", BF16),
        ("x", torch.float8_e5m2),
        ("weight", BF16),
        ("weight", torch.float8_e5m2),
        ("bias", torch.float32),
        ("x_scale", torch.float64),
        ("weight_scale", BF16),
    ):
        with refuses(TypeError, name, str(wrong), str(given[name].dtype)):
            fusedcuda.linear_act_fp8(**given | {name: given[name].to(wrong)})
    for name in given:
        with refuses(TypeError, name, "list"):
            fusedcuda.linear_act_fp8(**given | {name: [1.0]})
    for wrong in (torch.float32, torch.float8_e5m2):
        with refuses(TypeError, "out_dtype", str(wrong)):
            fusedcuda.linear_act_fp8(**given, out_dtype=wrong)


def test_shapes_that_do_not_fit(device):
    given = operands(4, n=16, k=32, device=device)
    for name, wrong in (
        ("x", given["x"][..., :16]),
        ("weight", given["weight"].t()),
        ("weight", given["weight"].unsqueeze(0)),
        ("bias", given["bias"][:8]),
        ("bias", given["bias"][None]),
        ("x_scale", torch.ones(4, device=device)),
        ("weight_scale", torch.ones(16, 1, device=device)),
    ):
        with refuses(ValueError, name, str(tuple(wrong.shape))):
            fusedcuda.linear_act_fp8(**given | {name: wrong})


def test_out_scale_and_out_dtype_go_together(device):
    given = operands(4, n=16, k=32, device=device)
    with refuses(ValueError, "out_scale", "none", str(FP8)):
        fusedcuda.linear_act_fp8(**given, out_dtype=FP8)
    with refuses(ValueError, "out_scale", "one", str(BF16)):
        fusedcuda.linear_act_fp8(**given, out_scale=given["x_scale"])
    with refuses(ValueError, "out_scale", "(2,)"):
        scale = torch.ones(2, device=device)
        fusedcuda.linear_act_fp8(**given, out_dtype=FP8, out_scale=scale)
    with refuses(ValueError, "activation", "'swish'"):
        fusedcuda.linear_act_fp8(**given, activation="swish")


def test_one_device():
    given = operands(4, n=16, k=32, device="cpu")
    for name in list(given)[1:]:
        with refuses(ValueError, name, "cpu", "meta"):
            fusedcuda.linear_act_fp8(**given | {name: given[name].to("meta")})
