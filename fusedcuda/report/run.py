"""Which report is made: measured on the GPU that is here, or predicted for one that is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .device import DEVICES
from .offline import find_device, report_offline
from .result import Report

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_FALLBACK = "h200"


def make_report(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    mode: str,
    backward: bool,
    measure: bool,
    offline: str | None,
    name: str | None,
    progress: Callable[[str], None] | None,
) -> Report:
    if not callable(function):
        raise TypeError(f"report: expected a model or function, found {type(function).__name__}")
    if mode not in MODES:
        raise ValueError(f"report: mode: expected one of {', '.join(MODES)}, found {mode!r}")
    say = progress or _silent
    subject = name or str(getattr(function, "__name__", type(function).__name__))
    has_gpu = torch.cuda.is_available()
    if offline is None and has_gpu and measure:
        from .measure import CudaClock, report_measured

        return report_measured(
            function, inputs, name=subject, mode=mode, backward=backward, clock=CudaClock(),
            progress=say,
        )  # fmt: skip
    key = offline or (_here() if has_gpu else _FALLBACK)
    report = report_offline(
        function, inputs, name=subject, mode=mode, backward=backward, device=find_device(key),
        progress=say,
    )  # fmt: skip
    if offline is None and not has_gpu:
        missing = f"There is no GPU here, so nothing was measured: this is offline={key!r}."
        return replace(report, notes=[missing, *report.notes])
    return report


def _here() -> str:
    """The known device that this GPU is, or else the fallback."""
    name = torch.cuda.get_device_name().lower()
    return next((key for key in DEVICES if key in name), _FALLBACK)


def _silent(_: str) -> None: ...
