"""gated_mlp against float64. Gradients beyond their values: test_gated_mlp_autograd.py."""

import layouts
import pytest
import torch
from gated_mlps import (
    PACKED,
    SEPARATE,
    check_gated_mlp,
    eager,
    either_weight,
    forced,
    fused,
    random_layer,
)
from linears import exact
from reference import ACTIVATIONS, DTYPES, leaf
from torch import Tensor

import fusedcuda
from fusedcuda.ops import _gated_mlp_cuda as cuda

BF16 = torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# ---- Values --------------------------------------------------------------------------------------


@either_weight
@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_dtype
def test_activations(dtype, activation, packed, device):
    check_gated_mlp(random_layer(70, k=64, f=48, dtype=dtype, device=device), activation,
                    packed=packed)  # fmt: skip


@either_weight
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 64, 65, 200])
@every_dtype
def test_rows(dtype, rows, packed, device):
    layer = random_layer(rows, k=72, f=136, n=40, dtype=dtype, device=device)
    check_gated_mlp(layer, packed=packed)
    check_gated_mlp(layer, packed=packed, wrt=())


@either_weight
@pytest.mark.parametrize(
    ("k", "f", "n"), [(1, 1, 1), (13, 7, 5), (40, 479, 40), (20, 129, 1), (479, 24, 129)]
)
@every_dtype
def test_odd_sizes(dtype, k, f, n, packed, device):
    for rows in (3, 130):
        check_gated_mlp(
            random_layer(rows, k=k, f=f, n=n, dtype=dtype, device=device), packed=packed
        )


@every_dtype
def test_leading_dimensions(dtype, device):
    for rows in ((), (5,), (2, 3, 4), (2, 0)):
        layer = random_layer(*rows, k=24, f=16, n=8, dtype=dtype, device=device)
        y = check_gated_mlp(layer)
        assert y.shape == (*rows, 8)


def test_nothing_to_add_up(device):
    for k, f, n in ((0, 4, 3), (5, 0, 3), (5, 4, 0)):
        layer = random_layer(2, k=k, f=f, n=n, device=device)
        y = check_gated_mlp(layer)
        assert torch.equal(y, y.new_zeros(2, n))
        check_gated_mlp(layer, packed=True, recompute=True)


@either_weight
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@every_dtype
def test_recompute(dtype, activation, packed, device):
    for rows in (9, 150):
        layer = random_layer(rows, k=64, f=48, dtype=dtype, device=device)
        check_gated_mlp(layer, activation, packed=packed, recompute=True)


@pytest.mark.parametrize("recompute", [False, True])
@either_weight
@every_dtype
def test_each_gradient_alone(dtype, packed, recompute, device):
    layer = random_layer(2, 40, k=24, f=40, n=16, dtype=dtype, device=device)
    for name in PACKED if packed else SEPARATE:
        check_gated_mlp(layer, packed=packed, recompute=recompute, wrt=(name,))
    check_gated_mlp(layer, packed=packed, recompute=recompute, wrt=("w_down", "x"))


# ---- Layouts -------------------------------------------------------------------------------------


@either_weight
@every_dtype
def test_layouts(dtype, packed, device):
    layer = random_layer(70, k=48, f=40, n=24, dtype=dtype, device=device)
    dy = exact(70, 24, dtype=dtype, device=device)
    for change in (layouts.transposed, layouts.pitched, layouts.spread,
                   lambda t: layouts.shifted(t, 1)):  # fmt: skip
        check_gated_mlp(layer._replace(x=change(layer.x)), packed=packed)
        check_gated_mlp(layer._replace(w_down=change(layer.w_down)), packed=packed)
        check_gated_mlp(layer, packed=packed, dy=change(dy))
        if not packed:
            inner = layer._replace(w_gate=change(layer.w_gate), w_up=change(layer.w_up))
            check_gated_mlp(inner)


def assert_equal_but_for_a_rounding(actual: Tensor, expected: Tensor) -> None:
    """Of the hidden layer or its gradient, which another kernel may have rounded the other way."""
    units = 2 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, atol=units, rtol=units)


def test_a_packed_weight_in_other_layouts(device):
    layer = random_layer(70, k=48, f=40, n=24, dtype=BF16, device=device)
    expected = fusedcuda.gated_mlp(layer.x, layer.w_gate_up, layer.w_down)
    for change in (layouts.transposed, layouts.pitched, layouts.spread):
        y = fusedcuda.gated_mlp(layer.x, change(layer.w_gate_up), layer.w_down)
        assert_equal_but_for_a_rounding(y, expected)


def test_one_row_repeated(device):
    layer = random_layer(1, k=48, f=40, n=24, dtype=BF16, device=device)
    many = layer._replace(x=layer.x.expand(70, 48))
    check_gated_mlp(many, dy=exact(1, 24, dtype=BF16, device=device).expand(70, 24))
    check_gated_mlp(layer._replace(w_up=layer.w_up[:1].expand(40, 48)))


def test_halves_of_a_packed_weight_as_a_pair(device):
    """Their gradients are those of the packed one, in its halves."""
    layer = random_layer(70, k=48, f=40, n=24, dtype=BF16, device=device)
    packed, down = layer.w_gate_up.requires_grad_(), layer.w_down
    dy = exact(70, 24, dtype=BF16, device=device)
    y = fusedcuda.gated_mlp(layer.x, packed, down)
    (whole,) = torch.autograd.grad(y, packed, dy)
    gate, up = packed.chunk(2)
    y = fusedcuda.gated_mlp(layer.x, (gate, up), down)
    parts = torch.autograd.grad(y, (gate, up), dy)
    assert_equal_but_for_a_rounding(torch.cat(parts), whole)
    assert torch.equal(fusedcuda.gated_mlp(layer.x, [gate, up], down), y)


# ---- Autocast ------------------------------------------------------------------------------------


@either_weight
def test_autocast(packed, device):
    layer = random_layer(70, k=48, f=40, n=24, device=device)
    leaves = [leaf(t) for t in layer.operands(packed).values()]
    narrow = [leaf(t.to(BF16)) for t in leaves]
    with torch.autocast(device, BF16):
        y = fused(*leaves)
    expected = fused(*narrow)
    assert y.dtype == BF16
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(leaves, narrow, strict=True):
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, theirs.grad.float())
    with torch.autocast(device, BF16):
        assert fused(*(t.double() for t in narrow)).dtype == torch.float64


# ---- Paths ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("path", cuda.PATHS)
@either_weight
@every_dtype
def test_paths(dtype, packed, path):
    """On the CPU there is but one, and test_gated_mlp_composition.py takes these."""
    with forced(path):
        for rows in (16, 130):
            layer = random_layer(rows, k=72, f=136, n=40, dtype=dtype, device="cuda")
            check_gated_mlp(layer, packed=packed)
            check_gated_mlp(layer, packed=packed, wrt=())


def tried(
    rows: int, *, f: int = 14336, packed: bool = True, saves: bool = False, dtype=BF16
) -> tuple[str, ...]:
    return cuda.candidates(torch.empty(rows, 32, dtype=dtype), f, packed, saves)


def test_the_rule():
    assert tried(1) == tried(8) == ("decode", "concatenated", "apart")
    assert tried(8, packed=False) == ("decode", "apart")
    assert tried(8, saves=True) == tried(9) == ("concatenated", "apart")
    assert tried(17) == tried(64, saves=True) == ("concatenated", "apart")
    assert tried(64, packed=False) == ("apart",)
    assert tried(65) == tried(8192, saves=True) == ("fused", "apart")
    # Tiles of 128 x 64: 90 of them, and 93.
    assert tried(257, f=1920) == ("concatenated", "apart")
    assert tried(257, f=1928) == ("fused", "apart")
    # The rows of up would start off a 16-byte boundary.
    assert tried(65, f=14332) == ("fused", "concatenated", "apart")
    assert tried(257, f=14332, dtype=torch.float32) == ("apart",)
    assert tried(257, f=14333, dtype=torch.float32) == ("concatenated", "apart")


@pytest.mark.parametrize("path", [path for path in cuda.PATHS if path != "auto"])
def test_a_forced_path_is_taken_where_it_can_be(path):
    with forced(path):
        assert tried(16)[0] == path
        assert tried(16, saves=True)[0] == ("apart" if path == "decode" else path)
        assert tried(17)[0] == tried(257)[0] == ("apart" if path == "decode" else path)
        assert tried(257, packed=False)[0] == ("fused" if path == "fused" else "apart")
        by_products = "concatenated" if path == "concatenated" else "apart"
        assert tried(257, dtype=torch.float64)[0] == by_products
    assert tried(8)[0] == "decode"


def test_unknown_path_is_refused():
    with pytest.raises(ValueError, match=r"^gated_mlp_use: path must be one of auto, .*; got 'x'"):
        torch.ops.fusedcuda.gated_mlp_use("x")
    with forced("auto"):
        assert tried(8)[0] == "decode"


# ---- As models have it ---------------------------------------------------------------------------


def test_the_error_is_smaller_than_that_of_eager(device):
    """The root of the summed squares, where eager rounds five times."""
    layer = random_layer(256, k=256, f=512, dtype=BF16, device=device)
    expected = eager(*(t.double() for t in layer))
    ours, theirs = (
        torch.linalg.vector_norm(y.double() - expected)
        for y in (fused(layer.x, layer.w_gate_up, layer.w_down), eager(*layer))
    )
    assert ours < theirs
