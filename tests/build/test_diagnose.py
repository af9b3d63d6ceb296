"""What the user sees of a failed compilation or load: the message that matters and the remedy."""

import pytest

from fusedcuda import _diagnose

LOG = """\
Error building extension 'fusedcuda_pointwise_1': [1/3] /cuda/bin/nvcc -c /x/cuda.cu -o cuda.o
FAILED: cuda.cuda.o
/cuda/bin/nvcc -I/x -c /cache/cuda.cu -o cuda.cuda.o
/src/kernels/pointwise.cu(7): error: identifier "kAnswerr" is undefined
    int launch_answer() { return kAnswerr + 41; }
                                 ^

1 error detected in the compilation of "/cache/cuda.cu".
[2/3] c++ -MMD -MF main.o.d -fPIC -c /cache/main.cpp -o main.o
ninja: build stopped: subcommand failed.
"""


def test_log_is_reduced_to_the_words_of_the_compiler() -> None:
    assert _diagnose.build_failure(LOG).splitlines() == [
        '  /src/kernels/pointwise.cu(7): error: identifier "kAnswerr" is undefined',
        "      int launch_answer() { return kAnswerr + 41; }",
        "                                   ^",
    ]


def test_remarks_before_the_first_error_are_left_out() -> None:
    log = "main.cpp:1: note: something\nmain.cpp:3:8: error: 'x' was not declared\n"
    assert _diagnose.build_failure(log) == "  main.cpp:3:8: error: 'x' was not declared"


def test_endless_template_errors_are_cut() -> None:
    log = "".join(f"a.cpp:{i}: error: no\n" for i in range(500))
    assert len(_diagnose.build_failure(log).splitlines()) < 30


def test_silent_compiler_is_said_to_be_silent() -> None:
    log = "Error building extension 'x': [1/3] c++ -c a.cpp -o a.o\nninja: build stopped: failed.\n"
    assert _diagnose.build_failure(log) == "  (the compiler printed nothing)"


@pytest.mark.parametrize(
    ("log", "remedy"),
    [
        (
            "bits/mathcalls.h(79): error: exception specification is incompatible with that of "
            'previous function "cospi" (declared at line 2601)',
            "glibc 2.41",
        ),
        (
            "#error -- unsupported GNU version! gcc versions later than 13 are not supported!",
            "CXX=",
        ),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120'", "newer CUDA toolkit"),
        ("Killed\nninja: build stopped: subcommand failed.", "MAX_JOBS=1"),
        ("FAILED: [code=137] cuda.cuda.o", "MAX_JOBS=1"),
        ("cc1plus: fatal error: /tmp/x.o: No space left on device", "FUSEDCUDA_CACHE_DIR"),
        ("a.cpp:1:10: fatal error: cublasLt.h: No such file or directory", "nvidia-cublas"),
        ("a.cpp:1:10: fatal error: cublas_v2.h: No such file or directory", "nvidia-cublas"),
        ("fatal error: cuda_runtime.h: No such file or directory", "cuda-toolkit[nvcc,cccl]"),
        (
            "a.h:4: fatal error: nv/target: No such file or directory",
            "cuda-toolkit[nvcc,cccl]",
        ),
        ("/usr/bin/ld: cannot find -lcudart: No such file or directory", "cuda-cudart-dev"),
    ],
)
def test_known_build_failures_come_with_the_remedy(log: str, remedy: str) -> None:
    assert remedy in _diagnose.build_failure(log).splitlines()[-1]


def test_torch_hides_the_message_of_the_loader() -> None:
    error = OSError("Could not load this library: /x.so")
    error.__cause__ = OSError("/x.so: file too short")
    assert _diagnose.load_failure(error).startswith("/x.so: file too short")


def test_unknown_build_failure_gets_no_guess() -> None:
    assert len(_diagnose.build_failure("a.cu(1): error: expected a ;").splitlines()) == 1


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("/x/_C.abi3.so: undefined symbol: aoti_torch_new_thing", "built for another torch"),
        (
            "/opt/conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by _C.so)",
            "libstdcxx-ng",
        ),
        ("libc10.so: cannot open shared object file: No such file or directory", "torch must be"),
        ("libcudart.so.12: cannot open shared object file: No such file", "another CUDA major"),
        ("/x/_C.abi3.so: file too short", "delete it"),
        ("/x/_C.abi3.so: invalid ELF header", "delete it"),
    ],
)
def test_known_load_failures_come_with_the_remedy(message: str, remedy: str) -> None:
    explained = _diagnose.load_failure(OSError(message))
    assert explained.startswith(message)
    assert remedy in explained.removeprefix(message)
