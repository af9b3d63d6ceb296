"""What only a GPU shows of the lora family: kernels alone, graphs, streams, memory, many rows."""

import threading

import pytest
import torch
from launches import captured
from layouts import pitched, shifted, spread, transposed
from linears import exact
from loras import Layer, check_lora, mask_of, random_layer
from reference import leaf, poison
from torch import Tensor

import fusedcuda

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HALVES = (torch.float16, BF16)
RANKS = (1, 3, 5, 8, 16, 24, 64, 100, 256)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
_ops = torch.ops.fusedcuda


def small(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Integers, whose products are added up exactly in any order."""
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def on_cpu(op: str, *arguments: object) -> Tensor:
    moved = (a.cpu() if isinstance(a, Tensor) else a for a in arguments)
    return getattr(_ops, op)(*moved).cuda()


# ---- Kernels alone -------------------------------------------------------------------------------


@pytest.mark.parametrize("factor_dtype", ["same", "float32"])
@pytest.mark.parametrize("rank", RANKS)
@every_half
def test_down_equals_the_reference_to_the_last_bit(dtype, rank, factor_dtype):
    kept = dtype if factor_dtype == "same" else torch.float32
    seed = torch.tensor([12345], device="cuda")
    for rows, columns in ((1, 4096), (16, 1000), (333, 479), (5000, 264)):
        x, factor = small(rows, columns, dtype=dtype), small(rank, columns, dtype=kept)
        for given in (factor, factor.T.contiguous().T):
            for options in ((None, 0.5, 0.0), (seed, 0.5, 0.5)):
                poison("cuda", rows * 1024)
                actual = _ops.lora_down(x, given, *options)
                assert torch.equal(actual, on_cpu("lora_down", x, given, *options))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", RANKS)
@every_half
def test_up_equals_the_reference_to_the_last_bit(dtype, rank, transposed):
    seed = torch.tensor([12345], device="cuda")
    for rows, columns in ((1, 4096), (65, 1000), (2000, 479)):
        x, t = small(rows, columns, dtype=dtype), small(rows, -(-rank // 8) * 8, dtype=dtype)
        t[:, rank:] = 0
        for options in ((None, rank, 0.0), (seed, rank, 0.5)):
            for in_float32 in (False, True):
                poison("cuda", rank * columns * 4)
                arguments = (t, x, *options, transposed, in_float32)
                assert torch.equal(_ops.lora_up(*arguments), on_cpu("lora_up", *arguments))


@pytest.mark.parametrize("rank", [1, 5, 16, 24, 33, 64])
@every_half
def test_a_pass_equals_the_reference_to_the_last_bit(dtype, rank):
    """One line of tiles and many, ends of rows and columns inside of them; a pitch."""
    fusedcuda.load("lora")
    seed, pitch = torch.tensor([2**40 + 3], device="cuda"), -(-rank // 8) * 8
    for rows, columns in ((1, 8), (300, 8200), (2048, 4096), (9000, 136)):
        x = small(rows, columns + 8, dtype=dtype)[:, :columns]
        t, lora_b = (small(n, pitch, dtype=dtype) for n in (rows, columns))
        t[:, rank:], lora_b[:, rank:] = 0, 0
        lora_a = small(rank, columns, dtype=dtype)
        calls = [(x, lora_b.T, t, None, rank, 0.5, 0.0, True, True)]
        for given in (None, seed):
            calls.append((x, lora_a, None, given, rank, 0.5, 0.5, False, False))
            calls.append((x, None, t, given, rank, 0.5, 0.5, False, True))
        for call in calls:
            there = [a.cpu() if isinstance(a, Tensor) else a for a in call]
            expected = _ops.lora_pass(*there)
            poison("cuda", 2 * rank * (rows + columns))
            for _ in range(2):
                for actual, wanted in zip(_ops.lora_pass(*call), expected, strict=True):
                    assert torch.equal(actual.cpu(), wanted)


def test_a_thread_that_has_not_called_cuda_before():
    """As autograd's may be: the driver's description of a matrix needs a context there."""
    fusedcuda.load("lora")
    x, t = small(300, 264), small(300, 8)
    call = (x, None, t, None, 8, 1.0, 0.0, False, False)
    (expected,) = _ops.lora_pass(*call)
    (kept,) = _ops.lora_pass(*call)
    del kept  # so that the thread's memory is there
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(_ops.lora_pass(*call)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("lora_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize(("n", "rank"), [(2048, 16), (2048, 5), (2048, 40), (520, 16), (520, 5)])
def test_layers_whose_skinny_products_are_passes(n, rank, dropout_p, lora_dtype):
    options = {"dtype": BF16, "lora_dtype": lora_dtype, "device": "cuda"}
    layer = random_layer(300, n=n, k=1032, rank=rank, **options)
    check_lora(layer, 0.5, dropout_p=dropout_p)
    for wrt in (["x"], ["lora_a"], ["lora_b"], ["lora_a", "lora_b"]):
        check_lora(layer, 0.5, "silu", dropout_p=dropout_p, wrt=wrt)


@pytest.mark.parametrize("layout", [transposed, spread, pitched, lambda x: shifted(x, 1)])
@pytest.mark.parametrize("rank", [16, 5])
def test_layouts_of_many_rows(rank, layout):
    """Where a pass would have to copy, other kernels make the skinny products."""
    x, weight, bias, lora_a, lora_b = random_layer(
        4096, n=264, k=256, rank=rank, dtype=BF16, device="cuda"
    )
    check_lora(Layer(layout(x), weight, bias, lora_a, lora_b), 0.5)
    check_lora(Layer(x, weight, bias, layout(lora_a), layout(lora_b)), 0.5)


def check_decode(m: int, n: int, k: int, rank: int, dtype: torch.dtype) -> None:
    """Few are not zero, so that sums are exact: rounded once, as the reference rounds."""

    def sparse(*shape: int) -> Tensor:
        return small(*shape, dtype=dtype) * (torch.rand(shape, device="cuda") < min(1, 24 / k))

    up = torch.zeros(n, -(-rank // 8) * 8, dtype=dtype, device="cuda")
    up[:, :rank] = small(n, rank, dtype=dtype)
    given = (sparse(m, k), sparse(n, k), small(n, dtype=dtype), sparse(rank, k), up, 0.5, 1)
    assert _ops.lora_decode_plan(*given, 132)
    poison("cuda", m * n * 2)
    expected = _ops.lora_decode(*(a.cpu() if isinstance(a, Tensor) else a for a in given))
    for _ in range(2):
        for actual, wanted in zip(_ops.lora_decode(*given), expected, strict=True):
            assert torch.equal(actual.cpu(), wanted)


@pytest.mark.parametrize("rank", [1, 5, 16, 64])
@pytest.mark.parametrize("m", [1, 7, 16, 17, 32])
@every_half
def test_decode_equals_the_reference_to_the_last_bit(dtype, m, rank):
    fusedcuda.load("lora")
    for n, k in ((4096, 4096), (1000, 1032), (40, 14336), (133, 8), (30_000, 512)):
        check_decode(m, n, k, rank, dtype)


@pytest.mark.parametrize(("n", "k"), [(128_256, 264), (70_000, 2056)])
def test_decode_in_groups_of_tiles(n, k):
    """Of a block, and of a cluster: more rows of the weight than it adds up at a time."""
    fusedcuda.load("lora")
    check_decode(3, n, k, 5, BF16)


def test_masks_are_those_of_the_cpu():
    seed = torch.tensor([2**62 + 17], device="cuda")
    for dtype in (torch.float64, torch.float32, *HALVES):
        x = torch.randn(100, 1003, device="cuda").to(dtype)
        for dropout_p in (0.0, 0.1, 0.5, 1.0):
            actual = _ops.lora_dropout(x, seed, dropout_p)
            assert torch.equal(actual, on_cpu("lora_dropout", x, seed, dropout_p))


@pytest.mark.parametrize("rank", [1, 8, 13, 16])
@every_half
def test_a_dropped_branch_equals_the_reference_to_the_last_bit(dtype, rank):
    fusedcuda.load("lora")
    seed = torch.tensor([2**40 + 3], device="cuda")
    for rows, columns in ((1, 8), (70, 1032), (8192, 4096), (3000, 136)):
        t = torch.randint(-2, 3, (rows, rank), device="cuda").to(dtype)
        factor = torch.randint(-2, 3, (rank, columns), device="cuda").to(dtype)
        for given in (factor, shifted(factor, 1)):
            (branch,) = _ops.lora_branch(t, given, seed, 0.5)
            (expected,) = _ops.lora_branch(t.cpu(), factor.cpu(), seed.cpu(), 0.5)
            assert torch.equal(branch.cpu(), expected)


def test_branches_without_a_kernel():
    """More ranks, columns that are no multiple of 8, everything dropped, nothing there."""
    fusedcuda.load("lora")
    seed = torch.tensor([1], device="cuda")
    for rows, rank, columns, dropout_p in (
        (5, 24, 8, 0.5),
        (5, 8, 12, 0.5),
        (5, 8, 8, 1.0),
        (0, 8, 8, 0.5),
    ):
        t = torch.ones(rows, rank, dtype=BF16, device="cuda")
        factor = torch.ones(rank, columns, dtype=BF16, device="cuda")
        assert _ops.lora_branch(t, factor, seed, dropout_p) == []
        layer = random_layer(rows, n=16, k=columns, rank=rank, dtype=BF16, device="cuda")
        check_lora(layer, 0.5, dropout_p=dropout_p)


def test_masks_do_not_repeat(memory):
    """Beyond 2^32 elements, where they would if the counter were too short."""
    memory(45)
    seed = torch.tensor([5], device="cuda")
    x = torch.ones(70_000, 65_536, dtype=BF16, device="cuda")
    kept = _ops.lora_dropout(x, seed, 0.5)
    assert 0.499 < (kept != 0).float().mean() < 0.501
    assert not torch.equal(kept[:1000], kept[65_536 : 65_536 + 1000])


@every_half
def test_many_rows(dtype):
    check_lora(random_layer(4099, n=512, k=1024, rank=16, dtype=dtype, device="cuda"))
    check_lora(
        random_layer(
            8192, n=1024, k=512, rank=64, dtype=dtype, lora_dtype=torch.float32, device="cuda"
        ),
        0.25,
        "silu",
        dropout_p=0.1,
    )


# ---- Streams and graphs --------------------------------------------------------------------------


def step(given: list[Tensor], dy: Tensor, dropout_p: float = 0.0) -> list[Tensor]:
    x, weight, bias, lora_a, lora_b = given
    y = fusedcuda.lora_linear(
        x, weight, lora_a, lora_b, 0.5, bias, "silu", dropout_p=dropout_p, training=True
    )
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


def leaves_of(m: int, n: int, k: int, rank: int) -> list[Tensor]:
    layer = random_layer(
        m, n=n, k=k, rank=rank, dtype=BF16, lora_dtype=torch.float32, device="cuda"
    )
    return [leaf(t) for t in layer]


@pytest.fixture
def decode():
    """Layers of few rows are one launch."""
    before = _ops.lora_use("decode")
    yield
    _ops.lora_use(before)


@pytest.mark.usefixtures("decode")
def test_graph_capture_of_one_launch():
    test_graph_capture(16)


@pytest.mark.usefixtures("decode")
def test_one_launch_follows_what_its_input_comes_from():
    """It may start before the kernel ahead of it has ended, and the next one before it has."""
    layer = random_layer(16, n=4096, k=4096, rank=16, dtype=BF16, device="cuda")
    x, weight, bias, lora_a, lora_b = layer
    first = fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5, bias)
    expected = fusedcuda.lora_linear(first, weight, lora_a, lora_b, 0.5, bias)
    torch.cuda.synchronize()
    for _ in range(20):
        y = x
        for _ in range(2):
            y = fusedcuda.lora_linear(y, weight, lora_a, lora_b, 0.5, bias)
        assert torch.equal(y, expected)


@pytest.mark.parametrize("m", [16, 500])
def test_graph_capture(m):
    given = leaves_of(m, 264, 520, 12)
    dy = exact(m, 264, dtype=BF16, device="cuda")
    graph, results = captured(lambda: step(given, dy))
    for _ in range(2):
        with torch.no_grad():
            for tensor in (*given, dy):
                tensor.copy_(tensor.roll(1, 0))
        graph.replay()
        for replayed, expected in zip(results, step(given, dy), strict=True):
            assert torch.equal(replayed, expected)


def test_each_replay_draws_its_own_mask():
    eye = torch.eye(64, dtype=BF16, device="cuda")
    x = leaf(torch.ones(50, 64, dtype=BF16, device="cuda"))

    def function() -> list[Tensor]:
        y = fusedcuda.lora_linear(x, 0 * eye, eye, eye, 1.0, dropout_p=0.5, training=True)
        return [y.detach(), *torch.autograd.grad(y, [x], torch.ones_like(y))]

    graph, (y, gradient) = captured(function)
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, gradient)
        seen.append(y.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_on_another_stream():
    given = leaves_of(300, 264, 520, 12)
    dy = exact(300, 264, dtype=BF16, device="cuda")
    expected = step(given, dy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = step(given, dy)
    torch.cuda.current_stream().wait_stream(stream)
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result, right)


@pytest.mark.gpus(2)
def test_on_another_device():
    layer = random_layer(30, n=24, k=40, rank=5, dtype=BF16, device="cuda:1")
    check_lora(layer, 0.5, "silu")


def test_no_call_waits_for_the_gpu():
    given = leaves_of(64, 264, 520, 12)
    dy = exact(64, 264, dtype=BF16, device="cuda")
    step(given, dy, dropout_p=0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(given, dy, dropout_p=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_results_do_not_vary(deterministic_algorithms):
    given = leaves_of(5000, 264, 520, 12)
    dy = exact(5000, 264, dtype=BF16, device="cuda")
    first = step(given, dy)
    deterministic_algorithms()
    for _ in range(3):
        for result, again in zip(first, step(given, dy), strict=True):
            assert torch.equal(result, again)


# ---- Memory --------------------------------------------------------------------------------------


def test_every_element_of_outputs_and_gradients_is_written():
    for m, n, k, rank in ((1, 1, 1, 1), (3, 5, 7, 2), (129, 255, 64, 5), (4097, 33, 13, 65)):
        given = leaves_of(m, n, k, rank)
        dy = exact(m, n, dtype=BF16, device="cuda")
        torch.cuda.empty_cache()
        poison("cuda", *[1 << 18] * 8, *[1 << 20] * 8, *[8 << 20] * 4)
        assert not any(t.isnan().any() for t in step(given, dy, dropout_p=0.5))


def test_autocast_makes_no_float32_copy_of_x():
    """AgileRL/AgileRL#623: a quarter of the peak, and no bit of the gradients."""
    m, k = 4096, 1024
    x = leaf(torch.randn(m, k, device="cuda", dtype=BF16))
    weight = torch.randn(k, k, device="cuda", dtype=BF16)
    lora_a, lora_b = (leaf(torch.randn(*shape, device="cuda")) for shape in ((16, k), (k, 16)))

    def forward() -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return fusedcuda.lora_linear(x, weight, lora_a, lora_b, 0.5)

    forward().sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = forward()
    output = m * k * 2
    # The output, t, a padded or rounded factor, and what cuBLAS works in is there already.
    assert torch.cuda.max_memory_allocated() - before < output + (2 << 20)
    assert y.dtype == BF16


def test_the_mask_takes_no_memory():
    given = leaves_of(8192, 256, 1024, 16)
    x, weight, bias, lora_a, lora_b = given
    kept = {}
    for dropout_p in (0.0, 0.5, 0.0, 0.5):  # the first calls allocate workspaces that stay
        before = torch.cuda.memory_allocated()
        y = fusedcuda.lora_linear(
            x, weight, lora_a, lora_b, 0.5, bias, dropout_p=dropout_p, training=True
        )
        kept[dropout_p] = torch.cuda.memory_allocated() - before
        del y
    assert kept[0.5] - kept[0.0] == 512  # the seed, in the allocator's smallest block


def test_the_mask_of_a_call_is_that_of_its_seed():
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cuda")
    x, eye = torch.ones(40, 64, dtype=BF16, device="cuda"), torch.eye(64, device="cuda")
    torch.manual_seed(3)
    y = fusedcuda.lora_linear(
        x, torch.zeros_like(eye, dtype=BF16), eye, eye, 1.0, dropout_p=0.3, training=True
    )
    assert torch.equal(y != 0, mask_of(seed, x, 0.3))
