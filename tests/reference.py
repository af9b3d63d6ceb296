"""The pointwise ops written in plain torch, and the rule for how far a fused op may be from them.

The same formula serves twice. In float64 it is the reference. In the dtype of the operands, where
torch rounds after every step, it is the eager op whose error sets the standard. See `check`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedcuda

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True)
class Op:
    """One fused op: calling it runs fusedcuda, `eager` and `reference` run the formula."""

    name: str
    operands: tuple[str, ...]
    formula: Callable[..., Tensor]

    @property
    def activations(self) -> tuple[str, ...]:
        return ("relu",) if self.name == "add_relu" else tuple(ACTIVATIONS)

    def __call__(self, *operands: Tensor | float, activation: str = "relu") -> Tensor:
        fused = getattr(fusedcuda, self.name)
        return fused(*operands) if self.name == "add_relu" else fused(*operands, activation)

    def eager(self, *operands: Tensor | float, activation: str = "relu") -> Tensor:
        def act(x: Tensor | float) -> Tensor:
            # torch's activations take no Python number; a 0-d tensor promotes as weakly.
            x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
            return ACTIVATIONS[activation](x)

        return self.formula(act, *operands)

    def random_operands(self, *shape: int, dtype=torch.float32, device="cpu") -> list[Tensor]:
        """One normally distributed tensor per operand; `shape` is the shape of the output."""
        if self.name == "act_mul_packed":
            shape = (*shape[:-1], 2 * shape[-1])
        # Scaled so that the activations are also sampled where they are flat.
        return [2 * torch.randn(shape, dtype=dtype, device=device) for _ in self.operands]


def packed(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


ADD_RELU = Op("add_relu", ("a", "b"), lambda act, a, b: act(a + b))
ADD_MUL_ACT = Op("add_mul_act", ("a", "b", "c"), lambda act, a, b, c: act((a + b) * c))
ACT_SCALE_BIAS = Op(
    "act_scale_bias", ("x", "scale", "bias"), lambda act, x, scale, bias: act(x) * scale + bias
)
BIAS_ACT = Op("bias_act", ("x", "bias"), lambda act, x, bias: act(x + bias))
ACT_MUL = Op("act_mul", ("gate", "up"), lambda act, gate, up: act(gate) * up)
ACT_MUL_PACKED = Op("act_mul_packed", ("gate_up",), packed)

BROADCASTING = (ADD_RELU, ADD_MUL_ACT, ACT_SCALE_BIAS, BIAS_ACT, ACT_MUL)
OPS = (*BROADCASTING, ACT_MUL_PACKED)


def by_name(op: Op) -> str:
    """For `pytest.mark.parametrize(..., ids=by_name)`."""
    return op.name


def leaf(operand: Tensor | float, requires_grad: bool = True) -> Tensor | float:
    """The operand as a new leaf of the graph, in the layout that it has."""
    if not isinstance(operand, Tensor):
        return operand
    return operand.detach().requires_grad_(requires_grad)


def poison(device: torch.device | str, *sizes: int) -> None:
    """Leave NaN in the memory that the next allocations of these sizes (in bytes) will be given."""
    if torch.device(device).type == "cuda":
        blocks = [
            torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device=device)
            for size in (*sizes, 512, 1 << 16, 1 << 20)
            for _ in range(3)
        ]
        del blocks


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from each (float64) value to its neighbour in `dtype`."""
    info = torch.finfo(dtype)
    smallest = torch.full_like(value, info.tiny)
    exponent = torch.frexp(torch.maximum(value.abs(), smallest)).exponent - 1
    return torch.ldexp(torch.full_like(value, info.eps), exponent)


def assert_as_good_as_eager(
    name: str,
    actual: Tensor,
    eager: Tensor,
    expected: Tensor,
    magnitude: Tensor,
    computed_for: torch.dtype,
) -> None:
    """Assert that `actual` is as near to `expected` (float64) as one rounding at the end allows.

    Every element: one ulp, plus 32 roundings of the arithmetic (fp32, or fp64 where the op's output
    is fp64) relative to `magnitude`, the sum of the absolute values of the terms that were added
    up. As a whole: the largest error and the root of the summed squares are each at most twice
    those of the eager op, plus one ulp. Fewer than 256 elements are too few to judge the eager op
    by, and in float64 the eager op is the reference; there the first rule stands alone.

    `computed_for` is the dtype of the op's output. An ulp is that of the coarser one of it and
    `actual`: the gradient of a 0-d float64 operand beside a half-precision tensor is rounded twice.
    """
    dtype = actual.dtype
    assert dtype == eager.dtype, f"{name}: {dtype}, torch gives {eager.dtype}"
    assert actual.shape == eager.shape, f"{name}: {actual.shape}, torch gives {eager.shape}"
    assert actual.device == eager.device, f"{name}: {actual.device}, torch gives {eager.device}"
    assert expected.isfinite().all(), "the rule is for finite values"
    if actual.numel() == 0:
        return
    actual = actual.to(expected.device)
    error = (actual.double() - expected).abs()
    one_ulp = torch.maximum(ulp(expected, dtype), ulp(expected, computed_for))

    in_double = computed_for == torch.float64
    arithmetic = torch.finfo(torch.float64 if in_double else torch.float32).eps
    scale = torch.maximum(magnitude, torch.clamp(expected.abs().max(), min=1.0))
    excess = error - (one_ulp + 32 * arithmetic * scale)
    if not (excess <= 0).all():  # written so that NaN fails
        worst = excess.nan_to_num(torch.inf).argmax().item()
        raise AssertionError(
            f"{name} ({dtype}): element {worst} of {tuple(actual.shape)} is "
            f"{actual.flatten()[worst].item()}, expected {expected.flatten()[worst].item()}, "
            f"ulp {one_ulp.flatten()[worst].item():.3g}"
        )

    if not in_double and actual.numel() >= 256:
        eager_error = (eager.to(expected.device).double() - expected).abs()
        for norm, order in (("largest error", torch.inf), ("2-norm of the error", 2)):
            ours, theirs, allowance = (
                torch.linalg.vector_norm(e, order).item() for e in (error, eager_error, one_ulp)
            )
            assert ours <= 2 * theirs + allowance, (
                f"{name} ({dtype}): {norm} {ours:.3g}, eager {theirs:.3g}, one ulp {allowance:.3g}"
            )


def gradients(
    function: Callable[..., Tensor],
    operands: Sequence[Tensor | float],
    wrt: Sequence[int],
    grad_output: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """The output, and the gradient of each operand named in `wrt`."""
    leaves = [leaf(operand, index in wrt) for index, operand in enumerate(operands)]
    out = function(*leaves)
    if not wrt:
        return out, {}
    poison(out.device, *(leaves[i].numel() * leaves[i].element_size() for i in wrt))
    grad_output = grad_output if grad_output is not None else torch.ones_like(out)
    grads = torch.autograd.grad(out, [leaves[i] for i in wrt], grad_output)
    return out.detach(), dict(zip(wrt, grads, strict=True))


def check(
    op: Op,
    operands: Sequence[Tensor | float],
    activation: str = "relu",
    wrt: Sequence[int] | None = None,
    grad_output: Tensor | None = None,
) -> Tensor:
    """Compare output and gradients with float64, by the rule of `assert_as_good_as_eager`.

    `wrt` says which operands require a gradient (by default all tensors), `grad_output` is drawn
    at random unless it is given. Returns the output of the fused op.
    """
    if wrt is None:
        wrt = [i for i, operand in enumerate(operands) if isinstance(operand, Tensor)]
    with torch.no_grad():
        eager_out = op.eager(*operands, activation=activation)
    if grad_output is None:
        grad_output = torch.randn_like(eager_out, memory_format=torch.contiguous_format)
    device = eager_out.device
    poison(device, eager_out.numel() * eager_out.element_size())

    def fused(*leaves: Tensor | float) -> Tensor:
        return op(*leaves, activation=activation)

    def eager(*leaves: Tensor | float) -> Tensor:
        return op.eager(*leaves, activation=activation)

    out, grads = gradients(fused, operands, wrt, grad_output)
    eager_out, eager_grads = gradients(eager, operands, wrt, grad_output)

    # Each operand at the size of the output, so that the gradient of a broadcast operand is here
    # still a list of terms, and their absolute values can be added up as well.
    wide = [
        operand
        if not isinstance(operand, Tensor)
        else operand.to(device, torch.float64)
        if op is ACT_MUL_PACKED
        else operand.to(device, torch.float64).expand(eager_out.shape)
        for operand in operands
    ]
    expected, terms = gradients(eager, wide, wrt, grad_output.double())
    assert_as_good_as_eager(
        f"{op.name} output", out, eager_out, expected, expected.abs(), out.dtype
    )
    for i in wrt:
        shape = operands[i].shape
        assert_as_good_as_eager(
            f"{op.name} gradient of {op.operands[i]}",
            grads[i],
            eager_grads[i],
            terms[i].sum_to_size(shape),
            terms[i].abs().sum_to_size(shape),
            out.dtype,
        )
    return out
