"""Reports of small models made here, with no GPU: what is counted, and what is not."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._triton import has_triton

import fusedcuda
from fusedcuda.report import adapter
from fusedcuda.report.device import H200
from fusedcuda.report.result import Kernel, Report

needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="torch is built without CUDA"
)

ROWS, WIDTH = 4096, 1024
BYTES = ROWS * WIDTH * 2


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, **options) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", **options)


def predict(function, *inputs, **options) -> Report:
    return fusedcuda.report(function, *inputs, offline="h200", **options)


def only_kernel(report: Report) -> Kernel:
    (kernel,) = report.kernels
    return kernel


def test_a_chain_is_one_kernel_that_reads_each_input_once():
    x = meta(ROWS, WIDTH)
    report = predict(lambda a, b, c: torch.relu((a + b) * c), x, x.clone(), x.clone())
    kernel = only_kernel(report)
    assert (kernel.kind, kernel.ops, kernel.count) == ("pointwise", ["add", "mul", "relu"], 1)
    assert (kernel.bytes_in, kernel.bytes_out) == (3 * BYTES, BYTES)
    eager = report.variant("eager")
    assert (eager.kernels, eager.bytes) == (3, (3 + 3 + 2) * BYTES)
    # Inductor has fused all of it, and an op of fusedcuda is not better.
    (swap,) = report.swaps
    assert (swap.op, swap.kernels, swap.bytes, swap.use) == ("add_mul_act", 0, 0, False)
    assert "Best next step: none" in report.verdict


def test_views_launch_nothing_and_an_update_in_place_reads_and_writes():
    def function(x: Tensor) -> None:
        x.view(-1).unsqueeze(0).transpose(0, 1).add_(1)

    report = predict(function, meta(ROWS, WIDTH))
    kernel = only_kernel(report)
    assert (kernel.ops, kernel.bytes_in, kernel.bytes_out) == (["add"], BYTES, BYTES)
    assert "inputs are written to" in report.cuda_graphs.text


@needs_cuda_build
def test_a_cache_that_is_written_into_is_not_read():
    def function(cache: Tensor, x: Tensor) -> None:
        cache[: ROWS // 2].copy_(x.relu())

    kernel = only_kernel(predict(function, meta(ROWS, WIDTH), meta(ROWS // 2, WIDTH)))
    assert (kernel.ops, kernel.bytes_in, kernel.bytes_out) == (["relu"], BYTES // 2, BYTES // 2)


def test_a_broadcast_vector_and_a_slice_count_what_is_read_of_them():
    vector, whole = meta(WIDTH), meta(ROWS, 4 * WIDTH)
    kernel = only_kernel(predict(lambda x, v: x[:, :WIDTH] * v, whole, vector))
    assert kernel.bytes_in == BYTES + WIDTH * 2
    assert kernel.bytes_out == BYTES


@pytest.mark.parametrize("fused", [False, True])
def test_an_embedding_does_not_read_its_table(fused):
    table, ids = meta(1_000_000, WIDTH), meta(ROWS, dtype=torch.int64)
    function = (lambda t, i: F.embedding(i, t).relu()) if fused else (lambda t, i: t[i])
    kernel = only_kernel(predict(function, table, ids))
    assert kernel.bytes_in == BYTES + ROWS * 8
    assert "gather" in kernel.ops


def test_rows_that_are_gathered_for_a_sum_and_for_the_result_count_once():
    def function(table: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(F.embedding(ids, table), (WIDTH,), weight)

    inputs = meta(1_000_000, WIDTH), meta(ROWS, dtype=torch.int64), meta(WIDTH)
    kernel = only_kernel(predict(function, *inputs))
    assert kernel.bytes_in == BYTES + ROWS * 8 + WIDTH * 2


def test_a_scatter_touches_the_rows_that_it_adds_to():
    def function(table: Tensor, ids: Tensor, x: Tensor) -> None:
        table.index_add_(0, ids, x)

    inputs = meta(1_000_000, WIDTH, dtype=torch.float32), meta(ROWS, dtype=torch.int64)
    report = predict(function, *inputs, meta(ROWS, WIDTH, dtype=torch.float32))
    (scatter,) = [kernel for kernel in report.kernels if "scatter add" in kernel.ops]
    assert scatter.bytes_in == 2 * (2 * BYTES) + ROWS * 8
    assert scatter.bytes_out == 2 * BYTES


def test_alike_launches_are_one_row_and_a_span_each():
    def function(xs: list[Tensor], w: Tensor) -> list[Tensor]:
        return [x @ w for x in xs]

    report = predict(function, [meta(ROWS, WIDTH) for _ in range(3)], meta(WIDTH, WIDTH))
    kernel = only_kernel(report)
    assert (kernel.count, kernel.kind, kernel.shape) == (3, "matmul", [ROWS, WIDTH, WIDTH])
    assert [span.kernel for span in report.timeline] == [0, 0, 0]
    assert report.verdict.startswith("3 kernels, 3 GEMMs, 0 single-op, 0 graph breaks")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x), approximate="tanh")


@pytest.fixture(scope="module")
def mlp() -> nn.Module:
    return Mlp().bfloat16()


def test_linear_act_takes_a_launch_and_two_passes(mlp):
    report = predict(mlp, meta(ROWS, WIDTH))
    assert [kernel.kind for kernel in report.kernels] == ["matmul", "pointwise"]
    (swap,) = report.swaps
    assert (swap.op, swap.kernels, swap.bytes, swap.use) == ("linear_act", 1, 2 * BYTES, True)
    assert report.avoidable_bytes == 2 * BYTES
    fused = report.variant("compiled + fusedcuda")
    assert fused.kernels == 1
    assert "fusedcuda.linear_act" in report.verdict


def test_backward_has_its_kernels_and_its_own_phase(mlp):
    report = predict(mlp, meta(ROWS, WIDTH, requires_grad=True), backward=True)
    backward = [kernel for kernel in report.kernels if kernel.phase == "backward"]
    # dx and dw; the activation's gradient, and the bias gradient in two stages.
    assert sum(kernel.count for kernel in backward if kernel.kind == "matmul") == 2
    gelu = next(kernel for kernel in backward if "gelu (tanh)" in kernel.ops)
    assert (gelu.bytes_in, gelu.bytes_out) == (2 * BYTES, BYTES)
    positions = [kernel.first for kernel in report.kernels]
    assert positions == sorted(positions)
    assert report.kernels[0].phase == "forward"


def test_the_model_itself_is_left_as_it_was(mlp):
    before = {name: value.clone() for name, value in mlp.state_dict().items()}
    predict(mlp, meta(ROWS, WIDTH))
    assert all(torch.equal(before[name], value) for name, value in mlp.state_dict().items())
    assert not torch.cuda.is_available() or torch.cuda.device_count()
    assert mlp(torch.zeros(1, WIDTH, dtype=torch.bfloat16)).device.type == "cpu"


@pytest.mark.parametrize("wrap", ["closure", "method", "partial", "compiled"])
def test_modules_are_found_where_a_function_holds_them(mlp, wrap):
    functions = {
        "closure": lambda x: mlp(x),
        "method": mlp.forward,
        "partial": functools.partial(lambda model, x: model(x), mlp),
        "compiled": torch.compile(mlp),
    }
    assert len(predict(functions[wrap], meta(ROWS, WIDTH)).kernels) == 2


def test_a_convolution_counts_its_work():
    image, filters = meta(32, 64, 56, 56), meta(128, 64, 3, 3)
    report = predict(lambda x, w: F.conv2d(x, w, padding=1), image, filters)
    kernel = next(kernel for kernel in report.kernels if kernel.kind == "convolution")
    assert kernel.bound == "tensor cores"
    flops = 2 * 32 * 128 * 56 * 56 * 64 * 9
    products = flops / H200.tflops["bfloat16"] / 1e6
    assert products < kernel.us < 1.5 * products


def test_float32_is_told_to_use_the_tensor_cores():
    x = meta(4096, 4096, dtype=torch.float32)
    report = predict(lambda x, w: x @ w, x, x.clone())
    assert "set_float32_matmul_precision" in {i.topic: i.text for i in report.advice}["float32"]


@needs_cuda_build
def test_random_numbers_are_no_part_of_the_shape():
    report = predict(lambda x: F.dropout(x, 0.1), meta(ROWS, WIDTH))
    dropout = next(kernel for kernel in report.kernels if "random" in kernel.ops)
    assert dropout.shape == [ROWS * WIDTH]


def test_a_graph_break_has_its_line_its_reason_and_a_fix(predicted):
    (found,) = predicted.graph_breaks
    file, _, line = found.where.rpartition(":")
    assert file.endswith("conftest.py")
    assert int(line) > 0
    assert found.code.startswith("print(")
    assert "print" in found.fix
    assert predicted.numbers()["breaks"] == 1
    (crossing,) = [item for item in predicted.breaks if item.code == "graph break"]
    assert crossing.bytes == crossing.saved == 2 * ROWS * 512 * 2
    assert f"remove the graph break at {found.where}" in predicted.verdict
    # Both graphs are there: the matmuls of the first, and the addition of the second.
    assert [kernel.kind for kernel in predicted.kernels] == ["matmul", "pointwise"] * 2


def test_a_value_that_decides_a_branch_breaks_the_graph():
    def function(x: Tensor) -> Tensor:
        y = x.relu()
        if y.sum().item() > 0:
            return y + 1
        return y * 2

    report = predict(function, meta(ROWS, WIDTH))
    assert [item.code for item in report.graph_breaks] == ["if y.sum().item() > 0:"]
    assert "keep the value in a tensor" in report.graph_breaks[0].fix
    assert report.kernels[-1].ops == ["add"]  # as if the value were 1
    assert any("is taken as 1" in note for note in report.notes)


def test_cuda_graphs_are_told_by_mode(mlp):
    default = predict(mlp, meta(ROWS, WIDTH))
    assert not default.cuda_graphs.used
    assert "mode='reduce-overhead'" in default.cuda_graphs.text
    asked = predict(mlp, meta(ROWS, WIDTH), mode="reduce-overhead")
    assert asked.cuda_graphs.used
    assert "CUDA graph: yes" in asked.verdict


def test_small_batches_are_launch_bound_and_large_ones_are_not(mlp):
    small, large = (predict(mlp, meta(rows, WIDTH)) for rows in (16, 65536))
    assert "mode='reduce-overhead'" in small.verdict
    assert "launch-bound" in {item.topic for item in small.advice}
    assert "launch-bound" not in {item.topic for item in large.advice}
    # 16 rows stay in the L2 cache; what fusing saves there is small, and it says so.
    cached = next(item for item in small.breaks if item.saved)
    assert cached.saved_us < 0.1


def test_an_odd_inner_dimension_comes_first():
    weight = meta(1024, 479)
    report = predict(lambda x, w: F.linear(x, w).relu(), meta(ROWS, 479), weight)
    assert "pad K=479" in report.verdict
    assert "alignment" in {item.code for item in report.breaks}


def test_where_there_is_no_gpu_it_says_that_it_predicted(monkeypatch, mlp):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = fusedcuda.report(mlp, meta(ROWS, WIDTH))
    assert not report.measured
    assert (
        report.notes[0] == "There is no GPU here, so nothing was measured: this is offline='h200'."
    )
    assert not any("There is no GPU here" in note for note in predict(mlp, meta(8, WIDTH)).notes)


def test_progress_is_told(mlp):
    said: list[str] = []
    predict(mlp, meta(ROWS, WIDTH), progress=said.append)
    assert said[0] == "tracing the model"
    assert "trying fusedcuda.linear_act" in said


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"offline": "b900"}, ValueError, "offline: expected one of 'h200', found 'b900'"),
        ({"offline": "h200", "mode": "fast"}, ValueError, "mode: expected one of default"),
        ({"offline": "h200", "backward": True}, ValueError, "requires a gradient"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        fusedcuda.report(torch.relu, meta(8), **arguments)


def test_what_is_not_a_model():
    with pytest.raises(TypeError, match="expected a model or function, found int"):
        fusedcuda.report(3, offline="h200")


def test_a_torch_without_one_of_the_hooks_is_named(monkeypatch):
    from torch._inductor.scheduler import BaseSchedulerNode

    monkeypatch.delattr(BaseSchedulerNode, "get_read_write_buffer_accesses")
    with pytest.raises(
        adapter.FormatNotRecognised, match=r"get_read_write_buffer_accesses is miss"
    ):
        predict(torch.relu, meta(8))


def test_pretending_ends_with_its_block():
    triton = has_triton()
    before = torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_properties
    with adapter.pretend_cuda(H200):
        assert torch.cuda.get_device_name() == "NVIDIA H200"
        has_triton()  # which remembers its answer
    now = torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_properties
    assert now == before
    assert has_triton() == triton


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch is built with CUDA")
def test_without_a_cuda_build_it_says_what_it_needs():
    with pytest.raises(RuntimeError, match="a torch built with CUDA is needed"):
        predict(lambda x: F.dropout(x, 0.1), meta(ROWS, WIDTH))
