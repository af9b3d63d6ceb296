"""Linear layers in plain torch, and the comparison with float64 that their tests share."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from reference import ACTIVATIONS, check_function, poison, rounded, ulp
from torch import Tensor

import fusedcuda
from fusedcuda.ops._linear_act_reference import saves_derivative

BATCHED = (3,)  # a batch of weights


def exact(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Normally distributed multiples of 1/8.

    Products of them are added up without rounding, in float32 and in any order: two
    implementations agree on the sign of a sum, and on how it is rounded to 16 bits.
    """
    return (8 * torch.randn(shape, device=device)).round().clamp(-32, 32).div(8).to(dtype)


def weights(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """As :func:`exact`, scaled by a power of two so that their products with it are about 1."""
    scale = 2.0 ** -round(math.log2(max(shape[-1], 1)) / 2)
    return exact(*shape, dtype=dtype, device=device) * scale


def operands(
    *rows: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    batch: Sequence[int] = (),
) -> list[Tensor]:
    """x of shape ``(*batch, *rows, k)``, weight and bias."""
    return [
        exact(*batch, *rows, k, dtype=dtype, device=device),
        weights(*batch, n, k, dtype=dtype, device=device),
        exact(*batch, n, dtype=dtype, device=device),
    ]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's op; of a batch of weights the product of the batches."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    rows = x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
    z = torch.matmul(rows, weight.mT)
    if bias is not None:
        z = z + (bias.unsqueeze(1) if bias.dim() == 2 else bias)
    return z.reshape(*x.shape[:-1], weight.shape[-2])


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    return ACTIVATIONS[activation](linear(x, weight, bias))


class RoundedGradient(torch.autograd.Function):
    """The tensor as it is; its gradient as if it had been stored in ``dtype``."""

    @staticmethod
    def forward(ctx, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


def act_with_saved(z: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """``act(z)``, whose gradient is what was saved of z times the incoming one, and rounded."""
    if activation == "none":
        return z
    z = RoundedGradient.apply(z, dtype)
    y = ACTIVATIONS[activation](z).detach()
    return y + saved_slope(z, activation, dtype) * (z - z.detach())


def slope(z: Tensor, activation: str) -> Tensor:
    """act'(z)"""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(ACTIVATIONS[activation](z).sum(), z)
    return gradient


def saved_slope(z: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """act'(z) as the backward knows it: rounded in 16 bits, of the rounded z in others."""
    z = z.detach()
    if activation == "relu" or not saves_derivative(dtype):
        return slope(z.to(dtype).to(z.dtype), activation)
    return slope(z, activation).to(dtype).to(z.dtype)


def bend(z: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """How much act'(z) may differ from that at the z that one of two kernels has rounded."""
    if activation in ("none", "relu"):
        return torch.zeros_like(z)
    step = ulp(z, dtype)
    near = torch.stack([slope(z + side * step, activation) for side in (-1, 0, 1)])
    return near.amax(0) - near.amin(0) + ulp(near[1], dtype)


def in_roundings(error: Tensor, dtype: torch.dtype) -> Tensor:
    """An error as the magnitude that excuses it: check_function allows 32 roundings of one."""
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    return error / (32 * torch.finfo(arithmetic).eps)


class Layer:
    """The magnitudes of what is added up in a layer, in float64, and how far roundings move it."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype
    ) -> None:
        self.activation, self.dtype = activation, dtype
        self.batched = weight.dim() == 3
        self.x, self.weight = self.matrix(x.detach().double()), weight.detach().double()
        bias = None if bias is None else bias.detach().double()
        z = self.matrix(linear(x.detach().double(), self.weight, bias))
        self.rounded_z = z.to(dtype).double()
        self.slope = saved_slope(z, activation, dtype)
        self.bend = bend(z, activation, dtype)
        self.steep = self.slope.abs().clamp(min=1)
        self.y = ACTIVATIONS[activation](z)
        sums = self.x.abs() @ self.weight.abs().mT
        if bias is not None:
            sums = sums + (bias.unsqueeze(1) if bias.dim() == 2 else bias).abs()
        # Two kernels instead of one apply the activation to the rounded z.
        excused = in_roundings(ulp(z, dtype) / 2 * self.slope.abs(), dtype)
        self.output = sums * self.steep + (0 if activation == "none" else excused)

    def matrix(self, rows: Tensor) -> Tensor:
        lead = rows.shape[:1] if self.batched else ()
        count = math.prod(rows.shape[len(lead) : -1])
        return rows.reshape(*lead, count, rows.shape[-1])

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        """Of x, weight and bias; one element of a sum may have been rounded the other way."""
        dz = dy * self.slope
        flips = in_roundings(ulp(dz, self.dtype), self.dtype)
        if self.activation == "none":
            flips = torch.zeros_like(flips)
        terms = dy.abs() * (self.steep + in_roundings(self.bend, self.dtype))
        x, weight = self.x.abs(), self.weight.abs()
        return {
            "x": terms @ weight + largest(flips, -1) * largest(weight, -2),
            "weight": terms.mT @ x + largest(flips, -2).mT * largest(x, -2),
            "bias": (terms.sum(-2) + largest(flips, -2).squeeze(-2)),
        }


def largest(values: Tensor, dim: int) -> Tensor:
    if values.shape[dim] == 0:
        return values.new_zeros(()).expand(*values.sum(dim, keepdim=True).shape)
    return values.amax(dim, keepdim=True)


def check_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    residual: Tensor | None = None,
    dy: Tensor | None = None,
    wrt: Sequence[str] | None = None,
    run_on: str | None = None,
) -> Tensor:
    """`check_function` of linear_act, or with a residual of linear_residual.

    ``run_on``: the device that computes it, if not that of the operands, where all that it is
    compared with is computed.
    """
    dtype = x.dtype
    layer = Layer(x, weight, bias, activation, dtype)
    shape = (*x.shape[:-1], weight.shape[-2])
    if dy is None:
        dy = torch.randn(shape, device=x.device).to(dtype)
    magnitudes = {
        "output 0": layer.output.reshape(shape),
        **layer.gradients(layer.matrix(dy.double())),
    }
    magnitudes["x"] = magnitudes["x"].reshape(x.shape)
    tensors = {"x": x, "weight": weight, "bias": bias}
    if residual is None:
        functions: list[Callable[..., Tensor]] = [
            lambda *tensors: fusedcuda.linear_act(*tensors, activation),
            lambda x, w, b: eager(x, w, b, activation),
            lambda x, w, b: act_with_saved(linear(x, w, b), activation, dtype),
        ]
    else:
        tensors["residual"] = residual
        magnitudes["output 0"] = magnitudes["output 0"] + residual.double().abs()
        functions = [
            fusedcuda.linear_residual,
            lambda x, w, b, r: linear(x, w, b) + r,
            lambda x, w, b, r: linear(x, w, b) + r,
        ]

    def fused(*tensors: Tensor | None) -> Tensor:
        y = functions[0](*(None if t is None else t.to(run_on or t.device) for t in tensors))
        assert y.is_contiguous()
        return y.to(x.device)

    return check_function(
        "linear_act" if residual is None else "linear_residual",
        fused,
        functions[1],
        tensors,
        reference=functions[2],
        wrt=wrt,
        grad_outputs=[dy],
        magnitudes=magnitudes,
    )


def check_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str = "gelu_tanh",
    *,
    dy: Tensor | None = None,
    wrt: Sequence[str] | None = None,
) -> Tensor:
    """`check_function` of mlp.

    The hidden layer and its gradient are rounded in the middle, once or, where the activation is a
    kernel of its own, twice.
    """
    dtype = x.dtype
    shape = (*x.shape[:-1], w2.shape[0])
    if dy is None:
        dy = torch.randn(shape, device=x.device).to(dtype)
    first = Layer(x, w1, b1, activation, dtype)
    second = Layer(first.y.to(dtype), w2, b2, "none", dtype)
    grad = first.matrix(dy.double())
    dh = grad @ second.weight
    two_roundings = in_roundings(ulp(first.y, dtype) + ulp(first.rounded_z, dtype), dtype)
    moved_h = first.output + two_roundings
    moved_dz = (grad.abs() @ second.weight.abs()) * first.steep + in_roundings(
        ulp(dh, dtype) * first.steep + ulp(dh * first.slope, dtype) + dh.abs() * first.bend, dtype
    )
    magnitudes = {
        "output 0": (second.output + moved_h @ second.weight.abs().mT).reshape(shape),
        "x": (moved_dz @ first.weight.abs()).reshape(x.shape),
        "w1": moved_dz.mT @ first.x.abs(),
        "b1": moved_dz.sum(0),
        "w2": grad.abs().mT @ (second.x.abs() + moved_h),
        "b2": grad.abs().sum(0),
    }

    def formula(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        h = act_with_saved(linear(x, w1, b1), activation, dtype)
        return linear(rounded(h, dtype), w2, b2)

    y = check_function(
        "mlp",
        lambda *tensors: fusedcuda.mlp(*tensors, activation),
        lambda x, w1, b1, w2, b2: F.linear(eager(x, w1, b1, activation), w2, b2),
        {"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2},
        reference=formula,
        wrt=wrt,
        grad_outputs=[dy],
        magnitudes=magnitudes,
    )
    assert y.is_contiguous()
    return y


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Whose products linear_act takes."""
    fusedcuda.load("linear_act")
    before = torch.ops.fusedcuda.linear_act_use(name)
    try:
        yield
    finally:
        torch.ops.fusedcuda.linear_act_use(before)


def check_kernel(
    kernel: str, m: int, n: int, k: int, activation: str = "relu",
    dtype: torch.dtype = torch.bfloat16, *, backward: bool = False,
) -> None:  # fmt: skip
    """A layer on CUDA that takes this kernel, or whose gradient does, against float64."""
    x, weight, bias = operands(m, n=n, k=k, dtype=dtype, device="cuda")
    layer = (fusedcuda.linear_act, x, weight, bias, activation)
    assert kernel in str(fusedcuda.explain(*layer, backward=backward))
    poison("cuda", 2 * m * n, 2 * m * k, 2 * n * k)
    check_linear(x, weight, bias, activation)
