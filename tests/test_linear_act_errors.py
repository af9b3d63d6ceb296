"""What linear_act, linear_residual and mlp refuse, with a message that says which op and what."""

import pytest
import torch
from linears import operands
from refusals import refuses
from torch import Tensor

import fusedcuda

NAMES = {
    "linear_act": ("x", "weight", "bias"),
    "linear_residual": ("x", "weight", "bias", "residual"),
    "mlp": ("x", "w1", "b1", "w2", "b2"),
}
EVERY_OP = pytest.mark.parametrize("op", NAMES)
WITH_AND_WITHOUT_GRADIENT = pytest.mark.parametrize("requires_grad", [False, True])


def given(op: str, device: str, **wrong) -> list:
    x, weight, bias = operands(4, n=6, k=5, device=device)
    residual = torch.ones(4, 6, device=device)
    w2, b2 = operands(1, n=3, k=6, device=device)[1:]
    tensors = {
        "linear_act": (x, weight, bias),
        "linear_residual": (x, weight, bias, residual),
        "mlp": (x, weight, bias, w2, b2),
    }
    named = dict(zip(NAMES[op], tensors[op], strict=True))
    assert not wrong.keys() - named.keys()
    return list((named | wrong).values())


def call(op: str, device: str, **wrong) -> Tensor:
    return getattr(fusedcuda, op)(*given(op, device, **wrong))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
@EVERY_OP
def test_unsupported_dtype(op, dtype, device):
    for name, tensor in zip(NAMES[op], given(op, device), strict=True):
        with refuses(op, TypeError, name, str(dtype)):
            call(op, device, **{name: tensor.to(dtype)})


@WITH_AND_WITHOUT_GRADIENT
@EVERY_OP
def test_operands_of_another_dtype_are_not_converted(op, requires_grad, device):
    for name, tensor in list(zip(NAMES[op], given(op, device), strict=True))[1:]:
        wrong = tensor.to(torch.bfloat16).requires_grad_(requires_grad)
        with refuses(op, TypeError, name, "torch.float32", "torch.bfloat16"):
            call(op, device, **{name: wrong})


@pytest.mark.parametrize("wrong", [1.0, "1", [1.0]], ids=repr)
@EVERY_OP
def test_operands_that_are_no_tensor(op, wrong, device):
    for name in NAMES[op]:
        with refuses(op, TypeError, name, type(wrong).__name__):
            call(op, device, **{name: wrong})
    with refuses("linear_residual", TypeError, "residual", "NoneType"):
        call("linear_residual", device, residual=None)


@WITH_AND_WITHOUT_GRADIENT
@EVERY_OP
def test_shapes(op, requires_grad, device):
    wrong = {
        "x": [(), (4,), (4, 6), (5, 4)],
        "weight": [(), (5,), (6, 4), (5, 6), (2, 2, 6, 5), (4, 6)],
        "bias": [(), (1,), (5,), (1, 6), (4, 6), (6, 1)],
        "residual": [(), (6,), (1, 6), (6, 4), (4, 5), (1, 4, 6)],
        "w2": [(), (6,), (3, 5), (6, 3), (2, 3, 6)],
        "b2": [(), (1,), (6,), (1, 3), (4, 3)],
    }
    wrong |= {"w1": [*wrong["weight"], (2, 6, 5)], "b1": wrong["bias"]}
    for name in NAMES[op]:
        for shape in wrong[name]:
            tensor = torch.ones(shape, device=device, requires_grad=requires_grad)
            # Whether x or the weight is wrong is not known.
            named = "x" if name == "x" and shape == () else ("w" if name == "x" else name)
            with refuses(op, ValueError, named, str(shape) if name != "x" or shape else "0-d"):
                call(op, device, **{name: tensor})


def test_shapes_of_batches(device):
    x, weight, bias = operands(4, n=6, k=5, device=device, batch=(3,))
    for wrong in (x[:2], x[0, 0], x[:1], x[..., :4]):
        with refuses("linear_act", ValueError, "x", str(tuple(wrong.shape)), "(3, 6, 5)"):
            fusedcuda.linear_act(wrong, weight, bias)
    for wrong in (bias[:2], bias[:1], bias.t(), bias[0, :1], bias.unsqueeze(1)):
        with refuses("linear_act", ValueError, "bias", str(tuple(wrong.shape)), "(3, 6)", "(6,)"):
            fusedcuda.linear_act(x, weight, wrong)
    with refuses("linear_residual", ValueError, "residual", "(3, 4, 6)"):
        fusedcuda.linear_residual(x, weight, bias, torch.ones(4, 6, device=device))


def test_unknown_activation(device):
    for op in ("linear_act", "mlp"):
        for wrong in ("swish", "GELU", None, 1, torch.relu):
            with refuses(op, ValueError, "activation", "relu_squared", "gelu_tanh", repr(wrong)):
                getattr(fusedcuda, op)(*given(op, device), activation=wrong)


@WITH_AND_WITHOUT_GRADIENT
@EVERY_OP
def test_the_permission_is_a_bool(op, requires_grad, device):
    tensors = [t.requires_grad_(requires_grad) for t in given(op, device)]
    for wrong in ("yes", [True], {}):
        with refuses(op, TypeError, "allow_low_precision_reduction", type(wrong).__name__):
            getattr(fusedcuda, op)(*tensors, allow_low_precision_reduction=wrong)


@EVERY_OP
def test_different_devices_without_a_gpu(op):
    """The meta device stands in for a second one."""
    for name, tensor in zip(NAMES[op], given(op, "cpu"), strict=True):
        with refuses(op, ValueError, "cpu", "meta"):
            call(op, "cpu", **{name: tensor.to("meta")})


@pytest.mark.gpu
@EVERY_OP
def test_different_devices(op):
    for name, tensor in zip(NAMES[op], given(op, "cuda"), strict=True):
        with refuses(op, ValueError, "cpu", "cuda:0"):
            call(op, "cuda", **{name: tensor.cpu()})


@EVERY_OP
def test_sparse_tensors_are_refused(op):
    x, *_ = given(op, "cpu")
    with pytest.raises((TypeError, NotImplementedError, RuntimeError, ValueError)):
        call(op, "cpu", x=x.to_sparse())


@EVERY_OP
def test_a_call_goes_on_working_after_an_error(op, device):
    expected = call(op, device)
    x, *_ = given(op, device)
    with pytest.raises(TypeError):
        call(op, device, x=x.long())
    assert call(op, device).shape == expected.shape
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------- raw gradients

NONE, RELU, SILU = (
    fusedcuda.ops._activations.ACTIVATIONS[name] for name in ("none", "relu", "silu")
)


def raw_backward(device: str, activation: int = SILU, **wrong) -> list[Tensor]:
    x, weight, _ = operands(4, n=6, k=5, device=device)
    saved = {
        NONE: None,
        RELU: torch.zeros(4, 16, dtype=torch.uint8, device=device),
        SILU: torch.zeros(4, 6, device=device),
    }
    named = {"dy": torch.ones(4, 6, device=device), "x": x, "weight": weight}
    named["saved"] = saved[activation]
    assert not wrong.keys() - named.keys()
    values = (named | wrong).values()
    return torch.ops.fusedcuda.linear_act_backward(*values, activation, 0b111, False)


ANY_ERROR = (TypeError, ValueError, RuntimeError)


def test_raw_gradients_refuse_what_does_not_fit(device):
    op = "linear_act_backward"
    for activation in (NONE, RELU, SILU):
        assert len(raw_backward(device, activation)) == 3
    for wrong in (torch.ones(4, 5), torch.ones(6), torch.ones(4, 6).double()):
        with refuses(op, ANY_ERROR, "dy"):
            raw_backward(device, dy=wrong.to(device))
    for activation, wrong in (
        (NONE, torch.ones(4, 6)),
        (RELU, None),
        (RELU, torch.ones(4, 6)),
        (RELU, torch.zeros(4, 1, dtype=torch.uint8)),
        (RELU, torch.zeros(2, 32, dtype=torch.uint8)),
        (SILU, None),
        (SILU, torch.ones(6, 4)),
        (SILU, torch.ones(4, 6).bfloat16()),
        (SILU, torch.zeros(4, 16, dtype=torch.uint8)),
    ):
        with refuses(op, ANY_ERROR, "saved"):
            raw_backward(device, activation, saved=None if wrong is None else wrong.to(device))


def test_raw_gradients_of_mlp_refuse_what_does_not_fit(device):
    x, w1, _ = operands(4, n=6, k=5, device=device)
    named = {"dy": torch.ones(4, 3), "x": x, "w1": w1, "saved": torch.zeros(4, 6)}
    named |= {"h": torch.zeros(4, 6), "w2": torch.zeros(3, 6)}
    named = {name: tensor.to(device) for name, tensor in named.items()}
    backward = torch.ops.fusedcuda.mlp_backward
    assert len(backward(*named.values(), SILU, 0b11111, False)) == 5
    for name, shape in (("dy", (4, 6)), ("h", (4, 5)), ("w2", (6, 3)), ("saved", (6, 4))):
        wrong = named | {name: torch.ones(shape, device=device)}
        with refuses("mlp_backward", ANY_ERROR, name):
            backward(*wrong.values(), SILU, 0b11111, False)
    with refuses("mlp_backward", ANY_ERROR, "saved"):
        backward(*named.values(), NONE, 0b11111, False)
