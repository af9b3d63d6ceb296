"""linear_cross_entropy where only a GPU shows it: graphs, waiting, asserts, repeated bits."""

import subprocess
import sys

import pytest
import torch
from launches import captured, no_waiting, on_another_stream
from linear_losses import eager, random_problem
from reference import leaf, poison
from torch import Tensor

import fusedcuda

pytestmark = pytest.mark.gpu

WAYS = [
    {"reduction": "mean", "chunk": 128},
    {"reduction": "mean", "chunk": 100, "accumulate": "weight"},
    {"reduction": "sum", "label_smoothing": 0.1, "chunk": 1000},
    {"reduction": "mean", "z_loss": 1e-3, "softcap": 5.0, "chunk": "auto"},
    {"reduction": "none", "chunk": 128},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


def problem(
    rows: int = 300, classes: int = 1003, features: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Tensor]:
    operands, target = random_problem(
        rows, classes=classes, features=features, dtype=dtype, device="cuda"
    )
    return [leaf(t) for t in operands.values()], target


def forward_and_backward(
    leaves: list[Tensor], target: Tensor, way: dict, factor: Tensor | float = 1.0
) -> list[Tensor]:
    x, weight, bias = leaves
    loss = fusedcuda.linear_cross_entropy(x, weight, target, bias, **way)
    return [loss, *torch.autograd.grad(loss.sum() * factor, leaves)]


@every_way
def test_cuda_graph_replays_with_new_data(way):
    leaves, target = problem()
    factor = torch.ones((), device="cuda")
    graph, results = captured(lambda: forward_and_backward(leaves, target, way, factor))
    for value in (1.0, 0.5, 1.0):  # whether gradients are scaled is decided in the replay
        factor.fill_(value)
        leaves[0].data.normal_()
        target.random_(1003)
        target[:128] = -100
        graph.replay()
        expected = forward_and_backward(leaves, target, way, factor)
        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@every_way
def test_no_call_waits_for_the_gpu(way):
    leaves, target = problem()
    forward_and_backward(leaves, target, way)
    with no_waiting():
        forward_and_backward(leaves, target, way)
        forward_and_backward(leaves, target.int(), way, factor=0.5)


@every_way
def test_on_another_stream(way):
    leaves, target = problem()
    expected = forward_and_backward(leaves, target, way)
    actual = on_another_stream(lambda: forward_and_backward(leaves, target, way))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpus(2)
def test_on_another_device():
    leaves, target = problem()
    expected = forward_and_backward(leaves, target, WAYS[0])
    there = [leaf(t.to("cuda:1")) for t in leaves]
    actual = forward_and_backward(there, target.to("cuda:1"), WAYS[0])
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.device == torch.device("cuda", 1)
        torch.testing.assert_close(ours.to(theirs.device), theirs)


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_element_is_written(way, dtype):
    """The allocator hands out NaN, also for logits and sums; nothing of it may come through."""
    for sizes in ((1, 1, 1), (3, 5, 8), (129, 255, 16), (300, 4099, 65)):
        leaves, target = problem(*sizes, dtype=dtype)
        torch.cuda.empty_cache()
        poison("cuda", *[1 << 18] * 8, *[1 << 20] * 8, *[8 << 20] * 4)
        results = forward_and_backward(leaves, target, way)
        assert not any(t.isnan().any() for t in results)


@every_way
def test_the_same_bits_in_every_call(way):
    leaves, target = problem(1000, 5000)
    first = forward_and_backward(leaves, target, way)
    for _ in range(5):
        for a, b in zip(first, forward_and_backward(leaves, target, way), strict=True):
            assert torch.equal(a, b)


def test_gradients_are_not_touched_again_where_the_incoming_one_is_1():
    """One small kernel a gradient looks at it, and nothing is written."""
    leaves, target = problem(1024, 32_000, 1024)
    x, weight, bias = leaves
    loss = fusedcuda.linear_cross_entropy(x, weight, target, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loss.backward(torch.ones_like(loss))
        torch.cuda.synchronize()
    microseconds = sum(e.device_time_total for e in profile.key_averages())
    assert microseconds < weight.nbytes / 5e6  # at 5 TB/s, faster than any write of them


@pytest.mark.parametrize("wrong", [8, -1, -99, 2**31])
@pytest.mark.parametrize("gradient", [False, True])
def test_targets_out_of_range_fail_a_device_assert(gradient, wrong):
    """In a process of its own: the assert takes the CUDA context with it."""
    script = f"""
import torch, fusedcuda
x = torch.zeros(4, 16, device="cuda", dtype=torch.bfloat16, requires_grad={gradient})
target = torch.tensor([0, 1, {wrong}, 2], device="cuda")
fusedcuda.linear_cross_entropy(x, torch.zeros_like(x).detach().repeat(2, 1), target)
torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert "Assertion `target >= 0" in result.stderr


def test_more_than_two_to_the_31_logits(memory):
    memory(12)
    rows, classes, features = 17_000, 128_256, 64
    operands, target = random_problem(
        rows, classes=classes, features=features, dtype=torch.bfloat16, device="cuda", bias=False
    )
    x, weight = leaf(operands["x"]), leaf(operands["weight"])
    target[:-100] = -100
    target[-1] = classes - 1
    loss = fusedcuda.linear_cross_entropy(x, weight, target, chunk=rows)
    loss.backward()
    last, other = leaf(operands["x"][-100:]), leaf(operands["weight"])
    expected = eager(last, other, None, target[-100:])
    expected.backward()
    torch.testing.assert_close(loss, expected)
    # Two units of bfloat16: the last rounding, and those of the gradient of the logits.
    torch.testing.assert_close(x.grad[-100:], last.grad, rtol=2**-6, atol=1e-5)
    torch.testing.assert_close(weight.grad, other.grad, rtol=2**-6, atol=1e-5)
    assert torch.count_nonzero(x.grad[:-100]) == 0
