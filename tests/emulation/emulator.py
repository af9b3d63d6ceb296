"""Runs the CUDA kernels on the CPU: builds csrc/kernels with g++ against an emulated CUDA.

Every call runs twice, with blocks and threads in ascending and in descending order, and must give
the same bits. All tensors lie in memory that faults at its ends; outputs and workspaces start as
NaN, and whatever lies beside and between the elements of a tensor must be unchanged afterwards.

What is emulated is in include/cuda_runtime.h, which errors are found in execution.h. Not: inline
PTX, which csrc/kernels/common wraps, and polling of memory by other means than grid_counter.cuh.

To add a family, such as norm:

- entry_norm.cpp defines a struct Call with what one operator's kernels need (pointers, sizes, and
  fields for what the test wants to know of the configuration), and

      EXPORT int emulate(Call* call, char* error, size_t error_size) {
        return emulation::report_errors(error, error_size, [&] { ... });
      }

  which chooses configurations and launches as the binding does, with check_launch() around
  launchers and emulation::Workspace for memory besides tensors (entry.h).
- norm_emulator.py has the same Call as a ctypes.Structure, and a class that makes it:

      class NormEmulator(Library):
          def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
              def call(x: Tensor, weight: Tensor | None, y: Tensor) -> ctypes.Structure:
                  return Call(x=address(x), weight=address(weight), y=address(y), ...)

              (y,) = self.run("rms_norm", call, [x, weight], [torch.empty_like(x)])
              return y

- its test has a fixture that makes the class of the library: NormEmulator(build_family("norm")).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fusedcuda._build import csrc_dir

HERE = Path(__file__).parent
CSRC = csrc_dir()

# In the order of enum class DType.
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
INCLUDES = (HERE / "include", HERE, CSRC)
EMULATION = tuple(sorted(set(HERE.glob("*.cpp")) - set(HERE.glob("entry_*.cpp"))))

Argument = TypeVar("Argument")  # a tensor, or whatever else a call passes on


class EmulationError(AssertionError):
    """A kernel did what would be an error, a race or undefined behaviour on a GPU."""


# ---- Building ------------------------------------------------------------------------------------


def find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def build(sources: Sequence[Path], folder: Path) -> Path:
    """A library of `sources` and the emulation in `folder`; built if it is not there.

    Processes that want the same one at the same time build it once.
    """
    compiler = find_compiler()
    digest = hashlib.sha256(repr((compiler, FLAGS, KERNEL_FLAGS)).encode())
    for path in sorted(_with_headers([*sources, *EMULATION])):
        digest.update(path.read_bytes())
    library = folder / f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"
    with open(folder / f"{sources[0].stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, [*sources, *EMULATION], library)
    return library


def _with_headers(sources: Iterable[Path]) -> set[Path]:
    """The files, and those in INCLUDES or beside them that they include."""
    found: set[Path] = set()
    remaining = list(sources)
    while remaining:
        path = remaining.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^ *# *include *[<"]([^>"]+)', path.read_text(), re.MULTILINE):
            candidates = [(folder / name).resolve() for folder in (path.parent, *INCLUDES)]
            remaining += filter(Path.is_file, candidates)
    return found


def _compile(compiler: str | None, sources: Sequence[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        linked = Path(scratch, "linked.so")
        objects = [Path(scratch, f"{source.stem}-{i}.o") for i, source in enumerate(sources)]
        for source, built in zip(sources, objects, strict=True):
            flags = [*FLAGS, *(KERNEL_FLAGS if source.suffix == ".cu" else ())]
            flags += [f"-I{path}" for path in INCLUDES]
            command = [compiler, *flags, "-x", "c++", "-c", source, "-o", built]
            subprocess.run(command, check=True)
        subprocess.run([compiler, "-shared", *objects, "-o", linked], check=True)
        linked.replace(library)  # in one step: it is never there by halves


# ---- Calling -------------------------------------------------------------------------------------


class Library:
    """What `build` made of the kernels of a family and of its entry_<family>.cpp."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.guarded_create.restype = ctypes.c_void_p
        self.library.guarded_data.restype = ctypes.c_void_p

    def run(
        self,
        op: str,
        make_call: Callable[..., ctypes.Structure],
        inputs: Sequence[object],
        outputs: Sequence[object],
        returned: Callable[[ctypes.Structure], None] = lambda call: None,
    ) -> list[Tensor]:
        """What emulate() writes to the tensors among `outputs`, which themselves stay as they are.

        `make_call` gets the inputs and the outputs, with tensors moved to guarded memory. Views of
        one storage stay in one: an output that is also an input is worked on in place. `returned`
        is shown the Call afterwards.
        """
        arguments = (op, make_call, inputs, outputs, returned)
        ascending = self._run_in_order(*arguments, descending=False)
        descending = self._run_in_order(*arguments, descending=True)
        for a, b in zip(ascending, descending, strict=True):
            if not torch.equal(_bits(a), _bits(b)):
                raise EmulationError(f"{op}: the result depends on the order of blocks or threads")
        return ascending

    def _run_in_order(
        self,
        op: str,
        make_call: Callable[..., ctypes.Structure],
        inputs: Sequence[object],
        outputs: Sequence[object],
        returned: Callable[[ctypes.Structure], None],
        descending: bool,
    ) -> list[Tensor]:
        with contextlib.ExitStack() as stack:
            memories: dict[int, GuardedStorage] = {}

            def memory_of(tensor: Tensor, is_output: bool) -> GuardedStorage:
                key = tensor.untyped_storage().data_ptr()
                if key not in memories:
                    memory = GuardedStorage(self.library, tensor.untyped_storage(), is_output)
                    memories[key] = stack.enter_context(memory)
                return memories[key]

            def placed(argument: Argument, is_output: bool) -> Argument | Tensor:
                if not isinstance(argument, Tensor):
                    return argument
                return memory_of(argument, is_output).like(argument)

            sources = [placed(x, is_output=False) for x in inputs]
            targets = [placed(x, is_output=True) for x in outputs]
            call = make_call(*sources, *targets)
            error = ctypes.create_string_buffer(1000)
            self.library.set_reversed(descending)
            status = self.library.emulate(ctypes.byref(call), error, ctypes.c_size_t(len(error)))
            if status != 0:
                raise EmulationError(f"{op}: {error.value.decode()}")
            returned(call)
            results = [target.clone() for target in targets if isinstance(target, Tensor)]
            for output in outputs:
                if isinstance(output, Tensor):
                    memory_of(output, is_output=True).forget(output)
            for memory in memories.values():
                memory.check(op)
            return results


class GuardedStorage:
    """A copy of a storage in memory that faults at its ends; of an output, filled with NaN."""

    def __init__(self, library: ctypes.CDLL, storage: torch.UntypedStorage, is_output: bool):
        self.library = library
        self.size = storage.nbytes()
        self.handle = ctypes.c_void_p(library.guarded_create(ctypes.c_size_t(self.size)))
        data = library.guarded_data(self.handle)
        raw = (ctypes.c_char * self.size).from_address(data)
        self.bytes = torch.tensor([], dtype=torch.int8)
        if self.size > 0:
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
        return _view_like(tensor, self.bytes)

    def forget(self, output: Tensor) -> None:
        """The elements of an output may be anything; what is between them is checked."""
        for memory in (self.bytes, self.expected):
            _bits(_view_like(output, memory)).fill_(-1)

    def check(self, op: str) -> None:
        if not torch.equal(self.bytes, self.expected):
            raise EmulationError(
                f"{op}: an input changed, or something between an output's elements"
            )
        if not self.library.guarded_is_intact(self.handle):
            raise EmulationError(f"{op}: the kernels wrote beside a tensor")


def address(tensor: Tensor | None) -> int | None:
    """For a c_void_p of a Call."""
    return None if tensor is None else tensor.data_ptr()


def _view_like(tensor: Tensor, memory: Tensor) -> Tensor:
    elements = memory.view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])
