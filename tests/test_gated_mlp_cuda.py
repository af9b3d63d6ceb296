"""What only a GPU shows of gated_mlp: graphs, streams, memory, many rows, every path."""

import pytest
import torch
from gated_mlps import check_gated_mlp, either_weight, forced, fused, random_layer
from launches import captured, no_waiting, on_another_stream
from linears import exact
from reference import leaf, poison
from torch import Tensor

from fusedcuda.ops import _gated_mlp_cuda as cuda

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(params=cuda.PATHS)
def path(request: pytest.FixtureRequest):
    with forced(request.param):
        yield request.param


@either_weight
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_large_layers(dtype, packed, path):
    for rows in (16, 1000, 4099):
        layer = random_layer(rows, k=512, f=1408, dtype=dtype, device="cuda")
        check_gated_mlp(layer, packed=packed)
        check_gated_mlp(layer, "gelu", packed=packed, recompute=True)
        check_gated_mlp(layer, packed=packed, wrt=())


def test_results_repeat_bit_by_bit(path, deterministic_algorithms):
    given = leaves_of(1000, packed=True)
    dy = exact(1000, 512, dtype=BF16, device="cuda")
    first = step(given, dy)
    deterministic_algorithms()
    for _ in range(3):
        for result, again in zip(first, step(given, dy), strict=True):
            assert torch.equal(result, again)


# ---- Streams and graphs --------------------------------------------------------------------------


def leaves_of(rows: int, packed: bool, k: int = 512, f: int = 1408) -> list[Tensor]:
    layer = random_layer(rows, k=k, f=f, dtype=BF16, device="cuda")
    return [leaf(t) for t in layer.operands(packed).values()]


def step(given: list[Tensor], dy: Tensor, recompute: bool = False) -> list[Tensor]:
    y = fused(*given, recompute=recompute)
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


@pytest.mark.parametrize("recompute", [False, True])
@either_weight
@pytest.mark.parametrize("rows", [16, 500])
def test_graph_capture_of_training(rows, packed, recompute, path):
    given = leaves_of(rows, packed)
    dy = exact(rows, 512, dtype=BF16, device="cuda")
    graph, results = captured(lambda: step(given, dy, recompute))
    for _ in range(2):
        with torch.no_grad():
            for tensor in (*given, dy):
                tensor.copy_(tensor.roll(1, 0))
        graph.replay()
        for replayed, expected in zip(results, step(given, dy, recompute), strict=True):
            assert torch.equal(replayed, expected)


@either_weight
@pytest.mark.parametrize("rows", [1, 16, 64, 500])
def test_graph_capture_of_inference(rows, packed, path):
    given = leaves_of(rows, packed)
    with torch.no_grad():
        graph, (y,) = captured(lambda: [fused(*given)])
        for _ in range(3):
            given[0].copy_(given[0].roll(1, 1))
            graph.replay()
            assert torch.equal(y, fused(*given))


def test_on_another_stream(path):
    for rows in (16, 300):
        given = leaves_of(rows, packed=False)
        dy = exact(rows, 512, dtype=BF16, device="cuda")

        def calls(given: list[Tensor] = given, dy: Tensor = dy) -> list[Tensor]:
            return [*step(given, dy), fused(*(t.detach() for t in given))]

        expected = calls()
        for result, right in zip(on_another_stream(calls), expected, strict=True):
            assert torch.equal(result, right)


@pytest.mark.gpus(2)
def test_on_another_device(path):
    for rows in (16, 130):
        layer = random_layer(rows, k=72, f=136, dtype=BF16, device="cuda:1")
        check_gated_mlp(layer)
        check_gated_mlp(layer, wrt=())


@either_weight
def test_no_call_waits_for_the_gpu(packed, path):
    for rows in (16, 300):
        given = leaves_of(rows, packed)
        dy = exact(rows, 512, dtype=BF16, device="cuda")

        def calls(given: list[Tensor] = given, dy: Tensor = dy) -> None:
            step(given, dy)
            with torch.no_grad():
                fused(*given)

        calls()
        with no_waiting():
            calls()


# ---- Memory --------------------------------------------------------------------------------------

M, K, F = 8192, 512, 4096
HIDDEN, OUTPUT, WEIGHTS = M * F * 2, M * K * 2, 3 * K * F * 2
SLACK = 36 << 20  # what cuBLASLt works in


def memory_of(function) -> tuple[int, int]:
    """What is allocated more after a call, and at its peak."""
    result = function()
    del result
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated() - before
    del result
    return used, torch.cuda.max_memory_allocated() - before


@either_weight
def test_memory_of_a_forward(packed):
    """h alone in between; with a gradient what is kept, of which h may be made again."""
    given = leaves_of(M, packed, K, F)
    with torch.no_grad():
        kept, peak = memory_of(lambda: fused(*given))
    assert kept == OUTPUT
    assert peak <= OUTPUT + HIDDEN + SLACK
    for recompute in (False, True):
        kept, peak = memory_of(lambda recompute=recompute: fused(*given, recompute=recompute))
        assert kept == OUTPUT + (2 if recompute else 3) * HIDDEN
        assert peak <= OUTPUT + 3 * HIDDEN + SLACK


@either_weight
def test_memory_of_a_step(packed):
    """At the peak gate, up and their gradients, h, and the gradient of h or of the parameters."""
    given = leaves_of(M, packed, K, F)
    dy = exact(M, K, dtype=BF16, device="cuda")
    for recompute in (False, True):
        _, peak = memory_of(lambda recompute=recompute: step(given, dy, recompute))
        assert peak <= 6 * HIDDEN + 2 * OUTPUT + WEIGHTS + SLACK


def test_every_element_of_outputs_and_gradients_is_written(path):
    for rows, k, f in ((1, 8, 8), (3, 5, 7), (129, 72, 264), (1000, 40, 33)):
        for packed in (True, False):
            given = leaves_of(rows, packed, k, f)
            dy = exact(rows, k, dtype=BF16, device="cuda")
            torch.cuda.empty_cache()
            poison("cuda", *[1 << 18] * 8, *[1 << 20] * 8, *[8 << 20] * 4)
            results = [*step(given, dy), fused(*(t.detach() for t in given))]
            assert not any(t.isnan().any() for t in results)
