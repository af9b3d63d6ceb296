"""For the tests of the benchmark: a clock that follows a script, instead of a GPU, and a case."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from bench import harness
from bench.cases import Case, Provider, random, traffic
from bench.measure import Result
from bench.report import Summary, Table, read


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
        random([shape], torch.float32), torch.relu, **fields,
    )  # fmt: skip


def with_provider(name: str, function, **fields) -> Case:
    case = relu_case(**fields)
    return replace(case, providers=case.providers | {name: Provider(lambda: function)})


def run(tmp_path: Path, cases, backend, **options) -> Summary:
    table = Table(tmp_path / "f.csv", "NVIDIA H200")
    table.add_copy([4.25, 4.27, 4.26], {"torch": "x"}, {"sm_mhz": 1980})
    settings = {"rounds": 3, "deadline": float("inf")} | options
    harness.run_cases(cases, backend, table, harness.Progress(tmp_path / "progress"), **settings)
    return Summary(read(tmp_path / "f.csv"), cases)


def by_name(results: list[Result]) -> dict[str, Result]:
    return {result.provider: result for result in results}
