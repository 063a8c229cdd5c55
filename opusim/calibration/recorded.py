r"""Frames in files: record flat frames in the layout of EMVA 1288, and read the frames that a laboratory has.

Three layouts are read (`read_frames`), and one of them is written (`record`):

**EMVA 1288**: a folder with images and a descriptor: ``v`` version, ``n bits width height``, then for every setting
``b exposure_ns photons`` (light) or ``d exposure_ns`` (dark), followed by a line ``i images\\NAME`` for each image. Two
images are a point of the temporal series; more than two are the spatial series. Lines that begin with ``#`` are
comments. Source: the format of the standard's reference implementation (EMVA1288 on GitHub).

**Named stacks**: a folder of .npy, .tif, .png, .bmp or .pgm files, in subfolders or not. The path of a file says what
it holds: ``dark`` (``black``, ``bias``) or ``flat`` (``bright``, ``light``, ``white``), the exposure with its unit
(``400us``, ``2.5ms``, ``1s``), and the photons on a pixel where they are known (``5200ph``): ``flat_400us_5200ph.npy``.
A file is a stack of one level's frames. Single images are one level if their names differ in the last number only.

**Arrays**: one .npz or HDF5 file with ``flat`` and ``dark``, each of shape (levels, frames, rows, columns);
``flat_exposure_us`` and ``dark_exposure_us``, a number for each level; and, if they are known, ``flat_photons``, a
number for each level, ``flat_time_s`` and ``dark_time_s``, of shape (levels, frames), and ``bits``.

**Numbers.** Cameras often write 12 bits to the upper end of 16-bit words. The lowest bit that is ever set tells it, and
numbers are shifted down by as much. Packed numbers (mono10p, mono12p of GenICam's pixel format names: pixel after
pixel from the lowest bit on) are bytes and are named by the caller. Nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from opusim import checks
from opusim.calibration.frames import Level, TakeFrames
from opusim.errors import ConfigError
from opusim.files import most_unpacked, open_to_read, read_text
from opusim.plugins import Deferred

h5py = Deferred("h5py")

DESCRIPTOR = "EMVA1288descriptor.txt"
VERSION = "4.0"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What to record.

    Attributes:
        width: columns of an image; width times height is the number of outputs.
        height: rows.
        bits: of the converter.
        steps: points of the temporal series, at least 4.
        spatial_frames: images of a point of the spatial series, at least 3.
        longest_exposure_us: exposure of the last point; the first has the device's exposure.
        saturating_photons: light of the last point; points rise in even steps of exposure and light.
    """

    width: int
    height: int
    bits: int
    steps: int = 30
    spatial_frames: int = 16
    longest_exposure_us: float
    saturating_photons: float

    def __post_init__(self) -> None:
        checks.integer(width=self.width, height=self.height, minimum=1)
        checks.integer(bits=self.bits, minimum=1, maximum=16)
        checks.integer(steps=self.steps, minimum=4)
        checks.integer(spatial_frames=self.spatial_frames, minimum=3)
        checks.positive(
            longest_exposure_us=self.longest_exposure_us, saturating_photons=self.saturating_photons
        )

    @property
    def images(self) -> int:
        """How many images are written: two dark and two bright ones a step, and the two spatial points."""
        return 4 * self.steps + 2 * self.spatial_frames

    def points(self, exposure_us: float) -> list[tuple[Level, int]]:
        """Return settings and their number of images: temporal pairs, bright and dark, then the spatial pair."""
        shares = np.linspace(1 / self.steps, 1.0, self.steps)
        longest = max(self.longest_exposure_us, 1.01 * exposure_us)  # points need different exposures
        exposures = np.linspace(exposure_us, longest, self.steps)
        middle = self.steps // 2
        found: list[tuple[Level, int]] = []
        for share, exposure in zip(shares, exposures, strict=True):
            photons = (0.0, float(share * self.saturating_photons))
            found += [(Level(photons=p, exposure_us=float(exposure)), 2) for p in photons]
        half = float(0.5 * self.saturating_photons)
        lit = [Level(photons=p, exposure_us=float(exposures[middle])) for p in (0.0, half)]
        return found + [(level, self.spatial_frames) for level in lit]


def record(take: TakeFrames, recording: Recording, folder: Path, *, exposure_us: float) -> Path:
    """Take the frames, which fill images row by row, write them into a new folder, and return the descriptor's path."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder, so that no frames are mixed")
    (folder / "images").mkdir()
    lines = [f"v {VERSION}", f"n {recording.bits} {recording.width} {recording.height}"]
    number = 0
    for level, count in recording.points(exposure_us):
        exposure_ns = 1e3 * float(level.exposure_us or 0)
        lines.append(
            f"b {exposure_ns:.1f} {level.photons:.6f}" if level.photons > 0 else f"d {exposure_ns:.1f}"
        )
        frames = take(count, **vars(level))
        checks.shape((count, recording.width * recording.height), frames=frames)
        for frame in frames:
            name = f"image{number:05d}.png"
            remedy = "a frame holds more than its converter's bits"
            checks.in_range(0, 2**recording.bits - 1, image=frame, remedy=remedy)
            grey = frame.astype(np.uint8 if recording.bits <= 8 else np.uint16)
            Image.fromarray(grey.reshape(recording.height, recording.width)).save(folder / "images" / name)
            lines.append(f"i images\\{name}")
            number += 1
    path = folder / DESCRIPTOR
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    return path


def shape_of(n_outputs: int) -> tuple[int, int]:
    """Width and height, width at least height, of the image nearest a square that holds exactly n_outputs pixels."""
    height = next(h for h in range(math.isqrt(n_outputs), 0, -1) if n_outputs % h == 0)
    return n_outputs // height, height


Packing = Literal["mono10p", "mono12p"]
_ARRAYS = (".npz", ".h5", ".hdf5")
_IMAGES = (".tif", ".tiff", ".png", ".bmp", ".pgm")
_LOSSY = (".jpg", ".jpeg", ".webp", ".mp4", ".avi", ".gif")
_GREY = ("L", "I", "F", "I;16", "I;16B", "I;16L")
"""Modes of Pillow with one number a pixel."""
_NAMED = (
    *("dark", "dark_exposure_us", "dark_time_s", "flat", "flat_exposure_us", "flat_photons", "flat_time_s"),
    "bits",
)
_MOST_FILES = 100_000
_WIDTHS = (8, 10, 12, 14, 16)
"""Bits of usual converters."""
_DARK = re.compile(r"(?<![a-z])(dark|black|bias)")
_FLAT = re.compile(r"(?<![a-z])(flat|bright|light|white)")
_EXPOSURE = re.compile(r"(?<![a-z0-9.,])(\d+(?:[.,]\d+)?) ?(us|µs|μs|ms|s)(?![a-z0-9])")
_PHOTONS = re.compile(r"(?<![a-z0-9.,])(\d+(?:[.,]\d+)?) ?ph(?:otons)?(?![a-z0-9])")
_MICROSECONDS = {"us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3, "s": 1e6}
_UNREADABLE = (
    *(OSError, ValueError, EOFError, KeyError, SyntaxError, MemoryError, Image.DecompressionBombError),
    *(zipfile.BadZipFile, zlib.error, UnidentifiedImageError),
)
"""What Pillow, numpy, zipfile and HDF5 raise for a damaged file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedLevel:
    """Frames of one setting of light and exposure.

    Attributes:
        name: of the files, for messages.
        exposure_us: microseconds.
        photons: mean photons on a pixel in the exposure; 0 in the dark, None if the light's strength is not known.
        parts: each returns some of the frames as they are stored, shape (frames, rows, columns).
        times_s: seconds of each frame, or None.
    """

    name: str
    exposure_us: float
    photons: float | None
    parts: tuple[Callable[[], np.ndarray], ...]
    times_s: np.ndarray | None = None

    @property
    def is_dark(self) -> bool:
        """Whether no light fell on the sensor."""
        return self.photons == 0


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedFrames:
    """What files hold.

    Attributes:
        path: the folder or file.
        layout: in words.
        levels: the dark ones first, each by exposure and light.
        bits: of the converter: stated, or the fewest that hold the largest number.
        shift: bits below the numbers, which are never set.
        largest: the largest number, DN.
        packing: of bytes, or None for whole numbers.
    """

    path: Path
    layout: str
    levels: tuple[RecordedLevel, ...]
    bits: int
    shift: int
    largest: int
    packing: Packing | None = None

    def frames_of(self, level: RecordedLevel) -> np.ndarray:
        """Return a level's frames, DN, whole numbers, shape (frames, rows, columns)."""
        return _stored(self.path, level, self.packing) >> self.shift

    def refused(self, key: str, reason: str) -> ConfigError:
        """Return the error that names this recording."""
        return ConfigError(str(self.path), key, reason)


def read_frames(path: Path, *, bits: int | None = None, packing: Packing | None = None) -> RecordedFrames:
    """Read what a laboratory recorded: a folder, an EMVA 1288 descriptor, or a file of arrays.

    `bits` of the converter count if the files do not say so or say it wrongly; `packing` is of bytes that hold packed
    numbers. ConfigError: no frames, frames that cannot be evaluated, or a file that cannot be read.
    """
    if path.suffix.lower() in _ARRAYS and path.is_file():
        layout, (levels, stated) = f"{path.suffix} file of arrays", _of_array_file(path)
    elif descriptor := _descriptor(path):
        layout, (levels, stated) = "EMVA 1288 folder", _of_descriptor(descriptor)
    elif path.is_dir():
        layout, levels, stated = "folder of named stacks", _of_names(path), None
    else:
        found = "is a single file, which holds one level" if path.is_file() else "is not there"
        raise ConfigError(
            str(path), "--recorded", f"{found}; give a folder with dark and flat frames, or .npz or HDF5"
        )
    return inspected(path, layout, levels, bits or stated, packing)


def inspected(
    path: Path,
    layout: str,
    levels: Iterable[RecordedLevel],
    bits: int | None = None,
    packing: Packing | None = None,
) -> RecordedFrames:
    """Look at every number once, for the number and size of the frames and the bits that are set."""
    ordered = sorted(levels, key=lambda level: (not level.is_dark, level.exposure_us, level.photons or 0.0))
    shapes, used, largest, word = set(), 0, 0, 0
    for level in ordered:
        frames = _stored(path, level, packing)
        if len(frames) < 2:
            reason = f"{len(frames)} frame; the noise needs two or more at each level"
            raise ConfigError(str(path), level.name, reason)
        shapes.add(frames.shape[1:])
        used |= int(np.bitwise_or.reduce(frames, axis=None))
        largest, word = max(largest, int(frames.max())), 8 * frames.dtype.itemsize
    if len(shapes) > 1:
        listed = " and ".join(f"{w} x {h}" for h, w in sorted(shapes))
        raise ConfigError(str(path), "images", f"have several sizes, {listed} pixels; keep one region")
    if not used:
        raise ConfigError(str(path), "images", "hold zeros only; is the camera connected?")
    shift = (used & -used).bit_length() - 1
    largest >>= shift
    if bits is None:
        # words that are filled from the top hold the remaining bits; others the fewest usual bits that fit
        fits = [width for width in _WIDTHS if width >= largest.bit_length()]
        bits = (
            word - shift if shift and packing is None and word <= 16 else (fits or [largest.bit_length()])[0]
        )
    if largest >= 2**bits:
        raise ConfigError(
            str(path),
            "--bits",
            f"{bits} bits do not hold the largest number, {largest:,}; leave --bits out, or name the packing",
        )
    return RecordedFrames(
        path=path,
        layout=layout,
        levels=tuple(ordered),
        bits=bits,
        shift=shift,
        largest=largest,
        packing=packing,
    )


def _stored(path: Path, level: RecordedLevel, packing: Packing | None) -> np.ndarray:
    """Return a level's frames as whole numbers, before they are shifted."""
    try:
        frames = np.concatenate([part() for part in level.parts])
    except ConfigError:
        raise
    except _UNREADABLE as error:
        reason = f"cannot be read ({_reason(error)}); record it again"
        raise ConfigError(str(path), level.name, reason) from error
    if packing is not None:
        if frames.dtype != np.uint8:
            raise ConfigError(
                str(path),
                "--packing",
                f"{packing} is packed into bytes, and {level.name} holds {frames.dtype}",
            )
        return _unpacked(frames, int(packing.removeprefix("mono").removesuffix("p")))
    if frames.dtype.kind == "f":
        if not np.all(frames == np.rint(frames)):
            raise ConfigError(
                str(path),
                level.name,
                "holds fractions, so frames were averaged or corrected; give the camera's own numbers",
            )
        frames = frames.astype(np.int64)
    if frames.dtype.kind not in "ui" or (frames.size and frames.min() < 0):
        raise ConfigError(
            str(path), level.name, "holds negative numbers or none; give the camera's own numbers"
        )
    return frames.astype(frames.dtype.newbyteorder("="), copy=False)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers in bytes, the lowest bits first; the last axis is a row of an image."""
    each = np.unpackbits(packed, axis=-1, bitorder="little")
    columns = each.shape[-1] // bits
    each = each[..., : columns * bits].reshape(*packed.shape[:-1], columns, bits)
    return np.asarray(each @ (1 << np.arange(bits, dtype=np.uint16)), dtype=np.uint16)


def _stack(path: Path) -> np.ndarray:
    """Return the frames of one file, shape (frames, rows, columns)."""
    if path.suffix.lower() == ".npy":
        with open(open_to_read(path), "rb") as file:
            found = np.load(file, allow_pickle=False)
        frames = found[None] if found.ndim == 2 else found
    else:
        with open(open_to_read(path), "rb") as file, Image.open(file) as image:
            pages = []
            for page in range(getattr(image, "n_frames", 1)):
                image.seek(page)
                if image.mode not in _GREY:
                    raise ConfigError(
                        str(path),
                        "image",
                        f"is of mode {image.mode}: colours are computed, and share noise; record raw grey frames",
                    )
                pages.append(np.array(image))
        frames = np.stack(pages)
    if frames.ndim != 3:
        raise ConfigError(str(path), "shape", f"is {frames.shape}; give (frames, rows, columns)")
    return frames


def _descriptor(path: Path) -> Path | None:
    """Return the EMVA 1288 descriptor that a path is or holds, or None."""
    found = [path] if path.is_file() else [path / DESCRIPTOR, *sorted(path.glob("*.txt"))]
    for each in found:
        if each.suffix.lower() == ".txt" and each.is_file():
            first = next((line for line in _lines(each)), [""])
            if first[0] in ("v", "n"):
                return each
    return None


def _lines(path: Path) -> list[list[str]]:
    """Return the words of a descriptor's lines, without comments."""
    try:
        lines = [line.strip() for line in read_text(path).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "descriptor", f"cannot be read ({error})") from error
    return [[line[:1], line[1:].strip()] for line in lines if line and not line.startswith("#")]


def _of_descriptor(path: Path) -> tuple[list[RecordedLevel], int | None]:
    """Return the levels of an EMVA 1288 folder and the stated bits; the two series' same settings are one level."""
    bits: int | None = None
    setting: tuple[float, float] | None = None
    images: dict[tuple[float, float], list[Path]] = {}
    for number, (kind, rest) in enumerate(_lines(path), start=1):
        try:
            if kind == "n":
                bits = int(rest.split()[0])
            elif kind in ("b", "d"):
                numbers = [float(word.replace(",", ".")) for word in rest.split()]
                exposure_ns, photons = numbers if kind == "b" else (*numbers, 0.0)
                checks.non_negative(exposure_ns=exposure_ns, photons=photons)
                setting = (exposure_ns, photons)
            elif kind == "i" and setting is not None:
                image = path.parent.joinpath(*rest.split("\\"))
                if not image.resolve().is_relative_to(path.parent.resolve()):
                    raise ValueError("leads out of the folder")
                images.setdefault(setting, []).append(image)
            elif kind != "v":
                raise ValueError("is none of v, n, b, d and i")
        except (ValueError, IndexError) as error:
            raise ConfigError(
                str(path), f"entry {number}", f"{kind} {rest} cannot be read: {error}"
            ) from None
    return [
        RecordedLevel(
            name=f"{'flat' if photons else 'dark'}, {exposure_ns / 1e3:g} µs, {photons:g} photons",
            exposure_us=exposure_ns / 1e3,
            photons=photons,
            parts=tuple(partial(_stack, image) for image in paths),
        )
        for (exposure_ns, photons), paths in images.items()
    ], bits


def _of_names(folder: Path) -> list[RecordedLevel]:
    """Return the levels of a folder of named stacks."""
    files = sorted(each for each in folder.rglob("*") if each.suffix.lower() in (".npy", *_IMAGES, *_LOSSY))
    if not files or len(files) > _MOST_FILES:
        raise ConfigError(
            str(folder),
            "--recorded",
            f"holds {len(files):,} files of frames; give an EMVA 1288 folder, or a folder of stacks such as "
            "dark_400us.npy and flat_400us_5200ph.tif",
        )
    settings = [(*_setting(folder, each), each) for each in files]
    levels = []
    for (exposure_us, photons, name), same in groupby(
        sorted(settings, key=lambda each: (each[0], each[1] is None, each[1] or 0.0, each[2])),
        key=lambda each: each[:3],
    ):
        parts = tuple(partial(_stack, path) for *_, path in same)
        levels.append(RecordedLevel(name=name, exposure_us=exposure_us, photons=photons, parts=parts))
    return levels


def _setting(folder: Path, path: Path) -> tuple[float, float | None, str]:
    """Return exposure, photons (None if unknown) and the level's name, from a file's path."""
    text = str(path.relative_to(folder).with_suffix("")).lower().replace("\\", "/")
    words = re.sub(r"[_/\- ]", " ", text)
    exposure, photons = _EXPOSURE.search(words), _PHOTONS.search(words)
    if path.suffix.lower() in _LOSSY:
        raise ConfigError(
            str(path), "format", "is compressed with loss, which changes noise; record raw frames"
        )
    dark, flat = bool(_DARK.search(words)), bool(_FLAT.search(words))
    if dark == flat or exposure is None:
        missing = "exposure with its unit" if dark != flat else "kind, dark or flat"
        raise ConfigError(
            str(path), "name", f"says no {missing}; name it such as flat_400us_5200ph{path.suffix}"
        )
    exposure_us = float(exposure[1].replace(",", ".")) * _MICROSECONDS[exposure[2]]
    if dark:
        return exposure_us, 0.0, f"dark, {exposure_us:g} µs"
    if photons is not None:
        light = float(photons[1].replace(",", "."))
        return exposure_us, light, f"flat, {exposure_us:g} µs, {light:g} photons"
    # light of unknown strength: a stack is a level of its own, single images one for each name without its number
    pages = 2 if path.suffix.lower() == ".npy" else 1
    if pages == 1:
        with suppress(*_UNREADABLE), open(open_to_read(path), "rb") as file, Image.open(file) as image:
            pages = int(getattr(image, "n_frames", 1))
    return exposure_us, None, re.sub(r"\d+$", "", text).rstrip("_- ") if pages == 1 else text


def _of_array_file(path: Path) -> tuple[list[RecordedLevel], int | None]:
    """Return the levels of an .npz or HDF5 file, and the stated bits."""
    is_npz = path.suffix.lower() == ".npz"
    try:
        with open(open_to_read(path), "rb") as raw:
            if is_npz:  # which must not take more memory than its length makes plausible
                with zipfile.ZipFile(raw) as archive:
                    total = sum(info.file_size for info in archive.infolist())
                if total > (most := most_unpacked(raw.seek(0, os.SEEK_END))):
                    reason = (
                        f"would take {total:,} bytes in memory, more than the {most:,} that its length makes "
                        "plausible; write it with numpy.savez, which does not compress"
                    )
                    raise ConfigError(str(path), "format", reason)
                raw.seek(0)
            stored = np.load(raw, allow_pickle=False) if is_npz else h5py.File(raw, "r")
            with stored:
                arrays = {name: np.asarray(stored[name]) for name in _NAMED if name in stored}
    except ConfigError:
        raise
    except ImportError as error:
        reason = "HDF5 needs h5py; pip install 'opusim[frames]'"
        raise ConfigError(str(path), "format", reason) from error
    except _UNREADABLE as error:
        raise ConfigError(
            str(path), "format", f"cannot be read ({_reason(error)}); write it again"
        ) from error
    return levels_of(path, arrays)


def levels_of(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[list[RecordedLevel], int | None]:
    """Return the levels of named arrays (see the module), and the stated bits."""
    levels = []
    for kind in ("dark", "flat"):
        missing = [name for name in (kind, f"{kind}_exposure_us") if name not in arrays]
        if missing:
            known = ", ".join(name for name in _NAMED if name in arrays) or "none that is known"
            raise ConfigError(str(path), missing[0], f"is missing; arrays there: {known}")
        stack = arrays[kind]
        if stack.ndim != 4:
            raise ConfigError(
                str(path), kind, f"has shape {stack.shape}; give (levels, frames, rows, columns)"
            )
        exposures = _column(path, arrays, f"{kind}_exposure_us", len(stack))
        photons: list[float | None] = [0.0 if kind == "dark" else None] * len(stack)
        if kind == "flat" and "flat_photons" in arrays:
            photons = [*_column(path, arrays, "flat_photons", len(stack)).tolist()]
        times = arrays.get(f"{kind}_time_s")
        if times is not None and times.shape != stack.shape[:2]:
            raise ConfigError(str(path), f"{kind}_time_s", f"has shape {times.shape}; give (levels, frames)")
        levels += [
            RecordedLevel(
                name=f"{kind}[{number}], {exposures[number]:g} µs",
                exposure_us=float(exposures[number]),
                photons=photons[number],
                parts=(partial(np.asarray, stack[number]),),
                times_s=None if times is None else times[number].astype(np.float64),
            )
            for number in range(len(stack))
        ]
    return levels, int(arrays["bits"]) if "bits" in arrays else None


def _column(path: Path, arrays: Mapping[str, np.ndarray], name: str, length: int) -> np.ndarray:
    """Return a number for each level."""
    found = np.asarray(arrays[name], dtype=np.float64)
    if found.shape != (length,) or not np.all(found >= 0):
        raise ConfigError(str(path), name, f"must hold {length} numbers of at least 0, one for each level")
    return found


def _reason(error: BaseException) -> str:
    """Return an error of a library in one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
