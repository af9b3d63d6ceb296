"""What the benchmark writes: the CSV, the tables, the verdicts about targets."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # bench is not part of the installed package

from scripted_backend import ScriptedBackend, relu_case, run, with_provider

from bench import device, harness, plots, tables
from bench.cases import QUACK_ELSEWHERE, Case, faster, within
from bench.report import COLUMNS, percentiles, read

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


def test_a_published_time_is_compared_and_marked(tmp_path):
    case = relu_case(targets=(faster("best", 1.0),), published={QUACK_ELSEWHERE: 8.0})
    summary = run(tmp_path, [case], ScriptedBackend([9.0, 10.0, 9.0]))
    entry = summary.entries["relu"]
    assert entry.best_peer("gpu_cold") == (QUACK_ELSEWHERE, 8.0)
    assert entry.verdict(case.targets[0]) == "missed (not interleaved)"
    assert tables.times(entry, QUACK_ELSEWHERE) == "0.89x*"
    assert tables.times(entry, "eager") == "1.11x"
    assert "not interleaved" in tables.terminal(summary)
    assert QUACK_ELSEWHERE in tables.markdown("relu", summary, [])


def test_a_remark_is_part_of_the_table(tmp_path):
    summary = run(tmp_path, [relu_case()], ScriptedBackend([9.0, 10.0, 9.0]))
    assert "\n\nSix bytes.\n\n" in tables.markdown("relu", summary, [], "Six bytes.")


def test_points_of_a_plot_are_in_the_order_of_their_sizes(tmp_path):
    cases = [relu_case(f"n {n}", panel="relu", x_value=str(n)) for n in (4096, 512, 1024)]
    summary = run(tmp_path, [*cases, relu_case("other")], ScriptedBackend([9.0, 10.0, 9.0] * 4))
    (panel,) = summary.panels().values()
    assert [entry.x_value for entry in panel] == ["512", "1024", "4096"]


def test_every_group_has_a_table_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    groups = {"layer": "main", "13-512": "dlrm", "512-256": "dlrm", "point": "sweep"}
    cases = [relu_case(label, group=group) for label, group in groups.items()]
    summary = run(tmp_path, cases, ScriptedBackend([9.0, 10.0, 9.0] * 4))
    assert summary.further_groups() == ["dlrm"]
    page = tables.markdown("relu", summary, [])
    for label in groups:
        assert f"| {label} | fusedcuda |" in page
    assert "## The layers of MLPerf's DLRM" in page
    written = plots.draw(summary, tmp_path, family="relu")
    assert {"relu_speedup.png", "relu_dlrm_speedup.png"} <= {path.name for path in written}


def test_what_is_said_of_several_cases_is_said_once(tmp_path):
    def with_note(label: str, note: str) -> Case:
        case = relu_case(label)
        providers = {**case.providers, "eager": replace(case.providers["eager"], note=note)}
        return replace(case, providers=providers)

    notes = {"a": "as it is", "b": "as it is", "c": "copied"}
    cases = [with_note(label, note) for label, note in notes.items()]
    summary = run(tmp_path, cases, ScriptedBackend([9.0, 10.0, 9.0] * 3))
    page = tables.markdown("relu", summary, [])
    assert "- eager: as it is (2 cases)" in page
    assert "- c: eager: copied" in page


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
