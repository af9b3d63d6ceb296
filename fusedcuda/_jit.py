"""Compiles one family of kernels through torch's cpp_extension, keeps it, and loads it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _build, _cache, _diagnose, _toolchain
from ._build import Arch, BuildError
from ._toolchain import Toolchain, describe_torch

_PACKAGE = Path(__file__).resolve().parent
PREBUILT = _PACKAGE / "_C.abi3.so"
BUILD_INFO = _PACKAGE / "_build_info.json"

_building = threading.RLock()  # a build changes os.environ, so threads take turns
_loaded: dict[str, Path] = {}  # family -> the library whose kernels are in use
_opened: set[Path] = set()  # every library that this process has loaded


# ---- The extension built ahead of time -----------------------------------------------------------


@dataclass
class Prebuilt:
    """The state of the extension that was (or was not) built when the package was installed."""

    families: tuple[str, ...] = ()
    error: str | None = None


prebuilt = Prebuilt()


def load_prebuilt() -> bool:
    """Loads the ahead-of-time extension if there is one; called once, by `import fusedcuda`."""
    if not PREBUILT.exists() or "FUSEDCUDA_CSRC" in os.environ:
        return False
    try:
        torch.ops.load_library(str(PREBUILT))
    except OSError as error:
        prebuilt.error = f"{PREBUILT} cannot be loaded: {_diagnose.load_failure(error)}"
        warnings.warn(
            f"fusedcuda: {prebuilt.error}\nThe kernels are compiled on first use instead",
            stacklevel=2,
        )
        return False
    prebuilt.families = tuple(build_info().get("families", _build.FAMILIES))
    for family in prebuilt.families:
        _configure(family)
    return True


def build_info() -> dict:
    """What setup.py recorded about the ahead-of-time build; empty where none was tried."""
    try:
        return json.loads(BUILD_INFO.read_text())
    except (OSError, ValueError):
        return {}


# ---- Public functions ----------------------------------------------------------------------------


def load(family: str, *, force: bool = False, verbose: bool = False) -> Path:
    """Makes the CUDA kernels of a family ready now instead of at the first call that needs them.

    Nothing happens if they are loaded already. Otherwise the family is compiled, which takes up to
    a minute once, and kept for later processes; see `python -m fusedcuda doctor` for where.

    Args:
        family: such as "pointwise".
        force: go back to the original kernels after `fusedcuda.jit` has replaced them.
        verbose: show the compiler's commands and output.

    Returns:
        The path of the loaded library.
    """
    _build.check_family("load", family)
    with _building:
        if family in prebuilt.families and family not in _loaded:
            _loaded[family] = PREBUILT
        if family in _loaded and not force:
            return _loaded[family]
        return _use(family, _compiled(family, read_sources(family), verbose))


class EditedKernels:
    """Edited kernels in use; `restore()`, or the end of a `with` block, goes back."""

    def __init__(self, family: str, path: Path) -> None:
        self.family = family
        self.path = path

    def restore(self) -> None:
        """Goes back to the original kernels."""
        load(self.family, force=True)

    def __enter__(self) -> EditedKernels:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"EditedKernels({self.family!r}, {str(self.path)!r})"


def jit(
    family: str,
    *,
    kernel: str | Path | None = None,
    binding: str | Path | None = None,
    replace: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> EditedKernels:
    """Compiles an edited copy of a family's kernels and uses it in place of the present ones.

    Change some text of the original, wherever it stands in the kernel or its headers::

        smaller_blocks = {"kPointwiseThreads = 256": "kPointwiseThreads = 128"}
        edited = fusedcuda.jit("pointwise", replace=smaller_blocks)
        y = fusedcuda.bias_act(x, bias)  # runs the edited kernel
        edited.restore()  # back to the original; a `with` block does this by itself

    or write a source anew: `kernel` takes the place of the family's first one (of pointwise and
    norm: the forward), as text or as a path, and can include the headers of csrc/kernels
    ("common/..."). The file to start from is `fusedcuda.kernel_source("pointwise")`. What is in
    other parts, <family>_*.cu beside it, is changed by `replace`.

    A mistake raises a RuntimeError with the message of the compiler; the kernels in use before stay
    in use. The first time, torch warns on stderr of a "previously registered kernel" that is
    overridden; that is what this function is for.

    Args:
        family: such as "pointwise".
        kernel: CUDA source that takes the place of csrc/kernels/<family>.cu.
        binding: C++ source that takes the place of csrc/bindings/<family>.cpp.
        replace: {old: new} pieces of text, applied to all sources; each must occur in one.
        verbose: show the compiler's commands and output.
    """
    _build.check_family("jit", family)
    sources = read_sources(family)
    for given, original in (
        (kernel, _build.kernel_source(family)),
        (binding, _build.binding_source(family)),
    ):
        if given is not None:
            sources[_below_csrc(original)] = _given_source(given, original)
    for old, new in (replace or {}).items():
        sources = _replaced(sources, old, new)
    with _building:
        return EditedKernels(family, _use(family, _compiled(family, sources, verbose)))


# ---- Sources and their key -----------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The text of a file, and the name that compiler messages and profilers give it."""

    name: str
    text: str


# All files that a build can see, by their path below csrc. They are read once and compiled from a
# copy, so that what is compiled is what the key was made of.
Sources = dict[str, Source]


def read_sources(family: str) -> Sources:
    compiled = (*_build.kernel_sources(family), _build.binding_source(family))
    files = (*compiled, *_build.headers())
    return {_below_csrc(path): Source(str(path), path.read_text()) for path in files}


def _below_csrc(path: Path) -> str:
    return str(path.relative_to(_build.csrc_dir()))


def _given_source(given: str | Path, original: Path) -> Source:
    if isinstance(given, str) and "\n" in given:
        return Source(f"{original.name} (edited)", given)
    return Source(str(given), Path(given).read_text())


def _replaced(sources: Sources, old: str, new: str) -> Sources:
    """The sources with `new` in place of `old`; the files that this changes are called edited."""
    if not any(old in source.text for source in sources.values()):
        compiled = " nor in ".join(_units(sources))
        raise ValueError(
            f"jit: {old!r} occurs neither in {compiled} nor in the headers of "
            f"{_build.csrc_dir()}. It must match the text there, line breaks and spaces included"
        )
    return {
        path: Source(f"{Path(path).name} (edited)", source.text.replace(old, new))
        if old in source.text
        else source
        for path, source in sources.items()
    }


def _units(sources: Sources) -> list[str]:
    """What the compiler is called for, in its order: the rest are headers."""
    return [path for path in sources if not path.endswith((".h", ".cuh"))]


def _write_sources(sources: Sources, folder: Path) -> None:
    for path, source in sources.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"#line 1 {json.dumps(source.name)}\n{source.text}")


def _key(sources: Sources, toolchain: Toolchain, archs: Sequence[Arch]) -> str:
    """Everything the binary depends on; another value of any of it is another build."""
    parts = [
        *(f"{path}\n{source.name}\n{source.text}" for path, source in sorted(sources.items())),
        " ".join(_host_flags(toolchain, archs) + _build.nvcc_flags(archs, jit=True)),
        f"torch {torch.__version__} {torch.version.git_version} cuda {torch.version.cuda}",
        f"{toolchain.cuda_home} {toolchain.nvcc_release} {toolchain.cxx} {toolchain.cxx_version}",
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}\n{part}".encode())
    return digest.hexdigest()[:16]


def _host_flags(toolchain: Toolchain, archs: Sequence[Arch]) -> list[str]:
    return _build.host_flags(archs) + toolchain.include_flags


# ---- Compiling -----------------------------------------------------------------------------------


def _compiled(family: str, sources: Sources, verbose: bool) -> Path:
    """The library of these sources, from the cache or from the compiler."""
    try:
        toolchain = _toolchain.find_toolchain(describe_torch(torch))
        if missing := toolchain.missing_for(family):
            raise BuildError(missing)
    except BuildError as error:
        raise BuildError(
            f"the CUDA kernels of {family!r} cannot be built: {error}{_why_not_prebuilt()}"
        ) from None
    gpus = _toolchain.visible_capabilities(torch)
    archs = _build.jit_archs(os.environ.get("TORCH_CUDA_ARCH_LIST"), gpus)
    archs, note = _build.fit_to_nvcc(archs, toolchain.nvcc_archs, f"nvcc {toolchain.nvcc}")
    name = f"fusedcuda_{family}_{_key(sources, toolchain, archs)}"
    entry = _cache.cache_root() / name
    library = entry / f"{name}.so"
    if library.exists():
        return library
    with _cache.build_lock(entry.with_name(f"{name}.lock"), repr(family)):
        if library.exists():  # another process built it while this one waited
            return library
        for line in filter(None, (*toolchain.notes, note)):
            _cache.say(line)
        _cache.say(
            f"compiling {family!r} for {', '.join(a.sm for a in archs)} (up to a minute, once) ..."
        )
        started = time.monotonic()
        with _cache.new_entry(entry) as folder:
            _compile(name, family, sources, toolchain, archs, folder, verbose)
        _cache.say(f"compiled {family!r} in {time.monotonic() - started:.1f} s")
    return library


def _compile(
    name: str,
    family: str,
    sources: Sources,
    toolchain: Toolchain,
    archs: Sequence[Arch],
    folder: Path,
    verbose: bool,
) -> None:
    cpp_extension = _toolchain.import_cpp_extension()
    _write_sources(sources, folder / "csrc")
    with (
        _toolchain.build_environment(toolchain, describe_torch(torch), cpp_extension) as link_flags,
        _without_loading(folder),
    ):
        try:
            cpp_extension.load(
                name,
                [str(folder / "csrc" / path) for path in _units(sources)],
                extra_cflags=[shlex.quote(flag) for flag in _host_flags(toolchain, archs)],
                extra_cuda_cflags=_build.nvcc_flags(archs, jit=True),
                extra_ldflags=link_flags,
                extra_include_paths=[str(path) for path in _build.include_dirs(folder / "csrc")],
                build_directory=str(folder),
                is_python_module=False,
                verbose=verbose,
            )
        except RuntimeError as error:
            # Otherwise torch believes that this name is built and the next try would not compile.
            cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
            log = folder.parent / f"{name}.log"
            log.write_text(str(error))
            raise BuildError(
                f"compiling the kernels of {family!r} failed:\n"
                f"{_diagnose.build_failure(str(error))}\nThe full log is {log}"
            ) from None


@contextlib.contextmanager
def _without_loading(folder: Path) -> Iterator[None]:
    """`load` also loads what it compiled; here that waits until the build is in its place.

    Loading runs the registrations in the library, which must not happen before the stubs of the
    family are released, and those must stay while the compiler may still fail.
    """
    load_library = torch.ops.load_library

    def load_others(path: str) -> None:
        if Path(path).parent != folder:
            load_library(path)

    with _toolchain.attributes(torch.ops, load_library=load_others):
        yield


def _why_not_prebuilt() -> str:
    """Why there is no ahead-of-time extension to fall back to, if that is known."""
    reason = prebuilt.error or build_info().get("reason")
    return f"\n(Not built at installation: {reason})" if reason else ""


# ---- Loading -------------------------------------------------------------------------------------


def _use(family: str, library: Path) -> Path:
    """Loads a library over the kernels that are in use.

    Loading a file a second time would run nothing, so going back to one means loading a copy of it.
    """
    from . import _library

    _library.release_stubs(family)
    try:
        if library in _opened:
            with tempfile.TemporaryDirectory() as folder:
                torch.ops.load_library(shutil.copy(library, folder))
        else:
            torch.ops.load_library(str(library))
    except OSError as error:
        if family not in _loaded:
            _library.install_stubs(family)
        raise BuildError(
            f"{library} cannot be loaded: {_diagnose.load_failure(error)}\n"
            f"To build it again: rm -r '{library.parent}'"
        ) from None
    _opened.add(library)
    _loaded[family] = library
    _configure(family)
    return library


def _configure(family: str) -> None:
    """What the kernels of a family need to be told once they are loaded."""
    if family == "linear_act":
        from . import _cublaslt

        _cublaslt.configure()
