"""The dlrm family on the CPU, as csrc/bindings/dlrm.cpp makes it of the kernels."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from emulator import DTYPES, Library, address
from torch import Tensor

from fusedcuda.ops._operands import compute_dtype

_INTERACTION, _INTERACTION_BWD, _TABLE_GRADIENT, _HEAD, _HEAD_BWD = range(5)


def _fields(kind: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names)


class _Call(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int, "op", "dtype", "num_sms"),
        *_fields(ctypes.c_int64, "shared_bytes_of_block", "rows"),
        *_fields(ctypes.c_int, "columns", "vectors", "width", "upper"),
        *_fields(ctypes.c_void_p, "dense", "embeddings", "grad"),
        *_fields(ctypes.c_int64, "dense_stride", "sample_stride", "vector_stride", "grad_stride"),
        *_fields(ctypes.c_void_p, "indices"),
        *_fields(ctypes.c_int, "index_is_int32"),
        *_fields(ctypes.c_int64, "index_sample_stride", "index_vector_stride", "table_rows"),
        *_fields(ctypes.c_void_p, "output", "dense_grad", "embeddings_grad"),
        ("items", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "table_grad", "x"),
        ("x_stride", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "weight", "bias", "target", "grad_loss"),
        *_fields(ctypes.c_double, "pos_weight", "scale"),
        ("reduced", ctypes.c_int),
        *_fields(ctypes.c_void_p, "loss", "logits", "dlogits", "dx", "dweight", "dbias"),
        *_fields(ctypes.c_int, "path", "aligned", "aligned_row", "tiles", "stages", "threads"),
        *_fields(ctypes.c_int64, "blocks", "column_tiles"),
        *_fields(ctypes.c_int, "passes", "digit_bits", "levels"),
        ("workspace_bytes", ctypes.c_int64),
    )


def _backward_call(
    grad: Tensor, dense_grad: Tensor | None, embeddings_grad: Tensor | None, **vectors: object
) -> _Call:
    return _Call(
        op=_INTERACTION_BWD,
        width=grad.shape[1],
        grad=address(grad),
        grad_stride=grad.stride(0),
        dense_grad=address(dense_grad),
        embeddings_grad=address(embeddings_grad),
        **vectors,
    )


class DlrmEmulator(Library):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Of the GPU that the grid is made for; few: a warp has several samples.
        self.num_sms = 1
        self.shared_bytes_of_block = 227 << 10
        self.call = _Call()  # the last one, with what was chosen

    def _remember(self, call: ctypes.Structure) -> None:
        assert isinstance(call, _Call)
        self.call = call

    def _device(self) -> dict[str, int]:
        return {"num_sms": self.num_sms, "shared_bytes_of_block": self.shared_bytes_of_block}

    def _dense(self, dense: Tensor, count: int, upper: bool) -> dict[str, object]:
        return {
            "dtype": DTYPES.index(dense.dtype),
            "rows": dense.shape[0],
            "columns": dense.shape[1],
            "vectors": count + 1,
            "upper": upper,
            "dense": address(dense),
            "dense_stride": dense.stride(0),
            **self._device(),
        }

    def _vectors(self, dense: Tensor, embeddings: Tensor, upper: bool) -> dict[str, object]:
        return {
            "embeddings": address(embeddings),
            "sample_stride": embeddings.stride(0),
            "vector_stride": embeddings.stride(1),
            **self._dense(dense, embeddings.shape[1], upper),
        }

    def _lookup(
        self, dense: Tensor, weight: Tensor, indices: Tensor, upper: bool
    ) -> dict[str, object]:
        return {
            "embeddings": address(weight),
            "vector_stride": weight.stride(0),
            "indices": address(indices),
            "index_is_int32": indices.dtype == torch.int32,
            "index_sample_stride": indices.stride(0),
            "index_vector_stride": indices.stride(1),
            "table_rows": weight.shape[0],
            **self._dense(dense, indices.shape[1], upper),
        }

    def dot_interaction(self, dense: Tensor, embeddings: Tensor, upper: bool, width: int) -> Tensor:
        def make_call(dense: Tensor, embeddings: Tensor, output: Tensor) -> ctypes.Structure:
            vectors = self._vectors(dense, embeddings, upper)
            return _Call(op=_INTERACTION, width=width, output=address(output), **vectors)

        outputs = [dense.new_empty(dense.shape[0], width)]
        inputs = [dense, embeddings]
        return self.run("dot_interaction", make_call, inputs, outputs, self._remember)[0]

    def embedding_interaction(
        self, dense: Tensor, weight: Tensor, indices: Tensor, upper: bool, width: int
    ) -> Tensor:
        def make_call(
            dense: Tensor, weight: Tensor, indices: Tensor, output: Tensor
        ) -> ctypes.Structure:
            vectors = self._lookup(dense, weight, indices, upper)
            return _Call(op=_INTERACTION, width=width, output=address(output), **vectors)

        outputs = [dense.new_empty(dense.shape[0], width)]
        inputs = [dense, weight, indices]
        return self.run("embedding_interaction", make_call, inputs, outputs, self._remember)[0]

    def dot_interaction_backward(
        self, grad: Tensor, dense: Tensor, embeddings: Tensor, upper: bool
    ) -> list[Tensor]:
        def make_call(
            grad: Tensor, dense: Tensor, embeddings: Tensor, *gradients: Tensor
        ) -> ctypes.Structure:
            return _backward_call(grad, *gradients, **self._vectors(dense, embeddings, upper))

        outputs = [dense.new_empty(dense.shape), embeddings.new_empty(embeddings.shape)]
        inputs = [grad, dense, embeddings]
        return self.run("dot_interaction_backward", make_call, inputs, outputs, self._remember)

    def embedding_interaction_backward(
        self,
        grad: Tensor,
        dense: Tensor,
        weight: Tensor,
        indices: Tensor,
        upper: bool,
        mask: int,
    ) -> list[Tensor]:
        def make_call(
            grad: Tensor,
            dense: Tensor,
            weight: Tensor,
            indices: Tensor,
            *gradients: Tensor | None,
        ) -> ctypes.Structure:
            return _backward_call(grad, *gradients, **self._lookup(dense, weight, indices, upper))

        shapes = (dense.shape, (*indices.shape, dense.shape[1]))
        outputs = [
            dense.new_empty(shape) if mask >> bit & 1 else None for bit, shape in enumerate(shapes)
        ]
        inputs = [grad, dense, weight, indices]
        op = "embedding_interaction_backward"
        return self.run(op, make_call, inputs, outputs, self._remember)

    def embedding_dense_backward(self, grad: Tensor, indices: Tensor, rows: int) -> Tensor:
        def make_call(grad: Tensor, indices: Tensor, table_grad: Tensor) -> ctypes.Structure:
            return _Call(
                op=_TABLE_GRADIENT,
                dtype=DTYPES.index(grad.dtype),
                columns=grad.shape[1],
                grad=address(grad),
                indices=address(indices),
                index_is_int32=indices.dtype == torch.int32,
                table_rows=rows,
                items=indices.numel(),
                table_grad=address(table_grad),
                **self._device(),
            )

        outputs = [grad.new_empty(rows, grad.shape[1])]
        inputs = [grad, indices]
        return self.run("embedding_dense_backward", make_call, inputs, outputs, self._remember)[0]

    def _rows(self, x: Tensor, weight: Tensor, reduction: int) -> dict[str, object]:
        mean_of = x.shape[0] if reduction == 1 else 1
        return {
            "dtype": DTYPES.index(x.dtype),
            "rows": x.shape[0],
            "columns": x.shape[1],
            "x": address(x),
            "x_stride": x.stride(0),
            "weight": address(weight),
            "reduced": reduction != 0,
            "scale": 1 / mean_of if mean_of > 0 else math.inf,
            **self._device(),
        }

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        pos_weight: float,
        reduction: int,
    ) -> list[Tensor]:
        """Like torch.ops.fusedcuda.linear_sigmoid_bce_forward."""

        def make_call(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            target: Tensor,
            loss: Tensor,
            logits: Tensor,
            dlogits: Tensor,
        ) -> ctypes.Structure:
            return _Call(
                op=_HEAD,
                bias=address(bias),
                target=address(target),
                pos_weight=pos_weight,
                loss=address(loss),
                logits=address(logits),
                dlogits=address(dlogits),
                **self._rows(x, weight, reduction),
            )

        logits = x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype))
        loss = logits.new_empty(() if reduction else logits.shape)
        outputs = [loss, logits, logits.new_empty(logits.shape)]
        inputs = [x, weight, bias, target]
        return self.run("linear_sigmoid_bce", make_call, inputs, outputs, self._remember)

    def backward(
        self,
        grad_loss: Tensor,
        x: Tensor,
        weight: Tensor,
        dlogits: Tensor,
        mask: int,
        reduction: int,
    ) -> list[Tensor]:
        """Like torch.ops.fusedcuda.linear_sigmoid_bce_backward."""

        def make_call(
            grad_loss: Tensor,
            x: Tensor,
            weight: Tensor,
            dlogits: Tensor,
            dx: Tensor | None,
            dweight: Tensor | None,
            dbias: Tensor | None,
        ) -> ctypes.Structure:
            return _Call(
                op=_HEAD_BWD,
                grad_loss=address(grad_loss),
                dlogits=address(dlogits),
                dx=address(dx),
                dweight=address(dweight),
                dbias=address(dbias),
                **self._rows(x, weight, reduction),
            )

        gradients = [x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(1)]
        outputs = [g if mask >> bit & 1 else None for bit, g in enumerate(gradients)]
        inputs = [grad_loss, x, weight, dlogits]
        op = "linear_sigmoid_bce_backward"
        return self.run(op, make_call, inputs, outputs, self._remember)
