"""What `fusedcuda.explain` says of rope; it needs no GPU. The plans: test_rope_plan.py."""

import pytest
import torch
from layouts import shifted
from ropes import bhsd, random_tables

from fusedcuda import explain, rope, rope_

BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("rope")


def operands(d: int = 64, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    q, k = bhsd(2, 8, 16, d, dtype=dtype), bhsd(2, 2, 16, d, dtype=dtype)
    return q, k, *random_tables(16, d)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_one_kernel_moves_everything_once(backward):
    q, k, cos, sin = operands()
    explanation = explain(rope, q, k, cos, sin, backward=backward)
    assert (explanation.function, explanation.kernels) == ("rope", 1)
    assert explanation.bytes_moved == 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
    assert (explanation.plan["path"], explanation.plan["vec"]) == ("vector", 8)
    assert "q, k: 16-byte vectors" in str(explanation)


def test_why_it_goes_element_by_element():
    q, k, cos, sin = operands()
    for arguments, why in (
        (operands(dtype=torch.float64), "float64 has no other kernel"),
        (operands(d=72), "half a head, 36 elements, is not whole vectors of 8"),
        ((shifted(q, 1), k, cos, sin), "q, k, cos or sin is strided along the head, or its rows"),
    ):
        explanation = explain(rope, *arguments)
        assert (explanation.plan["path"], explanation.plan["vec"]) == ("scalar", 1)
        assert f"q, k: element by element: {why}" in str(explanation)


def test_tables_that_are_converted_are_copies():
    q, k, cos, sin = operands()
    explanation = explain(rope, q, k, cos.half(), sin.half())
    assert explanation.plan["copies"] == ["cos", "sin"]
    assert explanation.kernels == 3
    assert "cos: converted first, as there is no kernel for torch.float16" in str(explanation)


def test_in_place_the_operands_are_the_outputs():
    """A part of each head keeps the stride of the whole one, which a new output would not."""
    q, k, cos, sin = operands(d=72)
    q, k, cos, sin = q[..., :64], k[..., :64], cos[:, :64].clone(), sin[:, :64].clone()
    assert explain(rope_, q, k, cos, sin).plan["path"] == "vector"
    odd = torch.empty(2, 8, 16, 65, dtype=BF16)[..., :64]
    assert explain(rope_, odd, k, cos, sin).plan["path"] == "scalar"
    with pytest.raises(RuntimeError, match=r"^rope_: records no gradient,"):
        explain(rope_, q, k, cos, sin, backward=True)


def test_what_the_call_refuses_explain_refuses():
    q, k, cos, sin = operands()
    for function, arguments, message in (
        (rope, (q, k, cos), "^explain: rope: missing"),
        (rope, (q, k.float(), cos, sin), "^rope: k must be"),
        (rope, (q, k, cos[:3], sin), "^rope: cos must have shape"),
        (rope, (q, k, cos, sin.requires_grad_()), "^rope: sin requires a gradient"),
        (rope_, (q[:1].expand_as(q), k, cos, sin), "^rope_: q is expanded"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            explain(function, *arguments)


def test_nothing_to_do():
    explanation = explain(rope, *(x[:0] for x in operands()[:2]), *random_tables(16, 64))
    assert (explanation.plan["path"], explanation.kernels) == ("empty", 0)
    assert explanation.bytes_moved == 0
