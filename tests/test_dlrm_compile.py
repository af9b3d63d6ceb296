"""The dlrm family under torch.compile, opcheck, fake tensors, vmap, autocast and checkpointing."""

from collections.abc import Callable

import pytest
import torch
from dlrms import eager_head, eager_interaction, random_head, random_vectors
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fusedcuda

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(batch: int = 6, device="cpu", dtype=torch.float32) -> list[Tensor]:
    """Vectors for the interaction, weight and bias of the head, labels."""
    dense, embeddings = random_vectors(batch, 5, 16, dtype=dtype, device=device)
    _, weight, bias, target = random_head(batch, 32, dtype=dtype, device=device)
    return [dense, embeddings, weight, bias, target]


def loss(dense: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """The interaction of one layer's outputs, and the head."""
    row = fusedcuda.dot_interaction(torch.tanh(dense), embeddings)
    return fusedcuda.linear_sigmoid_bce(row.sigmoid(), weight, bias, target)


def eager_loss(dense, embeddings, weight, bias, target) -> Tensor:
    row = eager_interaction(torch.tanh(dense), embeddings)
    return eager_head(row.sigmoid(), weight, bias, target)


def with_gradients(function: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given[:-1]]
    value = function(*leaves, given[-1])
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("upper", [False, True], ids=["tril", "triu"])
def test_opcheck_of_the_interaction(upper, device):
    raw = torch.ops.fusedcuda
    for dtype in (torch.float32, torch.bfloat16):
        stacked = torch.randn(4, 6, 16, dtype=dtype, device=device)
        for dense, embeddings in (
            random_vectors(4, 5, 16, dtype=dtype, device=device),
            random_vectors(0, 5, 16, dtype=dtype, device=device),
            (stacked[:, 0], stacked[:, 2:]),
        ):
            grad = torch.randn(dense.shape[0], 32, dtype=dtype, device=device)
            torch.library.opcheck(raw.dot_interaction.default, (dense, embeddings, upper, 32))
            torch.library.opcheck(
                raw.dot_interaction_backward.default, (grad, dense, embeddings, upper)
            )


@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
def test_opcheck_of_the_head(reduction, device):
    forward = torch.ops.fusedcuda.linear_sigmoid_bce_forward.default
    backward = torch.ops.fusedcuda.linear_sigmoid_bce_backward.default
    for shape in ((6, 16), (2, 3, 5), (16,)):
        x, weight, bias, target = random_head(*shape, dtype=torch.bfloat16, device=device)
        for w, b in ((weight, bias), (weight.view(-1), None)):
            torch.library.opcheck(forward, (x, w, b, target, 2.0, reduction))
        grad_loss = torch.ones_like(target.sum() if reduction else target)
        for mask in (1, 6, 7):
            torch.library.opcheck(backward, (grad_loss, x, weight, target, mask, reduction))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_meta(dtype, device):
    dense, embeddings, weight, bias, target = operands(device=device, dtype=dtype)
    for function, given in (
        (fusedcuda.dot_interaction, (dense, embeddings)),
        (fusedcuda.linear_sigmoid_bce, (dense, weight[:, :16], bias, target)),
    ):
        real, meta = function(*given), function(*(x.to("meta") for x in given))
        assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@BACKENDS
def test_compiled_equals_eager(backend, device):
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    inputs = operands(device=device)
    expected = with_gradients(eager_loss, *inputs)
    for function in (loss, compiled):
        torch.testing.assert_close(with_gradients(function, *inputs), expected)
        with torch.no_grad():
            torch.testing.assert_close(function(*inputs), expected[0])


@BACKENDS
def test_compiled_with_a_list_and_logits(backend, device):
    def function(dense: Tensor, others: list[Tensor], weight: Tensor, target: Tensor) -> Tensor:
        row = fusedcuda.dot_interaction(dense, others, order="triu", pad=1)
        value, logits = fusedcuda.linear_sigmoid_bce(
            row, weight, None, target.bool(), reduction="none", return_logits=True
        )
        return (value * logits.sigmoid()).sum()

    dense, *others = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(4))
    weight, target = torch.randn(14, device=device), torch.tensor([1.0, 0, 0, 1], device=device)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    actual, expected = (f(dense, others, weight, target) for f in (compiled, function))
    torch.testing.assert_close(actual, expected)
    leaves = [dense, *others]
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves)
    )


def test_batches_compile_at_most_twice(device):
    """Forward and backward: no size of a batch may have been baked into the graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 3, 5, 8, 13):
        inputs = operands(batch, device=device)
        torch.testing.assert_close(
            with_gradients(compiled, *inputs), with_gradients(eager_loss, *inputs)
        )
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("embeddings_dim", [None, 2])
def test_vmap_of_the_interaction(embeddings_dim, device):
    dense = torch.randn(3, 4, 8, device=device)
    shape = (4, 5, 8) if embeddings_dim is None else (4, 5, 3, 8)
    embeddings = torch.randn(shape, device=device)

    def batched(dense: Tensor) -> Tensor:
        return torch.func.vmap(fusedcuda.dot_interaction, (0, embeddings_dim))(dense, embeddings)

    def one_by_one(dense: Tensor) -> Tensor:
        others = [
            embeddings if embeddings_dim is None else embeddings.select(embeddings_dim, i)
            for i in range(3)
        ]
        return torch.stack([eager_interaction(*pair) for pair in zip(dense, others, strict=True)])

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.func.grad(lambda dense: function(dense).pow(3).sum())(dense)

    torch.testing.assert_close(batched(dense), one_by_one(dense))
    torch.testing.assert_close(gradient(batched), gradient(one_by_one))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_vmap_of_the_head(reduction, device):
    """Per-sample gradients, as torch.func has them."""
    x, weight, bias, target = random_head(3, 5, 8, device=device)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        def total(weight: Tensor, bias: Tensor, x: Tensor, target: Tensor) -> Tensor:
            return function(x, weight, bias, target, reduction=reduction).sum()

        return torch.func.vmap(torch.func.grad(total, (0, 1)), (None, None, 0, 0))(
            weight, bias, x, target
        )

    torch.testing.assert_close(gradients(fusedcuda.linear_sigmoid_bce), gradients(eager_head))


def test_autocast_casts_as_torch_does(device):
    dense, embeddings, weight, bias, target = operands(device=device)
    row = torch.randn(6, 32, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = fusedcuda.dot_interaction(dense, embeddings)
        value = fusedcuda.linear_sigmoid_bce(row, weight, bias, target)
    lower = [t.bfloat16() for t in (dense, embeddings, row, weight, bias)]
    assert torch.equal(output, fusedcuda.dot_interaction(*lower[:2]))
    assert torch.equal(value, fusedcuda.linear_sigmoid_bce(*lower[2:], target))
    assert value.dtype == torch.float32


def test_gradients_under_autocast_have_the_dtype_of_their_operand(device):
    *given, target = operands(device=device)
    leaves = [t.requires_grad_() for t in given]
    with torch.autocast(device, torch.bfloat16):
        value = loss(*leaves, target)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(value, leaves))


def test_checkpoint(device):
    inputs = operands(device=device)
    actual = with_gradients(lambda *args: checkpoint(loss, *args, use_reentrant=False), *inputs)
    torch.testing.assert_close(actual, with_gradients(loss, *inputs))
