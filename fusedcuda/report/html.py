"""The report as one HTML file that needs no network: styles, script and data are in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .render import OPAQUE, heading, microseconds, shorten_path
from .result import Kernel, Report
from .units import megabytes, signed

# One hue a kind, told apart in both themes and by those who do not see red and green apart.
_KINDS = {
    "matmul": 1,
    "convolution": 1,
    "attention": 2,
    "reduction": 3,
    "persistent reduction": 3,
    "pointwise": 4,
    "template": 4,
    "copy": 5,
    "custom": 6,
}
_OTHER = 7


def html(report: Report) -> str:
    folder = Path(__file__).parent
    # Names come from the model: everything is escaped unless the template says otherwise.
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(
        bytes=megabytes, signed=signed, us=microseconds, short=shorten_path, hue=_hue
    )
    template = environment.get_template("report.html.j2")
    return template.render(report=report, heading=heading(report), opaque=OPAQUE, **_scales(report))


def _hue(kernel: Kernel) -> int:
    return _KINDS.get(kernel.kind, _OTHER)


def _scales(report: Report) -> dict[str, Any]:
    """What the lengths of the bars are relative to."""
    kinds = {kernel.kind: _hue(kernel) for kernel in report.kernels}
    return {
        "step_us": sum(span.us for span in report.timeline) or 1.0,
        "most_us": max((kernel.us for kernel in report.kernels), default=1.0) or 1.0,
        "most_bytes": max((k.bytes_in + k.bytes_out for k in report.kernels), default=1) or 1,
        "most_gpu_us": max((item.gpu_us for item in report.variants), default=1.0) or 1.0,
        "most_variant_bytes": max((item.bytes for item in report.variants), default=1) or 1,
        "kinds": kinds,
    }
