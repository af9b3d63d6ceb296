"""`python -m bench [FAMILY...] [options]`: several families' benchmarks, one after the other.

The options are those of `python -m bench.bench_<family>` and go to each family; but `--budget` is
for all of them together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module

from bench import harness
from fusedcuda._build import FAMILIES


def share(left: float, cases: Sequence[int]) -> float:
    """The seconds of the first of the families that are left, by its part of their cases."""
    return left * cases[0] / max(sum(cases), 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("python -m bench", __doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY",
                        help=f"default: all of {', '.join(FAMILIES)}")  # fmt: skip
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.families) - set(FAMILIES)):
        parser.error(f"{', '.join(unknown)}: no such family; there are {', '.join(FAMILIES)}")
    modules = [import_module(f"bench.bench_{name}") for name in options.families or FAMILIES]
    counts = [len(harness.select(module.build_cases(), options)) for module in modules]
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
