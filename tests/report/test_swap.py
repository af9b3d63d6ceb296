"""What the rules find in Dynamo's graph, and that what they put there computes the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedcuda.report import adapter, swap
from fusedcuda.report.rules import RULES

B, S, D, H = 2, 8, 64, 4


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_half_by_chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), -1)


def rotated(half: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, cos, sin: (q * cos + half(q) * sin, k * cos + half(k) * sin)


def normed(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.rms_norm(h, (D,), w, 1e-6), h * 2


WEIGHT, BIAS = (3 * D, D), (3 * D,)

CASES = {
    "norm": (lambda x, w: F.rms_norm(x, (D,), w), [(S, D), (D,)], "rms_norm"),
    "norm of a layer": (
        lambda x, w, b: F.layer_norm(x, (D,), w, b), [(S, D), (D,), (D,)], "layer_norm",
    ),
    "norm with residual": (normed, [(S, D), (S, D), (D,)], "rms_norm"),
    "gated product": (lambda g, u: F.silu(g) * u, [(S, D), (S, D)], "act_mul"),
    "gated product turned": (
        lambda g, u: u * F.gelu(g, approximate="tanh"), [(S, D), (S, D)], "act_mul",
    ),
    "linear with activation": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)), [(S, D), WEIGHT, BIAS], "linear_act",
    ),
    "linear with activation method": (
        lambda x, w: F.linear(x, w).relu(), [(B, S, D), WEIGHT], "linear_act",
    ),
    "linear with residual": (
        lambda x, w, r: r + F.linear(x, w), [(S, D), WEIGHT, (S, 3 * D)], "linear_residual",
    ),
    "LoRA branch": (
        lambda x, w, a, b, y: F.linear(x, w) + 2.0 * F.linear(F.linear(y, a), b),
        [(S, D), WEIGHT, (H, D), (3 * D, H), (S, D)], "linear_residual",
    ),
    "linear with LoRA": (
        lambda x, w, a, b, c: F.linear(x, w, c) + 2.0 * F.linear(F.linear(x, a), b),
        [(S, D), WEIGHT, (H, D), (3 * D, H), BIAS], "lora_linear",
    ),
    "gated MLP": (
        lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d),
        [(B, S, D), WEIGHT, WEIGHT, (D, 3 * D)], "gated_mlp",
    ),
    "softmax": (lambda x: F.softmax(x, dim=-1), [(S, D)], "softmax"),
    "pointwise chain": (
        lambda a, b, c: torch.relu((a + b) * c), [(S, D)] * 3, "add_mul_act",
    ),
    "rotary embedding": (
        rotated(rotate_half), [(B, H, S, D), (B, H // 2, S, D), (S, D), (S, D)], "rope",
    ),
    "rotary embedding by chunks": (
        rotated(rotate_half_by_chunks), [(B, H, S, D), (B, H, S, D), (S, D), (S, D)], "rope",
    ),
}  # fmt: skip


def swapped(function: Callable, *inputs: Tensor) -> tuple[list[str], list[str], object]:
    """Rules and ops that applied, each alone, and what the graph with the first computes."""
    (graph,) = adapter.capture(function, *inputs).graphs
    sites = swap.find(graph)
    changed, _ = swap.apply(graph, [site.rule for site in sites[:1]])
    return [s.rule for s in sites], [s.op for s in sites], changed.module(*graph.inputs)


@pytest.mark.parametrize("name", CASES)
def test_finds_and_computes_the_same(name):
    function, shapes, op = CASES[name]
    inputs = [tensor(*shape) for shape in shapes]
    rules, ops, result = swapped(function, *inputs)
    assert name.startswith(rules[0])
    assert ops[0] == op
    expected = function(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.testing.assert_close(tuple(result), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_takes_the_logits_before_the_upcast(reduction):
    logits, target = tensor(S, 100, dtype=torch.bfloat16), torch.randint(100, (S,))

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target, reduction=reduction, label_smoothing=0.1)

    (graph,) = adapter.capture(loss, logits, target).graphs
    changed, (site,) = swap.apply(graph, ["cross-entropy"])
    assert site.op == "cross_entropy"
    assert not any(node.target == "float" for node in changed.module.graph.nodes)
    torch.testing.assert_close(changed.module(*graph.inputs)[0], loss(logits, target))


@pytest.mark.parametrize("upcast", [False, True])
def test_a_loss_takes_the_layer_before_it(upcast):
    dtype = torch.bfloat16 if upcast else torch.float32
    x, weight = tensor(S, D, dtype=dtype), tensor(100, D, dtype=dtype)
    target = torch.randint(100, (S,))

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.float() if upcast else logits, target)

    (graph,) = adapter.capture(loss, x, weight, target).graphs
    changed, (site,) = swap.apply(graph, ["linear with cross-entropy"])
    assert site.op == "linear_cross_entropy"
    torch.testing.assert_close(changed.module(*graph.inputs)[0], loss(x, weight, target))


def test_a_layer_whose_logits_are_needed_stays():
    def both(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits, target), logits.argmax(-1)

    given = (tensor(S, D), tensor(100, D), torch.randint(100, (S,)))
    (graph,) = adapter.capture(both, *given).graphs
    assert swap.apply(graph, ["linear with cross-entropy"])[1] == []


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: F.rms_norm(x, (S, D), w), [(B, S, D), (S, D)]),  # two dimensions
        (lambda x: F.softmax(x, dim=0), [(S, D)]),
        (lambda g, u: F.silu(g) * u, [(S, D), (1, D)]),  # a broadcast
        (lambda x, w: (y := F.linear(x, w), F.relu(y)), [(S, D), WEIGHT]),  # y is needed too
        (lambda x, w, r: F.linear(x, w) + r, [(S, D), WEIGHT, (3 * D,)]),
        (lambda a, b, c: torch.relu((a + b) * c), [(S, D), (S, D), (D,)]),
        (lambda q, k, c, s: q * c + rotate_half(k) * s, [(B, H, S, D)] * 2 + [(S, D)] * 2),
    ],
)
def test_leaves_alone_what_it_cannot_do(function, shapes):
    rules, _, _ = swapped(function, *(tensor(*shape) for shape in shapes))
    assert rules == []


def test_a_loss_in_bfloat16_is_left_alone():
    logits = tensor(S, 100, dtype=torch.bfloat16)
    rules, _, _ = swapped(F.cross_entropy, logits, torch.randint(100, (S,)))
    assert rules == []


class Block(nn.Module):
    """A sum that a matmul and a norm would both take."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(D, D, bias=False)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(x)
        return self.norm(x) + x


def test_rules_that_exclude_one_another_apply_in_the_given_order():
    block, x = Block(), tensor(S, D)
    (graph,) = adapter.capture(block, x).graphs
    both = ["linear with residual", "norm with residual", "norm"]
    assert {site.rule for site in swap.find(graph)} == set(both[:2])
    for rules, expected in ((both, {both[0], both[2]}), (both[1:], {both[1]})):
        changed, sites = swap.apply(graph, rules)
        assert {site.rule for site in sites} == expected
        torch.testing.assert_close(changed.module(*graph.inputs)[0], block(x))


def test_the_graph_itself_is_not_changed():
    (graph,) = adapter.capture(CASES["softmax"][0], tensor(S, D)).graphs
    before = str(graph.module.graph)
    swap.apply(graph, list(RULES))
    assert str(graph.module.graph) == before


def test_a_site_knows_its_line():
    (graph,) = adapter.capture(Block(), tensor(S, D)).graphs
    (site,) = swap.apply(graph, ["linear with residual"])[1]
    assert site.frame is not None
    assert site.frame.file == __file__
    assert site.frame.code == "x = x + self.out(x)"
