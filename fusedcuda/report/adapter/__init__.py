"""Everything that the report takes from the private parts of torch, in this one package.

Read: Dynamo's graphs and the reasons why they end, Inductor's schedule, its generated source, its
reasons not to fuse, and whether CUDA graphs would take the result. Changed, for the time of a
`with` block only: what torch believes about the GPU (`pretend_cuda`), so that Inductor writes the
code for one that is not here.

None of this is a stable interface. `check_hooks` names what is missing, and every reader of the
result compares its counts with a second source (`kernels.join`), so that a new torch leads to
`FormatNotRecognised` and not to a wrong report. Tested with the versions in TESTED.
"""

from __future__ import annotations

from .dynamo import (
    Capture,
    CapturedGraph,
    capture,
    many_compilations,
    node_frame,
    node_value,
)
from .hooks import TESTED, FormatNotRecognised, check_hooks
from .inductor import compile_graph, lower, recording, trace_eager
from .pretend import fake_like, pretend_cuda, traced_device

__all__ = [
    "TESTED",
    "Capture",
    "CapturedGraph",
    "FormatNotRecognised",
    "capture",
    "check_hooks",
    "compile_graph",
    "fake_like",
    "lower",
    "many_compilations",
    "node_frame",
    "node_value",
    "pretend_cuda",
    "recording",
    "trace_eager",
    "traced_device",
]
