"""The table that the probe measured on an H200: it is whole, and the steps follow it."""

import json
from pathlib import Path

import pytest
import torch
from fake_layer import FakeLayer
from linear_operands import ON_BIAS_ROWS, PLAIN, TOLERANCE, check, expected, kernels, random

from bench import probe
from fusedcuda import _cublaslt
from fusedcuda._cublaslt import ARITHMETIC, EPILOGUES
from fusedcuda.ops._activations import ACTIVATIONS, apply_activation

HALVES = (torch.bfloat16, torch.float16)


def table() -> dict[str, dict[str, dict]]:
    return json.loads(_cublaslt.SUPPORT.read_text())["epilogues"]


def test_the_table_has_every_epilogue_of_every_arithmetic() -> None:
    assert list(table()) == list(ARITHMETIC)
    assert all(list(rows) == list(EPILOGUES) for rows in table().values())


def test_the_notes_print_the_table() -> None:
    notes = Path(probe.__file__).parent / "results" / "h200" / "cublaslt.md"
    assert "\n".join(probe.as_markdown(table())) in notes.read_text()


def test_the_package_passes_the_table_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[int, int, int], bool] = {}

    def set_support(cuda_type: int, compute: int, epilogue: int, fused: bool) -> None:
        told[cuda_type, compute, epilogue] = fused

    monkeypatch.setattr(_cublaslt, "_set_support", set_support)
    _cublaslt.use_support(_cublaslt.SUPPORT)
    assert len(told) == len(ARITHMETIC) * len(EPILOGUES)
    bfloat16 = ARITHMETIC["bfloat16"]
    assert told[(*bfloat16, EPILOGUES["RELU_BIAS"])] is True
    assert told[(*bfloat16, EPILOGUES["RELU_AUX_BIAS"])] is False
    assert told[(*bfloat16, EPILOGUES["DRELU_BGRAD"])] is False
    assert told[(*ARITHMETIC["float32"], EPILOGUES["GELU_BIAS"])] is False


@pytest.fixture
def measured(layer: FakeLayer) -> FakeLayer:
    """What cuBLASLt would be asked for on the card of the table."""
    layer.use_support(_cublaslt.SUPPORT)
    return layer


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "silu"])
def test_forward(measured: FakeLayer, activation: str, saves: bool, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*s, dtype=dtype) for s in ((24, 32), (40, 32), (40,)))
    y, saved, steps = measured.forward(x, weight, bias, activation=activation, saves=saves)
    fused = {"relu": [torch.float32, *HALVES], "gelu_tanh": [*HALVES]}.get(activation, [])
    if dtype in fused and not saves:
        made_by = ["RELU_BIAS" if activation == "relu" else "GELU_BIAS"]
    else:
        # In float64 the bias in the epilogue is slower than apart.
        made_by = [*(ON_BIAS_ROWS if dtype == torch.float64 else ["BIAS"])]
        made_by += ["act_rows_kernel"] if activation != "none" else []
    assert kernels(steps) == made_by
    reference, z = expected(x, weight, bias, activation=activation)
    if saved is not None and activation != "relu":
        check(saved, z)
        reference = apply_activation(saved.double(), ACTIVATIONS[activation])
    check(y, reference)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_two_layers_backward(measured: FakeLayer, activation: str, dtype: torch.dtype) -> None:
    """No gradient is fused: each would be another kernel of cuBLASLt's, or slower than ours."""
    x, w1, h, w2 = (random(*s, dtype=dtype) for s in ((24, 32), (40, 32), (24, 40), (16, 40)))
    saved = torch.zeros(24, 16, dtype=torch.uint8) if activation == "relu" else h
    dy = random(24, 16, dtype=dtype)
    gradients, steps = measured.mlp_backward(dy, x, w1, saved, h, w2, activation)
    made_by = ["column_sums_kernel", PLAIN, PLAIN, "act_rows_bwd_sum_kernel", PLAIN, PLAIN]
    assert kernels(steps) == made_by
    check(gradients["dw2"], dy.double().mT @ h.double())
    check(gradients["db2"], dy.double().sum(0))
    if activation == "relu":  # the mask lets nothing through
        assert not any(gradients[name].any() for name in ("dx", "dw1", "db1"))


@pytest.mark.parametrize("known", [False, True], ids=["no table", "table"])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float64_has_no_epilogue_beyond_the_bias(
    layer: FakeLayer, activation: str, saves: bool, known: bool
) -> None:
    """cuBLASLt's search offers algorithms for others; they are not even looked at."""
    if known:
        layer.use_support(_cublaslt.SUPPORT)
    layer.fails_when_run("RELU", "RELU_BIAS", "RELU_AUX_BIAS", "GELU_BIAS", "GELU_AUX_BIAS")
    x, weight, bias = (random(*s, dtype=torch.float64) for s in ((24, 32), (40, 32), (40,)))
    y, _, steps = layer.forward(x, weight, bias, activation=activation, saves=saves)
    check(y, expected(x, weight, bias, activation=activation)[0])
    assert {step["epilogue"] for step in steps} <= {None, "BIAS"}
    assert layer.searches() == 1
