"""What only a GPU shows of the dlrm family: launches, streams, graphs, devices, large batches."""

import subprocess
import sys

import pytest
import torch
from dlrms import (
    check_head,
    check_interaction,
    check_lookup,
    eager_interaction,
    random_head,
    random_lookup,
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
    dense, table, indices = random_lookup(300, 27, 64, dtype=BF16, device="cuda")
    assert len(kernels_of(lambda: fusedcuda.embedding_interaction(dense, table, indices))) == 1
    output = fusedcuda.embedding_interaction(dense.requires_grad_(), table, indices)
    backward = kernels_of(lambda: torch.autograd.grad(output, dense, grad, retain_graph=True))
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
@pytest.mark.parametrize("shape", [(27, 128), (27, 16), (27, 64), (64, 256), (33, 13)], ids=str)
def test_lookups_of_many_samples_a_warp(shape, dtype):
    for batch, rows in ((1, 1), (131, 1000), (4097, 50_000)):
        given = random_lookup(batch, *shape, rows=rows, dtype=dtype, device="cuda")
        check_lookup(*given)
        dense, weight, indices = given
        output = fusedcuda.embedding_interaction(dense, weight, indices.int())
        looked_up = torch.nn.functional.embedding(indices, weight)
        assert torch.equal(output, fusedcuda.dot_interaction(dense, looked_up))


def test_what_is_looked_up_is_not_in_memory():
    dense, weight, indices = random_lookup(8192, 27, 128, dtype=BF16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = fusedcuda.embedding_interaction(dense.requires_grad_(), weight, indices)
    assert torch.cuda.max_memory_allocated() - before <= output.nbytes + (1 << 20)


@pytest.mark.parametrize("wrong", [50, -1, 1 << 40])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_indices_that_are_no_rows_fail_a_device_assert(dtype, wrong):
    """In a process of its own: the assert takes the CUDA context with it."""
    script = f"""
import torch, fusedcuda
dense = torch.zeros(4, 16, device="cuda", dtype=torch.{dtype})
weight = torch.zeros(50, 16, device="cuda", dtype=torch.{dtype})
indices = torch.tensor([[0, 1], [2, 3], [4, {wrong}], [5, 6]], device="cuda")
fusedcuda.embedding_interaction(dense, weight, indices)
torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert "device-side assert" in result.stderr


def test_a_lookup_does_not_wait_for_the_gpu():
    dense, weight, indices = random_lookup(300, 27, 16, dtype=BF16, device="cuda")
    leaves = (dense.requires_grad_(), weight.requires_grad_())
    output = fusedcuda.embedding_interaction(*leaves, indices)
    grad = torch.ones_like(output)
    torch.autograd.grad(output, leaves, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(fusedcuda.embedding_interaction(*leaves, indices), leaves, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
            dense, weight, indices = random_lookup(77, count, columns, dtype=dtype, device="cuda")
            leaves = (dense.requires_grad_(), weight.requires_grad_())
            torch.cuda.empty_cache()
            poison("cuda", *[dense.numel() * count * 4] * 6)
            output = fusedcuda.embedding_interaction(*leaves, indices, pad=16)
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


def test_the_gradient_of_a_table_repeats_to_the_bit():
    """With a row that most indices name; also where torch is asked for it, and when compiled."""
    dense, weight, indices = random_lookup(
        20_000, 27, 16, rows=3000, dtype=torch.float32, device="cuda"
    )
    leaves = (dense.requires_grad_(), weight.requires_grad_())
    grad = torch.randn_like(fusedcuda.embedding_interaction(*leaves, indices))

    def run(function=fusedcuda.embedding_interaction) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves, indices), leaves, grad)

    first = run()
    torch.use_deterministic_algorithms(True)
    try:
        asked_for = run()
    finally:
        torch.use_deterministic_algorithms(False)
    compiled = torch.compile(fusedcuda.embedding_interaction, fullgraph=True)
    for again in (run(), run(), asked_for, run(compiled)):
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


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


def test_graph_of_a_lookup():
    """Replayed on other values and other indices."""
    dense, weight, indices = random_lookup(200, 27, 16, dtype=BF16, device="cuda")
    leaves = (dense.requires_grad_(), weight.requires_grad_())

    def run() -> list[Tensor]:
        output = fusedcuda.embedding_interaction(*leaves, indices)
        return [output.detach(), *torch.autograd.grad(output.float().sum(), leaves)]

    graph, results = captured(run)
    for _ in range(3):
        for t in leaves:
            t.data.copy_(torch.randn_like(t))
        indices.random_(50)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, run(), strict=True))


def test_a_lookup_waits_for_its_indices():
    """Each launch looks up what the one before it has computed."""
    weight = torch.arange(101.0, device="cuda").unsqueeze(1).repeat(1, 8)
    indices = torch.zeros(500, 3, dtype=torch.int64, device="cuda")
    dense = torch.ones(500, 8, device="cuda")
    for step in range(1, 31):
        output = fusedcuda.embedding_interaction(dense, weight, indices)
        assert torch.equal(output[:, 8], torch.full_like(output[:, 8], 8.0 * (step - 1)))
        indices = (output[:, 8:9] / 8 + 1).long().expand(500, 3)


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


def test_a_table_of_more_than_two_to_the_31_elements(memory):
    """Rows at both ends and around 2^31 elements."""
    memory(6)
    rows = (1 << 31) // 128 + 5
    weight = torch.zeros(rows, 128, dtype=BF16, device="cuda")
    named = torch.tensor([0, rows - 7, rows - 5, rows - 1], device="cuda")
    weight[named, 0] = torch.arange(1.0, 5, device="cuda", dtype=BF16)
    dense = torch.ones(3, 128, dtype=BF16, device="cuda")
    output = fusedcuda.embedding_interaction(dense, weight, named.expand(3, 4), pad=1)
    products = [1, 2, 2, 3, 3, 6, 4, 4, 8, 12]  # (1, 0), (2, 0), (2, 1), ...
    assert output[:, 128:].tolist() == [products] * 3


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
