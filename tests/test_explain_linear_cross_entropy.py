"""What `fusedcuda.explain` says of linear_cross_entropy; it needs no GPU."""

import pytest
import torch
from layouts import spread

from fusedcuda import explain, linear_cross_entropy
from fusedcuda.ops._linear_cross_entropy_chunks import Problem

BF16 = torch.bfloat16
ROWS, CLASSES, FEATURES = 1000, 50_257, 512


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("linear_act")
    load_family("cross_entropy")


def operands(dtype=BF16, requires_grad=True):
    return (
        torch.empty(ROWS, FEATURES, dtype=dtype, requires_grad=requires_grad),
        torch.empty(CLASSES, FEATURES, dtype=dtype, requires_grad=requires_grad),
        torch.zeros(ROWS, dtype=torch.int64),
    )


def test_chunks_and_their_memory():
    explanation = explain(linear_cross_entropy, *operands(), chunk=256)
    text = str(explanation)
    peak = Problem(ROWS, FEATURES, CLASSES, BF16, True, 0b011).peak_bytes(256) / 1e6
    assert f"3 chunk(s) of 256 rows; {peak:.0f} MB at most beside the operands" in text
    assert "1 chunk(s) of 232 rows" in text
    assert text.count("logits: ") == 2
    assert "loss, and over the logits their gradient: a row is read once" in text
    assert "gradient of weight, added up in float32" in text
    assert "rounded to 16 bits" in text
    times = [launch["times"] for launch in explanation.launches]
    assert times == [1, 3, 3, 3, 1, 2, 1, 1, 1, 1, 1, 1]
    # Logits: written, read and overwritten, read twice; of dweight one chunk adds to nothing. The
    # products that make dweight see seven classes more, whose logits are zeros, written once.
    weight, dweight = CLASSES * FEATURES * 2, CLASSES * FEATURES * 4
    logits, x = ROWS * CLASSES * 2, ROWS * FEATURES * 2
    even, zeros = CLASSES + 7, 256 * 7 * 2
    products = (x + 4 * weight + logits) + (logits + 4 * weight + x)
    products += ROWS * even * 2 + x + 7 * even * FEATURES * 4
    assert explanation.bytes_moved == products + 2 * logits + weight + dweight + zeros


def test_one_chunk_needs_no_sum():
    for accumulate in ("fp32", "weight"):
        text = str(explain(linear_cross_entropy, *operands(), chunk=ROWS, accumulate=accumulate))
        assert "1 chunk(s) of 1000 rows" in text
        assert "added" not in text
    text = str(explain(linear_cross_entropy, *operands(), chunk=500, accumulate="weight"))
    assert "added to those of the chunks before" in text
    assert "float32" not in text


def test_without_a_gradient_logits_are_only_read():
    for given in (operands(), operands(requires_grad=False)):
        with torch.no_grad():
            explanation = explain(linear_cross_entropy, *given, chunk=ROWS)
        text = str(explanation)
        assert "loss: a row is read once" in text
        assert "gradient" not in text
        weight, logits, x = CLASSES * FEATURES * 2, ROWS * CLASSES * 2, ROWS * FEATURES * 2
        assert explanation.bytes_moved == x + weight + 2 * logits


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_the_backward_hands_out_what_the_forward_made(dtype):
    for reduction in ("mean", "sum"):
        explanation = explain(
            linear_cross_entropy, *operands(dtype), reduction=reduction, backward=True
        )
        assert explanation.kernels == 2
        assert explanation.bytes_moved == 0
        assert "nothing is moved where the incoming one is 1" in str(explanation)


@pytest.mark.parametrize(("dtype", "reduction"), [(BF16, "none"), (torch.float16, "mean")])
def test_the_backward_makes_the_logits_again(dtype, reduction):
    x, weight, target = operands(dtype)
    bias = torch.empty(CLASSES, dtype=dtype)
    given = (x, weight, target, bias)
    forward = explain(linear_cross_entropy, *given, reduction=reduction, chunk=ROWS)
    assert "loss: a row is read once" in str(forward)
    assert "gradient" not in str(forward)
    backward = explain(linear_cross_entropy, *given, reduction=reduction, chunk=ROWS, backward=True)
    text = str(backward)
    assert "logits: " in text
    assert "gradient of the logits, over them" in text
    assert "gradient of bias: torch.sum in float32" in text


def test_a_bias_of_an_odd_vocabulary_says_why_it_is_apart():
    x, weight, target = (t.detach() for t in operands())
    before = torch.ops.fusedcuda.linear_act_use("cublaslt")
    try:
        text = str(explain(linear_cross_entropy, x, weight, target, weight[:, 0].contiguous()))
    finally:
        torch.ops.fusedcuda.linear_act_use(before)
    assert "bias apart, because a bias in the epilogue is exact only where rows start" in text


@pytest.mark.parametrize("backend", ["hopper", "cublaslt"])
def test_whose_products(backend):
    """Our own have neither a transposed first factor nor a sum to add to."""
    before = torch.ops.fusedcuda.linear_act_use(backend)
    try:
        explanation = explain(linear_cross_entropy, *operands(), chunk=ROWS)
    finally:
        torch.ops.fusedcuda.linear_act_use(before)
    kernels = [
        launch["steps"][-1]["kernel"] for launch in explanation.launches if "steps" in launch
    ]
    ours = "linear_act_kernel_sm90" if backend == "hopper" else "cublasLtMatmul"
    assert kernels == [ours, ours, "cublasLtMatmul"]


def test_what_has_to_be_copied():
    x, weight, target = operands(requires_grad=False)
    assert "copied" not in str(
        explain(linear_cross_entropy, x, weight.t().contiguous().t(), target)
    )
    text = str(explain(linear_cross_entropy, spread(x), weight, target))
    assert "x: copied first" in text
    assert "weight: copied" not in text


def test_no_rows_and_what_the_call_itself_would_refuse():
    x, weight, target = operands()
    assert "there are no rows" in str(explain(linear_cross_entropy, x[:0], weight, target[:0]))
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: chunk must be at least one row"):
        explain(linear_cross_entropy, x, weight, target, chunk=0)
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: target must have shape"):
        explain(linear_cross_entropy, x, weight, target[1:])
