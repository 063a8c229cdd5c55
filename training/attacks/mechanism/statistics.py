"""Statistics of the self-test, and p-values that `opusim.p_values` does not have."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import kolmogorov, ndtr


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """<a, b> / (||a|| ||b||) of two arrays of one shape; 0 if one of them is 0."""
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / scale if scale else 0.0


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
    """Correlation of two samples, means estimated; for normal ones `cosine_p_value` of n - 1 dimensions gives its p."""
    return cosine(a - a.mean(), b - b.mean())
