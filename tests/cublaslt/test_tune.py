"""Tuning and the table of the probe, with made-up candidates and times."""

import json
from collections.abc import Callable

import pytest
import torch

from fusedcuda import _cublaslt, _jit, _tune

PROBLEM = {
    **{"problem": "aa", "m": 64, "n": 32, "k": 16, "batch": 1, "type": 14},
    **{"epilogue": "RELU_BIAS", "bytes": [1, 1, 0, 1, 1, 0]},
}


class Library:
    """In place of cuBLASLt: what it was asked for, and what was chosen."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.chosen: dict[str, str] = {}
        self.times: dict[str, float] = {"first": 100.0, "second": 80.0, "third": 120.0}
        self.measured: list[str] = []

    def measure(self, entry: dict, algorithms: list[str]) -> list[float]:
        self.measured.append(entry["problem"])
        return [self.times[name] for name in algorithms]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Library:
    fake = Library()
    monkeypatch.setenv("FUSEDCUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_jit, "load", lambda family: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(_cublaslt, "version", lambda: 130101)
    monkeypatch.setattr(_cublaslt, "problems", lambda: list(fake.asked))
    monkeypatch.setattr(
        _cublaslt, "candidates", lambda problem, count: [{"algorithm": a} for a in fake.times]
    )
    monkeypatch.setattr(_cublaslt, "choose", fake.chosen.__setitem__)
    monkeypatch.setattr(_tune, "measure", fake.measure)
    return fake


def tune(library: Library, *entries: dict) -> list[_tune.Tuned]:
    with _tune.tune(verbose=False) as results:
        library.asked.extend(entries)
    return results


def test_a_faster_algorithm_is_chosen_and_saved(library: Library) -> None:
    (result,) = tune(library, PROBLEM)
    assert result.changed
    assert (result.recommended_us, result.best_us, result.candidates) == (100.0, 80.0, 3)
    assert str(result).startswith("64 x 32 x 16 bfloat16 RELU_BIAS: 100.0 us recommended")
    assert "25.0% faster" in str(result)
    assert library.chosen == {"aa": "second"}
    assert _tune.choices_file().name == "cublaslt-NVIDIA-H200-130101.json"
    library.chosen.clear()
    _tune.use_saved()
    assert library.chosen == {"aa": "second"}


def test_a_gain_within_noise_changes_nothing(library: Library) -> None:
    library.times["second"] = 97.5
    (result,) = tune(library, PROBLEM)
    assert not result.changed
    assert "left as it is" in str(result)
    assert library.chosen == {"aa": ""}


def test_only_what_is_new_in_the_block_is_tuned(library: Library) -> None:
    library.asked.append(PROBLEM)
    tune(library, {**PROBLEM, "problem": "bb"})
    assert library.measured == ["bb"]


def test_files_grow(library: Library) -> None:
    tune(library, PROBLEM)
    tune(library, {**PROBLEM, "problem": "bb"})
    assert sorted(json.loads(_tune.choices_file().read_text())) == ["aa", "bb"]


def test_a_damaged_file_is_replaced(library: Library, capfd) -> None:
    _tune.choices_file().write_text("{")
    _tune.use_saved()
    assert library.chosen == {}
    assert "damaged" in capfd.readouterr().err
    tune(library, PROBLEM)
    assert json.loads(_tune.choices_file().read_text())["aa"]["algorithm"] == "second"


def test_nothing_is_tuned_where_results_must_repeat(library: Library) -> None:
    tune(library, PROBLEM)
    library.chosen.clear()
    torch.use_deterministic_algorithms(True)
    try:
        assert tune(library, {**PROBLEM, "problem": "bb"}) == []
        _tune.use_saved()
    finally:
        torch.use_deterministic_algorithms(False)
    assert library.chosen == {}


@pytest.mark.parametrize(("value", "tunes"), [("load", False), ("1", True)])
def test_the_environment_loads_and_tunes(
    library: Library, monkeypatch: pytest.MonkeyPatch, value: str, tunes: bool
) -> None:
    tune(library, PROBLEM)
    library.chosen.clear()
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setenv("FUSEDCUDA_TUNE", value)
    monkeypatch.setattr(_tune.atexit, "register", at_exit.append)
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda function: function())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    _tune.start_from_environment()
    assert library.chosen == {"aa": "second"}
    library.asked.append({**PROBLEM, "problem": "bb"})
    for function in at_exit:
        function()
    assert library.measured == (["aa", "bb"] if tunes else ["aa"])


def test_the_table_of_the_probe_is_passed_on(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int, bool]] = []
    monkeypatch.setattr(_cublaslt, "_set_support", lambda *values: told.append(values))
    path = tmp_path / "table.json"
    _cublaslt.use_support(path)
    assert told == []
    path.write_text(
        json.dumps({"epilogues": {"bfloat16": {"GELU_BIAS": {"fused": False, "us": 1.0}}}})
    )
    _cublaslt.use_support(path)
    assert told == [(14, 68, 36, False)]
