"""The pointwise ops under torch.compile, opcheck, fake tensors, vmap and DTensor."""

import itertools

import pytest
import torch
from reference import (
    ACT_MUL,
    ACT_MUL_PACKED,
    ACT_SCALE_BIAS,
    ADD_MUL_ACT,
    ADD_RELU,
    BIAS_ACT,
    BROADCASTING,
    OPS,
    by_name,
    leaf,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fusedcuda

GELU = 5


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- registration


def raw_arguments(op, operands: list[Tensor]) -> tuple[Tensor | int, ...]:
    return (*operands, GELU) if op is not ADD_RELU else tuple(operands)


def samples(op, device: str) -> list[list[Tensor]]:
    """Operands that are contiguous, permuted, broadcast, expanded and empty."""
    plain = op.random_operands(2, 4, 6, device=device)
    lists = [
        plain,
        [x.permute(2, 0, 1) for x in op.random_operands(4, 6, 2, device=device)],
        [x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain],
        [x[:1].expand(x.shape) for x in plain],
        op.random_operands(0, 4, device=device),
    ]
    if len(plain) > 1:
        vectors = [torch.randn(6, device=device) for _ in plain[1:]]
        lists += [
            [plain[0], *vectors],
            [plain[0].transpose(0, 1).contiguous().transpose(0, 1), *vectors],
            [plain[0][:, :, :1], *vectors],
            [plain[0], *(torch.randn((), device=device) for _ in vectors)],
        ]
    return lists


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_opcheck_forward(op, device):
    raw = getattr(torch.ops.fusedcuda, op.name).default
    for operands in samples(op, device):
        torch.library.opcheck(raw, raw_arguments(op, operands))


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_opcheck_backward(op, device):
    raw = getattr(torch.ops.fusedcuda, f"{op.name}_backward").default
    for operands in samples(op, device):
        out = op(*operands)
        grad = torch.randn_like(out)
        if op is ACT_MUL_PACKED:
            torch.library.opcheck(raw, (grad, *operands, GELU))
            continue
        saved = (out,) if op is ADD_RELU else ()
        code = () if op is ADD_RELU else (GELU,)
        every = (1 << len(operands)) - 1
        for mask in (every, 1, 1 << (len(operands) - 1)):
            torch.library.opcheck(raw, (grad, *saved, *operands, *code, mask))


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_shapes_strides_and_dtypes_without_data(op):
    """Fake tensors and the meta device know the layout that the kernels will give."""
    for operands in samples(op, "cpu"):
        real = op(*operands)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(x) for x in operands))
        meta = op(*(x.to("meta") for x in operands))
        for known in (fake, meta):
            assert (known.shape, known.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride()


# ---------------------------------------------------------------------------- torch.compile


def chain(a: Tensor, b: Tensor, gate_up: Tensor, bias: Tensor) -> Tensor:
    """Every op once, with torch's own work between them."""
    x = fusedcuda.add_relu(a, b)
    x = fusedcuda.add_mul_act(x, 0.5, a, "tanh") + 1
    x = fusedcuda.act_scale_bias(x, bias, b, "sigmoid")
    x = fusedcuda.bias_act(x @ x.transpose(0, 1) @ x, bias, "gelu")
    x = fusedcuda.act_mul(x, b)
    return x * fusedcuda.act_mul_packed(gate_up)


def chain_arguments(batch: int, width: int, device: str) -> list[Tensor]:
    shapes = ((batch, width), (batch, width), (batch, 2 * width), (width,))
    return [torch.randn(shape, device=device).mul_(0.5).requires_grad_() for shape in shapes]


def forward_and_backward(function, arguments: list[Tensor]) -> tuple[Tensor, ...]:
    out = function(*arguments)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), arguments))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_equals_eager(backend, device):
    compiled = torch.compile(chain, fullgraph=True, backend=backend)
    arguments = chain_arguments(5, 16, device)
    actual = forward_and_backward(compiled, arguments)
    expected = forward_and_backward(chain, arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_five_batch_sizes_compile_at_most_twice(op, device):
    """Forward and backward: no size may have been baked into the graph."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(*operands: Tensor) -> Tensor:
        return op(*operands)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 3, 5, 8, 13):
        operands = op.random_operands(batch, 16, device=device)
        if len(operands) > 1:
            operands[-1] = operands[-1][0]
        operands = [leaf(operand) for operand in operands]
        actual = forward_and_backward(compiled, operands)
        torch.testing.assert_close(actual, forward_and_backward(function, operands))
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_compiled_with_other_layouts(op, device):
    """The strides that the shape function promised are the ones that arrive."""

    def function(*operands: Tensor) -> Tensor:
        return op(*operands) * 2

    for operands in samples(op, device):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        leaves = [leaf(operand) for operand in operands]
        actual = forward_and_backward(compiled, leaves)
        expected = forward_and_backward(function, leaves)
        torch.testing.assert_close(actual, expected)
        assert actual[0].stride() == expected[0].stride()


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("numbers", [(0.5, 2.0, 3.5), (1, 2, 3)], ids=["float", "int"])
def test_compiled_with_numbers(position, numbers, device):
    """From the second value on, Dynamo passes a symbol in the place of the number."""
    compiled = torch.compile(fusedcuda.add_mul_act, fullgraph=True, backend="aot_eager")
    for number in numbers:
        operands = ADD_MUL_ACT.random_operands(3, 8, device=device)
        operands[position] = number
        actual, expected = compiled(*operands, "silu"), fusedcuda.add_mul_act(*operands, "silu")
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_compiled_with_mixed_dtypes(position, device):
    compiled = torch.compile(fusedcuda.add_mul_act, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float64, torch.bfloat16):
        operands = ADD_MUL_ACT.random_operands(3, 8, device=device)
        operands[position] = operands[position].to(dtype)
        operands = [leaf(operand) for operand in operands]
        actual = forward_and_backward(compiled, operands)
        torch.testing.assert_close(actual, forward_and_backward(fusedcuda.add_mul_act, operands))


def test_export_keeps_the_op(device):
    """One node in the graph: nothing is decomposed behind the user's back."""

    class Block(torch.nn.Module):
        def forward(self, gate_up: Tensor) -> Tensor:
            return fusedcuda.act_mul_packed(gate_up)

    gate_up = torch.randn(3, 8, device=device)
    with torch.no_grad():
        program = torch.export.export(Block(), (gate_up,))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.fusedcuda.act_mul_packed.default in targets
    torch.testing.assert_close(program.module()(gate_up), fusedcuda.act_mul_packed(gate_up))


def test_an_error_inside_a_compiled_function_names_the_op(device):
    compiled = torch.compile(fusedcuda.bias_act, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="bias_act"):
        compiled(torch.randn(3, 8, device=device), torch.randn(7, device=device))


# ---------------------------------------------------------------------------- vmap


def stack_loop(function, in_dims, operands: list[Tensor]) -> Tensor:
    """What vmap must equal: the function on one sample after the other."""
    size = next(x.shape[d] for x, d in zip(operands, in_dims, strict=True) if d is not None)
    rows = [
        function(
            *(x if d is None else x.select(d, i) for x, d in zip(operands, in_dims, strict=True))
        )
        for i in range(size)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_vmap_equals_a_loop(op, device):
    """Batched at the front, in the middle, at the end, or not at all; vectors and full operands."""
    for dims in itertools.product((0, 1, -1, None), repeat=len(op.operands)):
        if all(d is None for d in dims):
            continue
        operands = op.random_operands(4, 4, 4, device=device)
        actual = torch.func.vmap(op, in_dims=dims)(*operands)
        torch.testing.assert_close(actual, stack_loop(op, dims, operands))
        operands[-1] = torch.randn(4, 4, device=device)  # a vector in each sample, or two
        if dims[-1] != -1:
            actual = torch.func.vmap(op, in_dims=dims)(*operands)
            torch.testing.assert_close(actual, stack_loop(op, dims, operands))


def test_vmap_of_operands_of_different_ranks(device):
    """The batch dimension of a vector must not meet the rows of a matrix."""
    x, bias = torch.randn(5, 5, 5, device=device), torch.randn(5, 5, device=device)
    for op in (BIAS_ACT, ADD_RELU, ACT_MUL):
        torch.testing.assert_close(
            torch.func.vmap(op)(x, bias),
            torch.stack([op(a, b) for a, b in zip(x, bias, strict=True)]),
        )
        scalars = bias[0]
        torch.testing.assert_close(
            torch.func.vmap(op)(x, scalars),
            torch.stack([op(a, b) for a, b in zip(x, scalars, strict=True)]),
        )


def test_vmap_of_the_packed_form(device):
    x = torch.randn(3, 4, 6, device=device)
    for dim in (0, 1):
        actual = torch.func.vmap(ACT_MUL_PACKED, in_dims=dim)(x)
        torch.testing.assert_close(actual, stack_loop(ACT_MUL_PACKED, (dim,), [x]))
    # Batched along the last dimension: the halves are those of each sample.
    x = torch.randn(6, 3, device=device)
    actual = torch.func.vmap(ACT_MUL_PACKED, in_dims=-1)(x)
    torch.testing.assert_close(actual, stack_loop(ACT_MUL_PACKED, (-1,), [x]))


def test_nested_vmap(device):
    a, b = torch.randn(2, 3, 4, device=device), torch.randn(3, 4, device=device)
    actual = torch.func.vmap(torch.func.vmap(ADD_RELU), in_dims=(0, None))(a, b)
    torch.testing.assert_close(actual, ADD_RELU(a, b))


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_gradients_per_sample(op, device):
    """vmap(grad): a shared vector gets one gradient for each sample."""
    operands = op.random_operands(5, 4, 6, device=device)
    dims = [0] * len(operands)
    if len(operands) > 1:
        operands[-1], dims[-1] = operands[-1][0, 0], None
    argnums = tuple(range(len(operands)))

    def loss(*sample: Tensor) -> Tensor:
        return op(*sample, activation=op.activations[-1]).square().sum()

    actual = torch.func.vmap(torch.func.grad(loss, argnums), in_dims=tuple(dims))(*operands)
    for sample in range(5):
        leaves = [
            leaf(x if d is None else x.select(d, sample))
            for x, d in zip(operands, dims, strict=True)
        ]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        for batched, single in zip(actual, expected, strict=True):
            torch.testing.assert_close(batched[sample], single)


def test_functional_gradients(device):
    """torch.func.grad and vjp outside of vmap, and a jacobian, which is vmap over a vjp."""
    x, bias = torch.randn(3, 4, device=device), torch.randn(4, device=device)

    def loss(x: Tensor, bias: Tensor) -> Tensor:
        return ACT_SCALE_BIAS(x, bias, 1.0, activation="gelu")

    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return ACT_SCALE_BIAS.eager(x, bias, 1.0, activation="gelu")

    for transform in (
        lambda f: torch.func.grad(lambda *a: f(*a).sum(), (0, 1)),
        lambda f: torch.func.jacrev(f, (0, 1)),
    ):
        torch.testing.assert_close(transform(loss)(x, bias), transform(eager)(x, bias))


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_forward_mode_is_refused(op, device):
    operands = op.random_operands(3, 4, device=device)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
        torch.func.jvp(op, tuple(operands), tuple(operands))


# ---------------------------------------------------------------------------- DTensor


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_dtensor_is_refused(op, mesh):
    """Never computed from the local shard behind the user's back."""
    refused = pytest.raises((NotImplementedError, RuntimeError), match=r"sharding strategy|DTensor")
    for placement in (Shard(0), Shard(1), Replicate()):
        for requires_grad in (False, True):
            operands = [
                distribute_tensor(x, mesh, [placement]).requires_grad_(requires_grad)
                for x in op.random_operands(2, 4)
            ]
            with refused:
                op(*operands)
    if len(op.operands) > 1:
        with refused:
            op(*op.random_operands(2, 4)[:-1], operands[-1])
