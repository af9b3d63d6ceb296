"""The kernels of linear_act on the CPU, as csrc/bindings/linear_act.cpp launches them."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import NamedTuple

import torch
from emulator import DTYPES, Library, address
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS


class Saves(IntEnum):
    """What is kept for the gradient: enum class SavedForBackward."""

    NONE = 0
    MASK = 1
    PRE_ACTIVATION = 2
    DERIVATIVE = 3


PRODUCT, GRADIENT, ACTIVATE, ACTIVATE_BACKWARD, PAD, DOT, COLUMN_SUMS, NARROW, ONE_OUTPUT = range(9)


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("dtype", "activation", "saves", "kind")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "bias", "input", "saved", "output")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("a", "b", "input", "output")),
        *((name, ctypes.c_void_p) for name in ("dy", "x", "weight", "dx", "dweight", "dbias")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("dy", "x", "weight", "dx")),
        ("b_k_is_inner", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("extra_a", "extra_b")),
        *((name, ctypes.c_int64) for name in ("extra_k", "extra_a_stride", "extra_b_stride")),
        *((name, ctypes.c_int) for name in ("num_sms", "group")),
        *((name, ctypes.c_int) for name in ("dx_columns", "dweight_columns", "splits")),
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("only_choose", "vectors", "threads_along", "slices")),
        *((name, ctypes.c_int64) for name in ("column_blocks", "workspace_bytes")),
    )

    def set_matrix(self, name: str, matrix: Tensor | None) -> None:
        setattr(self, name, address(matrix))
        if matrix is not None:
            setattr(self, f"{name}_stride", matrix.stride(0))


class SumsConfig(NamedTuple):
    """How the sums of columns, or the gradient of a layer of one output, were divided."""

    vectors: bool
    threads_along: int
    column_blocks: int
    slices: int
    workspace_bytes: int


def mask_row_bytes(n: int) -> int:
    return (n + 127) // 128 * 16


def empty_saved(saves: Saves, m: int, n: int, dtype: torch.dtype) -> Tensor | None:
    if saves is Saves.NONE:
        return None
    if saves is Saves.MASK:
        return torch.empty(m, mask_row_bytes(n), dtype=torch.uint8)
    return torch.empty(m, n, dtype=dtype)


def packed_mask(positive: Tensor) -> Tensor:
    """The bits of a matrix of truth values, as the kernels store them."""
    padded = torch.nn.functional.pad(positive, (0, -positive.shape[1] % 128))
    bits = padded.view(positive.shape[0], -1, 8).int() << torch.arange(8)
    return bits.sum(-1).to(torch.uint8)


class LinearActEmulator(Library):
    """`num_sms`: of the GPU, few of which make a block compute several tiles."""

    num_sms = 4
    columns = 0  # of the tiles of gradients; 0 to choose
    splits = 0  # of dweight; 0 to choose

    def linear_act(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        *,
        saves: Saves = Saves.NONE,
        extra: tuple[Tensor, Tensor] | None = None,
        group: int = 0,
        output: Tensor | None = None,
        kind: int = PRODUCT,
    ) -> list[Tensor]:
        """[y], or [y, what is saved of z]; `extra`: the second pair of factors, laid out alike.

        `kind`: or NARROW.
        """
        m, k = x.shape
        n = weight.shape[0]
        k_is_inner = weight.stride(1) == 1
        output = torch.empty(m, n, dtype=x.dtype) if output is None else output
        saved = empty_saved(saves, m, n, x.dtype)

        def call(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            extra_a: Tensor | None,
            extra_b: Tensor | None,
            y: Tensor,
            saved: Tensor | None,
        ) -> ctypes.Structure:
            call = _Call(
                kind=kind,
                dtype=DTYPES.index(x.dtype),
                activation=list(ACTIVATIONS).index(activation),
                saves=saves,
                m=m,
                n=n,
                k=k,
                b_k_is_inner=k_is_inner,
                bias=address(bias),
                saved=address(saved),
                num_sms=self.num_sms,
                group=group,
            )
            call.set_matrix("a", x)
            call.set_matrix("b", weight if k_is_inner else weight.T)
            call.set_matrix("output", y)
            if extra_a is not None and extra_b is not None:
                call.extra_k = extra_a.shape[1]
                call.set_matrix("extra_a", extra_a)
                call.set_matrix("extra_b", extra_b if k_is_inner else extra_b.T)
            return call

        inputs = [x, weight, bias, *(extra or (None, None))]
        return self.run("linear_act", call, inputs, [output, saved])

    def backward(
        self,
        dy: Tensor,
        saved: Tensor,
        x: Tensor | None,
        weight: Tensor | None,
        *,
        bias: bool = True,
    ) -> list[Tensor]:
        """Of dx (with a weight), dweight (with x) and dbias (with both x and `bias`), by a mask."""
        m, n = dy.shape
        k = next(t for t in (x, weight) if t is not None).shape[1]

        def empty(wanted: bool, *shape: int) -> Tensor | None:
            return torch.empty(shape, dtype=dy.dtype) if wanted else None

        outputs = [
            empty(weight is not None, m, k),
            empty(x is not None, n, k),
            empty(x is not None and bias, n),
        ]

        def call(*tensors: Tensor | None) -> ctypes.Structure:
            call = self._gradient_call(GRADIENT, m, k, *tensors)
            call.n, call.splits = n, self.splits
            call.dx_columns = call.dweight_columns = self.columns
            return call

        return self.run("linear_act_bwd", call, [dy, saved, x, weight], outputs)

    def _gradient_call(
        self,
        kind: int,
        m: int,
        k: int,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor | None,
        weight: Tensor | None,
        dx: Tensor | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> _Call:
        call = _Call(
            kind=kind,
            dtype=DTYPES.index(dy.dtype),
            m=m,
            k=k,
            saved=address(saved),
            dweight=address(dweight),
            dbias=address(dbias),
            num_sms=self.num_sms,
        )
        for name, matrix in (("dy", dy), ("x", x), ("weight", weight), ("dx", dx)):
            call.set_matrix(name, matrix)
        return call

    def act_rows(
        self,
        x: Tensor,
        activation: str,
        *,
        saves: Saves = Saves.NONE,
        saved: Tensor | None = None,
        output: Tensor | None = None,
    ) -> list[Tensor]:
        """[act(x)], with what is saved of x, or with `saved` [x * act'(z)]."""
        output = torch.empty(x.shape, dtype=x.dtype) if output is None else output
        is_backward = saved is not None
        kept = None if is_backward else empty_saved(saves, *x.shape, x.dtype)

        def call(
            x: Tensor, saved: Tensor | None, y: Tensor, kept: Tensor | None
        ) -> ctypes.Structure:
            call = _Call(
                kind=ACTIVATE_BACKWARD if is_backward else ACTIVATE,
                dtype=DTYPES.index(x.dtype),
                activation=list(ACTIVATIONS).index(activation),
                saves=saves,
                m=x.shape[0],
                n=x.shape[1],
                saved=address(saved if is_backward else kept),
            )
            call.set_matrix("input", x)
            call.set_matrix("output", y)
            return call

        return self.run("act_rows", call, [x, saved], [output, kept])

    def column_sums(
        self,
        dy: Tensor,
        activation: str = "none",
        saved: Tensor | None = None,
        *,
        saves: Saves = Saves.NONE,
        batch: int = 1,
        output: Tensor | None = None,
    ) -> list[Tensor]:
        """[dz, sums] of dy * act'(z) with `saved` and room for dz, else [sums]; `sums_config`."""
        m, n = dy.shape
        sums = torch.empty(batch, n, dtype=dy.dtype)

        def call(
            dy: Tensor, saved: Tensor | None, dz: Tensor | None, sums: Tensor
        ) -> ctypes.Structure:
            call = _Call(
                kind=COLUMN_SUMS,
                dtype=DTYPES.index(dy.dtype),
                activation=list(ACTIVATIONS).index(activation),
                saves=saves,
                m=m,
                n=n,
                saved=address(saved),
                dbias=address(sums),
                num_sms=self.num_sms,
                batch=batch,
            )
            call.set_matrix("input", dy)
            call.set_matrix("output", dz)
            return call

        return self.run("column_sums", call, [dy, saved], [output, sums], self._remember)

    def choose_column_sums(
        self, m: int, n: int, dtype: torch.dtype, *, batch: int = 1, saves: Saves = Saves.NONE
    ) -> SumsConfig:
        """For contiguous matrices on an H200."""
        call = _Call(
            kind=COLUMN_SUMS,
            dtype=DTYPES.index(dtype),
            saves=saves,
            m=batch * m,
            n=n,
            input_stride=n,
            output_stride=n,
            num_sms=132,
            batch=batch,
            only_choose=True,
        )
        self.library.emulate(ctypes.byref(call), None, ctypes.c_size_t(0))
        self._remember(call)
        return self.sums_config

    def one_output_backward(
        self,
        dy: Tensor,
        x: Tensor | None,
        weight: Tensor | None,
        saved: Tensor | None = None,
        *,
        saves: Saves = Saves.NONE,
        bias: bool = True,
        dx: Tensor | None = None,
    ) -> list[Tensor]:
        """Of dx (with a weight), dweight (with x) and dbias (with `bias`); `sums_config`.

        dy is (m, 1), the weight (1, k), and `dx` where the gradient of x is to go.
        """
        m = dy.shape[0]
        k = next(t for t in (x, weight) if t is not None).shape[1]
        if dx is None and weight is not None:
            dx = torch.empty(m, k, dtype=dy.dtype)
        dweight = None if x is None else torch.empty(k, dtype=dy.dtype)
        outputs = [dx, dweight, torch.empty(1, dtype=dy.dtype) if bias else None]

        def call(*tensors: Tensor | None) -> ctypes.Structure:
            call = self._gradient_call(ONE_OUTPUT, m, k, *tensors)
            call.saves = saves
            if (row := tensors[3]) is not None:
                call.weight_stride = row.stride(1)  # from one element of the weight to the next
            return call

        inputs = [dy, saved, x, weight]
        return self.run("one_output_bwd", call, inputs, outputs, self._remember)

    def choose_one_output(
        self, m: int, k: int, *, wanted: tuple[str, ...] = ("dx", "dweight", "dbias")
    ) -> SumsConfig:
        """For contiguous bfloat16 on an H200."""
        call = _Call(
            kind=ONE_OUTPUT,
            dtype=DTYPES.index(torch.bfloat16),
            m=m,
            k=k,
            x_stride=k,
            dx_stride=k,
            num_sms=132,
            only_choose=True,
        )
        for name in wanted:
            setattr(call, name, 1 << 12)  # an address that nobody reads
        self.library.emulate(ctypes.byref(call), None, ctypes.c_size_t(0))
        self._remember(call)
        return self.sums_config

    def _remember(self, call: ctypes.Structure) -> None:
        values = [getattr(call, name) for name in SumsConfig._fields]
        self.sums_config = SumsConfig(bool(values[0]), *values[1:])

    def pad(self, x: Tensor) -> Tensor:
        m, k = x.shape
        output = torch.empty(m, (k + 7) // 8 * 8, dtype=x.dtype)

        def call(x: Tensor, y: Tensor) -> ctypes.Structure:
            call = _Call(kind=PAD, m=m, k=k, n=y.shape[1], output=address(y))
            call.set_matrix("input", x)
            return call

        (y,) = self.run("pad_rows", call, [x], [output])
        return y

    def dot(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """x (m, k) @ weight (k) + bias (1) + residual (m)."""
        m, k = x.shape
        k_is_inner = x.stride(1) == 1

        def call(
            x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor
        ) -> ctypes.Structure:
            call = _Call(
                kind=DOT,
                dtype=DTYPES.index(x.dtype),
                m=m,
                k=k,
                b_k_is_inner=k_is_inner,
                bias=address(bias),
            )
            call.set_matrix("a", x if k_is_inner else x.T)
            call.set_matrix("b", weight)
            call.set_matrix("input", residual)
            call.set_matrix("output", y)
            return call

        inputs = [x, weight, bias, residual]
        return self.run("dot_rows", call, inputs, [torch.empty(m, dtype=x.dtype)])[0]
