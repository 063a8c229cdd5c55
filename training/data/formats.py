"""Read data files of untrusted content: CSV, idx (MNIST), npz, folders of images, and CIFAR-10 as an archive.

No reader unpickles anything, and none holds more in memory than the file's kind and length make plausible: a damaged or
hostile file ends in a `DataError` that names the file, the problem and the remedy.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import importlib
import io
import itertools
import lzma
import math
import os
import re
import struct
import tarfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from opusim.files import make_folder, most_unpacked, open_to_read
from opusim.training.errors import DataError

Parts = dict[str, tuple[np.ndarray, np.ndarray]]
"""Pixels (n, d) and labels (n,) of ``"train"`` and ``"test"``."""
VARIABLE = "OPUSIM_DATA"
"""Environment variable that names the folder with ``MNIST/raw/``, ``FashionMNIST/raw/`` and ``CIFAR10-jpeg/``."""

_UNSIGNED_BYTE = 8
_IDX_BYTES_LIMIT = 2**31
"""Bytes of elements; the images of the largest set in this format, EMNIST, take 0.6 of 2^30."""
_DOWNLOAD_AGAIN = "delete this file and download it again; nothing else is lost"


def required_library(name: str, missing: str) -> Any:
    """Import an optional library when it is needed; `missing` is the message of ModuleNotFoundError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(missing) from error


_KIND_OF_ENDING = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    ".txt": "text",
    ".npz": "npz",
}
"""Probable kind of a file by its ending."""


def named_file(name: str) -> str | None:
    """Return the data.name of a file or a folder by its ending, such as "csv:PATH", or None for an unknown one."""
    path = Path(name)
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    kind = _KIND_OF_ENDING.get(ending.lower()) or ("folder" if path.is_dir() else None)
    return f"{kind}:{name}" if kind else None


SEPARATORS = (",", ";", "\t", "|")
"""What may stand between the columns of a CSV file."""
_TEXT_BYTES_ALLOWED = 2**26
_TEXT_RATIO_LIMIT = 100
"""Bytes of a table per byte of its gzip file, above `_TEXT_BYTES_ALLOWED`; measured tables compress by 3 to 30."""
_HEADER_BYTES = 2**20
_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}
"""Encodings by the bytes that a text begins with."""
_PACKED = {b"BZh": "bzip2", b"\xfd7zX": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""Compressions that are not read, by the bytes that a file begins with."""


def read_csv(file: IO[bytes], path: Path, pandas: Any) -> Any:
    """Read a CSV file as a DataFrame whose columns have the names of its header, also if two are equal.

    The text is UTF-8, or UTF-16 with its mark, and may be compressed by gzip. The separator is the one of `SEPARATORS`
    that splits the header into most names, and the next row into as many cells. "?" stands for a missing value, as in
    data of the UCI repository. Raises DataError if it is compressed in another way or too strongly, is no text, or has
    a row with another number of cells than the header, and ValueError if pandas cannot read it.
    """
    content: IO[bytes] = file
    begin = file.read(4)
    file.seek(0)
    if begin == b"PK\x03\x04":
        raise DataError(f"{path} is a zip archive, as a spreadsheet is; save the table as CSV in UTF-8")
    if packed := next((name for mark, name in _PACKED.items() if begin.startswith(mark)), None):
        raise DataError(f"{path} is compressed by {packed}; unpack it, or compress it by gzip")
    if begin[:2] == b"\x1f\x8b":
        content = _unpacked(file, path)
        begin = content.read(4)
        content.seek(0)
    encoding = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), "utf-8")
    try:
        head = content.read(_HEADER_BYTES).decode(encoding, errors="ignore")
        content.seek(0)
        if "\0" in head:
            raise DataError(
                f"{path} is no text in UTF-8, because it holds zero bytes, as UTF-16 without its mark does; save it in "
                "UTF-8"
            )
        names, separator = _header(head, tab=".tsv" in path.suffixes)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(
                content, sep=separator, encoding=encoding, na_values=["?"], index_col=False
            )
    except UnicodeError as error:
        raise DataError(f"{path} is no text in UTF-8 ({error}); save it in UTF-8") from error
    except pandas.errors.ParserWarning as error:  # it would drop the cells after the last name
        raise DataError(
            f"{path} has more cells in each row than names in its header ({', '.join(names[:4])}, ...); name every "
            "column, or drop the cells after the last one"
        ) from error
    except pandas.errors.ParserError as error:
        found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        if found is None:
            raise
        raise DataError(
            f"{path} has {found[3]} cells in line {found[2]} and {found[1]} in the lines before; give every row one "
            "cell for each name of the header"
        ) from error
    # pandas fills the cells that rows lack
    if len(frame) and len(names) > 1 and frame.iloc[:, -1].isna().all():
        raise DataError(
            f"{path} has {len(names)} names in its header and nothing in the last column, {names[-1]!r}; name each "
            "column once, or drop the empty one"
        )
    return frame.set_axis(names, axis=1) if len(names) == frame.shape[1] else frame


def _unpacked(file: IO[bytes], path: Path) -> IO[bytes]:
    """Return what a gzip file holds; raise DataError if it is damaged, or holds implausibly much for its length."""
    most = max(_TEXT_BYTES_ALLOWED, _TEXT_RATIO_LIMIT * os.fstat(file.fileno()).st_size)
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as stream:
            text = stream.read(most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}); copy it again") from error
    if len(text) > most:
        raise DataError(
            f"{path} unpacks to more than {most:,} bytes; give the file uncompressed, or a part of it"
        )
    return io.BytesIO(text)


def _header(text: str, *, tab: bool) -> tuple[list[str], str]:
    """Return the names of the columns and their separator; a column without a name gets the one that pandas gives."""
    lines = text.lstrip("\r\n").splitlines(keepends=True)

    def rows_by(separator: str) -> list[list[str]]:
        try:
            return [*itertools.islice(csv.reader(lines, delimiter=separator), 2), [], []][:2]
        except csv.Error:
            return [[], []]

    def rank(separator: str) -> tuple[bool, int]:
        names, cells = rows_by(separator)
        return 1 < len(names) == len(cells), len(names)

    separator = "\t" if tab else max(SEPARATORS, key=rank)
    names = rows_by(separator)[0]
    return [name or f"Unnamed: {number}" for number, name in enumerate(names)], separator


def read_idx(path: Path, *, n_dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes in C order, compressed if its name ends in ``.gz``; uint8, read-only.

    The format (MNIST page of Y. LeCun, C. Cortes and C. Burges): two zero bytes, a byte for the element type (8 is an
    unsigned byte), a byte for the number of dimensions, each dimension's size as a big-endian 32-bit integer, and the
    elements. Raises DataError if the file cannot be read, has other dimensions, or is shorter or longer than its header
    says.
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
    """Read the header, the elements and at most one more byte, which shows that the file is too long."""
    header_size = 4 + 4 * n_dimensions
    header = stream.read(header_size)
    magic = bytes([0, 0, _UNSIGNED_BYTE, n_dimensions])
    if header[:4] != magic[: len(header)]:
        raise DataError(
            f"{path} starts with 0x{header[:4].hex()}, an idx file of unsigned bytes with {n_dimensions} "
            f"dimension(s) starts with 0x{magic.hex()}: it is of another kind, or has another file's name; "
            f"{_DOWNLOAD_AGAIN}"
        )
    if len(header) < header_size:
        raise _cut_short(path, f"{len(header)} bytes do not hold a header of {header_size}")
    shape = struct.unpack(f">{n_dimensions}I", header[4:])
    expected = math.prod(shape)
    if expected > _IDX_BYTES_LIMIT:
        raise DataError(
            f"{path} promises {expected:,} bytes of data, more than the limit of {_IDX_BYTES_LIMIT:,}; "
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


_UNREADABLE = (OSError, ValueError, EOFError, KeyError, NotImplementedError, RuntimeError)
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, MemoryError)
_BAD_HEADER = (tokenize.TokenError, SyntaxError, IndexError, TypeError, AttributeError)
"""Errors of zipfile, its decompressors and numpy's parser of headers."""
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_arrays(path: Path, names: Sequence[str], *, optional: Sequence[str] = ()) -> list[np.ndarray]:
    """Read named arrays, and then optional ones, of an .npz file that `numpy.savez` or `savez_compressed` wrote.

    Nothing is unpickled, and no array is decompressed before its header agrees with its length. Raises DataError if the
    file is of another kind or damaged, lacks an array, holds objects, or would take more than 1 GiB and more than 100
    times its own length.
    """
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            most = most_unpacked(os.fstat(file.fileno()).st_size)
            if file.read(6) == np.lib.format.MAGIC_PREFIX:
                raise DataError(
                    f"{path} holds one array; write both with numpy.savez({str(path)!r}, x=x, y=y)"
                )
            with zipfile.ZipFile(file) as archive:
                held = {info.filename: info for info in archive.infolist()}
                missing = sorted(name for name in names if f"{name}.npy" not in held)
                if missing:
                    raise DataError(
                        f"{path} has no array {' and '.join(missing)}; write numpy.savez(FILE, x=x, y=y)"
                    )
                members = [held[f"{name}.npy"] for name in (*names, *optional) if f"{name}.npy" in held]
                total = sum(info.file_size for info in members)
                if total > most:
                    raise DataError(
                        f"{path} would take {total:,} bytes in memory, more than the {most:,} that its length makes "
                        "plausible; write it with numpy.savez, which does not compress"
                    )
                return [_read(archive, member) for member in members]
    except DataError:
        raise
    except (*_UNREADABLE, *_DAMAGED, *_BAD_HEADER) as error:
        wanted = " and ".join(names)
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise DataError(
            f"{path} is not an .npz file with arrays {wanted} ({reason}); write numpy.savez(FILE, x=x, y=y)"
        ) from error


def read_npz(
    path: Path,
) -> tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read x, y and, if it holds them, ids of a user-supplied .npz file; raise DataError if that fails."""
    x, y, *ids = read_arrays(path, ("x", "y"), optional=("ids",))
    return (x, y, ids[0]) if ids else (x, y)


_IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_IMAGE_FORMATS = ["PNG", "JPEG", "BMP", "WEBP"]
_PIXELS_LIMIT = 2**29
"""Numbers of a folder of images, 2 GiB in float32."""


def read_image_folder(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images that lie in a folder for each class, FOLDER/CLASS/IMAGE, as torchvision's ImageFolder does.

    Returns pixels in [0, 1], shape (n, 3, height, width), or (n, 1, height, width) if all are grey, float32, and the
    names of their classes, in alphabetical order of classes and files. Raises DataError if there is no image, one is
    damaged or of another size than the first, or all of them take too much memory, and ModuleNotFoundError without
    pillow.
    """
    image = required_library("PIL.Image", f"folder:{root} needs pillow, which is missing: pip install pillow")
    try:
        classes = sorted(each for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
        files = [file for each in classes for file in sorted(each.iterdir())]
    except OSError as error:
        raise DataError(f"{root} cannot be read ({error.strerror or error}); check the path") from error
    files = [file for file in files if file.suffix.lower() in _IMAGE_ENDINGS]
    if not files:
        raise DataError(
            f"{root} holds no images as CLASS/NAME.png; put those of each class into a folder of its name"
        )
    pixels: list[np.ndarray] = []
    for file in files:
        try:
            with (
                warnings.catch_warnings(),
                os.fdopen(open_to_read(file), "rb") as stream,
                image.open(stream, formats=_IMAGE_FORMATS) as opened,
            ):
                warnings.simplefilter("error", image.DecompressionBombWarning)
                width, height = opened.size
                size = height, width
                if pixels and pixels[0].shape[:2] != size:
                    first = " x ".join(map(str, pixels[0].shape[1::-1]))
                    raise DataError(
                        f"{file} has {width} x {height} pixels and {files[0]} {first}; bring all images to one size"
                    )
                if 3 * len(files) * width * height > _PIXELS_LIMIT:
                    raise DataError(
                        f"{root}: {len(files):,} images of {width} x {height} pixels exceed the limit of "
                        f"{_PIXELS_LIMIT:,} numbers; make them smaller, or give an array that is mapped from a file"
                    )
                if opened.mode.startswith(("I", "F")):
                    raise DataError(f"{file} has pixels of more than 8 bits; convert the images to 8 bits")
                pixels.append(np.asarray(opened.convert("L" if opened.mode in ("1", "L") else "RGB")))
        except (OSError, SyntaxError, image.DecompressionBombError, image.DecompressionBombWarning) as error:
            raise DataError(f"{file} is no readable image ({error}); remove it, or copy it again") from error
    if any(each.ndim == 3 for each in pixels):
        pixels = [each if each.ndim == 3 else np.repeat(each[:, :, None], 3, axis=2) for each in pixels]
    stacked = np.stack(pixels).astype(np.float32) / 255
    stacked = stacked[:, None] if stacked.ndim == 3 else stacked.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(stacked), np.array([file.parent.name for file in files])


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Read one array; its header must promise exactly the bytes that the archive holds."""
    with warnings.catch_warnings():
        # numpy warns of headers that Python 2 wrote, and Python of odd literals
        warnings.simplefilter("ignore")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version not in _HEADERS:
                raise ValueError(f"arrays of format {version} are not supported")
            shape, _, dtype = _HEADERS[version](member)
            if dtype.hasobject:
                raise ValueError("it holds Python objects, not numbers")
            promised = math.prod(shape) * dtype.itemsize + member.tell()
        if promised != info.file_size:
            raise ValueError(f"{info.filename} promises {promised:,} bytes and has {info.file_size:,}")
        with archive.open(info) as member:
            return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


IMAGE_FILES = tuple(
    f"{part}-{content}"
    for part in ("train", "t10k")
    for content in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
"""Files of MNIST, or of a data set like it, in ``raw/``; each may end in ``.gz``."""


def read_labelled_images(root: Path, folder: str) -> Parts:
    """Read MNIST or a data set like it, in the layout that torchvision writes, from `raw/` in a folder of the root.

    Returns pixels, shape (n, height * width), and labels, uint8. Raises DataError if a file is missing or damaged, or
    two files belong to different data sets.
    """
    raw = root / folder / "raw"
    parts = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images_path = _find(raw, f"{prefix}-images-idx3-ubyte")
        labels_path = _find(raw, f"{prefix}-labels-idx1-ubyte")
        images, labels = read_idx(images_path, n_dimensions=3), read_idx(labels_path, n_dimensions=1)
        if len(images) != len(labels):
            raise DataError(
                f"{images_path} holds {len(images)} images and {labels_path.name} {len(labels)} labels; "
                "one of them is of another data set: delete both and download them again"
            )
        parts[part] = images.reshape(len(images), int(np.prod(images.shape[1:]))), labels
    widths = {part: pixels.shape[1] for part, (pixels, _) in parts.items()}
    if widths["train"] != widths["test"]:
        raise DataError(
            f"{raw} holds training images of {widths['train']} pixels and test images of {widths['test']}; "
            "put the files of one data set there"
        )
    return parts


def _find(raw: Path, name: str) -> Path:
    """Return the compressed file if it exists, since it carries a checksum, else the plain one."""
    for path in (raw / f"{name}.gz", raw / name):
        if path.is_file():
            return path
    raise DataError(
        f"{raw / name}.gz is missing ({VARIABLE} is {raw.parent.parent}): set {VARIABLE} to the folder that "
        f"holds {raw.parent.name}/raw/, put the file there (torchvision's download does) or unset {VARIABLE} "
        "to download the data from openml.org"
    )


@contextlib.contextmanager
def unnamed_until_whole(file: Path) -> Iterator[IO[bytes]]:
    """Open a file of a cache to write, which gets its name once it is whole; other processes may write it too."""
    make_folder(file.parent)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as stream:
            yield stream
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


ARCHIVE = "CIFAR10-jpeg/cifar10-jpeg.tar.xz"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CACHE_NAME = "cifar10.npz"
_CACHED_ARRAYS = ("train_x", "train_y", "test_x", "test_y")
_SIDE = 32
_IMAGE_LIMIT = 64 * 2**10
"""Bytes of one JPEG file; those of CIFAR-10 take 1 to 3 thousand."""
_MEMBER_LIMIT = 100_000
"""Files and folders of the archive; CIFAR-10 has 60,000 images."""
_ARCHIVE_LIMIT = 2**30
"""Bytes of the unpacked archive; 60,000 images of 4 KiB take a quarter."""


def read_cifar10(root: Path) -> Parts:
    """Read CIFAR-10 from an archive of the files train/CLASS/NUMBER.jpg and test/CLASS/NUMBER.jpg.

    The decoded images are cached next to the archive if that folder is writable; later calls read the cache. Returns
    pixels, channels first, shape (n, 3 * 32 * 32), and class numbers in alphabetical order of the names, uint8. Raises
    DataError if the archive is missing or damaged, or holds something else.
    """
    archive = root / ARCHIVE
    if not archive.is_file():
        raise DataError(
            f"{archive} is missing: put CIFAR-10 there as JPEG files train/CLASS/NUMBER.jpg and test/CLASS/NUMBER.jpg "
            "in one .tar.xz"
        )
    cache = archive.with_name(_CACHE_NAME)
    if cache.is_file() and cache.stat().st_mtime >= archive.stat().st_mtime:
        with contextlib.suppress(DataError):
            train_x, train_y, test_x, test_y = read_arrays(cache, _CACHED_ARRAYS)
            parts = {"train": (train_x, train_y), "test": (test_x, test_y)}
            if all(_fits(*part) for part in parts.values()):
                return parts
    parts = _decode(archive)
    if cache.parent.stat().st_mode & 0o222:  # not marked read-only: cache them, whole or not at all
        with contextlib.suppress(OSError), unnamed_until_whole(cache) as file:
            (train_x, train_y), (test_x, test_y) = parts["train"], parts["test"]
            np.savez(file, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
    return parts


def _decode(archive: Path) -> Parts:
    """Decode all images of the archive, in the order of their names."""
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
    parts = {}
    for part, found in images.items():
        names = sorted(found)
        classes = [name.split("/")[0] for name in names]
        if set(classes) != set(CLASSES):
            raise DataError(
                f"{archive}: {part} holds the classes {sorted(set(classes))}, not those of CIFAR-10: {CLASSES}"
            )
        numbers = np.array([CLASSES.index(name) for name in classes], dtype=np.uint8)
        parts[part] = np.stack([found[name] for name in names]), numbers
    return parts


class _Limited(io.RawIOBase):
    """A stream that raises once it has returned more bytes than an archive of CIFAR-10 holds."""

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
    """Decode one JPEG image of the archive, channels first, shape (3 * 32 * 32,), uint8.

    Other formats are refused by their first bytes, and other sizes before they are decoded.
    """
    if member.size > _IMAGE_LIMIT:
        raise DataError(
            f"{where} has {member.size:,} bytes, more than {_IMAGE_LIMIT:,}; this is not CIFAR-10"
        )
    content = files.extractfile(member)
    if content is None:
        raise DataError(f"{where} is no regular file; copy the archive again")
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content.read()), formats=["JPEG"]) as image:
                if image.size != (_SIDE, _SIDE):
                    width, height = image.size
                    raise DataError(
                        f"{where} has {width} x {height} pixels, not {_SIDE} x {_SIDE}; this is not CIFAR-10"
                    )
                pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{where} is no readable JPEG image ({error}); copy the archive again") from error
    return pixels.transpose(2, 0, 1).reshape(-1)


def _fits(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether cached arrays are what `_decode` returns."""
    shapes = x.shape == (len(y), 3 * _SIDE**2) and y.ndim == 1
    return shapes and x.dtype == y.dtype == np.uint8 and bool((y < len(CLASSES)).all())
