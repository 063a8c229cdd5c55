"""The exact law of a digital number: the masses of every code, given the expected electrons.

DN = clip(round(b + K f(min(N, well)) + K r z), 0, top) with N ~ Poisson(rate), z ~ N(0, 1), b the black level with the
pixel's offset (`opusim.camera.stages.Sensor`) and the read-out f(n) = n (1 - q min(n / saturation, 1)). Given N, the
code d has the mass Phi((d + 1/2 - c) / s) - Phi((d - 1/2 - c) / s), c = b + K f(min(N, well)), s = K r; masses of
codes beyond an end of the converter lie on the end.

**Sums of a group.** On the lattice frequencies t in [-pi, pi] the characteristic function of one number is the sum over
integers k of sinc(u / 2) exp(-s^2 u^2 / 2 + i b u + rate (e^{i K u} - 1)) with u = t + 2 pi k (Poisson summation). The
product of the terms k = 0 over the n pixels of a group depends on the sum of their rates only; if K is a whole number,
each rate enters by the factor exp(rate (e^{i K t} - 1)), so that all of it does. Otherwise the terms k != 0 are at most
beta(t) = 2 sum over k >= 1 of exp(-s^2 (2 pi k - |t|)^2 / 2) together, so that the total rate tells the mass of the
group's sum at each place up to the largest n beta (exp(-s^2 t^2 / 2) + beta)^(n - 1) (`spread_error`), if no number
lies at an end of the converter or of the well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.special import gammaln, ndtr, pdtrc, xlogy

from opusim import checks
from opusim.camera.stages import Sensor

_FAR = 8.5
"""Standard deviations beyond which the mass is lost, 1e-17."""
_NO_MASS = 1e-22
"""Masses at the ends of a sum's law that are dropped: at most 1e-17 over all its places."""
_MORE_ELECTRONS = 30
_FREQUENCIES = 20_001
"""Frequencies at which characteristic functions are bounded."""
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
        inputs, _, codes = self.masses.shape
        found = np.zeros((inputs, len(groups), len(groups[0]) * (codes - 1) + 1))
        for group, pixels in enumerate(groups):
            for row, own in enumerate(self.masses[:, pixels]):
                start, total = _with_mass(own[0])
                for part in own[1:]:
                    shift, more = _with_mass(part)
                    cut, total = _with_mass(np.convolve(total, more))
                    start += shift + cut
                found[row, group, start : start + total.size] = total
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
        counts = np.exp(
            xlogy(electrons, rate) - gammaln(electrons + 1) - rate
        )  # Poisson, (inputs, electrons)
        counts[:, -1] += pdtrc(most, rate[:, 0])
        codes = _code_masses(base[pixel] + centres, std, first, last)
        masses[:, pixel] = counts @ codes
    return NumberLaw(first=first, masses=masses)


def spread_error(sensor: Sensor, offset_e: np.ndarray, most: float, nonlinearity: float = 0.0) -> float:
    """Bound how much the law of a group's sum depends on how its total rate is spread over its pixels.

    Args:
        sensor: The stages behind the light, with shot noise and a converter.
        offset_e: Fixed offset of each pixel of the group, electrons, shape (n,).
        most: Largest expected electrons of a pixel.
        nonlinearity: q of the read-out.

    Returns:
        The distance in total variation between any two spreads of one total; infinite if the read-out bends, or a
        number may lie at an end of the converter or of the full well.
    """
    gain, std, n = sensor.gain_dn_per_e, sensor.gain_dn_per_e * sensor.read_noise_e, np.size(offset_e)
    base = sensor.black_level_dn + gain * np.asarray(offset_e, dtype=float)
    highest = _electrons(most, 1)
    ends = float(base.min()) - _FAR * std, float(base.max()) + gain * highest + _FAR * std
    if (
        nonlinearity
        or sensor.adc_bits is None
        or ends[0] < 1
        or ends[1] > sensor.top_dn - 1
        or highest >= (math.inf if sensor.full_well_e is None else sensor.full_well_e)
    ):
        return math.inf
    beyond = 4e-17 * n  # masses that lie farther than `_FAR` at the ends
    if float(gain).is_integer() or n == 1:
        return beyond
    t = np.linspace(0.0, math.pi, _FREQUENCIES)
    others = 2.01 * sum(np.exp(-np.square(std * (2 * math.pi * k - t)) / 2) for k in range(1, 10))
    height = n * others * (np.exp(-np.square(std * t) / 2) + others) ** (n - 1)
    between = math.exp(std**2 * (n + 1) * math.pi**2 / (2 * _FREQUENCIES - 2))  # frequencies off the grid
    places = n * (ends[1] - ends[0] + 1)
    return float(beyond + places * np.max(height) * between)


def _electrons(rate: float, side: int) -> int:
    """The count below (side -1) or above (1) which a mass of 1e-17 lies."""
    return max(0, math.floor(rate + side * (_FAR * math.sqrt(rate) + _MORE_ELECTRONS)))


def _code_masses(centres: np.ndarray, std: float, first: int, last: int) -> np.ndarray:
    """Masses of clip(round(centre + std z), first, last), shape (centres, codes)."""
    codes = np.arange(first, last + 1)
    if std <= 0:
        return (np.clip(np.rint(centres), first, last)[:, None] == codes).astype(float)
    steps = centres[0] + np.arange(centres.size)
    if codes.size < 3 or np.any(np.abs(centres - steps) > 4 * np.spacing(np.abs(steps))):
        below = ndtr((codes[:-1] + 0.5 - centres[:, None]) / std)
        return np.diff(below, axis=1, prepend=0.0, append=1.0)
    # one digital number an electron: masses depend on the code less the electrons only
    edges = ndtr((codes[0] + 0.5 - steps[-1] + np.arange(centres.size + codes.size - 2)) / std)
    masses = np.empty((centres.size, codes.size))
    masses[:, 0] = edges[centres.size - 1 :: -1]
    masses[:, 1:-1] = sliding_window_view(np.diff(edges), codes.size - 2)[::-1]
    masses[:, -1] = 1 - edges[: codes.size - 3 : -1]
    return masses
