"""What the dlrm family would launch, by its plans; it needs the compiled family but no GPU."""

import json
from typing import Any

import pytest
import torch
from layouts import pitched, shifted, spread
from torch import Tensor

BF16 = torch.bfloat16
H200_SMS = 132
SHARED_OF_SM = 228 << 10


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("dlrm")


# ---- Interaction ---------------------------------------------------------------------------------


def vectors(
    count: int, columns: int, batch: int = 64, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(batch, columns, dtype=dtype),
        torch.empty(batch, count - 1, columns, dtype=dtype),
    )


def interaction(
    dense: Tensor, embeddings: Tensor, pad: int = 8, backward: bool = False
) -> dict[str, Any]:
    count = embeddings.shape[1] + 1
    width = -(-(dense.shape[1] + count * (count - 1) // 2) // pad) * pad
    plan = torch.ops.fusedcuda.dot_interaction_plan
    return json.loads(plan(dense, embeddings, False, width, backward, H200_SMS))


both_ways = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@both_ways
def test_dtypes(backward):
    for dtype, path, vec in (
        (BF16, "tensor_cores", 8),
        (torch.float16, "tensor_cores", 8),
        (torch.float32, "threads", 4),
        (torch.float64, "threads", 2),
    ):
        plan = interaction(*vectors(27, 128, dtype=dtype), backward=backward)
        assert (plan["path"], plan["vec"], plan["row_vec"]) == (path, vec, vec)


@both_ways
def test_enough_is_on_its_way(backward):
    """Of a large batch: more than the 30 KB an SM that hide the latency of memory (27 x 16: 20 KB,
    measured as fast as twice that), in so many warps that while some wait the others compute."""
    for columns, least in ((128, 120_000), (64, 80_000), (16, 20_000)):
        plan = interaction(*vectors(27, columns, 65536), backward=backward)
        assert plan["blocks"] % H200_SMS == 0
        blocks_of_sm = plan["blocks"] // H200_SMS
        assert blocks_of_sm * (plan["shared_bytes"] + 1024) <= SHARED_OF_SM
        warps = blocks_of_sm * plan["threads"] // 32
        assert warps >= 20
        assert warps * plan["stages"] * 27 * columns * 2 >= least


@both_ways
@pytest.mark.parametrize("count", [1, 2, 27, 32, 33, 64])
@pytest.mark.parametrize("columns", [8, 16, 128, 256])
def test_blocks_fit_any_gpu(columns, count, backward):
    """99 KB of shared memory are what the smallest has; a sample is in one warp at a time."""
    for batch in (1, 7, 131, 65536):
        for dtype in (BF16, torch.float32, torch.float64):
            plan = interaction(*vectors(count, columns, batch, dtype), backward=backward)
            assert 32 <= plan["threads"] <= 256
            assert plan["threads"] % 32 == 0
            warps = plan["threads"] // 32
            of_one = plan["shared_bytes"] // (warps if plan["path"] == "tensor_cores" else 1)
            assert of_one <= 99 << 10
            assert 1 <= plan["blocks"] <= batch


def test_few_samples_are_spread_over_the_gpu():
    for batch in (1, 128, 132, 264, 500):
        plan = interaction(*vectors(27, 16, batch))
        assert plan["blocks"] >= min(batch, H200_SMS)


def test_whatever_is_not_aligned_goes_element_by_element():
    dense, embeddings = vectors(9, 32)
    assert interaction(dense, embeddings)["vec"] == 8
    for change in (pitched, lambda x: shifted(x, 1)):
        assert interaction(change(dense), embeddings)["vec"] == 1
        assert interaction(dense, change(embeddings))["vec"] == 1
    assert interaction(*vectors(9, 31))["vec"] == 1
    assert interaction(dense, embeddings, pad=1)["row_vec"] == 1
    assert interaction(dense, embeddings, pad=1)["vec"] == 8
    # The stride of one sample, or of one vector, is never used.
    one = torch.empty(1, 33, dtype=BF16)[:, :32]
    assert interaction(one, torch.empty(1, 1, 33, dtype=BF16)[..., :32])["vec"] == 8
    stacked = torch.empty(64, 12, 32, dtype=BF16)
    assert interaction(stacked[:, 0], stacked[:, 3:])["vec"] == 8


def test_copies():
    dense, embeddings = vectors(9, 32)
    assert interaction(dense, embeddings)["copies"] == []
    assert interaction(spread(dense), embeddings)["copies"] == ["dense"]
    assert interaction(dense, spread(embeddings))["copies"] == ["embeddings"]


def test_no_samples():
    assert interaction(*vectors(9, 32, 0))["path"] == "empty"


# ---- Interaction of rows of a table --------------------------------------------------------------


def lookup(
    dense: Tensor, weight: Tensor, indices: Tensor, backward: bool = False
) -> dict[str, Any]:
    count = indices.shape[1] + 1
    width = -(-(dense.shape[1] + count * (count - 1) // 2) // 8) * 8
    plan = torch.ops.fusedcuda.embedding_interaction_plan
    return json.loads(plan(dense, weight, indices, False, width, backward, H200_SMS))


def rows_of_a_table(
    count: int, columns: int, batch: int = 64, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    indices = torch.zeros(batch, count - 1, dtype=torch.int64)
    return torch.empty(batch, columns, dtype=dtype), torch.empty(9, columns, dtype=dtype), indices


@both_ways
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64], ids=str)
def test_a_lookup_is_launched_as_the_interaction_of_what_it_gives(dtype, backward):
    for count, columns in ((27, 128), (27, 16), (64, 256), (5, 13), (1, 8)):
        for batch in (0, 7, 65536):
            plan = lookup(*rows_of_a_table(count, columns, batch, dtype), backward=backward)
            expected = interaction(*vectors(count, columns, batch, dtype), backward=backward)
            suffix = "_backward" if backward else ""
            assert plan.pop("op") == f"embedding_interaction{suffix}"
            assert expected.pop("op") == f"dot_interaction{suffix}"
            assert plan == expected


def test_a_table_that_is_not_aligned_goes_element_by_element():
    dense, weight, indices = rows_of_a_table(9, 32)
    assert lookup(dense, weight, indices)["vec"] == 8
    for change in (pitched, lambda x: shifted(x, 1)):
        assert lookup(change(dense), weight, indices)["vec"] == 1
        assert lookup(dense, change(weight), indices)["vec"] == 1
        assert lookup(dense, weight, change(indices))["vec"] == 8
    assert lookup(dense, spread(weight), indices)["copies"] == ["weight"]
    assert lookup(dense, weight, spread(indices))["copies"] == []


# ---- Gradient of a table -------------------------------------------------------------------------


def table_gradient(
    items: int, rows: int, columns: int = 16, dtype: torch.dtype = BF16, num_sms: int = H200_SMS
) -> dict[str, Any]:
    """What of the tensors matters is their layout, so they need not be there."""
    grad = torch.empty(items, columns, dtype=dtype, device="meta")
    indices = torch.empty(items, dtype=torch.int64, device="meta")
    plan = torch.ops.fusedcuda.embedding_dense_backward_plan
    return json.loads(plan(grad, indices, rows, num_sms))


def test_passes_cover_the_bits_of_the_rows():
    for rows, passes, bits in (
        (1, 1, 1), (2, 1, 1), (512, 1, 9), (513, 2, 5), (260_000, 2, 9), (1 << 18, 2, 9),
        ((1 << 18) + 1, 3, 7), (26_000_000, 3, 9), (1 << 31, 4, 8),
    ):  # fmt: skip
        plan = table_gradient(1000, rows)
        assert (plan["path"], plan["passes"], plan["digit_bits"]) == ("sorted", passes, bits)


def test_levels_leave_two_sums_a_piece():
    for items, levels in ((1, 1), (64, 1), (65, 2), (2048, 2), (2049, 3), (1_703_936, 4)):
        plan = table_gradient(items, 260_000)
        assert plan["levels"] == levels
        assert plan["launches"] == 3 * plan["passes"] + levels
    assert table_gradient((1 << 31) - 1, 100, 1)["levels"] == 6


def test_the_order_of_a_sum_does_not_depend_on_the_gpu():
    for items in (0, 5000, 1_703_936):
        plans = [table_gradient(items, 260_000, num_sms=sms) for sms in (1, 78, 132)]
        assert plans[0] == plans[1] == plans[2]


def test_what_is_too_large_to_be_sorted_is_torchs():
    for items, rows, path in (
        ((1 << 31) - 1, 1 << 31, "sorted"), (1 << 31, 1 << 31, "torch"),
        (5, (1 << 31) + 1, "torch"), (0, 5, "zeros"), (0, 0, "empty"),
    ):  # fmt: skip
        plan = table_gradient(items, rows, 1)
        assert plan["path"] == path
        assert (plan["workspace_bytes"] > 0) == (path == "sorted")
    assert table_gradient(5, 9, 0)["path"] == "empty"


def test_rows_of_a_gradient_in_vectors():
    for columns, dtype, vec in (
        (16, BF16, 8), (24, BF16, 8), (12, BF16, 1), (12, torch.float32, 4), (16, torch.float64, 1)
    ):  # fmt: skip
        plan = table_gradient(100, 9, columns, dtype)
        assert plan["vec"] == vec
        assert 1 <= plan["threads"] <= 64
        assert plan["threads"] * plan["column_tiles"] * vec >= columns
    grad, indices = torch.empty(9, 16), torch.zeros(9, dtype=torch.int64)
    plan = torch.ops.fusedcuda.embedding_dense_backward_plan
    for given, copies in (
        ((spread(grad), indices), ["grad"]),
        ((grad, spread(indices)), ["indices"]),
    ):
        assert json.loads(plan(*given, 9, H200_SMS))["copies"] == copies
    assert json.loads(plan(shifted(grad, 1), indices, 9, H200_SMS))["vec"] == 1


# ---- Head ----------------------------------------------------------------------------------------


def head(x: Tensor, weight: Tensor, mask: int = 0, reduction: int = 1) -> dict[str, Any]:
    plan = torch.ops.fusedcuda.linear_sigmoid_bce_plan
    return json.loads(plan(x, weight, reduction, mask, H200_SMS))


def rows(batch: int, columns: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return torch.empty(batch, columns, dtype=dtype), torch.empty(1, columns, dtype=dtype)


@pytest.mark.parametrize("mask", [0, 7], ids=["forward", "backward"])
def test_vectors_of_the_head(mask):
    for dtype, path, vec in (
        (BF16, "vector", 8),
        (torch.float32, "vector", 4),
        (torch.float64, "vector", 1),
    ):
        plan = head(*rows(100, 256, dtype), mask)
        assert (plan["path"], plan["vec"]) == (path, vec)
    x, weight = rows(100, 256)
    for given in (shifted(x, 1), pitched(x), rows(100, 255)[0]):
        assert head(given, weight[:, : given.shape[1]], mask)["path"] == "scalar"
    # The backward reads the weight once a thread, one by one.
    assert head(x, shifted(weight, 1), mask)["path"] == ("vector" if mask else "scalar")


@pytest.mark.parametrize("mask", [0, 7], ids=["forward", "backward"])
@pytest.mark.parametrize("columns", [1, 8, 256, 1000, 5000])
def test_blocks_of_the_head(columns, mask):
    for batch in (0, 1, 33, 65536):
        plan = head(*rows(batch, columns), mask)
        assert 1 <= plan["blocks"] <= 3 * H200_SMS
        assert plan["threads"] == 256


def test_partial_sums():
    x, weight = rows(65536, 256)
    assert head(x, weight, reduction=0)["workspace"] == 0
    forward = head(x, weight)
    assert forward["workspace"] == forward["blocks"]
    for mask, sums in ((1, 0), (2, 256), (4, 1), (7, 257)):
        plan = head(x, weight, mask)
        assert plan["workspace"] == sums * plan["blocks"]


# ---- The binding's own checks --------------------------------------------------------------------


def test_the_binding_names_what_is_wrong():
    dense, embeddings = vectors(4, 8)
    for name, given in (
        ("dense", (dense.long(), embeddings)),
        ("dense", (dense[None], embeddings)),
        ("embeddings", (dense, embeddings.half())),
        ("embeddings", (dense, embeddings[:3])),
        ("embeddings", (dense, embeddings[..., :7])),
        ("embeddings", (dense, embeddings.to("meta"))),
        ("vectors", vectors(4, 257)),
        ("there may be", vectors(65, 8)),
    ):
        with pytest.raises(RuntimeError, match=rf"^dot_interaction: {name} "):
            interaction(*given)
    dense, table, indices = rows_of_a_table(4, 8)
    for name, given in (
        ("dense", (dense.long(), table, indices)),
        ("weight", (dense, table.half(), indices)),
        ("weight", (dense, table[:, :7], indices)),
        ("weight", (dense, table[:0], indices)),
        ("weight", (dense, table.to("meta"), indices)),
        ("indices", (dense, table, indices.short())),
        ("indices", (dense, table, indices[:3])),
        ("indices", (dense, table, indices.to("meta"))),
        ("there may be", (dense, table, indices[:, :1].expand(64, 64))),
    ):
        with pytest.raises(RuntimeError, match=rf"^embedding_interaction: {name} "):
            lookup(*given)
    x, weight = rows(4, 8)
    for name, given in (
        ("x", (x.long(), weight)),
        ("x", (x[:, :0], weight)),
        ("weight", (x, weight.half())),
        ("weight", (x, weight[:, :7])),
        ("weight", (x, weight.view(8, 1))),
        ("weight", (x, weight.to("meta"))),
    ):
        with pytest.raises(RuntimeError, match=rf"^linear_sigmoid_bce: {name} "):
            head(*given)
