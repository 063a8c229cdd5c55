"""One writer per folder, and one kind of work: a run, a search, a sweep or an audit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from opusim.files import make_folder, make_private_folder
from opusim.locks import LockHeld, held
from training.errors import FolderBusy, RunFolderError

LOCK_FILE = "lock"
Kind = Literal["run", "search", "sweep", "audit"]
_WITH_ARTICLE: dict[Kind, str] = {
    "run": "a run",
    "search": "a search",
    "sweep": "a sweep",
    "audit": "an audit",
}
_MARKS: dict[Kind, tuple[str, ...]] = {
    "run": ("config.json", "checkpoints", "metrics.jsonl"),
    "search": ("tuning.json",),
    "sweep": ("sweep.json", "rows"),
    "audit": ("audit.json",),
}
"""Each kind of work leaves at least one of these in its folder; the first kind that matches is what a folder holds."""


def kind_of(folder: Path) -> Kind | None:
    """Return what a folder holds, or None if it holds nothing of opusim."""
    for kind, marks in _MARKS.items():
        if any((folder / name).exists() for name in marks):
            return kind
    return None


def require_kind(folder: Path, kind: Kind) -> None:
    """Refuse a folder that holds another kind of work.

    Raises:
        RunFolderError: It does.
    """
    found = kind_of(folder)
    if found is not None and found != kind:
        raise RunFolderError(f"{kind} folder {folder} holds {_WITH_ARTICLE[found]}; choose an empty folder")


@contextmanager
def only_writer(folder: Path, what: str, *, private: bool = False) -> Iterator[None]:
    """Hold a folder as its only writer; the folder is made if it is missing.

    Args:
        folder: The folder; the file `lock` in it names the process that holds it.
        what: What error messages call the folder, such as "run folder".
        private: Whether only the owner may read what is written there.

    Raises:
        FolderBusy: Another process is writing there.
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
