r"""Take frames under uniform light: reduce them to sums at once, or record them in the layout of EMVA 1288.

A recording is a folder with images and a descriptor: ``v`` version, ``n bits width height``, then for every setting
``b exposure_ns photons`` (light) or ``d exposure_ns`` (dark), followed by a line ``i images\\NAME`` for each image. Two
images are a point of the temporal series; more than two are the spatial series. Other evaluations of the standard read
it. Source: the format of the standard's reference implementation (EMVA1288 on GitHub).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from opusim import checks

TakeFrames = Callable[..., np.ndarray]
"""Called as take(count, photons=, exposure_us=, temperature_c=); gives DN, shape (count, pixels)."""
COUNT, MEAN, VARIANCE, MEAN_SQUARE = range(4)
PIXELS_LOOKED_AT = 4096
"""Pixels whose single frames are kept."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One setting of light and exposure.

    Attributes:
        photons: mean photons on a pixel in the exposure, at least 0.
        exposure_us: microseconds, or None for the device's exposure.
        temperature_c: degrees Celsius, or None for the device's temperature.
    """

    photons: float
    exposure_us: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatSeries:
    """Sums over pixels of each level.

    Attributes:
        levels: the settings.
        frames: frames of each level, F, at least 2.
        sums: shape (groups, levels, 4): over the pixels of a group, their number and the sums of the temporal mean
            [DN], of the unbiased temporal variance [DN^2], without what all pixels of a frame share, and of the
            squared temporal mean. Groups are interleaved.
        frame_means: mean over pixels of each frame, DN, shape (levels, frames).
        looked_at: frames of each level at the first pixels, shape (levels, frames, pixels): what independence is tested
            on.
    """

    levels: tuple[Level, ...]
    frames: int
    sums: np.ndarray
    frame_means: np.ndarray
    looked_at: np.ndarray

    def means(self) -> np.ndarray:
        """Return the mean of each level over all pixels, DN."""
        total = self.sums.sum(0)
        return np.asarray(total[:, MEAN] / total[:, COUNT])

    def variances(self) -> np.ndarray:
        """Return the temporal variance of each level over all pixels, DN^2."""
        total = self.sums.sum(0)
        return np.asarray(total[:, VARIANCE] / total[:, COUNT])

    def seconds(self) -> np.ndarray:
        """Return the exposures of the levels, seconds."""
        return np.array([float(level.exposure_us or 0) * 1e-6 for level in self.levels])

    def unlit(self) -> list[int]:
        """Return the levels without light."""
        return [i for i, level in enumerate(self.levels) if level.photons == 0]

    @property
    def pixels(self) -> float:
        """Number of pixels."""
        return float(self.sums[:, 0, COUNT].sum())


def take_series(take: TakeFrames, levels: Sequence[Level], *, frames: int, groups: int = 40) -> FlatSeries:
    """Take frames at every level and keep their sums.

    Half of each level's frames are taken in the order of the levels, half in the opposite order, so that a drift that
    is linear in time moves all levels alike.

    Args:
        take: see `TakeFrames`; `opusim.devices.camera.CameraDevice.flat_frames` is one.
        levels: the settings.
        frames: frames of each level, at least 2.
        groups: groups of pixels, at least 10.

    Raises:
        ValueError: fewer pixels than two a group.
    """
    checks.integer(frames=frames, minimum=2)
    there = [_Half.of(take(frames - frames // 2, **vars(level)), groups) for level in levels]
    back = [_Half.of(take(frames // 2, **vars(level)), groups) for level in reversed(levels)]
    halves = list(zip(there, reversed(back), strict=True))
    return FlatSeries(
        levels=tuple(levels),
        frames=frames,
        sums=np.stack([_sums(first, second, groups) for first, second in halves], axis=1),
        frame_means=np.stack([np.concatenate([a.frame_means, b.frame_means]) for a, b in halves]),
        looked_at=np.stack([np.concatenate([a.looked_at, b.looked_at]) for a, b in halves]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Half:
    """Frames of one level, reduced.

    Attributes:
        frame_means: shape (frames,).
        mean: temporal mean of each pixel, shape (pixels,).
        squares: of each pixel, sum over frames of the squared deviation from its mean, without frame means.
        looked_at: shape (frames, at most `PIXELS_LOOKED_AT`).
    """

    frame_means: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    looked_at: np.ndarray

    @classmethod
    def of(cls, frames: np.ndarray, groups: int) -> _Half:
        checks.integer(pixels=frames.shape[1], minimum=2 * groups, remedy="open a device with more outputs")
        dn = frames.astype(np.float64)
        frame_means, mean = dn.mean(axis=1), dn.mean(axis=0)
        rest = dn - frame_means[:, None] - mean + frame_means.mean()
        return cls(
            frame_means=frame_means,
            mean=mean,
            squares=np.sum(np.square(rest), axis=0),
            looked_at=np.array(frames[:, :PIXELS_LOOKED_AT]),
        )


def sums_of(frames: np.ndarray, kept: np.ndarray, groups: int) -> np.ndarray:
    """Sums of one setting's frames over some of their pixels, in the same groups of pixels; see `FlatSeries.sums`.

    Args:
        frames: DN, shape (frames, pixels), at least 4.
        kept: the pixels, indices.
        groups: groups of pixels; each must hold a kept one.

    Returns:
        Shape (groups, 4).
    """
    half = len(frames) // 2
    first, second = (_Half.of(part[:, kept], groups) for part in (frames[:half], frames[half:]))
    return _sums(first, second, groups, kept % groups)


def _sums(first: _Half, second: _Half, groups: int, group: np.ndarray | None = None) -> np.ndarray:
    """Both halves of a level, shape (groups, 4); group g holds every pixel g, g + groups, ... if none are given."""
    a, b, pixels = len(first.frame_means), len(second.frame_means), first.mean.size
    mean = (a * first.mean + b * second.mean) / (a + b)
    step = first.mean - second.mean
    squares = first.squares + second.squares + np.square(step - step.mean()) * a * b / (a + b)
    variance = squares / (a + b - 1) * pixels / (pixels - 1)  # a degree of freedom for each frame's mean
    columns = [np.ones_like(mean), mean, variance, np.square(mean)]
    where = np.arange(mean.size) % groups if group is None else group
    return np.stack([np.bincount(where, weights=column, minlength=groups) for column in columns], axis=1)


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
    """Take the frames and write them.

    Args:
        take: see `TakeFrames`; its pixels fill images row by row.
        recording: what to record.
        folder: a new or empty folder.
        exposure_us: the device's exposure.

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
