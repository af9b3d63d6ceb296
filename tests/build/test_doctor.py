"""The doctor: what it reports on machines with and without GPU, compilers and a built extension."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from fusedcuda import __main__, _build, _jit, _toolchain
from fusedcuda._build import FAMILIES

doctor = importlib.import_module("fusedcuda.doctor")


@pytest.fixture(autouse=True)
def no_gpu(machine, monkeypatch) -> None:
    """A machine without GPU, driver or extension; the tests add what they are about."""
    monkeypatch.delenv("FUSEDCUDA_CSRC")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", machine.root / "no-driver")
    monkeypatch.setattr(_toolchain, "visible_capabilities", lambda torch: [])
    monkeypatch.setattr(_jit, "prebuilt", _jit.Prebuilt())
    monkeypatch.setattr(_jit, "BUILD_INFO", machine.root / "_build_info.json")


def add_gpu(monkeypatch, name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0)) -> None:
    major, minor = capability
    properties = SimpleNamespace(name=name, major=major, minor=minor)
    monkeypatch.setattr(_toolchain, "visible_capabilities", lambda torch: [capability])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def add_extension(monkeypatch, archs: str, sources: str | None = None) -> None:
    info = {
        "built": True,
        "archs": archs,
        "torch": "2.11.0",
        "nvcc": "13.0.88",
        "sources": sources or _build.sources_digest(),
    }
    _jit.BUILD_INFO.write_text(json.dumps(info))
    monkeypatch.setattr(_jit, "prebuilt", _jit.Prebuilt(families=_build.FAMILIES))


def check(report, name: str):
    return next(c for c in report.checks if c.name == name)


def test_without_gpu_everything_still_works_on_the_cpu(machine) -> None:
    machine.remove_nvcc()
    report = doctor.doctor()
    assert report.ok
    assert report.verdict == "No GPU is usable here: every op runs its CPU reference."
    assert check(report, "GPU").status == "note"
    assert "nvcc was not found" in check(report, "nvcc").detail


def test_gpu_with_compilers_compiles_at_first_use(machine, monkeypatch) -> None:
    add_gpu(monkeypatch)
    report = doctor.doctor()
    assert report.ok
    assert "compiled at their first use" in report.verdict
    assert check(report, "GPU").detail == "NVIDIA H200 (sm_90)"
    assert check(report, "nvcc").detail.endswith(f"{machine.home}/bin/nvcc")
    assert check(report, "architectures").detail == "9.0a (from the GPUs here)"
    assert check(report, "cache").detail.startswith(str(machine.cache))


def test_gpu_without_extension_and_compiler_is_a_problem(machine, monkeypatch) -> None:
    add_gpu(monkeypatch)
    machine.remove_nvcc()
    _jit.BUILD_INFO.write_text('{"built": false, "reason": "nvcc was not found there"}')
    report = doctor.doctor()
    assert not report.ok
    assert check(report, "nvcc").status == "problem"
    assert "pip install 'cuda-toolkit" in check(report, "nvcc").detail
    assert "nvcc was not found there" in check(report, "extension").detail


def test_extension_for_this_gpu_needs_no_compiler(machine, monkeypatch) -> None:
    add_gpu(monkeypatch)
    add_extension(monkeypatch, "8.0;9.0a")
    machine.remove_nvcc()
    report = doctor.doctor()
    assert report.ok
    assert report.verdict == "The CUDA kernels are built and ready."
    assert check(report, "nvcc").status == "note"


def test_extension_for_other_gpus_is_a_problem_with_the_command(monkeypatch) -> None:
    add_gpu(monkeypatch, "NVIDIA B200", (10, 0))
    add_extension(monkeypatch, "8.0;9.0a")
    extension = check(doctor.doctor(), "extension")
    assert extension.status == "problem"
    assert "none of it runs on this GPU (sm_100)" in extension.detail
    assert extension.fix.startswith("TORCH_CUDA_ARCH_LIST=10.0a pip install")


def test_extension_from_older_sources_is_pointed_out(monkeypatch) -> None:
    add_extension(monkeypatch, "9.0a", sources="older")
    extension = check(doctor.doctor(), "extension")
    assert "from older sources" in extension.detail
    assert extension.fix.startswith("pip install")


def test_extension_that_does_not_load_shows_why(monkeypatch) -> None:
    monkeypatch.setattr(_jit, "prebuilt", _jit.Prebuilt(error="_C.abi3.so cannot be loaded: why"))
    assert check(doctor.doctor(), "extension").detail == "_C.abi3.so cannot be loaded: why"


def test_driver_without_usable_gpu_is_a_problem(machine, monkeypatch) -> None:
    driver = machine.root / "driver"
    driver.touch()
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    report = doctor.doctor()
    assert not report.ok
    assert "CUDA_VISIBLE_DEVICES=''" in check(report, "GPU").detail
    monkeypatch.setattr(torch.version, "cuda", None)
    assert check(doctor.doctor(), "torch").fix.startswith("pip install --force-reinstall torch")


def test_newer_gpu_than_nvcc_knows_is_pointed_out(machine, monkeypatch) -> None:
    add_gpu(monkeypatch, "NVIDIA B200", (10, 0))
    machine.install_nvcc(archs="sm_80 sm_90")
    detail = check(doctor.doctor(), "architectures").detail
    assert detail == "this nvcc cannot build sm_100a; building 9.0+PTX instead"


def test_unsafe_cache_is_a_problem_only_where_it_is_needed(machine, monkeypatch) -> None:
    machine.cache.mkdir()
    machine.cache.chmod(0o777)
    assert doctor.doctor().ok
    add_gpu(monkeypatch)
    cache = check(doctor.doctor(), "cache")
    assert cache.status == "problem"
    assert f"chmod 700 '{machine.cache}'" in cache.detail


def test_report_prints_one_line_for_each_check_and_the_fixes() -> None:
    report = doctor.Report(
        (
            doctor.Check("GPU", "ok", "NVIDIA H200"),
            doctor.Check("nvcc", "problem", "none", "get it"),
        ),
        "Not yet.",
    )
    assert repr(report).splitlines() == [
        "ok       GPU            NVIDIA H200",
        "problem  nvcc           none",
        "                        -> get it",
        "",
        "Not yet.",
    ]


# ---- The command line ----------------------------------------------------------------------------


def test_command_line_prints_the_report_as_text_and_as_json(capsys) -> None:
    assert __main__.main(["doctor"]) == 0
    assert "No GPU is usable here" in capsys.readouterr().out
    assert __main__.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {c["name"] for c in report["checks"]} >= {"GPU", "torch", "nvcc", "cuBLASLt", "cache"}


def test_command_line_fails_where_cuda_cannot_work(machine, monkeypatch, capsys) -> None:
    add_gpu(monkeypatch)
    machine.remove_nvcc()
    assert __main__.main(["doctor"]) == 1
    assert "cannot be used until" in capsys.readouterr().out


def test_demo_that_cannot_compile_says_why_in_one_message(monkeypatch, capsys) -> None:
    def cannot_compile(*_: object) -> None:
        raise _build.BuildError("nvcc was not found")

    monkeypatch.setattr("fusedcuda.demo.compare", cannot_compile)
    assert __main__.main(["demo", "--config", "lecture-small", "--table-rows", "10"]) == 2
    error = capsys.readouterr().err
    assert "demo: nvcc was not found\n" in error
    assert "Traceback" not in error


def test_command_line_builds_a_family_or_says_why_not(monkeypatch, capsys) -> None:
    monkeypatch.setattr(_jit, "load", lambda family, verbose: f"/cache/{family}.so")
    assert __main__.main(["build"]) == 0
    built = [f"{family}: /cache/{family}.so\n" for family in FAMILIES]
    assert capsys.readouterr().out == "".join(built)
    assert __main__.main(["build", "norm"]) == 0
    assert capsys.readouterr().out == "norm: /cache/norm.so\n"
    monkeypatch.undo()
    assert __main__.main(["build", "nope"]) == 1
    assert "build: unknown kernel family 'nope'" in capsys.readouterr().err
