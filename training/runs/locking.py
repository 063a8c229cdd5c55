"""A folder has one writer: a lock that the kernel gives back when its holder dies, and that says who holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import FolderBusy, RunFolderError

LOCK_FILE = "lock"


@contextmanager
def only_writer(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder, which is made if need be, as its only writer.

    Args:
        folder: The folder; the file `lock` in it names the holder.
        what: What errors call it, such as "run folder".

    Raises:
        FolderBusy: Another process writes here.
        RunFolderError: The folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFolderError(
            f"{what} {folder} cannot be used ({error.strerror}); choose another folder"
        ) from error
    try:
        _lock(descriptor, folder, what)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, what: str) -> None:
    """Take the lock and write who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another process"
        raise FolderBusy(
            f"{what} {folder} is being written by {holder}; wait for it or choose another folder"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, _holder().encode(), 0)


def _holder() -> str:
    """Name this process, for the message that another one gets."""
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {started}\n"
