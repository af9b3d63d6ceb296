"""What the adapter needs of torch, and the error where it is not there."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

TESTED = ("2.11", "2.13")

_HOOKS = (
    "torch._dynamo.config.recompile_limit",
    "torch._dynamo.utils.counters",
    "torch._dynamo.device_interface.CudaInterface.Worker.get_device_properties",
    "torch._functorch.config.force_non_lazy_backward_lowering",
    "torch._inductor.compile_fx.compile_fx",
    "torch._inductor.compile_fx.compile_fx_inner",
    "torch._inductor.decomposition.select_decomp_table",
    "torch._inductor.fx_passes.joint_graph.lazy_init",
    "torch._inductor.graph.GraphLowering.codegen",
    "torch._inductor.list_mode_options",
    "torch._inductor.graph.GraphLowering.compile_to_module",
    "torch._inductor.runtime.hints.DeviceProperties.create",
    "torch._inductor.scheduler.BaseSchedulerNode.get_read_write_buffer_accesses",
    "torch._inductor.scheduler.WhyNoFuse.__call__",
    "torch._subclasses.fake_tensor.init_gpu_context",
    "torch._guards.TracingContext.try_get",
    "torch._subclasses.fake_impls.op_implementations_dict",
    "torch._C._ensureCUDADeviceGuardSet",
)


class FormatNotRecognised(RuntimeError):  # noqa: N818  (a message to a person, as it is read)
    """This torch keeps or writes its compiler's results in a form that the report does not know."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"output format not recognised: {what} (torch {torch.__version__}; the report is "
            f"tested with {' and '.join(TESTED)}). No counts are shown rather than wrong ones."
        )


def check_hooks() -> None:
    """Raises `FormatNotRecognised` naming the first private part of torch that is not there."""
    for hook in _HOOKS:
        names = hook.split(".")
        found: Any = torch
        for depth, name in enumerate(names[1:], start=2):
            if not hasattr(found, name):
                with contextlib.suppress(ImportError):
                    importlib.import_module(".".join(names[:depth]))
            if not hasattr(found, name):
                raise FormatNotRecognised(f"{hook} is missing")
            found = getattr(found, name)
