"""Epsilon of Poisson-sampled Gaussian and Laplace noise: dominating pairs, closed forms, and Renyi bounds.

With standard deviation z (in units of C) and sampling probability q the pairs are, in both directions,

    add_or_remove_one, zero_out:  (1 - q) N(0, z^2) + q N(1, z^2)   against   N(0, z^2)
    replace_one:                  (1 - q) N(0, z^2) + q N(1, z^2)   against   (1 - q) N(0, z^2) + q N(-1, z^2)

and likewise with Laplace noise, which has a closed form at delta = 0 (theorem sampled-laplace).

dp_accounting's RDP and PLD accountants read a replace_one event differently, so an event never goes to both: the Renyi
bound for replace_one is built here from add_or_remove_one through the data set without the record, by the weak triangle
inequality (Mironov 2017, Proposition 11, p = q = 2):
D_a(P || R) <= (a - 1/2) / (a - 1) D_2a(P || Q) + D_(2a-1)(Q || R).

**Composition.** Each step's law of loss lies between two laws on a grid; domination of divergence curves survives
composition (`loss_laws`), so the composed grids enclose epsilon for any number of steps. While the bounds are apart,
the interval is refined, or widened where rounding separates them; the best of all bounds are returned.

**The plan** chooses tilt, window and interval from coarse laws of the steps' losses. Bounds are valid whatever it
chooses. The grid adds a variance V to the whole loss, which moves epsilon by s V / 2, s being the slope of -log delta;
the interval is the widest at which this stays below `_ACCURACY` of epsilon on either side. A grid has few points (they
thin out away from 0), so its cost does not depend on q, and large losses need no fine interval. Epsilon is estimated by
the Chernoff bound first and then by coarse transforms.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import dp_accounting
import numpy as np
from dp_accounting import get_epsilon_gaussian, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy import optimize, special, stats

from opusim import checks
from opusim.accounting.guarantee import Adjacency, EpsilonBounds, NoGuarantee
from opusim.accounting.numerics.loss_laws import (
    LARGEST_LOSS,
    UNIT,
    Direction,
    GaussianLaw,
    LaplaceLaw,
    LossLaw,
    MixedLaw,
    Plan,
    TiltedLaw,
    composed,
    largest_weight,
    weight_norm,
    weight_sum,
)

_REFINEMENTS, _GAP = 2, 5e-3
"""Most refinements of an interval, and the gap between the bounds, as a share of epsilon, that calls for one."""
_LEAST_GAP, _LARGE, _LARGE_GAP = 1e-6, 2**17, 2e-4
"""The least such gap, and the least one of transforms with at least `_LARGE` points."""
_COARSER = 4.0
"""Factor by which an interval widens if rounding separates the bounds; a wider one rounds less."""
LARGEST_WINDOW = 2**21
"""Most points of a transform."""
_ACCURACY = 2e-4
"""Largest shift of epsilon by the grid on either side, as a share of epsilon or, if larger, of the loss's deviation."""
_LEAST_ACCURACY = 2e-6
"""Shift of epsilon that the grid may always cause."""
_FEWEST = 0.05
"""Largest interval, in shares of epsilon or of the loss's deviation, whichever is larger."""
_INFINITE = 1e-6
"""Share of delta that lies above all grids."""
_BELOW = 1e-9
"""Mass below all grids, over all steps."""
_TAIL = 1e-5
"""Share of delta that the losses beyond the window may make, on either side."""
_COARSE = 16
"""Largest ratio of the last trial's interval to that of the plan."""
_SEEN = 1e-3
"""Share of delta above which rounding shows."""
_TRIALS, _TRIAL_TAIL = (2**12, 2**14, 2**16, 2**18), 1e-8
"""Points of the coarse grids by which epsilon is guessed, and the mass outside of the first one's window."""
_BINS = 320
"""Bins on either side of 0 in a plan."""
_TILTS, _EVERY = 96, 4
"""Number of tilts of a plan; every fourth one is tried."""
_LARGEST_EXPONENT = 300.0


NoisyStep = tuple[tuple[LossLaw, ...], int]
"""The law of a step's loss in each direction, and how often it is composed."""


def compose_bounds(parts: Sequence[NoisyStep], delta: float) -> EpsilonBounds | None:
    """Return bounds on epsilon(delta) of all steps, of equally many directions, or None if doubles cannot follow."""
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
        exact = replace(above, error=0.0), replace(below, error=0.0)  # with exact transforms
        by_grid = exact[0].largest_epsilon(delta) - exact[1].least_epsilon(delta)
        share = max(0.5 * wanted / gap, 0.1) if by_grid > 0.5 * gap else _COARSER
        interval = max(plan.interval * share, plan.finest)
        if 0.9 < interval / plan.interval < 1.1:
            break
        plan = replace(plan, interval=interval)
    return low, high


@dataclass(frozen=True, kw_only=True)
class ComposedCurve:
    """delta(epsilon) of all steps, the largest of all directions, from above, sharp at some deltas."""

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
    """Return the curve of all parts, sharp at some deltas, or None if doubles cannot follow; see `compose_bounds`."""
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
    steps = [count for _, count in parts]
    plans = [plan_of(laws, steps, delta) for laws in zip(*(laws for laws, _ in parts), strict=True)]
    known = [plan for plan in plans if plan is not None]
    return known if len(known) == len(plans) else None


def _method(plans: Sequence[Plan]) -> str:
    return f"privacy loss distribution, interval {max(plan.interval for plan in plans):.3g}"


def plan_of(laws: Sequence[LossLaw], steps: Sequence[int], delta: float) -> Plan | None:
    """Plan by the Chernoff bound, compose coarsely, and plan again around the epsilon found."""
    total = sum(steps)
    below, above = _BELOW / total, _INFINITE * delta / total
    spans = [law.span(below, above) for law in laws]
    low, high = min(min(span) for span in spans), max(max(span) for span in spans)
    if not (high - low < LARGEST_LOSS and high > 0):
        return None
    # beyond these tails masses round more, but make less than 1e-6 of delta: the rest's rounding is larger
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
    """Chooses tilts, windows and intervals by coarse laws of one direction, see `Plan`."""

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
        """Return the index of the tilt with the smallest window, the mass that may lie beyond it, and the interval.

        Errors of the tilted law are multiplied by M(t)^T e^(-t epsilon), which is least at one tilt; others may have
        shorter windows. A tilt at which rounding would show counts as a longer window. epsilon is an estimate of the
        answer.
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
        """Return the plan with a tilt, for an estimate of epsilon and the mass `tail` on either side of the window.

        h is widened if the window would need more points than `points`; None takes the window over these.
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


_ROUNDING = 2e-14
"""Rounding error of delta for each response in a transform of 2^19 doubles, raised to the number of steps."""

find_root, logistic = optimize.brentq, special.expit
normal_cdf, log_normal_cdf, normal_quantile = special.ndtr, special.log_ndtr, special.ndtri
binomial, chi_squared, beta_quantile = stats.binom, stats.chi2, stats.beta.ppf
noncentral_chi_squared_cdf = special.chndtr
"""Functions of scipy that are used elsewhere; the arguments are (probability, a, b) and (x, degrees, noncentrality)."""


def gaussian_bounds(mu: float, delta: float) -> EpsilonBounds:
    """Return epsilon of mu-GDP, exact up to the root search; infinite at delta 0.

    From mu = 1e8 on, where doubles fail, epsilon is infinite; below 1e-9 the bound of 1e-9 is used.
    """
    checks.in_unit_interval(closed="left", delta=delta)
    if delta == 0 or not mu < 1e8:
        return EpsilonBounds(lower=math.inf, upper=math.inf, method="exact Gaussian trade-off")
    with np.errstate(all="ignore"):  # dp_accounting takes the logarithm of 0 if delta exceeds mu
        epsilon = float(get_epsilon_gaussian(1.0 / max(mu, 1e-9), delta))
    lower = max(epsilon * (1 - 1e-9) - 1e-9, 0.0) if mu >= 1e-9 else 0.0
    return EpsilonBounds(lower=lower, upper=epsilon * (1 + 1e-9) + 1e-9, method="exact Gaussian trade-off")


def response_bounds(
    keep: float, n_classes: int, step_epsilon: float, steps: int, delta: float
) -> EpsilonBounds:
    """Return epsilon of k-ary randomized response, drawn independently several times for one label.

    The loss takes the values `step_epsilon` = log(keep (k - 1) / (1 - keep)), 0 and -step_epsilon, so its distribution
    is composed without discretisation.
    """
    pure = steps * step_epsilon
    if not _ROUNDING * steps <= delta / 2:  # rounding of the transform exceeds delta
        return EpsilonBounds(lower=0.0, upper=pure, method="closed form")
    other = (1 - keep) / (n_classes - 1)
    masses = {1: keep, 0: (n_classes - 2) * other, -1: other}
    loss = PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, step_epsilon)
    composed = loss if steps == 1 else loss.self_compose(steps)
    slack = _ROUNDING * steps if steps > 1 else 0.0
    epsilon = min(float(composed.get_epsilon_for_delta(delta - slack)) * (1 + 1e-9), pure)
    lower = min(float(composed.get_epsilon_for_delta(delta + slack)) * (1 - 1e-6), epsilon)
    return EpsilonBounds(lower=lower, upper=epsilon, method="exact distribution of the loss")


def renyi_to_epsilon(
    orders: Sequence[float] | np.ndarray, curve: Sequence[float] | np.ndarray, delta: float
) -> float:
    """Return dp_accounting's conversion of a finite Renyi curve at orders above 1 to epsilon(delta)."""
    return float(compute_epsilon(orders, curve, delta)[0])


def normality_p_value(values: np.ndarray) -> float:
    """Return the p-value of normality by skewness and kurtosis (D'Agostino and Pearson 1973), of at least 20 values."""
    return float(stats.normaltest(values).pvalue)


def variance_ratio_p_value(ratio: float, above: int, below: int) -> float:
    """Return the two-sided p-value of a ratio of sample variances, with degrees of freedom, of equal true variances."""
    return float(min(1.0, 2 * min(stats.f.cdf(ratio, above, below), stats.f.sf(ratio, above, below))))


_ORDERS = (
    *(1 + k / 20 for k in range(2, 20)), *(2 + k / 10 for k in range(90)), *range(11, 64), 80, 96, 128, 192, 256, 512
)  # fmt: skip
_MIXTURE_ORDERS = (*(1 + k / 20 for k in range(2, 40)), *range(3, 64), 80, 96, 128, 192, 256)
_LEAST_NOISE, _MOST_NOISE, _RAREST_SAMPLING = 1e-3, 1e5, 1e-9  # what doubles can follow
_PURE_ROUNDING = 1e-14
"""Relative rounding error of a closed form."""
_TIGHT = 1.01
"""Ratio of the bounds of the loss distribution up to which the Renyi bound need not be computed as well."""
_SMALL_EPSILON_DELTA = 0.1
"""Second delta at which a whole curve is computed, so that it is sharp at small epsilon, too."""
_SMALL = 1e-3
"""Gap in epsilon that the bounds may have in addition."""


@dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A sum over a Poisson batch of contributions of norm at most 1, plus noise, released `steps` times.

    Attributes:
        law: Law of the noise.
        scale: Standard deviation of Gaussian noise, scale b of Laplace noise; above 0.
        probability: q in (0, 1], the sampling probability; 1 for all records.
        steps: At least 1.
    """

    law: Literal["gaussian", "laplace"]
    scale: float
    probability: float = 1.0
    steps: int = 1

    @classmethod
    def of_mu(cls, mu: float, steps: int) -> Self:
        """Return the Gaussian noise on all records that is mu-GDP at each step if a record is replaced."""
        return cls(law="gaussian", scale=2 / mu, steps=steps)


@dataclass(frozen=True, kw_only=True)
class GaussianMixture:
    """The pair (1 - share) SGM(probability, noise) + share SGM(probability, noise / 2) of sampled Gaussian mechanisms.

    Attributes:
        noise: z above 0.
        probability: q in (0, 1].
        share: Weight of the part with half the noise, in [0, 1].
        steps: At least 1.
    """

    noise: float
    probability: float
    share: float
    steps: int = 1


def noise_bounds(sums: Sequence[NoisySum], adjacency: Adjacency, delta: float) -> EpsilonBounds:
    """Return bounds on epsilon(delta) of all sums together; raise NoGuarantee if the numerics have no answer."""
    shift = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    if delta > 0 and all(one.law == "gaussian" and one.probability == 1 for one in sums):
        mu = math.hypot(*(math.sqrt(one.steps) * shift / one.scale for one in sums))
        return gaussian_bounds(mu, delta)
    pure = sum(_pure_epsilon(one, adjacency) for one in sums)
    if delta == 0:
        return EpsilonBounds(lower=pure, upper=pure, method="closed form")
    pure *= 1 + _PURE_ROUNDING
    try:
        bounds = _sampled_bounds(sums, adjacency, delta)
    except NoGuarantee:
        if math.isinf(pure):
            raise
        return EpsilonBounds(lower=0.0, upper=pure, method="closed form for delta = 0")
    if bounds.upper <= pure:
        return bounds
    return EpsilonBounds(lower=min(bounds.lower, pure), upper=pure, method="closed form for delta = 0")


def _pure_epsilon(one: NoisySum, adjacency: Adjacency) -> float:
    """Epsilon at delta = 0 of all steps of a Laplace sum; infinite for Gaussian noise."""
    if one.law == "gaussian":
        return math.inf
    q, exponent = one.probability, 1 / one.scale
    # log(1 - q + q e^t) without overflow, small values kept
    up = math.log1p(q * math.expm1(exponent)) if exponent < 500 else exponent + math.log(q)
    if adjacency is Adjacency.REPLACE_ONE:
        up -= math.log1p(q * math.expm1(-exponent)) if q < 1 else -exponent
    return one.steps * up


def _sampled_bounds(sums: Sequence[NoisySum], adjacency: Adjacency, delta: float) -> EpsilonBounds:
    """Bounds on epsilon(delta) for delta in (0, 1); noise below 1e-3 counts as none."""
    if any(one.scale < _LEAST_NOISE for one in sums):
        return EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers for so little noise")
    followed = [_followed(one) for one in sums]
    with np.errstate(all="ignore"):  # what overflows ends as infinity or is refused
        bounds = _bounds(followed, adjacency, delta)
    if followed != list(sums):
        return EpsilonBounds(lower=0.0, upper=bounds.upper, method=bounds.method)
    return bounds


def _followed(one: NoisySum) -> NoisySum:
    """Return a sum that doubles can follow, of no less epsilon: noise is at most 1e5, q at least 1e-9."""
    return replace(one, scale=min(one.scale, _MOST_NOISE), probability=max(one.probability, _RAREST_SAMPLING))


def _bounds(sums: Sequence[NoisySum], adjacency: Adjacency, delta: float) -> EpsilonBounds:
    """Bounds of the loss distribution, or the Renyi bound if that is sharper or doubles cannot follow.

    Raises NoGuarantee if some noise is not Gaussian, and only a Renyi divergence could help.
    """
    try:
        parts = [_noisy_step(one, adjacency) for one in sums]
    except NoGuarantee:
        parts = []
    bounds = compose_bounds(parts, delta) if parts else None
    if bounds is not None and bounds.upper <= _TIGHT * bounds.lower + _SMALL:
        return bounds
    orders = np.array(_ORDERS, dtype=float)
    curve = sum((_renyi_curve(one, adjacency, orders) for one in sums), np.zeros(len(orders)))
    # a failed order is scored 0 or less, which would win the minimum
    usable = np.isfinite(curve) & (curve > 0)
    renyi = renyi_to_epsilon(orders[usable], curve[usable], delta) if usable.any() else math.inf
    if bounds is not None and bounds.upper <= renyi:
        return bounds
    lower = min(bounds.lower, renyi) if bounds is not None else 0.0
    return EpsilonBounds(lower=lower, upper=renyi, method="Renyi divergences")


@dataclass(frozen=True, kw_only=True)
class NoiseCurves:
    """Upper bounds on a noisy sum's loss in both directions: Renyi, epsilon(delta) and delta(epsilon) as asked."""

    renyi: np.ndarray
    inner: float
    deltas: np.ndarray


@functools.lru_cache(maxsize=64)
def noise_curves(
    one: NoisySum,
    adjacency: Adjacency,
    *,
    orders: tuple[float, ...],
    delta: float,
    epsilons: tuple[float, ...],
) -> NoiseCurves:
    """Return a sum's Renyi curve at orders above 1, and points of its curve delta(epsilon), sharp at delta.

    The points come from the privacy loss distribution. Where doubles cannot follow, they come from the Renyi curve.
    Raises NoGuarantee if the numerics have no answer for this law and relation.
    """
    grid = np.array(orders)
    nothing = NoiseCurves(renyi=np.full(len(grid), math.inf), inner=math.inf, deltas=np.ones(len(epsilons)))
    if one.scale < _LEAST_NOISE:
        return nothing
    one = _followed(one)
    with np.errstate(all="ignore"):
        curve = _renyi_curve(one, adjacency, grid) if one.law == "gaussian" else nothing.renyi
        renyi = np.where(np.isfinite(curve) & (curve > 0), curve, math.inf)
        found = composed_curve([_noisy_step(one, adjacency)], [min(delta, 0.5), _SMALL_EPSILON_DELTA])
    if found is not None:
        inner = 0.0 if delta >= 1 else found.epsilon(delta)
        return NoiseCurves(renyi=renyi, inner=inner, deltas=found.deltas(np.array(epsilons)))
    usable = np.isfinite(renyi)
    if not usable.any():
        return nothing
    deltas = [compute_delta(grid[usable], renyi[usable], epsilon)[0] for epsilon in epsilons]
    inner = 0.0 if delta >= 1 else renyi_to_epsilon(grid[usable], renyi[usable], delta)
    return NoiseCurves(renyi=renyi, inner=inner, deltas=np.array(deltas))


def _renyi_curve(one: NoisySum, adjacency: Adjacency, orders: np.ndarray) -> np.ndarray:
    if one.law != "gaussian":
        raise NoGuarantee(
            "Laplace noise: no Renyi divergence is known for it here; use delta = 0 or fewer steps"
        )
    if adjacency is not Adjacency.REPLACE_ONE:
        return one_way_curve(one, orders)
    doubled, below = one_way_curve(one, 2 * orders), one_way_curve(one, 2 * orders - 1)
    return np.where((doubled > 0) & (below > 0), (orders - 0.5) / (orders - 1) * doubled + below, np.nan)


def one_way_curve(one: NoisySum, orders: np.ndarray) -> np.ndarray:
    """Return Renyi divergences of Gaussian noise for add_or_remove_one, the larger of both directions.

    NaN, infinite, 0 or below if dp_accounting has no value at an order.
    """
    accountant = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    step = dp_accounting.PoissonSampledDpEvent(one.probability, dp_accounting.GaussianDpEvent(one.scale))
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # orders may overflow or not converge; the caller drops them
    try:
        with np.errstate(all="ignore"):
            accountant.compose(dp_accounting.SelfComposedDpEvent(step, one.steps))
    finally:
        logger.setLevel(level)
    return np.asarray(accountant.rdp, dtype=float)


def _noisy_step(one: NoisySum, adjacency: Adjacency) -> NoisyStep:
    replaces = adjacency is Adjacency.REPLACE_ONE
    if one.law == "gaussian":
        ways: tuple[Direction, ...] = ("replace",) if replaces else ("remove", "add")
        laws = [GaussianLaw(noise=one.scale, probability=one.probability, direction=way) for way in ways]
        return tuple(laws), one.steps
    if one.scale * LARGEST_LOSS < 1:
        raise NoGuarantee(f"Laplace noise: its loss exceeds what doubles can follow at scale = {one.scale:g}")
    if replaces:
        raise NoGuarantee("Laplace noise: its loss has no known distribution for replace_one; use delta = 0")
    remove = LaplaceLaw(scale=one.scale, probability=one.probability, direction="remove")
    return (remove, replace(remove, direction="add")), one.steps


def mixture_bounds(mixtures: Sequence[GaussianMixture], delta: float) -> EpsilonBounds:
    """Return an upper bound on epsilon(delta) of all mixtures together, in both directions; the lower bound is 0."""
    if delta == 0 or any(one.noise < 2 * _LEAST_NOISE for one in mixtures):
        return EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers for so little noise")
    steps = []
    for one in mixtures:
        z, q = min(one.noise, _MOST_NOISE), max(one.probability, _RAREST_SAMPLING)
        laws = [
            [GaussianLaw(noise=noise, probability=q, direction=way) for noise in (z, z / 2)]
            for way in ("remove", "add")
        ]
        mixed = (MixedLaw(parts=((1 - one.share, all_), (one.share, half))) for all_, half in laws)
        steps.append((tuple(mixed), one.steps))
    with np.errstate(all="ignore"):
        found = composed_curve(steps, [delta])
        upper = math.inf if found is None else found.epsilon(delta)
        total = sum(
            (one.steps * mixture_renyi_curve(one) for one in mixtures), np.zeros(len(_MIXTURE_ORDERS))
        )
        usable = np.isfinite(total)
        orders = np.asarray(_MIXTURE_ORDERS, dtype=float)[usable]
        renyi = renyi_to_epsilon(orders, total[usable], delta) if usable.any() else math.inf
    if found is None or math.isinf(upper) or not upper <= renyi:
        return EpsilonBounds(lower=0.0, upper=renyi, method="Renyi divergences")
    return EpsilonBounds(lower=0.0, upper=upper, method=found.method)


def mixture_renyi_curve(one: GaussianMixture, orders: Sequence[float] = _MIXTURE_ORDERS) -> np.ndarray:
    """Return the larger direction's Renyi divergence of one step, NaN if an order failed.

    log[(1 - rho) e^((a - 1) D_a(z)) + rho e^((a - 1) D_a(z / 2))] / (a - 1), rho being the share.
    """
    grid = np.asarray(orders, dtype=float)
    curves = []
    z = min(one.noise, _MOST_NOISE)
    for noise in (z, z / 2):
        curve = one_way_curve(NoisySum(law="gaussian", scale=noise, probability=one.probability), grid)
        curves.append(np.where(np.isfinite(curve) & (curve > 0), curve, np.nan) * (grid - 1))
    weights = np.array([[1 - one.share], [one.share]])
    return np.asarray(special.logsumexp(np.array(curves), b=weights, axis=0) / (grid - 1))
