"""``explain`` of the dlrm family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._explanation import Explainers, Explanation, ask, multiprocessors
from .ops import dlrm
from .ops._dlrm_lookup_reference import check_embedding_interaction
from .ops._dlrm_reference import check_head, check_interaction
from .ops._operands import compute_dtype

_BYTES_OF_ITEM = 8  # IndexedRow in csrc/kernels/dlrm_gradient.h: a row and a position

# --------------------------------------------------------------------------------------------------
# Interaction
# --------------------------------------------------------------------------------------------------


def _explain_interaction(arguments: dict[str, Any], backward: bool) -> Explanation:
    dense, given = arguments["dense"], arguments["embeddings"]
    embeddings = dlrm.stack_vectors(dense, given)
    width = dlrm.output_width(dense, embeddings, arguments["pad"])
    upper = dlrm.is_upper(arguments["order"])
    check_interaction(dense, embeddings, upper, width)
    how = (upper, width, backward, multiprocessors())
    plan = ask(dlrm.FAMILY, dense, embeddings, *how, plan="dot_interaction_plan")
    if isinstance(given, (list, tuple)):
        plan["copies"].append("embeddings")
    is_empty = plan["path"] == "empty"
    vectors = 0 if is_empty else _bytes_of(dense) + _bytes_of(embeddings)
    row = dense.shape[0] * width * dense.element_size()
    moved = (2 if backward else 1) * vectors + row
    copied = {"dense": dense, "embeddings": embeddings}
    moved += sum(2 * _bytes_of(copied[name]) for name in plan["copies"])
    plan["kernels"] = (not is_empty) + len(plan["copies"])
    lines = _describe_interaction(plan, dense, backward)
    return Explanation("dot_interaction", (plan,), moved, tuple(lines))


def _explain_lookup(arguments: dict[str, Any], backward: bool) -> Explanation:
    dense, weight, indices = (arguments[name] for name in ("dense", "weight", "indices"))
    op = "embedding_interaction"
    upper = dlrm.is_upper(arguments["order"], op)
    width = dlrm.lookup_width(dense, weight, indices, arguments["pad"])
    check_embedding_interaction(dense, weight, indices, upper, width)
    how = (upper, width, backward, multiprocessors())
    plan = ask(dlrm.FAMILY, dense, weight, indices, *how, plan=f"{op}_plan")
    is_empty = plan["path"] == "empty"
    looked_up = indices.numel() * dense.shape[1] * dense.element_size()
    # Of a table that is smaller than that, each row counts once.
    rows = 0 if is_empty else min(looked_up, _bytes_of(weight))
    vectors = 0 if is_empty else _bytes_of(dense)
    moved = vectors + rows + _bytes_of(indices) + dense.shape[0] * width * dense.element_size()
    copied = {"dense": dense, "weight": weight}
    moved += sum(2 * _bytes_of(copied[name]) for name in plan["copies"])
    plan["kernels"] = (not is_empty) + len(plan["copies"])
    lines = [*_describe_interaction(plan, dense, backward), *_describe_lookup(plan, indices)]
    launches = [plan]
    if backward:
        table_plan, bytes_of_sum, line = _explain_table_gradient(dense, weight, indices)
        launches.append(table_plan)
        moved += vectors + looked_up + bytes_of_sum
        lines.append(line)
    return Explanation(op, tuple(launches), moved, tuple(lines))


def _explain_table_gradient(
    dense: Tensor, weight: Tensor, indices: Tensor
) -> tuple[dict[str, Any], int, str]:
    """What sums up the gradients of the rows: its plan, the bytes that it moves, and a line."""
    columns = dense.shape[1]
    # Stand for those on the device, of which only the layout matters.
    grad = torch.empty(*indices.shape, columns, dtype=dense.dtype, device="meta")
    given = torch.empty_strided(indices.shape, indices.stride(), dtype=indices.dtype, device="meta")
    rows = weight.shape[0]
    name = "embedding_dense_backward_plan"
    plan = ask(dlrm.FAMILY, grad, given, rows, multiprocessors(), plan=name)
    plan["kernels"] = plan["launches"] + len(plan["copies"])
    moved = _bytes_of(grad) + _bytes_of(weight)
    line = f"  gradient of weight: {indices.numel()} rows added up in an order that is fixed"
    if plan["path"] == "torch":
        plan["kernels"] = 1
        why = "there are more of them, or a larger table, than 32-bit numbers count"
        return plan, moved + _bytes_of(indices), f"{line}, by torch's operator: {why}"
    if plan["path"] != "sorted":
        return plan, moved, "  gradient of weight: zeros, as there are no indices"
    # Each pass reads the items twice and writes them once, and the sum reads them once more.
    passes = plan["passes"]
    moved += 2 * _bytes_of(indices) + indices.numel() * _BYTES_OF_ITEM * (3 * passes - 1)
    moved += 2 * _bytes_of(indices) * len(plan["copies"])
    line += (
        f", by {plan['launches']} kernels: indices sorted in {passes} passes of "
        f"{plan['digit_bits']} bits, sums in {plan['levels']} levels; "
        f"{plan['workspace_bytes'] / 1e6:.1f} MB of workspace"
    )
    if "indices" in plan["copies"]:
        line += "; indices are copied first, as they are not contiguous"
    return plan, moved, line


def _describe_lookup(plan: dict[str, Any], indices: Tensor) -> list[str]:
    if plan["path"] == "empty":
        return []
    when = "with each vector"
    if plan["path"] == "tensor_cores" and plan["vec"] > 1:
        when = "those of the next sample while this one is worked on"
    return [f"    indices: {indices.dtype}, {when}"]


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _describe_interaction(plan: dict[str, Any], dense: Tensor, backward: bool) -> list[str]:
    if plan["path"] == "empty":
        return ["  empty: nothing to do"]
    how = "a warp a sample, products by tensor cores"
    if plan["path"] == "threads":
        how = f"a block a sample, products by threads: {dense.dtype} has no tensor cores here"
    lines = [f"  {plan['path']}: {plan['blocks']} blocks of {plan['threads']} threads, {how}"]
    if plan["vec"] > 1:
        lines.append("    vectors: 16 bytes at a time")
    else:
        vec = 16 // dense.element_size()
        why = "a tensor, or its vectors, start off a 16-byte boundary"
        if plan["columns"] % vec != 0:
            why = f"{plan['columns']} elements are not whole pieces of {vec}"
        lines.append(f"    vectors: element by element: {why}")
    row = "incoming row" if backward else "output row"
    if plan["row_vec"] > 1:
        lines.append(f"    {row}: 16 bytes at a time")
    else:
        why = f"its {plan['width']} elements are not whole pieces of {16 // dense.element_size()}"
        lines.append(f"    {row}: element by element: {why}")
    for name in plan["copies"]:
        lines.append(f"    {name}: copied first, so that its elements lie side by side")
    return lines


# --------------------------------------------------------------------------------------------------
# Head
# --------------------------------------------------------------------------------------------------


def _explain_head(arguments: dict[str, Any], backward: bool) -> Explanation:
    x, weight, bias = (arguments[name] for name in ("x", "weight", "bias"))
    reduction = dlrm.reduction_code(arguments["reduction"])
    pos_weight = arguments["pos_weight"]
    target = dlrm.fit_target(x, arguments["target"])
    check_head(x, weight, bias, target, 1.0 if pos_weight is None else pos_weight, reduction)
    mask = (3 if bias is None else 7) if backward else 0
    plan = ask(
        dlrm.FAMILY, x, weight, reduction, mask, multiprocessors(), plan="linear_sigmoid_bce_plan"
    )
    if target is not arguments["target"] and target.dtype != arguments["target"].dtype:
        plan["copies"].append("target")
    # Beside x and its gradient only the weight counts: what there is one of a row does not.
    moved = (2 if backward else 1) * _bytes_of(x) + (3 if backward else 1) * _bytes_of(weight)
    moved += sum(2 * _bytes_of(x) for name in plan["copies"] if name == "x")
    # The sums of what the blocks leave are a second kernel.
    sums = plan["workspace"] > 0
    plan["kernels"] = 1 + sums + len(plan["copies"])
    share = "the same columns of many rows a thread" if backward else "a warp a row"
    lines = [f"  {plan['path']}: {plan['blocks']} blocks of {plan['threads']} threads, {share}"]
    if plan["vec"] > 1:
        lines.append("    rows: 16-byte vectors")
    else:
        vec = 16 // x.element_size()
        why = "x, weight or their rows start off a 16-byte boundary"
        if x.element_size() == 8:
            why = "float64 has no other kernel"
        elif plan["columns"] % vec != 0:
            why = f"{plan['columns']} elements are not whole vectors of {vec}"
        lines.append(f"    rows: element by element: {why}")
    if sums:
        what = "gradients of weight and bias" if backward else "loss"
        lines.append(f"    {what}: {plan['blocks']} partial sums, added up by a second kernel")
    if "target" in plan["copies"]:
        lines.append(f"    target: converted to {compute_dtype(x.dtype)} first")
    return Explanation("linear_sigmoid_bce", (plan,), moved, tuple(lines))


EXPLAINERS: Explainers = {
    dlrm.dot_interaction: _explain_interaction,
    dlrm.embedding_interaction: _explain_lookup,
    dlrm.linear_sigmoid_bce: _explain_head,
}
