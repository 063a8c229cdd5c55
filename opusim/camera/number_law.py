"""The exact law of a digital number: the masses of every code, given the expected electrons.

DN = clip(round(b + K f(min(N, well)) + K r z), 0, top) with N ~ Poisson(rate), z ~ N(0, 1), b the black level with the
pixel's offset (`opusim.camera.stages.Sensor`) and the read-out f(n) = n (1 - q min(n / saturation, 1)). Given N, the
code d has the mass Phi((d + 1/2 - c) / s) - Phi((d - 1/2 - c) / s), c = b + K f(min(N, well)), s = K r; masses of
codes beyond an end of the converter lie on the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr
from scipy.stats import poisson

from opusim import checks
from opusim.camera.stages import Sensor

_FAR = 8.5
"""Standard deviations beyond which the mass is lost, 1e-17."""
_NO_MASS = 1e-22
"""Masses at the ends of a sum's law that are dropped: at most 1e-17 over all its places."""
_MORE_ELECTRONS = 30
_LEAST_LOG = -745.0
"""Logarithm of the smallest double, for codes without mass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberLaw:
    """Masses of the codes of some pixels under some inputs.

    Attributes:
        first: Code of the first mass.
        masses: Shape (inputs, pixels, codes), rows of sum 1 up to rounding.
    """

    first: int
    masses: np.ndarray

    def log_likelihood(self, numbers: np.ndarray) -> np.ndarray:  # (frames, pixels) -> (frames, inputs)
        """Return log P(numbers | input), summed over pixels; a code without mass counts as the smallest double.

        Args:
            numbers: Digital numbers, whole numbers, shape (frames, pixels).
        """
        inputs, pixels, codes = self.masses.shape
        checks.shape((None, pixels), numbers=numbers)
        with np.errstate(divide="ignore"):
            logs = np.maximum(np.log(self.masses), _LEAST_LOG)
        places = np.clip(np.rint(numbers).astype(np.int64) - self.first, 0, codes - 1)
        total = np.zeros((len(places), inputs))
        for pixel in range(pixels):
            total += logs[:, pixel, :].T[places[:, pixel]]
        return total

    def sums(self, groups: Sequence[np.ndarray]) -> np.ndarray:  # (inputs, groups, sums)
        """Return the masses of the sum of the codes of each group of pixels, from `first` times pixels on.

        Args:
            groups: Numbers of the pixels of each group, equally many.
        """
        found = [self._sum_of(pixels) for pixels in groups]
        return np.stack(found, axis=1)

    def _sum_of(self, pixels: np.ndarray) -> np.ndarray:  # (inputs, sums)
        inputs, _, codes = self.masses.shape
        found = np.zeros((inputs, len(pixels) * (codes - 1) + 1))
        for row, own in enumerate(self.masses[:, pixels]):
            start, total = _with_mass(own[0])
            for part in own[1:]:
                shift, more = _with_mass(part)
                cut, total = _with_mass(np.convolve(total, more))
                start += shift + cut
            found[row, start : start + total.size] = total
        return found


def _with_mass(masses: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the first place with mass, and the masses from there to the last one; those at the ends are lost."""
    places = np.flatnonzero(masses > _NO_MASS)
    return int(places[0]), masses[places[0] : places[-1] + 1]


def number_law(
    rates: np.ndarray, offset_e: np.ndarray, sensor: Sensor, nonlinearity: float = 0.0
) -> NumberLaw:
    """Return the law of the digital numbers of some pixels.

    Args:
        rates: Expected electrons, shape (inputs, pixels), at least 0.
        offset_e: Fixed offset of each pixel, electrons, shape (pixels,).
        sensor: The stages behind the light, with shot noise and a converter.
        nonlinearity: q of the read-out, in [0, 0.25], so that numbers rise with the count.

    Raises:
        ValueError: The sensor has no shot noise, or no converter that makes numbers discrete.
    """
    checks.shape((None, None), rates=rates)
    checks.non_negative(rates=rates)
    checks.in_range(0, 0.25, nonlinearity=nonlinearity)
    if not sensor.shot_noise or sensor.adc_bits is None:
        raise ValueError(
            "sensor: needs shot noise and a converter (sensor.adc_bits), whose codes have masses"
        )
    black, gain, std = sensor.black_level_dn, sensor.gain_dn_per_e, sensor.gain_dn_per_e * sensor.read_noise_e
    well = math.inf if sensor.full_well_e is None else sensor.full_well_e
    base = black + gain * np.asarray(offset_e, dtype=float)
    slope = gain * (1 - nonlinearity)  # least mean slope, at saturation
    full = math.ceil(
        min(well, (sensor.top_dn + 1 + _FAR * std - float(base.min())) / slope)
    )  # more change no code
    least = min(_electrons(float(np.min(rates)), -1), full)
    most = min(_electrons(float(np.max(rates)), 1), full)
    low = float(base.min()) + slope * min(least, well) - _FAR * std
    high = float(base.max()) + gain * min(most, well) + _FAR * std
    first, last = (int(np.clip(np.rint(end), 0, sensor.top_dn)) for end in (low, high))
    electrons = np.arange(least, most + 1)
    centres = np.minimum(electrons, well).astype(float)
    if nonlinearity:
        centres *= 1 - nonlinearity * np.minimum(centres / sensor.saturation_e, 1)
    centres *= gain
    masses = np.empty((*np.shape(rates), last - first + 1))
    for pixel in range(np.shape(rates)[1]):
        rate = np.asarray(rates)[:, pixel, None]
        counts = poisson.pmf(electrons, rate)  # (inputs, electrons)
        counts[:, -1] += poisson.sf(most, rate[:, 0])
        codes = _code_masses(base[pixel] + centres, std, first, last)
        masses[:, pixel] = counts @ codes
    return NumberLaw(first=first, masses=masses)


def _electrons(rate: float, side: int) -> int:
    """The count below (side -1) or above (1) which a mass of 1e-17 lies."""
    return max(0, math.floor(rate + side * (_FAR * math.sqrt(rate) + _MORE_ELECTRONS)))


def _code_masses(centres: np.ndarray, std: float, first: int, last: int) -> np.ndarray:
    """Masses of clip(round(centre + std z), first, last), shape (centres, codes)."""
    codes = np.arange(first, last + 1)
    if std <= 0:
        return (np.clip(np.rint(centres), first, last)[:, None] == codes).astype(float)
    below = ndtr((codes[:-1] + 0.5 - centres[:, None]) / std)
    return np.diff(below, axis=1, prepend=0.0, append=1.0)
