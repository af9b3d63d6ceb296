"""linear_cross_entropy: losses and gradients against float64, chunks, layouts, special values."""

import itertools

import pytest
import torch
from layouts import shifted, spread, transposed
from linear_losses import OPTIONS, check_linear_loss, eager, random_problem
from reference import DTYPES, leaf
from torch import Tensor, inf, nan

import fusedcuda
from fusedcuda.ops import _linear_cross_entropy_chunks as chunks

REDUCTIONS = ["none", "mean", "sum"]
ROWS = 37
CHUNKS = [1, 8, 12, 36, 37, 1000, "auto"]  # also with one row left over

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_option = pytest.mark.parametrize("name", OPTIONS)
both_sums = pytest.mark.parametrize("accumulate", ["fp32", "weight"])


@every_dtype
@every_reduction
@both_sums
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks(chunk, accumulate, reduction, dtype, device):
    for classes, features in ((40, 24), (51, 13)):
        operands, target = random_problem(
            ROWS, classes=classes, features=features, dtype=dtype, device=device
        )
        for incoming in (1.0, None):
            how = {"chunk": chunk, "accumulate": accumulate, "reduction": reduction}
            check_linear_loss(operands, target, incoming, **how)


@every_dtype
@every_reduction
@every_option
def test_options(name, reduction, dtype, device):
    operands, target = random_problem(ROWS, classes=50, features=16, dtype=dtype, device=device)
    for incoming in (1.0, None):
        options = {"reduction": reduction, **OPTIONS[name]}
        check_linear_loss(operands, target, incoming, chunk=10, **options)


@every_dtype
@pytest.mark.parametrize("classes", [1, 2, 3, 7, 8, 127, 128, 129, 1000, 4097])
def test_vocabularies_off_the_tiles(classes, dtype, device):
    for bias in (False, True):
        operands, target = random_problem(
            21, classes=classes, features=16, dtype=dtype, device=device, bias=bias
        )
        # All rows at once, as eager: of another number of rows the BLAS of the CPU adds up the
        # thousands of products in another order, up to five times less exactly.
        check_linear_loss(operands, target, chunk=21)


@pytest.mark.gpu
@every_reduction
@both_sums
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [32000, 50257, 128256])
def test_vocabularies_of_language_models(classes, dtype, accumulate, reduction):
    for rows, features, chunk in ((300, 256, 128), (1000, 512, "auto")):
        operands, target = random_problem(
            rows, classes=classes, features=features, dtype=dtype, device="cuda", bias=rows == 300
        )
        how = {"chunk": chunk, "accumulate": accumulate, "reduction": reduction}
        check_linear_loss(operands, target, **how)


@every_dtype
def test_leading_dimensions(dtype, device):
    for rows in ((), (1,), (2, 3, 4), (1, 1, 5)):
        operands, target = random_problem(*rows, classes=9, features=8, dtype=dtype, device=device)
        for reduction in REDUCTIONS:
            check_linear_loss(operands, target, chunk=3, reduction=reduction)


def test_the_loss_is_in_float32(device):
    for dtype in DTYPES:
        operands, target = random_problem(4, classes=9, features=8, dtype=dtype, device=device)
        for requires_grad in (False, True):
            x = leaf(operands["x"], requires_grad)
            loss = fusedcuda.linear_cross_entropy(x, operands["weight"], target)
            assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# ---------------------------------------------------------------------------- what is asked for


@every_reduction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_only_the_gradients_that_are_asked_for(dtype, reduction, device):
    names = ("x", "weight", "bias")
    operands, target = random_problem(ROWS, classes=40, features=16, dtype=dtype, device=device)
    for count in (1, 2):
        for wrt in itertools.combinations(names, count):
            check_linear_loss(operands, target, chunk=16, wrt=wrt, reduction=reduction)


@every_reduction
def test_products_that_are_made(reduction, device, monkeypatch):
    """One a chunk for the loss, and one for each gradient of a matrix."""
    made = count_products(monkeypatch)
    operands, target = random_problem(ROWS, classes=40, features=16, device=device)
    count = 3  # of chunks
    for wrt in ((), ("bias",), ("x",), ("weight",), ("x", "weight")):
        made.clear()
        leaves = {name: leaf(t, name in wrt) for name, t in operands.items()}
        loss = fusedcuda.linear_cross_entropy(
            leaves["x"], leaves["weight"], target, leaves["bias"], chunk=16, reduction=reduction
        )
        products = 1 + len(set(wrt) - {"bias"})
        ahead = reduction != "none"
        assert len(made) == count * (products if ahead else 1)
        if wrt:
            loss.sum().backward()
            assert len(made) == count * (products if ahead else 1 + products)


def count_products(monkeypatch) -> list[None]:
    made: list[None] = []

    class Counted:
        def __getattr__(self, name: str):
            if name == "linear_act_product_":
                made.append(None)
            return getattr(torch.ops.fusedcuda, name)

    monkeypatch.setattr(chunks, "_ops", Counted())
    return made


def test_the_sum_of_the_weight_in_float32_keeps_what_bfloat16_drops(device):
    """Many chunks that add the same small number: in bfloat16 the sum stops at 256 of them."""
    rows = 1024
    x = torch.ones(rows, 1, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64, device=device)

    def gradient(accumulate: str) -> float:
        loss = fusedcuda.linear_cross_entropy(
            x, weight, target, reduction="sum", chunk=1, accumulate=accumulate
        )
        return torch.autograd.grad(loss, weight)[0][1].item()

    assert gradient("fp32") == rows / 2
    assert gradient("weight") == 128


# ---------------------------------------------------------------------------- targets


@every_reduction
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 5, 255, 2**31 - 1])
def test_targets_and_ignore_index(ignore_index, dtype, reduction, device):
    operands, target = random_problem(
        40, classes=8, features=8, device=device, ignore_index=ignore_index
    )
    options = {"ignore_index": ignore_index, "reduction": reduction, "chunk": 16}
    check_linear_loss(operands, target.to(dtype), **options)


@every_reduction
def test_target_layouts(reduction, device):
    operands, target = random_problem(6, 5, classes=9, features=8, device=device)
    wide = torch.zeros(6, 10, dtype=target.dtype, device=device)
    wide[:, ::2] = target
    for other in (transposed(target), target[:, :1].expand(6, 5), wide[:, ::2]):
        check_linear_loss(operands, other, chunk=7, reduction=reduction)


def same_as_eager(
    operands: dict[str, Tensor | None], target: Tensor, **options
) -> dict[str, Tensor]:
    """Loss and gradients are torch's, NaN included; returns ours."""
    ours, theirs = ({name: leaf(t) for name, t in operands.items()} for _ in range(2))
    chunk = options.pop("chunk", "auto")
    loss = fusedcuda.linear_cross_entropy(
        ours["x"], ours["weight"], target, ours["bias"], chunk=chunk, **options
    )
    expected = eager(*theirs.values(), target, **options)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    loss.sum().backward()
    expected.sum().backward()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.grad, theirs[name].grad, equal_nan=True)
    return {name: tensor.grad for name, tensor in ours.items()}


@every_reduction
@every_option
@pytest.mark.parametrize("chunk", [4, "auto"])
def test_chunks_of_ignored_targets(chunk, name, reduction, device):
    """The first, one in the middle, and the last; then all of them: as torch, a mean is NaN."""
    operands, target = random_problem(18, classes=9, features=8, device=device)
    target[:] = torch.arange(18, device=device) % 9
    options = {"reduction": reduction, "chunk": chunk, **OPTIONS[name]}
    for ignored in (slice(0, 4), slice(8, 12), slice(16, 18), slice(0, 18)):
        some = target.clone()
        some[ignored] = -100
        gradients = same_as_eager(operands, some, **options)
        assert not gradients["x"][ignored].any()
    assert not any(gradient.any() for gradient in gradients.values())


@every_reduction
@every_option
def test_no_row_at_all(name, reduction, device):
    for rows in ((0,), (3, 0)):
        operands, target = random_problem(*rows, classes=5, features=8, device=device)
        gradients = same_as_eager(operands, target, reduction=reduction, **OPTIONS[name])
        assert not gradients["weight"].any()
        assert not gradients["bias"].any()


@every_reduction
def test_no_features(reduction, device):
    operands, target = random_problem(6, classes=5, features=0, device=device)
    same_as_eager(operands, target, chunk=4, reduction=reduction)


# ---------------------------------------------------------------------------- layouts


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": transposed,
    "pitched": lambda t: torch.cat([t, t[:, :3]], 1)[:, : t.shape[1]],
    "spread": spread,
    "shifted": lambda t: shifted(t, 1),
    "a row expanded": lambda t: t[:1].expand(t.shape),
    "a column expanded": lambda t: t[:, :1].expand(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("of_x", LAYOUTS)
def test_layouts(of_x, of_weight, dtype, device):
    """As of contiguous copies. (Of rows that repeat, errors repeat too and tell nothing.)"""
    operands, target = random_problem(21, classes=19, features=16, dtype=dtype, device=device)
    laid_out = {**operands, "x": LAYOUTS[of_x](operands["x"])}
    laid_out["weight"] = LAYOUTS[of_weight](operands["weight"])

    def loss_and_gradients(operands: dict[str, Tensor], reduction: str) -> list[Tensor]:
        x, weight, bias = (leaf(t) for t in operands.values())
        loss = fusedcuda.linear_cross_entropy(x, weight, target, bias, chunk=8, reduction=reduction)
        return [loss, *torch.autograd.grad(loss.sum(), (x, weight, bias))]

    for reduction in ("mean", "none"):
        actual = loss_and_gradients(laid_out, reduction)
        dense = {name: t.contiguous() for name, t in laid_out.items()}
        for ours, expected in zip(actual, loss_and_gradients(dense, reduction), strict=True):
            torch.testing.assert_close(ours, expected)


def test_an_operand_that_has_to_be_copied_is_copied_once(device):
    dense = torch.randn(8, 6, device=device)
    for matrix in (dense, dense.t(), dense[:, 1:], dense[:, 1:].t(), dense[::2], dense[:, :1]):
        assert chunks.readable(matrix) is matrix
    for matrix in (dense[:, ::2], dense[:1].expand(8, 6), dense[:, :1].expand(8, 6)):
        copy = chunks.readable(matrix)
        assert copy.is_contiguous()
        assert torch.equal(copy, matrix)


@every_dtype
def test_incoming_gradients_of_every_layout(dtype, device):
    operands, target = random_problem(6, 11, classes=33, features=8, dtype=dtype, device=device)
    of_loss = torch.float64 if dtype == torch.float64 else torch.float32
    grad = torch.randn(6, 11, dtype=of_loss, device=device)
    for incoming in (
        transposed(grad),
        spread(grad),
        grad[:1].expand(6, 11),
        grad[:, :1].expand(6, 11),
        grad[0, 0].expand(6, 11),
    ):
        check_linear_loss(operands, target, incoming, reduction="none", chunk=16)


# ---------------------------------------------------------------------------- special values


@every_reduction
@pytest.mark.parametrize("chunk", [1, 3, "auto"])
def test_special_values_are_those_of_torch(chunk, reduction, device):
    """Of a row of x: what is not finite stays in its row of dx, and is in the loss and in dW."""
    for value in (nan, inf, -inf):
        operands, target = random_problem(5, classes=7, features=8, device=device)
        target[:] = torch.arange(5, device=device)
        operands["x"][2, 3] = value
        gradients = same_as_eager(operands, target, chunk=chunk, reduction=reduction)
        if reduction != "mean":
            assert gradients["x"][0].isfinite().all()


def test_a_masked_class(device):
    """A bias of -inf: no probability, no gradient."""
    operands, target = random_problem(5, classes=7, features=8, device=device)
    target[:] = torch.arange(5, device=device)
    operands["bias"][6] = -inf
    gradients = same_as_eager(operands, target, chunk=2)
    assert not gradients["weight"][6].any()
