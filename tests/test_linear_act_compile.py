"""linear_act, linear_residual and mlp under torch.compile, opcheck, fake tensors and DTensor."""

import itertools

import pytest
import torch
from linears import exact, operands, weights
from reference import ACTIVATIONS, gradients, leaf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fusedcuda

CODES = fusedcuda.ops._activations.ACTIVATIONS
KINDS = ("relu", "gelu_tanh", "none")  # what is saved: a bit mask, z, nothing
EVERY_KIND = pytest.mark.parametrize("activation", KINDS)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- registration


def samples(device: str, n: int = 9) -> list[list[Tensor | None]]:
    """x, weight and bias: contiguous, permuted, expanded, batched, of 16 bits, without bias."""
    x, weight, bias = plain = operands(2, 3, n=n, k=6, device=device)
    batched = operands(4, n=n, k=6, device=device, batch=(3,))
    return [
        plain,
        [x[0, 0], weight, bias],
        [x.transpose(0, 1), weight.t().contiguous().t(), bias],
        [x[:1].expand(x.shape), weight[:1].expand(n, 6), bias],
        [x.bfloat16(), weight.bfloat16(), None],
        batched,
        [batched[0][:, 0], batched[1], bias],
        operands(0, n=n, k=6, device=device),
    ]


def test_opcheck_forward(device):
    for (x, weight, bias), activation in zip(samples(device), itertools.cycle(KINDS), strict=False):
        residual = x.new_ones(*x.shape[:-1], 9)
        for given in ((x, weight, bias, None), (x, weight, bias, residual)):
            torch.library.opcheck(
                torch.ops.fusedcuda.linear_act.default, (*given, CODES[activation], False)
            )


@EVERY_KIND
def test_opcheck_forward_and_backward_with_what_is_saved(activation, device):
    # All of what is saved is compared, and the mask of a ReLU has bits of no element in a row of
    # another length than a multiple of 128.
    for x, weight, bias in samples(device, n=128 if activation == "relu" else 9):
        options = (CODES[activation], False)
        forward = torch.ops.fusedcuda.linear_act_forward.default
        torch.library.opcheck(forward, (x, weight, bias, *options))
        y, *saved = forward(x, weight, bias, *options)
        arguments = (torch.randn_like(y), x, weight, saved[0] if saved else None)
        for mask in (0b111, 0b001, 0b110) if x.dim() == 3 and x.is_contiguous() else (0b111,):
            torch.library.opcheck(
                torch.ops.fusedcuda.linear_act_backward.default,
                (*arguments, CODES[activation], mask, False),
            )


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_opcheck_mlp_backward(activation, device):
    for rows in ((4,), (2, 3), ()):
        x, w1, b1 = operands(*rows, n=6, k=5, device=device)
        h, saved = torch.ops.fusedcuda.linear_act_forward(x, w1, b1, CODES[activation], False)
        w2 = weights(3, 6, device=device)
        dy = exact(*rows, 3, device=device)
        for mask in (0b11111, 0b00001, 0b11000, 0b10110):
            torch.library.opcheck(
                torch.ops.fusedcuda.mlp_backward.default,
                (dy, x, w1, saved, h, w2, CODES[activation], mask, False),
            )


@EVERY_KIND
def test_shapes_strides_and_dtypes_without_data(activation):
    """Fake tensors and the meta device know the layout that the kernels will give."""

    def convert(given, conversion):
        return [None if t is None else conversion(t) for t in given]

    def outputs(given: list[Tensor | None]) -> list[Tensor]:
        raw = torch.ops.fusedcuda.linear_act_forward(*given, CODES[activation], False)
        return [fusedcuda.linear_act(*given, activation), *raw]

    for given in samples("cpu"):
        real = outputs(given)
        with FakeTensorMode() as mode:
            fake = outputs(convert(given, mode.from_tensor))
        meta = outputs(convert(given, lambda t: t.to("meta")))
        for known in (fake, meta):
            for a, b in zip(known, real, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_meta_tensors_under_autocast():
    """There is no autocast for them, as for torch's linear layers."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = [t.to("meta") for t in operands(4, n=3, k=2)]
        assert fusedcuda.linear_act(*given).dtype == torch.nn.functional.linear(*given).dtype


# ---------------------------------------------------------------------------- torch.compile


def block(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Each function, and each kind of saved tensor, with torch's own work between them."""
    h = fusedcuda.mlp(x, w1, b1, w2, b2)
    h = fusedcuda.linear_residual(fusedcuda.linear_act(h, w1, b1, "relu").tanh(), w2, b2, h)
    return (
        fusedcuda.mlp(h, w1, None, w2, None, "none")
        * fusedcuda.linear_act(x, w2.t(), None)[..., :5]
    )


def block_arguments(batch: int, device: str) -> list[Tensor]:
    given = [
        *operands(batch, 4, n=7, k=5, device=device),
        *operands(1, n=5, k=7, device=device)[1:],
    ]
    return [leaf(t) for t in given]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_equals_eager(backend, device):
    if (backend, device) == ("inductor", "cpu"):
        pytest.skip("half a minute of g++, for code that calls the same operators")
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    arguments = block_arguments(3, device)
    actual = gradients(compiled, arguments, range(5), None)
    expected = gradients(block, arguments, range(5), None)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments), expected[0], rtol=1e-4, atol=1e-4)


def test_five_batch_sizes_compile_at_most_twice(device):
    """Forward and backward: no size may have been baked into the graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 3, 5, 8, 13):
        arguments = block_arguments(batch, device)
        actual = gradients(compiled, arguments, range(5), None)
        torch.testing.assert_close(actual, gradients(block, arguments, range(5), None))
    assert 1 <= counter.frame_count <= 2


def check_compiled(given: list[Tensor | None], activation: str, wrt: list[int]) -> None:
    def function(*tensors: Tensor) -> Tensor:
        return fusedcuda.linear_act(*tensors, activation)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = gradients(compiled, given, wrt, None)
    torch.testing.assert_close(actual, gradients(function, given, wrt, None))
    assert actual[0].is_contiguous()


def test_compiled_samples(device):
    for given, activation in zip(samples(device), itertools.cycle(KINDS), strict=False):
        check_compiled(given, activation, [i for i, t in enumerate(given) if t is not None])


@EVERY_KIND
def test_compiled_choices_of_gradients(activation, device):
    """Each is another graph, with stand-ins for what is not saved."""
    for wrt in ([0], [1], [2]):
        check_compiled(samples(device)[0], activation, wrt)


def test_compiled_choices_of_mlp(device):
    x, w1, b1 = operands(4, n=6, k=5, device=device)
    given = [x, w1, b1, *operands(1, n=3, k=6, device=device)[1:]]
    for wrt in ([0], [1], [3], [4], [0, 3]):
        torch._dynamo.reset()
        compiled = torch.compile(fusedcuda.mlp, fullgraph=True, backend="aot_eager")
        actual = gradients(compiled, given, wrt, None)
        torch.testing.assert_close(actual, gradients(fusedcuda.mlp, given, wrt, None))


def test_compiled_autocast(device):
    given = [leaf(t) for t in operands(4, n=6, k=5, device=device)]

    def function(*tensors: Tensor) -> Tensor:
        return fusedcuda.linear_act(*tensors, "silu")

    def inside(*tensors: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return function(*tensors)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert compiled(*given).dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = gradients(function, given, range(3), None)
        actual = gradients(compiled, given, range(3), None)
    torch.testing.assert_close(actual, expected)
    assert actual[0].dtype == torch.bfloat16
    assert compiled(*given).dtype == torch.float32
    inner = torch.compile(inside, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(inner, given, range(3), None), expected)


def test_export_keeps_the_op(device):
    """One node in the graph: nothing is decomposed behind the user's back."""
    layer = fusedcuda.nn.LinearAct(5, 6, activation="gelu", device=device).eval()
    x = torch.randn(3, 5, device=device)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.fusedcuda.linear_act.default]
    torch.testing.assert_close(program.module()(x), layer(x))


def test_an_error_inside_a_compiled_function_names_the_op(device):
    x, weight, bias = operands(3, n=6, k=5, device=device)
    for function, given, message in (
        (fusedcuda.linear_act, (x, weight[:, :4], bias), "linear_act: weight"),
        (fusedcuda.linear_residual, (x, weight, bias, x), "linear_residual: residual"),
        (fusedcuda.mlp, (x, weight, bias, weight, None), "mlp: w2"),
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(function, fullgraph=True, backend="aot_eager")(*given)


def test_compiled_transforms_with_gradients_are_refused(device):
    _, weight, _ = operands(3, n=6, k=5, device=device)

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(
            lambda x: torch.func.vmap(lambda row: fusedcuda.linear_act(row, weight))(x).sum()
        )(x)

    with pytest.raises(Exception, match=r"linear_act: torch\.func transforms inside"):
        torch.compile(gradient, backend="aot_eager", fullgraph=True)(exact(3, 5, device=device))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_compile(activation, device):
    given = operands(4, n=6, k=5, device=device)
    compiled = torch.compile(fusedcuda.linear_act, fullgraph=True, backend="eager")
    expected = fusedcuda.linear_act(*given, activation)
    torch.testing.assert_close(compiled(*given, activation), expected)


# ---------------------------------------------------------------------------- DTensor


def test_dtensor_is_refused(mesh):
    """A shard along K alone would be a part of the sum."""
    refused = pytest.raises((NotImplementedError, RuntimeError), match=r"sharding strategy|DTensor")
    x, weight, bias = operands(4, n=6, k=8)
    for placement in (Shard(0), Shard(1), Replicate()):
        for requires_grad in (False, True):
            sharded = distribute_tensor(weight, mesh, [placement]).requires_grad_(requires_grad)
            with refused:
                fusedcuda.linear_act(x, sharded, bias)
