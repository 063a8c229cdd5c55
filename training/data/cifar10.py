"""Read CIFAR-10 from JPEG files in one archive: train/CLASS/NUMBER.jpg and test/CLASS/NUMBER.jpg."""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np

from training.data.errors import DataError

ARCHIVE = "CIFAR10-jpeg/cifar10-jpeg.tar.xz"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CACHE = "cifar10.npz"
_SIDE = 32


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
        damaged = (OSError, KeyError, ValueError, zipfile.BadZipFile)
        with contextlib.suppress(*damaged), cache.open("rb") as file, np.load(file) as arrays:
            return {part: (arrays[f"{part}_x"], arrays[f"{part}_y"]) for part in ("train", "test")}
    parts = _decode(archive)
    _keep(cache, parts)
    return parts


def _decode(archive: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All images of the archive, in the order of their names."""
    images: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    try:
        with tarfile.open(archive, "r:xz") as files:
            for member in files:
                part, _, name = member.name.removeprefix("./").partition("/")
                content = files.extractfile(member) if member.isfile() and name.endswith(".jpg") else None
                if content is not None and part in images:
                    images[part][name] = _pixels(content.read(), f"{archive}: {member.name}")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{archive} is damaged ({error}); copy it again") from error
    return {part: _stacked(found, f"{archive}: {part}") for part, found in images.items()}


def _pixels(content: bytes, where: str) -> np.ndarray:
    """One image, channels first, shape (3 * 32 * 32,), uint8."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"{where} is no readable image ({error}); copy the archive again") from error
    if pixels.shape != (_SIDE, _SIDE, 3):
        raise DataError(
            f"{where} has {pixels.shape[1]} x {pixels.shape[0]} pixels, not {_SIDE} x {_SIDE}; this is not CIFAR-10"
        )
    return pixels.transpose(2, 0, 1).reshape(-1)


def _stacked(found: dict[str, np.ndarray], where: str) -> tuple[np.ndarray, np.ndarray]:
    names = sorted(found)
    classes = [name.split("/")[0] for name in names]
    if set(classes) != set(CLASSES):
        raise DataError(f"{where} holds the classes {sorted(set(classes))}, not those of CIFAR-10: {CLASSES}")
    return np.stack([found[name] for name in names]), np.array(
        [CLASSES.index(c) for c in classes], dtype=np.uint8
    )


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
