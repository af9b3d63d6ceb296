"""Gradients of rms_norm and layer_norm as autograd, checkpoints and torch.func see them."""

import gc

import pytest
import torch
from norms import EPS, LAYER_NORM, NORMS, RMS_NORM, Norm
from reference import by_name, gradients, leaf
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcuda

EVERY_NORM = pytest.mark.parametrize("norm", NORMS, ids=by_name)


def leaves_of(norm: Norm, *shape: int, dtype=torch.float64, device: str, residual=True):
    operands = norm.random_operands(*shape, dtype=dtype, device=device, residual=residual)
    return [t if t is None else leaf(t) for t in operands]


def present(operands: list[Tensor | None]) -> list[Tensor]:
    return [t for t in operands if t is not None]


@pytest.mark.parametrize("residual", [False, True])
@EVERY_NORM
def test_gradcheck(norm, residual, device):
    for shape in ((3, 5), (2, 2, 4), (4, 1), (3,)):
        operands = leaves_of(norm, *shape, device=device, residual=residual)
        assert torch.autograd.gradcheck(norm, operands, fast_mode=True)
    x, r, *vectors = leaves_of(norm, 3, 5, device=device, residual=residual)
    assert torch.autograd.gradcheck(norm, [x, r, *(None for _ in vectors)], fast_mode=True)


def test_gradcheck_with_an_offset(device):
    x, _, weight = leaves_of(RMS_NORM, 3, 5, device=device)
    assert torch.autograd.gradcheck(
        lambda x, w: fusedcuda.rms_norm(x, w, weight_offset=1.0), (x, weight), fast_mode=True
    )


@EVERY_NORM
def test_only_the_operands_that_ask_get_a_gradient(norm, device):
    for residual in (False, True):
        names = [n for n in norm.operands if residual or n != "residual"]
        for chosen in names:
            operands = norm.random_operands(4, 6, device=device, residual=residual)
            by = dict(zip(norm.operands, operands, strict=True))
            by[chosen].requires_grad_()
            out = norm(*operands)
            (sum(out) if residual else out).square().sum().backward()
            for name in names:
                assert (by[name].grad is not None) == (name == chosen)


@EVERY_NORM
def test_each_choice_of_gradients_gives_the_same_values(norm, device):
    """The mask decides what is computed, not what comes out."""
    operands = norm.random_operands(9, 24, dtype=torch.float64, device=device)
    everything = range(len(operands))
    grads = [torch.randn_like(operands[0]) for _ in range(2)]
    _, expected = gradients(norm, operands, everything, grads)
    for bits in range(1, 1 << len(operands)):
        wrt = [i for i in everything if bits >> i & 1]
        _, actual = gradients(norm, operands, wrt, grads)
        for i in wrt:
            torch.testing.assert_close(actual[i], expected[i])


@pytest.mark.parametrize("used", ["y", "h", "both"])
@EVERY_NORM
def test_an_output_that_is_not_used(norm, used, device):
    operands = leaves_of(norm, 4, 6, device=device)
    y, h = norm(*operands)
    y_eager, h_eager = norm.eager(*operands)
    loss = {"y": y, "h": h, "both": y * h}[used].square().sum()
    expected = {"y": y_eager, "h": h_eager, "both": y_eager * h_eager}[used].square().sum()
    actual = torch.autograd.grad(loss, operands, allow_unused=True)
    by_torch = torch.autograd.grad(expected, operands, allow_unused=True)
    for a, b in zip(actual, by_torch, strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a, b)


@EVERY_NORM
def test_both_summands_are_sent_one_gradient(norm, device):
    operands = leaves_of(norm, 4, 6, device=device)
    dx, dresidual, *_ = torch.autograd.grad(sum(norm(*operands)).sum(), operands)
    assert dx.data_ptr() == dresidual.data_ptr()


@EVERY_NORM
def test_gradients_that_share_memory_are_accumulated_apart(norm, device):
    operands, expected = (leaves_of(norm, 4, 6, device=device) for _ in range(2))
    for a, b in zip(operands, expected, strict=True):
        b.data.copy_(a.data)
    for _ in range(3):
        norm(*operands)[0].square().sum().backward()
        norm.eager(*expected)[0].square().sum().backward()
    for a, b in zip(operands, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    operands[0].grad.zero_()
    torch.testing.assert_close(operands[1].grad, expected[1].grad)


@EVERY_NORM
def test_one_tensor_as_both_summands(norm, device):
    x, _, *vectors = leaves_of(norm, 4, 6, device=device)
    y, h = norm(x, x, *vectors)
    y_eager, h_eager = norm.eager(x, x, *vectors)
    actual = torch.autograd.grad((y * h).sum(), [x, *vectors])
    expected = torch.autograd.grad((y_eager * h_eager).sum(), [x, *vectors])
    torch.testing.assert_close(actual, expected)


@EVERY_NORM
def test_without_a_gradient_to_ask_for_there_is_no_graph(norm, device):
    for residual in (False, True):
        frozen = norm.random_operands(4, 6, device=device, residual=residual)
        trained = [t if t is None else leaf(t) for t in frozen]

        def outputs(operands, residual=residual):
            out = norm(*operands)
            return out if residual else (out,)

        assert not any(out.requires_grad for out in outputs(frozen))
        assert all(out.requires_grad for out in outputs(trained))
        with torch.no_grad():
            assert not any(out.requires_grad for out in outputs(trained))
        with torch.inference_mode():
            inference = outputs(trained)
            assert all(out.is_inference() for out in inference)
            again = norm(*(inference[0], *frozen[1:]))
        torch.testing.assert_close(again, norm.eager(inference[0].clone(), *frozen[1:]))


@EVERY_NORM
def test_the_output_may_be_changed_in_place(norm, device):
    """y is not saved."""
    operands = leaves_of(norm, 4, 6, device=device, residual=False)
    expected = torch.autograd.grad(norm(*operands).sum(), present(operands))
    doubled = torch.autograd.grad(norm(*operands).mul_(2).sum(), present(operands))
    for once, twice in zip(expected, doubled, strict=True):
        torch.testing.assert_close(twice, 2 * once)


@EVERY_NORM
def test_a_changed_saved_tensor_is_noticed(norm, device):
    for residual in (False, True):
        operands = leaves_of(norm, 4, 6, device=device, residual=residual)
        x = operands[0] * 1
        out = norm(x, *operands[1:])
        y, saved = out if residual else (out, x)
        with torch.no_grad():
            saved.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@EVERY_NORM
def test_the_summands_are_not_saved(norm, device):
    """With a residual the sum stands for both, and the summands' memory may be reused."""
    operands = leaves_of(norm, 4, 6, device=device)
    x, residual = (t * 1 for t in operands[:2])
    out = sum(norm(x, residual, *operands[2:])).square().sum()
    expected = torch.autograd.grad(out, operands, retain_graph=True)
    with torch.no_grad():
        x.zero_()
        residual.zero_()
    torch.testing.assert_close(torch.autograd.grad(out, operands), expected)


@EVERY_NORM
def test_backward_twice_and_accumulation(norm, device):
    operands = leaves_of(norm, 4, 6, device=device)
    out = sum(norm(*operands)).square().sum()
    out.backward(retain_graph=True)
    once = [t.grad.clone() for t in operands]
    out.backward()
    for operand, grad in zip(operands, once, strict=True):
        torch.testing.assert_close(operand.grad, 2 * grad, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@EVERY_NORM
def test_double_backward_raises(norm, device):
    for residual in (False, True):
        operands = leaves_of(norm, 4, 6, device=device, residual=residual)
        out = norm(*operands)
        loss = (sum(out) if residual else out).square().sum()
        grads = torch.autograd.grad(loss, present(operands), create_graph=True)
        for grad in grads:
            with pytest.raises(RuntimeError, match=rf"^{norm.name}: a second derivative"):
                torch.autograd.grad(grad.sum(), operands[0], retain_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
@EVERY_NORM
def test_checkpoint(norm, use_reentrant, device):
    operands = leaves_of(norm, 4, 6, device=device)

    def block(*tensors: Tensor) -> Tensor:
        return sum(norm(*tensors)).tanh()

    expected = torch.autograd.grad(block(*operands).sum(), operands)
    for t in operands:
        t.grad = None
    checkpoint(block, *operands, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close([t.grad for t in operands], list(expected))


@EVERY_NORM
def test_no_tensor_outlives_its_graph(norm, device):
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    operands = leaves_of(norm, 4, 6, device=device)
    before = tensors()
    for _ in range(3):
        torch.autograd.grad(sum(norm(*operands)).sum(), operands)
    assert tensors() <= before  # fewer, where leftovers of another test went meanwhile


@EVERY_NORM
def test_saved_statistics(norm, device):
    """Single precision beside 16-bit rows, double beside double, one number a row."""
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        operands = leaves_of(norm, 4, 6, dtype=dtype, device=device, residual=False)
        out = norm(*operands)
        statistics = [t for t in out.grad_fn.saved_tensors if t.shape == (4,)]
        assert len(statistics) == (2 if norm is LAYER_NORM else 1)
        assert all(t.dtype == expected for t in statistics)
        h = operands[0].detach().to(expected)
        torch.testing.assert_close(statistics[-1], norm.rstd(h, EPS).squeeze(-1))


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@EVERY_NORM
def test_autocast_changes_nothing(norm, autocast_dtype, device):
    for dtype in (torch.float32, autocast_dtype):
        operands = leaves_of(norm, 4, 32, dtype=dtype, device=device)
        expected, expected_grads = gradients(norm, operands, range(len(operands)), None)
        with torch.autocast(device, dtype=autocast_dtype):
            out, grads = gradients(norm, operands, range(len(operands)), None)
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        assert all(torch.equal(grads[i], expected_grads[i]) for i in grads)


# ---------------------------------------------------------------------------- torch.func


def loss_of(function, norm: Norm):
    def loss(*operands: Tensor) -> Tensor:
        y, h = function(*operands)
        return (y.sin() * h.cos()).sum()

    return loss


@EVERY_NORM
def test_vmap_of_grad(norm, device):
    """Per-sample gradients, with vectors that are shared and with vectors of each sample."""
    operands = norm.random_operands(5, 3, 8, dtype=torch.float64, device=device)
    own = [torch.randn(5, 8, dtype=torch.float64, device=device) for _ in norm.vectors]
    shared = [None] * len(own)
    wrt = tuple(range(len(operands)))
    cases = [
        ([*operands], (0, 0, *shared)),
        ([operands[0], operands[1][0], *operands[2:]], (0, None, *shared)),
        ([operands[0].movedim(0, 1), operands[1], *operands[2:]], (1, 0, *shared)),
        ([*operands[:2], *own], (0, 0, *(0 for _ in own))),
        ([operands[0][0], operands[1][0], *own], (None, None, *(0 for _ in own))),
    ]
    for given, dims in cases:
        actual = torch.func.vmap(torch.func.grad(loss_of(norm, norm), wrt), dims)(*given)
        expected = torch.func.vmap(torch.func.grad(loss_of(norm.eager, norm), wrt), dims)(*given)
        torch.testing.assert_close(actual, expected)


@EVERY_NORM
def test_grad_over_vmap(norm, device):
    """Inside vmap a tensor of an outer grad level does not say that it needs a gradient."""
    x = torch.randn(5, 8, dtype=torch.float64, device=device)

    def loss(function):
        absent = [None] * (1 + len(norm.vectors))
        return lambda x: torch.func.vmap(lambda row: function(row, *absent))(x).sin().sum()

    actual = torch.func.grad(loss(norm))(x)
    torch.testing.assert_close(actual, torch.func.grad(loss(norm.eager))(x))


@EVERY_NORM
def test_forward_mode_is_refused(norm, device):
    x = torch.randn(3, 8, device=device)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(norm, (x,), (x,))
