"""What only a GPU shows: streams, graphs, devices, memory, and sizes beyond 2^31 elements."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from reference import (
    ACT_MUL,
    ACT_MUL_PACKED,
    ACT_SCALE_BIAS,
    ADD_MUL_ACT,
    ADD_RELU,
    BIAS_ACT,
    BROADCASTING,
    OPS,
    by_name,
    check,
    leaf,
    poison,
)

pytestmark = pytest.mark.gpu

GIB = 1 << 30
TWO_TO_31 = 1 << 31


# ---------------------------------------------------------------------------- the library is used


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_one_launch_forward_and_no_copy(op):
    """The CUDA kernels run, not the reference: one kernel, no memory traffic beside it."""
    operands = op.random_operands(64, 128, device="cuda")
    op(*operands)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op(*operands)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_a_bias_gradient_takes_two_launches_at_most(op):
    """The sum is begun inside the backward; a second small kernel may finish it."""
    operands = op.random_operands(512, 256, dtype=torch.bfloat16, device="cuda")
    operands[-1] = operands[-1][0].clone()
    operands = [leaf(operand) for operand in operands]
    grad = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda")
    torch.autograd.grad(op(*operands), operands, grad)
    out = op(*operands)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(out, operands, grad)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert 1 <= len(kernels) <= 2, kernels


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_forward_allocates_its_output_and_nothing_else(op, memory):
    operands = op.random_operands(1024, 1024, device="cuda")
    op(*operands)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = op(*operands)
    assert torch.cuda.max_memory_allocated() - before == out.numel() * out.element_size()


# ---------------------------------------------------------------------------- streams


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_runs_on_the_current_stream(op):
    """The input is written late on a side stream; a kernel on any other stream reads zeros."""
    operands = op.random_operands(1 << 14, 64, device="cuda")
    final = [operand.abs() + 1 for operand in operands]
    expected = op.eager(*final)
    leaves = [leaf(torch.zeros_like(operand)) for operand in operands]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for operand, value in zip(leaves, final, strict=True):
            operand.data.copy_(value)
        out = op(*leaves)
        grads = torch.autograd.grad(out.sum(), leaves)
    stream.synchronize()
    torch.testing.assert_close(out, expected)
    reference = [leaf(value) for value in final]
    expected_grads = torch.autograd.grad(op.eager(*reference).sum(), reference)
    torch.testing.assert_close(grads, expected_grads)


def test_no_call_waits_for_the_gpu():
    """torch's own check for synchronisation, forward and backward, with numbers and a bias."""
    x = leaf(torch.randn(64, 32, device="cuda"))
    bias = leaf(torch.randn(32, device="cuda"))
    torch.autograd.grad(ACT_SCALE_BIAS(x, 0.5, bias).sum(), [x, bias])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for out in (
            ACT_SCALE_BIAS(x, 0.5, bias, activation="gelu"),
            BIAS_ACT(x, bias),
            ADD_MUL_ACT(x, 1.0, x),
            ACT_MUL_PACKED(x),
        ):
            torch.autograd.grad(out.sum(), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_cuda_graph_replays_with_new_data(op):
    operands = [leaf(x) for x in op.random_operands(128, 64, device="cuda")]
    if len(operands) > 1:
        operands[-1] = leaf(operands[-1][0])  # with a reduction, and so with its workspace
    grad = torch.randn(128, 64, device="cuda")

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        torch.autograd.grad(op(*operands), operands, grad)
    torch.cuda.current_stream().wait_stream(warm_up)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*operands)
        grads = torch.autograd.grad(out, operands, grad)

    for _ in range(3):
        for operand in operands:
            operand.data.copy_(torch.randn_like(operand))
        grad.copy_(torch.randn_like(grad))
        # A larger eager call in between must not disturb the workspace of the graph.
        larger = [leaf(x) for x in op.random_operands(2048, 512, device="cuda")]
        torch.autograd.grad(op(*larger).sum(), larger)
        del larger
        torch.cuda.empty_cache()
        graph.replay()
        fresh = op(*operands)
        assert torch.equal(out, fresh)
        expected = torch.autograd.grad(fresh, operands, grad)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_compiled_with_cuda_graphs():
    """torch.compile(mode="reduce-overhead") captures what it compiles."""
    torch._dynamo.reset()

    def function(x, bias):
        return ACT_MUL(BIAS_ACT(x, bias, activation="gelu"), x).square()

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = leaf(torch.randn(32, 64, device="cuda"))
        bias = leaf(torch.randn(64, device="cuda"))
        torch.compiler.cudagraph_mark_step_begin()
        actual = torch.autograd.grad(compiled(x, bias).sum(), [x, bias])
        actual = [grad.clone() for grad in actual]
        expected = torch.autograd.grad(function(x, bias).sum(), [x, bias])
        torch.testing.assert_close(actual, expected)


# ---------------------------------------------------------------------------- complete outputs


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_every_element_of_outputs_and_gradients_is_written(op, memory):
    """The allocator hands out NaN, also to workspaces; nothing of it may come through."""
    for shape in ((1, 1), (3, 5), (129, 255), (1000, 1000), (4097, 33)):
        operands = [leaf(x) for x in op.random_operands(*shape, device="cuda")]
        if len(operands) > 1:
            operands[-1] = leaf(operands[-1][0])
        grad = torch.randn(shape, device="cuda")
        torch.cuda.empty_cache()
        poison("cuda", *[1 << 18] * 8, *[1 << 20] * 8, *[8 << 20] * 4)
        out = op(*operands)
        grads = torch.autograd.grad(out, operands, grad)
        assert not any(x.isnan().any() for x in (out, *grads))


# ---------------------------------------------------------------------------- large tensors


def ones_like_expanded(x: torch.Tensor) -> torch.Tensor:
    """A gradient of ones that takes no memory."""
    return torch.ones((), dtype=x.dtype, device=x.device).expand_as(x)


def samples_of(x: torch.Tensor) -> torch.Tensor:
    """The first, the middle and the last rows, and those around 2^31 elements."""
    flat = x.reshape(-1)
    size = 4096
    starts = [0, flat.numel() // 2, flat.numel() - size]
    if flat.numel() > TWO_TO_31 + size:
        starts.append(TWO_TO_31 - size // 2)
    return torch.cat([flat[start : start + size] for start in starts])


def test_more_than_two_to_the_31_elements(memory):
    memory(30)
    gate = torch.full((TWO_TO_31 // 4096 + 3, 4096), 1.0, dtype=torch.bfloat16, device="cuda")
    gate.view(-1)[-1] = -2.0
    gate.view(-1)[TWO_TO_31] = 3.0
    gate.requires_grad_()
    out = ADD_RELU(gate, 0.5)
    assert (samples_of(out) == torch.relu(samples_of(gate) + 0.5)).all()
    assert (out.view(-1)[-1].item(), out.view(-1)[TWO_TO_31].item()) == (0.0, 3.5)
    # Only the two marked elements differ from 1.5: counted, so that the whole tensor is looked at.
    assert torch.count_nonzero(out != 1.5).item() == 2
    (grad,) = torch.autograd.grad(out, gate, ones_like_expanded(out))
    assert torch.count_nonzero(grad != 1).item() == 1
    assert grad.view(-1)[-1].item() == 0


def test_more_than_two_to_the_31_elements_with_a_bias_gradient(memory):
    """Rows and columns beyond 2^31 elements; the sum of each column is known."""
    memory(30)
    rows, width = TWO_TO_31 // 1024 + 1, 1024
    x = torch.ones(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = -5
    bias = torch.zeros(width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = BIAS_ACT(x, bias)
    assert torch.count_nonzero(out != 1).item() == 1
    (grad,) = torch.autograd.grad(out, bias, ones_like_expanded(out))
    assert (grad == float(torch.tensor(rows, dtype=torch.bfloat16))).all()


def test_packed_with_more_than_two_to_the_31_elements(memory):
    memory(30)
    half = 4096
    rows = TWO_TO_31 // (2 * half) + 5
    gate_up = torch.ones(rows, 2 * half, dtype=torch.bfloat16, device="cuda")
    gate_up[:, half:] = 2
    gate_up[-1, -1] = 8
    gate_up.requires_grad_()
    out = ACT_MUL_PACKED(gate_up, activation="relu")
    assert torch.count_nonzero(out != 2).item() == 1
    assert out[-1, -1].item() == 8
    (grad,) = torch.autograd.grad(out, gate_up, ones_like_expanded(out))
    assert torch.count_nonzero(grad[:, :half] != 2).item() == 1
    assert torch.count_nonzero(grad[:, half:] != 1).item() == 0


def test_strides_beyond_two_to_the_31(memory):
    """Two rows that lie 2^31 elements apart."""
    memory(12)
    buffer = torch.zeros(TWO_TO_31 + 256, dtype=torch.bfloat16, device="cuda")
    x = torch.as_strided(buffer, (2, 128), (TWO_TO_31, 1))
    x.copy_(torch.randn(2, 128))
    check(BIAS_ACT, [x, torch.randn(128, dtype=torch.bfloat16, device="cuda")], "silu")
    check(ACT_MUL_PACKED, [x], "silu")
    check(ADD_MUL_ACT, [x.t(), torch.randn(2, dtype=torch.bfloat16, device="cuda"), 0.5], "gelu")


def test_an_output_beyond_two_to_the_31_from_small_operands(memory):
    """A row against a column: three kilobytes in, four gibibytes out."""
    memory(12)
    column = torch.arange(TWO_TO_31 // 16384 + 1, device="cuda").remainder(7).bfloat16()[:, None]
    row = torch.arange(16384, device="cuda").remainder(5).bfloat16()
    out = ADD_RELU(column, row)
    for i, j in ((0, 0), (77, 16383), (column.shape[0] - 1, 16383), (column.shape[0] - 1, 4)):
        assert out[i, j].item() == i % 7 + j % 5
    picked = out[-3:]
    assert torch.equal(picked, column[-3:] + row)


# ---------------------------------------------------------------------------- several devices


@pytest.mark.gpus(2)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_the_other_device(op):
    """Tensors on cuda:1 while cuda:0 is current: result, gradients and scratch are on cuda:1."""
    assert torch.cuda.current_device() == 0
    op(*op.random_operands(64, 64, device="cuda:0"))
    before = torch.cuda.memory_allocated(0)
    for broadcast in (False, True):
        operands = op.random_operands(300, 64, device="cuda:1")
        if broadcast and len(operands) > 1:
            operands[-1] = operands[-1][0].clone()
        out = check(op, operands)
        assert out.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.gpus(2)
def test_the_stream_of_the_other_device():
    x = torch.zeros(1 << 20, device="cuda:1")
    stream = torch.cuda.Stream(device="cuda:1")
    torch.cuda.synchronize(1)
    with torch.cuda.device(1), torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(1)
        with torch.cuda.device(0):
            y = ADD_MUL_ACT(x, 2.0, 1.0)
    stream.synchronize()
    assert (y == 3).all()


def train(rank: int, world_size: int, init_file: str, results) -> None:
    dist.init_process_group(
        "nccl", init_method=f"file://{init_file}", rank=rank, world_size=world_size
    )
    torch.cuda.set_device(rank)
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(16, 64, bias=False)
            self.bias = torch.nn.Parameter(torch.zeros(64))
            self.down = torch.nn.Linear(32, 16)

        def forward(self, x):
            hidden = BIAS_ACT(self.up(x), self.bias, activation="gelu")
            return ADD_RELU(x, self.down(ACT_MUL_PACKED(hidden, activation="silu")))

    model = torch.nn.parallel.DistributedDataParallel(Model().to(rank), device_ids=[rank])
    data = torch.randn(world_size, 8, 16, generator=torch.Generator().manual_seed(1)).to(rank)
    model(data[rank]).square().mean().backward()
    alone = Model().to(rank)
    alone.load_state_dict(model.module.state_dict())
    alone(data.flatten(0, 1)).square().mean().backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)
    results[rank] = True
    dist.destroy_process_group()


@pytest.mark.gpus(2)
def test_distributed_data_parallel(tmp_path):
    """The averaged gradients of two processes are those of one process with the whole batch."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(train, args=(2, str(tmp_path / "init"), results), nprocs=2)
        assert dict(results) == {0: True, 1: True}
