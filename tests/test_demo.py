"""`python -m fusedcuda demo`: what it prints, what it checks, and that it notices a wrong op."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusedcuda
from fusedcuda.demo import main
from fusedcuda.demo.check import Comparison, compare, worst_by_group
from fusedcuda.demo.criteo import generate_rows, write_tsv
from fusedcuda.demo.dlrm import CONFIGS, DLRM, DlrmConfig, click_loss, fused_hidden, plain_hidden
from fusedcuda.demo.measure import (
    Batch,
    Cost,
    Trainer,
    computes,
    count_operations,
    hidden_layer_bytes,
    kernel_durations,
    step_bytes,
)
from fusedcuda.demo.progress import Progress
from fusedcuda.demo.report import cost_table

# 200 real rows, which may not be redistributed with the project.
SAMPLE = Path(__file__).parents[2] / "shared" / "data" / "criteo_sample.csv"

QUICK = ["--device", "cpu", "--steps", "2", "--table-rows", "100"]

TINY = DlrmConfig(bottom=(32, 16), top=(24, 8))


def row(output: str, section: str, label: str) -> list[str]:
    """The cells of one row of the cost table."""
    _, _, below = output.partition(f"\n{section}")
    line = next(line for line in below.splitlines() if line.startswith(f"  {label}  "))
    return re.split(r"\s{2,}", line.strip())[1:]


def make_batch(config: DlrmConfig, size: int, dtype: torch.dtype = torch.float32) -> Batch:
    rows = generate_rows(size, seed=5)
    dense = rows.dense(config.dense_width).to(dtype)
    return Batch(dense, rows.table_indices(50), rows.labels.float())


@pytest.fixture(autouse=True)
def one_thread():
    """Layers this small gain nothing from a second core, and lose a lot if it is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> DLRM:
    return DLRM(TINY, table_rows=50)


def test_prints_the_right_numbers(capsys):
    assert main([*QUICK, "--batch", "512"]) == 0
    output = capsys.readouterr().out
    assert "DLRM (kaggle) on 2,048 synthetic Criteo rows, batch 512, float32" in output
    assert "\nPASS: logits, loss and 15 gradients agree" in output

    # 6 hidden layers, of 512 + 256 + 64 + 16 + 512 + 256 = 1616 outputs in all.
    one_pass = 512 * 1616 * 4 / 1e6
    forward = row(output, "Forward pass", "bytes moved by bias and ReLU")
    assert forward == [f"{2 * one_pass:.3g} MB", f"{2 * one_pass:.3g} MB", "same"]
    step = row(output, "Training step", "bytes moved by bias and ReLU")
    assert step == [f"{6 * one_pass:.3g} MB", f"{5 * one_pass:.3g} MB", "-17%"]

    # Lookup 2, bottom MLP 8, interaction 4, top MLP 4, output 1; the ReLUs' masks and the bias
    # gradients of 6 layers become one operation each.
    assert row(output, "Forward pass", "operations") == ["19", "19", "same"]
    plain, fused, change = row(output, "Training step", "operations")
    assert int(plain) - int(fused) == 6
    assert change == "-6"


def test_cpu_run_says_so_once_and_claims_no_speed(capsys):
    assert main([*QUICK, "--batch", "16"]) == 0
    output = capsys.readouterr().out
    assert output.count("CPU") == 1
    assert "the times are no comparison" in output
    assert row(output, "Training step", "time")[-1] == "reference"
    assert not re.search(r"\d+\.\d+x", output)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(3))
def test_agrees_for_other_seeds_and_dtypes(seed, dtype):
    arguments = ["--batch", "128", "--dtype", dtype, "--seed", str(seed), "--steps", "1"]
    assert main([*QUICK, *arguments]) == 0


def test_outer_product_interaction(capsys):
    assert main([*QUICK, "--config", "lecture-small", "--steps", "1"]) == 0
    assert "batch 64" in capsys.readouterr().out


def relu_without_bias(x: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    return x.relu() + 0 * bias


def gelu_instead(x: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    return torch.nn.functional.gelu(x + bias)


def threshold_off_zero(x: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    return torch.nn.functional.threshold(x + bias, 1e-3, 0.0)


def no_bias_gradient(x: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    return torch.relu(x + bias.detach())


def gradients_off_by_a_thousandth(x: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    y = torch.relu(x + bias)
    return y.detach() + 1.001 * (y - y.detach())


def one_row_missing_from_the_bias_gradient(
    x: Tensor, bias: Tensor, activation: str = "relu"
) -> Tensor:
    return torch.relu(torch.cat([x[:-1] + bias, x[-1:] + bias.detach()]))


def not_a_number(x: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    return torch.relu(x + bias) * float("nan")


@pytest.mark.parametrize(
    "broken",
    [
        relu_without_bias,
        gelu_instead,
        threshold_off_zero,
        no_bias_gradient,
        gradients_off_by_a_thousandth,
        one_row_missing_from_the_bias_gradient,
        not_a_number,
    ],
)
def test_notices_a_broken_op(monkeypatch, capsys, broken):
    monkeypatch.setattr(fusedcuda, "bias_act", broken)
    assert main([*QUICK, "--batch", "128"]) == 1
    output = capsys.readouterr().out
    assert "WRONG" in output
    assert "\nFAIL: fusedcuda disagrees with plain PyTorch in " in output
    assert "Training step" not in output


def test_rounding_across_the_kink_of_relu_is_not_an_error(monkeypatch, model):
    batch = make_batch(TINY, 64)
    layer = model.bottom[0]
    with torch.no_grad():  # puts one pre-activation within rounding of 0
        layer.bias[0] -= layer(batch.dense)[0, 0]

    def rounded_across_0(x: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
        y = x + bias
        at_0 = y.detach().abs() < 1e-6
        return torch.relu(y + torch.where(at_0, 1e-6, 0.0))

    def first_gradient(hidden) -> Tensor:
        model.zero_grad()
        loss = click_loss(model(batch.dense, batch.indices, hidden), batch.labels)
        loss.backward()
        return layer.bias.grad.clone()

    with torch.no_grad():
        layer.bias[0] -= 5e-7
    monkeypatch.setattr(fusedcuda, "bias_act", rounded_across_0)
    plain, fused = first_gradient(plain_hidden), first_gradient(fused_hidden)
    results = compare(model, batch.dense, batch.indices, batch.labels, Progress())
    gradient = next(item for item in results if item.name == "bottom.0.bias")
    assert (plain - fused).norm() / plain.norm() > 100 * gradient.limit  # yet neither is wrong
    assert gradient.ok


def test_compare_leaves_the_parameters_alone(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = make_batch(TINY, 32)
    results = compare(model, batch.dense, batch.indices, batch.labels, Progress())
    assert [item.name for item in results[:2]] == ["logits", "loss"]
    assert [item.name for item in results[2:]] == [name for name, _ in model.named_parameters()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_limit_is_twice_the_plain_error_and_four_ulps():
    comparison = Comparison("loss", plain=1e-6, fused=2.3e-6, eps=1e-7)
    assert comparison.limit == pytest.approx(2.4e-6)
    assert comparison.ok
    assert not Comparison("loss", plain=1e-6, fused=2.5e-6, eps=1e-7).ok
    assert not Comparison("loss", plain=1e-6, fused=float("nan"), eps=1e-7).ok
    assert not Comparison("loss", plain=float("nan"), fused=1e-6, eps=1e-7).ok


def test_worst_of_each_group_is_shown():
    items = [
        Comparison("bottom.0.bias", 1e-7, 1e-7, 1e-7),
        Comparison("bottom.1.bias", 1e-7, 9e-7, 1e-7),
        Comparison("bottom.2.bias", 1e-7, float("nan"), 1e-7),
        Comparison("loss", 1e-7, 1e-7, 1e-7),
    ]
    bottom, loss = worst_by_group(items)
    assert not bottom.ok
    assert loss.ok


def test_both_variants_train_alike(model):
    batch = make_batch(TINY, 64)
    losses = {}
    trainers = {
        hidden: Trainer(model, lambda *inputs, hidden=hidden: model(*inputs, hidden=hidden))
        for hidden in (plain_hidden, fused_hidden)
    }
    for hidden, trainer in trainers.items():
        trainer.time_round([batch], 30, Progress())
        losses[hidden] = trainer.cost.losses
    assert losses[plain_hidden] == pytest.approx(losses[fused_hidden], rel=1e-5)
    assert losses[plain_hidden][-1] < losses[plain_hidden][0]


def test_dot_interaction_is_the_lower_triangle(model):
    dense, embedded = torch.randn(3, 16), torch.randn(3, 26, 16)
    interacted = model._interact(dense, embedded)
    assert interacted.shape == (3, TINY.interaction_width) == (3, 368)
    vectors = [dense, *embedded.unbind(1)]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(27) for j in range(i)]
    expected = torch.cat([dense, torch.stack(products, 1), torch.zeros(3, 1)], dim=1)
    torch.testing.assert_close(interacted, expected)


def test_published_sizes():
    widths = {name: config.interaction_width for name, config in CONFIGS.items()}
    assert widths == {
        "kaggle": 368,  # 16 + 351, rounded up to a multiple of 8
        "terabyte": 416,
        "mlperf-v1": 480,
        "lecture-small": 186_624,
        "lecture-main": 186_624,
    }
    assert CONFIGS["kaggle"].linear_shapes == [
        (16, 512), (512, 256), (256, 64), (64, 16), (368, 512), (512, 256), (256, 1),
    ]  # fmt: skip


class _TrafficCounter(TorchDispatchMode):
    """Adds up the bytes of each operation's inputs and outputs; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        before = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        after = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
        name = func._schema.name
        if name == "aten::embedding":
            self.bytes += before[id(args[1])].nbytes + 2 * after[0].nbytes
        elif name == "aten::add_" and args[1].is_sparse:
            # Reads ids and gradients, reads and writes as many rows.
            self.bytes += args[1]._indices().nbytes + 3 * args[1]._values().nbytes
        elif name == "aten::index_add":
            # Reads the addend, reads and writes its places in a tensor that was cleared before.
            self.bytes += 3 * args[3].nbytes
        elif name == "aten::new_zeros":
            self.bytes += after[0].nbytes
        elif computes(func) and not any(t.is_sparse for t in after):
            self.bytes += sum(t.nbytes for t in [*before.values(), *after])
        return outputs


def test_step_bytes_matches_the_operations():
    config = CONFIGS["kaggle"]
    model = DLRM(config, table_rows=50)
    batch = make_batch(config, 256)
    trainer = Trainer(model, model)
    trainer.warm_up(batch)
    with _TrafficCounter() as counter:
        trainer.step(batch)
    assert step_bytes(config, 256, 4, fused=False) == pytest.approx(counter.bytes, rel=0.02)


def test_fusion_saves_one_pass_per_hidden_layer_in_backward():
    config = CONFIGS["terabyte"]
    one_pass = 2048 * (512 + 256 + 64 + 512 + 512 + 256) * 2
    plain, fused = (
        hidden_layer_bytes(config, 2048, 2, is_fused, training=True) for is_fused in (False, True)
    )
    assert (plain, fused) == (6 * one_pass, 5 * one_pass)
    assert step_bytes(config, 2048, 2, False) - step_bytes(config, 2048, 2, True) == one_pass


def test_operations_that_compute_nothing_are_not_counted():
    x = torch.randn(4, 6)
    assert count_operations(lambda: x.t().view(6, 4)[1:].unsqueeze(0).detach()) == 0
    assert count_operations(lambda: torch.empty_like(x)) == 0
    assert count_operations(lambda: (x + 1).relu_().sum()) == 3


def test_only_kernels_of_a_trace_are_launches():
    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "gemm", "dur": 5.0},
            {"cat": "kernel", "name": "bias_act_kernel", "dur": 2.5},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 9.0},
            {"cat": "gpu_memset", "name": "Memset", "dur": 9.0},
            {"cat": "gpu_user_annotation", "name": "Optimizer.step", "dur": 9.0},
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 9.0},
            {"name": "process_name", "ph": "M"},
        ]
    }
    assert kernel_durations(trace) == [5.0, 2.5]


def test_file_smaller_than_a_batch(tmp_path, capsys):
    path = tmp_path / "rows.tsv.gz"
    write_tsv(generate_rows(30), path)
    assert main([*QUICK, "--data", str(path)]) == 0
    assert f"30 rows of {path}, batch 30" in capsys.readouterr().out


def test_rows_limits_what_is_read(tmp_path, capsys):
    path = tmp_path / "rows.tsv"
    write_tsv(generate_rows(20), path)
    path.write_text(path.read_text() + "broken\n")
    assert main([*QUICK, "--data", str(path), "--rows", "20"]) == 0
    capsys.readouterr()
    assert main([*QUICK, "--data", str(path)]) == 2
    captured = capsys.readouterr()
    assert f"demo: {path}, line 21: expected 40 columns, found 1" in captured.err
    assert captured.out == ""


def test_missing_file(capsys):
    assert main([*QUICK, "--data", "nowhere.tsv"]) == 2
    assert "nowhere.tsv" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--dtype", "int8"], ["--config", "x"]])
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_that_is_not_there(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "python -m fusedcuda doctor" in capsys.readouterr().err


def test_compile_is_left_out_on_the_cpu(capsys):
    assert main([*QUICK, "--batch", "16", "--compile"]) == 0
    assert "--compile is left out" in capsys.readouterr().out


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"no sample of the real rows at {SAMPLE}")
def test_real_sample(capsys):
    assert main([*QUICK, "--data", str(SAMPLE)]) == 0
    output = capsys.readouterr().out
    assert f"200 rows of {SAMPLE}, batch 200" in output
    assert "PASS" in output


def test_thread_count_is_given_back():
    torch.set_num_threads(2)
    assert main([*QUICK, "--batch", "16"]) == 0
    assert torch.get_num_threads() == 2


def test_gpu_table_marks_what_may_be_noise():
    plain = Cost(25, 90, [1.0, 1.0, 1.0], [3.0, 3.0, 3.3], [2.0, 2.0, 2.0])
    fused = Cost(25, 84, [0.5, 0.5, 0.5], [2.9, 2.9, 2.9], [1.6, 1.6, 1.6])
    costs = {"plain PyTorch": plain, "fusedcuda": fused}
    output = "\n" + cost_table(costs, TINY, batch=64, itemsize=4, on_gpu=True)
    assert row(output, "Training step", "kernel launches") == ["90", "84", "-6"]
    assert row(output, "Forward pass", "time") == ["1 ms", "0.5 ms", "2.00x"]
    assert row(output, "Training step", "time") == ["3 ms", "2.9 ms", "1.03x (noise)"]
    assert row(output, "Training step", "time in GPU kernels") == ["2 ms", "1.6 ms", "1.25x"]


def test_table_without_a_working_profiler():
    costs = {"plain PyTorch": Cost(None, None, [1.0], [3.0]), "fusedcuda": Cost(step_ms=[3.0])}
    output = "\n" + cost_table(costs, TINY, batch=64, itemsize=4, on_gpu=True)
    assert row(output, "Training step", "kernel launches") == ["-", "-", "-"]
    assert "time in GPU kernels" not in output


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_run(capsys, dtype):
    arguments = ["--device", "cuda", "--batch", "4096", "--steps", "3", "--dtype", dtype]
    assert main([*arguments, "--compile"]) == 0
    output = capsys.readouterr().out
    assert all(int(n) > 0 for n in row(output, "Training step", "kernel launches")[:3])
    assert row(output, "Training step", "bytes moved by bias and ReLU")[2:] == ["-", "-17%"]


def kernels_of_a_step(hidden: Callable, dtype: torch.dtype) -> tuple[int, int]:
    """Kernels of fusedcuda and of PyTorch itself. Not those of its libraries: how many a matrix
    product takes depends on the algorithm that cuBLAS happens to choose."""
    config = CONFIGS["kaggle"]
    model = DLRM(config, table_rows=50).to("cuda", dtype)
    batch = make_batch(config, 4096, dtype)
    batch = Batch(batch.dense.cuda(), batch.indices.cuda(), batch.labels.cuda())
    trainer = Trainer(model, lambda *inputs: model(*inputs, hidden=hidden))
    trainer.warm_up(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        trainer.step(batch)
        torch.cuda.synchronize()
    names = [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return sum("fusedcuda::" in name for name in names), sum("at::native" in name for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_layers_launch_no_more_kernels(dtype):
    layers = len(CONFIGS["kaggle"].bottom) + len(CONFIGS["kaggle"].top)
    plain_own, plain_others = kernels_of_a_step(plain_hidden, dtype)
    fused_own, fused_others = kernels_of_a_step(fused_hidden, dtype)
    assert plain_own == 0
    assert fused_own == 3 * layers  # forward, backward, the end of its sums
    assert fused_own + fused_others <= plain_others
