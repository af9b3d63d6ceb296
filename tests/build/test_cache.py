"""The folder of compiled kernels: where it is, who may write to it, who builds, what remains."""

import fcntl
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from fusedcuda import _cache
from fusedcuda._build import BuildError

# ---- Where ---------------------------------------------------------------------------------------


@pytest.fixture
def home(machine, monkeypatch) -> Path:
    """No variable chooses the cache, so it goes below the home directory."""
    monkeypatch.delenv("FUSEDCUDA_CACHE_DIR")
    monkeypatch.setenv("HOME", str(machine.root / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(machine.root))
    return machine.root / "home"


def test_default_is_private_and_below_the_home_directory(home, recwarn) -> None:
    root = _cache.cache_root()
    assert root == home / ".cache" / "fusedcuda"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert not recwarn


def test_variables_choose_in_order(home, machine) -> None:
    machine.monkeypatch.setenv("XDG_CACHE_HOME", str(machine.root / "xdg"))
    assert _cache.cache_root() == machine.root / "xdg" / "fusedcuda"
    machine.monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(machine.root / "torch"))
    assert _cache.cache_root() == machine.root / "torch" / "fusedcuda"
    machine.monkeypatch.setenv("FUSEDCUDA_CACHE_DIR", str(machine.root / "own"))
    assert _cache.cache_root() == machine.root / "own"


def test_unwritable_home_falls_back_to_a_private_temporary_folder(home, machine) -> None:
    home.touch()  # a file, so that nothing can be created below it, not even by root
    with pytest.warns(
        UserWarning, match=r"cannot write to .*home/\.cache/fusedcuda .*FUSEDCUDA_CACHE"
    ):
        root = _cache.cache_root()
    assert root == machine.root / f"fusedcuda-{os.getuid()}"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_read_only_choice_falls_back_with_a_warning(home, machine) -> None:
    machine.monkeypatch.setenv("FUSEDCUDA_CACHE_DIR", "/proc/fusedcuda")
    with pytest.warns(UserWarning, match="cannot write to the cache folder /proc/fusedcuda"):
        assert _cache.cache_root() == home / ".cache" / "fusedcuda"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_writable_is_an_error_with_the_command(home, machine) -> None:
    home.touch()
    machine.monkeypatch.setattr("tempfile.tempdir", "/proc")
    with pytest.raises(BuildError, match="export FUSEDCUDA_CACHE_DIR="):
        _cache.cache_root()


def test_network_file_system_is_avoided_unless_chosen(home, machine) -> None:
    machine.monkeypatch.setattr(
        _cache, "network_file_system", lambda folder: "nfs4" if home in folder.parents else None
    )
    with pytest.warns(UserWarning, match=r"network file system \(nfs4\)"):
        assert _cache.cache_root() == machine.root / f"fusedcuda-{os.getuid()}"
    machine.monkeypatch.setenv("FUSEDCUDA_CACHE_DIR", str(home / "chosen"))
    assert _cache.cache_root() == home / "chosen"


def test_network_file_system_is_recognised_by_the_innermost_mount(tmp_path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\n"
        "server:/home /home nfs4 rw 0 0\n"
        "/dev/sdb1 /home/me/fast\\040disk xfs rw 0 0\n"
        "server:/scratch /scratch lustre rw 0 0\n"
    )
    kinds = {
        folder: _cache.network_file_system(Path(folder), mounts)
        for folder in ("/home/me", "/home/me/fast disk/x", "/scratch/a", "/homes", "/tmp")
    }
    assert kinds == {
        "/home/me": "nfs4",
        "/home/me/fast disk/x": None,
        "/scratch/a": "lustre",
        "/homes": None,
        "/tmp": None,
    }


# ---- Who may write -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_folder_that_others_can_write_to_is_refused(mode, machine) -> None:
    machine.cache.mkdir()
    machine.cache.chmod(mode)
    with pytest.raises(BuildError, match=f"mode {mode:04o}.*chmod 700 '{machine.cache}'"):
        _cache.cache_root()


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_folder_that_others_can_only_read_will_do(mode, machine) -> None:
    machine.cache.mkdir()
    machine.cache.chmod(mode)
    assert _cache.cache_root() == machine.cache


def test_folder_of_another_user_is_refused(machine) -> None:
    machine.cache.mkdir()
    machine.monkeypatch.setattr("os.geteuid", lambda: machine.cache.stat().st_uid + 1)
    with pytest.raises(BuildError, match=r"belongs to user id .*export FUSEDCUDA_CACHE_DIR="):
        _cache.cache_root()


# ---- Who builds ----------------------------------------------------------------------------------


def test_waiting_for_the_lock_is_announced_and_ends(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(_cache, "_SAY_WAITING_AFTER", 0.0)
    path = tmp_path / "lock"
    with open(path, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.3, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with _cache.build_lock(path, "'pointwise'", timeout=30):
            pass
    assert capsys.readouterr().err == (
        "fusedcuda: waiting for another process to compile 'pointwise' ...\n"
    )


def test_waiting_has_an_end(tmp_path) -> None:
    path = tmp_path / "lock"
    with open(path, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(BuildError, match=r"waited \d+ s for another process.*fuser"),
            _cache.build_lock(path, "'pointwise'", timeout=0.2),
        ):
            pytest.fail("the lock is held by somebody else")


def test_lock_file_left_behind_does_not_hang(tmp_path) -> None:
    path = tmp_path / "lock"
    path.write_text("whoever wrote this is dead")
    started = time.monotonic()
    with _cache.build_lock(path, "'pointwise'"):
        assert time.monotonic() - started < 1


def test_file_system_without_locks_is_noted_and_used(tmp_path, monkeypatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with (
        pytest.warns(UserWarning, match=r"No locks available.*building without one"),
        _cache.build_lock(tmp_path / "lock", "'pointwise'"),
    ):
        pass


# ---- What is left behind -------------------------------------------------------------------------


def test_entry_appears_only_when_it_is_complete(tmp_path) -> None:
    entry = tmp_path / "entry"
    with _cache.new_entry(entry) as work:
        (work / "library.so").write_text("half")
        assert not entry.exists()
        assert stat.S_IMODE(work.stat().st_mode) == 0o700
    assert (entry / "library.so").exists()
    assert os.listdir(tmp_path) == ["entry"]


def test_interrupted_build_leaves_nothing(tmp_path) -> None:
    def interrupted() -> None:
        with _cache.new_entry(tmp_path / "entry") as work:
            (work / "library.so").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_remains_of_a_killed_build_are_removed(tmp_path) -> None:
    (tmp_path / "entry.building-abc").mkdir()
    (tmp_path / "entry.building-abc" / "lock").touch()  # what torch up to 2.13 would wait for
    (tmp_path / "other.building-abc").mkdir()
    with _cache.new_entry(tmp_path / "entry"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["entry", "other.building-abc"]


def test_slower_of_two_builds_without_locks_keeps_the_first(tmp_path) -> None:
    entry = tmp_path / "entry"
    with _cache.new_entry(entry) as work:
        (work / "library.so").write_text("slower")
        entry.mkdir()
        (entry / "library.so").write_text("faster")
    assert (entry / "library.so").read_text() == "faster"
    assert os.listdir(tmp_path) == ["entry"]


def test_description_counts_finished_builds(tmp_path) -> None:
    for name in ("a", "b", "c.building-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "library.so").write_bytes(bytes(2**20))
    assert _cache.describe(tmp_path) == f"{tmp_path} (2 builds, 2.0 MiB)"
