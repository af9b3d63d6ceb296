"""Inductor's module and schedule, from recordings: launches, bytes, and refusal when in doubt."""

import pytest
from record import HIDDEN, ROWS, WIDTH

from fusedcuda.report.adapter import FormatNotRecognised
from fusedcuda.report.breaks import fusion_breaks
from fusedcuda.report.kernels import Launch, join
from fusedcuda.report.recording import Node, RecordedGraph

HALF = 2  # bytes of bfloat16
FULL, WIDE = ROWS * WIDTH * HALF, ROWS * HIDDEN * HALF


def matmuls(launches: list[Launch]) -> list[Launch]:
    return [launch for launch in launches if launch.is_matmul]


def test_every_version_finds_both_matmuls_with_their_work(recorded):
    first, second = matmuls(join(recorded))
    assert (first.shape, second.shape) == ((ROWS, HIDDEN, WIDTH), (ROWS, WIDTH, HIDDEN))
    assert first.flops == second.flops == 2 * ROWS * HIDDEN * WIDTH
    assert first.bytes_in == FULL + (HIDDEN * WIDTH + HIDDEN) * HALF
    assert first.bytes_out == WIDE
    assert first.ops == ("matmul", "bias add")
    assert first.dtype == "bfloat16"


def test_the_activation_is_a_kernel_of_its_own_and_named_by_its_body(recorded):
    launches = join(recorded)
    (gelu,) = [launch for launch in launches if "gelu (erf)" in launch.ops]
    assert gelu.kind == "pointwise"
    assert (gelu.bytes_in, gelu.bytes_out) == (WIDE, WIDE)
    assert gelu.special == 2 * ROWS * HIDDEN
    assert gelu.frame is not None
    assert gelu.frame.file == "record.py"
    assert "F.gelu" in gelu.frame.code


def test_a_gather_counts_at_most_the_elements_that_the_kernel_goes_over(recorded):
    first = join(recorded)[0]
    assert "gather" in first.ops
    table = max(first.reads, key=lambda name: recorded.buffers[name][0])
    assert recorded.buffers[table][0] == (50_000, WIDTH // 2)
    # Half of them are of the other part of the concatenation, which the index does not tell.
    assert FULL // 2 <= first.reads[table] <= FULL < 50_000 * WIDTH // 2 * HALF


def test_a_concatenation_reads_its_parts_once(recorded):
    first = join(recorded)[0]
    (x,) = [name for name in first.reads if recorded.buffers[name][0] == (ROWS, WIDTH // 2)]
    assert first.reads[x] == FULL // 2


def test_breaks_between_matmul_and_activation(recorded):
    launches = join(recorded)
    found = [item for item in fusion_breaks(launches, [recorded]) if item.code == "GEMM boundary"]
    gelu = next(i for i, launch in enumerate(launches) if "gelu (erf)" in launch.ops)
    (boundary,) = [item for item in found if item.consumer == gelu]
    assert boundary.producer == gelu - 1
    assert boundary.saved == boundary.bytes == 2 * WIDE


def test_a_recording_survives_json(recorded):
    assert RecordedGraph.from_dict(recorded.to_dict()) == recorded


def test_a_recording_of_another_format_is_refused(recorded):
    with pytest.raises(ValueError, match="expected format 1, found 7"):
        RecordedGraph.from_dict(recorded.to_dict() | {"format": 7})


# ---- Doubt is an error, with words that a person can search for ---------------------------------


def refuses(graph: RecordedGraph, why: str) -> None:
    with pytest.raises(FormatNotRecognised, match=f"output format not recognised: .*{why}"):
        join(graph)


def test_a_launch_that_is_not_found(change):
    refuses(change("extern_kernels.addmm(", "some_new_library.addmm("), "some_new_library.addmm")


def test_a_kernel_that_is_never_launched(recorded):
    call, run = recorded.source.split("def call(self, args):")
    line = next(line for line in run.splitlines() if ".run(" in line)
    source = f"{call}def call(self, args):{run.replace(line, '            pass')}"
    refuses(RecordedGraph.from_dict(recorded.to_dict() | {"source": source}), "no launch found of")


def test_a_module_without_a_call(change):
    refuses(change("def call(", "def execute("), "no function `call`")


def test_a_kernel_of_a_new_kind(change):
    refuses(change("@triton_heuristics.pointwise(", "@triton_heuristics.wavefront("), "wavefront")


def test_a_kernel_without_a_signature(change):
    refuses(change("triton_meta={'signature'", "triton_meta={'types'"), "no signature")


def test_a_module_that_is_not_python(change):
    refuses(change("def call(self, args):", "def call self, args:"), "does not parse")


def test_a_node_of_the_schedule_without_a_launch(recorded):
    data = recorded.to_dict()
    node = dict(data["nodes"][0], name="op99", outputs=("buf99",), reads={"arg0_1": 8})
    refuses(RecordedGraph.from_dict(data | {"nodes": [*data["nodes"], node]}), "op99")


# ---- What needs a GPU to be written, so is written here by hand ----------------------------------

TEMPLATE = """
kernel = async_compile.triton('triton_tem_fused_mm_relu_0', '''
@triton_heuristics.template(
    triton_meta={'signature': {'arg_A': '*bf16', 'arg_B': '*bf16', 'out_ptr0': '*bf16'}},
)
@triton.jit
def triton_tem_fused_mm_relu_0(arg_A, arg_B, out_ptr0):
    a = tl.load(arg_A)
    b = tl.load(arg_B)
    acc = tl.dot(a, b)
    tmp0 = tl.full([1], 0, tl.int32)
    tmp1 = triton_helpers.maximum(tmp0, acc)
    tl.store(out_ptr0 + (0), tmp1, mask)
''')
triton_tem_fused_mm_relu_0 = kernel
def call(args):
    arg0_1, arg1_1 = args
    buf0 = empty_strided_cuda((64, 32), (32, 1), torch.bfloat16)
    triton_tem_fused_mm_relu_0.run(arg0_1, arg1_1, buf0, 2, 1, 1, stream=stream0)
    return (buf0, )
"""


def test_a_triton_template_is_a_matmul_with_its_epilogue():
    node = Node("op0", "SchedulerNode", ("buf0",), {"arg0_1": 1, "arg1_1": 1}, {"buf0": 1})
    shapes = {"arg0_1": (64, 16), "arg1_1": (16, 32), "buf0": (64, 32)}
    buffers = {name: (shape, "bfloat16") for name, shape in shapes.items()}
    (launch,) = join(RecordedGraph("forward", TEMPLATE, (node,), buffers=buffers))
    assert launch.kind == "template"
    assert launch.ops == ("matmul", "relu")
    assert launch.flops == 2 * 64 * 32 * 16
