"""linear_cross_entropy under torch.compile, opcheck, fake tensors and torch.func."""

import pytest
import torch
from functorch.compile import make_boxed_func
from linear_losses import OPTIONS, eager, random_problem
from reference import leaf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedcuda
from fusedcuda.ops._cross_entropy_reference import REDUCTIONS

_ops = torch.ops.fusedcuda
forward, backward, scale_ = (
    getattr(_ops, f"linear_cross_entropy_{name}").default
    for name in ("forward", "backward", "scale_")
)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- registration


def raw_options(reduction: str, chunk: int = 0, in_float32: bool = True) -> tuple:
    return -100, 0.1, 1e-3, 5.0, REDUCTIONS[reduction], chunk, in_float32


@every_reduction
def test_opcheck(reduction, device):
    operands, target = random_problem(
        2, 5, classes=6, features=8, dtype=torch.bfloat16, device=device
    )
    x, weight, bias = operands.values()
    for given in (
        (x, weight, bias, target),
        (x.mT.contiguous().mT, weight.t().contiguous().t(), None, target.int()),
        (x[:1].expand(2, 5, 8), weight, bias, target[:1].expand(2, 5)),
        (x[:0], weight, bias, target[:0]),
    ):
        if given[0].numel() == 0 and reduction == "mean":
            continue  # NaN, which opcheck takes for a difference
        for chunk, in_float32 in ((0, True), (3, True), (3, False)):
            options = raw_options(reduction, chunk, in_float32)
            for mask in (0, 1, 6, 7):
                torch.library.opcheck(forward, (*given, *options, mask))
            loss, *saved = forward(*given, *options, 0)
            grad = torch.randn_like(loss)
            for mask in (0, 5, 7):
                torch.library.opcheck(backward, (grad, *given, *saved, *options, mask))


def test_opcheck_of_the_parts(device):
    gradient, factor = torch.randn(5, 6, device=device), torch.tensor(0.5, device=device)
    torch.library.opcheck(scale_, (gradient, factor))
    a, b = torch.randn(4, 6, device=device), torch.randn(3, 6, device=device)
    product = _ops.linear_act_product_.default
    for adds in (False, True):
        torch.library.opcheck(product, (torch.ones(4, 3, device=device), a, b, None, adds))
    wide = torch.ones(4, 8, device=device)[:, :3]
    torch.library.opcheck(product, (wide, a, b, torch.randn(3, device=device), False))
    for reduction, count in (("mean", 2), ("none", 0)):
        for with_gradient in (False, True):
            logits, target = torch.randn(4, 6, device=device), torch.arange(4, device=device)
            sums = torch.empty(4, device=device), torch.empty(4, 2, device=device)
            normalizer = torch.full((count,), 9.0, device=device)
            options = (-100, 0.1, 1e-3, 5.0, REDUCTIONS[reduction], with_gradient)
            rows = _ops.cross_entropy_rows_.default
            torch.library.opcheck(rows, (logits, *sums, target, normalizer, *options))


def test_scaling_by_one_leaves_the_gradient_alone(device):
    gradient = torch.full((70,), 3.0, device=device)
    for factor, expected in ((1.0, 3.0), (-0.5, -1.5), (0.0, 0.0)):
        scaled = gradient.clone()
        scale_(scaled, torch.tensor(factor, device=device))
        assert torch.equal(scaled, torch.full_like(gradient, expected))


@every_reduction
def test_shapes_without_data(reduction):
    operands, target = random_problem(2, 5, classes=6, features=8, dtype=torch.bfloat16)
    given = (*operands.values(), target)
    real = forward(*given, *raw_options(reduction), 7)
    with FakeTensorMode() as mode:
        fake = forward(*map(mode.from_tensor, given), *raw_options(reduction), 7)
    for known, actual in zip(fake, real, strict=True):
        assert (known.shape, known.dtype) == (actual.shape, actual.dtype)
        assert known.stride() == actual.stride()
    x, weight, bias, target = (t.to("meta") for t in given)
    loss = fusedcuda.linear_cross_entropy(x, weight, target, bias, reduction=reduction)
    assert (loss.shape, loss.dtype) == (real[0].shape, torch.float32)


# ---------------------------------------------------------------------------- torch.compile


@every_reduction
@pytest.mark.parametrize("wrt", ["x", "weight", "x weight bias"])
def test_compiled_for_five_batch_sizes(wrt, reduction, device):
    """At most two compilations; only what is asked for."""
    counter = CompileCounterWithBackend("aot_eager")
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}

    def function(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        loss = fusedcuda.linear_cross_entropy(2 * x, weight, target, bias, **options)
        return loss.sum() * 3 + x.square().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for rows in (2, 3, 5, 8, 13):
        operands, target = random_problem(rows, classes=16, features=8, device=device)
        leaves = {name: leaf(t, name in wrt) for name, t in operands.items()}
        asked = [t for t in leaves.values() if t.requires_grad]
        loss = compiled(*leaves.values(), target)
        gradients = torch.autograd.grad(loss, asked)
        x, weight, bias = leaves.values()
        expected = eager(2 * x, weight, bias, target, **options).sum() * 3 + x.square().sum()
        torch.testing.assert_close(loss, expected)
        for ours, theirs in zip(gradients, torch.autograd.grad(expected, asked), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_it_makes_the_gradients_in_the_forward_too(dtype, device):
    """A product less than making the logits again; one kind of operator in the graph."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        from torch._dynamo.backends.common import aot_autograd

        def note(graph: torch.fx.GraphModule, inputs: list[Tensor]):
            seen.extend(str(n.target) for n in graph.graph.nodes if "fusedcuda" in str(n.target))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=note, bw_compiler=note)(graph, inputs)

    operands, target = random_problem(12, classes=9, features=8, dtype=dtype, device=device)
    x, weight, _ = (leaf(t) for t in operands.values())
    compiled = torch.compile(fusedcuda.linear_cross_entropy, fullgraph=True, backend=backend)
    (0.3 * compiled(x, weight, target, chunk=5)).backward()
    assert seen == ["fusedcuda.linear_cross_entropy_forward.default"]
    gradients = x.grad, weight.grad
    expected = fusedcuda.linear_cross_entropy(x, weight, target, chunk=5)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(0.3 * expected, (x, weight)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_compiled_with_inductor():
    operands, target = random_problem(
        300, classes=512, features=64, dtype=torch.bfloat16, device="cuda"
    )
    leaves = [leaf(t) for t in operands.values()]

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fusedcuda.linear_cross_entropy(x.tanh(), weight, target, bias, chunk=128) / 2

    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(*leaves), function(*leaves))
    actual, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, function))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# ---------------------------------------------------------------------------- torch.func


@every_reduction
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_gradients_per_sample(name, reduction, device):
    """Each sample has its own mean; the weight is shared, or each sample's own."""
    options = {"reduction": reduction, **OPTIONS[name]}
    operands, target = random_problem(3, 4, classes=5, features=6, device=device)
    x, weight, _ = operands.values()
    weights = torch.stack([weight, 2 * weight, -weight])

    def fused(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss = fusedcuda.linear_cross_entropy(x, weight, target, chunk=3, **options)
        return loss.square().sum()

    def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return eager(x, weight, None, target, **options).square().sum()

    for given, dim in ((weights, 0), (weight, None)):
        dims = (0, dim, 0)
        for transform in (lambda f: f, torch.func.grad, lambda f: torch.func.grad(f, argnums=1)):
            actual = torch.func.vmap(transform(fused), in_dims=dims)(x, given, target)
            for sample in range(3):
                own = given[sample] if dim == 0 else given
                single = transform(plain)(x[sample], own, target[sample])
                torch.testing.assert_close(actual[sample], single)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
        torch.func.jvp(lambda x: fused(x, weight, target[0]), (x[0],), (x[0],))
