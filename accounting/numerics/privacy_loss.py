"""Bounds on epsilon of composed steps from the distribution of their privacy loss, with all numerical error counted.

Each step's law of loss lies between two laws on a grid (`loss_grids`); domination of divergence curves survives
composition (`tilted_law`), so the composed grids enclose epsilon for any number of steps. A plan (`loss_plan`) sets the
interval from the size of the answer. If the bounds still are apart, the interval is refined, or widened where rounding
separates them; the best of all bounds count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from accounting.errors import NoGuarantee
from accounting.guarantee import EpsilonBounds
from accounting.numerics.loss_laws import LossLaw
from accounting.numerics.loss_plan import plan_of
from accounting.numerics.tilted_law import Plan, TiltedLaw, composed

_REFINEMENTS, _GAP = 2, 5e-3
"""How often an interval is refined, and the distance of both bounds, in shares of epsilon, from which it is."""
_LEAST_GAP, _LARGE, _LARGE_GAP = 1e-6, 2**17, 2e-4
"""That distance at least, and that of transforms with as many points."""
_COARSER = 4.0
"""By how much wider an interval becomes if rounding, which falls with it, separates the bounds."""


@dataclass(frozen=True, kw_only=True)
class NoisyStep:
    """A step, and how often it is composed.

    Attributes:
        laws: The law of its loss in each direction.
        steps: At least 1.
    """

    laws: tuple[LossLaw, ...]
    steps: int


def compose_bounds(parts: Sequence[NoisyStep], delta: float) -> EpsilonBounds | None:
    """Return bounds on epsilon(delta) of all parts, or None if doubles cannot follow.

    Args:
        parts: What is composed, at least one, all with the same number of directions.
        delta: In (0, 1).
    """
    lower, upper = 0.0, 0.0
    try:
        plans = _plans(parts, delta)
        for plan in plans or ():
            low, high = _enclosed(plan, delta, lower)
            lower, upper = max(lower, low), max(upper, high)
    except NoGuarantee:
        return None
    if plans is None:
        return None
    if math.isinf(upper):
        return None
    return EpsilonBounds(lower=min(lower, upper), upper=upper, method=_method(plans))


def _enclosed(plan: Plan, delta: float, least: float) -> tuple[float, float]:
    """Bounds on epsilon of one direction; they need not be close below `least`, which another direction reaches."""
    low, high = 0.0, math.inf
    for _ in range(_REFINEMENTS + 1):
        below, above = composed(plan, plan.below()), composed(plan, plan.above())
        low, high = max(low, below.least_epsilon(delta)), min(high, above.largest_epsilon(delta))
        gap = high - max(low, least)
        wanted = max(_GAP * high, _LARGE_GAP if len(above.losses) >= _LARGE else _LEAST_GAP)
        if gap <= wanted:
            break
        by_grid = above.without_error().largest_epsilon(delta) - below.without_error().least_epsilon(delta)
        share = max(0.5 * wanted / gap, 0.1) if by_grid > 0.5 * gap else _COARSER
        interval = max(plan.interval * share, plan.finest)
        if 0.9 < interval / plan.interval < 1.1:
            break
        plan = replace(plan, interval=interval)
    return low, high


def compose_upper(parts: Sequence[NoisyStep], delta: float) -> EpsilonBounds | None:
    """Return `compose_bounds` with a lower bound of 0, for steps whose law is an upper bound itself."""
    found = composed_curve(parts, [delta])
    if found is None or math.isinf(upper := found.epsilon(delta)):
        return None
    return EpsilonBounds(lower=0.0, upper=upper, method=found.method)


@dataclass(frozen=True, kw_only=True)
class ComposedCurve:
    """delta(epsilon) of all steps together, the largest of all directions, from above.

    Attributes:
        laws: For each delta at which the curve is sharp, the law of each direction.
        method: How it was computed.
    """

    laws: tuple[tuple[TiltedLaw, ...], ...]
    method: str

    def epsilon(self, delta: float) -> float:
        """Return the epsilon at a delta, infinite where it is not known."""
        return min(max(law.largest_epsilon(delta) for law in laws) for laws in self.laws)

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Return the delta at each epsilon, from 0 to 1."""
        found = [np.max([law.deltas(epsilons) for law in laws], axis=0) for laws in self.laws]
        return np.asarray(np.min(found, axis=0))


def composed_curve(parts: Sequence[NoisyStep], deltas: Sequence[float]) -> ComposedCurve | None:
    """Return the curve of all parts, or None if doubles cannot follow.

    Args:
        parts: What is composed, at least one, all with the same number of directions.
        deltas: In (0, 1): where the curve is sharp, at least one.
    """
    laws, method = [], ""
    try:
        for delta in deltas:
            plans = _plans(parts, delta)
            if plans is None:
                return None
            laws.append(tuple(composed(plan, plan.above()) for plan in plans))
            method = method or _method(plans)
    except NoGuarantee:
        return None
    return ComposedCurve(laws=tuple(laws), method=method)


def _plans(parts: Sequence[NoisyStep], delta: float) -> list[Plan] | None:
    steps = [part.steps for part in parts]
    plans = [plan_of(laws, steps, delta) for laws in zip(*(part.laws for part in parts), strict=True)]
    known = [plan for plan in plans if plan is not None]
    return known if len(known) == len(plans) else None


def _method(plans: Sequence[Plan]) -> str:
    return f"privacy loss distribution, interval {max(plan.interval for plan in plans):.3g}"
