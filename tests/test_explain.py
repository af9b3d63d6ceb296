"""What `fusedcuda.explain` says a pointwise call would launch; it needs no GPU, but a compiler."""

import inspect
import itertools

import pytest
import torch
from layouts import pitched, shifted, transposed
from reference import ACT_MUL_PACKED, BROADCASTING, OPS, Op, by_name

import fusedcuda
from fusedcuda import _build


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("pointwise")


def explain(op: Op, *operands, backward: bool = False):
    return fusedcuda.explain(getattr(fusedcuda, op.name), *operands, backward=backward)


# The output is the last tensor of a forward.
def access(op: Op, *operands) -> list[str]:
    return explain(op, *operands).plan["access"]


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float64, 1), (torch.float32, 4), (torch.float16, 8), (torch.bfloat16, 8)],
    ids=str,
)
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_vectors_of_sixteen_bytes(op, dtype, width):
    """Full operands, also with an odd number of elements and in a transposed layout."""
    for shape in ((64, 256), (5, 33), (1,), (1_000_003,)):
        operands = op.random_operands(*shape, dtype=dtype)
        assert explain(op, *operands).plan["vec"] == width
        assert set(access(op, *operands)) == {"vector" if width > 1 else "element"}
    operands = [transposed(x) for x in op.random_operands(6, 7, dtype=dtype)]
    assert explain(op, *operands).plan["vec"] == width


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_every_kind_of_operand(op):
    """One operand without a 16-byte access does not cost the others theirs."""
    first, *others = op.random_operands(64, 256)
    for other, kind, path in (
        (torch.randn(256), "vector", "broadcast"),
        (torch.randn(1, 256), "vector", "broadcast"),
        (torch.randn(64, 1), "splat", "broadcast"),
        (0.5, "number", "linear"),
        (torch.tensor(0.5), "number", "linear"),
        (torch.randn(64, 256), "vector", "linear"),
        (torch.randn(64, 1).expand(64, 256), "splat", "broadcast"),
        (torch.randn(256, 3)[:, 1], "element", "flat"),
        (transposed(torch.randn(64, 256)), "element", "flat"),
        (pitched(torch.randn(64, 256)), "unaligned", "flat"),  # rows off the boundary
        (shifted(torch.randn(64, 256), 1), "unaligned", "flat"),
        (torch.randn(64, 264)[:, 4:260], "vector", "broadcast"),  # rows on it
        (shifted(torch.randn(64, 256), 4), "vector", "linear"),
    ):
        plan = explain(op, first, *(other for _ in others)).plan
        assert plan["access"] == ["vector", *(kind for _ in others), "vector"]
        assert plan["vec"] == 4
        assert plan["path"] == path


@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_rows_of_an_odd_size(op):
    """What is contiguous goes in vectors; what repeats along the rows is read by elements."""
    first, *others = op.random_operands(64, 257)
    for other, kind in (
        (torch.randn(257), "unaligned"),
        (torch.randn(64, 1), "element"),
        (shifted(torch.randn(64, 257), 1), "unaligned"),
        (torch.randn(64, 258)[:, :257], "unaligned"),
    ):
        plan = explain(op, first, *(other for _ in others)).plan
        assert plan["path"] == "flat"
        assert plan["access"] == ["vector", *(kind for _ in others), "vector"]


def test_results_that_are_not_contiguous_are_written_by_elements():
    """The halves of a packed gradient whose rows are off the boundary; gradients beside sums."""
    (packed,) = explain(ACT_MUL_PACKED, torch.randn(64, 2 * 33), backward=True).launches
    x, bias = torch.randn(64, 257), torch.randn(257)
    (summed,) = fusedcuda.explain(fusedcuda.bias_act, x, bias, backward=True).launches
    for launch, path in ((packed, "broadcast"), (summed, "columns")):
        assert launch["path"] == path
        assert launch["vec"] == 1
        assert set(launch["access"]) <= {"unaligned", "absent"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_grid_covers_every_element(dtype):
    """Neither too few threads, nor more than a block of them to spare."""
    sizes = (*range(1, 70), 255, 1023, 4095, 4097, 65_537, 1_000_003)
    for size, offset in itertools.product(sizes, (0, 1)):
        x = shifted(torch.zeros(size, dtype=dtype), offset)
        plan = fusedcuda.explain(fusedcuda.add_relu, x, 1.0).plan
        per_block = plan["threads"] * plan["vec"]
        assert plan["blocks"][0] * per_block >= size
        assert (plan["blocks"][0] - 1) * per_block < size


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_nothing_is_launched_for_an_empty_tensor(op):
    for shape in ((0,), (3, 0, 16), (0, 5)):
        assert explain(op, *op.random_operands(*shape)).plan["path"] == "empty"


@pytest.mark.parametrize(
    ("vector", "kind"),
    [
        ((16,), "columns"),
        ((1, 1, 1, 16), "columns"),
        ((12, 16), "columns"),
        ((3, 4, 12, 1), "rows"),
        ((3, 1, 1, 1), "rows"),
        ((4, 1, 1), "rows"),
        ((), "total"),
        ((1,), "total"),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", BROADCASTING, ids=by_name)
def test_gradients_are_summed_inside_the_backward(op, vector, kind):
    operands = op.random_operands(3, 4, 12, 16)
    operands[-1] = torch.randn(vector)
    (launch,) = explain(op, *operands, backward=True).launches
    assert launch["gradients"][0] == "full"
    assert launch["gradients"][-1] == kind
    assert launch["workspace"] > 0
    full = explain(op, *op.random_operands(3, 4, 12, 16), backward=True)
    assert [launch["workspace"] for launch in full.launches] == [0]


def test_two_sums_over_different_dimensions_take_two_launches():
    x, row, column = torch.randn(64, 256), torch.randn(256), torch.randn(64, 1)
    both = fusedcuda.explain(fusedcuda.act_scale_bias, x, row, row.clone(), backward=True)
    assert both.plan["gradients"] == ["full", "columns", "columns"]
    assert len(both.launches) == 1
    different = fusedcuda.explain(fusedcuda.act_scale_bias, x, row, column, backward=True)
    kinds = [[k for k in launch["gradients"] if k != "none"] for launch in different.launches]
    assert sorted(itertools.chain.from_iterable(kinds)) == ["columns", "full", "rows"]


def test_summands_share_one_gradient():
    """add_relu(a, b) sends the same gradient to both: it is written once."""
    a, b = torch.randn(2, 64, 256)
    plan = fusedcuda.explain(fusedcuda.add_relu, a, b, backward=True).plan
    assert plan["gradients"] == ["full", "none"]


def test_the_packed_form_reads_its_halves_in_place():
    gate_up = torch.randn(64, 2 * 128)
    forward = explain(ACT_MUL_PACKED, gate_up)
    assert forward.plan["access"] == ["vector", "vector", "vector"]
    (launch,) = explain(ACT_MUL_PACKED, gate_up, backward=True).launches
    assert launch["access"] == ["vector"] * 5
    odd = explain(ACT_MUL_PACKED, torch.randn(64, 2 * 33)).plan
    assert odd["access"] == ["unaligned", "unaligned", "vector"]


def test_bytes_moved():
    """Each tensor once, a broadcast operand with the bytes that it has."""
    x, row, half = torch.randn(64, 256), torch.randn(256), torch.randn(64, 256).bfloat16()
    full = x.nbytes
    for function, operands, forward, backward in (
        (fusedcuda.add_relu, (x, x), 3 * full, 2 * full + full),
        (fusedcuda.add_mul_act, (x, x, x), 4 * full, 4 * full + 2 * full),
        (fusedcuda.act_scale_bias, (x, row, row), 2 * full + 2048, 3 * full + 3 * 1024),
        (fusedcuda.bias_act, (x, 1.0), 2 * full, 3 * full),
        (fusedcuda.act_mul, (half, half), 3 * half.nbytes, 5 * half.nbytes),
        (fusedcuda.act_mul_packed, (x,), full + full // 2, full + full // 2 + full),
    ):
        assert fusedcuda.explain(function, *operands).bytes_moved == forward
        assert fusedcuda.explain(function, *operands, backward=True).bytes_moved == backward


def test_the_text_names_the_op_its_operands_and_how_they_are_read():
    x, bias = torch.randn(64, 256), torch.randn(256)
    text = str(fusedcuda.explain(fusedcuda.bias_act, x, bias, "gelu"))
    assert text.startswith("bias_act: 1 kernel")
    assert "x: 16-byte vectors" in text
    assert "bias: 16-byte vectors" in text
    text = str(
        fusedcuda.explain(fusedcuda.bias_act, x, bias=bias, activation="gelu", backward=True)
    )
    assert "gradient of bias: summed (columns)" in text


def test_what_the_call_refuses_explain_refuses():
    x = torch.randn(4, 8)
    for error, function, arguments, keywords, message in (
        (TypeError, torch.relu, (x,), {}, "explain: relu is not an operator of fusedcuda"),
        (TypeError, fusedcuda.add_relu, (x,), {}, "explain: add_relu: .*'b'"),
        (TypeError, fusedcuda.add_relu, (x.long(), x), {}, "^add_relu: a must be"),
        (TypeError, fusedcuda.add_relu, (x, x, "relu"), {}, "add_relu"),
        (TypeError, fusedcuda.add_relu, (x, x), {"scale": 1.0}, "scale"),
        (ValueError, fusedcuda.add_relu, (x, x[:3]), {}, "^add_relu: shapes"),
        (ValueError, fusedcuda.bias_act, (x, 1.0, "swish"), {}, "^bias_act: activation .*'swish'"),
        (ValueError, fusedcuda.act_mul_packed, (x[:, :7],), {}, "^act_mul_packed: .*even"),
    ):
        with pytest.raises(error, match=message):
            fusedcuda.explain(function, *arguments, **keywords)


def test_every_function_of_every_family_is_explained():
    public = [getattr(fusedcuda, name) for name in fusedcuda.__all__]
    functions = [f for f in public if inspect.isfunction(f)]
    operators = [f for f in functions if f.__module__.startswith("fusedcuda.ops.")]
    assert {f.__module__.split(".")[-1] for f in operators} == set(_build.FAMILIES)
    for function in operators:
        with pytest.raises(TypeError, match=f"^explain: {function.__name__}: missing"):
            fusedcuda.explain(function)


def test_a_rest_behind_the_vectors_is_counted():
    x = torch.randn(1027)
    repeated = torch.randn(1).expand(1027)
    explanation = fusedcuda.explain(fusedcuda.add_mul_act, x, repeated, x, "relu")
    assert (explanation.plan["rest"], explanation.kernels) == (3, 2)
    assert "the last 3 element(s): one by one, by a second kernel" in str(explanation)
    assert fusedcuda.explain(fusedcuda.add_relu, x, x).kernels == 1
    assert fusedcuda.explain(fusedcuda.add_relu, x[:0], x[:0]).kernels == 0
