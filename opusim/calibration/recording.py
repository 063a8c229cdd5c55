"""Frames on disk in the layout of the EMVA 1288 standard, which other evaluations of the standard read.

A folder with images and a descriptor: ``v`` version, ``n bits width height``, then for every setting ``b exposure_ns
photons`` (light) or ``d exposure_ns`` (dark), followed by a line ``i images\\NAME`` for each image. Two images are a
point of the temporal series; more than two are the spatial series. Source: the format of the standard's reference
implementation (EMVA1288 on GitHub).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opusim import checks
from opusim.calibration.flat_series import Level, TakeFrames

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
        longest_exposure_us: exposure of the last point; the first has the device's own.
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
        """Settings and their number of images: temporal pairs, bright and dark, then the spatial pair."""
        shares = np.linspace(1 / self.steps, 1.0, self.steps)
        longest = max(self.longest_exposure_us, 1.01 * exposure_us)  # points need exposures of their own
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
    """Takes the frames and writes them.

    Args:
        take: see `TakeFrames`; its pixels fill images row by row.
        recording: what to record.
        folder: a new or empty folder.
        exposure_us: the device's own exposure.

    Returns:
        The descriptor's path.

    Raises:
        FileExistsError: the folder holds something.
        ValueError: the frames have another number of pixels than the images, or numbers beyond the bits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder, so that no frames are mixed")
    (folder / "images").mkdir()
    lines = [f"v {VERSION}", f"n {recording.bits} {recording.width} {recording.height}"]
    names = _names()
    for level, count in recording.points(exposure_us):
        exposure_ns = 1e3 * float(level.exposure_us or 0)
        lines.append(
            f"b {exposure_ns:.1f} {level.photons:.6f}" if level.photons > 0 else f"d {exposure_ns:.1f}"
        )
        frames = take(count, **vars(level))
        checks.shape((count, recording.width * recording.height), frames=frames)
        for frame in frames:
            name = next(names)
            _save(frame.reshape(recording.height, recording.width), recording.bits, folder / "images" / name)
            lines.append(f"i images\\{name}")
    path = folder / DESCRIPTOR
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    return path


def shape_of(n_outputs: int) -> tuple[int, int]:
    """Width and height, width at least height, of the image nearest a square that holds exactly n_outputs pixels."""
    height = next(h for h in range(math.isqrt(n_outputs), 0, -1) if n_outputs % h == 0)
    return n_outputs // height, height


def _names() -> Iterator[str]:
    number = 0
    while True:
        yield f"image{number:05d}.png"
        number += 1


def _save(image: np.ndarray, bits: int, path: Path) -> None:
    """A grey PNG of 8 or 16 bits."""
    from PIL import Image

    checks.in_range(0, 2**bits - 1, image=image, remedy="a frame holds more than its converter's bits")
    Image.fromarray(image.astype(np.uint8 if bits <= 8 else np.uint16)).save(path)
