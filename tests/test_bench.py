"""The benchmark's own logic, on the CPU: a scripted clock stands in for the GPU."""

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # bench is not part of the installed package

from bench import bench_pointwise, device, harness, tables, timing
from bench.cases import Case, Provider, faster, traffic, within
from bench.measure import AGAIN, Result, measure, spread
from bench.report import COLUMNS, Summary, Table, percentiles, read


class ScriptedBackend:
    """Gives each recorded call list the next time of a script; runs every call once."""

    device = "cpu"

    def __init__(self, cold: list[float], lost_after: int | None = None) -> None:
        self.cold = iter(cold)
        self.order: list[float] = []
        self.lost_after = lost_after
        self.checks = 0

    def copies(self, bytes_per_call: int) -> int:
        return 2

    def l2_multiple(self, bytes_per_call: int, copies: int) -> float:
        return 3.0

    def record(self, calls, cycles):
        for call in calls:
            call()
        us = next(self.cold) if len(calls) == 2 else 1.0  # cold graphs have all the copies
        return SimpleNamespace(us=us, calls=len(calls) * cycles, method="scripted")

    record_uncaptured = record

    def sample(self, replay, count: int) -> list[float]:
        self.order.append(replay.us)
        return [replay.us] * count

    def host_us(self, call, count: int) -> float:
        call()
        return 7.0

    def peak_bytes(self, call) -> int:
        return sum(t.nbytes for t in call())

    def release(self) -> None: ...

    def healthy(self) -> bool:
        self.checks += 1
        return self.lost_after is None or self.checks <= self.lost_after


def relu_case(label: str = "relu", **fields) -> Case:
    shape = (64, 64)
    providers = {
        "fusedcuda": Provider(lambda: lambda x: x.clamp(min=0)),
        "eager": Provider(lambda: torch.relu),
    }
    fields = {"providers": providers} | fields
    return Case(
        "relu", label, torch.float32, traffic(torch.float32, read=[shape], write=[shape]),
        bench_pointwise.random([shape], torch.float32), torch.relu, **fields,
    )  # fmt: skip


def with_provider(name: str, function, **fields) -> Case:
    case = relu_case(**fields)
    return replace(case, providers=case.providers | {name: Provider(lambda: function)})


def by_name(results: list[Result]) -> dict[str, Result]:
    return {result.provider: result for result in results}


def run(tmp_path: Path, cases, backend, **options) -> Summary:
    table = Table(tmp_path / "f.csv", "NVIDIA H200")
    table.add_copy([4.25, 4.27, 4.26], {"torch": "x"}, {"sm_mhz": 1980})
    settings = {"rounds": 3, "deadline": float("inf")} | options
    harness.run_cases(cases, backend, table, harness.Progress(tmp_path / "progress"), **settings)
    return Summary(read(tmp_path / "f.csv"), cases)


# -- timing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_call", [8 << 20, 16 << 20, 100 << 20])
def test_rotated_buffers_exceed_the_cache_three_times(bytes_per_call):
    assert timing.copies_for(bytes_per_call, 60 << 20) * bytes_per_call >= 3 * (60 << 20)


def test_copies_are_bounded():
    assert timing.copies_for(16, 60 << 20) == timing.MAX_COPIES
    assert timing.copies_for(2 << 30, 60 << 20) == 2


def test_a_replay_lasts_about_two_milliseconds():
    assert timing.cycles_for(1 << 30, 2) * 2 * (1 << 30) / 4e6 >= timing.REPLAY_US
    assert timing.cycles_for(4096, 1024) == 1


# -- measuring ------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_the_first_provider_is_timed_twice():
    backend = ScriptedBackend(cold=[10.0, 20.0, 11.0])
    results = by_name(measure(relu_case(), backend, rounds=3))
    assert list(results) == ["fusedcuda", "eager", "fusedcuda" + AGAIN]
    cold = [us for us in backend.order if us != 1.0]
    assert cold == [10.0, 20.0, 11.0] * 3
    assert spread(list(results.values()), "cold") == pytest.approx(1 / 11, rel=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.relu(x) * 1.001, "is wrong"),
        (lambda x: torch.relu(x).index_fill(0, torch.tensor(3), 0.0), "is wrong"),
        (lambda x: torch.relu(x).masked_fill(x == x.max(), float("nan")), "is wrong"),
        (lambda x: torch.relu(x)[:-1], "expected torch.float32 (64, 64)"),
        (lambda x: torch.relu(x).half(), "expected torch.float32"),
        (lambda x: x.no_such_method(), "AttributeError"),
    ],
)
def test_a_wrong_or_raising_provider_is_reported_and_not_timed(function, message):
    case = with_provider("broken", function)
    results = by_name(measure(case, ScriptedBackend([10.0, 20.0, 10.0]), rounds=3))
    assert message in results["broken"].error
    assert not results["broken"].cold
    assert results["fusedcuda"].cold
    assert results["eager"].cold


def test_a_wrong_gradient_is_reported():
    class HalfGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.relu(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0] > 0) * 0.5

    case = with_provider("half", HalfGradient.apply, mode="backward")
    results = by_name(measure(case, ScriptedBackend([10.0, 20.0, 10.0]), rounds=3))
    assert "is wrong" in results["half"].error
    assert not results["eager"].error


@pytest.mark.parametrize(
    ("mode", "forwards", "grads"), [("backward", 0, True), ("both", 3, True), ("forward", 3, False)]
)
def test_a_backward_is_timed_without_its_forward(mode, forwards, grads):
    from bench.measure import bind

    seen = []

    def function(x):
        seen.append(x.requires_grad)
        return torch.relu(x)

    x = torch.randn(4)
    call = bind(relu_case(mode=mode), function, (x,), seed=0)
    before_timing = len(seen)
    for _ in range(3):
        (value,) = call()
    assert len(seen) - before_timing == forwards
    assert seen[0] is grads
    assert value.shape == x.shape


def test_adapt_and_restore_bring_a_peer_with_another_layout_to_the_same_check():
    halves = Provider(
        lambda: lambda a, b: torch.cat([a, b]).relu(),
        adapt=lambda inputs: tuple(h.clone() for h in inputs[0].split(32)),
        restore=lambda grads: (torch.cat(grads),),
    )
    case = relu_case(mode="backward")
    case = replace(case, providers=case.providers | {"halves": halves})
    results = by_name(measure(case, ScriptedBackend([1.5] * 4), rounds=3))
    assert not results["halves"].error


@pytest.mark.parametrize("grad_mode", ["inference", "no_grad", "grad"])
def test_host_cases_call_under_their_grad_mode(grad_mode):
    seen = set()

    def function(x):
        seen.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), x.requires_grad))
        return torch.relu(x)

    case = with_provider("spy", function, host_only=True, grad_mode=grad_mode)
    results = by_name(measure(case, ScriptedBackend([]), rounds=3))
    assert len(results["spy"].host) == 9
    expected = {"inference": (True, False, False), "no_grad": (False, False, False)}
    assert seen == {expected.get(grad_mode, (False, True, True))}


# -- running all ----------------------------------------------------------------------------------


def test_a_case_that_fails_as_a_whole_does_not_stop_the_next(tmp_path):
    def no_inputs(generator):
        raise MemoryError("no room for the inputs")

    broken = replace(relu_case("broken"), make_inputs=no_inputs)
    summary = run(tmp_path, [broken, relu_case("good")], ScriptedBackend([10.0, 20.0, 10.0]))
    assert "no room for the inputs" in summary.entries["broken"].errors["fusedcuda"]
    assert summary.entries["good"].time("fusedcuda", "gpu_cold") == 10.0


def test_a_new_worker_skips_what_is_recorded_and_the_case_that_killed_the_last(tmp_path):
    cases = [relu_case("first"), relu_case("deadly"), relu_case("last")]
    run(tmp_path, cases[:1], ScriptedBackend([10.0, 20.0, 10.0]))
    harness.Progress(tmp_path / "progress").begin("deadly")
    summary = run(tmp_path, cases, ScriptedBackend([30.0, 60.0, 30.0]))
    assert summary.entries["first"].time("fusedcuda", "gpu_cold") == 10.0
    assert "died" in summary.entries["deadly"].errors["fusedcuda"]
    assert summary.entries["last"].time("fusedcuda", "gpu_cold") == 30.0


def test_a_lost_device_ends_the_worker_after_the_row_is_written(tmp_path):
    table = Table(tmp_path / "f.csv", "NVIDIA H200")
    cases = [relu_case("first"), relu_case("second")]
    finished = harness.run_cases(
        cases, ScriptedBackend([10.0, 20.0, 10.0], lost_after=0), table,
        harness.Progress(tmp_path / "progress"), rounds=3, deadline=float("inf"),
    )  # fmt: skip
    assert not finished
    assert table.labels() == {"first"}


def test_cases_after_the_deadline_are_named_as_skipped(tmp_path):
    summary = run(tmp_path, [relu_case()], ScriptedBackend([]), deadline=0.0)
    assert summary.entries["relu"].errors == {"fusedcuda": "skipped: out of time"}


@pytest.mark.parametrize(
    ("codes", "starts", "completed"),
    [([0], 1, True), ([70, -11, 0], 3, True), ([70] * 9, 6, False), ([1], 1, False)],
)
def test_workers_are_started_again_but_not_forever(codes, starts, completed):
    ended = iter(codes)
    commands = []

    def fake_run(command, env, timeout):
        assert float(env[harness.WORKER_VARIABLE]) > 0
        commands.append(command)
        return SimpleNamespace(returncode=next(ended))

    deadline = harness.time.time() + 100
    assert harness.supervise(["worker"], deadline, run=fake_run) is completed
    assert len(commands) == starts


def test_a_hung_worker_is_given_up():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert not harness.supervise(command, harness.time.time(), grace=0.5)


def test_without_a_gpu_it_says_so_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_pointwise.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


# -- what is reported -----------------------------------------------------------------------------


def test_percentiles():
    assert percentiles([4.0, 1.0, 3.0, 2.0, 5.0, 6.0]) == (3.5, 2.0, 5.0)
    assert percentiles([2.0]) == (2.0, 2.0, 2.0)


def test_csv_has_the_columns_and_units(tmp_path):
    run(tmp_path, [relu_case()], ScriptedBackend([10.0, 20.0, 10.0]))
    rows = read(tmp_path / "f.csv")
    assert list(rows[0]) == COLUMNS
    cold = next(
        r for r in rows if (r["kernel_provider"], r["metric_name"]) == ("eager", "gpu_cold")
    )
    extra = json.loads(cold["extra_benchmark_config_str"])
    assert (cold["y_value_50"], cold["metric_unit"]) == ("20.0", "us")
    assert extra["bytes"] == 2 * 64 * 64 * 4
    assert extra["formula"] == "4 B * (read 64x64, write 64x64)"
    assert extra["tb_per_s"] == pytest.approx(extra["bytes"] / 20e-6 / 1e12, abs=1e-4)
    assert float(cold["pct_peak"]) == pytest.approx(100 * extra["tb_per_s"] / 4.26, abs=0.1)
    assert extra["pct_datasheet"] == pytest.approx(100 * extra["tb_per_s"] / 4.8, abs=0.1)
    metrics = {r["metric_name"] for r in rows if r["kernel_provider"] == "fusedcuda"}
    assert metrics == {"gpu_cold", "gpu_warm", "host", "peak_memory"}


@pytest.mark.parametrize(
    ("cold", "again", "verdict"),
    [(9.0, 9.0, "met"), (11.0, 11.0, "missed"), (10.2, 10.6, "noise")],
)
def test_verdicts_respect_the_spread_of_a_against_a(tmp_path, cold, again, verdict):
    case = relu_case(targets=(faster("best", 1.0),))
    summary = run(tmp_path, [case], ScriptedBackend([cold, 10.0, again]))
    entry = summary.entries["relu"]
    assert entry.verdict(case.targets[0]) == verdict
    assert tables.times(entry, "best").startswith("~") is (verdict == "noise")


def test_a_target_that_was_not_measured_is_not_met(tmp_path):
    case = relu_case(targets=(faster("triton", 1.0),))
    summary = run(tmp_path, [case], ScriptedBackend([1.0, 10.0, 1.0]))
    assert summary.entries["relu"].verdict(case.targets[0]) == "not measured"


def test_host_targets_are_a_factor_of_the_native_op(tmp_path):
    case = relu_case(host_only=True, group="host", targets=(within("eager", 1.05),))
    summary = run(tmp_path, [case], ScriptedBackend([]))
    assert summary.entries["relu"].verdict(case.targets[0]) == "met"


def test_the_terminal_table_is_short_and_names_failures(tmp_path):
    def no_kernel(x):
        raise RuntimeError("no kernel for this card")

    cases = [with_provider("broken", no_kernel, label=f"case {i}") for i in range(40)]
    summary = run(tmp_path, cases, ScriptedBackend([10.0, 20.0, 10.0] * 40))
    text = tables.terminal(summary)
    assert len(text.splitlines()) <= tables.TERMINAL_LINES
    assert "no kernel for this card" in text
    assert "case 39" in text
    page = tables.markdown("relu", summary, [tmp_path / "p.png"])
    assert page.count("no kernel for this card") == 40


def test_no_plots_without_matplotlib_still_gives_the_tables(tmp_path, capsys):
    run(tmp_path, [relu_case()], ScriptedBackend([10.0, 20.0, 10.0]))

    def no_plots(summary, out):
        raise ModuleNotFoundError("No module named 'matplotlib'")

    assert harness.finish("f", [relu_case()], no_plots, tmp_path) == 0
    assert "no plots" in capsys.readouterr().out
    assert "relu" in (tmp_path / "f.md").read_text()


# -- the device -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", "t4"),
    ],
)
def test_short_names(name, short):
    assert device.short_name(name) == short


def test_commit_comes_from_the_environment_first(monkeypatch):
    monkeypatch.setenv("FUSEDCUDA_COMMIT", "abc1234")
    assert device.commit() == "abc1234"


def test_throttle_reasons_have_names():
    assert device.throttle_names(0x4 | 0x40) == ["power cap", "hardware thermal"]
    assert device.throttle_names(0x1) == []  # idle is not a limit


# -- the pointwise cases --------------------------------------------------------------------------

BF16 = torch.bfloat16
SMALL = [
    bench_pointwise.add_mul_act((6, 8), BF16),
    bench_pointwise.add_mul_act((5, 7), torch.float32),
    bench_pointwise.add_relu((40,), BF16, "forward", offset=1),
    *(bench_pointwise.add_relu((6, 8), BF16, mode) for mode in ("forward", "backward")),
    *(
        bench_pointwise.bias_act((6, 8), BF16, activation, mode)
        for activation in ("relu", "gelu_tanh")
        for mode in ("forward", "backward")
    ),
    *(bench_pointwise.act_scale_bias((6, 8), BF16, mode) for mode in ("forward", "backward")),
    *(bench_pointwise.act_mul_packed(6, 8, BF16, mode) for mode in ("forward", "backward")),
]
BOTH = [
    bench_pointwise.add_relu((6, 8), BF16, "both"),
    bench_pointwise.bias_act((6, 8), BF16, "gelu_tanh", "both"),
    bench_pointwise.act_scale_bias((6, 8), BF16, "both"),
    bench_pointwise.act_mul_packed(6, 8, BF16, "both"),
]


@pytest.mark.parametrize("case", SMALL + BOTH, ids=lambda case: case.label)
def test_pointwise_cases_agree_with_their_reference(case):
    here = {k: v for k, v in case.providers.items() if k in ("fusedcuda", "eager")}
    results = by_name(measure(replace(case, providers=here), ScriptedBackend([1.5] * 3), rounds=3))
    assert {name: result.error for name, result in results.items()} == dict.fromkeys(results, "")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
def test_bytes_are_those_of_the_tensors(case):
    inputs = case.make_inputs(torch.Generator().manual_seed(0))
    output = case.reference(*inputs)
    expected = sum(t.nbytes for t in inputs) + output.nbytes
    if case.mode == "backward":
        # Grad in, gradients out; what the formulas need of the forward differs by operation.
        read_again = {
            "add_relu": output.nbytes,
            "bias_act": output.nbytes if "relu" in case.label else sum(t.nbytes for t in inputs),
            "act_scale_bias": inputs[0].nbytes + inputs[1].nbytes if len(inputs) > 1 else 0,
            "act_mul_packed": inputs[0].nbytes,
        }[case.kernel]
        written = sum(t.nbytes for t in inputs)
        if case.kernel == "add_relu":
            written = inputs[0].nbytes  # one gradient, shared by both operands
        expected = output.nbytes + read_again + written
    assert case.traffic.bytes == expected


def test_the_packed_backward_moves_ten_bytes_an_output_element():
    case = bench_pointwise.act_mul_packed(8, 16, BF16, "backward")
    assert case.traffic.bytes == 10 * 8 * 16


def test_an_offset_breaks_the_alignment():
    (x,) = bench_pointwise.random([(8,)], BF16, offset=1)(torch.Generator())
    assert x.data_ptr() % 16 == 2


def test_labels_are_unique_and_every_target_has_its_case():
    cases = bench_pointwise.build_cases()
    labels = [case.label for case in cases]
    assert len(set(labels)) == len(labels)
    assert set(bench_pointwise.TARGETS) <= set(labels)
    quick = [case for case in cases if case.quick]
    assert {c.label for c in cases if c.targets} <= {c.label for c in quick}
    assert all(prod(map(int, c.x_value.split("x"))) <= 2**28 for c in cases if c.group != "host")


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "bench", "--help"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
