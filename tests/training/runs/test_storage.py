import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from opusim.training.errors import RunFolderError
from opusim.training.runs import storage


def test_a_file_is_replaced_whole_or_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        storage.write_file(path, content)
        assert path.read_bytes() == content
    monkeypatch.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left.*keeps its old content.*file"):
        storage.write_file(path, b"new content")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    records = [{"step": number, "text": "x" * (3000 * number)} for number in range(5)]
    for record in records:
        storage.append_line(path, record)
    assert storage.read_lines(path) == records


@pytest.mark.parametrize("tail", [b'{"bcdefgh": 2}', b'{"bcdefgh"', b"{", b"x" * 10_000], ids=len)
def test_a_cut_last_line_is_dropped_and_overwritten(tmp_path: Path, tail: bytes) -> None:
    """Also one that is longer than a block."""
    path = tmp_path / "lines"
    storage.append_line(path, {"a": 1})
    path.write_bytes(path.read_bytes() + tail)
    assert storage.read_lines(path) == [{"a": 1}]
    storage.append_line(path, {"c": 3})
    assert storage.read_lines(path) == [{"a": 1}, {"c": 3}]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_lines_after_a_failed_one_are_read(tmp_path: Path, call: str, monkeypatch: Any) -> None:
    path = tmp_path / "lines"
    storage.append_line(path, {"a": 1})
    real_write, calls = os.write, []

    def fail(descriptor: int, *content: memoryview) -> int:
        calls.append(content)
        if content and len(calls) == 1:
            return real_write(descriptor, bytes(content[0])[:3])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="lines"):
            storage.append_line(path, {"b": 2})
    assert path.read_bytes() == b'{"a": 1}\n'
    storage.append_line(path, {"c": 3})
    assert storage.read_lines(path) == [{"a": 1}, {"c": 3}]


@pytest.mark.parametrize(("use", "message"), [
    (storage.read_lines, "line 2 is not JSON"),
    (storage.read_json, "file: not JSON"),
    (lambda path: storage.append_line(path, {"loss": float("nan")}), "Out of range float values"),
])  # fmt: skip
def test_what_is_no_json_is_refused(tmp_path: Path, use: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "file"
    path.write_text('{"a": 1}\nnonsense\n{"b": 2}\n')
    with pytest.raises(ValueError, match=message):
        use(path)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A record as a search or a sweep keeps it."""

    score: float
    settings: tuple[str, ...]
    facts: dict[str, int]


KEPT = Kept(score=0.1 + 0.2, settings=("optimizer.lr=0.1", "é"), facts={"a": 2**63 - 1})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A record that is kept under a seal."""
    storage.write_record(tmp_path / "record.json", KEPT, 7)
    return tmp_path / "record.json"


def read(path: Path) -> Kept:
    return storage.read_record(path, Kept, 7, what="a record", remedy="write it again")


def test_a_sealed_record_comes_back(path: Path) -> None:
    assert read(path) == KEPT
    content = json.loads(path.read_text())
    assert list(content) == ["schema_version", "score", "settings", "facts", "seal"]
    path.write_text(json.dumps(dict(reversed(content.items()))))  # the order of keys tells nothing
    assert read(path) == KEPT
    storage.write_json(path, storage.record_json(KEPT, 7))
    with pytest.warns(UserWarning, match=r"record\.json: has no digest, like all files of versions before"):
        assert read(path) == KEPT


def test_an_edited_record_is_refused(path: Path) -> None:
    sound = path.read_text()
    edits = {"0.30000000000000004": "0.3", "lr=0.1": "lr=0.2", '"a"': '"b"', "775807": "775806"}
    for old, new in edits.items():
        assert old in sound
        path.write_text(sound.replace(old, new))
        with pytest.raises(RunFolderError, match=r"record\.json was changed since it was written"):
            read(path)


@pytest.mark.filterwarnings("error")
def test_no_flipped_bit_changes_a_record(path: Path) -> None:
    """The name of the seal is the one place after whose change the record is read, with a warning."""
    sound = path.read_bytes()
    warned, noticed = set(), 0
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << place % 8]) + sound[place + 1 :])
        try:
            assert read(path) == KEPT
        except RunFolderError:
            noticed += 1
        except UserWarning:
            warned.add(place)
    assert noticed > len(sound) / 2
    assert len(warned) <= len("seal")
    assert b"seal" in sound[min(warned) : max(warned) + 1]
