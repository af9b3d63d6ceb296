"""Public bug reports about cross-entropy kernels, each as a small input with the right value.

The links name the report. Some concern other row operators; what they showed about strides, streams
or gradients is true of this one as well.
"""

import pytest
import torch
import torch.nn.functional as F
from reference import leaf
from torch import Tensor, inf, nan
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fusedcuda import cross_entropy

every_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def tensors(device: str, logits: list, target: list[int]) -> tuple[Tensor, Tensor]:
    x = torch.tensor(logits, dtype=torch.float32, device=device, requires_grad=True)
    return x, torch.tensor(target, device=device)


def close(actual: Tensor, expected: list | float, **tolerance: float) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(actual.detach(), expected, equal_nan=True, **tolerance)


# https://github.com/flashinfer-ai/flashinfer/issues/3005
@every_reduction
def test_one_row_with_a_stride_beyond_int32(reduction, device):
    x = torch.arange(1.0, 129.0, device=device) / 16
    strided = leaf(torch.as_strided(x, (1, 128), (2**31, 1)))
    target = torch.tensor([5], device=device)
    loss = cross_entropy(strided, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, strided)
    plain = leaf(x[None])
    expected = F.cross_entropy(plain, target)
    (wanted,) = torch.autograd.grad(expected, plain)
    torch.testing.assert_close((loss, grad), (expected, wanted))


# https://github.com/ROCm/TransformerEngine/issues/623
def test_the_gradient_of_a_sum_has_one_stored_element(device):
    x, target = tensors(device, [[1, 2, 3], [3, 1, 0], [0, 0, 0]], [2, 0, 1])
    rows = [
        [0.090031, 0.24473, -0.33476],
        [-0.15621, 0.1142, 0.04201],
        [0.33333, -0.66667, 0.33333],
    ]
    cross_entropy(x, target, reduction="none").sum().backward()
    close(x.grad, rows)
    many = leaf(x.repeat(32, 1))
    cross_entropy(many, target.repeat(32), reduction="none").sum().backward()
    close(many.grad, rows * 32)


# https://github.com/NVIDIA/apex/issues/770, #1022, triton-lang/triton#5205
@pytest.mark.gpu
@pytest.mark.gpus(2)
@every_reduction
def test_a_call_on_the_second_gpu(reduction):
    for device in ("cuda:0", "cuda:1"):
        x, target = tensors(device, [[1, 2, 3]], [0])
        loss = cross_entropy(x, target, reduction=reduction).sum()
        loss.backward()
        assert loss.device == x.grad.device == torch.device(device)
        close(loss, 2.40761)
        close(x.grad, [[-0.90997, 0.24473, 0.66524]])
    assert torch.cuda.current_device() == 0


# https://github.com/vllm-project/vllm/issues/13632
@pytest.mark.gpu
@every_reduction
def test_the_kernel_runs_on_the_current_stream(reduction):
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 14, 64, device="cuda")
    target = torch.zeros(1 << 14, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x[:, 0] = 1
        loss = cross_entropy(x, target, reduction=reduction)
    stream.synchronize()
    torch.testing.assert_close(loss, F.cross_entropy(x, target, reduction=reduction))


# https://github.com/NVIDIA/cuEquivariance/issues/223, pytorch/pytorch#196347
@every_reduction
def test_the_strides_that_the_compiler_was_promised(reduction, device):
    torch._dynamo.reset()
    logits = torch.arange(24.0, device=device).view(2, 3, 4).permute(2, 0, 1)
    target = torch.arange(8, device=device).view(2, 4).t() % 3

    def function(x: Tensor) -> Tensor:
        return cross_entropy(x * 0.1, target, reduction=reduction) + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, function):
        x = leaf(logits)
        loss = run(x)
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), x)[0]))
    torch.testing.assert_close(*results, check_stride=True)


# https://github.com/pytorch/pytorch/issues/121080, #172822
def test_no_batch_size_is_compiled_in(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(cross_entropy, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 3, 5, 8, 13):
        x = torch.randn(batch, 16, device=device)
        target = torch.arange(batch, device=device)
        close(compiled(x, target), F.cross_entropy(x, target).item())
    assert counter.frame_count <= 2


# https://github.com/NVIDIA/TransformerEngine/issues/371
def test_autocast_computes_in_float32_as_torch_does(device):
    x, target = tensors(device, [[1, 2, 3]], [0])
    with torch.autocast(device, dtype=torch.bfloat16):
        half = x.bfloat16()
        loss = cross_entropy(half, target)
    assert loss.dtype == torch.float32
    loss.backward()
    assert x.grad.dtype == torch.float32
    close(loss, 2.407606)


# https://github.com/NVIDIA/apex/issues/410
@every_reduction
def test_a_second_derivative_is_refused_and_not_zero(reduction, device):
    x, target = tensors(device, [[1, 2, 4]], [0])
    loss = cross_entropy(x, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        grad.square().sum().backward()


# https://github.com/facebookresearch/xformers/issues/1126, #1127, jzhang38/TinyLlama#152
@every_reduction
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_head(use_reentrant, reduction, device):
    """The same number of saved tensors the second time."""
    hidden = torch.randn(4, 6, device=device)
    target = torch.arange(4, device=device)
    weights = [torch.nn.Parameter(w) for w in torch.randn(1, 8, 6, device=device).repeat(2, 1, 1)]

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy(F.linear(hidden, weight), target, reduction=reduction).sum()

    x = leaf(hidden)
    head(x, weights[0]).backward()
    y = leaf(hidden)
    checkpoint(head, y, weights[1], use_reentrant=use_reentrant).backward()
    torch.testing.assert_close((y.grad, weights[1].grad), (x.grad, weights[0].grad))


# https://github.com/unslothai/unsloth/issues/5002, linkedin/Liger-Kernel#272, #1251,
# modelscope/ms-swift#10129
@every_reduction
def test_the_gradient_is_not_written_over_logits_that_others_use(reduction, device):
    p, target = tensors(device, [[1, 2, 3]], [0])
    z = torch.softmax(p, dim=-1)
    kept = z.detach().clone()
    loss = cross_entropy(z, target, reduction=reduction).sum() + z.square().sum()
    close(loss, 1.882944)
    for _ in range(2):
        (grad,) = torch.autograd.grad(loss, p, retain_graph=True)
        close(grad, [[-0.170382, -0.13232, 0.302702]])
        assert torch.equal(z, kept)
    loss = cross_entropy(z * 1, target, reduction=reduction, inplace_backward=True).sum()
    (loss + z.square().sum()).backward()
    close(p.grad, [[-0.170382, -0.13232, 0.302702]])


# https://github.com/pytorch/functorch/issues/207, #1031
def test_vmap_is_the_loop(device):
    x = torch.arange(1.0, 13.0, device=device).view(3, 1, 4)
    target = torch.tensor([[0], [1], [3]], device=device)
    losses = torch.func.vmap(cross_entropy)(x, target)
    grads = torch.func.vmap(torch.func.grad(cross_entropy))(x, target)
    for sample in range(3):
        single = leaf(x[sample])
        loss = cross_entropy(single, target[sample])
        loss.backward()
        torch.testing.assert_close(losses[sample], loss.detach())
        torch.testing.assert_close(grads[sample], single.grad)


# https://github.com/linkedin/Liger-Kernel/issues/177, mgmalek/efficient_cross_entropy#6,
# pytorch/pytorch#70348
@pytest.mark.parametrize(("reduction", "loss"), [("mean", nan), ("sum", 0.0), ("none", [0.0, 0.0])])
def test_all_targets_ignored(reduction, loss, device):
    x, target = tensors(device, [[1, 2, 3], [3, 2, 1]], [-100, -100])
    actual = cross_entropy(x, target, reduction=reduction)
    close(actual, loss)
    actual.sum().backward()
    close(x.grad, [[0.0] * 3] * 2)


# https://github.com/pytorch/pytorch/issues/15508
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ignore_index", [255, 1])
def test_an_ignore_index_outside_of_the_vocabulary_or_in_it(ignore_index, dtype, device):
    x, target = tensors(device, [[1, 2, 3], [0, 0, 0], [3, 2, 1]], [0, ignore_index, 2])
    target = target.to(dtype)
    rows = cross_entropy(x, target, ignore_index=ignore_index, reduction="none")
    close(rows, [2.40761, 0, 2.40761])
    rows.sum().backward()
    assert torch.equal(x.grad[1], torch.zeros(3, device=device))
    close(cross_entropy(x, target, ignore_index=ignore_index), 2.407606)


# https://github.com/linkedin/Liger-Kernel/issues/421, #488
def test_no_reduction_gives_one_loss_a_row(device):
    x, target = tensors(device, [[1, 2, 3], [3, 2, 1]], [0, -100])
    close(cross_entropy(x, target, reduction="none"), [2.40761, 0])
    close(cross_entropy(x, target, reduction="sum"), 2.407606)
    close(cross_entropy(x, target, reduction="mean"), 2.407606)


# https://github.com/linkedin/Liger-Kernel/issues/1298, #968
def test_each_row_has_its_own_incoming_gradient(device):
    """Reported of a fused linear layer; the weights are the identity and zeros here."""
    x, target = tensors(device, [[1, 0, 0], [0, 1, 0]], [0, 2])
    rows = cross_entropy(x, target, reduction="none")
    rows.backward(torch.tensor([2.0, -3.0], device=device))
    close(x.grad, [[-0.84777, 0.42388, 0.42388], [-0.63582, -1.7284, 2.3642]], rtol=1e-4, atol=1e-4)


# https://github.com/pytorch/pytorch/issues/73205, linkedin/Liger-Kernel#198
def test_label_smoothing_does_not_count_ignored_rows(device):
    x, target = tensors(device, [[1, 2, 3], [3, 2, 1], [5, 0, 0]], [0, 2, -100])
    rows = cross_entropy(x, target, label_smoothing=0.2, reduction="none")
    close(rows, [2.20761, 2.20761, 0])
    loss = cross_entropy(x, target, label_smoothing=0.2)
    close(loss, 2.207606)
    loss.backward()
    close(x.grad[2], [0, 0, 0], rtol=0, atol=0)
    close(x.grad[0], [-0.38832, 0.089031, 0.29929])


# https://github.com/PaddlePaddle/Paddle/issues/10945, pytorch/pytorch#108345
@pytest.mark.parametrize("wrong", [[0, 5], [-1, 0], [0, 2**31]])
@every_reduction
def test_labels_out_of_range(wrong, reduction):
    """On a GPU: tests/test_cross_entropy_cuda.py."""
    with pytest.raises(IndexError, match="cross_entropy: target"):
        cross_entropy(torch.zeros(2, 5), torch.tensor(wrong), reduction=reduction)


# https://github.com/Dao-AILab/flash-attention/issues/1930
@pytest.mark.parametrize("position", [0, 1023, 1024, 50_000, 99_999])
@every_reduction
def test_one_finite_logit_among_masked_ones(position, reduction, device):
    """An online softmax that meets only -inf first computes exp(-inf - -inf)."""
    x = torch.full((1, 100_000), -inf, device=device)
    x[0, position] = 10
    x.requires_grad_()
    loss = cross_entropy(x, torch.tensor([position], device=device), reduction=reduction).sum()
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(x.grad, torch.zeros_like(x))
    masked = 77
    x.grad = None
    loss = cross_entropy(x, torch.tensor([masked], device=device), reduction=reduction).sum()
    loss.backward()
    assert loss.item() == inf
    assert (x.grad[0, masked].item(), x.grad[0, position].item()) == (-1, 1)
    assert torch.count_nonzero(x.grad) == 2


# https://github.com/unslothai/unsloth/issues/10616
@pytest.mark.parametrize("classes", [1, 2, 3, 32_003, 50_257, 65_537, 128_255])
def test_lanes_beyond_the_vocabulary_do_not_enter_the_sum(classes, device):
    x = torch.full((2, classes), -100.0, device=device)
    x[1, -1] = -90
    target = torch.tensor([0, classes - 1], device=device)
    expected = F.cross_entropy(x.double(), target, reduction="none").float()
    close(cross_entropy(x, target, reduction="none"), expected, rtol=1e-4, atol=1e-6)
    if classes == 65_537:
        close(expected, [11.09037, 1.3801077])
