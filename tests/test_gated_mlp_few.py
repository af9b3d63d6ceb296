"""A gated MLP of few rows in two launches: its plans, and on CUDA the operator alone."""

import json
from typing import Any

import layouts
import pytest
import torch
from gated_mlps import check_inference, inference, inference_operands
from launches import captured
from reference import ACTIVATIONS
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS as CODES

ops = torch.ops.fusedcuda
BF16 = torch.bfloat16
HALVES = (torch.float16, BF16)
H200_SMS = 132
SILU = CODES["silu"]
OP = "gated_mlp_few"
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True, scope="module")
def compiled(load_family) -> None:
    load_family("gated_mlp")


# ---- Plans ---------------------------------------------------------------------------------------


def shapes(m: int, k: int, f: int, dtype: torch.dtype = BF16) -> Operands:
    w = torch.empty(2 * f, k, dtype=dtype)
    return torch.empty(m, k, dtype=dtype), w[:f], w[f:], torch.empty(k, f, dtype=dtype)


def plan_text(*given: Tensor) -> str:
    return ops.gated_mlp_few_plan(*given, SILU, H200_SMS)


def plan(m: int, k: int, f: int) -> dict[str, Any]:
    return json.loads(plan_text(*shapes(m, k, f)))


@pytest.mark.parametrize("m", [1, 16, 32])
def test_both_launches_fill_the_card(m):
    found = plan(m, 4096, 14336)
    output = found["output"]
    assert (found["m"], found["k"], found["f"], found["n"]) == (m, 4096, 14336, 4096)
    # 1792 tiles of eight rows each of gate and up, in 32 clusters of eight blocks.
    assert (found["cluster"], found["blocks"], found["tiles"]) == (8, 256, 56)
    assert (output["cluster"], output["blocks"], output["tiles"]) == (
        (8, 256, 8) if m <= 16 else (8, 120, 18)  # one block on an SM, for so much of h
    )
    for launch in (found, output):
        two_fit = launch["shared_bytes"] <= 113 << 10
        assert two_fit == (launch["blocks"] == 256)


def test_what_there_is_a_plan_for():
    assert plan_text(*shapes(64, 4096, 14336)) == ""  # h does not fit into a cluster
    assert plan_text(*shapes(64, 2048, 4096))
    for m in (1, 64):
        assert plan_text(*shapes(m, 136, 72))
    x, w_gate, w_up, w_down = shapes(3, 136, 136)
    for refused in (
        (layouts.shifted(x, 1), w_gate, w_up, w_down),
        (x, w_gate, w_up, layouts.transposed(w_down)),
        shapes(65, 136, 136),
        shapes(3, 132, 136),
        shapes(3, 136, 132),
        tuple(t.float() for t in (x, w_gate, w_up, w_down)),
    ):
        assert plan_text(*refused) == ""
    with pytest.raises(RuntimeError, match="gated_mlp_few: w_up must have the dtype of x"):
        plan_text(x, w_gate, w_up.half(), w_down)


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_half
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    check_inference(OP, *inference_operands(5, 520, 1096, 264, dtype), activation=activation)


@pytest.mark.gpu
@every_half
@pytest.mark.parametrize("m", [1, 2, 8, 15, 16, 17, 32, 33, 64])
def test_rows(m, dtype):
    check_inference(OP, *inference_operands(m, 1024, 3072, dtype=dtype))


# Around a step of 32 columns, and clusters of one block to eight.
@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 12, 40])
@pytest.mark.parametrize("k", [8, 40, 520, 1032, 4104])
@pytest.mark.parametrize("f", [8, 1056, 4104])
@pytest.mark.parametrize("n", [1, 131, 2200])
def test_ragged_sizes(m, k, f, n):
    check_inference(OP, *inference_operands(m, k, f, n))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "k", "f"),
    [(1, 4096, 14336), (16, 4096, 14336), (32, 4096, 14336), (8, 8192, 28672), (64, 2048, 8192)],
)
def test_models(m, k, f):
    check_inference(OP, *inference_operands(m, k, f))


@pytest.mark.gpu
def test_values_that_are_not_finite_stay_in_their_rows():
    x, w_gate, w_up, w_down = inference_operands(9, 520, 1096, 264)
    clean = inference(OP, x, w_gate, w_up, w_down, activation=SILU)
    x[1, 519], w_down[7] = torch.nan, torch.nan
    y = inference(OP, x, w_gate, w_up, w_down, activation=SILU)
    assert y[1].isnan().all()
    assert y[:, 7].isnan().all()
    rows, columns = torch.arange(9) != 1, torch.arange(264) != 7
    assert torch.equal(y[rows][:, columns], clean[rows][:, columns])


# ---- Launches ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_launches_in_a_row_give_the_same_bits():
    """Each may start before the last one has ended."""
    for given in (inference_operands(1, 1024, 3072), inference_operands(16, 4096, 14336)):
        first = inference(OP, *given, activation=SILU)
        results = [inference(OP, *given, activation=SILU) for _ in range(100)]
        assert all(torch.equal(y, first) for y in results)


@pytest.mark.gpu
def test_a_layer_follows_what_its_input_comes_from():
    given = inference_operands(16, 2048, 8192)
    x, *inner = given
    first = inference(OP, x, *inner, activation=SILU)
    torch.cuda.synchronize()
    expected = inference(OP, first, *inner, activation=SILU)
    torch.cuda.synchronize()
    for _ in range(20):
        y = inference(OP, inference(OP, x, *inner, activation=SILU), *inner, activation=SILU)
        assert torch.equal(y, expected)


@pytest.mark.gpu
def test_graph_capture():
    given = inference_operands(12, 520, 1096)
    graph, y = captured(lambda: inference(OP, *given, activation=SILU))
    for _ in range(2):
        given[0].copy_(given[0].roll(1, 0))
        graph.replay()
        assert torch.equal(y, inference(OP, *given, activation=SILU))
