"""Fusion arithmetic: what fusing relu((a+b)*c) and relu(x)*s+b has to save, and what it does save.

Three operators move 16 bytes an element in 16 bits, one kernel moves 8: twice as fast, says the
arithmetic, and a third of the launches. Both are only bounds. Small tensors are bounded by the
launches; a tensor in between that still lies in the L2 cache costs less than its bytes say; beyond
the cache the bytes count. This script predicts all three for an H200, from 1 KB to 1 GB a tensor,
and on a GPU measures eager PyTorch, torch.compile, Triton and fusedcuda against it.

  python -m examples.fusion_arithmetic                       # the prediction, in a second
  python -m examples.fusion_arithmetic --out results         # CSV, page and plot as well
  python -m examples.fusion_arithmetic --out results --ncu   # on a GPU: HBM bytes by ncu, too
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from bench import bench_pointwise
from bench.cases import Case, Provider, imported
from bench.harness import taking_turns, turn
from bench.measure import (
    AGAIN,
    Result,
    as_tuple,
    check,
    expected_values,
    flat,
    measure,
    one_line,
    spread,
)
from bench.timing import CudaBackend, copy_bandwidth
from examples import fusion_page
from examples import results as study
from examples.results import COUNTED, MEASURED, PREDICTED, Results
from fusedcuda.demo.measure import count_operations
from fusedcuda.report import ncu
from fusedcuda.report.cost import predict
from fusedcuda.report.device import H200
from fusedcuda.report.kernels import Launch

NAME = "fusion_arithmetic"
DTYPE = torch.bfloat16
COLUMNS = 512  # of the vectors s and b: 1 KB
SIZES = [2**k for k in (10, 12, 14, 16, 18, *range(20, 29), 30)]  # bytes of one tensor
CHECK_BYTES = 2**16  # on the CPU
NCU_SIZES = (2**22, 2**28)  # one that lies in the L2 cache, and one that does not
UNFUSED, FUSED = fusion_page.FORMS


@dataclass(frozen=True)
class Kernel:
    """One launch, by the names of the tensors that it reads and writes."""

    reads: str
    writes: str


@dataclass(frozen=True)
class Expression:
    """small: the tensors of one row; all others have the full size."""

    text: str
    unfused: tuple[Kernel, ...]
    fused: tuple[Kernel, ...]
    small: str
    make_case: Callable[[int], Case]  # by the number of elements

    def kernels(self, form: str) -> tuple[Kernel, ...]:
        return self.unfused if form == UNFUSED else self.fused

    def size(self, tensor: str, nbytes: int) -> int:
        return COLUMNS * DTYPE.itemsize if tensor in self.small else nbytes

    def bytes(self, form: str, nbytes: int) -> int:
        """Each kernel reads each input once and writes its output once."""
        return sum(self.size(tensor, nbytes) for kernel in self.kernels(form)
                   for tensor in kernel.reads + kernel.writes)  # fmt: skip

    def touched(self, form: str, nbytes: int) -> int:
        """Bytes of all tensors together: what a cache must hold for a second run to find them."""
        tensors = {t for kernel in self.kernels(form) for t in kernel.reads + kernel.writes}
        return sum(self.size(tensor, nbytes) for tensor in tensors)

    def case(self, nbytes: int) -> Case:
        return self.make_case(nbytes // DTYPE.itemsize)

    def label(self, nbytes: int) -> str:
        return f"{self.text} {fusion_page.size_name(nbytes)}"


def add_mul_relu(elements: int) -> Case:
    return bench_pointwise.add_mul_act((elements,), DTYPE)


def relu_scale_bias(elements: int) -> Case:
    case = bench_pointwise.act_scale_bias((elements // COLUMNS, COLUMNS), DTYPE, "forward")
    triton = Provider(imported("examples.fusion_triton", "act_scale_bias"))
    return replace(case, providers={**case.providers, "triton": triton})


# t and u are the tensors in between, which fusing does away with.
EXPRESSIONS = (
    Expression(
        "relu((a+b)*c)",
        unfused=(Kernel("ab", "t"), Kernel("tc", "u"), Kernel("u", "y")),
        fused=(Kernel("abc", "y"),),
        small="",
        make_case=add_mul_relu,
    ),
    Expression(
        "relu(x)*s+b",
        unfused=(Kernel("x", "t"), Kernel("ts", "u"), Kernel("ub", "y")),
        fused=(Kernel("xsb", "y"),),
        small="sb",
        make_case=relu_scale_bias,
    ),
)


# -- prediction -----------------------------------------------------------------------------------


def predicted_us(expression: Expression, form: str, nbytes: int, warm: bool) -> float:
    """By the model of the fusion report: bytes at the speed of where they are, and the launches.

    Cold, the operands come from memory, and only what was just written may be found in the L2
    cache; warm, the same call ran before on the same tensors.
    """
    launches = [
        Launch(
            graph=0, phase="forward", name=form, kind="pointwise", ops=(), shape=(nbytes // 2,),
            dtype="bfloat16", reads={t: expression.size(t, nbytes) for t in kernel.reads},
            writes={t: expression.size(t, nbytes) for t in kernel.writes},
        )
        for kernel in expression.kernels(form)
    ]  # fmt: skip
    costs = predict(launches * 2 if warm else launches, H200)
    return sum(cost.us for cost in costs[-len(launches) :])


def add_predictions(expression: Expression, sizes: Sequence[int], results: Results) -> None:
    for nbytes in sizes:
        label = expression.label(nbytes)
        for form in (UNFUSED, FUSED):
            kernels = expression.kernels(form)
            results.add(label, form, "launches", len(kernels), "", COUNTED)
            results.add(label, form, "bytes", expression.bytes(form, nbytes), "bytes", COUNTED)
            for state in ("cold", "warm"):
                us = predicted_us(expression, form, nbytes, state == "warm")
                results.add(label, form, state, us, "us", PREDICTED)


# -- measurement ----------------------------------------------------------------------------------


def check_on_cpu(expression: Expression) -> str:
    """Whether both forms agree, and launch as many operators as the prediction takes them to."""
    case = expression.case(CHECK_BYTES)
    inputs = case.make_inputs(torch.Generator().manual_seed(0))
    fused = case.providers["fusedcuda"].build()
    exact, native = expected_values(case, inputs, seed=0)
    check(case, as_tuple(fused(*inputs)), exact, native)
    operators = [count_operations(partial(form, *inputs)) for form in (case.reference, fused)]
    expected = [len(expression.kernels(form)) for form in (UNFUSED, FUSED)]
    if operators != expected:
        raise AssertionError(f"{expression.text}: {operators} operators, expected {expected}")
    return f"{expression.text}: fusedcuda agrees; {operators[0]} operators against {operators[1]}"


def measure_all(options: argparse.Namespace, sizes: Sequence[int], results: Results) -> None:
    backend = CudaBackend()
    deadline = time.time() + options.budget
    with backend.on_stream():
        results.add("copy", "torch", "bandwidth", None, "TB/s", MEASURED,
                    samples=copy_bandwidth(backend))  # fmt: skip
        results.add("copy", "torch", "L2", backend.l2_bytes / 1e6, "MB", MEASURED)
        for nbytes in [*sizes[::2], *sizes[1::2]]:  # out of time, every other size is there
            for expression in EXPRESSIONS:
                label = expression.label(nbytes)
                if time.time() > deadline:
                    print(f"{label}: skipped, out of time (--budget)")
                    continue
                try:
                    add_times(label, measure(expression.case(nbytes), backend, options.rounds),
                              results)  # fmt: skip
                except Exception as error:
                    results.add(label, "all", "cold", None, "us", MEASURED, note=one_line(error))
                print(f"{label}: measured", flush=True)
    if options.ncu:
        add_all_hbm_bytes(results)


def add_times(label: str, found: Sequence[Result], results: Results) -> None:
    for result in found:
        if result.provider.endswith(AGAIN):
            continue
        if result.error:
            results.add(label, result.provider, "cold", None, "us", MEASURED, note=result.error)
            continue
        for state in ("cold", "warm"):
            samples = flat(getattr(result, state))
            results.add(label, result.provider, state, median(samples), "us", MEASURED,
                        samples=samples)  # fmt: skip
    for state in ("cold", "warm"):
        if (noise := spread(found, state)) is not None:
            results.add(label, "A/A", state, noise, "share", MEASURED)


# -- HBM bytes, by a process under ncu ------------------------------------------------------------


def add_all_hbm_bytes(results: Results) -> None:
    """All programs start at once, since most of their time is imports; they take turns on the GPU,
    as ncu's counters are those of the whole card."""
    jobs = [(e, n, peer) for n in NCU_SIZES for e in EXPRESSIONS for peer in fusion_page.PEERS]
    with taking_turns(), ThreadPoolExecutor(len(jobs)) as threads:
        for job in [threads.submit(add_hbm_bytes, *job, results) for job in jobs]:
            job.result()


def add_hbm_bytes(expression: Expression, nbytes: int, provider: str, results: Results) -> None:
    """What ncu counts of one cold call; its absence or refusal is a note, not an end."""
    label = expression.label(nbytes)
    program = [sys.executable, "-m", f"examples.{NAME}", "--one-call", expression.text,
               str(nbytes), provider]  # fmt: skip
    try:
        found = hbm_bytes(program)
        results.add(label, provider, "HBM bytes", sum(found.values()), "bytes", MEASURED)
    except Exception as error:
        results.add(label, provider, "HBM bytes", None, "bytes", MEASURED, note=one_line(error))


def hbm_bytes(program: Sequence[str]) -> dict[str, int]:
    path = ncu.find_ncu()
    if path is None:
        raise RuntimeError("ncu is not installed")
    run = subprocess.run([*ncu.command(path), *program], capture_output=True, text=True,
                         timeout=300)  # fmt: skip
    if run.returncode != 0:
        raise RuntimeError(f"ncu ended with {run.returncode}: {run.stderr.strip()[-200:]}")
    return ncu.read_bytes(run.stdout)


def one_call(text: str, nbytes: int, provider: str) -> None:
    """The program under ncu: one call of a provider that is compiled and tuned, the cache cold."""
    case = next(e for e in EXPRESSIONS if e.text == text).case(nbytes)
    function = case.providers[provider].build()
    with turn():
        inputs = case.make_inputs(torch.Generator("cuda").manual_seed(0))
        for _ in range(3):
            function(*inputs)
        # Read, not written: what a flush left to be written back would be counted with the call.
        torch.zeros(2**28, device="cuda").sum()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        function(*inputs)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


# -- command line ---------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = study.script_parser(NAME, __doc__)
    add = parser.add_argument
    add("--largest", type=int, default=SIZES[-1], metavar="BYTES", help="of one tensor (2^30)")
    add("--budget", type=float, default=400, metavar="SECONDS",
        help="after which no size is begun (default: 400)")  # fmt: skip
    add("--ncu", action="store_true", help="count HBM bytes where Nsight Compute is installed")
    add("--device", choices=("auto", "cpu"), default="auto")
    add("--one-call", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.one_call:
        text, nbytes, provider = options.one_call
        one_call(text, int(nbytes), provider)
        return 0
    sizes = [size for size in SIZES if size <= options.largest]
    results = Results.of_folder(options.out, NAME)
    for expression in EXPRESSIONS:
        print(check_on_cpu(expression), flush=True)
        add_predictions(expression, sizes, results)
    if options.device != "cpu" and torch.cuda.is_available():
        measure_all(options, sizes, results)
    else:
        print("No GPU used: the times below are predicted for an H200, nothing is measured.")
    expressions = [expression.text for expression in EXPRESSIONS]
    fusion_page.print_tables(expressions, sizes, results)
    if options.out:
        knees = {e.text: {form: knee(e, form) for form in (UNFUSED, FUSED)} for e in EXPRESSIONS}
        study.write(
            options.out, NAME, results,
            lambda found, pictures: fusion_page.markdown(expressions, SIZES, found, pictures),
            lambda plt, found: fusion_page.draw(plt, expressions, SIZES, knees, found),
        )  # fmt: skip
    return 0


def knee(expression: Expression, form: str) -> float:
    """Bytes of one tensor at which all of them together fill the L2 cache."""
    large = expression.touched(form, 1 << 40) / (1 << 40)
    return H200.l2_mb * 1e6 / large


if __name__ == "__main__":
    sys.exit(main())
