"""Public bug reports about rms_norm and layer_norm, each as a small input with the right value.

The links name the report. Those about gradients and torch's machinery are in
test_cases_norm_autograd.py, those about several GPUs in test_norm_cuda.py, the one about DTensor in
test_norm_compile.py.
"""

import pytest
import torch
import torch.nn.functional as F
from norms import LAYER_NORM, NORMS, RMS_NORM, exactly, near, values
from reference import by_name, leaf, poison
from torch import Tensor

import fusedcuda
from fusedcuda import layer_norm, rms_norm

EVERY_NORM = pytest.mark.parametrize("norm", NORMS, ids=by_name)
f16, bf16 = torch.float16, torch.bfloat16


# ---------------------------------------------------------------------------- precision


# https://github.com/pytorch/pytorch/issues/133085, xlite-dev/LeetCUDA#335
def test_squares_that_overflow_float16(device):
    x = values([300, -300, 300, 300], device=device, dtype=f16)
    exactly(rms_norm(x, torch.ones_like(x[0])), [[1, -1, 1, 1]])


# https://github.com/microsoft/onnxruntime/issues/29034
def test_a_sum_whose_square_overflows_float16(device):
    x = torch.full((2, 64), 20000.0, dtype=f16, device=device)
    y, h = rms_norm(x, torch.ones_like(x[0]), residual=x.clone())
    exactly(h, 40000)
    exactly(y, 1)


# https://github.com/tracel-ai/burn/issues/5607
def test_variance_in_one_pass(device):
    x = (1000.0 + torch.arange(16, device=device) * 1e-3).unsqueeze(0)
    y = layer_norm(x)
    near(y[0, [0, 15]], [-1.34151, 1.34424], 2e-2)


# https://github.com/pytorch/pytorch/issues/51102, microsoft/onnxruntime#28463
def test_four_close_values_far_from_zero(device):
    x = torch.tensor([[40000.0], [80000.0]], device=device) + torch.arange(4, device=device)
    near(layer_norm(x), torch.tensor([[-1.34164, -0.447212, 0.447212, 1.34164]] * 2))


# https://github.com/pytorch/pytorch/issues/189581
def test_eps_does_not_come_from_the_dtype_of_the_activations(device):
    x = torch.full((1, 32), 0.05, dtype=bf16, device=device)
    near(rms_norm(x), 1.0, 4e-3)
    near(rms_norm(x, eps=torch.finfo(bf16).eps), 0.49273, 4e-3)
    layer = fusedcuda.nn.RMSNorm(32, device=device, dtype=bf16)
    assert layer.eps is None
    near(layer(x), 0.99998, 4e-3)
    exactly(layer(x), F.rms_norm(x, (32,)))


# https://github.com/xlite-dev/LeetCUDA/issues/317
def test_eps_is_added_to_the_mean_and_not_to_the_count(device):
    x = values([0, 0, 0, 0], [1e-4, 1e-4, 1e-4, 1e-4], device=device)
    near(rms_norm(x), torch.tensor([[0.0] * 4, [0.0995037] * 4]))
    exactly(layer_norm(x)[0], 0)


# ---------------------------------------------------------------------------- dtypes of the weight


# https://github.com/sgl-project/sglang/issues/32807, Dao-AILab/quack#12
def test_a_float32_weight_beside_bfloat16(device):
    x = torch.arange(1.0, 9.0, device=device).view(1, 8).to(bf16)
    y = rms_norm(x, torch.linspace(0.5, 1.5, 8, device=device))
    near(y, [[0.099015, 0.25461, 0.46678, 0.73554, 1.0609, 1.4428, 1.8813, 2.3764]], 4e-3)


# https://github.com/pytorch/pytorch/issues/167308, ROCm/FlyDSL#884
@EVERY_NORM
def test_dtypes_of_output_and_gradients(norm, device):
    x = leaf(torch.arange(1.0, 9.0, device=device).view(2, 4).to(bf16))
    vectors = [torch.ones(4, device=device, requires_grad=True) for _ in norm.vectors]
    y = norm(x, None, *vectors)
    dx, *grads = torch.autograd.grad(y.sum(), [x, *vectors])
    assert (y.dtype, dx.dtype) == (bf16, bf16)
    assert all(grad.dtype == torch.float32 for grad in grads)
    if norm is RMS_NORM:
        near(grads[0], [1.1232, 1.64, 2.1568, 2.6736], 1e-4)


# https://github.com/vllm-project/vllm/pull/29810, #3653
def test_one_plus_the_weight_in_bfloat16(device):
    x = torch.arange(1.0, 33.0, device=device).view(1, 32).to(bf16)
    weight = torch.full((32,), 15.8125, dtype=bf16, device=device)
    y = rms_norm(x, weight, weight_offset=1.0)
    assert y[0, 0].item() == 0.890625
    exactly(y, rms_norm(x, weight.float() + 1))
    assert (y != rms_norm(x, weight + 1)).sum().item() == 22


# https://github.com/vllm-project/vllm/issues/42325, #42379, InternLM/lmdeploy#4133
def test_one_rounding_and_not_two(device):
    x = torch.arange(1.0, 65.0, device=device).view(1, 64).to(bf16)
    weight = torch.linspace(0.5, 2.0, 64, device=device).to(bf16)
    y = rms_norm(x, weight)
    exactly(y.cpu(), F.rms_norm(x.cpu(), (64,), weight.cpu(), 1e-6))
    twice = rms_norm(x) * weight
    assert (y != twice).sum().item() == 18
    assert (y - twice).abs().max().item() <= 0.015625


# ---------------------------------------------------------------------------- residual


# https://github.com/vllm-project/vllm/issues/52104, vllm-project/vllm-omni#6878
def test_the_norm_is_that_of_the_rounded_sum(device):
    x = values([256, 3, 3, 3], device=device, dtype=bf16)
    residual = values([1, 0, 0, 0], device=device, dtype=bf16)
    y, h = rms_norm(x, residual=residual)
    assert h[0, 0].item() == 256  # 257 lies between two bfloat16 numbers
    exactly(y, torch.tensor([[1.999588, 0.02343267, 0.02343267, 0.02343267]]).to(bf16))
    exactly(y, rms_norm(x + residual))
    exactly(layer_norm(x, residual=residual)[0], layer_norm(x + residual))


# https://github.com/Dao-AILab/quack/issues/53
def test_the_gradient_of_the_sum_is_added_after_the_norm(device):
    x = leaf(values([1, 2, 3, 4], device=device))
    residual = leaf(values([0.5, 0, -0.5, 1], device=device))
    grads = [values([1, 0, 0, 0], device=device), values([0, 1, 0, 2], device=device)]
    outputs = rms_norm(x, residual=residual)
    for grad in torch.autograd.grad(outputs, [x, residual], grads):
        near(grad, [[0.307003, 0.973872, -0.0326599, 1.93468]])


# https://github.com/Dao-AILab/quack/issues/52
def test_an_unused_residual_output(device):
    g = values([1, 0, 0, 0], device=device)

    def gradients(use: str, x_needs: bool) -> tuple[Tensor | None, Tensor | None]:
        x = leaf(values([1, 2, 3, 4], device=device), x_needs)
        residual = leaf(values([0, 1, 0, 1], device=device))
        y, h = rms_norm(x, residual=residual)
        {"y": y, "h": h}[use].backward(g)
        return x.grad, residual.grad

    expected = [[0.294659, -0.0205576, -0.0205576, -0.0342626]]
    for grad in gradients("y", True):
        near(grad, expected)
    for grad in gradients("h", True):
        exactly(grad, g)
    dx, dresidual = gradients("y", False)
    assert dx is None
    near(dresidual, expected)


# ---------------------------------------------------------------------------- shapes and layouts


# https://github.com/flashinfer-ai/flashinfer/issues/3005
@EVERY_NORM
def test_one_row_with_a_stride_beyond_int32(norm, device):
    buffer = torch.arange(1.0, 129.0, device=device)
    x = torch.as_strided(buffer, (1, 128), (2**31, 1))
    ones = torch.ones(128, device=device)
    y = norm(x, None, ones, *([None] if norm is LAYER_NORM else []))
    exactly(y, norm(buffer.view(1, 128), None, ones, *([None] if norm is LAYER_NORM else [])))
    if norm is RMS_NORM:
        near(y[0, [0, 127]], [0.013453, 1.721964])


# https://github.com/NVIDIA/apex/issues/411, NVIDIA/TensorRT#2021
def test_more_rows_than_grid_y_holds(device):
    x = (torch.arange(65537 * 4, device=device) % 7).float().view(65537, 4)
    poison(device, x.numel() * 4)
    y = layer_norm(x)
    last = torch.tensor(
        [[0.109764, 0.548821, 0.987877, -1.64646], [-1.34164, -0.447212, 0.447212, 1.34164]]
    )
    near(y[65535:], last)
    torch.testing.assert_close(y, F.layer_norm(x, (4,)))
    poison(device, x.numel() * 4)
    torch.testing.assert_close(rms_norm(x), F.rms_norm(x, (4,), eps=1e-6))


# https://github.com/Dao-AILab/flash-attention/issues/1620, pytorch/pytorch#28614
@EVERY_NORM
def test_a_grid_of_no_blocks(norm, device):
    x = torch.randn(3, 0, 2520, dtype=bf16, device=device, requires_grad=True)
    vectors = [
        torch.ones(2520, dtype=bf16, device=device, requires_grad=True) for _ in norm.vectors
    ]
    poison(device, 2 * 2520)
    y = norm(x, None, *vectors)
    dx, *grads = torch.autograd.grad(y.sum(), [x, *vectors])
    assert y.shape == dx.shape == (3, 0, 2520)
    for grad in grads:
        exactly(grad, 0)
    if device == "cuda":
        torch.cuda.synchronize()


# https://github.com/pytorch/pytorch/issues/188375
def test_rows_of_one_element(device):
    x = leaf(values([3], [-2], [0.5], device=device))
    weight, bias = (leaf(torch.tensor([v], device=device)) for v in (2.0, 0.25))
    y = layer_norm(x, weight, bias)
    exactly(y, 0.25)
    dx, dweight, dbias = torch.autograd.grad(y.sum(), [x, weight, bias])
    exactly(dx, 0)
    exactly(dweight, 0)
    exactly(dbias, 3)
    near(rms_norm(x, weight), torch.tensor([[2.0], [-2.0], [2.0]]))


# https://github.com/flashinfer-ai/flashinfer/issues/718, Dao-AILab/flash-attention#144, #751
@pytest.mark.parametrize("n", [12288, 16384, 32768])
@pytest.mark.parametrize("dtype", [torch.float32, bf16], ids=str)
def test_rows_beyond_48_kilobytes_of_shared_memory(dtype, n, device):
    x = (torch.arange(n, device=device) % 3).to(dtype).view(1, -1)
    ones = torch.ones_like(x)
    y, _ = rms_norm(x, ones[0], residual=ones)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    near(y[0, :3], [0.4629211, 0.9258422, 1.388763], tolerance)
    if n == 16384 and dtype == torch.float32:
        near(y.sum(), 15168.536, 1e-4)
    z, h = layer_norm(x, residual=ones)
    torch.testing.assert_close(z, F.layer_norm(h, (n,)))


# https://github.com/flashinfer-ai/flashinfer/issues/634, #636
def test_every_warp_count(device):
    def rows(n: int) -> tuple[Tensor, Tensor]:
        x = (torch.arange(n, device=device) % 5).to(bf16).view(1, -1)
        return x, torch.ones_like(x)

    x, ones = rows(3584)
    y, _ = rms_norm(x, ones[0], residual=ones)
    near(y[0, :5], [0.301565, 0.60313, 0.904695, 1.20626, 1.50782], 4e-3)
    for k in range(1, 601, 1 if device == "cuda" else 50):
        x, ones = rows(8 * k)
        y, h = rms_norm(x, ones[0], residual=ones)
        torch.testing.assert_close(y, F.rms_norm(h, (8 * k,), eps=1e-6))


# https://github.com/vllm-project/vllm/issues/41257, #45466
def test_rows_that_begin_off_every_vector_boundary(device):
    x = (torch.arange(17 * 46, device=device) % 11).to(bf16).view(17, 46)
    near(rms_norm(x)[1, :3], [0.34421, 0.51631, 0.68842], 4e-3)
    for n in range(1, 65):
        x = (torch.arange(17 * n, device=device) % 11).to(bf16).view(17, n)
        torch.testing.assert_close(rms_norm(x), F.rms_norm(x, (n,), eps=1e-6))


# https://github.com/ModelTC/LightLLM/pull/1467
def test_a_stride_in_the_last_dimension(device):
    x = torch.arange(1.0, 13.0, device=device).view(3, 4).t()
    expected = torch.tensor([[0.167444, 0.837218, 1.50699], [0.46291, 0.92582, 1.38873]])
    near(rms_norm(x)[[0, 3]], expected)
    torch.testing.assert_close(layer_norm(x), F.layer_norm(x.contiguous(), (3,)))


# https://github.com/NVIDIA/TransformerEngine/issues/417, #1017
def test_channels_last(device):
    x = (torch.arange(256, device=device) ** 2 % 31).float().view(4, 4, 4, 4)
    x = x.contiguous(memory_format=torch.channels_last)
    y = layer_norm(x)
    near(y[0, 0, 0], [-1, -0.714285, 0.142857, 1.57143])
    near(y[3, 3, 3], [0, 1.25412, -1.53281, 0.278693])
    assert y.is_contiguous()
    torch.testing.assert_close(rms_norm(x), F.rms_norm(x, (4,), eps=1e-6))


# https://github.com/microsoft/onnxruntime/issues/28971
def test_a_scale_with_two_dimensions_is_refused(device):
    with pytest.raises(ValueError, match=r"^rms_norm: weight must have shape \(3,\).*\(2, 3\)"):
        rms_norm(torch.ones(2, 2, 3, device=device), torch.ones(2, 3, device=device))
