"""Public bug reports about elementwise kernels, each as a small input with the right value.

The links name the report. A few of them concern norms or softmax; what they showed about strides,
empty tensors or grid limits is true of every op that writes rows, and is tested here on these.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import ACT_MUL, ADD_RELU, BROADCASTING, OPS, by_name, leaf
from torch import Tensor, inf, nan
from torch.utils.checkpoint import checkpoint

import fusedcuda

HALVES_AND_FLOAT = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)


def values(*numbers: float, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def assert_same(actual: Tensor, expected: Tensor | list) -> None:
    """Equal to the last bit, with NaN equal to NaN."""
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def signbit(x: Tensor) -> list[bool]:
    return torch.signbit(x).tolist()


# https://github.com/pytorch/pytorch/issues/7999, tensorflow/tensorflow#40072,
# microsoft/onnxruntime#11010, apache/mxnet#11115
def test_relu_written_with_fmax_swallows_nan(device):
    a = values(nan, 1, -1, 0, device=device).requires_grad_()
    one, zero = torch.ones_like(a), torch.zeros_like(a)
    for out in (
        fusedcuda.add_mul_act(a, zero, one),
        fusedcuda.add_relu(a, zero),
        fusedcuda.act_scale_bias(a, one, zero),
        fusedcuda.bias_act(a, zero),
        fusedcuda.act_mul(a, one, "relu"),
    ):
        assert_same(out.detach(), [nan, 1, 0, 0])
        (grad,) = torch.autograd.grad(out, a, torch.ones_like(out))
        assert_same(grad, [1, 1, 0, 0])


# https://github.com/pytorch/pytorch/issues/181801, #162235, #181533, #196039
def test_relu_of_negative_zero_has_the_sign_that_torch_gives_it(device):
    x = values(-0.0, 0.0, -1e-45, device=device)
    negative_zero = torch.full_like(x, -0.0)
    for out in (fusedcuda.add_relu(x, negative_zero), fusedcuda.bias_act(x, negative_zero)):
        assert_same(out, [0, 0, 0])
        assert signbit(out) == signbit(torch.relu(x + negative_zero))
        assert not signbit(out)[2]
    out = fusedcuda.act_mul(x, torch.ones_like(x), "relu")
    assert signbit(out) == signbit(torch.relu(x))


# https://github.com/pytorch/pytorch/issues/185770, #187293, #194278
@HALVES_AND_FLOAT
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activations_at_infinity(activation, dtype, device):
    """+inf is inf, NaN is NaN; at -inf the limit 0 or torch's NaN, but nothing else."""
    x = values(inf, -inf, nan, 0, dtype=dtype, device=device)
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    for out in (
        fusedcuda.act_scale_bias(x, one, zero, activation),
        fusedcuda.bias_act(x, zero, activation),
        fusedcuda.act_mul(x, one, activation),
    ):
        assert out[0] == inf
        assert out[1] == 0 or out[1].isnan()
        assert out[2].isnan()
        assert out[3] == 0


# https://github.com/pytorch/pytorch/issues/186278, https://github.com/pytorch/executorch/issues/22323
@HALVES_AND_FLOAT
def test_gelu_tanh_of_large_arguments(dtype, device):
    """tanh as (e^2y - 1) / (e^2y + 1) overflows, because y grows like x^3."""
    x = values(-200, -20, -13.24, 10.5, 15.5, 200, dtype=dtype, device=device).requires_grad_()
    out = fusedcuda.act_scale_bias(x, 1.0, 0.0, "gelu_tanh")
    assert_same(out.detach(), [0, 0, 0, 10.5, 15.5, 200])
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert_same(grad, [0, 0, 0, 1, 1, 1])


# https://github.com/NVIDIA/apex/issues/411, NVIDIA/TensorRT#2021
def test_more_rows_than_grid_y_holds(device):
    x = (torch.arange(65_537 * 4, device=device) % 7).float().view(65_537, 4)
    bias = torch.arange(4.0, device=device)
    assert_same(fusedcuda.bias_act(x, -bias)[65_535:], torch.relu(x - bias)[65_535:])
    assert_same(fusedcuda.add_relu(x, -x[:, :1]), torch.relu(x - x[:, :1]))


# https://github.com/flashinfer-ai/flashinfer/issues/3005
def test_one_row_with_a_stride_beyond_int32(device):
    """No memory is needed for it, but the stride does not fit in 32 bits."""
    x = torch.as_strided(torch.arange(1.0, 129.0, device=device), (1, 128), (2**31, 1))
    up = torch.full((1, 128), 2.0, device=device)
    assert_same(fusedcuda.add_relu(x, 1.0), x + 1)
    assert_same(fusedcuda.act_mul(up, x, "relu"), 2 * x)
    assert_same(fusedcuda.act_mul_packed(x, "relu"), x[:, :64] * x[:, 64:])


# https://github.com/Dao-AILab/flash-attention/issues/1620, pytorch/pytorch#28614
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_a_grid_of_no_blocks(op, device):
    """The vector's gradient is zeros, not memory that nothing has written."""
    x, *others = op.random_operands(3, 0, 2520, dtype=torch.bfloat16, device=device)
    vectors = [torch.ones(2520, dtype=x.dtype, device=device) for _ in others]
    operands = [leaf(operand) for operand in (x, *vectors)]
    out = op(*operands)
    assert out.shape == (3, 0, 2520)
    out.sum().backward()
    assert operands[0].grad.shape == x.shape
    for vector in operands[1:]:
        assert_same(vector.grad, torch.zeros(2520))
    if device == "cuda":
        torch.cuda.synchronize()


# https://github.com/vllm-project/vllm/issues/41257, #45466
def test_rows_of_46_half_precision_elements(device):
    """92 bytes: the second row of input and output is off the 16-byte boundary."""
    x = (torch.arange(17 * 46, device=device) % 11).bfloat16().view(17, 46)
    bias = (torch.arange(46, device=device) % 5).bfloat16()
    assert_same(fusedcuda.bias_act(x, -bias), torch.relu(x - bias))
    assert_same(fusedcuda.act_mul_packed(x, "relu"), x[:, :23] * x[:, 23:])
    for width in range(1, 65):
        rows = x.reshape(-1)[: width * (x.numel() // width)].view(-1, width)
        assert_same(fusedcuda.add_relu(rows, -rows[:, :1]), torch.relu(rows - rows[:, :1]))


# https://github.com/ModelTC/LightLLM/pull/1467, NVIDIA/TransformerEngine#417, #1017
def test_elements_are_paired_in_logical_order(device):
    """A kernel that walks memory in storage order pairs the wrong elements."""
    x = torch.arange(1.0, 13.0, device=device).view(3, 4).t()
    bias = values(0, 10, 20, device=device)
    expected = [[1, 15, 29], [2, 16, 30], [3, 17, 31], [4, 18, 32]]
    assert_same(fusedcuda.bias_act(x, bias), expected)
    image = torch.arange(256.0, device=device).view(4, 4, 4, 4)
    last = image.contiguous(memory_format=torch.channels_last)
    column = values(0, 1, 2, 3, device=device)
    assert_same(fusedcuda.bias_act(last, column), image + column)
    assert_same(fusedcuda.act_mul(last, image, "relu"), image * image)


# https://github.com/NVIDIA/Fuser/issues/806
def test_an_expanded_scalar_is_not_contiguous(device):
    base_a = torch.tensor(2.0, device=device, requires_grad=True)
    base_c = torch.tensor(0.5, device=device, requires_grad=True)
    b = torch.arange(9.0, device=device).view(3, 3) - 4
    out = fusedcuda.add_mul_act(base_a.expand(3, 3), b - 2, base_c.expand(3, 3))
    assert_same(out.detach(), [[0, 0, 0], [0, 0, 0.5], [1, 1.5, 2]])
    out = fusedcuda.add_mul_act(base_a.expand(3, 3), b, base_c.expand(3, 3))
    assert_same(out.detach(), [[0, 0, 0], [0.5, 1, 1.5], [2, 2.5, 3]])
    out.sum().backward()
    assert base_a.grad.item() == 6 * 0.5  # six of nine pass the relu
    assert base_c.grad.item() == 1 + 2 + 3 + 4 + 5 + 6
    assert_same(fusedcuda.add_relu(base_a.detach().expand(3, 3), b), torch.relu(b + 2))
    scaled = fusedcuda.act_scale_bias(b, base_a.detach().expand(3, 3), base_c.detach().expand(3, 3))
    assert_same(scaled, torch.relu(b) * 2 + 0.5)


# https://github.com/microsoft/onnxruntime/issues/28971
def test_a_scale_with_two_dimensions(device):
    """Shape (S, W) against (B, S, W): row 0 was applied to every row."""
    x = torch.ones(2, 2, 3, device=device)
    scale = torch.arange(1.0, 7.0, device=device).view(2, 3).requires_grad_()
    out = fusedcuda.act_scale_bias(x, scale, torch.zeros(3, device=device), "none")
    assert_same(out.detach(), [[[1, 2, 3], [4, 5, 6]]] * 2)
    out.sum().backward()
    assert_same(scale.grad, [[2, 2, 2], [2, 2, 2]])


# https://github.com/Dao-AILab/quack/issues/88, ROCm/TransformerEngine#623
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_the_gradient_of_a_sum_is_expanded(op, device):
    """y.sum().backward() sends one stored element with stride 0."""
    operands = [leaf(x) for x in op.random_operands(66, 4, device=device)]
    op(*operands).sum().backward()
    reference = [leaf(x) for x in operands]
    op.eager(*reference).sum().backward()
    for actual, expected in zip(operands, reference, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


# https://github.com/triton-lang/triton/issues/5205, linkedin/Liger-Kernel#401, NVIDIA/apex#770
@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_a_call_on_the_second_gpu_after_one_on_the_first():
    fusedcuda.act_mul(torch.ones(1, device="cuda:0"), torch.ones(1, device="cuda:0"))
    gate, up = values(1, device="cuda:1"), values(2, device="cuda:1")
    out = fusedcuda.act_mul(gate, up)
    assert out.device == torch.device("cuda:1")
    assert math.isclose(out.item(), 1.4621172, rel_tol=1e-6)
    assert torch.cuda.current_device() == 0


# https://github.com/vllm-project/vllm/issues/13632
@pytest.mark.gpu
def test_the_kernel_runs_on_the_current_stream():
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(1)
        out = fusedcuda.add_mul_act(x, 2.0, 1.0)
    stream.synchronize()
    assert_same(out, torch.full_like(out, 3))


# https://github.com/NVIDIA/cuEquivariance/issues/223, pytorch/pytorch#196347
def test_the_strides_that_the_compiler_was_promised(device):
    x = torch.arange(24.0, device=device).view(2, 3, 4).permute(2, 0, 1)
    torch._dynamo.reset()
    for function in (
        lambda x: fusedcuda.add_relu(x, x) + 1,
        lambda x: fusedcuda.act_scale_bias(x, x[:1, :1], 2.0, "gelu") + 1,
    ):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        actual, expected = compiled(x), function(x)
        assert actual.stride() == expected.stride() == (1, 12, 4)
        assert_same(actual, expected)


# https://github.com/NVIDIA/apex/issues/410
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_a_second_derivative_is_refused_and_not_zero(op, device):
    operands = [leaf(x) for x in op.random_operands(3, 4, device=device)]
    grads = torch.autograd.grad(op(*operands).square().sum(), operands, create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        grads[0].square().sum().backward()


# https://github.com/baidu-baige/LoongForge/issues/106, huggingface/candle#3823, #3613
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_parameters_upstream_are_trained(op, device):
    """A missing backward lets everything before the op train as if it were frozen."""
    operands = op.random_operands(4, 8, device=device)
    weight = torch.nn.Parameter(torch.eye(operands[0].shape[-1], device=device))
    out = op(*(x @ weight for x in operands))
    assert out.requires_grad
    out.sum().backward()
    assert weight.grad.abs().sum() > 0


# https://github.com/facebookresearch/xformers/issues/1126, #1127, jzhang38/TinyLlama#152
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gated_mlp(use_reentrant, device):
    x = torch.tensor([[1.0, -1.0]], device=device, requires_grad=True)
    gate_weight = torch.eye(2, device=device, requires_grad=True)
    up_weight = torch.tensor([[2.0, 0.0], [0.0, 3.0]], device=device)

    def mlp(x: Tensor) -> Tensor:
        gated = fusedcuda.act_mul(F.linear(x, gate_weight), F.linear(x, up_weight))
        return F.linear(gated, torch.ones(1, 2, device=device))

    y = checkpoint(mlp, x, use_reentrant=use_reentrant)
    y.sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y.detach().cpu(), torch.tensor([[2.26894]]), **close)
    torch.testing.assert_close(x.grad.cpu(), torch.tensor([[3.31746, -1.02381]]), **close)
    torch.testing.assert_close(
        gate_weight.grad.cpu(),
        torch.tensor([[1.85534, -1.85534], [-0.216988, 0.216988]]),
        **close,
    )


# https://github.com/Dao-AILab/flash-attention/issues/781, BobMcDear/attorch#18, Liger-Kernel#950
def test_the_bias_gradient_is_complete_and_the_same_in_every_call(device):
    one_row = torch.zeros(4, device=device)
    for _ in range(10):
        bias = torch.ones(4, device=device, requires_grad=True)
        fusedcuda.bias_act(one_row, bias).backward(torch.full((4,), -1.0, device=device))
        assert_same(bias.grad, [-1, -1, -1, -1])
    for rows in (*range(1, 301), *range(1023, 1031)):
        bias = torch.zeros(33, device=device, requires_grad=True)
        fusedcuda.bias_act(torch.ones(rows, 33, device=device), bias).sum().backward()
        assert_same(bias.grad, [float(rows)] * 33)
    bias = torch.zeros(8, device=device, dtype=torch.bfloat16, requires_grad=True)
    fusedcuda.bias_act(torch.ones(4096, 8, device=device).bfloat16(), bias).sum().backward()
    assert_same(bias.grad, [4096.0] * 8)  # an accumulator in bf16 sticks at 256


# https://github.com/pytorch/functorch/issues/207, #1031
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_vmap_is_the_loop(op, device):
    samples = torch.arange(-5.0, 7.0, device=device).view(3, 1, 4)
    shared = [torch.full((4,), 0.5, device=device) for _ in op.operands[1:]]

    def loss(sample: Tensor, *vectors: Tensor) -> Tensor:
        return op(sample, *vectors).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, 1), in_dims=(0, *(None for _ in shared)))
    actual = per_sample(samples, *shared)
    assert actual.shape == (3, 4)
    for sample, grad in zip(samples, actual, strict=True):
        vectors = [leaf(vector) for vector in shared]
        loss(sample, *vectors).backward()
        torch.testing.assert_close(grad, vectors[0].grad)


# https://github.com/XPU-Forces/mojo_opset/issues/461, vllm-project/vllm-omni#6283
def test_the_gate_is_not_rounded_before_the_product(device):
    """silu(gate) * up is rounded once; torch, unfused, rounds twice and differs in 74 places."""
    gate = torch.linspace(-4, 4, 256).to(torch.bfloat16).to(device)
    up = torch.linspace(3, -3, 256).to(torch.bfloat16).to(device)
    once = (F.silu(gate.double()) * up.double()).to(torch.bfloat16)
    twice = F.silu(gate) * up
    out = fusedcuda.act_mul(gate, up)
    # fp32 arithmetic may fall on the other side of a tie, so not all 256 need be equal.
    assert (out != once).sum() <= 1
    assert 70 <= (out != twice).sum() <= 78
    assert (out.float() - twice.float()).abs().max() <= 0.0625
    assert_same(fusedcuda.act_mul_packed(torch.cat([gate, up])), out)


# https://github.com/linkedin/Liger-Kernel/issues/254
def test_the_saved_inputs_are_not_overwritten_by_gradients(device):
    x = values(0, 0.5, -1, device=device).requires_grad_()
    e = x.exp()
    kept = e.detach().clone()
    fusedcuda.act_mul(e, e).backward(torch.ones_like(e))
    torch.testing.assert_close(
        x.grad.cpu(), torch.tensor([1.65873, 5.16598, 0.171987]), rtol=1e-5, atol=1e-6
    )
    assert_same(e.detach(), kept)


# https://github.com/NVIDIA/apex/issues/1605, pytorch/pytorch#104061, TensorRT-LLM#17693
def test_gelu_is_not_its_tanh_form(device):
    """They differ by 4.732e-4 at |x| = 2.7, in the value; the gradient must use the same form."""
    x = torch.linspace(-4, 4, 1601, dtype=torch.float64, device=device).requires_grad_()
    gelu, gelu_tanh = (fusedcuda.bias_act(x, 0.0, name) for name in ("gelu", "gelu_tanh"))
    gap = (gelu - gelu_tanh).abs().detach()
    assert math.isclose(gap.max().item(), 4.732e-4, rel_tol=1e-3)
    assert math.isclose(x[gap.argmax()].abs().item(), 2.7, abs_tol=0.01)
    for out, approximate in ((gelu, "none"), (gelu_tanh, "tanh")):
        reference = F.gelu(x, approximate=approximate)
        torch.testing.assert_close(out, reference)
        ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (out, reference))
        torch.testing.assert_close(ours, theirs)


# https://github.com/NVIDIA/TransformerEngine/issues/371, unslothai/unsloth#7020
def test_autocast_changes_no_dtype_that_torch_does_not(device):
    x, bias = torch.ones(2, 8, device=device), torch.zeros(8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ADD_RELU(x, bias).dtype == torch.relu(x + bias).dtype == torch.float32
        half = F.linear(x, torch.ones(8, 8, device=device))
        assert ACT_MUL(half, half).dtype == torch.bfloat16
