"""Turns what compilers and the loader print into the lines that matter and the remedy."""

from __future__ import annotations

import re

_MAX_LINES = 24

# Lines of ninja and the command lines it echoes; everything else is the compilers' own words.
_NINJA = re.compile(r"^(\[\d+/\d+\]|FAILED:|ninja:|\d+ errors? detected in)")
_ECHOED_COMMAND = re.compile(r"^\S*(nvcc|cc|c\+\+|g\+\+\S*|clang\+\+\S*) .*(-c|-shared|-o) ")
_ERROR = re.compile(r"(?i)\berror\b|\bfatal\b|undefined reference|cannot find -l|No such file")

# (what the log contains, what to tell). The order is from the specific to the general.
_BUILD_HINTS = (
    (
        r"exception specification is incompatible.*|.*\b(cospi|sinpi|rsqrt)f?\b.*exception",
        "The C library (glibc 2.41 or newer) declares functions that this CUDA version declares "
        "differently: use a CUDA 13 toolkit of a later minor version, or an older base system.",
    ),
    (
        r"unsupported GNU version|unsupported clang version",
        "The host compiler is too new for this nvcc: install an older g++ and "
        "export CC=gcc-13 CXX=g++-13.",
    ),
    (
        r"Unsupported gpu architecture '?(\w+)",
        "This nvcc does not know that architecture: use a newer CUDA toolkit, or set "
        "TORCH_CUDA_ARCH_LIST to one that `nvcc --list-gpu-code` prints.",
    ),
    (
        r"\bKilled\b|signal 9|code[ =]137|virtual memory exhausted|Cannot allocate memory",
        "The compiler was killed, probably for want of memory: export MAX_JOBS=1 and try again.",
    ),
    (
        r"No space left on device",
        "The disk is full: free some space, or export FUSEDCUDA_CACHE_DIR=/some/other/disk "
        "(TMPDIR for the compiler's temporary files).",
    ),
    (
        r"cublas(Lt|_v2)?\.h: No such file",
        "The cuBLAS headers are missing: pip install nvidia-cublas (conda: libcublas-dev).",
    ),
    (
        r"(cuda_runtime|cuda_fp16|cuda_bf16|nv/target)(\.h)?: No such file",
        "Headers of the CUDA toolkit are missing: install the complete toolkit, or "
        "pip install 'cuda-toolkit[nvcc,cccl]'.",
    ),
    (
        r"cannot find -lcudart",
        "The CUDA runtime library is missing from the toolkit: install cuda-cudart-dev, or "
        "pip install 'cuda-toolkit[nvcc,cccl]'.",
    ),
)

_BUILD_AGAIN = "Build it again: `python -m fusedcuda doctor` shows the command."

_LOAD_HINTS = (
    (
        r"undefined symbol",
        f"It was built for another torch. {_BUILD_AGAIN}",
    ),
    (
        r"(GLIBCXX|CXXABI)_[\d.]+.*not found",
        "It was compiled with a newer g++ than the libstdc++ that this Python has loaded: "
        "conda install -c conda-forge libstdcxx-ng, or build with "
        "CXX=$CONDA_PREFIX/bin/x86_64-conda-linux-gnu-g++.",
    ),
    (
        r"lib(c10|torch)\w*\.so.*cannot open",
        "torch must be imported first, and must be the one it was built for: "
        "python -c 'import torch, fusedcuda'",
    ),
    (
        r"libcud\w+\.so.*cannot open|libcublas\w*\.so.*cannot open",
        f"It was built for another CUDA major version than torch's. {_BUILD_AGAIN}",
    ),
    (
        r"file too short|invalid ELF|wrong ELF|failed to map|corrupt",
        "The file is damaged: delete it and build again.",
    ),
)


def build_failure(log: str) -> str:
    """The compilers' own messages from a ninja log, and a hint where the cause is known."""
    lines = [
        line.rstrip()
        for line in re.sub(r"Error building extension '\w+': ", "", log).splitlines()
        if line.strip() and not _NINJA.match(line) and not _ECHOED_COMMAND.match(line)
    ]
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), 0)
    shown = lines[first : first + _MAX_LINES] or ["(the compiler printed nothing)"]
    return "\n".join(["  " + line for line in shown] + _matching_hints(_BUILD_HINTS, log))


def load_failure(error: OSError) -> str:
    """The loader's message (torch hides it behind one of its own) and what it means."""
    message = str(error.__cause__ or error)
    return "\n".join([message.strip(), *_matching_hints(_LOAD_HINTS, message)])


def _matching_hints(hints: tuple[tuple[str, str], ...], text: str) -> list[str]:
    return next(([hint] for pattern, hint in hints if re.search(pattern, text)), [])
