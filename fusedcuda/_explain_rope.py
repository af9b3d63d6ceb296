"""``explain`` of the rope family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._explanation import Explainers, Explanation, ask, multiprocessors
from .ops import rope


def _explain(arguments: dict[str, Any], backward: bool, *, in_place: bool) -> Explanation:
    q, k, cos, sin, interleaved = arguments.values()
    if in_place:
        rope.check_in_place(q, k, cos, sin)
        if backward:
            raise RuntimeError("rope_: records no gradient, so it has no backward; use rope")
    else:
        assert rope.ROPE.check is not None
        rope.ROPE.check(q, k, cos, sin, interleaved)
    if backward:  # the same kernel, on gradients laid out like the outputs
        q, k = torch.empty_like(q), torch.empty_like(k)
    plan = ask(rope.FAMILY, q, k, cos, sin, interleaved, multiprocessors(), in_place)
    is_empty = plan["path"] == "empty"
    kernels = (not is_empty) + len(plan["copies"])
    moved = 0 if is_empty else 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
    lines = _describe(plan, q, cos)
    name = "rope_" if in_place else "rope"
    return Explanation(name, ({**plan, "kernels": kernels},), moved, tuple(lines))


EXPLAINERS: Explainers = {
    rope.rope: partial(_explain, in_place=False),
    rope.rope_: partial(_explain, in_place=True),
}


def _describe(plan: dict[str, Any], q: Tensor, cos: Tensor) -> list[str]:
    if plan["path"] == "empty":
        return ["  empty: nothing to do"]
    blocks = "x".join(str(b) for b in plan["blocks"])
    lines = [
        f"  {plan['path']}: {blocks} blocks of {plan['threads']} threads, "
        f"{plan['heads_per_block']} head(s) of {plan['tile']['positions']} position(s) a block"
    ]
    if plan["path"] == "vector":
        lines.append("    q, k: 16-byte vectors")
    else:
        lines.append(f"    q, k: element by element: {_why_scalar(q)}")
    for table in plan["copies"]:
        lines.append(f"    {table}: converted first, as there is no kernel for {cos.dtype}")
    return lines


def _why_scalar(q: Tensor) -> str:
    if q.dtype == torch.float64:
        return "float64 has no other kernel"
    vec = 16 // q.element_size()
    if q.shape[-1] // 2 % vec != 0:
        return f"half a head, {q.shape[-1] // 2} elements, is not whole vectors of {vec}"
    return "q, k, cos or sin is strided along the head, or its rows start off a 16-byte boundary"
