"""softmax and log_softmax under autograd, torch.compile, torch.func, and on a GPU's streams."""

import pytest
import torch
from layouts import reversed_dimensions
from reference import by_name, leaf
from test_softmax import OPS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

every_op = pytest.mark.parametrize("op", OPS, ids=by_name)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_op
def test_gradcheck(op, device):
    for scale in (1.0, -0.5):
        x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, scale=scale: op(x, scale), x)


@every_op
def test_a_graph_only_where_it_is_asked_for(op, device):
    x = torch.randn(4, 6, device=device)
    assert not op(x).requires_grad
    assert op(leaf(x)).requires_grad
    with torch.no_grad():
        assert not op(leaf(x)).requires_grad
    with torch.inference_mode():
        assert op(leaf(x)).is_inference()


@every_op
def test_backward_twice_and_a_stale_output(op, device):
    x = leaf(torch.randn(4, 6, device=device))
    y, dy = op(x), torch.randn(4, 6, device=device)
    (first,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert torch.equal(first, second)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@every_op
def test_only_the_output_is_saved(op, device):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = op(leaf(torch.randn(4, 6, device=device)))
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]


@every_op
def test_a_second_derivative_is_refused(op, device):
    x = leaf(torch.randn(3, 4, device=device))
    (dx,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"^{op.name}: .*differentiable once"):
        dx.square().sum().backward()


@every_op
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(op, use_reentrant, device):
    x = leaf(torch.randn(4, 6, device=device))
    (expected,) = torch.autograd.grad(op(x).square().sum(), x)
    checkpoint(op, x, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_the_dtype(op, dtype, device):
    """torch's own would return float32; the arithmetic is in float32 in any case."""
    x = leaf(torch.randn(4, 6, device=device, dtype=dtype))
    with torch.autocast(device, dtype=torch.bfloat16):
        y = op(x)
    assert y.dtype == dtype
    assert torch.equal(y, op(x))
    y.float().square().sum().backward()
    assert x.grad.dtype == dtype


# ---------------------------------------------------------------------------- registration


def samples(device: str) -> list[Tensor]:
    x = torch.randn(2, 4, 6, device=device)
    return [x, reversed_dimensions(x), x[:1].expand(3, 4, 6), x[:, :0], x[..., 1:-1], x[0, 0]]


@every_op
def test_opcheck(op, device):
    forward = getattr(torch.ops.fusedcuda, op.name).default
    backward = getattr(torch.ops.fusedcuda, f"{op.name}_backward").default
    for x in samples(device):
        torch.library.opcheck(forward, (x, 0.5))
        torch.library.opcheck(backward, (torch.randn_like(x), op(x), 0.5))
        torch.library.opcheck(backward, (torch.ones((), device=device).expand_as(x), op(x), 0.5))


@every_op
def test_compiled_equals_eager(op, device):
    """At most two compilations for five batch sizes, forward and backward."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(x: Tensor) -> Tensor:
        return op(x * 2, 0.5) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for rows in (2, 3, 5, 8, 13):
        x = leaf(torch.randn(rows, 16, device=device))
        dy = torch.randn(rows, 16, device=device)
        torch.testing.assert_close(compiled(x), function(x))
        actual, expected = (torch.autograd.grad(f(x), x, dy)[0] for f in (compiled, function))
        torch.testing.assert_close(actual, expected)
    assert 1 <= counter.frame_count <= 2


@every_op
def test_compiled_with_other_layouts(op, device):
    for x in samples(device):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: op(x) * 2, fullgraph=True, backend="aot_eager")
        assert compiled(x).stride() == op(x).stride()
        torch.testing.assert_close(compiled(x), op(x) * 2)


@every_op
def test_vmap_and_gradients_per_sample(op, device):
    x = torch.randn(3, 4, 5, device=device)
    for dim in (0, 1, 2):
        expected = torch.stack([op.eager(sample) for sample in x.unbind(dim)])
        torch.testing.assert_close(torch.func.vmap(op, in_dims=dim)(x), expected)

    def loss(function):
        return lambda sample: function(sample).square().sum()

    actual = torch.func.vmap(torch.func.grad(loss(op)))(x)
    torch.testing.assert_close(actual, torch.func.vmap(torch.func.grad(loss(op.eager)))(x))
    actual = torch.func.grad(lambda x: torch.func.vmap(loss(op))(x).sum())(x)
    torch.testing.assert_close(actual, torch.func.grad(loss(op.eager))(x))
    jacobian = torch.func.jacrev(op)(x[0])
    torch.testing.assert_close(jacobian, torch.func.jacrev(op.eager)(x[0]))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
        torch.func.jvp(op, (x,), (x,))


# ---------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@every_op
def test_one_kernel_each_way_and_no_wait(op):
    x = leaf(torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16))
    dy = torch.randn_like(x)
    torch.autograd.grad(op(x), x, dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(op(x), x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2, kernels


@pytest.mark.gpu
@every_op
def test_cuda_graph_replays_with_new_data(op):
    for width in (100, 40_000):
        x = leaf(torch.randn(16, width, device="cuda"))
        dy = torch.randn_like(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.autograd.grad(op(x), x, dy)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = op(x)
            (dx,) = torch.autograd.grad(y, x, dy)
        for _ in range(3):
            x.data.normal_()
            dy.normal_()
            graph.replay()
            fresh = op(x)
            assert torch.equal(y, fresh)
            assert torch.equal(dx, torch.autograd.grad(fresh, x, dy)[0])


@pytest.mark.gpu
@every_op
def test_more_than_two_to_the_31_elements(op):
    width = 4096
    rows = (1 << 31) // width + 3
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(width, device="cuda")
    x.requires_grad_()
    y = op(x)
    torch.testing.assert_close(y[-3:], op.eager(x.detach()[-3:]))
    (dx,) = torch.autograd.grad(y, x, x.detach())
    expected = leaf(x.detach()[-3:])
    op.eager(expected).backward(x.detach()[-3:])
    torch.testing.assert_close(dx[-3:], expected.grad)
    assert torch.count_nonzero(dx[:-3]) == 0
