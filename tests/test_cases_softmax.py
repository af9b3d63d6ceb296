"""Public bug reports about softmax kernels, each as a small input with the right value.

The links name the report. Some concern other row operators; what they showed about strides, grids,
masks or gradients is true of every op that writes rows.
"""

import pytest
import torch
from reference import leaf
from torch import Tensor, inf, nan
from torch._dynamo.testing import CompileCounterWithBackend

import fusedcuda

OPS = (fusedcuda.softmax, fusedcuda.log_softmax)
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def eager(op, x: Tensor) -> Tensor:
    return getattr(torch, op.__name__)(x, dim=-1)


def close(actual: Tensor, expected: list | Tensor, **tolerance: float) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(actual.detach(), expected, equal_nan=True, **tolerance)


# https://github.com/flashinfer-ai/flashinfer/issues/3005
@every_op
def test_one_row_with_a_stride_beyond_int32(op, device):
    x = torch.arange(1.0, 129.0, device=device) / 16
    strided = torch.as_strided(x, (1, 128), (2**31, 1))
    close(op(strided), eager(op, x[None]))
    strided.requires_grad_()
    (grad,) = torch.autograd.grad(op(strided), strided, torch.ones_like(x)[None] * x)
    expected = leaf(x)
    eager(op, expected).backward(x)
    close(grad, expected.grad[None], rtol=1e-4, atol=1e-6)


# https://github.com/NVIDIA/apex/issues/411, NVIDIA/TensorRT#2021
@every_op
def test_more_rows_than_a_grid_is_high(op, device):
    x = (torch.arange(65_537 * 4, device=device) % 7).float().view(65_537, 4)
    y = op(x)
    close(y, eager(op, x))
    assert y[65_535:].isfinite().all()


# https://github.com/vllm-project/vllm/issues/41257, #45466
def test_rows_of_46_half_precision_elements(device):
    """92 bytes: every other row of input and output is off the 16-byte boundary."""
    x = (torch.arange(17 * 46, device=device) % 11).bfloat16().view(17, 46)
    close(fusedcuda.softmax(x)[16, :3], [0.13647, 6.1955e-06, 1.6841e-05], rtol=1e-2, atol=0)
    for width in range(1, 65):
        rows = x.reshape(-1)[: width * (x.numel() // width)].view(-1, width)
        for op in OPS:
            expected = eager(op, rows.float()).bfloat16()
            close(op(rows), expected, rtol=2**-7, atol=0)


# https://github.com/ModelTC/LightLLM/pull/1467, NVIDIA/TransformerEngine#417, #1017
@every_op
def test_elements_are_read_in_logical_order(op, device):
    x = torch.arange(1.0, 13.0, device=device).view(3, 4).t()
    close(op(x), eager(op, x.contiguous()))
    image = (torch.arange(256.0, device=device) ** 2 % 31).view(4, 4, 4, 4)
    last = image.contiguous(memory_format=torch.channels_last)
    close(op(last), eager(op, image))
    assert op(last).is_contiguous()


# https://github.com/Dao-AILab/quack/issues/88
@every_op
def test_the_gradient_of_a_sum_is_expanded(op, device):
    """One stored element with stride 0."""
    x = leaf(torch.randn(66, 40, device=device))
    expected = leaf(x)
    op(x).sum().backward()
    eager(op, expected).sum().backward()
    close(x.grad, expected.grad, rtol=1e-4, atol=1e-5)


# https://github.com/NVIDIA/apex/issues/770, #1022, triton-lang/triton#5205
@pytest.mark.gpu
@pytest.mark.gpus(2)
@every_op
def test_a_call_on_the_second_gpu(op):
    op(torch.ones(1, 4, device="cuda:0"))
    x = torch.tensor([[1.5, 0.0, 0.0, 0.0]], device="cuda:1", requires_grad=True)
    y = op(x)
    y.sum().backward()
    assert y.device == x.grad.device == torch.device("cuda:1")
    close(y, eager(op, x.detach()))
    assert torch.cuda.current_device() == 0


# https://github.com/vllm-project/vllm/issues/13632
@pytest.mark.gpu
@every_op
def test_the_kernel_runs_on_the_current_stream(op):
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 14, 64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x[:, 0] = 1
        y = op(x)
    stream.synchronize()
    close(y, eager(op, x))


# https://github.com/NVIDIA/cuEquivariance/issues/223, pytorch/pytorch#196347
@every_op
def test_the_strides_that_the_compiler_was_promised(op, device):
    torch._dynamo.reset()
    x = torch.arange(24.0, device=device).view(2, 3, 4).permute(2, 0, 1)
    compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(x).stride() == op(x).stride() == (6, 3, 1)
    close(compiled(x), op(x) + 1)


# https://github.com/pytorch/pytorch/issues/121080, #172822
@every_op
def test_no_batch_size_is_compiled_in(op, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: op(x), fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 3, 5, 8, 13):
        x = torch.randn(batch, 16, device=device)
        close(compiled(x), op(x))
    assert counter.frame_count <= 2


# https://github.com/NVIDIA/TransformerEngine/issues/371
@every_op
def test_autocast_keeps_the_dtype_that_came_in(op, device):
    """torch's softmax would return float32; here the layers around it decide."""
    x = torch.ones(2, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert op(x).dtype == torch.float32
        assert op(x.bfloat16()).dtype == torch.bfloat16


# https://github.com/NVIDIA/apex/issues/410
@every_op
def test_a_second_derivative_is_refused_and_not_zero(op, device):
    x = torch.tensor([1.0, 2.0, 4.0], device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(op(x)[0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        grad.square().sum().backward()


# https://github.com/baidu-baige/LoongForge/issues/106, huggingface/candle#3823, #3613
@every_op
def test_parameters_upstream_are_trained(op, device):
    weight = torch.nn.Parameter(torch.eye(8, device=device))
    y = op(torch.randn(4, 8, device=device) @ weight)
    assert y.requires_grad
    y.square().sum().backward()
    assert weight.grad.abs().sum() > 0


# https://github.com/pytorch/functorch/issues/207, #1031
@every_op
def test_vmap_is_the_loop(op, device):
    x = torch.arange(1.0, 13.0, device=device).view(3, 1, 4)
    close(torch.func.vmap(op)(x), torch.stack([op(sample) for sample in x]))
    grads = torch.func.vmap(torch.func.grad(lambda sample: op(sample).square().sum()))(x)
    for sample, grad in zip(x, grads, strict=True):
        single = leaf(sample)
        op(single).square().sum().backward()
        close(grad, single.grad)


# https://github.com/Dao-AILab/flash-attention/issues/1930
@pytest.mark.parametrize("position", [0, 1023, 1024, 50_000, 99_999])
def test_one_finite_logit_among_masked_ones(position, device):
    """An online softmax that meets only -inf first computes exp(-inf - -inf)."""
    x = torch.full((1, 100_000), -inf, device=device)
    x[0, position] = 10
    y = fusedcuda.softmax(leaf(x))
    assert y[0, position] == 1
    assert torch.count_nonzero(y) == 1
    assert fusedcuda.log_softmax(x)[0, position] == 0
    z = leaf(x)
    fusedcuda.softmax(z).backward(torch.randn_like(x))
    assert torch.equal(z.grad, torch.zeros_like(x))


# https://github.com/unslothai/unsloth/issues/10616
@pytest.mark.parametrize("width", [1, 2, 3, 32_003, 50_257, 65_537, 128_255])
def test_lanes_beyond_the_row_do_not_enter_the_sum(width, device):
    x = torch.full((2, width), -100.0, device=device)
    x[1, -1] = -90
    for op in OPS:
        close(op(x), eager(op, x.double()).float(), rtol=1e-4, atol=1e-6)


# https://github.com/NVIDIA/Megatron-LM/issues/132
def test_rows_of_fewer_elements_than_threads(device):
    for width in range(1, 130):
        x = (torch.arange(width * 3, device=device) % 5 * 0.5).view(3, width)
        for op in OPS:
            ours, theirs = leaf(x), leaf(x)
            y, expected = op(ours), eager(op, theirs)
            close(y, expected.detach())
            y.backward(x + 1)
            expected.backward(x + 1)
            close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        if width == 20:
            close(fusedcuda.softmax(x)[1, :3], [0.0145031, 0.0239115, 0.0394234])
        if width == 1:
            close(fusedcuda.softmax(x), [[1.0]] * 3)


# https://github.com/pytorch/pytorch/issues/25110, #131060, NVIDIA/apex#1390
def test_a_fully_masked_row_is_nan_and_its_neighbours_are_not(device):
    x = torch.tensor([[0.0, 1, -inf], [-inf, -inf, -inf], [1, 1, 1]], device=device)
    third = 1 / 3
    close(fusedcuda.softmax(x), [[0.268941, 0.731059, 0], [nan] * 3, [third] * 3])
    close(fusedcuda.softmax(torch.tensor([[inf, 0.0]], device=device)), [[nan, nan]])


# https://github.com/pytorch/pytorch/issues/56325
def test_rows_of_30522_floats(device):
    """Not a multiple of 4: the second row starts 8 bytes off the boundary."""
    x = (torch.arange(3 * 30522, device=device) % 10).float().view(3, 30522)
    p = fusedcuda.log_softmax(x).exp()
    close(p.sum(dim=-1), [1.0] * 3, rtol=1e-4, atol=0)
    picked = torch.stack([p[0, 9], p[1, 0], p[2, 30521]])
    close(picked, [0.0002071262, 1.888745e-07, 3.79363e-06], rtol=1e-4, atol=0)
    down = fusedcuda.softmax(x.t())  # over the other dimension
    close(down[0], [0.015876, 0.11731, 0.86681], rtol=1e-4, atol=0)


# https://github.com/NVIDIA/TransformerEngine/issues/295, #390
def test_65_columns_of_bf16(device):
    """A row pitch of 130 bytes; and 64 columns of it, one element in."""
    x = (torch.arange(4 * 65, device=device) % 7).bfloat16().view(4, 65)
    y = fusedcuda.softmax(x)
    close(y[3, :3], [0.0656716, 0.000162784, 0.000442492], rtol=1e-2, atol=0)
    close(y.float().sum(dim=-1), [1.0] * 4, rtol=1e-2, atol=0)
    close(
        fusedcuda.softmax(x[:, 1:]), eager(fusedcuda.softmax, x[:, 1:].float()), rtol=1e-2, atol=0
    )
