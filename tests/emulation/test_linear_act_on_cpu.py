"""The kernels of linear_act, run by the emulator of this folder, against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from linear_act_emulator import LinearActEmulator, Saves, packed_mask
from reference import ACTIVATIONS
from row_emulator import assert_rounded
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture
def linear(build_family: Callable[[str], Path]) -> LinearActEmulator:
    return LinearActEmulator(build_family("linear_act"))


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(m, k).to(dtype),
        (torch.randn(n, k) / k**0.5).to(dtype),
        torch.randn(n).to(dtype),
    )


def test_product(linear: LinearActEmulator) -> None:
    x, weight, bias = operands(300, 264, 136, torch.bfloat16)
    (y,) = linear.linear_act(x, weight, bias, "none")
    assert_rounded("y", y, x.double() @ weight.double().T + bias.double())


def unpacked(mask: Tensor, n: int) -> Tensor:
    bits = mask[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.reshape(mask.shape[0], -1)[:, :n].bool()


def derivative(activation: str, z: Tensor) -> Tensor:
    leaf = z.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(ACTIVATIONS[activation](leaf).sum(), leaf)
    return gradient


def check(
    linear: LinearActEmulator,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "none",
    *,
    saves: Saves = Saves.NONE,
    **options: object,
) -> None:
    """The output, and what is saved of z, against float64."""
    z = x.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    y, *saved = linear.linear_act(x, weight, bias, activation, saves=saves, **options)
    # 32 roundings of the terms of z: a sum of k products is not exact to the last bit.
    size = 1 + z.abs().max().item()
    assert_rounded("y", y, ACTIVATIONS[activation](z), magnitude=size)
    if saves is Saves.DERIVATIVE:
        assert_rounded("derivative", saved[0], derivative(activation, z), magnitude=4 * size)
    if saves is Saves.MASK:
        # Where z is so near to 0 that the order of its sum decides, both are right.
        sure = z.abs() > 1e-5 * size
        assert torch.equal(unpacked(saved[0], z.shape[1])[sure], (z > 0)[sure])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("k_is_inner", [True, False], ids=["nk", "kn"])
def test_layouts_of_the_weight(
    linear: LinearActEmulator, dtype: torch.dtype, k_is_inner: bool
) -> None:
    x, weight, bias = operands(136, 520, 200, dtype)
    if not k_is_inner:
        weight = weight.T.contiguous().T
    check(linear, x, weight, bias)


@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 72, 16), (129, 40, 24), (64, 136, 64)], ids=str)
def test_small_products(linear: LinearActEmulator, shape: tuple[int, int, int]) -> None:
    check(linear, *operands(*shape, torch.bfloat16))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(linear: LinearActEmulator, activation: str) -> None:
    x, weight, bias = operands(70, 136, 72, torch.bfloat16)
    check(linear, x, weight, bias, activation)
    if activation != "none":
        saves = Saves.MASK if activation == "relu" else Saves.DERIVATIVE
        check(linear, x, weight, bias, activation, saves=saves)


def test_mask_of_a_ragged_matrix(linear: LinearActEmulator) -> None:
    """300 columns: a mask of 304 bits is stored, in rows of 48 bytes."""
    x, weight, bias = operands(140, 304, 72, torch.float16)
    check(linear, x, weight[:300], bias[:300], "relu", saves=Saves.MASK,
          output=torch.empty(140, 304, dtype=torch.float16)[:, :300])  # fmt: skip


@pytest.mark.parametrize("num_sms", [2, 6])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_blocks_with_many_tiles(linear: LinearActEmulator, num_sms: int, group: int) -> None:
    """More rounds of the stages than there are stages, odd and even numbers of tiles."""
    linear.num_sms = num_sms
    x, weight, bias = operands(900, 264, 200, torch.bfloat16)
    check(linear, x, weight, bias, "relu", saves=Saves.MASK, group=group)


@pytest.mark.parametrize("rank", [8, 16, 72])
@pytest.mark.parametrize("k_is_inner", [True, False], ids=["nk", "kn"])
def test_a_second_pair_of_factors(linear: LinearActEmulator, rank: int, k_is_inner: bool) -> None:
    linear.num_sms = 2
    x, weight, bias = operands(300, 264, 200, torch.bfloat16)
    t, up, _ = operands(300, 264, rank, torch.bfloat16)
    stored = (weight, up) if k_is_inner else (f.T.contiguous().T for f in (weight, up))
    weight, up = stored
    (y,) = linear.linear_act(x, weight, bias, "none", extra=(t, up))
    z = x.double() @ weight.double().T + bias.double() + t.double() @ up.double().T
    assert_rounded("y", y, z, magnitude=1 + z.abs().max().item())


@pytest.mark.parametrize("k", [72, 200, 456])
def test_halves_of_a_packed_gradient(linear: LinearActEmulator, k: int) -> None:
    """As a gated MLP has its gradient of x: the second pair is as wide as the first."""
    linear.num_sms = 2
    packed, weights, _ = operands(300, 264, 2 * k, torch.bfloat16)
    first, second = (half.T.contiguous().T for half in weights.chunk(2, dim=-1))
    (y,) = linear.linear_act(packed[:, :k], first, None, "none", extra=(packed[:, k:], second))
    z = packed.double() @ weights.double().T
    assert_rounded("y", y, z, magnitude=1 + z.abs().max().item())


@pytest.mark.parametrize("k", [320, 456, 640])
def test_warpgroups_that_skip_each_others_rounds(linear: LinearActEmulator, k: int) -> None:
    """Tiles that fill the ring of stages, or more: a warpgroup does not see all of its rounds."""
    linear.num_sms = 2
    check(linear, *operands(900, 264, k, torch.bfloat16), "relu")


def test_without_bias_and_with_one_that_is_not_aligned(linear: LinearActEmulator) -> None:
    x, weight, bias = operands(40, 72, 40, torch.bfloat16)
    check(linear, x, weight, None)
    check(linear, x, weight, torch.cat([bias[:1], bias])[1:])


def test_rows_with_a_pitch(linear: LinearActEmulator) -> None:
    x, weight, bias = operands(70, 72, 64, torch.bfloat16)
    wide_x, wide_weight = torch.randn(70, 80).bfloat16(), torch.randn(72, 72).bfloat16()
    wide_x[:, :64], wide_weight[:, :64] = x, weight
    output = torch.empty(70, 88, dtype=torch.bfloat16)[:, 8:80]
    check(linear, wide_x[:, :64], wide_weight[:, :64], bias, output=output)


def test_values_that_are_not_finite(linear: LinearActEmulator) -> None:
    x, weight, _ = operands(8, 16, 16, torch.bfloat16)
    x[1, 2], x[3, 4] = torch.nan, torch.inf
    weight[:, 4] = 1
    y, mask = linear.linear_act(x, weight, None, "relu", saves=Saves.MASK)
    assert y[1].isnan().all()
    assert (y[3] == torch.inf).all()
    # As torch's gradient of relu: that of a NaN passes.
    assert (mask[1, :2] == 255).all()
    assert (mask[3, :2] == 255).all()


# ---- Elementwise kernels -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", [64, 37])
def test_act_rows(linear: LinearActEmulator, dtype: torch.dtype, activation: str, n: int) -> None:
    z = (2 * torch.randn(9, n)).to(dtype)
    (y,) = linear.act_rows(z, activation)
    assert_rounded("y", y, ACTIVATIONS[activation](z.double()), magnitude=4)
    if activation == "none":
        return
    slope = derivative(activation, z.double())
    dy = torch.randn(9, n).to(dtype)
    if activation == "relu":
        again, mask = linear.act_rows(z, activation, saves=Saves.MASK)
        assert torch.equal(again, y)
        assert torch.equal(unpacked(mask, n), z > 0)
        saved, saves = mask, Saves.MASK
    else:
        again, derivatives = linear.act_rows(z, activation, saves=Saves.DERIVATIVE)
        assert torch.equal(again, y)
        assert_rounded("derivative", derivatives, slope, magnitude=4)
        (dz,) = linear.act_rows(dy, activation, saved=derivatives, saves=Saves.DERIVATIVE)
        assert_rounded("dz", dz, dy.double() * derivatives.double())
        saved, saves = z, Saves.PRE_ACTIVATION
    (dz,) = linear.act_rows(dy, activation, saved=saved, saves=saves)
    assert_rounded("dz", dz, dy.double() * slope, magnitude=4)
    (in_place,) = linear.act_rows(dy, activation, saved=saved, saves=saves, output=dy)
    assert torch.equal(in_place, dz)


def test_act_rows_with_a_pitch(linear: LinearActEmulator) -> None:
    dy, z = torch.randn(5, 40)[:, :32], torch.randn(5, 32)
    output = torch.empty(5, 48)[:, 8:40]
    (dz,) = linear.act_rows(dy, "relu_squared", saved=z, saves=Saves.PRE_ACTIVATION, output=output)
    assert_rounded("dz", dz, 2 * z.double().relu() * dy.double(), magnitude=4)


@pytest.mark.parametrize("k", [1, 8, 13, 479, 600])
def test_padded_rows(linear: LinearActEmulator, k: int) -> None:
    x = torch.randn(70, k + 1).bfloat16()[:, 1:]
    padded = linear.pad(x)
    assert torch.equal(padded[:, :k], x)
    assert not padded[:, k:].any()


# ---- Gradient ------------------------------------------------------------------------------------


def masked(dy: Tensor) -> tuple[Tensor, Tensor]:
    """The mask of a ReLU's inputs, and dz."""
    positive = torch.rand(dy.shape) < 0.6
    return packed_mask(positive), dy * positive


def check_gradient(linear: LinearActEmulator, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    dy = torch.randn(m, n).to(dtype)
    x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    mask, dz = masked(dy)
    dx, dweight, dbias = linear.backward(dy, mask, x, weight)
    dz, x, weight = dz.double(), x.double(), weight.double()
    for name, actual, expected in (
        ("dx", dx, dz @ weight),
        ("dweight", dweight, dz.T @ x),
        ("dbias", dbias, dz.sum(0)),
    ):
        assert_rounded(name, actual, expected, magnitude=1 + expected.abs().max().item())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("columns", [64, 192, 256])
def test_gradient(linear: LinearActEmulator, dtype: torch.dtype, columns: int) -> None:
    linear.columns = columns
    check_gradient(linear, 200, 136, 264, dtype)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 40, 16), (70, 264, 24), (65, 8, 72)], ids=str)
def test_gradient_of_small_products(linear: LinearActEmulator, shape: tuple[int, int, int]) -> None:
    check_gradient(linear, *shape, torch.bfloat16)


@pytest.mark.parametrize("splits", [2, 5])
def test_gradient_in_parts(linear: LinearActEmulator, splits: int) -> None:
    """dweight of 19 blocks of k, in parts of unequal length; rows that are not whole vectors."""
    linear.splits = splits
    linear.num_sms = 8
    check_gradient(linear, 1200, 264, 40, torch.bfloat16)
    odd = torch.randn(1200, 16).bfloat16()[:, :9]
    dy = torch.randn(1200, 8).bfloat16()
    mask, dz = masked(dy)
    dweight, dbias = linear.backward(dy, mask, odd, None)
    assert_rounded("dweight", dweight, dz.double().T @ odd.double(), magnitude=200)
    assert_rounded("dbias", dbias, dz.double().sum(0), magnitude=200)


def test_gradients_one_by_one(linear: LinearActEmulator) -> None:
    dy, x, weight = (torch.randn(s).bfloat16() for s in ((70, 72), (70, 40), (72, 40)))
    mask, _ = masked(dy)
    all_three = linear.backward(dy, mask, x, weight)
    (dx,) = linear.backward(dy, mask, None, weight)
    (dweight,) = linear.backward(dy, mask, x, None, bias=False)
    assert torch.equal(dx, all_three[0])
    assert torch.equal(dweight, all_three[1])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [1, 13, 256, 264])
def test_dot_rows(linear: LinearActEmulator, dtype: torch.dtype, k: int) -> None:
    """Rows that fill no warp's share, in vectors and not, stored by rows and by columns."""
    for m in (1, 33, 130):
        x, weight, bias = operands(m, 1, k, dtype)
        residual = torch.randn(m).to(dtype)
        z = x.double() @ weight[0].double()
        y = linear.dot(x, weight[0], bias, None)
        assert_rounded("y", y, z + bias.double())
        apart = torch.stack([weight[0], -weight[0]], 1)[:, 0]
        y = linear.dot(x.T.contiguous().T, apart, None, residual)
        assert_rounded("y", y, z + residual.double())
