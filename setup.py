"""Builds fusedcuda/_C.abi3.so where a CUDA toolchain is at hand, and says why where none is.

    FUSEDCUDA_BUILD=1           fail if the kernels cannot be built
    FUSEDCUDA_BUILD=0           do not try; kernels are compiled on first use
    TORCH_CUDA_ARCH_LIST=9.0a   what to build for (default: the GPUs here, else the common ones)

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import site
import sys
import sysconfig
import types
from collections.abc import Iterable
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)


def package_module(name: str) -> types.ModuleType:
    """Imports one module of the package without its __init__, which needs torch."""
    bare = types.ModuleType("fusedcuda")
    bare.__path__ = [str(ROOT / "fusedcuda")]
    sys.modules.setdefault("fusedcuda", bare)
    return importlib.import_module(f"fusedcuda.{name}")


_build = package_module("_build")
_toolchain = package_module("_toolchain")


class BuildPython(build_py):
    """Ships the C++ sources inside the package, for the just-in-time build."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "fusedcuda" / "csrc"
            shutil.rmtree(target, ignore_errors=True)  # parts of an earlier build would be compiled
            shutil.copytree(ROOT / "csrc", target)


class BuildKernels(build_ext):
    """Compiles with torch's build_ext if it can; otherwise the package works without kernels.

    torch is imported here and not at the top: metadata and source distributions do without it.
    """

    def run(self) -> None:
        wanted = os.environ.get("FUSEDCUDA_BUILD", "auto")
        try:
            if wanted == "0":
                raise _build.BuildError("FUSEDCUDA_BUILD=0 was set")
            torch = import_torch()
            toolchain = _toolchain.find_toolchain(_toolchain.describe_torch(torch))
        except _build.BuildError as error:
            if wanted == "1":
                raise SystemExit(f"fusedcuda: {error}") from None
            print(f"fusedcuda: installing without CUDA kernels: {error}", file=sys.stderr)
            (self.package_folder / "_C.abi3.so").unlink(missing_ok=True)  # of an earlier build
            self.record({"built": False, "reason": str(error)})
        else:
            self.record(self.compile(torch, toolchain))

    @property
    def package_folder(self) -> Path:
        """Where the extension goes: into the checkout, or into the wheel that is being made."""
        return (ROOT if self.inplace else Path(self.build_lib)) / "fusedcuda"

    def record(self, info: dict[str, object]) -> None:
        """Leaves a note for the doctor, and for the first op that finds no kernel."""
        self.package_folder.mkdir(parents=True, exist_ok=True)
        (self.package_folder / "_build_info.json").write_text(json.dumps(info, indent=1) + "\n")

    def compile(
        self, torch: types.ModuleType, toolchain: _toolchain.Toolchain
    ) -> dict[str, object]:
        cpp_extension = _toolchain.import_cpp_extension()
        about = _toolchain.describe_torch(torch)
        gpus = _toolchain.visible_capabilities(torch)
        archs, note = _build.fit_to_nvcc(
            _build.aot_archs(os.environ.get("TORCH_CUDA_ARCH_LIST"), gpus),
            toolchain.nvcc_archs,
            str(toolchain.nvcc),
        )
        for line in filter(None, (*toolchain.notes, note)):
            print(f"fusedcuda: {line}", file=sys.stderr)
        print(f"fusedcuda: compiling for {_build.format_archs(archs)} ...", file=sys.stderr)

        families = []
        for family in _build.FAMILIES:
            if missing := toolchain.missing_for(family):
                print(f"fusedcuda: leaving out {family}: {missing}", file=sys.stderr)
            else:
                families.append(family)

        with _toolchain.build_environment(toolchain, about, cpp_extension) as link_flags:
            (declared,) = self.extensions
            self.distribution.ext_modules = [
                cpp_extension.CUDAExtension(
                    declared.name,
                    sources(families),
                    include_dirs=[str(path) for path in _build.include_dirs(_build.csrc_dir())],
                    extra_compile_args={
                        "cxx": _build.host_flags(archs) + toolchain.include_flags,
                        "nvcc": _build.nvcc_flags(archs),
                    },
                    extra_link_args=[*link_flags, "-s"],
                    py_limited_api=True,
                )
            ]
            command = cpp_extension.BuildExtension(self.distribution)
            # Ninja knows what is out of date; setuptools would look at the sources alone, not
            # at headers and flags.
            command.inplace, command.force = self.inplace, True
            command.build_lib, command.build_temp = self.build_lib, self.build_temp
            command.ensure_finalized()
            try:
                command.run()
            except (RuntimeError, CompileError, LinkError) as error:
                raise SystemExit(
                    f"fusedcuda: compiling the kernels failed ({error}). The compiler's messages "
                    "are above (pip shows them with -v); FUSEDCUDA_BUILD=0 installs without kernels"
                ) from error
        return {
            "built": True,
            "families": families,
            "archs": _build.format_archs(archs),
            "torch": about.version,
            "cuda": about.cuda,
            "nvcc": toolchain.nvcc_release,
            "cxx": toolchain.cxx_version,
            "sources": _build.sources_digest(),
        }


def sources(families: Iterable[str]) -> list[str]:
    return [
        os.path.relpath(source, ROOT)
        for family in families
        for source in (*_build.kernel_sources(family), _build.binding_source(family))
    ]


def import_torch() -> types.ModuleType:
    """torch of the environment being installed into, also from inside pip's build isolation."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        site.addsitedir(sysconfig.get_path("purelib"))
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        raise _build.BuildError(
            "torch was not found while installing. Install torch first, then: "
            "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps ."
        ) from None


class AnyPythonWheel(bdist_wheel):
    """The kernels use only stable interfaces of torch and none of Python: one wheel serves all."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()


setup(
    ext_modules=[
        Extension(
            "fusedcuda._C",
            sources(_build.FAMILIES),
            py_limited_api=True,
        )
    ],
    cmdclass={"build_py": BuildPython, "build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
