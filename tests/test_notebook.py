"""The example notebook runs from top to bottom, with a compiler and without, and tells which."""

import re
from pathlib import Path

import pytest
import torch

from fusedcuda import _jit, _toolchain
from fusedcuda._build import BuildError

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "jit_notebook.ipynb"
ON_GPU = torch.cuda.is_available()


def read() -> "nbformat.NotebookNode":
    return nbformat.read(NOTEBOOK, as_version=4)


def run(monkeypatch: pytest.MonkeyPatch) -> str:
    """Executes a copy in a kernel of its own and returns what it printed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the kernel starts in the notebook's folder
    notebook = read()
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    printed = "".join(o.text for o in outputs if o.get("name") == "stdout")
    print(printed)
    return printed


def assert_fusion_is_shown(printed: str) -> None:
    """What every machine shows: the counts, the rounding, and that an edit leaves no trace."""
    assert "float32, equal: True" in printed
    assert "unfused: 3 kernel(s), 16 bytes an element" in printed
    assert "\nfused: 1 kernel(s), 8 bytes an element" in printed
    errors = dict(re.findall(r"bfloat16, (\w+): relative error (\S+)", printed))
    assert 0 < float(errors["fused"]) < float(errors["unfused"]) < 0.01
    assert "original is relu: True" in printed
    assert "restored is relu: True" in printed
    assert "same result: True" in printed


def test_with_the_compilers_of_this_machine(monkeypatch) -> None:
    try:
        _toolchain.find_toolchain(_toolchain.describe_torch(torch))
    except BuildError as error:
        pytest.skip(str(error))
    printed = run(monkeypatch)
    assert_fusion_is_shown(printed)
    assert "skipped" not in printed
    assert f"edited is leaky relu: {ON_GPU}" in printed
    assert ("not timed, as there is no GPU" in printed) == (not ON_GPU)
    first, second = re.findall(r"edited kernels: (\S+\.so)", printed)
    assert first != second
    for said in (" blocks, 1 element a thread", "linear: ", "broadcast: ", "b: element by element"):
        assert said in printed
    assert ("an edited kernel changes CUDA tensors only" in printed) == (not ON_GPU)


def test_without_a_compiler(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    printed = run(monkeypatch)
    prebuilt = _jit.PREBUILT.exists()
    assert printed.count("skipped: compiling needs C++ compiler") == 2
    assert ("cannot be built: no C++ compiler" in printed) == (not prebuilt)
    assert ("skipped: explain asks the compiled library" in printed) == (not prebuilt)
    assert "edited kernels:" not in printed
    assert "edited is leaky relu: False" in printed
    assert_fusion_is_shown(printed)


def test_is_short_and_committed_without_outputs() -> None:
    cells = read().cells
    assert len(cells) <= 20
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert [cell.execution_count for cell in code] == [None] * len(code)
