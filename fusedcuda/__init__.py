"""Hand-written CUDA C++ fused kernels for PyTorch. The public names, on one screen."""

import torch as _torch  # noqa: F401  (first: a compiled library needs torch's libraries in the process)

from . import _build, _jit, _library, nn
from ._build import BuildError, kernel_source
from ._explain import explain
from ._jit import jit, load
from ._tune import tune
from ._version import __version__
from .doctor import doctor
from .ops.cross_entropy import cross_entropy
from .ops.dlrm import dot_interaction, embedding_interaction, linear_sigmoid_bce
from .ops.gated_mlp import gated_mlp
from .ops.linear_act import linear_act, linear_act_fp8, linear_residual, mlp
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.lora import LoRAWeights, lora_linear, lora_mlp
from .ops.norm import layer_norm, rms_norm
from .ops.pointwise import (
    act_mul,
    act_mul_packed,
    act_scale_bias,
    add_mul_act,
    add_relu,
    bias_act,
)
from .ops.rope import rope, rope_
from .ops.softmax import log_softmax, softmax
from .report import report

__all__ = [
    "BuildError",
    "LoRAWeights",
    "__version__",
    "act_mul",
    "act_mul_packed",
    "act_scale_bias",
    "add_mul_act",
    "add_relu",
    "bias_act",
    "cross_entropy",
    "doctor",
    "dot_interaction",
    "embedding_interaction",
    "explain",
    "gated_mlp",
    "jit",
    "kernel_source",
    "layer_norm",
    "linear_act",
    "linear_act_fp8",
    "linear_cross_entropy",
    "linear_residual",
    "linear_sigmoid_bce",
    "load",
    "log_softmax",
    "lora_linear",
    "lora_mlp",
    "mlp",
    "nn",
    "report",
    "rms_norm",
    "rope",
    "rope_",
    "softmax",
    "tune",
]

_jit.load_prebuilt()
for _family in _build.FAMILIES:
    if _family not in _jit.prebuilt.families:
        _library.install_stubs(_family)
