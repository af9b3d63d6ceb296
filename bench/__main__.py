"""`python -m bench [FAMILY...] [options]`: several families' benchmarks, one after the other.

The options are those of `python -m bench.bench_<family>` and go to each family; but `--budget` is
for all of them together. With `--at-once` all of them get ready at the same time and then take
turns on the GPU, which saves 15 seconds a family.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from bench import harness
from fusedcuda._build import FAMILIES


def share(left: float, cases: Sequence[int]) -> float:
    """The seconds of the first of the families that are left, by its part of their cases."""
    return left * cases[0] / max(sum(cases), 1)


def parts(budget: float | None, cases: Sequence[int]) -> list[float | None]:
    """Every family's own seconds, by its part of the cases."""
    return [budget and max(1.0, budget * count / max(sum(cases), 1)) for count in cases]


def at_once(jobs: Sequence[tuple[Callable[[list[str]], int], list[str]]]) -> list[int]:
    """Each main(arguments) in a thread of its own, which starts a process and waits for it."""
    with harness.taking_turns(), ThreadPoolExecutor(max(len(jobs), 1)) as threads:
        return list(threads.map(lambda job: job[0](job[1]), jobs))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("python -m bench", __doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY",
                        help=f"default: all of {', '.join(FAMILIES)}")  # fmt: skip
    parser.add_argument("--at-once", action="store_true", help="get all families ready first")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.families) - set(FAMILIES)):
        parser.error(f"{', '.join(unknown)}: no such family; there are {', '.join(FAMILIES)}")
    families = options.families or FAMILIES
    modules = [import_module(f"bench.bench_{name}") for name in families]
    counts = [
        len(harness.to_measure(name, harness.select(module.build_cases(), options), options))
        for name, module in zip(families, modules, strict=True)
    ]
    if options.at_once:
        jobs = [
            (module.main, harness.arguments_of(options, part))
            for module, count, part in zip(
                modules, counts, parts(options.budget, counts), strict=True
            )
            if count
        ]
        return max([0, *at_once(jobs)])
    deadline = time.time() + options.budget if options.budget else None
    codes = [0]
    for index, module in enumerate(modules):
        if counts[index]:
            # What one family does not use is divided among those after it.
            budget = deadline and max(1.0, share(deadline - time.time(), counts[index:]))
            codes.append(module.main(harness.arguments_of(options, budget)))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
