"""What only a GPU shows of the norms: streams, graphs, devices, memory, very large tensors."""

import pytest
import torch
from norms import NORMS, Norm, check_norm
from reference import by_name, leaf, need_gpu_memory, poison
from torch import Tensor
from torch.autograd import DeviceType

import fusedcuda

pytestmark = pytest.mark.gpu

EVERY_NORM = pytest.mark.parametrize("norm", NORMS, ids=by_name)
TWO_TO_31 = 1 << 31


def leaves_of(norm: Norm, *shape: int, dtype=torch.float32, device="cuda") -> list[Tensor]:
    return [leaf(t) for t in norm.random_operands(*shape, dtype=dtype, device=device)]


def ones_like_expanded(x: Tensor) -> Tensor:
    """A gradient of ones that takes no memory."""
    return torch.ones((), dtype=x.dtype, device=x.device).expand_as(x)


def kernels_of(function) -> list[str]:
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]


# ---------------------------------------------------------------------------- launches and memory


@EVERY_NORM
def test_one_launch_forward(norm):
    """The kernel runs, not the reference, and nothing is copied, filled or converted beside it."""
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, *vectors = norm.random_operands(64, 1024, dtype=dtype, device="cuda")
        for rows in ((x, None), (x, residual), (x[:, :513], None), (x[::2], residual[::2])):
            for vectors_dtype in (dtype, torch.float32):
                cut = [v[: rows[0].shape[-1]].to(vectors_dtype) for v in vectors]
                kernels = kernels_of(lambda rows=rows, cut=cut: norm(*rows, *cut))
                assert len(kernels) == 1, kernels


@EVERY_NORM
def test_two_launches_backward_at_most(norm):
    """The sums for the weight begin in the kernel that computes dx; a small one may finish them."""
    operands = leaves_of(norm, 512, 1024, dtype=torch.bfloat16)
    grads = [torch.randn_like(operands[0]) for _ in range(2)]
    out = norm(*operands)

    def backward():
        torch.autograd.grad(out, operands, grads, retain_graph=True)

    kernels = kernels_of(backward)
    assert 1 <= len(kernels) <= 2, kernels


@EVERY_NORM
def test_forward_allocates_its_outputs_and_nothing_else(norm):
    operands = norm.random_operands(1024, 1024, dtype=torch.bfloat16, device="cuda")
    norm(*operands)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y, h = norm(*operands)
    rows = y.numel() * y.element_size() + h.numel() * h.element_size()
    statistics = 2 * 1024 * 4
    assert torch.cuda.max_memory_allocated() - before <= rows + statistics


@EVERY_NORM
def test_every_element_of_outputs_and_gradients_is_written(norm):
    """The allocator hands out NaN, also to workspaces; nothing of it may come through."""
    for shape in ((1, 1), (3, 5), (129, 255), (1000, 1000), (4097, 33), (2, 70000), (7, 4096)):
        operands = leaves_of(norm, *shape)
        grads = [torch.randn_like(operands[0]) for _ in range(2)]
        torch.cuda.empty_cache()
        poison("cuda", *[1 << 18] * 8, *[1 << 20] * 8, *[8 << 20] * 4)
        outputs = norm(*operands)
        gradients = torch.autograd.grad(outputs, operands, grads)
        assert not any(t.isnan().any() for t in (*outputs, *gradients))


# ---------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("shape", [(4096, 1024), (1000, 513), (64, 40000), (30000, 8)], ids=str)
@EVERY_NORM
def test_two_runs_agree_to_the_last_bit(norm, shape, deterministic_algorithms):
    operands = leaves_of(norm, *shape, dtype=torch.bfloat16)
    grads = [torch.randn_like(operands[0]) for _ in range(2)]

    def run() -> list[Tensor]:
        outputs = norm(*operands)
        return [*outputs, *torch.autograd.grad(outputs, operands, grads)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    deterministic_algorithms()
    assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


# ---------------------------------------------------------------------------- streams and graphs


@EVERY_NORM
def test_runs_on_the_current_stream(norm):
    """The inputs are written late on a side stream; a kernel on any other stream reads zeros."""
    final = norm.random_operands(1 << 13, 128, device="cuda")
    leaves = [leaf(torch.zeros_like(t)) for t in final]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for operand, value in zip(leaves, final, strict=True):
            operand.data.copy_(value)
        outputs = norm(*leaves)
        grads = torch.autograd.grad(sum(outputs).square().sum(), leaves)
    stream.synchronize()
    trained = [leaf(t) for t in final]
    expected = norm.eager(*trained)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    expected_grads = torch.autograd.grad(sum(expected).square().sum(), trained)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-2)


@EVERY_NORM
def test_no_call_waits_for_the_gpu(norm):
    """torch's own check for synchronisation, forward and backward, with copies and mixed dtypes."""
    operands = leaves_of(norm, 64, 32, dtype=torch.bfloat16)
    mixed = [leaf(t) for t in norm.random_vectors(32, torch.float16, "cuda")]
    spread = leaf(torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")[:, ::2])
    torch.autograd.grad(sum(norm(*operands)).sum(), operands)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in (operands, [*operands[:2], *mixed], [spread, *operands[1:]]):
            torch.autograd.grad(sum(norm(*given)).sum(), given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EVERY_NORM
def test_cuda_graph_replays_with_new_data(norm):
    operands = leaves_of(norm, 128, 512, dtype=torch.bfloat16)
    grads = [torch.randn_like(operands[0]) for _ in range(2)]
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        torch.autograd.grad(norm(*operands), operands, grads)
    torch.cuda.current_stream().wait_stream(warm_up)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = norm(*operands)
        gradients = torch.autograd.grad(outputs, operands, grads)

    for _ in range(3):
        for tensor in (*operands, *grads):
            tensor.data.copy_(torch.randn_like(tensor))
        # A larger eager call in between must not disturb the workspace of the graph.
        larger = leaves_of(norm, 2048, 2048)
        torch.autograd.grad(sum(norm(*larger)).sum(), larger)
        del larger
        torch.cuda.empty_cache()
        graph.replay()
        fresh = norm(*operands)
        expected = torch.autograd.grad(fresh, operands, grads)
        for a, b in zip((*outputs, *gradients), (*fresh, *expected), strict=True):
            assert torch.equal(a, b)


# ---------------------------------------------------------------------------- large tensors


@pytest.mark.parametrize("n", [1, 8, 33])
@EVERY_NORM
def test_more_rows_than_a_grid_dimension_holds(norm, n):
    """65,536 is the limit of grid.y and grid.z."""
    for m in (65535, 65537, 200_003):
        check_norm(norm, *norm.random_operands(m, n, device="cuda"))


@EVERY_NORM
def test_more_than_two_to_the_31_elements(norm):
    """Two kinds of rows, so that every row of output and gradient can be compared with one."""
    need_gpu_memory(40)
    width = 4096
    rows = TWO_TO_31 // width + 5
    kinds = torch.randn(2, width, dtype=torch.bfloat16, device="cuda")
    x = kinds[:1].expand(rows, width).clone()
    marked = [0, rows // 2, rows - 6, rows - 5, rows - 1]
    x[marked] = kinds[1]
    x.requires_grad_()
    vectors = norm.random_vectors(width, torch.float32, "cuda")
    weight = vectors[0].requires_grad_()

    y = norm(x, None, *vectors)
    dx, dweight = torch.autograd.grad(y, [x, weight], ones_like_expanded(y))
    # Enough rows for the kernel that takes many: others may add up in another order.
    small = leaf(kinds.repeat(500, 1))
    expected_y = norm(small, None, *vectors)
    (expected_dx,) = torch.autograd.grad(expected_y, small, torch.ones_like(expected_y))
    is_marked = torch.zeros(rows, 1, dtype=torch.bool, device="cuda")
    is_marked[marked] = True
    for actual, expected in ((y, expected_y), (dx, expected_dx)):
        for kind in (0, 1):
            differs = (actual.detach() != expected.detach()[kind]).any(-1, keepdim=True)
            assert not (differs & (is_marked == bool(kind))).any()

    normed = norm.centred(kinds.double()) * norm.rstd(kinds.double())
    exact = (rows - len(marked)) * normed[0] + len(marked) * normed[1]
    torch.testing.assert_close(dweight.double(), exact, rtol=1e-3, atol=1.0)


@EVERY_NORM
def test_strides_beyond_two_to_the_31(norm):
    """Two rows that lie 2^31 elements apart."""
    need_gpu_memory(16)
    buffer = torch.zeros(TWO_TO_31 + 256, dtype=torch.bfloat16, device="cuda")
    x = torch.as_strided(buffer, (2, 128), (TWO_TO_31, 1))
    x.copy_(torch.randn(2, 128))
    _, residual, *vectors = norm.random_operands(2, 128, dtype=torch.bfloat16, device="cuda")
    check_norm(norm, x, residual, *vectors, grad_outputs=[x, x])


# ---------------------------------------------------------------------------- several devices


# https://github.com/NVIDIA/apex/issues/770, #1022, triton-lang/triton#5205, Liger-Kernel#401
@pytest.mark.gpus(2)
@EVERY_NORM
def test_the_other_device(norm):
    """Tensors on cuda:1 while cuda:0 is current: outputs, statistics and scratch are on cuda:1."""
    assert torch.cuda.current_device() == 0
    norm(*norm.random_operands(64, 64, device="cuda:0"))
    before = torch.cuda.memory_allocated(0)
    outputs = check_norm(norm, *norm.random_operands(300, 64, device="cuda:1"))
    assert all(output.device == torch.device("cuda:1") for output in outputs)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.gpus(2)
def test_a_row_on_the_second_gpu():
    x = torch.tensor([[1.5, 0.0, 0.0, 0.0]], device="cuda:1")
    expected = torch.tensor([[1.732, -0.57734, -0.57734, -0.57734]], device="cuda:1")
    torch.testing.assert_close(fusedcuda.layer_norm(x), expected, rtol=1e-4, atol=1e-4)
    assert fusedcuda.rms_norm(x).device == x.device


@EVERY_NORM
def test_compiled_with_cuda_graphs(norm):
    """torch.compile(mode="reduce-overhead") captures what it compiles."""
    torch._dynamo.reset()

    def function(*operands: Tensor) -> Tensor:
        y, h = norm(*operands)
        return (y * h).square()

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        operands = leaves_of(norm, 32, 64)
        torch.compiler.cudagraph_mark_step_begin()
        actual = torch.autograd.grad(compiled(*operands).sum(), operands)
        actual = [grad.clone() for grad in actual]
        expected = torch.autograd.grad(function(*operands).sum(), operands)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-2)
