"""The file under a ledger: lines chained by hashes, synced one by one, and a head that says how many count.

A line is JSON with the digest of the line before and its own, so that a flipped byte or a reordered line is found at
its place. A file cut between two lines would still be a valid chain: the head (`ledger.head` beside
`ledger.jsonl`, replaced at once) names the number of lines and the last digest, and is written after a line is
synced and before the step it pays for. What a crash can leave is then told from what it cannot:

| found | a crash? | done |
| --- | --- | --- |
| text behind the head's last line that is no whole line | the line was being written: no step relied on it | dropped |
| one whole line more than the head says | the head was not written yet: no step relied on it | counted |
| fewer lines than the head says, a line cut or changed within them, two lines more | no | refused |

The head lies beside the file, so an old pair of both is a valid journal. `Witness` closes that: another file, such as a
checkpoint, keeps the `Position` that the journal had, and every later reader requires that prefix.

The hashes are not keyed: they find accidents and careless edits, not an adversary who computes them anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from accounting.errors import LedgerCorrupt
from opusim.files import open_to_write, parse_json, read_bytes, write_all, write_file

SCHEMA_VERSION = 1
_GENESIS = "0" * 64
_LIMIT = 2**30
"""Bytes of a journal, at most."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a journal went.

    Attributes:
        lines: Number of its lines, at least 0.
        digest: Of the last of them, which depends on all before it.
    """

    lines: int = 0
    digest: str = _GENESIS

    def to_json(self) -> dict[str, Any]:
        """As a mapping of JSON."""
        return {"lines": self.lines, "digest": self.digest}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """What `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: It is something else.
        """
        lines, digest = content["lines"], content["digest"]
        if type(lines) is not int or lines < 0 or not isinstance(digest, str):
            raise ValueError(f"lines = {lines!r}, digest = {digest!r}: is no position of a ledger")
        return cls(lines=lines, digest=digest)


@dataclass(frozen=True, kw_only=True)
class Witness:
    """What a file outside a journal knows of it.

    Attributes:
        name: What messages call that file.
        position: How far the journal went when that file was written: a prefix of what it must hold now.
        final: Whether nothing was appended afterwards.
    """

    name: str
    position: Position
    final: bool = False

    def check(self, path: Path, digests: Sequence[str]) -> None:
        """Require the prefix.

        Args:
            path: The journal's file.
            digests: Of its lines.

        Raises:
            LedgerCorrupt: The journal is shorter, is another, or is longer although it was final.
        """
        lines = self.position.lines
        if len(digests) < lines:
            raise LedgerCorrupt(
                f"{path}: line {len(digests) + 1}: is missing: {self.name} was written when the ledger had {lines} "
                "lines, so this is an older ledger; restore the newest one from a copy"
            )
        if lines and digests[lines - 1] != self.position.digest:
            raise LedgerCorrupt(
                f"{path}: line {lines}: is not the line that {self.name} names: the lines were rewritten, or are "
                "those of another run; restore the ledger from a copy"
            )
        if self.final and len(digests) > lines:
            raise LedgerCorrupt(
                f"{path}: line {lines + 1}: was added after {self.name} was written, which ends the run; restore the "
                "ledger from a copy"
            )


class Journal:
    """Appends entries; opening one repairs what a crash left, and refuses anything else.

    Args:
        path: The file; its folder exists. It is created with the first entry.
        witnesses: What other files know of it.

    Raises:
        LedgerCorrupt: The file was changed, cut or reordered, or contradicts a witness.
    """

    def __init__(self, path: str | Path, *, witnesses: Sequence[Witness] = ()) -> None:
        self.path = Path(path)
        self.entries, digests, length = _read(self.path, witnesses)
        self._digest = digests[-1] if digests else _GENESIS
        self._descriptor = open_to_write(self.path, os.O_RDWR | os.O_CREAT)
        if os.fstat(self._descriptor).st_size != length:
            os.ftruncate(self._descriptor, length)
        os.lseek(self._descriptor, length, os.SEEK_SET)
        if self.entries:
            os.fsync(self._descriptor)
            _write_head(self.path, len(self.entries), self._digest)

    @property
    def position(self) -> Position:
        """How far the journal goes."""
        return Position(lines=len(self.entries), digest=self._digest)

    def append(self, entry: dict[str, Any]) -> None:
        """Write, sync, then move the head; when this returns, the entry survives a power cut."""
        line, digest = _line(len(self.entries) + 1, self._digest, entry)
        write_all(self._descriptor, line)
        os.fsync(self._descriptor)
        _write_head(self.path, len(self.entries) + 1, digest)
        self.entries.append(entry)
        self._digest = digest

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)


def read_journal(path: str | Path, *, witnesses: Sequence[Witness] = ()) -> list[dict[str, Any]]:
    """The entries of a journal, nothing repaired.

    Args:
        path: The file.
        witnesses: What other files know of it.

    Raises:
        FileNotFoundError: There is none.
        LedgerCorrupt: It was changed, cut or reordered, or contradicts a witness; the message names file and line.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: there is no ledger; give a run folder that has one")
    return _read(Path(path), witnesses)[0]


def read_position(path: str | Path) -> Position:
    """How far a journal goes, nothing repaired.

    Raises:
        LedgerCorrupt: It was changed, cut or reordered.
    """
    _, digests, _ = _read(Path(path), ())
    return Position(lines=len(digests), digest=digests[-1]) if digests else Position()


def head_file(path: Path) -> Path:
    """Where the head of a journal stands."""
    return path.with_suffix(".head")


def _read(path: Path, witnesses: Sequence[Witness]) -> tuple[list[dict[str, Any]], list[str], int]:
    """Entries, their digests, and the length in bytes of what counts."""
    promised, promised_digest = _read_head(path)
    content = read_bytes(path, at_most=_LIMIT) if path.exists() else b""
    *lines, rest = content.split(b"\n")
    entries: list[dict[str, Any]] = []
    digests: list[str] = []
    digest, length = _GENESIS, 0
    for number, line in enumerate(lines, start=1):
        if number > promised + 1:
            raise LedgerCorrupt(
                f"{path}: line {number}: stands behind the {promised} lines that the head counts"
            )
        entry = _verified(path, number, line, digest, must_count=number <= promised)
        if entry is None:
            if len(lines) > number:
                raise LedgerCorrupt(f"{path}: line {number}: is damaged, and lines follow it")
            break
        entries.append(entry)
        digest, length = json.loads(line)["digest"], length + len(line) + 1
        digests.append(digest)
        if number == promised and digest != promised_digest:
            raise LedgerCorrupt(
                f"{path}: line {number}: is not the line that {head_file(path).name} ends with"
            )
    if len(entries) < promised:
        where = "is cut short" if rest else "is missing"
        raise LedgerCorrupt(
            f"{path}: line {len(entries) + 1}: {where}, but {head_file(path).name} counts {promised} lines"
        )
    for witness in witnesses:
        witness.check(path, digests)
    return entries, digests, length


def _verified(
    path: Path, number: int, line: bytes, previous: str, *, must_count: bool
) -> dict[str, Any] | None:
    """The entry of a line; None where it is damaged and need not count.

    Raises:
        LedgerCorrupt: It must count and is not what was written.
    """
    problem = "its digest does not fit: it was changed"
    try:
        content = parse_json(line)
        entry = content["entry"]
        if content["schema_version"] != SCHEMA_VERSION:
            problem = f"schema_version {content['schema_version']!r} is not {SCHEMA_VERSION}"
        elif content["line"] != number or content["previous"] != previous:
            problem = (
                f"says it is line {content['line']} or follows another line: lines were moved or removed"
            )
        elif _line(number, previous, entry)[0] == line + b"\n":
            return dict(entry)
    except (ValueError, KeyError, TypeError):
        problem = "is not a line of a ledger: it was changed"
    if must_count:
        raise LedgerCorrupt(f"{path}: line {number}: {problem}; restore the file from a copy")
    return None


def _line(number: int, previous: str, entry: dict[str, Any]) -> tuple[bytes, str]:
    content = {"schema_version": SCHEMA_VERSION, "line": number, "previous": previous, "entry": entry}
    digest = hashlib.sha256(_dump(content)).hexdigest()
    return _dump({**content, "digest": digest}) + b"\n", digest


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _read_head(path: Path) -> tuple[int, str]:
    head = head_file(path)
    if not head.exists():
        return 0, _GENESIS
    try:
        content = parse_json(read_bytes(head))
        lines, digest, version = content["lines"], content["digest"], content["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerCorrupt(f"{head}: line 1: was changed; restore the file from a copy") from error
    if version != SCHEMA_VERSION or type(lines) is not int or lines < 1 or not isinstance(digest, str):
        raise LedgerCorrupt(f"{head}: line 1: was changed, or is of another schema than {SCHEMA_VERSION}")
    return lines, digest


def _write_head(path: Path, lines: int, digest: str) -> None:
    """Replace the head at once and sync the folder, which also holds the journal's own name."""
    head = {"schema_version": SCHEMA_VERSION, "lines": lines, "digest": digest}
    write_file(head_file(path), _dump(head) + b"\n")
