"""Norm family: `python -m bench.bench_norm [--quick] [--filter REGEX] [--out DIR]`.

Bytes are those of x, y and their gradients and of the weights; the statistics a forward keeps, 4 or
8 bytes a row, are not counted. The cases come first in the order in which they matter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from bench import cases, harness, plots
from bench.cases import (
    ALIGNED,
    MODES,
    ODD_SHAPES,
    ODD_TARGET,
    Case,
    Function,
    Provider,
    Shape,
    Target,
    Tensors,
    Traffic,
    aligned_twin,
    faster,
    for_mode,
    fusedcuda_op,
    host_cases,
    imported,
    liger_function,
    random,
    row_panel,
    row_sweep,
    torch_providers,
    traffic,
    triton_op,
    where_installed,
)

BF16, FP32 = torch.bfloat16, torch.float32
RMS_EPS, LAYER_EPS = 1e-6, 1e-5

# rows x columns: (forward, backward): what the best peer's time must be over fusedcuda's.
RMS_RATIOS = {
    (262144, 1024): (0.98, 1.0),
    (65536, 4096): (0.98, 1.08),
    (32768, 8192): (0.98, 1.15),
    (16384, 16384): (0.98, 1.4),
    (4096, 65536): (0.98, 1.5),
    (1024, 262144): (0.98, 1.8),
}
LAYER_RATIOS = {
    (131072, 3072): (1.5, 1.6),
    (65536, 4096): (1.4, 1.25),
    (16384, 16384): (1.0, 1.7),
    (4096, 65536): (1.6, 1.8),
}
RESIDUAL_SHAPES = [(65536, 4096), (16384, 16384), (4096, 65536)]


def by_label(kernel: str, ratios: dict[tuple[int, int], tuple[float, float]]) -> dict[str, tuple]:
    return {
        f"{kernel} {rows}x{columns} bf16 {mode}": (faster("best", ratio),)
        for (rows, columns), pair in ratios.items()
        for mode, ratio in zip(MODES, pair, strict=True)
    }


TARGETS: dict[str, tuple[Target, ...]] = {
    **by_label("rms_norm", RMS_RATIOS),
    **by_label("layer_norm", LAYER_RATIOS),
    **{f"rms_norm residual {r}x{c} bf16 forward": (faster("best", 0.98),)
       for r, c in RESIDUAL_SHAPES},
    **{f"{kernel} odd {r}x{c} bf16 {mode}": (ODD_TARGET,)
       for kernel in ("rms_norm", "layer_norm") for r, c in ODD_SHAPES for mode in MODES},
}  # fmt: skip

QUACK_US = {
    "rms_norm 262144x1024 bf16 forward": 259, "rms_norm 262144x1024 bf16 backward": 392,
    "rms_norm 65536x4096 bf16 forward": 256, "rms_norm 65536x4096 bf16 backward": 433,
    "rms_norm 32768x8192 bf16 forward": 257, "rms_norm 32768x8192 bf16 backward": 473,
    "rms_norm 16384x16384 bf16 forward": 259, "rms_norm 16384x16384 bf16 backward": 587,
    "rms_norm 4096x65536 bf16 forward": 259, "rms_norm 4096x65536 bf16 backward": 671,
    "rms_norm 1024x262144 bf16 forward": 260, "rms_norm 1024x262144 bf16 backward": 921,
    "layer_norm 131072x3072 bf16 forward": 6314, "layer_norm 65536x4096 bf16 forward": 381,
    "layer_norm 16384x16384 bf16 forward": 4956, "layer_norm 4096x65536 bf16 forward": 539,
}  # fmt: skip

new_case = partial(cases.new_case, targets=TARGETS, quack_us=QUACK_US)


def moved(
    mode: str, shape: Shape, dtype: torch.dtype, vectors: Sequence[torch.dtype], residual: int = 0
) -> Traffic:
    """Of a norm with `vectors` (weight, bias) of these dtypes; `residual` is 1 or 0.

    The backward reads dy and h (and dh) and writes one gradient, which x and the residual share.
    """
    forward = traffic(dtype, read=[shape] * (1 + residual), write=[shape] * (1 + residual))
    backward = traffic(dtype, read=[shape] * (2 + residual), write=[shape])
    for vector in vectors:
        forward += traffic(vector, read=[shape[-1:]])
        backward += traffic(vector, read=[shape[-1:]], write=[shape[-1:]])
    return for_mode(mode, forward=forward, backward=backward)


# -- the operations -------------------------------------------------------------------------------


def rms_norm_eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, RMS_EPS)
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), RMS_EPS).to(x.dtype)


def rms_norm(
    shape: Shape,
    dtype: torch.dtype,
    mode: str,
    *,
    variant: str = "",
    weight_dtype: torch.dtype | None = None,
    peers: bool = True,
    **fields,
) -> Case:
    weight_dtype = weight_dtype or dtype
    ours = fusedcuda_op("rms_norm", eps=RMS_EPS)
    providers = {"fusedcuda": ours, **torch_providers(rms_norm_eager)}
    if peers:
        providers |= {
            "triton": triton_op("norm", "rms_norm", eps=RMS_EPS),
            **liger_function(
                "rms_norm", "LigerRMSNormFunction", RMS_EPS, 0.0, "llama", False,
                note="told not to write its gradient over the incoming one, as it would by default",
            ),
            **where_installed(
                "quack", "quack", Provider(imported("quack", "rmsnorm", eps=RMS_EPS))
            ),
        }  # fmt: skip
    if variant == "odd":
        providers[ALIGNED] = aligned_twin(ours)
    return new_case(
        "rms_norm", variant, shape, dtype, mode=mode,
        make_inputs=random([shape, shape[-1:]], [dtype, weight_dtype]),
        traffic=moved(mode, shape, dtype, [weight_dtype]), reference=rms_norm_eager,
        providers=providers, **fields,
    )  # fmt: skip


def rms_norm_residual(shape: Shape, dtype: torch.dtype, mode: str) -> Case:
    """h = x + residual; y = rms_norm(h); both are results, and both have gradients."""

    def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        h = x + residual
        return rms_norm_eager(h, weight), h

    def ours() -> Function:
        from fusedcuda import rms_norm

        return lambda x, residual, weight: rms_norm(x, weight, RMS_EPS, residual=residual)

    def quack() -> Function:
        from quack import rmsnorm

        return lambda x, residual, weight: rmsnorm(
            x, weight, residual=residual, eps=RMS_EPS, prenorm=True
        )

    return new_case(
        "rms_norm", "residual", shape, dtype, mode=mode,
        traffic=moved(mode, shape, dtype, [dtype], residual=1),
        make_inputs=random([shape, shape, shape[-1:]], dtype),
        reference=eager,
        providers={
            "fusedcuda": Provider(ours), **torch_providers(eager),
            "triton": triton_op("norm", "add_rms_norm", eps=RMS_EPS),
            **liger_function(
                "fused_add_rms_norm", "LigerFusedAddRMSNormFunction", RMS_EPS, 0.0, "llama", False
            ),
            **where_installed("quack", "quack", Provider(quack)),
        },
    )  # fmt: skip


def layer_norm_eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, LAYER_EPS)


def layer_norm(shape: Shape, dtype: torch.dtype, mode: str, *, variant: str = "", **fields) -> Case:
    def fp32_vectors(inputs: Tensors) -> Tensors:
        return (inputs[0], *(t.float() for t in inputs[1:]))

    ours = fusedcuda_op("layer_norm", eps=LAYER_EPS)
    quack = Provider(
        imported("quack.rmsnorm", "layernorm_fwd", eps=LAYER_EPS), adapt=fp32_vectors,
        note="takes weight and bias in fp32 only",
    )  # fmt: skip
    providers = {
        "fusedcuda": ours, **torch_providers(layer_norm_eager),
        "triton": triton_op("norm", "layer_norm", eps=LAYER_EPS),
        **liger_function("layer_norm", "LigerLayerNormFunction", LAYER_EPS),
        # QuACK's LayerNorm has no autograd.
        **(where_installed("quack", "quack", quack) if mode == "forward" else {}),
    }  # fmt: skip
    if variant == "odd":
        providers[ALIGNED] = aligned_twin(ours)
    return new_case(
        "layer_norm", variant, shape, dtype, mode=mode,
        traffic=moved(mode, shape, dtype, [dtype, dtype]),
        make_inputs=random([shape, shape[-1:], shape[-1:]], dtype),
        reference=layer_norm_eager,
        providers=providers, **fields,
    )  # fmt: skip


# -- the list -------------------------------------------------------------------------------------


def host_table(shape: Shape = (4, 4096)) -> list[Case]:
    vector = shape[-1:]
    return [
        *host_cases(
            "rms_norm", shape, moved("forward", shape, BF16, [BF16]),
            random([shape, vector], BF16), rms_norm_eager,
            native=rms_norm_eager, native_name="F.rms_norm",
        ),
        *host_cases(
            "layer_norm", shape, moved("forward", shape, BF16, [BF16, BF16]),
            random([shape, vector, vector], BF16), layer_norm_eager,
            native=layer_norm_eager, native_name="F.layer_norm",
        ),
    ]  # fmt: skip


def build_cases() -> list[Case]:
    return [
        *row_sweep(rms_norm, [columns for _, columns in RMS_RATIOS]),
        *host_table(),
        *(
            layer_norm(shape, BF16, mode, **row_panel("layer_norm", shape[1], mode))
            for shape in LAYER_RATIOS
            for mode in MODES
        ),
        *(rms_norm_residual(shape, BF16, mode) for shape in RESIDUAL_SHAPES for mode in MODES),
        *(rms_norm((rows, 4096), BF16, "forward", variant="decode") for rows in (1, 16, 128)),
        *(rms_norm(shape, BF16, mode, variant="odd") for shape in ODD_SHAPES for mode in MODES),
        *(layer_norm(shape, BF16, mode, variant="odd") for shape in ODD_SHAPES for mode in MODES),
        *(
            rms_norm((65536, 4096), BF16, mode, variant="fp32-weight", weight_dtype=FP32,
                     peers=False)
            for mode in MODES
        ),
        *row_sweep(rms_norm, [2048, 32768, 131072], group="sweep"),
        *(rms_norm((2**20, 1), BF16, mode, peers=False) for mode in MODES),
        *(rms_norm((32768, 4096), FP32, mode) for mode in MODES),
        *(layer_norm((32768, 4096), FP32, mode) for mode in MODES),
        *row_sweep(layer_norm, [1024, 32768, 262144], group="sweep"),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main("norm", build_cases(), partial(plots.draw, family="norm"), arguments)


if __name__ == "__main__":
    sys.exit(main())
