"""A folder holds one kind of work: a run, a search, a sweep or an audit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from training.errors import RunFolderError

Kind = Literal["run", "search", "sweep", "audit"]
_MARKS: dict[Kind, tuple[str, ...]] = {
    "run": ("config.json", "checkpoints", "metrics.jsonl"),
    "search": ("tuning.json",),
    "sweep": ("sweep.json", "rows"),
    "audit": ("audit.json",),
}
"""Files and folders of which each kind of work has at least one; the first kind that fits is what a folder holds."""


def kind_of(folder: Path) -> Kind | None:
    """What a folder holds; None if nothing of this project."""
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


_WITH_ARTICLE: dict[Kind, str] = {
    "run": "a run",
    "search": "a search",
    "sweep": "a sweep",
    "audit": "an audit",
}
