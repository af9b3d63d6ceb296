"""cross_entropy under autograd: the three ways to a gradient, what they save, what they refuse."""

import pytest
import torch
from losses import OPTIONS, eager_cross_entropy, random_problem
from reference import leaf
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcuda

# Made in the forward, made in the backward, and made in the backward over the logits.
WAYS = {
    "ahead": {"reduction": "mean"},
    "ahead_sum": {"reduction": "sum"},
    "recomputed": {"reduction": "none"},
    "in_place": {"reduction": "mean", "inplace_backward": True},
    "in_place_none": {"reduction": "none", "inplace_backward": True},
}
every_way = pytest.mark.parametrize("way", WAYS)
repeatable = pytest.mark.parametrize("way", ["ahead", "ahead_sum", "recomputed"])


def problem(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    logits, target, _ = random_problem(12, 9, device=device, dtype=dtype)
    return leaf(logits), target


def loss_of(way: str, logits: Tensor, target: Tensor, **options) -> Tensor:
    """One number. The logits are the output of another op, as they are in a model."""
    return fusedcuda.cross_entropy(logits * 1, target, **WAYS[way], **options).sum()


def expected_gradient(way: str, logits: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
    logits = leaf(logits)
    loss = eager_cross_entropy(logits, target, reduction=WAYS[way]["reduction"])
    return torch.autograd.grad(factor * loss.sum(), logits)[0]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name, reduction, device):
    options = OPTIONS[name]
    logits, target, options = random_problem(
        5, 4, device=device, dtype=torch.float64, reduction=reduction, **options
    )

    def loss(logits: Tensor) -> Tensor:
        return fusedcuda.cross_entropy(logits, target, **options)

    assert torch.autograd.gradcheck(loss, leaf(logits))


@every_way
@pytest.mark.parametrize("factor", [1.0, 0.5, -3.0, 0.0])
def test_scaled_losses(way, factor, device):
    logits, target = problem(device)
    (loss_of(way, logits, target) * factor).backward()
    torch.testing.assert_close(logits.grad, expected_gradient(way, logits, target, factor))


@every_way
def test_a_loss_scale_saves_what_float16_cannot_hold(way, device):
    """Gradients that would be subnormal in float16, or zero, are right to an ulp once scaled."""
    rows, classes, scale = 512, 1024, 65536.0
    if WAYS[way]["reduction"] != "mean":
        scale /= rows
    logits = leaf((0.1 * torch.randn(rows, classes, device=device)).half())
    target = torch.randint(classes, (rows,), device=device)
    (loss_of(way, logits, target) * scale).backward()
    double = leaf(logits.detach().double())
    reduction = WAYS[way]["reduction"]
    (eager_cross_entropy(double, target, reduction=reduction).sum() * scale).backward()
    torch.testing.assert_close(logits.grad.double(), double.grad, rtol=2**-11 + 1e-5, atol=0)


@repeatable
def test_backward_twice(way, device):
    """With the same and with another factor; what was handed out first stays as it is."""
    logits, target = problem(device)
    loss = loss_of(way, logits, target)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (third,) = torch.autograd.grad(-2 * loss, logits, retain_graph=True)
    assert torch.equal(first, kept)
    torch.testing.assert_close(second, first)
    torch.testing.assert_close(third, -2 * first)
    first.zero_()  # the gradient belongs to whoever asked for it
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, logits)


@every_way
def test_accumulation_over_two_losses(way, device):
    logits, target = problem(device)
    for factor in (1.0, 0.25):
        (loss_of(way, logits, target) * factor).backward()
    torch.testing.assert_close(logits.grad, expected_gradient(way, logits, target, 1.25))


@every_way
def test_logits_changed_before_the_backward_are_noticed(way, device):
    logits, target = problem(device)
    used = logits * 1
    loss = fusedcuda.cross_entropy(used, target, **WAYS[way]).sum()
    with torch.no_grad():
        used.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_way
def test_a_second_derivative_is_refused(way, device):
    logits, target = problem(device)
    loss = loss_of(way, logits, target)
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: .*differentiable once"):
        grad.square().sum().backward()


@every_way
def test_a_graph_only_where_it_is_asked_for(way, device):
    logits, target = problem(device)
    assert not loss_of(way, logits.detach(), target).requires_grad
    with torch.no_grad():
        assert not loss_of(way, logits, target).requires_grad
    with torch.inference_mode():
        assert loss_of(way, logits, target).is_inference()
    assert loss_of(way, logits, target).requires_grad


@every_way
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(way, use_reentrant, device):
    logits, target = problem(device)
    checkpoint(loss_of, way, logits, target, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close(logits.grad, expected_gradient(way, logits, target))


@every_way
def test_what_is_saved(way, device):
    """The gradient, where the forward makes it; never a copy of the logits in float32."""
    logits, target = problem(device, torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = fusedcuda.cross_entropy(logits * 1, target, **WAYS[way])
    matrices = [t for t in saved if t.shape == logits.shape]
    assert all(t.dtype == torch.bfloat16 for t in matrices)
    assert len(matrices) == (2 if way.startswith("ahead") else 1)
    assert loss.requires_grad


@every_way
def test_saved_tensors_may_be_moved_away(way, device):
    logits, target = problem(device)
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(way, logits, target)
    loss.backward()
    torch.testing.assert_close(logits.grad, expected_gradient(way, logits, target))


@every_way
def test_class_weights_get_no_gradient_and_say_so(way, device):
    logits, target = problem(device)
    weight = torch.ones(9, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: weight requires a gradient"):
        loss_of(way, logits, target, weight=weight)
    with torch.no_grad():
        loss_of(way, logits, target, weight=weight)


# ---------------------------------------------------------------------------- in place


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_takes_the_place_of_the_logits(dtype, reduction, device):
    logits, target = problem(device, dtype)
    used = logits * 1
    loss = fusedcuda.cross_entropy(used, target, reduction=reduction, inplace_backward=True).sum()
    (grad,) = torch.autograd.grad(2 * loss, used)
    assert grad.data_ptr() == used.data_ptr()
    double = leaf(logits.double())
    (2 * eager_cross_entropy(double, target, reduction=reduction).sum()).backward()
    torch.testing.assert_close(grad, double.grad.to(dtype))


def test_in_place_there_is_no_second_backward(device):
    logits, target = problem(device)
    loss = loss_of("in_place", logits, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: .*second backward.*inplace_backward"):
        loss.backward()


def test_others_who_saved_the_logits_notice_that_they_are_gone(device):
    logits, target = problem(device)
    used = logits * 1
    other = used.square().sum()
    fusedcuda.cross_entropy(used, target, inplace_backward=True).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_logits_that_may_not_be_written_to(device):
    logits, target = problem(device)
    for refused, what in (
        (logits, "a leaf"),
        (logits.view(12, 9), "a view of a leaf"),
        ((logits * 1)[:1].expand(12, 9), "expanded"),
    ):
        with pytest.raises(RuntimeError, match=f"^cross_entropy: inplace_backward.*{what}"):
            fusedcuda.cross_entropy(refused, target, inplace_backward=True)
    # Without a gradient nothing is written.
    with torch.no_grad():
        fusedcuda.cross_entropy(logits, target, inplace_backward=True)


def test_in_place_in_a_part_of_a_larger_tensor(device):
    """Rows with a pitch, and a view of what another op made: the rest of it is left alone."""
    logits, target = problem(device)
    wide = torch.nn.functional.pad(logits, (2, 3), value=7.0)
    loss = fusedcuda.cross_entropy(wide[:, 2:11], target, inplace_backward=True)
    loss.backward()
    torch.testing.assert_close(logits.grad, expected_gradient("in_place", logits, target))
    assert (wide[:, :2] == 7).all()
    assert (wide[:, 11:] == 7).all()
