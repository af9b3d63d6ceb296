"""Fusion arithmetic: the counts are those of the real code, the prediction has its three parts."""

import os
import subprocess
from dataclasses import replace

import pytest
import torch
from scripted_gpu import ScriptedGpu

import fusedcuda
from bench import harness
from bench.cases import Provider
from examples import fusion_arithmetic as study
from examples import fusion_page
from examples.fusion_arithmetic import EXPRESSIONS, FUSED, UNFUSED, predicted_us
from examples.results import COUNTED, MEASURED, NOT_MEASURED, PREDICTED, Results
from fusedcuda.report import ncu

every_expression = pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda e: e.text)
KB, MB, GB = 2**10, 2**20, 2**30


def gain(expression, nbytes, warm=False):
    unfused, fused = (predicted_us(expression, form, nbytes, warm) for form in (UNFUSED, FUSED))
    return unfused / fused


# -- counts ---------------------------------------------------------------------------------------


@every_expression
def test_counts_are_those_of_eager_and_of_inductors_code(expression):
    """The formulas against what the fusion report reads in Inductor's code for an H200."""
    case = expression.case(MB)
    inputs = case.make_inputs(torch.Generator().manual_seed(0))
    report = fusedcuda.report(case.reference, *inputs, offline="h200")
    for name, form in (("eager", UNFUSED), ("compiled", FUSED)):
        variant = report.variant(name)
        assert variant.kernels == len(expression.kernels(form))
        assert variant.bytes == expression.bytes(form, MB)


@every_expression
def test_fused_bytes_are_those_of_the_benchmark(expression):
    assert expression.bytes(FUSED, MB) == expression.case(MB).traffic.bytes


@every_expression
def test_every_size_is_a_whole_number_of_rows(expression):
    for nbytes in study.SIZES:
        assert expression.touched(FUSED, nbytes) == expression.bytes(FUSED, nbytes)
        assert nbytes % (study.COLUMNS * study.DTYPE.itemsize) == 0


def test_the_check_counts_operators_and_refuses_a_wrong_result():
    (expression, _) = EXPRESSIONS
    assert study.check_on_cpu(expression).endswith("3 operators against 1")

    def with_fused(function):
        def make_case(elements):
            case = expression.make_case(elements)
            wrong = Provider(lambda: function)
            return replace(case, providers={**case.providers, "fusedcuda": wrong})

        return replace(expression, make_case=make_case)

    with pytest.raises(AssertionError, match="is wrong"):
        study.check_on_cpu(with_fused(lambda a, b, c: torch.relu((a + b) * b)))
    with pytest.raises(AssertionError, match=r"\[3, 3\] operators, expected \[3, 1\]"):
        study.check_on_cpu(with_fused(lambda a, b, c: torch.relu((a + b) * c)))


# -- prediction -----------------------------------------------------------------------------------


@every_expression
def test_small_tensors_gain_by_launches_and_large_ones_by_bytes(expression):
    ratio = expression.bytes(UNFUSED, GB) / expression.bytes(FUSED, GB)
    assert gain(expression, KB) == pytest.approx(3.0, rel=0.01)
    assert gain(expression, GB) == pytest.approx(ratio, rel=0.01)


@every_expression
def test_in_the_cache_the_bytes_that_fusing_saves_are_the_cheap_ones(expression):
    knee = study.knee(expression, UNFUSED)
    ratio = expression.bytes(UNFUSED, GB) / expression.bytes(FUSED, GB)
    assert gain(expression, 16 * MB) < ratio < gain(expression, KB) + 1e-3
    # Warm, the fused form fits between its own knee and that of the unfused one.
    between = (knee + study.knee(expression, FUSED)) / 2
    assert gain(expression, int(between), warm=True) > gain(expression, int(between))
    for size in (256 * MB, GB):
        assert gain(expression, size, warm=True) == gain(expression, size)


def test_the_knee_is_where_all_tensors_fill_the_cache():
    first, second = EXPRESSIONS
    assert study.knee(first, FUSED) == pytest.approx(50e6 / 4)  # a b c y
    assert study.knee(first, UNFUSED) == pytest.approx(50e6 / 6)  # and two in between
    assert study.knee(second, FUSED) == pytest.approx(50e6 / 2, rel=1e-6)  # x y


# -- measurement ----------------------------------------------------------------------------------


def without_compilers(expression):
    """Its case with the two providers that run anywhere."""

    def make_case(elements):
        case = expression.make_case(elements)
        kept = {name: case.providers[name] for name in ("fusedcuda", "eager")}
        broken = Provider(lambda: fusedcuda.no_such_op)
        return replace(case, providers={**kept, "triton": broken})

    return replace(expression, make_case=make_case)


@pytest.fixture
def scripted(on_a_gpu, monkeypatch) -> ScriptedGpu:
    """Cold, in the order of recording: fusedcuda 5 us, eager 11 us, fusedcuda again 5 us."""
    gpu = ScriptedGpu([5.0, 11.0, 5.0] * len(EXPRESSIONS))
    monkeypatch.setattr(study, "CudaBackend", lambda: gpu)
    monkeypatch.setattr(study, "copy_bandwidth", lambda _: [4.2, 4.3])
    monkeypatch.setattr(study, "EXPRESSIONS", tuple(map(without_compilers, EXPRESSIONS)))
    return gpu


def test_measurements_become_rows_and_failures_their_message(scripted):
    results = Results()
    study.measure_all(study.parse(["--rounds", "3"]), [4 * KB], results)
    for expression in EXPRESSIONS:
        label = expression.label(4 * KB)
        assert results.ratio(label, "eager", "fusedcuda", "cold") == pytest.approx(2.2)
        assert results.value(label, "A/A", "cold") == 0.0
        assert "no_such_op" in results.row(label, "triton", "cold").note
    assert results.value("copy", "torch", "bandwidth") == pytest.approx(4.25)
    text = EXPRESSIONS[0].text
    study.add_predictions(EXPRESSIONS[0], [4 * KB], results)
    (row,) = fusion_page.measured_rows(text, study.SIZES, results)
    assert row == ["4 KB", "11", "-", "-", "5", "2.20x", "3.00x", "~1.00x", "3.00x"]


def test_out_of_time_no_size_is_begun(scripted, capsys):
    results = Results()
    study.measure_all(study.parse(["--budget", "-1"]), [4 * KB], results)
    assert results.value(EXPRESSIONS[0].label(4 * KB), "fusedcuda", "cold") is None
    assert "skipped, out of time" in capsys.readouterr().out


NCU_TABLE = """"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","k","dram__bytes_read.sum","byte","3,000"
"0","k","dram__bytes_write.sum","byte","1,000"
"""


def test_ncu_runs_one_call_of_a_provider_and_its_bytes_are_added(on_a_gpu, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "lines of the program\n" + NCU_TABLE, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(ncu, "find_ncu", lambda: "/usr/bin/ncu")
    results, expression = Results(), EXPRESSIONS[1]
    study.add_hbm_bytes(expression, 4 * MB, "eager", results)
    assert results.value(expression.label(4 * MB), "eager", "HBM bytes") == 4000
    assert commands[0][-4:] == ["--one-call", expression.text, str(4 * MB), "eager"]
    study.add_predictions(expression, [4 * MB], results)
    (row,) = fusion_page.hbm_rows(expression.text, study.SIZES, results)
    assert row == [expression.label(4 * MB), "eager", "25.2 MB", "0.0 MB"]


def test_all_programs_under_ncu_take_turns_on_the_gpu(on_a_gpu, monkeypatch):
    turns = []

    def run(command, **options):
        turns.append(os.environ[harness.TURN_VARIABLE])
        return subprocess.CompletedProcess(command, 0, NCU_TABLE, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(ncu, "find_ncu", lambda: "/usr/bin/ncu")
    results = Results()
    study.add_all_hbm_bytes(results)
    assert len(turns) == len(results.rows) == 16
    assert len(set(turns)) == 1
    assert harness.TURN_VARIABLE not in os.environ


def test_without_ncu_the_bytes_are_missing_with_the_reason(on_a_gpu, monkeypatch):
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    results = Results()
    study.add_hbm_bytes(EXPRESSIONS[0], 4 * MB, "eager", results)
    assert [row.note for row in results.errors()] == ["RuntimeError: ncu is not installed"]


# -- the script -----------------------------------------------------------------------------------


def test_the_script_predicts_and_writes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert study.main(["--device", "cpu", "--largest", str(MB), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "relu((a+b)*c): fusedcuda agrees; 3 operators against 1" in printed
    assert "nothing is measured" in printed
    text = (tmp_path / "fusion_arithmetic.md").read_text()
    assert "| 1 KB | 3 -> 1 | 2.00x | 4.5 | 1.5 | 3.00x | 3.00x |" in text
    assert text.count(f"\n{NOT_MEASURED}.\n") == 4
    assert (tmp_path / "fusion_arithmetic_sizes.png").stat().st_size > 10_000


def test_the_picture_shows_what_was_measured(on_a_gpu):
    pytest.importorskip("matplotlib")
    from bench.plots import pyplot

    results = Results()
    for expression in EXPRESSIONS:
        study.add_predictions(expression, study.SIZES, results)
        for size in study.SIZES:
            for provider, us in (("eager", 9.0), ("fusedcuda", 3.0)):
                results.add(expression.label(size), provider, "cold", us, "us", MEASURED)
    knees = {e.text: {form: study.knee(e, form) for form in (UNFUSED, FUSED)} for e in EXPRESSIONS}
    texts = [expression.text for expression in EXPRESSIONS]
    figure = fusion_page.draw(pyplot(), texts, study.SIZES, knees, results)["sizes"]
    measured = [line for line in figure.axes[2].lines if line.get_label() == "fusedcuda, cold"]
    assert list(measured[0].get_ydata()) == [3.0] * len(study.SIZES)
    places = {line.get_xdata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 2}
    assert places == set(knees[texts[0]].values())
    pyplot().close(figure)


@pytest.mark.parametrize(
    ("nbytes", "name"), [(512, "512 B"), (KB, "1 KB"), (16 * MB, "16 MB"), (GB, "1 GB")]
)
def test_sizes_have_names(nbytes, name):
    assert fusion_page.size_name(nbytes) == name


@pytest.mark.gpu
def test_the_triton_kernel_agrees():
    case = EXPRESSIONS[1].case(MB)
    inputs = case.make_inputs(torch.Generator("cuda").manual_seed(0))
    found = case.providers["triton"].build()(*inputs)
    torch.testing.assert_close(found, case.reference(*inputs), rtol=2e-2, atol=2e-2)


def test_predictions_are_marked_as_such():
    results = Results()
    study.add_predictions(EXPRESSIONS[0], [KB], results)
    sources = {row.metric: row.source for row in results.rows.values()}
    assert sources == {
        "launches": COUNTED, "bytes": COUNTED, "cold": PREDICTED, "warm": PREDICTED,
    }  # fmt: skip
