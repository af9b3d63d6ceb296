"""The list of what is built: the house rules, the architectures, the flags."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fusedcuda import _build
from fusedcuda._build import Arch, BuildError

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"


# ---- The house -----------------------------------------------------------------------------------


def stems(folder: str, pattern: str) -> set[str]:
    return {p.stem for p in (ROOT / folder).glob(pattern) if not p.stem.startswith("_")}


def test_each_family_has_one_stem_everywhere() -> None:
    families = set(_build.FAMILIES)
    parts = [p.stem for family in families for p in _build.kernel_sources(family)]
    assert sorted(parts) == sorted(stems("csrc/kernels", "*.cu"))  # each is of one family
    assert families <= set(parts)
    assert families <= stems("csrc/kernels", "*.h")
    assert stems("csrc/bindings", "*.cpp") == families
    assert stems("fusedcuda/ops", "*.py") == families
    assert families <= {stem.removeprefix("test_") for stem in stems("tests", "test_*.py")}
    assert {stem.removeprefix("bench_") for stem in stems("bench", "bench_*.py")} == families


def includes(folder: Path) -> dict[str, list[str]]:
    files = [p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".cpp")]
    return {
        str(p.relative_to(CSRC)): re.findall(r'#\s*include\s*[<"]([^>"]+)', p.read_text())
        for p in files
    }


def test_kernels_do_not_know_torch_and_avoid_slow_headers() -> None:
    forbidden = re.compile(r"^(torch|ATen|c10|pybind11|Python\.h|cub/|cooperative_groups)")
    found = {
        name: [header for header in headers if forbidden.match(header)]
        for name, headers in includes(CSRC / "kernels").items()
    }
    assert found, "no kernel sources were found"
    assert not any(found.values()), found


def test_bindings_use_only_the_stable_interface_of_torch() -> None:
    stable = ("torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/c/", "torch/headeronly/")
    foreign = re.compile(r"^(torch/|ATen/|c10/|pybind11/)")
    found = {
        name: [h for h in headers if foreign.match(h) and not h.startswith(stable)]
        for name, headers in includes(CSRC / "bindings").items()
    }
    assert found, "no binding sources were found"
    assert not any(found.values()), found


def test_build_list_can_be_read_without_torch() -> None:
    code = f"import runpy; print(runpy.run_path({_build.__file__!r})['FAMILIES'])"
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == str(_build.FAMILIES), run.stderr


def test_sources_are_found_beside_a_checkout_and_inside_a_package(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("FUSEDCUDA_CSRC", raising=False)
    assert _build.csrc_dir() == CSRC
    package = tmp_path / "fusedcuda"
    (package / "csrc").mkdir(parents=True)
    copy = package / "_build.py"
    copy.write_text(Path(_build.__file__).read_text())
    assert runpy.run_path(str(copy))["csrc_dir"]() == package / "csrc"


def test_unknown_family_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^load: unknown .* 'pointwize'; there is pointwise"):
        _build.check_family("load", "pointwize")


# ---- Architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.0", "9.0"),
        ("9.0a", "9.0a"),
        ("sm_90", "9.0"),
        ("sm_90a", "9.0a"),
        ("90", "9.0"),
        ("120", "12.0"),
        ("8.0,9.0", "8.0;9.0"),
        ("8.0 8.6;9.0+PTX", "8.0;8.6;9.0+PTX"),
        ("9.0+ptx;9.0+PTX", "9.0+PTX"),
        ("10.0f", "10.0f"),
    ],
)
def test_architecture_spellings(text: str, expected: str) -> None:
    assert _build.format_archs(_build.parse_archs(text)) == expected


@pytest.mark.parametrize("text", ["Hopper", "all", "9", "9.0b", "9.0a;;x", ""])
def test_unreadable_architecture_is_named_with_an_example(text: str) -> None:
    with pytest.raises(BuildError, match=r"TORCH_CUDA_ARCH_LIST=.*9\.0a"):
        _build.parse_archs(text)


def test_hopper_and_newer_are_built_with_their_special_instructions() -> None:
    assert _build.format_archs(_build.jit_archs(None, [(9, 0), (8, 6), (9, 0)])) == "8.6;9.0a"


def test_ahead_of_time_build_for_the_gpus_here_adds_ptx_for_later_ones() -> None:
    assert _build.format_archs(_build.aot_archs(None, [(8, 6), (9, 0)])) == "8.6;9.0a;9.0+PTX"


def test_ahead_of_time_build_without_gpu_takes_the_default_list() -> None:
    archs = _build.aot_archs(None, [])
    assert Arch(9, 0, "a") in archs
    assert all(
        any(a.runs_on(gpu) for a in archs) for gpu in [(8, 0), (8, 9), (9, 0), (10, 3), (13, 0)]
    )


def test_just_in_time_build_without_gpu_asks_for_the_architecture() -> None:
    with pytest.raises(BuildError, match=r"no GPU is visible.*export TORCH_CUDA_ARCH_LIST=9\.0a"):
        _build.jit_archs(None, [])


def test_request_wins_over_the_gpus_and_native_does_not() -> None:
    assert _build.jit_archs("8.0", [(9, 0)]) == [Arch(8, 0)]
    assert _build.jit_archs("native", [(9, 0)]) == [Arch(9, 0, "a")]


@pytest.mark.parametrize(
    ("arch", "gpu", "runs"),
    [
        ("9.0a", (9, 0), True),
        ("9.0a", (10, 0), False),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (12, 0), True),
        ("9.0+PTX", (8, 9), False),
        ("10.0", (10, 3), True),
    ],
)
def test_which_gpu_runs_what(arch: str, gpu: tuple[int, int], runs: bool) -> None:
    assert _build.parse_archs(arch)[0].runs_on(gpu) is runs


def test_gpu_newer_than_nvcc_gets_ptx_of_the_newest_known_architecture() -> None:
    archs, note = _build.fit_to_nvcc(
        [Arch(8, 0), Arch(12, 0, "a")], ["sm_80", "sm_90"], "nvcc 12.2"
    )
    assert _build.format_archs(archs) == "8.0;9.0+PTX"
    assert note == "nvcc 12.2 cannot build sm_120a; building 8.0;9.0+PTX instead"


def test_gpu_older_than_nvcc_is_an_error_that_lists_what_it_knows() -> None:
    with pytest.raises(BuildError, match=r"nvcc 13\.0 cannot build sm_70: it knows sm_75 sm_80"):
        _build.fit_to_nvcc([Arch(7, 0)], ["sm_80", "sm_75"], "nvcc 13.0")


def test_known_architectures_are_left_alone() -> None:
    assert _build.fit_to_nvcc([Arch(9, 0, "a")], ["sm_90"], "nvcc") == ([Arch(9, 0, "a")], None)


# ---- Flags ---------------------------------------------------------------------------------------


def test_gencode_leaves_out_sm_90_beside_sm_90a() -> None:
    assert _build.gencode_flags(_build.parse_archs("8.0;9.0a;9.0+PTX")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_host_units_know_the_architectures_and_the_oldest_torch() -> None:
    flags = _build.host_flags(_build.parse_archs("9.0a;9.0+PTX"))
    assert '-DFUSEDCUDA_ARCHS="9.0a;9.0+PTX"' in flags
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in flags
    assert "-DUSE_CUDA" in flags


# ---- Parallelism ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu_max", "available_gib", "expected"),
    [
        ("max 100000", 100, 8),  # no limit but the cores
        ("150000 100000", 100, 1),  # a container with 1.5 cores
        ("400000 100000", 100, 4),
        ("max 100000", 5, 2),  # 2 GiB for each compiler
        ("max 100000", 1, 1),  # never none
        (None, None, 8),  # neither file exists
    ],
)
def test_jobs_fit_the_container_and_the_memory(
    cpu_max, available_gib, expected, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    if cpu_max:
        (tmp_path / "cpu.max").write_text(cpu_max + "\n")
        (tmp_path / "meminfo").write_text(
            f"MemTotal: 999 kB\nMemAvailable:   {available_gib * 2**20} kB\n"
        )
    assert _build.max_jobs(proc=tmp_path, cgroup=tmp_path) == expected
