"""linear_cross_entropy under autograd: the two ways to a gradient, what they save and refuse."""

import pytest
import torch
from linear_losses import OPTIONS, eager, random_problem
from reference import leaf
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcuda

# Made in the forward, and made in the backward.
WAYS = {
    "ahead": {"reduction": "mean"},
    "ahead_sum": {"reduction": "sum", "accumulate": "weight"},
    "recomputed": {"reduction": "none"},
}
every_way = pytest.mark.parametrize("way", WAYS)
NAMES = ("x", "weight", "bias")


def problem(device: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    operands, target = random_problem(12, classes=9, features=8, dtype=dtype, device=device)
    return [leaf(t) for t in operands.values()], target


def loss_of(way: str, leaves: list[Tensor], target: Tensor, **options) -> Tensor:
    """One number. x is the output of another op, as it is in a model."""
    x, weight, bias = leaves
    options = {"chunk": 5, **WAYS[way], **options}
    return fusedcuda.linear_cross_entropy(x * 1, weight, target, bias, **options).sum()


def expected_gradients(
    way: str, leaves: list[Tensor], target: Tensor, factor: float = 1.0
) -> tuple[Tensor, ...]:
    leaves = [leaf(t) for t in leaves]
    loss = eager(*leaves, target, reduction=WAYS[way]["reduction"])
    return torch.autograd.grad(factor * loss.sum(), leaves)


def assert_all_close(actual, expected) -> None:
    for name, ours, theirs in zip(NAMES, actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name, reduction, device):
    operands, target = random_problem(5, classes=4, features=3, dtype=torch.float64, device=device)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = {"reduction": reduction, **OPTIONS[name]}
        return fusedcuda.linear_cross_entropy(x, weight, target, bias, chunk=2, **options)

    assert torch.autograd.gradcheck(loss, [leaf(t) for t in operands.values()])


@every_way
@pytest.mark.parametrize("factor", [1.0, 0.5, -3.0, 0.0])
def test_scaled_losses(way, factor, device):
    leaves, target = problem(device)
    (loss_of(way, leaves, target) * factor).backward()
    expected = expected_gradients(way, leaves, target, factor)
    assert_all_close([t.grad for t in leaves], expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss_scale_saves_what_float16_cannot_hold(reduction, device):
    """Gradients of a mean over many rows vanish in float16, but for the scale of the loss."""
    rows, scale = 512, 65536.0 if reduction == "mean" else 128.0
    operands, target = random_problem(
        rows, classes=256, features=16, dtype=torch.float16, device=device
    )
    leaves = [leaf(t) for t in operands.values()]
    double = [leaf(t.double()) for t in operands.values()]
    x, weight, bias = leaves
    options = {"reduction": reduction}
    loss = fusedcuda.linear_cross_entropy(x, weight, target, bias, chunk=100, **options)
    (loss.sum() * scale).backward()
    (eager(*double, target, **options).sum() * scale).backward()
    for ours, exact in zip(leaves, double, strict=True):
        error = (ours.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < 2**-10  # a unit of float16


@every_way
def test_backward_twice(way, device):
    """With the same and with another factor; what was handed out first stays as it is."""
    leaves, target = problem(device)
    loss = loss_of(way, leaves, target)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    third = torch.autograd.grad(-2 * loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert_all_close(second, kept)
    assert_all_close(third, [-2 * gradient for gradient in kept])
    for gradient in first:
        gradient.zero_()  # it belongs to whoever asked for it
    assert_all_close(torch.autograd.grad(loss, leaves), kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@every_way
def test_backward_twice_into_the_same_leaves(way, device):
    leaves, target = problem(device)
    loss = loss_of(way, leaves, target)
    (3 * loss).backward(retain_graph=True)
    loss.backward()
    expected = expected_gradients(way, leaves, target, 4.0)
    assert_all_close([t.grad for t in leaves], expected)


@every_way
def test_a_loss_that_is_used_twice(way, device):
    leaves, target = problem(device)
    loss = loss_of(way, leaves, target)
    (loss + loss.square()).backward()
    factor = 1 + 2 * loss.item()
    assert_all_close([t.grad for t in leaves], expected_gradients(way, leaves, target, factor))


@every_way
def test_a_weight_that_is_used_elsewhere_too(way, device):
    """Tied to the embedding: the gradient is added to what is there, or becomes it."""
    leaves, target = problem(device)
    for order in (1, -1):
        for t in leaves:
            t.grad = None
        parts = [loss_of(way, leaves, target), leaves[1].square().sum()][::order]
        sum(parts).backward()
        expected = list(expected_gradients(way, leaves, target))
        expected[1] = expected[1] + 2 * leaves[1].detach()
        assert_all_close([t.grad for t in leaves], expected)


@every_way
def test_accumulation_over_two_losses(way, device):
    leaves, target = problem(device)
    for factor in (1.0, 0.25):
        (loss_of(way, leaves, target) * factor).backward()
    expected = expected_gradients(way, leaves, target, 1.25)
    assert_all_close([t.grad for t in leaves], expected)


@every_way
def test_operands_are_left_alone(way, device):
    leaves, target = problem(device)
    before = [t.detach().clone() for t in (*leaves, target)]
    loss_of(way, leaves, target).backward()
    for now, then in zip((*leaves, target), before, strict=True):
        assert torch.equal(now, then)


@every_way
def test_an_operand_changed_before_the_backward_is_noticed(way, device):
    leaves, target = problem(device)
    for changed in leaves[1:]:
        loss = loss_of(way, leaves, target)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@every_way
def test_a_second_derivative_is_refused(way, device):
    leaves, target = problem(device)
    loss = loss_of(way, leaves, target)
    (grad,) = torch.autograd.grad(loss, leaves[1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"^linear_cross_entropy: .*differentiable once"):
        grad.square().sum().backward()


@every_way
def test_a_graph_only_where_it_is_asked_for(way, device):
    leaves, target = problem(device)
    assert not loss_of(way, [t.detach() for t in leaves], target).requires_grad
    with torch.no_grad():
        assert not loss_of(way, leaves, target).requires_grad
    with torch.inference_mode():
        assert loss_of(way, leaves, target).is_inference()
    assert loss_of(way, leaves, target).requires_grad


@every_way
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(way, use_reentrant, device):
    leaves, target = problem(device)

    def loss(*leaves: Tensor) -> Tensor:
        return loss_of(way, list(leaves), target)

    checkpoint(loss, *leaves, use_reentrant=use_reentrant).backward()
    assert_all_close([t.grad for t in leaves], expected_gradients(way, leaves, target))


@every_way
def test_what_is_saved(way, device):
    """Operands, two float32 a row, and where the forward makes them the gradients: no logits."""
    leaves, target = problem(device, torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss_of(way, leaves, target)
    shapes = [(12, 8), (9, 8), (9,)]  # of x, weight and bias, and of their gradients
    expected = [*shapes, (12,), (12, 2), (0,) if way == "recomputed" else (2,)]
    expected += [] if way == "recomputed" else shapes
    assert [tuple(t.shape) for t in saved] == expected
    assert all(t.dtype == torch.bfloat16 for t in saved if tuple(t.shape) in shapes)


@every_way
def test_saved_tensors_may_be_moved_away(way, device):
    leaves, target = problem(device)
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(way, leaves, target)
    loss.backward()
    assert_all_close([t.grad for t in leaves], expected_gradients(way, leaves, target))


def test_autocast_casts_what_a_linear_layer_would(device):
    """As torch.nn.functional.linear; the loss stays float32, gradients are like the leaves."""
    leaves, target = problem(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = loss_of("ahead", leaves, target)
    narrow = [leaf(t.bfloat16()) for t in leaves]
    expected = loss_of("ahead", narrow, target)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(leaves, narrow, strict=True):
        assert torch.equal(ours.grad, theirs.grad.float())
