"""The real cross-entropy kernels, run by the emulator of this folder, against float64 autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_emulator import PLAIN, CrossEntropyEmulator, Options, compute_dtype
from emulator import DTYPES, EmulationError
from layouts import pitched, shifted
from row_emulator import RowConfig, assert_rounded
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
ALL = Options(label_smoothing=0.1, z_loss=1e-2, softcap=2.5)
EVERY_OPTION = pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        Options(label_smoothing=0.2),
        Options(z_loss=1e-2),
        Options(softcap=1.5),
        ALL,
        Options(label_smoothing=1.0),
    ],
    ids=["plain", "smoothing", "z_loss", "softcap", "all", "only-smoothing"],
)


@pytest.fixture
def entropy(build_family: Callable[[str], Path]) -> CrossEntropyEmulator:
    return CrossEntropyEmulator(build_family("cross_entropy"))


def expected_loss(x: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> Tensor:
    """The definition, with torch's own cross-entropy for the part that torch has."""
    if options.softcap:
        x = options.softcap * torch.tanh(x / options.softcap)
    loss = F.cross_entropy(
        x,
        target.long(),
        weight=None if weight is None else weight.double(),
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    if not options.z_loss:
        return loss
    valid = target != options.ignore_index
    penalty = options.z_loss * torch.where(valid, x.logsumexp(-1).square(), 0.0)
    if options.reduction == "none":
        return loss + penalty
    return loss + (penalty.sum() / valid.sum() if options.reduction == "mean" else penalty.sum())


def check(
    entropy: CrossEntropyEmulator,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    options: Options = PLAIN,
) -> RowConfig:
    """Everything the forward returns and every way to the gradient; returns what it chose."""
    leaf = logits.double().requires_grad_()
    loss = expected_loss(leaf, target, weight, options)
    grad_loss = torch.rand(loss.shape).to(compute_dtype(logits)) + 0.5
    ones, scaled = (
        torch.autograd.grad(loss, leaf, g, retain_graph=True)[0]
        for g in (torch.ones_like(loss), grad_loss.double())
    )
    valid = target != options.ignore_index
    weights = torch.ones(logits.shape[-1]) if weight is None else weight

    actual, statistics, normalizer, gradient = entropy.forward(
        logits, target, weight, options, with_gradient=True
    )
    config = entropy.config
    assert_rounded("loss", actual, loss.detach(), ulps=64)
    assert_rounded("gradient", gradient, ones)
    capped = leaf if not options.softcap else options.softcap * torch.tanh(leaf / options.softcap)
    maximum, total = statistics.unbind(-1)
    assert_rounded("lse", maximum + total.log(), capped.detach().logsumexp(-1), ulps=8)
    if options.reduction != "none":
        sums = torch.stack([weights[target[valid].long()].double().sum(), valid.sum().double()])
        assert_rounded("normalizer", normalizer, sums, ulps=8)

    alone = entropy.forward(logits, target, weight, options)
    together = [actual, statistics, normalizer]  # the same bits with a gradient and without
    torch.testing.assert_close(alone, together, rtol=0, atol=0, equal_nan=True)

    saved = (logits, target, statistics, normalizer, weight, options)
    assert_rounded("backward", entropy.backward(grad_loss, *saved), scaled)
    in_place = entropy.backward(grad_loss, *saved, gradient=logits)
    assert_rounded("backward in place", in_place, scaled)
    return config


def make(rows: int, classes: int, dtype: torch.dtype, ignored: int = 1) -> tuple[Tensor, Tensor]:
    target = torch.randint(classes, (rows,))
    target[:ignored] = -100
    return (torch.randn(rows, classes) * 2).to(dtype), target


@EVERY_OPTION
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_options(entropy, options, reduction, weighted) -> None:
    fields = {**options.__dict__, "reduction": reduction}
    weight = torch.rand(70) + 0.1 if weighted else None
    check(entropy, *make(6, 70, torch.float32), weight, Options(**fields))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 2, 3, 7, 8, 63, 64, 127, 256, 1000])
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_sizes(entropy, classes, options, dtype) -> None:
    """Several rows a warp or a block, and a last block that has rows to spare."""
    weight = torch.rand(classes).to(torch.float64 if dtype == torch.float64 else torch.float32)
    config = check(entropy, *make(5, classes, dtype), weight + 0.1, options)
    assert config.path == ("stream" if dtype == torch.float64 else "register")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    ("vectors", "items", "cluster"), [(32, 1, 1), (33, 4, 1), (1500, 8, 1), (2060, 8, 2)]
)
def test_vectors_of_a_thread(entropy, vectors, items, cluster, dtype) -> None:
    classes = vectors * (16 // dtype.itemsize)
    config = check(entropy, *make(3, classes, dtype))
    if dtype == torch.float32 and items == 8:  # the same row in twice as many blocks
        items, cluster = 4, 2 * cluster
    assert (config.aligned, config.items, config.cluster) == (True, items, cluster)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clusters_with_every_option(entropy, dtype) -> None:
    for classes in (9000, 8999):
        weight = torch.rand(classes) + 0.1
        config = check(entropy, *make(2, classes, dtype), weight, ALL)
        assert (config.items, config.cluster > 1) == (4, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [pitched, lambda x: shifted(x, 1), lambda x: x[:, 1:]])
def test_rows_apart_from_their_gradients(entropy, layout, dtype) -> None:
    """Logits and gradients that are aligned differently."""
    for classes in (9, 300, 1030):
        logits, _ = make(3, classes, dtype)
        logits = layout(logits)
        target = torch.randint(logits.shape[-1], (3,))
        assert not check(entropy, logits, target).aligned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_rows_beyond_registers(entropy, options, dtype) -> None:
    """Without clusters; the stream kernel keeps nothing of a row."""
    entropy.clusters = False
    for classes in (40000, 40003):
        config = check(entropy, *make(2, classes, dtype), torch.rand(classes) + 0.1, options)
        assert config.path == "stream"


def test_int32_targets_and_a_class_that_is_ignored(entropy) -> None:
    logits, target = make(40, 10, torch.float32)
    target[0] = 3
    check(entropy, logits, target.int(), None, Options(ignore_index=3))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_many_rows(entropy, reduction) -> None:
    """Sums over rows by the blocks of a cluster."""
    options = Options(reduction=reduction, z_loss=1e-3)
    check(entropy, *make(9000, 3, torch.float32, ignored=100), torch.rand(3) + 0.1, options)
    assert entropy.totals_cluster == 4


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_rows_ignored(entropy, reduction, dtype) -> None:
    """As in torch: "mean" is NaN, and the gradient 0, whatever the logits."""
    logits, target = make(3, 20, dtype, ignored=3)
    logits[1] = math.nan
    logits[2] = -math.inf
    options = Options(reduction=reduction)
    loss, _, _, gradient = entropy.forward(logits, target, None, options, with_gradient=True)
    if reduction == "mean":
        assert loss.isnan()
    else:
        assert not loss.any()
    assert not gradient.any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_rows(entropy, reduction) -> None:
    logits, target = make(0, 20, torch.float32)
    options = Options(reduction=reduction)
    loss, _, normalizer, _ = entropy.forward(logits, target, None, options, with_gradient=True)
    assert loss.isnan() if reduction == "mean" else loss == 0
    assert not normalizer.any()


def test_weights_that_add_up_to_nothing(entropy) -> None:
    logits, target = make(3, 5, torch.float32)
    target[1:] = 2
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    check(entropy, logits, target, weight)


def check_part(
    entropy: CrossEntropyEmulator, logits: Tensor, target: Tensor, options: Options = PLAIN
) -> RowConfig:
    """Some of the rows: losses that nobody adds up, and the gradient over the logits."""
    count = torch.tensor([7.0, 7.0], dtype=compute_dtype(logits))  # of all rows
    leaf = logits.double().requires_grad_()
    losses = expected_loss(leaf, target, None, Options(**{**options.__dict__, "reduction": "none"}))
    divisor = 7 if options.reduction == "mean" else 1
    (ones,) = torch.autograd.grad(losses.sum() / divisor, leaf)
    normalizer = count[: 0 if options.reduction == "none" else 2]
    for with_gradient in (False, True):
        actual, _, written = entropy.rows(logits, target, normalizer, options, with_gradient)
        assert_rounded("losses", actual, losses.detach(), ulps=64)
        if with_gradient:
            assert_rounded("gradient", written, ones)
        else:
            assert torch.equal(written, logits)
    return entropy.config


@EVERY_OPTION
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_part_of_the_rows(entropy, reduction, options) -> None:
    options = Options(**{**options.__dict__, "reduction": reduction})
    for dtype in DTYPES:
        check_part(entropy, *make(6, 70, dtype), options)


@pytest.mark.parametrize("layout", [lambda x: x, pitched, lambda x: shifted(x, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_part_of_the_rows_in_its_place(entropy, dtype, layout) -> None:
    """By a warp, by blocks, by clusters: no thread reads what another one has overwritten."""
    for classes in (9, 300, 4096, 9000):
        logits, target = make(3, classes, dtype)
        check_part(entropy, layout(logits), target)
    entropy.clusters = False
    logits, target = make(2, 40000, dtype)
    assert check_part(entropy, layout(logits), target, ALL).path == "stream"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [5, 300, 1500])
def test_logits_that_are_not_finite(entropy, classes, dtype) -> None:
    lowest = torch.finfo(dtype).min
    logits = torch.randn(10, classes)
    special = torch.tensor([-math.inf, math.inf, math.nan, lowest, -lowest])
    logits[:5] = special[:, None]
    logits[5:, -1] = special
    target = torch.zeros(10, dtype=torch.long)
    x = logits.to(dtype)
    options = Options(reduction="none")
    loss, statistics, normalizer, gradient = entropy.forward(x, target, None, options, True)
    leaf = x.double().requires_grad_()
    expected = F.cross_entropy(leaf, target, reduction="none")
    assert_rounded("loss", loss[[0, 1, 2, 5, 6, 7, 8]], expected[[0, 1, 2, 5, 6, 7, 8]])
    (ones,) = torch.autograd.grad(expected.sum(), leaf)
    assert_rounded("gradient", gradient, ones)
    saved = (x, target, statistics, normalizer, None, options)
    assert_rounded("backward", entropy.backward(torch.ones_like(loss), *saved), ones)


@pytest.mark.parametrize("offset", [50.0, -50.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logits_far_from_zero(entropy, dtype, offset) -> None:
    logits, target = make(3, 300, dtype)
    check(entropy, logits + offset, target, None, Options(label_smoothing=0.1, reduction="sum"))


def test_a_gradient_that_is_one_stays(entropy) -> None:
    logits, target = make(5, 40, torch.bfloat16)
    _, statistics, normalizer, gradient = entropy.forward(logits, target, with_gradient=True)
    saved = (logits, target, statistics, normalizer)
    mine = torch.full_like(logits, 7.0)
    for value, stays in ((1.0, True), (1.0 + 1e-6, False)):
        written = entropy.backward(
            torch.tensor(value), *saved, gradient=mine.clone(), unless_one=True
        )
        assert torch.equal(written, mine) == stays
    assert_rounded("gradient", written, gradient.double())


def test_expanded_gradient_of_the_loss(entropy) -> None:
    logits, target = make(5, 40, torch.float32)
    options = Options(reduction="none")
    _, statistics, normalizer, gradient = entropy.forward(logits, target, None, options, True)
    grad_loss = torch.tensor(3.0).expand(5)
    actual = entropy.backward(grad_loss, logits, target, statistics, normalizer, None, options)
    assert_rounded("gradient", actual, 3 * gradient.double(), ulps=4)


@pytest.mark.parametrize("wrong", [-1, 10, 1 << 40])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_target_out_of_range(entropy, wrong, reduction) -> None:
    logits, target = make(3, 10, torch.float32)
    target[2] = wrong
    with pytest.raises(EmulationError, match="target >= 0 && target < num_classes"):
        entropy.forward(logits, target, None, Options(reduction=reduction), with_gradient=True)


def test_many_tiles(entropy) -> None:
    """A row of the backward in several tiles, and blocks that take several of them."""
    logits, target = make(3, 20000, torch.bfloat16)
    _, statistics, normalizer, gradient = entropy.forward(logits, target, with_gradient=True)
    for unless_one in (False, True):
        actual = entropy.backward(
            torch.tensor(2.0),
            *(logits, target, statistics, normalizer),
            gradient=torch.empty_like(logits),
            unless_one=unless_one,
        )
        assert_rounded("gradient", actual, 2 * gradient.double(), ulps=2)
    assert entropy.tiles == 3
