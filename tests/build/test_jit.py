"""Just-in-time builds: what starts one, what shares one, what survives a crash."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import toy_family
from machine import result

from fusedcuda import _build, _jit, _toolchain
from fusedcuda._build import BuildError


def build(verbose: bool = False) -> Path:
    """Compiles the toy family as `load` does, without loading it into the process of the tests."""
    return _jit._compiled("pointwise", _jit.read_sources("pointwise"), verbose)


# ---- What starts a build -------------------------------------------------------------------------


def test_second_build_comes_from_the_cache(machine, capfd) -> None:
    library = build()
    assert library.is_file()
    assert library.parent.parent == machine.cache
    out, err = capfd.readouterr()
    announcement = "fusedcuda: compiling 'pointwise' for sm_90a (up to a minute, once) ...\n"
    assert err.startswith(announcement)
    assert "fusedcuda: compiled 'pointwise' in " in err
    assert out == ""
    assert build() == library
    assert capfd.readouterr().err == ""
    assert len(machine.compilations()) == 1


def test_edited_header_rebuilds(machine) -> None:
    before = build()
    toy_family.set_answer(machine.csrc, 2)
    assert build() != before
    assert len(machine.compilations()) == 2
    toy_family.set_answer(machine.csrc, 1)
    assert build() == before
    assert len(machine.compilations()) == 2


@pytest.mark.parametrize("what", ["torch", "nvcc", "compiler", "architectures", "sources"])
def test_everything_the_binary_depends_on_is_in_the_key(what, machine) -> None:
    before = build()
    if what == "torch":
        machine.monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif what == "nvcc":
        machine.install_nvcc(version=f"{torch.version.cuda.split('.')[0]}.9")
    elif what == "compiler":
        machine.script(machine.bin / "my-c++", '#!/bin/sh\nexec c++ "$@"\n')
        machine.monkeypatch.setenv("CXX", "my-c++")
    elif what == "architectures":
        machine.monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    else:
        binding = machine.csrc / "bindings" / "pointwise.cpp"
        binding.write_text(binding.read_text() + "// a comment\n")
    assert build() != before


def test_flags_reach_the_compiler(machine) -> None:
    build()
    (command,) = machine.compilations()
    for flag in _build.nvcc_flags(_build.parse_archs("9.0a"), jit=True):
        assert flag in command
    assert f"MAX_JOBS={_build.max_jobs()}" in command


def test_no_gpu_and_no_architecture_is_explained(machine) -> None:
    machine.monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    machine.monkeypatch.setattr(_toolchain, "visible_capabilities", lambda torch: [])
    with pytest.raises(BuildError, match="no GPU is visible"):
        build()


def test_environment_is_as_before_after_a_build(machine) -> None:
    before = dict(os.environ)
    build()
    assert dict(os.environ) == before


def test_paths_with_spaces_build(machine) -> None:
    home = machine.root / "my toolkit"
    machine.install_nvcc(home)
    machine.monkeypatch.setenv("CUDA_HOME", str(home))
    machine.monkeypatch.setenv("FUSEDCUDA_CACHE_DIR", str(machine.root / "my cache"))
    machine.monkeypatch.setenv("FUSEDCUDA_CSRC", str(toy_family.write(machine.root / "my csrc")))
    assert build().is_file()


# ---- What a failure looks like -------------------------------------------------------------------


def test_compile_error_shows_file_and_message_and_is_tried_again(machine) -> None:
    header = machine.csrc / "kernels" / "common" / "answer.h"
    header.write_text("constexpr int kAnswer = oops;\n")
    with pytest.raises(BuildError) as error:
        build()
    message = str(error.value)
    assert f"{header}:1" in message
    assert "'oops' was not declared" in message
    for noise in ("ninja", "FAILED", "[1/", "-gencode"):
        assert noise not in message
    log = Path(message.splitlines()[-1].removeprefix("The full log is "))
    assert "-gencode" in log.read_text()

    with pytest.raises(BuildError, match="oops"):  # the same sources in the same process
        build()
    toy_family.set_answer(machine.csrc, 1)
    assert build().is_file()


def test_error_in_a_source_names_the_source_and_its_line(machine) -> None:
    source = machine.csrc / "kernels" / "pointwise.cu"
    source.write_text(source.read_text() + "int broken() { return nothing; }\n")
    line = len(source.read_text().splitlines())
    with pytest.raises(BuildError, match=f"{source}:{line}:"):
        build()


def test_killed_compiler_is_recognised(machine) -> None:
    machine.install_nvcc(body="os.kill(os.getpid(), 9)")
    with pytest.raises(BuildError, match="MAX_JOBS=1"):
        build()


def test_missing_toolchain_names_the_family_and_why_nothing_was_prebuilt(machine) -> None:
    machine.remove_nvcc()
    info = machine.root / "info.json"
    info.write_text('{"built": false, "reason": "FUSEDCUDA_BUILD=0 was set"}')
    machine.monkeypatch.setattr(_jit, "BUILD_INFO", info)
    with pytest.raises(
        BuildError, match=r"'pointwise' cannot be built: nvcc was not found"
    ) as error:
        build()
    assert "Not built at installation: FUSEDCUDA_BUILD=0 was set" in str(error.value)


# ---- Crashes and crowds --------------------------------------------------------------------------

_SLOW = """
    open({started!r}, "w").close()
    time.sleep(600)
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_killed_build_neither_blocks_nor_spoils_the_next(machine, capfd) -> None:
    started = machine.root / "started"
    machine.install_nvcc(body=_SLOW.format(started=str(started)))
    process = machine.python("_jit._compiled('pointwise', _jit.read_sources('pointwise'), False)")
    wait_for(started)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (remains,) = machine.cache.glob("*.building-*")
    orphan = int(machine.compilations()[0].split()[0])
    os.kill(orphan, signal.SIGKILL)  # its compiler, which outlives it

    machine.install_nvcc()
    before = time.monotonic()
    assert build().is_file()
    assert time.monotonic() - before < 30
    assert not remains.exists()
    assert f"removing {remains}, which an interrupted build left behind" in capfd.readouterr().err


def test_processes_at_once_build_once(machine) -> None:
    machine.install_nvcc(body="time.sleep(1)")
    code = "print(_jit.load('pointwise')); print(answer())"
    processes = [machine.python(code) for _ in range(2)]
    outputs = [result(process) for process in processes]
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    assert outputs[0][1] == outputs[1][1]
    assert outputs[0][1].splitlines()[1] == "1"
    assert len(machine.compilations()) == 1


def test_every_process_shows_the_error_of_a_failed_build(machine) -> None:
    (machine.csrc / "kernels" / "common" / "answer.h").write_text("oops\n")
    processes = [machine.python("_jit.load('pointwise')") for _ in range(2)]
    for code, _, err in map(result, processes):
        assert code == 1
        assert "answer.h:1" in err
        assert "cannot open shared object" not in err


# ---- Loading, editing and going back -------------------------------------------------------------


def test_edited_kernels_replace_the_original_and_go_back(machine) -> None:
    process = machine.python("""
        original = _jit.load("pointwise")
        assert _jit.load("pointwise") == original
        assert answer() == 1

        edit = {"return kAnswer": "return kAnswer + 41"}
        with _jit.jit("pointwise", replace=edit) as edited:
            assert answer() == 42, answer()
            assert edited.path != original
        assert answer() == 1, answer()

        kernel = _jit._build.kernel_source("pointwise")
        text = kernel.read_text().replace("return kAnswer", "return 7")
        edited = _jit.jit("pointwise", kernel=text)
        assert answer() == 7, answer()
        try:
            _jit.jit("pointwise", kernel=text.replace("return 7", "return seven"))
        except RuntimeError as error:
            assert "pointwise.cu (edited)" in str(error), error
            assert "seven" in str(error), error
        else:
            raise SystemExit("a broken kernel was accepted")
        assert answer() == 7, "a broken edit took the kernels in use away"
        edited.restore()
        assert answer() == 1

        _jit.jit("pointwise", replace=edit)
        assert answer() == 42, "the same edit a second time"
        with _jit.jit("pointwise", replace={"kAnswer = 1": "kAnswer = 5"}):
            assert answer() == 5, "text of a header"
        _jit.jit("pointwise", replace=edit)
        assert _jit.load("pointwise", force=True) == original
        assert answer() == 1
    """)
    code, _, err = result(process)
    assert code == 0, err
    assert len(machine.compilations()) == 5  # original, edit, text, broken text, header


def test_kernel_can_be_a_file_of_its_own(machine) -> None:
    path = machine.root / "mine.cu"
    path.write_text(_build.kernel_source("pointwise").read_text() + "int broken = nothing;\n")
    line = len(path.read_text().splitlines())
    for kernel in (path, str(path)):
        with pytest.raises(BuildError, match=f"{path}:{line}:.*nothing"):
            _jit.jit("pointwise", kernel=kernel)


def test_example_in_the_documentation_fits_the_real_kernel(monkeypatch) -> None:
    monkeypatch.delenv("FUSEDCUDA_CSRC", raising=False)
    (old,) = re.findall(r'= {"(.+?)":', _jit.jit.__doc__)
    sources = _jit.read_sources("pointwise").values()
    assert sum(source.text.count(old) for source in sources) == 1


def test_text_to_replace_must_occur(machine) -> None:
    where = r"kernels/pointwise\.cu nor in bindings/pointwise\.cpp nor in the headers of "
    with pytest.raises(ValueError, match=rf"^jit: 'kUnroll = 9' occurs neither in {where}"):
        _jit.jit("pointwise", replace={"kUnroll = 9": "kUnroll = 1"})


def test_unknown_family_is_refused(machine) -> None:
    for function in (_jit.load, _jit.jit):
        with pytest.raises(ValueError, match=f"^{function.__name__}: unknown kernel family 'nope'"):
            function("nope")


# ---- The extension built ahead of time -----------------------------------------------------------


def test_broken_extension_is_reported_and_replaced_by_the_jit(machine) -> None:
    broken = machine.root / "_C.abi3.so"
    broken.write_text("not a library")
    machine.monkeypatch.delenv("FUSEDCUDA_CSRC")
    machine.monkeypatch.setattr(_jit, "PREBUILT", broken)
    machine.monkeypatch.setattr(_jit, "prebuilt", _jit.Prebuilt())
    with pytest.warns(UserWarning, match=r"_C\.abi3\.so cannot be loaded: .*\n.*\n.*first use"):
        assert _jit.load_prebuilt() is False
    assert "delete it" in _jit.prebuilt.error
    assert _jit.prebuilt.families == ()


def test_absent_extension_is_no_error(machine, recwarn) -> None:
    machine.monkeypatch.delenv("FUSEDCUDA_CSRC")
    machine.monkeypatch.setattr(_jit, "PREBUILT", machine.root / "_C.abi3.so")
    assert _jit.load_prebuilt() is False
    assert not recwarn


def test_present_extension_makes_load_return_at_once(machine) -> None:
    machine.monkeypatch.setattr(_jit, "prebuilt", _jit.Prebuilt(families=("pointwise",)))
    machine.monkeypatch.setattr(_jit, "_loaded", {})
    assert _jit.load("pointwise") == _jit.PREBUILT
    assert machine.compilations() == []


# ---- The real thing ------------------------------------------------------------------------------


def test_pointwise_compiles_and_registers_its_cuda_kernels(real_compilers) -> None:
    process = real_compilers.python("""
        import time
        path = _jit.load("pointwise", force=True)
        before = time.perf_counter()
        assert _jit._compiled("pointwise", _jit.read_sources("pointwise"), False) == path
        seconds = time.perf_counter() - before
        assert seconds < 0.5, f"finding a cached build took {seconds} s"
        for name in fusedcuda._library._families["pointwise"]:
            kernels = torch._C._dispatch_dump(f"fusedcuda::{name}")
            assert "pointwise.cpp" in kernels, kernels
    """)
    code, _, err = result(process, timeout=300)
    assert code == 0, err
    print(err)
