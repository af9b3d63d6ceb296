"""dlrm family: `python -m bench.bench_dlrm [--quick] [--filter REGEX] [--out DIR]`.

Interactions are batch x vectors x elements of the published models: 27 vectors of 16 (kaggle), 64
(terabyte) and 128 (MLPerf) elements. With the lookup, all but one of them are rows of a table, that
of the case study; the gradient of that table alone is indices x rows x elements. The head is batch
x inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812

from bench import cases, harness, plots
from bench.cases import (
    MODES,
    Case,
    Provider,
    Target,
    Tensors,
    Traffic,
    faster,
    for_mode,
    fusedcuda_op,
    host_cases,
    random,
    torch_providers,
    traffic,
    triton_op,
)

BF16 = torch.bfloat16
BYTES_OF_FLOAT32, BYTES_OF_INT64 = 4, 8
TABLE_ROWS = 260_000  # 10,000 for each of 26 features

TARGETS: dict[str, tuple[Target, ...]] = {
    "dot_interaction 65536x27x128 bf16 forward": (faster("best", 1.0), faster("compile", 1.3)),
    "dot_interaction 65536x27x128 bf16 backward": (faster("best", 1.0), faster("compile", 1.3)),
    "dot_interaction 65536x27x16 bf16 forward": (faster("best", 1.0), faster("compile", 1.3)),
    "embedding_interaction 65536x27x16 bf16 forward": (faster("best", 1.0),),
    "embedding_interaction 65536x27x128 bf16 forward": (faster("best", 1.0),),
    "embedding_dense_backward 1703936x260000x16 bf16 forward": (faster("best", 1.0),),
    "embedding_dense_backward 1703936x260000x128 bf16 forward": (faster("best", 1.0),),
    "linear_sigmoid_bce 65536x256 bf16 forward": (faster("best", 1.0),),
    "linear_sigmoid_bce 65536x256 bf16 backward": (faster("best", 1.0),),
}

new_case = partial(cases.new_case, targets=TARGETS)


# -- interaction ----------------------------------------------------------------------------------


def width_of(count: int, columns: int) -> int:
    """Of an output row: a multiple of 8."""
    return -(-(columns + count * (count - 1) // 2) // 8) * 8


@cache
@torch.inference_mode(False)  # the first to ask is a host time in inference mode
def pairs(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    i, j = torch.tril_indices(count, count, -1, device=device)
    return i, j


def eager_interaction(dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """As NVIDIA's DLRM has it without its own kernel, the indices made once."""
    vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
    count, columns = vectors.shape[1:]
    i, j = pairs(count, dense.device)
    products = torch.bmm(vectors, vectors.transpose(1, 2))[:, i, j]
    used = columns + count * (count - 1) // 2
    padding = dense.new_zeros(dense.shape[0], width_of(count, columns) - used)
    return torch.cat([dense, products, padding], dim=1)


def interaction_traffic(batch: int, count: int, columns: int, mode: str) -> Traffic:
    vectors = [(batch, columns), (batch, count - 1, columns)]
    row = [(batch, width_of(count, columns))]
    return for_mode(
        mode,
        forward=traffic(BF16, read=vectors, write=row),
        backward=traffic(BF16, read=[*vectors, *row], write=vectors),
    )


def interaction_inputs(batch: int, count: int, columns: int) -> Callable[..., Tensors]:
    return random([(batch, columns), (batch, count - 1, columns)], BF16)


def dot_interaction(batch: int, columns: int, mode: str, count: int = 27) -> Case:
    return new_case(
        "dot_interaction", "", (batch, count, columns), BF16, mode=mode,
        traffic=interaction_traffic(batch, count, columns, mode),
        make_inputs=interaction_inputs(batch, count, columns),
        reference=eager_interaction,
        providers={
            "fusedcuda": fusedcuda_op("dot_interaction"), **torch_providers(eager_interaction),
            "triton": triton_op("dlrm", "dot_interaction"),
        },
    )  # fmt: skip


# -- interaction of rows of a table ---------------------------------------------------------------


def eager_lookup(dense: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return eager_interaction(dense, F.embedding(indices, weight))


def apart(dense: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Torch's lookup, and the products in one kernel."""
    import fusedcuda

    return fusedcuda.dot_interaction(dense, F.embedding(indices, weight))


def lookup_inputs(
    batch: int, count: int, columns: int, rows: int = TABLE_ROWS
) -> Callable[[torch.Generator], Tensors]:
    draw = random([(batch, columns), (rows, columns)], BF16)

    def indexed(generator: torch.Generator) -> Tensors:
        shape, device = (batch, count - 1), generator.device
        return *draw(generator), torch.randint(rows, shape, generator=generator, device=device)

    return indexed


def lookup_traffic(
    batch: int, count: int, columns: int, mode: str, rows: int = TABLE_ROWS
) -> Traffic:
    """Rows of a table that is smaller than what is looked up count once.

    Backward: the gradients of what was looked up are written, and read to be added up.
    """
    dense, table = (batch, columns), (rows, columns)
    looked_up, row = (batch, count - 1, columns), (batch, width_of(count, columns))
    indices = (batch, count - 1, BYTES_OF_INT64 // BF16.itemsize)
    read = [dense, min(table, looked_up, key=prod), indices]
    return for_mode(
        mode,
        forward=traffic(BF16, read=read, write=[row]),
        backward=traffic(
            BF16, read=[*read, row, looked_up, indices], write=[dense, looked_up, table]
        ),
    )


def embedding_interaction(
    batch: int, columns: int, mode: str, count: int = 27, rows: int = TABLE_ROWS
) -> Case:
    return new_case(
        "embedding_interaction", "", (batch, count, columns), BF16, mode=mode,
        traffic=lookup_traffic(batch, count, columns, mode, rows),
        make_inputs=lookup_inputs(batch, count, columns, rows),
        reference=eager_lookup,
        providers={
            "fusedcuda": fusedcuda_op("embedding_interaction"),
            **torch_providers(eager_lookup),
            "fusedcuda, apart": Provider(lambda: apart),
        },
        constants=1,
    )  # fmt: skip


# -- gradient of a table --------------------------------------------------------------------------


def gradient_inputs(items: int, rows: int, columns: int) -> Callable[[torch.Generator], Tensors]:
    draw = random([(items, columns)], BF16)

    def indexed(generator: torch.Generator) -> Tensors:
        indices = torch.randint(rows, (items,), generator=generator, device=generator.device)
        return *draw(generator), indices

    return indexed


def table_gradient(items: int, columns: int, rows: int = TABLE_ROWS) -> Case:
    """Of a table, from those of what was looked up in it. What a sort moves is not counted."""

    def by_torch(grad: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.embedding_dense_backward(grad, indices, rows, -1, False)

    def sorted_here(grad: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        import fusedcuda  # noqa: F401

        result: torch.Tensor = torch.ops.fusedcuda.embedding_dense_backward(grad, indices, rows)
        return result

    a_row, indices = (items, columns), (items, BYTES_OF_INT64 // BF16.itemsize)
    return new_case(
        "embedding_dense_backward", "", (items, rows, columns), BF16,
        traffic=traffic(BF16, read=[a_row, indices], write=[(rows, columns)]),
        make_inputs=gradient_inputs(items, rows, columns), reference=by_torch,
        providers={"fusedcuda": Provider(lambda: sorted_here), **torch_providers(by_torch)},
    )  # fmt: skip


# -- head -----------------------------------------------------------------------------------------


def eager_head(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    logits = F.linear(x, weight, bias).squeeze(-1)
    # The loss in float32, as under autocast (in float64 where the result is checked).
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.binary_cross_entropy_with_logits(logits.to(dtype), target.to(dtype))


def head_inputs(batch: int, columns: int) -> Callable[[torch.Generator], Tensors]:
    draw = random([(batch, columns), (1, columns), (1,)], BF16)

    def labelled(generator: torch.Generator) -> Tensors:
        x, weight, bias = draw(generator)
        target = torch.rand(batch, generator=generator, device=generator.device) < 0.3
        return x, weight.mul_(columns**-0.5), bias, target.float()

    return labelled


def head_traffic(batch: int, columns: int, mode: str) -> Traffic:
    """Beside x and weight: targets, logits and their gradients, in float32."""
    values = BYTES_OF_FLOAT32 // BF16.itemsize
    a_row = (batch, values)
    x, weight = (batch, columns), (columns,)
    return for_mode(
        mode,
        forward=traffic(BF16, read=[x, weight, a_row], write=[a_row, a_row]),
        backward=traffic(BF16, read=[x, weight, a_row], write=[x, weight]),
    )


def linear_sigmoid_bce(batch: int, columns: int, mode: str) -> Case:
    triton = {"triton": triton_op("dlrm", "linear_sigmoid_bce")} if mode == "forward" else {}
    return new_case(
        "linear_sigmoid_bce", "", (batch, columns), BF16, mode=mode,
        traffic=head_traffic(batch, columns, mode),
        make_inputs=head_inputs(batch, columns),
        reference=eager_head,
        providers={
            "fusedcuda": fusedcuda_op("linear_sigmoid_bce"), **torch_providers(eager_head),
            **triton,
        },
        constants=1,
    )  # fmt: skip


# -- the list -------------------------------------------------------------------------------------


def build_cases() -> list[Case]:
    small = (128, 27, 16)
    return [
        *(dot_interaction(65536, 128, mode) for mode in MODES),
        *(dot_interaction(65536, 16, mode) for mode in MODES),
        *(embedding_interaction(65536, 16, mode) for mode in MODES),
        *(embedding_interaction(65536, 128, mode) for mode in MODES),
        *(table_gradient(65536 * 26, columns) for columns in (16, 128)),
        *(linear_sigmoid_bce(65536, 256, mode) for mode in MODES),
        *host_cases(
            "dot_interaction", small, interaction_traffic(*small, "forward"),
            interaction_inputs(*small), eager_interaction,
        ),
        *host_cases(
            "embedding_interaction", small, lookup_traffic(*small, "forward"),
            lookup_inputs(*small), eager_lookup, constants=1,
        ),
        *host_cases(
            "linear_sigmoid_bce", (128, 256), head_traffic(128, 256, "forward"),
            head_inputs(128, 256), eager_head, constants=1,
        ),
        *(dot_interaction(65536, 64, mode) for mode in MODES),
        *(dot_interaction(batch, 128, mode) for batch in (2048, 128) for mode in MODES),
        *(dot_interaction(128, 16, mode) for mode in MODES),
        *(dot_interaction(16384, 64, mode, count=64) for mode in MODES),
        *(linear_sigmoid_bce(2048, 256, mode) for mode in MODES),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main("dlrm", build_cases(), partial(plots.draw, family="dlrm"), arguments)


if __name__ == "__main__":
    sys.exit(main())
