"""JSON documents, JSON lines and arrays on disk, written so that a kill at any moment leaves nothing half-written.

A document is replaced at once (`opusim.files.write_file`). A line is appended and synced; `read_lines` drops a last
line that a kill cut short. A file is as private as its folder (`opusim.files`).

Results are dataclasses whose fields are the keys of their JSON object: `record_json` and `record_from_json` convert
them, with the schema version as the first key. A document that is read back has a seal, a digest of all else in it, so
that damage and edits by hand are noticed. Documents of versions before 0.3 have none; reading one warns.

A folder has one writer, and holds one kind of work: a run, a search, a sweep or an audit.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import PlainSerializer, PlainValidator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from opusim import checks
from opusim.accounting.guarantee import Guarantee, from_json, to_json
from opusim.accounting.journal import Position
from opusim.devices.access import LockHeld, held
from opusim.errors import ConfigError
from opusim.files import (
    append_whole_line,
    make_folder,
    make_private_folder,
    parse_json,
    read_bytes,
    require_regular,
    require_utf8,
    write_file,
)
from opusim.training.errors import FolderBusy, RunFolderError

LOCK_FILE = "lock"
Kind = Literal["run", "search", "sweep", "audit", "private loop"]
_MARKS: dict[Kind, tuple[str, ...]] = {
    "run": ("config.json", "checkpoints", "metrics.jsonl"),
    "search": ("tuning.json",),
    "sweep": ("sweep.json", "rows"),
    "private loop": ("private.json", "private.pt"),
    "audit": ("audit.json", "one-run.json", "final-model.json", "final-model-scores.json"),
}
"""Each kind of work leaves at least one of these in its folder; the first kind that matches is what a folder holds."""


def kind_of(folder: Path) -> Kind | None:
    """Return what a folder holds, or None if it holds nothing of opusim."""
    for kind, marks in _MARKS.items():
        if any((folder / name).exists() for name in marks):
            return kind
    return None


def require_kind(folder: Path, kind: Kind) -> None:
    """Refuse (RunFolderError) a folder that holds another kind of work."""
    found = kind_of(folder)
    if found is not None and found != kind:
        article = "an" if found == "audit" else "a"
        raise RunFolderError(f"{kind} folder {folder} holds {article} {found}; choose an empty folder")


@contextmanager
def only_writer(folder: Path, what: str, *, private: bool = False) -> Iterator[None]:
    """Hold a folder, called `what` in messages, as its only writer; it is made if it is missing.

    The file `lock` in it names the process that holds it; of a `private` one only the owner may read what is written.
    Raises FolderBusy if another process is writing there, and RunFolderError if it cannot be used.
    """
    try:
        require_utf8(folder, what)
    except ConfigError as error:
        raise RunFolderError(str(error)) from error
    lock = held(folder / LOCK_FILE)
    try:
        make_private_folder(folder) if private else make_folder(folder)
        lock.__enter__()
    except LockHeld as error:
        ours = error.holder.startswith(f"process {os.getpid()} ")
        remedy = "close what holds it in this process" if ours else "wait for it"
        raise FolderBusy(
            f"{what} {folder} is being written by {error.holder}; {remedy} or choose another folder"
        ) from error
    except OSError as error:
        raise RunFolderError(
            f"{what} {folder} cannot be used ({error.strerror}); choose another folder"
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


Record = TypeVar("Record")


def _guarantee(value: Any) -> Guarantee:
    try:
        return value if isinstance(value, Guarantee) else Guarantee.from_json(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a guarantee: {error!r}") from error


StoredGuarantee = Annotated[Guarantee, PlainValidator(_guarantee), PlainSerializer(Guarantee.to_json)]
"""A field of a record that holds a guarantee in its own JSON format."""

_ARRAY = "array"
_SEAL = "seal"
_LINES_LIMIT = 2**30
"""Largest file of JSON lines that is read, in bytes."""


def new_digest(content: bytes | memoryview = b"") -> hashlib.blake2b:
    """Return BLAKE2b of 16 bytes, which takes more content by `update`."""
    return hashlib.blake2b(content, digest_size=16)


def digest_of(content: bytes | memoryview) -> str:
    """BLAKE2b of a file's content, 16 bytes in hexadecimal."""
    return new_digest(content).hexdigest()


def json_digest(content: Mapping[str, Any]) -> str:
    """BLAKE2b of a JSON object, independent of the order of its keys."""
    return digest_of(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Replace a file with a JSON document (UTF-8, indented, keys in the order given); see `write_file`."""
    write_file(path, json_content(value), private=private)


def json_content(value: Any) -> bytes:
    """Return the bytes that `write_json` writes."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Read a JSON document; raise ValueError, which names the file, if it is none."""
    try:
        return parse_json(read_bytes(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); restore the file or start a new run folder") from error


def sealed(content: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Return a JSON object with its seal, the last key, whose digest also covers further facts."""
    return {**content, _SEAL: {**facts, "digest": json_digest({**content, **facts})}}


def unsealed(path: Path, content: Any, *, remedy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check the digest (RunFolderError, with the remedy), and return what `sealed` was given."""
    if isinstance(content, dict) and isinstance(content.get(_SEAL), dict):
        facts = {**content[_SEAL]}
        kept = {key: value for key, value in content.items() if key != _SEAL}
        digest = facts.pop("digest", None)
        if digest == json_digest({**kept, **facts}):
            return kept, facts
    raise RunFolderError(f"{path} was changed since it was written (its digest does not fit); {remedy}")


def require_unchanged(path: Path, content: Any, *, remedy: str, named: Path | None = None) -> None:
    """Check the seal of a document, or warn if it has none; see `unsealed` and `read_record`."""
    if _SEAL in content:
        unsealed(path, content, remedy=remedy)
    else:
        warn_unsealed(named or path)


def warn_unsealed(path: Path) -> None:
    """Warn of a file that is read without a digest."""
    warnings.warn(
        f"{path}: has no digest, like all files of versions before 0.3, so damage and edits by hand go unnoticed",
        stacklevel=4,
    )


def write_record(path: Path, record: Any, version: int, *, private: bool = False) -> None:
    """Replace a file with a dataclass as a sealed JSON document, which `read_record` reads; see `write_file`."""
    write_json(path, sealed(record_json(record, version)), private=private)


def record_json(record: Any, version: int) -> dict[str, Any]:
    """Return a dataclass as a JSON object with its schema version."""
    return {"schema_version": version, **to_json(record)}


def record_from_json(kind: type[Record], content: Any, version: int) -> Record:
    """Return the dataclass that `record_json` converted; raise ValueError, in a line, for anything else."""
    found = content.get("schema_version") if isinstance(content, Mapping) else None
    if found != version:
        raise ValueError(f"schema_version {checks.short(found)} is not {version}")
    return from_json(kind, content)


def read_record(
    path: Path, kind: type[Record], version: int, *, what: str, remedy: str, named: Path | None = None
) -> Record:
    """Read a dataclass from a JSON document that `write_record` wrote; warn if it has no seal.

    `what` and `remedy` are for the message of RunFolderError if it is something else or was changed; `named` is the
    path that a warning names, such as the folder of many files.
    """
    try:
        content = read_json(path)
        record = record_from_json(kind, content, version)
    except ValueError as error:
        raise RunFolderError(f"{path}: is not {what} ({error}); {remedy}") from error
    require_unchanged(path, content, remedy=remedy, named=named)
    return record


def write_array(path: Path, array: np.ndarray) -> None:
    """Replace a file with one array (safetensors: nothing in it executes), with a schema version."""
    write_file(path, save({_ARRAY: np.ascontiguousarray(array)}, metadata={"schema_version": "1"}))


def read_array(path: Path) -> np.ndarray:
    """Read what `write_array` wrote; raise ValueError, which names it, for a file that is cut or something else."""
    try:
        require_regular(path)  # safetensors would block on a named pipe
        with safe_open(path, framework="np") as file:
            if (file.metadata() or {}).get("schema_version") != "1":
                raise ValueError(f"{path}: schema_version is not 1; read it with the opusim that wrote it")
            return np.asarray(file.get_tensor(_ARRAY))
    except SafetensorError as error:
        raise ValueError(f"{path}: not readable ({error}); restore it or start a new run folder") from error


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON record as a line and sync it; see `opusim.files.append_whole_line`."""
    append_whole_line(path, (json.dumps(record, allow_nan=False) + "\n").encode())


def read_lines(path: Path, numbers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read a file of JSON lines. A missing file has no lines; a cut last line is dropped.

    ValueError names file and line if one is not a JSON object with a number for each of these keys.
    """
    if not path.exists():
        return []
    records = []
    lines = read_bytes(path, at_most=_LINES_LIMIT).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # whatever follows the last newline was cut
        try:
            record = parse_json(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: line {number} is not JSON ({error}); the file was edited, restore it"
            ) from error
        if not isinstance(record, dict) or any(type(record.get(key)) not in (int, float) for key in numbers):
            raise ValueError(
                f"{path}: line {number} is not a record with {', '.join(numbers)}; the file was edited, restore it"
            )
        records.append(record)
    return records


# The facts of a checkpoint, and a seal of the other files of its run, so that later changes are noticed. A checkpoint
# is one safetensors file; its facts are JSON in the header. The `Seal` among them covers everything else that a resumed
# run, an evaluation or a statement of guarantees reads:
#
# | file | what the seal holds | what may differ later |
# | --- | --- | --- |
# | config.json, components, baseline, labels | digest of the content, or null if there is no file | nothing |
# | metrics.jsonl | length and digest | more lines: the run was killed after it wrote an epoch's line |
# | ledger.jsonl | number of lines and digest of the last | more lines: steps paid for after the checkpoint |
# | the folder (release mode) | its inode number | nothing: a copy has another inode |
#
# Labels are drawn after the first checkpoint, which is then sealed again; a kill in between leaves labels that no seal
# covers. The digest of the facts covers the seal, the step, the running sums and the digest of the tensors. No digest
# is keyed: digests detect accidents and careless edits, not an adversary who recomputes them.

HEADER_KEY = "opusim"
CHECKPOINT_VERSION = 2
SIZE_LIMIT = 2**30
"""Largest file that a seal covers, in bytes."""
REMEDY = "delete it to resume from the checkpoint before it"


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Length and digest of the first part of a file."""

    bytes: int
    digest: str


class GrowingFile:
    """A file to which lines are added; a new digest reads only what was added since the last one.

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
        return json_digest(record_json(self, CHECKPOINT_VERSION))

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of the safetensors file."""
        facts = record_json(self, CHECKPOINT_VERSION)
        return {HEADER_KEY: json.dumps({**facts, "digest": json_digest(facts)}, allow_nan=False)}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the file of the checkpoint of a step; names sort by step."""
    return folder / f"step-{step:010d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def read_header(path: Path) -> Header:
    """Read the facts of a checkpoint and check their digest, not the tensors; raise RunFolderError as its reader."""
    try:
        require_regular(path)  # safetensors would block on a named pipe
        with safe_open(path, framework="np") as file:
            facts = parse_json((file.metadata() or {})[HEADER_KEY])
        version, digest = facts["schema_version"], facts.pop("digest")
        found = json_digest(facts)
        header = (
            record_from_json(Header, facts, CHECKPOINT_VERSION) if version == CHECKPOINT_VERSION else None
        )
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} is not a readable checkpoint ({error}); {REMEDY}") from error
    if header is None:
        raise RunFolderError(
            f"{path}: schema_version {checks.short(version)} is not {CHECKPOINT_VERSION}; read it with the opusim that "
            "wrote it"
        )
    if found != digest or path.name != checkpoint_path(path, header.step).name:
        raise RunFolderError(
            f"{path} is damaged (its header does not match its digest or its name); {REMEDY}"
        )
    return header
