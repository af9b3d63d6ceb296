"""Cross-entropy on the CPU, as csrc/bindings/cross_entropy.cpp makes it of the kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from emulator import address
from row_emulator import Chosen, Matrix, RowLibrary, Rows
from torch import Tensor

from fusedcuda.ops._cross_entropy_reference import REDUCTIONS


class _Call(ctypes.Structure):
    _fields_ = (
        ("rows", Rows),
        *((name, Matrix) for name in ("logits", "gradient")),
        *((name, ctypes.c_void_p) for name in ("target", "weight", "grad_loss")),
        *((name, ctypes.c_void_p) for name in ("loss", "statistics", "normalizer")),
        ("target_is_int32", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("ignore_index", "grad_stride")),
        *((name, ctypes.c_double) for name in ("label_smoothing", "z_loss", "softcap")),
        *((name, ctypes.c_int) for name in ("reduction", "is_part", "unless_one", "backward")),
        ("chosen", Chosen),
        *((name, ctypes.c_int) for name in ("totals_cluster", "tiles")),
    )


@dataclass(frozen=True)
class Options:
    """Of a loss; as for fusedcuda.cross_entropy, but that softcap 0 is none."""

    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    ignore_index: int = -100

    @property
    def code(self) -> int:
        return REDUCTIONS[self.reduction]

    def raw(self, weight: Tensor | None) -> tuple[object, ...]:
        """The arguments of the raw operators behind their tensors."""
        numbers = (self.label_smoothing, self.z_loss, self.softcap)
        return weight, self.ignore_index, *numbers, self.code

    def fields(self) -> dict[str, object]:
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "reduction": self.code,
        }


PLAIN = Options()


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class CrossEntropyEmulator(RowLibrary):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.totals_cluster = 0  # of the last forward
        self.tiles = 0  # of the last backward

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        options: Options = PLAIN,
        with_gradient: bool = False,
    ) -> list[Tensor]:
        """[loss, statistics, normalizer] and, with_gradient, that of the logits."""

        def call(
            logits: Tensor,
            target: Tensor,
            weight: Tensor | None,
            loss: Tensor,
            statistics: Tensor,
            normalizer: Tensor,
            gradient: Tensor | None,
        ) -> ctypes.Structure:
            return _Call(
                rows=self.rows_of(logits),
                logits=Matrix.of(logits),
                gradient=Matrix.of(gradient),
                target=address(target),
                target_is_int32=target.dtype == torch.int32,
                weight=address(weight),
                loss=address(loss),
                statistics=address(statistics),
                normalizer=address(normalizer),
                **options.fields(),
            )

        def remember(call: ctypes.Structure) -> None:
            self.remember(call)
            self.totals_cluster = call.totals_cluster

        dtype = compute_dtype(logits)
        reduced = options.reduction != "none"
        shapes = (() if reduced else target.shape, (*target.shape, 2), (2 if reduced else 0,))
        outputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        gradient = torch.empty(logits.shape, dtype=logits.dtype) if with_gradient else None
        inputs = [logits, target, weight]
        return self.run("cross_entropy", call, inputs, [*outputs, gradient], remember)

    def rows(
        self,
        logits: Tensor,
        target: Tensor,
        normalizer: Tensor,
        options: Options = PLAIN,
        with_gradient: bool = False,
    ) -> list[Tensor]:
        """[losses, statistics, logits], of which the last are their gradient if that is wanted."""

        def call(
            logits: Tensor,
            target: Tensor,
            normalizer: Tensor,
            losses: Tensor,
            statistics: Tensor,
            written: Tensor,
        ) -> ctypes.Structure:
            return _Call(
                rows=self.rows_of(logits),
                logits=Matrix.of(logits),
                gradient=Matrix.of(written if with_gradient else None),
                target=address(target),
                target_is_int32=target.dtype == torch.int32,
                loss=address(losses),
                statistics=address(statistics),
                normalizer=address(normalizer),
                is_part=True,
                **options.fields(),
            )

        dtype = compute_dtype(logits)
        losses, statistics = (
            torch.empty(shape, dtype=dtype) for shape in (target.shape, (*target.shape, 2))
        )
        inputs, outputs = [logits, target, normalizer], [losses, statistics, logits]
        return self.run("cross_entropy_rows_", call, inputs, outputs, self.remember)

    def backward(
        self,
        grad_loss: Tensor,
        logits: Tensor,
        target: Tensor,
        statistics: Tensor,
        normalizer: Tensor,
        weight: Tensor | None = None,
        options: Options = PLAIN,
        *,
        gradient: Tensor | None = None,
        unless_one: bool = False,
    ) -> Tensor:
        """The gradient; written to `gradient`, which may be the logits, if that is given."""

        def call(
            grad_loss: Tensor,
            logits: Tensor,
            target: Tensor,
            statistics: Tensor,
            normalizer: Tensor,
            weight: Tensor | None,
            before: Tensor | None,
            gradient: Tensor,
        ) -> ctypes.Structure:
            return _Call(
                rows=self.rows_of(logits),
                logits=Matrix.of(logits),
                gradient=Matrix.of(gradient),
                target=address(target),
                target_is_int32=target.dtype == torch.int32,
                weight=address(weight),
                grad_loss=address(grad_loss),
                grad_stride=grad_loss.stride(0) if grad_loss.dim() else 0,
                statistics=address(statistics),
                normalizer=address(normalizer),
                unless_one=unless_one,
                backward=True,
                **options.fields(),
            )

        def remember(call: ctypes.Structure) -> None:
            self.remember(call)
            self.tiles = call.tiles

        output = torch.empty(logits.shape, dtype=logits.dtype) if gradient is None else gradient
        # As an input too, what is given keeps its values until the kernel writes others.
        inputs = [grad_loss, logits, target, statistics, normalizer, weight, gradient]
        (result,) = self.run("cross_entropy_backward", call, inputs, [output], remember)
        return result
