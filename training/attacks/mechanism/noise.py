"""Checks of numbers that should be independent N(0, 1): what a run adds to the sums that it releases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.special import kolmogorov, ndtr

from opusim.p_values import bonferroni, chi_squared_p_value, cosine_p_value, doubt, normal_p_value
from training.attacks.mechanism.report import Check

LAGS = (1, 2, 3, 4)
_PARTS, _LEAST_PART = 32, 8
"""Most parts of a step whose variances are compared, and the fewest coordinates of one."""
_LEAST_PRODUCTS = 1000
"""Fewest products at a distance: the tail of their sum at 1e-9 is then normal up to a third."""


def shared(checks: Sequence[Check], level: float) -> tuple[Check, ...]:
    """Give each check an equal share of the family level."""
    return tuple(replace(check, level=level / len(checks)) for check in checks)


def noise_checks(noise: np.ndarray) -> list[Check]:
    """Check numbers that should be independent N(0, 1), shape (runs, steps, coordinates)."""
    return [
        _noise_variance(noise),
        _variance_in_a_step(noise),
        _variance_in_a_part(noise),
        _noise_mean(noise),
        _noise_law(noise),
        *(_lag(noise, lag) for lag in LAGS),
        _any_two(noise),
        _between_coordinates(noise),
    ]


def signal_noise_checks(noise: np.ndarray) -> list[Check]:
    """Check the noise along the layers' inputs, shape (runs, steps, coordinates)."""
    return [
        _noise_variance(noise, "noise on signals: variance"),
        _any_two(noise, "noise on signals: any two steps"),
        *(_lag(noise, lag, "noise on signals") for lag in LAGS[:1]),
    ]


def _noise_variance(noise: np.ndarray, name: str = "noise: variance") -> Check:
    total = float(np.sum(np.square(noise)))
    return Check(
        name=name,
        observed=total / noise.size,
        expected=1.0,
        standard_error=math.sqrt(2 / noise.size),
        p_value=chi_squared_p_value(total, noise.size),
        finds="noise weaker or stronger than accounted",
    )


def _variance_in_a_step(noise: np.ndarray) -> Check:
    """Check the step whose noise has the least likely variance: an empty batch may be one without noise."""
    steps = noise.reshape(-1, noise.shape[2])
    return least_likely_variance(
        "noise: variance in a step", list(steps), "a step without noise, or with less"
    )


def _variance_in_a_part(noise: np.ndarray) -> Check:
    """Check the part of a step, some neighbouring coordinates, whose noise has the least likely variance."""
    count = max(1, min(_PARTS, noise.shape[2] // _LEAST_PART))
    parts = np.array_split(noise, count, axis=2)
    return least_likely_variance("noise: variance in a part", parts, "a part of a step without noise")


def least_likely_variance(name: str, parts: Sequence[np.ndarray], finds: str) -> Check:
    """Check the least likely variance of several arrays of independent N(0, 1)."""
    found = [(chi_squared_p_value(float(np.sum(np.square(part))), part.size), part) for part in parts]
    p, part = min(found, key=lambda pair: doubt(pair[0]))
    return Check(
        name=name,
        observed=float(np.mean(np.square(part))),
        expected=1.0,
        standard_error=math.sqrt(2 / part.size),
        p_value=bonferroni(p, len(parts)),
        finds=finds,
    )


def _noise_mean(noise: np.ndarray) -> Check:
    error = 1 / math.sqrt(noise.size)
    return Check(
        name="noise: mean",
        observed=float(noise.mean()),
        expected=0.0,
        standard_error=error,
        p_value=normal_p_value(float(noise.mean()) / error),
        finds="noise that is not centred, records in coordinates that none should touch",
    )


def _noise_law(noise: np.ndarray) -> Check:
    distance = kolmogorov_distance(noise)
    root = math.sqrt(noise.size)
    return Check(
        name="noise: distance from normal",
        observed=distance,
        expected=0.8687 / root,  # mean and standard deviation of the limit law
        standard_error=0.2603 / root,
        p_value=kolmogorov_p(distance, noise.size),
        finds="another law with the same variance",
    )


def _lag(noise: np.ndarray, lag: int, name: str = "noise") -> Check:
    """Check the correlation of steps t and t + lag, for each phase t mod (lag + 1), whose pairs share no step."""
    firsts = [np.arange(phase, noise.shape[1] - lag, lag + 1) for phase in range(lag + 1)]
    pairs = [(noise[:, first], noise[:, first + lag]) for first in firsts]
    return least_likely(f"{name}: steps {lag} apart", pairs, "noise used again")


def _any_two(noise: np.ndarray, name: str = "noise: any two steps") -> Check:
    r, pairs = largest_pair(noise.reshape(-1, noise.shape[2]))
    p = bonferroni(cosine_p_value(r, noise.shape[2]), pairs)
    text = "noise used again at any distance, or in another run"
    return correlation(name, r, noise.shape[2], p, text)


def _between_coordinates(noise: np.ndarray) -> Check:
    """Check the mean product of two coordinates of a step, for every distance at which enough products are known.

    Products at one distance are uncorrelated and of variance 1, so that a sum of many is normal.
    """
    rows, size = noise.shape[0] * noise.shape[1], noise.shape[2]
    spectrum = np.fft.rfft(noise, 2 * size, axis=2)
    sums = np.fft.irfft(np.sum(np.square(np.abs(spectrum)), axis=(0, 1)), 2 * size)
    distances = np.arange(1, max(size - _LEAST_PRODUCTS // rows, 2))
    counts = np.maximum(rows * (size - distances), 1)
    deviations = sums[distances] / np.sqrt(counts)
    worst = int(np.argmax(np.abs(deviations)))
    return Check(
        name="noise: coordinates of a step",
        observed=float(deviations[worst]) / math.sqrt(counts[worst]),
        expected=0.0,
        standard_error=1 / math.sqrt(counts[worst]),
        p_value=bonferroni(normal_p_value(float(deviations[worst])), len(distances)),
        finds="one number for several coordinates, a part that repeats another",
    )


def least_likely(name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]], finds: str) -> Check:
    """Check the least likely of several correlations whose means are known to be 0."""
    found = []
    for a, b in pairs:
        r = cosine(a, b)
        found.append((float(cosine_p_value(r, a.size)), r, a.size))
    p, r, dimension = min(found, key=lambda pair: doubt(pair[0]))
    return correlation(name, r, dimension, bonferroni(p, len(found)), finds)


def correlation(name: str, r: float, dimension: int, p_value: float, finds: str) -> Check:
    """Return the check of a cosine whose mean is known to be 0."""
    return Check(
        name=name,
        observed=r,
        expected=0.0,
        standard_error=1 / math.sqrt(dimension),
        p_value=p_value,
        finds=finds,
    )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return <a, b> / (||a|| ||b||) of two arrays of one shape; 0 if one of them is 0."""
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / scale if scale else 0.0


def kolmogorov_distance(values: np.ndarray) -> float:
    """Return the largest distance of the empirical distribution function from that of N(0, 1)."""
    expected = ndtr(np.sort(values, axis=None))
    n = len(expected)
    ranks = np.arange(n + 1) / n
    return float(max(np.max(ranks[1:] - expected), np.max(expected - ranks[:-1])))


def kolmogorov_p(distance: float, n: int) -> float:
    """Return the p-value of a Kolmogorov distance of n independent values, by the limit law of large n."""
    return float(kolmogorov(distance * math.sqrt(n)))


def largest_pair(rows: np.ndarray) -> tuple[float, int]:
    """Return the cosine of largest magnitude between two rows (n, d), and the number of pairs."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1.0)
    upper = np.triu_indices(len(rows), 1)
    found = (unit @ unit.T)[upper]
    return float(found[np.argmax(np.abs(found))]), len(found)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Return the sample correlation; for normal samples, `cosine_p_value` in n - 1 dimensions gives its p-value."""
    return cosine(a - a.mean(), b - b.mean())
