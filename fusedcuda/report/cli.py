"""`python -m fusedcuda report TARGET`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import operator
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fusedcuda.demo.progress import Progress

from .adapter import FormatNotRecognised
from .device import DEVICES
from .result import Report
from .run import MODES

_OPERATORS = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
    ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*([-+.\deE]+)\s*")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 where a --fail-on condition holds, 2 where no report could be made."""
    options = _parser().parse_args(argv)
    progress = Progress()
    try:
        conditions = [parse_condition(text) for text in options.fail_on]
        old = _read(options.diff) if options.diff else None
        report = _make(options, progress)
    except (
        FormatNotRecognised,
        ValueError,
        TypeError,
        RuntimeError,
        OSError,
        ImportError,
    ) as error:
        progress.clear()
        print(f"report: {str(error).removeprefix('report: ')}", file=sys.stderr)
        return 2
    progress.clear()
    for path in filter(None, (options.json, options.md, options.html)):
        report.save(path)
        print(f"wrote {path}", file=sys.stderr)
    print(report)
    if old is not None:
        from .diff import diff

        print(f"\n{diff(old, report)}")
    return _failures(report, conditions)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fusedcuda report",
        description="What torch.compile fuses in a model, what breaks it, what it costs, "
        "and which fusedcuda op to use instead.",
    )
    add = parser.add_argument
    add(
        "target",
        help="package.module:function or file.py:function; it returns the model (or a function) "
        "and its inputs: (model, x) or (model, (x, y))",
    )
    add("--backward", action="store_true", help="the backward pass too")
    add("--mode", choices=MODES, default="default", help="of torch.compile")
    add("--offline", choices=DEVICES, help="predict for this GPU; needs none and runs nothing")
    add("--no-measure", action="store_true", help="on a GPU: predict instead of timing")
    add("--ncu", action="store_true", help="count HBM bytes with Nsight Compute (on a GPU)")
    add("--json", metavar="FILE", help="write the report as JSON, for --diff and other programs")
    add("--md", metavar="FILE", help="write it as Markdown")
    add("--html", metavar="FILE", help="write it as one HTML file")
    add(
        "--fail-on",
        metavar="CONDITION",
        action="append",
        default=[],
        help="exit with 1 if this holds, such as 'breaks>0' (graph breaks), 'kernels>20', "
        "'avoidable_share>0.3'; may be repeated",
    )
    add("--diff", metavar="OLD.json", help="compare with an earlier report")
    return parser


def _make(options: argparse.Namespace, progress: Progress) -> Report:
    from . import report

    model, inputs = load_target(options.target)
    measured = options.offline is None and torch.cuda.is_available() and not options.no_measure
    if measured:
        model, inputs = on_gpu(model, inputs)
    made = report(
        model,
        *inputs,
        mode=options.mode,
        backward=options.backward,
        measure=not options.no_measure,
        offline=options.offline,
        progress=progress.stage,
    )
    return _with_bytes(made, options, progress) if options.ncu else made


def _with_bytes(made: Report, options: argparse.Namespace, progress: Progress) -> Report:
    from dataclasses import replace

    from .ncu import find_ncu, measure_bytes

    ncu = find_ncu()
    if ncu is None or not made.measured:
        missing = "there is no ncu in PATH" if ncu is None else "nothing was run"
        note = f"HBM bytes are by model only: --ncu was asked for, but {missing}."
        return replace(made, notes=[*made.notes, note])
    progress.stage("counting bytes with ncu")
    found = measure_bytes(ncu, options.target, options.mode, options.backward)
    parts = ", ".join(f"{name} {count:,}" for name, count in found.items())
    return replace(
        made, bytes_measured=sum(found.values()), notes=[*made.notes, f"Measured by ncu: {parts}."]
    )


def load_target(target: str) -> tuple[Any, tuple[Any, ...]]:
    """The model and its inputs, from what the target's function returns."""
    place, colon, name = target.rpartition(":")
    if not colon:
        raise ValueError(f"expected package.module:function or file.py:function, found {target!r}")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise ValueError(f"{target} returned {type(made).__name__}, expected (model, inputs)")
    model, inputs = made
    return model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` finds modules
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"there is no file {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that its classes can be found by name
    spec.loader.exec_module(module)
    return module


def on_gpu(model: Any, inputs: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The same on the current CUDA device. Weights on the meta device get random values."""
    if isinstance(model, nn.Module):
        if any(x.is_meta for x in [*model.parameters(), *model.buffers()]):
            model = model.to_empty(device="cuda")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.02)
                for buffer in model.buffers():
                    buffer.zero_()
        else:
            model = model.cuda()

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_meta:
            return value.cuda()
        made = torch.empty_like(value, device="cuda")
        return made.normal_() if made.is_floating_point() else made.zero_()

    return model, tree_map(move, inputs)


def _read(path: str) -> Report:
    try:
        return Report.from_dict(json.loads(Path(path).read_text()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--diff: {path} is not a report: {error}") from None


Condition = tuple[str, str, float]


def parse_condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"--fail-on: expected such as 'breaks>0', found {text!r}")
    name, symbol, number = match.groups()
    try:
        return name, symbol, float(number)
    except ValueError:
        raise ValueError(f"--fail-on: {number!r} is not a number") from None


def _failures(report: Report, conditions: Sequence[Condition]) -> int:
    numbers = report.numbers()
    status = 0
    for name, symbol, limit in conditions:
        if name not in numbers:
            print(f"report: --fail-on: no number {name!r}; there are {', '.join(numbers)}",
                  file=sys.stderr)  # fmt: skip
            return 2
        if _OPERATORS[symbol](numbers[name], limit):
            print(f"report: FAIL: {name}{symbol}{limit:g}: it is {numbers[name]:g}",
                  file=sys.stderr)  # fmt: skip
            status = 1
    return status
