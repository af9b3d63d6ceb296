"""Plans of single products: the cache, choices, threads, and which library is used."""

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from fake_kernels import Operands, Problem, address
from fake_layer import EPILOGUES, FakeLayer

from bench import probe

BF16, E4M3, COMPUTE_32F = 14, 28, 68


def make_problem(m: int = 8, n: int = 16, k: int = 32, **changes: int) -> Problem:
    values = {
        **{"m": m, "n": n, "k": k, "batch": 1, "a_stride": k, "b_stride": k, "output_stride": n},
        **{"a_k_is_inner": 1, "b_k_is_inner": 1, "type": BF16, "output_type": BF16},
        **{"compute": COMPUTE_32F, "epilogue": EPILOGUES["DEFAULT"]},
        **dict.fromkeys(["a_alignment", "b_alignment", "c_alignment", "output_alignment"], 16),
    }
    return Problem(**{**values, **changes})


def product(layer: FakeLayer, problem: Problem) -> tuple[int | None, torch.Tensor, torch.Tensor]:
    """(status, output, what it should be)"""
    a = torch.randn(problem.m, problem.k).bfloat16()
    b = torch.randn(problem.n, problem.k).bfloat16()
    output = a.new_full((problem.m, problem.n), torch.nan)
    status = layer.matmul(problem, Operands(a=address(a), b=address(b), output=address(output)))
    return status, output, (a.double() @ b.double().T).bfloat16()


def test_a_product(layer: FakeLayer) -> None:
    status, output, expected = product(layer, make_problem())
    assert status == 0
    torch.testing.assert_close(output, expected)


def test_a_hit_does_not_search(layer: FakeLayer) -> None:
    for _ in range(3):
        product(layer, make_problem())
    assert layer.searches() == 1
    product(layer, make_problem(m=9))
    assert layer.searches() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"k": 16},
        {"a_stride": 40},
        {"a_alignment": 2},
        {"epilogue": EPILOGUES["RELU"]},
        {"low_precision_reduction": 1},
        {"device": 1},
    ],
    ids=str,
)
def test_everything_is_part_of_the_key(layer: FakeLayer, change: dict[str, int]) -> None:
    for problem in (make_problem(), make_problem(**change)) * 2:
        layer.candidate(problem)
    assert layer.searches() == 2


def test_a_hit_is_cheap(layer: FakeLayer) -> None:
    problem = make_problem()
    layer.find_again(problem, 1)
    count, best = 20_000, float("inf")
    for _ in range(5):
        started = time.perf_counter()
        layer.find_again(problem, count)
        best = min(best, (time.perf_counter() - started) / count)
    assert best < 1e-6


def test_no_algorithm_is_remembered(layer: FakeLayer) -> None:
    layer.without_algorithm("DEFAULT")
    for _ in range(2):
        assert product(layer, make_problem())[0] is None
    assert layer.searches() == 1


def test_the_least_recent_plan_goes(libraries) -> None:
    layer = FakeLayer(*libraries, capacity=3)
    problems = [make_problem(m=m) for m in (1, 2, 3)]
    for problem in problems:
        product(layer, problem)
    product(layer, problems[0])  # makes m=2 the least recent
    product(layer, make_problem(m=4))
    assert layer.size() == 3
    searches = layer.searches()
    product(layer, problems[0])
    assert layer.searches() == searches
    product(layer, problems[1])
    assert layer.searches() == searches + 1
    layer.close()


def test_a_choice_replaces_the_recommendation(layer: FakeLayer) -> None:
    problem = make_problem()
    assert layer.candidate(problem) == 0
    layer.choose(problem, 2)
    assert layer.candidate(problem) == 2
    status, output, expected = product(layer, problem)
    assert status == 0
    torch.testing.assert_close(output, expected)
    assert layer.candidate(make_problem(device=3)) == 2  # on every device
    assert layer.candidate(make_problem(m=9)) == 0
    layer.choose(problem, -1)
    assert layer.candidate(problem) == 0


def test_many_threads(libraries) -> None:
    """Plans are made, used and evicted by all of them; each has addresses of its own."""
    layer = FakeLayer(*libraries, capacity=4)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(150):
            m = (seed + i) % 6 + 1
            status, output, expected = product(layer, make_problem(m=m))
            if status != 0 or not torch.allclose(output, expected, rtol=1e-2, atol=1e-2):
                wrong.append(f"m={m}: status {status}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    layer.close()


def test_threads_with_one_plan_keep_their_biases(layer: FakeLayer) -> None:
    wrong: list[int] = []

    def work(value: int) -> None:
        bias = torch.full((16,), float(value)).bfloat16()
        zeros = torch.zeros(16, 32).bfloat16()
        output = torch.empty(8, 16).bfloat16()
        problem = make_problem(epilogue=EPILOGUES["BIAS"])
        operands = Operands(
            a=address(zeros), b=address(zeros), output=address(output), bias=address(bias)
        )
        for _ in range(200):
            layer.matmul(problem, operands)
            if not bool((output == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("output_type", [BF16, E4M3])
def test_scaled_factors(layer: FakeLayer, output_type: int) -> None:
    a = torch.randn(8, 32).to(torch.float8_e4m3fn)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn)
    bias = torch.randn(16).bfloat16()
    scales = [torch.tensor(value) for value in (0.5, 4.0, 0.25)]
    eight = output_type == E4M3
    output = torch.zeros(8, 16, dtype=torch.float8_e4m3fn if eight else torch.bfloat16)
    problem = make_problem(
        type=E4M3,
        output_type=output_type,
        epilogue=EPILOGUES["RELU_BIAS"],
        scaled_factors=1,
        scaled_output=int(eight),
    )
    status = layer.matmul(
        problem,
        Operands(
            **{"a": address(a), "b": address(b), "output": address(output), "bias": address(bias)},
            a_scale=address(scales[0]),
            b_scale=address(scales[1]),
            output_scale=address(scales[2]) if eight else None,
        ),
    )
    assert status == 0
    z = 0.5 * a.double() @ (4.0 * b.double()).T + bias.double()
    expected = torch.relu(z) * (0.25 if eight else 1.0)
    tolerance = 0.07 if eight else 0.01
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=0.02)


def test_the_probe_names_problems_as_the_kernels_do(layer: FakeLayer) -> None:
    problem = probe.make_problem("bfloat16", "DEFAULT", (8, 16, 32))
    status, output, expected = product(
        layer, Problem.from_buffer_copy(bytes.fromhex(problem.to_hex()))
    )
    assert status == 0
    torch.testing.assert_close(output, expected)


def test_tiles_have_the_names_of_the_header(layer: FakeLayer, cublaslt_header: Path) -> None:
    enumerators = re.findall(r"CUBLASLT_MATMUL_TILE_(\d+x\d+) = (\d+)", cublaslt_header.read_text())
    assert len(enumerators) > 100
    name = ctypes.create_string_buffer(100)
    for expected, number in enumerators:
        layer.entry.name_tile(int(number), name, ctypes.c_size_t(len(name)))
        # Later ones than of cuBLAS 13.0 have their number.
        assert name.value.decode() in (expected, f"number {number}")
        assert int(number) > 600 or name.value.decode() == expected


_WHICH = """
import ctypes, sys
if sys.argv[2] == "torch":
    import torch
entry = ctypes.CDLL(sys.argv[1])
entry.version.restype = ctypes.c_size_t
print(entry.version())
"""


def test_it_is_the_library_of_torch(entry_library: Path) -> None:
    """Found by its name alone, because torch has loaded it."""
    if torch.version.cuda is None:
        pytest.skip("torch is a CPU-only build")
    environment = {k: v for k, v in os.environ.items() if k != "FUSEDCUDA_CUBLASLT"}
    result = subprocess.run(
        [sys.executable, "-c", _WHICH, str(entry_library), "torch"],
        env={**environment, "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    version = int(result.stdout)
    assert version // 10000 == int(torch.version.cuda.split(".")[0])
