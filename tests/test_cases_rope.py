"""Public bug reports about rotary embeddings, each as a small input with the right value.

The links name the report. Some concern other kernels that write rows; what they showed is true of
this one as well.
"""

import math

import pytest
import torch
from layouts import shifted
from ropes import angles, random_tables
from torch import Tensor

import fusedcuda

BF16 = torch.bfloat16


def assert_close(actual: Tensor, expected: list | Tensor, tolerance: float = 1e-6) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype).to(actual.device).view(actual.shape)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# https://github.com/Dao-AILab/flash-attention/issues/1620, pytorch/pytorch#28614
def test_a_grid_of_no_blocks(device):
    q = torch.randn(3, 0, 1, 2520, dtype=BF16, device=device, requires_grad=True)
    k = torch.randn(3, 0, 1, 2520, dtype=BF16, device=device, requires_grad=True)
    outputs = fusedcuda.rope(q, k, *random_tables(1, 2520, device=device))
    grads = torch.autograd.grad([y.sum() for y in outputs], [q, k])
    assert [x.shape for x in (*outputs, *grads)] == [(3, 0, 1, 2520)] * 4
    if device == "cuda":
        torch.cuda.synchronize()


# https://github.com/vllm-project/vllm/issues/41257, #45466
def test_rows_of_every_width_in_memory_that_is_not_aligned(device):
    """In place, the output is wherever the input is: here two bytes after a multiple of 16."""
    for width in range(2, 66, 2):
        x = (torch.arange(17 * width) % 11).to(BF16).view(1, 1, 17, width).to(device)
        tables = random_tables(17, width, device=device)
        expected, _ = fusedcuda.rope(x, x, *tables)
        out = shifted(x, 1)
        fusedcuda.rope_(out, shifted(x, 3), *tables)
        assert torch.equal(out, expected)


# https://github.com/Dao-AILab/quack/issues/88
def test_the_expanded_gradient_of_a_sum(device):
    x = torch.arange(1.0, 9.0, device=device).view(1, 1, 2, 4).requires_grad_()
    cos = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.6, 1.0, 0.6, 1.0]], device=device)
    sin = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.8, 0.0, 0.8, 0.0]], device=device)
    outputs = fusedcuda.rope(x, x.detach(), cos, sin)
    outputs[0].sum().backward()
    assert_close(x.grad, [1, 1, -1, 1, 1.4, 1, -0.2, 1])


# https://github.com/NVIDIA/apex/issues/770, #1022
@pytest.mark.gpus(2)
def test_another_device_than_the_current_one():
    assert torch.cuda.current_device() == 0
    q = torch.tensor([[[[1.0, 0.0]]]], device="cuda:1", requires_grad=True)
    cos, sin = (torch.tensor([[value, value]], device="cuda:1") for value in (0.6, 0.8))
    y, _ = fusedcuda.rope(q, q.detach(), cos, sin)
    y.sum().backward()
    assert y.device == q.grad.device == torch.device("cuda:1")
    assert_close(y.detach(), [0.6, 0.8])
    assert_close(q.grad, [1.4, -0.2])
    assert torch.cuda.current_device() == 0


# https://github.com/vllm-project/vllm/issues/13632
@pytest.mark.gpu
def test_another_stream_than_the_default_one():
    stream = torch.cuda.Stream()
    q = torch.zeros(1, 1, 1 << 14, 64, device="cuda")
    cos, sin = (torch.full((1 << 14, 64), value, device="cuda") for value in (0.6, 0.8))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        q.fill_(1)
        y, _ = fusedcuda.rope(q, q, cos, sin)
    stream.synchronize()
    expected = torch.tensor([-0.2] * 32 + [1.4] * 32, device="cuda").expand_as(y)
    torch.testing.assert_close(y, expected)


# https://github.com/baidu-baige/LoongForge/issues/106, huggingface/candle#3823, #3613
def test_the_backward_rotates_back(device):
    q = torch.tensor([[[[1.0, 0.0]]]], device=device, requires_grad=True)
    cos = torch.tensor([[[0.6, 0.6]]], device=device)
    sin = torch.tensor([[[0.8, 0.8]]], device=device)
    y, _ = fusedcuda.rope(q, q.detach(), cos, sin)
    assert y.requires_grad
    assert_close(y.detach(), [0.6, 0.8])
    y.backward(torch.tensor([[[[1.0, 2.0]]]], device=device))
    assert_close(q.grad, [2.2, 0.4])


# https://github.com/linkedin/Liger-Kernel/issues/342
def test_one_head_of_keys_is_rotated(device):
    q = torch.arange(1.0, 17.0, device=device).view(1, 2, 2, 4)
    k = torch.arange(1.0, 9.0, device=device).view(1, 1, 2, 4)
    cos = torch.tensor([[[1.0, 1.0, 1.0, 1.0], [0.0, 0.6, 0.0, 0.6]]], device=device)
    sin = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1.0, 0.8, 1.0, 0.8]]], device=device)
    rotated_q, rotated_k = fusedcuda.rope(q, k, cos, sin)
    assert_close(rotated_k, [1, 2, 3, 4, -7, -2.8, 5, 9.6])
    assert torch.equal(rotated_q[:, :, 0], q[:, :, 0])


# https://github.com/linkedin/Liger-Kernel/issues/477
def test_each_batch_has_its_own_table(device):
    q = torch.ones(2, 1, 1, 4, device=device)
    cos = torch.tensor([[[1.0, 1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0, 0.0]]], device=device)
    rotated, _ = fusedcuda.rope(q, q, cos, 1 - cos)
    assert_close(rotated, [1, 1, 1, 1, -1, -1, 1, 1])
    for table in (cos[1:], cos[1:].expand(2, -1, -1)):
        rotated, _ = fusedcuda.rope(q, q, table, 1 - table)
        assert_close(rotated, [-1, -1, 1, 1] * 2)


# https://github.com/EleutherAI/gpt-neox/issues/1003, huggingface/transformers#25681, #29496
def test_tables_of_large_positions_keep_their_precision(device):
    """The tables are the caller's; float32 ones reach 16-bit rows without being rounded to them."""
    position, dim = 1857, 32
    angle = angles(position + 1, dim)[position:]
    assert angle[0, 1].item() == pytest.approx(1044.2678, abs=1e-4)
    q = torch.zeros(1, 1, 1, dim, dtype=torch.float16, device=device)
    q[..., 1] = 1
    tables = (t.float().to(device) for t in (angle.cos(), angle.sin()))
    rotated, _ = fusedcuda.rope(q, q, *tables)
    assert rotated[0, 0, 0, 1].item() == pytest.approx(0.306693, rel=2**-11)


# https://github.com/Dao-AILab/flash-attention/issues/823, tile-ai/TileOPs#2010
def test_products_that_cancel_are_not_rounded_before_they_are_subtracted(device):
    x = torch.tensor([[[[1.0, 1.0078125]]]], dtype=BF16, device=device)
    cos, sin = (torch.full((1, 1, 2), f(0.78), device=device) for f in (math.cos, math.sin))
    rotated, _ = fusedcuda.rope(x, x, cos, sin)
    assert rotated.flatten().tolist() == [0.00213623046875, 1.421875]
