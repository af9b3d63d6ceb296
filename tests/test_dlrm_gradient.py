"""The gradient of a table from those of its rows: values, layouts, refusals, and on a GPU launches,
repetition, graphs, and what is larger than 32-bit numbers count."""

import subprocess
import sys
from collections.abc import Callable

import layouts
import pytest
import torch
from dlrms import check_table_gradient
from launches import captured, no_waiting, on_another_stream
from reference import DTYPES, poison
from refusals import refuses
from torch import Tensor

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)

BF16 = torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sum_by_row = torch.ops.fusedcuda.embedding_dense_backward


def draw(
    *shape: int, rows: int, columns: int = 16, dtype=torch.float32, device="cpu"
) -> tuple[Tensor, Tensor]:
    """Gradients of rows, and which these are: many of them the first one."""
    indices = torch.randint(rows, shape, device=device)
    indices *= torch.rand(shape, device=device) < 0.8
    return torch.randn(*shape, columns, dtype=dtype, device=device), indices


def check(grad: Tensor, indices: Tensor, rows: int) -> Tensor:
    poison(grad.device, rows * grad.shape[-1] * grad.element_size())
    actual = sum_by_row(grad, indices, rows)
    assert actual.is_contiguous()
    check_table_gradient(actual, grad, indices)
    return actual


@pytest.mark.parametrize("columns", [1, 8, 13, 16, 24, 128, 300])
@every_dtype
def test_columns(dtype, columns, device):
    for items in (1, 33, 700):
        grad, indices = draw(items, rows=90, columns=columns, dtype=dtype, device=device)
        actual = check(grad, indices, 90)
        assert torch.equal(sum_by_row(grad, indices.int(), 90), actual)
        check(layouts.shifted(grad, 1), indices, 90)


@pytest.mark.parametrize("rows", [1, 2, 511, 512, 513, 100_000])
def test_rows(rows, device):
    for dtype in (BF16, torch.float32):
        for items in (1, 31, 4607, 4608, 4609, 20_011):
            check(*draw(items, rows=rows, columns=8, dtype=dtype, device=device), rows)


@every_dtype
def test_one_row_and_two_of_all(dtype, device):
    """Runs that are longer than a level of pieces."""
    grad, indices = draw(9000, rows=2, dtype=dtype, device=device)
    check(grad, indices + 7, 50)
    actual = check(grad, torch.full_like(indices, 7), 50)
    assert actual.any(1).tolist() == [row == 7 for row in range(50)]


def test_rows_that_differ_are_copies(device):
    order = torch.randperm(20_000, device=device)
    grad = torch.randn(20_000, 16, dtype=BF16, device=device)
    assert torch.equal(sum_by_row(grad, order, 20_000)[order], grad)


@every_dtype
def test_layouts(dtype, device):
    """Of any number of dimensions, and any strides."""
    for shape in ((40,), (6, 9), (2, 5, 7)):
        grad, indices = draw(*shape, rows=30, dtype=dtype, device=device)
        expected = check(grad, indices, 30)
        for change in (layouts.pitched, layouts.transposed, layouts.spread):
            assert torch.equal(sum_by_row(change(grad), indices, 30), expected)
            assert torch.equal(sum_by_row(grad, change(indices), 30), expected)
            assert torch.equal(sum_by_row(grad, change(indices.int()), 30), expected)
    check(grad[:1, :1, :1, :1].expand(grad.shape), indices[:1].expand(indices.shape), 30)


@pytest.mark.parametrize(
    ("items", "rows", "columns"), [(0, 5, 3), (0, 0, 8), (0, 70_001, 1), (4, 5, 0), (0, 5, 0)]
)
def test_nothing_to_add_up(items, rows, columns, device):
    grad = torch.ones(items, columns, dtype=BF16, device=device)
    poison(device, rows * columns * 2)
    zeros = sum_by_row(grad, torch.zeros(items, dtype=torch.int64, device=device), rows)
    assert zeros.shape == (rows, columns)
    assert not zeros.any()


def test_refusals(device):
    on_cpu = device == "cpu"
    type_error = TypeError if on_cpu else RuntimeError
    value_error = ValueError if on_cpu else RuntimeError
    grad, indices = draw(4, 3, rows=9, device=device)
    for given, error, mentions in (
        ((grad.int(), indices, 9), type_error, ("grad must be",)),
        ((grad, indices.float(), 9), type_error, ("indices must be an int64 or int32 tensor",)),
        ((grad[:3], indices, 9), value_error, ("grad must have", "(4, 3)", "(3, 3, 16)")),
        ((grad[:, 0], indices, 9), value_error, ("grad must have", "(4, 16)")),
        ((grad, indices, -1), value_error, ("rows must not be negative", "-1")),
    ):
        with refuses("embedding_dense_backward", error, *mentions):
            sum_by_row(*given)
    with refuses("embedding_dense_backward", IndexError if on_cpu else RuntimeError):
        sum_by_row(grad, indices, 0)


# ---- On a GPU ------------------------------------------------------------------------------------


def of_the_case_study(columns: int = 16, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, int]:
    rows = 260_000
    indices = torch.randint(rows, (65536, 26), device="cuda")
    return torch.randn(65536, 26, columns, dtype=dtype, device="cuda"), indices, rows


@pytest.mark.gpu
@every_dtype
def test_many_tiles(dtype):
    for columns in (16, 24):
        check(*of_the_case_study(columns, dtype))
    grad, indices = draw(1_000_003, rows=3_000_000, columns=4, dtype=dtype, device="cuda")
    check(grad, indices, 3_000_000)  # three passes


@pytest.mark.gpu
def test_a_hot_row_of_a_million():
    grad = torch.randn(1_300_000, 8, device="cuda")
    indices = torch.full((1_300_000,), 3, device="cuda")
    indices[::100] = torch.randint(1000, (13_000,), device="cuda")
    check(grad, indices, 1000)


@pytest.mark.gpu
def test_launches():
    """Only those of the plan, and the copies that it names."""
    for given in (draw(40, 9, rows=1000, device="cuda"), draw(9000, rows=9, device="cuda")):
        grad, indices = given
        plan = torch.ops.fusedcuda.embedding_dense_backward_plan(grad, indices, 1000, 0)
        function = lambda grad=grad, indices=indices: sum_by_row(grad, indices, 1000)  # noqa: E731
        function()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        kernels = [e.name for e in profile.events() if e.device_type == on_gpu]
        assert f'"launches": {len(kernels)},' in plan
        assert all("radix_" in name or "embedding_sum" in name for name in kernels)


@pytest.mark.gpu
@every_dtype
def test_runs_repeat_to_the_bit(dtype):
    """Also where torch is asked for it, on another stream, and while the GPU does other work."""
    grad, indices = draw(300_000, rows=3000, dtype=dtype, device="cuda")

    def run() -> Tensor:
        return sum_by_row(grad, indices, 3000)

    first = run()
    torch.use_deterministic_algorithms(True)
    try:
        asked_for = run()
    finally:
        torch.use_deterministic_algorithms(False)
    others = [asked_for, on_another_stream(run), *(run() for _ in range(10))]
    assert all(torch.equal(again, first) for again in others)


@pytest.mark.gpu
def test_calls_behind_each_other():
    """They follow without a gap and share what the allocator gives them as workspace."""
    calls = [
        draw(items, rows=rows, columns=columns, dtype=dtype, device="cuda")
        for items, rows in ((5, 70_000), (9001, 700), (70_000, 20_000), (0, 9), (4609, 1))
        for columns, dtype in ((16, BF16), (5, torch.float32))
    ]
    torch.cuda.synchronize()
    sizes = [int(indices.max()) + 1 if indices.numel() else 9 for _, indices in calls]
    results = [
        sum_by_row(grad, indices, rows)
        for _ in range(5)
        for (grad, indices), rows in zip(calls, sizes, strict=True)
    ]
    for result, (grad, indices) in zip(results, 5 * calls, strict=True):
        check_table_gradient(result, grad, indices)


@pytest.mark.gpu
def test_graph():
    """Replayed on other values and other indices."""
    grad, indices = draw(400, 26, rows=5000, dtype=BF16, device="cuda")

    def run() -> Tensor:
        return sum_by_row(grad, indices, 5000)

    graph, result = captured(run)
    for rows in (5000, 2, 600):
        grad.normal_()
        indices.random_(rows)
        graph.replay()
        assert torch.equal(result, run())
        check_table_gradient(result, grad, indices)


@pytest.mark.gpu
def test_it_does_not_wait_for_the_gpu():
    grad, indices = draw(400, 26, rows=5000, dtype=BF16, device="cuda")
    sum_by_row(grad, indices, 5000)
    with no_waiting():
        sum_by_row(grad, indices, 5000)


@pytest.mark.gpu
def test_it_waits_for_its_indices():
    """Each call reads what the one before it has written."""
    grad = torch.ones(9000, 8, device="cuda")
    indices = torch.zeros(9000, dtype=torch.int64, device="cuda")
    results = []
    for _ in range(20):
        results.append(sum_by_row(grad, indices, 21)[:, 0])
        indices = (results[-1].argmax() + 1).expand(9000).contiguous()
    assert torch.equal(torch.stack(results), 9000 * torch.eye(21, device="cuda")[:20])


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [50, -1, 1 << 40])
def test_indices_that_are_no_rows_fail_a_device_assert(wrong):
    """In a process of its own: the assert takes the CUDA context with it."""
    script = f"""
import torch, fusedcuda
indices = torch.tensor([0, 1, {wrong}, 49], device="cuda")
torch.ops.fusedcuda.embedding_dense_backward(torch.zeros(4, 8, device="cuda"), indices, 50)
torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert "device-side assert" in result.stderr


def at_places(items: int, places: list[int], device: str = "cuda") -> Tensor:
    """Zeros but for 1, 2, 4, ... at these items."""
    grad = torch.zeros(items, 1, dtype=BF16, device=device)
    for k, place in enumerate(places):
        grad[place] = 2.0**k
    return grad


@pytest.mark.gpu
def test_as_many_items_as_are_sorted(memory: Callable[[float], None]):
    """Positions up to 2^31 - 2, in the last of 466,000 tiles."""
    memory(70)
    items = (1 << 31) - 1
    places = [0, 4607, 4608, 1 << 30, items - 2, items - 1]
    indices = torch.arange(items, dtype=torch.int32, device="cuda").remainder_(1000)
    actual = sum_by_row(at_places(items, places), indices, 1000)
    expected = torch.zeros(1000)
    for k, place in enumerate(places):
        expected[place % 1000] += 2.0**k
    assert torch.equal(actual[:, 0].float().cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [0, 5])
def test_as_many_rows_as_are_sorted_and_more(memory: Callable[[float], None], more):
    """2^31 rows; more are torch's. Rounded once: one by one, 256 + 1 + 1 is 256 in bfloat16."""
    memory(40)
    rows = (1 << 31) + more
    indices = torch.tensor([0, rows - 1, rows - 2, rows - 1, 1 << 30, rows - 1], device="cuda")
    grad = torch.tensor([3.0, 256, 5, 1, 7, 1], dtype=BF16, device="cuda").unsqueeze(1)
    plan = torch.ops.fusedcuda.embedding_dense_backward_plan(grad, indices, rows, 0)
    assert f'"path": "{"torch" if more else "sorted"}"' in plan
    actual = sum_by_row(grad, indices, rows)
    assert actual.dtype == BF16
    assert actual[indices, 0].tolist() == [3, 258, 5, 258, 7, 258]
    assert int(actual.count_nonzero()) == 4
