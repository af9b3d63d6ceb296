"""Runs the CUDA kernels on the CPU: builds csrc/kernels with g++ against an emulated CUDA.

Every call runs twice, with blocks and threads in ascending and in descending order, and must give
the same bits. All tensors lie in memory that faults at its ends; outputs and workspaces start as
NaN, and whatever lies beside and between the elements of a tensor must be unchanged afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fusedcuda._build import csrc_dir
from fusedcuda.ops._activations import ACTIVATIONS
from fusedcuda.ops._operands import empty_output

HERE = Path(__file__).parent
CSRC = csrc_dir()

# In the order of enum class PointwiseOp and DType.
OPS = ("bias_act", "add_mul_act", "act_scale_bias", "act_mul")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# The order of a thread's instructions does not matter to these checks, so -O1. The sanitizer traps
# on misaligned vectors, overflowing indices and array bounds; execution.cpp reports the thread.
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-fvisibility=hidden")
KERNEL_FLAGS = (
    "-D__CUDACC__",
    "-fsanitize=undefined",
    "-fno-sanitize=vptr",
    "-fsanitize-undefined-trap-on-error",
)


def find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def build(sources: Sequence[Path], folder: Path) -> Path:
    """A library of `sources` and the emulation in `folder`; built if it is not there."""
    compiler = find_compiler()
    includes = [f"-I{path}" for path in (HERE / "include", HERE, CSRC)]
    sources = [*sources, HERE / "execution.cpp"]
    digest = hashlib.sha256(repr((compiler, FLAGS, KERNEL_FLAGS)).encode())
    headers = [p for root in (HERE, CSRC / "kernels") for p in root.rglob("*.*h")]
    for path in [*sources, *sorted(headers)]:
        digest.update(path.read_bytes())
    library = folder / f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        linked = Path(scratch, "linked.so")
        objects = [Path(scratch, f"{source.stem}.o") for source in sources]
        for source, built in zip(sources, objects, strict=True):
            flags = [*FLAGS, *(KERNEL_FLAGS if source.suffix == ".cu" else ()), *includes]
            command = [compiler, *flags, "-x", "c++", "-c", source, "-o", built]
            subprocess.run(command, check=True)
        subprocess.run([compiler, "-shared", *objects, "-o", linked], check=True)
        linked.replace(library)  # in one step: another process may be about to load it
    return library


class _Launch(ctypes.Structure):
    _fields_ = (
        ("path", ctypes.c_char_p),
        ("gradients", ctypes.c_char_p * 3),
        ("vec", ctypes.c_int),
        ("num_partials", ctypes.c_int),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("number", ctypes.c_double),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_int),
        ("activation", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("wanted", ctypes.c_uint),
        ("num_sms", ctypes.c_int),
        ("max_grid_y", ctypes.c_int),
        ("reversed", ctypes.c_int),
        ("num_dims", ctypes.c_int),
        ("num_tensors", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("tensors", ctypes.POINTER(_Tensor)),
    )


@dataclass(frozen=True)
class Launch:
    """What pointwise_config.h chose for one launch."""

    path: str
    gradients: tuple[str, ...]
    vec: int
    num_partials: int


class EmulationError(AssertionError):
    """A kernel did what would be an error, a race or undefined behaviour on a GPU."""


class Emulator:
    """The pointwise kernels of a library that `build` made."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.guarded_create.restype = ctypes.c_void_p
        self.library.guarded_data.restype = ctypes.c_void_p
        self.num_sms = 4  # of the GPU that the grids are made for
        self.max_grid_y = 65535
        self.launches: list[Launch] = []  # of the last call

    # ---- The operators, as csrc/bindings/pointwise.cpp makes them of the kernels -----------------

    def forward(self, op: str, activation: str, *operands: Tensor | float) -> Tensor:
        """Like torch.ops.fusedcuda.<op> on a GPU; a 0-d tensor is one there, not a number."""
        output = empty_output(*(x for x in operands if isinstance(x, Tensor)))
        (result,) = self._call(op, activation, operands, {0: output}, output.shape, wanted=0)
        return result

    def backward(
        self,
        op: str,
        activation: str,
        grad: Tensor,
        *operands: Tensor | float,
        wanted: Sequence[int],
        shapes: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Gradients of the operands in `wanted`, which look like them, or like `shapes`."""
        like = shapes or operands
        outputs = {k: torch.empty_like(like[k]) for k in wanted}
        mask = sum(1 << k for k in wanted)
        return self._call(op, activation, [*operands, grad], outputs, grad.shape, mask)

    def packed(self, activation: str, gate_up: Tensor) -> Tensor:
        halves = gate_up.chunk(2, dim=-1)
        output = torch.empty(halves[0].shape, dtype=gate_up.dtype)
        (result,) = self._call("act_mul", activation, halves, {0: output}, output.shape, wanted=0)
        return result

    def packed_backward(self, activation: str, grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        output = torch.empty(gate_up.shape, dtype=gate_up.dtype)
        outputs = dict(enumerate(output.chunk(2, dim=-1)))
        results = self._call("act_mul", activation, [gate, up, grad], outputs, grad.shape, 0b11)
        return torch.cat(results, dim=-1)

    # ---- One call --------------------------------------------------------------------------------

    def _call(
        self,
        op: str,
        activation: str,
        inputs: Sequence[Tensor | float],
        outputs: dict[int, Tensor],
        shape: torch.Size,
        wanted: int,
    ) -> list[Tensor]:
        arguments = (op, activation, inputs, outputs, shape, wanted)
        ascending = self._call_in_order(*arguments, descending=False)
        descending = self._call_in_order(*arguments, descending=True)
        for a, b in zip(ascending, descending, strict=True):
            if not torch.equal(_bits(a), _bits(b)):
                raise EmulationError(f"{op}: the result depends on the order of blocks or threads")
        return ascending

    def _call_in_order(
        self,
        op: str,
        activation: str,
        inputs: Sequence[Tensor | float],
        outputs: dict[int, Tensor],
        shape: torch.Size,
        wanted: int,
        descending: bool,
    ) -> list[Tensor]:
        with contextlib.ExitStack() as stack:
            memories: dict[int, GuardedStorage] = {}

            def placed(tensor: Tensor, is_output: bool) -> Tensor:
                """The tensor in guarded memory; views of one storage stay in one."""
                key = tensor.untyped_storage().data_ptr()
                if key not in memories:
                    memory = GuardedStorage(self.library, tensor.untyped_storage(), is_output)
                    memories[key] = stack.enter_context(memory)
                return memories[key].like(tensor)

            sources = [placed(x, False) if isinstance(x, Tensor) else x for x in inputs]
            targets = {k: placed(x, True) for k, x in outputs.items()}
            num_outputs = 1 if wanted == 0 else len(inputs) - 1
            tensors: list[Tensor | float] = [
                *sources,
                *(targets.get(k, 0.0) for k in range(num_outputs)),
            ]
            self.launches = self._run(op, activation, tensors, shape, wanted, descending)
            results = [target.clone() for target in targets.values()]
            for target in targets.values():
                _bits(target).fill_(-1)  # what remains of NaN is what the kernels must not touch
            for memory in memories.values():
                memory.check(op)
            return results

    def _run(
        self,
        op: str,
        activation: str,
        tensors: Sequence[Tensor | float],
        shape: torch.Size,
        wanted: int,
        descending: bool,
    ) -> list[Launch]:
        def int64s(values: Sequence[int]) -> ctypes.Array:
            return (ctypes.c_int64 * len(values))(*values)

        described = (_Tensor * len(tensors))()
        for entry, tensor in zip(described, tensors, strict=True):
            if isinstance(tensor, Tensor):
                entry.data = tensor.data_ptr()
                entry.strides = int64s(tensor.expand(shape).stride())
            else:
                entry.number = tensor
        dtype = next(x.dtype for x in tensors if isinstance(x, Tensor))
        call = _Call(
            OPS.index(op),
            ACTIVATIONS[activation],
            DTYPES.index(dtype),
            wanted,
            self.num_sms,
            self.max_grid_y,
            descending,
            len(shape),
            len(tensors),
            int64s(shape),
            described,
        )
        launches = (_Launch * 3)()
        error = ctypes.create_string_buffer(1000)
        count = self.library.emulate_pointwise(
            ctypes.byref(call), launches, error, ctypes.c_size_t(len(error))
        )
        if count < 0:
            raise EmulationError(f"{op}: {error.value.decode()}")
        return [
            Launch(
                launch.path.decode(),
                tuple(kind.decode() for kind in launch.gradients if kind),
                launch.vec,
                launch.num_partials,
            )
            for launch in launches[:count]
        ]


class GuardedStorage:
    """A copy of a storage in memory that faults at its ends; of an output, filled with NaN."""

    def __init__(self, library: ctypes.CDLL, storage: torch.UntypedStorage, is_output: bool):
        self.library = library
        self.size = storage.nbytes()
        self.handle = ctypes.c_void_p(library.guarded_create(ctypes.c_size_t(self.size)))
        data = library.guarded_data(self.handle)
        raw = (ctypes.c_char * self.size).from_address(data)
        self.bytes = torch.frombuffer(raw, dtype=torch.int8)
        if not is_output:
            self.bytes.copy_(torch.tensor([], dtype=torch.int8).set_(storage))
        self.expected = self.bytes.clone()

    def __enter__(self) -> GuardedStorage:
        return self

    def __exit__(self, *exception: object) -> None:
        self.library.guarded_destroy(self.handle)

    def like(self, tensor: Tensor) -> Tensor:
        """The view of this memory that `tensor` is of its own."""
        elements = self.bytes.view(tensor.dtype)
        return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def check(self, op: str) -> None:
        if not torch.equal(self.bytes, self.expected):
            raise EmulationError(
                f"{op}: an input changed, or something between an output's elements"
            )
        if not self.library.guarded_is_intact(self.handle):
            raise EmulationError(f"{op}: the kernels wrote beside a tensor")


def _bits(tensor: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])
