"""What the dlrm family refuses, and that each message says which op, what and why."""

import re

import pytest
import torch
from dlrms import random_head, random_lookup, random_vectors
from refusals import refuses
from torch import Tensor

import fusedcuda
from fusedcuda import _build
from fusedcuda.ops import _dlrm_reference


def interact(device="cpu", **changes) -> Tensor:
    dense, embeddings = random_vectors(4, 3, 8, device=device)
    given = {"dense": dense, "embeddings": embeddings} | changes
    return fusedcuda.dot_interaction(**given)


def look_up(device="cpu", **changes) -> Tensor:
    dense, weight, indices = random_lookup(4, 3, 8, device=device)
    given = {"dense": dense, "weight": weight, "indices": indices} | changes
    return fusedcuda.embedding_interaction(**given)


def head(device="cpu", **changes) -> Tensor:
    x, weight, bias, target = random_head(4, 8, device=device)
    given = {"x": x, "weight": weight, "bias": bias, "target": target} | changes
    return fusedcuda.linear_sigmoid_bce(**given)


CALLS = [
    *(("dot_interaction", interact, name) for name in ("dense", "embeddings")),
    *(("embedding_interaction", look_up, name) for name in ("dense", "weight", "indices")),
    *(("linear_sigmoid_bce", head, name) for name in ("x", "weight", "bias", "target")),
]


def of_calls(calls):
    ids = [f"{op}-{name}" for op, _, name in calls]
    return pytest.mark.parametrize(("op", "call", "name"), calls, ids=ids)


every_operand = of_calls(CALLS)
every_operand_but_the_first = of_calls([c for c in CALLS if c[2] not in ("dense", "x")])


@every_operand
@pytest.mark.parametrize("wrong", [None, 1.0, "x"], ids=repr)
def test_no_tensor(op, call, name, wrong):
    if name == "bias" and wrong is None:
        call(bias=None)
        return
    with refuses(op, TypeError, f"{name} must be a tensor", type(wrong).__name__):
        call(**{name: wrong})


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_unsupported_dtype(dtype, device):
    for name in ("dense", "embeddings"):
        x = torch.ones((4, 8) if name == "dense" else (4, 2, 8), device=device).to(dtype)
        with refuses("dot_interaction", TypeError, f"{name} must be", str(dtype)):
            interact(device, **{name: x})
    for name in ("dense", "weight"):
        with refuses("embedding_interaction", TypeError, f"{name} must be", str(dtype)):
            look_up(device, **{name: torch.ones(4, 8, device=device).to(dtype)})
    for name in ("x", "weight"):
        x = torch.ones((4, 8) if name == "x" else (1, 8), device=device).to(dtype)
        with refuses("linear_sigmoid_bce", TypeError, f"{name} must be", str(dtype)):
            head(device, **{name: x})


def test_dtypes_that_differ(device):
    with refuses("dot_interaction", TypeError, "embeddings", "float32", "float16"):
        interact(device, embeddings=torch.ones(4, 2, 8, device=device).half())
    with refuses("embedding_interaction", TypeError, "weight", "float32", "float16"):
        look_up(device, weight=torch.ones(50, 8, device=device).half())
    for name, shape in (("weight", (1, 8)), ("bias", (1,))):
        with refuses("linear_sigmoid_bce", TypeError, name, "float32", "float16"):
            head(device, **{name: torch.ones(shape, device=device).half()})
    with refuses("linear_sigmoid_bce", TypeError, "target", "complex"):
        head(device, target=torch.ones(4, device=device, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dense", (8,)),
        ("dense", (4, 1, 8)),
        ("dense", (4, 9)),
        ("dense", (3, 8)),
        ("embeddings", (4, 8)),
        ("embeddings", (3, 2, 8)),
        ("embeddings", (4, 2, 7)),
    ],
    ids=str,
)
def test_shapes_of_vectors(name, shape, device):
    with refuses("dot_interaction", ValueError, "shape", str(shape)):
        interact(device, **{name: torch.ones(shape, device=device)})


@pytest.mark.parametrize(
    ("name", "shape", "mentions"),
    [
        ("x", (), ("x must have at least one dimension", "0-d")),
        ("x", (4, 7), ("weight must have shape (7,) or (1, 7)", "(1, 8)")),
        ("x", (4, 0), ("x must have at least one element", "(4, 0)")),
        ("x", (5, 8), ("target must have shape (5,) or (5, 1)", "(4,)")),
        ("weight", (8, 1), ("weight must have shape (8,) or (1, 8)", "got (8, 1)")),
        ("weight", (2, 8), ("weight must have shape (8,) or (1, 8)", "got (2, 8)")),
        ("weight", (7,), ("weight must have shape (8,) or (1, 8)", "got (7,)")),
        ("weight", (1, 1, 8), ("weight must have shape (8,) or (1, 8)", "got (1, 1, 8)")),
        ("bias", (), ("bias must have shape (1,)", "got ()")),
        ("bias", (8,), ("bias must have shape (1,)", "got (8,)")),
        ("bias", (1, 1), ("bias must have shape (1,)", "got (1, 1)")),
        ("target", (3,), ("target must have shape (4,) or (4, 1)", "got (3,)")),
        ("target", (4, 8), ("target must have shape (4,) or (4, 1)", "got (4, 8)")),
        ("target", (1, 4), ("target must have shape (4,) or (4, 1)", "got (1, 4)")),
        ("target", (), ("target must have shape (4,) or (4, 1)", "got ()")),
    ],
    ids=str,
)
def test_shapes_of_the_head(name, shape, mentions, device):
    with refuses("linear_sigmoid_bce", ValueError, *mentions):
        head(device, **{name: torch.ones(shape, device=device)})


def test_limits_are_those_of_the_kernels():
    header = (_build.csrc_dir() / "kernels" / "dlrm.h").read_text()
    for name, value in (
        ("kMaxDotVectors", _dlrm_reference.MAX_VECTORS),
        ("kMaxDotColumns", _dlrm_reference.MAX_COLUMNS),
        ("kMaxDotPadding", _dlrm_reference.MAX_PADDING),
    ):
        assert re.search(rf"constexpr int {name} = (\d+);", header).group(1) == str(value)


def test_too_many_or_too_large_vectors(device):
    dense = torch.ones(2, 8, device=device)
    with refuses("dot_interaction", ValueError, "64 vectors", "65"):
        fusedcuda.dot_interaction(dense, torch.ones(2, 64, 8, device=device))
    fusedcuda.dot_interaction(dense, torch.ones(2, 63, 8, device=device))
    for columns in (0, 257):
        with refuses("dot_interaction", ValueError, "1 to 256 elements", str(columns)):
            fusedcuda.dot_interaction(*random_vectors(2, 3, columns, device=device))


def test_elements_of_a_list():
    dense = torch.ones(4, 8)
    with refuses("dot_interaction", TypeError, "embeddings[1]", "tensor", "float"):
        interact(embeddings=[dense, 1.0])
    with refuses("dot_interaction", ValueError, "embeddings[1]", "(4, 8)", "(4, 7)"):
        interact(embeddings=[dense, dense[:, :7]])


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float32], ids=str)
def test_dtypes_of_indices(dtype, device):
    indices = torch.ones(4, 2, dtype=dtype, device=device)
    with refuses("embedding_interaction", TypeError, "indices must be an int64", str(dtype)):
        look_up(device, indices=indices)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dense", (8,)),
        ("dense", (4, 9)),
        ("dense", (3, 8)),
        ("weight", (8,)),
        ("weight", (50, 7)),
        ("weight", (2, 50, 8)),
        ("weight", (0, 8)),
        ("indices", (4,)),
        ("indices", (3, 2)),
        ("indices", (4, 2, 1)),
    ],
    ids=str,
)
def test_shapes_of_lookups(name, shape, device):
    dtype = torch.int64 if name == "indices" else torch.float32
    with refuses("embedding_interaction", ValueError, name, str(shape)):
        look_up(device, **{name: torch.ones(shape, dtype=dtype, device=device)})


@pytest.mark.parametrize("wrong", [50, -1, 2**31, -(2**63)])
def test_indices_that_are_no_rows_raise_on_the_cpu(wrong):
    indices = torch.tensor([[0, 1], [2, 49], [3, wrong], [4, 5]])
    message = ("indices must be in [0, 50)", f"got {wrong} at (2, 1)")
    with refuses("embedding_interaction", IndexError, *message):
        look_up(indices=indices)
    with (
        refuses("embedding_interaction", IndexError, *message),
        torch.autocast("cpu", torch.bfloat16),
    ):
        look_up(indices=indices)
    dense, weight, _ = random_lookup(4, 3, 8)
    grad, rows = torch.ones(4, 16), torch.ones(4, 2, 8)
    with refuses("embedding_interaction_backward", IndexError, *message):
        torch.ops.fusedcuda.embedding_interaction_backward(grad, dense, weight, indices, False, 3)
    with refuses("embedding_dense_backward", IndexError, *message):
        torch.ops.fusedcuda.embedding_dense_backward(rows, indices, 50)


def test_too_many_indices_or_too_large_rows(device):
    indices = torch.zeros(4, 64, dtype=torch.int64, device=device)
    with refuses("embedding_interaction", ValueError, "64 vectors", "65"):
        look_up(device, indices=indices)
    look_up(device, indices=indices[:, :63])
    for columns in (0, 257):
        with refuses("embedding_interaction", ValueError, "1 to 256 elements", str(columns)):
            fusedcuda.embedding_interaction(*random_lookup(2, 3, columns, device=device))


@pytest.mark.parametrize("order", ["lower", None, 1])
def test_order(order):
    for op, call in (("dot_interaction", interact), ("embedding_interaction", look_up)):
        with refuses(op, ValueError, "order", "tril, triu", repr(order)):
            call(order=order)


@pytest.mark.parametrize("pad", [0, -8, 129, 8.0, None])
def test_pad(pad):
    for op, call in (("dot_interaction", interact), ("embedding_interaction", look_up)):
        with refuses(op, ValueError, "pad", "1 to 128", repr(pad)):
            call(pad=pad)


@pytest.mark.parametrize("reduction", ["average", None, 1])
def test_reduction(reduction):
    with refuses("linear_sigmoid_bce", ValueError, "none, mean, sum", repr(reduction)):
        head(reduction=reduction)


def test_pos_weight(device):
    for wrong in (-1.0, float("inf"), float("nan")):
        with refuses("linear_sigmoid_bce", ValueError, "pos_weight", str(wrong)):
            head(device, pos_weight=wrong)
    with refuses("linear_sigmoid_bce", TypeError, "pos_weight", "number", "Tensor"):
        head(device, pos_weight=torch.ones(1, device=device))


def test_a_target_that_requires_a_gradient(device):
    with refuses("linear_sigmoid_bce", RuntimeError, "target", "gradient", "detach"):
        head(device, target=torch.rand(4, device=device).requires_grad_())


@every_operand_but_the_first
def test_devices(op, call, name):
    """The meta device stands in for a second one. That of the first operand is the call's."""
    shapes = {"embeddings": (4, 2, 8), "weight": (1, 8), "bias": (1,), "target": (4,)}
    shapes["indices"] = (4, 2)
    dtype = torch.int64 if name == "indices" else torch.float32
    with refuses(op, ValueError, f"{name} must be on cpu", "meta"):
        call(**{name: torch.ones(shapes[name], dtype=dtype, device="meta")})


@pytest.mark.gpu
@every_operand
def test_devices_with_a_gpu(op, call, name):
    shapes = {
        "dense": (4, 8), "embeddings": (4, 2, 8),
        "x": (4, 8), "weight": (1, 8), "bias": (1,), "target": (4,), "indices": (4, 2),
    }  # fmt: skip
    dtype = torch.int64 if name == "indices" else torch.float32
    with refuses(op, ValueError, "cpu", "cuda:0"):
        call("cuda", **{name: torch.ones(shapes[name], dtype=dtype)})


def test_raw_operators_check_as_well(device):
    dense, embeddings = random_vectors(4, 3, 8, device=device)
    for width in (10, 11 + 128):
        with pytest.raises((ValueError, RuntimeError), match=r"^dot_interaction: width must be 11"):
            torch.ops.fusedcuda.dot_interaction(dense, embeddings, False, width)
    with pytest.raises((ValueError, RuntimeError), match=r"^dot_interaction_backward: .*grad"):
        torch.ops.fusedcuda.dot_interaction_backward(dense, dense, embeddings, False)
    x, weight, _, target = random_head(4, 8, device=device)
    raw = torch.ops.fusedcuda.linear_sigmoid_bce_backward
    for grad_loss, reduction in ((target, 1), (target.sum(), 0), (target, 3)):
        with pytest.raises((ValueError, RuntimeError), match=r"^linear_sigmoid_bce_backward: "):
            raw(grad_loss, x, weight, target, 7, reduction)
