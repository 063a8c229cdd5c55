"""Privacy of the last iterate of a noisy recursion, by shifted interpolation (Bok, Su and Altschuler 2024).

    X_t = phi_t(X_(t-1)) + N(0, w_t^2 I),   X'_t = phi'_t(X'_(t-1)) + N(0, w_t^2 I),   X_0 = X'_0,

where every phi is c_t-Lipschitz and |phi_t(x) - phi'_t(x)| <= s_t everywhere. Then X_T is mu-GDP with

    mu^2 = min sum_t (a_t / w_t)^2   over   z_t = c_t z_(t-1) + s_t - a_t >= 0,  z_0 = z_T = 0,  a_t >= 0

(docs/convex.md, section 3, has the proof for any c_t, s_t and w_t). Discounted to the end, with
d_t = c_(t+1) ... c_T, the shifts arrive as a staircase F(V) over the noise's variance V and the schedule a is a curve
below it; the shortest one is the greatest convex function below F, so `mu_of_schedule` is exact, not a search.
"""

from __future__ import annotations

import math

import numpy as np


def mu_of_schedule(shifts: np.ndarray, noises: np.ndarray, log_factors: np.ndarray) -> float:
    """The least mu of the recursion above.

    Args:
        shifts: s_t >= 0 of each step, shape (T,).
        noises: w_t >= 0, standard deviation of each step's noise, shape (T,).
        log_factors: log c_t of each step, any sign, shape (T,).

    Returns:
        mu, infinite where a shift is followed by no noise.
    """
    later = np.concatenate([np.cumsum(log_factors[::-1])[::-1][1:], [0.0]])  # log d_t
    scale = np.exp(later - later.max())  # a common factor cancels
    starts = np.flatnonzero(shifts > 0)  # a stretch lasts from one shift to the step before the next
    if not starts.size:
        return 0.0
    rises = (shifts * scale)[starts]
    lengths = np.add.reduceat((noises * scale) ** 2, starts)
    rises, lengths = _convex(rises, lengths)
    if np.any((lengths == 0) & (rises > 0)):
        return math.inf
    moving = lengths > 0
    return math.sqrt(float(np.sum(rises[moving] ** 2 / lengths[moving])))


def _convex(rises: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of the greatest convex function below the staircase: neighbours are pooled until slopes rise.

    Increments are pooled, not sums, so a late shift that is small beside the first ones keeps its digits.
    """
    pooled: list[tuple[float, float]] = []
    for rise, length in zip(rises.tolist(), lengths.tolist(), strict=True):
        while pooled and pooled[-1][0] * length >= rise * pooled[-1][1]:
            rise, length = rise + pooled[-1][0], length + pooled[-1][1]
            pooled.pop()
        pooled.append((rise, length))
    return np.array([rise for rise, _ in pooled]), np.array([length for _, length in pooled])


def mu_general(mu0: float, batches: int, epochs: int, log_factor: float) -> float:
    """Theorem 2.8 for one learning rate and one noise, in a form that is stable for any c: below 1, at 1 and above.

    Args:
        mu0: L / (b sigma), the mu of one step alone.
        batches: k >= 1, steps of an epoch.
        epochs: E >= 1.
        log_factor: log c of a step.

    Returns:
        mu0 sqrt(1 + (E - 1) / k) at c = 1; mu0 where c = 0.
    """
    k, e, a = batches, epochs, -log_factor
    if e <= 1 or a == math.inf:
        return mu0
    if abs(a) * k * e < 1e-7:
        return mu0 * math.sqrt(1 + (e - 1) / k) * (1 + 1e-7)
    if a < 0:  # each shift is absorbed within its own epoch
        return mu0 * math.sqrt(1 + (e - 1) * math.expm1(2 * a) / math.expm1(2 * k * a))
    forgotten = math.exp(-(2 * k - 2) * a) * -math.expm1(-2 * a) / math.expm1(-k * a) ** 2
    return mu0 * math.sqrt(1 + forgotten * math.tanh(k * (e - 1) * a / 2))
