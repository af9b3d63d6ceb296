"""The benchmark's own logic, on the CPU: a scripted clock stands in for the GPU."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # bench is not part of the installed package

from scripted_backend import ScriptedBackend, by_name, relu_case, run, with_provider

from bench import __main__ as all_families
from bench import bench_norm, bench_pointwise, harness, timing
from bench.cases import Provider
from bench.measure import AGAIN, bind, gradients_like, measure, spread
from bench.report import Table

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
    backend = ScriptedBackend(cold=[10.0, 20.0, 30.0, 40.0, 11.0])
    names = ["fusedcuda", "eager", "compile", "triton"]
    case = relu_case(providers={name: Provider(lambda: torch.relu) for name in names})
    results = by_name(measure(case, backend, rounds=3))
    assert list(results) == [*names, "fusedcuda" + AGAIN]
    cold = [us for us in backend.order if us != 1.0]
    # Never behind itself, and another one is the first in every round.
    assert cold[:5] == [10.0, 20.0, 11.0, 30.0, 40.0]
    assert cold[5:10] == [20.0, 11.0, 30.0, 40.0, 10.0]
    assert cold[10:] == [30.0, 40.0, 10.0, 20.0, 11.0]
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


def test_constants_get_no_gradient_and_every_output_has_its_own():
    def both(x, index):
        return x[index], 2 * x

    x, index = torch.randn(4), torch.tensor([3, 1])
    first, second = gradients_like(both(x, index), seed=0)
    (gradient,) = bind(relu_case(mode="backward", constants=1), both, (x, index), seed=0)()
    torch.testing.assert_close(gradient, (2 * second).index_add(0, index, first))


def test_a_scalar_loss_starts_from_one():
    x = torch.randn(4)
    (gradient,) = bind(relu_case(mode="both"), torch.sum, (x,), seed=0)()
    assert gradient.tolist() == [1.0] * 4


def test_gradients_are_laid_out_like_their_output():
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.stride())
            return grad

    bind(relu_case(mode="backward"), Spy.apply, (torch.randn(2, 3, 4).transpose(0, 1),), seed=0)()
    assert seen == [(4, 12, 1)]


def test_the_first_call_of_one_that_overwrites_its_input_sees_the_input():
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.detach().mul_(2))
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0] * grad

    call = bind(relu_case(mode="both"), InPlace.apply, (torch.full((4,), 3.0),), seed=0)
    assert call()[0].tolist() == [6.0] * 4


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


def test_only_what_is_missing_is_measured(tmp_path):
    cases = [relu_case("first"), relu_case("second")]
    options = harness.parse("f", ["--missing", f"--out={tmp_path}"])
    assert harness.to_measure("f", cases, options) == cases
    run(tmp_path, cases[:1], ScriptedBackend([10.0, 20.0, 10.0]))
    run(tmp_path, cases[1:], ScriptedBackend([]), deadline=0.0)
    assert harness.to_measure("f", cases, options) == cases[1:]
    harness.report.keep_measured(tmp_path / "f.csv")
    summary = run(tmp_path, cases, ScriptedBackend([30.0, 60.0, 30.0]))
    assert summary.entries["first"].time("fusedcuda", "gpu_cold") == 10.0
    assert summary.entries["second"].time("fusedcuda", "gpu_cold") == 30.0
    assert not summary.entries["second"].errors


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


@pytest.mark.parametrize(
    "arguments",
    [[], ["--quick", "--missing", "--filter=a b", "--without=c", "--rounds=4", "--out=x"]],
)
def test_a_worker_gets_the_options_of_its_parent(arguments):
    options = harness.parse("norm", arguments)
    again = harness.parse("norm", harness.arguments_of(options, options.budget))
    assert vars(again) == vars(options)


def test_families_share_the_budget_by_their_cases(monkeypatch):
    monkeypatch.setattr(all_families, "FAMILIES", ("norm", "pointwise"))
    given = {}

    def record(name):
        def main(arguments):
            given[name] = harness.parse(name, arguments)
            return 0

        return main

    for module, name in ((bench_norm, "norm"), (bench_pointwise, "pointwise")):
        monkeypatch.setattr(module, "main", record(name))
    assert all_families.main(["--budget", "100", "--filter", "host time"]) == 0
    # 6 cases of 21, and then what is left, all of which is there.
    assert given["norm"].budget == pytest.approx(100 * 6 / 21, rel=0.05)
    assert given["pointwise"].budget == pytest.approx(100, rel=0.05)
    assert given["norm"].filter == "host time"


def test_a_family_without_cases_is_not_started(monkeypatch):
    monkeypatch.setattr(all_families, "FAMILIES", ("norm", "pointwise"))
    monkeypatch.setattr(bench_norm, "main", lambda arguments: pytest.fail("started"))
    monkeypatch.setattr(bench_pointwise, "main", lambda arguments: 0)
    assert all_families.main(["--filter", "act_mul_packed"]) == 0


def test_families_that_start_at_once_take_turns(monkeypatch, tmp_path):
    """Their waiting is not part of their time, and nobody is given up while it waits."""
    monkeypatch.setattr(all_families, "FAMILIES", ("norm", "pointwise"))
    inside, order = [], []

    def take_turn(name):
        def main(arguments):
            budget = harness.parse(name, arguments).budget
            with harness.turn() as waited:
                inside.append(name)
                order.append((name, budget, waited))
                harness.time.sleep(0.2)
                assert inside == [name]
                inside.clear()
            return 3

        return main

    for module, name in ((bench_norm, "norm"), (bench_pointwise, "pointwise")):
        monkeypatch.setattr(module, "main", take_turn(name))
    assert all_families.main(["--at-once", "--budget", "100", "--filter", "host time"]) == 3
    assert {name: budget for name, budget, _ in order} == pytest.approx(
        {"norm": 100 * 6 / 21, "pointwise": 100 * 15 / 21}
    )
    assert sorted(waited >= 0.1 for *_, waited in order) == [False, True]
    assert harness.TURN_VARIABLE not in harness.os.environ
    with harness.turn() as waited:
        assert waited == 0


def test_an_unknown_family_is_named(capsys):
    with pytest.raises(SystemExit):
        all_families.main(["norms"])
    assert "norms: no such family" in capsys.readouterr().err


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "bench", "--help"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
