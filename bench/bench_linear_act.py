"""linear_act family: `python -m bench.bench_linear_act [--quick] [--filter REGEX] [--out DIR]`.

Shapes are M x N x K: M rows of x, N outputs, K inputs. The cases come first in the order in which
they matter: when time runs out, the last are skipped.
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
    faster,
    for_mode,
    forced,
    fusedcuda_op,
    host_cases,
    imported,
    random,
    torch_providers,
    traffic,
    triton_op,
    where_installed,
    within,
)

BF16 = torch.bfloat16
MNK = tuple[int, int, int]

DLRM_TOP: MNK = (65536, 1024, 480)  # the widest layer of MLPerf's DLRM
GPT: tuple[MNK, ...] = ((8192, 3072, 768), (8192, 4096, 1024))
LARGE: tuple[MNK, ...] = ((8192, 4096, 4096), (8192, 14336, 4096))

TARGETS: dict[str, tuple[Target, ...]] = {
    "linear_act relu 65536x512x16 bf16 forward": (faster("best", 1.15),),
    "linear_act relu 65536x1024x480 bf16 forward": (faster("best", 1.05), faster("compile", 1.45)),
    "linear_act gelu_tanh 65536x1024x480 bf16 forward": (faster("best", 1.05),),
    "linear_act relu padded 65536x1024x479 bf16 forward": (faster("best", 1.05),),
    "linear_act gelu_tanh 8192x3072x768 bf16 forward": (
        faster("best", 1.02), faster("compile", 1.45),
    ),
    "linear_act gelu_tanh 8192x4096x1024 bf16 forward": (faster("addmm_activation", 1.08),),
    "linear_act gelu_tanh 8192x4096x4096 bf16 forward": (faster("best", 1.02),),
    "linear_act gelu_tanh 8192x14336x4096 bf16 forward": (faster("best", 1.02),),
    "linear_act gelu_tanh 16x4096x4096 bf16 forward": (faster("best", 1.0),),
    "linear_act relu 65536x1024x480 bf16 backward": (
        within(MATMUL, 1.10, "gpu_cold"), faster("compile", 1.25),
    ),
    "linear_act relu 65536x512x16 bf16 backward": (faster("compile", 1.6),),
    "linear_act gelu_tanh 8192x3072x768 bf16 backward": (within(MATMUL, 1.12, "gpu_cold"),),
    "linear_act gelu_tanh 8192x4096x1024 bf16 backward": (within(MATMUL, 1.10, "gpu_cold"),),
}  # fmt: skip
QUACK_US = {
    "linear_act gelu_tanh 65536x1024x480 bf16 forward": 130,
    "linear_act gelu_tanh 8192x3072x768 bf16 forward": 66,
    "linear_act gelu_tanh 8192x4096x4096 bf16 forward": 414,
    "linear_act gelu_tanh 8192x14336x4096 bf16 forward": 1435,
}

new_case = partial(cases.new_case, targets=TARGETS, quack_us=QUACK_US)

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


# -- inputs ---------------------------------------------------------------------------------------


def layer_inputs(shape: MNK, pitch: int = 0) -> Callable[[torch.Generator], Tensors]:
    """x, weight and bias, so that z is about 1. `pitch`: elements between rows of x and weight."""
    m, n, k = shape
    draw = random([(m, pitch or k), (n, pitch or k), (n,)], BF16)

    def scaled(generator: torch.Generator) -> Tensors:
        x, weight, bias = draw(generator)
        return x[:, :k], weight.mul_(k**-0.5)[:, :k], bias

    return scaled


def layer_traffic(shape: MNK, mode: str, activation: str) -> Traffic:
    m, n, k = shape
    factors = [(m, k), (n, k), (n,)]
    forward = traffic(BF16, read=factors, write=[(m, n)])
    # dy and what was kept of z are read for either product.
    kept = [] if activation == "none" else [(m, n // 16 if activation == "relu" else n)]
    backward = traffic(BF16, read=[(m, n), *kept, (m, k), (n, k)], write=factors)
    return for_mode(mode, forward=forward, backward=backward)


# -- providers ------------------------------------------------------------------------------------


def eager_layer(activation: str) -> Function:
    act = ACTIVATIONS[activation]
    return lambda x, weight, bias: act(F.linear(x, weight, bias))


def autotuned(function: Function) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, mode="max-autotune-no-cudagraphs")


def addmm_activation(activation: str) -> Provider:
    """torch's private epilogue: ReLU or tanh GELU, no gradient."""

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=activation == "gelu_tanh")

    return Provider(lambda: call)


def matmul_alone(mode: str) -> Provider:
    """The products without bias or activation: what an epilogue that costs nothing would take."""
    products = {"forward": "the product", "backward": "its two products", "both": "its products"}
    return Provider(
        lambda: F.linear, adapt=lambda tensors: tensors[:2], checked=False,
        note=f"{products[mode]} without bias and activation; not a peer",
    )  # fmt: skip


def peers(activation: str, mode: str, is_slow: bool) -> dict[str, Provider]:
    eager = eager_layer(activation)
    found = dict(torch_providers(eager))
    if mode == "forward":
        if not is_slow:
            found["compile max-autotune"] = Provider(lambda: autotuned(eager))
        if activation in ("relu", "gelu_tanh"):
            found["addmm_activation"] = addmm_activation(activation)
        found["triton"] = triton_op("linear_act", "linear_act", activation=activation)
    quack = Provider(imported("quack.linear", "linear_act_func", activation=activation))
    return found | where_installed("quack", "quack", quack)


MOST_FEW_INPUTS = 16


def by_tiles(activation: str) -> Provider:
    """By the product of tiles, where a layer of few inputs has a kernel of its own."""

    def build() -> Function:
        import fusedcuda

        fusedcuda.load("linear_act")
        layer = partial(fusedcuda.linear_act, activation=activation)
        return forced("linear_act_use", "hopper", layer)

    return Provider(build)


# -- cases ----------------------------------------------------------------------------------------


def layer(
    activation: str, shape: MNK, mode: str, variant: str = "", pitch: int = 0, **fields
) -> Case:
    eager = eager_layer(activation)
    is_slow = shape in LARGE
    is_narrow = shape[2] <= MOST_FEW_INPUTS and mode == "forward"
    return new_case(
        "linear_act", " ".join(filter(None, (activation, variant))), shape, BF16, mode=mode,
        traffic=layer_traffic(shape, mode, activation),
        make_inputs=layer_inputs(shape, pitch),
        reference=eager,
        providers={
            "fusedcuda": fusedcuda_op("linear_act", activation=activation),
            **({"fusedcuda, tiles": by_tiles(activation)} if is_narrow else {}),
            MATMUL: matmul_alone(mode),
            **peers(activation, mode, is_slow),
        },
        **fields,
    )  # fmt: skip


def mlp_eager(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def mlp(tokens: int, width: int, mode: str) -> Case:
    """A GPT block's two layers, `width` to four times that and back."""
    hidden = 4 * width
    shapes = [(tokens, width), (hidden, width), (hidden,), (width, hidden), (width,)]
    between = [(tokens, hidden)] * 2
    forward = traffic(BF16, read=[*shapes, between[0]], write=[*between, (tokens, width)])
    backward = traffic(BF16, read=[*shapes, *between, (tokens, width)], write=[*shapes, between[0]])
    draw = random(shapes, BF16)

    def scaled(generator: torch.Generator) -> Tensors:
        x, w1, b1, w2, b2 = draw(generator)
        return x, w1.mul_(width**-0.5), b1, w2.mul_(hidden**-0.5), b2

    return new_case(
        "mlp", "gelu_tanh", (tokens, width, hidden), BF16, mode=mode,
        traffic=for_mode(mode, forward=forward, backward=backward),
        make_inputs=scaled, reference=mlp_eager,
        providers={"fusedcuda": fusedcuda_op("mlp"), **torch_providers(mlp_eager)},
    )  # fmt: skip


def dlrm_layers(batch: int, *modes: str) -> list[Case]:
    """MLPerf's DLRM: the bottom layers 13-512-256-128, the top 479-1024-1024-512-256-1."""
    bottom = [(512, 13), (256, 512), (128, 256)]
    top = [(1024, 479), (1024, 1024), (512, 1024), (256, 512), (1, 256)]
    return [
        layer("relu", (batch, *shape), mode, variant="dlrm", group="dlrm")
        for shape in dict.fromkeys(bottom + top)
        for mode in modes
    ]


def build_cases() -> list[Case]:
    small: MNK = (16, 64, 64)
    relu_small = eager_layer("relu")
    passes = ("forward", "backward")
    return [
        *(layer("relu", (65536, 512, 16), mode) for mode in passes),
        *(layer("relu", DLRM_TOP, mode) for mode in passes),
        layer("gelu_tanh", DLRM_TOP, "forward"),
        layer("relu", (65536, 1024, 479), "forward", variant="padded", pitch=480),
        *(layer("gelu_tanh", shape, mode) for shape in GPT for mode in passes),
        *(layer("gelu_tanh", shape, "forward") for shape in LARGE),
        layer("gelu_tanh", (16, 4096, 4096), "forward"),
        *host_cases(
            "linear_act", small, layer_traffic(small, "forward", "relu"), layer_inputs(small),
            relu_small, ours=fusedcuda_op("linear_act", activation="relu"),
            native=F.linear, native_name="F.linear",
        ),
        *(layer(name, (8192, 4096, 1024), "forward") for name in ("gelu", "silu", "none")),
        *(layer("gelu_tanh", shape, "backward") for shape in LARGE),
        *(mlp(8192, width, mode) for width in (768, 1024) for mode in passes),
        layer("relu", (65536, 1024, 479), "forward", variant="unpadded"),
        *dlrm_layers(65536, *passes),
        *dlrm_layers(2048, *passes),
        *(mlp(8192, 4096, mode) for mode in passes),
        *(layer("relu", shape, "both") for shape in ((65536, 512, 16), DLRM_TOP)),
        *(layer("gelu_tanh", shape, "both") for shape in (*GPT, *LARGE)),
        *(mlp(8192, width, "both") for width in (768, 1024, 4096)),
        *dlrm_layers(65536, "both"),
        *dlrm_layers(2048, "both"),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    draw = partial(plots.draw, family="linear_act")
    return harness.main("linear_act", build_cases(), draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
