"""The medium at any time: a stationary Ornstein-Uhlenbeck process of every entry, computed without its past.

Time t is taken in units of tau and rounded to the grid t_m = m / 4096. On the grid every entry is a Gaussian process
with mean 0, variance 1 and correlation exp(-|t - s|) between any two times: a sum of independent media Z_k, one for
each grid point k (its epoch), whose weights are fixed numbers. Every eighth tau is a node of a chain,
    X_0 = Z_0,   X_n = sqrt(1 - r^2) Z_n + r Z_(n-1),   r = exp(-8),
and between two nodes the midpoint m of an interval (a, b) of length 2 d is drawn from its law given the ends,
    X_m = (X_a + X_b) / (2 cosh d) + sqrt(tanh d) Z_m,
down to the point sought: at most 18 media, whatever the time. Deviations from exp(-|t - s| / tau): at most 2.5e-4 by
the grid, which moves each of the two times by at most tau / 8192, and 1.2e-7 by the chain, which forgets after two
nodes.
Entries keep the tail cut and the rounding to 2^-12 of `opusim.medium`. Source for the midpoint: the Gaussian law of an
Ornstein-Uhlenbeck bridge, Gillespie, Phys. Rev. E 54, 2084 (1996), exact for any step.
"""

from __future__ import annotations

import math
from functools import lru_cache

STEPS_PER_TAU = 4096
_NODE = 8 * STEPS_PER_TAU
MOST_TAU = (2**32 - 2 * _NODE) // STEPS_PER_TAU
"""Latest time, in units of tau: grid points are 32-bit epochs of the medium."""


def grid_point(time: float) -> int:
    """The grid point nearest a time in units of tau.

    Raises:
        ValueError: it is negative, or beyond 1,048,560 tau.
    """
    if not 0 <= time <= MOST_TAU:
        raise ValueError(
            f"time = {time:g} decorrelation times: must lie in [0, {MOST_TAU}]; begin a new medium"
        )
    return round(time * STEPS_PER_TAU)


@lru_cache(maxsize=64)
def medium_weights(point: int) -> tuple[tuple[int, float], ...]:
    """Epochs of the media that make up the medium at a grid point, and their weights: coarse ones first.

    The squares of the weights sum to 1, up to 1e-10. At point 0 it is the medium of epoch 0 itself.
    """
    low = point - point % _NODE
    left = _node_weights(low)
    if low == point:
        return tuple(left.items())
    right, high = _node_weights(low + _NODE), low + _NODE
    while True:
        middle, half = (low + high) // 2, (high - low) / 2 / STEPS_PER_TAU
        share = 0.5 / math.cosh(half)
        mixed = {epoch: share * (left.get(epoch, 0.0) + right.get(epoch, 0.0)) for epoch in {**left, **right}}
        mixed[middle] = math.sqrt(math.tanh(half))
        if middle == point:
            return tuple(mixed.items())
        if point < middle:
            high, right = middle, mixed
        else:
            low, left = middle, mixed


def _node_weights(point: int) -> dict[int, float]:
    """The chain at a node."""
    if point == 0:
        return {0: 1.0}
    r = math.exp(-_NODE / STEPS_PER_TAU)
    return {point - _NODE: r, point: math.sqrt(1 - r * r)}
