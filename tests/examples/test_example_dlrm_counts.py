"""What a DLRM step launches and moves: bytes by operator, phases, kinds, compiled kernels."""

import pytest
import torch
from torch import nn

import fusedcuda
from examples.dlrm import step
from examples.dlrm.counts import (
    Counter,
    Work,
    count_compiled,
    count_step,
    kind_of_compiled,
    touched,
)
from examples.dlrm.models import FusedDLRM, PlainDLRM, reduced
from examples.traces import (
    BACKWARD,
    COPY,
    ELEMENTWISE,
    FORWARD,
    FUSED,
    GATHER,
    MATMUL,
    OPTIMIZER,
)
from fusedcuda.demo.dlrm import CONFIGS


def counted(*functions) -> list[Work]:
    with Counter() as counter, counter.phase(FORWARD):
        for function in functions:
            function()
    return counter.work


def test_bytes_of_operators():
    x, y = torch.empty(8, 16, device="meta"), torch.empty(16, device="meta")
    table, ids = torch.empty(1000, 16, device="meta"), torch.zeros(4, 3, device="meta").long()
    work = counted(
        lambda: torch.relu(x),
        lambda: x + y.expand(8, 16),  # y has 16 elements, however often it is read
        lambda: x.add_(1),
        lambda: x.t().view(16, 8),
        lambda: nn.functional.embedding(ids, table),
        lambda: torch._foreach_mul_([x, y], 0.5),
        lambda: x.new_empty(3),
    )
    assert [(item.name, item.kind, item.bytes) for item in work] == [
        ("aten::relu", ELEMENTWISE, 2 * 512),
        ("aten::add", ELEMENTWISE, 2 * 512 + 64),
        ("aten::add_", ELEMENTWISE, 2 * 512),
        ("aten::embedding", GATHER, 4 * 3 * 8 + 2 * 4 * 3 * 64),
        ("aten::_foreach_mul_", ELEMENTWISE, 2 * (512 + 64)),
    ]


def test_touched_bytes_are_those_of_distinct_elements():
    x = torch.empty(4, 1, 6)
    assert touched(x) == touched(x.expand(4, 9, 6)) == 96
    assert touched(torch.empty(0, 3)) == 0
    assert touched(torch.empty(())) == 4


def test_backward_of_a_layer_is_a_derivative_and_two_products():
    x, w = (torch.empty(*s, device="meta", requires_grad=True) for s in ((128, 64), (256, 64)))
    bias = torch.empty(256, device="meta", requires_grad=True)
    y = fusedcuda.linear_act(x, w, bias, "relu")
    dy = torch.empty_like(y)
    work = [item for item in counted(lambda: y.backward(dy)) if "linear_act" in item.name]
    m_n, m_k, n_k = 4 * 128 * 256, 4 * 128 * 64, 4 * 256 * 64
    mask = 128 * 256 // 8
    moved = m_n + m_k + n_k
    assert [(item.kind, item.bytes) for item in work] == [
        (ELEMENTWISE, 2 * m_n + mask), (MATMUL, moved), (MATMUL, moved),
    ]  # fmt: skip


def test_a_step_of_the_published_size_is_counted_without_its_memory():
    sizes = (CONFIGS["mlperf-v1"], 1_000_000, 65536, torch.bfloat16, step.OPTIMIZERS["sgd"])
    plain, fused = (count_step(kind, *sizes) for kind in (PlainDLRM, FusedDLRM))
    layers = len(CONFIGS["mlperf-v1"].linear_shapes)
    products = [work for work in plain if work.kind == MATMUL]
    assert sum(work.phase == FORWARD for work in products) == layers + 1  # and the interaction
    assert sum(work.phase == BACKWARD for work in products) == 2 * layers - 1 + 2
    assert {work.kind for work in plain if work.phase == OPTIMIZER} == {ELEMENTWISE}
    # Dense tables: the update reads weight and gradient and writes the weight.
    table = 26_000_000 * 128 * 2
    updated = sum(work.bytes for work in plain if work.phase == OPTIMIZER)
    assert 3 * table < updated < 3 * table * 1.01
    # No [65536, 27, 27] products: the interaction of the fused model is one op each way.
    interactions = [work for work in fused if "interaction" in work.name]
    assert [(work.kind, work.phase) for work in interactions] == [
        (FUSED, FORWARD),
        (FUSED, BACKWARD),
    ]
    # Of the table what is looked up, which is not in memory between.
    looked_up, indices = 65536 * 26 * 128 * 2, 65536 * 26 * 8
    row, vector = 65536 * 480 * 2, 65536 * 128 * 2
    assert interactions[0].bytes == vector + looked_up + indices + row
    assert interactions[1].bytes == 2 * (vector + looked_up) + indices + row
    assert len(fused) < len(plain)
    moved = [
        sum(work.bytes for work in items if work.phase != OPTIMIZER) for items in (plain, fused)
    ]
    assert moved[1] < 0.7 * moved[0]


def test_compiled_code_is_counted_by_what_is_in_its_kernels():
    config = reduced(CONFIGS["kaggle"])
    work = count_compiled(config, 20, 64, torch.bfloat16)
    layers = len(config.linear_shapes)
    products = [w.phase for w in work if w.kind == MATMUL for _ in range(w.launches)]
    assert products.count(FORWARD) == layers + 1
    assert {FORWARD, BACKWARD} == {item.phase for item in work}
    assert any(item.kind == GATHER for item in work)
    assert any(item.kind == ELEMENTWISE for item in work)


@pytest.mark.parametrize(
    ("kind", "ops", "expected"),
    [
        ("pointwise", ["gather", "relu", "concat or pad"], GATHER),
        ("pointwise", ["concat or pad"], COPY),
        ("pointwise", ["relu", "concat or pad"], ELEMENTWISE),
        ("copy", ["fill"], COPY),
        ("template", ["matmul", "relu"], MATMUL),
    ],
)
def test_kinds_of_compiled_kernels(kind, ops, expected):
    assert kind_of_compiled(kind, ops, "triton_") == expected
