"""Gradients of the pointwise ops as autograd sees them: who gets one, when, and what it costs."""

import copy
import gc

import pytest
import torch
from reference import (
    ACT_MUL,
    ACT_MUL_PACKED,
    ADD_MUL_ACT,
    ADD_RELU,
    BIAS_ACT,
    BROADCASTING,
    OPS,
    Op,
    by_name,
    leaf,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

EVERY_ACTIVATION = [
    pytest.param(op, activation, id=f"{op.name}-{activation}")
    for op in OPS
    for activation in op.activations
]


def leaves_of(op: Op, *shape: int, dtype=torch.float64, device="cpu") -> list[Tensor]:
    """Random operands that need a gradient, none of them where relu has its corner."""
    operands = op.random_operands(*shape, dtype=dtype, device=device)
    return [leaf(torch.where(x.abs() < 0.05, 0.5, x)) for x in operands]


@pytest.mark.parametrize(("op", "activation"), EVERY_ACTIVATION)
def test_gradcheck(op, activation, device):
    def run(*operands: Tensor) -> Tensor:
        return op(*operands, activation=activation)

    shapes = [(3, 4)]
    if len(op.operands) > 1:
        shapes += [(4,), (3, 1), ()]
    for shape in shapes:
        operands = leaves_of(op, 3, 4, device=device)
        if shape != (3, 4):
            operands[-1] = leaf(torch.randn(shape, dtype=torch.float64, device=device))
        assert torch.autograd.gradcheck(run, operands, fast_mode=True)


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_only_the_operands_that_ask_get_a_gradient(op, device):
    for chosen in range(len(op.operands)):
        operands = op.random_operands(4, 6, device=device)
        operands[chosen].requires_grad_()
        op(*operands).sum().backward()
        for index, operand in enumerate(operands):
            assert (operand.grad is not None) == (index == chosen)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_without_a_gradient_to_ask_for_there_is_no_graph(op, device):
    frozen = op.random_operands(4, 6, device=device)
    assert not op(*frozen).requires_grad
    trained = [leaf(operand) for operand in frozen]
    assert op(*trained).requires_grad
    with torch.no_grad():
        assert not op(*trained).requires_grad
    with torch.inference_mode():
        out = op(*trained)
        assert not out.requires_grad
        assert out.is_inference()
    with torch.no_grad(), torch.enable_grad():
        assert op(*trained).requires_grad


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_inference_tensors_are_accepted(op, device):
    with torch.inference_mode():
        operands = op.random_operands(4, 6, device=device)
    torch.testing.assert_close(op(*operands), op.eager(*operands))


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_the_output_may_be_changed_in_place(op, device):
    """As the next layer does, as long as the op saved its inputs and not its output."""
    activation = op.activations[-1]
    operands = [leaf(x) for x in op.random_operands(4, 6, device=device)]
    with torch.no_grad():
        op(*operands, activation=activation).add_(1)
    if op is not ADD_RELU:
        expected = torch.autograd.grad(op(*operands, activation=activation).sum(), operands)
        doubled = op(*operands, activation=activation).mul_(2)
        for grad, once in zip(torch.autograd.grad(doubled.sum(), operands), expected, strict=True):
            torch.testing.assert_close(grad, 2 * once)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_a_changed_saved_tensor_is_noticed(op, device):
    """add_relu saves its output, the others their inputs; a stale one must not give a gradient."""
    operands = [leaf(x) for x in op.random_operands(4, 6, device=device)]
    inner = [x * 1 for x in operands]
    out = op(*inner, activation=op.activations[-1])
    with torch.no_grad():
        (out if op is ADD_RELU else inner[0]).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_backward_twice_and_accumulation(op, device):
    operands = [leaf(x) for x in op.random_operands(4, 6, device=device)]
    out = op(*operands)
    out.sum().backward(retain_graph=True)
    once = [x.grad.clone() for x in operands]
    out.sum().backward()
    for operand, grad in zip(operands, once, strict=True):
        torch.testing.assert_close(operand.grad, 2 * grad, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_gradients_that_share_memory_are_accumulated_apart(op, device):
    """Where two operands get the same gradient, adding to one must not add to the other."""
    operands = [leaf(x) for x in op.random_operands(4, 6, device=device)]
    for _ in range(3):
        op(*operands).sum().backward()
    expected = [leaf(x) for x in operands]
    for _ in range(3):
        op.eager(*expected).sum().backward()
    for actual, reference in zip(operands, expected, strict=True):
        torch.testing.assert_close(actual.grad, reference.grad)
    operands[0].grad.zero_()
    assert torch.equal(operands[1].grad, operands[1].grad.clone())
    torch.testing.assert_close(operands[1].grad, expected[1].grad)


@pytest.mark.parametrize("op", [ADD_RELU, ADD_MUL_ACT, BIAS_ACT], ids=by_name)
def test_two_summands_are_sent_one_gradient(op, device):
    """It is written once and handed out twice."""
    operands = [leaf(x) for x in op.random_operands(4, 6, device=device)]
    for activation in op.activations:
        out = op(*operands, activation=activation)
        first, second, *_ = torch.autograd.grad(out, operands, torch.randn_like(out))
        assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_one_tensor_as_every_operand(op, device):
    x = leaf(torch.randn(5, 8, dtype=torch.float64, device=device))
    reference = leaf(x)
    for activation in op.activations:
        (grad,) = torch.autograd.grad(op(*[x] * len(op.operands), activation=activation).sum(), x)
        out = op.eager(*[reference] * len(op.operands), activation=activation)
        (expected,) = torch.autograd.grad(out.sum(), reference)
        torch.testing.assert_close(grad, expected)


def test_a_tensor_and_a_view_of_it(device):
    x = leaf(torch.randn(6, 6, dtype=torch.float64, device=device))
    (grad,) = torch.autograd.grad(ACT_MUL(x, x.t(), activation="silu").sum(), x)
    (expected,) = torch.autograd.grad(ACT_MUL.eager(x, x.t(), activation="silu").sum(), x)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_double_backward_is_refused(op, device):
    """An error, not a zero: the second derivative is not implemented."""
    for activation in op.activations:
        operands = leaves_of(op, 3, 4, device=device)
        out = op(*operands, activation=activation)
        grads = torch.autograd.grad(out.square().sum(), operands, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(sum(grad.square().sum() for grad in grads), operands)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_a_gradient_penalty_is_refused(op, device):
    """The gradient of a sum comes in as a constant, yet what goes out depends on the inputs."""
    operands = leaves_of(op, 3, 4, device=device)
    out = op(*operands, activation=op.activations[-1])
    grads = torch.autograd.grad(out.sum(), operands, create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    with pytest.raises(RuntimeError, match="differentiable once"):
        (out.sum() + penalty).backward()


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_hooks_and_undefined_gradients(op, device):
    """A branch of the graph that sends no gradient back must not disturb the others."""
    operands = [leaf(x) for x in op.random_operands(4, 6, device=device)]
    seen = []
    operands[0].register_hook(lambda grad: seen.append(grad.shape))
    used, unused = op(*operands), op(*operands)
    used.sum().backward(inputs=operands)
    assert seen == [operands[0].shape]
    assert unused.requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["recompute", "reentrant"])
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_checkpoint(op, use_reentrant, device):
    operands = [leaf(x) for x in op.random_operands(4, 6, device=device)]
    expected = torch.autograd.grad(op(*operands).square().sum(), operands)
    again = [leaf(x) for x in operands]
    checkpoint(op, *again, use_reentrant=use_reentrant).square().sum().backward()
    for operand, grad in zip(again, expected, strict=True):
        assert torch.equal(operand.grad, grad)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_autocast_changes_nothing_but_what_torch_changes(op, device):
    """These are elementwise ops: autocast leaves their dtype to type promotion, as torch's own."""
    for dtype in (torch.float32, torch.bfloat16):
        operands = op.random_operands(4, 8, dtype=dtype, device=device)
        if len(operands) > 1:
            operands[-1] = operands[-1].float()
        operands = [leaf(operand) for operand in operands]
        with torch.autocast(device, dtype=torch.bfloat16):
            out = op(*operands)
            assert out.dtype == op.eager(*operands).dtype
            torch.testing.assert_close(out, op(*operands))
        out.float().sum().backward()
        assert [operand.grad.dtype for operand in operands] == [o.dtype for o in operands]


def test_after_a_linear_layer_under_autocast(device):
    """A bf16 activation meets an fp32 bias, which must get an fp32 gradient."""
    linear = torch.nn.Linear(8, 16, bias=False, device=device)
    bias = torch.nn.Parameter(torch.randn(16, device=device))
    with torch.autocast(device, dtype=torch.bfloat16):
        hidden = linear(torch.randn(4, 8, device=device))
        out = ADD_RELU(hidden, bias)
        expected = torch.relu(hidden + bias)
    assert (hidden.dtype, out.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert bias.grad.dtype == linear.weight.grad.dtype == torch.float32


class SavedBytes:
    """Counts the bytes of the distinct storages that autograd keeps."""

    def __enter__(self):
        self.storages = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    @property
    def total(self) -> int:
        return sum(self.storages.values())


def test_relu_saves_its_output_only(device):
    """What the next layer keeps anyway; the sum itself is never stored."""
    a, b = (leaf(torch.randn(64, 64, device=device)) for _ in range(2))
    with SavedBytes() as saved:
        out = ADD_RELU(a, b)
    assert list(saved.storages) == [out.untyped_storage().data_ptr()]


@pytest.mark.parametrize(("op", "activation"), EVERY_ACTIVATION)
def test_no_intermediate_result_is_saved(op, activation, device):
    operands = [leaf(x) for x in op.random_operands(64, 64, device=device)]
    with SavedBytes() as saved:
        out = op(*operands, activation=activation)
    known = {x.untyped_storage().data_ptr() for x in (*operands, out)}
    assert set(saved.storages) <= known


def test_the_graph_is_freed_with_its_output(device):
    """No reference cycle: memory is returned without waiting for the garbage collector."""
    x = leaf(torch.randn(8, 16, device=device))
    gc.collect()
    gc.disable()
    try:
        hidden = x * 2
        memory = StorageWeakRef(hidden.untyped_storage())
        out = ACT_MUL_PACKED(hidden, activation="silu")
        del hidden
        assert not memory.expired()
        del out
        assert memory.expired()
    finally:
        gc.enable()


def test_a_module_can_be_copied_and_trained(device):
    """The same step on the model and on a deep copy of it, with the gradients set to None."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 32, device=device)
            self.down = torch.nn.Linear(16, 8, device=device)

        def forward(self, x: Tensor) -> Tensor:
            return ADD_RELU(x, self.down(ACT_MUL_PACKED(self.up(x), activation="silu")))

    block = Block()
    twin = copy.deepcopy(block)
    x = torch.randn(4, 8, device=device)
    for model in (block, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(block.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
