"""Where just-in-time builds are kept: a private folder with one subfolder and one lock per build.

A build happens in a folder of its own and is renamed into place when it is complete, so an entry is
either whole or absent: an interrupted build leaves nothing that could be loaded by mistake.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from ._build import BuildError

_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "afs", "fuse.sshfs")
_SAY_WAITING_AFTER = 2.0  # seconds
_GIVE_UP_AFTER = 1800.0  # seconds


def cache_root() -> Path:
    """The first usable folder of the candidates; a warning names each one that is passed over."""
    for folder, chosen_by_user in _candidates():
        if not chosen_by_user and (kind := network_file_system(folder)):
            warnings.warn(
                f"fusedcuda: {folder} is on a network file system ({kind}), where builds of other "
                "machines would mix and locks may fail; using a local folder instead "
                "(FUSEDCUDA_CACHE_DIR overrides)",
                stacklevel=2,
            )
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            warnings.warn(
                f"fusedcuda: cannot write to the cache folder {folder} ({error.strerror}); "
                "trying the next one (FUSEDCUDA_CACHE_DIR sets it)",
                stacklevel=2,
            )
            continue
        refuse_unless_private(folder)
        return folder
    raise BuildError(
        "no folder for compiled kernels is writable: export FUSEDCUDA_CACHE_DIR=/a/folder/of/yours"
    )


def _candidates() -> Iterator[tuple[Path, bool]]:
    """Folders to try, and whether the user chose them for fusedcuda or torch."""
    if own := os.environ.get("FUSEDCUDA_CACHE_DIR"):
        yield Path(own).absolute(), True
    if torch := os.environ.get("TORCH_EXTENSIONS_DIR"):
        yield Path(torch).absolute() / "fusedcuda", True
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(home) / "fusedcuda", False
    yield Path(tempfile.gettempdir()) / f"fusedcuda-{os.getuid()}", False


def refuse_unless_private(folder: Path) -> None:
    """The folder holds code that this process will run: nobody else may put any there."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise BuildError(
            f"the cache folder {folder} belongs to user id {status.st_uid}, not to you "
            f"({os.geteuid()}), who could place code there that fusedcuda would run. "
            "Use a folder of your own: export FUSEDCUDA_CACHE_DIR=/some/folder/of/yours"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"other users can write to the cache folder {folder} (mode "
            f"{stat.S_IMODE(status.st_mode):04o}), so they could place code there that fusedcuda "
            f"would run. Make it private: chmod 700 '{folder}'"
        )


def network_file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the network file system that holds `folder`, or None if it is local."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    best, kind = "", None
    for line in lines:
        _, point, file_system, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, file_system
    return kind if kind in _NETWORK_FILE_SYSTEMS else None


@contextlib.contextmanager
def build_lock(path: Path, what: str, timeout: float = _GIVE_UP_AFTER) -> Iterator[None]:
    """One process at a time builds `what`. The kernel drops the lock of a process that dies.

    Where locks do not work at all the build goes on without: entries are published by a rename, so
    the worst that can happen is that two processes do the same work.
    """
    with open(path, "w") as file:
        started, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
            except OSError as error:
                warnings.warn(
                    f"fusedcuda: file locks do not work for {path} ({error.strerror}); "
                    "building without one",
                    stacklevel=3,
                )
                break
            if waited > timeout:
                raise BuildError(
                    f"waited {waited:.0f} s for another process that is compiling {what}. If none "
                    f"is, something else holds the lock: fuser '{path}' names it"
                )
            if waited > _SAY_WAITING_AFTER and not told:
                told = True
                say(f"waiting for another process to compile {what} ...")
            time.sleep(0.05)
        yield


@contextlib.contextmanager
def new_entry(entry: Path) -> Iterator[Path]:
    """A fresh folder to build in, which becomes `entry` if the body succeeds.

    Call it with the lock held: what a killed build of the same entry left behind is removed first.
    """
    for leftover in entry.parent.glob(f"{entry.name}.building-*"):
        say(f"removing {leftover}, which an interrupted build left behind")
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{entry.name}.building-", dir=entry.parent))
    try:
        yield work
        try:
            work.rename(entry)
        except OSError:
            if not entry.is_dir():  # else a process without working locks was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def say(message: str) -> None:
    """A line of progress, on stderr because stdout belongs to the user's program."""
    print(f"fusedcuda: {message}", file=sys.stderr, flush=True)


def describe(root: Path) -> str:
    """A line for the doctor: where the cache is and what it holds."""
    entries = [p for p in root.iterdir() if p.is_dir() and ".building-" not in p.name]
    size = sum(f.stat().st_size for p in entries for f in p.rglob("*") if f.is_file())
    return f"{root} ({len(entries)} builds, {size / 2**20:.1f} MiB)"
