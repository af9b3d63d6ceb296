"""Hand-written CUDA C++ fused kernels for PyTorch. The public names, on one screen."""

import torch as _torch  # noqa: F401  (first: a compiled library needs torch's libraries in the process)

from . import _build, _jit, _library, nn
from ._build import BuildError, kernel_source
from ._explain import explain
from ._jit import jit, load
from ._version import __version__
from .doctor import doctor
from .ops.pointwise import (
    act_mul,
    act_mul_packed,
    act_scale_bias,
    add_mul_act,
    add_relu,
    bias_act,
)

__all__ = [
    "BuildError",
    "__version__",
    "act_mul",
    "act_mul_packed",
    "act_scale_bias",
    "add_mul_act",
    "add_relu",
    "bias_act",
    "doctor",
    "explain",
    "jit",
    "kernel_source",
    "load",
    "nn",
]

if not _jit.load_prebuilt():
    for _family in _build.FAMILIES:
        _library.install_stubs(_family)
