"""Which kernels a linear layer takes, as its plan says on any machine."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusedcuda  # noqa: F401  (defines torch.ops.fusedcuda)
from fusedcuda.ops._activations import ACTIVATIONS

ops = torch.ops.fusedcuda
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture
def use(load_family: Callable[[str], None]) -> Iterator[Callable[[str], str]]:
    """Chooses the backend until the test ends."""
    load_family("linear_act")
    before = ops.linear_act_use("measured")
    yield ops.linear_act_use
    ops.linear_act_use(before)


def steps_of(plan: str) -> list[dict[str, Any]]:
    return json.loads(plan)["steps"]


def forward(
    m: int = 256, n: int = 128, k: int = 64, *, activation: str = "relu",
    dtype: torch.dtype = torch.bfloat16, saves: bool = False, **replaced: torch.Tensor,
) -> list[str]:  # fmt: skip
    given = {
        "x": torch.empty(m, k, dtype=dtype), "weight": torch.empty(n, k, dtype=dtype),
        "bias": torch.empty(n, dtype=dtype), "residual": None,
    } | replaced  # fmt: skip
    plan = ops.linear_act_plan(*given.values(), ACTIVATIONS[activation], False, saves)
    return [step["kernel"] for step in steps_of(plan)]


def backward(
    m: int = 256, n: int = 128, k: int = 64, *, activation: str = "relu", mask: int = 0b111,
    dtype: torch.dtype = torch.bfloat16, **replaced: torch.Tensor,
) -> list[dict[str, Any]]:  # fmt: skip
    saved: torch.Tensor | None = torch.empty(m, n, dtype=dtype)
    if activation == "relu":
        saved = torch.empty(m, (n + 127) // 128 * 16, dtype=torch.uint8)
    given = {
        "dy": torch.empty(m, n, dtype=dtype), "x": torch.empty(m, k, dtype=dtype),
        "weight": torch.empty(n, k, dtype=dtype), "saved": None if activation == "none" else saved,
    } | replaced  # fmt: skip
    plan = ops.linear_act_backward_plan(*given.values(), ACTIVATIONS[activation], mask, False)
    return steps_of(plan)


def kernels(steps: list[dict[str, Any]]) -> list[str]:
    return [step["kernel"] for step in steps]


OWN = "linear_act_kernel_sm90"
OWN_BWD = "linear_act_dx_kernel_sm90, linear_act_dweight_kernel_sm90"
PAD = "pad_rows_kernel"


def test_backends_have_names(use):
    assert use("hopper") == "measured"
    assert use("cublaslt") == "hopper"
    with pytest.raises(RuntimeError, match="hopper or cublaslt; got triton"):
        use("triton")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_our_own_product_has_everything_in_its_epilogue(use, dtype, activation):
    use("hopper")
    for saves in (False, True):
        assert forward(activation=activation, dtype=dtype, saves=saves) == [OWN]
    use("cublaslt")
    assert OWN not in forward(activation=activation, dtype=dtype)


def test_rows_that_are_not_aligned_are_padded(use):
    use("hopper")
    assert forward(k=479) == [PAD, PAD, OWN]
    wide = torch.empty(256, 480, dtype=torch.bfloat16)
    assert forward(k=479, x=wide[:, :479]) == [PAD, OWN]
    assert forward(k=479, x=wide[:, :479], weight=wide[:128, :479]) == [OWN]
    shifted = torch.empty(256 * 64 + 1, dtype=torch.bfloat16)[1:].view(256, 64)
    assert forward(x=shifted) == [PAD, OWN]
    assert kernels(backward(k=479)) == [PAD, PAD, OWN_BWD, PAD]
    assert kernels(backward(k=479, mask=0b110)) == [PAD, OWN_BWD]
    use("cublaslt")
    assert PAD not in forward(k=479)


def test_layers_of_few_inputs_have_a_kernel_of_their_own(use):
    narrow = "linear_narrow_kernel"
    for k in (1, 13, 16):
        assert forward(k=k) == [narrow]
        for activation in ACTIVATIONS:
            assert forward(k=k, activation=activation, saves=True) == [narrow]
    wide = torch.empty(256, 16, dtype=torch.bfloat16)
    assert forward(k=13, weight=wide[:128, :13]) == [narrow]
    assert forward(m=1, k=13, x=wide[:1, :13]) == [narrow]
    x, weight = (torch.empty(rows, 13, dtype=torch.bfloat16) for rows in (256, 128))
    (step,) = steps_of(ops.linear_act_plan(x, weight, None, None, ACTIVATIONS["relu"], False, True))
    assert step["fused"]
    for other in (
        forward(k=17), forward(n=124, k=13), forward(k=13, dtype=torch.float32),
        forward(k=13, weight=torch.empty(13, 128, dtype=torch.bfloat16).T),
        # x is read as one array.
        forward(k=13, x=wide[:, :13]),
        forward(k=13, x=torch.empty(256 * 13 + 1, dtype=torch.bfloat16)[1:].view(256, 13)),
    ):  # fmt: skip
        assert narrow not in other
    for backend in ("hopper", "cublaslt"):
        use(backend)
        assert narrow not in forward(k=13)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_of_one_output_is_a_kernel_of_its_own(use, activation, dtype):
    (step,) = backward(m=65536, n=1, k=256, activation=activation, dtype=dtype)
    assert step["kernel"] == "one_output_bwd_kernel, sum_partials_kernel"
    assert (step["kernels"], step["workspace_bytes"]) == (2, 391 * 257 * 4)
    assert step["fused"]
    (step,) = backward(m=65536, n=1, k=256, activation=activation, dtype=dtype, mask=0b001)
    assert (step["kernel"], step["kernels"]) == ("one_output_bwd_kernel", 1)
    (step,) = backward(m=16, n=1, k=4096, activation=activation, dtype=dtype)
    assert (step["kernels"], step["workspace_bytes"]) == (1, 0)
    for mask in (0b010, 0b011, 0b101, 0b110):
        (step,) = backward(n=1, k=13, activation=activation, dtype=dtype, mask=mask)
        assert "one_output_bwd_kernel" in step["kernel"]
    for other in (
        {"mask": 0b100}, {"n": 2}, {"dtype": torch.float32}, {"k": 0},
        {"x": torch.empty(64, 256, dtype=dtype).T},
    ):  # fmt: skip
        steps = kernels(backward(**{"n": 1, "activation": activation, "dtype": dtype} | other))
        assert not any("one_output" in kernel for kernel in steps)
    for backend in ("hopper", "cublaslt"):
        use(backend)
        steps = kernels(backward(n=1, activation=activation, dtype=dtype))
        assert not any("one_output" in kernel for kernel in steps)


def test_cublaslt_is_asked_for_what_the_probe_saw_it_fuse(use):
    """The package has told the kernels its table."""
    use("cublaslt")
    bias_apart = ["torch.copy_", "cublasLtMatmul"]
    for dtype, given, made_by in (
        (torch.bfloat16, {}, ["cublasLtMatmul"]),
        (torch.bfloat16, {"saves": True}, ["cublasLtMatmul", "act_rows_kernel"]),
        (torch.bfloat16, {"k": 479}, [*bias_apart, "act_rows_kernel"]),
        (torch.bfloat16, {"n": 127}, [*bias_apart, "act_rows_kernel"]),
        (torch.float32, {"n": 127}, ["cublasLtMatmul"]),
        (torch.float64, {}, [*bias_apart, "act_rows_kernel"]),
        (torch.float64, {"activation": "none"}, bias_apart),
    ):
        assert forward(dtype=dtype, **given) == made_by
    apart = ["act_rows_bwd_sum_kernel, sum_partials_kernel", "cublasLtMatmul", "cublasLtMatmul"]
    for dtype in (torch.float32, *HALVES):
        assert kernels(backward(dtype=dtype)) == apart


def test_what_our_own_product_does_not_take(use):
    use("hopper")
    assert OWN not in forward(dtype=torch.float32)
    assert OWN not in forward(n=127)
    assert OWN not in forward(residual=torch.empty(256, 128, dtype=torch.bfloat16))
    transposed = torch.empty(64, 128, dtype=torch.bfloat16).t()
    assert forward(weight=transposed) == [OWN]
    assert OWN not in forward(x=torch.empty(64, 256, dtype=torch.bfloat16).t())
    batch = torch.empty(3, 128, 64, dtype=torch.bfloat16)
    bias = torch.empty(3, 128, dtype=torch.bfloat16)
    x = torch.empty(3, 256, 64, dtype=torch.bfloat16)
    assert OWN not in forward(x=x, weight=batch, bias=bias)
    for other in (
        {"activation": "none"},
        {"n": 127},
        {"activation": "silu"},  # a derivative
        {"dtype": torch.float32},
        {"weight": transposed},
        {"mask": 0b100},
    ):
        assert OWN_BWD not in kernels(backward(**other))


def test_gradient_of_a_hidden_layer(use):
    """dh by cuBLASLt, the rest with the mask on the way into our own products."""
    use("hopper")
    m, hidden, k, n = 256, 128, 64, 40

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    mask = empty(m, 16, dtype=torch.uint8)
    given = (empty(m, n), empty(m, k), empty(hidden, k), mask, empty(m, hidden))
    relu = ACTIVATIONS["relu"]
    plan = ops.mlp_backward_plan(*given, empty(n, hidden), relu, 0b11111, False)
    second = ["column_sums_kernel", "cublasLtMatmul"]  # db2, dw2
    assert kernels(steps_of(plan)) == [*second, "cublasLtMatmul", OWN_BWD]


def test_a_gradient_of_many_rows_and_few_inputs_is_our_own(use):
    for m, n, k in ((65536, 1024, 480), (65536, 512, 16), (65536, 256, 512), (65536, 1024, 1024)):
        assert kernels(backward(m=m, n=n, k=k)) == [OWN_BWD]
    for m, n, k in ((8192, 3072, 768), (65536, 128, 256), (65536, 1024, 4096)):
        assert OWN_BWD not in kernels(backward(m=m, n=n, k=k))


def test_the_gradient_of_the_weight_is_split(use):
    """So that few tiles keep all multiprocessors busy; the parts need room in float32."""
    use("hopper")
    (step,) = backward(m=65536, n=1024, k=480)
    assert step["split_k"] == 8
    assert step["kernels"] == 3
    assert step["workspace_bytes"] == 8 * (1024 * 480 + 1024) * 4
    (step,) = backward(m=65536, n=1024, k=480, mask=0b001)
    assert (step["kernels"], step["workspace_bytes"]) == (1, 0)


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_the_bias_gradient_is_summed_where_dz_is_made(use, activation):
    """Without an activation dz is there already, and is read for its sum alone."""
    use("cublaslt")
    name = "column_sums_kernel" if activation == "none" else "act_rows_bwd_sum_kernel"
    step = backward(m=8192, n=3072, k=768, activation=activation)[0]
    assert step["kernel"] == f"{name}, sum_partials_kernel"
    assert step["what"] == ("dbias" if activation == "none" else "dz, dbias")
    assert (step["kernels"], step["workspace_bytes"]) == (2, 33 * 3072 * 4)
    for m in (1, 64):  # few rows: one kernel, and no memory for parts
        step = backward(m=m, n=3072, k=768, activation=activation)[0]
        assert (step["kernel"], step["kernels"], step["workspace_bytes"]) == (name, 1, 0)
    (step,) = backward(m=64, n=3072, k=768, activation=activation, mask=0b100)
    assert (step["kernel"], step["what"]) == (name, "dbias")


def test_bias_gradients_of_a_batch_of_weights(use):
    use("cublaslt")
    given = {"dy": (3, 64, 40), "x": (3, 64, 24), "weight": (3, 40, 24), "saved": (3, 64, 40)}
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in given.items()}
    assert kernels(backward(activation="silu", **tensors))[0] == "act_rows_bwd_sum_kernel"
    assert kernels(backward(activation="none", **tensors | {"saved": None}))[0] == (
        "column_sums_kernel"
    )
