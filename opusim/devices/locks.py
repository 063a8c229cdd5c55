"""Locks that name their holder: one process at a time uses a device, or writes a folder.

The kernel releases a lock when its holder dies. filelock (4.2.11 and later) opens the lock file without following
symbolic links and never truncates it. The holder's name is written only into a regular file that has a single name and
is empty or holds an earlier holder's name, so that a link in a shared folder cannot redirect the write to another file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from opusim.files import open_to_read

_NAME_LIMIT = 4096
_MARK = b"process "
"""What a holder's name begins with; a file with other content is not a lock."""


class LockHeld(Exception):  # a state that callers turn into their own error
    """Another process, or another place of this one, holds the lock; `holder` says which."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file, which names this process while it is held.

    Args:
        path: the file; its folder is there.

    Raises:
        LockHeld: another process holds it, or another place of this one.
        OSError: the file cannot be written, or is no lock: a link, a named pipe, or a file with other content.
    """
    lock = FileLock(
        path,
        mode=path.parent.stat().st_mode & 0o666 | 0o600,  # as open as its folder, which users may share
        blocking=False,
        thread_local=False,
        fallback_to_soft=False,
        on_acquired=_write_holder,
    )
    try:
        lock.acquire()
    except Timeout:
        raise LockHeld(_read_holder(path)) from None
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether some process holds a lock file.

    Asking writes nothing, but holds the file for an instant, in which a process that wants the lock is refused.
    """
    try:
        descriptor = open_to_read(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _write_holder(descriptor: int) -> None:
    """Replace the content of a lock file by this process's name.

    Raises:
        OSError: It is no lock file.
    """
    facts = os.fstat(descriptor)
    content = os.pread(descriptor, _NAME_LIMIT, 0) if stat.S_ISREG(facts.st_mode) else b""
    is_lock = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
    if not is_lock or (content and not content.startswith(_MARK)):
        raise OSError(errno.EINVAL, "the file there is no lock file")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, _this_process().encode(), 0)


def _read_holder(path: Path) -> str:
    """Return who holds a lock, as far as its file tells."""
    try:
        descriptor = open_to_read(path)
    except OSError:
        return "another process"
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(_NAME_LIMIT).decode(errors="replace")
    return " ".join(text.split()) or "another process"


def _this_process() -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {started}\n"
