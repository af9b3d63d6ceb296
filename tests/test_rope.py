"""rope: values, layouts, dtypes, gradients, in place."""

import layouts
import pytest
import torch
from reference import DTYPES
from ropes import (
    LAYOUTS,
    angles,
    bhsd,
    bshd,
    check,
    complex_rotation,
    eager,
    layout_name,
    random_tables,
)

import fusedcuda

INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


# ---- Values --------------------------------------------------------------------------------------


@INTERLEAVED
def test_complex_multiplication(device, interleaved):
    """The rotation by the angles that models use, of tables of either width."""
    q, k = bhsd(2, 3, 7, 16, dtype=torch.float64), bhsd(2, 1, 7, 16, dtype=torch.float64)
    angle = angles(7, 16)
    full = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    for table in (angle, full, full[None], full.expand(2, -1, -1)):
        operands = (t.to(device) for t in (q, k, table.cos(), table.sin()))
        for x, y in zip((q, k), fusedcuda.rope(*operands, interleaved=interleaved), strict=True):
            expected = complex_rotation(x, angle, interleaved=interleaved)
            torch.testing.assert_close(y.cpu(), expected, rtol=1e-13, atol=1e-13)


@INTERLEAVED
@pytest.mark.parametrize("width", [16, 32], ids=["half", "full"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype, layout, width, interleaved, device):
    """Each kind of table, also of another dtype; their halves differ."""
    b, s, d = 2, 9, 32
    for table_dtype in {dtype, torch.float32, torch.float64, torch.float16}:
        for shape in ((s, width), (1, s, width), (b, s, width)):
            q = layout(b, 6, s, d, dtype=dtype, device=device)
            k = layout(b, 2, s, d, dtype=dtype, device=device)
            check(q, k, *random_tables(*shape, dtype=table_dtype, device=device), interleaved)


@INTERLEAVED
@pytest.mark.parametrize("d", [2, 4, 6, 10, 18, 24, 40, 64, 72, 80, 96, 100, 128, 192, 256, 514])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_dims(dtype, d, interleaved, device):
    for layout in (bhsd, bshd):
        for width in (d, d // 2):
            q = layout(2, 5, 6, d, dtype=dtype, device=device)
            k = layout(2, 2, 6, d, dtype=dtype, device=device)
            check(q, k, *random_tables(6, width, dtype=dtype, device=device), interleaved)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (32, 8), (33, 1), (71, 1), (1, 7), (40, 40)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_heads(layout, heads, device):
    for length in (1, 33):
        q, k = (layout(2, h, length, 64, dtype=torch.bfloat16, device=device) for h in heads)
        check(q, k, *random_tables(2, length, 64, device=device))


def test_layouts_that_differ(device):
    for layouts_of_q_and_k in ((bhsd, bshd), (bshd, bhsd)):
        q, k = (f(2, 4, 5, 32, dtype=torch.float16, device=device) for f in layouts_of_q_and_k)
        check(q, k, *random_tables(5, 32, device=device))


@INTERLEAVED
@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=layouts.layout_name)
def test_strides(layout, interleaved, device):
    """Of one operand at a time; the others have 16-byte accesses."""
    for dtype in (torch.float32, torch.bfloat16):
        plain = [bhsd(2, h, 6, 32, dtype=dtype, device=device) for h in (4, 3)]
        tables = random_tables(6, 32, dtype=dtype, device=device)
        for position in (0, 1):
            changed = [layout(x) if i == position else x for i, x in enumerate(plain)]
            check(*changed, *tables, interleaved)
        if layout is not layouts.channels_last:
            check(*plain, *map(layout, tables), interleaved)
            check(*plain, tables[0], layout(tables[1]), interleaved)


@INTERLEAVED
@pytest.mark.parametrize("elements", [1, 2, 3, 4, 8])
def test_unaligned(elements, interleaved, device):
    for dtype in (torch.float32, torch.bfloat16):
        operands = [bhsd(1, h, 5, 64, dtype=dtype, device=device) for h in (3, 2)]
        operands += random_tables(5, 64, dtype=dtype, device=device)
        for position in range(4):
            shifted = list(operands)
            shifted[position] = layouts.shifted(shifted[position], elements)
            check(*shifted, interleaved)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)], ids=str)
def test_empty(shape, device):
    q, k = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    tables = random_tables(*shape[2:], device=device)
    outputs = fusedcuda.rope(q, k, *tables)
    assert [y.shape for y in outputs] == [q.shape, k.shape]
    grads = torch.autograd.grad(sum(y.sum() for y in outputs), (q, k))
    assert [g.shape for g in grads] == [q.shape, k.shape]
    with torch.no_grad():
        fusedcuda.rope_(q.detach(), k.detach(), *tables)
    if device == "cuda":
        torch.cuda.synchronize()


def test_one_of_them_without_heads(device):
    q, k = bhsd(2, 3, 4, 16, device=device), bhsd(2, 0, 4, 16, device=device)
    tables = random_tables(4, 16, device=device)
    assert torch.equal(fusedcuda.rope(q, k, *tables)[0], fusedcuda.rope(q, q, *tables)[1])
    assert torch.equal(fusedcuda.rope(k, q, *tables)[1], fusedcuda.rope(q, q, *tables)[0])


def test_special_values(device):
    """As the eager formula has them: 0 * inf is NaN, and a NaN stays within its pair."""
    q = torch.tensor([torch.inf, torch.nan, 1.0, -0.0, 1.0, 2.0, 3.0, 4.0], device=device)
    q = q.view(1, 1, 1, 8)
    cos, sin = torch.ones(1, 8, device=device), torch.zeros(1, 8, device=device)
    actual = fusedcuda.rope(q, q, cos, sin)[0]
    torch.testing.assert_close(actual, eager(q, q, cos, sin)[0], equal_nan=True)
    assert actual.isnan().flatten().tolist() == [
        False,
        True,
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_a_row_is_rotated_alike_wherever_it_is(device):
    """The vector path and the scalar path round alike, as do all heads and batches."""
    row = torch.randn(64, dtype=torch.bfloat16, device=device)
    cos, sin = random_tables(1, 64, device=device)
    q = row.expand(3, 5, 1, 64).contiguous()
    first, second = fusedcuda.rope(q, layouts.shifted(q, 1)[:, :2], cos, sin)
    assert (first == first[0, 0, 0]).all()
    assert (second == first[0, 0, 0]).all()
    vectors, _ = fusedcuda.rope(q, q[:, :2].contiguous(), cos, sin)
    assert torch.equal(first, vectors)


# ---- Gradients -----------------------------------------------------------------------------------


@INTERLEAVED
@pytest.mark.parametrize("width", [4, 8], ids=["half", "full"])
def test_gradcheck(width, interleaved, device):
    """Also of the second order: the rotation is linear, so its backward is differentiable."""
    q, k = (
        torch.randn(2, h, 3, 8, dtype=torch.float64, device=device, requires_grad=True)
        for h in (2, 1)
    )
    cos, sin = (torch.randn(2, 3, width, dtype=torch.float64, device=device) for _ in range(2))

    def function(q, k):
        return fusedcuda.rope(q, k, cos, sin, interleaved=interleaved)

    assert torch.autograd.gradcheck(function, (q, k))
    assert torch.autograd.gradgradcheck(function, (q, k))


@INTERLEAVED
def test_gradients_of_one_or_through_one(interleaved, device):
    q, k = (bshd(2, h, 6, 32, dtype=torch.bfloat16, device=device) for h in (4, 2))
    tables = random_tables(6, 32, device=device)
    for wrt in (("q",), ("k",)):
        grads = [torch.randn_like(x) if name in wrt else None for name, x in (("q", q), ("k", k))]
        check(q, k, *tables, interleaved, wrt=wrt, grad_outputs=grads)
        leaves = [x.detach().requires_grad_(name in wrt) for name, x in (("q", q), ("k", k))]
        outputs = fusedcuda.rope(*leaves, *tables, interleaved=interleaved)
        assert [y.requires_grad for y in outputs] == [x.requires_grad for x in leaves]


@pytest.mark.parametrize("expand", [(1, 1, 1, 1), (2, 1, 1, 32), (1, 4, 6, 1)], ids=str)
def test_expanded_incoming_gradients(expand, device):
    q, k = (bhsd(2, 4, 6, 32, device=device) for _ in range(2))
    grad = torch.randn(expand, device=device).expand(q.shape)
    check(q, k, *random_tables(6, 32, device=device), grad_outputs=(grad, grad))


def test_an_output_that_is_not_used_has_no_gradient(device):
    q, k = (bhsd(1, 2, 3, 8, device=device).requires_grad_() for _ in range(2))
    rotated, _ = fusedcuda.rope(q, k, *random_tables(3, 8, device=device))
    rotated.sum().backward()
    assert q.grad is not None
    assert k.grad is None


def test_only_the_tables_are_saved(device):
    q, k = (bhsd(1, 2, 3, 8, device=device).requires_grad_() for _ in range(2))
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    tables = random_tables(3, 8, device=device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fusedcuda.rope(q, k, *tables)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in tables]


# ---- In place ------------------------------------------------------------------------------------


@INTERLEAVED
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(dtype, layout, interleaved, device):
    """The same bits as out of place, in the given memory and nowhere else."""
    for d in (32, 6):
        q, k = (layout(2, h, 9, d, dtype=dtype, device=device) for h in (6, 2))
        tables = random_tables(2, 9, d, dtype=dtype, device=device)
        expected = fusedcuda.rope(q, k, *tables, interleaved=interleaved)
        around = [x._base.clone() if x._is_view() else None for x in (q, k)]
        result = fusedcuda.rope_(q, k, *tables, interleaved=interleaved)
        assert result[0] is q
        assert result[1] is k
        for x, y, before in zip((q, k), expected, around, strict=True):
            assert torch.equal(x, y)
            if before is not None:
                before.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(y)
                assert torch.equal(x._base, before)


def test_partial_rotation_in_place(device):
    q, k = (bshd(2, h, 5, 64, dtype=torch.bfloat16, device=device) for h in (4, 2))
    tables = random_tables(5, 32, device=device)
    before = [x.clone() for x in (q, k)]
    fusedcuda.rope_(q[..., :32], k[..., :32], *tables)
    expected = fusedcuda.rope(*(x[..., :32] for x in before), *tables)
    for x, old, new in zip((q, k), before, expected, strict=True):
        assert torch.equal(x[..., :32], new)
        assert torch.equal(x[..., 32:], old[..., 32:])


def test_in_place_is_noticed_by_autograd(device):
    x = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    y = x + 0
    z = y * y  # saves y
    with torch.no_grad():
        fusedcuda.rope_(
            y, torch.randn(1, 1, 3, 8, device=device), *random_tables(3, 8, device=device)
        )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_in_place_in_inference_mode(device):
    tables = random_tables(3, 8, device=device)
    with torch.inference_mode():
        q, k = (torch.randn(1, 2, 3, 8, device=device) for _ in range(2))
        expected = fusedcuda.rope(q, k, *tables)
        fusedcuda.rope_(q, k, *tables)
        assert torch.equal(q, expected[0])
        assert torch.equal(k, expected[1])
