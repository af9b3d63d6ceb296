"""Cross-entropy: `python -m bench.bench_cross_entropy [--quick] [--filter REGEX] [--out DIR]`.

The cases come first in the order in which they matter: when time runs out, the last are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from bench import cases, harness, plots
from bench.cases import (
    ALIGNED,
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
    fusedcuda_op,
    host_cases,
    imported,
    random,
    torch_providers,
    traffic,
    triton_op,
    where_installed,
)

BF16 = torch.bfloat16
TRAFFIC_REMARK = (
    "Forward plus backward counts 6 bytes a logit in bf16, two reads and a write, for every "
    "provider. 4 are enough (one read, one write), and are what fusedcuda moves where the forward "
    "makes the gradient, which is why it can be above 100 % of the copy."
)

TARGETS: dict[str, tuple[Target, ...]] = {
    "cross_entropy 8192x32000 bf16 both": (faster("best", 1.05),),
    "cross_entropy 8192x128256 bf16 both": (faster("best", 1.05),),
    "cross_entropy 2048x262144 bf16 both": (faster("best", 1.08),),
    "cross_entropy odd 32768x4097 bf16 both": (ODD_TARGET,),
    "cross_entropy odd 8192x50257 bf16 both": (ODD_TARGET,),
}
QUACK_US = {
    "cross_entropy 8192x32000 bf16 both": 413,
    "cross_entropy 8192x128256 bf16 both": 1663,
    "cross_entropy 2048x262144 bf16 both": 885,
}

new_case = partial(cases.new_case, targets=TARGETS, quack_us=QUACK_US)


def moved(mode: str, shape: Shape, dtype: torch.dtype) -> Traffic:
    """A forward alone reads the logits; see TRAFFIC_REMARK for both passes."""
    if mode == "forward":
        return traffic(dtype, read=[shape])
    return traffic(dtype, read=[shape, shape], write=[shape])


def logits_and_target(shape: Shape, dtype: torch.dtype):
    def draw(generator: torch.Generator) -> Tensors:
        (logits,) = random([shape], dtype)(generator)
        return logits, torch.randint(
            shape[-1], shape[:-1], generator=generator, device=generator.device
        )

    return draw


def own_logits(inputs: Tensors) -> Tensors:
    """For a peer that writes the gradient over the logits: all providers share the inputs."""
    return (inputs[0].clone(), *inputs[1:])


def one_class_less(inputs: Tensors) -> Tensors:
    logits, target = inputs
    classes = logits.shape[-1] - 1
    return logits[..., :classes].contiguous(), target.clamp(max=classes - 1)


# -- the operations -------------------------------------------------------------------------------


def at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def eager(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """As training code writes it: the logits in fp32, then torch's loss and what comes on top."""
    logits = at_least_fp32(logits)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=label_smoothing)
    return loss + z_loss * torch.logsumexp(logits, -1).square().mean() if z_loss else loss


def liger(
    mode: str = "both",
    *,
    clone: bool = True,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> dict[str, Provider]:
    def build() -> Function:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        tail = (None, -100, z_loss, label_smoothing, reduction, softcap)
        apply = LigerCrossEntropyFunction.apply
        if clone:
            return lambda logits, target: apply(logits.clone(), target, *tail)[0]
        return lambda logits, target: apply(logits, target, *tail)[0]

    note = "writes its gradient over the logits, so it gets a copy, which is in its time"
    provider = Provider(build, note=note) if clone else Provider(build, own_logits)
    if mode == "forward":  # its loss has the dtype of the logits
        provider = replace(provider, restore=lambda loss: (loss[0].float(),))
    return where_installed("liger_kernel", "liger", provider)


def cross_entropy(
    shape: Shape,
    mode: str = "both",
    *,
    variant: str = "",
    triton: bool = True,
    options: dict[str, object] | None = None,
) -> Case:
    options = options or {}
    reference = partial(eager, **options) if options else eager
    ours = fusedcuda_op("cross_entropy", **options)
    providers = {
        "fusedcuda": ours,
        **torch_providers(reference),
        **({"triton": triton_op("cross_entropy", "cross_entropy")} if triton else {}),
        **liger(mode, **options),
        **(
            {}
            if options
            else where_installed("quack", "quack", Provider(imported("quack", "cross_entropy")))
        ),
    }
    if variant == "odd":
        providers[ALIGNED] = aligned_twin(ours, one_class_less)
    return new_case(
        "cross_entropy", variant, shape, BF16, mode=mode,
        traffic=moved(mode, shape, BF16),
        make_inputs=logits_and_target(shape, BF16),
        reference=reference,
        providers=providers,
        constants=1,
    )  # fmt: skip


class Handed(torch.autograd.Function):
    """Logits that are no leaf, as behind a matmul, at no cost: the same memory, and no view."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor) -> torch.Tensor:
        return logits.new_empty(0).set_(logits.detach())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def in_place(shape: Shape) -> Case:
    """Who can writes the gradient over the logits, and needs no memory for it.

    So from the second call on the logits are the gradient of the call before.
    """
    name = "cross_entropy"

    def ours() -> Function:
        from fusedcuda import cross_entropy

        return lambda logits, target: cross_entropy(
            Handed.apply(logits), target, inplace_backward=True
        )

    return new_case(
        name, "in-place", shape, BF16, mode="both",
        traffic=moved("both", shape, BF16),
        make_inputs=logits_and_target(shape, BF16),
        reference=eager,
        providers={
            "fusedcuda": Provider(ours, own_logits),
            "eager": Provider(lambda: eager, note="not in place: it cannot"),
            "triton": Provider(
                imported("bench.baselines.cross_entropy", name, in_place=True), own_logits
            ),
            **liger(clone=False),
        },
        constants=1,
    )  # fmt: skip


# -- the list -------------------------------------------------------------------------------------


def host_table(shape: Shape = (4, 4096)) -> list[Case]:
    return host_cases(
        "cross_entropy", shape, moved("forward", shape, BF16), logits_and_target(shape, BF16),
        eager, native=F.cross_entropy, native_name="F.cross_entropy, in bf16", constants=1,
    )  # fmt: skip


def build_cases() -> list[Case]:
    return [
        cross_entropy((8192, 32000)),
        cross_entropy((8192, 128256)),
        cross_entropy((2048, 262144)),
        *host_table(),
        in_place((8192, 32000)),
        cross_entropy((32768, 4097), variant="odd"),
        cross_entropy((8192, 50257), variant="odd"),
        cross_entropy((8192, 32000), "forward"),
        cross_entropy((8192, 32000), variant="none", triton=False, options={"reduction": "none"}),
        cross_entropy(
            (8192, 32000), variant="smoothing z-loss softcap", triton=False,
            options={"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0},
        ),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    draw = partial(plots.draw, family="cross_entropy")
    return harness.main("cross_entropy", build_cases(), draw, arguments, TRAFFIC_REMARK)


if __name__ == "__main__":
    sys.exit(main())
