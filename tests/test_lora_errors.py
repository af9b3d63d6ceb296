"""What the lora family refuses, with a message that names op, argument, what came, what should."""

import pytest
import refusals
import torch
from loras import random_layer
from torch import Tensor

import fusedcuda
from fusedcuda.nn import LoRALinear, LoRAMLP

BF16 = torch.bfloat16
_ops = torch.ops.fusedcuda
WITH_AND_WITHOUT_GRADIENT = pytest.mark.parametrize("requires_grad", [False, True])


def refuses(error: type[Exception], *mentions: str, op: str = "lora_linear"):
    return refusals.refuses(op, error, *mentions)


def call(device: str, requires_grad: bool = False, **wrong) -> Tensor:
    given = random_layer(4, n=6, k=5, rank=3, device=device)._asdict()
    given |= {"scale": 0.5, "activation": "none", "dropout_p": 0.0, "training": True} | wrong
    lora_a = given["lora_a"]
    if requires_grad and isinstance(lora_a, Tensor) and lora_a.is_floating_point():
        given["lora_a"] = lora_a.detach().requires_grad_()
    return fusedcuda.lora_linear(**given)


@WITH_AND_WITHOUT_GRADIENT
@pytest.mark.parametrize("name", ["x", "weight", "bias", "lora_a", "lora_b"])
def test_dtypes(name, requires_grad, device):
    good = random_layer(4, n=6, k=5, rank=3, device=device)._asdict()[name]
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8):
        with refuses(TypeError, name, str(dtype)):
            call(device, requires_grad, **{name: good.to(dtype)})
    if name != "x":
        with refuses(TypeError, name, "torch.float32", "torch.bfloat16"):
            call(device, requires_grad, **{name: good.to(BF16)})


def test_factors_in_float32_only_go_with_16_bits(device):
    layer = random_layer(4, n=6, k=5, rank=3, dtype=torch.float64, device=device)._asdict()
    with refuses(TypeError, "lora_a must be a torch.float64 tensor; got torch.float32"):
        call(device, **(layer | {"lora_a": layer["lora_a"].float()}))
    layer = random_layer(4, n=6, k=5, rank=3, dtype=BF16, device=device)._asdict()
    with refuses(TypeError, "lora_b must be a torch.bfloat16 or float32 tensor; got torch.float16"):
        call(device, **(layer | {"lora_b": layer["lora_b"].half()}))


@WITH_AND_WITHOUT_GRADIENT
@pytest.mark.parametrize(
    ("name", "shape", "mentions"),
    [
        ("x", (), ("at least one dimension", "0-d")),
        ("x", (4, 6), ("weight must have shape (N, 6)", "(6, 5)")),
        ("weight", (5, 6), ("weight must have shape (N, 5)", "(5, 6)", "weight.T")),
        ("weight", (2, 6, 5), ("weight must have shape (N, 5)", "(2, 6, 5)")),
        ("bias", (5,), ("bias must have shape (6,)", "(5,)")),
        ("bias", (1, 6), ("bias must have shape (6,)", "(1, 6)")),
        ("lora_a", (3, 6), ("lora_a must have shape (r, 5)", "(3, 6)")),
        ("lora_a", (5,), ("lora_a must have shape (r, 5)", "(5,)")),
        ("lora_a", (0, 5), ("lora_a", "rank from 1 to 512", "0")),
        ("lora_a", (513, 5), ("lora_a", "rank from 1 to 512", "513")),
        ("lora_b", (3, 6), ("lora_b must have shape (6, 3)", "(3, 6)")),
        ("lora_b", (6, 4), ("lora_b must have shape (6, 3)", "(6, 4)")),
    ],
)
def test_shapes(name, shape, mentions, requires_grad, device):
    with refuses(ValueError, *mentions):
        call(device, requires_grad, **{name: torch.ones(shape, device=device)})


def test_what_is_no_tensor(device):
    for name in ("x", "weight", "bias", "lora_a", "lora_b"):
        with refuses(TypeError, f"{name} must be a tensor; got list"):
            call(device, **{name: [1.0]})
    with refuses(TypeError, "lora_a must be a tensor; got NoneType"):
        call(device, lora_a=None)


def test_numbers(device):
    with refuses(TypeError, "scale must be a number; got str"):
        call(device, scale="0.5")
    with refuses(TypeError, "dropout_p must be a number; got NoneType"):
        call(device, dropout_p=None)
    for p in (-0.1, 1.5, float("nan")):
        with refuses(ValueError, "dropout_p must be a probability", str(p)):
            call(device, dropout_p=p)
    with refuses(ValueError, "activation must be one of none, relu", "'swish'"):
        call(device, activation="swish")


@pytest.mark.gpu
def test_other_devices():
    for name in ("weight", "bias", "lora_a", "lora_b"):
        other = random_layer(4, n=6, k=5, rank=3)._asdict()[name]
        with refuses(ValueError, name, "cuda:0", "cpu"):
            call("cuda", **{name: other})


def test_the_same_while_compiling(device):
    torch._dynamo.reset()

    def function(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        return fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5)

    x, weight, _, lora_a, lora_b = random_layer(4, n=6, k=5, rank=3, device=device)
    with pytest.raises(Exception, match=r"lora_b must have shape \(6, 3\); got \(3, 6\)"):
        torch.compile(function, backend="eager", fullgraph=True)(x, weight, lora_a, lora_b.T)


def test_mlp_names_the_layer(device):
    x, weight, bias, lora_a, lora_b = random_layer(4, n=6, k=5, rank=3, device=device)
    good = (weight, lora_a, lora_b, 0.5, bias)
    down = tuple(random_layer(1, n=5, k=6, rank=2, device=device)[i] for i in (1, 3, 4))
    fusedcuda.lora_mlp(x, good, down)
    for arguments, error, words in (
        ((good, good), ValueError, r"down: lora_linear: weight must have shape \(N, 6\)"),
        (((weight, lora_b, lora_b), down), ValueError, "up: lora_linear: lora_a must have shape"),
        (((weight.half(),), down), TypeError, "up: linear_act: weight must be"),
        (((weight, lora_a), down), ValueError, "up has one factor of an adapter; lora_b is None"),
        ((weight, down), TypeError, r"up must be a tuple \(weight, lora_a, .*\); got Tensor"),
        (((), down), TypeError, "up must be a tuple"),
    ):
        with pytest.raises(error, match=f"^lora_mlp: {words}"):
            fusedcuda.lora_mlp(x, *arguments)
    with pytest.raises(ValueError, match=r"^lora_mlp: activation must be one of"):
        fusedcuda.lora_mlp(x, good, down, "swish")


_PASS = (1.0, 0.5, False, False)  # scale, dropout_p, transposed, in_float32


@pytest.mark.parametrize(
    ("op", "arguments", "words"),
    [
        ("lora_down", lambda x, a, t: (x[0], a, None, 1.0, 0.0), "x must be a matrix"),
        ("lora_down", lambda x, a, t: (x, a[:, 1:], None, 1.0, 0.0), "factor must have shape"),
        ("lora_down", lambda x, a, t: (x, a.double(), None, 1.0, 0.0), "factor must"),
        ("lora_down", lambda x, a, t: (x, a[:0], None, 1.0, 0.0), "1 to 512; got 0"),
        ("lora_down", lambda x, a, t: (x, a, t[0, :1], 1.0, 0.5), "seed must be an int64"),
        ("lora_up", lambda x, a, t: (t[:, :3], x, None, 3, 0.0, False, True), "t must have shape"),
        ("lora_up", lambda x, a, t: (t[1:], x, None, 3, 0.0, False, True), "t must have shape"),
        ("lora_up", lambda x, a, t: (t.float(), x, None, 3, 0.0, False, True), "t must"),
        ("lora_up", lambda x, a, t: (t, x, None, 513, 0.0, False, True), "1 to 512; got 513"),
        ("lora_dropout", lambda x, a, t: (x, t[0, :1], 0.5), "seed must be an int64"),
        ("lora_branch", lambda x, a, t: (t, x, t[0, :1].long(), 0.5), "factor must have shape"),
        ("lora_pass", lambda x, a, t: (x, None, None, None, 3, *_PASS), "factor or t must be"),
        ("lora_pass", lambda x, a, t: (x, a, None, None, 513, *_PASS), "1 to 512; got 513"),
        ("lora_pass", lambda x, a, t: (x, a, t, None, 3, *_PASS), "factor must have shape"),
        ("lora_pass", lambda x, a, t: (x, a[1:], None, None, 3, *_PASS), "factor must have shape"),
        ("lora_pass", lambda x, a, t: (x, a.float(), None, None, 3, *_PASS), "factor must"),
        ("lora_pass", lambda x, a, t: (x, None, t[1:], None, 3, *_PASS), "t must have shape"),
        ("lora_pass", lambda x, a, t: (x, a, None, t[0, :1], 3, *_PASS), "seed must be an int64"),
    ],
)
def test_raw_operators(op, arguments, words, device):
    x, _, _, lora_a, _ = random_layer(4, n=6, k=8, rank=3, dtype=BF16, device=device)
    t = torch.zeros(4, 8, dtype=BF16, device=device)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{op}: .*{words}"):
        getattr(_ops, op)(*arguments(x, lora_a, t))


def test_modules():
    with pytest.raises(ValueError, match=r"^LoRALinear: rank must be 1 to 512; got 0"):
        LoRALinear(4, 4, 0)
    with pytest.raises(ValueError, match=r"^LoRALinear: dropout must be a probability"):
        LoRALinear(4, 4, 2, dropout=2.0)
    with pytest.raises(ValueError, match=r"^LoRALinear: activation must be one of"):
        LoRALinear(4, 4, 2, activation="swish")
    with pytest.raises(
        TypeError, match=r"^LoRALinear: linear must be a torch\.nn\.Linear; got Conv1d"
    ):
        LoRALinear.from_linear(torch.nn.Conv1d(1, 1, 1), 2)
    with pytest.raises(ValueError, match=r"^LoRAMLP: up must have no activation of its own"):
        LoRAMLP.from_layers(LoRALinear(4, 4, 2, activation="relu"), torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"^LoRAMLP: down must be a LoRALinear or .*; got Identity"):
        LoRAMLP.from_layers(LoRALinear(4, 4, 2), torch.nn.Identity())
