"""What test_sanitize.py is for the other kernels, for matrix products and what goes with them."""

from collections.abc import Iterator

import pytest
import torch
from gated_mlps import check_gated_mlp
from gated_mlps import random_layer as random_gated_mlp
from linears import check_linear, operands
from loras import check_lora, random_layer
from sanitizing import check, every_dtype, every_row, new, on_both
from torch import Tensor

import fusedcuda
from fusedcuda.ops._lora_reference import pitch_of

# ---- LoRA ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("k", [136, 13])
@pytest.mark.parametrize("rank", [5, 72])
def test_lora_products(rank, k, dropout_p):
    """The skinny products alone, as racecheck can look at them: without cuBLAS's kernels."""
    ops = torch.ops.fusedcuda
    seed = torch.tensor([7], device="cuda") if dropout_p > 0 else None
    for rows in (16, 1100):
        x, factor = new(rows, k, dtype=torch.bfloat16), new(rank, k, dtype=torch.float32)
        for given in (factor, factor.T.contiguous().T):  # either dimension inner
            t = on_both(ops.lora_down, x, given, seed, 0.5, dropout_p)
        on_both(ops.lora_up, t, x, seed, rank, dropout_p, False, True)
        on_both(ops.lora_up, t, x, None, rank, 0.0, True, False)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [5, 16, 40, 64])
def test_one_pass_over_x(rank):
    """Blocks with parts of lines, and of several; rows and columns that end inside a tile."""
    one_pass = torch.ops.fusedcuda.lora_pass
    seed = torch.tensor([7], device="cuda")
    for rows, columns in ((70, 264), (300, 8200), (9000, 136)):
        x, lora_a = (new(n, columns, dtype=torch.bfloat16) for n in (rows, rank))
        t, lora_b = (new(n, pitch_of(rank), dtype=torch.bfloat16) for n in (rows, columns))
        t[:, rank:], lora_b[:, rank:] = 0, 0
        for given in (None, seed):
            options = (given, rank, 0.5, 0.5, False, True)
            on_both(lambda *a: one_pass(*a)[0], x, lora_a, None, *options)
            on_both(lambda *a: one_pass(*a)[0], x, None, t, *options)
        for output in (0, 1):
            both = (x, lora_b.T, t, None, rank, 0.5, 0.0, True, False)
            on_both(lambda *a, output=output: one_pass(*a)[output], *both)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 5, 8, 16])
def test_a_dropped_branch(rank):
    branch = torch.ops.fusedcuda.lora_branch
    seed = torch.tensor([7], device="cuda")
    for rows, columns in ((1, 8), (70, 136), (1100, 40)):
        t, factor = (new(*size, dtype=torch.bfloat16) for size in ((rows, rank), (rank, columns)))
        on_both(lambda *given: branch(*given)[0], t, factor, seed, 0.5)


@pytest.mark.gpu
@pytest.mark.cublas
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("k", [136, 13])
@pytest.mark.parametrize("rank", [5, 72])
@every_dtype
def test_lora_linear(rank, k, dropout_p, dtype):
    """Rows that end inside a block, parts of a sum, two passes of ranks, factors in float32."""
    lora_dtype = torch.float32 if dtype != torch.float64 else dtype
    for rows in (16, 1100):
        layer = random_layer(rows, n=40, k=k, rank=rank, dtype=dtype, lora_dtype=lora_dtype)
        check_lora(layer, 0.5, "silu", dropout_p=dropout_p, run_on="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 140, 1100])
@pytest.mark.parametrize("rank", [5, 16])
def test_a_lora_layer_in_one_launch(rank, rows):
    """Rows that end inside a warp's, more and fewer of them than warps; tiles that end outside."""
    product = torch.ops.fusedcuda.lora_product
    x, weight, down = (new(n, 200, dtype=torch.bfloat16) for n in (rows, 520, rank))
    up = new(520, pitch_of(rank), dtype=torch.bfloat16)
    up[:, rank:] = 0
    arguments = (x, weight, None, down, up, 0.5)
    on_both(lambda *given: torch.cat(product(*given), dim=1), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize("rank", [5, 40])
def test_a_lora_layer_of_few_rows_in_one_launch(rank, rows):
    """Clusters of 1, 4 and 8 blocks; rows and columns that end inside a tile."""
    decode = torch.ops.fusedcuda.lora_decode
    for n, k in ((40, 72), (1000, 2056), (133, 4104)):
        x, weight, down = (new(m, k, dtype=torch.bfloat16) for m in (rows, n, rank))
        up = new(n, pitch_of(rank), dtype=torch.bfloat16)
        up[:, rank:] = 0
        arguments = (x / 4, weight, new(n, dtype=torch.bfloat16), down, up / 4, 0.5, 1)
        on_both(lambda *given: torch.cat(decode(*given), dim=1), *arguments)


# ---- Gated MLP -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("f", [72, 128])
def test_gated_product(f, saves):
    """Gate and up in one product: tiles that are cut off, blocks with one tile and with several."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    for rows in (70, 20_000):
        # Integers whose sums bfloat16 has, so that there is one rounding at most.
        x, w_gate, w_up = (
            torch.randint(-1, 2, shape, device="cuda").bfloat16()
            for shape in ((rows, 72), (f, 72), (f, 72))
        )
        outputs = torch.ops.fusedcuda.gated_product(x, w_gate, w_up, 1, saves)
        there = (t.cpu() for t in (x, w_gate, w_up))
        expected = torch.ops.fusedcuda.gated_product(*there, 1, saves)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 12])
def test_gated_mlp_decode(m):
    """One launch: blocks with rows of their own and without, stages and rounds that are cut off."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    for k, f, n in ((72, 1096, 40), (520, 2120, 264)):
        # Few are not zero, so that every sum is exact and there is one rounding of h and of y.
        layer = [
            (torch.randint(-1, 2, shape, device="cuda") * (torch.rand(shape, device="cuda") < 0.1))
            for shape in ((m, k), (f, k), (f, k), (n, f))
        ]
        operands = [t.bfloat16() for t in layer]
        (y,) = torch.ops.fusedcuda.gated_mlp_decode(*operands, 1)
        (expected,) = torch.ops.fusedcuda.gated_mlp_decode(*(t.cpu() for t in operands), 1)
        assert torch.equal(y.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.cublas
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
@every_dtype
def test_gated_mlp(packed, dtype):
    for rows, k, f in ((7, 40, 136), (130, 40, 136), (130, 13, 33)):
        layer = random_gated_mlp(rows, k=k, f=f, dtype=dtype)
        for recompute in (False, True):
            check_gated_mlp(layer, packed=packed, recompute=recompute, run_on="cuda")
        check_gated_mlp(layer, packed=packed, wrt=(), run_on="cuda")


# ---- Linear + cross-entropy ----------------------------------------------------------------------


@pytest.mark.gpu
@every_dtype
@every_row
def test_a_part_of_the_rows_of_a_loss(shape, dtype):
    """The gradient over the logits, as racecheck can look at it: without cuBLAS's kernels."""
    rows, classes = shape
    logits = new(rows, classes + 3, dtype=dtype)[:, :classes]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    given = [new(rows, dtype=wide), new(rows, 2, dtype=wide)]
    target = torch.arange(rows, device="cuda") % classes
    normalizer = torch.full((2,), 9.0, dtype=wide, device="cuda")
    operator = torch.ops.fusedcuda.cross_entropy_rows_
    options = (-100, 0.1, 1e-3, 5.0, 1, True)
    there = [t.cpu() for t in (logits, *given)]
    operator(logits, *given, target, normalizer, *options)
    operator(*there, target.cpu(), normalizer.cpu(), *options)
    for result, expected in zip((logits, *given), there, strict=True):
        torch.testing.assert_close(result.cpu(), expected, rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("count", [1, 1001, 300_000])
def test_scaled_gradients(count, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for gradient in (new(count, dtype=dtype), new(count + 1, dtype=dtype)[1:]):
        expected = gradient.cpu()
        for factor in (1.0, 0.5):
            by = torch.tensor(factor, dtype=wide, device="cuda")
            torch.ops.fusedcuda.linear_cross_entropy_scale_(gradient, by)
            expected *= factor
            assert torch.equal(gradient.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.cublas
@every_dtype
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy(reduction, dtype):
    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        target = torch.arange(x.shape[0], device=x.device) % weight.shape[0]
        how = {"chunk": 50, "accumulate": "weight", "reduction": reduction}
        return fusedcuda.linear_cross_entropy(x / 8, weight, target, bias, **how)

    for rows, classes, features in ((7, 24, 40), (130, 1001, 40), (70, 13, 5)):
        shapes = (rows, features), (classes, features), (classes,)
        check(loss, *(new(*shape, dtype=dtype) for shape in shapes))


# ---- Linear layers -------------------------------------------------------------------------------


BACKENDS = (
    "hopper", *(pytest.param(b, marks=pytest.mark.cublas) for b in ("cublaslt", "measured"))
)  # fmt: skip


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    fusedcuda.load("linear_act")
    before = torch.ops.fusedcuda.linear_act_use(request.param)
    yield request.param
    torch.ops.fusedcuda.linear_act_use(before)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
@pytest.mark.parametrize("k", [40, 13])
def test_linear_act(backend, activation, k, dtype):
    """Ragged tiles, a split gradient of the weight, and rows that are padded first.

    Where the activation is a kernel of its own, its derivative is that at the rounded sum: over
    1100 rows of gradients this is more than the tolerances above, which do not know the summands.
    """
    check_linear(*operands(1100, n=136, k=k, dtype=dtype), activation, run_on="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("k", [264, 13])
def test_linear_act_of_one_output(activation, k):
    """Rows that end inside a thread's, of one block and of several."""
    for rows in (70, 1100):
        layer = operands(rows, n=1, k=k, dtype=torch.bfloat16, device="cuda")
        check_linear(*layer, activation)


@pytest.mark.gpu
@pytest.mark.cublas
def test_mlp(backend):
    x, w1, w2 = (new(*s, dtype=torch.bfloat16) / 4 for s in ((70, 40), (136, 40), (24, 136)))
    b1, b2 = new(136, dtype=torch.bfloat16), new(24, dtype=torch.bfloat16)
    check(lambda *t: fusedcuda.mlp(*t, "silu"), x, w1, b1, w2, b2)
