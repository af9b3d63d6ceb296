"""What rope and rope_ refuse, and that each message says which op, what and why."""

import pytest
import refusals
import torch
from ropes import random_tables
from torch import Tensor

import fusedcuda

OPS = pytest.mark.parametrize("op", [fusedcuda.rope, fusedcuda.rope_])
NAMES = ("q", "k", "cos", "sin")


def operands(device="cpu", dtype=torch.float32) -> dict[str, Tensor]:
    q, k = (torch.randn(2, h, 5, 8, dtype=dtype, device=device) for h in (4, 2))
    cos, sin = random_tables(5, 8, device=device)
    return {"q": q, "k": k, "cos": cos, "sin": sin}


def refuses(op, error: type[Exception], *mentions: str):
    return refusals.refuses(op.__name__, error, *mentions)


@OPS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [None, 1.0, [1.0]], ids=repr)
def test_no_tensor(op, name, wrong):
    with refuses(op, TypeError, name, "tensor", type(wrong).__name__):
        op(**{**operands(), name: wrong})


@OPS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_unsupported_dtype(op, name, dtype, device):
    given = operands(device)
    with refuses(op, TypeError, name, str(dtype)):
        op(**{**given, name: given[name].to(dtype)})


@OPS
@pytest.mark.parametrize(("name", "model"), [("k", "q"), ("sin", "cos")])
def test_dtypes_that_differ(op, name, model, device):
    given = operands(device)
    with refuses(op, TypeError, name, model, "torch.float32", "torch.float16"):
        op(**{**given, name: given[name].half()})


@OPS
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (4, 5, 8)),
        ("k", (5, 8)),
        ("q", (2, 4, 5, 7)),
        ("k", (2, 2, 5, 6)),
        ("k", (1, 2, 5, 8)),
        ("k", (2, 2, 4, 8)),
        ("k", (2, 5, 2, 8)),
        ("cos", (8,)),
        ("cos", (4, 8)),
        ("cos", (6, 8)),
        ("cos", (5, 6)),
        ("cos", (5, 16)),
        ("cos", (3, 5, 8)),
        ("cos", (2, 1, 5, 8)),
        ("sin", (5, 4)),
        ("sin", (1, 5, 8)),
    ],
    ids=str,
)
def test_shapes(op, name, shape, device):
    with refuses(op, ValueError, name, str(shape)):
        op(**{**operands(device), name: torch.randn(shape, device=device)})
    if op is fusedcuda.rope:
        given = {**operands(device), name: torch.randn(shape, device=device)}
        given["k"].requires_grad_()
        with refuses(op, ValueError, name, str(shape)):
            op(**given)


@OPS
@pytest.mark.parametrize("name", NAMES[1:])
def test_devices(op, name):
    """The meta device stands in for a second one."""
    given = operands()
    with refuses(op, ValueError, name, "meta", "cpu"):
        op(**{**given, name: given[name].to("meta")})


@pytest.mark.gpu
@OPS
@pytest.mark.parametrize("name", NAMES[1:])
def test_devices_with_a_gpu(op, name):
    given = operands("cuda")
    with refuses(op, ValueError, name, "cpu", "cuda:0"):
        op(**{**given, name: given[name].cpu()})


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_that_require_a_gradient(name, device):
    given = operands(device)
    given[name].requires_grad_()
    with refuses(fusedcuda.rope, RuntimeError, name, "gradient", "detach"):
        fusedcuda.rope(**given)
    compiled = torch.compile(fusedcuda.rope, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"rope: {name} requires a gradient"):
        compiled(**given)
    with torch.no_grad():
        fusedcuda.rope(**given)


@pytest.mark.parametrize("name", NAMES)
def test_in_place_records_no_gradient(name, device):
    given = operands(device)
    given[name].requires_grad_()
    before = given["q"].clone()
    with refuses(fusedcuda.rope_, RuntimeError, name, "gradient", "rope", "no_grad"):
        fusedcuda.rope_(**given)
    assert torch.equal(given["q"], before)
    with torch.no_grad():
        fusedcuda.rope_(**given)
    assert not torch.equal(given["q"], before)


def test_in_place_needs_memory_for_every_element(device):
    given = operands(device)
    for name in ("q", "k"):
        expanded = given[name][:, :1].expand(-1, 2, -1, -1)
        with refuses(fusedcuda.rope_, ValueError, name, "expanded", "clone"):
            fusedcuda.rope_(**{**given, name: expanded})
    with refuses(fusedcuda.rope_, ValueError, "q and k", "clone"):
        fusedcuda.rope_(**{**given, "k": given["q"]})


@OPS
def test_a_call_goes_on_working_after_an_error(op, device):
    given = operands(device)
    with pytest.raises(TypeError):
        op(**{**given, "q": given["q"].long()})
    expected = fusedcuda.rope(**operands() | {n: t.cpu() for n, t in given.items()})
    for actual, y in zip(op(**given), expected, strict=True):
        torch.testing.assert_close(actual.cpu(), y)
