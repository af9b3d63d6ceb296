"""Public bug reports about gradients of rms_norm and layer_norm, and about torch's machinery."""

import pytest
import torch
from norms import LAYER_NORM, NORMS, exactly, near, values
from reference import by_name, leaf, poison
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedcuda import layer_norm, rms_norm

EVERY_NORM = pytest.mark.parametrize("norm", NORMS, ids=by_name)
bf16 = torch.bfloat16


# ---------------------------------------------------------------------------- gradients


# https://github.com/Dao-AILab/quack/issues/88
def test_the_gradient_of_a_sum_is_expanded(device):
    x = leaf(torch.arange(1.0, 9.0, device=device).view(2, 4))
    weight = leaf(torch.tensor([1.0, 2.0, 3.0, 4.0], device=device))
    dx, dweight = torch.autograd.grad(rms_norm(x, weight).sum(), [x, weight])
    near(dx[0], [0, 0, 0, 0], 1e-6)
    near(dx[1], [-0.153362, -0.0627391, 0.0278841, 0.118507])
    near(dweight, [1.12325, 1.64001, 2.15678, 2.67355])


# https://github.com/NVIDIA/apex/issues/403
def test_gradients_without_weight_and_bias(device):
    x = leaf(values([1, 2, 4, 7], device=device))
    g = values([1, 0, 0, 0], device=device)
    near(
        torch.autograd.grad(layer_norm(x), x, g)[0],
        [[0.197435, -0.187044, -0.0831306, 0.0727389]],
    )
    near(
        torch.autograd.grad(rms_norm(x), x, g)[0],
        [[0.235631, -0.00682988, -0.0136598, -0.0239046]],
    )


# https://github.com/Dao-AILab/flash-attention/issues/781
@EVERY_NORM
def test_the_weight_gradient_of_one_row(norm, device):
    x = torch.zeros(4, device=device)
    vectors = [torch.ones(4, device=device, requires_grad=True) for _ in norm.vectors]
    for _ in range(10):
        poison(device, 16)
        y = norm(x, None, *vectors)
        assert y.shape == (4,)
        dweight, *rest = torch.autograd.grad(y, vectors, torch.full_like(x, -1.0))
        exactly(dweight, 0)
        for dbias in rest:
            exactly(dbias, -1)


# https://github.com/BobMcDear/attorch/issues/18
def test_every_row_is_in_the_weight_gradient(device):
    counts = (*range(1, 301), *range(1023, 1031))
    for m in counts if device == "cuda" else counts[::20]:
        x = torch.ones(m, 33, device=device)
        weight, bias = (leaf(torch.full((33,), v, device=device)) for v in (1.0, 0.0))
        (dweight,) = torch.autograd.grad(rms_norm(x, weight).sum(), weight)
        near(dweight, m / (1 + 1e-6) ** 0.5)
        _, dbias = torch.autograd.grad(layer_norm(x, weight, bias).sum(), [weight, bias])
        exactly(dbias, m)


# https://github.com/linkedin/Liger-Kernel/issues/950
def test_the_weight_gradient_is_not_summed_in_bfloat16(device):
    x = torch.ones(4096, 8, dtype=bf16, device=device)
    weight, bias = (leaf(torch.ones(8, dtype=bf16, device=device)) for _ in range(2))
    (dweight,) = torch.autograd.grad(rms_norm(x, weight, 0.0).sum(), weight)
    exactly(dweight, 4096)
    (dbias,) = torch.autograd.grad(layer_norm(x, weight, bias).sum(), bias)
    exactly(dbias, 4096)


# https://github.com/pytorch/helion/issues/2273
def test_rstd_is_saved_in_float32(device):
    x = leaf(values([1, 2, 4], device=device, dtype=bf16))
    (dx,) = torch.autograd.grad(rms_norm(x), x, values([1, 2, 4.5], device=device, dtype=bf16))
    expected = torch.tensor([[-0.0359966, -0.0719931, 0.044996]])
    exactly(dx, expected.to(bf16))


# https://github.com/baidu-baige/LoongForge/issues/106, huggingface/candle#3823, #3613
@EVERY_NORM
def test_parameters_upstream_are_trained(norm, device):
    linear = torch.nn.Linear(4, 4, device=device)
    x, _, *vectors = norm.random_operands(3, 4, device=device)
    y = norm(linear(x), None, *vectors)
    assert y.requires_grad
    y.square().sum().backward()
    trained = linear.weight.grad.clone()
    linear.weight.grad = None
    norm.eager(linear(x), None, *vectors).square().sum().backward()
    torch.testing.assert_close(trained, linear.weight.grad, rtol=1e-3, atol=1e-4)


# https://github.com/NVIDIA/apex/issues/410
@EVERY_NORM
def test_a_second_derivative_is_refused_and_not_zero(norm, device):
    x = leaf(torch.tensor([1.0, 2.0, 4.0], device=device))
    y = norm(x, None, *(None for _ in norm.vectors), eps=1e-5)
    v = torch.tensor([1.0, 0.0, 0.0], device=device)
    (g,) = torch.autograd.grad(y, x, v, create_graph=True)
    if norm is LAYER_NORM:
        near(g, [0.229082, -0.34362, 0.114538])
    with pytest.raises(RuntimeError, match="second derivative"):
        g.square().sum().backward()


# ---------------------------------------------------------------------------- torch's machinery


# https://github.com/vllm-project/vllm/issues/13632
@pytest.mark.gpu
def test_the_kernel_runs_on_the_current_stream():
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 14, 64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        x.fill_(1)
        y = rms_norm(x, eps=0.0)
    stream.synchronize()
    exactly(y, 1)


# https://github.com/NVIDIA/TransformerEngine/issues/371
def test_autocast(device):
    """A float32 output for float32 inputs, as torch; one of 16 bits for 16-bit inputs."""
    x = torch.ones(2, 8, device=device)
    for function in (rms_norm, layer_norm):
        with torch.autocast(device, dtype=bf16):
            assert function(x).dtype == torch.float32
            assert function(x.to(bf16)).dtype == bf16


# https://github.com/facebookresearch/xformers/issues/1126, #1127, jzhang38/TinyLlama#152
@pytest.mark.parametrize("use_reentrant", [False, True])
@EVERY_NORM
def test_checkpointed_block(norm, use_reentrant, device):
    operands = [leaf(t) for t in norm.random_operands(3, 8, device=device)]
    linear = torch.nn.Linear(8, 8, device=device)

    def block(*tensors: Tensor) -> Tensor:
        y, h = norm(*tensors)
        return linear(y) + h

    def gradients(run) -> tuple[Tensor, ...]:
        linear.zero_grad()
        for t in operands:
            t.grad = None
        run().square().sum().backward()
        return *(t.grad for t in operands), linear.weight.grad.clone()

    plain = gradients(lambda: block(*operands))
    again = gradients(lambda: checkpoint(block, *operands, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# https://github.com/pytorch/functorch/issues/207, #1031
def test_vmap_is_the_loop(device):
    x = torch.arange(1.0, 13.0, device=device).view(3, 1, 4)
    weight = torch.ones(4, device=device)
    y = torch.func.vmap(rms_norm, in_dims=(0, None))(x, weight)
    near(y[0, 0], [0.36515, 0.7303, 1.0954, 1.4606], 1e-4)
    torch.testing.assert_close(y, torch.stack([rms_norm(row, weight) for row in x]))
    per_sample = torch.func.vmap(
        torch.func.grad(lambda w, row: rms_norm(row, w).sum()), in_dims=(None, 0)
    )(weight, x)
    near(per_sample[0], [0.36515, 0.7303, 1.0954, 1.4606], 1e-4)
