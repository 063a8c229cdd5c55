"""What choosing the best of K ~ Poisson(m) trials costs, each trial being mu-GDP in its output and score together.

With Q the density of a trial's (output, score) and a(y) = Q(score > y), the search releases the density
A(y) = m e^(-m a(y)) Q(y). Three bounds on its hockey-stick divergence, the least of which counts:

- Theorem 5.1 (Koskela, Redberg and Wang 2024): A is (epsilon^ + m (e^e1 - 1) + m delta(e1), m delta(epsilon^))-DP for
  every e1 >= 0; the best choice is always e1 = 0, so epsilon = epsilon^ + m delta(0) with m delta(epsilon^) = delta.
- Refined (docs/convex.md, section 4): a' <= Phi(mu + Phi^-1(a)) =: a + g(a) bounds the other world's tail pointwise, so
  H <= m E_Q'[sup_a e^(-m a) (r - e^(epsilon - m g(a)))_+], r = dQ/dQ'; a convex function of r, so the Gaussian pair
  dominates it.
- Renyi divergence (Papernot and Steinke 2022), through dp_accounting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from accounting.guarantee import Adjacency, Guarantee, Release
from accounting.numerics.loss_bounds import EpsilonBounds
from accounting.selection.mechanism import PrivateSelection
from accounting.statement import proven_guarantee, stated

if TYPE_CHECKING:
    import numpy as np


_CHECKED = (
    "the number of trials is Poisson, drawn once, before any trial and independent of the data",
    "every trial draws its settings independently from the same law, which does not depend on the data",
    "a trial's score is part of what makes it mu-GDP: Gaussian noise hides the held-out records in it",
    "the best trial's model and score alone are released; with no trial, nothing is",
)
_TRUSTED = ("no search is begun again because its result, or its number of trials, was not liked",)


def guarantees(
    mechanisms: Sequence[PrivateSelection], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """The least of the three bounds, several searches added up at equal shares of delta.

    Args:
        mechanisms: At least one.
        delta: In [0, 1).
        enforced: Whether the code that searched checked what code can check.
    """
    share = delta / sum(mechanism.steps for mechanism in mechanisms)
    found = [
        (mechanism.steps, selection_bounds(mechanism.mu, mechanism.mean, share)) for mechanism in mechanisms
    ]
    epsilon = math.fsum(steps * bounds.upper for steps, bounds in found)
    return [
        proven_guarantee(
            mechanisms,
            bounds=EpsilonBounds(
                lower=0.0 if math.isfinite(epsilon) else math.inf, upper=epsilon, method=found[0][1].method
            ),
            delta=delta,
            adjacency=Adjacency.REPLACE_ONE,
            source="docs/convex.md, section 4: private selection (Koskela, Redberg and Wang 2024, Theorem 5.1 of the "
            "paper; Papernot and Steinke 2022)",
            assumptions=stated(_CHECKED, _TRUSTED, enforced=enforced),
            device_model=any(mechanism.device_noise for mechanism in mechanisms),
            release=Release.LAST_ITERATE,
        )
    ]


def selection_bounds(mu: float, mean: float, delta: float) -> EpsilonBounds:
    """The least epsilon that one of the three bounds gives.

    Args:
        mu: Above 0.
        mean: m > 0.
        delta: In [0, 1).
    """
    if delta == 0 or mu > 25:  # e^(loss) leaves the doubles
        return EpsilonBounds(lower=math.inf, upper=math.inf, method="no numbers")
    candidates = {
        "Theorem 5.1": theorem_epsilon(mu, mean, delta),
        "refined bound": refined_epsilon(mu, mean, delta),
        "Renyi divergence": renyi_epsilon(mu, mean, delta),
    }
    method = min(candidates, key=lambda name: candidates[name])
    return EpsilonBounds(lower=0.0, upper=candidates[method], method=method)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta(epsilon) of mu-GDP: Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    from scipy.special import log_ndtr, ndtr

    first = float(ndtr(mu / 2 - epsilon / mu))
    return max(first - math.exp(min(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)), 0.0)), 0.0)


def theorem_epsilon(mu: float, mean: float, delta: float) -> float:
    """Theorem 5.1 at its best, e1 = 0: epsilon^ + m delta(0), where m delta(epsilon^) = delta."""
    from accounting.standard import gaussian_bounds

    inner = gaussian_bounds(mu, delta / mean).upper if delta < mean * gaussian_delta(mu, 0.0) else 0.0
    return inner + mean * gaussian_delta(mu, 0.0)


def renyi_epsilon(mu: float, mean: float, delta: float) -> float:
    """Papernot and Steinke 2022, Theorem 6, converted to epsilon by dp_accounting.

    A trial's Renyi divergence lambda mu^2 / 2 grows by m delta(log(1 + 1 / (lambda - 1))) + log(m) / (lambda - 1).
    """
    import numpy as np
    from dp_accounting import rdp

    orders = 1 + np.logspace(-1.5, 2.5, 400)
    spent = [
        order * mu**2 / 2
        + mean * gaussian_delta(mu, math.log1p(1 / (order - 1)))
        + max(math.log(mean), 0.0) / (order - 1)
        for order in orders.tolist()
    ]
    return float(rdp.compute_epsilon(orders, np.array(spent), delta)[0])


def refined_epsilon(mu: float, mean: float, delta: float) -> float:
    """The refined bound solved for epsilon, by bisection from above."""
    low, high = 0.0, theorem_epsilon(mu, mean, delta)
    if refined_delta(mu, mean, high) > delta:
        return math.inf  # where mu is large the cells cost more than the refinement gains
    while high - low > 1e-4 * max(high, 1e-2):
        middle = (low + high) / 2
        low, high = (middle, high) if refined_delta(mu, mean, middle) > delta else (low, middle)
    return high


def refined_delta(mu: float, mean: float, epsilon: float) -> float:
    """The refined bound, m E[sup_a e^(-m a) (r - e^(epsilon - m g(a)))_+], each cell of a grid at its worst corner."""
    import numpy as np
    from scipy.special import ndtr

    slopes, levels, turns = _lines(mu, mean)
    x = np.linspace(-mu - 9, mu + 9, 8001)
    scale = math.exp(min(epsilon, 600.0))
    ratio = np.exp(mu * x - mu**2 / 2)[1:] / scale  # at each cell's right end: what follows rises with r
    best = np.searchsorted(turns, ratio)
    worst = np.maximum(scale * slopes[best] * (ratio - levels[best]), 0.0)
    # of two tails the smaller one: Phi is 1 in doubles from 8.3 on, where r is largest
    masses = np.where(x[:-1] > 0, -np.diff(ndtr(-x)), np.diff(ndtr(x)))
    inside = float(np.sum(masses * worst)) + float(ndtr(x[0]) * worst[0])
    return mean * (inside + float(ndtr(mu - x[-1])))  # beyond the grid the sum is at most E[r; x large]


@lru_cache
def _lines(mu: float, mean: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lines e^(-m a) (u - e^(-m g(a))) of u that are highest somewhere, and where one gives way to the next.

    Every line stands for a cell of a, from its worst corner; the cells cover [0, 1].
    """
    import numpy as np
    from scipy.special import ndtr

    a = np.concatenate([[0.0], ndtr(np.linspace(-9, 9, 8001)), [1.0]])
    with np.errstate(divide="ignore"):
        other = np.concatenate([[0.0], ndtr(np.linspace(-9, 9, 8001) + mu), [1.0]])
    slopes, levels = np.exp(-mean * a[:-1]), np.exp(-mean * (other[1:] - a[:-1]))
    highest: list[tuple[float, float]] = []  # slopes rise from left to right
    turns: list[float] = []
    for slope, level in sorted(
        zip(slopes.tolist(), levels.tolist(), strict=True), key=lambda line: (line[0], -line[1])
    ):
        if highest and slope - highest[-1][0] < 1e-15:  # one line above both
            level = min(level, highest.pop()[1])
            turns = turns[: max(len(highest) - 1, 0)]
        while highest:
            turn = (slope * level - highest[-1][0] * highest[-1][1]) / (slope - highest[-1][0])
            if not turns or turn > turns[-1]:
                turns.append(turn)
                break
            highest.pop()
            turns.pop()
        highest.append((slope, level))
    return np.array([s for s, _ in highest]), np.array([level for _, level in highest]), np.array(turns)
