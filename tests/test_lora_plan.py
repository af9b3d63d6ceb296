"""What the lora family would launch, by its plans; it needs the compiled family but no GPU."""

import json
from typing import Any

import layouts
import pytest
import torch
from torch import Tensor

BF16 = torch.bfloat16
H200_SMS = 132
SHARED_OF_SM = 228 << 10
_ops = torch.ops.fusedcuda


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("lora")


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def down(x: Tensor, factor: Tensor) -> dict[str, Any]:
    return json.loads(_ops.lora_down_plan(x, factor, None, 1.0, 0.0, H200_SMS))


def up(x: Tensor, rank: int, t: Tensor | None = None) -> dict[str, Any]:
    t = empty(x.shape[0], -(-rank // 8) * 8, dtype=x.dtype) if t is None else t
    return json.loads(_ops.lora_up_plan(t, x, None, rank, 0.0, False, True, H200_SMS))


def bytes_of_x_in_flight(plan: dict[str, Any]) -> int:
    """On an SM: all stages of its blocks but the one that is worked on."""
    resident = min(SHARED_OF_SM // (plan["shared_bytes"] + 1024), -(-plan["blocks"] // H200_SMS))
    return resident * 3 * plan["rows_of_stage"] * plan["columns_of_stage"] * 2


@pytest.mark.parametrize("factor_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [1, 16, 64])
@pytest.mark.parametrize("rows", [2048, 4096, 8192, 65536])
def test_enough_is_on_its_way(rows, rank, factor_dtype):
    """More than the 30 KB an SM that hide the latency of memory, in one pass over x."""
    x = empty(rows, 4096)
    for factor in (empty(rank, 4096, dtype=factor_dtype), empty(4096, rank, dtype=factor_dtype).T):
        plan = down(x, factor)
        assert bytes_of_x_in_flight(plan) > 36_000
        assert plan["blocks"] >= 0.9 * H200_SMS
        assert plan["chunks"] == 1
        # The factor is not read more than x.
        assert factor[:, 0].numel() * factor.itemsize <= 4 * plan["rows_of_stage"]
    assert bytes_of_x_in_flight(up(x, rank)) > 36_000


def test_many_rows_are_one_kernel():
    for rank in (1, 16, 64):
        plan = down(empty(8192, 4096), empty(rank, 4096))
        assert (plan["blocks"], plan["splits"], plan["workspace"]) == (128, 1, 0)
    assert down(empty(2048, 4096), empty(16, 4096))["splits"] == 1
    assert down(empty(2048, 4096), empty(64, 4096))["splits"] == 8  # rather than the factor often


def test_few_rows_are_split_over_the_card():
    for rows in (1, 16):
        plan = down(empty(rows, 4096), empty(16, 4096))
        assert (plan["blocks"], plan["splits"]) == (32, 32)  # parts of 128 columns
        assert plan["workspace"] == 32 * rows * 16
    assert down(empty(16, 65536), empty(16, 65536))["blocks"] == 2 * H200_SMS


@pytest.mark.parametrize("rank", [65, 128, 200, 512])
def test_ranks_beyond_64_are_passes(rank):
    assert down(empty(8192, 4096), empty(rank, 4096))["chunks"] == -(-rank // 64)
    assert up(empty(8192, 4096), rank)["chunks"] == -(-rank // 64)


def test_alignment():
    x, factor = empty(64, 128), empty(16, 128)
    assert (down(x, factor)["vec"], down(x, factor)["factor_aligned"]) == (8, True)
    assert down(empty(64, 100)[:, :96], empty(16, 96))["vec"] == 1  # a pitch of 200 bytes
    assert down(empty(64, 479), empty(16, 479))["vec"] == 1
    assert down(layouts.shifted(x, 1), factor)["vec"] == 1
    assert not down(x, empty(128, 5).T)["factor_aligned"]
    assert down(x, empty(128, 12, dtype=torch.float32).T)["factor_aligned"]
    assert down(empty(64, 136)[:, :128], factor)["vec"] == 8
    # Of one row the stride says nothing.
    assert down(empty(1, 128).expand(1, 128), empty(1, 128))["factor_aligned"]


def test_copies():
    x, factor = empty(64, 128), empty(16, 128)
    assert down(x, factor)["copies"] == []
    assert down(layouts.spread(x), factor)["copies"] == ["x"]
    assert down(layouts.transposed(x), factor)["copies"] == ["x"]
    assert up(layouts.spread(x), 16)["copies"] == ["x"]


def test_empty():
    assert down(empty(0, 128), empty(16, 128))["path"] == "empty"
    assert up(empty(16, 0), 16)["path"] == "empty"
    assert up(empty(0, 128), 16)["splits"] == 0  # zeros are written


def test_parts_of_the_rows_are_as_many_as_there_is_room_for():
    for columns in (4096, 14336):
        plan = up(empty(8192, columns), 16)
        panels = -(-columns // 128)
        assert plan["splits"] == 2 * H200_SMS // panels
        assert plan["workspace"] == plan["splits"] * 16 * columns


# ---- lora_product --------------------------------------------------------------------------------


def product(m: int, n: int, k: int, rank: int, by_columns: bool = False, **fields: Any) -> str:
    """The plan's text; the operands may be given otherwise."""
    pitch = -(-rank // 8) * 8
    given = {
        "x": empty(m, k),
        "weight": empty(k, n).T if by_columns else empty(n, k),
        "bias": None,
        "down": empty(rank, k),
        "up": empty(pitch, n).T if by_columns else empty(n, pitch),
    }
    return _ops.lora_product_plan(*(given | fields).values(), 2.0, H200_SMS)


def test_the_layer_in_one_launch_fills_the_card():
    for by_columns in (False, True):
        plan = json.loads(product(8192, 4096, 4096, 16, by_columns))
        assert plan["blocks"] == H200_SMS
        assert (plan["tile_rows"], plan["tile_columns"], plan["cluster"]) == (128, 256, 2)
        assert (plan["m"], plan["n"], plan["k"], plan["rank"]) == (8192, 4096, 4096, 16)


def test_where_the_layer_is_one_launch():
    for rank in (1, 8, 9, 16):
        assert product(300, 136, 72, rank)
    assert product(300, 136, 72, 16, bias=empty(136))
    for without in (
        product(300, 136, 72, 17),
        product(300, 136, 68, 16),
        product(300, 132, 72, 16),
        product(300, 136, 72, 16, down=layouts.shifted(empty(16, 72), 1)),
        product(300, 136, 72, 16, up=layouts.transposed(empty(136, 16))),
        product(300, 136, 72, 16, bias=empty(272)[::2]),
    ):
        assert without == ""


def test_operands_of_one_launch_that_do_not_go_together():
    for fields, message in (
        ({"x": empty(300)}, r"x must be a matrix \(M, K\); got shape \(300,\)"),
        ({"weight": empty(136, 64)}, r"weight must have shape \(136, 72\); got \(136, 64\)"),
        ({"down": empty(16, 64)}, r"down must have shape \(16, 72\); got \(16, 64\)"),
        ({"up": empty(136, 8)}, r"up must have shape \(136, 16\); got \(136, 8\)"),
        ({"bias": empty(72)}, r"bias must have shape \(136,\); got \(72,\)"),
        ({"up": empty(136, 16, dtype=torch.float16)}, "up must have the dtype of x"),
    ):
        with pytest.raises(RuntimeError, match=f"lora_product: {message}"):
            product(300, 136, 72, 16, **fields)


# ---- lora_decode ---------------------------------------------------------------------------------


def decode(m: int, n: int, k: int, rank: int, dtype: torch.dtype = BF16, **fields: Any) -> str:
    """The plan's text; the operands may be given otherwise."""
    given = {
        "x": empty(m, k, dtype=dtype),
        "weight": empty(n, k, dtype=dtype),
        "bias": None,
        "down": empty(rank, k, dtype=dtype),
        "up": empty(n, -(-rank // 8) * 8, dtype=dtype),
    }
    return _ops.lora_decode_plan(*(given | fields).values(), 2.0, 0, H200_SMS)


@pytest.mark.parametrize(
    ("shape", "cluster", "blocks", "tiles"),
    [
        # A block on each SM that has a place in a cluster.
        ((16, 4096, 4096), 4, 116, 9),
        ((1, 4096, 4096), 4, 116, 9),
        ((32, 4096, 4096), 4, 116, 9),
        ((16, 1024, 4096), 4, 88, 3),
        ((16, 14336, 4096), 4, 120, 30),
        # Few columns: fewer blocks share them.
        ((16, 4096, 1024), 2, 128, 4),
        ((16, 4096, 256), 1, 128, 2),
        # More than the shared memory of four blocks holds of x.
        ((32, 4096, 14336), 8, 120, 18),
    ],
    ids=str,
)
def test_few_rows_fill_the_card(shape, cluster, blocks, tiles):
    plan = json.loads(decode(*shape, 16))
    found = [plan[name] for name in ("cluster", "blocks", "tiles")]
    assert found == [cluster, blocks, tiles]
    assert plan["tiles_at_a_time"] >= tiles
    assert plan["shared_bytes"] <= 195 << 10


def test_many_rows_of_the_weight_are_added_up_in_groups():
    plan = json.loads(decode(16, 128256, 4096, 16))
    assert plan["tiles"] == 268
    assert plan["tiles_at_a_time"] == 30 * 4


def test_where_few_rows_are_one_launch():
    for m in (1, 32):
        for rank in (1, 8, 9, 64):
            assert decode(m, 136, 72, rank)
    assert decode(5, 133, 72, 16, torch.float16, bias=empty(133, dtype=torch.float16))
    for without in (
        decode(33, 136, 72, 16),
        decode(5, 136, 72, 65),
        decode(5, 136, 68, 16),
        decode(5, 136, 72, 16, torch.float32),
        decode(5, 136, 72, 16, weight=layouts.transposed(empty(136, 72)), up=empty(16, 136).T),
        decode(5, 136, 72, 16, down=layouts.shifted(empty(16, 72), 1)),
        decode(5, 136, 72, 16, up=layouts.shifted(empty(136, 16), 1)),
        decode(5, 136, 72, 16, bias=empty(272)[::2]),
        decode(32, 4096, 65536, 64),  # x does not fit into the shared memory of a cluster
    ):
        assert without == ""


def test_operands_of_few_rows_that_do_not_go_together():
    with pytest.raises(RuntimeError, match=r"lora_decode: up must have shape \(136, 16\)"):
        decode(5, 136, 72, 16, up=empty(136, 8))
    with pytest.raises(RuntimeError, match="lora_decode: activation must be a code"):
        _ops.lora_decode_plan(
            empty(5, 72), empty(136, 72), None, empty(8, 72), empty(136, 8), 1.0, 99, H200_SMS
        )


# ---- lora_pass -----------------------------------------------------------------------------------


def one_pass(
    x: Tensor,
    rank: int,
    down: bool = True,
    up: bool = True,
    factor: Tensor | None = None,
    seed: Tensor | None = None,
    num_sms: int = H200_SMS,
) -> str:
    """The plan's text; what the factor is may be given otherwise."""
    pitch, columns = -(-rank // 8) * 8, x.shape[1]
    if factor is None and down:
        factor = empty(columns, pitch).T if up else empty(rank, columns)
    t = empty(x.shape[0], pitch, dtype=x.dtype) if up else None
    return _ops.lora_pass_plan(x, factor, t, seed, rank, 1.0, 0.5, True, False, num_sms)


def test_a_pass_fills_the_card():
    for rows in (2048, 8192):
        for rank in (1, 16, 17, 64):
            for down, up in ((True, True), (True, False), (False, True)):
                plan = json.loads(one_pass(empty(rows, 4096), rank, down, up))
                assert plan["blocks"] == H200_SMS
                assert (plan["tile_rows"], plan["tile_columns"]) == (64, 256)
    assert json.loads(one_pass(empty(300, 264), 8, up=False))["blocks"] == 5 * 2


def test_lines_of_a_pass_and_their_parts():
    """A sum for each line that a block has tiles of; of both, `down` leaves one for each line."""
    x, rows, columns = empty(8192, 4096), 8192, 4096
    plan = json.loads(one_pass(x, 16))
    assert (plan["line_width"], plan["lines"]) == (512, 8)
    assert plan["workspace"] == 16 * (8 * rows + (8 + H200_SMS) * 512)
    plan = json.loads(one_pass(x, 24))
    assert (plan["line_width"], plan["lines"]) == (256, 16)
    assert plan["workspace"] == 24 * (16 * rows + (16 + H200_SMS) * 256)
    plan = json.loads(one_pass(x, 16, down=False))
    assert (plan["line_width"], plan["lines"]) == (256, columns // 256)
    assert plan["workspace"] == 16 * (16 + H200_SMS) * 256
    plan = json.loads(one_pass(x, 16, up=False))
    assert (plan["line_width"], plan["lines"]) == (64, rows // 64)
    assert plan["workspace"] == 16 * (128 + H200_SMS) * 64


def test_where_there_is_no_pass():
    x, seed = empty(300, 264), torch.zeros(1, dtype=torch.int64)
    assert one_pass(x, 8)
    assert one_pass(x, 8, up=False, seed=seed)
    assert one_pass(empty(300, 272)[:, :264], 8)
    assert one_pass(empty(1, 264).expand(1, 264), 8)
    assert one_pass(x, 1, up=False, factor=empty(1, 300)[:, :264])
    for text in (
        one_pass(x, 8, seed=seed),
        one_pass(x, 65),
        one_pass(empty(300, 260), 8),
        one_pass(layouts.shifted(x, 1), 8),
        one_pass(empty(1, 264).expand(300, 264), 8),
        one_pass(x, 8, factor=empty(8, 264)),
        one_pass(x, 8, up=False, factor=empty(264, 8).T),
        one_pass(x, 8, up=False, factor=layouts.shifted(empty(8, 264), 1)),
        one_pass(empty(0, 264), 8),
    ):
        assert text == ""
