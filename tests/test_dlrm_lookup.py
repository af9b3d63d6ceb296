"""The interaction of rows of a table: values, layouts, dtypes, gradients, compilation."""

import layouts
import pytest
import torch
import torch.nn.functional as F
from dlrms import ORDERS, check_lookup, eager_lookup, random_lookup
from reference import DTYPES
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusedcuda

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
raw = torch.ops.fusedcuda


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "shape", [(9, 27, 128), (33, 27, 16), (5, 27, 64), (3, 64, 256), (17, 4, 8)], ids=str
)
@every_dtype
def test_lookup(dtype, shape, order, device):
    dense, weight, indices = random_lookup(*shape, dtype=dtype, device=device)
    output = check_lookup(dense, weight, indices, order=order)
    looked_up = F.embedding(indices, weight)
    assert torch.equal(output, fusedcuda.dot_interaction(dense, looked_up, order=order))
    narrow = fusedcuda.embedding_interaction(dense, weight, indices.int(), order=order)
    assert torch.equal(output, narrow)


@pytest.mark.parametrize("pad", [1, 7, 16, 128])
@every_dtype
def test_padding(dtype, pad, device):
    output = check_lookup(*random_lookup(6, 5, 24, dtype=dtype, device=device), pad=pad)
    assert output.shape[1] % pad == 0
    assert 34 <= output.shape[1] < 34 + pad


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 12, 31, 100, 255])
@every_dtype
def test_columns(dtype, columns, device):
    for count in (2, 33):
        check_lookup(*random_lookup(5, count, columns, dtype=dtype, device=device))


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 48, 63, 64])
def test_numbers_of_vectors(count, device):
    for dtype in (torch.bfloat16, torch.float32):
        check_lookup(*random_lookup(5, count, 32, dtype=dtype, device=device))


@every_dtype
def test_layouts(dtype, device):
    dense, weight, indices = random_lookup(6, 9, 32, dtype=dtype, device=device)
    for change in (
        layouts.pitched,
        layouts.transposed,
        layouts.spread,
        layouts.reversed_dimensions,
        lambda x: layouts.shifted(x, 1),
    ):
        check_lookup(change(dense), weight, indices)
        check_lookup(dense, change(weight), indices)
        check_lookup(dense, weight, change(indices))
        check_lookup(dense, weight, change(indices.int()))
    check_lookup(dense[:1].expand(6, 32), weight[:1].expand(50, 32), indices[:, :1].expand(6, 8))


@every_dtype
def test_layouts_of_the_incoming_gradient(dtype, device):
    dense, weight, indices = random_lookup(6, 5, 16, dtype=dtype, device=device)
    grad = torch.randn(6, 32, dtype=dtype, device=device)
    for given in (layouts.shifted(grad, 1), layouts.transposed(grad), grad[:1, :1].expand(6, 32)):
        check_lookup(dense, weight, indices, given)


@pytest.mark.parametrize("batch", [0, 1])
def test_few_samples(batch, device):
    for dtype in (torch.bfloat16, torch.float32):
        given = random_lookup(batch, 5, 16, dtype=dtype, device=device)
        assert check_lookup(*given).shape == (batch, 32)
    dense, weight, indices = random_lookup(batch, 1, 8, rows=1, device=device)
    assert torch.equal(fusedcuda.embedding_interaction(dense, weight[:0], indices), dense)


def test_one_row_for_all(device):
    """Its gradient is the sum over all samples; all other rows have none."""
    for dtype in DTYPES:
        dense, weight, indices = random_lookup(700, 27, 16, dtype=dtype, device=device)
        check_lookup(dense, weight, torch.full_like(indices, 7))
        weight.requires_grad_()
        output = fusedcuda.embedding_interaction(dense, weight, torch.full_like(indices, 7))
        (gradient,) = torch.autograd.grad(output.float().sum(), weight)
        assert gradient.any(1).tolist() == [row == 7 for row in range(50)]


def test_gradcheck(device):
    dense, weight, indices = random_lookup(3, 4, 5, rows=6, dtype=torch.float64, device=device)
    for order in ORDERS:
        assert torch.autograd.gradcheck(
            lambda *v, order=order: fusedcuda.embedding_interaction(*v, indices, order=order),
            (dense.requires_grad_(), weight.requires_grad_()),
        )


def test_gradient_of_one_of_them(device):
    dense, weight, indices = random_lookup(30, 4, 8, device=device)
    grad = torch.randn(30, 16, device=device)

    def gradients(*wanted: Tensor) -> tuple[Tensor, ...]:
        for t in (dense, weight):
            t.requires_grad_(any(t is w for w in wanted))
        output = fusedcuda.embedding_interaction(dense, weight, indices)
        return torch.autograd.grad(output, wanted, grad)

    both = gradients(dense, weight)
    assert torch.equal(gradients(dense)[0], both[0])
    assert torch.equal(gradients(weight)[0], both[1])


def test_what_is_saved_is_what_was_given(device):
    """Nothing of what was looked up."""
    dense, weight, indices = random_lookup(30, 4, 8, device=device)
    saved = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        fusedcuda.embedding_interaction(dense.requires_grad_(), weight.requires_grad_(), indices)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (dense, weight, indices)}


def test_a_second_derivative_raises(device):
    dense, weight, indices = random_lookup(3, 4, 8, device=device)
    dense.requires_grad_()
    output = fusedcuda.embedding_interaction(dense, weight, indices).square().sum()
    (gradient,) = torch.autograd.grad(output, dense, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^embedding_interaction: a second derivative"):
        torch.autograd.grad(gradient.sum(), dense)


# ---- The compiler and autocast -------------------------------------------------------------------


@pytest.mark.parametrize("upper", [False, True], ids=["tril", "triu"])
def test_opcheck(upper, device):
    for dtype in (torch.float32, torch.bfloat16):
        for batch in (0, 4):
            dense, weight, indices = random_lookup(batch, 5, 16, dtype=dtype, device=device)
            for given in (indices, indices.int(), layouts.transposed(indices)):
                grad = torch.randn(batch, 32, dtype=dtype, device=device)
                arguments = (dense, weight, given, upper)
                torch.library.opcheck(raw.embedding_interaction.default, (*arguments, 32))
                for mask in (1, 2, 3):
                    torch.library.opcheck(
                        raw.embedding_interaction_backward.default, (grad, *arguments, mask)
                    )
                rows = torch.randn(*given.shape, 16, dtype=dtype, device=device)
                torch.library.opcheck(
                    raw.embedding_dense_backward.default, (rows, given, weight.shape[0])
                )


def test_meta(device):
    given = random_lookup(6, 5, 16, dtype=torch.bfloat16, device=device)
    real = fusedcuda.embedding_interaction(*given)
    meta = fusedcuda.embedding_interaction(*(t.to("meta") for t in given))
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


def loss(dense: Tensor, weight: Tensor, indices: Tensor) -> Tensor:
    return fusedcuda.embedding_interaction(torch.tanh(dense), weight, indices).sigmoid().sum()


def eager_loss(dense: Tensor, weight: Tensor, indices: Tensor) -> Tensor:
    return eager_lookup(torch.tanh(dense), weight, indices).sigmoid().sum()


def with_gradients(function, dense: Tensor, weight: Tensor, indices: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (dense, weight)]
    value = function(*leaves, indices)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_equals_eager(backend, device):
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    given = random_lookup(6, 5, 16, device=device)
    expected = with_gradients(eager_loss, *given)
    for function in (loss, compiled):
        torch.testing.assert_close(with_gradients(function, *given), expected)
        with torch.no_grad():
            torch.testing.assert_close(function(*given), expected[0])


def test_batches_compile_at_most_twice(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 3, 5, 8, 13):
        given = random_lookup(batch, 5, 16, rows=20 + batch, device=device)
        torch.testing.assert_close(
            with_gradients(compiled, *given), with_gradients(eager_loss, *given)
        )
    assert 1 <= counter.frame_count <= 2


def test_autocast(device):
    """As F.embedding and dot_interaction; a table of another dtype is not cast as a whole."""
    dense, weight, indices = random_lookup(6, 5, 16, rows=5000, device=device)
    leaves = [t.requires_grad_() for t in (dense, weight)]
    with torch.autocast(device, torch.bfloat16):
        output = fusedcuda.embedding_interaction(*leaves, indices, order="triu", pad=16)
        expected = fusedcuda.dot_interaction(
            dense, F.embedding(indices, weight), order="triu", pad=16
        )
        low = fusedcuda.embedding_interaction(
            dense, weight.bfloat16(), indices, order="triu", pad=16
        )
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    assert torch.equal(low, expected)
    gradients = torch.autograd.grad(output.float().sum(), leaves)
    assert all(g.dtype == torch.float32 for g in gradients)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.float().sum(), leaves))
