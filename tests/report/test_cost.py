"""The model: what bounds a kernel, what the L2 cache holds, and what it was measured against."""

from dataclasses import replace

import pytest
import torch

from fusedcuda.report.cost import COMPUTE, HBM, L2, SPECIAL, START, predict, totals
from fusedcuda.report.device import H200
from fusedcuda.report.kernels import Launch

MB = 10**6


def launch(reads: dict[str, int], writes: dict[str, int], **fields) -> Launch:
    kind = fields.pop("kind", "pointwise")
    return Launch(0, "forward", "k", kind, ("add",), (1,), "bfloat16", reads, writes, **fields)


def test_time_is_bytes_over_the_speed_of_a_copy_plus_a_start():
    (cost,) = predict([launch({"x": 400 * MB}, {"y": 450 * MB})], H200)
    assert cost.us == pytest.approx(H200.launch_us + 850 / H200.copy_tb_s)
    assert cost.bound == HBM


def test_what_was_just_written_is_read_from_the_cache_if_it_fits():
    small = [launch({"x": 8 * MB}, {"y": 8 * MB}), launch({"y": 8 * MB}, {"z": MB})]
    first, second = predict(small, H200)
    assert (first.l2, second.l2, second.hbm) == (0, 8 * MB, MB)
    assert second.bound == START  # 8 MB are read in less than a launch takes

    large = [launch({}, {"y": 60 * MB}), launch({"y": 60 * MB}, {})]
    assert predict(large, H200)[1].l2 == 0

    between = [*small[:1], launch({"w": 45 * MB}, {}), small[1]]
    assert predict(between, H200)[2].l2 == 0

    warm = [launch({}, {"y": 30 * MB}), launch({"y": 30 * MB}, {})]
    assert predict(warm, H200)[1].bound == L2


def test_buffers_of_two_graphs_with_one_name_are_two():
    first = launch({}, {"buf0": 8 * MB})
    assert predict([first, replace(first, graph=1, reads={"buf0": 8 * MB})], H200)[1].l2 == 0


def test_a_kernel_full_of_exponentials_is_bound_by_them():
    elements = 100 * MB
    slow = launch({"x": 2 * elements}, {"y": 2 * elements}, special=8 * elements)
    (cost,) = predict([slow], H200)
    assert cost.bound == SPECIAL
    assert cost.us == pytest.approx(H200.launch_us + 8 * elements / H200.special_t_s / 1e6)


@pytest.mark.parametrize(
    ("m", "n", "k", "measured"),
    [
        (8192, 4096, 4096, 400),
        (8192, 14336, 4096, 1430),
        (8192, 4096, 1024, 110),
        (8192, 3072, 768, 66),
        (65536, 1024, 480, 127),
    ],
)
def test_matmuls_take_what_they_were_measured_to_take(m, n, k, measured):
    reads, writes = {"a": 2 * m * k, "b": 2 * n * k}, {"c": 2 * m * n}
    (cost,) = predict([launch(reads, writes, kind="matmul", flops=2 * m * n * k)], H200)
    assert cost.bound == COMPUTE
    assert cost.us == pytest.approx(measured, rel=0.05)


def test_a_matmul_with_a_short_inner_dimension_is_bound_by_memory():
    m, n, k = 65536, 512, 16
    reads, writes = {"a": 2 * m * k, "b": 2 * n * k}, {"c": 2 * m * n}
    (cost,) = predict([launch(reads, writes, kind="matmul", flops=2 * m * n * k)], H200)
    assert cost.bound == HBM


@pytest.mark.parametrize(("rows", "columns", "measured"), [(65536, 4096, 281), (4096, 65536, 374)])
def test_a_norm_in_two_passes_takes_what_it_was_measured_to_take(rows, columns, measured):
    size = 2 * rows * columns
    norm = launch({"x": size}, {"y": size}, kind="reduction", passes=2)
    (cost,) = predict([replace(norm, shape=(rows, columns))], H200)
    assert cost.us == pytest.approx(measured, rel=0.15)


def test_float32_matmuls_use_tf32_only_where_torch_does():
    reads, writes = {"a": 4 * 4096**2, "b": 4 * 4096**2}, {"c": 4 * 4096**2}
    matmul = replace(launch(reads, writes, kind="matmul", flops=2 * 4096**3), dtype="float32")
    (plain,) = predict([matmul], H200)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        (fast,) = predict([matmul], H200)
    finally:
        torch.set_float32_matmul_precision(before)
    assert plain.us > 5 * fast.us


def test_totals_overlap_host_and_gpu():
    launches = [launch({"x": MB}, {"y": MB})] * 4
    total = totals(launches, predict(launches, H200), host_us=100.0)
    assert (total.kernels, total.bytes, total.host_us) == (4, 8 * MB, 400.0)
    assert total.step_us == 400.0 > total.gpu_us
