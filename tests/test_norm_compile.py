"""rms_norm and layer_norm under torch.compile, opcheck, fake tensors, export and DTensor."""

import pytest
import torch
from norms import EPS, LAYER_NORM, NORMS, RMS_NORM, Norm
from reference import as_tuple, by_name, gradients, leaf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fusedcuda

EVERY_NORM = pytest.mark.parametrize("norm", NORMS, ids=by_name)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- registration


def samples(norm: Norm, device: str) -> list[list[Tensor | None]]:
    """Contiguous, permuted, expanded and empty; vectors of another dtype or absent."""
    plain = norm.random_operands(2, 3, 6, device=device)
    x, residual, *vectors = plain
    return [
        plain,
        [x, None, *vectors],
        [x.transpose(0, 1), residual.transpose(0, 1), *vectors],
        [x[:1].expand(x.shape), residual[..., :1].expand(x.shape), *vectors],
        [x.bfloat16(), residual.bfloat16(), *vectors],
        [x, residual, *(None for _ in vectors)],
        norm.random_operands(0, 6, device=device),
    ]


@EVERY_NORM
def test_opcheck_forward(norm, device):
    options = (EPS, 0.0) if norm is RMS_NORM else (EPS,)
    for x, residual, *vectors in samples(norm, device):
        without_statistics = getattr(torch.ops.fusedcuda, norm.name).default
        torch.library.opcheck(without_statistics, (x, *vectors, *options))
        forward = getattr(torch.ops.fusedcuda, f"{norm.name}_forward").default
        torch.library.opcheck(forward, (x, residual, *vectors, *options))


@EVERY_NORM
def test_opcheck_backward(norm, device):
    backward = getattr(torch.ops.fusedcuda, f"{norm.name}_backward").default
    forward = getattr(torch.ops.fusedcuda, f"{norm.name}_forward").default
    for x, residual, *vectors in samples(norm, device):
        options = (EPS, 0.0) if norm is RMS_NORM else (EPS,)
        outputs = forward(x, residual, *vectors, *options)
        h = x if residual is None else outputs[1]
        statistics = outputs[1 if residual is None else 2 :]
        dh = None if residual is None else torch.randn_like(h)
        every_bit = sum(1 << bit for bit, v in enumerate([h, *vectors]) if v is not None)
        masks = {every_bit, 1, every_bit & ~1} - {0}
        for mask in masks:
            last = (0.0, mask) if norm is RMS_NORM else (mask,)
            arguments = (torch.randn_like(h), h, *statistics, *vectors, dh, *last)
            torch.library.opcheck(backward, arguments)


@EVERY_NORM
def test_shapes_strides_and_dtypes_without_data(norm):
    """Fake tensors and the meta device know the layout that the kernels will give."""

    def convert(operands, conversion):
        return [None if t is None else conversion(t) for t in operands]

    for operands in samples(norm, "cpu"):
        real = as_tuple(norm(*operands))
        with FakeTensorMode() as mode:
            fake = as_tuple(norm(*convert(operands, mode.from_tensor)))
        meta = as_tuple(norm(*convert(operands, lambda t: t.to("meta"))))
        for known in (fake, meta):
            for a, b in zip(known, real, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# ---------------------------------------------------------------------------- torch.compile


def block(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each form once, with torch's own work between them."""
    y, h = fusedcuda.rms_norm(x, weight, residual=residual, weight_offset=1.0)
    z, h = fusedcuda.layer_norm(y.tanh(), weight, bias, residual=h)
    return (fusedcuda.layer_norm(z * 2) + fusedcuda.rms_norm(h, weight)) * h


def block_arguments(batch: int, device: str) -> list[Tensor]:
    return [leaf(t) for t in LAYER_NORM.random_operands(batch, 5, 16, device=device)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_equals_eager(backend, device):
    if (backend, device) == ("inductor", "cpu"):
        pytest.skip("half a minute of g++, for code that calls the same operators")
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    arguments = block_arguments(3, device)
    actual = gradients(compiled, arguments, range(4), None)
    expected = gradients(block, arguments, range(4), None)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments), expected[0], rtol=1e-4, atol=1e-4)


def test_five_batch_sizes_compile_at_most_twice(device):
    """Forward and backward: no size may have been baked into the graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 3, 5, 8, 13):
        arguments = block_arguments(batch, device)
        actual = gradients(compiled, arguments, range(4), None)
        torch.testing.assert_close(actual, gradients(block, arguments, range(4), None))
    assert 1 <= counter.frame_count <= 2


@EVERY_NORM
def test_compiled_samples(norm, device):
    for operands in samples(norm, device):
        torch._dynamo.reset()
        compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
        wrt = [i for i, t in enumerate(operands) if t is not None]
        actual = gradients(compiled, operands, wrt, None)
        torch.testing.assert_close(actual, gradients(norm, operands, wrt, None))
        for a, b in zip(as_tuple(actual[0]), as_tuple(norm(*operands)), strict=True):
            assert a.stride() == b.stride()


@EVERY_NORM
def test_compiled_with_an_unused_output(norm, device):
    operands = norm.random_operands(4, 8, device=device)
    for index in (0, 1):

        def one(*tensors: Tensor, index: int = index) -> Tensor:
            return norm(*tensors)[index]

        wrt = range(len(operands)) if index == 0 else (0, 1)
        compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
        actual = gradients(compiled, operands, wrt, None)
        torch.testing.assert_close(actual, gradients(one, operands, wrt, None))


@EVERY_NORM
def test_export_keeps_the_op(norm, device):
    """One node in the graph: nothing is decomposed behind the user's back."""

    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return getattr(fusedcuda, norm.name)(x)

    x = torch.randn(3, 8, device=device)
    with torch.no_grad():
        program = torch.export.export(Block(), (x,))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert getattr(torch.ops.fusedcuda, norm.name).default in targets
    torch.testing.assert_close(program.module()(x), Block()(x))


@EVERY_NORM
def test_an_error_inside_a_compiled_function_names_the_op(norm, device):
    x, residual, *vectors = norm.random_operands(3, 8, device=device)
    vectors[0] = vectors[0][:7]
    with pytest.raises(Exception, match=rf"{norm.name}: weight"):
        torch.compile(norm, fullgraph=True, backend="aot_eager")(x, residual, *vectors)


@EVERY_NORM
def test_compiled_transforms_with_gradients_are_refused(norm, device):
    x = torch.randn(5, 8, device=device)

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: torch.func.vmap(norm)(x).sum())(x)

    with pytest.raises(Exception, match=rf"{norm.name}: torch\.func transforms inside"):
        torch.compile(gradient, backend="aot_eager", fullgraph=True)(x)


# ---------------------------------------------------------------------------- DTensor


# https://github.com/linkedin/Liger-Kernel/issues/826, #868, PR #982
@EVERY_NORM
def test_dtensor_is_refused(norm, mesh):
    """A shard of a row alone would be normalised by its own statistics."""
    refused = pytest.raises((NotImplementedError, RuntimeError), match=r"sharding strategy|DTensor")
    for placement in (Shard(0), Shard(1), Replicate()):
        for requires_grad in (False, True):
            for residual in (False, True):
                operands = norm.random_operands(2, 4, residual=residual)
                x = distribute_tensor(operands[0], mesh, [placement]).requires_grad_(requires_grad)
                with refused:
                    norm(x, *operands[1:])
