"""Small files in the layouts of MNIST and CIFAR-10."""

import gzip
import io
import lzma
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from opusim.training.data.formats import ARCHIVE


def idx_bytes(array: np.ndarray, element_type: int = 8) -> bytes:
    """Return an array of bytes in the idx format."""
    header = bytes([0, 0, element_type, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_labelled_images(
    raw: Path, parts: Mapping[str, tuple[np.ndarray, np.ndarray]], *, compress: bool = True
) -> None:
    """Write images (n, height, width) and labels of the parts "train" and "t10k" under MNIST's names."""
    raw.mkdir(parents=True)
    for prefix, arrays in parts.items():
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays, strict=True):
            path, content = raw / f"{prefix}-{kind}-ubyte", idx_bytes(array)
            if compress:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)


def write_archive(root: Path, members: Mapping[str, bytes]) -> Path:
    """Write CIFAR-10's archive with these members under a folder; returns its path."""
    path = root / ARCHIVE
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wb", preset=0) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
