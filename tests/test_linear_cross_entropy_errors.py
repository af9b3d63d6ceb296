"""What linear_cross_entropy refuses: each message names the op and the argument."""

import pytest
import torch
from torch import Tensor

import fusedcuda


def arguments(**changes) -> dict:
    return {
        "x": torch.zeros(2, 4),
        "weight": torch.zeros(3, 4),
        "target": torch.zeros(2, dtype=torch.int64),
        **changes,
    }


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, "x .*int64", {"x": torch.ones(2, 4, dtype=torch.int64)}),
        (TypeError, "x .*list", {"x": [[1.0, 2.0]]}),
        (ValueError, "x .*dimension", {"x": torch.ones(())}),
        (TypeError, "weight .*float32.*float16", {"weight": torch.ones(3, 4).half()}),
        (TypeError, "weight .*NoneType", {"weight": None}),
        (ValueError, r"weight .*\(N, 4\).*\(3, 5\)", {"weight": torch.ones(3, 5)}),
        (ValueError, r"weight .*\(V, 4\).*\(2, 3, 4\)", {"weight": torch.ones(2, 3, 4)}),
        (ValueError, r"weight .*class.*\(0, 4\)", {"weight": torch.ones(0, 4)}),
        (ValueError, "weight .*meta", {"weight": torch.ones(3, 4, device="meta")}),
        (TypeError, "bias .*float32.*float64", {"bias": torch.ones(3).double()}),
        (ValueError, r"bias .*\(3,\).*\(4,\)", {"bias": torch.ones(4)}),
        (TypeError, "target .*int32 or int64.*float32", {"target": torch.ones(2)}),
        (TypeError, "target .*uint8", {"target": torch.zeros(2, dtype=torch.uint8)}),
        (TypeError, "target .*list", {"target": [0, 1]}),
        (ValueError, r"target .*\(2,\).*\(3,\)", {"target": torch.zeros(3, dtype=torch.int64)}),
        (ValueError, "target .*meta", {"target": torch.zeros(2, dtype=torch.int64, device="meta")}),
        (TypeError, "ignore_index .*float", {"ignore_index": 0.5}),
        (ValueError, "reduction .*none, mean, sum.*'avg'", {"reduction": "avg"}),
        (ValueError, r"label_smoothing .*\[0, 1\].*1.5", {"label_smoothing": 1.5}),
        (TypeError, "label_smoothing .*str", {"label_smoothing": "0.1"}),
        (ValueError, "z_loss .*-1", {"z_loss": -1.0}),
        (TypeError, "z_loss .*Tensor", {"z_loss": torch.ones(())}),
        (ValueError, "softcap .*positive.*0", {"softcap": 0.0}),
        (ValueError, "chunk .*at least one.*0", {"chunk": 0}),
        (ValueError, "chunk .*at least one.*-5", {"chunk": -5}),
        (TypeError, "chunk .*auto.*float", {"chunk": 128.0}),
        (TypeError, "chunk .*auto.*'all'", {"chunk": "all"}),
        (TypeError, "chunk .*bool", {"chunk": True}),
        (ValueError, "accumulate .*fp32, weight.*'bf16'", {"accumulate": "bf16"}),
        (ValueError, "accumulate .*float32", {"accumulate": torch.float32}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(error, words, changes, requires_grad, device):
    def placed(value):
        elsewhere = not isinstance(value, Tensor) or value.is_meta
        return value if elsewhere else value.to(device)

    given = {name: placed(value) for name, value in arguments(**changes).items()}
    if requires_grad and isinstance(given["x"], Tensor) and given["x"].is_floating_point():
        given["x"].requires_grad_()
    with pytest.raises(error, match=f"^linear_cross_entropy: {words}"):
        fusedcuda.linear_cross_entropy(**given)


@pytest.mark.parametrize("wrong", [3, -1, -99, 2**31, -(2**31) - 100])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("chunk", [1, "auto"])
def test_targets_out_of_range_raise_on_the_cpu(chunk, wrong, reduction):
    """Before anything is computed, with the place in the whole target."""
    for requires_grad in (False, True):
        given = arguments(target=torch.tensor([0, wrong]), chunk=chunk, reduction=reduction)
        given["x"].requires_grad_(requires_grad)
        words = rf"^linear_cross_entropy: target .*\[0, 3\).*{wrong} at \(1,\)"
        with pytest.raises(IndexError, match=words):
            fusedcuda.linear_cross_entropy(**given)


# ---------------------------------------------------------------------------- the parts


def product(output: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, adds: bool = False):
    torch.ops.fusedcuda.linear_act_product_(output, a, b, bias, adds)


def test_products_into_what_does_not_fit(device):
    a, b = torch.zeros(2, 4, device=device), torch.zeros(3, 4, device=device)
    bias = torch.zeros(3, device=device)
    for error, words, output, more in (
        (ValueError, r"output .*\(2, 3\).*\(3, 2\)", torch.zeros(3, 2), {}),
        (TypeError, "output .*float32", torch.zeros(2, 3).double(), {}),
        (ValueError, "bias .*not added to", torch.zeros(2, 3), {"bias": bias, "adds": True}),
    ):
        with pytest.raises((error, RuntimeError), match=f"^linear_act_product_: {words}"):
            product(output.to(device), a, b, **more)
    half = (a.half(), b.half(), bias.half())
    product(torch.zeros(2, 3, device=device), *half[:2])
    with pytest.raises((ValueError, RuntimeError), match=r"^linear_act_product_: bias .*not added"):
        product(torch.zeros(2, 3, device=device), *half)


@pytest.mark.gpu
def test_the_kernels_refuse_what_they_cannot_write_in_place():
    logits = torch.zeros(4, 6, device="cuda")
    target = torch.zeros(4, dtype=torch.int64, device="cuda")
    losses, statistics = torch.empty(4, device="cuda"), torch.empty(4, 2, device="cuda")
    normalizer = torch.ones(2, device="cuda")
    options = (-100, 0.0, 0.0, 0.0, 1, True)
    rows = torch.ops.fusedcuda.cross_entropy_rows_
    for words, given in (
        ("logits must be rows", (logits.t().contiguous().t(), losses, statistics)),
        ("rows of logits must not share", (logits[:1].expand(4, 6), losses, statistics)),
        ("losses must be contiguous", (logits, losses[:1].expand(4), statistics)),
        ("losses must be a float32", (logits, losses.double(), statistics)),
        ("must lie in memory", (logits, losses, statistics.t().contiguous().t())),
        ("statistics must have shape", (logits, losses, statistics[:3])),
    ):
        with pytest.raises(RuntimeError, match=f"^cross_entropy_rows_: .*{words}"):
            rows(*given, target, normalizer, *options)
    scale = torch.ops.fusedcuda.linear_cross_entropy_scale_
    for words, gradient, factor in (
        ("gradient must be contiguous", logits[:, :3], normalizer[0]),
        ("factor must be a 0-d float32", logits, normalizer[:1]),
        ("factor must be a 0-d float32", logits, normalizer[0].double()),
        ("factor is on another device", logits, torch.ones(())),
    ):
        with pytest.raises(RuntimeError, match=f"^linear_cross_entropy_scale_: {words}"):
            scale(gradient, factor)
