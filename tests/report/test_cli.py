"""`python -m fusedcuda report`: targets, files, conditions, and comparison with before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusedcuda.__main__ import main
from fusedcuda.report import cli, ncu
from fusedcuda.report.cli import load_target, parse_condition

ROOT = Path(__file__).parents[2]
TARGET = f"{Path(__file__).parent / 'conftest.py'}:two_layers"


def run(*arguments: str) -> int:
    return main(["report", *arguments])


@pytest.fixture(scope="module")
def saved(predicted, tmp_path_factory) -> Path:
    return predicted.save(tmp_path_factory.mktemp("before") / "old.json")


def test_prints_and_writes_every_form(tmp_path, capsys):
    files = [tmp_path / f"report.{ending}" for ending in ("json", "md", "html")]
    options = [f"--{path.suffix[1:]}={path}" for path in files]
    assert run(TARGET, "--offline", "h200", *options) == 0
    captured = capsys.readouterr()
    assert "TwoLayers: forward, mode default, predicted for NVIDIA H200" in captured.out
    assert captured.err.count("wrote ") == 3
    assert json.loads(files[0].read_text())["schema"] == 1
    assert files[1].read_text().startswith("# TwoLayers")
    assert files[2].read_text().startswith("<!DOCTYPE html>")


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("conditions", "status"),
    [(["breaks>0"], 1), (["breaks>1"], 0), (["kernels>=5", "gemms==2"], 1), (["single_op<9"], 1)],
)
def test_conditions_decide_the_status(conditions, status, capsys):
    options = [option for text in conditions for option in ("--fail-on", text)]
    assert run(TARGET, *options) == status
    assert capsys.readouterr().err.count("FAIL: ") == status


@pytest.fixture
def made(monkeypatch, predicted) -> None:
    """The report is not made anew for each test of what happens to it afterwards."""
    monkeypatch.setattr(cli, "_make", lambda *_: predicted)


@pytest.mark.usefixtures("made")
def test_compares_with_an_earlier_report(saved, tmp_path, capsys):
    assert run(TARGET, "--diff", str(saved)) == 0
    assert "Nothing changed." in capsys.readouterr().out
    data = json.loads(saved.read_text())
    data["graph_breaks"] = []
    (tmp_path / "better.json").write_text(json.dumps(data))
    assert run(TARGET, "--diff", str(tmp_path / "better.json")) == 0
    assert "breaks" in capsys.readouterr().out.partition("Compared with before")[2]


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fail-on", "breaks"], "--fail-on: expected such as 'breaks>0', found 'breaks'"),
        (["--fail-on", "brakes>0"], "no number 'brakes'; there are kernels, gemms,"),
        (["--diff", "no.json"], "No such file"),
        (["--diff", __file__], "is not a report"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    assert run(TARGET, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("examples", "expected package.module:function or file.py:function, found 'examples'"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("json:dumpz", "json has no function 'dumpz'"),
        ("platform:machine", "platform:machine returned str, expected (model, inputs)"),
    ],
)
def test_wrong_targets(target, message, capsys):
    assert run(target, "--offline", "h200") == 2
    assert message in capsys.readouterr().err


def test_conditions_are_read_and_not_evaluated():
    assert parse_condition(" avoidable_share >= 0.3 ") == ("avoidable_share", ">=", 0.3)
    for text in ("kernels>exit()", "a>b", "1>0>0", "kernels>1-2"):
        with pytest.raises(ValueError, match="--fail-on"):
            parse_condition(text)


def test_without_ncu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    assert run(TARGET, "--offline", "h200", "--ncu") == 0
    assert "there is no ncu in PATH" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "lora", "dlrm"])
def test_the_examples_are_targets(name):
    model, inputs = load_target(f"{ROOT}/examples/report_{name}.py:make_model")
    assert all(x.is_meta for x in [*model.parameters(), *inputs])


def test_importing_fusedcuda_does_not_load_the_report():
    code = (
        "import sys, fusedcuda; assert callable(fusedcuda.report); "
        "print([m for m in sys.modules if m.startswith(('fusedcuda.report.', 'torch._inductor.'))])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert "fusedcuda.report." not in printed
