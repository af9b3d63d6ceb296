"""What gated_mlp refuses: the error, and that its message names what was expected and what came."""

from functools import partial

import pytest
import refusals
import torch
from gated_mlps import random_layer
from torch import Tensor

import fusedcuda
from fusedcuda.ops._activations import ACTIVATIONS

BF16 = torch.bfloat16
WITH_AND_WITHOUT_GRADIENT = pytest.mark.parametrize("requires_grad", [False, True])
_ops = torch.ops.fusedcuda
refuses = partial(refusals.refuses, "gated_mlp")


def call(device: str, packed: bool, requires_grad: bool = False, **wrong) -> Tensor:
    layer = random_layer(4, k=6, f=8, n=5, device=device)
    given = layer.operands(packed) | wrong
    w_down = given["w_down"]
    trains = isinstance(w_down, Tensor) and w_down.is_floating_point()
    if requires_grad and trains:
        w_down = w_down.detach().requires_grad_()
    pair = given["w_gate_up"] if packed else (given["w_gate"], given["w_up"])
    return fusedcuda.gated_mlp(given["x"], pair, w_down)


@WITH_AND_WITHOUT_GRADIENT
@pytest.mark.parametrize(
    ("packed", "name"),
    [(True, "x"), (True, "w_gate_up"), (True, "w_down"), (False, "w_gate"), (False, "w_up")],
)
def test_dtypes(packed, name, requires_grad, device):
    good = random_layer(4, k=6, f=8, n=5, device=device).operands(packed)[name]
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8):
        with refuses(TypeError, f"{name} must be", str(dtype)):
            call(device, packed, requires_grad, **{name: good.to(dtype)})
    if name != "x":
        with refuses(TypeError, f"{name} must be", "torch.float32", "torch.bfloat16"):
            call(device, packed, requires_grad, **{name: good.to(BF16)})
    with refuses(TypeError, f"{name} must be a tensor; got str"):
        call(device, packed, requires_grad, **{name: "1"})


@WITH_AND_WITHOUT_GRADIENT
@pytest.mark.parametrize(
    ("packed", "name", "shape", "mentions"),
    [
        (True, "x", (), ("at least one dimension", "0-d")),
        (True, "x", (4, 7), ("w_gate_up must have shape (2 * F, 7)", "(4, 7)", "(16, 6)")),
        (True, "w_gate_up", (15, 6), ("w_gate_up must have shape (2 * F, 6)", "(15, 6)")),
        (True, "w_gate_up", (6, 16), ("w_gate_up must have shape (2 * F, 6)", "(6, 16)")),
        (True, "w_gate_up", (2, 8, 6), ("w_gate_up must have shape (2 * F, 6)", "(2, 8, 6)")),
        (True, "w_gate_up", (12, 6), ("w_down must have shape (N, 6)", "(5, 8)")),
        (True, "w_down", (8, 5), ("w_down must have shape (N, 8)", "(8, 5)")),
        (True, "w_down", (5, 16), ("w_down must have shape (N, 8)", "(5, 16)")),
        (True, "w_down", (8,), ("w_down must have shape (N, 8)", "(8,)")),
        (False, "w_gate", (6, 8), ("w_gate must have shape (F, 6)", "(6, 8)")),
        (False, "w_gate", (7, 6), ("w_up must have shape (7, 6)", "(8, 6)")),
        (False, "w_up", (7, 6), ("w_up must have shape (8, 6)", "(7, 6)")),
        (False, "w_up", (8,), ("w_up must have shape (8, 6)", "(8,)")),
    ],
)
def test_shapes(packed, name, shape, mentions, requires_grad, device):
    with refuses(ValueError, *mentions):
        call(device, packed, requires_grad, **{name: torch.ones(shape, device=device)})


def test_what_is_no_pair(device):
    x, w_gate, w_up, w_down = random_layer(4, k=6, f=8, device=device)
    for wrong, got in (
        ((w_gate, w_up, w_up), "(Tensor, Tensor, Tensor)"),
        ((w_gate,), "(Tensor)"),
        ((w_gate, None), "(Tensor, NoneType)"),
        ([], "()"),
    ):
        with refuses(TypeError, "w_gate_up must be a tensor or a pair of tensors", f"got {got}"):
            fusedcuda.gated_mlp(x, wrong, w_down)
    with refuses(TypeError, "w_gate must be a tensor; got NoneType"):
        fusedcuda.gated_mlp(x, (None, w_up), w_down)


def test_activation(device):
    x, w_gate, w_up, w_down = random_layer(4, k=6, f=8, device=device)
    with refuses(ValueError, "activation must be one of none, relu", "'swish'"):
        fusedcuda.gated_mlp(x, (w_gate, w_up), w_down, "swish")


@pytest.mark.gpu
def test_other_devices():
    for packed in (True, False):
        for name, tensor in random_layer(4, k=6, f=8, n=5).operands(packed).items():
            if name != "x":
                with refuses(ValueError, name, "cuda:0", "cpu"):
                    call("cuda", packed, **{name: tensor})


def test_the_same_while_compiling(device):
    torch._dynamo.reset()
    x, w_gate_up, w_down = random_layer(4, k=6, f=8, n=5, device=device).operands(True).values()
    with pytest.raises(Exception, match=r"w_down must have shape \(N, 8\).*; got \(8, 5\)"):
        torch.compile(fusedcuda.gated_mlp, backend="eager", fullgraph=True)(x, w_gate_up, w_down.T)


@pytest.mark.parametrize("op", ["gated_product", "gated_mlp_decode"])
def test_raw_operators(op):
    """On the CPU: where there is no kernel, CUDA returns nothing."""
    x, w_gate, w_up, w_down = random_layer(4, k=6, f=8, dtype=BF16)
    code = ACTIVATIONS["silu"]

    def run(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> None:
        if op == "gated_product":
            _ops.gated_product(x, w_gate, w_up, code, True)
        else:
            _ops.gated_mlp_decode(x, w_gate, w_up, w_down, code)

    run(x, w_gate, w_up, w_down)
    for wrong, words in (
        ((x, w_gate, w_up[1:], w_down), r"w_up must have shape \(8, 6\); got \(7, 6\)"),
        ((x, w_gate.float(), w_up, w_down), "w_gate must be a torch.bfloat16 tensor"),
        ((x[:, 1:], w_gate, w_up, w_down), r"w_gate must have shape \(F, 5\)"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{op}: {words}"):
            run(*wrong)
