"""Bugs that users of other projects reported of gated MLPs, as numbers worked by hand."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcuda

BF16 = torch.bfloat16
either_weight = pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])


def tensor(values: list, device: str, trained: bool = True) -> Tensor:
    return torch.tensor(values, device=device, requires_grad=trained)


def both(w_gate: Tensor, w_up: Tensor, packed: bool) -> Tensor | tuple[Tensor, Tensor]:
    return torch.cat([w_gate, w_up]) if packed else (w_gate, w_up)


# ---- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", ["plain", "reentrant", "not reentrant"])
@either_weight
def test_with_and_without_a_checkpoint(packed, way, recompute, device):
    """facebookresearch/xformers#1126, #1127, jzhang38/TinyLlama#152: other tensors the 2nd time."""
    x = tensor([[1.0, -1.0]], device)
    w_gate = tensor([[1.0, 0.0], [0.0, 1.0]], device)
    w_up = tensor([[2.0, 0.0], [0.0, 3.0]], device)
    w_down = tensor([[1.0, 1.0]], device)

    def mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        inner = both(w_gate, w_up, packed)
        return fusedcuda.gated_mlp(x, inner, w_down, recompute=recompute)

    given = (x, w_gate, w_up, w_down)
    wrapped = {
        "plain": mlp,
        "reentrant": partial(checkpoint, mlp, use_reentrant=True),
        "not reentrant": partial(checkpoint, mlp, use_reentrant=False),
    }
    y = wrapped[way](*given)
    y.sum().backward()
    for actual, expected in (
        (y, [[2.26894]]),
        (x.grad, [[3.31746, -1.02381]]),
        (w_gate.grad, [[1.85534, -1.85534], [-0.216988, 0.216988]]),
    ):
        torch.testing.assert_close(actual, tensor(expected, device), atol=1e-5, rtol=1e-5)


# ---- Roundings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 100])
@either_weight
def test_the_gate_is_not_rounded_before_the_product(packed, rows, device):
    """XPU-Forces/mojo_opset#461, vllm-project/vllm-omni#6283: once or twice, 74 places differ.

    x and w_down select: gate and up are the first columns of their weights, y is h.
    """
    gate = torch.linspace(-4, 4, 256).to(BF16).to(device)
    up = torch.linspace(3, -3, 256).to(BF16).to(device)
    weights = [F.pad(values.unsqueeze(1), (0, 7)) for values in (gate, up)]
    x = torch.zeros(rows, 8, dtype=BF16, device=device)
    x[:, 0] = 1
    y = fusedcuda.gated_mlp(x, both(*weights, packed), torch.eye(256, dtype=BF16, device=device))
    once = (F.silu(gate.double()) * up.double()).to(BF16)
    twice = F.silu(gate) * up
    for row in y:
        # fp32 arithmetic may fall on the other side of a tie, so not all 256 need be equal.
        assert (row != once).sum() <= 1
        assert 70 <= (row != twice).sum() <= 78
        assert (row.float() - twice.float()).abs().max() <= 0.0625


# ---- Writing over what is in use -----------------------------------------------------------------


def test_gate_and_up_of_one_weight(device):
    """linkedin/Liger-Kernel#254: gradients were written over what the forward had saved."""
    x = tensor([0.0, 0.5, -1.0], device)
    e = x.exp()
    before = e.detach().clone()
    one = torch.eye(3, device=device)
    y = fusedcuda.gated_mlp(e, (one, one), one)
    y.sum().backward()
    expected = tensor([1.65873, 5.16598, 0.171987], device)
    torch.testing.assert_close(x.grad, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(e, before)


def test_one_weight_for_all_three(device):
    """Its gradient is the sum of three."""
    weight = tensor([[2.0]], device)
    y = fusedcuda.gated_mlp(torch.tensor([[3.0]], device=device), (weight, weight), weight, "relu")
    assert y.item() == 6 * 6 * 2
    y.backward()
    assert weight.grad.item() == 3 * 9 * 2**2  # of 9 w^3


# ---- Shapes and gradients ------------------------------------------------------------------------


@either_weight
def test_no_rows(packed, device):
    """Dao-AILab/flash-attention#1620, pytorch/pytorch#28614: an error that the next kernel got."""
    x = torch.randn(3, 0, 2520, dtype=BF16, device=device, requires_grad=True)
    weights = [torch.ones(8, 2520, dtype=BF16, device=device, requires_grad=True) for _ in range(2)]
    w_down = torch.ones(2520, 8, dtype=BF16, device=device, requires_grad=True)
    y = fusedcuda.gated_mlp(x, both(*weights, packed), w_down)
    assert y.shape == (3, 0, 2520)
    y.sum().backward()
    assert x.grad.shape == (3, 0, 2520)
    for weight in (*weights, w_down):
        assert torch.equal(weight.grad, torch.zeros_like(weight))
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("recompute", [False, True])
@either_weight
def test_an_expanded_gradient(packed, recompute, device):
    """Dao-AILab/quack#88: y.sum() sends one element with strides of 0."""
    x = torch.randn(70, 16, device=device, dtype=BF16)
    weights = [torch.randn(24, 16, device=device, dtype=BF16) for _ in range(2)]
    w_down = torch.randn(16, 24, device=device, dtype=BF16)
    given = [t.requires_grad_() for t in (x, *weights, w_down)]
    inner = both(*weights, packed)
    y = fusedcuda.gated_mlp(x, inner, w_down, recompute=recompute)
    expanded = torch.autograd.grad(y.sum(), given, retain_graph=True)
    full = torch.autograd.grad(y, given, torch.ones_like(y))
    for one, other in zip(expanded, full, strict=True):
        assert torch.equal(one, other)


# ---- NaN -----------------------------------------------------------------------------------------


@either_weight
def test_relu_passes_nan(packed, device):
    """pytorch/pytorch#7999: a maximum would return 0."""
    x = torch.full((70, 8), torch.nan, device=device, dtype=BF16)
    one = torch.eye(8, device=device, dtype=BF16)
    y = fusedcuda.gated_mlp(x, both(one, one, packed), one, "relu")
    assert y.isnan().all()


# ---- Devices -------------------------------------------------------------------------------------


@pytest.mark.gpus(2)
def test_on_the_second_gpu():
    """triton-lang/triton#5205, linkedin/Liger-Kernel#401, state-spaces/mamba#103."""
    for dtype in (torch.float32, BF16):
        for device in ("cuda:0", "cuda:1"):
            gate, up = (torch.full((8, 8), v / 8, device=device, dtype=dtype) for v in (1.0, 2.0))
            x = torch.ones(1, 8, device=device, dtype=dtype)
            one = torch.eye(8, device=device, dtype=dtype)
            y = fusedcuda.gated_mlp(x, (gate, up), one)
            assert y.device == torch.device(device)
            tolerance = 2 * torch.finfo(dtype).eps
            expected = torch.full_like(y, 1.4621172)
            torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
        assert torch.cuda.current_device() == 0
