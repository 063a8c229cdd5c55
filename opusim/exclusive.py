"""One process at a time: the lock of a physical device, which names its holder."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from opusim.errors import DeviceBusy, DeviceUnavailable
from opusim.locks import LockHeld, held

FOLDER_VARIABLE = "OPUSIM_LOCKS"


class ExclusiveUse:
    """The right to use a device, for this process only.

    The lock is a file in the folder that OPUSIM_LOCKS names, else in a folder of the user's own (`lock_folder`). If
    several users share a device, all must set OPUSIM_LOCKS to one folder that all can write. The kernel gives the lock
    back when its holder dies.

    Args:
        name: the device's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock: AbstractContextManager[None] | None = None

    def acquire(self) -> None:
        """Takes the device; nothing happens if this object has it.

        Raises:
            DeviceBusy: another process has it, or another object of this one; the message says which.
            DeviceUnavailable: the lock's folder cannot be written.
        """
        if self._lock is not None:
            return
        path = lock_file(self._name)
        lock = held(path)
        try:
            _make(path.parent)
            lock.__enter__()
        except LockHeld as error:
            raise DeviceBusy(
                f"device {self._name!r} is held by {error.holder}; wait for it, or end it"
            ) from error
        except OSError as error:
            raise DeviceUnavailable(
                f"device {self._name!r}: its lock {path} cannot be written ({error.strerror}); "
                f"set {FOLDER_VARIABLE} to a folder that all its users can write"
            ) from error
        self._lock = lock

    def release(self) -> None:
        """Gives the device back."""
        if self._lock is not None:
            self._lock.__exit__(None, None, None)
            self._lock = None


def lock_file(name: str) -> Path:
    """Where the lock of a device is."""
    return lock_folder() / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.lock"


def lock_folder() -> Path:
    """Where locks are: $OPUSIM_LOCKS; else in $XDG_RUNTIME_DIR; else in a private folder of the temporary folder.

    $XDG_RUNTIME_DIR is taken only if it belongs to this user and no other user may enter it.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own(Path(runtime)):
        return Path(runtime) / "opusim-locks"
    return Path(tempfile.gettempdir()) / f"opusim-locks-{os.geteuid()}"


def _make(folder: Path) -> None:
    """Make the folder of the locks; one of the user's own must be closed to others.

    Raises:
        OSError: It cannot be made, is a link, or belongs to another user.
    """
    if os.environ.get(FOLDER_VARIABLE):
        folder.mkdir(parents=True, exist_ok=True)
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(folder):
        raise PermissionError(errno.EPERM, "its folder is a link, or other users may enter it", str(folder))


def _is_own(folder: Path) -> bool:
    """Whether a path is a folder, not a link, that belongs to this user and that no other user may enter."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
