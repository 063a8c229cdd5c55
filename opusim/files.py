"""Files of users and of runs: read within a limit, and written no wider than their folder allows.

Reading never blocks on a named pipe and never takes more memory than a stated limit. Writing follows one rule: **a
file is as private as its folder.** In a folder that only its owner may enter (mode 0700), files are created with mode
0600 and folders with mode 0700, from the first byte on; elsewhere the umask decides. `make_private_folder` makes such a
folder. A file that is private itself, such as an audit with figures of private records, has mode 0600 in any folder,
and a folder that is made for it has mode 0700 (`write_file(private=True)`). Only one process writes a file that grows
line by line (`OwnProcess`, `AppendedFile`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from opusim.errors import ConfigError

TEXT_LIMIT = 16 * 2**20
"""Bytes of a configuration, description, certificate or JSON file, at most."""
DEPTH_LIMIT = 64
"""Tables and lists within each other in such a file, at most."""
KEY_LIMIT = 50_000
"""Parts of keys, such as the two of trainer.kind, in a TOML file, at most: its parser takes some 1.5 kB for each."""
CONTAINER_LIMIT = 2**20
"""Tables and lists in a JSON file, at most."""
INTEGER_LIMIT = 2**64
"""The magnitude of a whole number in such a file is below this."""
FIGURES = (".png", ".pdf", ".svg")
"""Endings of a figure's file name."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_private(folder: Path) -> bool:
    """Return whether only its owner may enter a folder."""
    return not folder.stat().st_mode & _OTHERS


def make_folder(path: Path, *, exclusive: bool = False) -> bool:
    """Make a folder and its missing parents, private inside a private folder; return whether this call made it.

    The folder that holds each new one is synced, so that a power cut keeps them. FileExistsError if the folder is there
    and must be new (`exclusive`), or a file is in its place.
    """
    if path.is_dir() and not exclusive:
        return False
    if not path.parent.is_dir():
        make_folder(path.parent)
    try:
        path.mkdir(mode=0o700 if is_private(path.parent) else 0o777)
    except FileExistsError:
        if exclusive or not path.is_dir():
            raise
        return False
    sync_folder(path.parent)
    return True


@contextmanager
def output_folder(path: Path) -> Iterator[None]:
    """Make a folder before long work, and remove what was made if the work fails and the folder is empty."""
    require_writable_folder(path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_folder(path)
    except OSError as error:
        raise ConfigError(
            "--out", str(path), f"cannot be made ({error.strerror}); choose another folder"
        ) from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it holds something
            for folder in made:
                folder.rmdir()
        raise


def require_writable_folder(path: Path) -> None:
    """Refuse (ConfigError), before long work, a folder that could not be made or written to; creates nothing."""
    require_utf8(path, "--out")
    problem = folder_problem(path)
    if problem is not None:
        raise ConfigError("--out", str(path), f"cannot be written ({problem}); choose another folder")


def folder_problem(path: Path) -> str | None:
    """Return why a folder, which need not exist, could not be written to; None if it could."""
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not there.is_dir():
        return f"{there.name} is no folder"
    try:  # it may be read-only, or the disk full
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            file.write(b" ")
    except OSError as error:
        return error.strerror or str(error)
    return None


def require_utf8(path: Path, option: str) -> None:
    """Refuse (ConfigError) a path that is not UTF-8, which the files of a run and several libraries cannot name."""
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise ConfigError(option, shown, "is not UTF-8; choose another name, or rename it") from error


def require_writable(path: Path, option: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse (ConfigError), before long work, a file that cannot be written or whose name ends in no suffix."""
    require_utf8(path, option)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(option, str(path), f"must end in {' or '.join(suffixes)}")
    if path.is_dir() or not path.parent.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(option, str(path), "cannot be written; name a file in a folder that exists")
    problem = folder_problem(path.parent)
    if problem is not None:
        reason = f"cannot be written ({problem}); name a file in another folder"
        raise ConfigError(option, str(path), reason)


def quoted(path: str | Path) -> str:
    """Return a path as a word of a command that a user copies into a shell."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter; close an existing one to others (OSError: another user's)."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        sync_folder(path.parent)
    if not is_private(path):
        path.chmod(0o700)


def write_file(path: Path, content: bytes | memoryview, *, private: bool = False) -> None:
    """Replace a file's content at once: write a temporary file, sync it, rename it, sync the folder.

    A kill or an error (OSError: full disk, ...) at any moment leaves either the old content or the new one. A `private`
    file may be read by its owner only, in whatever folder; a folder that this call makes is private, too.
    """
    if private and not path.parent.is_dir():
        make_private_folder(path.parent)
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        descriptor = open_to_write(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, private=private)
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_error(error, path, "it keeps its old content") from error
    sync_folder(path.parent)


def write_error(error: OSError, path: Path, kept: str) -> OSError:
    """Return the error with the file's name, the part of the file that is kept, and a remedy."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space and resume" if is_full else "check the folder's permissions"
    return OSError(error.errno, f"{error.strerror}; {kept}, {remedy}", str(path))


def sync_folder(path: Path) -> None:
    """Write the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_to_write(path: Path, flags: int, *, private: bool = False) -> int:
    """Return the descriptor of a regular file, no link, opened with `flags` and the mode that its folder calls for."""
    private = private or is_private(path.parent)
    mode = 0o600 if private else 0o644
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        _require_regular(descriptor, path)
        if private and os.fstat(descriptor).st_mode & _OTHERS:
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write everything, in as many calls as the system takes."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


class OwnProcess:
    """The process that made an object; a process forked from it must not pay or draw a second time.

    An unpickled copy belongs to the process that unpickled it.
    """

    __slots__ = ("_maker",)

    def __init__(self) -> None:
        self._maker = (os.getpid(), _forks[0])

    @property
    def is_this(self) -> bool:
        """Whether the running process is the one that made the object."""
        return self._maker == (os.getpid(), _forks[0])

    def require(self, what: object) -> None:
        """Refuse (RuntimeError) the work of a forked process; `what`'s text begins the message: "the private loop"."""
        if self._maker != (os.getpid(), _forks[0]):
            raise RuntimeError(
                f"{what} belongs to process {self._maker[0]}, and process {os.getpid()} was forked from it; both would "
                f"use what was paid once. Continue in process {self._maker[0]} only, or fork before it is made"
            )

    def __reduce__(self) -> tuple[type[OwnProcess], tuple[()]]:
        """Pickle as the process that unpickles it."""
        return type(self), ()


_forks = [0]
"""Number of forks that led to this process; its process number does not do, since the system uses numbers again."""


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_count_fork)


class AppendedFile:
    """A regular file, made if it is missing, that one process appends to; after a failed write it refuses every other.

    Only reopening the file shows what a failed write left on the disk. Content after the stated end (None: the file's),
    left by a kill or Ctrl-C, is removed before the next write. A symbolic link is refused.
    """

    def __init__(self, path: Path, *, end: int | None = None) -> None:
        self.path = path
        self._process, self._failed = OwnProcess(), ""
        self._descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT)
        if end is not None:
            try:
                self._cut(end)
            except OSError:
                self.close()
                raise

    def append(self, content: bytes, *, end: int, sync: bool = True) -> None:
        """Write after the first `end` bytes, which are kept whatever fails; synced content survives a power cut."""
        with self.refusing_after_errors():
            try:
                self._cut(end)
                write_all(self._descriptor, content)
                if sync:
                    os.fsync(self._descriptor)
            except OSError:
                with suppress(OSError):  # a later opening does the same
                    os.ftruncate(self._descriptor, end)
                raise

    def sync(self) -> None:
        """Write everything to disk; raises what `append` does."""
        with self.refusing_after_errors():
            os.fsync(self._descriptor)

    @contextmanager
    def refusing_after_errors(self) -> Iterator[None]:
        """Refuse the block (OSError) if an earlier write failed, and every later block if this one raises OSError."""
        self._process.require(self.path)
        if self._failed:
            reason = f"takes nothing more in this process, since a write failed ({self._failed}); resume in a new one"
            raise OSError(errno.EIO, reason, str(self.path))
        try:
            yield
        except OSError as error:
            self._failed = error.strerror or str(error)
            raise write_error(error, self.path, "its earlier content is kept") from error

    def end_of_last_line(self) -> int:
        """Return the offset just after the last newline, 0 in a file without one."""
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        while end:
            start = max(0, end - 4096)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def hold(self) -> None:
        """Wait until no other process holds the file, and hold it until it is closed."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _cut(self, end: int) -> None:
        if os.fstat(self._descriptor).st_size != end:
            os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)


def append_whole_line(path: Path, line: bytes) -> None:
    """Append a line, or nothing if it is empty, and sync it; several processes may do so.

    A last line without its newline, which a kill or a full disk cut, is removed first, so lines never run together.
    """
    is_new = not path.exists()
    file = AppendedFile(path)
    try:
        file.hold()
        file.append(line, end=file.end_of_last_line())
    finally:
        file.close()
    if is_new:
        sync_folder(path.parent)


def read_bytes(path: str | Path, *, at_most: int = TEXT_LIMIT, start: int = 0) -> bytes:
    """Return a regular file's bytes from `start` to its end; OSError if there are more, or it is a named pipe."""
    descriptor = open_to_read(path)
    with os.fdopen(descriptor, "rb") as file:
        file.seek(start)
        size = min(max(os.fstat(descriptor).st_size - start, 0), at_most)
        content = file.read(size + 1)  # Python reserves the memory asked for before it reads
        if len(content) > size:  # the file grew, or does not tell its size
            content += file.read(at_most + 1 - len(content))
    if len(content) > at_most:
        raise OSError(errno.EFBIG, f"longer than {at_most:,} bytes", str(path))
    return content


def read_head(path: str | Path, size: int) -> bytes:
    """Return the first bytes of a regular file; all of a shorter one."""
    with os.fdopen(open_to_read(path), "rb") as file:
        return file.read(size)


def most_unpacked(length: int) -> int:
    """Return how many bytes an .npz file of `length` bytes may take in memory; measured data compress by 2 to 20."""
    return max(2**30, 100 * length)


def open_to_read(path: str | Path) -> int:
    """Return a descriptor of a regular file; opening a named pipe does not block, but fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a path with a NUL character, such as a file may name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        _require_regular(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(path: str | Path) -> None:
    """Refuse (OSError) a path that a library should not open, such as a named pipe."""
    os.close(open_to_read(path))


def read_text(path: str | Path, *, at_most: int = TEXT_LIMIT) -> str:
    """Read a UTF-8 file; see `read_bytes`."""
    return read_bytes(path, at_most=at_most).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; JSONDecodeError also beyond `DEPTH_LIMIT`, `CONTAINER_LIMIT`, `INTEGER_LIMIT`, at lone surrogates."""
    try:
        decoded = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
        containers = decoded.count("{") + decoded.count("[")
        if containers > CONTAINER_LIMIT:
            raise json.JSONDecodeError(
                f"{containers:,} tables and lists, more than the limit of {CONTAINER_LIMIT:,}", "", 0
            )
        value = _JSON.decode(decoded)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError(_TOO_DEEP, "", 0) from None
    except ValueError as error:  # not UTF-8, or a number with too many digits
        raise json.JSONDecodeError(str(error), "", 0) from None
    # A short ASCII text keeps the other limits: this spares each line of a long ledger the walk
    if containers <= DEPTH_LIMIT and decoded.isascii() and "\\u" not in decoded:
        return value
    problem = _problem(value)
    if problem:
        raise json.JSONDecodeError(problem, "", 0)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; TOMLDecodeError also beyond `DEPTH_LIMIT`, `KEY_LIMIT` (parts of keys) and `INTEGER_LIMIT`."""
    parts = 0  # an upper bound on the parts of all keys; in a line with quotes every dot counts
    for line in text.split("\n"):
        if '"' in line or "'" in line:
            parts += line.count(".") + line.count("=") + 1
        elif line.lstrip().startswith("["):
            name = line.partition("]")[0]  # of a table, or the beginning of a list
            parts += 0 if "," in name else name.count(".") + 1
        else:
            for piece in line.split("=")[:-1]:
                parts += piece[max(piece.rfind(","), piece.rfind("{")) + 1 :].count(".") + 1
    if parts > KEY_LIMIT:
        raise tomllib.TOMLDecodeError(
            f"its keys have {parts:,} parts, more than the limit of {KEY_LIMIT:,}; give fewer keys, or lists of numbers"
        )
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError(_TOO_DEEP) from None
    except ValueError as error:  # a number with too many digits, an impossible date
        raise tomllib.TOMLDecodeError(str(error)) from None
    problem = _problem(value)
    if problem:
        raise tomllib.TOMLDecodeError(problem)
    return value


def to_toml(content: Mapping[str, Any], prefix: str = "") -> str:
    """Return plain values as TOML: keys first, then tables; JSON strings and numbers are TOML's."""
    lines = [
        f"{_toml_key(key)} = {json.dumps(value)}" for key, value in content.items() if not _is_table(value)
    ]
    for key, value in content.items():
        name = f"{prefix}{_toml_key(key)}"
        if isinstance(value, Mapping):
            lines.append(f"\n[{name}]\n{to_toml(value, f'{name}.')}".rstrip())
        elif _is_table(value):
            lines += [f"\n[[{name}]]\n{to_toml(item)}".rstrip() for item in value]
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    )


def _bounded(digits: str) -> int:
    number = int(digits)
    if abs(number) >= INTEGER_LIMIT:
        raise ValueError(_TOO_LONG)
    return number


_HALF = re.compile("[\ud800-\udfff]")
_JSON = json.JSONDecoder(parse_int=_bounded)
_TOO_DEEP = f"more than {DEPTH_LIMIT} tables and lists within each other"
_TOO_LONG = "a whole number of more than 64 bits"


def _problem(value: Any) -> str | None:
    """Return why a parsed value must be refused (a number's size, a lone surrogate, the depth), or None."""
    level = [value]
    for _ in range(DEPTH_LIMIT + 1):
        for item in level:
            if isinstance(item, int) and abs(item) >= INTEGER_LIMIT:
                return _TOO_LONG
            if isinstance(item, str) and not item.isascii() and _HALF.search(item):
                return "a text with half a character (a lone surrogate)"
        below = [[*v, *v.values()] if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [item for values in below for item in values]
        if not level:
            return None
    return _TOO_DEEP


def _require_regular(descriptor: int, path: str | Path) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
