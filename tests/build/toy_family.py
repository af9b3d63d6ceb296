"""A tiny stand-in for csrc, so that tests of the build take seconds: one op, no tensors, no GPU.

The op is of the family pointwise; the others' sources are there and empty.

`torch.ops.fusedcuda_toy.answer()` returns the number in kernels/common/answer.h, which tells which
build is loaded.
"""

from pathlib import Path

from fusedcuda._build import FAMILIES

_KERNEL = """\
#include "pointwise.h"

#include "common/answer.h"

__global__ void answer_kernel(int* out) { *out = kAnswer; }

int launch_answer() { return kAnswer; }
"""

_HEADER = """\
#pragma once
int launch_answer();
"""

_BINDING = """\
#include "../kernels/pointwise.h"

#include <torch/csrc/stable/library.h>

static int64_t answer() { return launch_answer(); }

STABLE_TORCH_LIBRARY_IMPL(fusedcuda_toy, CompositeExplicitAutograd, m) {
  m.impl("answer", TORCH_BOX(&answer));
}
"""


def write(csrc: Path, answer: int = 1) -> Path:
    """Writes the tree and returns its root, which goes into FUSEDCUDA_CSRC."""
    for name, text in {
        "kernels/pointwise.cu": _KERNEL,
        "kernels/pointwise.h": _HEADER,
        "bindings/pointwise.cpp": _BINDING,
    }.items():
        path = csrc / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for family in FAMILIES:
        if family != "pointwise":
            (csrc / "kernels" / f"{family}.cu").touch()
            (csrc / "bindings" / f"{family}.cpp").touch()
    set_answer(csrc, answer)
    return csrc


def set_answer(csrc: Path, answer: int) -> None:
    """Edits the header that the kernel includes."""
    header = csrc / "kernels" / "common" / "answer.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(f"#pragma once\nconstexpr int kAnswer = {answer};\n")
