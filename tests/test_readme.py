"""What the documents say is so: the snippets run, and numbers, names and links are right."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import OPS, Op, by_name
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedcuda
from fusedcuda import _build, _toolchain, doctor
from fusedcuda.__main__ import main
from fusedcuda.ops.pointwise import operator_of

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
    assert run_snippets(with_compiler=True) == shown_output("explain")


def test_doctor_output_has_the_lines_of_a_real_one() -> None:
    shown = re.findall(r"^(?:ok|note|problem) +(\S.*?)  ", shown_output("doctor"), re.MULTILINE)
    real = [check.name for check in doctor().checks]
    assert shown == list(dict.fromkeys(real))


# ---- The table of ops ----------------------------------------------------------------------------

ROWS = re.findall(
    r"^\| `(\w+)\((.*?)\)` \| `(.*?)` \| (\d+) → (\d+) \| (\d+) → (\d+) \|$", README, re.MULTILINE
)
WIDTH = 64  # of a row; with this many elements below a vector counts as nothing
ELEMENTS = 4096 * WIDTH


def test_table_lists_exactly_the_ops() -> None:
    listed = {name: signature for name, signature, *_ in ROWS}
    public = {name: getattr(fusedcuda, name) for name in fusedcuda.__all__}
    assert set(listed) == {name for name, value in public.items() if operator_of(value)}
    for name, signature in listed.items():
        assert signature.split(", ") == list(inspect.signature(getattr(fusedcuda, name)).parameters)


def test_activations_are_named() -> None:
    (names,) = re.findall(r"`activation` is one of (.*?)\. Operands", README, re.DOTALL)
    assert re.findall(r"`(\w+)`", names) == list(fusedcuda.ops._activations.ACTIVATIONS)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write; views move nothing."""

    bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        if not operator.is_view and operator.overloadpacket not in (
            torch.ops.aten.detach,
            torch.ops.aten.split,
        ):
            flat = torch.utils._pytree.tree_leaves((args, kwargs, output))
            self.bytes += sum(x.nbytes for x in flat if isinstance(x, Tensor))
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


def test_measured_numbers_have_their_place() -> None:
    assert README.count("<!-- bench:pointwise -->") == 1
    assert README.count("<!-- /bench:pointwise -->") == 1


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
    text = text_of(document)
    links = re.findall(r"\]\(([^)]+)\)", text)
    local = [link for link in links if not re.match(r"https?://", link)]
    assert [link for link in local if not (ROOT / link.split("#")[0]).exists()] == []


@every_document
def test_files_that_are_named_exist(document: str) -> None:
    """Paths in backquotes; `<family>` in one stands for any family."""
    paths = re.findall(r"`((?:csrc|fusedcuda|tests|bench|examples)/[^`\s]+)`", text_of(document))
    for path in paths:
        pattern = re.sub(r"<\w+>", _build.FAMILIES[0], path)
        assert list(ROOT.glob(pattern.rstrip("/"))), path


def test_changelog_has_this_version() -> None:
    versions = re.findall(r"^## \[([\d.]+)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == fusedcuda.__version__
