"""cross_entropy: losses and gradients against float64, layouts, special values."""

import pytest
import torch
from layouts import LAYOUTS, layout_name, shifted, spread, transposed
from losses import OPTIONS, check_loss, eager_cross_entropy, random_problem
from reference import DTYPES, leaf
from torch import Tensor, inf, nan

import fusedcuda

REDUCTIONS = ["none", "mean", "sum"]
CLASSES = [1, 2, 3, 7, 8, 63, 64, 127, 1000, 1024, 4097]
MANY_CLASSES = [16384, 32000, 32768, 50257, 65536, 128256, 131072, 262144]

every_option = pytest.mark.parametrize("name", OPTIONS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def incoming_gradients(reduction: str, rows: int) -> list[float | None]:
    """None is random. With that of a mean as large as the rows are many, its errors can be seen."""
    return {"none": [None], "sum": [1.0, None], "mean": [1.0, 1.5 * rows]}[reduction]


@every_dtype
@every_reduction
@pytest.mark.parametrize("classes", CLASSES)
def test_loss_and_gradient(classes, reduction, dtype, device):
    for rows in (1, 7, 199) if classes < 1000 else (1, 7):
        logits, target, _ = random_problem(rows, classes, device=device, dtype=dtype)
        for incoming in incoming_gradients(reduction, rows):
            check_loss(logits, target, incoming, reduction=reduction)


@every_dtype
@every_reduction
@every_option
@pytest.mark.parametrize("classes", [7, 130])
def test_options(classes, name, reduction, dtype, device):
    rows = 41
    problem = random_problem(rows, classes, device=device, dtype=dtype, **OPTIONS[name])
    logits, target, options = problem
    for incoming in incoming_gradients(reduction, rows):
        check_loss(logits, target, incoming, reduction=reduction, **options)
    check_loss(logits, target, None, inplace_backward=True, reduction=reduction, **options)


@pytest.mark.gpu
@every_dtype
@every_reduction
@pytest.mark.parametrize("classes", MANY_CLASSES)
def test_many_classes(classes, reduction, dtype):
    for rows in (1, 7, max(8, (1 << 23) // classes)):
        problem = random_problem(rows, classes, device="cuda", dtype=dtype, **OPTIONS["everything"])
        logits, target, options = problem
        for incoming in incoming_gradients(reduction, rows):
            check_loss(logits, target, incoming, reduction=reduction)
            check_loss(logits, target, incoming, reduction=reduction, **options)
        check_loss(logits, target, inplace_backward=True, reduction=reduction)


@pytest.mark.gpu
@every_reduction
def test_4096_rows(reduction):
    for classes in (*CLASSES, 32000):
        problem = random_problem(4096, classes, device="cuda", dtype=torch.bfloat16)
        logits, target, _ = problem
        check_loss(logits, target, 1.0, reduction=reduction)
        check_loss(logits, target, reduction=reduction)


@every_dtype
def test_one_row_without_leading_dimensions_and_many_of_them(dtype, device):
    for shape in ((9,), (2, 3, 4, 9), (1, 1, 9)):
        logits, target, _ = random_problem(*shape, device=device, dtype=dtype)
        for reduction in REDUCTIONS:
            check_loss(logits, target, reduction=reduction)
        loss = fusedcuda.cross_entropy(logits, target, reduction="none")
        assert loss.shape == target.shape


def test_the_loss_is_in_float32(device):
    for dtype in DTYPES:
        logits, target, _ = random_problem(3, 5, device=device, dtype=dtype)
        loss = fusedcuda.cross_entropy(leaf(logits), target)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert fusedcuda.cross_entropy(logits, target).dtype == loss.dtype


# ---------------------------------------------------------------------------- targets and weights


@every_reduction
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 5, 255, 2**31 - 1])
def test_targets_and_ignore_index(ignore_index, dtype, reduction, device):
    logits, target, _ = random_problem(40, 8, device=device, ignore_index=ignore_index)
    options = {"ignore_index": ignore_index, "reduction": reduction}
    check_loss(logits, target.to(dtype), **options)
    check_loss(logits, target.to(dtype), label_smoothing=0.1, z_loss=1e-3, **options)


@every_reduction
def test_target_layouts(reduction, device):
    logits, target, _ = random_problem(6, 5, 9, device=device)
    row = target[:, :1].expand(6, 5)
    wide = torch.zeros(6, 10, dtype=target.dtype, device=device)
    wide[:, ::2] = target
    for other in (transposed(target), row, row.t().contiguous().t(), wide[:, ::2]):
        check_loss(logits, other, reduction=reduction)


@every_reduction
@every_dtype
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_class_weights_of_another_dtype(dtype, weight_dtype, reduction, device):
    problem = random_problem(30, 17, device=device, dtype=dtype, weight=weight_dtype)
    logits, target, options = problem
    for label_smoothing in (0.0, 0.2):
        check_loss(logits, target, reduction=reduction, label_smoothing=label_smoothing, **options)
    options["weight"] = spread(options["weight"])
    check_loss(logits, target, reduction=reduction, **options)


def same_as_eager(logits: Tensor, target: Tensor, **options) -> Tensor:
    """Loss and gradient are torch's, NaN and infinity included; returns our gradient."""
    ours, theirs = leaf(logits), leaf(logits)
    loss = fusedcuda.cross_entropy(ours, target, **options)
    expected = eager_cross_entropy(theirs, target, **options)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)
    return ours.grad


@every_reduction
@every_option
def test_no_row_at_all(name, reduction, device):
    """As torch: the mean over nothing is NaN, a sum 0, and the gradient of ignored rows 0."""
    for shape in ((0, 5), (3, 0, 5)):
        problem = random_problem(*shape, device=device, **OPTIONS[name])
        logits, target, options = problem
        same_as_eager(logits, target, reduction=reduction, **options)
    logits, target, options = random_problem(4, 5, device=device, **OPTIONS[name])
    target.fill_(-100)
    gradient = same_as_eager(logits, target, reduction=reduction, **options)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_targets_whose_classes_weigh_nothing(device):
    weight = torch.tensor([0.0, 1.0, 0.0], device=device)
    logits, target = torch.randn(2, 3, device=device), torch.tensor([0, 2], device=device)
    for reduction in REDUCTIONS:
        same_as_eager(logits, target, weight=weight, reduction=reduction)


# ---------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_reduction
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_layouts(layout, reduction, dtype, device):
    logits, target, _ = random_problem(3, 5, 4, 66, device=device, dtype=dtype)
    check_loss(layout(logits), target, reduction=reduction)
    check_loss(layout(logits), target, inplace_backward=True, reduction=reduction)


@every_dtype
@every_reduction
def test_unaligned_rows(reduction, dtype, device):
    for classes in (64, 65, 1031):
        logits, target, _ = random_problem(7, classes, device=device, dtype=dtype)
        for elements in (1, 2, 3):
            check_loss(shifted(logits, elements), target, reduction=reduction)


@every_reduction
def test_expanded_logits(reduction, device):
    logits, target, _ = random_problem(6, 40, device=device)
    check_loss(logits[:1].expand(6, 40), target, reduction=reduction)
    check_loss(logits[:, :1].expand(6, 40), target, reduction=reduction)


@every_dtype
def test_incoming_gradients_of_every_layout(dtype, device):
    logits, target, _ = random_problem(6, 11, 33, device=device, dtype=dtype)
    ours = torch.float64 if dtype == torch.float64 else torch.float32
    grad = torch.randn(6, 11, dtype=ours, device=device)
    for incoming in (
        transposed(grad),
        spread(grad),
        grad[:1].expand(6, 11),
        grad[:, :1].expand(6, 11),
        grad[0, 0].expand(6, 11),
    ):
        check_loss(logits, target, incoming, reduction="none")
        check_loss(logits, target, incoming, reduction="none", inplace_backward=True)


# ---------------------------------------------------------------------------- special values


@every_reduction
@pytest.mark.parametrize("classes", [4, 100, 1500])
def test_special_values_are_those_of_torch(classes, reduction, device):
    rows = torch.tensor(
        [
            [0, 1, -inf, 2],  # a masked class
            [-inf, -inf, -inf, 3],
            [3, -inf, -inf, -inf],
            [-inf, -inf, -inf, -inf],
            [inf, 0, 1, 2],
            [inf, inf, 0, 1],
            [nan, 0, 1, 2],
            [0, 0, 0, 0],
        ],
        device=device,
    )
    rows = torch.cat([rows, rows[:, 1:2].expand(-1, classes - 4)], dim=1)
    for row in rows:
        for target in (0, 2, 3):  # also a masked one: the loss is inf, its gradient -1
            for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.01}):
                same_as_eager(
                    torch.stack([row, rows[-1]]),
                    torch.tensor([target, 1], device=device),
                    reduction=reduction,
                    **options,
                )


def test_a_masked_class_under_a_softcap(device):
    """tanh makes -inf the finite -softcap, as it does in torch."""
    logits = torch.tensor([[0.0, -inf, 1.0], [inf, 0.0, 1.0]], device=device)
    for target in ([0, 1], [1, 0]):
        same_as_eager(logits, torch.tensor(target, device=device), softcap=5.0)


@every_reduction
def test_an_ignored_row_counts_as_nothing_whatever_it_holds(reduction, device):
    logits, target, _ = random_problem(5, 9, device=device)
    target[:] = torch.arange(5, device=device)
    target[2] = -100
    clean = same_as_eager(logits, target, reduction=reduction, label_smoothing=0.1, z_loss=0.01)
    for rubbish in (nan, inf, -inf):
        logits[2] = rubbish
        x = leaf(logits)
        loss = fusedcuda.cross_entropy(
            x, target, reduction=reduction, label_smoothing=0.1, z_loss=0.01
        )
        assert loss.isfinite().all()
        loss.sum().backward()
        assert torch.equal(x.grad, clean)


def test_large_and_shifted_logits(device):
    """The loss keeps its digits where lse is large: log(sum) is added to the difference."""
    logits, target, _ = random_problem(6, 300, device=device)
    logits = (logits * 64).round() / 64  # so that adding the offset rounds nothing away
    exact = fusedcuda.cross_entropy(logits, target, reduction="none")
    for offset in (4096.0, -4096.0):
        loss = fusedcuda.cross_entropy(logits + offset, target, reduction="none")
        torch.testing.assert_close(loss, exact, rtol=1e-6, atol=1e-6)
    far = torch.linspace(-3e4, 3e4, 300, device=device).repeat(6, 1)
    same_as_eager(far, target, reduction="none")


@every_reduction
@pytest.mark.parametrize("offset", [0.0, 50.0, -50.0, 1e4, -1e4])
def test_the_gradient_is_as_exact_as_that_of_torch(offset, reduction, device):
    """A backward from the rounded lse is not: its error grows as lse does."""
    rows = 32
    logits, target, _ = random_problem(rows, 130, device=device)
    logits = 4 * logits + offset
    for incoming in incoming_gradients(reduction, rows):
        check_loss(logits, target, incoming, reduction=reduction)
        check_loss(logits, target, incoming, reduction=reduction, label_smoothing=0.1)
        check_loss(logits, target, incoming, inplace_backward=True, reduction=reduction)
