"""Bugs that users of other projects reported of linear layers, of cross-entropy, and of both.

The links name the report; the logits of those about cross-entropy alone are made by the identity.
"""

import pytest
import torch
from linear_losses import eager
from reference import leaf
from torch import Tensor

from fusedcuda import linear_cross_entropy

every_chunk = pytest.mark.parametrize("chunk", [1, 2, "auto"])


def of_logits(logits: list[list[float]], device: str) -> tuple[Tensor, Tensor]:
    """x and weight whose product they are: the gradient of x is that of the logits."""
    x = torch.tensor(logits, dtype=torch.float32, device=device, requires_grad=True)
    return x, torch.eye(x.shape[1], device=device)


def close(actual: Tensor, expected: list | float) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
    torch.testing.assert_close(actual.detach(), expected, equal_nan=True, rtol=1e-4, atol=1e-4)


# https://github.com/linkedin/Liger-Kernel/issues/177, mgmalek/efficient_cross_entropy#6,
# pytorch/pytorch#70348
@every_chunk
@pytest.mark.parametrize(("reduction", "loss"), [("mean", torch.nan), ("sum", 0), ("none", [0, 0])])
def test_all_targets_ignored(reduction, loss, chunk, device):
    x, weight = of_logits([[1, 2, 3], [3, 2, 1]], device)
    weight.requires_grad_()
    target = torch.tensor([-100, -100], device=device)
    actual = linear_cross_entropy(x, weight, target, reduction=reduction, chunk=chunk)
    close(actual, loss)
    actual.sum().backward()
    assert not x.grad.any()
    assert not weight.grad.any()


# https://github.com/linkedin/Liger-Kernel/issues/421, #488
@every_chunk
def test_none_is_a_loss_for_each_row(chunk, device):
    x, weight = of_logits([[1, 2, 3], [3, 2, 1]], device)
    target = torch.tensor([0, -100], device=device)
    for reduction, expected in (("none", [2.40761, 0.0]), ("sum", 2.407606), ("mean", 2.407606)):
        loss = linear_cross_entropy(x, weight, target, reduction=reduction, chunk=chunk)
        close(loss, expected)


# https://github.com/linkedin/Liger-Kernel/issues/1298, #968
@every_chunk
@pytest.mark.parametrize("accumulate", ["fp32", "weight"])
def test_each_row_has_its_own_incoming_gradient(accumulate, chunk, device):
    """It is applied before the rows are added up in the gradients of weight and bias."""
    x = torch.eye(2, device=device, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], device=device, requires_grad=True)
    bias = torch.zeros(3, device=device, requires_grad=True)
    target = torch.tensor([0, 2], device=device)
    how = {"reduction": "none", "chunk": chunk, "accumulate": accumulate}
    loss = linear_cross_entropy(x, weight, target, bias, **how)
    loss.backward(torch.tensor([2.0, -3.0], device=device))
    close(x.grad, [[-0.84777, 0.42388], [-0.63582, -1.7284]])
    close(weight.grad, [[-0.84777, -0.63582], [0.42388, -1.7284], [0.42388, 2.3642]])
    close(bias.grad, [-0.84777 - 0.63582, 0.42388 - 1.7284, 0.42388 + 2.3642])


# https://github.com/PaddlePaddle/Paddle/issues/10945, pytorch/pytorch#108345
# (On a GPU a device-side assert: test_linear_cross_entropy_cuda.py.)
@every_chunk
@pytest.mark.parametrize("target", [[0, 5], [-1, 0], [0, 2**31]])
def test_a_target_out_of_range_is_never_a_finite_loss(target, chunk):
    x, weight = torch.zeros(2, 4), torch.zeros(5, 4)
    with pytest.raises(IndexError, match=r"^linear_cross_entropy: target must be in \[0, 5\)"):
        linear_cross_entropy(x, weight, torch.tensor(target), chunk=chunk)


# https://github.com/unslothai/unsloth/issues/7020, AgileRL/AgileRL#598
def test_a_float32_activation_and_a_weight_of_16_bits_under_autocast(device):
    """In the forward and in the backward, where autocast is off."""
    x = torch.ones(2, 8, device=device, requires_grad=True)
    weight = torch.ones(4, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.tensor([0, 3], device=device)
    for reduction in ("mean", "none"):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = linear_cross_entropy(x, weight, target, reduction=reduction)
        close(loss, 1.386294 if reduction == "mean" else [1.386294, 1.386294])
        dx, dweight = torch.autograd.grad(loss.sum(), (x, weight))
        assert (dx.dtype, dweight.dtype) == (torch.float32, torch.bfloat16)
        rows = 2 if reduction == "mean" else 1
        close(dweight, [[-0.5 / rows] * 8, [0.5 / rows] * 8, [0.5 / rows] * 8, [-0.5 / rows] * 8])


# https://github.com/NVIDIA/TransformerEngine/issues/371
def test_under_autocast_the_layer_is_in_16_bits_and_the_loss_is_not(device):
    x, weight, bias = torch.ones(2, 8), torch.ones(4, 8), torch.tensor([0.0, 0.0, 0.0, 2**-9])
    target = torch.tensor([3, 3], device=device)
    given = [t.to(device) for t in (x, weight, bias)]
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = linear_cross_entropy(given[0], given[1], target, given[2])
    assert loss.dtype == torch.float32
    # 8 + 2**-9 is 8 in bfloat16.
    close(loss, 1.3862944)


# https://github.com/pytorch/pytorch/issues/73205, linkedin/Liger-Kernel#198
@every_chunk
def test_label_smoothing_does_not_count_ignored_rows(chunk, device):
    x, weight = of_logits([[1, 2, 3], [3, 2, 1], [5, 0, 0]], device)
    target = torch.tensor([0, 2, -100], device=device)
    options = {"label_smoothing": 0.2, "chunk": chunk}
    close(linear_cross_entropy(x, weight, target, reduction="none", **options), [2.20761] * 2 + [0])
    loss = linear_cross_entropy(x, weight, target, **options)
    close(loss, 2.207606)
    loss.backward()
    close(x.grad[0], [-0.38832, 0.089031, 0.29929])
    assert not x.grad[2].any()


# https://github.com/unslothai/unsloth/issues/10616
@pytest.mark.parametrize("classes", [1, 2, 3, 32_003, 50_257, 65_537, 128_255])
def test_a_vocabulary_off_the_tiles(classes, device):
    """What pads a row of logits is no class: lanes of 0 would have most of the probability."""
    x = torch.tensor([[1.0], [1.0]], device=device)
    weight = torch.full((classes, 1), -100.0, device=device)
    weight[-1] = -90.0
    target = torch.tensor([0, classes - 1], device=device)
    weight, exact = leaf(weight), leaf(weight.double())
    loss = linear_cross_entropy(x, weight, target, reduction="none", chunk=1)
    expected = eager(x.double(), exact, None, target, reduction="none")
    torch.testing.assert_close(loss, expected.float())
    # (The gradient of x is a hundred times a sum of all that cancels out.)
    (dweight,) = torch.autograd.grad(loss.sum(), weight)
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(dweight, wanted.float())


# https://github.com/openxla/xla/issues/46897
def test_as_many_rows_as_classes(device):
    """A bias along the wrong dimension, or a factor the wrong way round, has the right shape."""
    torch.manual_seed(0)
    leaves = [leaf(torch.randn(*shape, device=device)) for shape in ((6, 6), (6, 6), (6,))]
    target = torch.arange(6, device=device)
    loss = linear_cross_entropy(*leaves[:2], target, leaves[2], chunk=4)
    expected = eager(*leaves, target)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


# https://github.com/NVIDIA/apex/issues/410
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_raises(reduction, device):
    x, weight = of_logits([[1, 2, 4]], device)
    loss = linear_cross_entropy(x, weight, torch.tensor([0], device=device), reduction=reduction)
    (grad,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()
