"""Bounds on epsilon of composed steps from the distribution of their privacy loss, with all numerical error stated.

Each step's law of loss lies between two laws on a grid (`loss_grids`); domination of divergence curves survives
composition, so the composed grids enclose epsilon for any number of steps. A plan (`_plan`) sets the interval from the
size of the answer: the grid adds the variance V to the whole loss, which moves epsilon by t V / 2, t being the slope of
-log delta, and this stays below `_ACCURACY` of epsilon on either side. A grid has few points (they thin out away from
0), so its cost does not depend on q, and large losses need no fine interval.

Composition is one discrete Fourier transform of the *tilted* law p e^(t l) / M(t), raised to the number of steps:
delta(epsilon) = M(t)^T e^(-t epsilon) sum over l > epsilon of [T-fold tilted law] e^(-t (l - epsilon)) (1 - e^(epsilon - l)).
At the t of the Chernoff bound the law's weight lies near epsilon, so errors of the transform are relative to delta
instead of 1e-16, whatever delta is. What is counted, always to the safe side:

- losses beyond the window of the transform, which are folded into it: Chernoff bounds of the grid itself (`_TAIL`);
- rounding of the transform: each of the log2(n) stages adds at most 6 roundings of the sum of sizes of its input (Higham
  2002, theorem 24.2). The law's largest mass is taken out before, so this is in proportion to the rest of the law;
- rounding of masses (relative) and of losses (absolute), at most `LossLaw.rounding` a step;
- losses above the grid: their mass, at most `_INFINITE` of delta, counts as delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from accounting.guarantee import EpsilonBounds
from accounting.numerics.loss_grids import LossGrid, grid_above, grid_below
from accounting.numerics.loss_laws import LossLaw
from accounting.numerics.lower_polygon import LARGEST_LOSS

_ACCURACY = 2e-4
"""By which share of epsilon, or of the loss's deviation if that is larger, the grid may move it on either side."""
_INFINITE = 1e-6
"""Share of delta that lies above all grids."""
_BELOW = 1e-9
"""Mass below all grids, over all steps."""
_LEAST_ACCURACY = 2e-6
"""By how much the grid may move epsilon, however small it is."""
_TAIL = 1e-5
"""Share of delta that the losses beyond the window may make, on either side."""
_COARSE = 16
"""How much coarser a last trial may be than what follows."""
_SEEN = 1e-3
"""Share of delta from which on rounding shows."""
_REFINEMENTS, _GAP, _LEAST_GAP = 2, 5e-3, 2e-4
"""How often an interval is refined, and the distance of both bounds, in shares of epsilon, from which it is."""
_COARSER = 4.0
"""By how much wider an interval becomes if rounding, which falls with it, separates the bounds."""
_TRIALS, _TRIAL_TAIL = (2**12, 2**14, 2**16, 2**18), 1e-8
"""Points of the coarse grids by which epsilon is guessed, and the mass outside of the first one's window."""
_LARGEST_WINDOW = 2**21
_UNIT = 2.0**-53
_LARGEST_EXPONENT = 300.0
_BINS = 320
"""Bins on either side of 0 in a plan."""
_TILTS, _EVERY = 96, 4
"""Tilts of a plan, and which of them are tried."""


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
    plans = _plans(parts, delta)
    if plans is None:
        return None
    lower, upper = 0.0, 0.0
    for plan in plans:
        low, high = _enclosed(plan, delta, lower)
        lower, upper = max(lower, low), max(upper, high)
    if math.isinf(upper):
        return None
    return EpsilonBounds(lower=min(lower, upper), upper=upper, method=_method(plans))


def _enclosed(plan: _Plan, delta: float, least: float) -> tuple[float, float]:
    """Bounds on epsilon of one direction; they need not be close below `least`, which another direction reaches."""
    low, high = 0.0, math.inf
    for _ in range(_REFINEMENTS + 1):
        below, above = _compose(plan, plan.below()), _compose(plan, plan.above())
        low, high = max(low, below.least_epsilon(delta)), min(high, above.largest_epsilon(delta))
        gap = high - max(low, least)
        wanted = max(_GAP * high, _LEAST_GAP)
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
    found = composed_curve(parts, delta)
    if found is None or math.isinf(upper := found.epsilon(delta)):
        return None
    return EpsilonBounds(lower=0.0, upper=upper, method=found.method)


@dataclass(frozen=True, kw_only=True)
class ComposedCurve:
    """delta(epsilon) of all steps together, the largest of all directions, from above.

    Attributes:
        composed: Of each direction.
        method: How it was computed.
    """

    composed: tuple[_Composed, ...]
    method: str

    def epsilon(self, delta: float) -> float:
        """Return the epsilon at a delta, infinite where it is not known."""
        return max(one.largest_epsilon(delta) for one in self.composed)

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Return the delta at each epsilon, from 0 to 1."""
        return np.max([one.deltas(epsilons) for one in self.composed], axis=0)


def composed_curve(parts: Sequence[NoisyStep], delta: float) -> ComposedCurve | None:
    """Return the curve of all parts, or None if doubles cannot follow.

    Args:
        parts: What is composed, at least one, all with the same number of directions.
        delta: In (0, 1): where the curve is sharpest.
    """
    plans = _plans(parts, delta)
    if plans is None:
        return None
    return ComposedCurve(
        composed=tuple(_compose(plan, plan.above()) for plan in plans), method=_method(plans)
    )


def _plans(parts: Sequence[NoisyStep], delta: float) -> list[_Plan] | None:
    steps = [part.steps for part in parts]
    plans = [_plan(laws, steps, delta) for laws in zip(*(part.laws for part in parts), strict=True)]
    known = [plan for plan in plans if plan is not None]
    return known if len(known) == len(plans) else None


def _method(plans: Sequence[_Plan]) -> str:
    return f"privacy loss distribution, interval {max(plan.interval for plan in plans):.3g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """How one direction is composed; no bound depends on whether its choices are good.

    Attributes:
        laws: Of each part.
        steps: Of each part.
        low: Loss below which the mass is negligible.
        high: Loss above which it counts as infinite.
        interval: h.
        finest: The least h whose window fits.
        tilt: t.
        upper_tilt: Of the Chernoff bound on losses above the window.
        lower_tilt: Of that on losses below it.
        tail: Mass of the tilted law outside of the window, on either side.
        guess: About what epsilon will be.
    """

    laws: tuple[LossLaw, ...]
    steps: tuple[int, ...]
    low: float
    high: float
    interval: float
    finest: float
    tilt: float
    upper_tilt: float
    lower_tilt: float
    tail: float
    guess: float

    def above(self) -> list[LossGrid]:
        """Return a law above that of each part."""
        return [grid_above(law, self.low, self.high, self.interval) for law in self.laws]

    def below(self) -> list[LossGrid]:
        """Return a law below that of each part."""
        return [grid_below(law, self.low, self.high, self.interval) for law in self.laws]


def _plan(laws: Sequence[LossLaw], steps: Sequence[int], delta: float) -> _Plan | None:
    """Plan by the Chernoff bound, compose that coarsely, and plan again about the epsilon found."""
    total = sum(steps)
    spans = [law.span(_BELOW / total, _INFINITE * delta / total) for law in laws]
    low, high = min(min(span) for span in spans), max(max(span) for span in spans)
    if not (high - low < LARGEST_LOSS and high > 0):
        return None
    planner = _Planner(laws, steps, low, high)
    if not planner.deviation > 0:
        return None
    scores = (planner.logs + np.log(_most(planner.tilts) / delta)) / planner.tilts
    guess, at, tail, interval = (
        max(float(scores.min()), 0.0),
        min(int(np.argmin(scores)), _TILTS - 2),
        _TRIAL_TAIL,
        0.0,
    )
    for points in _TRIALS:
        trial = planner.plan(at, guess, tail, None, points)
        guess = min(guess, _compose(trial, trial.above()).estimate(delta))
        at, tail, interval = planner.best_tilt(guess, delta)
        if trial.interval <= _COARSE * interval:
            break
    return planner.plan(at, guess, tail, interval)


class _Planner:
    """Chooses tilts, windows and intervals by coarse laws of one direction.

    Args:
        laws: Of each part.
        steps: Of each part.
        low: Loss below which the mass is negligible.
        high: Loss above which it counts as infinite.
    """

    def __init__(self, laws: Sequence[LossLaw], steps: Sequence[int], low: float, high: float) -> None:
        self.laws, self.steps, self.low, self.high = laws, steps, low, high
        self.bins = [_coarse(law, low, high) for law in laws]
        self.deviation = math.sqrt(
            sum(n * float(p @ np.square(l)) for n, (p, l) in zip(steps, self.bins, strict=True))
        )
        largest = _LARGEST_EXPONENT / high
        least = min(0.01 / self.deviation, 1e-3 * largest) if self.deviation > 0 else 1e-3 * largest
        self.tilts = np.geomspace(least, largest, _TILTS)
        self.logs = self._logs(self.tilts)
        self.negative = np.append(0.0, -self.tilts * min(1.0, high / max(-low, 1e-300)))
        self.negative_logs = self._logs(self.negative)

    def _logs(self, tilts: np.ndarray) -> np.ndarray:
        return np.sum(
            [n * _log_moments(p, l, tilts) for n, (p, l) in zip(self.steps, self.bins, strict=True)], axis=0
        )

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
        sizes = [2 * float(p @ np.abs(l)) / interval for p, l in self.bins]
        outside = sum(n * min(1.0, size) for n, size in zip(self.steps, sizes, strict=True))
        found = []
        for at in range(0, _TILTS - 1, _EVERY):
            tilt = float(self.tilts[at])
            multiple = math.exp(min(float(logs[at]), 600.0))
            tail = min(max(_TAIL / multiple, 1e-30), 1e-6)
            top, bottom, *_ = self._window(at, tail)
            weight = min(_weight(tilt, interval), _weight_norm(tilt, interval))
            error = multiple * (450 * _UNIT * outside * weight + tail)
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
        self, at: int, guess: float, tail: float, interval: float | None, points: int = _LARGEST_WINDOW
    ) -> _Plan:
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
        return _Plan(
            laws=tuple(self.laws),
            steps=tuple(self.steps),
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
        return float(intervals[max(int(np.searchsorted(moved, most)) - 1, 0)])


def _coarse(law: LossLaw, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Masses and losses of bins whose widths are in proportion to their distance from 0."""
    sides = [np.geomspace(1e-9 * end, end, _BINS) if end > 0 else np.zeros(0) for end in (-low, high)]
    masses, losses = law.bins(np.concatenate([-sides[0][::-1], sides[1]]))
    some = (masses > 0) & np.isfinite(losses)
    return masses[some], losses[some]


def _log_moments(masses: np.ndarray, losses: np.ndarray, tilts: np.ndarray) -> np.ndarray:
    """Log of the mean of e^(t l), for each t."""
    return np.log(np.exp(np.outer(tilts, losses)) @ masses)


def _most(tilts: np.ndarray) -> np.ndarray:
    """The largest value of e^(-t u) (1 - e^(-u)) over u > 0."""
    return np.exp(tilts * -np.log1p(1 / tilts)) / (1 + tilts)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Composed:
    """The composed law of one direction at the losses of a window.

    Attributes:
        losses: Ascending, the first at least 0; shape (n,).
        interval: h.
        tilt: t.
        guess: A loss of reference.
        scale: log of M(t)^T e^(-t guess).
        powers: e^(-t (l - guess)) at each loss.
        sums: Sum of law times powers from each loss on.
        discounted: The same, each term times e^(guess - l).
        error: Of the tilted law's sums.
        beyond: Mass of an infinite loss.
        shift: By how much losses may be off, and in what proportion masses may be.
    """

    losses: np.ndarray
    interval: float
    tilt: float
    guess: float
    scale: float
    powers: np.ndarray
    sums: np.ndarray
    discounted: np.ndarray
    error: float
    beyond: float
    shift: float

    def largest_epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon(delta), infinite if there is none."""
        wanted = (delta - self.beyond) * math.exp(-self.scale - self.shift)
        good = self._excess() + self.error * self.powers <= wanted
        if not good.any():
            return math.inf
        at = int(np.argmax(good))
        found = self._solved(at, self.sums[at] + self.error * self._power_before(at) - wanted)
        return float(np.clip(found, self._loss_before(at), self.losses[at])) + self.shift

    def estimate(self, delta: float) -> float:
        """Return epsilon(delta) as if nothing were off."""
        good = self._excess() <= delta * math.exp(-self.scale)
        return float(self.losses[int(np.argmax(good)) if good.any() else -1])

    def least_epsilon(self, delta: float) -> float:
        """Return a lower bound on epsilon(delta), 0 if there is none."""
        wanted = delta * math.exp(-self.scale + self.shift)
        good = np.flatnonzero(self._excess() - self.error * self.powers >= wanted)
        at = min(int(good[-1]) + 1, len(self.losses) - 1) if good.size else 0
        found = self._solved(at, self.sums[at] - self.error * self._power_before(at) - wanted)
        return float(np.clip(found, self._loss_before(at), self.losses[at])) - self.shift

    def without_error(self) -> Self:
        """Return the law as if its transform were exact."""
        return replace(self, error=0.0)

    def _loss_before(self, at: int) -> float:
        return max(float(self.losses[at]) - self.interval, 0.0)

    def _power_before(self, at: int) -> float:
        return float(self.powers[at]) * math.exp(self.tilt * self.interval)

    def _excess(self) -> np.ndarray:
        return self.sums - np.exp(self.losses - self.guess) * self.discounted

    def _solved(self, at: int, left: float) -> float:
        """The epsilon with e^(epsilon - guess) discounted = left."""
        if not (left > 0 and self.discounted[at] > 0):
            return -math.inf
        return self.guess + math.log(left / self.discounted[at])

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Return upper bounds on delta, from 0 to 1."""
        found = (self._excess() + self.error * self.powers) * math.exp(self.scale + self.shift) + self.beyond
        at = np.searchsorted(self.losses, epsilons - self.shift, side="right") - 1  # the curve falls
        last = found[-1]
        return np.clip(np.where(at < 0, 1.0, np.where(at < len(found), found[at], last)), 0.0, 1.0)


def _compose(plan: _Plan, grids: Sequence[LossGrid]) -> _Composed:
    tilt, interval = plan.tilt, plan.interval
    logs, up, down = (_logs(grids, plan.steps, t) for t in (tilt, plan.upper_tilt, plan.lower_tilt))
    rest = -math.log(plan.tail)
    top = (up - logs + rest) / (plan.upper_tilt - tilt)
    bottom = (logs - down - rest) / (tilt - plan.lower_tilt)
    offset = sum(count * grid.offset for count, grid in zip(plan.steps, grids, strict=True))
    first = math.floor((bottom - offset) / interval)
    size = int(next_fast_len(math.ceil((top - offset) / interval) - first + 2, real=True))
    law, rounding = _transformed(grids, plan.steps, tilt, first, size)
    start = max(0, math.ceil((max(0.0, plan.guess - 650 / (1 + tilt)) - offset) / interval) - first)
    losses = offset + interval * (first + np.arange(start, size))
    powers = np.exp(-tilt * (losses - plan.guess))
    terms = law[start:] * powers
    sums = np.cumsum(terms[::-1])[::-1]
    discounted = np.cumsum((terms * np.exp(plan.guess - losses))[::-1])[::-1]
    roundings = sum(
        count * (law.rounding + 32 * _UNIT) for count, law in zip(plan.steps, plan.laws, strict=True)
    )
    return _Composed(
        losses=losses,
        interval=interval,
        tilt=tilt,
        guess=plan.guess,
        scale=logs - tilt * plan.guess,
        powers=powers,
        sums=sums,
        discounted=discounted,
        error=rounding
        + 2 * plan.tail * float(_most(np.array(tilt)))
        + 2 * _UNIT * (1 + min(size, 1 / (tilt * interval))),
        beyond=sum(count * grid.beyond for count, grid in zip(plan.steps, grids, strict=True)),
        shift=roundings,
    )


def _logs(grids: Sequence[LossGrid], steps: Sequence[int], tilt: float) -> float:
    """Log of the mean of e^(t l) of the composed law."""
    return sum(
        count * math.log(float(np.exp(tilt * grid.losses) @ grid.masses))
        for grid, count in zip(grids, steps, strict=True)
    )


def _transformed(
    grids: Sequence[LossGrid], steps: Sequence[int], tilt: float, first: int, size: int
) -> tuple[np.ndarray, float]:
    """Return the composed tilted law at the numbers first, first + 1, ..., and what rounding does to its sums.

    A sum weighs masses by at most e^(-t u) (1 - e^(-u)), u being the distance from epsilon; its error is at most the
    largest error of a mass times the sum of these weights, and at most the product of both norms (Parseval).
    """
    roundings = _UNIT * (6 * math.log2(size) + 16)
    sizes, phases = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1)
    offset, spread = 0, 0.0
    for grid, count in zip(grids, steps, strict=True):
        tilted = grid.masses * np.exp(tilt * grid.losses)
        mode = int(np.argmax(tilted))
        others = tilted / tilted.sum()
        others[mode] = 0.0
        outside = float(others.sum())
        folded = np.bincount((grid.numbers - grid.numbers[mode]) % size, weights=others, minlength=size)
        folded[0] -= outside
        less = rfft(folded)  # the transform of the law, less 1
        sizes += (0.5 * count) * np.log1p(np.maximum(2 * less.real + np.square(np.abs(less)), -1.0))
        phases += count * np.arctan2(less.imag, 1 + less.real)
        offset += count * int(grid.numbers[mode])
        spread += count * outside
    powers = np.exp(sizes)
    law = irfft(powers * np.exp(1j * phases), size)
    derivative = np.exp(sizes * (1 - 1 / min(steps)))  # at least every |F|^(T - 1)
    errors = (3 * roundings * spread + 8 * _UNIT) * derivative + roundings * powers
    largest, norm = 2 * float(errors.mean()), math.sqrt(2 * float(np.square(errors).mean()))
    interval = grids[0].interval
    rounding = min(largest * _weight(tilt, interval), norm * _weight_norm(tilt, interval))
    return np.maximum(np.roll(law, -((first - offset) % size)), 0.0), rounding


def _weight(tilt: float, interval: float) -> float:
    """The sum over k >= 0 of e^(-t k h) (1 - e^(-k h))."""
    return 1 / -math.expm1(-tilt * interval) - 1 / -math.expm1(-(tilt + 1) * interval)


def _weight_norm(tilt: float, interval: float) -> float:
    """The root of the sum of their squares."""
    once, twice, none = (1 / -math.expm1(-(2 * tilt + k) * interval) for k in (1, 2, 0))
    return math.sqrt(max(none - 2 * once + twice, 0.0) + 1e-12 * none)
