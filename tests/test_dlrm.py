"""The dlrm family: values, layouts, dtypes, gradients."""

import layouts
import pytest
import torch
import torch.nn.functional as F
from dlrms import (
    ORDERS,
    check_head,
    check_interaction,
    eager_head,
    eager_interaction,
    random_head,
    random_vectors,
)
from reference import DTYPES
from torch import Tensor

import fusedcuda

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_order = pytest.mark.parametrize("order", ORDERS)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


# ---- Interaction ---------------------------------------------------------------------------------


@every_order
@pytest.mark.parametrize(
    "shape", [(9, 27, 128), (33, 27, 16), (5, 27, 64), (3, 64, 256), (17, 4, 8)], ids=str
)
@every_dtype
def test_interaction(dtype, shape, order, device):
    dense, embeddings = random_vectors(*shape, dtype=dtype, device=device)
    output = check_interaction(dense, embeddings, order=order)
    count, columns = shape[1:]
    used = columns + count * (count - 1) // 2
    assert output.shape == (shape[0], -(-used // 8) * 8)
    assert torch.equal(output[:, :columns], dense)
    assert not output[:, used:].any()


def test_orders(device):
    """The products of vectors whose lengths are powers of two name their pairs."""
    embeddings = torch.tensor([[[2.0], [4.0], [16.0]]], device=device)
    dense = torch.ones(1, 1, device=device)
    for order, products in (
        ("tril", [2, 4, 8, 16, 32, 64]),  # (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)
        ("triu", [2, 4, 16, 8, 32, 64]),  # (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)
    ):
        output = fusedcuda.dot_interaction(dense, embeddings, order=order, pad=1)
        assert output.tolist() == [[1.0, *products]]


@pytest.mark.parametrize("pad", [1, 2, 7, 8, 16, 128])
@every_dtype
def test_padding(dtype, pad, device):
    dense, embeddings = random_vectors(6, 5, 24, dtype=dtype, device=device)
    output = check_interaction(dense, embeddings, pad=pad)
    assert output.shape[1] % pad == 0
    assert 34 <= output.shape[1] < 34 + pad


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 7, 12, 31, 100, 129, 255])
@every_dtype
def test_columns(dtype, columns, device):
    for count in (2, 33):
        check_interaction(*random_vectors(5, count, columns, dtype=dtype, device=device))


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 49, 63])
def test_numbers_of_vectors(count, device):
    for dtype in (torch.bfloat16, torch.float32):
        check_interaction(*random_vectors(5, count, 32, dtype=dtype, device=device))


@every_dtype
def test_layouts_of_vectors(dtype, device):
    """Read where they lie, or copied; all give the same."""
    stacked = torch.randn(6, 9, 32, dtype=dtype, device=device)
    dense, embeddings = stacked[:, 0], stacked[:, 2:]
    expected = check_interaction(dense.clone(), embeddings.clone())
    assert torch.equal(check_interaction(dense, embeddings), expected)
    for change in (
        layouts.pitched,
        layouts.transposed,
        layouts.spread,
        layouts.reversed_dimensions,
        lambda x: layouts.shifted(x, 1),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        check_interaction(change(dense), embeddings)
        check_interaction(dense, change(embeddings))
    check_interaction(dense[:1].expand(6, -1), embeddings[:, :1].expand(-1, 5, -1))


@every_dtype
def test_layouts_of_the_incoming_gradient(dtype, device):
    dense, embeddings = random_vectors(6, 5, 16, dtype=dtype, device=device)
    grad = torch.randn(6, 32, dtype=dtype, device=device)
    for given in (
        layouts.shifted(grad, 1),
        layouts.pitched(grad),
        layouts.transposed(grad),
        layouts.spread(grad),
        grad[:1, :1].expand(6, 32),
        grad[:1].expand(6, 32),
    ):
        check_interaction(dense, embeddings, given)


@every_order
def test_a_list_of_vectors_is_stacked(order, device):
    dense, *others = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(6))
    for sequence in (list, tuple):
        output = fusedcuda.dot_interaction(dense, sequence(others), order=order)
        expected = eager_interaction(dense, torch.stack(others, 1), order=order)
        torch.testing.assert_close(output, expected)
        grad = torch.randn_like(output)
        torch.testing.assert_close(
            torch.autograd.grad(output, [dense, *others], grad),
            torch.autograd.grad(expected, [dense, *others], grad),
        )
    assert torch.equal(fusedcuda.dot_interaction(dense, []), dense)


@pytest.mark.parametrize("batch", [0, 1])
def test_few_samples(batch, device):
    for dtype in (torch.bfloat16, torch.float32):
        dense, embeddings = random_vectors(batch, 5, 16, dtype=dtype, device=device)
        assert check_interaction(dense, embeddings).shape == (batch, 32)


def test_what_is_not_finite_goes_where_it_is_multiplied(device):
    for dtype in (torch.bfloat16, torch.float32):
        dense, embeddings = random_vectors(7, 5, 16, dtype=dtype, device=device)
        embeddings[2, 1, 3] = torch.nan
        output = fusedcuda.dot_interaction(dense, embeddings)
        assert output.isnan().any(1).tolist() == [sample == 2 for sample in range(7)]
        assert torch.equal(output.isnan(), eager_interaction(dense, embeddings).isnan())


def test_interaction_gradcheck(device):
    dense, embeddings = random_vectors(3, 4, 5, dtype=torch.float64, device=device)
    vectors = (dense.requires_grad_(), embeddings.requires_grad_())
    for order in ORDERS:
        assert torch.autograd.gradcheck(
            lambda *v, order=order: fusedcuda.dot_interaction(*v, order=order), vectors
        )


def test_gradient_of_one_of_them(device):
    dense, embeddings = random_vectors(3, 4, 8, device=device)
    grad = torch.randn(3, 16, device=device)
    both = torch.autograd.grad(
        fusedcuda.dot_interaction(dense.requires_grad_(), embeddings.requires_grad_()),
        (dense, embeddings),
        grad,
    )
    for wanted, other, expected in (
        (dense, embeddings, both[0]),
        (embeddings, dense, both[1]),
    ):
        other.requires_grad_(False)
        (gradient,) = torch.autograd.grad(
            fusedcuda.dot_interaction(dense, embeddings), (wanted,), grad
        )
        other.requires_grad_()
        assert torch.equal(gradient, expected)


# ---- Head ----------------------------------------------------------------------------------------


@every_reduction
@pytest.mark.parametrize("pos_weight", [None, 3.0])
@pytest.mark.parametrize("columns", [1, 13, 16, 256, 257, 1000])
@every_dtype
def test_head(dtype, columns, pos_weight, reduction, device):
    x, weight, bias, target = random_head(300, columns, dtype=dtype, device=device)
    options = {"reduction": reduction, "pos_weight": pos_weight}
    check_head(x, weight, bias, target, **options)
    check_head(x, weight.view(-1), None, target, **options)


@every_reduction
def test_leading_dimensions(reduction, device):
    for shape in ((8,), (3, 4, 8), (2, 1, 3, 8)):
        x, weight, bias, target = random_head(*shape, device=device)
        expected = check_head(x, weight, bias, target, reduction=reduction)
        assert expected.shape == (shape[:-1] if reduction == "none" else ())
        column = fusedcuda.linear_sigmoid_bce(
            x, weight, bias, target.unsqueeze(-1), reduction=reduction
        )
        assert torch.equal(column, expected)


@every_dtype
def test_layouts_of_rows(dtype, device):
    x, weight, bias, target = random_head(40, 64, dtype=dtype, device=device)
    for given in (
        layouts.shifted(x, 1),
        layouts.pitched(x),
        layouts.transposed(x),
        layouts.spread(x),
        torch.randn(40, 128, dtype=dtype, device=device)[:, :64],
        x[:1].expand(40, 64),
    ):
        check_head(given, weight, bias, target)
    for other in (layouts.shifted(weight, 1), layouts.spread(weight)):
        check_head(x, other, bias, target)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.bfloat16], ids=str)
def test_targets_of_other_dtypes(dtype, device):
    x, weight, bias, target = random_head(40, 64, device=device)
    expected = fusedcuda.linear_sigmoid_bce(x, weight, bias, target)
    assert torch.equal(fusedcuda.linear_sigmoid_bce(x, weight, bias, target.to(dtype)), expected)


def test_targets_between_0_and_1(device):
    x, weight, bias, _ = random_head(200, 24, device=device)
    check_head(x, weight, bias, torch.rand(200, device=device), pos_weight=0.5)


def test_logits(device):
    """In float32, not rounded to the dtype of x; they carry no gradient."""
    x, weight, bias, target = random_head(50, 64, dtype=torch.bfloat16, device=device)
    for requires_grad in (False, True):
        x.requires_grad_(requires_grad)
        loss, logits = fusedcuda.linear_sigmoid_bce(x, weight, bias, target, return_logits=True)
        assert loss.requires_grad == requires_grad
        assert not logits.requires_grad
        expected = F.linear(x.double(), weight.double(), bias.double()).squeeze(-1)
        # 64 products of about 1/8 that are added up in float32; rounded to bfloat16 it is 4e-3.
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, target))


@pytest.mark.parametrize("z", [0.0, 1e-4, 15.0, 60.0, 1e4])
def test_no_term_cancels(z, device):
    """Losses of nearly certain answers, and their gradients, keep their digits."""
    x = torch.tensor([[z], [-z]], device=device)
    weight = torch.ones(1, device=device)
    for y in (0.0, 1.0):
        target = torch.full((2,), y, device=device)
        check_head(x, weight, None, target, reduction="none")
        loss = fusedcuda.linear_sigmoid_bce(x, weight, None, target, reduction="none")
        signed = torch.tensor([z, -z], dtype=torch.float64) * (1 - 2 * y)
        # Eight units of float32, also of 1e-26; below the smallest normal number it may be 0.
        torch.testing.assert_close(loss.cpu().double(), F.softplus(signed), rtol=1e-6, atol=1e-38)


@every_reduction
def test_no_rows(reduction, device):
    x, weight, bias, target = random_head(0, 8, device=device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss = fusedcuda.linear_sigmoid_bce(*leaves, target, reduction=reduction)
    expected = eager_head(*leaves, target, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    gradients = torch.autograd.grad(loss.sum(), leaves)
    assert [g.shape for g in gradients] == [t.shape for t in leaves]
    assert not any(g.any() for g in gradients)


@every_reduction
def test_head_gradcheck(reduction, device):
    x, weight, bias, target = random_head(4, 5, dtype=torch.float64, device=device)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fusedcuda.linear_sigmoid_bce(
            x, weight, bias, target, reduction=reduction, pos_weight=1.5
        )

    assert torch.autograd.gradcheck(function, tuple(t.requires_grad_() for t in (x, weight, bias)))


@pytest.mark.parametrize(
    "wrt", [["x"], ["weight"], ["bias"], ["x", "bias"], ["weight", "bias"]], ids=str
)
def test_gradients_that_are_asked_for(wrt, device):
    for dtype in (torch.bfloat16, torch.float32):
        check_head(*random_head(70, 32, dtype=dtype, device=device), wrt=wrt)


# ---- Both ----------------------------------------------------------------------------------------


def test_a_second_derivative_raises(device):
    dense, embeddings = random_vectors(3, 4, 8, device=device)
    x, weight, bias, target = random_head(5, 8, device=device)
    for name, function, leaf in (
        ("dot_interaction", lambda v: fusedcuda.dot_interaction(v, embeddings), dense),
        ("linear_sigmoid_bce", lambda v: fusedcuda.linear_sigmoid_bce(v, weight, bias, target), x),
    ):
        leaf.requires_grad_()
        output = function(leaf).square().sum()
        (gradient,) = torch.autograd.grad(output, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=f"^{name}: a second derivative"):
            torch.autograd.grad(gradient.sum(), leaf)
