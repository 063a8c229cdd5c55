"""Read CIFAR-10 from JPEG files in one archive: train/CLASS/NUMBER.jpg and test/CLASS/NUMBER.jpg."""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from opusim.files import open_to_read
from training.data.dataset import DataError
from training.data.formats import read_arrays

ARCHIVE = "CIFAR10-jpeg/cifar10-jpeg.tar.xz"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CACHE = "cifar10.npz"
_CACHED = ("train_x", "train_y", "test_x", "test_y")
_SIDE = 32
_IMAGE_LIMIT = 64 * 2**10
"""Bytes of one JPEG file; those of CIFAR-10 take 1 to 3 thousand."""
_MEMBER_LIMIT = 100_000
"""Files and folders of the archive; CIFAR-10 has 60,000 images."""
_ARCHIVE_LIMIT = 2**30
"""Bytes of the unpacked archive; 60,000 images of 4 KiB take a quarter."""


def read_cifar10(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read the archive, or what an earlier call decoded and left beside it (where that folder may be written to).

    Args:
        root: The folder that `OPUSIM_DATA` names.

    Returns:
        Under ``"train"`` and ``"test"``, the pixels, channels first, shape (n, 3 * 32 * 32), uint8, and the class
        numbers in alphabetical order of the names, shape (n,), uint8.

    Raises:
        DataError: The archive is missing or damaged, or holds something else.
    """
    archive = root / ARCHIVE
    if not archive.is_file():
        raise DataError(
            f"{archive} is missing: put CIFAR-10 there as JPEG files train/CLASS/NUMBER.jpg and test/CLASS/NUMBER.jpg "
            "in one .tar.xz"
        )
    cache = archive.with_name(_CACHE)
    if cache.is_file() and cache.stat().st_mtime >= archive.stat().st_mtime:
        with contextlib.suppress(DataError):
            train_x, train_y, test_x, test_y = read_arrays(cache, _CACHED)
            parts = {"train": (train_x, train_y), "test": (test_x, test_y)}
            if all(_fits(*part) for part in parts.values()):
                return parts
    parts = _decode(archive)
    _keep(cache, parts)
    return parts


def _decode(archive: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All images of the archive, in the order of their names."""
    images: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    try:
        with (
            os.fdopen(open_to_read(archive), "rb") as file,
            lzma.LZMAFile(file) as stream,
            tarfile.open(fileobj=_Limited(stream, archive), mode="r|") as files,
        ):
            for count, member in enumerate(files):
                if count == _MEMBER_LIMIT:
                    raise DataError(
                        f"{archive} has more than {_MEMBER_LIMIT:,} members; this is not CIFAR-10"
                    )
                part, _, name = member.name.removeprefix("./").partition("/")
                if member.isreg() and name.endswith(".jpg") and part in images:
                    images[part][name] = _image(files, member, f"{archive}: {member.name}")
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{archive} is damaged ({error}); copy it again") from error
    return {part: _stacked(found, f"{archive}: {part}") for part, found in images.items()}


class _Limited(io.RawIOBase):
    """A stream that ends in an error once it has given more than an archive of CIFAR-10 holds."""

    def __init__(self, stream: lzma.LZMAFile, archive: Path) -> None:
        self._stream, self._archive = stream, archive
        self._left = _ARCHIVE_LIMIT

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise DataError(
                f"{self._archive} unpacks to more than {_ARCHIVE_LIMIT:,} bytes; this is not CIFAR-10"
            )
        buffer[: len(content)] = content
        return len(content)


def _image(files: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> np.ndarray:
    """One image of the archive, channels first, shape (3 * 32 * 32,), uint8."""
    if member.size > _IMAGE_LIMIT:
        raise DataError(
            f"{where} has {member.size:,} bytes, more than {_IMAGE_LIMIT:,}; this is not CIFAR-10"
        )
    content = files.extractfile(member)
    if content is None:
        raise DataError(f"{where} is no regular file; copy the archive again")
    return _pixels(content.read(), where)


def _pixels(content: bytes, where: str) -> np.ndarray:
    """One JPEG image; other formats are refused by their first bytes, other sizes before they are decoded."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
                if image.size != (_SIDE, _SIDE):
                    width, height = image.size
                    raise DataError(
                        f"{where} has {width} x {height} pixels, not {_SIDE} x {_SIDE}; this is not CIFAR-10"
                    )
                pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"{where} is no readable image ({error}); only JPEG is read, copy the archive again"
        ) from error
    return pixels.transpose(2, 0, 1).reshape(-1)


def _stacked(found: dict[str, np.ndarray], where: str) -> tuple[np.ndarray, np.ndarray]:
    names = sorted(found)
    classes = [name.split("/")[0] for name in names]
    if set(classes) != set(CLASSES):
        raise DataError(f"{where} holds the classes {sorted(set(classes))}, not those of CIFAR-10: {CLASSES}")
    return np.stack([found[name] for name in names]), np.array(
        [CLASSES.index(c) for c in classes], dtype=np.uint8
    )


def _fits(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether cached arrays are what `_decode` returns."""
    shapes = x.shape == (len(y), 3 * _SIDE**2) and y.ndim == 1
    return shapes and x.dtype == y.dtype == np.uint8 and bool((y < len(CLASSES)).all())


def _keep(cache: Path, parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Leave the decoded images beside the archive, whole or not at all; not in a folder marked read-only."""
    if not cache.parent.stat().st_mode & 0o222:
        return
    partial = cache.with_name(f"{_CACHE}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        with partial.open("wb") as file:
            (train_x, train_y), (test_x, test_y) = parts["train"], parts["test"]
            np.savez(file, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
        partial.replace(cache)
