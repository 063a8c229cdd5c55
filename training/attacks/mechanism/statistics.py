"""Two-sided p-values of the self-test; exact for Gaussian noise unless a function says otherwise.

With a and b independent in R^d, b of law N(0, I), the cosine r of their angle has r^2 ~ Beta(1/2, (d - 1)/2) whatever a
is. That is the law of a correlation whose means are known to be 0, and it needs nothing of a: one vector may stand for
many steps in a row.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betainc, chdtr, chdtrc, erfc, kolmogorov, ndtr


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """<a, b> / (||a|| ||b||) of two arrays of one shape; 0 if one of them is 0."""
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / scale if scale else 0.0


def cosine_p(r: float | np.ndarray, dimension: int) -> np.ndarray:
    """P(|cosine| >= |r|) in R^dimension, dimension at least 2; see the module."""
    return np.asarray(betainc((dimension - 1) / 2, 0.5, 1 - np.minimum(np.square(r), 1.0)))


def variance_p(sum_of_squares: float, degrees: int) -> float:
    """Two-sided p of a sum of so many squares of N(0, 1)."""
    return min(1.0, 2 * min(float(chdtr(degrees, sum_of_squares)), float(chdtrc(degrees, sum_of_squares))))


def normal_p(z: float) -> float:
    """P(|N(0, 1)| >= |z|)."""
    return float(erfc(abs(z) / math.sqrt(2)))


def kolmogorov_distance(values: np.ndarray) -> float:
    """Largest distance of the empirical distribution function from that of N(0, 1)."""
    expected = ndtr(np.sort(values, axis=None))
    n = len(expected)
    ranks = np.arange(n + 1) / n
    return float(max(np.max(ranks[1:] - expected), np.max(expected - ranks[:-1])))


def kolmogorov_p(distance: float, n: int) -> float:
    """P(distance at least so large) for n independent values, by the limit law of large n."""
    return float(kolmogorov(distance * math.sqrt(n)))


def largest_pair(rows: np.ndarray) -> tuple[float, int]:
    """The largest |cosine| between two of the rows (n, d), with its sign, and the number of pairs."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1.0)
    upper = np.triu_indices(len(rows), 1)
    found = (unit @ unit.T)[upper]
    return float(found[np.argmax(np.abs(found))]), len(found)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of two samples, means estimated; `cosine_p` with dimension n - 1 gives its p for normal samples."""
    return cosine(a - a.mean(), b - b.mean())
