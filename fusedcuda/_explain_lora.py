"""``explain`` of the lora family."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _explain_linear_act, _explain_pointwise, _jit
from ._explanation import Explainers, Explanation, Launch, Parts, ask, multiprocessors
from .ops import _lora_cuda as cuda
from .ops import _lora_reference as reference
from .ops import linear_act as linear_family
from .ops import lora as family
from .ops import pointwise
from .ops._activations import ACTIVATIONS, activation_code
from .ops._lora_reference import NONE
from .ops._rows import as_matrix


class _Layer(NamedTuple):
    """The arguments of the raw operators."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor
    lora_b: Tensor
    seed: Tensor | None
    activation: int
    scale: float
    dropout_p: float


class _Product(NamedTuple):
    """``y = x @ weight.T + bias + t @ factor.T``, or the gradient of ``x`` as one."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    t: Tensor
    factor: Tensor
    y: Tensor


def _explain_lora_linear(arguments: dict[str, Any], backward: bool) -> Explanation:
    names = ("x", "weight", "bias", "lora_a", "lora_b")
    x, weight, bias, lora_a, lora_b = family.cast(*(arguments[name] for name in names))
    activation = activation_code("lora_linear", arguments["activation"])
    scale, dropout_p = arguments["scale"], arguments["dropout_p"]
    drops = arguments["training"] and dropout_p > 0
    seed = torch.zeros(1, dtype=torch.int64, device=x.device) if drops else None
    layer = _Layer(x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p)
    reference.check_lora("lora_linear", *layer)
    parts = Parts()
    describe = _describe_backward if backward else _describe_forward
    describe(parts, layer)
    return parts.explanation("lora_linear")


def _describe_forward(parts: Parts, layer: _Layer) -> None:
    y, t, *z = reference.lora_linear_forward_fake(*layer)
    x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p = layer
    operands = (x, weight, bias, lora_a, lora_b)
    records = torch.is_grad_enabled() and any(o is not None and o.requires_grad for o in operands)
    saves = records and bool(z)
    in_product = NONE if saves else activation
    rows = as_matrix(x).detach()
    product = _Product(x, weight, bias, t, cuda.padded(lora_b.detach(), t, dim=1), y)
    launch = cuda.one_launch(rows, lora_a.shape[0], seed, in_product)
    of_rows = product._replace(x=rows)
    if launch and _add_one_launch(parts, launch, of_rows, lora_a, scale, in_product):
        activation_left = saves
    else:
        _add_down(parts, "t", rows, lora_a, seed, scale, dropout_p)
        activation_left = _add_product(parts, product, activation, in_product)
    if activation_left:
        given = {"x": y, "bias": 0.0, "activation": _name_of(activation)}
        parts.include(_explain_pointwise.EXPLAINERS[pointwise.bias_act](given, False))


def _add_product(parts: Parts, product: _Product, activation: int, in_product: int) -> bool:
    """Returns whether the activation is left to do."""
    path = cuda.choose_path()
    if path in cuda.IN_ONE_PRODUCT and _add_extended(parts, product, in_product):
        return activation != in_product
    _add_linear_and_branch(parts, product, path)
    return activation != NONE and (path != "residual" or in_product == NONE)


def _add_linear_and_branch(parts: Parts, product: _Product, path: str) -> None:
    x, weight, bias, t, factor, y = product
    linear: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "allow_low_precision_reduction": False,
    }
    if path == "residual":
        parts.add(_cublas("t @ lora_b.T"), [t, factor, y], "  t @ lora_b.T: cuBLAS")
        linear["residual"] = y
        explain = _explain_linear_act.EXPLAINERS[linear_family.linear_residual]
    else:
        linear["activation"] = "none"
        explain = _explain_linear_act.EXPLAINERS[linear_family.linear_act]
    with torch.no_grad():  # nothing of the linear itself is kept
        parts.include(explain(linear, False))
    if path != "residual":
        _add_branch(parts, t, factor, y)


def _add_branch(parts: Parts, t: Tensor, factor: Tensor, base: Tensor) -> None:
    """``base + t @ factor.T``, where ``base`` is finished and rounded before."""
    given: dict[str, Any] = {
        "x": t,
        "weight": factor,
        "bias": None,
        "residual": as_matrix(base),
        "allow_low_precision_reduction": False,
    }
    with torch.no_grad():
        parts.include(_explain_linear_act.EXPLAINERS[linear_family.linear_residual](given, False))


def _add_one_launch(
    parts: Parts, launch: str, product: _Product, down: Tensor, scale: float, activation: int
) -> bool:
    """One launch of everything, if there is a kernel for that."""
    _jit.load(family.FAMILY)
    x, weight, bias, t, factor, y = product
    adapter = cuda.fused_arguments(down.detach(), factor, scale)
    given = [x, weight.detach(), bias, *adapter]
    if launch == "lora_decode":
        given.append(activation)
    text = getattr(torch.ops.fusedcuda, f"{launch}_plan")(*given, multiprocessors())
    if not text:
        return False
    # lora_product: a memset of its counters comes first.
    kernels = 2 if launch == "lora_product" else 1
    plan = {"path": launch, "kernels": kernels, "copies": []} | json.loads(text)
    line = f"  {launch}: t, and the product with the branch in it, in one launch"
    parts.add(plan, [x, weight, bias, down, factor, t, y], f"{line}: {plan['blocks']} blocks")
    return True


def _add_extended(parts: Parts, product: _Product, activation: int) -> bool:
    """One product of both, if there is a kernel for that."""
    _jit.load(linear_family.FAMILY)
    text = torch.ops.fusedcuda.linear_act_extended_plan(*product[:-1], activation)
    if not text:
        return False
    plan = json.loads(text)
    plan["kernels"] = _explain_linear_act._kernels(plan)
    lines = _explain_linear_act._describe(plan)
    parts.add(plan, list(product), "\n".join(lines))
    ranks = product.factor.shape[1]
    parts.lines.append(f"    with {ranks} more products in each sum: the branch")
    return True


def _describe_backward(parts: Parts, layer: _Layer) -> None:
    """With a gradient of weight and bias only where they ask for one: they are frozen as a rule."""
    dy, t, *_ = reference.lora_linear_forward_fake(*layer)
    x, weight, bias, lora_a, lora_b, seed, activation, scale, dropout_p = layer
    dz, rows = as_matrix(dy), as_matrix(x)
    if activation != NONE:
        given = {"x": dy, "bias": 0.0, "activation": _name_of(activation)}
        parts.include(_explain_pointwise.EXPLAINERS[pointwise.bias_act](given, True))
    factor = cuda.padded(lora_a.detach(), t, dim=0).T
    product = _Product(dz, weight.detach().T, None, t, factor, rows)
    launch = cuda.one_launch(dz, lora_a.shape[0], seed, NONE)
    in_one_launch = launch == "lora_product" and _add_one_launch(
        parts, launch, product, lora_b.T, scale, NONE
    )
    has_db = False
    if not in_one_launch:
        has_db = _add_both(parts, dz, t, lora_b, scale)
        if not has_db:
            _add_down(parts, "gradient of t", dz, lora_b.T, None, scale, 0.0)
        in_one = cuda.choose_path() in cuda.IN_ONE_PRODUCT and seed is None
        if not (in_one and _add_extended(parts, product, NONE)):
            _add_dx_and_branch(parts, product, seed, dropout_p)
    if weight.requires_grad:
        parts.add(_cublas("dz.T @ x"), [dz, rows, weight], "  gradient of weight: as linear_act's")
    if bias is not None and bias.requires_grad:
        parts.add(_cublas("sum of dz"), [dz, bias], "  gradient of bias: as linear_act's")
    _add_up(parts, "lora_a", t, rows, lora_a, seed, dropout_p, transposed=False)
    if not has_db:
        _add_up(parts, "lora_b", t, dz, lora_b, None, 0.0, transposed=True)


def _add_dx_and_branch(
    parts: Parts, product: _Product, seed: Tensor | None, dropout_p: float
) -> None:
    dz, weight, _, dt, factor, rows = product
    if seed is None:
        line = "  gradient of x: a product as linear_act's"
        parts.add(_cublas("dz @ weight"), [dz, weight, rows], line)
        _add_branch(parts, dt, factor, rows)
        return
    _add_dropped_branch(parts, dt, factor, rows, seed, dropout_p)
    _add_branch(parts, dz, weight, rows)


def _add_dropped_branch(
    parts: Parts, dt: Tensor, factor: Tensor, rows: Tensor, seed: Tensor, dropout_p: float
) -> None:
    what = "  gradient of x: the branch's part"
    if cuda.has_kernel(dt.dtype):
        _jit.load(family.FAMILY)
        given = (dt, factor.T, seed, dropout_p, multiprocessors())
        if text := torch.ops.fusedcuda.lora_branch_plan(*given):
            plan = {"op": "lora_branch", "kernels": 1, "copies": []} | json.loads(text)
            line = f"{what} with its dropout in one launch: {plan['blocks']} blocks; then"
            parts.add(plan, [dt, factor, rows], line)
            return
    line = f"{what} by cuBLAS, dropout by a kernel of its own, then"
    parts.add(_cublas("dt @ lora_a", kernels=2), [dt, factor, *[rows] * 3], line)


def _explain_lora_mlp(arguments: dict[str, Any], backward: bool) -> Explanation:
    x, activation = arguments["x"], arguments["activation"]
    activation_code("lora_mlp", activation)
    layers = {"gate": arguments["gate"], "up": arguments["up"], "down": arguments["down"]}
    gated = layers["gate"] is not None
    parts = Parts()

    def layer(name: str, rows: Tensor, activation: str = "none") -> tuple[Explanation, Tensor]:
        weights = family.weights_of(name, layers[name])
        output = rows.new_empty(*rows.shape[:-1], weights.weight.shape[0])
        given: dict[str, Any] = {"x": rows, "weight": weights.weight, "bias": weights.bias}
        given["activation"] = activation
        if weights.lora_a is None:
            given["allow_low_precision_reduction"] = False
            explain = _explain_linear_act.EXPLAINERS[linear_family.linear_act]
            return explain(given, backward), output
        given |= {"lora_a": weights.lora_a, "lora_b": weights.lora_b, "scale": weights.scale}
        given |= {"dropout_p": weights.dropout_p, "training": arguments["training"]}
        return _explain_lora_linear(given, backward), output

    up, h = layer("up", x, "none" if gated else activation)
    found = [up]
    if gated:
        gate, h = layer("gate", x)
        given = {"gate": h, "up": h, "activation": activation}
        found = [gate, up, _explain_pointwise.EXPLAINERS[pointwise.act_mul](given, backward)]
    found.append(layer("down", h)[0])
    for explanation in reversed(found) if backward else found:
        parts.include(explanation)
    return parts.explanation("lora_mlp")


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def _name_of(activation: int) -> str:
    return next(name for name, code in ACTIVATIONS.items() if code == activation)


def _cublas(what: str, kernels: int = 1) -> Launch:
    return {"op": what, "path": "cublas", "kernels": kernels, "copies": []}


def _add_down(
    parts: Parts,
    what: str,
    x: Tensor,
    factor: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> None:
    t = reference.lora_down_fake(x, factor, seed, scale, dropout_p)
    if cuda.down_by_pass(x, factor, seed is not None):
        given = cuda.down_arguments(x, factor, seed, scale, dropout_p)
        if _add_pass(parts, what, given, [x, factor, t]):
            return
    if why := cuda.why_down_by_cublas(x, factor, seed is not None):
        _add_cublas(parts, what, [x, factor, t], x, seed, why)
        return
    arguments = (x, factor, seed, scale, dropout_p, multiprocessors())
    plan = ask(family.FAMILY, *arguments, plan="lora_down_plan")
    passes = plan["chunks"]
    _add_plan(parts, plan, what, [factor, t, *[x] * passes], x, has_sum=plan["splits"] > 1)


def _add_both(parts: Parts, dz: Tensor, t: Tensor, lora_b: Tensor, scale: float) -> bool:
    if not cuda.both_by_pass(dz, lora_b):
        return False
    given = cuda.both_arguments(dz, t, lora_b.detach(), scale)
    return _add_pass(parts, "gradients of t and lora_b", given, [dz, t, t, lora_b, lora_b])


def _add_pass(
    parts: Parts, what: str, arguments: tuple[Any, ...], tensors: list[Tensor | None]
) -> bool:
    """One pass over x, if there is a kernel for that."""
    _jit.load(family.FAMILY)
    text = torch.ops.fusedcuda.lora_pass_plan(*arguments, multiprocessors())
    if not text:
        return False
    plan = {"op": "lora_pass", "kernels": 2, "copies": []} | json.loads(text)
    line = f"  {what}: one pass by tensor cores, {plan['blocks']} blocks, and a sum of its parts"
    parts.add(plan, tensors, line)
    return True


def _add_up(
    parts: Parts,
    name: str,
    t: Tensor,
    x: Tensor,
    parameter: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    transposed: bool,
) -> None:
    what = f"gradient of {name}"
    rank = parameter.shape[1 if transposed else 0]
    in_float32 = parameter.dtype == torch.float32
    if cuda.up_by_pass(t, x, parameter, rank, seed is not None):
        given = cuda.up_arguments(t, x, parameter, rank, seed, dropout_p, transposed)
        if _add_pass(parts, what, given, [x, t, parameter]):
            return
    if why := cuda.why_up_by_cublas(t, x, parameter, rank, seed is not None):
        _add_cublas(parts, what, [t, x, parameter], x, seed, why)
        return
    arguments = (t, x, seed, rank, dropout_p, transposed, in_float32, multiprocessors())
    plan = ask(family.FAMILY, *arguments, plan="lora_up_plan")
    _add_plan(parts, plan, what, [t, parameter, *[x] * plan["chunks"]], x, has_sum=True)


def _add_cublas(
    parts: Parts,
    what: str,
    tensors: list[Tensor | None],
    x: Tensor,
    seed: Tensor | None,
    why: str,
) -> None:
    how = f"cuBLAS: {why}"
    if seed is not None:
        how += ", after a kernel for dropout"
        tensors = [*tensors, x, x]
    parts.add(_cublas(what, kernels=1 + (seed is not None)), tensors, f"  {what}: {how}")


def _add_plan(
    parts: Parts,
    plan: Launch,
    what: str,
    tensors: list[Tensor | None],
    x: Tensor,
    has_sum: bool,
) -> None:
    if plan["path"] == "empty":
        parts.add(plan | {"kernels": 0}, [], f"  {what}: empty")
        return
    plan["kernels"] = 1 + has_sum + len(plan["copies"])
    ways = [f"{plan['blocks']} blocks of {plan['threads']} threads, products by tensor cores"]
    if plan["vec"] == 1:
        ways.append("x element by element: its rows start off a 16-byte boundary")
    if not plan["factor_aligned"]:
        ways.append("the factor element by element: its rows start off a 16-byte boundary")
    if plan["chunks"] > 1:
        ways.append(f"x read {plan['chunks']} times, for 64 ranks each")
    if has_sum:
        ways.append(f"{plan['splits']} parts, added up by a second kernel")
    if plan["copies"]:
        ways.append("x copied first, so that its elements lie side by side")
        tensors = [*tensors, x, x]
    parts.add(plan, tensors, f"  {what}: {'; '.join(ways)}")


EXPLAINERS: Explainers = {
    family.lora_linear: _explain_lora_linear,
    family.lora_mlp: _explain_lora_mlp,
}
