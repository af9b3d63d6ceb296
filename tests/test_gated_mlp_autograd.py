"""Gradients of gated_mlp beyond their values: what is saved, checkpoints, transforms."""

import pytest
import torch
from gated_mlps import either_weight, fused, random_layer
from linears import exact
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import fusedcuda
from fusedcuda.ops._activations import ACTIVATIONS

BF16 = torch.bfloat16
_ops = torch.ops.fusedcuda


def leaves(*rows: int, packed: bool, k: int = 40, f: int = 24, **options) -> list[Tensor]:
    layer = random_layer(*rows, k=k, f=f, **options)
    return [t.requires_grad_() for t in layer.operands(packed).values()]


@pytest.mark.parametrize("recompute", [False, True])
@either_weight
@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "silu", "sigmoid"])
def test_gradcheck(activation, packed, recompute, device):
    given = leaves(3, packed=packed, k=4, f=5, n=2, dtype=torch.float64, device=device)
    assert torch.autograd.gradcheck(
        lambda *tensors: fused(*tensors, activation=activation, recompute=recompute), given
    )


@pytest.mark.parametrize("recompute", [False, True])
@either_weight
def test_nothing_saved_is_overwritten(packed, recompute, device):
    """A second backward gives the same again, and the operands are what they were."""
    for dtype in (torch.float32, BF16):
        given = leaves(100, packed=packed, dtype=dtype, device=device)
        before = [t.detach().clone() for t in given]
        dy = exact(100, 40, dtype=dtype, device=device)
        incoming = dy.clone()
        y = fused(*given, recompute=recompute)
        first = torch.autograd.grad(y, given, dy, retain_graph=True)
        y.backward(dy, retain_graph=True)
        y.backward(dy)
        assert torch.equal(dy, incoming)
        for leaf, was, gradient in zip(given, before, first, strict=True):
            assert torch.equal(leaf, was)
            assert torch.equal(leaf.grad, 2 * gradient)


@either_weight
def test_recompute_leaves_the_other_gradients_as_they_are(packed, device):
    given = leaves(100, packed=packed, dtype=BF16, device=device)
    dy = exact(100, 40, dtype=BF16, device=device)
    kept, again = (
        torch.autograd.grad(fused(*given, recompute=recompute), given, dy)
        for recompute in (False, True)
    )
    for one, other in zip(kept[:-1], again[:-1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointing(recompute, use_reentrant, device):
    given = leaves(30, packed=True, dtype=BF16, device=device)
    dy = exact(30, 40, dtype=BF16, device=device)

    def function(*tensors: Tensor) -> Tensor:
        return fused(*tensors, recompute=recompute)

    plain = torch.autograd.grad(function(*given), given, dy)
    checkpoint(function, *given, use_reentrant=use_reentrant).backward(dy)
    for leaf, gradient in zip(given, plain, strict=True):
        assert torch.equal(leaf.grad, gradient)


# ---- What is saved -------------------------------------------------------------------------------


def saved_bytes(*tensors: Tensor, recompute: bool) -> int:
    """Of what the graph keeps beside the operands, each storage once."""
    own = {t.untyped_storage().data_ptr() for t in tensors}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused(*tensors, recompute=recompute)
    return sum(size for storage, size in kept.items() if storage not in own)


@either_weight
def test_what_is_saved(packed, device):
    rows, f = 72, 24
    one = rows * f * 2
    given = leaves(rows, packed=packed, f=f, dtype=BF16, device=device)
    assert saved_bytes(*given, recompute=False) == 3 * one
    assert saved_bytes(*given, recompute=True) == 2 * one
    *others, w_down = given
    for leaf in others:
        leaf.requires_grad_(False)
    assert saved_bytes(*given, recompute=False) == one
    assert saved_bytes(*given, recompute=True) == 2 * one
    w_down.requires_grad_(False)
    others[0].requires_grad_()
    assert saved_bytes(*given, recompute=False) == 2 * one


@either_weight
def test_frozen_operands_get_no_gradient_and_nothing_is_kept_for_them(packed, device):
    for trained in range(3 if packed else 4):
        given = leaves(70, packed=packed, device=device)
        for index, leaf in enumerate(given):
            leaf.requires_grad_(index == trained)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t
        ):
            y = fused(*given)
        y.sum().backward()
        assert [t.grad is not None for t in given] == [i == trained for i in range(len(given))]
        x, *inner, w_down = given
        assert (x.data_ptr() in kept) == (0 < trained < len(given) - 1)
        assert all((w.data_ptr() in kept) == (trained == 0) for w in inner)
        assert (w_down.data_ptr() in kept) == (trained < len(given) - 1)


def test_inference_keeps_nothing(device):
    given = leaves(5, packed=True, device=device)
    with torch.no_grad():
        assert fused(*given).grad_fn is None
    with torch.inference_mode():
        assert fused(*given).is_inference()


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivative_raises(recompute, device):
    given = leaves(5, packed=False, dtype=torch.float64, device=device)
    y = fused(*given, recompute=recompute)
    gradients = torch.autograd.grad(y.sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^gated_mlp: a second derivative was asked for"):
        sum(g.square().sum() for g in gradients).backward()


def test_forward_mode_raises(device):
    x, w_gate_up, w_down = random_layer(5, k=4, f=6, device=device).operands(True).values()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
            fused(dual, w_gate_up, w_down)


# ---- Transforms ----------------------------------------------------------------------------------


@either_weight
def test_gradients_of_each_sample(packed, device):
    """torch.func: vmap of grad, with what differs between the samples, and what does not."""
    layer = random_layer(4, 6, k=5, f=7, dtype=torch.float64, device=device)
    x, *weights = layer.operands(packed).values()

    def loss(weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
        return fused(x, *weights).square().sum()

    gradient = torch.func.grad(loss)
    each = torch.func.vmap(gradient, (None, 0))(tuple(weights), x)
    expected = [gradient(tuple(weights), sample) for sample in x]
    for actual, parts in zip(each, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(parts))
    of_x = torch.func.vmap(torch.func.grad(lambda x: loss(tuple(weights), x)))(x)
    for actual, sample in zip(of_x, x, strict=True):
        torch.testing.assert_close(
            actual, torch.func.grad(lambda x: loss(tuple(weights), x))(sample)
        )


def test_vmap(device):
    layer = random_layer(3, 4, 6, k=5, f=7, dtype=torch.float64, device=device)
    x, w_gate_up, w_down = layer.operands(True).values()
    whole = fusedcuda.gated_mlp(x, w_gate_up, w_down)
    for dim in (0, 1, 2):
        y = torch.func.vmap(fused, (dim, None, None), dim)(x, w_gate_up, w_down)
        torch.testing.assert_close(y, whole)
    stacked = torch.stack([w_down, 2 * w_down])
    y = torch.func.vmap(fused, (None, None, 0))(x, w_gate_up, stacked)
    torch.testing.assert_close(y, torch.stack([whole, 2 * whole]))


# ---- Operators -----------------------------------------------------------------------------------


@either_weight
def test_opcheck(packed, device):
    code = ACTIVATIONS["silu"]
    for dtype in (torch.float32, BF16):
        layer = random_layer(2, 3, k=16, f=8, n=24, dtype=dtype, device=device)
        x, w_gate, w_up, w_down = layer
        both = (layer.w_gate_up, None) if packed else (w_gate, w_up)
        opcheck(_ops.gated_mlp.default, (x, *both, w_down, code))
        opcheck(_ops.gated_mlp_forward.default, (x, *both, w_down, code))
        y, gate_up, h = _ops.gated_mlp_forward(x, *both, w_down, code)
        dy = torch.ones_like(y)
        for mask in (0b1011, 0b1000, 0b0001) if packed else (0b1111, 0b0010, 0b0101):
            for kept in (h, None):
                arguments = (dy, x, *both, w_down, gate_up, kept, packed, code, mask)
                opcheck(_ops.gated_mlp_backward.default, arguments)
        opcheck(_ops.gated_mlp_backward.default,
                (dy, None, *both, w_down, gate_up, None, packed, code, 0b0001))  # fmt: skip


def test_opcheck_of_the_parts(device):
    layer = random_layer(6, k=16, f=8, n=24, dtype=BF16, device="cpu")
    code = ACTIVATIONS["gelu"]
    # Where CUDA has no kernel there is nothing to compare with the shape function.
    opcheck(_ops.gated_mlp_decode.default, (*layer, code))
    for saves in (False, True):
        opcheck(_ops.gated_product.default, (*layer[:3], code, saves))
    for dtype in (torch.float32, BF16):
        grad, gate_up = (torch.randn(5, n, device=device).to(dtype) for n in (8, 16))
        opcheck(_ops.act_mul_packed_recompute.default, (grad, gate_up, code))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [16, 13])
def test_what_is_made_again_equals_what_was_made(width, activation, device):
    code = ACTIVATIONS[activation]
    for dtype in (torch.float64, torch.float32, torch.float16, BF16):
        grad, gate_up = (torch.randn(37, n, device=device).to(dtype) for n in (width, 2 * width))
        gradient, output = _ops.act_mul_packed_recompute(grad, gate_up, code)
        assert torch.equal(gradient, _ops.act_mul_packed_backward(grad, gate_up, code))
        expected = fusedcuda.act_mul_packed(gate_up, activation)
        # The same formula in another kernel, which may fuse other multiplications and additions.
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def test_what_a_gradient_is_made_of_has_to_be_given():
    x, w_gate, w_up, w_down = random_layer(6, k=16, f=8, n=24)
    dy, gate_up = x.new_ones(6, 24), x.new_ones(6, 16)
    for missing, mask, use in (
        ("w_gate", 0b0001, "x"),
        ("x", 0b0010, "w_gate and w_up"),
        ("w_down", 0b0100, "gate and up"),
        ("gate_up", 0b0001, "gate and up"),
        ("gate_up", 0b1000, "w_down"),
    ):
        given = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down, "gate_up": gate_up}
        given |= {"h": None, missing: None}
        words = f"gated_mlp_backward: {missing} must be given for the gradient of {use}"
        with pytest.raises(ValueError, match=f"^{words}"):
            _ops.gated_mlp_backward(dy, *given.values(), False, ACTIVATIONS["silu"], mask)
