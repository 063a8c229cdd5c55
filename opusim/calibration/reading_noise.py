"""Evaluate readings of constant inputs: a lower limit of their noise, its correlations, and tests of its law.

**Lower limit.** With n = readings - 1, S the sample covariance and v the unit vector that minimises v^T Sigma v for the
true Sigma, lambda_min(S) <= v^T S v = lambda_min(Sigma) chi2_n / n, so n lambda_min(S) / chi2_(n, 1 - beta) is a lower
limit of lambda_min(Sigma) at confidence 1 - beta, without a union over outputs. The smallest sample variance takes the
place of lambda_min(S) if outputs are known to be independent. Both hold only for Gaussian readings that are not
quantised and do not depend on each other. Source: docs/privacy-labels.md, section 10.

**Several inputs.** With enough readings the limit is the smallest eigenvalue's and holds for correlated outputs too;
else it is that of the smallest output's variance, which assumes independent outputs. It is the lowest over the inputs,
at beta / inputs each. If successive readings correlate by phi, the one-step prediction variance, (1 - phi^2) times the
variance, takes its place. A variance proves nothing: the law stays an assumption, which the tests must not contradict.

**Law.** Of n readings of an output, standardised (mean 0, mean square 1), Gaussian readings have a law without
parameters:

- deviates of skewness (D'Agostino 1970) and fourth moment (Anscombe, Glynn 1983) are close to N(0, 1); their means and
  mean squares over outputs are compared with those of simulated Gaussian readings, drawn once from a fixed seed. The
  squares see outputs that differ from the Gaussian in opposite ways;
- the logarithm of the Anderson-Darling statistic A^2, mean and variance fitted, is compared in the same way; the
  largest over outputs has the tail of Stephens (1986);
- how many readings lie far out, and how many near the mean;
- two readings lie within w of each other with probability at most w / (sqrt(pi) sigma); a grid makes more such pairs;
- (n - 1) s^2 / sigma^2 is chi-squared, so log s^2 at different inputs differ with variance psi'((n - 1)/2) each.

**Independence** between outputs and between readings, by statistics whose laws are known.

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
from functools import cached_property, lru_cache

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.sparse.linalg import eigsh
from scipy.special import (
    betainc,
    betaincinv,
    chdtr,
    chdtrc,
    chdtri,
    digamma,
    gammaln,
    log_ndtr,
    ndtr,
    ndtri,
    pdtr,
    pdtrc,
    polygamma,
)
from scipy.stats import kurtosistest, skewtest

from opusim import checks
from opusim.devices.certificate import TrustedProperty
from opusim.p_values import (
    FAMILY_ALARM,
    PropertyTest,
    bonferroni,
    chi_squared_p_value,
    cosine_p_value,
    decide,
    gamma_p_value,
    normal_p_value,
)

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
    """Return the p-value of the block of readings with the least noise, over all outputs and at single ones."""
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
    """Return the two-sided p-value of the lowest frequencies' share of the noise, over all outputs and segments."""
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
    """Return the two-sided p-value of the number of Gaussian readings far out."""
    found = []
    for limit in far_limits([part.shape for part in parts]):
        expected = sum(part.size * _beyond(limit, len(part)) for part in parts)
        count = sum(int(np.count_nonzero(np.abs(part) > limit)) for part in parts)
        tails = pdtr(count, expected), pdtrc(count - 1, expected) if count else 1.0
        found.append(2 * float(min(tails)))
    return bonferroni(min(found, default=1.0), max(len(found), 1))


def near_mean(parts: Sequence[np.ndarray]) -> float:
    """Return the two-sided p-value of the number of Gaussian readings near their output's mean."""
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
    """Return limits, standard deviations, beyond which the numbers `FAR_OUT` are expected of Gaussian readings."""
    total, n = sum(math.prod(shape) for shape in shapes), max(shape[0] for shape in shapes)
    counts = [count for count in FAR_OUT if count <= _MOST_FAR_OUT * total]
    return [math.sqrt((n - 1) * float(betaincinv(0.5, (n - 2) / 2, 1 - count / total))) for count in counts]


def _beyond(limit: float, readings: int) -> float:
    """Return the probability that one of `readings` standardised Gaussian readings lies beyond a limit."""
    return 1 - float(betainc(0.5, (readings - 2) / 2, min(limit**2 / (readings - 1), 1.0)))


def one_value(part: np.ndarray) -> float:
    """Return the p-value of the value that most readings of one input share exactly, in the device's number type."""
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
    """Return the least share of single numbers whose noise may be missing; `samples` 2: a law is known by samples."""
    within = 1 - _beyond(near_limit(readings), max(readings, 4))
    error = math.sqrt(samples * within / (numbers * (1 - within)))
    return TrustedProperty(
        text=f"noise is missing in no single number of {of}",
        fault="numbers without noise if they are at least",
        size=min(1.0, _margin(level) * error),
        unit="of all",
    )


def slow_noise(readings: int, columns: int, level: float) -> TrustedProperty:
    """Return the least share of 1/f noise in the variance, at n/2 frequencies of n readings, equal at all outputs."""
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
    """Return the farthest cut of the tails that shows, of numbers that are counted beyond a limit.

    Numbers that are cut off lie at the cut in true standard deviations. In measured ones they scatter by the errors of
    a mean and of a deviation, so a cut shows if it lies 2.5 such errors below the limit.
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
    """Return the least loss of counts' variance that their third cumulant, with its relative error, shows.

    Counts whose deviations are multiplied by f have the variance f^2 times Poisson's, and a third cumulant 1/f times
    that of Poisson counts with the gain that this variance suggests.
    """
    return TrustedProperty(
        text="counts vary as much as Poisson's (third cumulants)",
        fault="a loss of at least",
        size=1 - (1 + _margin(level) * error) ** -2 if math.isfinite(error) else 1.0,
        unit="of the variance",
    )


def weak_inputs(tolerance: float, numbers: int, level: float) -> TrustedProperty:
    """Return the least loss of variance at one tried input that the test shows, its tolerance included."""
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

    Segments (readings, n_outputs) are of one setting each, in order of time. `ranked` replaces readings by normal
    scores of their ranks within output and segment, ties broken at random from a fixed seed: readings are then
    exchangeable under every law, also if they are whole numbers.
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


_CORRELATED = 5.0  # standard errors of the correlation of successive readings
# five statistics in time, one of them over five frequencies; six of the law at one input
_STATISTICS_IN_TIME, _STATISTICS_OF_LAW = 25, 6


_REFERENCE_NUMBERS, _MOST_REFERENCE, _LEAST_REFERENCE = 2_000_000, 4000, 500
_REFERENCE_SEED = 20261122
_WIDTHS = (1e-6, 1e-5, 1e-4, 3e-4)  # of close pairs, in standard deviations
_COARSE = 1e-3  # roundings of the number type above this share of a standard deviation are a grid
_MARGIN = 1.1  # pairs of one output are not independent
_OUTPUTS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class ReadingNoise:
    """What readings of constant inputs say of the noise.

    Attributes:
        readings: how many of each input.
        inputs: how many inputs.
        n_outputs: outputs of each reading.
        mean_std: root mean variance over outputs and inputs, units of the reading.
        smallest_std: smallest standard deviation of an output at an input, estimate.
        smallest_std_low: its lower limit at confidence 1 - beta, for Gaussian readings only.
        beta: probability that this limit is too high.
        uses_eigenvalue: whether the limit is of the smallest eigenvalue, which correlated outputs may share.
        successive: correlation of successive readings.
        tests: of the properties that a law needs; the needed ones decide.
    """

    readings: int
    inputs: int
    n_outputs: int
    mean_std: float
    smallest_std: float
    smallest_std_low: float
    beta: float
    uses_eigenvalue: bool
    successive: float
    tests: tuple[PropertyTest, ...]

    @property
    def is_gaussian(self) -> bool:
        """Whether no test speaks against independent Gaussian readings, the same at every input."""
        return all(test.holds for test in self.tests)

    def trust(self, *, gaussian: bool) -> tuple[TrustedProperty, ...]:
        """Return the smallest faults that this number of readings shows; counts are not tested one by one."""
        shape, level = (self.readings, self.n_outputs), self.tests[0].level
        found = (
            missing_readings(self.inputs * self.readings),
            TrustedProperty(
                text="noise does not repeat",
                fault="a repeat after up to",
                size=float(self.inputs * self.readings),
                unit="readings",
            ),
            slow_noise(self.readings, self.inputs * self.n_outputs, level / _STATISTICS_IN_TIME),
        )
        if not gaussian:
            return found
        limits, numbers = far_limits([shape] * self.inputs), self.inputs * self.readings * self.n_outputs
        share = level / (_STATISTICS_OF_LAW * self.inputs + 2)
        return *found, cut_tails(limits[-1], self.readings), missing_numbers(numbers, self.readings, share)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions of a limit of Gaussian noise, which the tests cannot check."""
        outputs = (
            "the limit holds for correlated outputs too"
            if self.uses_eigenvalue
            else f"{self.readings} readings cannot bound the smallest eigenvalue of {self.n_outputs} outputs, so "
            "independent outputs are assumed"
        )
        return (
            "assumed law: Gaussian readings, independent between outputs and in time, of one variance at every input, "
            f"unchanged after calibration; {outputs}. The tests do not see noise that changes after calibration, "
            "repeats after more readings than were taken, depends on inputs that were not tried or comes from a "
            "generator, nor one output that is a sum of many others",
        )


def evaluate_readings(
    samples: np.ndarray | Sequence[np.ndarray],
    *,
    beta: float,
    alarm: float = FAMILY_ALARM,
    gaussian: bool = True,
) -> ReadingNoise:
    """Evaluate readings of one input, or of several, (inputs, readings, n_outputs), in order of time.

    They are of the number type in which the device gave them, at least 30 of an input. `alarm` is the probability that
    sound readings fail a test; a law that is not Gaussian needs independence only.
    """
    values = np.asarray(samples)
    values = values[None] if values.ndim == 2 else values
    checks.shape((None, None, None), samples=values)
    checks.finite(samples=values)
    inputs, readings, outputs = values.shape
    checks.integer(readings=readings, minimum=30, remedy="take more readings")
    parts = list(values)
    shape = shape_p_values(parts)
    variances = np.stack([np.asarray(part, dtype=np.float64).var(axis=0, ddof=1) for part in parts])
    # the correlation of successive readings, averaged over outputs and inputs; taking off the mean makes it -1/n
    standard = [standardised(part) for part in parts]
    successive = float(np.mean([np.mean(z[1:] * z[:-1]) + 1 / len(z) for z in standard]))
    return ReadingNoise(
        readings=readings,
        inputs=inputs,
        n_outputs=outputs,
        mean_std=float(np.sqrt(variances.mean())),
        smallest_std=float(np.sqrt(variances.min())),
        smallest_std_low=std_lower_limit(parts, successive=successive, beta=beta),
        beta=beta,
        uses_eigenvalue=_bounds_eigenvalue(values[0]),
        successive=successive,
        tests=decide(
            independence_p_values(parts, ranked=not gaussian) | shape,
            alarm=alarm,
            not_needed=() if gaussian else tuple(shape),
        ),
    )


def std_lower_limit(parts: Sequence[np.ndarray], *, successive: float = 0.0, beta: float) -> float:
    """Return the limit that the smallest standard deviation of every input exceeds with probability 1 - beta.

    The correlation of successive readings counts if it lies five standard errors from 0.
    """
    fresh = max(0.0, 1 - successive**2) if abs(successive) > _CORRELATED / np.size(parts) ** 0.5 else 1.0
    smallest = min(
        smallest_variance(part, independent_outputs=not _bounds_eigenvalue(part)) for part in parts
    )
    return float(
        variance_lower_limit(fresh * smallest, readings=len(parts[0]), beta=beta / len(parts)) ** 0.5
    )


def _bounds_eigenvalue(part: np.ndarray) -> bool:
    """Return whether there are readings enough to bound the smallest eigenvalue of the outputs' covariance."""
    return part.shape[1] + 2 <= len(part)


def smallest_variance(samples: np.ndarray, *, independent_outputs: bool) -> float:
    """Return the smallest sample variance of an output, or lambda_min(S), the smallest in any direction.

    The former if outputs are known to be independent; the latter needs n_outputs + 2 readings.
    """
    checks.shape((None, None), samples=samples)
    readings, outputs = samples.shape
    least = 3 if independent_outputs else outputs + 2
    checks.integer(
        readings=readings, minimum=least, remedy=f"{outputs} outputs need as many to bound their noise"
    )
    centred = np.asarray(samples, dtype=np.float64) - np.mean(samples, axis=0)
    n = readings - 1
    if independent_outputs:
        return float(np.min(np.sum(np.square(centred), axis=0)) / n)
    return max(float(np.linalg.eigvalsh(centred.T @ centred / n)[0]), 0.0)


def variance_lower_limit(variance: float, *, readings: int, beta: float) -> float:
    """Limit n variance / chi2_(n, 1 - beta), n = readings - 1, which the true one exceeds but for probability beta."""
    checks.non_negative(variance=variance)
    checks.integer(readings=readings, minimum=2)
    checks.in_range(1e-300, 1 - 1e-12, beta=beta)
    n = readings - 1
    return float(variance * n / chdtri(n, beta))


# Law of readings


def shape_p_values(segments: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the P-values of three properties of Gaussian readings that do not depend on the input.

    Segments have at least 20 readings; the rounding of the number type in which the device gave them is allowed for.
    """
    varying = np.all([np.ptp(part, axis=0) > 0 for part in segments], axis=0)
    law: dict[str, float] = {} if np.all(varying) else {"constant outputs": 0.0}
    if not np.any(varying):
        return {"each output is Gaussian": law}
    segments = [np.asarray(part)[:, varying] for part in segments]
    for number, part in enumerate(segments, start=1):
        where = f" at input {number}" if len(segments) > 1 else ""
        law |= {f"{name}{where}": value for name, value in _law(part).items()}
    standard = [standardised(part) for part in segments]
    law |= {"readings far out": far_out(standard), "readings near the mean": near_mean(standard)}
    found = {"each output is Gaussian": law, "readings lie on no grid": _grid(segments)}
    if len(segments) > 1:
        found["noise is the same at every input"] = _equal_variances(segments)
    return found


def _law(part: np.ndarray) -> dict[str, float]:
    statistics, reference = _statistics(part), _reference(len(part))
    inverse = 1 / part.shape[1] + 1 / _reference_outputs(len(part))
    found = {}
    for name, values in statistics.items():
        mean, std = reference[name]
        found[name] = normal_p_value(float(values.mean() - mean) / (std * inverse**0.5))
        if name in _DEVIATES:
            mean, variance = reference[f"{name} squared"]
            square = float(np.mean(np.square(values)))
            found[f"{name}, its square"] = gamma_p_value(square, mean, variance * inverse)
    largest, n = float(np.exp(statistics[_AD].max())), len(part)
    # Stephens in D'Agostino, Stephens, Goodness-of-Fit Techniques (1986), table 4.9; 1 below 0.6
    scaled = min(largest * (1 + 0.75 / n + 2.25 / n**2), 100.0)
    tail = 1.0 if scaled < 0.6 else float(np.exp(1.2937 - 5.709 * scaled + 0.0186 * scaled**2))
    found[f"largest {_AD}"] = bonferroni(tail, part.shape[1])
    return found


_AD = "Anderson-Darling statistic"
_DEVIATES = ("skewness", "fourth moment")


def _statistics(part: np.ndarray) -> dict[str, np.ndarray]:
    """Return for each output, shape (n_outputs,): the logarithm of A^2, and deviates that are close to N(0, 1)."""
    z, n = standardised(part), len(part)
    # A^2, at least 1e-12; the variance is that with n - 1
    weights, squares = (2 * np.arange(1, n + 1) - 1)[:, None], np.empty(z.shape[1])
    for start in range(0, z.shape[1], _OUTPUTS_AT_ONCE):
        ordered = np.sort(z[:, start : start + _OUTPUTS_AT_ONCE], axis=0) * ((n - 1) / n) ** 0.5
        logs = log_ndtr(ordered) + log_ndtr(-ordered[::-1])
        squares[start : start + _OUTPUTS_AT_ONCE] = -n - np.sum(weights * logs, axis=0) / n
    return {
        _AD: np.log(np.maximum(squares, 1e-12)),
        "skewness": skewtest(z).statistic,
        "fourth moment": kurtosistest(z).statistic,
    }


@lru_cache(maxsize=8)
def _reference(n: int) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of each statistic over simulated outputs; for squares mean and variance."""
    random = np.random.default_rng(_REFERENCE_SEED)
    statistics = _statistics(random.standard_normal((n, _reference_outputs(n))))
    found = {name: (float(values.mean()), float(values.std())) for name, values in statistics.items()}
    squares = {f"{name} squared": np.square(statistics[name]) for name in _DEVIATES}
    return found | {name: (float(values.mean()), float(values.var())) for name, values in squares.items()}


def _reference_outputs(n: int) -> int:
    """Return how many outputs of n readings are simulated."""
    return min(max(_REFERENCE_NUMBERS // n, _LEAST_REFERENCE), _MOST_REFERENCE)


def _grid(segments: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the p-values of pairs of nearly equal readings, and of a number type too coarse for the noise."""
    counts, expected, coarse = np.zeros(len(_WIDTHS) + 1), np.zeros(len(_WIDTHS) + 1), 0.0
    for part in segments:
        step = np.finfo(part.dtype).eps if np.issubdtype(part.dtype, np.floating) else 0.0
        n = len(part)
        for start in range(0, part.shape[1], _OUTPUTS_AT_ONCE):
            values = np.sort(np.asarray(part[:, start : start + _OUTPUTS_AT_ONCE], dtype=np.float64), axis=0)
            std, largest = values.std(axis=0), np.abs(values).max(axis=0)
            gaps, rounding = np.diff(values, axis=0), step * largest
            coarse = max(coarse, float(np.max(rounding / std)))
            widths = [ROUNDINGS * rounding, *(np.maximum(w * std, ROUNDINGS * rounding) for w in _WIDTHS)]
            for i, width in enumerate(widths):
                counts[i] += np.count_nonzero(gaps <= width)
                expected[i] += n * (n - 1) / 2 * np.sum((width + rounding) / (np.pi**0.5 * std))
    close = min(
        float(pdtrc(c - 1, _MARGIN * mean)) if c else 1.0 for c, mean in zip(counts, expected, strict=True)
    )
    return {
        "nearly equal readings": bonferroni(close, len(counts)),
        "roundings of the number type": 0.0 if coarse > _COARSE else 1.0,
        "one value at many outputs": bonferroni(min(map(one_value, segments)), len(segments)),
    }


def _equal_variances(segments: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the p-values of log variances at different inputs: means over outputs, spread, largest difference."""
    inputs, outputs = len(segments), segments[0].shape[1]
    half = np.array([(len(part) - 1) / 2 for part in segments])
    variances = np.stack([part.var(axis=0, ddof=1, dtype=np.float64) for part in segments])
    logs = np.log(variances) - (digamma(half) - np.log(half))[:, None]
    error2 = polygamma(1, half)
    weights = (1 / error2) / np.sum(1 / error2)
    rest = logs - weights @ logs
    deviates = rest.mean(axis=1) / np.sqrt(error2 * (1 - weights) / outputs)
    freedom = outputs * (inputs - 1)
    energy = float(np.sum(np.square(rest) / error2[:, None]))
    spread = 2 + float(np.max(polygamma(3, half) / error2**2))
    largest = float(np.max(np.abs(rest) / np.sqrt(error2 * (1 - weights))[:, None]))
    # the two-sided tail of the standardised log of chi-squared with 2 h degrees of freedom, the heavier tail twice
    h = float(half.min())
    centre, error = digamma(h) - np.log(h), float(polygamma(1, h)) ** 0.5
    tails = (
        chdtr(2 * h, 2 * h * np.exp(centre - largest * error)),
        chdtrc(2 * h, 2 * h * np.exp(centre + largest * error)),
    )
    return {
        "mean over outputs": bonferroni(normal_p_value(float(np.max(np.abs(deviates)))), inputs),
        "spread over outputs": gamma_p_value(energy, freedom, freedom * spread),
        "largest of an output": bonferroni(2 * float(max(tails)), inputs * outputs),
    }
