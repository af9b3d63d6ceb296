"""Reasons for a pair of kernels, by what they are; fixes for graph breaks, by what torch says."""

import pytest

from fusedcuda.report.breaks import fusion_breaks, graph_break, odd_dimensions
from fusedcuda.report.kernels import Launch
from fusedcuda.report.recording import Frame, RecordedGraph, Refusal

GRAPH = RecordedGraph("forward", "", ())
SIZE = 2 * 4096 * 2048


def launch(name: str, kind: str, reads: dict[str, int], writes: dict[str, int], **fields) -> Launch:
    shape = fields.pop("shape", (4096, 2048, 512) if kind == "matmul" else (4096 * 2048,))
    ops = fields.pop("ops", ("add",))
    return Launch(
        0, "forward", name, kind, ops, shape, "bfloat16", reads, writes, node=name, **fields
    )


def matmul(writes: str = "y", reads: str = "x") -> Launch:
    return launch(f"mm_{writes}", "matmul", {reads: SIZE}, {writes: SIZE}, ops=("matmul",))


def pointwise(reads: dict[str, int], **fields) -> Launch:
    return launch("pointwise", "pointwise", reads, {"z": SIZE}, **fields)


def code_of(*launches: Launch, graph: RecordedGraph = GRAPH) -> str:
    (found,) = fusion_breaks(launches, [graph])
    return found.code


def test_an_activation_after_a_matmul_could_be_its_epilogue():
    (found,) = fusion_breaks([matmul(), pointwise({"y": SIZE})], [GRAPH])
    assert found.code == "GEMM boundary"
    assert found.saved == found.bytes == 2 * SIZE
    assert "linear_act" in found.reason.fix


def test_what_others_read_too_is_written_in_any_case():
    launches = [matmul(), pointwise({"y": SIZE}), launch("r", "reduction", {"y": SIZE}, {})]
    first = next(item for item in fusion_breaks(launches, [GRAPH]) if item.consumer == 1)
    assert first.saved == SIZE
    kept = RecordedGraph("forward", "", (), outputs=("y",))
    assert fusion_breaks(launches[:2], [kept])[0].saved == SIZE


@pytest.mark.parametrize(
    "second",
    [
        pointwise({"y": SIZE}, ops=("concat or pad",)),
        pointwise({"y": SIZE}, gathers=1),
        pointwise({"y": SIZE}, shape=(4096,)),
        launch("r", "reduction", {"y": SIZE}, {"z": 8}),
        launch("attention", "attention", {"y": SIZE}, {"z": SIZE}),
        launch("fusedcuda::softmax", "custom", {"y": SIZE}, {"z": SIZE}),
        matmul("z", "y"),
    ],
)
def test_what_an_epilogue_cannot_do_is_not_called_avoidable(second):
    (found,) = fusion_breaks([matmul(), second], [GRAPH])
    assert found.saved == 0
    assert found.bytes == 2 * SIZE


def test_the_product_of_two_matmuls_has_an_advice_of_its_own():
    launches = [matmul("g"), matmul("u"), pointwise({"g": SIZE, "u": SIZE}, ops=("silu", "mul"))]
    fixes = {item.reason.fix for item in fusion_breaks(launches, [GRAPH])}
    assert len(fixes) == 1
    assert "act_mul_packed" in fixes.pop()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("numel/rnumel mismatch (reduce) (4096, 1), (32000, 4096)", "reduction"),
        ("nodes numel incompatibility", "size"),
        ("memory deps did not match", "index mismatch"),
        ("intermediate nodes between node1 & node2", "order"),
        ("register spilling of the fused kernel", "register pressure"),
        ("device mismatch (cuda:0 vs cpu)", "device copy"),
        ("", "scheduler"),
    ],
)
def test_the_schedulers_words_for_two_kernels_of_its_own(words, code):
    first = launch("a", "pointwise", {"x": SIZE}, {"y": SIZE}, shape=(7,))
    second = pointwise({"y": SIZE})
    # The scheduler speaks of the parts of what it fused later.
    members = {"op1": "a", "op2": "pointwise"}
    said = (Refusal("op1", "op2", words),) if words else ()
    graph = RecordedGraph("forward", "", (), members=members, refusals=said)
    assert code_of(first, second, graph=graph) == code


def test_layout_copies_and_split_reductions():
    copy = launch("c", "copy", {"x": SIZE}, {"y": SIZE}, ops=("copy",), shape=(7,))
    assert code_of(copy, pointwise({"y": SIZE})) == "layout copy"
    split = launch("r", "reduction", {"x": SIZE}, {"y": 64}, ops=("sum",))
    assert code_of(split, launch("p", "persistent reduction", {"y": 64}, {"s": 4})) == "reduction"


def test_independent_kernels_that_are_alike():
    alike = [launch("k", "pointwise", {f"x{i}": 64}, {f"y{i}": 64}, shape=(32,)) for i in range(26)]
    (found,) = fusion_breaks(alike, [GRAPH])
    assert (found.code, found.said) == ("horizontal", "26 launches")
    chain = [launch("k", "pointwise", {f"x{i}": 64}, {f"x{i + 1}": 64}) for i in range(3)]
    assert "horizontal" not in {item.code for item in fusion_breaks(chain, [GRAPH])}


@pytest.mark.parametrize(
    ("shape", "dtype", "odd"),
    [
        ((4096, 1024, 479), "bfloat16", "K=479"),
        ((4096, 1001, 479), "float16", "N=1001 K=479"),
        ((4097, 1024, 480), "bfloat16", ""),
        ((4096, 1, 256), "bfloat16", ""),
        ((4096, 1024, 479), "float32", ""),
        ((64, 27, 27, 128), "bfloat16", ""),
    ],
)
def test_alignment_of_16_bit_matmuls(shape, dtype, odd):
    multiplication = Launch(
        0, "forward", "mm", "matmul", ("matmul",), shape, dtype, {"x": 8}, {"y": 8}
    )
    assert odd_dimensions(multiplication) == odd
    codes = [item.code for item in fusion_breaks([multiplication], [GRAPH])]
    assert codes == (["alignment"] if odd else [])


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("Failed to trace builtin operator\n  Explanation: builtin operator `print`", "print"),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "keep the value"),
        ("Data-dependent branching\n  Explanation: Detected data-dependent", "torch.cond"),
        ("Call to `torch._dynamo.graph_break()`", "delete the call"),
        ("Attempted to call function marked as skipped", "torch.library.custom_op"),
        ("something that no version said before", "torch operators"),
    ],
)  # fmt: skip
def test_fixes_of_graph_breaks(reason, fix):
    found = graph_break(reason, Frame("model.py", 7, "x.item()"))
    assert fix in found.fix
    assert found.reason.startswith(reason.split("\n")[0])
