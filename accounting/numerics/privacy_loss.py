"""Bounds on epsilon of composed additive noise, from dp_accounting's privacy loss distributions.

The upper bound is dp_accounting's "connect the dots" discretisation: its divergence curve is a chord polygon above the
mechanism's own, convex in e^epsilon. The lower bound is our dual of it: a polygon below the curve, with its corners
at the same grid points, between tangents at the middle of each interval (`_lower_pmf`). Domination of curves survives
composition, so both bounds hold for any number of steps, up to the rounding of doubles, for which delta is shifted by
`ROUNDING` per step.

Width: the discretisation adds h^2 / 6 to the variance of a step's loss, so epsilon moves by a share of about
(h / s)^2 / 12 on each side, s being the standard deviation of a step's loss. The interval is therefore s / 14 (0.04 %)
and never depends on the number of steps; it widens if the arrays would outgrow `_LARGEST_COMPOSED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MonotonePrivacyLoss

from accounting.guarantee import EpsilonBounds
from accounting.numerics.lower_polygon import LARGEST_LOSS, polygon_below

_BINS_PER_DEVIATION = 14.0
_FEWEST_BINS_PER_DEVIATION = 3.0  # bins per standard deviation below which the Renyi bound is usually better
_FINEST_INTERVAL = 1e-8  # masses are second differences of delta over the interval: rounding / interval each
_LARGEST_COMPOSED = 2**19  # loss values after composition
_LARGEST_SINGLE = 2**16  # loss values of one step: they are built one by one
ROUNDING = 2e-14  # of delta per step: fast Fourier transforms of 2^19 doubles, raised to the number of steps


@dataclass(frozen=True, kw_only=True)
class NoisyStep:
    """A step's pair of output distributions, and how often it is composed.

    Attributes:
        loss: The privacy loss of a direction, as dp_accounting's class gives it.
        upper: dp_accounting's pessimistic distribution at a given interval, both directions.
        directions: The directions of the pair.
        deviation: Approximate standard deviation of the loss; it sets the interval, and no bound depends on it.
        steps: How often the step is composed.
    """

    loss: Callable[[AdjacencyType], MonotonePrivacyLoss]
    upper: Callable[[float], distributions.PrivacyLossDistribution]
    directions: tuple[AdjacencyType, ...]
    deviation: float
    steps: int


def compose_bounds(parts: Sequence[NoisyStep], delta: float) -> EpsilonBounds | None:
    """Return bounds on epsilon(delta) of all parts, or None if delta is below the rounding or arrays are too large.

    Args:
        parts: What is composed, at least one.
        delta: In (0, 1).
    """
    above, interval = compose_upper(parts, delta), _interval(parts)
    if above is None or interval is None:
        return None
    lowest = _lower_epsilon(parts, interval, delta + _slack(parts))
    return EpsilonBounds(lower=min(lowest, above.upper), upper=above.upper, method=above.method)


def compose_upper(parts: Sequence[NoisyStep], delta: float) -> EpsilonBounds | None:
    """Return `compose_bounds` with a lower bound of 0, for pairs whose loss is no monotone function of one output."""
    if _slack(parts) > delta / 2 or (found := composed_curve(parts)) is None:
        return None
    method = f"privacy loss distribution, interval {found.interval:.3g}"
    return EpsilonBounds(lower=0.0, upper=found.epsilon(delta), method=method)


@dataclass(frozen=True, kw_only=True)
class ComposedCurve:
    """delta(epsilon) of all steps together in both directions, from above.

    Attributes:
        composed: dp_accounting's pessimistic distribution of the composed loss.
        slack: By how much rounding may change delta.
        interval: Of the grid.
    """

    composed: distributions.PrivacyLossDistribution
    slack: float
    interval: float

    def epsilon(self, delta: float) -> float:
        """Return the epsilon at a delta, infinite where delta is within the rounding."""
        return float(self.composed.get_epsilon_for_delta(max(delta - self.slack, 0.0)))

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Return the delta at each epsilon, from 0 to 1."""
        rising, places = np.unique(
            epsilons, return_inverse=True
        )  # dp_accounting takes them in ascending order
        found = np.asarray(self.composed.get_delta_for_epsilon(rising.tolist()), dtype=float)
        return np.clip(found + self.slack, 0.0, 1.0)[places]


def composed_curve(parts: Sequence[NoisyStep]) -> ComposedCurve | None:
    """Return the curve of all parts, or None if arrays are too large.

    Args:
        parts: What is composed, at least one.
    """
    interval = _interval(parts)
    if interval is None:
        return None
    composed = _compose([part.upper(interval) for part in parts], parts)
    return ComposedCurve(composed=composed, slack=_slack(parts), interval=interval)


def resolution(parts: Sequence[NoisyStep]) -> float:
    """Return the bins per standard deviation that `compose_bounds` would use, or 0 if it gives up."""
    interval = _interval(parts)
    return _typical_deviation(parts) / interval if interval else 0.0


def _slack(parts: Sequence[NoisyStep]) -> float:
    """By how much rounding may change delta."""
    return ROUNDING * sum(part.steps for part in parts)


def _compose(
    steps: Sequence[distributions.PrivacyLossDistribution], parts: Sequence[NoisyStep]
) -> distributions.PrivacyLossDistribution:
    composed = [
        step if part.steps == 1 else step.self_compose(part.steps)
        for step, part in zip(steps, parts, strict=True)
    ]
    return reduce(lambda left, right: left.compose(right), composed)


def _typical_deviation(parts: Sequence[NoisyStep]) -> float:
    total = sum(part.steps for part in parts)
    return math.sqrt(sum(part.steps * part.deviation**2 for part in parts) / total)


def _interval(parts: Sequence[NoisyStep]) -> float | None:
    """The finest interval whose arrays fit, or None if even the coarsest does not."""
    deviation = _typical_deviation(parts)
    span = max(_span(part) for part in parts)
    if not span < LARGEST_LOSS:
        return None
    interval = max(deviation / _BINS_PER_DEVIATION, span / _LARGEST_SINGLE, _FINEST_INTERVAL)
    while _composed_size(parts, interval, span) > _LARGEST_COMPOSED:
        interval *= 1.5
        if interval > deviation / _FEWEST_BINS_PER_DEVIATION:
            return None
    return interval


def _span(part: NoisyStep) -> float:
    bounds = [part.loss(direction).connect_dots_bounds() for direction in part.directions]
    return max(bound.epsilon_upper for bound in bounds) - min(bound.epsilon_lower for bound in bounds)


def _composed_size(parts: Sequence[NoisyStep], interval: float, span: float) -> float:
    """Loss values after composition; dp_accounting cuts tails by Chernoff bounds of orders 1 to 20."""
    values = span / interval
    variance = sum(part.steps * (part.deviation / interval) ** 2 for part in parts)
    return min(values * sum(part.steps for part in parts), variance / values + 70 * values)


def _lower_epsilon(parts: Sequence[NoisyStep], interval: float, delta: float) -> float:
    """Epsilon of the polygons below the curve, or 0 if the grid is too coarse for one."""
    steps = []
    for part in parts:
        pmfs = [_lower_pmf(part.loss(direction), interval) for direction in part.directions]
        if any(pmf is None for pmf in pmfs):
            return 0.0
        steps.append(distributions.PrivacyLossDistribution(*pmfs))
    return float(_compose(steps, parts).get_epsilon_for_delta(delta))


def _lower_pmf(loss: MonotonePrivacyLoss, interval: float) -> pld_pmf.PLDPmf | None:
    """Masses on the grid whose divergence curve is nowhere above the mechanism's, or None if the grid is too coarse.

    A = P(L > m) and B = Q(L > m) at the middles m. (Tail masses enter as such, not as second differences of delta, so
    they keep their relative precision.)
    """
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    grid = np.arange(low, high + 1)
    a, b = _tails(loss, (grid[:-1] + 0.5) * interval)
    found = polygon_below(np.exp(grid * interval), a, b)
    if found is None:
        return None
    first, masses = found
    grid = grid[first : first + len(masses)]
    masses *= min(1.0, 1.0 / masses.sum())
    return pld_pmf.create_pmf(dict(zip(grid.tolist(), masses.tolist(), strict=True)), interval, 0.0, False)


def _tails(loss: MonotonePrivacyLoss, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P(L > epsilon) and Q(L > epsilon): the loss falls along the output, so they are distribution functions."""
    points = np.array([_output_of(loss, epsilon) for epsilon in epsilons.tolist()])
    return np.asarray(loss.mu_upper_cdf(points)), np.exp(np.asarray(loss.mu_lower_log_cdf(points)))


def _output_of(loss: MonotonePrivacyLoss, epsilon: float) -> float:
    try:
        return loss.inverse_privacy_loss(epsilon)
    except ValueError:  # dp_accounting: the loss never falls, or never rises, so far
        return -math.inf if epsilon > 0 else math.inf
