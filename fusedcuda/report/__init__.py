"""``fusedcuda.report``: what fused, what broke, what it costs, and what to use instead.

The parts, in the order in which a report is made: ``adapter`` (all that is private to torch),
``recording`` (what it writes down), ``wrapper`` and ``body`` (Inductor's code, parsed), ``kernels``
(both joined: the launches), ``cost``, ``breaks``, ``swap``, ``analysis`` (the report), ``result``
(its data), ``render`` and ``html``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .result import Report


def report(
    model_or_fn: Callable[..., Any],
    *inputs: Any,
    mode: str = "default",
    backward: bool = False,
    measure: bool = True,
    offline: str | None = None,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """What ``torch.compile(model_or_fn, mode=mode)(*inputs)`` launches, and what could be less.

    - ``backward``: the backward pass too, with a gradient for every output that has one.
    - ``measure``: times it on the GPU. Without, times come from a model of the GPU.
    - ``offline``: a GPU to predict for, ``"h200"``. No GPU is needed, nothing is run, and weights
      may be on the meta device. On a machine without a GPU this is what happens in any case; the
      report says so.
    - ``name`` of the subject, and ``progress``, called with what is going on.

    The result prints as text; ``save`` writes JSON, Markdown or HTML by the name's ending.

    >>> print(fusedcuda.report(model, x, offline="h200"))

    Raises ``FormatNotRecognised`` where this version of torch keeps its compiler's results in a
    form that the report does not know.
    """
    from .run import make_report

    return make_report(
        model_or_fn,
        inputs,
        mode=mode,
        backward=backward,
        measure=measure,
        offline=offline,
        name=name,
        progress=progress,
    )
