"""An append-only file of JSON entries, chained by digests and synced one by one, with a head that counts them.

A line holds the digest of the line before and its own, so that a flipped byte or a reordered line is found at its
place. A file truncated between two lines would still be a valid chain: the head (`ledger.head` next to `ledger.jsonl`,
replaced atomically) names the number of lines and the last digest, and is written after a line is synced and before
`append` returns. The head thus tells the traces of a crash from other damage:

| found | a crash? | done |
| --- | --- | --- |
| an incomplete line after the head's last line | the line was being written: nothing relied on it | dropped |
| one complete line more than the head says | the head was not written yet: nothing relied on it | counted |
| fewer lines than the head says, a changed line among them, two lines more | no | refused |

After a system error, such as a full disk, a `Journal` appends nothing more: the failed write left one of the first two
rows, and only reopening tells which. A forked process cannot append either.

An old pair of file and head is still a valid journal. `Witness` closes that gap: another file, such as a checkpoint,
keeps the `Position` that the journal had, and every later reader requires that prefix.

The digests have no key: they find accidents and careless edits, not an attacker who recomputes them.

A ledger is one such journal; any other append-only log may be one too, read with `read_positioned`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from opusim import checks
from opusim.accounting.guarantee import LedgerCorrupt
from opusim.files import AppendedFile, open_to_write, parse_json, read_bytes, sync_folder, write_all

SCHEMA_VERSION = 1
_GENESIS = "0" * 64
_LIMIT = 2**30
"""Bytes of a journal, at most."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """How many lines a journal has, and the digest of the last one, which depends on all lines before it."""

    lines: int = 0
    digest: str = _GENESIS

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"lines": self.lines, "digest": self.digest}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Read back what `to_json` returned; raise ValueError, KeyError or TypeError for anything else."""
        lines, digest = content["lines"], content["digest"]
        if type(lines) is not int or lines < 0 or not isinstance(digest, str):
            raise ValueError(f"lines = {lines!r}, digest = {digest!r}: is no position of a ledger")
        return cls(lines=lines, digest=digest)


@dataclass(frozen=True, kw_only=True)
class Witness:
    """What another file says of a journal: a prefix that it must still have, all of it if `final`."""

    name: str
    position: Position
    final: bool = False

    def check(self, path: Path, digests: Sequence[str]) -> None:
        """Require (LedgerCorrupt) the prefix in a journal of these digests of lines, all of it if it was final."""
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
    """Appends entries; opening a journal repairs what a crash left and refuses any other damage.

    Args:
        path: The file, in an existing folder; it is created with the first entry.
        witnesses: Witnesses that the journal must fit.

    Raises:
        LedgerCorrupt: The file was changed, truncated or reordered, or contradicts a witness.
    """

    def __init__(self, path: str | Path, *, witnesses: Sequence[Witness] = ()) -> None:
        self.path = Path(path)
        self._lines = _read(self.path, witnesses)
        self._file = AppendedFile(self.path, end=self._lines[-1].end)
        if len(self._lines) > 1:
            try:
                self._file.sync()
                _write_head(self.path, self.position)
            except OSError:
                self.close()
                raise

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The entries so far."""
        return [line.entry for line in self._lines[1:]]

    @property
    def last(self) -> dict[str, Any]:
        """The last entry; empty if there is none."""
        return self._lines[-1].entry

    @property
    def position(self) -> Position:
        """How far the journal reaches."""
        return self._lines[-1].position

    def append(self, entry: dict[str, Any]) -> None:
        """Write, sync, then move the head; when this returns, the entry survives a power cut.

        Raises OSError if that failed now or before, and nothing more can be appended, and RuntimeError in a forked
        process.
        """
        _, before, end = self._lines[-1]
        line, position = _line(before, entry)
        self._file.append(line, end=end)
        with self._file.refusing_after_errors():
            _write_head(self.path, position)
        # one call, which Ctrl-C cannot interrupt halfway
        self._lines.append(_Line(entry, position, end + len(line)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_positioned(
    path: str | Path, *, witnesses: Sequence[Witness] = ()
) -> tuple[list[dict[str, Any]], Position]:
    """Return the entries of a journal and how far it reaches, from one reading, without repairing anything.

    Raises FileNotFoundError without one, and LedgerCorrupt, which names file and line, if it was changed, truncated or
    reordered, or contradicts a witness.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: there is no ledger; give a run folder that has one")
    lines = _read(Path(path), witnesses)
    return [line.entry for line in lines[1:]], lines[-1].position


class _Line(NamedTuple):
    """A line as it was read or written: its entry, the journal's position after it, and the offset of its end."""

    entry: dict[str, Any]
    position: Position
    end: int


def head_file(path: Path) -> Path:
    """Return the path of a journal's head."""
    return path.with_suffix(".head")


def _read(path: Path, witnesses: Sequence[Witness]) -> list[_Line]:
    """Return the valid lines, after an empty one that stands for the start of the file."""
    head = _read_head(path)
    promised = head.lines
    content = read_bytes(path, at_most=_LIMIT) if path.exists() else b""
    *lines, rest = content.split(b"\n")
    found = [_Line({}, Position(), 0)]
    for number, line in enumerate(lines, start=1):
        if number > promised + 1:
            raise LedgerCorrupt(f"{path}: line {number}: follows the {promised} lines that the head counts")
        _, before, end = found[-1]
        entry = _verified(path, before, line, must_count=number <= promised)
        if entry is None:
            if len(lines) > number:
                raise LedgerCorrupt(f"{path}: line {number}: is damaged, and lines follow it")
            break
        position = Position(lines=number, digest=json.loads(line)["digest"])
        found.append(_Line(entry, position, end + len(line) + 1))
        if number == promised and position != head:
            raise LedgerCorrupt(
                f"{path}: line {number}: is not the line that {head_file(path).name} ends with"
            )
    if len(found) <= promised:
        where = "is cut short" if rest else "is missing"
        raise LedgerCorrupt(
            f"{path}: line {len(found)}: {where}, but {head_file(path).name} counts {promised} lines"
        )
    for witness in witnesses:
        witness.check(path, [line.position.digest for line in found[1:]])
    return found


def _verified(path: Path, before: Position, line: bytes, *, must_count: bool) -> dict[str, Any] | None:
    """Return a line's entry, None if it is damaged and may be dropped; raise LedgerCorrupt if it must count."""
    number, problem = before.lines + 1, "its digest does not fit: it was changed"
    try:
        content = parse_json(line)
        entry = content["entry"]
        if content["schema_version"] != SCHEMA_VERSION:
            problem = f"schema_version {checks.short(content['schema_version'])} is not {SCHEMA_VERSION}"
        elif content["line"] != number or content["previous"] != before.digest:
            said = checks.short(content["line"])
            problem = f"says it is line {said} or follows another line: lines were moved or removed"
        elif _line(before, entry)[0] == line + b"\n":
            return dict(entry)
    except (ValueError, KeyError, TypeError):
        problem = "is not a line of a ledger: it was changed"
    if must_count:
        raise LedgerCorrupt(f"{path}: line {number}: {problem}; restore the file from a copy")
    return None


def _line(before: Position, entry: dict[str, Any]) -> tuple[bytes, Position]:
    """Return the line of an entry, and the journal's position after it."""
    number = before.lines + 1
    content = {"schema_version": SCHEMA_VERSION, "line": number, "previous": before.digest, "entry": entry}
    digest = hashlib.sha256(_dump(content)).hexdigest()
    return _dump({**content, "digest": digest}) + b"\n", Position(lines=number, digest=digest)


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _read_head(path: Path) -> Position:
    head = head_file(path)
    if not head.exists():
        return Position()
    try:
        content = parse_json(read_bytes(head))
        found, version = Position.from_json(content), content["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerCorrupt(f"{head}: line 1: was changed; restore the file from a copy") from error
    if version != SCHEMA_VERSION or not found.lines:
        raise LedgerCorrupt(f"{head}: line 1: was changed, or is of another schema than {SCHEMA_VERSION}")
    return found


def _write_head(path: Path, position: Position) -> None:
    """Replace the head atomically and sync the folder, which also holds the journal's own name."""
    head = head_file(path)
    temporary = head.with_suffix(".head.partial")
    descriptor = open_to_write(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(descriptor, _dump({"schema_version": SCHEMA_VERSION, **position.to_json()}) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, head)
    sync_folder(path.parent)
