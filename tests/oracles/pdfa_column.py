"""One column of a PDFA update: a two-sided Renyi bound that holds, and the exact value.

Column k of layer l is N(f, (sigma/m)^2 diag(a)^2) with a_j^2 = sum_i (phi'_ij h_ik)^2 (eq. 13 of the PDFA paper),
each term between lo/n and hi/n. A bound on columns is no bound on the matrix: the columns share their noise.
"""

import math

import numpy as np

from opusim import checks


def column_bound_two_sided(
    order: float, *, batch_size: int, width: int, lo: float, hi: float, signal: float
) -> float:
    """2 alpha hi s^2 / c + n max(g(r), g(1/r)), with c = m lo - (alpha - 1)(hi - lo); infinity where c <= 0.

    r = ((m - 1) lo + hi) / (m lo) is the largest ratio of the neighbours' variances, and
    g(r) = (alpha log r - log(1 - alpha + alpha r)) / (2 (alpha - 1)) the divergence of N(0, 1) from N(0, r).
    Proof: eq. 7 coordinate by coordinate. alpha a'^2 + (1 - alpha) a^2 >= c/n for neighbours within the box, the
    signals differ by at most 2 tB sqrt(hi/n) / m in norm, and g falls before 1 and rises behind it.
    Takes the arguments of `column_bound_published`.
    """
    m = batch_size
    c = m * lo - (order - 1) * (hi - lo)
    if c <= 0:
        return math.inf
    r = ((m - 1) * lo + hi) / (m * lo)
    return 2 * order * hi * signal**2 / c + width * max(_scale(order, r), _scale(order, 1 / r))


def column_divergence(
    order: float, *, shift: np.ndarray, variance_p: np.ndarray, variance_q: np.ndarray
) -> float:
    """D_alpha(N(shift, diag(variance_p)) || N(0, diag(variance_q))), exact; infinity where not definite.

    alpha/2 sum_j shift_j^2 / (alpha q_j + (1 - alpha) p_j)
    - 1/(2 (alpha - 1)) sum_j log[(alpha q_j + (1 - alpha) p_j) / (p_j^(1 - alpha) q_j^alpha)] (eq. 7), alpha > 1.
    """
    checks.positive(variance_p=variance_p, variance_q=variance_q)
    mixed = order * variance_q + (1 - order) * variance_p
    if np.any(mixed <= 0):
        return math.inf
    quadratic = order / 2 * np.sum(np.square(shift) / mixed)
    logs = np.log(mixed) - (1 - order) * np.log(variance_p) - order * np.log(variance_q)
    return float(quadratic - np.sum(logs) / (2 * (order - 1)))


def _scale(order: float, ratio: float) -> float:
    """g(ratio) of `column_bound_two_sided`."""
    mixed = 1 - order + order * ratio
    if mixed <= 0:
        return math.inf
    return (order * math.log(ratio) - math.log(mixed)) / (2 * (order - 1))
