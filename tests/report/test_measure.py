"""The measured report with a scripted clock in the GPU's place, and ncu's output from a file."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fusedcuda
from fusedcuda.report import adapter, measure, ncu, offline
from fusedcuda.report.cost import predict
from fusedcuda.report.device import H200
from fusedcuda.report.kernels import Launch
from fusedcuda.report.measure import Trace, align, in_turns, largest_error, read_trace


def launch(name: str, megabytes: int = 8) -> Launch:
    kind = "pointwise" if name.startswith("triton") else "matmul"
    reads, writes = {"x": megabytes * 10**6}, {"y": megabytes * 10**6}
    return Launch(0, "forward", name, kind, ("add",), (1,), "bfloat16", reads, writes)


LAUNCHES = [launch("mm"), launch("triton_poi_0"), launch("mm", 80), launch("mm", 8)]


def aligned(*kernels: tuple[str, float]) -> list[float] | None:
    return align(LAUNCHES, predict(LAUNCHES, H200), Trace(kernels))


def test_library_kernels_belong_to_the_calls_between_tritons():
    kernels = (("nvjet_a", 5.0), ("triton_poi_0", 2.0), ("nvjet_b", 30.0), ("nvjet_c", 4.0))
    assert aligned(*kernels) == [5.0, 2.0, 30.0, 4.0]


def test_several_kernels_of_one_call_are_added_up():
    kernels = (("splitk", 4.0), ("reduce", 1.0), ("triton_poi_0", 2.0), ("b", 30.0), ("c", 4.0))
    assert aligned(*kernels)[:2] == [5.0, 2.0]


def test_where_it_is_unknown_whose_they_are_they_are_shared_out_as_predicted():
    kernels = (("a", 5.0), ("triton_poi_0", 2.0), ("b", 20.0), ("splitk", 10.0), ("c", 4.0))
    times = aligned(*kernels)
    assert sum(times) == pytest.approx(41.0)
    predicted = predict(LAUNCHES, H200)
    assert times[2] / times[3] == pytest.approx(predicted[2].us / predicted[3].us)


@pytest.mark.parametrize(
    "kernels",
    [
        [("a", 5.0), ("triton_poi_0", 2.0)],  # the last calls launched nothing
        [("a", 5.0), ("b", 30.0), ("c", 4.0)],  # no Triton kernel
        [("a", 5.0), ("triton_poi_0", 2.0), ("triton_poi_0", 2.0), ("b", 30.0), ("c", 4.0)],
    ],
)
def test_a_trace_of_something_else_is_refused(kernels):
    assert aligned(*kernels) is None


def test_a_trace_is_read_in_the_order_of_time():
    events = [
        {"cat": "kernel", "name": "second", "ts": 20, "dur": 3},
        {"cat": "gpu_memcpy", "name": "Memcpy", "ts": 1, "dur": 9},
        {"cat": "kernel", "name": "first", "ts": 10, "dur": 2.5},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 1},
    ]
    trace = read_trace({"traceEvents": events})
    assert trace == Trace([("first", 2.5), ("second", 3.0)], graph_launches=1)
    assert trace.us == 5.5


def test_error_is_relative_to_the_largest_value():
    assert largest_error([torch.tensor([1.0, 11.0])], [torch.tensor([1.0, 10.0])]) == 0.1
    assert largest_error([torch.tensor([3])], [torch.tensor([4])]) == 0.0  # no rounding of integers


class ScriptedClock:
    """Says what a trace of a run is by the name of the compiled function in it."""

    def __init__(self, us: dict[str, list[float]], graph_launches: int = 0) -> None:
        self.us = us
        self.graph_launches = graph_launches

    def device(self):
        return replace(H200, copy_tb_s=4.0)

    def trace(self, run) -> Trace:
        run()
        kind = kind_of(run)
        script = self.us[kind]
        us = script[0] if len(script) == 1 else script.pop(0)
        return Trace(TRACES[kind](us), self.graph_launches)

    def host_us(self, run) -> float:
        run()
        return 40.0


def kind_of(run) -> str:
    function = run.args[0]
    return getattr(function, "kind", "eager")


TRACES = {
    "eager": lambda us: [("nvjet", us / 2), ("gelu", us / 2)],
    "compiled": lambda us: [("nvjet", 0.75 * us), ("triton_poi_fused_gelu_0", 0.25 * us)],
    "swapped": lambda us: [("linear_act_kernel", us)],
}


def test_in_turns_knows_the_noise():
    def run(kind):
        function = lambda: None  # noqa: E731
        function.kind = kind
        return functools.partial(lambda f: f(), function)

    clock = ScriptedClock({"compiled": [10, 11, 12, 10, 11], "swapped": [8, 8, 9, 8, 8]})
    assert in_turns(clock, run("compiled"), run("swapped")) == (11, 8, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.up(x), approximate="tanh")


@pytest.fixture
def on_a_scripted_gpu(monkeypatch):
    """torch.compile that runs eagerly, and the recording that it would have made on a GPU."""
    model, x = Mlp().bfloat16(), torch.randn(64, 1024, dtype=torch.bfloat16)
    recordings = {}
    with adapter.pretend_cuda(H200):
        graphs = offline.capture_fake(model, [x], backward=False).graphs
        recordings["compiled"] = adapter.lower(graphs[0], False)
        swapped = measure.swap.apply(graphs[0], ["linear with activation"])[0]
        recordings["swapped"] = adapter.lower(swapped, False)
    compile_really = torch.compile
    kinds = []

    def compile_eagerly(function, *, backend=None, mode=None, dynamic=None):
        kinds.append("compiled" if backend is None else "swapped")
        run = compile_really(function, backend=backend or "eager", dynamic=dynamic)
        made = lambda *inputs: run(*inputs)  # noqa: E731
        made.kind = kinds[-1]
        return made

    @contextlib.contextmanager
    def recording(run_code):
        assert run_code
        yield recordings[kinds[-1]]

    monkeypatch.setattr(adapter, "recording", recording)
    monkeypatch.setattr(adapter, "compile_graph", lambda graph, mode: graph.module.forward)

    def report(us, mode="default", graph_launches=0, progress=lambda _: None):
        clock = ScriptedClock(us, graph_launches)
        monkeypatch.setattr(torch, "compile", compile_eagerly)
        return measure.report_measured(
            model, [x], name="mlp", mode=mode, backward=False, clock=clock, progress=progress
        )

    return report


def test_a_measured_report_has_the_times_of_the_trace(on_a_scripted_gpu):
    report = on_a_scripted_gpu({"eager": [30.0], "compiled": [20.0], "swapped": [12.0]})
    assert report.measured
    assert [(k.kind, k.us) for k in report.kernels] == [("matmul", 15.0), ("pointwise", 5.0)]
    (swap,) = report.swaps
    assert (swap.op, swap.us, swap.kernels, swap.use) == ("linear_act", 8.0, 1, True)
    assert swap.measured
    assert 0 < swap.error < 0.02
    times = {item.name: (item.kernels, item.gpu_us, item.host_us) for item in report.variants}
    assert times == {
        "eager": (2, 30.0, 40.0),
        "compiled": (2, 20.0, 40.0),
        "compiled + fusedcuda": (1, 12.0, 40.0),
    }
    assert "measured on NVIDIA H200" in str(report)


def test_what_is_timed_in_turns_is_compiled_once(on_a_scripted_gpu, monkeypatch):
    events: list[str] = []
    reset = torch._dynamo.reset
    monkeypatch.setattr(torch._dynamo, "reset", lambda: (events.append("reset"), reset()))

    def said(text: str) -> None:
        events.append(text)

    us = {"eager": [30.0], "compiled": [20.0], "swapped": [12.0]}
    on_a_scripted_gpu(us, progress=said)
    assert "reset" in events
    assert "reset" not in events[events.index("compiling") :]


def test_a_gain_within_the_noise_is_none(on_a_scripted_gpu):
    compiled = [20.0, 20.0, 24.0, 18.0, 20.0, 20.0, 20.0]
    report = on_a_scripted_gpu({"eager": [30.0], "compiled": compiled, "swapped": [17.0]})
    (swap,) = report.swaps
    assert not swap.use
    assert swap.why == "not here: 20.0 us -> 17.0 us (rounds differ by 6.0 us)"
    assert len(report.variants) == 2


@pytest.mark.parametrize(("launches", "used"), [(1, True), (0, False)])
def test_a_graph_is_replayed_if_the_trace_says_so(on_a_scripted_gpu, launches, used):
    us = {"eager": [30.0], "compiled": [20.0], "swapped": [12.0]}
    report = on_a_scripted_gpu(us, "reduce-overhead", launches)
    assert report.cuda_graphs.used is used
    assert "cudaGraphLaunch" in report.cuda_graphs.text


def test_a_trace_that_does_not_fit_leaves_the_sums_measured(on_a_scripted_gpu, monkeypatch):
    monkeypatch.setitem(TRACES, "compiled", lambda us: [("one_kernel_for_all", us)])
    report = on_a_scripted_gpu({"eager": [30.0], "compiled": [20.0], "swapped": [12.0]})
    assert report.variant("compiled").gpu_us == 20.0
    assert any("another order" in note for note in report.notes)


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_on_a_gpu(backward):
    model = Mlp().cuda().bfloat16()
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    report = fusedcuda.report(model, x, backward=backward)
    assert report.measured
    compiled = report.variant("compiled")
    us = sum(kernel.us for kernel in report.kernels)
    if backward:  # the step makes the incoming gradient too, which no compiled code launches
        with torch.no_grad():
            y = model(x)
        us += measure.CudaClock().trace(functools.partial(torch.ones_like, y)).us
    assert us == pytest.approx(compiled.gpu_us, rel=0.01)
    (swap,) = report.swaps
    assert swap.error is not None
    assert swap.error < 0.02


# ---- ncu -----------------------------------------------------------------------------------------

NCU_CSV = """==PROF== Connected to process 7
model says hello
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","triton_poi","dram__bytes_read.sum","byte","1,000,192"
"0","7","triton_poi","dram__bytes_write.sum","byte","524,288"
"1","7","nvjet","dram__bytes_read.sum","byte","2048"
"1","7","nvjet","gpu__time_duration.sum","ns","9999"
"""


def test_bytes_are_summed_over_kernels():
    expected = {"dram__bytes_read.sum": 1_002_240, "dram__bytes_write.sum": 524_288}
    assert ncu.read_bytes(NCU_CSV) == expected


def test_ncu_without_the_right_to_count_is_an_error():
    with pytest.raises(RuntimeError, match="ncu printed no table"):
        ncu.read_bytes("==ERROR== ERR_NVGPUCTRPERM\n")


def test_ncu_counts_one_step_and_leaves_the_clocks_alone():
    command = " ".join(ncu.command("ncu"))
    assert "--profile-from-start off" in command
    assert "--clock-control none" in command
    assert all(metric in command for metric in ncu.METRICS)
