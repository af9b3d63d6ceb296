"""What ``explain`` returns, and how it asks a compiled family for its plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _jit

_H200_SMS = 132


@dataclass(frozen=True)
class Explanation:
    """The launches of one call. ``str()`` is for people, ``launches`` and ``plan`` for programs.

    ``bytes_moved`` are those of operands and results of every launch, each once; partial sums in a
    ``workspace`` are not among them, nor are parameters that are rounded or padded first, and
    ``kernels`` does not count the kernels that do that.

    ``plan`` is the first launch. In all but linear_act, lora and gated_mlp it has ``path``,
    ``vec`` (elements of the widest access: 1 where everything goes element by element) and
    ``blocks``; everywhere ``kernels`` (how many it takes) and, but for pointwise, ``copies``: the
    arguments that are copied first.

    - pointwise: ``path`` is "linear", "flat", "broadcast", "columns", "rows" or "empty". ``access``
      of each of the ``tensors`` (operands, then output; for a backward: operands, incoming
      gradient, gradients), ``threads``, ``rows``, ``columns``, ``rest`` (columns behind the last
      vector, for a small second launch), and for a backward ``gradients`` ("full", "columns",
      "rows", "total", "none") and ``workspace`` in elements.
    - norm, softmax, cross_entropy: ``path`` is "register", "pipeline", "stream" or "empty".
      ``rows``, ``columns``, ``aligned``, ``items`` (vectors of a row in a thread),
      ``threads_per_row`` (in each block), ``rows_per_block``, ``cluster`` (blocks that share a
      row). norm: ``stages`` and ``shared_bytes`` of shared memory, and for a backward ``partials``
      a column and ``workspace`` in elements. cross_entropy: ``workspace``, forward
      ``totals_cluster`` and ``totals_first`` of the sum over the rows, backward ``tiles`` of a row.
    - rope: ``path`` is "vector", "scalar" or "empty". ``threads``, ``columns``, ``heads``,
      ``heads_per_block``, ``tile``, ``inside`` ("heads" or "positions").
    - dlrm: ``path`` of an interaction is "tensor_cores", "threads" or "empty"; ``row_vec`` is the
      ``vec`` of its output row or incoming gradient. ``tiles`` of 16 vectors, ``threads``,
      ``shared_bytes``, ``vectors``, ``columns``, ``width``. The backward of a lookup has a second
      entry, the gradient of the table, of ``path`` "sorted", "zeros", "empty" or "torch": its
      ``passes`` of ``digit_bits`` and ``tiles`` (sort), ``levels`` (sum), ``launches``, ``items``,
      ``rows``, ``columns``, ``workspace_bytes``. Of a head it is "vector" or "scalar";
      ``rows``, ``columns``, ``threads``, ``column_tiles``, ``workspace`` in elements.
    - lora: a launch for each part. Of a skinny product ``path`` is "lora_pass_kernel_sm90" (one
      pass over x, of the gradients of t and lora_b one for both), "tensor_cores", "cublas" or
      "empty". Of the first ``tile_rows`` and ``tile_columns`` of x, ``lines`` of tiles and their
      ``line_width``, and ``workspace`` in elements. Of the second ``threads``, ``factor_aligned``,
      ``chunks`` of 64 ranks, ``splits`` of the sum, ``rows_of_stage`` and ``columns_of_stage`` of x
      in shared memory, ``shared_bytes`` and ``workspace`` in elements. The linear's is
      linear_act's, an activation's pointwise's, all others are cuBLAS's. Its backward has gradients
      of weight and bias where they require one.
    - gated_mlp: a launch for each operator that the layer consists of. Of "gated_product" and
      "gated_mlp_decode" the ``path`` is their name; ``blocks`` and what their kernels are divided
      into. All others are linear_act's and pointwise's.
    - linear_cross_entropy: a launch for each part of a chunk, with ``times``, how often it comes:
      the products are linear_act's, the loss is cross_entropy's, ``path`` "torch" is torch's.
    - linear_act: one launch an operator: ``op``, ``m``, ``n``, ``k``, ``batch``, and ``steps``, of
      which there are none if there is nothing to do. A step has ``kernel``, ``what`` it makes,
      ``fused`` (with something else), or else ``why`` not, and of a product of cuBLASLt, where they
      are known, ``epilogue``, ``adds_c`` (the residual), ``tile``, ``split_k``,
      ``workspace_bytes``, ``algorithm`` and ``tuned``.
    """

    function: str
    launches: tuple[dict[str, Any], ...]
    bytes_moved: int
    _lines: tuple[str, ...] = field(repr=False)  # what str() says of the launches

    @property
    def plan(self) -> dict[str, Any]:
        return self.launches[0]

    @property
    def kernels(self) -> int:
        """Kernels launched, those for sums, and for copies that have to be made, included."""
        return sum(launch["kernels"] for launch in self.launches)

    def __str__(self) -> str:
        head = f"{self.function}: {self.kernels} kernel(s), {self.bytes_moved / 1e6:.3f} MB moved"
        return "\n".join([head, *self._lines])


Launch = dict[str, Any]


class Parts:
    """What a call consists of, one part after the other."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.bytes_moved = 0
        self.lines: list[str] = []

    def add(self, launch: Launch, tensors: Sequence[Tensor | None], line: str) -> None:
        """A launch that reads or writes each of ``tensors`` once."""
        self.launches.append(launch)
        self.bytes_moved += sum(t.nbytes for t in tensors if t is not None)
        self.lines.append(line)

    def include(self, explanation: Explanation) -> None:
        self.launches += explanation.launches
        self.bytes_moved += explanation.bytes_moved
        self.lines += explanation._lines

    def explanation(self, name: str) -> Explanation:
        return Explanation(name, tuple(self.launches), self.bytes_moved, tuple(self.lines))


# A family's public functions, with what explains a call of them: given the arguments by name, and
# whether the backward is meant.
Explainers = dict[Callable[..., Any], Callable[[dict[str, Any], bool], Explanation]]


def ask(family: str, *arguments: Any, plan: str | None = None) -> Any:
    """What an operator of ``family``, its ``plan``, answers; compiles the family if needed."""
    _jit.load(family)
    return json.loads(getattr(torch.ops.fusedcuda, plan or f"{family}_plan")(*arguments))


def multiprocessors() -> int:
    """As plan operators take them: 0, the current device; where there is none, those of an H200."""
    return 0 if torch.cuda.is_available() else _H200_SMS
