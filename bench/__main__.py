"""`python -m bench [options]`: every family's benchmark, one after the other."""

import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str]) -> int:
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    return max(import_module(f"bench.{name}").main(arguments) for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
