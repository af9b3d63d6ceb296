"""A gated MLP of few rows in one launch, alone, against float64; its counters and its order."""

import threading

import layouts
import pytest
import torch
import torch.nn.functional as F
from gated_mlps import Operands, check_inference, inference
from gated_mlps import inference_operands as operands
from launches import need_hopper, no_waiting
from reference import ACTIVATIONS
from torch import Tensor

from fusedcuda.ops._activations import ACTIVATIONS as CODES

ops = torch.ops.fusedcuda
BF16 = torch.bfloat16
HALVES = (torch.float16, BF16)
SILU = CODES["silu"]
pytestmark = pytest.mark.gpu
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture(autouse=True, scope="module")
def hopper() -> None:
    need_hopper("gated_mlp")


def decode(*given: Tensor, activation: int = SILU) -> Tensor:
    return inference("gated_mlp_decode", *given, activation=activation)


def check(*given: Tensor, activation: str = "silu") -> None:
    check_inference("gated_mlp_decode", *given, activation=activation)


# ---- Values --------------------------------------------------------------------------------------


@every_half
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    check(*operands(5, 520, 1096, 264, dtype), activation=activation)


@every_half
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 15, 16])
def test_rows(m, dtype):
    check(*operands(m, 1024, 3072, dtype=dtype))


# Around a stage of 512 columns, a round of 8 rows on each of 132 multiprocessors, and the parts
# of h that fit registers.
@pytest.mark.parametrize("m", [1, 12])
@pytest.mark.parametrize("k", [8, 504, 520, 4096])
@pytest.mark.parametrize("f", [8, 1056, 1064, 4104, 8200])
@pytest.mark.parametrize("n", [1, 131, 2200])
def test_ragged_sizes(m, k, f, n):
    check(*operands(m, k, f, n))


@pytest.mark.parametrize(
    ("m", "k", "f"),
    [
        (1, 4096, 14336),
        (8, 4096, 14336),
        (16, 4096, 14336),
        (8, 8192, 28672),
        (3, 5120, 27648),
        (12, 128, 20488),
    ],
)
def test_models(m, k, f):
    check(*operands(m, k, f))


@every_half
def test_weights_in_different_places(dtype):
    """Of their own, and each with a pitch of its own."""
    x, w_gate, w_up, w_down = operands(3, 480, 1096, 264, dtype)
    check(x, w_gate.clone(), w_up.clone(), w_down)
    x, w_gate, w_up, w_down = (
        F.pad(t, (8, 8 * i))[:, 8 : 8 + t.shape[1]] for i, t in enumerate((x, w_gate, w_up, w_down))
    )
    check(x, w_gate, w_up, w_down)


def test_values_that_are_not_finite_stay_in_their_rows():
    x, w_gate, w_up, w_down = operands(9, 520, 1096, 264)
    clean = decode(x, w_gate, w_up, w_down)
    x[1, 519], w_down[7] = torch.nan, torch.nan
    y = decode(x, w_gate, w_up, w_down)
    assert y[1].isnan().all()
    assert y[:, 7].isnan().all()
    rows, columns = torch.arange(9) != 1, torch.arange(264) != 7
    assert torch.equal(y[rows][:, columns], clean[rows][:, columns])


def test_what_there_is_no_kernel_for():
    x, w_gate, w_up, w_down = operands(3, 136, 136)
    for refused in (
        (layouts.shifted(x, 1), w_gate, w_up, w_down),
        (x, w_gate, w_up, layouts.transposed(w_down)),
        (x[:0], w_gate, w_up, w_down),
        operands(17, 136, 136),
        operands(9, 4104, 136),
        tuple(t.float() for t in (x, w_gate, w_up, w_down)),
    ):
        assert ops.gated_mlp_decode(*refused, SILU) == []


# ---- Launches ------------------------------------------------------------------------------------


def test_launches_in_a_row_give_the_same_bits():
    """200 of them, of which each finds the counters as the first one did."""
    for given in (
        operands(1, 1024, 3072),
        operands(16, 2048, 8192),
        operands(16, 4096, 14336),
    ):
        first = decode(*given)
        results = [decode(*given) for _ in range(200)]
        assert all(torch.equal(y, first) for y in results)


def test_launches_of_different_sizes_in_turns():
    layers = [operands(m, k, 4 * k) for m, k in ((1, 256), (16, 1024), (5, 512), (16, 128))]
    expected = [decode(*given) for given in layers]
    results = [[decode(*given) for given in layers] for _ in range(50)]
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def captured(layers: list[Operands]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [decode(*given) for given in layers]
    return graph, outputs


def test_in_a_graph():
    layers = [operands(m, 1024, 3072) for m in (1, 9)]
    expected = [decode(*given) for given in layers]
    graph, outputs = captured(layers)
    for _ in range(200):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    for x, *_ in layers:
        x.mul_(-0.5)
    for y in outputs:
        y.fill_(torch.nan)
    graph.replay()
    changed = [decode(*given) for given in layers]
    assert all(torch.equal(a, b) for a, b in zip(outputs, changed, strict=True))
    assert not torch.equal(changed[0], expected[0])


def test_graphs_and_calls_on_many_streams_at_the_same_time():
    """None of them waits for another's counters, or counts at them."""
    given = [operands(m, 1024, 3072) for m in (1, 4, 8, 16)]
    expected = [decode(*layer) for layer in given]
    graphs = [captured([layer]) for layer in given]
    streams = [torch.cuda.Stream() for _ in range(2 * len(given))]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in given]
    for _ in range(50):
        for i, (graph, _) in enumerate(graphs):
            with torch.cuda.stream(streams[2 * i]):
                graph.replay()
            with torch.cuda.stream(streams[2 * i + 1]):
                results[i].append(decode(*given[i]))
    torch.cuda.synchronize()
    for i, (_, (replayed,)) in enumerate(graphs):
        assert torch.equal(replayed, expected[i])
        assert all(torch.equal(y, expected[i]) for y in results[i])


def test_threads_on_streams_of_their_own():
    given = operands(2, 1024, 3072)
    expected = decode(*given)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [decode(*given) for _ in range(100)]
            torch.cuda.current_stream().synchronize()
        if not all(torch.equal(y, expected) for y in results):
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_call_waits_for_the_gpu():
    given = operands(4, 1024, 3072)
    decode(*given)
    with no_waiting():
        decode(*given)


@pytest.mark.gpus(2)
def test_on_another_device():
    given = operands(4, 1024, 3072)
    there = [t.to("cuda:1") for t in given]
    y = decode(*there)
    assert y.device == torch.device("cuda:1")
    assert torch.equal(y.to("cuda:0"), decode(*given))


def test_more_graphs_than_there_are_slots_of_counters():
    """The last test: from here on all new streams and graphs have counters in memory of a call."""
    given = operands(1, 64, 64)
    expected = decode(*given)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(1100):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            y = decode(*given)
            graph.capture_end()
        for _ in range(3):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, expected)
