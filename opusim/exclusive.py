"""One process at a time: the lock of a physical device, which names its holder."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from opusim.errors import DeviceBusy, DeviceUnavailable
from opusim.locks import LockHeld, held

FOLDER_VARIABLE = "OPUSIM_LOCKS"


class ExclusiveUse:
    """The right to use a device, for this process alone.

    The lock is a file in the folder that OPUSIM_LOCKS names, else in the system's temporary folder; all users of one
    device on one machine must agree on it. The kernel gives it back when its holder dies.

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
            path.parent.mkdir(parents=True, exist_ok=True)
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
    folder = os.environ.get(FOLDER_VARIABLE)
    base = Path(folder) if folder else Path(tempfile.gettempdir()) / "opusim-locks"
    return base / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.lock"
