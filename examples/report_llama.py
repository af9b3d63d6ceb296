"""A Llama block of 8B size in plain PyTorch, for the fusion report.

python -m fusedcuda report examples/report_llama.py:make_model --backward --html llama.html
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, HEADS, KEY_HEADS, HIDDEN = 2, 4096, 4096, 32, 8, 14336
HEAD = WIDTH // HEADS


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            project(y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def make_model() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """On the meta device: the report needs shapes, not values."""
    with torch.device("meta"):
        x = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16)
        table = torch.empty(LENGTH, HEAD, dtype=torch.bfloat16)
        return Block().to(torch.bfloat16), (x, table, table.clone())
