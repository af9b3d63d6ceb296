"""The command line: `python -m fusedcuda {doctor,demo,report,build}`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["demo"]:  # the demo has options of its own
        from .demo import main as demo

        return demo(arguments[1:])
    if arguments[:1] == ["report"]:
        from .report.cli import main as report

        return report(arguments[1:])
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fusedcuda", description="Fused CUDA kernels for PyTorch."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say what is here, what is missing, how to fix it")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.set_defaults(run=_doctor)

    commands.add_parser(
        "demo", help="train a DLRM step with and without fused ops; try demo --help"
    )

    commands.add_parser(
        "report", help="what torch.compile fuses in a model, and what it could; try report --help"
    )

    build = commands.add_parser("build", help="compile a family of kernels now")
    build.add_argument("family", nargs="*", help="such as pointwise; all of them if none is named")
    build.add_argument("--verbose", action="store_true", help="show the compiler's output")
    build.set_defaults(run=_build)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor

    report = doctor()
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return 0 if report.ok else 1


def _build(options: argparse.Namespace) -> int:
    from ._build import FAMILIES, BuildError, check_family
    from ._jit import load

    try:
        for family in options.family:
            check_family("build", family)
        for family in options.family or FAMILIES:
            print(f"{family}: {load(family, verbose=options.verbose)}")
    except (BuildError, ValueError) as error:
        print(f"fusedcuda: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
