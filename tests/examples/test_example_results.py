"""The CSV of a case study: what survives a run elsewhere, and how numbers become words."""

import pytest

from examples.results import (
    COUNTED,
    MEASURED,
    NOT_MEASURED,
    Results,
    read,
    spread_of,
    times_faster,
)
from examples.stopwatch import MAX_CALLS, SAMPLES_PER_ROUND, BackToBack, in_turns


def measured() -> Results:
    results = Results()
    results.add("kaggle", "eager", "step", None, "us", MEASURED, samples=[12.0, 10.0, 11.0])
    results.add("kaggle", "fusedcuda", "step", None, "us", MEASURED, samples=[5.5])
    results.add("kaggle", "eager", "bytes", 1e9, "bytes", COUNTED)
    results.add("kaggle", "broken", "step", None, "us", MEASURED, note="out of memory")
    return results


@pytest.mark.usefixtures("on_a_gpu")
def test_what_was_measured_survives_and_what_was_counted_is_made_anew(tmp_path):
    measured().save(tmp_path / "study.csv")
    again = Results.of_folder(tmp_path, "study")
    assert again.value("kaggle", "eager", "step") == 11.0
    assert again.row("kaggle", "eager", "step").low == pytest.approx(10.4)
    assert again.measured_on() == "NVIDIA H200, torch 2.11.0, commit 1234567, 2026-01-31"
    assert again.value("kaggle", "eager", "bytes", COUNTED) is None
    assert [row.provider for row in again.errors()] == ["broken"]
    assert again.ratio("kaggle", "eager", "fusedcuda", "step") == 2.0


@pytest.mark.usefixtures("on_a_gpu")
def test_a_new_measurement_takes_the_place_of_the_old_one(tmp_path):
    results = measured()
    results.add("kaggle", "broken", "step", 7.0, "us", MEASURED)
    results.save(tmp_path / "study.csv")
    rows = [row for row in read(tmp_path / "study.csv") if row.provider == "broken"]
    assert [(row.value, row.note) for row in rows] == [(7.0, "")]


def test_without_a_folder_or_a_file_nothing_was_measured(tmp_path):
    for folder in (None, tmp_path):
        assert Results.of_folder(folder, "study").measured_on() == NOT_MEASURED


@pytest.mark.parametrize(
    ("ratio", "noise", "text"), [(1.617, 0.0, "1.62x"), (1.02, 0.03, "~1.02x"), (None, 0.0, "-")]
)
def test_a_ratio_within_the_noise_is_marked(ratio, noise, text):
    assert times_faster(ratio, noise) == text


def test_the_spread_is_that_of_the_medians():
    assert spread_of([10.0, 11.0, 30.0], [10.0, 10.0, 10.0]) == pytest.approx(0.1)


# -- the stopwatch --------------------------------------------------------------------------------


class Clock:
    """Samples as CudaBackend does, with a time a call that depends on who is called."""

    def __init__(self, us):
        self.us = us
        self.order = []

    def sample(self, replay: BackToBack, count: int) -> list[float]:
        before = len(self.order)
        replay.launch()
        names = self.order[before:]
        return [sum(self.us[name] for name in names) / replay.calls] * count


def test_providers_take_turns_and_the_first_is_timed_twice():
    clock = Clock({"a": 100.0, "b": 4000.0, "b on another batch": 6000.0})
    calls = {
        "slow": [lambda: clock.order.append("b"), lambda: clock.order.append("b on another batch")],
        "fast": [lambda: clock.order.append("a")],
    }
    times = in_turns(clock, calls, rounds=2)
    assert list(times) == ["slow", "fast", "slow (again)"]
    assert times["slow"] == times["slow (again)"] == [5000.0] * 2 * SAMPLES_PER_ROUND
    assert times["fast"] == [100.0] * 2 * SAMPLES_PER_ROUND
    # One look at each, then two rounds of about 20 ms each, all batches in turn.
    runs = [name[0] for name in clock.order]
    assert runs[:5] == list("bbabb")
    assert runs[5:].count("a") == 2 * 200
    assert "".join(runs[5:]).startswith("bbbb" + "a" * 200 + "bbbb" * 2)


def test_very_short_calls_are_bounded_in_number():
    clock = Clock({"a": 0.1})
    in_turns(clock, {"tiny": [lambda: clock.order.append("a")]}, rounds=1)
    assert len(clock.order) == 2 * (1 + MAX_CALLS)
