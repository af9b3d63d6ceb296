"""Calls and variants of cross-entropy, for `python -m bench.tuning.variants cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.tuning.inputs import new

# name: {text in csrc: what takes its place}
VARIANTS: dict[str, dict[str, str]] = {"as committed": {}}
SHAPES = [(8192, 32000), (8192, 128256), (2048, 262144), (8192, 50257)]


def cases() -> dict[str, Callable[[], object]]:
    """Per vocabulary: the forward that makes the gradient, the plain one, the backward."""
    raw = torch.ops.fusedcuda
    plain = (None, -100, 0.0, 0.0, 0.0, 1)  # no weight, smoothing, z-loss or cap; the mean
    extras = (None, -100, 0.1, 1e-4, 30.0, 1)
    calls: dict[str, Callable[[], object]] = {}

    def add(rows: int, classes: int) -> None:
        logits = new(rows, classes)
        target = torch.randint(classes, (rows,), device=logits.device)
        loss, statistics, normalizer = raw.cross_entropy_forward(logits, target, *plain, False)
        factor = torch.full_like(loss, 0.5)
        calls.update({
            f"fwd+grad {classes}": lambda: raw.cross_entropy_forward(logits, target, *plain, True),
            f"fwd {classes}": lambda: raw.cross_entropy_forward(logits, target, *plain, False),
            f"bwd {classes}": lambda: raw.cross_entropy_backward(
                factor, logits, target, statistics, normalizer, *plain
            ),
            f"extras {classes}": lambda: raw.cross_entropy_forward(logits, target, *extras, True),
        })  # fmt: skip

    for rows, classes in SHAPES:
        add(rows, classes)
    return calls
