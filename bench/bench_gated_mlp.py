"""gated_mlp family: `python -m bench.bench_gated_mlp [--quick] [--filter REGEX] [--out DIR]`.

Shapes are M x K x F: M rows of x, K inputs and outputs, F of the hidden layer. "both" is a forward
and a backward with all four gradients. Weights are separate as in a Llama's checkpoint; providers
that want them packed get them so, outside the timing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from bench import cases, harness, plots
from bench.cases import (
    MATMUL,
    Case,
    Function,
    Provider,
    Target,
    Tensors,
    Traffic,
    compiled,
    faster,
    forced,
    host_cases,
    imported,
    random,
    torch_providers,
    traffic,
    where_installed,
)

BF16 = torch.bfloat16
MKF = tuple[int, int, int]

LLAMA_8B = (4096, 14336)
LLAMA_1B = (2048, 8192)
FEW_ROWS = 64  # up to so many, nothing has to be written in between

TARGETS: dict[str, tuple[Target, ...]] = {
    "gated_mlp silu 8192x4096x14336 bf16 forward": (faster("best", 1.04),),
    "gated_mlp silu 16x4096x14336 bf16 forward": (faster("best", 1.05),),
    "gated_mlp silu 1x4096x14336 bf16 forward": (faster("best", 1.06),),
}
QUACK_US = {"gated_mlp silu 8192x4096x14336 bf16 forward": 4240}

new_case = partial(cases.new_case, targets=TARGETS, quack_us=QUACK_US)


# -- inputs ---------------------------------------------------------------------------------------


def layer_inputs(shape: MKF) -> Callable[[torch.Generator], Tensors]:
    """x, w_gate, w_up, w_down, so that gate, up and y are about 1."""
    m, k, f = shape
    draw = random([(m, k), (f, k), (f, k), (k, f)], BF16)

    def scaled(generator: torch.Generator) -> Tensors:
        x, w_gate, w_up, w_down = draw(generator)
        return x, w_gate.mul_(k**-0.5), w_up.mul_(k**-0.5), w_down.mul_(f**-0.5)

    return scaled


def layer_traffic(shape: MKF, mode: str) -> Traffic:
    """Each tensor once; what has to go through memory between two products twice."""
    m, k, f = shape
    weights = [(f, k), (f, k), (k, f)]
    h, gate_up = (m, f), (m, 2 * f)
    if mode == "forward":
        between = [] if m <= FEW_ROWS else [h]
        return traffic(BF16, read=[(m, k), *weights, *between], write=[*between, (m, k)])
    forward = traffic(BF16, read=[(m, k), *weights, h], write=[gate_up, h, (m, k)])
    backward = traffic(
        BF16,
        read=[(m, k), *weights, gate_up, h, (m, k), h, gate_up],
        write=[h, gate_up, (m, k), *weights],
    )
    return forward + backward


# -- providers ------------------------------------------------------------------------------------


def eager(x, w_gate, w_up, w_down):
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def eager_packed(x, w_gate_up, w_down):
    gate, up = F.linear(x, w_gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w_down)


def products_alone(x, w_gate, w_up, w_down):
    """The gate in place of the hidden layer; up is an output, so that it has gradients, too."""
    return F.linear(F.linear(x, w_gate), w_down), F.linear(x, w_up)


def pack(tensors: Tensors) -> Tensors:
    x, w_gate, w_up, w_down = tensors
    return x, torch.cat([w_gate, w_up]), w_down


def unpack(results: Tensors) -> Tensors:
    """Gradients as those of separate weights; an output as it is."""
    if len(results) == 1:
        return results
    dx, dw_gate_up, dw_down = results
    return dx, *dw_gate_up.chunk(2), dw_down


def interleave(tensors: Tensors) -> Tensors:
    x, w_gate, w_up, w_down = tensors
    return x, torch.stack([w_gate, w_up], dim=1).flatten(0, 1), w_down


def part(results: Tensors) -> Tensors:
    if len(results) == 1:
        return results
    dx, dw, dw_down = results
    return dx, dw[::2], dw[1::2], dw_down


def autotuned(function: Function) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, mode="max-autotune-no-cudagraphs")


def fused(path: str = "auto", packed: bool = False, recompute: bool = False) -> Provider:
    def build() -> Function:
        import fusedcuda

        def layer(x, *weights):
            *inner, w_down = weights
            w_gate_up = inner[0] if packed else tuple(inner)
            return fusedcuda.gated_mlp(x, w_gate_up, w_down, recompute=recompute)

        return layer if path == "auto" else forced("gated_mlp_use", path, layer)

    return Provider(build, adapt=pack, restore=unpack) if packed else Provider(build)


def ours(mode: str, few: bool) -> dict[str, Provider]:
    """As the rule has it, with weights of either form, and every other path."""
    found = {"fusedcuda": fused(), "fusedcuda, packed": fused(packed=True)}
    if mode == "both":
        found["fusedcuda, recompute"] = fused(recompute=True)
    if few:
        found["fusedcuda, one launch"] = fused("decode")
    if few or mode == "both":
        found["fusedcuda, fused"] = fused("fused")
    return found | {
        "fusedcuda, apart": fused("apart"),
        "fusedcuda, concatenated": fused("concatenated", packed=True),
    }


def peers(mode: str) -> dict[str, Provider]:
    packed = partial(Provider, adapt=pack, restore=unpack)
    found = torch_providers(eager) | {
        "concatenated": packed(lambda: eager_packed),
        "compile concatenated": packed(lambda: compiled(eager_packed)),
    }
    if mode == "forward":  # tuning the products of a backward takes minutes
        found["compile max-autotune"] = Provider(lambda: autotuned(eager))
    liger = Provider(imported("bench.baselines.gated_mlp", "liger_mlp"))
    quack = Provider(imported("bench.baselines.gated_mlp", "quack_mlp"), interleave, part)
    found |= where_installed("liger_kernel", "liger", liger)
    return found | where_installed("quack", "quack", quack)


# -- cases ----------------------------------------------------------------------------------------


def gated_mlp(shape: MKF, mode: str, **fields) -> Case:
    note = "its products and their gradients' without anything between; not a peer"
    return new_case(
        "gated_mlp", "silu", shape, BF16, mode=mode,
        traffic=layer_traffic(shape, mode),
        make_inputs=layer_inputs(shape),
        reference=eager,
        providers={
            **ours(mode, few=shape[0] <= FEW_ROWS),
            MATMUL: Provider(lambda: products_alone, checked=False, note=note),
            **peers(mode),
        },
        **fields,
    )  # fmt: skip


def build_cases() -> list[Case]:
    small: MKF = (16, 64, 128)
    return [
        *(gated_mlp((m, *LLAMA_8B), "forward") for m in (8192, 16, 1)),
        gated_mlp((8192, *LLAMA_8B), "both"),
        *(gated_mlp((2048, *LLAMA_1B), mode) for mode in ("forward", "both")),
        *host_cases(
            "gated_mlp", small, layer_traffic(small, "forward"), layer_inputs(small), eager,
            ours=fused(),
        ),
        *(gated_mlp((m, *LLAMA_1B), "forward") for m in (1, 16)),
        *(gated_mlp((m, *LLAMA_8B), "forward", group="rows") for m in (4, 32, 64, 128, 512, 2048)),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    draw = partial(plots.draw, family="gated_mlp", with_memory=True)
    return harness.main("gated_mlp", build_cases(), draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
