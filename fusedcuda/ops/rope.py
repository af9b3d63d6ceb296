"""Rotary position embedding (RoPE) of queries and keys, in one launch.

A pair of elements ``(a, b)`` of a head is turned by the angle of its position::

    a' = a * cos - b * sin        b' = b * cos + a * sin

Eager PyTorch takes some ten kernels for it. Source: Su et al., RoFormer, arXiv:2104.09864. Kernel:
``csrc/kernels/rope.cu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._library import define, define_host, functorch_active
from ._call import Operator
from ._operands import check_dtype, compute_dtype
from ._rows import call

FAMILY = "rope"

# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """``q`` and ``k`` turned by the angles of their positions.

    - ``q`` is ``(B, H, S, D)`` and ``k`` ``(B, Hk, S, D)``, of one dtype, with any strides: pass a
      ``(B, S, H, D)`` tensor as ``x.transpose(1, 2)``. ``Hk`` may differ from ``H`` (GQA); ``D`` is
      even. The outputs are laid out as ``torch.empty_like`` lays them out, that is as the inputs.
    - ``cos`` and ``sin`` are ``(S, D)``, ``(1, S, D)`` or ``(B, S, D)``, or ``D/2`` wide, with one
      value for each pair. Both have one dtype, which may be another than that of ``q``: float32
      tables are the accurate ones. They get no gradient.
    - Pairs are ``(i, i + D/2)``, as in Hugging Face's models (``x * cos + rotate_half(x) * sin``),
      or with ``interleaved`` ``(2i, 2i + 1)``, as in GPT-J. Tables of width ``D`` are read at the
      pair's own two positions and may differ between them.
    - Dtypes: float64, float32, float16, bfloat16. Computed in float32 (float64 for float64 ``q``)
      and rounded once, to the dtype of ``q``, where eager PyTorch would promote it to that of the
      tables. Autocast changes nothing.

    Memory: reads and writes ``q`` and ``k`` once; so does the backward, which turns the gradients
    back. Saved for backward: ``cos`` and ``sin``. Differentiable any number of times.

    ``TypeError``: an operand that is not a floating tensor, or dtypes that do not match.
    ``ValueError``: shapes that do not fit, different devices. ``RuntimeError``: ``cos`` or ``sin``
    requires a gradient.

    >>> q, k = fusedcuda.rope(q, k, cos, sin)
    """
    return call(ROPE, (q, k, cos, sin), interleaved)


def rope_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`rope` in place, for inference: overwrites ``q`` and ``k`` and returns them.

    Turns a part of each head too: ``rope_(q[..., :rotary], k[..., :rotary], cos, sin)``.

    It records no gradient: where one is needed it raises ``RuntimeError`` (under
    ``torch.no_grad()`` none is), because autograd takes no function that overwrites two views, and
    queries and keys usually are views. So do expanded tensors, and ``q`` and ``k`` that are the
    same memory, with ``ValueError``.
    """
    if torch.is_grad_enabled():
        _refuse_gradients(q, k, cos, sin)
    if forward_ad._current_level >= 0 or functorch_active():
        raise NotImplementedError(
            "rope_: works neither inside torch.func transforms nor in forward mode; use rope"
        )
    if torch.compiler.is_compiling():
        check_in_place(q, k, cos, sin)
        _rope_in_place(q, k, cos, sin, interleaved)
        return q, k
    try:
        _rope_in_place(q, k, cos, sin, interleaved)
    except (TypeError, ValueError, RuntimeError):
        check_in_place(q, k, cos, sin)
        raise
    # So that autograd notices if it had saved what is overwritten.
    torch.autograd.graph.increment_version((q, k))
    return q, k


# --------------------------------------------------------------------------------------------------
# Checks: each message names the op, the argument, what was expected and what came
# --------------------------------------------------------------------------------------------------


def _check(op: str, q: Any, k: Any, cos: Any, sin: Any) -> None:
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor; got {type(tensor).__name__}")
        check_dtype(op, name, tensor)
        if tensor.device != q.device:
            raise ValueError(
                f"{op}: {name} must be on {q.device} as q is; got one on {tensor.device}"
            )
    for name, tensor, of, model in (("k", k, "q", q), ("sin", sin, "cos", cos)):
        if tensor.dtype != model.dtype:
            raise TypeError(
                f"{op}: {name} must be a {model.dtype} tensor as {of} is; got {tensor.dtype}"
            )
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4 or tensor.shape[3] % 2 != 0:
            raise ValueError(
                f"{op}: {name} must have shape (batch, heads, length, even head_dim); "
                f"got {tuple(tensor.shape)}"
            )
    batch, _, length, dim = q.shape
    if (k.shape[0], *k.shape[2:]) != (batch, length, dim):
        raise ValueError(
            f"{op}: k must have shape ({batch}, any, {length}, {dim}) to go with q of shape "
            f"{tuple(q.shape)}; got {tuple(k.shape)}"
        )
    _check_table(op, "cos", cos, batch, length, dim)
    if sin.shape != cos.shape:
        raise ValueError(
            f"{op}: sin must have the shape of cos, {tuple(cos.shape)}; got {tuple(sin.shape)}"
        )


def _check_table(op: str, name: str, table: Tensor, batch: int, length: int, dim: int) -> None:
    if (
        table.dim() not in (2, 3)
        or table.shape[-2] != length
        or table.shape[-1] not in (dim, dim // 2)
        or (table.dim() == 3 and table.shape[0] not in (1, batch))
    ):
        raise ValueError(
            f"{op}: {name} must have shape ({length}, {dim}), (1, {length}, {dim}) or "
            f"({batch}, {length}, {dim}), or be half as wide; got {tuple(table.shape)}"
        )


def check_in_place(q: Any, k: Any, cos: Any, sin: Any) -> None:
    _check("rope_", q, k, cos, sin)
    for name, tensor in (("q", q), ("k", k)):
        if any(
            size > 1 and stride == 0
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise ValueError(
                f"rope_: {name} is expanded, several of its elements share memory (shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}); clone it, or use rope"
            )
    if torch.compiler.is_compiling() or q.numel() == 0 or k.numel() == 0:
        return
    if q.data_ptr() == k.data_ptr():
        raise ValueError("rope_: q and k share memory; clone one of them, or use rope")


def _refuse_gradients(q: Any, k: Any, cos: Any, sin: Any) -> None:
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"rope_: {name} requires a gradient, and rope_ records none; use rope, or call it "
                "under torch.no_grad()"
            )


def _refuse_table_gradients(op: str, cos: bool, sin: bool) -> None:
    if cos or sin:
        raise RuntimeError(
            f"{op}: {'cos' if cos else 'sin'} requires a gradient, but the tables get none; "
            f"pass {'cos' if cos else 'sin'}.detach()"
        )


# --------------------------------------------------------------------------------------------------
# Operators
# --------------------------------------------------------------------------------------------------


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool = False
) -> Tensor:
    """The formula in the precision that the kernels compute in."""
    dtype = compute_dtype(x.dtype)

    def members(t: Tensor) -> tuple[Tensor, Tensor]:
        """Of the pairs: their first elements and their second ones."""
        t = t.to(dtype)
        if t.shape[-1] != x.shape[-1]:
            return t, t  # a table with one value for each pair
        half = t.shape[-1] // 2
        return (t[..., ::2], t[..., 1::2]) if interleaved else (t[..., :half], t[..., half:])

    # The tables are the same for all heads.
    (cos_a, cos_b), (sin_a, sin_b) = (
        members(t.unsqueeze(-3) if t.dim() == 3 else t) for t in (cos, sin)
    )
    if transposed:
        sin_a, sin_b = -sin_b, -sin_a
    a, b = members(x)
    turned = (a * cos_a - b * sin_a, b * cos_b + a * sin_b)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def _rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    _check("rope", q, k, cos, sin)
    turned = (torch.empty_like(x).copy_(_turned(x, cos, sin, interleaved)) for x in (q, k))
    return next(turned), next(turned)


def _rope_backward_reference(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    _check("rope_backward", dq, dk, cos, sin)
    turned = (torch.empty_like(x).copy_(_turned(x, cos, sin, interleaved, True)) for x in (dq, dk))
    return next(turned), next(turned)


def _rope_in_place_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> None:
    check_in_place(q, k, cos, sin)
    for x in (q, k):
        x.copy_(_turned(x, cos, sin, interleaved))


def _fake(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        _check(op, q, k, cos, sin)
        return torch.empty_like(q), torch.empty_like(k)

    return fake


def _rope_in_place_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    _check("rope_", q, k, cos, sin)


def _batched(name: str) -> Callable[..., tuple[Any, Any]]:
    """Batching rule (``torch.library.register_vmap``): the samples are more of the batch."""

    def rule(
        info: Any,
        in_dims: tuple[int | None, ...],
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        def of_samples(x: Tensor, dim: int | None) -> Tensor:
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        q, k = of_samples(q, in_dims[0]), of_samples(k, in_dims[1])
        batch = q.shape[1]
        one_table = cos.dim() == 2 or cos.shape[0] == 1
        if in_dims[2] is not None or in_dims[3] is not None or not one_table:
            cos, sin = of_samples(cos, in_dims[2]), of_samples(sin, in_dims[3])
            if cos.dim() == 3:
                cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            cos, sin = (t.expand(-1, batch, -1, -1).flatten(0, 1) for t in (cos, sin))
        op = getattr(torch.ops.fusedcuda, name).default
        turned = op(q.flatten(0, 1), k.flatten(0, 1), cos, sin, interleaved)
        q, k = (x.unflatten(0, (info.batch_size, batch)) for x in turned)
        return (q, k), (0, 0)

    return rule


_rope = define(
    FAMILY,
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
    cpu=_rope_reference,
    fake=_fake("rope"),
    vmap=_batched("rope"),
)
_rope_backward = define(
    FAMILY,
    "rope_backward(Tensor dq, Tensor dk, Tensor cos, Tensor sin, bool interleaved)"
    " -> (Tensor, Tensor)",
    cpu=_rope_backward_reference,
    fake=_fake("rope_backward"),
    vmap=_batched("rope_backward"),
)
_rope_in_place = define(
    FAMILY,
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved) -> ()",
    cpu=_rope_in_place_reference,
    fake=_rope_in_place_fake,
)

# Host only: what a call would launch, as JSON. Implemented in csrc/bindings/rope.cpp, read by
# explain().
define_host(
    "rope_plan(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, int num_sms, "
    "bool in_place=False) -> str"
)

# --------------------------------------------------------------------------------------------------
# Differentiable forms: each is the other's backward, since the rotation is linear
# --------------------------------------------------------------------------------------------------


def _set_up(op: str, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved = inputs
    _refuse_table_gradients(op, *ctx.needs_input_grad[2:4])
    needs = ctx.needs_input_grad[:2]
    ctx.mark_non_differentiable(*(x for x, need in zip(outputs, needs, strict=True) if not need))
    ctx.save_for_backward(cos, sin)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, operator: Operator, dq: Tensor | None, dk: Tensor | None
) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    given = [g for g in (dq, dk) if g is not None]
    if not given:
        return (None,) * 5
    # An output that was not used takes part without heads, at no cost.
    first, second = (given[0][:, :0] if g is None else g for g in (dq, dk))
    if torch.compiler.is_compiling():
        turned = operator.raw(first, second, cos, sin, ctx.interleaved)
    else:
        turned = call(operator, (first, second, cos, sin), ctx.interleaved)
    results = (None if g is None else x for g, x in zip((dq, dk), turned, strict=True))
    return (*results, None, None, None)


class _Rope(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        return _rope(q, k, cos, sin, interleaved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _set_up("rope", ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, _ROPE_BACKWARD, dq, dk)


class _RopeBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        return _rope_backward(dq, dk, cos, sin, interleaved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _set_up("rope_backward", ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, ROPE, dq, dk)


def _checks(op: str) -> Callable[..., None]:
    def check(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool) -> None:
        _check(op, q, k, cos, sin)
        if torch.is_grad_enabled():
            _refuse_table_gradients(op, cos.requires_grad, sin.requires_grad)

    return check


_OPERANDS = ("q", "k", "cos", "sin")
ROPE = Operator("rope", _rope, _Rope, _OPERANDS, _checks("rope"))
_ROPE_BACKWARD = Operator(
    "rope_backward", _rope_backward, _RopeBackward, _OPERANDS, _checks("rope_backward")
)
