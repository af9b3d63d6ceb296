"""Pointwise family: `python -m bench.bench_pointwise [--quick] [--filter REGEX] [--out DIR]`.

The cases come first in the order in which they matter: when time runs out, the last are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from bench import cases, harness, plots
from bench.cases import (
    DTYPE_NAMES,
    Case,
    Provider,
    Shape,
    Target,
    faster,
    for_mode,
    fusedcuda_op,
    host_cases,
    random,
    torch_providers,
    traffic,
)

ACTIVATIONS = {"relu": torch.relu, "silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}

# What fusedcuda has to show, by label: the peer's time over its own, in the same rounds.
TARGETS: dict[str, tuple[Target, ...]] = {
    "add_mul_act relu 10000x10000 fp32 forward": (faster("best", 1.0), faster("eager", 2.0)),
    "add_mul_act relu 10000x10000 bf16 forward": (faster("best", 1.0),),
    # 16 and 8 MB: everything stays in the L2 when warm, so both numbers are of interest.
    "add_mul_act relu 1024x1024 fp32 forward": (
        faster("best", 1.05), faster("best", 1.05, "gpu_warm"),
    ),
    "add_mul_act relu 1024x1024 bf16 forward": (
        faster("best", 1.05), faster("best", 1.05, "gpu_warm"),
    ),
    "act_mul_packed silu 8192x28672 bf16 forward": (faster("best", 1.0),),
    "act_mul_packed silu 8192x28672 bf16 backward": (faster("compile", 1.6),),
}  # fmt: skip

SWEEP_ELEMENTS = [4**k * 1024 for k in range(10)]  # 1 Ki to 256 Mi
QUICK_SWEEP = {4**k * 1024 for k in (3, 5, 7, 8)}


new_case = partial(cases.new_case, targets=TARGETS)
triton_op = partial(cases.triton_op, "pointwise")


# -- the operations -------------------------------------------------------------------------------


def add_mul_act(
    shape: Shape, dtype: torch.dtype, *, variant: str = "relu", offset: int = 0, **fields
) -> Case:
    def eager(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.relu((a + b) * c)

    return new_case(
        "add_mul_act", variant, shape, dtype,
        traffic=traffic(dtype, read=[shape] * 3, write=[shape]),
        make_inputs=random([shape] * 3, dtype, offset),
        reference=eager,
        providers={
            "fusedcuda": fusedcuda_op("add_mul_act"), **torch_providers(eager),
            "triton": triton_op("add_mul_act"),
        },
        **fields,
    )  # fmt: skip


def add_relu(
    shape: Shape, dtype: torch.dtype, mode: str, *, variant: str = "", offset: int = 0, **fields
) -> Case:
    def eager(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a + b)

    # Backward: the output and its gradient in, one gradient out, which both operands share.
    one_pass = traffic(dtype, read=[shape] * 2, write=[shape])
    return new_case(
        "add_relu", variant, shape, dtype, mode=mode,
        traffic=for_mode(mode, forward=one_pass, backward=one_pass),
        make_inputs=random([shape] * 2, dtype, offset),
        reference=eager,
        providers={"fusedcuda": fusedcuda_op("add_relu"), **torch_providers(eager)},
        **fields,
    )  # fmt: skip


def bias_act(shape: Shape, dtype: torch.dtype, activation: str, mode: str, **fields) -> Case:
    function = ACTIVATIONS[activation]
    vector = shape[-1:]

    def eager(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return function(x + bias)

    providers = {
        "fusedcuda": fusedcuda_op("bias_act", activation=activation), **torch_providers(eager),
    }  # fmt: skip
    if mode == "forward":
        providers["triton"] = triton_op("bias_act", activation=activation)
    # Backward of relu reads its output; another activation reads x again, and the bias with it.
    saved = [shape] if activation == "relu" else [shape, vector]
    return new_case(
        "bias_act", activation, shape, dtype, mode=mode,
        traffic=for_mode(
            mode,
            forward=traffic(dtype, read=[shape, vector], write=[shape]),
            backward=traffic(dtype, read=[shape, *saved], write=[shape, vector]),
        ),
        make_inputs=random([shape, vector], dtype),
        reference=eager,
        providers=providers,
        **fields,
    )  # fmt: skip


def act_scale_bias(shape: Shape, dtype: torch.dtype, mode: str, **fields) -> Case:
    vector = shape[-1:]

    def eager(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * scale + bias

    return new_case(
        "act_scale_bias", "relu", shape, dtype, mode=mode,
        traffic=for_mode(
            mode,
            forward=traffic(dtype, read=[shape, vector, vector], write=[shape]),
            backward=traffic(dtype, read=[shape, shape, vector], write=[shape, vector, vector]),
        ),
        make_inputs=random([shape, vector, vector], dtype),
        reference=eager,
        providers={"fusedcuda": fusedcuda_op("act_scale_bias"), **torch_providers(eager)},
        **fields,
    )  # fmt: skip


def act_mul_packed(rows: int, d: int, dtype: torch.dtype, mode: str, **fields) -> Case:
    packed, half = (rows, 2 * d), (rows, d)

    def eager(gate_up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate_up[..., :d]) * gate_up[..., d:]

    return new_case(
        "act_mul_packed", "silu", packed, dtype, mode=mode,
        traffic=for_mode(
            mode,
            forward=traffic(dtype, read=[packed], write=[half]),
            backward=traffic(dtype, read=[packed, half], write=[packed]),
        ),
        make_inputs=random([packed], dtype),
        reference=eager,
        providers={
            "fusedcuda": fusedcuda_op("act_mul_packed"), **torch_providers(eager),
            "triton": triton_op("silu_mul_packed"), **liger_silu_mul(d, mode),
        },
        **fields,
    )  # fmt: skip


def liger_silu_mul(d: int, mode: str) -> dict[str, Provider]:
    """Liger's function on two halves, and its packed one where the installed version has it."""

    def halves() -> Callable[..., torch.Tensor]:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        if mode != "backward":
            return lambda x: LigerSiLUMulFunction.apply(x[..., :d], x[..., d:])
        return LigerSiLUMulFunction.apply

    def packed() -> Callable[..., torch.Tensor]:
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

        return LigerFusedGateUpSiLUMulFunction.apply

    if mode != "backward":
        split = Provider(halves, note="takes views of the two halves, and copies them")
    else:
        split = Provider(
            halves,
            adapt=lambda inputs: tuple(h.contiguous() for h in inputs[0].split(d, dim=-1)),
            restore=lambda grads: (torch.cat(grads, dim=-1),),
            note="starts from halves that are already split, and leaves the gradients split; it "
            "overwrites what the forward saved, so all but the first replay read gradients",
        )
    return {"liger": split, "liger_packed": Provider(packed)}


# -- host time ------------------------------------------------------------------------------------


def host_table(rows: int = 4, columns: int = 4096) -> list[Case]:
    """One call at a size where only the host counts, beside a native op of the same arity."""
    full, vector, dtype = (rows, columns), (columns,), torch.bfloat16
    table = [
        ("add_relu", torch.add, lambda a, b: torch.relu(a + b), [full] * 2),
        ("add_mul_act", torch.addcmul, lambda a, b, c: torch.relu((a + b) * c), [full] * 3),
        ("bias_act", torch.add, lambda x, b: torch.relu(x + b), [full, vector]),
        ("act_mul", torch.mul, lambda gate, up: F.silu(gate) * up, [full] * 2),
        ("act_scale_bias", torch.addcmul, lambda x, s, b: torch.relu(x) * s + b,
         [full, vector, vector]),
    ]  # fmt: skip
    return [
        case
        for name, native, eager, shapes in table
        for case in host_cases(
            name, full, traffic(dtype, read=shapes, write=[full]), random(shapes, dtype), eager,
            native=native, native_name=f"torch.{native.__name__}",
        )
    ]  # fmt: skip


# -- the list -------------------------------------------------------------------------------------


def build_cases() -> list[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    modes = ("forward", "backward")
    return [
        *(add_mul_act((n, n), t, quick=True) for n in (10000, 1024) for t in (fp32, bf16)),
        *(act_mul_packed(8192, 14336, bf16, mode, quick=True) for mode in modes),
        *(bias_act((65536, 1024), bf16, "relu", mode, quick=True) for mode in modes),
        *host_table(),
        *(bias_act((65536, 1024), bf16, "gelu_tanh", mode, quick=True) for mode in modes),
        *(act_scale_bias((16384, 4096), bf16, mode, quick=True) for mode in modes),
        *(sweep(n, bf16) for n in SWEEP_ELEMENTS if n in QUICK_SWEEP),
        add_mul_act((4096, 4097), bf16, quick=True),
        add_relu((2**26,), bf16, "forward", variant="x[1:]", offset=1, quick=True),
        *(add_relu((16384, 4096), bf16, mode) for mode in modes),
        *(bias_act((4096, 50257), bf16, "relu", mode) for mode in modes),
        act_mul_packed(8192, 14336, bf16, "both"),
        bias_act((65536, 1024), bf16, "relu", "both"),
        *(bias_act((65536, n), bf16, "relu", mode) for n in (512, 256, 64) for mode in modes),
        *(sweep(n, bf16) for n in SWEEP_ELEMENTS if n not in QUICK_SWEEP),
        *(sweep(n, fp32) for n in SWEEP_ELEMENTS),
    ]


def sweep(elements: int, dtype: torch.dtype) -> Case:
    return add_mul_act(
        (elements,), dtype, group="sweep", x_name="elements", x_label="elements",
        x_value=str(elements), panel=f"relu((a + b) * c), {DTYPE_NAMES[dtype]}",
        quick=elements in QUICK_SWEEP and dtype == torch.bfloat16,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    draw = partial(plots.draw, family="pointwise", names={"liger": "Liger, two halves"})
    return harness.main("pointwise", build_cases(), draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
