"""What `fusedcuda.explain` says of the lora family; it needs no GPU. Plans: test_lora_plan.py."""

import pytest
import torch
from layouts import pitched, shifted, spread, transposed

from fusedcuda import LoRAWeights, explain, lora_linear, lora_mlp

BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def compiled(load_family):
    load_family("lora")
    load_family("linear_act")
    load_family("pointwise")


@pytest.fixture
def use():
    """Called in a test, it forces a path until the test's end."""
    before = torch.ops.fusedcuda.lora_use("auto")
    yield torch.ops.fusedcuda.lora_use
    torch.ops.fusedcuda.lora_use(before)


@pytest.fixture
def hopper():
    before = torch.ops.fusedcuda.linear_act_use("hopper")
    yield
    torch.ops.fusedcuda.linear_act_use(before)


def operands(m: int = 8192, n: int = 512, k: int = 256, rank: int = 16, dtype=BF16):
    return (
        torch.empty(m, k, dtype=dtype),
        torch.empty(n, k, dtype=dtype),
        torch.empty(rank, k, dtype=dtype, requires_grad=True),
        torch.empty(n, rank, dtype=dtype, requires_grad=True),
        0.5,
    )


@pytest.mark.usefixtures("hopper")
def test_one_product_of_both():
    x, weight, lora_a, lora_b, scale = operands()
    forward = explain(lora_linear, x, weight, lora_a, lora_b, scale)
    assert forward.kernels == 2
    output, t = 8192 * 512 * 2, 8192 * 16 * 2
    once = x.nbytes + weight.nbytes + lora_a.nbytes + lora_b.nbytes + output
    assert forward.bytes_moved == once + x.nbytes + 2 * t
    text = str(forward)
    assert "linear_act_kernel_sm90" in text
    assert "with 16 more products in each sum: the branch" in text
    # With a gradient an activation is a kernel, since z is kept; of relu the output will do.
    for activation, kernels in (("silu", 3), ("relu", 2)):
        plan = explain(lora_linear, x, weight, lora_a, lora_b, scale, None, activation)
        assert plan.kernels == kernels
        with torch.no_grad():
            plan = explain(lora_linear, x, weight, lora_a, lora_b, scale, None, activation)
        assert plan.kernels == 2
    backward = explain(lora_linear, x, weight, lora_a, lora_b, scale, backward=True)
    assert "with 16 more products in each sum: the branch" in str(backward)
    assert backward.kernels == 2 + 1 + 2
    # Ranks that are no multiple of 8: by our own kernels, with a sum of parts each; both gradients
    # of dz from one pass over it.
    few = [lora_a[:5], lora_b[:, :5]]
    backward = explain(lora_linear, x, weight, *few, scale, backward=True)
    assert backward.kernels == 2 + 1 + 2
    assert "gradients of t and lora_b: one pass by tensor cores" in str(backward)
    assert "gradient of lora_a: one pass by tensor cores" in str(backward)
    # Factors in float32: their gradients are in float32, which cuBLAS does not give.
    masters = [factor.float() for factor in (lora_a, lora_b)]
    text = str(explain(lora_linear, x, weight, *masters, scale, backward=True))
    assert "gradient of lora_a: one pass" in text
    assert "gradients of t and lora_b: one pass" in text


@pytest.mark.usefixtures("hopper")
def test_both_gradients_of_dz_from_one_pass():
    x, weight, lora_a, lora_b, scale = operands(n=2048)
    backward = explain(lora_linear, x, weight, lora_a, lora_b, scale, backward=True)
    assert backward.kernels == 2 + 1 + 2
    dy, t = 8192 * 2048 * 2, 8192 * 16 * 2
    factors = 2 * lora_b.nbytes + 2 * lora_a.nbytes  # read, and their gradients
    dx = x.nbytes + weight.nbytes
    assert backward.bytes_moved == 2 * dy + x.nbytes + dx + factors + 4 * t
    assert "gradients of t and lora_b: one pass" in str(backward)
    # More ranks, and fewer rows: by cuBLAS.
    for fields in ({"n": 2048, "rank": 64}, {"m": 200}):
        text = str(explain(lora_linear, *operands(**fields), backward=True))
        assert "gradient of lora_b: cuBLAS" in text


@pytest.mark.parametrize("layout", [transposed, spread, pitched, lambda x: shifted(x, 1)])
def test_a_pass_reads_what_the_copy_engine_reads(layout):
    """Of other layouts it would read a copy, and cuBLAS and lora_down need none, or take theirs."""
    x, weight, lora_a, lora_b, scale = operands()
    for rank in (16, 5):
        given = (weight, lora_a[:rank], lora_b[:, :rank], scale)
        assert "t: one pass" not in str(explain(lora_linear, layout(x), *given))
        text = str(explain(lora_linear, layout(x), *given, backward=True))
        assert "gradient of lora_a: one pass" not in text
        assert "gradients of t and lora_b: one pass" in text  # dz is contiguous
    # Rounded factors are contiguous, and aligned if their rows are of multiples of 16 bytes.
    masters = (shifted(lora_a.float(), 1), shifted(lora_b.float(), 1))
    assert "t: one pass" in str(explain(lora_linear, x[:2048], weight, *masters, scale))
    text = str(explain(lora_linear, x, weight, *masters, scale, backward=True))
    assert "gradients of t and lora_b: one pass" in text
    narrow = (x[:2048, :252], weight[:, :252], lora_a.float()[:, :252].contiguous())
    assert "t: one pass" not in str(explain(lora_linear, *narrow, lora_b.float(), scale))
    for factors in ((layout(lora_a), lora_b), (lora_a, layout(lora_b))):
        forward = explain(lora_linear, x[:2048], weight, *factors, scale)
        assert ("t: one pass" in str(forward)) == (factors[0] is lora_a)
        backward = explain(lora_linear, x, weight, *factors, scale, backward=True)
        assert "gradient of lora_a: one pass" in str(backward)
        both = "gradients of t and lora_b: one pass" in str(backward)
        assert both == (factors[1] is lora_b)


def test_forward_apart(use):
    use("apart")
    x, weight, lora_a, lora_b, scale = operands()
    explanation = explain(lora_linear, x, weight, lora_a, lora_b, scale)
    assert explanation.function == "lora_linear"
    output, t = 8192 * 512 * 2, 8192 * 16 * 2
    expected = 2 * x.nbytes + weight.nbytes + lora_a.nbytes + lora_b.nbytes + 3 * output + 2 * t
    assert explanation.bytes_moved == expected
    text = str(explanation)
    assert "t: cuBLAS: faster for many rows and ranks that are a multiple of 8" in text
    assert "linear_act: 8192 x 512 from 256 products each" in text
    assert "linear_act: 8192 x 512 from 16 products each" in text
    assert "residual added" in text
    with_act = explain(lora_linear, x, weight, lora_a, lora_b, scale, None, "silu")
    assert with_act.kernels == explanation.kernels + 1
    assert with_act.bytes_moved == explanation.bytes_moved + 2 * output


def test_forward_with_the_branch_first(use):
    use("residual")
    x, weight, lora_a, lora_b, scale = operands()
    text = str(explain(lora_linear, x, weight, lora_a, lora_b, scale))
    assert "residual added" in text
    assert "finished" not in text


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_few_rows_in_one_launch(use, activation):
    x, weight, lora_a, lora_b, scale = operands(m=16)
    with torch.no_grad():
        explanation = explain(lora_linear, x, weight, lora_a, lora_b, scale, None, activation)
    assert explanation.kernels == 1
    output, t = 16 * 512 * 2, 16 * 16 * 2
    expected = sum(tensor.nbytes for tensor in (x, weight, lora_a, lora_b)) + output + t
    assert explanation.bytes_moved == expected
    assert "lora_decode: t, and the product with the branch in it, in one launch" in str(
        explanation
    )
    # With a gradient an activation is a kernel, since z is kept.
    explanation = explain(lora_linear, x, weight, lora_a, lora_b, scale, None, activation)
    assert explanation.kernels == (1 if activation == "none" else 2)
    # More rows, or ranks, than it takes.
    for more in ({"m": 33}, {"m": 16, "rank": 72}):
        text = str(explain(lora_linear, *operands(**more)))
        assert "lora_decode" not in text


def test_backward(use):
    use("apart")
    x, weight, lora_a, lora_b, scale = operands()
    backward = explain(lora_linear, x, weight, lora_a, lora_b, scale, backward=True)
    text = str(backward)
    for part in ("gradients of t and lora_b", "gradient of x", "gradient of lora_a"):
        assert part in text
    assert "gradient of weight" not in text  # it is frozen
    weight.requires_grad_()
    text = str(explain(lora_linear, x, weight, lora_a, lora_b, scale, backward=True))
    assert "gradient of weight" in text
    drops = {"dropout_p": 0.1, "training": True}
    dropped = explain(lora_linear, x, weight, lora_a, lora_b, scale, backward=True, **drops)
    assert "the branch's part with its dropout in one launch" in str(dropped)
    assert dropped.kernels > backward.kernels
    more = operands(rank=24)
    dropped = explain(lora_linear, *more, backward=True, **drops)
    assert "the branch's part by cuBLAS, dropout by a kernel of its own" in str(dropped)


def test_t_by_our_own_kernels():
    drops = {"dropout_p": 0.1, "training": True}
    for given, options in (
        (operands(rank=5), {}),
        (operands(), drops),
        (operands(m=256), {}),
        (operands(m=4096), {}),
    ):
        text = str(explain(lora_linear, *given, **options))
        assert "t: one pass by tensor cores" in text
    text = str(explain(lora_linear, *operands(m=4096, rank=64)))
    assert "t: cuBLAS: faster for many rows" in text
    text = str(explain(lora_linear, *operands(), backward=True, **drops))
    assert "gradient of lora_a: one pass" in text
    for rows, rank, blocks in ((200, 16, 26), (8192, 72, 256)):
        text = str(explain(lora_linear, *operands(m=rows, rank=rank), **drops))
        assert f"t: {blocks} blocks of 256 threads, products by tensor cores" in text


def test_why_it_is_not_at_its_fastest():
    x, weight, lora_a, lora_b, scale = operands()
    for given, why in (
        ((shifted(x, 1), weight, lora_a, lora_b), "x element by element: its rows start off"),
        ((x, weight, shifted(lora_a, 1), lora_b), "the factor element by element"),
        ((spread(x), weight, lora_a, lora_b), "x copied first"),
        (operands(rank=100)[:4], "x read 2 times, for 64 ranks each"),
        (operands(m=40)[:4], "2 parts, added up by a second kernel"),
        (operands(dtype=torch.float32)[:4], "cuBLAS: torch.float32 has no kernel of its own"),
    ):
        assert why in str(explain(lora_linear, *given, scale)), why


def test_mlp_is_its_layers(use):
    use("apart")
    x, weight, lora_a, lora_b, scale = operands()
    down = LoRAWeights(torch.empty(256, 512, dtype=BF16))
    up = LoRAWeights(weight, lora_a, lora_b, scale)
    layer = explain(lora_linear, x, weight, lora_a, lora_b, scale)
    plain = explain(lora_mlp, x, up, down, "none")
    assert plain.bytes_moved > layer.bytes_moved
    gated = explain(lora_mlp, x, up, down, "silu", gate=up)
    assert gated.kernels == plain.kernels + layer.kernels + 1
    assert "gradient of lora_a" in str(explain(lora_mlp, x, up, down, "silu", backward=True))


def test_it_refuses_what_the_call_would_refuse():
    x, weight, lora_a, lora_b, scale = operands()
    with pytest.raises(ValueError, match=r"^lora_linear: lora_b must have shape \(512, 16\)"):
        explain(lora_linear, x, weight, lora_a, lora_b.T, scale)
    with pytest.raises(TypeError, match=r"^lora_mlp: up must be a tuple"):
        explain(lora_mlp, x, weight, weight)
