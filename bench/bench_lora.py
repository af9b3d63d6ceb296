"""lora family: `python -m bench.bench_lora [--quick] [--filter REGEX] [--out DIR]`.

Shapes are M x N x K r: M rows of x, N outputs, K inputs, r ranks. The weight is frozen: a backward
has gradients of x and of both factors. The yardstick is the linear layer without a branch, whose
backward is the gradient of x alone. With dropout the providers draw different masks, which cannot
be compared; there the checks are those of tests/test_lora.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from bench import cases, harness, plots
from bench.cases import (
    MODES,
    Case,
    Function,
    Provider,
    Target,
    Tensors,
    Traffic,
    for_mode,
    forced,
    host_cases,
    imported,
    random,
    torch_providers,
    traffic,
    where_installed,
    within,
)

BF16 = torch.bfloat16
MNK = tuple[int, int, int]
SCALE = 2.0
# K-extension: columns for t behind those of x, so that rows stay aligned to 128 bytes.
EXTENSION = 64
BASE = "linear alone"

SQUARE: MNK = (8192, 4096, 4096)
WIDE: MNK = (8192, 14336, 4096)
DECODE: MNK = (16, 4096, 4096)

TARGETS: dict[str, tuple[Target, ...]] = {
    "lora_linear r16 8192x4096x4096 bf16 forward": (within(BASE, 1.05, "gpu_cold"),),
    "lora_linear r16 8192x14336x4096 bf16 forward": (within(BASE, 1.03, "gpu_cold"),),
    "lora_linear r16 8192x4096x4096 bf16 backward": (within(BASE, 1.12, "gpu_cold"),),
    "lora_linear r16 16x4096x4096 bf16 forward": (within(BASE, 1.15, "gpu_cold"),),
}

new_case = partial(cases.new_case, targets=TARGETS)


# -- inputs ---------------------------------------------------------------------------------------


def layer_inputs(shape: MNK, rank: int) -> Callable[[torch.Generator], Tensors]:
    """x, both factors and, the last one and constant, the weight; outputs are about 1."""
    m, n, k = shape
    draw = random([(m, k), (rank, k), (n, rank), (n, k)], BF16)

    def scaled(generator: torch.Generator) -> Tensors:
        x, lora_a, lora_b, weight = draw(generator)
        return x, lora_a.mul_(k**-0.5), lora_b.mul_(rank**-0.5), weight.mul_(k**-0.5)

    return scaled


def layer_traffic(shape: MNK, rank: int, mode: str) -> Traffic:
    """Each tensor once: what one kernel a direction would move."""
    m, n, k = shape
    factors = [(rank, k), (n, rank)]
    inputs = [(m, k), (n, k), *factors]
    return for_mode(
        mode,
        forward=traffic(BF16, read=inputs, write=[(m, n)]),
        backward=traffic(BF16, read=[(m, n), *inputs], write=[(m, k), *factors]),
    )


# -- providers ------------------------------------------------------------------------------------


def eager_layer(dropout_p: float) -> Function:
    """As the peft package computes it."""

    def layer(x, lora_a, lora_b, weight):
        dropped = F.dropout(x, dropout_p) if dropout_p else x
        return F.linear(x, weight) + F.linear(F.linear(dropped, lora_a), lora_b) * SCALE

    return layer


def fused_layer(dropout_p: float, path: str) -> Provider:
    def build() -> Function:
        import fusedcuda

        def layer(x, lora_a, lora_b, weight):
            return fusedcuda.lora_linear(
                x, weight, lora_a, lora_b, SCALE, dropout_p=dropout_p, training=True
            )

        return layer if path == "auto" else forced("lora_use", path, layer)

    return Provider(build, checked=dropout_p == 0)


def linear_alone() -> Provider:
    return Provider(
        lambda: F.linear, adapt=lambda tensors: (tensors[0], tensors[-1]), checked=False,
        note="without the branch, backward for x alone; not a peer",
    )  # fmt: skip


def peft_layer(dropout_p: float) -> dict[str, Provider]:
    """The layer of the installed package; its parameters are those of the case."""
    build = imported("bench.baselines.lora", "peft_layer", dropout_p=dropout_p, scale=SCALE)
    return where_installed("peft", "peft", Provider(build, checked=dropout_p == 0))


def with_extended_weight(tensors: Tensors) -> Tensors:
    """For K-extension: the weight with the scaled second factor behind it, as a model keeps it."""
    x, lora_a, lora_b, weight = tensors
    extended = weight.new_zeros(weight.shape[0], weight.shape[1] + EXTENSION)
    extended[:, : weight.shape[1]] = weight
    extended[:, weight.shape[1] :][:, : lora_b.shape[1]] = lora_b * SCALE
    return x, lora_a, extended


def peers(mode: str, rank: int, dropout_p: float) -> dict[str, Provider]:
    eager = eager_layer(dropout_p)
    found = torch_providers(eager) | peft_layer(dropout_p)
    if dropout_p:
        return {
            name: Provider(p.build, p.adapt, p.restore, p.note, checked=False)
            for name, p in found.items()
        }
    # Made for p = 0: what these projects do with dropout is to go back to the eager layer.
    found["addmm"] = Provider(imported("bench.baselines.lora", "addmm_layer", scale=SCALE))
    if mode == "forward" and rank <= EXTENSION:
        found["K-extension"] = Provider(
            imported("bench.baselines.lora", "extended_layer"), adapt=with_extended_weight,
            note="x is copied to rows with room for t, which is timed; the weights' side is not",
        )  # fmt: skip
    return found


# -- cases ----------------------------------------------------------------------------------------


def other_paths(shape: MNK, dropout_p: float) -> dict[str, Provider]:
    few = shape[0] <= DECODE[0]
    return {
        "fusedcuda, one launch": fused_layer(dropout_p, "decode" if few else "fused"),
        "fusedcuda, apart": fused_layer(dropout_p, "apart"),
        "fusedcuda, residual": fused_layer(dropout_p, "residual"),
    }


def lora_linear(
    shape: MNK,
    mode: str,
    rank: int = 16,
    dropout_p: float = 0.0,
    has_paths: bool = True,
    **fields,
) -> Case:
    words = (f"r{rank}", f"dropout {dropout_p:g}" if dropout_p else "")
    return new_case(
        "lora_linear", " ".join(filter(None, words)), shape, BF16, mode=mode,
        traffic=layer_traffic(shape, rank, mode),
        make_inputs=layer_inputs(shape, rank),
        reference=eager_layer(dropout_p),
        providers={
            "fusedcuda": fused_layer(dropout_p, "auto"),
            **(other_paths(shape, dropout_p) if has_paths else {}),
            BASE: linear_alone(),
            **peers(mode, rank, dropout_p),
        },
        constants=1,
        **fields,
    )  # fmt: skip


def lora_down(m: int, k: int, rank: int) -> Case:
    """The skinny product alone: t of x and lora_a."""

    def reference(x: torch.Tensor, lora_a: torch.Tensor) -> torch.Tensor:
        return F.linear(x, lora_a)

    def fused() -> Function:
        import fusedcuda  # noqa: F401

        def down(x: torch.Tensor, lora_a: torch.Tensor) -> torch.Tensor:
            return torch.ops.fusedcuda.lora_down(x, lora_a, None, 1.0, 0.0)[:, :rank]

        return down

    def fused_pass() -> Function:
        import fusedcuda  # noqa: F401

        def down(x: torch.Tensor, lora_a: torch.Tensor) -> torch.Tensor:
            given = (x, lora_a, None, None, rank, 1.0, 0.0, False, False)
            return torch.ops.fusedcuda.lora_pass(*given)[0][:, :rank]

        return down

    passes = {"fusedcuda, one pass": Provider(fused_pass)} if m > DECODE[0] else {}
    return new_case(
        "lora_down", f"r{rank}", (m, k), BF16, mode="forward",
        traffic=traffic(BF16, read=[(m, k), (rank, k)], write=[(m, rank)]),
        make_inputs=random([(m, k), (rank, k)], BF16),
        reference=reference,
        providers={
            "fusedcuda": Provider(fused), **passes, "cublas": Provider(lambda: reference)
        },
    )  # fmt: skip


def lora_pass(m: int, n: int, rank: int) -> Case:
    """Both gradients of dz: of t and of lora_b."""

    def reference(
        dz: torch.Tensor, lora_b: torch.Tensor, t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return dz @ lora_b, dz.T @ t

    def fused() -> Function:
        import fusedcuda  # noqa: F401

        def both(
            dz: torch.Tensor, lora_b: torch.Tensor, t: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            given = (dz, lora_b.T, t, None, rank, 1.0, 0.0, True, False)
            dt, db = torch.ops.fusedcuda.lora_pass(*given)
            return dt, db

        return both

    return new_case(
        "lora_pass", f"r{rank}", (m, n), BF16, mode="forward",
        traffic=traffic(
            BF16,
            read=[(m, n), (n, rank), (m, rank)],
            write=[(m, rank), (n, rank)],
        ),
        make_inputs=random([(m, n), (n, rank), (m, rank)], BF16),
        reference=reference,
        providers={"fusedcuda": Provider(fused), **torch_providers(reference)},
    )  # fmt: skip


# LoRAFusion's (EuroSys 2026): square layers of these sizes with so many tokens, rank 16.
LORAFUSION_SIZES = (4096, 5120, 8192)
LORAFUSION_TOKENS = (2048, 4096, 8192)


def build_cases() -> list[Case]:
    small: MNK = (16, 64, 64)
    published = [
        lora_linear(
            (tokens, size, size), mode, dropout_p=dropout_p, has_paths=False, group="lorafusion"
        )
        for dropout_p in (0.0, 0.1)
        for size in LORAFUSION_SIZES
        for tokens in LORAFUSION_TOKENS
        for mode in ("forward", "backward", "both")
        if (tokens, size, size) != SQUARE or dropout_p or mode == "both"
    ]
    return [
        *(lora_linear(SQUARE, mode) for mode in MODES),
        lora_linear(WIDE, "forward"),
        lora_linear(DECODE, "forward"),
        *(lora_down(8192, 4096, rank) for rank in (16, 64, 5)),
        lora_down(16, 4096, 16),
        *(lora_pass(8192, n, 16) for n in (4096, 14336)),
        lora_linear(WIDE, "backward"),
        *(lora_linear(SQUARE, mode, rank=64) for mode in MODES),
        *host_cases(
            "lora_linear", (*small, 16), layer_traffic(small, 16, "forward"),
            layer_inputs(small, 16), eager_layer(0.0), ours=fused_layer(0.0, "auto"),
            constants=1,
        ),
        *(lora_linear(SQUARE, mode, rank=rank) for rank in (8, 256) for mode in MODES),
        *published,
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main("lora", build_cases(), partial(plots.draw, family="lora"), arguments)


if __name__ == "__main__":
    sys.exit(main())
