"""cross_entropy where only a GPU shows it: graphs, waiting, memory, asserts, 2^31 logits."""

import subprocess
import sys

import pytest
import torch
from losses import eager_cross_entropy, random_problem
from reference import leaf, poison

import fusedcuda

pytestmark = pytest.mark.gpu

WAYS = [
    {"reduction": "mean"},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "mean", "z_loss": 1e-3, "softcap": 5.0},
    {"reduction": "none"},
    {"reduction": "mean", "inplace_backward": True},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


def forward_and_backward(logits, target, way, factor=1.0):
    loss = fusedcuda.cross_entropy(logits * 1, target, **way)
    return loss, *torch.autograd.grad(loss.sum() * factor, logits)


@every_way
@pytest.mark.parametrize("classes", [100, 4097, 128_256])
def test_cuda_graph_replays_with_new_data(classes, way):
    logits, target, _ = random_problem(24, classes, device="cuda", dtype=torch.bfloat16)
    logits = leaf(logits)
    factor = torch.ones((), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(logits, target, way, factor)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(logits, target, way, factor)
    for value in (1.0, 0.5, 1.0):  # whether the gradient is made again is decided in the replay
        factor.fill_(value)
        logits.data.normal_()
        target.random_(classes)
        graph.replay()
        for actual, expected in zip(
            captured, forward_and_backward(logits, target, way, factor), strict=True
        ):
            assert torch.equal(actual, expected)


@every_way
def test_no_call_waits_for_the_gpu(way):
    logits, target, _ = random_problem(64, 1000, device="cuda")
    logits = leaf(logits)
    weight = torch.rand(1000, device="cuda", dtype=torch.float16)
    forward_and_backward(logits, target, way)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_backward(logits, target, way)
        forward_and_backward(logits, target.int(), {**way, "weight": weight}, factor=0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_memory(function) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("way", "copies"),
    [({"reduction": "mean"}, 1), ({"reduction": "none"}, 1), ({"inplace_backward": True}, 0)],
    ids=str,
)
def test_memory(way, copies):
    """One gradient, or with inplace_backward none; nothing of the logits' size in float32."""
    logits, target, _ = random_problem(512, 32_000, device="cuda", dtype=torch.bfloat16)
    size = logits.numel() * logits.element_size()
    used = leaf(logits) * 1

    def step():
        loss = fusedcuda.cross_entropy(used, target, **way)
        torch.autograd.grad(loss.sum(), used)

    assert copies * size <= peak_memory(step) <= copies * size + (1 << 20)


def test_the_gradient_of_the_forward_is_not_touched_again():
    """Where the incoming gradient is 1, one small kernel looks at it and nothing is written."""
    logits, target, _ = random_problem(2048, 32_000, device="cuda", dtype=torch.bfloat16)
    logits = leaf(logits)
    loss = fusedcuda.cross_entropy(logits, target)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loss.backward(torch.ones_like(loss))
        torch.cuda.synchronize()
    microseconds = sum(e.device_time_total for e in profile.key_averages())
    bytes_of_logits = logits.numel() * logits.element_size()
    assert microseconds < bytes_of_logits / 5e6  # at 5 TB/s, faster than any write of them


@every_way
def test_every_element_is_written(way):
    """The allocator hands out NaN, also to workspaces; nothing of it may come through."""
    for rows, classes in ((1, 1), (3, 5), (129, 255), (100, 4097), (5000, 33)):
        logits, target, _ = random_problem(rows, classes, device="cuda")
        torch.cuda.empty_cache()
        poison("cuda", *[1 << 18] * 8, *[1 << 20] * 8, *[8 << 20] * 4)
        results = forward_and_backward(leaf(logits), target, way)
        assert not any(x.isnan().any() for x in results)


@every_way
def test_the_same_bits_in_every_call(way):
    logits, target, _ = random_problem(5000, 1000, device="cuda", dtype=torch.bfloat16)
    first = forward_and_backward(leaf(logits), target, way)
    for _ in range(5):
        for a, b in zip(first, forward_and_backward(leaf(logits), target, way), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("wrong", [8, -1, -99, 2**31])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("gradient", [False, True])
def test_targets_out_of_range_fail_a_device_assert(gradient, reduction, wrong):
    """In a process of its own: the assert takes the CUDA context with it."""
    script = f"""
import torch, fusedcuda
logits = torch.zeros(4, 8, device="cuda", requires_grad={gradient})
target = torch.tensor([0, 1, {wrong}, 2], device="cuda")
loss = fusedcuda.cross_entropy(logits, target, reduction="{reduction}")
torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert "device-side assert" in result.stderr


def test_more_than_two_to_the_31_logits():
    classes = 128_256
    rows = (1 << 31) // classes + 3
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = torch.randn(2, classes, device="cuda")
    target = torch.full((rows,), -100, device="cuda")
    target[-3:] = torch.tensor([0, classes - 1, classes // 2], device="cuda")
    logits.requires_grad_()
    loss = fusedcuda.cross_entropy(logits, target)
    last = leaf(logits.detach()[-3:].float())
    expected = eager_cross_entropy(last, target[-3:])
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(expected, last)
    torch.testing.assert_close(grad[-3:], wanted.bfloat16(), rtol=2**-7, atol=0)
    assert torch.count_nonzero(grad[:-3]) == 0
