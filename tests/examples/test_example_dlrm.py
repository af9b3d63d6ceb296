"""The DLRM study: models that agree, counts that are right, and a page that says what was done."""

import copy
import gc
import weakref
from collections import Counter as Calls
from pathlib import Path

import pytest
import torch
from scripted_gpu import ROOT, ScriptedGpu

import fusedcuda
from examples.dlrm import __main__ as study
from examples.dlrm import models, page, step
from examples.dlrm.check import compare
from examples.dlrm.counts import count_step
from examples.dlrm.models import FusedDLRM, PlainDLRM, reduced
from examples.results import COUNTED, MEASURED, NOT_MEASURED, Results
from examples.traces import (
    BACKWARD,
    ELEMENTWISE,
    FORWARD,
    MATMUL,
    OPTIMIZER,
    Kernel,
    StepTrace,
)
from fusedcuda.demo.criteo import generate_rows, read_rows
from fusedcuda.demo.dlrm import CONFIGS

SAMPLE = ROOT.parent / "shared" / "data" / "criteo_sample.csv"
ROWS = 20
every_config = pytest.mark.parametrize("name", CONFIGS)
PROVIDED = [op for op in models.OPS if hasattr(fusedcuda, op)]


def batch_of(config, size=16, dtype=torch.float64, rows=None):
    rows = rows or generate_rows(size)
    (batch,) = step.batches_of(rows, config, ROWS, size, 1, torch.device("cpu"), dtype)
    return batch


# -- the models -----------------------------------------------------------------------------------


@every_config
def test_both_models_agree(name):
    config = reduced(CONFIGS[name])
    model = PlainDLRM(config, ROWS).double()
    comparisons = compare(model, batch_of(config))
    assert {item.name for item in comparisons} == {"logits", "loss"} | {
        name for name, _ in model.named_parameters()
    }
    assert [item.name for item in comparisons if not item.ok] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_agree_in_narrow_dtypes_up_to_the_plain_models_own_error(dtype):
    config = reduced(CONFIGS["kaggle"])
    comparisons = compare(PlainDLRM(config, ROWS).to(dtype), batch_of(config, 64, dtype))
    for item in comparisons[:2]:  # gradients may differ by a ReLU that rounding switched
        assert item.ok, item


@pytest.mark.skipif(not SAMPLE.exists(), reason="needs the rows of the Criteo sample")
def test_they_agree_on_real_rows():
    config = reduced(CONFIGS["kaggle"])
    rows = read_rows(SAMPLE)
    assert len(rows) == 200
    comparisons = compare(PlainDLRM(config, ROWS).double(), batch_of(config, 200, rows=rows))
    assert all(item.ok for item in comparisons)


def test_a_wrong_gradient_is_found(monkeypatch):
    right = fusedcuda.linear_act
    monkeypatch.setattr(fusedcuda, "linear_act", lambda x, w, b, a: right(x, w, b.detach(), a))
    config = reduced(CONFIGS["kaggle"])
    comparisons = compare(PlainDLRM(config, ROWS).double(), batch_of(config))
    wrong = {item.name for item in comparisons if not item.ok}
    assert wrong == {
        *(f"bottom.{i}.bias" for i in range(len(config.bottom))),
        *(f"top.{i}.bias" for i in range(len(config.top))),
    }


@pytest.mark.parametrize("op", PROVIDED)
def test_the_fused_model_uses_each_op_and_gets_by_without_it(op, monkeypatch):
    config = reduced(CONFIGS["kaggle"])
    arguments = (FusedDLRM, config, ROWS, 8, torch.float32, step.OPTIMIZERS["sgd"])
    called = {work.name.removesuffix("_forward") for work in count_step(*arguments)}
    assert f"fusedcuda::{op}" in called
    if op == "linear_act":
        return  # the family that this example is about; no fusedcuda lacks it
    assert models.missing_ops([config]) == []
    monkeypatch.delattr(fusedcuda, op)
    called = {work.name.removesuffix("_forward") for work in count_step(*arguments)}
    assert f"fusedcuda::{op}" not in called
    (sentence,) = models.missing_ops([config])
    assert sentence == f"fusedcuda.{op} is not in this version: that part is plain PyTorch."
    assert all(x.ok for x in compare(PlainDLRM(config, ROWS).double(), batch_of(config)))


def test_the_outer_product_is_said_to_be_the_librarys():
    assert "outer product" in models.missing_ops([CONFIGS["lecture-main"]])[-1]


@every_config
def test_reduced_sizes_keep_the_form(name):
    small, full = reduced(CONFIGS[name]), CONFIGS[name]
    assert len(small.linear_shapes) == len(full.linear_shapes)
    assert small.interaction == full.interaction
    assert sum(a * b for a, b in small.linear_shapes) < 500_000


# -- the step -------------------------------------------------------------------------------------


def test_a_short_file_fills_every_batch():
    config = reduced(CONFIGS["kaggle"])
    rows = generate_rows(5)
    batches = list(step.batches_of(rows, config, ROWS, 4, 3, torch.device("cpu"), torch.float32))
    labels = torch.cat([batch.labels for batch in batches])
    assert labels.tolist() == (rows.labels.tolist() * 3)[:12]
    assert batches[1].dense.shape == (4, config.dense_width)


@pytest.mark.parametrize("optimizer", step.OPTIMIZERS)
def test_both_models_train_alike(optimizer):
    config = reduced(CONFIGS["kaggle"])
    plain = PlainDLRM(config, ROWS).double()
    batch = batch_of(config, 32)
    losses = {}
    for kind in (PlainDLRM, FusedDLRM):
        make = step.optimizer_for(optimizer, torch.device("cpu"))
        provider = step.eager(step.twin(plain, kind), make)
        losses[kind] = torch.stack([provider.step(batch) for _ in range(5)])
    assert losses[PlainDLRM][-1] < losses[PlainDLRM][0]
    torch.testing.assert_close(losses[FusedDLRM], losses[PlainDLRM], rtol=1e-9, atol=0)


def test_providers_do_not_train_each_others_parameters():
    config = reduced(CONFIGS["kaggle"])
    plain = PlainDLRM(config, ROWS).double()
    before = copy.deepcopy(plain.state_dict())
    batch = batch_of(config)
    provider = step.build(step.FUSED, plain, step.OPTIMIZERS["sgd"], batch)
    assert provider.predict(batch).shape == (16,)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("name", [step.EAGER, step.FUSED, step.GRAPH])
def test_a_provider_keeps_its_model(name, monkeypatch):
    """A CUDA graph reads parameters, buffers and optimizer state where they were: it owns none."""

    class Recorded:
        """What GraphReplay keeps of the calls it captured: their outputs."""

        def __init__(self, calls, cycles, stream):
            self.outputs = [call() for call in calls]

    made, held = [], []
    twin, adam = step.twin, step.optimizer_for("adam", torch.device("cpu"))

    def seen_twin(*arguments):
        made.append(twin(*arguments))
        held.extend(weakref.ref(x) for x in (*made[-1].parameters(), *made[-1].buffers()))
        return made.pop()

    def seen_adam(parameters):
        made.append(adam(parameters))
        held.append(weakref.ref(made[-1]))
        return made.pop()

    monkeypatch.setattr(step, "GraphReplay", Recorded)
    monkeypatch.setattr(step, "twin", seen_twin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    config = reduced(CONFIGS["kaggle"])
    plain = PlainDLRM(config, ROWS)
    provider = step.build(name, plain, seen_adam, batch_of(config, dtype=torch.float32))
    gc.collect()
    assert len(held) == len([*plain.parameters(), *plain.buffers()]) + 1
    assert all(reference() is not None for reference in held)
    del provider
    gc.collect()
    assert all(reference() is None for reference in held)


# -- the page -------------------------------------------------------------------------------------

TINY = ["--case", "kaggle:32", "--table-rows", "50", "--no-compile", "--device", "cpu"]


def test_the_script_checks_counts_and_writes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert study.main([*TINY, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "kaggle 32: logits, loss and 15 gradients agree" in printed
    assert "not measured, there is no GPU here" in printed
    assert {path.name for path in tmp_path.iterdir()} == {
        "dlrm.csv", "dlrm.md", "dlrm_bytes.png",
    }  # fmt: skip
    text = (tmp_path / "dlrm.md").read_text()
    assert f"Measured on: {NOT_MEASURED}." in text
    assert text.count(f"\n{NOT_MEASURED}.\n") == 2
    assert "adam over tables of 50 rows, bfloat16" in text


@pytest.mark.skipif(not SAMPLE.exists(), reason="needs the rows of the Criteo sample")
def test_the_script_takes_real_rows(capsys):
    assert study.main([*TINY, "--data", str(SAMPLE)]) == 0
    assert "200 rows" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_an_error_of_the_command(capsys):
    assert study.main([*TINY, "--data", "nowhere.csv"]) == 2
    assert "nowhere.csv" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["kagle:8", "kaggle:many"])
def test_a_case_that_does_not_exist_is_refused(case, capsys):
    with pytest.raises(SystemExit):
        study.main(["--case", case])
    assert "expected NAME:BATCH, where NAME is one of kaggle, terabyte" in capsys.readouterr().err


def test_a_disagreement_is_said_and_fails(monkeypatch, capsys):
    right = fusedcuda.linear_act
    monkeypatch.setattr(fusedcuda, "linear_act", lambda *args: 1.01 * right(*args))
    assert study.main(TINY) == 1
    printed = capsys.readouterr().out
    assert "kaggle 32: WRONG: logits, loss" in printed
    assert "gradients, embeddings" in printed


@pytest.fixture
def measured(on_a_gpu) -> Results:
    """As a run on a GPU leaves it: three providers of one case, one that failed."""
    results = Results()
    case = "kaggle 65536"
    times = {step.COMPILE: 400.0, step.FUSED: 200.0, step.EAGER: 500.0}
    for provider, us in times.items():
        for metric in ("predict", "step"):
            results.add(case, provider, metric, us, "us", MEASURED)
        results.add(case, provider, f"{FORWARD}: {MATMUL}", 60.0, "us", MEASURED)
        results.add(case, provider, f"{FORWARD}: {ELEMENTWISE}", 20.0, "us", MEASURED)
        results.add(case, provider, f"{BACKWARD}: {ELEMENTWISE}", 20.0, "us", MEASURED)
        results.add(case, provider, f"{OPTIMIZER}: {ELEMENTWISE}", 100.0, "us", MEASURED)
    results.add(case, step.GRAPH, "step", None, "us", MEASURED, note="not capturable")
    return results


def test_the_page_has_shares_ratios_and_targets(measured):
    text = page.markdown(measured, [])
    assert "| kaggle 65536 | fusedcuda | 200 | 10.0% | 10.0% | 50.0% | - |" in text
    assert "| kaggle 65536 | fusedcuda | 200.0 | 2.00x | 200.0 | 2.00x |" in text
    assert "| kaggle 65536 | forward, fusedcuda against compile | 1.9x | 2.00x | met |" in text
    assert (
        f"| mlperf-v1 65536 | forward, fusedcuda against compile | 1.6x | - | {NOT_MEASURED} |"
        in text
    )
    assert "- kaggle 65536, fusedcuda, CUDA graph: not capturable" in text
    assert "Measured on: NVIDIA H200" in text


def test_a_run_without_a_gpu_keeps_what_was_measured(measured, tmp_path):
    pytest.importorskip("matplotlib")
    measured.save(tmp_path / "dlrm.csv")
    assert study.main([*TINY, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "dlrm.md").read_text()
    assert "| kaggle 65536 | forward, fusedcuda against compile | 1.9x | 2.00x | met |" in text
    assert "| kaggle 32 | fusedcuda |" in text
    assert (tmp_path / "dlrm_speedup.png").exists()
    assert (tmp_path / "dlrm_kernels.png").exists()


def test_shares_of_the_phases_add_up_and_a_whole_graph_has_none(measured):
    measured.add("c", step.GRAPH, f"whole step: {ELEMENTWISE}", 30.0, "us", MEASURED)
    measured.add("c", step.GRAPH, f"whole step: {MATMUL}", 70.0, "us", MEASURED)
    (row,) = page.share_rows(["c"], measured)
    assert row == ["c", step.GRAPH, "100", "-", "-", "-", "30.0%"]


def test_settings_are_said_once_or_by_case():
    results = Results()
    options = study.parse([])
    study.add_settings(study.Case("kaggle", 8), options, COUNTED, results)
    study.add_settings(study.Case("kaggle", 16), options, COUNTED, results)
    same = "adam over tables of 10,000 rows, bfloat16"
    assert page.settings(results, COUNTED) == same
    assert page.settings(results, MEASURED) == NOT_MEASURED
    study.add_settings(
        study.Case("kaggle", 16), study.parse(["--optimizer", "sgd"]), COUNTED, results
    )
    other = "sgd over tables of 10,000 rows, bfloat16 (kaggle 16)"
    assert page.settings(results, COUNTED) == f"{same} (kaggle 8); {other}"


def test_counted_and_measured_numbers_do_not_mix(measured):
    assert page.amount(measured, "kaggle 65536", step.FUSED, COUNTED) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", step.PROVIDERS)
def test_every_provider_runs_on_a_gpu(name):
    config = reduced(CONFIGS["kaggle"])
    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        plain = PlainDLRM(config, ROWS).to(device)
        rows = generate_rows(64)
        batches = list(step.batches_of(rows, config, ROWS, 32, 2, device, torch.float32))
        expected = plain(batches[1].dense, batches[1].indices)
        provider = step.build(name, plain, step.optimizer_for("adam", device), batches[0])
        losses = [provider.step(batches[0]).item() for _ in range(20)]
        assert losses[-1] < losses[0]
        assert provider.predict(batches[1]).shape == expected.shape


@pytest.mark.gpu
@pytest.mark.parametrize("name", step.PROVIDERS)
def test_later_allocations_do_not_reach_a_provider_on_a_gpu(name):
    config = reduced(CONFIGS["kaggle"])
    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        plain = PlainDLRM(config, ROWS).to(device)
        (batch,) = step.batches_of(generate_rows(32), config, ROWS, 32, 1, device, torch.float32)
        provider = step.build(name, plain, step.optimizer_for("adam", device), batch)
        expected = provider.predict(batch).clone()
        # Into every gap between small tensors; as offsets they give rows that exist, but others.
        others = [torch.ones(64, dtype=torch.int64, device=device) for _ in range(50_000)]
        assert torch.equal(provider.predict(batch), expected)
        losses = [provider.step(batch).item() for _ in range(20)]
        assert losses[-1] < losses[0]
        assert all((torch.stack(others) == 1).flatten().tolist())


def test_the_measured_case_runs_from_start_to_end_with_a_scripted_gpu(
    on_a_gpu, monkeypatch, tmp_path
):
    """All of `measure` but the GPU: CPU tensors, a scripted clock, no profiler."""
    gpu = ScriptedGpu([])
    trace = StepTrace([Kernel("gemm", 3.0, "aten::mm", FORWARD)], Calls(cudaLaunchKernel=1))
    seen = []

    def profiled(run, path: Path):
        run()
        seen.append(path.name)
        return trace

    monkeypatch.setattr(study, "CudaBackend", lambda: gpu)
    monkeypatch.setattr(study, "profiled", profiled)
    monkeypatch.setattr(study, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(step, "PROVIDERS", (step.EAGER, step.FUSED, step.GRAPH))
    options = study.parse([*TINY, "--dtype", "float32", "--rounds", "1", "--out", str(tmp_path)])
    results = Results()
    study.measure(study.Case("kaggle", 8), generate_rows(32), options, results, study.Progress())
    assert seen == ["kaggle_8_eager.json.gz", "kaggle_8_fusedcuda.json.gz"]
    assert results.value("kaggle 8", step.EAGER, "step") == 20_000.0
    assert results.value("kaggle 8", step.FUSED, "predict") == 20_000.0
    assert results.value("kaggle 8", "A/A", "step") == 0.0
    assert results.value("kaggle 8", step.FUSED, f"{FORWARD}: {MATMUL}") == 3.0
    assert [row.provider for row in results.errors()] == [step.GRAPH]  # there is no GPU to capture
