"""Renyi divergences of photon counts: exact between Poisson laws, worst over boxes of rates.

D_alpha(Poisson(a) || Poisson(b)) = (a^alpha b^(1-alpha) - alpha a + (alpha - 1) b) / (alpha - 1), summed over pixels
and frames. It is jointly convex, so over a box of rates it is largest at a corner; homogeneous, D(c a, c b) =
c D(a, b), so more light is less private; and infinite at b = 0 < a, which dark or bias light prevents.
Whatever happens to counts later (gain, read noise, full well, rounding, linear recovery) is post-processing.
Source: docs/privacy.md, section 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np
from dp_accounting.rdp import compute_epsilon

from accounting import arguments
from opusim.noise import PhotonCountNoise

ORDERS = tuple(float(order) for order in 1 + np.logspace(-2, 4, 200))


def poisson_divergence(a: np.ndarray | float, b: np.ndarray | float, order: float) -> np.ndarray:
    """B (expm1(alpha t) - alpha expm1(t)) / (alpha - 1) with t = log(a/b), rounded up; elementwise.

    Args:
        a: Rates of the first law, expected counts, at least 0.
        b: Rates of the second, of a shape that broadcasts.
        order: alpha > 1.
    """
    arguments.non_negative(a=a, b=b)
    arguments.positive(order_above_1=order - 1)
    a, b = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    safe = np.where(b > 0, b, 1.0)
    with np.errstate(over="ignore", divide="ignore"):
        t = np.log1p((a - safe) / safe)
        up, once = np.expm1(order * t), np.expm1(t)
        slack = 8 * np.finfo(float).eps * order * (np.abs(up) + np.abs(once) + 2)
        value = safe * (up - order * once + np.where(a == safe, 0.0, slack)) / (order - 1)
    value = np.where(np.isfinite(value), np.maximum(value, 0.0), np.inf)
    return np.where(b > 0, value, np.where(a > 0, np.inf, 0.0))


def box_rdp(noise: PhotonCountNoise, order: float) -> float:
    """Sum over pixels and frames of the largest divergence between two rates of the same box.

    The corners are (low, high) and (high, low); equal rates give 0.

    Args:
        noise: The boxes.
        order: alpha > 1.
    """
    low, high = np.asarray(noise.rate_low), np.asarray(noise.rate_high)
    worst = np.maximum(poisson_divergence(high, low, order), poisson_divergence(low, high, order))
    return float(np.sum(worst))


def pattern_rdp(rates: np.ndarray, order: float) -> float:
    """The largest summed divergence over ordered pairs of known patterns: sharper than boxes.

    Args:
        rates: Expected counts of each pattern (a label's, say) at every pixel and frame, shape (patterns, pixels).
        order: alpha > 1.
    """
    arguments.shape((None, None), rates=rates)
    if len(rates) < 2:
        raise ValueError(f"rates has {len(rates)} pattern: at least two are needed")
    return max(
        float(np.sum(poisson_divergence(rates[a], rates[b], order)))
        for a, b in permutations(range(len(rates)), 2)
    )


def epsilon_of_curve(curve: Sequence[float], delta: float) -> float:
    """dp_accounting's conversion of a Renyi curve over `ORDERS`; infinity where no order is finite.

    Args:
        curve: One value for each order, at least 0; infinity where there is none.
        delta: In (0, 1).
    """
    arguments.fraction(delta=delta)
    pairs = [(order, rdp) for order, rdp in zip(ORDERS, curve, strict=True) if math.isfinite(rdp)]
    if not pairs:
        return math.inf
    epsilon = float(compute_epsilon([o for o, _ in pairs], [r for _, r in pairs], delta)[0])
    return epsilon if epsilon >= 0 else math.inf
