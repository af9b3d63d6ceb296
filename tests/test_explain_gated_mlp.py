"""What `fusedcuda.explain` says of gated_mlp; it needs no GPU."""

from collections.abc import Callable, Iterator

import pytest
import torch
from layouts import shifted, transposed
from torch import Tensor

from fusedcuda import explain, gated_mlp

BF16 = torch.bfloat16
M, K, F = 8192, 512, 1408
X, HIDDEN, DOWN = M * K * 2, M * F * 2, K * F * 2  # bytes; the output is as large as x


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    for family in ("gated_mlp", "linear_act", "pointwise"):
        load_family(family)


@pytest.fixture
def use() -> Iterator[Callable[[str], str]]:
    """Called in a test, it forces a path until the test's end."""
    before = torch.ops.fusedcuda.gated_mlp_use("auto")
    yield torch.ops.fusedcuda.gated_mlp_use
    torch.ops.fusedcuda.gated_mlp_use(before)


@pytest.fixture(autouse=True)
def hopper():
    before = torch.ops.fusedcuda.linear_act_use("hopper")
    yield
    torch.ops.fusedcuda.linear_act_use(before)


def operands(
    m: int = M, k: int = K, f: int = F, packed: bool = True, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor], Tensor]:
    packed_weight = torch.empty(2 * f, k, dtype=dtype)
    gate, up = packed_weight.chunk(2)
    w_gate_up = packed_weight if packed else (gate, up)
    return torch.empty(m, k, dtype=dtype), w_gate_up, torch.empty(k, f, dtype=dtype)


def operators(explanation) -> list[str]:
    return [launch["op"] for launch in explanation.launches]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_one_product_for_gate_and_up(packed):
    x, w_gate_up, w_down = operands(packed=packed)
    forward = explain(gated_mlp, x, w_gate_up, w_down)
    assert (forward.function, forward.kernels) == ("gated_mlp", 2)
    assert operators(forward) == ["gated_product", "linear_act"]
    assert forward.bytes_moved == 2 * X + 3 * DOWN + 2 * HIDDEN
    assert forward.plan["saves"] is False
    kept = explain(gated_mlp, x, w_gate_up, w_down.requires_grad_())
    assert kept.bytes_moved == forward.bytes_moved + 2 * HIDDEN
    assert kept.plan["saves"] is True
    with torch.no_grad():
        assert str(explain(gated_mlp, x, w_gate_up, w_down)) == str(forward)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_backward(packed, recompute):
    backward = explain(gated_mlp, *operands(packed=packed), backward=True, recompute=recompute)
    of_x = "linear_act" if packed else "linear_act_extended"
    of_weights = ["linear_act_backward"] * (2 if packed else 3)
    expected = ["linear_act", "act_mul_packed", of_x, *of_weights]
    assert operators(backward) == expected
    # Each product reads its factors and writes its result; the pass between them is 5 M F, or 6.
    products = (X + DOWN + HIDDEN) + (2 * HIDDEN + 2 * DOWN + X)
    products += 2 * HIDDEN + (1 if packed else 2) * X + 2 * DOWN + (X + HIDDEN + DOWN)
    assert backward.bytes_moved == products + (6 if recompute else 5) * HIDDEN
    assert ("what was not kept" in str(backward)) == recompute
    assert ("1408 more products in each sum" in str(backward)) != packed


def test_paths(use):
    """h, and unless they are fused gate and up, are written and read; x is read once or twice."""
    linear, product = "linear_act", "linear_act_product_"
    apart = [linear, linear, "act_mul", linear]
    apart_kept = [product, product, "act_mul_packed", linear]
    concatenated = [linear, "act_mul_packed", linear]
    for path, packed, keeps, expected, reads_of_x, passes in (
        ("fused", True, False, ["gated_product", linear], 1, 2),
        ("apart", True, False, apart, 2, 6),
        ("apart", True, True, apart_kept, 2, 6),
        ("concatenated", True, False, concatenated, 1, 6),
        ("concatenated", True, True, concatenated, 1, 6),
        ("concatenated", False, False, apart, 2, 6),
        ("decode", True, False, apart, 2, 6),
    ):
        use(path)
        x, w_gate_up, w_down = operands(packed=packed)
        explanation = explain(gated_mlp, x, w_gate_up, w_down.requires_grad_(keeps))
        assert operators(explanation) == expected, (path, packed, keeps)
        assert explanation.bytes_moved == (reads_of_x + 1) * X + 3 * DOWN + passes * HIDDEN


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_are_one_launch(rows):
    x, w_gate_up, w_down = operands(rows)
    forward = explain(gated_mlp, x, w_gate_up, w_down)
    assert operators(forward) == ["gated_mlp_decode"]
    assert forward.kernels == 1
    assert forward.bytes_moved == 2 * x.nbytes + 3 * DOWN
    assert "all three products in one launch" in str(forward)
    w_down.requires_grad_()
    kept = explain(gated_mlp, x, w_gate_up, w_down)
    assert operators(kept) == ["linear_act", "act_mul_packed", "linear_act"]


def test_why_there_is_no_kernel():
    for rows, op in ((M, "gated_product"), (8, "gated_mlp_decode")):
        text = str(explain(gated_mlp, *operands(rows, k=K + 1)))
        assert f"{op}: has no kernel for these operands; it needs a Hopper GPU" in text
        x, w_gate_up, w_down = operands(rows)
        assert "has no kernel" in str(explain(gated_mlp, shifted(x, 1), w_gate_up, w_down))
        assert "has no kernel" not in str(explain(gated_mlp, x, w_gate_up, w_down))
    assert "has no kernel" not in str(explain(gated_mlp, *operands(dtype=torch.float32)))


def test_copies():
    x, w_gate_up, w_down = operands()
    plain = explain(gated_mlp, x, w_gate_up, w_down)
    copied = explain(gated_mlp, transposed(x), w_gate_up, w_down)
    assert copied.kernels == plain.kernels + 1
    assert copied.bytes_moved == plain.bytes_moved + 2 * X
    assert "copied first, so that the elements of a row lie side by side" in str(copied)
    for_each_row = explain(gated_mlp, x.view(2, M // 2, K), w_gate_up, w_down)
    assert for_each_row.kernels == plain.kernels


def test_nothing_to_do():
    assert explain(gated_mlp, *operands(0)).kernels == 0
    assert explain(gated_mlp, *operands(0)).bytes_moved == 0


def test_it_refuses_what_the_call_would_refuse():
    x, w_gate_up, w_down = operands()
    with pytest.raises(ValueError, match=r"^gated_mlp: w_down must have shape \(N, 1408\)"):
        explain(gated_mlp, x, w_gate_up, w_down.T)
    with pytest.raises(TypeError, match=r"^gated_mlp: w_gate_up must be a tensor or a pair"):
        explain(gated_mlp, x, (w_gate_up,), w_down)
    with pytest.raises(ValueError, match=r"^gated_mlp: activation must be one of"):
        explain(gated_mlp, x, w_gate_up, w_down, "swish")
