"""What only a GPU shows of linear layers: streams, graphs, threads, memory, very large tensors."""

import threading
from collections.abc import Callable

import pytest
import torch
from launches import captured
from linears import check_linear, exact, operands, weights
from reference import leaf, need_gpu_memory, poison
from torch import Tensor

import fusedcuda

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
KINDS = ("relu", "gelu_tanh", "silu", "none")
EVERY_KIND = pytest.mark.parametrize("activation", KINDS)


def leaves_of(*rows: int, n: int, k: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [leaf(t) for t in operands(*rows, n=n, k=k, dtype=dtype, device="cuda")]


def mlp_leaves(m: int, n: int, hidden: int, k: int) -> list[Tensor]:
    first = leaves_of(m, n=hidden, k=k)
    return [*first, *leaves_of(1, n=n, k=hidden)[1:]]


def run(given: list[Tensor], dy: Tensor, function: Callable[..., Tensor]) -> list[Tensor]:
    y = function(*given)
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


def with_activation(activation: str) -> Callable[..., Tensor]:
    return lambda *tensors: fusedcuda.linear_act(*tensors, activation)


# ---------------------------------------------------------------------------- memory


@EVERY_KIND
def test_every_element_of_outputs_and_gradients_is_written(activation):
    """The allocator hands out NaN, also to workspaces; nothing of it may come through."""
    for m, n, k in ((1, 1, 1), (3, 5, 7), (129, 255, 64), (1000, 1000, 40), (4097, 33, 13)):
        given = leaves_of(m, n=n, k=k)
        dy = exact(m, n, dtype=BF16, device="cuda")
        torch.cuda.empty_cache()
        poison("cuda", *[1 << 18] * 8, *[1 << 20] * 8, *[8 << 20] * 4)
        assert not any(t.isnan().any() for t in run(given, dy, with_activation(activation)))
    given = mlp_leaves(129, 40, 255, 64)
    dy = exact(129, 40, dtype=BF16, device="cuda")
    torch.cuda.empty_cache()
    poison("cuda", *[1 << 18] * 8, *[1 << 20] * 8)
    results = run(given, dy, lambda *t: fusedcuda.mlp(*t, activation))
    assert not any(t.isnan().any() for t in results)


@pytest.mark.parametrize(("activation", "saved"), [("none", 0), ("relu", 1 / 16), ("silu", 1)])
def test_the_forward_keeps_what_it_says(activation, saved):
    """Beside the output a bit an element for relu, z for others, nothing without a gradient."""
    x, weight, bias = operands(4096, n=1024, k=64, dtype=BF16, device="cuda")
    fusedcuda.linear_act(x, weight, bias, activation)  # allocates the workspace
    output = 4096 * 1024 * 2
    for trained, kept in ((weight, 0), (leaf(weight), saved)):
        before = torch.cuda.memory_allocated()
        y = fusedcuda.linear_act(x, trained, bias, activation)
        assert torch.cuda.memory_allocated() - before == output * (1 + kept)
        del y


def test_no_call_waits_for_the_gpu():
    """torch's own check for synchronisation, with operands that have to be copied."""
    fp8 = torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.ones((), device="cuda")
    given = leaves_of(64, n=32, k=48)
    dy = exact(64, 32, dtype=BF16, device="cuda")

    def odd(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        return fusedcuda.linear_act(x[:, ::3], weight[:, :16], bias, activation)

    def everything() -> None:
        for activation in KINDS:
            run(given, dy, with_activation(activation))
            run(given, dy[:, :1].expand(64, 32), lambda *t, a=activation: odd(*t, a))
        fusedcuda.linear_act_fp8(fp8, fp8, x_scale=scale, weight_scale=scale)

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_elements_than_an_int_counts():
    """Offsets of rows beyond 2^31, in x and in the output."""
    need_gpu_memory(40)
    rows = (1 << 31) // 64 + 64
    for n, k in ((64, 8), (8, 64)):
        x = torch.zeros(rows, k, dtype=BF16, device="cuda")
        x[-3:] = exact(3, k, dtype=BF16, device="cuda")
        weight, bias = weights(n, k, dtype=BF16, device="cuda"), exact(n, dtype=BF16, device="cuda")
        for activation in ("relu", "silu"):
            trained = leaf(weight)
            y = fusedcuda.linear_act(x, trained, bias, activation)
            expected = fusedcuda.linear_act(x[-3:], weight, bias, activation)
            torch.testing.assert_close(y[-3:], expected)
            (dweight,) = torch.autograd.grad(y[-3:].sum(), trained)
            alone = leaf(weight)
            last = fusedcuda.linear_act(x[-3:], alone, bias, activation)
            # The slopes of few rows are those at the rounded z, and differ by two roundings each.
            atol = 2 * 2**-9 * x[-3:].abs().sum(0).max().item() if activation == "silu" else 0
            expected = torch.autograd.grad(last.sum(), alone)[0]
            torch.testing.assert_close(dweight, expected, rtol=0.016, atol=atol)
            del y, dweight


# ---------------------------------------------------------------------------- determinism


@EVERY_KIND
def test_two_runs_agree_to_the_last_bit(activation, deterministic_algorithms):
    for m, n, k in ((4096, 512, 16), (64, 4096, 4096), (1000, 129, 479)):
        given = leaves_of(m, n=n, k=k)
        dy = torch.randn(m, n, device="cuda").to(BF16)
        first = run(given, dy, with_activation(activation))
        for _ in range(3):
            again = run(given, dy, with_activation(activation))
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    deterministic_algorithms()
    again = run(given, dy, with_activation(activation))
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


# ---------------------------------------------------------------------------- streams and graphs


@EVERY_KIND
def test_runs_on_the_current_stream(activation):
    """The inputs are written late on a side stream; a kernel on any other stream reads zeros."""
    final = operands(1 << 13, n=128, k=64, dtype=BF16, device="cuda")
    late = [leaf(torch.zeros_like(t)) for t in final]
    dy = exact(1 << 13, 128, dtype=BF16, device="cuda")
    expected = run([leaf(t) for t in final], dy, with_activation(activation))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for tensor, value in zip(late, final, strict=True):
            tensor.data.copy_(value)
        actual = run(late, dy, with_activation(activation))
    stream.synchronize()
    torch.testing.assert_close(actual, expected)


@EVERY_KIND
def test_a_graph_replays_forward_and_backward_with_new_data(activation):
    given = leaves_of(512, n=256, k=128)
    dy = exact(512, 256, dtype=BF16, device="cuda")
    graph, outputs = captured(lambda: run(given, dy, with_activation(activation)))
    for _ in range(2):
        fresh = operands(512, n=256, k=128, dtype=BF16, device="cuda")
        for tensor, value in zip(given, fresh, strict=True):
            tensor.data.copy_(value)
        graph.replay()
        expected = run([leaf(t) for t in fresh], dy, with_activation(activation))
        torch.testing.assert_close(outputs, expected)


def test_a_graph_outlives_another_one():
    """Each has a workspace of its own: resetting the one must not take that of the other."""
    large, small = leaves_of(64, n=4096, k=4096), leaves_of(512, n=256, k=128)
    gradients = [exact(*shape, dtype=BF16, device="cuda") for shape in ((64, 4096), (512, 256))]
    graphs = [
        captured(lambda given=given, dy=dy: run(given, dy, with_activation("gelu_tanh")))
        for given, dy in zip((large, small), gradients, strict=True)
    ]
    expected = run(small, gradients[1], with_activation("gelu_tanh"))
    graphs[0][0].replay()
    graphs[0][0].reset()
    torch.cuda.empty_cache()
    poison("cuda", *[32 << 20] * 4)
    run(large, gradients[0], with_activation("relu"))
    graph, outputs = graphs[1]
    for output in outputs:
        output.zero_()
    graph.replay()
    torch.testing.assert_close(outputs, expected)


def test_threads_on_streams_of_their_own():
    """Plans and workspaces are shared; results are not."""
    shapes = [(64, 256, 128), (129, 64, 40), (1000, 512, 16), (16, 1024, 1024)]
    given = [leaves_of(m, n=n, k=k) for m, n, k in shapes]
    dys = [exact(m, n, dtype=BF16, device="cuda") for m, n, _ in shapes]
    results: list[list[Tensor]] = [[] for _ in shapes]
    errors: list[BaseException] = []
    torch.cuda.synchronize()

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for repetition in range(20):
                    function = with_activation(KINDS[repetition % 4])
                    results[index] = run(given[index], dys[index], function)
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for tensors, dy, result in zip(given, dys, results, strict=True):
        torch.testing.assert_close(result, run(tensors, dy, with_activation(KINDS[19 % 4])))


# ---------------------------------------------------------------------------- settings of torch


def test_tf32_is_torchs_setting():
    """Off by default; on, the operands of float32 products are rounded to 10 bits."""
    x, weight = (torch.randn(size, 512, device="cuda") for size in (256, 128))
    exactly = x.double() @ weight.double().mT
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        errors = []
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            error = (fusedcuda.linear_act(x, weight).double() - exactly).abs().max()
            errors.append(error.item())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert errors[0] < 1e-3
    assert 1e-3 < errors[1] < 0.5


@pytest.mark.gpus(2)
def test_two_devices_at_once():
    """Handles, plans and workspaces belong to a device."""
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        for activation in KINDS:
            check_linear(*operands(64, n=128, k=64, dtype=BF16, device=device), activation)
