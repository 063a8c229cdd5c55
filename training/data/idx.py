"""Read the idx format of the MNIST files, and say what is wrong with a damaged one.

The format is stated on the MNIST page of Y. LeCun, C. Cortes and C. Burges: two zero bytes, a byte for the
element type (8 is an unsigned byte), a byte for the number of dimensions, each dimension's size as a
big-endian 32-bit integer, and the elements in C order.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from opusim.files import open_to_read
from training.data.errors import DataError

_UNSIGNED_BYTE = 8
_LARGEST = 2**31
"""Bytes of elements; the images of the largest set in this format, EMNIST, take 0.6 of 2^30."""
_DOWNLOAD_AGAIN = "delete this file and download it again; nothing else is lost"


def read_idx(path: Path, *, n_dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes, compressed if its name ends in ``.gz``.

    Args:
        path: The file.
        n_dimensions: What the file must hold: 3 for images (n, height, width), 1 for labels (n,).

    Returns:
        The elements, uint8, in the file's shape; read-only.

    Raises:
        DataError: The file cannot be read, is of another kind, or is shorter or longer than it says.
    """
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            if path.suffix != ".gz":
                return _elements(file, path, n_dimensions)
            with gzip.GzipFile(fileobj=file, mode="rb") as stream:
                return _elements(stream, path, n_dimensions)
    except EOFError as error:
        raise _cut_short(path, "the compressed data ends early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a sound gzip file ({error}); {_DOWNLOAD_AGAIN}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _elements(stream: IO[bytes] | gzip.GzipFile, path: Path, n_dimensions: int) -> np.ndarray:
    """Header and elements; of the rest, no more is decompressed than shows that there is one."""
    header_size = 4 + 4 * n_dimensions
    header = stream.read(header_size)
    magic = bytes([0, 0, _UNSIGNED_BYTE, n_dimensions])
    if header[:4] != magic[: len(header)]:
        raise DataError(
            f"{path} starts with 0x{header[:4].hex()}, an idx file of unsigned bytes with {n_dimensions} "
            f"dimension(s) starts with 0x{magic.hex()}: it is a file of another kind or under another's "
            f"name; {_DOWNLOAD_AGAIN}"
        )
    if len(header) < header_size:
        raise _cut_short(path, f"{len(header)} bytes do not hold a header of {header_size}")
    shape = struct.unpack(f">{n_dimensions}I", header[4:])
    expected = math.prod(shape)
    if expected > _LARGEST:
        raise DataError(
            f"{path} promises {expected:,} bytes of data, more than the {_LARGEST:,} that are read; "
            "give the records as arrays instead"
        )
    content = stream.read(expected + 1)
    if len(content) < expected:
        raise _cut_short(path, f"its header promises {expected} bytes of data, it holds {len(content)}")
    if len(content) > expected:
        raise DataError(
            f"{path} holds more than the {expected} bytes that its header promises; {_DOWNLOAD_AGAIN}"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _cut_short(path: Path, how: str) -> DataError:
    return DataError(f"{path} is cut short, as by an interrupted download ({how}); {_DOWNLOAD_AGAIN}")
