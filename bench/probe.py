"""What cuBLASLt does on this GPU: `make probe`, a minute or two.

A call with an epilogue that "works" may still run a second kernel, or be slower than the product
and an elementwise kernel together, or treat NaN in another way than torch. For every element type
and epilogue this counts the kernels of a call, times it against the plain product, and compares the
result with torch's. Then, for layouts and alignments: how much slower the product becomes, and
whether a 16-bit one is rounded before the bias is added to it.

Writes fusedcuda/data/cublaslt_<gpu>.json, which the package chooses by, and prints it as a table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusedcuda
from bench.device import short_name
from fusedcuda import _cublaslt, _tune
from fusedcuda._cublaslt import ARITHMETIC, EPILOGUES, TYPES

BYTES_PER_US = 4e6  # of an elementwise kernel on an H200
MOST_ERROR = 0.02  # a bfloat16's rounding, with room; a wrong layout or formula is far beyond
SPECIALS = "of nan, inf, -inf"
MASK = "mask of nan, 0"
SIZES = (8192, 1024, 512)  # m, n, k: an epilogue of its own would cost about as much again


@dataclass(frozen=True)
class Problem:
    """MatmulProblem of csrc/bindings/cublaslt_problem.h, in its order."""

    m: int
    n: int
    k: int
    batch: int = 1
    a_stride: int = 0
    b_stride: int = 0
    c_stride: int = 0
    output_stride: int = 0
    aux_stride: int = 0
    a_batch: int = 0
    b_batch: int = 0
    c_batch: int = 0
    output_batch: int = 0
    bias_batch: int = 0
    aux_batch: int = 0
    a_k_is_inner: int = 1
    b_k_is_inner: int = 1
    type: int = TYPES[torch.bfloat16]
    output_type: int = TYPES[torch.bfloat16]
    compute: int = 68
    epilogue: int = 1
    a_alignment: int = 16
    b_alignment: int = 16
    c_alignment: int = 16
    output_alignment: int = 16
    scaled_factors: int = 0
    scaled_output: int = 0
    low_precision_reduction: int = 0
    device: int = 0

    def to_hex(self) -> str:
        """As the operators of _cublaslt name it."""
        return struct.pack("<15q14i", *asdict(self).values()).hex()


def make_problem(
    arithmetic: str,
    epilogue: str,
    sizes: tuple[int, int, int] = SIZES,
    a_k_is_inner: bool = True,
    b_k_is_inner: bool = True,
    pitch: int = 0,
) -> Problem:
    """A product of contiguous matrices; with `pitch`, the rows of the factors lie further apart."""
    m, n, k = sizes
    is_mask = epilogue.startswith(("RELU_AUX", "DRELU"))
    cuda_type, compute = ARITHMETIC[arithmetic]
    dtype = _dtype(cuda_type)
    output = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    element = dtype.itemsize
    strides = ((k if a_k_is_inner else m) + pitch, (k if b_k_is_inner else n) + pitch)
    alignments = [min(16, (stride * element) & -(stride * element)) for stride in strides]
    return Problem(
        m,
        n,
        k,
        a_stride=strides[0],
        b_stride=strides[1],
        output_stride=n,
        aux_stride=-(-n // 128) * 128 if is_mask else n,
        a_k_is_inner=int(a_k_is_inner),
        b_k_is_inner=int(b_k_is_inner),
        type=cuda_type,
        output_type=TYPES[output],
        compute=compute,
        epilogue=EPILOGUES.get(epilogue, 1),
        a_alignment=alignments[0],
        b_alignment=alignments[1],
    )


def layout_of(epilogue: str) -> dict[str, bool]:
    """The one in which linear_act needs it: forward x W^T, dgrad dy W, wgrad dy^T x."""
    if epilogue == "BGRADB":
        return {"a_k_is_inner": False, "b_k_is_inner": False}
    return {"b_k_is_inner": not epilogue.startswith("D") or epilogue == "DEFAULT"}


# ---- Running -------------------------------------------------------------------------------------


@dataclass
class Operands:
    """Typed matrices of a problem without batch; a and b as they lie in memory."""

    a: Tensor
    b: Tensor
    output: Tensor
    bias: Tensor
    aux: Tensor

    @classmethod
    def make(cls, problem: Problem) -> Operands:
        p = problem
        dtype, wide = _dtype(p.type), _dtype(p.output_type)

        def factor(rows: int, stride: int, k_is_inner: int) -> Tensor:
            return _random(rows if k_is_inner else p.k, stride, dtype=dtype)

        is_mask = p.epilogue & 128 and p.epilogue & (2 | 8)
        aux = _random(p.m, p.aux_stride, dtype=wide)
        if is_mask:
            aux = torch.randint(256, (p.m, p.aux_stride // 8), dtype=torch.uint8, device="cuda")
        return cls(
            factor(p.m, p.a_stride, p.a_k_is_inner),
            factor(p.n, p.b_stride, p.b_k_is_inner),
            torch.empty(p.m, p.n, dtype=wide, device="cuda"),
            _random(max(p.m, p.n), dtype=wide),
            aux,
        )

    def as_bytes(self) -> list[Tensor]:
        """As cublaslt_run() takes them."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cuda")
        workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        typed = (self.a, self.b, nothing, self.output, self.bias, self.aux)
        return [*(t.view(torch.uint8).flatten() for t in typed), workspace]


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, device="cuda") / 8).to(dtype)


def _dtype(code: int) -> torch.dtype:
    return next(dtype for dtype, known in TYPES.items() if known == code)


def recommended(problem: Problem) -> str | None:
    """What stands for cuBLASLt's recommendation, or None where it has none or refuses its own."""
    if not _cublaslt.candidates(problem.to_hex(), 1):
        return None
    try:
        _cublaslt.run(problem.to_hex(), "", Operands.make(problem).as_bytes())
    except RuntimeError as error:
        print(f"recommended and refused: {problem}: {error}", flush=True)
        return None
    torch.cuda.synchronize()
    return ""


def count_kernels(problem: Problem, algorithm: str, operands: Operands) -> int:
    """Of one call; the runtime's copies and fills are counted too."""
    tensors = operands.as_bytes()
    _cublaslt.run(problem.to_hex(), algorithm, tensors)
    torch.cuda.synchronize()
    calls = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            _cublaslt.run(problem.to_hex(), algorithm, tensors)
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return round(len(on_device) / calls)


def time_us(problem: Problem, algorithm: str, operands: Operands) -> float:
    tensors = operands.as_bytes()
    entry = {
        "problem": problem.to_hex(),
        "type": problem.type,
        "bytes": [t.numel() for t in tensors[:-1]],
    }
    return _tune.measure(entry, [algorithm])[0]


# ---- Meaning -------------------------------------------------------------------------------------


def largest_error(problem: Problem, epilogue: str, operands: Operands) -> float:
    """Of the outputs, relative to their largest element, after a run."""
    expected = _expected(problem, epilogue, operands)
    errors = [_relative_error(operands.output, expected)]
    if epilogue.endswith("_BGRAD"):
        errors.append(_relative_error(operands.bias[: problem.n], expected.sum(0)))
    if epilogue == "BGRADB":
        sums = operands.a[:, : problem.m].double().sum(0)
        errors.append(_relative_error(operands.bias[: problem.m], sums))
    if epilogue.startswith("GELU_AUX"):
        z = _expected(problem, epilogue.replace("GELU_AUX", ""), operands)
        errors.append(_relative_error(operands.aux[:, : problem.n], z))
    if epilogue.startswith("RELU_AUX"):  # the share of wrong bits
        wrong = _bits(operands.aux, problem.n) != (operands.output > 0)
        errors.append(float(wrong.double().mean()))
    return max(errors)


def _bits(mask: Tensor, n: int) -> Tensor:
    """Bit n % 8 of byte n / 8 of each row."""
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device="cuda") & 1
    return bits.flatten(1)[:, :n].bool()


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def _expected(problem: Problem, epilogue: str, operands: Operands) -> Tensor:
    p, o = problem, operands
    a = (o.a[:, : p.k] if p.a_k_is_inner else o.a[:, : p.m].mT).double()
    b = (o.b[:, : p.k] if p.b_k_is_inner else o.b[:, : p.n].mT).double()
    z = a @ b.mT
    if epilogue.endswith("_BIAS") or epilogue == "BIAS":
        z = z + o.bias[: p.n].double()
    if epilogue.startswith("RELU"):
        return torch.relu(z)
    if epilogue.startswith("GELU"):
        return torch.nn.functional.gelu(z, approximate="tanh")
    if epilogue.startswith("DRELU"):
        return torch.where(_bits(o.aux, p.n), z, 0.0)
    if epilogue.startswith("DGELU"):
        pre = o.aux[:, : p.n].double().requires_grad_()
        torch.nn.functional.gelu(pre, approximate="tanh").backward(z)
        assert pre.grad is not None
        return pre.grad
    return z


def special_values(arithmetic: str, epilogue: str) -> dict[str, Any]:
    """What becomes of z = NaN, inf and -inf, and of their gradients 1, 1, 1."""
    problem = make_problem(arithmetic, epilogue, (16, 128, 64), **layout_of(epilogue))
    algorithm = recommended(problem)
    if algorithm is None:
        return {}
    operands = Operands.make(problem)
    for tensor in (operands.a, operands.b, operands.bias):
        tensor.zero_()
    specials = torch.tensor([math.nan, math.inf, -math.inf], device="cuda")
    if epilogue.endswith("_BIAS"):  # z is the bias
        operands.bias[:3] = specials.to(operands.bias.dtype)
    else:  # z[0, :3] is a[0, 0] times them, and what is kept of the forward is 0
        operands.a.fill_(1)
        first = operands.b[:3, 0] if problem.b_k_is_inner else operands.b[0, :3]
        first.copy_(specials)
        operands.aux.zero_()
    _cublaslt.run(problem.to_hex(), algorithm, operands.as_bytes())
    special = {SPECIALS: [str(v) for v in operands.output[0, :3].float().tolist()]}
    if epilogue.startswith("RELU_AUX"):  # z[0, 3] is 0
        special[MASK] = _bits(operands.aux, problem.n)[0, [0, 3]].tolist()
    return special


def rounds_before_bias(problem: Problem, algorithm: str) -> bool:
    """Whether 2049 less a bias of 2048 is not 1: 16 bits have no 2049."""
    operands = Operands.make(problem)
    a = operands.a[:, : problem.k] if problem.a_k_is_inner else operands.a[:, : problem.m].mT
    b = operands.b[:, : problem.k] if problem.b_k_is_inner else operands.b[:, : problem.n].mT
    a.zero_()
    b.fill_(1)
    a[:, 0], a[:, 1] = 2048, 1
    operands.bias.fill_(-2048)
    _cublaslt.run(problem.to_hex(), algorithm, operands.as_bytes())
    return bool((operands.output != 1).any())


# ---- Tables --------------------------------------------------------------------------------------


def probe_epilogue(arithmetic: str, epilogue: str) -> dict[str, Any]:
    problem = make_problem(arithmetic, epilogue, **layout_of(epilogue))
    plain = _measure(replace(problem, epilogue=1))
    if plain is None:
        return {"fused": False, "why": "no product in this layout"}
    measured = _measure(problem)
    if measured is None:
        return {"fused": False, "why": "no algorithm"}
    kernels, us, operands = measured
    # Apart, the output would be read and written once more.
    apart_us = plain[1] + 2 * operands.output.nbytes / BYTES_PER_US
    row: dict[str, Any] = {
        "kernels": kernels,
        "us": round(us, 2),
        "apart_us": round(apart_us, 2),
        "error": float(f"{largest_error(problem, epilogue, operands):.1e}"),
    }
    if epilogue not in ("BIAS", "BGRADB"):
        row |= special_values(arithmetic, epilogue)
    if kernels > plain[0]:
        return row | {"fused": False, "why": "a second kernel"}
    if row["error"] > MOST_ERROR:
        return row | {"fused": False, "why": "another result than torch's"}
    if us > apart_us:
        return row | {"fused": False, "why": "slower than apart"}
    # max(z, 0) that loses a NaN would hide a diverged model (pytorch#7999).
    if epilogue.startswith("RELU") and row.get(SPECIALS, ["nan"])[0] != "nan":
        return row | {"fused": False, "why": "NaN is lost"}
    # The gradient of torch's ReLU passes where z is NaN, and not where it is 0.
    if row.get(MASK, [True, False]) != [True, False]:
        return row | {"fused": False, "why": "another mask than torch's"}
    return row | {"fused": True}


def _measure(problem: Problem) -> tuple[int, float, Operands] | None:
    """Kernels, microseconds and what was computed; None if there is no algorithm."""
    algorithm = recommended(problem)
    if algorithm is None:
        return None
    operands = Operands.make(problem)
    kernels = count_kernels(problem, algorithm, operands)
    return kernels, time_us(problem, algorithm, operands), operands


def probe_epilogues() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for arithmetic in ARITHMETIC:
        table[arithmetic] = {}
        for epilogue in EPILOGUES:
            row = table[arithmetic][epilogue] = probe_epilogue(arithmetic, epilogue)
            print(f"{arithmetic:14} {epilogue:14} {row}", flush=True)
    return table


def probe_layouts() -> list[dict[str, Any]]:
    """Which factor is stored how, how far apart its rows are, and sizes that are odd."""
    m, n, k = SIZES
    variants: list[dict[str, Any]] = [{"pitch": pitch} for pitch in (0, 8, 4, 2, 1)]
    variants += [{"sizes": sizes} for sizes in ((m, n - 1, k), (m, n, k - 1), (33, 40, k - 1))]
    rows = []
    for arithmetic in ("float32", "tf32", "bfloat16"):
        for a_inner, b_inner in ((True, True), (True, False), (False, False)):
            for variant in variants:
                layout = {"a_k_is_inner": a_inner, "b_k_is_inner": b_inner, **variant}
                for epilogue in ("DEFAULT", "RELU_BIAS"):
                    problem = make_problem(arithmetic, epilogue, **layout)
                    algorithm = recommended(problem)
                    row = {"arithmetic": arithmetic, "epilogue": epilogue, **layout, "us": None}
                    if algorithm is not None:
                        operands = Operands.make(problem)
                        row["us"] = round(time_us(problem, algorithm, operands), 2)
                        if (arithmetic, epilogue) == ("bfloat16", "RELU_BIAS"):
                            row["rounds first"] = rounds_before_bias(problem, algorithm)
                    rows.append(row)
                    print(row, flush=True)
    return rows


def as_markdown(epilogues: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Microseconds in one kernel, or why it is none."""
    yield "| epilogue | " + " | ".join(epilogues) + " |"
    yield "|---" * (1 + len(epilogues)) + "|"
    for epilogue in EPILOGUES:
        cells = []
        for rows in epilogues.values():
            row = rows[epilogue]
            cells.append(f"{row['us']:.1f} us" if row["fused"] else row["why"])
        yield f"| {epilogue} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.probe", description=__doc__)
    parser.add_argument("--output", type=Path, help="default: fusedcuda/data/cublaslt_<gpu>.json")
    options = parser.parse_args(arguments)
    fusedcuda.load("linear_act")
    card = torch.cuda.get_device_name()
    path = options.output or _cublaslt.SUPPORT.with_name(f"cublaslt_{short_name(card)}.json")
    epilogues = probe_epilogues()
    result = {
        "card": card,
        "cublaslt": _cublaslt.version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "m, n, k": SIZES,
        "epilogues": epilogues,
        "layouts": probe_layouts(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(as_markdown(epilogues)))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
