"""A short run through every kernel and access, for compute-sanitizer (`make sanitize`); those of
matrix products are in test_sanitize_products.py.

Under memcheck a launch takes a hundred times as long, so this is one small case of each kind
instead of the whole suite. Sizes are chosen to end inside vectors, warps, tiles and blocks.

What results are compared with is computed on the CPU: torch's own kernels would be checked as well,
and racecheck and initcheck report false errors of those in cuBLAS that store by TMA. racecheck even
dies of them: it is for the tests that are not marked `cublas`.
"""

import pytest
import torch
from sanitizing import check, every_dtype, every_row, new, on_both
from torch import Tensor

import fusedcuda

# Shapes of an operand beside a full one of [37, 264]: each takes another way through the kernels.
OPERANDS = {
    "full": (37, 264),
    "row": (264,),
    "column": (37, 1),
    "scalar": (),
}


# ---- Pointwise -----------------------------------------------------------------------------------


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("kind", OPERANDS)
def test_operands(kind, dtype):
    x, other = new(37, 264, dtype=dtype), new(*OPERANDS[kind], dtype=dtype)
    check(fusedcuda.add_relu, x, other)
    check(lambda a, b: fusedcuda.bias_act(a, b, "gelu"), x, other)
    check(lambda a, b: fusedcuda.act_mul(a, b, "gelu_tanh"), x, other)
    check(lambda a, b, c: fusedcuda.add_mul_act(a, b, c, "tanh"), x, other, x)
    check(lambda a, b, c: fusedcuda.act_scale_bias(a, b, c, "silu"), x, other, other)


@pytest.mark.gpu
@every_dtype
def test_layouts(dtype):
    def made(*shape: int) -> Tensor:
        return new(*shape, dtype=dtype)

    check(fusedcuda.add_relu, made(1001), made(1001))  # a rest behind the last vector
    check(fusedcuda.add_relu, made(1002)[1:], made(1001))  # off the 16-byte boundary
    check(fusedcuda.bias_act, made(19, 33), made(33))  # odd rows
    check(fusedcuda.bias_act, made(5, 7, 16), made(7, 1))  # a sum over outer and inner dimensions
    check(fusedcuda.bias_act, made(40, 24).t(), made(40))  # transposed
    check(fusedcuda.bias_act, made(3, 4000), made(3, 1))  # rows longer than a block
    check(fusedcuda.act_mul_packed, made(9, 2 * 48))
    check(fusedcuda.act_mul_packed, made(9, 2 * 13))
    check(fusedcuda.add_relu, made(1), made(1))


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("width", [48, 13])
def test_what_is_made_again(width, dtype):
    grad, gate_up = new(9, width, dtype=dtype), new(9, 2 * width, dtype=dtype)
    operands = [grad, gate_up]
    made = torch.ops.fusedcuda.act_mul_packed_recompute(*operands, 7)
    expected = torch.ops.fusedcuda.act_mul_packed_recompute(*(t.cpu() for t in operands), 7)
    for result, right in zip(made, expected, strict=True):
        torch.testing.assert_close(result.cpu(), right)


# ---- Rows ----------------------------------------------------------------------------------------


def check_norms(x: Tensor) -> None:
    residual = torch.randn_like(x)
    weight, bias = (new(x.shape[-1], dtype=x.dtype) for _ in range(2))
    check(fusedcuda.rms_norm, x, weight)
    check(lambda x, r, w: fusedcuda.rms_norm(x, w, residual=r), x, residual, weight)
    check(fusedcuda.layer_norm, x, weight, bias)
    check(lambda x, r, w, b: fusedcuda.layer_norm(x, w, b, residual=r), x, residual, weight, bias)


def check_softmax(x: Tensor) -> None:
    check(lambda x: fusedcuda.softmax(x, scale=0.5), x)
    check(fusedcuda.log_softmax, x)


def check_cross_entropy(logits: Tensor) -> None:
    rows, classes = logits.shape
    target = torch.arange(rows, device=logits.device) % classes
    target[1::4] = -100
    class_weights = torch.linspace(0.5, 1.5, classes, device=logits.device)

    def loss(x: Tensor, target: Tensor, **options) -> Tensor:
        return fusedcuda.cross_entropy(x, target, **options)

    check(lambda x, t: 2 * loss(x, t), logits, target)  # times 0.5: the incoming gradient is 1
    check(lambda x, t: loss(x, t, reduction="sum"), logits, target)  # 0.5: made again
    check(lambda x, t: loss(x, t, reduction="none"), logits, target)
    check(lambda x, t: loss(1 * x, t, inplace_backward=True), logits, target)
    check(lambda x, t: loss(x, t, z_loss=0.1, softcap=5.0), logits, target)
    check(
        lambda x, t: loss(x, t, weight=class_weights.to(x.device), label_smoothing=0.1),
        logits,
        target,
    )


CHECKS = pytest.mark.parametrize(
    "check_rows",
    [check_norms, check_softmax, check_cross_entropy],
    ids=lambda function: function.__name__.removeprefix("check_"),
)


@pytest.mark.gpu
@CHECKS
@every_row
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows(check_rows, shape, dtype):
    check_rows(new(*shape, dtype=dtype))


@pytest.mark.gpu
@CHECKS
def test_rows_of_float64(check_rows):
    check_rows(new(37, 1001, dtype=torch.float64))


@pytest.mark.gpu
@CHECKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_are_too_long_for_a_cluster(check_rows, dtype):
    check_rows(new(2, 2**20 // dtype.itemsize + 13, dtype=dtype))


@pytest.mark.gpu
@CHECKS
@every_dtype
def test_layouts_of_rows(check_rows, dtype):
    check_rows(new(7, 1008, dtype=dtype)[:, 1:1001])  # off the 16-byte boundary, rows apart
    check_rows(new(1008, dtype=dtype).expand(3, 1008))  # one row, repeated
    check_rows(new(24, 40, dtype=dtype).t())  # copied first


@pytest.mark.gpu
def test_norm_weights_of_other_dtypes():
    x, float32 = new(137, 1032, dtype=torch.bfloat16), new(1032, dtype=torch.float32)
    check(fusedcuda.rms_norm, x, float32)
    check(fusedcuda.layer_norm, x, float32, new(1032, dtype=torch.bfloat16))
    check(fusedcuda.rms_norm, x, new(1032, dtype=torch.float16))


# ---- RoPE ----------------------------------------------------------------------------------------


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for interleaved in (False, True):

        def rope(q: Tensor, k: Tensor, interleaved: bool = interleaved) -> tuple[Tensor, Tensor]:
            cos_there, sin_there = cos.to(q.device), sin.to(q.device)
            return fusedcuda.rope(q, k, cos_there, sin_there, interleaved=interleaved)

        check(rope, q, k)
        # Copies that keep the strides, so that the kernel sees the layout that it is tried on.
        turned = [torch.empty_like(x).copy_(x) for x in (q, k)]
        fusedcuda.rope_(*turned, cos, sin, interleaved=interleaved)
        torch.testing.assert_close(turned, list(rope(q, k)))


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("dim", [64, 6], ids=["vectors", "single elements"])
def test_rope(dim, dtype):
    length = 19
    cos, sin = new(2, length, dim, dtype=dtype).unbind()
    q, k = new(2, 5, length, dim, dtype=dtype), new(2, 2, length, dim, dtype=dtype)
    check_rope(q, k, cos, sin)
    check_rope(q, k, cos[:, : dim // 2], sin[:, : dim // 2])
    check_rope(q, k, cos.float().expand(2, length, dim), sin.float().expand(2, length, dim))
    by_position = [new(2, length, heads, dim, dtype=dtype).transpose(1, 2) for heads in (5, 2)]
    check_rope(*by_position, cos, sin)
    check_rope(new(2, 5, length, dim + 1, dtype=dtype)[..., 1:], k, cos, sin)  # off the boundary


# ---- DLRM ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("shape", [(27, 128), (27, 16), (5, 13), (40, 72), (64, 256)], ids=str)
def test_dot_interaction(shape, dtype):
    """More samples than the GPU has warps for, of vectors that end inside tiles."""
    count, columns = shape
    batch = 10_001 if columns == 16 else 37
    dense, embeddings = (
        new(batch, columns, dtype=dtype),
        new(batch, count - 1, columns, dtype=dtype),
    )
    check(fusedcuda.dot_interaction, dense / 8, embeddings / 8)
    check(lambda d, e: fusedcuda.dot_interaction(d, e, order="triu", pad=1), dense, embeddings / 8)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("shape", [(27, 128), (27, 16), (5, 13), (40, 72), (64, 256)], ids=str)
def test_embedding_interaction(shape, dtype):
    """Indices up to both ends of the table."""
    count, columns = shape
    batch = 10_001 if columns == 16 else 37
    width = columns + count * (count - 1) // 2
    dense, weight = (new(n, columns, dtype=dtype) / 8 for n in (batch, 101))
    grad = new(batch, width, dtype=dtype)
    ends = torch.arange(batch * (count - 1)).view(batch, count - 1) % 101
    raw = torch.ops.fusedcuda
    for indices in (ends.cuda(), ends.int().cuda()):
        on_both(raw.embedding_interaction, dense, weight, indices, False, width)
        for mask, shape_of_gradient in ((1, dense.shape), (2, (*indices.shape, columns))):

            def gradient(*given: object, mask: int = mask) -> Tensor:
                (result,) = raw.embedding_interaction_backward(*given, False, mask)
                return result

            assert on_both(gradient, grad, dense, weight, indices).shape == shape_of_gradient


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("columns", [16, 13])
def test_gradient_of_a_table(columns, dtype):
    """One pass and two, no full tile and several, one level of sums and three; no items at all."""
    for items, rows in ((0, 9), (33, 5), (9301, 1), (9301, 700)):
        grad = new(items, columns, dtype=dtype)
        indices = (torch.arange(items) ** 2 % rows).cuda()
        for given in (indices, indices.int()):
            on_both(torch.ops.fusedcuda.embedding_dense_backward, grad, given, rows)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("columns", [256, 13, 5000])
def test_linear_sigmoid_bce(columns, dtype):
    x, weight, bias = (
        new(1001, columns, dtype=dtype),
        new(1, columns, dtype=dtype),
        new(1, dtype=dtype),
    )
    target = torch.linspace(0, 1, 1001, device="cuda")
    for reduction in ("mean", "sum", "none"):

        def loss(x: Tensor, w: Tensor, b: Tensor, reduction: str = reduction) -> Tensor:
            there = target.to(x.device)
            return fusedcuda.linear_sigmoid_bce(x, w / 64, b, there, reduction=reduction)

        check(loss, x, weight, bias)
