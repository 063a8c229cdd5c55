"""Writing to disk so that a process killed at any instant leaves nothing half-written behind.

Every write of a run folder goes through this file: `write_file` replaces a whole file or leaves it as
it was; `append_line` adds one line, and `read_lines` drops a last line that a kill cut short. A file is as private as
its folder (`opusim.files`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from opusim.files import (
    make_folder,
    open_to_write,
    parse_json,
    read_bytes,
    require_regular,
    sync_folder,
    write_all,
)

if TYPE_CHECKING:
    from torch import Tensor

_ARRAY = "array"
_LINES_LIMIT = 2**30
"""Bytes of a file of JSON lines, at most."""


def digest_of(content: bytes) -> str:
    """BLAKE2b of a file's content, 16 bytes in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Replace a file's content at once: write beside it, sync, rename over it, sync the folder.

    A kill at any moment leaves either the old content or the new one under `path`.

    Raises:
        OSError: The disk is full or not writable; `path` keeps its old content.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        descriptor = open_to_write(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _named(error, path, "it keeps its old content") from error
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a JSON document (UTF-8, indented, keys in the order given)."""
    write_file(path, json_content(value))


def json_content(value: Any) -> bytes:
    """The content of the file that `write_json` writes."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Read a JSON document.

    Raises:
        ValueError: The file is not JSON; the message names it.
    """
    try:
        return parse_json(read_bytes(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); restore the file or start a new run folder") from error


def write_array(path: Path, array: np.ndarray) -> None:
    """Replace a file by one array (safetensors, nothing in it executes), with a schema version."""
    write_file(path, save({_ARRAY: np.ascontiguousarray(array)}, metadata={"schema_version": "1"}))


def read_array(path: Path) -> np.ndarray:
    """Read what `write_array` wrote.

    Raises:
        ValueError: The file is something else, cut, or of another schema; the message names it.
    """
    try:
        require_regular(path)  # safetensors would wait for a named pipe
        with safe_open(path, framework="np") as file:
            if (file.metadata() or {}).get("schema_version") != "1":
                raise ValueError(f"{path}: schema_version is not 1; read it with the opusim that wrote it")
            return np.asarray(file.get_tensor(_ARRAY))
    except SafetensorError as error:
        raise ValueError(f"{path}: not readable ({error}); restore it or start a new run folder") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a file by tensors of any torch type (safetensors), with a schema version."""
    from safetensors.torch import save as save_torch

    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_file(path, save_torch(kept, metadata={"schema_version": "1"}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of any safetensors file.

    Raises:
        ValueError: The file is missing or something else; the message names it.
    """
    from safetensors.torch import load_file

    try:
        require_regular(path)
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not readable as safetensors ({error}); give another file") from error


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON record as a line and sync it.

    A last line without its newline (cut by a kill) is removed first, so lines never run together.
    """
    line = (json.dumps(record, allow_nan=False) + "\n").encode()
    is_new = not path.exists()
    descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT)
    try:
        os.lseek(descriptor, _end_of_last_line(descriptor), os.SEEK_SET)
        os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR))
        write_all(descriptor, line)
        os.fsync(descriptor)
    except OSError as error:
        raise _named(error, path, "its earlier lines are kept") from error
    finally:
        os.close(descriptor)
    if is_new:
        sync_folder(path.parent)


def read_lines(path: Path, numbers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a missing file has none, a cut last line is left out.

    Args:
        path: The file.
        numbers: Keys of every line whose values are numbers.

    Raises:
        ValueError: A complete line is no JSON object with these numbers; the message names file and line.
    """
    if not path.exists():
        return []
    records = []
    lines = read_bytes(path, at_most=_LINES_LIMIT).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what stands behind the last newline was cut
        try:
            record = parse_json(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: line {number} is not JSON ({error}); the file was changed by hand"
            ) from error
        wrong = [
            key
            for key in numbers
            if not isinstance(record, dict) or type(record.get(key)) not in (int, float)
        ]
        if wrong or not isinstance(record, dict):
            raise ValueError(
                f"{path}: line {number} is no record with {', '.join(numbers)}; the file was changed by hand"
            )
        records.append(record)
    return records


def _named(error: OSError, path: Path, kept: str) -> OSError:
    """The same error, saying which file could not be written and what became of it."""
    room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "make room and go on" if room else "check the folder's permissions"
    return OSError(error.errno, f"{error.strerror}; {kept}, {remedy}", str(path))


def _end_of_last_line(descriptor: int) -> int:
    """Offset just behind the last newline, 0 in a file without one."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        block = os.pread(descriptor, end - start, start)
        newline = block.rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
