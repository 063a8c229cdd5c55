"""Bounds on epsilon of composed steps from the distribution of their privacy loss, with all numerical error counted.

Each step's law of loss lies between two laws on a grid; domination of divergence curves survives composition
(`tilted_law`), so the composed grids enclose epsilon for any number of steps. A plan sets the interval from the size of
the answer. If the bounds still are apart, the interval is refined, or widened where rounding separates them; the best
of all bounds count.

**The plan.** How a composition is computed: tilt, window and interval, from coarse laws of the steps' losses.

No bound depends on whether these choices are good. The grid adds a variance V to the whole loss, which moves epsilon by
s V / 2, s being the slope of -log delta; the interval is the widest at which this stays below `_ACCURACY` of epsilon on
either side. A grid has few points (they thin out away from 0), so its cost does not depend on q, and large losses need
no fine interval. The size of the answer is guessed by the Chernoff bound first and then by coarse transforms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from opusim.accounting.guarantee import EpsilonBounds, NoGuarantee
from opusim.accounting.numerics.loss_laws import (
    LARGEST_LOSS,
    UNIT,
    LossLaw,
    Plan,
    TiltedLaw,
    composed,
    largest_weight,
    weight_norm,
    weight_sum,
)

_REFINEMENTS, _GAP = 2, 5e-3
"""How often an interval is refined, and the distance of both bounds, in shares of epsilon, from which it is."""
_LEAST_GAP, _LARGE, _LARGE_GAP = 1e-6, 2**17, 2e-4
"""That distance at least, and that of transforms with as many points."""
_COARSER = 4.0
"""By how much wider an interval becomes if rounding, which falls with it, separates the bounds."""
LARGEST_WINDOW = 2**21
"""Most points of a transform."""
_ACCURACY = 2e-4
"""By which share of epsilon, or of the loss's deviation if that is larger, the grid may move it on either side."""
_LEAST_ACCURACY = 2e-6
"""By how much the grid may move epsilon, however small it is."""
_FEWEST = 0.05
"""Largest interval, in shares of epsilon or of the loss's deviation, whichever is larger."""
_INFINITE = 1e-6
"""Share of delta that lies above all grids."""
_BELOW = 1e-9
"""Mass below all grids, over all steps."""
_TAIL = 1e-5
"""Share of delta that the losses beyond the window may make, on either side."""
_COARSE = 16
"""How much coarser a last trial may be than what follows."""
_SEEN = 1e-3
"""Share of delta from which on rounding shows."""
_TRIALS, _TRIAL_TAIL = (2**12, 2**14, 2**16, 2**18), 1e-8
"""Points of the coarse grids by which epsilon is guessed, and the mass outside of the first one's window."""
_BINS = 320
"""Bins on either side of 0 in a plan."""
_TILTS, _EVERY = 96, 4
"""Tilts of a plan, and which of them are tried."""
_LARGEST_EXPONENT = 300.0


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
    if plans is None or math.isinf(upper):
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
        exact = replace(above, error=0.0), replace(below, error=0.0)  # as if the transforms were
        by_grid = exact[0].largest_epsilon(delta) - exact[1].least_epsilon(delta)
        share = max(0.5 * wanted / gap, 0.1) if by_grid > 0.5 * gap else _COARSER
        interval = max(plan.interval * share, plan.finest)
        if 0.9 < interval / plan.interval < 1.1:
            break
        plan = replace(plan, interval=interval)
    return low, high


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


def plan_of(laws: Sequence[LossLaw], steps: Sequence[int], delta: float) -> Plan | None:
    """Plan by the Chernoff bound, compose that coarsely, and plan again about the epsilon found."""
    total = sum(steps)
    below, above = _BELOW / total, _INFINITE * delta / total
    spans = [law.span(below, above) for law in laws]
    low, high = min(min(span) for span in spans), max(max(span) for span in spans)
    if not (high - low < LARGEST_LOSS and high > 0):
        return None
    # beyond these tails rounding is a larger part of masses that make less than 1e-6 of delta: below the rest's
    roundings = [law.rounding(min(below, above / 2)) for law in laws]
    planner = _Planner(laws, steps, roundings, low, high)
    if not planner.deviation > 0:
        return None
    scores = (planner.logs + np.log(largest_weight(planner.tilts) / delta)) / planner.tilts
    guess, at = max(float(scores.min()), 0.0), min(int(np.argmin(scores)), _TILTS - 2)
    tail, interval = _TRIAL_TAIL, 0.0
    for points in _TRIALS:
        trial = planner.plan(at, guess, tail, None, points)
        guess = min(guess, composed(trial, trial.above()).estimate(delta))
        at, tail, interval = planner.best_tilt(guess, delta)
        if trial.interval <= _COARSE * interval:
            break
    return planner.plan(at, guess, tail, interval)


class _Planner:
    """Chooses tilts, windows and intervals by coarse laws of one direction.

    Args:
        laws: Of each part.
        steps: Of each part.
        roundings: Of each part's masses and losses.
        low: Loss below which the mass is negligible.
        high: Loss above which it counts as infinite.
    """

    def __init__(
        self,
        laws: Sequence[LossLaw],
        steps: Sequence[int],
        roundings: Sequence[float],
        low: float,
        high: float,
    ) -> None:
        self.laws, self.steps, self.roundings, self.low, self.high = laws, steps, roundings, low, high
        # masses and losses of bins whose widths are in proportion to their distance from 0
        sides = [np.geomspace(1e-9 * end, end, _BINS) if end > 0 else np.zeros(0) for end in (-low, high)]
        edges, self.bins = np.concatenate([-sides[0][::-1], sides[1]]), []
        for law in laws:
            masses, losses = law.bins(edges)
            some = (masses > 0) & np.isfinite(losses)
            self.bins.append((masses[some], losses[some]))
        self.deviation = math.sqrt(
            sum(n * float(p @ np.square(loss)) for n, (p, loss) in zip(steps, self.bins, strict=True))
        )
        largest = _LARGEST_EXPONENT / high
        least = min(0.01 / self.deviation, 1e-3 * largest) if self.deviation > 0 else 1e-3 * largest
        self.tilts = np.geomspace(least, largest, _TILTS)
        self.logs = self._logs(self.tilts)
        self.negative = np.append(0.0, -self.tilts * min(1.0, high / max(-low, 1e-300)))
        self.negative_logs = self._logs(self.negative)

    def _logs(self, tilts: np.ndarray) -> np.ndarray:
        """Log of the mean of e^(t l) of all steps, for each tilt t."""
        parts = zip(self.steps, self.bins, strict=True)
        return np.sum([n * np.log(np.exp(np.outer(tilts, loss)) @ p) for n, (p, loss) in parts], axis=0)

    def best_tilt(self, epsilon: float, delta: float) -> tuple[int, float, float]:
        """Return the number of the tilt with the smallest window, the mass that may lie beyond it, and the interval.

        Errors of the tilted law are multiplied by M(t)^T e^(-t epsilon), which is least at one tilt; others may have
        shorter windows. A tilt at which rounding would show counts as a longer window.

        Args:
            epsilon: About what the answer will be.
            delta: In (0, 1).
        """
        logs = self.logs - self.tilts * epsilon - math.log(delta)
        slope = float(self.tilts[int(np.argmin(logs - np.log(self.tilts * (1 + self.tilts))))])
        interval = self._interval(
            slope, epsilon, max(_ACCURACY * max(epsilon, self.deviation), _LEAST_ACCURACY)
        )
        sizes = [2 * float(p @ np.abs(loss)) / interval for p, loss in self.bins]
        outside = sum(n * min(1.0, size) for n, size in zip(self.steps, sizes, strict=True))
        found = []
        for at in range(0, _TILTS - 1, _EVERY):
            tilt = float(self.tilts[at])
            multiple = math.exp(min(float(logs[at]), 600.0))
            tail = min(max(_TAIL / multiple, 1e-30), 1e-6)
            top, bottom, *_ = self._window(at, tail)
            weight = min(weight_sum(tilt, interval), weight_norm(tilt, interval))
            error = multiple * (550 * UNIT * outside * weight + tail)
            found.append((math.log(top - bottom) + 2 * math.log1p(error / _SEEN), at, tail))
        _, at, tail = min(found)
        return at, tail, interval

    def _window(self, at: int, tail: float) -> tuple[float, float, float, float]:
        """The top and the bottom of a window, and the tilts of their Chernoff bounds."""
        tilt, log, rest = float(self.tilts[at]), self.logs[at], -math.log(tail)
        downs = np.append(self.tilts[:at], self.negative)
        tops = (self.logs[at + 1 :] - log + rest) / (self.tilts[at + 1 :] - tilt)
        bottoms = (log - np.append(self.logs[:at], self.negative_logs) - rest) / (tilt - downs)
        up, down = int(tops.argmin()), int(bottoms.argmax())
        return float(tops[up]), float(bottoms[down]), float(self.tilts[at + 1 + up]), float(downs[down])

    def plan(
        self, at: int, guess: float, tail: float, interval: float | None, points: int = LARGEST_WINDOW
    ) -> Plan:
        """Return the plan with a tilt.

        Args:
            at: Number of the tilt.
            guess: About what epsilon will be.
            tail: Mass of the tilted law outside of the window, on either side.
            interval: h, wider if its window is too large; None for the window's share of its points.
            points: Most points of the window.
        """
        top, bottom, upper_tilt, lower_tilt = self._window(at, tail)
        tilt, window = float(self.tilts[at]), top - bottom
        finest = window / points
        return Plan(
            laws=tuple(self.laws),
            steps=tuple(self.steps),
            roundings=tuple(self.roundings),
            low=self.low,
            high=self.high,
            interval=max(interval or 0.0, finest),
            finest=finest,
            tilt=tilt,
            upper_tilt=upper_tilt,
            lower_tilt=lower_tilt,
            tail=tail,
            guess=guess,
        )

    def _interval(self, slope: float, epsilon: float, accuracy: float) -> float:
        """The widest interval that moves epsilon by at most `accuracy`; `slope` is that of -log delta."""
        top = max(self.high, -self.low)
        intervals = np.geomspace(1e-10 * top, top, 120)
        moved = np.zeros(len(intervals))
        for (masses, losses), count in zip(self.bins, self.steps, strict=True):
            weights = masses * np.exp(slope * np.minimum(losses, epsilon))
            sizes = np.abs(losses)
            gaps = np.maximum(intervals[:, None], sizes / 128)
            moved += 0.5 * slope * count * (np.minimum(gaps / 6, sizes) * gaps) @ (weights / weights.sum())
        most = max(accuracy, 2 * float(moved[0]))  # the points far from 0 move it at any interval
        found = float(intervals[max(int(np.searchsorted(moved, most)) - 1, 0)])
        return min(found, self.high, _FEWEST * max(epsilon, self.deviation, _LEAST_ACCURACY))
