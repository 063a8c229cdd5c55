"""Frames under uniform light, reduced to what photon transfer needs while they are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from opusim import checks

TakeFrames = Callable[..., np.ndarray]
"""Called as take(count, photons=, exposure_us=, temperature_c=); gives DN, shape (count, pixels)."""
COUNT, MEAN, VARIANCE, MEAN_SQUARE = range(4)


@dataclass(frozen=True, kw_only=True)
class Level:
    """One setting of light and exposure.

    Attributes:
        photons: mean photons on a pixel in the exposure, at least 0.
        exposure_us: microseconds; None for the device's own.
        temperature_c: degrees Celsius; None for the device's own.
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
            [DN], of the unbiased temporal variance [DN^2] and of the squared temporal mean. Groups are interleaved.
    """

    levels: tuple[Level, ...]
    frames: int
    sums: np.ndarray

    def means(self) -> np.ndarray:
        """Mean of each level over all pixels, DN."""
        total = self.sums.sum(0)
        return np.asarray(total[:, MEAN] / total[:, COUNT])

    def variances(self) -> np.ndarray:
        """Temporal variance of each level over all pixels, DN^2."""
        total = self.sums.sum(0)
        return np.asarray(total[:, VARIANCE] / total[:, COUNT])


def take_series(take: TakeFrames, levels: Sequence[Level], *, frames: int, groups: int = 40) -> FlatSeries:
    """Takes frames at every level and keeps their sums.

    Args:
        take: see `TakeFrames`; `opusim.devices.camera.CameraDevice.flat_frames` is one.
        levels: the settings.
        frames: frames of each level, at least 2.
        groups: groups of pixels, at least 10.

    Raises:
        ValueError: fewer pixels than two a group.
    """
    checks.integer(frames=frames, minimum=2)
    return FlatSeries(
        levels=tuple(levels),
        frames=frames,
        sums=np.stack([_sums(take, level, frames, groups) for level in levels], axis=1),
    )


def _sums(take: TakeFrames, level: Level, frames: int, groups: int) -> np.ndarray:
    """Shape (groups, 4)."""
    dn = take(frames, **vars(level)).astype(np.float64)
    checks.integer(pixels=dn.shape[1], minimum=2 * groups, remedy="open a device with more outputs")
    mean = dn.mean(axis=0)
    columns = [np.ones_like(mean), mean, dn.var(axis=0, ddof=1), np.square(mean)]
    return np.stack([[column[g::groups].sum() for column in columns] for g in range(groups)])
