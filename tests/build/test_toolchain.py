"""Finding nvcc, the host compiler, ninja and cuBLASLt on machines of every kind."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from fusedcuda import _toolchain
from fusedcuda._build import BuildError

GCC_LIMITS = {"13.0": ((6, 0, 0), (16, 0))}


# ---- nvcc ----------------------------------------------------------------------------------------


def test_cuda_home_is_taken_first(machine, about) -> None:
    notes = []
    assert _toolchain.find_cuda_home(about, notes) == machine.home
    assert notes == []


@pytest.mark.parametrize("value", [":/usr/local/cuda-10.2", "/opt/none", "/usr"])
def test_cuda_home_that_is_no_toolkit_is_noted_and_passed_over(value, machine, about) -> None:
    machine.monkeypatch.setenv("CUDA_HOME", value)
    machine.monkeypatch.setenv("CUDA_PATH", str(machine.home))
    notes = []
    assert _toolchain.find_cuda_home(about, notes) == machine.home
    assert len(notes) == 1
    assert f"CUDA_HOME={value!r} is not a CUDA toolkit" in notes[0]


def test_nvcc_on_path_leads_to_its_toolkit(machine, about) -> None:
    machine.monkeypatch.delenv("CUDA_HOME")
    machine.monkeypatch.setenv("PATH", f"{machine.home / 'bin'}:/usr/bin:/bin")
    assert _toolchain.find_cuda_home(about, []) == machine.home


def test_wrapper_script_on_path_leads_to_the_real_toolkit(machine, about) -> None:
    machine.monkeypatch.delenv("CUDA_HOME")
    machine.script(machine.bin / "nvcc", f'#!/bin/sh\nexec "{machine.home}/bin/nvcc" "$@"\n')
    assert _toolchain.find_cuda_home(about, []) == machine.home


@pytest.mark.parametrize("place", ["default", "conda", "pip"])
def test_usual_places_are_searched(place, machine, about) -> None:
    machine.monkeypatch.delenv("CUDA_HOME")
    homes = {
        "default": _toolchain.DEFAULT_CUDA_HOME,
        "conda": machine.root / "conda",
        "pip": about.site_packages / "nvidia" / "cu13",
    }
    machine.monkeypatch.setenv("CONDA_PREFIX", str(homes["conda"]))
    machine.install_nvcc(homes[place])
    assert _toolchain.find_cuda_home(about, []) == homes[place]


def test_toolkit_without_headers_does_not_count(machine, about) -> None:
    (machine.home / "include" / "cuda_runtime.h").unlink()
    assert _toolchain.find_cuda_home(about, []) is None
    conda_layout = machine.home / "targets" / "x86_64-linux" / "include"
    conda_layout.mkdir(parents=True)
    (conda_layout / "cuda_runtime.h").touch()
    assert _toolchain.find_cuda_home(about, []) == machine.home


def test_missing_nvcc_is_explained_with_a_command(machine, about) -> None:
    machine.remove_nvcc()
    with pytest.raises(BuildError, match=r"nvcc was not found") as error:
        _toolchain.find_toolchain(about)
    assert "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*'" in str(error.value)


def test_other_major_version_is_an_error_that_names_both(machine, about) -> None:
    machine.install_nvcc(version="12.4")
    with pytest.raises(BuildError, match=r"nvcc is CUDA 12\.4, but torch 2\.11\.0 .* CUDA 13\.0"):
        _toolchain.find_toolchain(about)


def test_other_minor_version_is_a_note(machine, about) -> None:
    machine.install_nvcc(version="13.2")
    notes = _toolchain.find_toolchain(about).notes
    assert notes == ("nvcc is CUDA 13.2 and torch's CUDA is 13.0; the same major works",)


def test_nvcc_that_does_not_run_is_named(machine, about) -> None:
    machine.script(machine.home / "bin" / "nvcc", "#!/bin/sh\necho exec format error\n")
    with pytest.raises(BuildError, match=r"bin/nvcc --version .*exec format error"):
        _toolchain.find_toolchain(about)


def test_toolchain_is_described(machine, about) -> None:
    toolchain = _toolchain.find_toolchain(about)
    assert toolchain.nvcc_version == (13, 0)
    assert toolchain.nvcc_release == "13.0.88"
    assert "sm_90" in toolchain.nvcc_archs
    assert toolchain.cxx_version


# ---- torch and the platform ----------------------------------------------------------------------


def test_cpu_only_torch_is_named_with_the_command_for_another(machine, about) -> None:
    cpu_only = dataclasses.replace(about, version="2.13.0+cpu", cuda=None)
    with pytest.raises(BuildError, match=r"2\.13\.0\+cpu is a CPU-only build.*pip install .*torch"):
        _toolchain.find_toolchain(cpu_only)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems_are_told_what_works_there(platform, machine, about) -> None:
    machine.monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(BuildError, match=f"Linux only, and this is {platform}.*CPU reference"):
        _toolchain.find_toolchain(about)


# ---- Host compiler and ninja ---------------------------------------------------------------------


def test_missing_compiler_is_named(machine, about) -> None:
    machine.monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(BuildError, match=r"g\+\+-99 was not found.*apt-get install g\+\+"):
        _toolchain.find_toolchain(about)


def install_gcc(machine, name: str, version: str) -> None:
    for tool in (name, name.replace("g++", "gcc").replace("c++", "gcc")):
        machine.script(machine.bin / tool, f"#!/bin/sh\necho {version}\n")


def test_too_new_gcc_is_replaced_by_an_older_one(machine, about) -> None:
    install_gcc(machine, "c++", "99.1.0")
    install_gcc(machine, "g++-15", "15.2.0")
    toolchain = _toolchain.find_toolchain(about)
    expected = {"CC": "gcc-15", "CXX": "g++-15"}
    assert _toolchain.host_compiler_env(toolchain, GCC_LIMITS) == expected


def test_too_new_gcc_without_an_older_one_is_an_error_with_the_command(machine, about) -> None:
    machine.monkeypatch.setenv("PATH", str(machine.bin))
    install_gcc(machine, "c++", "99.1.0")
    toolchain = _toolchain.find_toolchain(about)
    with pytest.raises(BuildError, match=r"g\+\+ 99\.1\.0 is newer.*apt-get install g\+\+-15"):
        _toolchain.host_compiler_env(toolchain, GCC_LIMITS)


@pytest.mark.parametrize("limits", [GCC_LIMITS, {}])
def test_fitting_gcc_is_left_alone(limits, machine, about) -> None:
    install_gcc(machine, "c++", "12.2.0")
    assert _toolchain.host_compiler_env(_toolchain.find_toolchain(about), limits) == {}


def test_ninja_of_pip_is_found_off_the_path(machine) -> None:
    (machine.root / "ninja.py").write_text("BIN_DIR = '/somewhere/bin'\n")
    machine.monkeypatch.delitem(sys.modules, "ninja", raising=False)
    machine.monkeypatch.syspath_prepend(machine.root)
    assert str(_toolchain.find_ninja()) == "/somewhere/bin"


def test_build_sees_ninja_even_if_the_users_path_does_not(machine, about) -> None:
    toolchain = dataclasses.replace(
        _toolchain.find_toolchain(about), ninja_dir=machine.root / "env" / "bin"
    )
    before = os.environ["PATH"]
    with _toolchain.build_environment(toolchain, about, FakeCppExtension):
        assert os.environ["PATH"] == f"{machine.root}/env/bin:{before}"
    assert os.environ["PATH"] == before


def test_ninja_of_the_system_will_do_and_none_is_an_error(machine) -> None:
    machine.monkeypatch.setitem(sys.modules, "ninja", None)  # cannot be imported
    machine.monkeypatch.setenv("PATH", str(machine.bin))
    with pytest.raises(BuildError, match="pip install ninja"):
        _toolchain.find_ninja()
    machine.script(machine.bin / "ninja", "#!/bin/sh\n")
    assert _toolchain.find_ninja() == machine.bin


# ---- Setting up torch's build --------------------------------------------------------------------


class FakeCppExtension:
    CUDA_GCC_VERSIONS = GCC_LIMITS
    CUDA_HOME = "before"
    TORCH_LIB_PATH = "before"


def test_paths_with_spaces_are_reached_through_links(machine, about) -> None:
    spaced = machine.root / "my cuda"
    machine.install_nvcc(spaced)
    machine.monkeypatch.setenv("CUDA_HOME", str(spaced))
    site = dataclasses.replace(about, site_packages=machine.root / "my site-packages")
    (site.site_packages / "torch" / "lib").mkdir(parents=True)
    toolchain = _toolchain.find_toolchain(site)
    assert " " in str(toolchain.cuda_home)
    with _toolchain.build_environment(toolchain, site, FakeCppExtension) as flags:
        assert not any(" " in flag for flag in flags)
        for path, target in (
            (FakeCppExtension.CUDA_HOME, spaced),
            (FakeCppExtension.TORCH_LIB_PATH, site.site_packages / "torch" / "lib"),
        ):
            assert " " not in path
            assert Path(path).resolve() == target
    assert FakeCppExtension.CUDA_HOME == FakeCppExtension.TORCH_LIB_PATH == "before"


@pytest.mark.parametrize("owner", ["toolkit", "pip"])
def test_runtime_library_gets_the_name_that_the_linker_wants(owner, machine, about) -> None:
    home = machine.home if owner == "toolkit" else about.site_packages / "nvidia" / "cu13"
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "libcudart.so.13").touch()
    toolchain = _toolchain.find_toolchain(about)
    with _toolchain.build_environment(toolchain, about, FakeCppExtension) as (flag,):
        link = Path(flag.removeprefix("-L")) / "libcudart.so"
        assert link.resolve() == home / "lib" / "libcudart.so.13"


@pytest.mark.parametrize("users_choice", ["1", None])
def test_number_of_jobs_is_chosen_unless_the_user_did(users_choice, machine, about) -> None:
    if users_choice:
        machine.monkeypatch.setenv("MAX_JOBS", users_choice)
    machine.monkeypatch.setattr(_toolchain, "max_jobs", lambda: 7)
    toolchain = _toolchain.find_toolchain(about)
    with _toolchain.build_environment(toolchain, about, FakeCppExtension):
        assert os.environ["MAX_JOBS"] == (users_choice or "7")
    assert os.environ.get("MAX_JOBS") == users_choice


# ---- cuBLASLt ------------------------------------------------------------------------------------


def plant(*paths) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ("library", "header"),
    [
        ("site-packages/nvidia/cu13/lib", "site-packages/nvidia/cu13/include"),  # pip, CUDA 13
        ("site-packages/nvidia/cublas/lib", "site-packages/nvidia/cublas/include"),  # pip, CUDA 12
        ("cuda/lib64", "cuda/include"),  # system
        ("conda/lib", "conda/targets/x86_64-linux/include"),
    ],
)
def test_cublaslt_is_found_in_every_layout(library, header, machine, about) -> None:
    machine.monkeypatch.setenv("CONDA_PREFIX", str(machine.root / "conda"))
    plant(
        machine.root / library / "libcublasLt.so.13",
        machine.root / header / "cublasLt.h",
        machine.root / "maps",
    )
    found = _toolchain.find_cublaslt(about, machine.home, maps=machine.root / "maps")
    assert found.library == machine.root / library / "libcublasLt.so.13"
    assert found.header == machine.root / header / "cublasLt.h"
    assert found.problem is None


def test_the_cublaslt_that_torch_has_loaded_wins(machine, about) -> None:
    loaded = machine.root / "elsewhere" / "lib" / "libcublasLt.so.13"
    plant(loaded, machine.home / "lib64" / "libcublasLt.so.13")
    maps = machine.root / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 fe:00 42   {loaded}\n7f02-7f03 rw-p 0 0:0 0 [heap]\n")
    assert _toolchain.find_cublaslt(about, machine.home, maps=maps).library == loaded


def test_missing_cublaslt_header_comes_with_the_command(machine, about) -> None:
    plant(machine.home / "lib64" / "libcublasLt.so.13", machine.root / "maps")
    found = _toolchain.find_cublaslt(about, machine.home, maps=machine.root / "maps")
    assert "no cublasLt.h: pip install nvidia-cublas" in found.problem


def test_no_cublaslt_is_none(machine, about) -> None:
    plant(machine.root / "maps")
    assert _toolchain.find_cublaslt(about, None, maps=machine.root / "maps") is None


def test_what_a_family_lacks_is_said_before_compiling(machine, about) -> None:
    toolchain = _toolchain.find_toolchain(about)
    assert toolchain.missing_for("norm") is None
    without = dataclasses.replace(toolchain, cublaslt=None)
    assert "pip install nvidia-cublas" in without.missing_for("linear_act")
    assert without.include_flags == []
    no_header = dataclasses.replace(
        toolchain, cublaslt=_toolchain.CublasLt(Path("/lib/libcublasLt.so"), None)
    )
    assert "no cublasLt.h" in no_header.missing_for("linear_act")
    header = Path("/some where/cublasLt.h")
    complete = dataclasses.replace(
        toolchain, cublaslt=_toolchain.CublasLt(Path("/lib/libcublasLt.so"), header)
    )
    assert complete.missing_for("linear_act") is None
    assert complete.include_flags == ["-idirafter", "/some where"]
