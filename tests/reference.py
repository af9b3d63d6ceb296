"""The pointwise ops written in plain torch, and the rule for how far a fused op may be from them.

The same formula serves twice. In float64 it is the reference. In the dtype of the operands, where
torch rounds after every step, it is the eager op whose error sets the standard. See
`check_function`, which takes any function of tensors, and `check`, which takes a pointwise op.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
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


def leaf(operand: Tensor | float | None, requires_grad: bool = True) -> Tensor | float | None:
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


def need_gpu_memory(gibibytes: float) -> None:
    """Skip the test where the card has less than that left."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gibibytes:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory, found {free:.1f}")


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from each (float64) value to its neighbour in `dtype`."""
    info = torch.finfo(dtype)
    magnitude = torch.maximum(value.abs(), torch.full_like(value, info.tiny))
    # The power of two at or below it: the number without its fraction. (Not torch.ldexp, which is
    # wrong on a GPU that is not the current one: https://github.com/pytorch/pytorch/issues/189567.)
    exponent_bits = torch.tensor(0x7FF0_0000_0000_0000, device=value.device)
    return (magnitude.view(torch.int64) & exponent_bits).view(torch.float64) * info.eps


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
    up. As a whole, of at least 256 elements: the root of the summed squares and the largest error
    are each at most twice those of the eager op, plus one ulp. The largest of fewer than 20,000 is
    luck, and four times the eager op's pass: of two equally exact log-softmax gradients of 1,400
    elements, twice is broken once in 1,300 calls. In float64 the eager op is the reference, and the
    first rule stands alone.

    `computed_for` is the dtype of the arithmetic or, of a pointwise op, that of its output. An ulp
    is that of the coarser one of it and `actual`: the gradient of a 0-d float64 operand beside a
    half-precision tensor is rounded twice.
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
        for norm, order, factor in (
            ("2-norm of the error", 2, 2),
            ("largest error", torch.inf, 2 if actual.numel() >= 20_000 else 4),
        ):
            ours, theirs, allowance = (
                torch.linalg.vector_norm(e, order).item() for e in (error, eager_error, one_ulp)
            )
            assert ours <= factor * theirs + allowance, (
                f"{name} ({dtype}): {norm} {ours:.3g}, eager {theirs:.3g}, one ulp {allowance:.3g}"
            )


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as if it had been stored in `dtype`; the gradient passes unchanged."""
    return value + (value.to(dtype).to(value.dtype) - value).detach()


def gradients(
    function: Callable[..., Tensor | Sequence[Tensor]],
    operands: Sequence[Tensor | float | None],
    wrt: Sequence[int],
    grad_outputs: Tensor | Sequence[Tensor | None] | None,
) -> tuple[Any, dict[int, Tensor]]:
    """What the function returns, and the gradient of each operand whose index is in `wrt`.

    One incoming gradient an output, None for an output that is not used further; None instead of
    them all stands for ones.
    """
    leaves = [leaf(operand, index in wrt) for index, operand in enumerate(operands)]
    out = function(*leaves)
    if not wrt:
        return out, {}
    outputs = as_tuple(out)
    poison(outputs[0].device, *(leaves[i].numel() * leaves[i].element_size() for i in wrt))
    if grad_outputs is None:
        grad_outputs = [torch.ones_like(output) for output in outputs]
    elif isinstance(grad_outputs, Tensor):
        grad_outputs = [grad_outputs]
    used = [pair for pair in zip(outputs, grad_outputs, strict=True) if pair[1] is not None]
    grads = torch.autograd.grad(
        [output for output, _ in used], [leaves[i] for i in wrt], [grad for _, grad in used]
    )
    detached = tuple(output.detach() for output in outputs)
    return detached[0] if isinstance(out, Tensor) else detached, dict(zip(wrt, grads, strict=True))


def check_function(
    name: str,
    fused: Callable[..., Tensor | Sequence[Tensor]],
    eager: Callable[..., Tensor | Sequence[Tensor]],
    tensors: Mapping[str, Tensor | float | None],
    *,
    reference: Callable[..., Tensor | Sequence[Tensor]] | None = None,
    wrt: Sequence[str] | None = None,
    grad_outputs: Sequence[Tensor | None] | None = None,
    expand: Sequence[str] = (),
    magnitudes: Mapping[str, Tensor] | None = None,
    computed_for: torch.dtype | None = None,
) -> Any:
    """Compare a function's outputs and gradients with float64 by `assert_as_good_as_eager`.

    `fused` and `eager` are called with the values of `tensors` in that order. They return a tensor
    or several; every output of `eager` is compared. `reference` is called with the floating tensors
    in float64; it is `eager` unless something else is given, as it must be where the op rounds in
    the middle (see `rounded`). Returns what `fused` returns.

    `wrt` names the tensors that get a gradient (by default all floating ones). `grad_outputs` are
    drawn at random unless given; None stands for an output that is not used. `expand` names the
    tensors that are expanded to the shape of the first output before the float64 gradient is taken,
    so that the terms of a sum are known one by one. `magnitudes` gives the sum of the absolute
    values of the terms where cancellation hides it: by "output 0", "output 1", ... and, for the
    gradients, by the name in `tensors`. `computed_for`: see `assert_as_good_as_eager`; by default
    what the op computes in, float64 for a float64 output and else float32.
    """
    names, operands = list(tensors), list(tensors.values())
    magnitudes = magnitudes or {}
    floating = [
        i for i, t in enumerate(operands) if isinstance(t, Tensor) and t.is_floating_point()
    ]
    indices = floating if wrt is None else [names.index(one) for one in wrt]
    with torch.no_grad():
        shapes = as_tuple(eager(*operands))
    if grad_outputs is None:
        grad_outputs = [
            torch.randn_like(out, memory_format=torch.contiguous_format) for out in shapes
        ]
    if computed_for is None:
        in_double = shapes[0].dtype == torch.float64
        computed_for = torch.float64 if in_double else torch.float32
    device = shapes[0].device
    poison(device, *(out.numel() * out.element_size() for out in shapes))

    result, grads = gradients(fused, operands, indices, grad_outputs)
    eager_result, eager_grads = gradients(eager, operands, indices, grad_outputs)

    # Expanded, the gradient of a broadcast operand is still a list of terms, and their absolute
    # values can be added up as well.
    wide = [t.to(device, torch.float64) if i in floating else t for i, t in enumerate(operands)]
    for one in expand:
        index = names.index(one)
        if index in floating:
            wide[index] = wide[index].expand(shapes[0].shape)
    wide_grads = [None if grad is None else grad.double() for grad in grad_outputs]
    expected, terms = gradients(reference or eager, wide, indices, wide_grads)

    for k, (actual, by_eager, in_float64) in enumerate(
        zip(as_tuple(result), as_tuple(eager_result), as_tuple(expected), strict=True)
    ):
        output = f"output {k}"
        magnitude = magnitudes.get(output, in_float64.abs())
        label = f"{name} {output}"
        assert_as_good_as_eager(label, actual, by_eager, in_float64, magnitude, computed_for)
    for i in indices:
        shape = operands[i].shape
        assert_as_good_as_eager(
            f"{name} gradient of {names[i]}",
            grads[i],
            eager_grads[i],
            terms[i].sum_to_size(shape),
            magnitudes.get(names[i], terms[i].abs().sum_to_size(shape)),
            computed_for,
        )
    return result


def check(
    op: Op,
    operands: Sequence[Tensor | float],
    activation: str = "relu",
    wrt: Sequence[int] | None = None,
    grad_output: Tensor | None = None,
) -> Tensor:
    """`check_function` for a pointwise op; `wrt` gives operands by their position."""

    def fused(*leaves: Tensor | float) -> Tensor:
        return op(*leaves, activation=activation)

    def eager(*leaves: Tensor | float) -> Tensor:
        return op.eager(*leaves, activation=activation)

    with torch.no_grad():
        output_dtype = eager(*operands).dtype
    return check_function(
        op.name,
        fused,
        eager,
        dict(zip(op.operands, operands, strict=True)),
        wrt=None if wrt is None else [op.operands[i] for i in wrt],
        grad_outputs=None if grad_output is None else [grad_output],
        expand=() if op is ACT_MUL_PACKED else op.operands,
        computed_for=output_dtype,
    )
