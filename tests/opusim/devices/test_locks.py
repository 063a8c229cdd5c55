"""A lock never writes through a link, and the folder of the locks belongs to the user."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from opusim.devices.access import (
    FOLDER_VARIABLE,
    ExclusiveUse,
    LockHeld,
    held,
    is_held,
    lock_file,
    lock_folder,
)
from opusim.errors import DeviceUnavailable
from opusim.training.errors import RunFolderError
from opusim.training.runs.storage import LOCK_FILE, only_writer

VICTIM = "process 7 on elsewhere since noon\n"  # as a lock file's own content


def symlink(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def named_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def other_file(path: Path, victim: Path) -> None:
    victim.write_text("three pages of notes")
    victim.rename(path)
    victim.symlink_to(path)  # so that the test reads it under its old name


TRAPS: list[Callable[[Path, Path], None]] = [symlink, hard_link, named_pipe, other_file]


@pytest.mark.parametrize("trap", TRAPS)
def test_the_lock_of_a_device_or_run_writes_into_no_other_file(
    tmp_path: Path, trap: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    run, victims = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    run.mkdir()
    for lock, victim in zip([lock_file("gaussian"), run / LOCK_FILE], victims, strict=True):
        victim.write_text(VICTIM)
        trap(lock, victim)
    before = [victim.read_text() for victim in victims]
    with pytest.raises(DeviceUnavailable, match=rf"gaussian.lock cannot be written .*{FOLDER_VARIABLE}"):
        ExclusiveUse("gaussian").acquire()
    with pytest.raises(RunFolderError, match="cannot be used"), only_writer(run, "run folder"):
        pass
    assert [victim.read_text() for victim in victims] == before


def test_a_lock_names_its_holder_and_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "device.lock"
    for _ in range(2):
        with held(path):
            with (
                pytest.raises(LockHeld, match=f"process {os.getpid()} on {socket.gethostname()}"),
                held(path),
            ):
                pass
            assert path.read_text().startswith(f"process {os.getpid()} on")
    other = tmp_path / "other.lock"
    with held(path), held(other):
        pass


def test_locks_are_in_a_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    runtime, shared = tmp_path / "runtime", tmp_path / "shared"
    runtime.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert lock_folder() == runtime / "opusim-locks"
    runtime.chmod(0o755)  # others may enter: not what the specification of that folder promises
    assert lock_folder() == shared / f"opusim-locks-{os.geteuid()}"
    use = ExclusiveUse("gaussian")
    use.acquire()
    use.release()
    assert stat.S_IMODE(lock_folder().stat().st_mode) == 0o700


def test_a_folder_of_another_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    lock_folder().symlink_to(elsewhere)
    with pytest.raises(DeviceUnavailable, match="its folder is a link, or other users may enter it"):
        ExclusiveUse("gaussian").acquire()
    lock_folder().unlink()
    lock_folder().mkdir()
    lock_folder().chmod(0o777)
    with pytest.raises(DeviceUnavailable, match="its folder is a link, or other users may enter it"):
        ExclusiveUse("gaussian").acquire()
    assert not list(elsewhere.iterdir())


def test_asking_who_holds_a_lock_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    assert not path.exists()
    with held(path):
        before = path.read_bytes()
        assert is_held(path)
        assert path.read_bytes() == before
    assert not is_held(path)
    with held(path):  # asking took nothing away
        pass
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_held(pipe)
