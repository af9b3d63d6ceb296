"""What `fusedcuda.explain` says of the families that reduce over rows; it needs no GPU."""

import pytest
import torch
from layouts import shifted, transposed
from torch import Tensor
from torch.autograd import DeviceType

import fusedcuda
from fusedcuda import cross_entropy, explain, layer_norm, log_softmax, rms_norm, softmax

BF16 = torch.bfloat16
FAMILIES = ("norm", "softmax", "cross_entropy")
DIRECTIONS = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    for family in FAMILIES:
        load_family(family)


def target_of(logits: Tensor) -> Tensor:
    return torch.zeros(logits.shape[:-1], dtype=torch.long)


def explain_cross_entropy(logits: Tensor, *, backward: bool = False, **options):
    return explain(cross_entropy, logits, target_of(logits), backward=backward, **options)


EXPLAINED = {
    "rms_norm": lambda x, **how: explain(rms_norm, x, **how),
    "layer_norm": lambda x, **how: explain(layer_norm, x, **how),
    "softmax": lambda x, **how: explain(softmax, x, **how),
    "log_softmax": lambda x, **how: explain(log_softmax, x, **how),
    "cross_entropy": lambda x, **how: explain_cross_entropy(x, reduction="none", **how),
}
EVERY_OP = pytest.mark.parametrize("op", EXPLAINED)


# ---------------------------------------------------------------------------- paths


@DIRECTIONS
@EVERY_OP
def test_aligned_rows_go_in_vectors(op, backward):
    for dtype, width in ((torch.float32, 4), (torch.float16, 8), (BF16, 8)):
        for columns in (8, 1024, 32_768):
            explanation = EXPLAINED[op](torch.empty(300, columns, dtype=dtype), backward=backward)
            plan = explanation.plan
            assert plan["path"] in ("register", "pipeline")
            assert (plan["rows"], plan["columns"], plan["vec"]) == (300, columns, width)
            assert (plan["aligned"], plan["copies"]) == (True, [])
            assert explanation.function == op
            assert str(explanation).startswith(f"{op}: 1 kernel")
            assert "rows: 16-byte vectors\n" in f"{explanation}\n"


@DIRECTIONS
@EVERY_OP
def test_threads_and_blocks_hold_every_row(op, backward):
    for columns in (1, 7, 64, 1000, 4096, 50_257, 262_144):
        plan = EXPLAINED[op](torch.empty(77, columns, dtype=BF16), backward=backward).plan
        tiles = plan.get("tiles", 1)
        held = plan["vec"] * plan["items"] * plan["threads_per_row"] * plan["cluster"] * tiles
        if plan["path"] == "stream":
            assert plan["blocks"] == 77
            continue
        assert held >= columns
        if plan["path"] == "register":
            assert plan["blocks"] * plan["rows_per_block"] >= 77 * plan["cluster"] * tiles
        assert plan["threads_per_row"] * plan["rows_per_block"] <= 1024


@DIRECTIONS
@EVERY_OP
def test_why_rows_are_not_whole_vectors(op, backward):
    odd = EXPLAINED[op](torch.empty(300, 1027, dtype=BF16), backward=backward)
    assert not odd.plan["aligned"]
    assert "at the ends: 1027 elements are not whole vectors of 8" in str(odd)


@EVERY_OP
def test_rows_that_start_off_the_boundary(op):
    x = shifted(torch.empty(300, 1024, dtype=BF16), 1)
    explanation = EXPLAINED[op](x)
    assert not explanation.plan["aligned"]
    assert "start off a 16-byte boundary" in str(explanation)


@DIRECTIONS
@EVERY_OP
def test_why_a_row_is_read_several_times(op, backward):
    if backward and op == "cross_entropy":
        pytest.skip("its backward reduces nothing")
    for columns, dtype, why in (
        (64, torch.float64, "float64 has no other kernel"),
        (1 << 21, BF16, "2097152 elements are more than the registers of a row's blocks hold"),
    ):
        explanation = EXPLAINED[op](torch.empty(3, columns, dtype=dtype), backward=backward)
        assert explanation.plan["path"] == "stream"
        assert f"a block walks along its row several times: {why}" in str(explanation)


def test_rows_of_the_norms_by_clusters_come_through_shared_memory():
    plan = explain(rms_norm, torch.empty(4096, 65_536, dtype=BF16)).plan
    assert plan["path"] == "pipeline"
    assert plan["cluster"] > 1
    assert plan["stages"] >= 1
    assert 0 < plan["shared_bytes"] <= 227 << 10


@DIRECTIONS
@EVERY_OP
def test_copies_are_named_and_counted(op, backward):
    x = transposed(torch.empty(300, 1024, dtype=BF16))
    name = "logits" if op == "cross_entropy" else "x"
    contiguous = EXPLAINED[op](x.contiguous(), backward=backward)
    explanation = EXPLAINED[op](x, backward=backward)
    if backward and op.endswith("softmax"):  # reads the output only
        assert explanation == contiguous
        return
    assert contiguous.plan["copies"] == []
    assert explanation.plan["copies"] == [name]
    assert explanation.kernels == contiguous.kernels + 1
    assert explanation.bytes_moved == contiguous.bytes_moved + 2 * 300 * 1024 * 2
    assert f"{name}: copied first, its rows do not lie one stride apart" in str(explanation)


def test_rows_with_a_stride_are_not_copied():
    for x in (torch.empty(300, 2048, dtype=BF16)[:, :1024], torch.empty(1, 1024).expand(300, 1024)):
        assert explain(softmax, x).plan["copies"] == []


@DIRECTIONS
@EVERY_OP
def test_nothing_to_do(op, backward):
    explanation = EXPLAINED[op](torch.empty(0, 16), backward=backward)
    assert explanation.plan["path"] == "empty"
    assert (explanation.kernels, explanation.bytes_moved) == (0, 0)


# ---------------------------------------------------------------------------- norms


def test_bytes_and_kernels_of_the_norms():
    x, r = torch.empty(2, 64, 256, dtype=BF16)
    w, f = torch.empty(256, dtype=BF16), torch.empty(256)
    half = torch.empty(256, dtype=torch.float16)
    s = x.nbytes
    for function, arguments, residual, forward, backward in (
        (rms_norm, (x,), None, (1, 2 * s), (1, 3 * s)),
        (rms_norm, (x, w), None, (1, 2 * s + 512), (2, 3 * s + 2 * 512)),
        (rms_norm, (x, w), r, (1, 4 * s + 512), (2, 4 * s + 2 * 512)),
        (layer_norm, (x, w, w), None, (1, 2 * s + 2 * 512), (2, 3 * s + 3 * 512)),
        # Gradients of two dtypes are added up by two kernels.
        (layer_norm, (x, w, f), None, (1, 2 * s + 512 + 1024), (3, 3 * s + 2 * 512 + 1024)),
        # float16 beside bfloat16 is converted (512 bytes read and 512 counted as written), and its
        # gradient converted back.
        (rms_norm, (x, half), None, (2, 2 * s + 3 * 512), (4, 3 * s + 4 * 512)),
    ):
        for is_backward, (kernels, moved) in ((False, forward), (True, backward)):
            explanation = explain(function, *arguments, residual=residual, backward=is_backward)
            assert (explanation.kernels, explanation.bytes_moved) == (kernels, moved)


def test_the_long_way_to_the_gradients_of_the_vectors():
    """dx, the partial sums and their sums, each by a kernel."""
    x, w = torch.empty(64, 256).double(), torch.empty(256).double()
    explanation = explain(layer_norm, x, w, w.clone(), backward=True)
    assert (explanation.plan["path"], explanation.kernels) == ("stream", 3)
    assert "partial sum(s) a column, added up" in str(explanation)


def test_a_vector_that_is_not_like_the_rows_is_copied():
    x, w = torch.empty(64, 256, dtype=BF16), torch.empty(512, dtype=BF16)[::2]
    explanation = explain(rms_norm, x, w)
    assert explanation.plan["copies"] == ["weight"]
    assert "weight: copied first, to another dtype, or" in str(explanation)


# ---------------------------------------------------------------------------- cross-entropy


def test_the_ways_to_the_gradient_of_the_logits():
    logits = torch.empty(512, 32_000, dtype=BF16)
    n = logits.nbytes
    leaf = logits.clone().requires_grad_()
    for x, options, backward, kernels, moved, words in (
        (logits, {}, False, 2, n, ""),
        (leaf, {}, False, 3, 2 * n, "the gradient is made on the way"),
        (leaf, {"reduction": "sum"}, False, 2, 2 * n, "the gradient is made on the way"),
        (leaf, {}, True, 1, 0, "nothing is moved where the incoming one is 1"),
        (leaf, {"reduction": "none"}, False, 1, n, ""),
        (leaf, {"reduction": "none"}, True, 1, 2 * n, ""),
        (leaf, {"inplace_backward": True}, False, 2, n, ""),
        (leaf, {"inplace_backward": True}, True, 1, 2 * n, "written over the logits"),
    ):
        explanation = explain_cross_entropy(x, backward=backward, **options)
        assert (explanation.kernels, explanation.bytes_moved) == (kernels, moved)
        assert words in str(explanation)


def test_options_of_the_cross_entropy_count():
    logits, weight = torch.empty(512, 32_000, dtype=BF16), torch.ones(32_000)
    plain = explain_cross_entropy(logits).plan
    capped = explain_cross_entropy(logits, softcap=30.0).plan
    assert capped["items"] < plain["items"]  # the cap takes registers
    how = {"reduction": "none", "weight": weight, "backward": True}
    assert explain_cross_entropy(logits, **how).kernels == 1
    smoothed = explain_cross_entropy(logits, label_smoothing=0.1, **how)
    assert smoothed.kernels == 2  # one for the sum of the weights
    assert smoothed.bytes_moved == 2 * logits.nbytes + weight.nbytes


# ---------------------------------------------------------------------------- errors, and the GPU


def test_what_the_call_refuses_explain_refuses():
    x = torch.empty(4, 8)
    target = torch.zeros(4, dtype=torch.long)
    for error, function, arguments, keywords, message in (
        (TypeError, rms_norm, (x,), {"bias": x}, "^explain: rms_norm: .*'bias'"),
        (TypeError, rms_norm, (x.long(),), {}, "^rms_norm: x must be"),
        (ValueError, layer_norm, (x, x), {}, "^layer_norm: weight must have shape"),
        (ValueError, layer_norm, (x,), {"residual": x[:2]}, "^layer_norm: residual"),
        (TypeError, softmax, (x,), {"scale": "2"}, "^softmax: scale must be a number"),
        (ValueError, log_softmax, (x[0, 0],), {}, "^log_softmax: x must have"),
        (ValueError, cross_entropy, (x, target[:2]), {}, "^cross_entropy: target"),
        (ValueError, cross_entropy, (x, target), {"reduction": "all"}, "^cross_entropy: reduction"),
        (ValueError, cross_entropy, (x, target), {"softcap": -1.0}, "^cross_entropy: softcap"),
    ):
        with pytest.raises(error, match=message):
            explain(function, *arguments, **keywords)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax", "cross_entropy"])
def test_as_many_kernels_run_as_are_explained(op):
    for columns, dtype in ((1024, BF16), (65_536, BF16), (1 << 21, BF16), (64, torch.float64)):
        x = torch.randn(64, columns, dtype=dtype, device="cuda").requires_grad_()
        vector = torch.ones(columns, dtype=dtype, device="cuda").requires_grad_()
        arguments = {
            "rms_norm": (x, vector),
            "layer_norm": (x, vector, vector.detach().float().requires_grad_()),
            "softmax": (x,),
            "cross_entropy": (x, torch.zeros(64, dtype=torch.long, device="cuda")),
        }[op]
        function = getattr(fusedcuda, op)
        output = function(*arguments)
        grad = torch.ones_like(output)
        leaves = [t for t in arguments if t.requires_grad]

        def forward(function=function, arguments=arguments):
            function(*arguments)

        def backward(output=output, leaves=leaves, grad=grad):
            torch.autograd.grad(output, leaves, grad)

        for run, is_backward in ((forward, False), (backward, True)):
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                run()
                torch.cuda.synchronize()
            launched = sum(event.device_type == DeviceType.CUDA for event in prof.events())
            assert launched == explain(function, *arguments, backward=is_backward).kernels
