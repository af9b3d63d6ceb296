"""Gradients of the lora family beyond their values: what is saved, checkpoints, transforms."""

import pytest
import torch
from linears import exact
from loras import random_layer
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import fusedcuda
from fusedcuda.ops._activations import ACTIVATIONS

BF16 = torch.bfloat16
_ops = torch.ops.fusedcuda


def leaves(*rows: int, n: int = 24, k: int = 40, rank: int = 5, **options) -> list[Tensor]:
    return [t.requires_grad_() for t in random_layer(*rows, n=n, k=k, rank=rank, **options)]


def lora(*tensors: Tensor, activation: str = "none", dropout_p: float = 0.0) -> Tensor:
    x, weight, bias, lora_a, lora_b = tensors
    return fusedcuda.lora_linear(
        x, weight, lora_a, lora_b, 0.5, bias, activation, dropout_p=dropout_p, training=True
    )


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("activation", ["none", "gelu", "silu", "sigmoid"])
def test_gradcheck(activation, dropout_p, device):
    given = leaves(3, n=4, k=9, rank=2, dtype=torch.float64, device=device)

    def function(*tensors: Tensor) -> Tensor:
        torch.manual_seed(0)
        return lora(*tensors, activation=activation, dropout_p=dropout_p)

    assert torch.autograd.gradcheck(function, given)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_nothing_saved_is_overwritten(activation, dropout_p, device):
    """A second backward gives the same again, and the operands are what they were."""
    for dtype in (torch.float32, BF16):
        given = leaves(30, dtype=dtype, lora_dtype=torch.float32, device=device)
        before = [t.detach().clone() for t in given]
        dy = exact(30, 24, dtype=dtype, device=device)
        incoming = dy.clone()
        y = lora(*given, activation=activation, dropout_p=dropout_p)
        first = torch.autograd.grad(y, given, dy, retain_graph=True)
        y.backward(dy, retain_graph=True)
        y.backward(dy)
        assert torch.equal(dy, incoming)
        for leaf, was, gradient in zip(given, before, first, strict=True):
            assert torch.equal(leaf, was)
            assert torch.equal(leaf.grad, 2 * gradient)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_checkpointing_draws_the_same_mask(activation, use_reentrant, device):
    given = leaves(30, dtype=BF16, device=device)
    dy = exact(30, 24, dtype=BF16, device=device)

    def function(*tensors: Tensor) -> Tensor:
        return lora(*tensors, activation=activation, dropout_p=0.5)

    results = []
    for wrap in (False, True):
        torch.manual_seed(5)
        y = checkpoint(function, *given, use_reentrant=use_reentrant) if wrap else function(*given)
        for leaf in given:
            leaf.grad = None
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in given)])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def saved_bytes(*tensors: Tensor, **options) -> int:
    """Of what the graph keeps beside the operands, each storage once."""
    own = {t.untyped_storage().data_ptr() for t in tensors}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = lora(*tensors, **options)
    kept.pop(y.untyped_storage().data_ptr(), None)
    return sum(size for storage, size in kept.items() if storage not in own)


def test_what_is_saved(device):
    """t always; z only for an activation that is no relu; of dropout the seed, and no mask."""
    rows, n, rank = 64, 24, 5
    given = leaves(rows, n=n, rank=rank, dtype=BF16, device=device)
    t, z = rows * 8 * 2, rows * n * 2
    for activation, dropout_p, expected in (
        ("none", 0.0, t),
        ("relu", 0.0, t),
        ("silu", 0.0, t + z),
        ("none", 0.5, t + 8),
    ):
        assert saved_bytes(*given, activation=activation, dropout_p=dropout_p) == expected


def test_frozen_operands_get_no_gradient_and_nothing_is_kept_for_them(device):
    x, weight, bias, lora_a, lora_b = leaves(30, device=device)
    for frozen in (x, weight, bias):
        frozen.requires_grad_(False)
    lora(x, weight, bias, lora_a, lora_b).sum().backward()
    assert [t.grad is None for t in (x, weight, bias, lora_a, lora_b)] == [True] * 3 + [False] * 2
    # x is for the gradient of lora_a alone, which is not asked for here.
    lora_a.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()), lambda t: t):
        lora(x, weight, bias, lora_a, lora_b)
    assert x.data_ptr() not in kept
    assert weight.data_ptr() not in kept


def test_second_derivative_raises(device):
    given = leaves(5, dtype=torch.float64, device=device)
    y = lora(*given, activation="silu")
    gradients = torch.autograd.grad(y.sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^lora_linear: a second derivative was asked for"):
        sum(g.square().sum() for g in gradients).backward()


def test_forward_mode_raises(device):
    given = random_layer(5, n=4, k=6, rank=2, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given.x, torch.ones_like(given.x))
        with pytest.raises((RuntimeError, NotImplementedError)):
            lora(dual, *given[1:])


def test_inference_keeps_nothing(device):
    given = leaves(5, device=device)
    with torch.no_grad():
        assert lora(*given, activation="silu").grad_fn is None
    with torch.inference_mode():
        assert lora(*given, activation="silu").is_inference()


def test_gradients_of_each_sample(device):
    """torch.func: vmap of grad, with what differs between the samples, and what does not."""
    x, weight, bias, lora_a, lora_b = random_layer(
        4, 6, n=5, k=7, rank=2, dtype=torch.float64, device=device
    )

    def loss(lora_a: Tensor, lora_b: Tensor, x: Tensor) -> Tensor:
        return fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias, "silu").square().sum()

    gradient = torch.func.grad(loss, (0, 1))
    each = torch.func.vmap(gradient, (None, None, 0))(lora_a, lora_b, x)
    expected = [gradient(lora_a, lora_b, sample) for sample in x]
    for actual, parts in zip(each, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(parts))
    stacked = torch.stack([lora_a, 2 * lora_a, -lora_a])
    outputs = torch.func.vmap(lambda a: fusedcuda.lora_linear(x, weight, a, lora_b, 0.5))(stacked)
    for output, a in zip(outputs, stacked, strict=True):
        torch.testing.assert_close(output, fusedcuda.lora_linear(x, weight, a, lora_b, 0.5))


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("with_seed", [False, True])
def test_opcheck(activation, with_seed, device):
    for dtype, lora_dtype in ((torch.float32, torch.float32), (BF16, torch.float32)):
        layer = random_layer(
            2, 3, n=8, k=10, rank=3, dtype=dtype, lora_dtype=lora_dtype, device=device
        )
        seed = torch.tensor([7], device=device) if with_seed else None
        options = (ACTIVATIONS[activation], 0.5, 0.25)
        opcheck(_ops.lora_linear.default, (*layer, seed, *options))
        opcheck(_ops.lora_linear_forward.default, (*layer, seed, *options))
        y, t, *z = _ops.lora_linear_forward(*layer, seed, *options)
        saved = z[0] if z else y if activation == "relu" else None
        x, weight, _, lora_a, lora_b = layer
        for mask in (0b11111, 0b11001):
            opcheck(
                _ops.lora_linear_backward.default,
                (torch.ones_like(y), x, weight, saved, t, lora_a, lora_b, seed, *options, mask),
            )


@pytest.mark.parametrize("with_seed", [False, True])
def test_opcheck_of_the_parts(with_seed, device):
    layer = random_layer(6, n=8, k=10, rank=3, dtype=BF16, device=device)
    seed = torch.tensor([7], device=device) if with_seed else None
    opcheck(_ops.lora_down.default, (layer.x, layer.lora_a, seed, 0.5, 0.25))
    t = _ops.lora_down(layer.x, layer.lora_a, seed, 0.5, 0.25)
    for transposed in (False, True):
        for in_float32 in (False, True):
            opcheck(_ops.lora_up.default, (t, layer.x, seed, 3, 0.25, transposed, in_float32))
    if with_seed:
        opcheck(_ops.lora_dropout.default, (layer.x, seed, 0.25))
        # What there is a kernel for: for others it returns nothing.
        factor = torch.randn(8, 16, dtype=BF16, device=device)
        opcheck(_ops.lora_branch.default, (t, factor, seed, 0.25))
    x, lora_a = (torch.randn(rows, 16, dtype=BF16, device=device) for rows in (6, 3))
    opcheck(_ops.lora_pass.default, (x, lora_a, None, seed, 3, 0.5, 0.25, False, False))
    opcheck(_ops.lora_pass.default, (x, None, t, seed, 3, 0.5, 0.25, True, True))
    if not with_seed:
        by_columns = torch.randn(16, 8, dtype=BF16, device=device).T
        opcheck(_ops.lora_pass.default, (x, by_columns, t, None, 3, 0.5, 0.0, True, False))
