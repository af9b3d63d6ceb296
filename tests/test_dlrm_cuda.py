"""What only a GPU shows of the dlrm family: launches, streams, graphs, devices, large batches."""

import pytest
import torch
from dlrms import (
    check_head,
    check_interaction,
    eager_interaction,
    random_head,
    random_vectors,
)
from launches import captured
from reference import DTYPES, poison
from torch import Tensor

import fusedcuda

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def kernels_of(function) -> list[str]:
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_launches():
    dense, embeddings = random_vectors(300, 27, 64, dtype=BF16, device="cuda")
    leaves = (dense.requires_grad_(), embeddings.requires_grad_())
    output = fusedcuda.dot_interaction(*leaves)
    grad = torch.randn_like(output)
    assert len(kernels_of(lambda: fusedcuda.dot_interaction(*leaves))) == 1
    backward = kernels_of(lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True))
    assert len(backward) == 1
    x, weight, bias, target = random_head(300, 256, dtype=BF16, device="cuda")
    leaves = tuple(t.requires_grad_() for t in (x, weight, bias))
    loss = fusedcuda.linear_sigmoid_bce(*leaves, target)
    one = torch.ones_like(loss)
    assert len(kernels_of(lambda: fusedcuda.linear_sigmoid_bce(*leaves, target))) == 2
    backward = kernels_of(lambda: torch.autograd.grad(loss, leaves, one, retain_graph=True))
    assert len(backward) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(27, 128), (27, 16), (27, 64), (64, 256), (33, 13)], ids=str)
def test_batches_of_many_samples_a_warp(shape, dtype):
    for batch in (1, 131, 4097):
        check_interaction(*random_vectors(batch, *shape, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_many_rows(dtype):
    for rows in (1, 4097, 70_001):
        check_head(*random_head(rows, 256, dtype=dtype, device="cuda"))


def test_every_element_is_written():
    """The allocator hands out NaN; nothing of it may come through."""
    for count, columns in ((27, 128), (5, 13), (40, 24)):
        for dtype in (BF16, torch.float32):
            dense, embeddings = random_vectors(77, count, columns, dtype=dtype, device="cuda")
            leaves = (dense.requires_grad_(), embeddings.requires_grad_())
            torch.cuda.empty_cache()
            poison("cuda", *[t.numel() * 4 for t in leaves] * 3)
            output = fusedcuda.dot_interaction(*leaves, pad=16)
            gradients = torch.autograd.grad(output.sum(), leaves)
            assert not any(t.isnan().any() for t in (output, *gradients))


def test_runs_repeat_to_the_bit():
    x, weight, bias, target = random_head(50_000, 256, dtype=BF16, device="cuda")
    leaves = tuple(t.requires_grad_() for t in (x, weight, bias))

    def run() -> list[Tensor]:
        loss = fusedcuda.linear_sigmoid_bce(*leaves, target)
        return [loss, *torch.autograd.grad(loss, leaves)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_graph():
    """Interaction and head, forward and backward in one graph, replayed on new values."""
    dense, embeddings = random_vectors(200, 27, 16, dtype=BF16, device="cuda")
    _, weight, bias, target = random_head(200, 368, dtype=BF16, device="cuda")
    leaves = tuple(t.requires_grad_() for t in (dense, embeddings, weight, bias))

    def run() -> list[Tensor]:
        row = fusedcuda.dot_interaction(*leaves[:2])
        loss = fusedcuda.linear_sigmoid_bce(row, *leaves[2:], target)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    graph, results = captured(run)
    for _ in range(3):
        for t in leaves:
            t.data.copy_(torch.randn_like(t))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, run(), strict=True))


def test_a_chain_of_dependent_launches():
    """Each launch reads what the one before it has written."""
    x, embeddings = random_vectors(500, 4, 8, device="cuda")
    embeddings /= 10
    expected, wide = x.double(), embeddings.double()
    for _ in range(30):
        x = fusedcuda.dot_interaction(x, embeddings)[:, 6:14]  # two elements and the products
        expected = eager_interaction(expected, wide)[:, 6:14]
    # What float32 rounds in 30 launches; a launch that reads too early is wrong by far more.
    torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpus(2)
def test_the_other_device():
    assert torch.cuda.current_device() == 0
    output = check_interaction(*random_vectors(9, 27, 64, dtype=BF16, device="cuda:1"))
    assert output.device == torch.device("cuda:1")
    loss = check_head(*random_head(9, 64, dtype=BF16, device="cuda:1"))
    assert loss.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0


def test_more_than_two_to_the_31_elements(memory):
    """Samples at both ends and around 2^31 elements of the vectors."""
    memory(14)
    batch = (1 << 31) // (26 * 128) + 5
    embeddings = torch.zeros(batch, 26, 128, dtype=BF16, device="cuda")
    dense = torch.ones(batch, 128, dtype=BF16, device="cuda")
    for i, sample in enumerate((0, batch - 7, batch - 6, batch - 1)):
        embeddings[sample, :, 0] = i + 1
    output = fusedcuda.dot_interaction(dense, embeddings)
    for i, sample in enumerate((0, batch - 7, batch - 6, batch - 1)):
        expected = torch.tensor([i + 1.0, i + 1.0, (i + 1.0) ** 2], dtype=BF16, device="cuda")
        assert torch.equal(output[sample, 128:131], expected)  # (1, 0), (2, 0), (2, 1)
        output[sample, 128:] = 0
    assert (output[:, :128] == 1).all()
    assert not output[:, 128:].any()
