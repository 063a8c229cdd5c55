"""Renyi divergences and total variation of photon counts: between Poisson laws, worst over boxes of rates.

D_alpha(Poisson(a) || Poisson(b)) = (a^alpha b^(1-alpha) - alpha a + (alpha - 1) b) / (alpha - 1), summed over pixels
and frames. It is jointly convex, so over a box of rates it is largest at a corner; homogeneous, D(c a, c b) =
c D(a, b), so more light is less private; and infinite at b = 0 < a, which dark or bias light prevents.
Whatever happens to counts later (gain, read noise, full well, rounding, linear recovery) is post-processing.
Source: docs/privacy.md, section 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from dp_accounting.rdp import compute_epsilon

from opusim import checks
from opusim.noise import PhotonCountNoise

_UP = 1 + 1e-9  # above the rounding of sums of doubles
ORDERS = tuple(float(order) for order in 1 + np.logspace(-2, 4, 200))


def poisson_divergence(a: np.ndarray | float, b: np.ndarray | float, order: float) -> np.ndarray:
    """B (expm1(alpha t) - alpha expm1(t)) / (alpha - 1) with t = log(a/b), rounded up; elementwise.

    Args:
        a: Rates of the first law, expected counts, at least 0.
        b: Rates of the second, of a shape that broadcasts.
        order: alpha > 1.
    """
    checks.non_negative(a=a, b=b)
    checks.positive(order_above_1=order - 1)
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
    """The largest summed divergence over ordered pairs of known patterns, rounded up: sharper than boxes.

    With m the geometric mean of a pixel, x = log(a/m), y = log(b/m), E = expm1(alpha x), F = expm1((1 - alpha) y):
        a^alpha b^(1-alpha) - alpha a + (alpha - 1) b
            = m (E - alpha expm1(x)) + m (F + (alpha - 1) expm1(y)) + m E F,
    so that all pairs take one matrix product, and nothing of the size of m cancels. Its rounding, at most
    (pixels + 8 alpha (1 + max |x|)) units of the summed magnitudes, is added.

    Args:
        rates: Expected counts of each pattern (a label's, say) at every pixel and frame, shape (patterns, pixels).
        order: alpha > 1.
    """
    checks.shape((None, None), rates=rates)
    checks.non_negative(rates=rates)
    checks.positive(order_above_1=order - 1)
    if len(rates) < 2:
        raise ValueError(f"rates has {len(rates)} pattern: at least two are needed")
    lit = np.asarray(rates, dtype=float)[:, np.any(np.asarray(rates) > 0, axis=0)]
    if np.any(lit == 0):
        return math.inf
    if lit.size == 0:
        return 0.0
    middle = np.exp(np.mean(np.log(lit), axis=0))
    logs = np.log(lit / middle)
    units = (lit.shape[1] + 8 * order * (1 + np.abs(logs).max())) * np.finfo(float).eps
    with np.errstate(over="ignore", invalid="ignore"):
        up, down, once = np.expm1(order * logs), np.expm1((1 - order) * logs), np.expm1(logs)
        first, second = (up - order * once) @ middle, (down + (order - 1) * once) @ middle
        sizes = (abs(up) + order * abs(once)) @ middle, (abs(down) + (order - 1) * abs(once)) @ middle
        values = first[:, None] + second + (middle * up) @ down.T
        slack = units * (sizes[0][:, None] + sizes[1] + (middle * abs(up)) @ abs(down).T)
        values = (values + slack) / (order - 1)
    pairs = values[~np.eye(len(lit), dtype=bool)]
    return float(np.max(np.where(np.isfinite(pairs), np.maximum(pairs, 0.0), np.inf)))


def total_variation_limit(root_distance: float, distance: float) -> float:
    """An upper limit of the total variation distance of two products of Poisson laws, rounded up.

    min( sqrt(1 - exp(-root_distance)), 1 - exp(-distance) ), where root_distance = sum (sqrt a - sqrt b)^2 and
    distance = sum |a - b| over pixels and frames. The first is sqrt(1 - BC^2) with the Bhattacharyya coefficient
    BC = exp(-root_distance / 2); the second couples the counts, b = a + Poisson(b - a), which differ with that
    probability. Where it is at most delta, (0, delta) holds: no Renyi curve proves epsilon 0.

    Args:
        root_distance: At least 0, may be infinite.
        distance: At least 0, may be infinite.
    """
    checks.non_negative(limits=np.minimum([root_distance, distance], 1e300))
    limit = min(math.sqrt(-math.expm1(-root_distance)), -math.expm1(-distance))
    return min(1.0, limit * _UP)


def box_variation(noise: PhotonCountNoise, readings: int = 1) -> float:
    """`total_variation_limit` of any two points of the boxes, over several readings."""
    low, high = np.asarray(noise.rate_low), np.asarray(noise.rate_high)
    roots = float(np.sum(np.square(np.sqrt(high) - np.sqrt(low))))
    return total_variation_limit(readings * roots * _UP, readings * float(np.sum(high - low)) * _UP)


def pattern_variation(rates: np.ndarray) -> float:
    """The largest `total_variation_limit` over pairs of known patterns, shape (patterns, pixels)."""
    checks.shape((None, None), rates=rates)
    checks.non_negative(rates=rates)
    roots, worst = np.sqrt(np.asarray(rates, dtype=float)), 0.0
    for i in range(1, len(rates)):
        squares = np.sum(np.square(roots[:i] - roots[i]), axis=1) * _UP
        apart = np.sum(np.abs(rates[:i] - rates[i]), axis=1) * _UP
        pairs = zip(squares.tolist(), apart.tolist(), strict=True)
        worst = max(worst, *(total_variation_limit(*pair) for pair in pairs))
    return worst


def epsilon_of_curve(curve: Sequence[float], delta: float) -> float:
    """dp_accounting's conversion of a Renyi curve over `ORDERS`; infinity where no order is finite.

    Args:
        curve: One value for each order, at least 0; infinity where there is none.
        delta: In (0, 1).
    """
    checks.in_unit_interval(closed="neither", delta=delta)
    pairs = [(order, rdp) for order, rdp in zip(ORDERS, curve, strict=True) if math.isfinite(rdp)]
    if not pairs:
        return math.inf
    epsilon = float(compute_epsilon([o for o, _ in pairs], [r for _, r in pairs], delta)[0])
    return epsilon if epsilon >= 0 else math.inf


def epsilon_of_divergence(divergence: Callable[[float], float], delta: float) -> float:
    """`epsilon_of_curve` of a Renyi divergence, computed for no more orders than can matter.

    Divergences rise with the order, and a conversion takes at most log(a / (a - 1)) + log(a) / (a - 1) < 6 off them at
    orders a >= 1.01: once one exceeds the best epsilon so far by 6, higher orders are left out. Leaving out orders is
    always sound.

    Args:
        divergence: Takes an order to the divergence, infinity where there is none.
        delta: In (0, 1).
    """
    checks.in_unit_interval(closed="neither", delta=delta)
    curve, best = [math.inf] * len(ORDERS), math.inf
    for index, order in enumerate(ORDERS):
        curve[index] = divergence(order)
        if curve[index] > best + 6:
            break
        if math.isfinite(curve[index]):
            best = min(best, float(compute_epsilon([order], [curve[index]], delta)[0]))
    return epsilon_of_curve(curve, delta)
