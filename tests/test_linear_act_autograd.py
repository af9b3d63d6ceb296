"""Gradients of linear_act, linear_residual and mlp in autograd, autocast and torch.func."""

import gc
import itertools
import time
from collections.abc import Callable

import pytest
import torch
from linears import eager, linear, operands
from reference import ACTIVATIONS, by_name, gradients, leaf
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcuda


class Op:
    """A function, the same in plain torch, and the names of its tensors."""

    def __init__(self, name: str, names: tuple[str, ...], formula: Callable[..., Tensor]) -> None:
        self.name, self.names, self.formula = name, names, formula

    def __call__(self, *tensors: Tensor | None, activation: str = "silu") -> Tensor:
        options = () if self.name == "linear_residual" else (activation,)
        return getattr(fusedcuda, self.name)(*tensors, *options)

    def eager(self, *tensors: Tensor | None, activation: str = "silu") -> Tensor:
        return self.formula(activation, *tensors)

    def random_operands(self, *rows: int, dtype=torch.float64, device="cpu") -> list[Tensor]:
        x, weight, bias = operands(*rows, n=6, k=5, dtype=dtype, device=device)
        if self.name == "linear_act":
            return [x, weight, bias]
        if self.name == "linear_residual":
            return [x, weight, bias, torch.randn(*rows, 6, device=device).to(dtype)]
        return [x, weight, bias, *operands(1, n=4, k=6, dtype=dtype, device=device)[1:]]


LINEAR_ACT = Op("linear_act", ("x", "weight", "bias"), lambda act, x, w, b: eager(x, w, b, act))
LINEAR_RESIDUAL = Op(
    "linear_residual",
    ("x", "weight", "bias", "residual"),
    lambda act, x, w, b, r: linear(x, w, b) + r,
)
MLP = Op(
    "mlp",
    ("x", "w1", "b1", "w2", "b2"),
    lambda act, x, w1, b1, w2, b2: linear(eager(x, w1, b1, act), w2, b2),
)
OPS = (LINEAR_ACT, LINEAR_RESIDUAL, MLP)
EVERY_OP = pytest.mark.parametrize("op", OPS, ids=by_name)
KINDS = ("relu", "gelu_tanh", "none")  # what is saved: a bit mask, z, nothing


def leaves_of(op: Op, *rows: int, dtype=torch.float64, device: str) -> list[Tensor]:
    return [leaf(t) for t in op.random_operands(*rows, dtype=dtype, device=device)]


def unlike_zero(op: Op, *rows: int, device: str) -> list[Tensor]:
    """Operands whose sums are not where relu bends."""
    return [leaf(t + 0.01 * torch.rand_like(t)) for t in op.random_operands(*rows, device=device)]


# ---------------------------------------------------------------------------- which gradients


@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY_OP
def test_gradcheck(op, activation, device):
    if op is LINEAR_RESIDUAL and activation != "none":
        pytest.skip("has no activation")

    def function(*tensors: Tensor) -> Tensor:
        return op(*tensors, activation=activation)

    for rows in ((3,), (2, 2), ()):
        given = unlike_zero(op, *rows, device=device)
        assert torch.autograd.gradcheck(function, given, fast_mode=True)
    biases = ("bias", "b1", "b2")
    without = [None if n in biases else t for n, t in zip(op.names, given, strict=True)]
    assert torch.autograd.gradcheck(function, without, fast_mode=True)


@pytest.mark.parametrize("activation", KINDS)
def test_gradcheck_of_batched_weights(activation, device):
    shapes = ((2, 3, 5), (2, 6, 5), (2, 6)), ((2, 5), (2, 6, 5), (6,)), ((2, 3, 2, 5), (2, 6, 5))
    for given in shapes:
        tensors = [leaf(torch.randn(s, dtype=torch.float64, device=device)) for s in given]
        assert torch.autograd.gradcheck(
            lambda *t: fusedcuda.linear_act(*t, activation=activation), tensors, fast_mode=True
        )


@pytest.mark.parametrize("activation", KINDS)
@EVERY_OP
def test_each_choice_of_gradients_gives_the_same_values(op, activation, device):
    """The mask decides what is computed, not what comes out; nothing else gets a gradient."""
    given = op.random_operands(7, device=device)
    dy = torch.randn_like(op(*given))

    def function(*tensors: Tensor) -> Tensor:
        return op(*tensors, activation=activation)

    _, expected = gradients(function, given, range(len(given)), dy)
    for bits in range(1, 1 << len(given)):
        wrt = [i for i in range(len(given)) if bits >> i & 1]
        _, actual = gradients(function, given, wrt, dy)
        for i in wrt:
            torch.testing.assert_close(actual[i], expected[i])
    for chosen in range(len(given)):
        leaves = [leaf(t, i == chosen) for i, t in enumerate(given)]
        function(*leaves).backward(dy)
        assert [t.grad is not None for t in leaves] == [i == chosen for i in range(len(given))]


def saved_by(function: Callable[[], Tensor]) -> list[Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function()
    return saved


@pytest.mark.parametrize("activation", KINDS)
def test_only_what_the_gradients_need_is_saved(activation, device):
    x, weight, bias = operands(4, n=6, k=5, dtype=torch.bfloat16, device=device)
    kept = {"relu": [(4, 16)], "gelu_tanh": [(4, 6)], "none": []}[activation]
    for need_x, need_weight, need_bias in itertools.product([False, True], repeat=3):
        if not (need_x or need_weight or need_bias):
            continue
        given = leaf(x, need_x), leaf(weight, need_weight), leaf(bias, need_bias)
        saved = saved_by(lambda given=given: fusedcuda.linear_act(*given, activation))
        expected = [(4, 5)] * need_weight + [(6, 5)] * need_x + kept
        assert [tuple(t.shape) for t in saved] == expected
        if activation == "relu":
            assert saved[-1].dtype == torch.uint8


def test_only_what_the_gradients_need_is_saved_by_mlp(device):
    shapes = {"x": (4, 5), "w1": (6, 5), "saved": (4, 16), "h": (4, 6), "w2": (4, 6)}
    for wanted, expected in (
        (("x",), ("w1", "saved", "w2")),
        (("w1",), ("x", "saved", "w2")),
        (("b1",), ("saved", "w2")),
        (("w2",), ("h",)),
        (("b2",), ()),
        (MLP.names, ("x", "w1", "saved", "h", "w2")),
    ):
        given = MLP.random_operands(4, device=device)
        leaves = [leaf(t, name in wanted) for name, t in zip(MLP.names, given, strict=True)]
        saved = saved_by(lambda leaves=leaves: fusedcuda.mlp(*leaves, "relu"))
        assert [tuple(t.shape) for t in saved] == [shapes[name] for name in expected]


def test_a_frozen_weight_may_change_before_the_backward(device):
    """It is not saved where x needs no gradient, nor is x where the weight needs none."""
    x, weight, bias = LINEAR_ACT.random_operands(4, device=device)
    for trained, frozen in ((0, 1), (1, 0)):
        given = [x.clone(), weight.clone(), bias.clone()]
        given[trained].requires_grad_()
        y = fusedcuda.linear_act(*given, "silu")
        (expected,) = torch.autograd.grad(y.sum(), given[trained], retain_graph=True)
        given[trained].data.zero_()
        (actual,) = torch.autograd.grad(y.sum(), given[trained], retain_graph=True)
        assert torch.equal(actual, expected)
        given[frozen].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@EVERY_OP
def test_without_a_gradient_to_ask_for_there_is_no_graph(op, device):
    frozen = op.random_operands(4, device=device)
    trained = [leaf(t) for t in frozen]
    assert not op(*frozen).requires_grad
    assert op(*trained).requires_grad
    with torch.no_grad():
        assert not op(*trained).requires_grad
    with torch.inference_mode():
        inference = op(*trained)
        assert inference.is_inference()
        x = frozen[0].clone()
    torch.testing.assert_close(op(x, *frozen[1:]), op.eager(x.clone(), *frozen[1:]))
    torch.testing.assert_close(inference.clone(), op.eager(*frozen))


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


@EVERY_OP
def test_an_incoming_gradient_that_is_undefined(op, device):
    """What comes behind may say that it has no gradient; then there is none here."""
    given = leaves_of(op, 4, device=device)
    NoGradient.apply(op(*given)).sum().backward()
    assert all(t.grad is None for t in given)


# ---------------------------------------------------------------------------- the graph


@EVERY_OP
def test_the_output_may_be_changed_in_place(op, device):
    """It is not saved."""
    given = leaves_of(op, 4, device=device)
    for activation in KINDS:
        expected = torch.autograd.grad(op(*given, activation=activation).sum(), given)
        doubled = torch.autograd.grad(op(*given, activation=activation).mul_(2).sum(), given)
        for once, twice in zip(expected, doubled, strict=True):
            torch.testing.assert_close(twice, 2 * once)


@EVERY_OP
def test_backward_twice_and_accumulation(op, device):
    given = leaves_of(op, 4, device=device)
    out = op(*given).square().sum()
    out.backward(retain_graph=True)
    once = [t.grad.clone() for t in given]
    out.backward()
    for operand, grad in zip(given, once, strict=True):
        torch.testing.assert_close(operand.grad, 2 * grad, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@EVERY_OP
def test_double_backward_raises(op, device):
    given = leaves_of(op, 4, device=device)
    grads = torch.autograd.grad(op(*given).square().sum(), given, create_graph=True)
    for grad in grads[:2]:
        with pytest.raises(RuntimeError, match=rf"^{op.name}: a second derivative"):
            torch.autograd.grad(grad.sum(), given[0], retain_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
@EVERY_OP
def test_checkpoint(op, use_reentrant, device):
    given = leaves_of(op, 4, device=device)
    expected = torch.autograd.grad(op(*given).tanh().sum(), given)
    block = checkpoint(lambda *t: op(*t).tanh(), *given, use_reentrant=use_reentrant)
    block.sum().backward()
    torch.testing.assert_close([t.grad for t in given], list(expected))


@EVERY_OP
def test_no_tensor_outlives_its_graph(op, device):
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    given = leaves_of(op, 4, device=device)
    before = tensors()
    for _ in range(3):
        torch.autograd.grad(op(*given).sum(), given)
    # The engine's thread for the GPU may let go of the last gradients after grad() has returned.
    deadline = time.monotonic() + 5
    while tensors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tensors() <= before  # fewer, where leftovers of another test went meanwhile


# ---------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@EVERY_OP
def test_autocast_casts_as_for_torchs_linear_layers(op, autocast_dtype, device):
    """The result is that of the cast operands; the gradients have the operands' own dtypes."""
    given = [leaf(t) for t in op.random_operands(7, dtype=torch.float32, device=device)]
    dy = torch.randn(op(*given).shape, device=device).to(autocast_dtype)
    cast = [leaf(t.to(autocast_dtype)) for t in given]
    expected, expected_grads = gradients(op, cast, range(len(cast)), dy)
    with torch.autocast(device, dtype=autocast_dtype):
        out, grads = gradients(op, given, range(len(given)), dy)
        inner = op(given[0], cast[1], *given[2:])  # operands of two dtypes
        assert torch.nn.functional.linear(*given[:3]).dtype == out.dtype
    assert torch.equal(out, expected)
    assert torch.equal(inner, expected)
    for i, t in enumerate(given):
        assert grads[i].dtype == t.dtype
        assert torch.equal(grads[i], expected_grads[i].float())


@EVERY_OP
def test_autocast_leaves_float64_alone(op, device):
    given = leaves_of(op, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = op(*given)
    assert out.dtype == torch.float64
    assert torch.equal(out, op(*given))


@EVERY_OP
def test_autocast_does_not_reach_into_the_operators(op, device):
    """float32 through a disabled region, and a backward inside an enabled one, stay float32."""
    given = [leaf(t) for t in op.random_operands(7, dtype=torch.float32, device=device)]
    out = op(*given)
    expected = torch.autograd.grad(out.sum(), given, retain_graph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = torch.autograd.grad(out.sum(), given)
        with torch.autocast(device, enabled=False):
            assert op(*given).dtype == torch.float32
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------- torch.func


@pytest.mark.parametrize("activation", KINDS)
@EVERY_OP
def test_vmap_of_grad(op, activation, device):
    """Per-sample gradients of everything, with shared operands and operands of each sample."""
    if op is LINEAR_RESIDUAL and activation != "none":
        pytest.skip("has no activation")
    samples = [op.random_operands(3, device=device) for _ in range(4)]
    own = [torch.stack(tensors) for tensors in zip(*samples, strict=True)]
    wrt = tuple(range(len(own)))

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *t: function(*t, activation=activation).sin().sum()

    choices = [
        wrt,
        (0,),
        (1,),
        (2,),
        wrt[:1] + wrt[2:],
        wrt[1:],
        (len(own) - 1,),
    ]
    for batched in choices:
        dims = tuple(0 if i in batched else None for i in wrt)
        given = [t if i in batched else t[0] for i, t in enumerate(own)]
        for argnums in (wrt, (0,), (1,)):
            actual, expected = (
                torch.func.vmap(torch.func.grad(loss(f), argnums), dims)(*given)
                for f in (op, op.eager)
            )
            torch.testing.assert_close(actual, expected)
    moved = [own[0].movedim(0, 1), *own[1:]]
    actual, expected = (
        torch.func.vmap(f, (1, *(0 for _ in own[1:])))(*moved) for f in (op, op.eager)
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("rows", [(), (3,)], ids=str)
def test_vmap_of_batched_weights(activation, rows, device):
    samples = [
        operands(*rows, n=6, k=5, dtype=torch.float64, device=device, batch=(2,)) for _ in range(4)
    ]
    x, weight, bias = (torch.stack(tensors) for tensors in zip(*samples, strict=True))

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *t: function(*t, activation).sin().sum()

    for given, dims in (
        ((x, weight, bias), (0, 0, 0)),
        ((x, weight[0], bias[0]), (0, None, None)),
        ((x, weight[0], bias), (0, None, 0)),
        ((x[0], weight, bias[0]), (None, 0, None)),
        ((x, weight, bias[:, 0]), (0, 0, 0)),  # one bias for the weights of a sample
        ((x, weight, bias[0, 0]), (0, 0, None)),
    ):
        actual, expected = (
            torch.func.vmap(torch.func.grad(loss(f), (0, 1, 2)), dims)(*given)
            for f in (fusedcuda.linear_act, eager)
        )
        torch.testing.assert_close(actual, expected)


@EVERY_OP
def test_grad_over_vmap(op, device):
    """Inside vmap a tensor of an outer grad level does not say that it needs a gradient."""
    x, *rest = op.random_operands(5, device=device)
    dims = (0, *(0 if name == "residual" else None for name in op.names[1:]))

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *t: torch.func.vmap(function, dims)(*t).sin().sum()

    wrt = tuple(range(len(op.names)))
    actual, expected = (torch.func.grad(loss(f), wrt)(x, *rest) for f in (op, op.eager))
    torch.testing.assert_close(actual, expected)


@EVERY_OP
def test_forward_mode_is_refused(op, device):
    x, *rest = op.random_operands(4, device=device)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(lambda x: op(x, *rest), (x,), (x,))
