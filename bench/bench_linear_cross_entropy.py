"""linear_cross_entropy family: `python -m bench.bench_linear_cross_entropy [--quick]
[--filter REGEX] [--out DIR]`.

Shapes are M x H x V: M rows of x, H features, V classes. "both" is a forward and a backward with
the gradients of x and of the weight. Two questions are asked of one shape: how long with the memory
of a few large chunks, and how long with hardly more memory than the gradients themselves ("lean").
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
MHV = tuple[int, int, int]

LLAMA_8B: MHV = (8192, 4096, 128256)
SMALL: MHV = (8192, 2048, 32000)
GPT2: MHV = (8192, 768, 50257)


@dataclass(frozen=True)
class Setting:
    """How the call is divided, and whose products it takes."""

    chunk: int | str = "auto"
    accumulate: str = "fp32"
    backend: str = "measured"


# Within 2.2, 1.2 and 0.55 GiB (tests/test_linear_cross_entropy_memory.py).
LARGE = Setting(4096, "weight")
LEAN = Setting(512, "weight")


def smaller(peer: str, ratio: float) -> Target:
    text = f">= {ratio:.2f}x less memory than {peer}"
    return Target("peak_memory", peer, ratio, text)


TARGETS: dict[str, tuple[Target, ...]] = {
    "linear_cross_entropy 8192x4096x128256 bf16 both": (
        faster("best", 1.05),
        smaller("compile", 1.4),
    ),
    "linear_cross_entropy lean 8192x4096x128256 bf16 both": (
        faster("best", 1.01),
        smaller("compile", 2.5),
    ),
    "linear_cross_entropy 8192x2048x32000 bf16 both": (
        faster("best", 1.05),
        smaller("compile", 1.2),
    ),
}
QUACK_US = {
    "linear_cross_entropy 8192x4096x128256 bf16 both": 44400,
    "linear_cross_entropy lean 8192x4096x128256 bf16 both": 44400,
    "linear_cross_entropy 8192x2048x32000 bf16 both": 5230,
}

new_case = partial(cases.new_case, targets=TARGETS, quack_us=QUACK_US)


# -- inputs ---------------------------------------------------------------------------------------


def layer_inputs(shape: MHV):
    """x, weight, so that logits are about 1, and, the last one and constant, the target."""
    m, h, v = shape
    draw = random([(m, h), (v, h)], BF16)

    def scaled(generator: torch.Generator) -> Tensors:
        x, weight = draw(generator)
        target = torch.randint(v, (m,), generator=generator, device=generator.device)
        return x, weight.mul_(h**-0.5), target

    return scaled


def layer_traffic(shape: MHV, mode: str) -> Traffic:
    """Each tensor once for each product; the logits as they come and go between two of them."""
    m, h, v = shape
    x, weight, logits = (m, h), (v, h), (m, v)
    if mode == "forward":
        return traffic(BF16, read=[x, weight, logits], write=[logits])
    return traffic(
        BF16,
        read=[x, weight, logits, logits, weight, logits, x],
        write=[logits, logits, x, weight],
    )


# -- providers ------------------------------------------------------------------------------------


def eager(x, weight, target, reduction="mean"):
    """As training code writes it: the logits in fp32, then torch's loss."""
    logits = F.linear(x, weight)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, target, reduction=reduction)


def products_alone(x, weight, target):
    """The logits as the output, whose gradient is given."""
    return F.linear(x, weight)


def ours(setting: Setting, **options: object) -> Provider:
    def build() -> Function:
        import fusedcuda

        loss = partial(
            fusedcuda.linear_cross_entropy,
            chunk=setting.chunk,
            accumulate=setting.accumulate,
            **options,
        )

        if setting.backend == "measured":
            return loss
        # The gradients are made in the forward, so this holds for all three products.
        fusedcuda.load("linear_act")
        return forced("linear_act_use", setting.backend, loss)

    note = f"chunk={setting.chunk!r}, accumulate={setting.accumulate!r}"
    if setting.backend != "measured":
        note += f", products by {setting.backend}"
    return Provider(build, note=note)


def settings(first: Setting) -> dict[str, Provider]:
    cublaslt = Setting(first.chunk, first.accumulate, "cublaslt")
    others = {
        "fusedcuda": first,
        "fusedcuda, cuBLASLt": cublaslt,
        "fusedcuda, fp32 sum": Setting(first.chunk, "fp32"),
        "fusedcuda, one chunk": Setting(1 << 30),
        "fusedcuda, auto": Setting(),
    }
    return {name: ours(setting) for name, setting in others.items()}


def torch_own() -> dict[str, Provider]:
    """torch's own chunked form, in the releases that have it."""
    own = getattr(F, "linear_cross_entropy", None)
    return {} if own is None else {"torch.linear_cross_entropy": Provider(lambda: own)}


def peers() -> dict[str, Provider]:
    module = "bench.baselines.linear_cross_entropy"
    return {
        **torch_providers(eager),
        **torch_own(),
        **where_installed("liger_kernel", "liger", Provider(imported(module, "liger"))),
        **where_installed("quack", "quack", Provider(imported(module, "quack"))),
    }


# -- cases ----------------------------------------------------------------------------------------


def both(shape: MHV, setting: Setting, variant: str = "") -> Case:
    note = "the three products without the loss, for a given gradient of the logits; not a peer"
    return new_case(
        "linear_cross_entropy", variant, shape, BF16, mode="both",
        traffic=layer_traffic(shape, "both"),
        make_inputs=layer_inputs(shape),
        reference=eager,
        providers={
            **settings(setting),
            MATMUL: Provider(lambda: products_alone, checked=False, note=note),
            **peers(),
        },
        constants=1,
    )  # fmt: skip


def forward(shape: MHV) -> Case:
    """Evaluation: the loss alone."""
    note = "the product without the loss; not a peer"
    return new_case(
        "linear_cross_entropy", "", shape, BF16, mode="forward",
        traffic=layer_traffic(shape, "forward"),
        make_inputs=layer_inputs(shape),
        reference=eager,
        providers={
            "fusedcuda": ours(Setting(2048)),
            "fusedcuda, auto": ours(Setting()),
            MATMUL: Provider(lambda: products_alone, checked=False, note=note),
            **torch_providers(eager),
        },
        constants=1,
    )  # fmt: skip


def a_loss_a_row(shape: MHV) -> Case:
    """reduction="none": the backward makes the logits again, for the gradient of each row."""
    reference = partial(eager, reduction="none")
    return new_case(
        "linear_cross_entropy", "none", shape, BF16, mode="both",
        traffic=layer_traffic(shape, "both"),
        make_inputs=layer_inputs(shape),
        reference=reference,
        providers={"fusedcuda": ours(LARGE, reduction="none"), **torch_providers(reference)},
        constants=1,
    )  # fmt: skip


def build_cases() -> list[Case]:
    small: MHV = (16, 64, 128)
    return [
        both(LLAMA_8B, LARGE),
        both(LLAMA_8B, LEAN, "lean"),
        both(SMALL, LARGE),
        *host_cases(
            "linear_cross_entropy", small, layer_traffic(small, "forward"), layer_inputs(small),
            eager, constants=1,
        ),
        both(GPT2, LARGE, "odd"),
        forward(LLAMA_8B),
        a_loss_a_row(SMALL),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    draw = partial(plots.draw, family="linear_cross_entropy", with_memory=True)
    return harness.main("linear_cross_entropy", build_cases(), draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
