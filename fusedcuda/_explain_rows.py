"""``explain`` of the families that reduce over the last dimension."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._explanation import Explainers, Explanation, ask, multiprocessors
from .ops import cross_entropy as ce
from .ops import norm, softmax
from .ops._cross_entropy_reference import check_numbers, reduction_code
from .ops._norm_reference import check_layer_norm, check_rms_norm
from .ops._operands import compute_dtype
from .ops._rows import check_number, check_rows

# --------------------------------------------------------------------------------------------------
# Norms
# --------------------------------------------------------------------------------------------------


def _explain_norm(name: str, arguments: dict[str, Any], backward: bool) -> Explanation:
    x, residual, weight = (arguments[key] for key in ("x", "residual", "weight"))
    bias = arguments.get("bias")
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    if name == "rms_norm":
        check_rms_norm(x, weight, arguments["eps"], arguments["weight_offset"], residual)
    else:
        check_layer_norm(x, weight, bias, arguments["eps"], residual)
    plan = ask(norm.FAMILY, name, *tensors.values(), backward, multiprocessors())
    vectors = [v for v in (weight, bias) if v is not None]
    vector_bytes = sum(v.nbytes for v in vectors)
    if not backward:
        rows_moved = 2 if residual is None else 4
        return _explanation(name, plan, tensors, rows_moved, vector_bytes=vector_bytes)
    notes = []
    if plan["workspace"] > 0:
        notes.append(
            f"gradients of the vectors: {plan['partials']} partial sum(s) a column, added up"
        )
    return _explanation(
        name,
        plan,
        tensors,
        rows_moved=3 if residual is None else 4,  # with one, the gradient of the sum comes in too
        # The gradients are written; a bias is not read.
        vector_bytes=vector_bytes + (0 if weight is None else weight.nbytes),
        more_kernels=_kernels_of_sums(plan, x.dtype, vectors),
        notes=notes,
    )


def _kernels_of_sums(plan: dict[str, Any], dtype: torch.dtype, vectors: list[Tensor]) -> int:
    """Kernels for the gradients of ``vectors``, beside the one that makes dx."""
    if plan["workspace"] == 0:
        return 0
    # A vector in a dtype that the kernels do not have gets its gradient converted.
    kept = [v.dtype if v.dtype in (dtype, torch.float32) else compute_dtype(dtype) for v in vectors]
    converted = sum(k != v.dtype for k, v in zip(kept, vectors, strict=True))
    apart = plan["path"] == "stream"  # elsewhere the partial sums are made on the way
    return apart + len(set(kept)) + converted


# --------------------------------------------------------------------------------------------------
# Softmax
# --------------------------------------------------------------------------------------------------


def _explain_softmax(name: str, arguments: dict[str, Any], backward: bool) -> Explanation:
    x = arguments["x"]
    check_rows(name, "x", x)
    check_number(name, "scale", arguments["scale"])
    plan = ask(softmax.FAMILY, x, backward, multiprocessors())
    return _explanation(name, plan, {"x": x}, rows_moved=3 if backward else 2)


# --------------------------------------------------------------------------------------------------
# Cross-entropy
# --------------------------------------------------------------------------------------------------


def _explain_cross_entropy(arguments: dict[str, Any], backward: bool) -> Explanation:
    logits, target, weight = (arguments[name] for name in ("logits", "target", "weight"))
    smoothing, z_loss = arguments["label_smoothing"], arguments["z_loss"]
    reduction = reduction_code(arguments["reduction"])
    check_numbers(smoothing, z_loss, arguments["softcap"])
    softcap = arguments["softcap"] or 0.0
    operator = ce.choose_operator(logits, reduction, arguments["inplace_backward"])
    assert operator.check is not None
    options = (arguments["ignore_index"], smoothing, z_loss, softcap, reduction)
    operator.check(logits, target, weight, *options)

    ahead, in_place = operator is ce.AHEAD, operator is ce.IN_PLACE
    with_gradient = ahead and not backward and logits.requires_grad
    how = (with_gradient, backward, in_place, ahead, multiprocessors())
    plan = ask(ce.FAMILY, logits, weight, smoothing, softcap, reduction, *how)
    notes = []
    if with_gradient:
        notes.append("the gradient is made on the way, for the backward to hand out")
    elif backward and ahead:
        notes.append("the forward made the gradient: nothing is moved where the incoming one is 1")
    elif backward and in_place:
        notes.append("the gradient is written over the logits")
    if backward:
        rows_moved = 0 if ahead else 2
        more_kernels = int(plan["workspace"] > 0)  # the sum of the weights
    else:
        rows_moved = 2 if with_gradient else 1
        # Reduced, the losses are added up at the end; a mean's gradient needs the count before.
        more_kernels = (reduction != ce.NONE) + plan["totals_first"]
    return _explanation(
        "cross_entropy",
        plan,
        {"logits": logits, "weight": weight},
        rows_moved,
        vector_bytes=0 if weight is None else weight.nbytes,
        more_kernels=more_kernels,
        notes=notes,
    )


EXPLAINERS: Explainers = {
    norm.rms_norm: partial(_explain_norm, "rms_norm"),
    norm.layer_norm: partial(_explain_norm, "layer_norm"),
    softmax.softmax: partial(_explain_softmax, "softmax"),
    softmax.log_softmax: partial(_explain_softmax, "log_softmax"),
    ce.cross_entropy: _explain_cross_entropy,
}

# --------------------------------------------------------------------------------------------------
# What they share
# --------------------------------------------------------------------------------------------------


def _explanation(
    name: str,
    plan: dict[str, Any],
    tensors: dict[str, Tensor | None],
    rows_moved: int,
    *,
    vector_bytes: int = 0,
    more_kernels: int = 0,
    notes: Sequence[str] = (),
) -> Explanation:
    """From the plan and what it does not know.

    ``rows_moved`` counts the tensors of the shape of the first of ``tensors`` that are read and
    written, ``more_kernels`` what is launched beside the kernel of the plan.
    """
    rows = next(t for t in tensors.values() if t is not None)
    copied = {key: t for key in plan["copies"] if (t := tensors[key]) is not None}
    moved = rows_moved * rows.numel() * rows.element_size()
    if moved > 0:
        moved += vector_bytes
    moved += sum(2 * t.numel() * t.element_size() for t in copied.values())
    kernels = (plan["path"] != "empty") + more_kernels + len(copied)
    lines = [f"  {plan['path']}: {_grid(plan)}"]
    if plan["path"] != "empty":
        lines += [f"    {line}" for line in (_passes(plan, rows.dtype), _access(plan), *notes)]
    for key, tensor in copied.items():
        why = "its rows do not lie one stride apart, or their elements not side by side"
        if tensor.shape != rows.shape:
            why = "to another dtype, or so that its elements lie side by side"
        lines.append(f"    {key}: copied first, {why}")
    return Explanation(name, ({**plan, "kernels": kernels},), moved, tuple(lines))


def _grid(plan: dict[str, Any]) -> str:
    if plan["path"] == "empty":
        return "nothing to do"
    threads = plan["threads_per_row"] * plan["rows_per_block"]
    if plan["cluster"] > 1:
        share = f"{plan['cluster']} blocks a row"
    elif plan.get("tiles", 1) > 1:
        share = f"{plan['tiles']} blocks a row"
    else:
        share = f"{plan['rows_per_block']} row(s) a block"
    return f"{plan['blocks']} blocks of {threads} threads, {share}"


def _passes(plan: dict[str, Any], dtype: torch.dtype) -> str:
    """How often a row is read; for the slower path, why."""
    if "tiles" in plan:
        return "no reduction: every block makes its part of the gradient"
    if plan["path"] == "register":
        return "a row is read once and stays in registers"
    if plan["path"] == "pipeline":
        return "a row is read once and stays in registers; the next ones are on their way"
    why = "float64 has no other kernel"
    if dtype != torch.float64:
        why = f"{plan['columns']} elements are more than the registers of a row's blocks hold"
    return f"a block walks along its row several times: {why}"


def _access(plan: dict[str, Any]) -> str:
    if plan["vec"] == 1 or ("stages" in plan and plan["path"] == "stream"):
        return "rows: element by element"
    if plan["aligned"]:
        return "rows: 16-byte vectors"
    why = "a tensor, or its rows, start off a 16-byte boundary"
    if plan["columns"] % plan["vec"] != 0:
        why = f"{plan['columns']} elements are not whole vectors of {plan['vec']}"
    return f"rows: 16-byte vectors inside, element by element at the ends: {why}"
