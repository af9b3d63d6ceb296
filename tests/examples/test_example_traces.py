"""Kernels by phase and kind, from a step that the profiler recorded here and from one on a GPU.

No machine of these tests has a GPU. The first trace is recorded on the CPU, with a kernel put under
each operator; the second has the events of a GPU in the form that torch's profiler gives them.
"""

import json
from itertools import count

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from examples import traces
from examples.dlrm.models import PlainDLRM, reduced
from examples.dlrm.step import OPTIMIZERS, batches_of, train
from examples.traces import (
    BACKWARD,
    COPY,
    ELEMENTWISE,
    FORWARD,
    FUSED,
    GATHER,
    MATMUL,
    OPTIMIZER,
    OTHER,
    REDUCTION,
    kind_of,
    read,
)
from fusedcuda.demo.criteo import generate_rows
from fusedcuda.demo.dlrm import CONFIGS


class GpuTrace:
    """Events as in a Chrome trace of a GPU: operators, launches, kernels."""

    def __init__(self):
        self.events = []
        self.number = count(1)

    def event(self, category, name, ts, dur, **args):
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}
        )

    def block(self, name, ts, dur):
        self.event("user_annotation", name, ts, dur, **{"External id": next(self.number)})

    def launch(self, operator, kernel, ts, us, *, category="kernel", call="cudaLaunchKernel"):
        operator_id, correlation = next(self.number), next(self.number)
        if operator:
            self.event("cpu_op", operator, ts - 1, 3, **{"External id": operator_id})
        self.event("cuda_runtime", call, ts, 1, correlation=correlation)
        # The GPU is behind: the kernel runs long after its launch, in another phase's time.
        self.kernel(kernel, ts + 1000, us, operator_id, correlation, category)

    def kernel(self, name, ts, us, operator_id, correlation, category="kernel"):
        ids = {"External id": operator_id, "correlation": correlation}
        self.event(category, name, ts, us, **ids)

    def read(self):
        return read({"traceEvents": [{"ph": "M", "name": "process_name"}, *self.events]})


@pytest.fixture
def step() -> traces.StepTrace:
    trace = GpuTrace()
    trace.block(FORWARD, 100, 50)
    trace.launch("aten::addmm", "nvjet_tst_128x256_64x4_1x2_h_bz_coopB_TNT", 110, 20.0)
    trace.launch("aten::relu", "vectorized_elementwise_kernel<4, launch_clamp_scalar>", 120, 8.0)
    trace.block(BACKWARD, 200, 50)
    trace.launch("aten::threshold_backward", "vectorized_elementwise_kernel<4, ...>", 210, 12.0)
    trace.launch("aten::sum", "reduce_kernel<512, 1, ReduceOp<BFloat16>>", 220, 5.0)
    trace.block(OPTIMIZER, 300, 50)
    trace.launch("aten::_foreach_lerp_", "multi_tensor_apply_kernel<TensorListMetadata>", 310, 40.0)
    trace.launch("", "Memset (Device)", 400, 1.0, category="gpu_memset", call="cudaMemsetAsync")
    return trace.read()


def test_a_kernel_belongs_to_the_phase_of_its_launch(step):
    assert step.us_by(FORWARD) == {MATMUL: 20.0, ELEMENTWISE: 8.0}
    assert step.us_by(BACKWARD) == {ELEMENTWISE: 12.0, REDUCTION: 5.0}
    assert step.us_by(OPTIMIZER) == {ELEMENTWISE: 40.0}
    assert step.us_by("") == {COPY: 1.0}
    assert step.us == 86.0


def test_launches_of_the_host_are_counted_and_other_calls_are_not(step):
    assert (step.launches, step.graph_launches) == (5, 0)


def test_kernels_of_one_graph_have_one_launch_and_its_phase():
    trace = GpuTrace()
    trace.block(FORWARD, 100, 50)
    trace.event("cuda_runtime", "cudaGraphLaunch", 110, 5, correlation=7)
    for number in range(3):
        trace.kernel(f"triton_poi_fused_relu_{number}", 1000 + number, 2.0, 1, 7)
    found = trace.read()
    assert (found.launches, found.graph_launches, len(found.kernels)) == (1, 1, 3)
    assert found.us_by(FORWARD) == {ELEMENTWISE: 6.0}


def test_triton_is_launched_by_the_driver_api():
    trace = GpuTrace()
    trace.launch(
        "triton_poi_fused_relu_1", "triton_poi_fused_relu_1", 10, 2.0, call="cuLaunchKernelEx"
    )
    trace.events[1]["cat"] = "cuda_driver"
    assert trace.read().launches == 1


@pytest.mark.parametrize(
    ("operator", "kernel", "kind"),
    [
        ("aten::addmm", "void cublasLt::splitKreduce_kernel<32, 16, int>", MATMUL),
        ("aten::addmm", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", MATMUL),
        ("aten::addmm", "void at::native::elementwise_kernel<128, 4, direct_copy_kernel>", COPY),
        ("aten::mv", "void gemv2T_kernel_val<int, int, bfloat16>", MATMUL),
        ("aten::cat", "void at::native::CatArrayBatchedCopy_vectorized<OpaqueType<2>>", COPY),
        ("aten::fill_", "vectorized_elementwise_kernel<8, FillFunctor<BFloat16>>", COPY),
        ("aten::embedding", "void at::native::indexSelectLargeIndex<c10::BFloat16>", GATHER),
        ("aten::embedding", "void at::native::vectorized_gather_kernel<16, long>", GATHER),
        ("aten::embedding_dense_backward", "void compute_grad_weight<BFloat16, float>", GATHER),
        ("aten::index_add_", "void at::native::indexFuncLargeIndex<BFloat16, long>", GATHER),
        ("", "triton_poi_fused_cat_embedding_relu_unsqueeze_4", GATHER),
        ("", "triton_poi_fused_relu_threshold_backward_3", ELEMENTWISE),
        ("", "triton_poi_fused_new_zeros_8", COPY),
        ("", "triton_red_fused_sum_6", REDUCTION),
        ("", "triton_per_fused__to_copy_binary_cross_entropy_with_logits_squeeze_8", REDUCTION),
        ("", "triton_tem_fused_addmm_relu_0", MATMUL),
        ("fusedcuda::dot_interaction", "void fusedcuda::dot_interaction_kernel<bf16>", FUSED),
        (
            "fusedcuda::linear_act_backward",
            "void fusedcuda::act_rows_bwd_kernel<bf16>",
            ELEMENTWISE,
        ),
        (
            "fusedcuda::linear_act_backward",
            "void fusedcuda::act_rows_bwd_sum_kernel<bf16, 8>",
            ELEMENTWISE,
        ),
        ("fusedcuda::linear_act_backward", "void fusedcuda::column_sums_kernel<bf16>", REDUCTION),
        ("fusedcuda::linear_act_backward", "void fusedcuda::sum_partials_kernel<bf16>", REDUCTION),
        ("fusedcuda::linear_act_forward", "", MATMUL),
        ("fusedcuda::dot_interaction_backward", "", FUSED),
        ("fusedcuda::embedding_interaction", "", FUSED),
        ("fusedcuda::embedding_interaction_backward", "", FUSED),
        ("fusedcuda::embedding_dense_backward", "", GATHER),
        ("", "void fusedcuda::radix_scatter_kernel<long>", GATHER),
        ("", "void fusedcuda::embedding_sum_kernel<bf16, true, 8>", GATHER),
        ("fusedcuda::linear_sigmoid_bce_forward", "", FUSED),
        ("aten::relu_", "", ELEMENTWISE),
        ("aten::_foreach_addcdiv_", "", ELEMENTWISE),
        ("aten::_fused_adam_", "", ELEMENTWISE),
        ("aten::embedding_dense_backward", "", GATHER),
        ("aten::_to_copy", "", COPY),
        ("aten::some_new_thing", "some_new_kernel", OTHER),
    ],
)
def test_kinds_by_name_and_operator(operator, kernel, kind):
    assert kind_of(operator, kernel) == kind


def record_a_training_step(path) -> dict:
    """The second step of a tiny DLRM, profiled on the CPU."""
    config = reduced(CONFIGS["kaggle"])
    model = PlainDLRM(config, 20)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    rows = generate_rows(8)
    (batch,) = batches_of(rows, config, 20, 8, 1, torch.device("cpu"), torch.float32)
    train(model.loss, optimizer, batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(model.loss, optimizer, batch)
    profiler.export_chrome_trace(str(path))
    return json.loads(path.read_text())


def with_kernels(recorded: dict, operators: set[str]) -> GpuTrace:
    """The trace with a launch, and a kernel of one microsecond, in each of these operators."""
    trace = GpuTrace()
    trace.events = [event for event in recorded["traceEvents"] if event.get("ph") == "X"]
    launching = [e for e in trace.events if e.get("cat") == "cpu_op" and e["name"] in operators]
    for number, event in enumerate(launching):
        at = event["ts"] + event["dur"] / 2
        trace.event("cuda_runtime", "cudaLaunchKernel", at, 0.1, correlation=number)
        trace.kernel("a kernel", at + 1e6, 1.0, event["args"]["External id"], number)
    return trace


def test_a_recorded_step_is_split_into_its_phases(tmp_path):
    recorded = record_a_training_step(tmp_path / "trace.json")
    watched = {"aten::addmm", "aten::relu", "aten::mm", "aten::threshold_backward"}
    found = with_kernels(recorded, {*watched, "aten::_foreach_add_"}).read()
    layers = len(reduced(CONFIGS["kaggle"]).linear_shapes)
    hidden = layers - 1
    assert found.us_by(FORWARD) == {MATMUL: layers, ELEMENTWISE: hidden}
    # The first layer's input needs no gradient.
    assert found.us_by(BACKWARD) == {MATMUL: 2 * layers - 1, ELEMENTWISE: hidden}
    assert found.us_by(OPTIMIZER) == {ELEMENTWISE: 1}
    assert found.us_by("") == {}


@pytest.mark.gpu
def test_a_training_step_on_a_gpu(tmp_path):
    x = torch.randn(256, 256, device="cuda", requires_grad=True)

    def run():
        with torch.profiler.record_function(FORWARD):
            y = torch.relu(x @ x)
        with torch.profiler.record_function(BACKWARD):
            y.sum().backward()

    run()
    found = traces.profiled(run, tmp_path / "step.json.gz")
    assert set(found.us_by(FORWARD)) == {MATMUL, ELEMENTWISE}
    assert {MATMUL, ELEMENTWISE} <= set(found.us_by(BACKWARD))
    assert found.launches == sum("Mem" not in kernel.name for kernel in found.kernels)
    assert (tmp_path / "step.json.gz").exists()
