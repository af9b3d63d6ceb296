"""Graph breaks and CUDA graphs: one print, found by the report, and what launches are counted."""

from collections import Counter

import pytest
import torch
from scripted_gpu import ScriptedGpu

from examples import graph_breaks as study
from examples.graph_breaks import DEFAULT, EAGER, OVERHEAD, Guarded, WithPrint
from examples.results import COUNTED, MEASURED, NOT_MEASURED, Results
from examples.traces import Kernel, StepTrace


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"BATCH": 4, "WIDTH": 32, "LAYERS": 4}.items():
        monkeypatch.setattr(study, name, value)


@pytest.fixture(scope="module")
def reports():
    return {case: study.report(make) for case, make in study.MODELS.items()}


def test_the_report_finds_the_print_and_names_line_and_fix(reports):
    (item,) = reports["with the print"].graph_breaks
    text = study.break_text(item)
    assert text.startswith("graph_breaks.py:")
    assert 'print("activations:", x.abs().mean())' in text
    assert "torch.compiler.is_compiling()" in text


def test_the_guarded_model_is_one_graph_with_fewer_kernels(reports):
    before, after = reports.values()
    assert after.graph_breaks == []
    assert after.variant("compiled").kernels < before.variant("compiled").kernels


def test_both_models_compute_the_same_and_print_when_run_eagerly():
    assert study.same_results() == 0.0
    for model in (WithPrint(), Guarded()):
        with study.quietly() as printed:
            model(torch.randn(4, 32))
        assert printed.getvalue().startswith("activations: tensor(")


def test_a_model_that_differs_is_noticed(monkeypatch):
    monkeypatch.setattr(Guarded, "forward", lambda self, x: self.second(self.first(x)) + 1)
    assert study.same_results() == pytest.approx(1.0, abs=1e-6)


TRACES = {
    EAGER: (16, Counter(cudaLaunchKernel=16)),
    DEFAULT: (16, Counter(cudaLaunchKernel=8, cuLaunchKernelEx=8)),
    OVERHEAD: (16, Counter(cudaGraphLaunch=1, cudaMemcpyAsync=1)),
}


@pytest.fixture
def measured(on_a_gpu, monkeypatch, tmp_path) -> Results:
    """All of `measure` but the GPU, the compiler and the profiler."""
    providers = iter([*study.PROVIDERS, *study.PROVIDERS])

    def profiled(run, path):
        run()
        kernels, calls = TRACES[next(providers)]
        return StepTrace([Kernel("k", 2.0, "", "")] * kernels, calls)

    monkeypatch.setattr(study, "CudaBackend", lambda: ScriptedGpu([]))
    monkeypatch.setattr(study, "profiled", profiled)
    monkeypatch.setattr(study, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(study, "compile_as", lambda provider, model: model)
    results = Results()
    parser = study.study.script_parser(study.NAME, "")
    study.measure(parser.parse_args(["--rounds", "1", "--out", str(tmp_path)]), results)
    return results


def test_launches_and_graphs_are_counted(measured):
    rows = {tuple(row[:2]): row[2:] for row in study.time_rows(measured)}
    assert len(rows) == 6
    assert rows["guarded", OVERHEAD] == ["20000.0", "~1.00x", "32.0", "16", "1", "1"]
    assert rows["guarded", DEFAULT][-3:] == ["16", "16", "0"]


def test_the_page_shows_the_measurement_and_where_it_was_made(measured, reports):
    for case, report in reports.items():
        study.add_report(case, report, measured)
    text = study.markdown(measured, ["graph_breaks_time.png"])
    assert f"| guarded | {OVERHEAD} | 20000.0 |" in text
    assert "Measured on: NVIDIA H200" in text
    assert "![graph_breaks_time.png](graph_breaks_time.png)" in text


def test_a_provider_that_fails_leaves_its_message(on_a_gpu, monkeypatch):
    def fail(provider, model):
        raise RuntimeError(f"no {provider}")

    monkeypatch.setattr(study, "CudaBackend", lambda: ScriptedGpu([]))
    monkeypatch.setattr(study, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(study, "compile_as", fail)
    results = Results()
    study.measure(study.study.script_parser(study.NAME, "").parse_args([]), results)
    assert {row.note for row in results.errors()} == {
        f"RuntimeError: no {provider}" for provider in study.PROVIDERS
    }


def test_the_script_runs_and_writes(tmp_path, capsys, monkeypatch, reports):
    pytest.importorskip("matplotlib")
    makers = {make: reports[case] for case, make in study.MODELS.items()}
    monkeypatch.setattr(study, "report", makers.__getitem__)
    assert study.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Both models agree: the largest difference is 0." in printed
    assert "not measured, there is no GPU here" in printed
    text = (tmp_path / "graph_breaks.md").read_text()
    assert f"\n{NOT_MEASURED}.\n" in text
    assert "| with the print | 2 |" in text
    assert "| guarded | 1 |" in text


def test_a_later_run_keeps_the_measurement(measured, tmp_path, monkeypatch, reports):
    pytest.importorskip("matplotlib")
    makers = {make: reports[case] for case, make in study.MODELS.items()}
    monkeypatch.setattr(study, "report", makers.__getitem__)
    measured.save(tmp_path / "graph_breaks.csv")
    assert study.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "graph_breaks.md").read_text()
    assert f"| guarded | {OVERHEAD} | 20000.0 |" in text
    assert (tmp_path / "graph_breaks_time.png").exists()


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "graphs"), [("with the print", 2), ("guarded", 1)])
def test_one_graph_is_replayed_for_each_compiled_graph(case, graphs, tmp_path):
    x = torch.randn(study.BATCH, study.WIDTH, device="cuda")
    model = study.compile_as(OVERHEAD, study.MODELS[case]().cuda())
    with torch.no_grad(), study.quietly():
        for _ in range(3):
            study.forward(model, x)
        trace = study.profiled(lambda: study.forward(model, x), tmp_path / "trace.json.gz")
    assert trace.graph_launches == graphs


def test_counts_are_marked_as_such(reports):
    results = Results()
    study.add_report("guarded", reports["guarded"], results)
    assert MEASURED not in {row.source for row in results.rows.values()}
    assert results.value("guarded", DEFAULT, "graphs", COUNTED) == 1
