"""setup.py: wheels and source distributions, with and without torch, nvcc and build isolation."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
import toy_family
from machine import Machine

from fusedcuda._build import FAMILIES

ROOT = Path(__file__).parent.parent.parent


class Project:
    """A copy of this project with the toy sources, built by the stub compiler."""

    def __init__(self, machine: Machine) -> None:
        self.root = machine.root / "project"
        self.machine = machine
        machine.monkeypatch.delenv("FUSEDCUDA_CSRC")
        ignore = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__")
        shutil.copytree(ROOT / "fusedcuda", self.root / "fusedcuda", ignore=ignore)
        shutil.copytree(machine.csrc, self.root / "csrc")
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
            shutil.copy(ROOT / name, self.root)

    def setup(self, *arguments: str, prologue: str = "") -> subprocess.CompletedProcess[str]:
        """Runs setup.py as pip does; `prologue` may first change what Python can import."""
        code = (
            f"import sys, runpy; {prologue}\n"
            f"sys.argv = ['setup.py', {', '.join(map(repr, arguments))}]\n"
            "runpy.run_path('setup.py', run_name='__main__')"
        )
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True)

    def info(self) -> dict:
        """What an in-place build recorded."""
        return json.loads((self.root / "fusedcuda" / "_build_info.json").read_text())

    @property
    def library(self) -> Path:
        return self.root / "fusedcuda" / "_C.abi3.so"


@pytest.fixture
def project(machine: Machine) -> Project:
    return Project(machine)


def test_wheel_holds_the_extension_and_the_sources_and_works(project, machine) -> None:
    build = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = project.root / "build" / build / "fusedcuda" / "csrc" / "kernels" / "pointwise_gone.cu"
    stale.parent.mkdir(parents=True)
    stale.touch()
    run = project.setup("bdist_wheel")
    assert run.returncode == 0, run.stderr
    (wheel,) = (project.root / "dist").glob("*.whl")
    assert re.fullmatch(r"fusedcuda-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(machine.root / "site")
    assert {
        "fusedcuda/_C.abi3.so",
        "fusedcuda/_build_info.json",
        "fusedcuda/py.typed",
        "fusedcuda/data/cublaslt_h200.json",
        "fusedcuda/ops/pointwise.py",
        "fusedcuda/csrc/kernels/pointwise.cu",
        "fusedcuda/csrc/kernels/common/answer.h",
        "fusedcuda/csrc/bindings/pointwise.cpp",
    } <= names
    assert f"fusedcuda/csrc/kernels/{stale.name}" not in names  # of an earlier build
    assert not any(name.startswith(("tests/", "bench/", "csrc/")) for name in names)

    machine.monkeypatch.setenv("PYTHONPATH", str(machine.root / "site"))
    process = machine.python(
        """
        assert "/site/" in fusedcuda.__file__, fusedcuda.__file__
        assert _jit._build.csrc_dir().parent.name == "fusedcuda"
        assert str(_jit.load("pointwise")).endswith("_C.abi3.so")
        assert answer() == 1
        """,
        folder=machine.root,
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


def test_source_distribution_is_complete_without_torch(project) -> None:
    folders = ("bench", "examples", "tests")
    for folder in folders:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, project.root / folder, ignore=ignore)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", ".clang-format"):
        shutil.copy(ROOT / name, project.root)
    run = project.setup("sdist", prologue="sys.modules['torch'] = None")
    assert run.returncode == 0, run.stderr
    (archive,) = (project.root / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    assert {
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        ".clang-format",
        "fusedcuda/py.typed",
        "fusedcuda/data/cublaslt_h200.json",
        "csrc/kernels/pointwise.cu",
        "csrc/kernels/common/answer.h",
        "csrc/bindings/pointwise.cpp",
    } <= names
    below = (path for folder in folders for path in (project.root / folder).rglob("*"))
    assert {str(path.relative_to(project.root)) for path in below} <= names  # its tests run
    assert not any(name.endswith(".so") for name in names)


def test_metadata_needs_no_torch(project) -> None:
    run = project.setup("--version", prologue="sys.modules['torch'] = None")
    assert run.stdout.strip() == "0.1.0", run.stderr


def test_in_place_build_records_what_it_was_for(project, machine) -> None:
    machine.monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "sm_90a 9.0+PTX")
    run = project.setup("build_ext", "--inplace")
    assert run.returncode == 0, run.stderr
    assert project.library.exists()
    info = project.info()
    assert info["built"] is True
    assert info["archs"] == "9.0a;9.0+PTX"
    assert info["families"] == list(FAMILIES)


@pytest.mark.parametrize("what", ["header", "architectures"])
def test_another_in_place_build_takes_up_what_changed(what, project, machine) -> None:
    def kernels() -> bytes:
        assert project.setup("build_ext", "--inplace").returncode == 0
        return project.library.read_bytes()

    before = kernels()
    assert kernels() == before
    assert len(machine.compilations()) == len(FAMILIES)
    if what == "header":
        toy_family.set_answer(project.root / "csrc", 2)
        assert kernels() != before
        assert len(machine.compilations()) == len(FAMILIES) + 1  # of the one that includes it
    else:
        machine.monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
        kernels()
        assert "code=sm_80" in machine.compilations()[-1]
        assert len(machine.compilations()) == 2 * len(FAMILIES)


def test_without_gpu_and_request_the_default_architectures_are_built(project, machine) -> None:
    machine.monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert project.setup("build_ext", "--inplace").returncode == 0
    assert project.info()["archs"] == "8.0;8.6;8.9;9.0a;9.0+PTX;10.0;12.0+PTX"
    for command in machine.compilations():
        assert "code=sm_90a" in command
        assert "code=compute_120" in command


def test_build_isolation_finds_the_torch_of_the_environment(project, machine) -> None:
    """pip's isolation hides site-packages and adds a folder with the build requirements only."""
    overlay = machine.root / "overlay"
    overlay.mkdir()
    site_packages = Path(setuptools.__file__).parent.parent
    for name in ("setuptools", "_distutils_hack", "ninja"):
        if (site_packages / name).exists():
            (overlay / name).symlink_to(site_packages / name)
    hide = "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]"
    prologue = f"{hide} + [{str(overlay)!r}]"
    run = project.setup("build_ext", "--inplace", prologue=prologue)
    assert run.returncode == 0, run.stderr
    assert project.library.exists()


def test_without_torch_the_package_installs_and_says_why_it_has_no_kernels(project) -> None:
    run = project.setup("bdist_wheel", prologue="sys.modules['torch'] = None")
    assert run.returncode == 0, run.stderr
    (wheel,) = (project.root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "fusedcuda/_C.abi3.so" not in archive.namelist()
        assert "fusedcuda/csrc/kernels/pointwise.cu" in archive.namelist()
        info = json.loads(archive.read("fusedcuda/_build_info.json"))
    assert info["built"] is False
    assert "Install torch first" in info["reason"]


def test_without_nvcc_the_reason_is_recorded(project, machine) -> None:
    machine.monkeypatch.setenv("CUDA_HOME", "/nowhere")
    toolchain = project.root / "fusedcuda" / "_toolchain.py"
    text = toolchain.read_text()
    assert "/usr/local/cuda" in text
    assert '"nvidia" /' in text
    text = text.replace("/usr/local/cuda", "/nowhere").replace('"nvidia" /', '"nowhere" /')
    toolchain.write_text(text)
    run = project.setup("build_ext", "--inplace")
    assert run.returncode == 0, run.stderr
    assert not project.library.exists()
    assert project.info()["reason"].startswith("nvcc was not found")
    assert "installing without CUDA kernels: nvcc was not found" in run.stderr

    machine.monkeypatch.setenv("FUSEDCUDA_BUILD", "1")
    run = project.setup("build_ext", "--inplace")
    assert run.returncode != 0
    assert "fusedcuda: nvcc was not found" in run.stderr


def test_build_can_be_declined_and_leaves_no_earlier_one_in_use(project, machine) -> None:
    project.library.write_text("an earlier build")
    machine.monkeypatch.setenv("FUSEDCUDA_BUILD", "0")
    assert project.setup("build_ext", "--inplace").returncode == 0
    assert not project.library.exists()
    assert project.info() == {"built": False, "reason": "FUSEDCUDA_BUILD=0 was set"}
    assert machine.compilations() == []


def test_failed_compilation_fails_the_installation(project) -> None:
    (project.root / "csrc" / "kernels" / "common" / "answer.h").write_text("oops\n")
    run = project.setup("build_ext", "--inplace")
    assert run.returncode != 0
    assert "compiling the kernels failed" in run.stderr
    assert "FUSEDCUDA_BUILD=0 installs without kernels" in run.stderr
    assert "answer.h:1" in run.stdout + run.stderr


# ---- The real package ----------------------------------------------------------------------------


def test_extension_needs_only_the_stable_interface_of_torch(extension) -> None:
    run = subprocess.run(
        ["nm", "-D", "--undefined-only", extension], capture_output=True, text=True
    )
    symbols = [line.split()[-1] for line in run.stdout.splitlines()]
    assert any(symbol.startswith("aoti_torch_") for symbol in symbols), run
    unstable = re.compile(r"^_Z\w*?(2at|3c10|5torch)|^Py|^_Py")
    assert [symbol for symbol in symbols if unstable.match(symbol)] == []


def python(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_package_can_be_imported_before_torch() -> None:
    assert python("import fusedcuda, sys; print('torch' in sys.modules)") == "True\n"


def test_import_costs_little_beyond_torch(tmp_path: Path) -> None:
    """With its bytecode written, as pip leaves it."""
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    code = """
import torch, sys, time
before = set(sys.modules)
started = time.perf_counter()
import fusedcuda
print(time.perf_counter() - started, *set(sys.modules) - before)
"""
    runs = [python(code, **bytecode).split() for _ in range(3)]
    for module in ("torch.utils.cpp_extension", "setuptools", "triton", "matplotlib", "numpy"):
        assert module not in runs[0]
    assert min(float(seconds) for seconds, *_ in runs) < 0.1
