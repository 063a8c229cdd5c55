"""Test independence between outputs and between readings, by statistics whose laws are known.

Each segment holds readings of one setting in order of time. Standardised within a segment (mean 0, mean square 1), the
readings of an output are a uniform point on a sphere if they are Gaussian and independent, for every mean and
variance, and outputs are independent points. So, for outputs i, j and readings s, t of all N readings, p outputs and
d = sum over segments of (readings - 1):

- a correlation r_ij has the law r^2 ~ Beta(1/2, (d - 1)/2) (Fisher 1915), up to the weights of segments;
- squared correlations of different pairs are uncorrelated, of mean 1/d and variance 2 (d - 1)/(d^2 (d + 2)), so that
  their sum is tested by a gamma law (Schott 2005);
- the largest singular value of the standardised readings exceeds its mean by t with probability at most
  exp(-c t^2 / 2) (concentration on spheres), and the mean is at most that of a Gaussian matrix (Davidson, Szarek 2001);
- the mean over outputs of a reading has chi-squared energy; so has the mean over pairs of outputs at one distance;
- the cosine of two readings' vectors has the law of a correlation in p dimensions;
- autocorrelations have the first two moments that they have over all orders of the readings, exactly;
- the lowest frequencies hold their share of the noise, and no block of readings lacks it.

Sizes are tested as signed readings are: the same statistics of h(z) = Phi^-1(2 Phi(|z|) - 1), which is N(0, 1) too.
Readings that are not Gaussian are tested by the normal scores of their ranks: permutations of one vector, of the same
first two moments.

**Faults that are rare, slow or far out.** The n numbers of an output within a segment are a uniform point on a sphere
in n - 1 dimensions if readings are independent and Gaussian, for ranked ones a random order of fixed scores. So

- the sum of squares of a block of b readings, of one output or of p outputs, has a lower tail no heavier than
  chi-squared's with b or b p degrees of freedom: noise that is missing for a while, or in one reading, makes it small;
- z^2 / (n - 1) ~ Beta(1/2, (n - 2)/2): how many numbers lie far out, and how many near the mean, follows exactly. A
  tail that is cut has none beyond the cut, and numbers without noise lie near the mean;
- the k lowest frequencies of an output hold the share Beta(k, (n - 1)/2 - k) of its n: slow noise makes it large;
- numbers without noise of different outputs may agree exactly, as readings of nothing do; of N readings of a density f
  in steps of d, at most a Poisson number of mean N d f agree with one of them.

**What stays on trust.** A fault that is too small for these tests passes them. A `TrustedProperty` states the smallest
fault that shows with probability 0.99 at the calibration's number of readings or frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.sparse.linalg import eigsh
from scipy.special import betainc, betaincinv, chdtr, gammaln, ndtr, ndtri, pdtr, pdtrc

from opusim.devices.certificate import TrustedProperty
from opusim.p_values import bonferroni, chi_squared_p_value, cosine_p_value, gamma_p_value, normal_p_value

FAR_OUT = (1000.0, 300.0, 100.0, 30.0)
"""Expected numbers of readings beyond the limits at which tails are counted."""
_MOST_FAR_OUT = 0.3  # share of all numbers that may count as far out
_NEAR = 2.5  # distance that counts as near the mean, in errors of a mean of n readings
_FREQUENCIES = (1, 2, 4, 8, 16)
_LEAST_BLOCK = 8  # of one output; the sum of fewer squares is near 0 by chance
ROUNDINGS = 4.0  # roundings of the number type within which two readings may agree
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
    """Return the numbers of lowest frequencies to sum, at most an eighth of the frequencies of the readings."""
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
    """Return the probability that one of `readings` standardised Gaussian readings lies beyond a limit."""
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
    rounding = ROUNDINGS * float(step) * float(np.abs(values[[0, -1]]).max())
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


def cut_tails(limit: float, readings: int, of: str = "readings") -> TrustedProperty:
    """Return the farthest cut of the tails that shows.

    Numbers that are cut off lie at the cut in true standard deviations. In measured ones they scatter by the errors of
    a mean and of a deviation, so a cut shows if it lies 2.5 such errors below the limit.

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
    that of Poisson counts with the gain that this variance suggests.

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
    """Return the least loss of variance at one tried input that the test shows, its tolerance included.

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


PAIRED_OUTPUTS = 4096
"""Pairs are formed among the first outputs only; all other statistics use all outputs."""
_LEAST_OUTPUTS = 30  # below, the cosine of two readings is no sum of many numbers
_LEAST_TERMS = 30  # of an output's autocorrelation; fewer are not tested by themselves
_BLOCK = 1024
_TIES_SEED, _START_SEED = 20261123, 1
_TIE = 1e-6  # standard deviations below which ranks are drawn
_LAGS = 10
_EXCESS = 14.0  # of the variance of sums of squared autocorrelations over chi-squared's, times the readings


def independence_p_values(
    segments: Sequence[np.ndarray], *, ranked: bool = False
) -> dict[str, dict[str, float]]:
    """Return the P-values of the statistics of five properties; an output that is constant in a segment is left out.

    Args:
        segments: readings of one setting each, in order of time, shape (readings, n_outputs), finite, at least 8
            readings each and the same outputs in all.
        ranked: replaces readings by normal scores of their ranks within output and segment, ties broken at random from
            a fixed seed. Readings are then exchangeable under every law, also if they are whole numbers.

    Returns:
        For each property the p-value of each statistic.
    """
    varying = np.all([np.ptp(part, axis=0) > 0 for part in segments], axis=0)
    if not np.any(varying):
        return {name: {"constant": 1.0} for name in _PROPERTIES}
    kept = [np.asarray(part)[:, varying] for part in segments]
    random = np.random.default_rng(_TIES_SEED)
    signed = [standardised(_rank_scores(part, random) if ranked else part) for part in kept]
    # of sizes |z|, Phi^-1(2 Phi(|z|) - 1), which is N(0, 1) for z ~ N(0, 1)
    sizes = [standardised(-ndtri(np.clip(2 * ndtr(-np.abs(part)), 1e-15, 1 - 1e-9))) for part in signed]
    found: dict[str, dict[str, float]] = {}
    for names, parts in ((_PROPERTIES[:2], signed), (_PROPERTIES[2:4], sizes)):
        readings = _Standardised(parts)
        found[names[0]], found[names[1]] = _between_outputs(readings), _between_readings(readings)
    found[_PROPERTIES[1]]["low frequencies"] = low_frequencies(signed)
    found[_PROPERTIES[4]] = {"block of least noise": least_energy(signed)}
    return found


_PROPERTIES = (
    "outputs do not correlate",
    "readings do not repeat or follow from earlier ones",
    "sizes of the outputs' noises do not correlate",
    "sizes of noise do not follow from earlier ones",
    "noise is missing in no block of readings",
)


def standardised(samples: np.ndarray) -> np.ndarray:
    """Return each output's readings less their mean over their root mean square, float64; zeros if they do not vary."""
    centred = np.asarray(samples, dtype=np.float64) - np.mean(samples, axis=0, dtype=np.float64)
    spread = np.sqrt(np.mean(np.square(centred), axis=0))
    return np.asarray(centred / np.where(spread > 0, spread, 1.0))


def _rank_scores(part: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Phi^-1((rank - 1/2) / n) of each output's readings."""
    n, scores = len(part), np.empty(part.shape)
    levels = ndtri((np.arange(n) + 0.5) / n)[:, None]
    for start in range(0, part.shape[1], _BLOCK):
        values = np.asarray(part[:, start : start + _BLOCK], dtype=np.float64)
        values = values + _TIE * values.std(axis=0) * random.random(values.shape)
        np.put_along_axis(scores[:, start : start + _BLOCK], np.argsort(values, axis=0), levels, axis=0)
    return scores


@dataclass(frozen=True, eq=False)
class _Standardised:
    """Standardised readings of all segments, and their Gram matrix over time.

    Attributes:
        parts: of each segment, shape (readings, n_outputs).
    """

    parts: list[np.ndarray]

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(part) for part in self.parts])

    @cached_property
    def rows(self) -> np.ndarray:
        """All readings, float32, shape (N, p)."""
        return np.concatenate(self.parts).astype(np.float32)

    @cached_property
    def freedom(self) -> float:
        """d: one over the variance of a correlation of two outputs."""
        share = self.lengths / self.lengths.sum()
        return float(1 / np.sum(np.square(share) / (self.lengths - 1)))

    @cached_property
    def gram(self) -> np.ndarray:
        """Products of readings summed over outputs, or of outputs summed over readings: the smaller matrix."""
        count, outputs = self.rows.shape
        return np.asarray(self.rows @ self.rows.T if count <= outputs else self.rows.T @ self.rows)


def _between_outputs(z: _Standardised) -> dict[str, float]:
    """Return the p-values of the statistics of correlations between outputs."""
    (count, outputs), d = z.rows.shape, z.freedom
    if outputs < 2:
        return {"one output": 1.0}
    found = {}
    # 1. The largest correlation of a pair.
    columns, largest = z.rows[:, :PAIRED_OUTPUTS].T, 0.0
    for i in range(0, len(columns), _BLOCK):
        for j in range(i, len(columns), _BLOCK):
            products = np.abs(columns[i : i + _BLOCK] @ columns[j : j + _BLOCK].T)
            if i == j:
                np.fill_diagonal(products, 0.0)
            largest = max(largest, float(products.max()))
    paired = len(columns) * (len(columns) - 1) // 2
    found["largest correlation of a pair"] = bonferroni(cosine_p_value(largest / count, d), paired)
    # 2. The sum of squared correlations.
    pairs = outputs * (outputs - 1) / 2
    total = (float(np.sum(np.square(z.gram, dtype=np.float64))) / count**2 - outputs) / 2
    mean, variance = pairs / d, pairs * 2 * (d - 1) / (d**2 * (d + 2))
    found["sum of squared correlations"] = gamma_p_value(total, mean, variance)
    # 3. The largest eigenvalue.
    found["largest eigenvalue"] = 1.0
    if min(count, outputs) >= 3:
        start = np.random.default_rng(_START_SEED).standard_normal(len(z.gram)).astype(np.float32)
        top = eigsh(z.gram, k=1, v0=start, tol=1e-4, return_eigenvectors=False)[0]
        singular, free = float(np.sqrt(max(top, 0.0) / count)), z.lengths - 1.0
        mean_chi = np.sqrt(2) * np.exp(gammaln((free + 1) / 2) - gammaln(free / 2))
        scale = float(np.max(np.sqrt(z.lengths / count) / mean_chi))
        most = scale * (np.sqrt(free.sum()) + np.sqrt(outputs))
        curvature = float(np.min((z.lengths - 2) * count / z.lengths))
        found["largest eigenvalue"] = float(np.exp(-curvature * max(singular - most, 0.0) ** 2 / 2))
    # 4. The mean over outputs of each reading.
    means = z.rows.sum(axis=1, dtype=np.float64) / outputs**0.5
    weights = np.repeat((z.lengths - 1) / z.lengths, z.lengths)
    energy = float(np.sum(weights * np.square(means)))
    found["mean over outputs"] = chi_squared_p_value(energy, int(np.sum(z.lengths - 1)))
    # 5. The correlations of outputs at one distance, summed, each of variance (p - distance)/d.
    length = next_fast_len(2 * outputs, real=True)
    spectrum = np.zeros(length // 2 + 1)
    for first in range(0, count, _BLOCK):
        part = rfft(z.rows[first : first + _BLOCK], n=length, axis=1)
        spectrum += np.sum(np.square(part.real) + np.square(part.imag), axis=0)
    sums = np.abs(irfft(spectrum, n=length)[1:outputs] / count)
    found["pairs at one distance"] = largest_deviate_p_value(
        sums * np.sqrt(d / np.arange(outputs - 1, 0, -1))
    )
    return found


def _between_readings(z: _Standardised) -> dict[str, float]:
    """Return the p-values of the statistics of readings that repeat or follow from earlier ones."""
    (count, outputs), largest = z.rows.shape, 0.0
    # 1. The largest cosine of two readings.
    norms = np.sqrt(np.maximum(np.einsum("ij,ij->i", z.rows, z.rows), 1e-12))
    segment = np.repeat(np.arange(len(z.lengths)), z.lengths)
    mean = (outputs / (z.lengths[segment] - 1.0)).astype(np.float32)  # removed by centring, within a segment
    starts = range(0, count if outputs >= _LEAST_OUTPUTS else 0, _BLOCK)
    for i, j in ((i, j) for i in starts for j in starts if j >= i):
        some, others = slice(i, i + _BLOCK), slice(j, j + _BLOCK)
        products = z.rows[some] @ z.rows[others].T
        products += (segment[some, None] == segment[others]) * mean[others]
        products /= np.outer(norms[some], norms[others])
        np.abs(products, out=products)
        if i == j:
            np.fill_diagonal(products, 0.0)
        largest = max(largest, float(products.max()))
    cosine = bonferroni(cosine_p_value(largest, outputs), count * (count - 1) // 2) if starts else 1.0
    # 2. Products of readings at one lag, summed over outputs and time, up to three quarters of the readings.
    lags = np.arange(1, 3 * count // 4 + 1)
    sums = np.sum(_lagged_products(z.rows, lags.size), axis=1, dtype=np.float64)
    within = np.maximum(z.lengths[:, None] - lags, 0)
    means = -outputs * np.sum(within / (z.lengths[:, None] - 1), axis=0)
    lag = largest_deviate_p_value(np.abs(sums - means) / np.sqrt(outputs * (count - lags)))
    # 3. The largest autocorrelation of an output at a lag up to half a segment, and the first lags' squares.
    worst, tests, energy, freedom, variance = 1.0, 0, 0.0, 0, 0.0
    for part in z.parts:
        n = len(part)
        products = _lagged_products(part.astype(np.float32), n // 2)
        lags = np.arange(1, min(n // 2, n - _LEAST_TERMS) + 1)
        if lags.size:
            # the cosine of the early and the late readings of one output, at its largest
            squares = np.cumsum(np.square(part), axis=0)
            roots = np.sqrt(squares[n - 1 - lags] * (n - squares[lags - 1]))
            cosines = products[: lags.size] + ((n - lags) / (n - 1))[:, None]
            cosines /= np.maximum(roots, 1e-12)
            worst = min(worst, float(np.min(cosine_p_value(np.abs(cosines).max(axis=1), n - lags))))
            tests += outputs * lags.size
        fourth = np.mean(np.square(np.square(part)), axis=0)
        for first in range(1, min(_LAGS, n // 2) + 1):
            deviation = products[first - 1] + (n - first) / (n - 1)
            energy += float(np.sum(np.square(deviation) / _product_variance(n, first, fourth)))
            freedom += outputs
            variance += 2 * outputs * (1 + _EXCESS / n)
    return {
        "largest cosine of two readings": cosine,
        "a lag, over all outputs": lag,
        "a lag of an output": bonferroni(worst, max(tests, 1)),
        f"lags 1 to {_LAGS}, over all outputs": gamma_p_value(energy, freedom, variance),
    }


def _lagged_products(part: np.ndarray, most: int) -> np.ndarray:
    """Return the sums over time of z_s z_(s + lag), shape (lags, n_outputs), lags 1 to most."""
    n, outputs = part.shape
    length = next_fast_len(n + most, real=True)
    products = np.empty((most, outputs), dtype=np.float32)
    for start in range(0, outputs, _BLOCK):
        spectrum = rfft(part[:, start : start + _BLOCK], n=length, axis=0)
        power = np.square(spectrum.real) + np.square(spectrum.imag)
        products[:, start : start + _BLOCK] = irfft(power, n=length, axis=0)[1 : most + 1]
    return products


def _product_variance(n: int, lag: int, fourth: np.ndarray) -> np.ndarray:
    """Return the variance over all orders in time of sum z_s z_(s + lag), for outputs with the given mean fourth power.

    The sum's square has n - lag terms z_a^2 z_b^2, 2 (n - 2 lag) terms z_a^2 z_b z_c, and products of four readings.
    """
    same, linked = n - lag, 2 * max(n - 2 * lag, 0)
    apart = same**2 - same - linked
    second = (
        same * (n - fourth) / (n - 1)
        + linked * (2 * fourth - n) / ((n - 1) * (n - 2))
        + apart * (3 * n - 6 * fourth) / ((n - 1) * (n - 2) * (n - 3))
    )
    return np.asarray(second - (same / (n - 1)) ** 2)


# Laws


def largest_deviate_p_value(deviates: np.ndarray) -> float:
    """Return the p-value of the largest of several absolute standard normal numbers."""
    return bonferroni(normal_p_value(float(np.max(deviates, initial=0.0))), deviates.size)
