"""Records what this torch's Inductor writes for an H200, for the tests of the parser.

    python tests/report/record.py     # writes tests/report/recorded/torch-<version>.json

Needs no GPU. To be run again with a new torch; the tests read every recording that is there.
"""

import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedcuda.report import adapter
from fusedcuda.report.device import H200
from fusedcuda.report.offline import capture_fake

FOLDER = Path(__file__).parent / "recorded"
ROWS, WIDTH, HIDDEN, CLASSES = 4096, 512, 2048, 1000


class Model(nn.Module):
    """A norm, an MLP, a gather, a concatenation and a softmax over rows: one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50_000, WIDTH // 2)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = torch.cat([self.table(ids), x], dim=-1)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.softmax(x, dim=-1)


def make_model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        x = torch.empty(ROWS, WIDTH // 2, dtype=torch.bfloat16)
        return Model().to(torch.bfloat16), (x, torch.empty(ROWS, dtype=torch.int64))


def record() -> list[dict]:
    model, inputs = make_model()
    with adapter.pretend_cuda(H200):
        captured = capture_fake(model, inputs, backward=False)
        return [
            item.to_dict()
            for graph in captured.graphs
            for item in adapter.lower(graph, backward=False)
        ]


def without_paths(text: str) -> str:
    """The recording without the folders of this machine."""
    text = re.sub(r"# kernel path: [^\\]*\\n", "", text)
    return re.sub(r'"file": "[^"]*/', '"file": "', text)


if __name__ == "__main__":
    version = ".".join(torch.__version__.split(".")[:2])
    target = FOLDER / f"torch-{version}.json"
    target.write_text(without_paths(json.dumps(record(), indent=1)) + "\n")
    print(f"wrote {target}")
