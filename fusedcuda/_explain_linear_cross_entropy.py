"""``explain`` of the linear_cross_entropy family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _explain_linear_act, _explain_rows
from ._explanation import Explainers, Explanation, Launch, Parts, ask, multiprocessors
from .ops import _linear_cross_entropy_chunks as chunks
from .ops import _linear_cross_entropy_reference as reference
from .ops import cross_entropy as ce
from .ops import linear_act as linear_family
from .ops import linear_cross_entropy as family
from .ops._cross_entropy_reference import reduction_code
from .ops._linear_cross_entropy_reference import DBIAS, DWEIGHT, DX, NONE, OP
from .ops._operands import compute_dtype
from .ops._rows import as_matrix


def _explain(arguments: dict[str, Any], backward: bool) -> Explanation:
    reduction = reduction_code(arguments["reduction"], OP)
    x, weight, bias = family.autocast(*(arguments[name] for name in ("x", "weight", "bias")))
    numbers = [arguments[name] for name in ("ignore_index", "label_smoothing", "z_loss")]
    options: tuple[Any, ...] = (*numbers, arguments["softcap"] or 0.0, reduction)
    chunk = reference.chunk_code(arguments["chunk"])
    in_float32 = reference.sums_in_float32(arguments["accumulate"])
    target = arguments["target"]
    given: tuple[Any, ...] = (x, weight, bias, target, *options, chunk, in_float32, 0)
    reference.check(*given)
    ahead = family.makes_gradients_ahead(x.dtype, reduction)
    if backward and ahead:
        return _scaling(x, weight, bias)
    mask = 0
    if backward or (ahead and torch.is_grad_enabled()):
        wanted = [t is not None and (backward or t.requires_grad) for t in (x, weight, bias)]
        mask = sum(want << bit for bit, want in enumerate(wanted))
    call = _Call(x, weight, bias, chunk, in_float32, mask)
    call.describe_chunks(options, backward)
    call.describe_sums(reduction, backward)
    return call.parts.explanation(OP)


def _scaling(x: Tensor, weight: Tensor, bias: Tensor | None) -> Explanation:
    parts = Parts()
    for name, operand in {"x": x, "weight": weight, "bias": bias}.items():
        if operand is not None:
            launch = {"op": f"{OP}_scale_", "path": "in place", "kernels": 1, "copies": []}
            parts.add(launch, [], f"  gradient of {name}: scale_gradient_kernel")
    parts.lines.append(
        "    the forward made the gradients: nothing is moved where the incoming one is 1"
    )
    return parts.explanation(OP)


class _Call:
    """One pass over all chunks. Plans are made for memory that nobody touches."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk: int,
        in_float32: bool,
        mask: int,
    ) -> None:
        self.parts = Parts()
        self.mask = mask
        rows = as_matrix(x.detach())
        count, features = rows.shape
        classes = weight.shape[0]
        self.problem = chunks.Problem(count, features, classes, x.dtype, in_float32, mask)
        self.chunk = chunks.rows_of_chunk(self.problem, chunk, x.device)
        self.rows, self.weight = self._readable("x", rows), self._readable("weight", weight)
        self.bias = None if bias is None else _stand_in(bias.detach())

    def _readable(self, name: str, matrix: Tensor) -> Tensor:
        given = matrix.detach()
        read = chunks.readable(_stand_in(given))
        if read.stride() != given.stride():
            launch = {"op": "copy", "path": "torch", "kernels": 1, "copies": [name]}
            line = f"  {name}: copied first, so that its rows or its columns lie side by side"
            self.parts.add(launch, [read, read], line)
        return read

    def describe_chunks(self, options: tuple[Any, ...], backward: bool) -> None:
        problem = self.problem
        whole, last = divmod(problem.rows, self.chunk)
        kinds = [(whole, self.chunk)] if whole else []
        kinds += [(1, last)] if last else []
        if not kinds:
            self.parts.lines.append("  empty: there are no rows")
        peak = problem.peak_bytes(self.chunk) / 1e6
        for position, (times, rows) in enumerate(kinds):
            beside = "" if position else f"; {peak:.0f} MB at most beside the operands"
            self.parts.lines.append(f"  {times} chunk(s) of {rows} rows{beside}")
            if not position:
                self._describe_padding()
            self._describe_chunk(times, rows, options, backward, is_first=position == 0)

    def _describe_padding(self) -> None:
        classes = self.problem.classes
        padding = self.rows.new_empty(self.chunk, chunks.pitch_of(classes) - classes)
        if self.mask & DWEIGHT and padding.numel():
            line = "zeros beside the logits, so that rows of the gradient of weight are even"
            self._torch(1, "zero_", 1, [padding], line)

    def _describe_chunk(
        self, times: int, rows: int, options: tuple[Any, ...], backward: bool, is_first: bool
    ) -> None:
        classes = self.problem.classes
        padded = self.rows.new_empty(rows, chunks.pitch_of(classes))
        logits, x = padded[:, :classes], self.rows[:rows]
        self._product("logits", times, logits, x, self.weight, self.bias)
        self._loss(times, logits, options, backward)
        if self.mask & DX:
            self._product("gradient of x", times, x.new_empty(x.shape), logits, self.weight.t())
        if self.mask & DWEIGHT:
            wide = self.problem.has_wide_sum(self.chunk)
            dtype = torch.float32 if wide else x.dtype
            dweight = x.new_empty(padded.shape[1], x.shape[1], dtype=dtype)
            what = "gradient of weight" + (", added up in float32" if wide else "")
            first = int(is_first)  # which is not added to anything
            for count, adds in ((first, False), (times - first, True)):
                if count:
                    self._product(what, count, dweight, padded.t(), x.t(), adds=adds)
        if self.mask & DBIAS:
            self._torch(times, "sum", 2, [logits], "gradient of bias: torch.sum in float32")

    def _product(
        self,
        what: str,
        times: int,
        output: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        adds: bool = False,
    ) -> None:
        arguments = (output, a, b, bias, adds)
        plan = ask(linear_family.FAMILY, *arguments, plan="linear_act_product_plan")
        kernels = _explain_linear_act._kernels(plan)
        made = plan["steps"][-1] if plan["steps"] else None
        line = f"{what}: {_explain_linear_act._how(made) if made else 'empty'}"
        line += ", added to those of the chunks before" if adds else ""
        tensors = [output, a, b, bias, output if adds else None]
        self._add(times, {**plan, "kernels": kernels}, tensors, line)
        for step in plan["steps"]:
            if step["why"]:
                self.parts.lines.append(f"      {step['what']} apart, because {step['why']}")

    def _loss(self, times: int, logits: Tensor, options: tuple[Any, ...], backward: bool) -> None:
        _, smoothing, _, softcap, reduction = options
        how = (self.mask != 0, backward, True, False, multiprocessors())
        plan = ask(ce.FAMILY, logits, None, smoothing, softcap, reduction, *how)
        what = "loss"
        if self.mask:
            what = "gradient of the logits, over them" if backward else "loss, and over the logits"
            what += "" if backward else " their gradient"
        line = f"{what}: {_explain_rows._passes(plan, logits.dtype)}"
        moved = [logits, logits if self.mask else None]
        self._add(times, {**plan, "kernels": 1}, moved, line)

    def describe_sums(self, reduction: int, backward: bool) -> None:
        """What comes once a call."""
        if not backward and reduction != NONE:
            self._torch(1, "count and mean", 6, [], "number of targets, sum of the losses: torch")
        if self.problem.has_wide_sum(self.chunk):
            wide = self.weight.new_empty(self.weight.shape, dtype=torch.float32)
            line = "gradient of weight: rounded to 16 bits"
            self._torch(1, "round", 1, [wide, self.weight], line)
        if self.mask & DBIAS and compute_dtype(self.rows.dtype) != self.rows.dtype:
            self._torch(1, "round", 1, [], "gradient of bias: rounded to 16 bits")

    def _torch(
        self, times: int, op: str, kernels: int, tensors: list[Tensor | None], line: str
    ) -> None:
        launch = {"op": op, "path": "torch", "kernels": kernels, "copies": []}
        self._add(times, launch, tensors, line)

    def _add(self, times: int, launch: Launch, tensors: list[Tensor | None], line: str) -> None:
        """Once for all chunks of a kind."""
        launch = {**launch, "times": times, "kernels": times * launch["kernels"]}
        moved = [t for t in tensors if t is not None for _ in range(times)]
        self.parts.add(launch, moved, f"    {line}")


def _stand_in(tensor: Tensor) -> Tensor:
    """Memory on the CPU of the layout and the alignment of ``tensor``, never written to."""
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0
    memory = torch.empty(offset + extent, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


EXPLAINERS: Explainers = {family.linear_cross_entropy: _explain}
