"""A folder has one writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opusim.files import make_folder, make_private_folder
from opusim.locks import LockHeld, held
from training.errors import FolderBusy, RunFolderError

LOCK_FILE = "lock"


@contextmanager
def only_writer(folder: Path, what: str, *, private: bool = False) -> Iterator[None]:
    """Hold a folder, which is made if need be, as its only writer.

    Args:
        folder: The folder; the file `lock` in it names the holder.
        what: What errors call it, such as "run folder".
        private: Whether only the owner may read what is written there.

    Raises:
        FolderBusy: Another process writes here.
        RunFolderError: The folder cannot be used.
    """
    lock = held(folder / LOCK_FILE)
    try:
        make_private_folder(folder) if private else make_folder(folder)
        lock.__enter__()
    except LockHeld as error:
        raise FolderBusy(
            f"{what} {folder} is being written by {error.holder}; wait for it or choose another folder"
        ) from error
    except OSError as error:
        raise RunFolderError(
            f"{what} {folder} cannot be used ({error.strerror}); choose another folder"
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
