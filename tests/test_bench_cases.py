"""The benchmarks' cases: on small shapes they run, agree, and count their bytes right."""

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # bench is not part of the installed package

from scripted_backend import ScriptedBackend, by_name

from bench import bench_cross_entropy as cross_entropy
from bench import bench_dlrm as dlrm
from bench import bench_gated_mlp as gated_mlp
from bench import bench_linear_cross_entropy as linear_cross_entropy
from bench import bench_lora as lora
from bench import bench_norm as norm
from bench import bench_pointwise as pointwise
from bench import bench_rope as rope
from bench import bench_softmax as softmax
from bench.cases import ALIGNED, MATMUL, MODES, QUACK_ELSEWHERE, random
from bench.measure import measure
from bench.tuning import variants

ROOT = Path(__file__).parents[1]
BF16 = torch.bfloat16
POINTWISE = [
    pointwise.add_mul_act((6, 8), BF16),
    pointwise.add_mul_act((5, 7), torch.float32),
    pointwise.add_relu((40,), BF16, "forward", offset=1),
    *(pointwise.add_relu((6, 8), BF16, mode) for mode in ("forward", "backward")),
    *(
        pointwise.bias_act((6, 8), BF16, activation, mode)
        for activation in ("relu", "gelu_tanh")
        for mode in ("forward", "backward")
    ),
    *(pointwise.act_scale_bias((6, 8), BF16, mode) for mode in ("forward", "backward")),
    *(pointwise.act_mul_packed(6, 8, BF16, mode) for mode in ("forward", "backward")),
]
BOTH = [
    pointwise.add_relu((6, 8), BF16, "both"),
    pointwise.bias_act((6, 8), BF16, "gelu_tanh", "both"),
    pointwise.act_scale_bias((6, 8), BF16, "both"),
    pointwise.act_mul_packed(6, 8, BF16, "both"),
]
SMALL_ROPE = {"heads": (3, 2), "batch": 2, "sequence": 5, "d": 8}
ROWS = [
    case
    for mode in MODES
    for case in (
        norm.rms_norm((6, 40), BF16, mode),
        norm.rms_norm((6, 41), BF16, mode, variant="odd"),
        norm.rms_norm((6, 40), BF16, mode, variant="fp32-weight", weight_dtype=torch.float32),
        norm.rms_norm((9, 1), BF16, mode, peers=False),
        norm.rms_norm((6, 40), torch.float32, mode),
        norm.rms_norm_residual((6, 40), BF16, mode),
        norm.layer_norm((6, 40), BF16, mode),
        norm.layer_norm((6, 41), BF16, mode, variant="odd"),
        softmax.softmax((6, 40), BF16, mode),
        softmax.softmax((6, 41), BF16, mode, variant="odd"),
        softmax.log_softmax((6, 40), BF16, mode),
        *(
            rope.rope(layout, mode, interleaved=interleaved, **SMALL_ROPE)
            for layout in ("bshd", "bhsd")
            for interleaved in (False, True)
        ),
    )
]
LOSSES = [
    cross_entropy.cross_entropy((6, 40)),
    cross_entropy.cross_entropy((6, 40), "forward"),
    cross_entropy.cross_entropy((6, 41), variant="odd"),
    cross_entropy.cross_entropy((6, 40), variant="none", options={"reduction": "none"}),
    cross_entropy.cross_entropy(
        (6, 40), variant="all", options={"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
    ),
    cross_entropy.in_place((6, 40)),
]
DLRM = [
    case
    for mode in MODES
    for case in (
        dlrm.dot_interaction(6, 16, mode),
        dlrm.dot_interaction(6, 24, mode, count=5),
        dlrm.embedding_interaction(6, 16, mode, rows=40),
        dlrm.linear_sigmoid_bce(40, 24, mode),
    )
] + [dlrm.table_gradient(70, 16, rows=40)]
LORA = [
    *(lora.lora_linear((6, 16, 24), mode, rank=5) for mode in (*MODES, "both")),
    lora.lora_down(6, 40, 5),
]
GATED = [gated_mlp.gated_mlp((m, 24, 40), mode) for m in (6, 70) for mode in ("forward", "both")]
SMALL_LARGE, SMALL_LEAN = (linear_cross_entropy.Setting(rows, "weight") for rows in (4, 1))
LINEAR_LOSSES = [
    linear_cross_entropy.both((7, 16, 40), SMALL_LARGE),
    linear_cross_entropy.both((7, 16, 41), SMALL_LEAN, "lean"),
    linear_cross_entropy.forward((7, 16, 40)),
    linear_cross_entropy.a_loss_a_row((7, 16, 40)),
]
# Those whose variants are text replaced in the sources, and all.
TUNED = {"pointwise": pointwise, "norm": norm, "softmax": softmax, "lora": lora,
         "cross_entropy": cross_entropy, "rope": rope, "dlrm": dlrm}  # fmt: skip
MODULES = {**TUNED, "gated_mlp": gated_mlp, "linear_cross_entropy": linear_cross_entropy}
HOST = [case for module in MODULES.values() for case in module.build_cases() if case.host_only]


@pytest.mark.parametrize(
    "case",
    POINTWISE + BOTH + ROWS + LOSSES + DLRM + LORA + GATED + LINEAR_LOSSES + HOST,
    ids=lambda c: c.label,
)
def test_cases_agree_with_their_reference(case):
    here = ("fusedcuda", "eager", "native", ALIGNED, "addmm", "K-extension", "peft", lora.BASE)
    here = (*here, "fusedcuda, apart", "fusedcuda, residual", "cublas", MATMUL, "concatenated")
    here = (*here, "fusedcuda, fused", "fusedcuda, packed", "fusedcuda, concatenated")
    here = (*here, "fusedcuda, recompute", "fusedcuda, fp32 sum", "fusedcuda, one chunk")
    providers = {name: p for name, p in case.providers.items() if name in here}
    backend = ScriptedBackend([1.5] * (len(providers) + 1))
    results = by_name(measure(replace(case, providers=providers), backend, rounds=3))
    assert {name: result.error for name, result in results.items()} == dict.fromkeys(results, "")


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", POINTWISE, ids=lambda case: case.label)
def test_pointwise_bytes_are_those_of_the_tensors(case):
    inputs = case.make_inputs(torch.Generator().manual_seed(0))
    output = case.reference(*inputs)
    expected = sum(t.nbytes for t in inputs) + output.nbytes
    if case.mode == "backward":
        # Grad in, gradients out; what the formulas need of the forward differs by operation.
        read_again = {
            "add_relu": output.nbytes,
            "bias_act": output.nbytes if "relu" in case.label else sum(t.nbytes for t in inputs),
            "act_scale_bias": inputs[0].nbytes + inputs[1].nbytes if len(inputs) > 1 else 0,
            "act_mul_packed": inputs[0].nbytes,
        }[case.kernel]
        written = sum(t.nbytes for t in inputs)
        if case.kernel == "add_relu":
            written = inputs[0].nbytes  # one gradient, shared by both operands
        expected = output.nbytes + read_again + written
    assert case.traffic.bytes == expected


def test_the_packed_backward_moves_ten_bytes_an_output_element():
    case = pointwise.act_mul_packed(8, 16, BF16, "backward")
    assert case.traffic.bytes == 10 * 8 * 16


def test_an_offset_breaks_the_alignment():
    (x,) = random([(8,)], BF16, offset=1)(torch.Generator())
    assert x.data_ptr() % 16 == 2


ROW_BYTES = [  # of 8 rows of 16 elements, 128 in all
    (norm.rms_norm, {"forward": 4 * 128 + 2 * 16, "backward": 6 * 128 + 4 * 16}),
    (norm.rms_norm_residual, {"forward": 8 * 128 + 2 * 16, "backward": 8 * 128 + 4 * 16}),
    (norm.layer_norm, {"forward": 4 * 128 + 4 * 16, "backward": 6 * 128 + 8 * 16}),
    (softmax.softmax, {"forward": 4 * 128, "backward": 6 * 128}),
    (softmax.log_softmax, {"forward": 4 * 128, "backward": 6 * 128}),
]


@pytest.mark.parametrize(
    ("operation", "by_mode"), ROW_BYTES, ids=lambda v: getattr(v, "__name__", "")
)
def test_row_operations_move_so_many_bytes(operation, by_mode):
    for mode, expected in by_mode.items():
        assert operation((8, 16), BF16, mode).traffic.bytes == expected, mode


def test_other_bytes_of_rows():
    fp32_weight = norm.rms_norm((8, 16), BF16, "forward", weight_dtype=torch.float32)
    assert fp32_weight.traffic.bytes == 4 * 128 + 4 * 16
    assert cross_entropy.cross_entropy((8, 16)).traffic.bytes == 6 * 128
    assert cross_entropy.cross_entropy((8, 16), "forward").traffic.bytes == 2 * 128
    heads = (3 + 2) * 2 * 5 * 8
    assert rope.rope("bshd", "backward", **SMALL_ROPE).traffic.bytes == 4 * heads + 2 * 2 * 5 * 8
    vectors, row = 2 * 6 * 27 * 16, 2 * 6 * 368
    assert dlrm.dot_interaction(6, 16, "forward").traffic.bytes == vectors + row
    assert dlrm.dot_interaction(6, 16, "backward").traffic.bytes == 2 * vectors + row
    dense, looked_up, indices = 2 * 6 * 16, 2 * 6 * 26 * 16, 8 * 6 * 26
    for rows, read in ((40, 2 * 40 * 16), (400, looked_up)):
        lookup = partial(dlrm.embedding_interaction, 6, 16, rows=rows)
        assert lookup("forward").traffic.bytes == dense + read + indices + row
        kernel = 2 * dense + read + indices + row + looked_up
        sums = looked_up + indices + 2 * rows * 16
        assert lookup("backward").traffic.bytes == kernel + sums
        assert dlrm.table_gradient(6 * 26, 16, rows).traffic.bytes == sums
    x, weight = 2 * 40 * 24, 2 * 24
    assert dlrm.linear_sigmoid_bce(40, 24, "forward").traffic.bytes == x + weight + 3 * 4 * 40
    assert dlrm.linear_sigmoid_bce(40, 24, "backward").traffic.bytes == 2 * (x + weight) + 4 * 40
    x, y, weight, factors = 2 * 6 * 24, 2 * 6 * 16, 2 * 16 * 24, 2 * 5 * (16 + 24)
    layer = partial(lora.lora_linear, (6, 16, 24), rank=5)
    assert layer("forward").traffic.bytes == x + weight + factors + y
    assert layer("backward").traffic.bytes == y + x + weight + factors + x + factors
    few, many = (gated_mlp.gated_mlp((m, 16, 24), "forward").traffic.bytes for m in (6, 100))
    weights = 2 * 3 * 16 * 24
    assert few == weights + 2 * 6 * 2 * 16
    assert many == weights + 2 * 100 * (2 * 16 + 2 * 24)
    both = gated_mlp.gated_mlp((100, 16, 24), "both").traffic.bytes
    assert both == 3 * weights + 2 * 100 * (5 * 16 + 13 * 24)
    x, weight, logits = 2 * 7 * 16, 2 * 40 * 16, 2 * 7 * 40
    loss = linear_cross_entropy.forward((7, 16, 40))
    assert loss.traffic.bytes == x + weight + 2 * logits
    loss = linear_cross_entropy.both((7, 16, 40), SMALL_LARGE)
    assert loss.traffic.bytes == 3 * x + 3 * weight + 5 * logits


# -- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "strides"), [("bshd", (120, 8, 24, 1)), ("bhsd", (120, 40, 8, 1))]
)
def test_rope_operands_have_the_layout_of_their_name(layout, strides):
    case = rope.rope(layout, "forward", **SMALL_ROPE)
    q, k, cos, sin = case.make_inputs(torch.Generator())
    assert (q.shape, q.stride()) == ((2, 3, 5, 8), strides)
    assert k.shape == (2, 2, 5, 8)
    assert cos.shape == sin.shape == (1, 5, 8)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), rtol=0, atol=0.02)


def test_rope_tables_have_the_angle_of_a_pair_at_both_its_places():
    halves, pairs = (rope.tables(5, 8, i, torch.device("cpu"))[0][0] for i in (False, True))
    assert (halves[:, :4] == halves[:, 4:]).all()
    assert (pairs[:, ::2] == pairs[:, 1::2]).all()
    assert (halves[:, :4] == pairs[:, ::2]).all()


def test_targets_stay_in_range_without_the_last_class():
    logits, target = cross_entropy.one_class_less((torch.randn(3, 5), torch.tensor([4, 3, 0])))
    assert logits.shape == (3, 4)
    assert target.tolist() == [3, 3, 0]


# -- the lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_labels_are_unique_and_every_target_has_its_case(module):
    cases = module.build_cases()
    labels = [case.label for case in cases]
    assert len(set(labels)) == len(labels)
    quick = {case.label for case in cases if case.quick}
    assert set(module.TARGETS) <= quick
    assert {case.label for case in cases if case.targets} <= quick
    for case in cases:
        peers = {"best", *case.providers}
        assert {t.peer for t in case.targets} - peers <= {"liger"}  # where it is installed
        if case.panel:
            assert int(case.x_value) > 0


def test_pointwise_sizes_fit_a_card():
    cases = [case for case in pointwise.build_cases() if case.group != "host"]
    assert all(prod(map(int, case.x_value.split("x"))) <= 2**28 for case in cases)


@pytest.mark.parametrize(
    "module",
    [norm, softmax, cross_entropy, gated_mlp, linear_cross_entropy],
    ids=lambda m: m.__name__,
)
def test_published_times_have_their_case_and_give_way_to_the_peer_itself(module):
    cases = {case.label: case for case in module.build_cases()}
    for label, us in module.QUACK_US.items():
        case = cases[label]
        expected = {} if "quack" in case.providers else {QUACK_ELSEWHERE: us}
        assert case.published == expected
        # Above what the card's memory can do, the number or the bytes would be wrong.
        assert 0.1 < case.traffic.bytes / us / 1e6 < 4.8


def test_plots_have_a_point_for_every_power_of_two():
    panels = {}
    for case in norm.build_cases():
        if case.panel:
            panels.setdefault(case.panel, set()).add(int(case.x_value))
    assert panels["rms_norm forward, bf16"] == {2**k for k in range(10, 19)}
    assert panels["rms_norm backward, bf16"] == {2**k for k in range(10, 19)}


# -- variants of kernels --------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*TUNED, "linear_act"])
def test_replacements_occur_in_the_sources(family, tmp_path):
    tried = import_module(f"bench.tuning.{family}_cases").VARIANTS
    assert next(iter(tried.values())) == {}  # the first is what the others are compared with
    for replacements in tried.values():
        variants.prepare(tmp_path / "csrc", ROOT / "csrc", replacements)


def test_a_replacement_that_does_not_occur_is_an_error(tmp_path):
    source, copy = tmp_path / "csrc", tmp_path / "copy"
    source.mkdir()
    (source / "a.cu").write_text("kTile = 32;")
    variants.prepare(copy, source, {"kTile = 32": "kTile = 64"})
    assert (copy / "a.cu").read_text() == "kTile = 64;"
    with pytest.raises(SystemExit, match="kTile = 16"):
        variants.prepare(copy, source, {"kTile = 16": "kTile = 8"})
    assert (source / "a.cu").read_text() == "kTile = 32;"


@pytest.mark.parametrize(
    "family", ["norm", "softmax", "cross_entropy", "rope", "dlrm", "lora", "linear_act"]
)
def test_the_calls_that_are_tuned_are_accepted(family, monkeypatch):
    module = import_module(f"bench.tuning.{family}_cases")
    small = {"ROW_ELEMENTS": 2**15, "ROW_LENGTHS": (8, 1024, 5000), "POSITIONS": 3,
             "SHAPES": [(3, 10), (2, 7)], "BATCH": 5, "FEW": (3, 40, 24),
             "COLD_BYTES": 1 << 8}  # fmt: skip
    for name, value in small.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "new", lambda *shape, dtype=BF16: torch.randn(shape).to(dtype))
    for name, call in module.cases().items():
        call()
        assert name.isprintable()


def test_the_table_of_variants_has_a_gap_where_a_call_failed():
    line = variants.table_line("wide", 6, ["fwd 1024", "bwd"], {"fwd 1024": 12.345})
    assert line == "wide       12.35    -"
