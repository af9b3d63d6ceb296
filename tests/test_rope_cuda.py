"""What only a GPU shows of rope: launches, streams, graphs, devices, and 2^31 elements."""

import pytest
import torch
from reference import DTYPES, poison
from ropes import LAYOUTS, bhsd, bshd, check, layout_name, random_tables
from torch import Tensor

import fusedcuda

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
GIB = 1 << 30
TWO_TO_31 = 1 << 31


def kernels_of(function) -> list[str]:
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_one_launch_for_both_and_no_copy(layout):
    q, k = (layout(2, h, 64, 128, dtype=BF16, device="cuda").requires_grad_() for h in (8, 2))
    tables = random_tables(64, 128, device="cuda")
    grads = [torch.randn_like(x) for x in (q, k)]
    outputs = fusedcuda.rope(q, k, *tables)
    assert len(kernels_of(lambda: fusedcuda.rope(q, k, *tables))) == 1
    assert (
        len(kernels_of(lambda: torch.autograd.grad(outputs, (q, k), grads, retain_graph=True))) == 1
    )
    with torch.no_grad():
        assert len(kernels_of(lambda: fusedcuda.rope_(q, k, *tables))) == 1


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [bhsd, bshd], ids=layout_name)
def test_shapes_of_models(layout, dtype, interleaved):
    """Grids of several waves: many heads a thread, all positions."""
    for b, heads, length, d in (
        (2, (32, 8), 1111, 128),
        (1, (14, 2), 3001, 64),
        (3, (8, 1), 500, 256),
    ):
        q, k = (layout(b, h, length, d, dtype=dtype, device="cuda") for h in heads)
        for width in (d, d // 2):
            check(q, k, *random_tables(length, width, device="cuda"), interleaved)


def test_decoding():
    for batch in (1, 3, 64, 1000):
        q, k = (bshd(batch, h, 1, 128, dtype=BF16, device="cuda") for h in (32, 8))
        check(q, k, *random_tables(batch, 1, 128, device="cuda"))


def test_tables_that_the_kernel_does_not_take():
    """float64 and float16 ones beside bfloat16: converted first."""
    q, k = (bhsd(1, h, 33, 64, dtype=BF16, device="cuda") for h in (4, 2))
    for dtype in (torch.float64, torch.float16):
        check(q, k, *random_tables(33, 64, dtype=dtype, device="cuda"))


def test_every_element_is_written():
    """The allocator hands out NaN; nothing of it may come through."""
    for d in (6, 34, 64, 128):
        q, k = (bhsd(3, h, 77, d, device="cuda").requires_grad_() for h in (5, 3))
        tables = random_tables(77, d, device="cuda")
        grads = [torch.randn_like(x) for x in (q, k)]
        torch.cuda.empty_cache()
        poison("cuda", *[x.numel() * 4 for x in (q, k)] * 4)
        outputs = fusedcuda.rope(q, k, *tables)
        results = torch.autograd.grad(outputs, (q, k), grads)
        assert not any(x.isnan().any() for x in (*outputs, *results))


def test_graph():
    """Forward, backward and in place in one graph, replayed on new values."""
    q, k = (bshd(2, h, 40, 64, dtype=BF16, device="cuda").requires_grad_() for h in (4, 2))
    tables = random_tables(40, 64, device="cuda")
    grads = [torch.randn_like(x) for x in (q, k)]

    def run() -> list[Tensor]:
        outputs = fusedcuda.rope(q, k, *tables)
        gradients = torch.autograd.grad(outputs, (q, k), grads)
        copies = [x.detach().clone() for x in (q, k)]
        fusedcuda.rope_(*copies, *tables)
        return [*(y.detach() for y in outputs), *gradients, *copies]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for x in (q.data, k.data, *grads, *tables):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


def test_compiled_with_cuda_graphs():
    torch._dynamo.reset()
    tables = random_tables(32, 64, device="cuda")

    def function(q: Tensor, k: Tensor) -> Tensor:
        q, k = fusedcuda.rope(q, k, *tables)
        return (q * k).square().sum()

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        q, k = (bshd(1, 4, 32, 64, device="cuda").requires_grad_() for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        actual = [g.clone() for g in torch.autograd.grad(compiled(q, k), (q, k))]
        expected = torch.autograd.grad(function(q, k), (q, k))
        torch.testing.assert_close(actual, list(expected))


def test_a_chain_of_dependent_launches():
    """Each launch reads what the one before it has written, in the same memory."""
    q, k = (bhsd(1, h, 128, 64, device="cuda") for h in (4, 2))
    angle = torch.full((128, 64), 0.1, dtype=torch.float64)
    tables = [t.float().cuda() for t in (angle.cos(), angle.sin())]
    whole = [t.float().cuda() for t in ((100 * angle).cos(), (100 * angle).sin())]
    expected = fusedcuda.rope(q, k, *whole)
    for _ in range(100):
        fusedcuda.rope_(q, k, *tables)
    torch.testing.assert_close([q, k], list(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.gpus(2)
def test_the_other_device():
    assert torch.cuda.current_device() == 0
    q, k = (bhsd(2, h, 9, 64, dtype=BF16, device="cuda:1") for h in (4, 2))
    outputs = check(q, k, *random_tables(9, 64, device="cuda:1"))
    assert all(y.device == torch.device("cuda:1") for y in outputs)
    assert torch.cuda.current_device() == 0


def test_more_than_two_to_the_31_elements(memory):
    """Rows at both ends and around 2^31; the table is one row for all positions."""
    memory(22)
    length = TWO_TO_31 // (2 * 128) + 5
    q = torch.ones(1, 2, length, 128, dtype=BF16, device="cuda")
    rows = [(0, 0), (0, length - 1), (1, 0), (1, length - 6), (1, length - 5), (1, length - 1)]
    for i, (head, position) in enumerate(rows):
        q[0, head, position] = i + 2
    k = torch.ones(1, 1, length, 128, dtype=BF16, device="cuda")
    cos = torch.zeros(1, 128, device="cuda").expand(length, 128)
    rotated, _ = fusedcuda.rope(q, k, cos, cos + 1)
    signs = torch.tensor([-1.0] * 64 + [1.0] * 64, dtype=BF16, device="cuda")
    for i, (head, position) in enumerate(rows):
        assert torch.equal(rotated[0, head, position], (i + 2) * signs)
        rotated[0, head, position] = signs
    for part in rotated.view(-1, 128).split(1 << 20):
        assert (part == signs).all()


def test_strides_beyond_two_to_the_31(memory):
    memory(14)
    buffer = torch.zeros(TWO_TO_31 + 4096, dtype=BF16, device="cuda")
    shapes = {
        (2, 1, 3, 64): (TWO_TO_31, 64, 64, 1),
        (1, 2, 3, 64): (64, TWO_TO_31, 64, 1),
        (1, 3, 2, 64): (64, 64, TWO_TO_31, 1),
    }
    for shape, strides in shapes.items():
        q = torch.as_strided(buffer, shape, strides)
        q.copy_(torch.randn(shape))
        k = bhsd(shape[0], 1, *shape[2:], dtype=BF16, device="cuda")
        tables = random_tables(shape[2], 64, device="cuda")
        expected = check(q, k, *tables)
        fusedcuda.rope_(q, k, *tables)
        assert torch.equal(q, expected[0])
