"""What linear_cross_entropy asks of cuBLASLt: products into given memory, or added to it."""

import pytest
import torch
from fake_layer import FakeLayer
from linear_operands import (
    LAYOUTS,
    ON_BIAS_ROWS,
    PLAIN,
    TOLERANCE,
    check,
    column_major,
    kernels,
    pitched,
    random,
    shifted,
)

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("pitch", [0, 8, 3])
def test_product(layer: FakeLayer, pitch: int, adds: bool, dtype: torch.dtype) -> None:
    a, b = random(24, 32, dtype=dtype), random(40, 32, dtype=dtype)
    before = random(24, 40, dtype=dtype)
    output = pitched(before, pitch) if pitch else before.clone()
    steps = layer.product(output, a, b, adds=adds)
    check(output, a.double() @ b.double().mT + (before.double() if adds else 0))
    assert kernels(steps) == [PLAIN]
    assert steps[0]["what"] == "output"


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_layouts_are_read_in_place(layer: FakeLayer, b_layout: str, a_layout: str) -> None:
    """The gradient of x reads the weight by its columns, that of the weight both factors."""
    a, b = LAYOUTS[a_layout](random(17, 24)), LAYOUTS[b_layout](random(16, 24))
    for dtype in (torch.bfloat16, torch.float32):
        output = torch.zeros(17, 16, dtype=dtype)
        for times in (1, 2):
            steps = layer.product(output, a, b, adds=times > 1)
            check(output, times * (a.double() @ b.double().mT))
            assert kernels(steps) == [PLAIN]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_sum_in_float32_is_not_rounded_to_16_bits(layer: FakeLayer, dtype: torch.dtype) -> None:
    """256 + 1 + 1 ... stays at 256 in bfloat16, 2048 + 1 + 1 ... at 2048 in float16."""
    one = torch.ones(8, 1, dtype=dtype)
    wide, narrow = (torch.full((8, 8), 2048.0, dtype=kind) for kind in (torch.float32, dtype))
    for _ in range(3):
        layer.product(wide, one, one, adds=True)
        layer.product(narrow, one, one, adds=True)
    assert torch.equal(wide, torch.full_like(wide, 2051))
    assert torch.equal(narrow, torch.full_like(narrow, 2048))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_bias_in_the_epilogue_where_rows_are_aligned(
    layer: FakeLayer, dtype: torch.dtype
) -> None:
    a, b, bias = random(24, 32, dtype=dtype), random(40, 32, dtype=dtype), random(40, dtype=dtype)
    output = torch.full((24, 40), torch.nan, dtype=dtype)
    steps = layer.product(output, a, b, bias)
    check(output, a.double() @ b.double().mT + bias.double())
    assert kernels(steps) == ["BIAS"]


@pytest.mark.parametrize("classes", [7, 13, 41])
def test_a_bias_of_an_odd_vocabulary_is_in_the_rows_before(layer: FakeLayer, classes: int) -> None:
    """The rows of logits are padded, but their number of classes is not a multiple of 8."""
    a, b, bias = random(24, 32), random(classes, 32), random(classes)
    output = torch.full((24, 48), torch.nan).bfloat16()[:, :classes]
    steps = layer.product(output, a, b, bias)
    check(output, a.double() @ b.double().mT + bias.double())
    assert kernels(steps) == ON_BIAS_ROWS
    assert "multiples of 16 bytes" in steps[0]["why"]
    assert kernels(layer.product(output, a, b)) == [PLAIN]


def test_a_misaligned_bias_is_copied(layer: FakeLayer) -> None:
    a, b, bias = random(24, 32), random(40, 32), shifted(random(40))
    output = torch.full((24, 40), torch.nan).bfloat16()
    assert kernels(layer.product(output, a, b, bias)) == ["cudaMemcpyAsync", "BIAS"]
    check(output, a.double() @ b.double().mT + bias.double())


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("refusal", [FakeLayer.without_algorithm, FakeLayer.fails_when_run])
def test_torch_multiplies_where_cublaslt_does_not(
    layer: FakeLayer, refusal, adds: bool, output_dtype: torch.dtype
) -> None:
    refusal(layer, "DEFAULT")
    a, b = column_major(random(24, 32)), column_major(random(40, 32))
    before = random(24, 40, dtype=output_dtype)
    output = before.clone()
    steps = layer.product(output, a, b, adds=adds)
    check(output, a.double() @ b.double().mT + (before.double() if adds else 0))
    assert kernels(steps) == ["torch.matmul"]


def test_a_plan_is_found_once_for_each_kind_of_chunk(layer: FakeLayer) -> None:
    """The last chunk has fewer rows; the others, and the next call's, search for nothing."""
    weight = random(40, 32)
    for _ in range(3):
        for rows in (24, 24, 24, 8):
            x = random(rows, 32)
            logits = torch.empty(rows, 40).bfloat16()
            dweight = torch.zeros(40, 32)
            layer.product(logits, x, weight)
            layer.product(dweight, logits.t(), x.t(), adds=True)
    assert layer.searches() == 4
