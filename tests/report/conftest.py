"""Recordings of several torch versions, and reports that several tests look at."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedcuda
from fusedcuda.report.recording import RecordedGraph
from fusedcuda.report.result import Report

RECORDINGS = sorted(Path(__file__).parent.glob("recorded/*.json"))


@pytest.fixture(params=RECORDINGS, ids=lambda path: path.stem)
def recorded(request: pytest.FixtureRequest) -> RecordedGraph:
    """One graph of record.py's model, as a version of torch lowered it."""
    (graph,) = json.loads(request.param.read_text())
    return RecordedGraph.from_dict(graph)


@pytest.fixture
def change(recorded: RecordedGraph) -> Callable[..., RecordedGraph]:
    """The recording with some of its source replaced, which has to be there."""

    def changed(old: str, new: str) -> RecordedGraph:
        assert old in recorded.source
        data = recorded.to_dict() | {"source": recorded.source.replace(old, new)}
        return RecordedGraph.from_dict(json.loads(json.dumps(data)))

    return changed


class TwoLayers(nn.Module):
    """Its forward is interrupted by a print; its name and that of its layer are hostile to HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 2048)
        self.down = nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(x)))
        print("<between & 'graphs'>")
        return F.relu(y + x)


def two_layers() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return TwoLayers().to(torch.bfloat16), torch.empty(4096, 512, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def predicted() -> Report:
    """Of two graphs, without a GPU."""
    model, x = two_layers()
    return fusedcuda.report(model, x, offline="h200", name="<b>two & layers</b>")
