"""rope under torch.compile, opcheck, fake tensors, vmap and autocast."""

import pytest
import torch
from ropes import LAYOUTS, bhsd, bshd, eager, random_tables
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fusedcuda

INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(layout=bhsd, length: int = 6, device="cpu", dtype=torch.float32) -> list[Tensor]:
    q, k = (layout(2, h, length, 16, device=device, dtype=dtype) for h in (4, 2))
    return [q, k, *random_tables(length, 16, device=device)]


@INTERLEAVED
@pytest.mark.parametrize("name", ["rope", "rope_backward", "rope_"])
def test_opcheck(name, interleaved, device):
    raw = getattr(torch.ops.fusedcuda, name).default
    for layout in LAYOUTS:
        q, k, cos, sin = operands(layout, device=device)
        lists = [
            [q, k, cos, sin],
            [q, k, cos[:, :8], sin[:, :8]],
            [q.new_empty(0, 4, 6, 16), k.new_empty(0, 2, 6, 16), cos, sin],
        ]
        if name != "rope_":
            lists.append([q[:1, :1].expand(q.shape), k, cos, sin])
        for arguments in lists:
            torch.library.opcheck(raw, (*arguments, interleaved))


def test_meta(device):
    for layout in LAYOUTS:
        inputs = operands(layout, device=device)
        real = fusedcuda.rope(*inputs)
        meta = fusedcuda.rope(*(x.to("meta") for x in inputs))
        for known, y in zip(meta, real, strict=True):
            assert (known.shape, known.dtype) == (y.shape, y.dtype)


def loss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    q, k = fusedcuda.rope(q * 2, k, cos, sin, interleaved=interleaved)
    return (q @ k.repeat_interleave(2, 1).transpose(-1, -2)).square().sum()


def with_gradients(function, q, k, *others) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    value = function(*leaves, *others)
    return [value.detach(), *torch.autograd.grad(value, leaves, allow_unused=True)]


@INTERLEAVED
@BACKENDS
def test_compiled_equals_eager(backend, interleaved, device):
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for layout in LAYOUTS:
        inputs = operands(layout, device=device)
        actual = with_gradients(compiled, *inputs, interleaved)
        expected = with_gradients(loss, *inputs, interleaved)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(*inputs, interleaved), expected[0], rtol=1e-4, atol=1e-4
            )


@BACKENDS
def test_compiled_where_an_output_is_not_used(backend, device):
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return fusedcuda.rope(q, k, cos, sin)[0].square().sum()

    inputs = operands(device=device)
    value, dq, dk = with_gradients(
        torch.compile(function, fullgraph=True, backend=backend), *inputs
    )
    expected = with_gradients(function, *inputs)
    torch.testing.assert_close([value, dq], expected[:2])
    assert dk is None or not dk.any()


def test_lengths_compile_at_most_twice(device):
    """Forward and backward: no size may have been baked into the graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for length in (2, 3, 5, 8, 13):
        inputs = operands(bshd, length, device=device)
        actual = with_gradients(compiled, *inputs)
        torch.testing.assert_close(actual, with_gradients(loss, *inputs), rtol=1e-4, atol=1e-4)
    assert 1 <= counter.frame_count <= 2


@BACKENDS
def test_compiled_in_place(backend, device):
    """Of an argument and of a tensor made inside, whose older value is still read."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        inner = q + 1
        before = inner * 3
        fusedcuda.rope_(inner, k, cos, sin)
        return inner - before, k * 2

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for layout in LAYOUTS:
        q, k, cos, sin = operands(layout, device=device)
        k_compiled, k_eager = k.clone(), k.clone()
        with torch.no_grad():
            actual = compiled(q, k_compiled, cos, sin)
            expected = function(q, k_eager, cos, sin)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(k_compiled, k_eager)
        assert not torch.equal(k_compiled, k)


@pytest.mark.parametrize(
    ("shape", "table_dim"),
    [((5, 16), None), ((1, 5, 16), None), ((2, 5, 16), None), ((3, 5, 16), 0), ((3, 2, 5, 8), 0)],
    ids=str,
)
@pytest.mark.parametrize("k_dim", [None, 3])
def test_vmap(k_dim, shape, table_dim, device):
    """Each operand may have the dimension of the samples, or be the same for all of them."""
    q = torch.randn(3, 2, 4, 5, 16, device=device)
    k = torch.randn((2, 2, 5, 16) if k_dim is None else (2, 2, 5, 3, 16), device=device)
    cos, sin = random_tables(*shape, device=device)
    in_dims = (0, k_dim, table_dim, table_dim)

    def batched(q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.vmap(fusedcuda.rope, in_dims)(q, k, cos, sin)

    def one_by_one(q: Tensor) -> tuple[Tensor, ...]:
        given = list(zip((q, k, cos, sin), in_dims, strict=True))
        samples = [
            eager(*(x if dim is None else x.select(dim, i) for x, dim in given)) for i in range(3)
        ]
        return tuple(torch.stack(parts) for parts in zip(*samples, strict=True))

    def gradient(function) -> Tensor:
        return torch.func.grad(lambda q: sum(y.pow(3).sum() for y in function(q)))(q)

    torch.testing.assert_close(batched(q), one_by_one(q))
    torch.testing.assert_close(gradient(batched), gradient(one_by_one))


def test_in_place_under_transforms_is_refused(device):
    q, k, cos, sin = operands(device=device)
    with pytest.raises(NotImplementedError, match=r"^rope_: .*torch\.func"):
        torch.func.vmap(lambda q: fusedcuda.rope_(q, k, cos, sin)[0])(q[None])


def test_autocast_changes_nothing(device):
    inputs = operands(device=device)
    with torch.autocast(device, torch.bfloat16):
        actual = fusedcuda.rope(*inputs)
    torch.testing.assert_close(actual, fusedcuda.rope(*inputs), rtol=0, atol=0)


def test_checkpoint(device):
    q, k, cos, sin = operands(device=device)
    expected = with_gradients(loss, q, k, cos, sin)
    actual = with_gradients(
        lambda *args: checkpoint(loss, *args, use_reentrant=False), q, k, cos, sin
    )
    torch.testing.assert_close(actual, expected)
