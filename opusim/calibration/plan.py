"""Which frames a calibration takes: found by looking at a few, on pixels' frames that are not used again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opusim import checks
from opusim.calibration.flat_series import FlatSeries, Level, TakeFrames, take_series
from opusim.calibration.photon_transfer import LEAST_VARIANCE_DN2, PhotonTransfer

_PILOT_FRAMES = 4
_MOST_DOUBLINGS = 60
_LONGEST_US = 6e7


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much a calibration takes.

    Attributes:
        frames: frames of a level, at least 2.
        light_levels: levels of rising light below saturation, at least 6.
        dark_levels: exposures of the dark series, at least 3.
        groups: groups of pixels of the jackknife, at least 10.
        temperatures_c: none, or two temperatures between which the dark current's doubling is measured; the first is
            that of all other measurements.
    """

    frames: int = 32
    light_levels: int = 12
    dark_levels: int = 6
    groups: int = 40
    temperatures_c: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        checks.integer(frames=self.frames, minimum=2)
        checks.integer(light_levels=self.light_levels, minimum=6)
        checks.integer(dark_levels=self.dark_levels, minimum=3)
        checks.integer(groups=self.groups, minimum=10)


def take_photon_transfer(
    take: TakeFrames, plan: Plan, *, exposure_us: float, is_rounded: bool = True
) -> PhotonTransfer:
    """Finds the saturating light and an exposure long enough for dark current, then takes the series.

    Args:
        take: see `opusim.calibration.flat_series.TakeFrames`.
        plan: how much.
        exposure_us: the operating exposure.
        is_rounded: whether numbers come from a converter.

    Raises:
        ValueError: no light saturates the sensor.
    """
    cold, hot = plan.temperatures_c or (None, None)
    saturating = _saturating_photons(take)
    steps = np.linspace(0, 0.65, plan.light_levels) * saturating
    light = [
        Level(photons=float(p), exposure_us=exposure_us, temperature_c=cold)
        for p in [*steps, 20 * saturating]
    ]
    lit = _dither_photons(take, saturating) if is_rounded else 0.0
    dark = _dark_series(take, plan, lit, cold, exposure_us)
    return PhotonTransfer(
        light=take_series(take, light, frames=plan.frames, groups=plan.groups),
        dark=dark,
        exposure_us=exposure_us,
        is_rounded=is_rounded,
        warm=None if hot is None else _dark_series(take, plan, lit, hot, exposure_us),
    )


def _dark_series(
    take: TakeFrames, plan: Plan, photons: float, temperature_c: float | None, exposure_us: float
) -> FlatSeries:
    """Exposures up to one at which the dark charge shows, under constant light."""
    longest = _dark_exposure_us(take, photons, temperature_c, exposure_us)
    exposures = np.linspace(min(exposure_us, longest / 4), longest, plan.dark_levels)
    levels = [Level(photons=photons, exposure_us=float(t), temperature_c=temperature_c) for t in exposures]
    return take_series(take, levels, frames=plan.frames, groups=plan.groups)


def _saturating_photons(take: TakeFrames) -> float:
    """Photons at which the mean stops to rise, found by doubling the light until the rise no longer doubles."""
    dark = float(np.mean(take(_PILOT_FRAMES, photons=0.0)))
    photons, before = 1.0, dark
    for _ in range(_MOST_DOUBLINGS):
        mean = float(np.mean(take(_PILOT_FRAMES, photons=photons)))
        if before - dark > 4 and mean - before < 0.75 * (before - dark):
            return 0.5 * photons * (mean - dark) / (before - dark)
        photons, before = 2 * photons, mean
    raise ValueError(f"photons = {photons:g}: do not saturate the sensor; does the device see the light?")


def _dither_photons(take: TakeFrames, saturating: float) -> float:
    """The least light, from none in steps of two, whose noise smooths the converter's steps."""
    photons = 0.0
    while photons < saturating / 4:
        dn = take(4 * _PILOT_FRAMES, photons=photons)
        if float(np.mean(np.var(dn, axis=0, ddof=1))) > 1.2 * LEAST_VARIANCE_DN2:
            return photons
        photons = max(2 * photons, saturating / 4096)
    return photons


def _dark_exposure_us(
    take: TakeFrames, photons: float, temperature_c: float | None, exposure_us: float
) -> float:
    """An exposure at which the dark charge moves the mean by 3 standard deviations of a pixel, at most a minute."""
    first = take(_PILOT_FRAMES, photons=photons, temperature_c=temperature_c)
    spread, longest = float(np.sqrt(np.mean(np.var(first, axis=0, ddof=1)))), exposure_us
    while longest < _LONGEST_US:
        mean = float(
            np.mean(take(_PILOT_FRAMES, photons=photons, exposure_us=longest, temperature_c=temperature_c))
        )
        if mean - float(np.mean(first)) > 3 * max(spread, 0.3):
            return longest
        longest = min(4 * longest, _LONGEST_US)
    return longest
