"""What the documents say is so: the snippets run, and numbers, names and links are right."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ropes
import torch
import torch.nn.functional as F
from losses import eager_cross_entropy
from reference import OPS, Op, as_tuple, by_name
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

import fusedcuda
from fusedcuda import _build, _toolchain, doctor
from fusedcuda.__main__ import main
from fusedcuda.ops.pointwise import OPERATORS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
NEEDS_COMPILER = re.compile(r"fusedcuda\.(jit|explain|load)\(")


@pytest.fixture
def for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation for Hopper where there is no GPU; skips where there is no compiler."""
    try:
        _toolchain.find_toolchain(_toolchain.describe_torch(torch))
    except _build.BuildError as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")


every_document = pytest.mark.parametrize("document", DOCUMENTS)


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


# ---- Snippets ------------------------------------------------------------------------------------


def script(with_compiler: bool) -> str:
    """The Python blocks as one session; the lines keep the numbers that they have in the README."""
    lines, block, language = [], [], None
    for line in README.splitlines():
        if line.startswith("```"):
            keep = language == "python" and (
                with_compiler or not NEEDS_COMPILER.search("\n".join(block))
            )
            lines += [*(block if keep else [""] * len(block)), ""]
            language, block = (line[3:] or None) if language is None else None, []
        elif language:
            block.append(line)
        else:
            lines.append("")
    return "\n".join(lines)


def run_snippets(with_compiler: bool) -> str:
    code = f"exec(compile({script(with_compiler)!r}, 'README.md', 'exec'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout


def shown_output(name: str) -> str:
    return re.search(rf"<!-- {name} -->\n```text\n(.*?)```", README, re.DOTALL).group(1)


def test_snippets_run_without_a_compiler() -> None:
    code = script(with_compiler=False)
    assert code.count("\nimport fusedcuda") == 1
    assert not NEEDS_COMPILER.search(code)
    run_snippets(with_compiler=False)


@pytest.mark.usefixtures("for_hopper")
def test_snippets_run_and_print_what_is_shown() -> None:
    assert len(NEEDS_COMPILER.findall(script(with_compiler=True))) == 2
    shown = shown_output("report") + shown_output("explain")
    printed = re.sub(r"README\.md:\d+", "model.py:8", run_snippets(with_compiler=True))
    assert printed == shown


def test_doctor_output_has_the_lines_of_a_real_one() -> None:
    shown = re.findall(r"^(?:ok|note|problem) +(\S.*?)  ", shown_output("doctor"), re.MULTILINE)
    real = [check.name for check in doctor().checks]
    assert shown == list(dict.fromkeys(real))


# ---- The tables of ops ---------------------------------------------------------------------------

ROWS = re.findall(
    r"^\| `(\w+)\((.*?)\)` \| `(.*?)` \| (\d+) → (\d+) \| (\d+) → (\d+) \|$", README, re.MULTILINE
)
WIDTH = 64  # of a row; with this many elements below a vector counts as nothing
ELEMENTS = 4096 * WIDTH


def test_table_lists_exactly_the_ops() -> None:
    listed = {name: signature for name, signature, *_ in ROWS}
    public = {name: getattr(fusedcuda, name) for name in fusedcuda.__all__}
    assert set(listed) == {name for name, value in public.items() if value in OPERATORS}
    for name, signature in listed.items():
        assert signature.split(", ") == list(inspect.signature(getattr(fusedcuda, name)).parameters)


def test_activations_are_named() -> None:
    (names,) = re.findall(r"`activation` is one of (.*?)\. Operands", README, re.DOTALL)
    assert re.findall(r"`(\w+)`", names) == list(fusedcuda.ops._activations.ACTIVATIONS)


# What these operators do on a GPU beyond reading each input and writing each output once.
KERNELS = {  # all others: one
    "native_layer_norm_backward": 2,  # for the input, and for weight and bias
    "nll_loss_backward": 2,  # zeros, and the targets' elements
}


def tensor_bytes(*trees: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(trees)
    return sum(x.nbytes for x in leaves if isinstance(x, Tensor))


def bytes_of(operator: str, inputs: Any, outputs: Any) -> int:
    match operator:
        case "native_layer_norm_backward":  # either kernel reads both tensors
            return 2 * tensor_bytes(inputs) + tensor_bytes(outputs)
        case "nll_loss_forward":  # reads one element a row
            return 0
        case "nll_loss_backward":
            return tensor_bytes(outputs)
        case "cross_entropy_backward_":  # does nothing where the incoming gradient is 1, as here
            return 0
        case _:
            return tensor_bytes(inputs, outputs)


class Traffic(TorchDispatchMode):
    """Counts kernels and the bytes that they read and write; views move nothing."""

    bytes = 0
    kernels = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        if not operator.is_view and name not in ("detach", "split"):
            self.bytes += bytes_of(name, (args, kwargs), output)
            self.kernels += KERNELS.get(name, 1)
        return output


def operands_of(op: Op) -> list[Tensor]:
    """One full tensor each; `scale` and `bias` are vectors, as the README says."""
    full = op.random_operands(ELEMENTS // WIDTH, WIDTH, dtype=torch.bfloat16)
    return [
        (x[0].clone() if name in ("scale", "bias") else x).requires_grad_()
        for name, x in zip(op.operands, full, strict=True)
    ]


def activation_of(op: Op) -> str:
    return "silu" if op.name.startswith("act_mul") else "relu"


def assert_in_table(op: Op, columns: slice, *bytes_moved: int) -> None:
    (cells,) = (row[3:] for row in ROWS if row[0] == op.name)
    assert [int(cell) for cell in cells[columns]] == [round(n / ELEMENTS) for n in bytes_moved]


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_bytes_that_eager_moves(op: Op) -> None:
    operands = operands_of(op)
    with Traffic() as forward:
        out = op.eager(*operands, activation=activation_of(op))
    grad = torch.randn_like(out)
    with Traffic() as backward:
        torch.autograd.grad(out, operands, grad)
    assert_in_table(op, slice(0, None, 2), forward.bytes, backward.bytes)


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_bytes_that_fusedcuda_moves(op: Op) -> None:
    arguments = operands_of(op)
    if op.name != "add_relu":
        arguments.append(activation_of(op))
    plans = (
        fusedcuda.explain(getattr(fusedcuda, op.name), *arguments, backward=backward)
        for backward in (False, True)
    )
    assert_in_table(op, slice(1, None, 2), *(plan.bytes_moved for plan in plans))


# ---- The table of ops along the last dimension

ROWS_ALONG = re.findall(
    r"^\| `((\w+)\(.*?\))` \| .*? \| (\d+) → (\d+) \| (\d+) → (\d+) \| (\d+) → (\d+) \|$",
    README,
    re.MULTILINE,
)


def normalise(x: Tensor, *vectors: Tensor, residual: Tensor | None = None) -> Any:
    """Either norm: torch has one operator for it on a GPU (on the CPU it takes RMSNorm apart)."""
    h = x if residual is None else x + residual
    y = F.layer_norm(h, h.shape[-1:], *vectors)
    return y if residual is None else (y, h)


EAGER: dict[str, Callable[..., Any]] = {
    "rms_norm": normalise,
    "layer_norm": normalise,
    "softmax": lambda x, *, scale: torch.softmax(scale * x, -1),
    "log_softmax": lambda x, *, scale: torch.log_softmax(scale * x, -1),
    "cross_entropy": eager_cross_entropy,
    "rope": ropes.eager,
}


@dataclass(frozen=True)
class Counted:
    """Of a forward and of a backward in which every tensor gets its gradient."""

    bytes: tuple[int, int]
    kernels: tuple[int, int]


def call_of(text: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """The arguments of a call in the table, and the number of elements that its bytes are of."""
    names = {
        "x": (4096, WIDTH),
        "r": (4096, WIDTH),
        "weight": (WIDTH,),
        "bias": (WIDTH,),
        "logits": (512, 8 * WIDTH),
        "q": (1, 24, 64, WIDTH),
        "k": (1, 8, 64, WIDTH),
        "cos": (64, WIDTH),
        "sin": (64, WIDTH),
    }

    def value(node: ast.expr) -> Any:
        assert isinstance(node, ast.Name)
        if node.id == "s":
            return 0.5
        if node.id == "target":
            return torch.randint(8 * WIDTH, (512,), device=device)
        differentiable = node.id not in ("cos", "sin")
        return torch.randn(
            names[node.id], dtype=torch.bfloat16, device=device, requires_grad=differentiable
        )

    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    args = tuple(value(node) for node in call.args)
    kwargs = {keyword.arg: value(keyword.value) for keyword in call.keywords}
    elements = args[0].numel() + (args[1].numel() if text.startswith("rope") else 0)
    return args, kwargs, elements


def differentiable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*args, *kwargs.values()) if getattr(x, "requires_grad", False)]


def count(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counted:
    with Traffic() as forward:
        outputs = as_tuple(function(*args, **kwargs))
    grads = [torch.ones_like(output) for output in outputs]
    with Traffic() as backward:
        torch.autograd.grad(outputs, differentiable(args, kwargs), grads)
    return Counted((forward.bytes, backward.bytes), (forward.kernels, backward.kernels))


def kernels_launched(function: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profile.events())


def test_all_other_ops_are_in_three_tables() -> None:
    names = r"linear\w+|mlp|gated\w+|dot\w+|embedding\w+|lora\w+"
    products = set(re.findall(rf"^\| `({names})\(", README, re.MULTILINE))
    public = {name for name in fusedcuda.__all__ if inspect.isfunction(getattr(fusedcuda, name))}
    tools = {"doctor", "explain", "jit", "kernel_source", "load", "report", "tune"}
    in_first_table = {name for name, *_ in ROWS}
    in_place = {"rope_"}
    assert {row[1] for row in ROWS_ALONG} | products == public - tools - in_first_table - in_place


@pytest.mark.parametrize("row", ROWS_ALONG, ids=lambda row: row[0])
def test_bytes_and_launches_of_the_other_ops(row: tuple[str, ...]) -> None:
    text, name, *cells = row
    forward, fused_forward, backward, fused_backward, kernels, _ = (int(cell) for cell in cells)
    args, kwargs, elements = call_of(text, "cpu")
    eager = count(EAGER[name], args, kwargs)
    fused = count(getattr(fusedcuda, name), args, kwargs)
    assert [round(n / elements) for n in eager.bytes] == [forward, backward]
    assert [round(n / elements) for n in fused.bytes] == [fused_forward, fused_backward]
    assert sum(eager.kernels) == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS_ALONG, ids=lambda row: row[0])
def test_launches_of_the_other_ops_on_a_gpu(row: tuple[str, ...]) -> None:
    text, name, *cells = row
    args, kwargs, _ = call_of(text, "cuda")
    function = getattr(fusedcuda, name)
    outputs = as_tuple(function(*args, **kwargs))
    grads = [torch.ones_like(output) for output in outputs]
    leaves = differentiable(args, kwargs)
    forward = kernels_launched(lambda: function(*args, **kwargs))
    backward = kernels_launched(lambda: torch.autograd.grad(outputs, leaves, grads))
    assert forward + backward == int(cells[-1])


@pytest.mark.parametrize("family", _build.FAMILIES)
def test_measured_numbers_have_their_place(family: str) -> None:
    assert README.count(f"<!-- bench:{family} -->") == 1
    assert README.count(f"<!-- /bench:{family} -->") == 1


# ---- Names and links -----------------------------------------------------------------------------


@every_document
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text_of(document), re.MULTILINE))
    assert named <= targets
    if document == "README.md":
        assert {"demo", "test"} <= named


@every_document
def test_commands_exist(document: str, capsys) -> None:
    for command in set(re.findall(r"python -m fusedcuda (\w+)", text_of(document))):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0, command
    for module in set(re.findall(r"python -m (bench[\w.]*)", text_of(document))):
        path = ROOT / module.replace(".", "/")
        assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), module


@every_document
def test_environment_variables_exist(document: str) -> None:
    code = (
        "\n".join(
            path.read_text()
            for folder in ("fusedcuda", "csrc", "tests")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".h", ".cpp") and path != Path(__file__)
        )
        + (ROOT / "setup.py").read_text()
    )
    named = set(re.findall(r"\bFUSEDCUDA_[A-Z_]+", text_of(document)))
    assert {name for name in named if name not in code} == set()


@every_document
def test_links_lead_somewhere(document: str) -> None:
    text = re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)", text)
    local = [link for link in links if not re.match(r"https?://", link)]
    assert [link for link in local if not (ROOT / link.split("#")[0]).exists()] == []


@every_document
def test_files_that_are_named_exist(document: str) -> None:
    """Paths in backquotes; `<family>` in one stands for any family, `<gpu>` for any GPU."""
    paths = re.findall(r"`((?:csrc|fusedcuda|tests|bench|examples)/[^`\s]+)`", text_of(document))
    for path in paths:
        pattern = path.replace("<family>", _build.FAMILIES[0]).replace("<gpu>", "*")
        assert list(ROOT.glob(pattern.rstrip("/"))), path


def test_changelog_has_this_version() -> None:
    versions = re.findall(r"^## \[([\d.]+)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == fusedcuda.__version__
