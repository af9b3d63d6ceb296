"""cross_entropy under torch.compile, opcheck, fake tensors and torch.func; and what it refuses."""

import pytest
import torch
from layouts import spread, transposed
from losses import OPTIONS, eager_cross_entropy, random_problem
from reference import leaf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedcuda
from fusedcuda.ops._cross_entropy_reference import REDUCTIONS

forward, backward, backward_ = (
    getattr(torch.ops.fusedcuda, f"cross_entropy_{name}").default
    for name in ("forward", "backward", "backward_")
)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- registration


def raw_options(reduction: str, options: dict) -> tuple:
    return (
        options.get("weight"),
        options.get("ignore_index", -100),
        options.get("label_smoothing", 0.0),
        options.get("z_loss", 0.0),
        options.get("softcap", 0.0),
        REDUCTIONS[reduction],
    )


@every_reduction
def test_opcheck(reduction, device):
    plain, target, options = random_problem(2, 5, 6, device=device, **OPTIONS["everything"])
    raw = raw_options(reduction, options)
    for logits, classes in (
        (plain, target),
        (transposed(plain), transposed(target)),
        (spread(plain)[..., 1:-1], target.int() % 4),
        (plain[:1].expand(2, 5, 6), target[:1].expand(2, 5)),
        (plain[:0], target[:0]),
    ):
        given = (logits, classes, *raw)
        if logits.numel() == 0 and reduction == "mean":
            continue  # NaN, which opcheck takes for a difference
        if logits.shape[-1] != 6:
            given = (logits, classes, None, *raw[1:])
        for with_gradient in (False, True):
            torch.library.opcheck(forward, (*given, with_gradient))
        loss, statistics, normalizer = forward(*given, False)
        saved = (torch.randn_like(loss), logits, classes, statistics, normalizer, *given[2:])
        torch.library.opcheck(backward, saved)
        torch.library.opcheck(backward_, (torch.zeros(logits.shape, device=device), *saved, False))
        if reduction != "none":
            torch.library.opcheck(backward_, (logits.clone(), *saved, True))


def test_unless_one_leaves_the_gradient_alone(device):
    logits, target, _ = random_problem(4, 6, device=device)
    options = raw_options("mean", {})
    loss, statistics, normalizer, gradient = forward(logits, target, *options, True)
    for factor in (1.0, 2.0):
        saved = (torch.full_like(loss, factor), logits, target, statistics, normalizer, *options)
        for written in (torch.full_like(logits, 7.0), transposed(torch.full_like(logits, 7.0))):
            backward_(written, *saved, True)
            expected = torch.full_like(logits, 7.0) if factor == 1 else factor * gradient
            torch.testing.assert_close(written, expected)
    none = raw_options("none", {})
    saved = (torch.ones_like(logits[:, 0]), logits, target, statistics, normalizer[:0], *none)
    with pytest.raises((ValueError, RuntimeError), match="unless_one"):
        backward_(torch.empty_like(logits), *saved, True)


@every_reduction
def test_shapes_without_data(reduction):
    logits, target, _ = random_problem(2, 5, 6, device="cpu", dtype=torch.bfloat16)
    real = forward(logits, target, *raw_options(reduction, {}), True)
    with FakeTensorMode() as mode:
        fakes = (mode.from_tensor(logits), mode.from_tensor(target))
        fake = forward(*fakes, *raw_options(reduction, {}), True)
    for known, actual in zip(fake, real, strict=True):
        assert (known.shape, known.dtype) == (actual.shape, actual.dtype)
        assert known.stride() == actual.stride()
    loss = fusedcuda.cross_entropy(logits.to("meta"), target.to("meta"), reduction=reduction)
    assert (loss.shape, loss.dtype) == (real[0].shape, torch.float32)


# ---------------------------------------------------------------------------- torch.compile


@every_reduction
@pytest.mark.parametrize("inplace_backward", [False, True])
def test_compiled_for_five_batch_sizes(inplace_backward, reduction, device):
    """At most two compilations; inplace_backward is ignored, so the logits stay as they are."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(x: Tensor, target: Tensor) -> Tensor:
        logits = x * 2
        loss = fusedcuda.cross_entropy(
            logits,
            target,
            reduction=reduction,
            label_smoothing=0.1,
            z_loss=1e-3,
            softcap=5.0,
            inplace_backward=inplace_backward,
        )
        return loss.sum() * 3 + logits.square().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for rows in (2, 3, 5, 8, 13):
        logits, target, _ = random_problem(rows, 16, device=device)
        logits = leaf(logits)
        loss = compiled(logits, target)
        (grad,) = torch.autograd.grad(loss, logits)
        double = leaf(logits.double())
        options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}
        expected = eager_cross_entropy(2 * double, target, reduction=reduction, **options)
        expected = expected.sum() * 3 + (2 * double).square().sum()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        (wanted,) = torch.autograd.grad(expected, double)
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-5)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.gpu
def test_compiled_with_inductor():
    logits, target, options = random_problem(5, 16, device="cuda", weight=True)
    logits = leaf(logits)

    def function(logits: Tensor) -> Tensor:
        return fusedcuda.cross_entropy(logits.tanh() * 4, target, **options) / 2

    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(logits), function(logits))
    actual, expected = (torch.autograd.grad(f(logits), logits)[0] for f in (compiled, function))
    torch.testing.assert_close(actual, expected)


# ---------------------------------------------------------------------------- torch.func


@every_reduction
@pytest.mark.parametrize("inplace_backward", [False, True])
def test_gradients_per_sample(inplace_backward, reduction, device):
    """Each sample has its own mean. Weights may be each sample's own, too."""
    logits, target, _ = random_problem(3, 4, 5, device=device)
    weights = torch.rand(3, 5, device=device) + 0.5

    def loss(function, **options):
        return lambda logits, target, weight: (
            function(logits, target, weight=weight, reduction=reduction, **options).square().sum()
        )

    fused = loss(fusedcuda.cross_entropy, inplace_backward=inplace_backward)
    eager = loss(eager_cross_entropy)
    for weight, dim in ((weights, 0), (weights[0], None)):
        dims = (0, 0, dim)
        for transform in (lambda f: f, torch.func.grad):
            actual = torch.func.vmap(transform(fused), in_dims=dims)(logits, target, weight)
            for sample in range(3):
                own = weight[sample] if dim == 0 else weight
                single = transform(eager)(logits[sample], target[sample], own)
                torch.testing.assert_close(actual[sample], single)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
        torch.func.jvp(lambda x: fused(x, target, weights[0]), (logits,), (logits,))


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, "logits .*int64", {"logits": torch.ones(2, 3, dtype=torch.int64)}),
        (TypeError, "logits .*list", {"logits": [[1.0, 2.0]]}),
        (ValueError, "logits .*dimension", {"logits": torch.ones(())}),
        (ValueError, r"logits .*class.*\(2, 0\)", {"logits": torch.ones(2, 0)}),
        (TypeError, "target .*int32 or int64.*float32", {"target": torch.ones(2)}),
        (TypeError, "target .*uint8", {"target": torch.zeros(2, dtype=torch.uint8)}),
        (TypeError, "target .*list", {"target": [0, 1]}),
        (ValueError, r"target .*\(2,\).*\(3,\)", {"target": torch.zeros(3, dtype=torch.int64)}),
        (ValueError, r"target .*\(2, 3\)", {"target": torch.zeros(2, 3, dtype=torch.int64)}),
        (TypeError, "weight .*int64", {"weight": torch.ones(3, dtype=torch.int64)}),
        (ValueError, r"weight .*\(3,\).*\(4,\)", {"weight": torch.ones(4)}),
        (TypeError, "weight .*list", {"weight": [1.0, 1.0, 1.0]}),
        (TypeError, "ignore_index .*float", {"ignore_index": 0.5}),
        (ValueError, "reduction .*none, mean, sum.*'avg'", {"reduction": "avg"}),
        (ValueError, "reduction .*None", {"reduction": None}),
        (ValueError, r"label_smoothing .*\[0, 1\].*1.5", {"label_smoothing": 1.5}),
        (ValueError, "label_smoothing .*nan", {"label_smoothing": float("nan")}),
        (TypeError, "label_smoothing .*str", {"label_smoothing": "0.1"}),
        (ValueError, "z_loss .*-1", {"z_loss": -1.0}),
        (TypeError, "z_loss .*Tensor", {"z_loss": torch.ones(())}),
        (ValueError, "softcap .*positive.*0", {"softcap": 0.0}),
        (TypeError, "softcap .*str", {"softcap": "30"}),
        (ValueError, "target .*meta", {"target": torch.zeros(2, dtype=torch.int64, device="meta")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(error, words, changes, requires_grad, device):
    """Each message names the op and the argument, and says what was expected and what came."""

    def placed(value):
        elsewhere = not isinstance(value, Tensor) or value.is_meta
        return value if elsewhere else value.to(device)

    arguments = {
        "logits": torch.zeros(2, 3),
        "target": torch.zeros(2, dtype=torch.int64),
        **changes,
    }
    arguments = {name: placed(value) for name, value in arguments.items()}
    logits = arguments["logits"]
    if requires_grad and isinstance(logits, Tensor) and logits.is_floating_point():
        logits.requires_grad_()
    with pytest.raises(error, match=f"^cross_entropy: {words}"):
        fusedcuda.cross_entropy(**arguments)


def test_the_class_dimension_of_torch_is_pointed_out(device):
    """(N, C, d1) with targets (N, d1) is what F.cross_entropy takes."""
    logits = torch.zeros(2, 5, 3, device=device)
    target = torch.zeros(2, 3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^cross_entropy: target .*last dimension.*dimension 1"):
        fusedcuda.cross_entropy(logits, target)
    fusedcuda.cross_entropy(logits.movedim(1, -1), target)


@pytest.mark.parametrize("wrong", [5, -1, -99, 2**31, -(2**31) - 100])
@every_reduction
def test_targets_out_of_range_raise_on_the_cpu(wrong, reduction):
    for logits in (torch.zeros(2, 5), torch.zeros(2, 5, requires_grad=True)):
        with pytest.raises(IndexError, match=rf"^cross_entropy: target .*\[0, 5\).*{wrong} at"):
            fusedcuda.cross_entropy(logits, torch.tensor([0, wrong]), reduction=reduction)


def test_the_codes_are_those_of_the_kernels():
    header = fusedcuda.kernel_source("cross_entropy").with_suffix(".h").read_text()
    order = header.split("enum class Reduction {")[1].split("}")[0]
    assert [name.strip()[1:].lower() for name in order.split(",")] == list(REDUCTIONS)
