"""Public bug reports about linear layers and cuBLASLt, each as a small input with the right value.

The links name the report. Those about fakes, strides and recompilation (NVIDIA/cuEquivariance#223,
pytorch/pytorch#196347, #121080, #172822) are in test_linear_act_compile.py.
"""

import pytest
import torch
import torch.nn.functional as F
from layouts import shifted
from norms import exactly, near
from reference import leaf
from torch import Tensor, inf, nan

from fusedcuda import linear_act, mlp

f16, bf16, f64 = torch.float16, torch.bfloat16, torch.float64
THREE_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, f16, bf16], ids=str)


def column(*values: float, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def one(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(1, 1, dtype=dtype, device=device)


# ---------------------------------------------------------------------------- activations


# https://github.com/pytorch/pytorch/issues/7999, tensorflow/tensorflow#40072,
# microsoft/onnxruntime#11010, apache/mxnet#11115
@THREE_DTYPES
def test_relu_lets_a_nan_through(dtype, device):
    x = leaf(column(nan, 1, -1, 0, device=device, dtype=dtype))
    y = linear_act(x, one(device, dtype), activation="relu")
    torch.testing.assert_close(y, column(nan, 1, 0, 0, device=device, dtype=dtype), equal_nan=True)
    (dx,) = torch.autograd.grad(y.sum(), x)
    exactly(dx, column(1, 1, 0, 0, device="cpu"))


# https://github.com/pytorch/pytorch/issues/181801, #162235, #181533, #196039
def test_relu_of_zeros_of_both_signs(device):
    x = column(-0.0, 0.0, -1e-45, device=device)
    y = linear_act(x, one(device), activation="relu")
    exactly(y, 0)
    assert not (y < 0).any()


# https://github.com/pytorch/pytorch/issues/185770, #187293, #194278
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@THREE_DTYPES
def test_activations_at_infinity(dtype, activation, device):
    x = column(inf, -inf, nan, 0.0, device=device, dtype=dtype)
    above, below, no_number, zero = linear_act(x, one(device, dtype), activation=activation)
    assert above == inf
    assert below == 0 or below.isnan()
    assert no_number.isnan()
    assert zero == 0


# https://github.com/pytorch/pytorch/issues/186278, pytorch/executorch#22323
@THREE_DTYPES
def test_gelu_tanh_far_from_zero(dtype, device):
    x = leaf(column(-200.0, -20.0, -13.24, 10.5, 15.5, 200.0, device=device, dtype=dtype))
    y = linear_act(x, one(device, dtype), activation="gelu_tanh")
    exactly(y, column(0, 0, 0, 10.5, 15.5, 200, device="cpu"))
    (dx,) = torch.autograd.grad(y.sum(), x)
    exactly(dx, column(0, 0, 0, 1, 1, 1, device="cpu"))


# https://github.com/NVIDIA/apex/issues/1605, pytorch/pytorch#104061, NVIDIA/TensorRT-LLM#17693
def test_gelu_is_the_exact_one_and_gelu_tanh_is_not(device):
    x = torch.linspace(-4, 4, 1601, dtype=f64).view(-1, 1)
    for dtype in (torch.float32, f64):
        given = leaf(x.to(device, dtype))
        weight, bias = one(device, dtype), torch.zeros(1, dtype=dtype, device=device)
        outputs, slopes = {}, {}
        for activation in ("gelu", "gelu_tanh"):
            y = linear_act(given, weight, bias, activation)
            outputs[activation] = y.detach().cpu().double()
            slopes[activation] = torch.autograd.grad(y.sum(), given)[0].cpu().double()
            wide = leaf(x)
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            expected = F.gelu(wide, approximate=approximate)
            near(outputs[activation], expected.detach(), 1e-6)
            near(slopes[activation], torch.autograd.grad(expected.sum(), wide)[0], 1e-5)
        gap = (outputs["gelu"] - outputs["gelu_tanh"]).abs()
        assert gap.max().item() == pytest.approx(4.732e-4, abs=2e-6)
        # So flat is it there that the roundings of float32 decide where it is largest.
        if dtype == f64:
            assert x[gap.argmax()].abs().item() == pytest.approx(2.7, abs=0.02)
        near(outputs["gelu"][1200], 1.9544997, 1e-6)
        near(outputs["gelu_tanh"][1200], 1.9545977, 1e-6)
        assert (slopes["gelu"] - slopes["gelu_tanh"]).abs().max() > 5e-5


# ---------------------------------------------------------------------------- shapes


# https://github.com/pytorch/pytorch/issues/27619
def test_a_batch_of_nothing(device):
    empty, *parameters = torch.zeros(0, 100), torch.ones(1, 100), torch.ones(1)
    x, weight, bias = (leaf(t.to(device)) for t in (empty, *parameters))
    for activation in ("none", "relu", "gelu_tanh"):
        y = linear_act(x, weight, bias, activation)
        assert y.shape == (0, 1)
        dx, dweight, dbias = torch.autograd.grad(y.sum(), (x, weight, bias))
        assert dx.shape == (0, 100)
        exactly(dweight, torch.zeros(1, 100))
        exactly(dbias, torch.zeros(1))


# https://github.com/pytorch/pytorch/issues/31421
def test_sums_of_nothing_plus_the_bias(device):
    x, weight = torch.zeros(3, 0, device=device), torch.zeros(4, 0, device=device)
    bias = torch.tensor([-1.0, 0.0, 1.0, 2.0], device=device)
    for activation, row in (
        ("relu", [0, 0, 1, 2]),
        ("gelu", [-0.158655, 0, 0.841345, 1.9545]),
        ("gelu_tanh", [-0.158808, 0, 0.841192, 1.9546]),
    ):
        near(linear_act(x, weight, bias, activation), torch.tensor([row] * 3))


# https://github.com/NVIDIA/apex/issues/1392
@THREE_DTYPES
def test_a_single_output_feature(dtype, device):
    def check(m: int, n: int, k: int) -> None:
        x, weight, bias = (
            leaf(torch.full(shape, value, dtype=dtype, device=device))
            for shape, value in (((m, k), 1.0), ((n, k), 0.5), ((n,), 0.0))
        )
        for activation in ("none", "relu"):
            y = linear_act(x, weight, bias, activation)
            exactly(y, k / 2)
            dx, dweight, dbias = torch.autograd.grad(y.sum(), (x, weight, bias))
            exactly(dx, n / 2)
            exactly(dweight, m)
            exactly(dbias, m)

    for n in (1, 2, 3, 7, 9, 4097):
        check(64, n, 400 if n < 10 else 8)
    if dtype == torch.float32:
        check(13824, 1, 400)


# https://github.com/pytorch/pytorch/issues/73455
@THREE_DTYPES
def test_very_many_short_rows(dtype, device):
    x = torch.ones(655360, 10, dtype=dtype, device=device)
    bias = torch.arange(10.0, device=device).to(dtype)
    y = linear_act(x, torch.ones(10, 10, dtype=dtype, device=device), bias)
    exactly(y[[0, 327680, -1]], torch.arange(10.0, 20.0).expand(3, 10))
    assert (y == y[0]).all()


# https://github.com/openxla/xla/issues/46897
@THREE_DTYPES
def test_the_bias_belongs_to_the_columns(dtype, device):
    x, weight = (torch.zeros(4, 8, dtype=dtype, device=device) for _ in range(2))
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype, device=device)
    for activation in ("none", "relu"):
        exactly(linear_act(x, weight, bias, activation), torch.tensor([[1.0, 2, 3, 4]] * 4))


# ---------------------------------------------------------------------------- alignment and layout


# https://github.com/pytorch/pytorch/issues/92201, #97205, #98975, NVIDIA/TransformerEngine#845
def test_operands_off_every_boundary(device):
    x = (torch.arange(129, device=device) * 7 % 11).half()[1:].view(16, 8)
    weight = (torch.arange(64, device=device) * 3 % 5).half().view(8, 8)
    bias = torch.arange(8.0, device=device).half()
    first = [63, 101, 114, 82, 80, 68, 106, 119]
    last = [108, 77, 76, 65, 104, 113, 82, 81]
    dy = (torch.arange(128, device=device) % 3).half().view(16, 8)
    expected = None
    for offset in (0, 1, 2, 4):
        for moved in ("x", "weight", "bias", "dy"):
            tensors = {"x": x, "weight": weight, "bias": bias, "dy": dy}
            tensors[moved] = shifted(tensors[moved], offset)
            *given, grad = (leaf(t) for t in tensors.values())
            y = linear_act(*given)
            exactly(y[[0, -1]], torch.tensor([first, last]))
            assert torch.equal(linear_act(*given, "relu"), y)  # all are positive
            grads = torch.autograd.grad(y, given, grad.detach())
            expected = expected or grads
            assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


# https://github.com/pytorch/pytorch/issues/76021
def test_a_weight_within_a_larger_matrix(device):
    big = (torch.arange(160, device=device) % 7).half().view(8, 20)
    x = (torch.arange(32, device=device) * 5 % 9).half().view(8, 4).t()
    bias = torch.arange(8.0, device=device).half()
    weight = leaf(big[:, 3:11])
    assert not weight.is_contiguous()
    y = linear_act(x, weight, bias)
    exactly(
        y[[0, 3]],
        torch.tensor([[86, 114, 93, 86, 93, 79, 79, 93], [86, 90, 108, 77, 102, 127, 103, 93]]),
    )
    (dweight,) = torch.autograd.grad(y.sum(), weight)
    exactly(dweight, torch.tensor([[12, 20, 10, 18, 17, 16, 15, 14]] * 8))
    (raw,) = torch.ops.fusedcuda.linear_act_backward(
        torch.ones_like(y), x, weight.detach(), None, 0, 0b010, False
    )
    assert raw.is_contiguous()


# ---------------------------------------------------------------------------- torch's machinery


# https://github.com/NVIDIA/TransformerEngine/issues/371
def test_autocast(device):
    x, weight, bias = torch.ones(2, 8), torch.ones(4, 8), torch.zeros(4)
    given = [leaf(t.to(device)) for t in (x, weight, bias)]
    with torch.autocast(device, dtype=bf16):
        y = linear_act(*given)
        assert y.dtype == F.linear(*given).dtype == bf16
    exactly(y, 8)
    grads = torch.autograd.grad(y.sum(), given)
    assert all(grad.dtype == torch.float32 for grad in grads)
    assert linear_act(*given).dtype == torch.float32


# https://github.com/unslothai/unsloth/issues/7020, AgileRL/AgileRL#598
def test_autocast_over_weights_of_two_dtypes(device):
    x, a, b = (leaf(torch.ones(shape, device=device)) for shape in ((2, 8), (3, 8), (4, 3)))
    weight = torch.ones(4, 8, dtype=bf16, device=device)
    with torch.autocast(device, dtype=bf16):
        y = linear_act(x, weight) + 2.0 * mlp(x, a, None, b, None, "none")
    assert y.dtype == bf16
    exactly(y, 56)
    dx, da, db = torch.autograd.grad(y.sum(), (x, a, b))
    assert dx.dtype == da.dtype == db.dtype == torch.float32
    exactly(dx, 4 + 2 * 4 * 3)
    exactly(da, 2 * 2 * 4)
    exactly(db, 2 * 2 * 8)


# https://github.com/pytorch/functorch/issues/207, #1031
def test_vmap_is_the_loop(device):
    x = torch.arange(1.0, 13.0, device=device).view(3, 1, 4)
    weight = torch.ones(2, 4, device=device)
    for activation in ("none", "relu", "silu"):
        y = torch.func.vmap(lambda x, a=activation: linear_act(x, weight, activation=a))(x)
        loop = [linear_act(rows, weight, activation=activation) for rows in x]
        torch.testing.assert_close(y, torch.stack(loop))
    per_sample = torch.func.vmap(
        torch.func.grad(lambda w, rows: linear_act(rows, w).sum()), in_dims=(None, 0)
    )(weight, x)
    exactly(per_sample, x.cpu().expand(3, 2, 4))


# https://github.com/NVIDIA/apex/issues/770, #1022
@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_operands_on_another_device_than_the_current_one():
    x, weight = (leaf(torch.ones(shape, device="cuda:1")) for shape in ((3, 16), (8, 16)))
    with torch.cuda.device(0):
        y = linear_act(x, weight, activation="relu")
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
        assert torch.cuda.current_device() == 0
    assert y.device == dx.device == dweight.device == torch.device("cuda:1")
    exactly(y, 16)
    exactly(dx, 8)
    exactly(dweight, 3)


# https://github.com/vllm-project/vllm/issues/13632
@pytest.mark.gpu
def test_the_kernels_run_on_the_current_stream():
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 14, 64, dtype=bf16, device="cuda")
    weight = torch.ones(32, 64, dtype=bf16, device="cuda")
    linear_act(x, weight, activation="relu")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        x.fill_(1)
        y = linear_act(x, weight, activation="relu")
    stream.synchronize()
    exactly(y, 64)


# https://github.com/pytorch/pytorch/issues/193402, flashinfer-ai/flashinfer#4553,
# NVIDIA/TransformerEngine#3171
@pytest.mark.gpu
def test_the_workspace_of_a_captured_product_stays():
    x = torch.ones(64, 256, dtype=bf16, device="cuda")
    weight, bias = (torch.ones(s, dtype=bf16, device="cuda") for s in ((128, 256), (128,)))
    linear_act(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear_act(x, weight, bias)
    graph.replay()
    exactly(y, 256)  # 257 lies between two bfloat16 numbers
    large = torch.ones(4096, 4096, dtype=bf16, device="cuda")
    exactly(linear_act(large, large), 4096)
    del large
    torch.cuda.empty_cache()
    graph.replay()
    exactly(y, 256)
    x.fill_(2)
    graph.replay()
    exactly(y, 512)
