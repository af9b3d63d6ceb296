"""A GPU that is not here: torch is told of one, so that Inductor writes the code for it."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..device import Device


@contextlib.contextmanager
def pretend_cuda(device: Device) -> Iterator[Any]:
    """Inside, CUDA tensors are fake and torch sees one `device`; yields the fake-tensor mode.

    Nothing can be computed, only traced and lowered. The device guard that torch needs for that
    stays installed afterwards; it is the one that `FakeTensorMode` installs itself.
    """
    from torch._dynamo import device_interface
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._inductor import codecache, config  # noqa: F401  (for _forget)
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import hints
    from torch._subclasses import FakeTensorMode, fake_impls, fake_tensor
    from torch.utils import _triton

    # Autograd starts a thread for each device that it sees the first time: only those that exist.
    torch.ones(1, requires_grad=True).sum().backward()
    torch._C._ensureCUDADeviceGuardSet()
    # Dynamo lists torch's functions once: the true ones, so it has to happen before.
    getattr(TorchInGraphFunctionVariable, "_get_handlers", _always(None))()
    properties = types.SimpleNamespace(**device.properties())
    capability = (properties.major, properties.minor)

    both = {"is_available": True, "device_count": 1, "current_device": 0, "synchronize": None}
    cuda = both | {
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "is_initialized": True,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "is_bf16_supported": True,
    }
    interface = both | {
        "get_compute_capability": 10 * capability[0] + capability[1],
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "set_device": None,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "get_raw_stream": 0,
        "is_bf16_supported": True,
    }
    names = hints.DeviceProperties._fields
    hint = hints.DeviceProperties(
        **{name: value for name, value in device.hints().items() if name in names}
    )
    lazy_init = joint_graph.lazy_init

    def lazy_init_on_the_cpu(*_: Any) -> Any:
        """Inductor's patterns are traced from small real tensors."""
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            return lazy_init(torch.device("cpu"))  # type: ignore[call-arg]

    with contextlib.ExitStack() as stack:
        _forget()
        stack.callback(_forget)

        def patch(target: Any, name: str, value: Any) -> None:
            if hasattr(target, name):  # which of them exist differs by version
                stack.enter_context(mock.patch.object(target, name, value))

        for name, value in cuda.items():
            patch(torch.cuda, name, _always(value))
        for name, value in interface.items():
            patch(device_interface.CudaInterface, name, staticmethod(_always(value)))
        worker = device_interface.CudaInterface.Worker
        patch(worker, "get_device_properties", staticmethod(_always(properties)))
        patch(worker, "current_device", staticmethod(_always(0)))
        patch(hints.DeviceProperties, "create", staticmethod(_always(hint)))
        patch(_triton, "triton_hash_with_backend", _always("no-gpu"))
        patch(joint_graph, "lazy_init", lazy_init_on_the_cpu)
        patch(fake_tensor, "init_gpu_context", _always(None))
        stack.enter_context(mock.patch("torch._dynamo.utils.preserve_rng_state", _no_state))
        implementations = fake_impls.op_implementations_dict
        for operator, known in _reading_values(implementations).items():
            stack.enter_context(mock.patch.dict(implementations, {operator: known}))
        # Whether to pad a matmul is decided by timing it.
        stack.enter_context(config.patch(shape_padding=False, max_autotune=False))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def _forget() -> None:
    """Drops what torch remembers about the GPU, so that it looks again at what is here."""
    cached = type(functools.cache(_always))
    for name in ("torch.utils._triton", "torch._inductor.utils", "torch._inductor.codecache"):
        for value in vars(sys.modules[name]).values():
            if isinstance(value, cached):
                value.cache_clear()


def _reading_values(implementations: dict[Any, Callable[..., Any]]) -> dict[Any, Any]:
    """Operators that read a value of a tensor into Python: outside of a graph it is taken as 1.

    Between two graphs the model's own Python runs, and a fake tensor has no values. Inside of a
    graph the operator has to fail as ever: that is how Dynamo learns to end it.
    """

    def standing_in(known: Callable[..., Any]) -> Callable[..., Any]:
        def read(mode: Any, operator: Any, tensor: Tensor) -> Any:
            if torch._guards.TracingContext.try_get() is not None:
                return known(mode, operator, tensor)
            return torch.ones((), dtype=tensor.dtype).tolist()

        return read

    aten = torch.ops.aten
    operators = (aten.item.default, aten._local_scalar_dense.default)
    return {name: standing_in(implementations[name]) for name in operators}


def _always(value: Any) -> Callable[..., Any]:
    """A function of its own each time: Dynamo keeps its handlers by the function's identity."""
    return lambda *_, **__: value


@contextlib.contextmanager
def _no_state() -> Iterator[None]:
    yield


def traced_device() -> str:
    """Where the model's fake tensors live while Dynamo looks at it.

    A torch built without CUDA cannot differentiate through CUDA tensors, not even fake ones.
    """
    return "cuda:0" if torch.backends.cuda.is_built() else "cpu"


def fake_like(tensor: Tensor, device: str | None = None) -> Tensor:
    """A fake tensor of the same layout; to be called inside `pretend_cuda`."""
    device = device or traced_device()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
