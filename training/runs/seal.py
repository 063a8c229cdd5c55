"""The facts of a checkpoint, and a seal of the other files of its run, so that later changes are noticed.

A checkpoint is one safetensors file; its facts are JSON in the header. The `Seal` among them covers everything else
that a resumed run, an evaluation or a statement of guarantees reads:

| file | what the seal holds | what may differ later |
| --- | --- | --- |
| config.json, components, baseline, labels | digest of the content, or null if there is no file | nothing |
| metrics.jsonl | length and digest | more lines: the run was killed after it wrote an epoch's line |
| ledger.jsonl | number of lines and digest of the last | more lines: steps paid for after the checkpoint |
| the folder (release mode) | its inode number | nothing: a copy has another inode |

Labels are drawn after the first checkpoint, which is then sealed again; a kill in between leaves labels that no seal
covers. The digest of the facts covers the seal, the step, the running sums and the digest of the tensors. No digest is
keyed: digests detect accidents and careless edits, not an adversary who recomputes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opusim.accounting.journal import Position
from safetensors import SafetensorError, safe_open

from opusim import checks
from opusim.files import parse_json, read_bytes, require_regular
from opusim.training.errors import RunFolderError
from opusim.training.runs.storage import json_digest, new_digest, record_from_json, record_json

HEADER_KEY = "opusim"
SCHEMA_VERSION = 2
SIZE_LIMIT = 2**30
"""Largest file that a seal covers, in bytes."""
REMEDY = "delete it to resume from the checkpoint before it"


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The first part of a file.

    Attributes:
        bytes: Its length.
        digest: Its digest.
    """

    bytes: int
    digest: str


class GrowingFile:
    """A file to which lines are added; its digest costs what was added since the last one.

    Args:
        path: The file; a missing one is empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size, self._digest = 0, new_digest()

    def prefix(self) -> Prefix:
        """Return the length and the digest of the whole file."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._size:  # a resumed run cut it back
            self._size, self._digest = 0, new_digest()
        if size > self._size:
            added = read_bytes(self._path, at_most=SIZE_LIMIT, start=self._size)
            self._digest.update(added)
            self._size += len(added)
        return Prefix(bytes=self._size, digest=self._digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class Seal:
    """The other files of a run when a checkpoint was written.

    Attributes:
        files: Digest of each file that never changes, by its name, or None if there was no such file.
        metrics: Length and digest of the metrics.
        ledger: Length and last digest of the ledger.
        inode: Inode of the folder in release mode, else None.
    """

    files: Mapping[str, str | None]
    metrics: Prefix
    ledger: Position
    inode: int | None


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts of a checkpoint, without its tensors.

    Attributes:
        step: Steps done.
        progress: The engine's running sums and the usage of the device, as JSON.
        tensors: Digest of the tensors.
        seal: The other files of the run.
    """

    step: int
    progress: Mapping[str, Any]
    tensors: str
    seal: Seal

    @property
    def digest(self) -> str:
        """Digest of all facts, and so of the whole checkpoint."""
        return json_digest(record_json(self, SCHEMA_VERSION))

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of the safetensors file."""
        facts = record_json(self, SCHEMA_VERSION)
        return {HEADER_KEY: json.dumps({**facts, "digest": json_digest(facts)}, allow_nan=False)}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the file of the checkpoint of a step; names sort by step."""
    return folder / f"step-{step:010d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def read_header(path: Path) -> Header:
    """Read the facts of a checkpoint and check their digest, without reading the tensors.

    Raises:
        RunFolderError: The file is missing, cut, damaged or of another schema.
    """
    try:
        require_regular(path)  # safetensors would block on a named pipe
        with safe_open(path, framework="np") as file:
            facts = parse_json((file.metadata() or {})[HEADER_KEY])
        version, digest = facts["schema_version"], facts.pop("digest")
        found = json_digest(facts)
        header = record_from_json(Header, facts, SCHEMA_VERSION) if version == SCHEMA_VERSION else None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} is not a readable checkpoint ({error}); {REMEDY}") from error
    if header is None:
        raise RunFolderError(
            f"{path}: schema_version {checks.short(version)} is not {SCHEMA_VERSION}; read it with the opusim that "
            "wrote it"
        )
    if found != digest or path.name != checkpoint_path(path, header.step).name:
        raise RunFolderError(
            f"{path} is damaged (its header does not match its digest or its name); {REMEDY}"
        )
    return header
