"""An MLP with LoRA adapters on frozen weights, for the fusion report.

python -m fusedcuda report examples/report_lora.py:make_model --backward --html lora.html
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

ROWS, WIDTH, HIDDEN, RANK, SCALE = 8192, 4096, 16384, 16, 2.0


class LoRALinear(nn.Module):
    """x W^T + bias + scale * (x A^T) B^T; only A and B are trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, RANK, bias=False)
        self.b = nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + SCALE * self.b(self.a(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = LoRALinear(WIDTH, HIDDEN)
        self.down = LoRALinear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def make_model() -> tuple[nn.Module, Tensor]:
    """On the meta device: the report needs shapes, not values."""
    with torch.device("meta"):
        x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        return Mlp().to(torch.bfloat16), x
