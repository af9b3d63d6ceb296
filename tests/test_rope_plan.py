"""What rope would launch, by `rope_plan`; it needs the compiled family but no GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
from layouts import pitched, shifted, spread
from ropes import bhsd, bshd, packed, random_tables
from torch import Tensor

BF16 = torch.bfloat16
H200_SMS = 132


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("rope")


def plan(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> dict:
    return json.loads(torch.ops.fusedcuda.rope_plan(q, k, cos, sin, interleaved, H200_SMS))


def plan_of(layout, b: int, heads: tuple[int, int], s: int, d: int, dtype=BF16) -> dict:
    q, k = (layout(b, h, s, d, make=torch.empty, dtype=dtype) for h in heads)
    return plan(q, k, torch.empty(s, d), torch.empty(s, d))


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float64, 1), (torch.float32, 4), (torch.float16, 8), (BF16, 8)],
    ids=str,
)
def test_vectors_of_sixteen_bytes(dtype, width):
    for layout in (bhsd, bshd, packed):
        for d in (2 * width, 6 * width, 128):
            chosen = plan_of(layout, 2, (4, 2), 5, d, dtype)
            assert (chosen["vec"], chosen["columns"]) == (width, d // 2 // width)


def test_whatever_is_not_aligned_takes_the_scalar_path():
    aligned = [bhsd(2, 4, 5, 32, dtype=BF16), bhsd(2, 2, 5, 32, dtype=BF16)]
    aligned += random_tables(5, 32)
    assert plan(*aligned)["path"] == "vector"
    for change in (pitched, spread, lambda x: shifted(x, 1)):
        for position in range(4):
            operands = list(aligned)
            operands[position] = change(operands[position])
            assert plan(*operands)["path"] == "scalar"
    for d in (6, 24, 72):
        assert plan_of(bhsd, 2, (4, 2), 5, d)["path"] == "scalar"


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_fresh_tables_are_always_aligned_enough(dtype, interleaved):
    """Half-width rows of 16-bit tables are 12 bytes at d = 24 of float32, for one."""
    for table_dtype in (torch.float64, torch.float32, torch.float16, BF16):
        for d in (16, 24, 48, 80, 96):
            if d // 2 % (16 // dtype.itemsize) != 0:
                continue
            q = bhsd(1, 2, 3, d, dtype=dtype)
            for width in (d, d // 2):
                tables = random_tables(3, width, dtype=table_dtype)
                assert plan(q, q, *tables, interleaved)["path"] == "vector"


def test_rows_of_a_block_are_neighbours_in_memory():
    for layout, inside in ((bhsd, "positions"), (bshd, "heads")):
        chosen = plan_of(layout, 4, (32, 8), 4096, 128)
        assert chosen["inside"] == inside
        assert chosen["tile"][inside] * 256 == 2048  # bytes in one stretch
        assert chosen["threads"] == 256
    # One position, or one head: the other is inside whatever the strides are.
    assert plan_of(bhsd, 4, (32, 8), 1, 128)["inside"] == "heads"
    assert plan_of(bshd, 4, (1, 1), 64, 128)["inside"] == "positions"


def test_heads_are_divided_only_to_fill_the_gpu():
    """A thread that takes several heads reads the tables once for all of them."""
    large = plan_of(bhsd, 4, (32, 8), 4096, 128)
    assert large["heads_per_block"] == 40
    assert large["blocks"][0] == 4 * 4096 // large["tile"]["positions"]
    small = plan_of(bhsd, 1, (32, 8), 256, 128)
    assert small["heads_per_block"] == small["tile"]["heads"]


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (32, 8), (33, 1), (7, 0), (200, 100)])
@pytest.mark.parametrize("d", [2, 6, 64, 80, 128, 1000, 6000, 20000])
def test_blocks_cover_everything_once(d, heads):
    for layout in (bhsd, bshd):
        for b, s in ((1, 1), (5, 1), (3, 50)):
            chosen = plan_of(layout, b, heads, s, d)
            tile = chosen["tile"]
            positions = -(-b * s // tile["positions"])
            groups, rest = divmod(chosen["blocks"][0], positions)
            assert rest == 0
            assert (groups - 1) * chosen["heads_per_block"] < sum(heads)
            assert groups * chosen["heads_per_block"] >= sum(heads)
            assert chosen["heads_per_block"] % tile["heads"] == 0
            assert (chosen["blocks"][1] - 1) * tile["columns"] < chosen["columns"]
            assert chosen["blocks"][1] * tile["columns"] >= chosen["columns"]
            assert 1 <= chosen["threads"] <= 256


def test_nothing_to_do():
    for shape in ((0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)):
        x = torch.empty(shape)
        assert plan(x, x, *random_tables(shape[2], 8))["path"] == "empty"


def test_the_binding_names_what_is_wrong():
    q = bhsd(2, 4, 5, 8)
    good = {"q": q, "k": q, "cos": torch.ones(5, 8), "sin": torch.ones(5, 8)}
    wrong = {
        "q": [q[0], q[..., :7], q.long()],
        "k": [q[..., :6], q.half(), q[:1], q.to("meta")],
        "cos": [torch.ones(4, 8), torch.ones(8), torch.ones(3, 5, 8), torch.ones(5, 8).long()],
        "sin": [torch.ones(5, 4), torch.ones(5, 8).half(), torch.ones(1, 5, 8)],
    }
    for name, tensors in wrong.items():
        for tensor in tensors:
            with pytest.raises(RuntimeError, match=rf"^rope: {name} "):
                plan(**{**good, name: tensor})


def test_printed_at_the_call():
    """FUSEDCUDA_PRINT_CONFIG is read once, so another process is asked."""
    program = (
        "import torch, fusedcuda; fusedcuda.load('rope'); x = torch.ones(1, 2, 3, 8);"
        "torch.ops.fusedcuda.rope_plan(x, x, x[0, 0], x[0, 0], False, 132)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "FUSEDCUDA_PRINT_CONFIG": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'fusedcuda: {"op": "rope", "path": "vector", "vec": 4' in run.stderr
