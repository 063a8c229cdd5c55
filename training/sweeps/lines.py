"""Where a key stands in a TOML file, so that an error can name its line (tomllib tells no positions)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence


def line_of(text: str, path: Sequence[str]) -> int | None:
    """The line that sets a key, or the nearest table or key above it that is there.

    Args:
        text: A TOML document.
        path: Keys from the top; the n-th table of an array by its number from 0. Dots within a key split it.

    Returns:
        A line number from 1; None where not even the first key is there.
    """
    wanted = _split(path)
    best, found = 0, None
    for number, keys in _statements(text):
        if len(keys) >= best and wanted[: len(keys)] == keys and keys:
            best, found = len(keys), number
    return found


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Every line that opens a table or sets a key, with its full path."""
    counts: dict[tuple[str, ...], int] = {}
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("[["):
            name = _keys(stripped.split("]]")[0][2:])
            counts[tuple(name)] = counts.get(tuple(name), -1) + 1
            table = _numbered(name, counts)
            yield number, table
        elif stripped.startswith("["):
            name = _keys(stripped.split("]")[0][1:])
            if name:
                table = _numbered(name, counts)
                yield number, table
        elif "=" in stripped and not stripped.startswith("#"):
            keys = _keys(stripped.partition("=")[0])
            if keys:
                yield number, table + keys


def _numbered(name: Sequence[str], counts: dict[tuple[str, ...], int]) -> list[str]:
    """A table's path, with the number of the newest table behind the name of each array of tables."""
    path: list[str] = []
    for end, key in enumerate(name, start=1):
        path.append(key)
        number = counts.get(tuple(name[:end]))
        if number is not None:
            path.append(str(number))
    return _split(path)


def _keys(text: str) -> list[str]:
    """The keys of a dotted, maybe quoted name; none where it is no name."""
    try:
        value = tomllib.loads(f"{text.strip()} = 0")
    except tomllib.TOMLDecodeError:
        return []
    keys = []
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
        keys.append(key)
    return _split(keys)


def _split(path: Sequence[str]) -> list[str]:
    return [part for key in path for part in key.split(".")]
