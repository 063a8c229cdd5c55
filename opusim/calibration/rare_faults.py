"""Test noise for faults that are rare, slow or far out, and compute the smallest fault that a calibration finds.

Readings are standardised within output and segment (`opusim.calibration.independence.standardised`): n numbers of mean
0 and mean square 1. For independent Gaussian readings they are a uniform point on a sphere in n - 1 dimensions, for
ranked ones a random order of fixed scores. So

- the sum of squares of a block of b readings, of one output or of p outputs, has a lower tail no heavier than
  chi-squared's with b or b p degrees of freedom: noise that is missing for a while, or in one reading, makes it small;
- z^2 / (n - 1) ~ Beta(1/2, (n - 2)/2): how many numbers lie far out, and how many near the mean, follows exactly. A
  tail that is cut has none beyond the cut, and numbers without noise lie near the mean;
- the k lowest frequencies of an output hold the share Beta(k, (n - 1)/2 - k) of its n: slow noise makes it large;
- numbers without noise of different outputs may agree exactly, as readings of nothing do; of N readings of a density f
  in steps of d, at most a Poisson number of mean N d f agree with one of them.

**What stays on trust.** A fault that is too small for these tests passes them. A `TrustedProperty` states the smallest
one that shows with probability 0.99 at the calibration's number of readings or frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.fft import rfft
from scipy.special import betainc, betaincinv, chdtr, ndtri, pdtr, pdtrc

from opusim.devices.certificate import TrustedProperty
from opusim.p_values import bonferroni, gamma_p_value, normal_p_value

FAR_OUT = (1000.0, 300.0, 100.0, 30.0)
"""Expected numbers of readings beyond the limits at which tails are counted."""
_MOST_FAR_OUT = 0.3  # share of all numbers that may count as far out
_NEAR = 2.5  # of the mean, times the error of a mean of n readings
_FREQUENCIES = (1, 2, 4, 8, 16)
_LEAST_BLOCK = 8  # of one output; the sum of fewer squares is near 0 by chance
_ROUNDINGS = 4.0  # roundings of the number type within which two readings may agree
_FOUND = 0.99
_MISSED = -float(ndtri(1 - _FOUND))


def least_energy(parts: Sequence[np.ndarray]) -> float:
    """Return the p-value of the block of readings with the least noise, over all outputs and at single ones.

    Args:
        parts: standardised readings of each segment, shape (readings, n_outputs).
    """
    worst, tests = 1.0, 0
    for part in parts:
        squares, block = np.square(part), 1
        while len(squares) >= 4 or block == 1:
            least = float(chdtr(block * part.shape[1], squares.sum(axis=1).min()))
            tests += len(squares)
            if block >= _LEAST_BLOCK:
                least = min(least, float(chdtr(block, squares.min())))
                tests += squares.size
            worst, block = min(worst, least), 2 * block
            squares = squares[: len(squares) // 2 * 2]
            squares = squares[::2] + squares[1::2]
    return bonferroni(worst, max(tests, 1))


def low_frequencies(parts: Sequence[np.ndarray]) -> float:
    """Return the two-sided p-value of the lowest frequencies' share of the noise, over all outputs and segments.

    Args:
        parts: standardised readings of each segment, shape (readings, n_outputs).
    """
    powers, lengths = [], []
    for part in parts:
        n = len(part)
        spectrum = rfft(part, axis=0)[1 : max(_FREQUENCIES) + 1]
        total = np.sum(np.square(spectrum.real) + np.square(spectrum.imag), axis=1)
        powers.append(2 * total / n**2)  # of each output's share, summed over outputs
        lengths.append(n)
    found = []
    for count in _frequencies(min(lengths)):
        mean = variance = value = 0.0
        for power, n, part in zip(powers, lengths, parts, strict=True):
            a, both = float(count), (n - 1) / 2
            mean += part.shape[1] * a / both
            variance += part.shape[1] * a * (both - a) / (both**2 * (both + 1))
            value += float(power[:count].sum())
        found.append(gamma_p_value(value, mean, variance))
    return bonferroni(min(found, default=1.0), len(found))


def _frequencies(readings: int) -> list[int]:
    """Return how many of the lowest frequencies of so many readings are summed: at most an eighth of all."""
    return [count for count in _FREQUENCIES if count <= max(readings // 16, 1)]


def far_out(parts: Sequence[np.ndarray]) -> float:
    """Return the two-sided p-value of the number of Gaussian readings far out.

    Args:
        parts: standardised readings of each segment, shape (readings, n_outputs).
    """
    found = []
    for limit in far_limits([part.shape for part in parts]):
        expected = sum(part.size * _beyond(limit, len(part)) for part in parts)
        count = sum(int(np.count_nonzero(np.abs(part) > limit)) for part in parts)
        tails = pdtr(count, expected), pdtrc(count - 1, expected) if count else 1.0
        found.append(2 * float(min(tails)))
    return bonferroni(min(found, default=1.0), max(len(found), 1))


def near_mean(parts: Sequence[np.ndarray]) -> float:
    """Return the two-sided p-value of the number of Gaussian readings near their output's mean.

    Args:
        parts: standardised readings of each segment, shape (readings, n_outputs).
    """
    excess = variance = 0.0
    for part in parts:
        limit = near_limit(len(part))
        within = 1 - _beyond(limit, len(part))
        excess += int(np.count_nonzero(np.abs(part) < limit)) - part.size * within
        variance += part.size * within * (1 - within)
    return normal_p_value(excess / variance**0.5)


def near_limit(readings: int) -> float:
    """Return the distance from the mean, in standard deviations, within which numbers are counted."""
    return min(_NEAR / readings**0.5, 0.6)


def far_limits(shapes: Sequence[tuple[int, ...]]) -> list[float]:
    """Return limits, standard deviations, beyond which the numbers `FAR_OUT` are expected of Gaussian readings.

    Args:
        shapes: shape of each segment, (readings, n_outputs).
    """
    total, n = sum(math.prod(shape) for shape in shapes), max(shape[0] for shape in shapes)
    counts = [count for count in FAR_OUT if count <= _MOST_FAR_OUT * total]
    return [math.sqrt((n - 1) * float(betaincinv(0.5, (n - 2) / 2, 1 - count / total))) for count in counts]


def _beyond(limit: float, readings: int) -> float:
    """Return the probability that a standardised one of so many Gaussian readings lies beyond a limit."""
    return 1 - float(betainc(0.5, (readings - 2) / 2, min(limit**2 / (readings - 1), 1.0)))


def one_value(part: np.ndarray) -> float:
    """Return the p-value of the value that most readings of one input share exactly.

    Args:
        part: shape (readings, n_outputs), of the number type in which the device gave them; each output varies.
    """
    values = np.sort(part, axis=None)
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    most = int(np.diff(np.append(starts, values.size)).max())
    if most < 2:
        return 1.0
    step = np.finfo(part.dtype).eps if np.issubdtype(part.dtype, np.floating) else 0.0
    rounding = _ROUNDINGS * float(step) * float(np.abs(values[[0, -1]]).max())
    density = 0.4 * float(np.sum(len(part) / part.std(axis=0, dtype=np.float64)))
    return bonferroni(float(pdtrc(most - 2, rounding * density)), values.size)


# What stays on trust


def missing_readings(readings: int) -> TrustedProperty:
    """Return the least share of readings whose noise may be missing at all outputs, if one such reading shows."""
    return TrustedProperty(
        text="noise is missing at all outputs in no reading",
        fault="readings without noise if they are at least",
        size=1 - (1 - _FOUND) ** (1 / readings),
        unit="of all",
    )


def missing_numbers(
    numbers: int, readings: int, level: float, *, samples: int = 1, of: str = "readings"
) -> TrustedProperty:
    """Return the least share of single numbers whose noise may be missing.

    Args:
        numbers: how many there are.
        readings: of each output.
        level: of the test.
        samples: 2 if their law is known from as many simulated numbers.
        of: what the numbers are.
    """
    within = 1 - _beyond(near_limit(readings), max(readings, 4))
    error = math.sqrt(samples * within / (numbers * (1 - within)))
    return TrustedProperty(
        text=f"noise is missing in no single number of {of}",
        fault="numbers without noise if they are at least",
        size=min(1.0, _margin(level) * error),
        unit="of all",
    )


def slow_noise(readings: int, columns: int, level: float) -> TrustedProperty:
    """Return the least share of 1/f noise in the variance, the same at all outputs.

    Args:
        readings: of a segment, n; 1/f noise lies at n/2 frequencies.
        columns: outputs times segments.
        level: of the test.
    """
    harmonic = np.cumsum(1 / np.arange(1, readings // 2 + 1))
    counts = np.array(_frequencies(readings))
    gains = readings / 2 * harmonic[counts - 1] / (counts * harmonic[-1])  # of the lowest ones' mean power
    return TrustedProperty(
        text="noise is not stronger at low frequencies (1/f)",
        fault="1/f noise of at least",
        size=min(1.0, float(np.min(_margin(level) / np.sqrt(counts * columns) / gains))),
        unit="of the variance",
    )


def repeats(readings: int) -> TrustedProperty:
    """Return the longest period with which noise may repeat that so many readings show."""
    return TrustedProperty(
        text="noise does not repeat", fault="a repeat after up to", size=float(readings), unit="readings"
    )


def cut_tails(limit: float, readings: int, of: str = "readings") -> TrustedProperty:
    """Return the farthest cut of the tails that shows.

    Numbers that are cut off lie at the cut in true standard deviations. In measured ones they scatter by the errors of
    a mean and of a deviation, so a cut shows if it lies 2.5 such errors below the limit that is looked at.

    Args:
        limit: distance beyond which numbers are counted, standard deviations.
        readings: of each output.
        of: what the numbers are.
    """
    scatter = math.sqrt((1 + limit**2 / 2) / readings)
    return TrustedProperty(
        text=f"tails of {of} are not cut",
        fault="a cut at up to",
        size=max(0.0, limit - 2.5 * scatter),
        unit="standard deviations",
    )


def _margin(level: float) -> float:
    """Return standard errors at which a two-sided test of a level finds a deviation with probability 0.99."""
    return -float(ndtri(level / 2)) + _MISSED


def third_cumulant(error: float, level: float) -> TrustedProperty:
    """Return the least loss of counts' variance that their third cumulant shows.

    Counts whose deviations are multiplied by f have the variance f^2 times Poisson's, and a third cumulant 1/f times
    that of Poisson counts of the gain that their variance tells.

    Args:
        error: relative standard error of the third cumulant.
        level: of the test.
    """
    return TrustedProperty(
        text="counts vary as much as Poisson's (third cumulants)",
        fault="a loss of at least",
        size=1 - (1 + _margin(level) * error) ** -2 if math.isfinite(error) else 1.0,
        unit="of the variance",
    )


def weak_inputs(tolerance: float, numbers: int, level: float) -> TrustedProperty:
    """Return the least loss of variance at one tried input that shows, with what the test tolerates.

    Args:
        tolerance: relative loss that is tolerated.
        numbers: readings of the input times outputs.
        level: of the test of one input.
    """
    return TrustedProperty(
        text="noise is as strong as stated at inputs that were not tried",
        fault="a loss at a tried input of at least",
        size=min(1.0, tolerance + _margin(level) * math.sqrt(2 / numbers)),
        unit="of the variance",
    )
