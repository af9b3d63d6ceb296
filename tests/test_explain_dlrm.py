"""What `fusedcuda.explain` says of the dlrm family; it needs no GPU. Plans: test_dlrm_plan.py."""

import pytest
import torch
from dlrms import random_head, random_lookup, random_vectors
from layouts import shifted, spread

from fusedcuda import dot_interaction, embedding_interaction, explain, linear_sigmoid_bce

BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("dlrm")


def test_interaction_moves_everything_once():
    dense, embeddings = random_vectors(64, 27, 128, dtype=BF16)
    row = 64 * 480 * 2
    for backward, moved in ((False, 1), (True, 2)):
        explanation = explain(dot_interaction, dense, embeddings, backward=backward)
        assert (explanation.function, explanation.kernels) == ("dot_interaction", 1)
        assert explanation.bytes_moved == moved * (dense.nbytes + embeddings.nbytes) + row
        text = str(explanation)
        assert "a warp a sample, products by tensor cores" in text
        assert "vectors: 16 bytes at a time" in text
        assert ("incoming row" if backward else "output row") + ": 16 bytes at a time" in text


def test_why_the_interaction_is_not_at_its_fastest():
    dense, embeddings = random_vectors(8, 4, 12, dtype=BF16)
    aligned = random_vectors(8, 4, 16, dtype=BF16)
    for given, options, why in (
        (random_vectors(8, 4, 16), {}, "products by threads: torch.float32 has no tensor cores"),
        ((dense, embeddings), {}, "vectors: element by element: 12 elements are not whole pieces"),
        ((shifted(aligned[0], 1), aligned[1]), {}, "vectors: element by element: a tensor, or its"),
        (aligned, {"pad": 1}, "output row: element by element: its 22 elements are not whole"),
        ((aligned[0], spread(aligned[1])), {}, "embeddings: copied first"),
        ((aligned[0], list(aligned[1].unbind(1))), {}, "embeddings: copied first"),
    ):
        assert why in str(explain(dot_interaction, *given, **options))


def test_copies_count():
    dense, embeddings = random_vectors(8, 4, 16, dtype=BF16)
    plain = explain(dot_interaction, dense, embeddings)
    for given in (spread(embeddings), list(embeddings.unbind(1))):
        copied = explain(dot_interaction, dense, given)
        assert copied.plan["copies"] == ["embeddings"]
        assert copied.kernels == plain.kernels + 1
        assert copied.bytes_moved == plain.bytes_moved + 2 * embeddings.nbytes


@pytest.mark.parametrize("rows", [100, 100_000])
def test_lookup_moves_the_rows_or_the_table(rows):
    dense, weight, indices = random_lookup(64, 27, 128, rows=rows, dtype=BF16)
    looked_up, row = 64 * 26 * 128 * 2, 64 * 480 * 2
    read = dense.nbytes + min(looked_up, weight.nbytes) + indices.nbytes
    forward = explain(embedding_interaction, dense, weight, indices)
    assert (forward.function, forward.kernels) == ("embedding_interaction", 1)
    assert forward.bytes_moved == read + row
    assert "indices: torch.int64, those of the next sample while" in str(forward)
    backward = explain(embedding_interaction, dense, weight, indices, backward=True)
    # The gradients of dense and of the rows, then these to that of the table, in the order of the
    # indices: each pass reads them twice and writes them once, and the sum reads what came of it.
    passes = 1 if rows <= 512 else 2
    items = 8 * 1664
    summed = looked_up + weight.nbytes + 2 * indices.nbytes + 2 * items + 3 * items * (passes - 1)
    assert backward.bytes_moved == read + row + dense.nbytes + looked_up + summed
    text = f"rows added up in an order that is fixed, by {3 * passes + 2} kernels: indices sorted"
    assert f"gradient of weight: 1664 {text} in {passes} passes" in str(backward)
    assert [launch["path"] for launch in backward.launches] == ["tensor_cores", "sorted"]
    assert backward.kernels == 1 + 3 * passes + 2


def test_what_else_the_gradient_of_a_table_may_be():
    dense, weight, indices = random_lookup(64, 27, 128, rows=100, dtype=BF16)
    plain = explain(embedding_interaction, dense, weight, indices, backward=True)
    copied = explain(embedding_interaction, dense, weight, spread(indices), backward=True)
    assert copied.kernels == plain.kernels + 1
    assert copied.bytes_moved == plain.bytes_moved + 2 * indices.nbytes
    assert "indices are copied first" in str(copied)
    none = explain(embedding_interaction, dense[:0], weight, indices[:0], backward=True)
    assert (none.kernels, none.bytes_moved) == (1, weight.nbytes)
    assert "gradient of weight: zeros, as there are no indices" in str(none)
    huge = torch.empty((1 << 31) + 1, 8, dtype=BF16, device="meta")
    given = (torch.empty(4, 8, dtype=BF16, device="meta"), huge, indices[:4].to("meta"))
    by_torch = explain(embedding_interaction, *given, backward=True)
    assert [launch["path"] for launch in by_torch.launches] == ["tensor_cores", "torch"]
    assert "by torch's operator: there are more of them, or a larger table" in str(by_torch)


def test_why_a_lookup_is_not_at_its_fastest():
    dense, weight, indices = random_lookup(8, 4, 16, dtype=BF16)
    for given, why in (
        ((dense, shifted(weight, 1), indices), "vectors: element by element: a tensor, or its"),
        ((dense, shifted(weight, 1), indices), "indices: torch.int64, with each vector"),
        ((dense, spread(weight), indices), "weight: copied first"),
        ((dense.float(), weight.float(), indices.int()), "indices: torch.int32, with each vector"),
    ):
        assert why in str(explain(embedding_interaction, *given))
    copied = explain(embedding_interaction, dense, spread(weight), indices)
    plain = explain(embedding_interaction, dense, weight, indices)
    assert copied.kernels == plain.kernels + 1
    assert copied.bytes_moved == plain.bytes_moved + 2 * weight.nbytes


def test_head():
    x, weight, bias, target = random_head(1000, 256, dtype=BF16)
    forward = explain(linear_sigmoid_bce, x, weight, bias, target)
    assert (forward.function, forward.kernels) == ("linear_sigmoid_bce", 2)
    assert forward.bytes_moved == x.nbytes + weight.nbytes
    assert "loss: " in str(forward)
    assert "added up by a second kernel" in str(forward)
    each = explain(linear_sigmoid_bce, x, weight, bias, target, reduction="none")
    assert each.kernels == 1
    backward = explain(linear_sigmoid_bce, x, weight, bias, target, backward=True)
    assert backward.kernels == 2
    assert backward.bytes_moved == 2 * x.nbytes + 3 * weight.nbytes
    assert "gradients of weight and bias: " in str(backward)


def test_why_the_head_goes_element_by_element():
    for columns, dtype, why in (
        (255, BF16, "255 elements are not whole vectors of 8"),
        (256, torch.float64, "float64 has no other kernel"),
    ):
        x, weight, bias, target = random_head(10, columns, dtype=dtype)
        text = str(explain(linear_sigmoid_bce, x, weight, bias, target.to(torch.float64)))
        assert f"rows: element by element: {why}" in text
    x, weight, bias, target = random_head(10, 256, dtype=BF16)
    text = str(explain(linear_sigmoid_bce, shifted(x, 1), weight, bias, target))
    assert "rows: element by element: x, weight or their rows start off" in text


def test_a_target_that_is_converted_is_a_copy():
    x, weight, bias, target = random_head(10, 256, dtype=BF16)
    explanation = explain(linear_sigmoid_bce, x, weight, bias, target.bool())
    assert explanation.plan["copies"] == ["target"]
    assert explanation.kernels == 3
    assert "target: converted to torch.float32 first" in str(explanation)


def test_nothing_to_do():
    for explanation in (
        explain(dot_interaction, *random_vectors(0, 4, 16)),
        explain(embedding_interaction, *random_lookup(0, 4, 16)),
    ):
        assert (explanation.plan["path"], explanation.kernels) == ("empty", 0)
        assert explanation.bytes_moved == 0


def test_what_the_call_refuses_explain_refuses():
    dense, embeddings = random_vectors(8, 4, 16)
    x, weight, bias, target = random_head(8, 16)
    for function, given, options, message in (
        (dot_interaction, (dense,), {}, "^explain: dot_interaction: missing"),
        (dot_interaction, (dense, embeddings.half()), {}, "^dot_interaction: embeddings"),
        (dot_interaction, (dense, embeddings), {"order": "x"}, "^dot_interaction: order"),
        (dot_interaction, (dense, embeddings), {"pad": 0}, "^dot_interaction: pad"),
        (embedding_interaction, (dense, dense), {}, "^explain: embedding_interaction: missing"),
        (embedding_interaction, (dense, dense, dense), {}, "^embedding_interaction: indices"),
        (linear_sigmoid_bce, (x, weight, bias), {}, "^explain: linear_sigmoid_bce: missing"),
        (linear_sigmoid_bce, (x, weight[:, :3], bias, target), {}, "^linear_sigmoid_bce: weight"),
        (linear_sigmoid_bce, (x, weight, bias, target), {"reduction": "x"}, "reduction"),
        (linear_sigmoid_bce, (x, weight, bias, target), {"pos_weight": -1}, "pos_weight"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            explain(function, *given, **options)
