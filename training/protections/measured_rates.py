"""Rates of a few known patterns at each pixel of a camera, measured with limits: no medium, no response is assumed.

Each pattern is shown R times at the described light, and R frames are taken without light. With K the gain [DN/e-],
v the variance of a frame without light [DN^2] and x the mean number that a pattern adds, the difference D of the two
means is that of Poisson counts and Gaussian noise, a sub-gamma number: at each side

    P(|D - x| > sqrt(2 t (2 v + K x) / R) + K t / (3 R)) <= e^-t

(Boucheron, Lugosi and Massart 2013, section 2.4); v is at most its chi-squared limit, and rounding moves a mean by at
most exp(-2 pi^2 v) / pi. Limits in electrons are divided by the lower limit of K: at another K the light is less by one
factor for all pixels, which is dimming (theorem measured-rates).

**Drift.** The patterns are shown again after the labels, and the run ends unless the limits of that measurement lie
within the stated ones. The stated limits are therefore wider, to allow for the difference of two measurements of steady
rates: drift beyond them is found with probability 1 - beta, and steady rates end a run with probability `_ALARM` at
most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy.stats import chi2

from opusim.devices.camera import CameraDevice
from opusim.errors import DeviceFault

SHARE = 0.1
"""Share of the delta that a certificate leaves: the probability that limits measured before or after are wrong."""
LEAST_FRAMES = 500
_ALARM = 1e-4
_SPARE = 1.5
"""Largest ratio of two chi-squared limits of one variance, from at least `LEAST_FRAMES` frames."""
_FULL = 0.9
"""Share of the converter's or the well's range above which a pattern's mean may be clipped."""
_NUMBERS_AT_ONCE = 2**22


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRates:
    """Statistics of each pixel over frames of the patterns.

    Attributes:
        light_dn: D of each pattern, shape (patterns, pixels).
        dark_dn: mean number without light, shape (pixels,).
        variance_dn2: upper limit of v, shape (pixels,).
        full: highest mean number of a pattern at each pixel, as a share of the range, shape (pixels,).
        count: R.
        gain: limits of K, DN per electron.
        beta: probability that a limit is wrong, in (0, 1).
    """

    light_dn: np.ndarray
    dark_dn: np.ndarray
    variance_dn2: np.ndarray
    full: np.ndarray
    count: int
    gain: tuple[float, float]
    beta: float

    @classmethod
    def of(
        cls, device: CameraDevice, patterns: int, *, count: int, gain: tuple[float, float], beta: float
    ) -> Self:
        """Measure R frames of the first unit vectors, one at a time, and frames without light.

        `count` is R, at least `LEAST_FRAMES`, `gain` has limits of K, and `beta` bounds the probability that any limit
        of the measurement is wrong; half of it is for the variances.
        """
        width = device.n_outputs
        sums, squares = np.zeros((patterns + 1, width)), np.zeros(width)
        at_once = max(1, _NUMBERS_AT_ONCE // width)
        for start in range(0, count, at_once):
            part = min(at_once, count - start)
            for pattern, row in enumerate(torch.eye(patterns, device.n_inputs)):
                frames = device.dimmed_frames(row.expand(part, -1), 1.0)
                sums[pattern] += frames.sum(axis=0, dtype=np.float64)
            dark = device.flat_frames(part).astype(np.float64)
            sums[-1] += dark.sum(axis=0)
            squares += np.square(dark).sum(axis=0)
        means = sums / count
        variance = np.maximum(squares - count * np.square(means[-1]), 0.0)  # times R - 1
        sensor = device.exposure.sensor
        top_dn = sensor.black_level_dn + sensor.gain_dn_per_e * sensor.saturation_e
        return cls(
            light_dn=means[:-1] - means[-1],
            dark_dn=means[-1],
            variance_dn2=variance / chi2.ppf(beta / (2 * width), count - 1),
            full=means.max(axis=0) / top_dn,
            count=count,
            gain=gain,
            beta=beta,
        )

    @property
    def usable(self) -> np.ndarray:
        """Numbers of the pixels that no pattern fills."""
        return np.flatnonzero(self.full < _FULL)

    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the stated lower and upper limits of light, electrons, each of shape (patterns, pixels)."""
        t, alarm = (math.log(4 * self.light_dn.size / p) for p in (self.beta, _ALARM))
        spare = _SPARE * self.variance_dn2
        low, high = (
            self._moved(self._moved(self.light_dn, side, alarm, 2, spare), side, t, 1, spare)
            for side in (-1, 1)
        )
        return np.maximum(low, 0.0) / self.gain[0], np.maximum(high, 0.0) / self.gain[0]

    def _moved(
        self, from_dn: np.ndarray, side: int, t: float, measurements: int, variance_dn2: np.ndarray
    ) -> np.ndarray:
        """Return the limit of x on one side of D, DN: the farthest x that D does not exclude.

        It lies s beyond the terms that do not depend on x, s^2 = (2 t / R) (2 v + K (D +- s)).
        """
        gain, share = self.gain[1], 2 * t * measurements / self.count
        rounding = 2 * np.exp(-2 * math.pi**2 * variance_dn2 / _SPARE) / math.pi
        start = from_dn + side * (gain * t / (3 * self.count) + rounding)
        constant = 4 * share * (2 * variance_dn2 + gain * np.maximum(start, 0.0))
        s = (side * share * gain + np.sqrt((share * gain) ** 2 + constant)) / 2
        return np.asarray(start + side * s)

    def require_same(self, again: MeasuredRates, pixels: np.ndarray, name: str) -> None:
        """Raise DeviceFault if kept pixels' rates, measured again after the labels, lie beyond the stated limits."""
        stated, t = self.limits(), math.log(4 * again.light_dn.size / again.beta)
        # limits of x as measured now, in electrons
        low, high = (
            again._moved(again.light_dn, side, t, 1, again.variance_dn2) / self.gain[0] for side in (-1, 1)
        )
        beyond = (np.maximum(low, 0.0) < stated[0]) | (high > stated[1])
        beyond = beyond[:, pixels]
        if beyond.any():
            change = float(np.mean(again.light_dn[:, pixels]) / np.mean(self.light_dn[:, pixels])) - 1
            raise DeviceFault(
                f"device {name!r}: rates of the labels' patterns left their limits at {int(beyond.any(axis=0).sum())} "
                f"of {pixels.size} pixels while labels were shown (mean light {change:+.2%}); nothing was kept of the "
                "labels. Let laser and medium settle, and begin again"
            )
