"""Read named arrays from an .npz file: only numbers, and no more of them than the file's size makes plausible."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from opusim.files import open_to_read
from training.data.errors import DataError

_ALWAYS_ALLOWED = 2**30
_LARGEST_RATIO = 100
"""Bytes in memory for a byte of the file, beyond the first `_ALWAYS_ALLOWED`; measured data compress by 2 to 20."""
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, NotImplementedError, RuntimeError)
_DAMAGED = (zipfile.BadZipFile, zlib.error)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_arrays(path: Path, names: Sequence[str], *, optional: Sequence[str] = ()) -> list[np.ndarray]:
    """Read arrays of an .npz file by name.

    Nothing is unpickled, and nothing is decompressed before its header was compared with its length.

    Args:
        path: The file, as `numpy.savez` or `numpy.savez_compressed` writes it.
        names: Of arrays that must be there.
        optional: Of arrays that may be there.

    Returns:
        The arrays in the order of the names, then the optional ones that are there.

    Raises:
        DataError: It is no such file, lacks an array, holds objects, is damaged, or holds more than 1 GiB and more
            than 100 times its own length.
    """
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            most = max(_ALWAYS_ALLOWED, _LARGEST_RATIO * os.fstat(file.fileno()).st_size)
            if file.read(6) == np.lib.format.MAGIC_PREFIX:
                raise DataError(
                    f"{path} holds one array; write both with numpy.savez({str(path)!r}, x=x, y=y)"
                )
            with zipfile.ZipFile(file) as archive:
                members = _members(path, archive, names, optional, most)
                return [_read(archive, member) for member in members]
    except DataError:
        raise
    except (*_UNREADABLE, *_DAMAGED) as error:
        wanted = " and ".join(names)
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise DataError(f"{path} is not an .npz file with arrays {wanted} ({reason})") from error


def _members(
    path: Path, archive: zipfile.ZipFile, names: Sequence[str], optional: Sequence[str], most: int
) -> list[zipfile.ZipInfo]:
    held = {info.filename: info for info in archive.infolist()}
    missing = sorted(name for name in names if f"{name}.npy" not in held)
    if missing:
        raise DataError(f"{path} has no array {' and '.join(missing)}; write numpy.savez(FILE, x=x, y=y)")
    found = [held[f"{name}.npy"] for name in (*names, *optional) if f"{name}.npy" in held]
    total = sum(info.file_size for info in found)
    if total > most:
        raise DataError(
            f"{path} would take {total:,} bytes in memory, more than the {most:,} that its length makes plausible; "
            "write it with numpy.savez, which does not compress"
        )
    return found


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """One array, whose header must promise just what the archive holds."""
    with archive.open(info) as member:
        promised = _promised(member) + member.tell()
    if promised != info.file_size:
        raise ValueError(f"{info.filename} promises {promised:,} bytes and has {info.file_size:,}")
    with archive.open(info) as member:
        return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


def _promised(member: IO[bytes]) -> int:
    """Bytes that an array's header promises; the member stands behind the header afterwards."""
    version = np.lib.format.read_magic(member)
    if version not in _HEADERS:
        raise ValueError(f"arrays of format {version} are not read here")
    shape, _, dtype = _HEADERS[version](member)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, not numbers")
    return math.prod(shape) * dtype.itemsize
