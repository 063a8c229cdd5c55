"""Lower bounds on epsilon from one run with m canaries, each of which an independent fair coin put in or left out.

The auditor scores every canary, higher where it seems to be in. Four ways to read the scores:

- any mechanism: guess "in" for the highest k / 2 scores and "out" for the lowest k / 2, abstain on the rest, and count
  the correct guesses v. If the run is (epsilon, delta)-DP, then with B ~ Binomial(k, 1 / (1 + e^-epsilon))
      P(V >= v) <= P(B >= v) + 2 m delta max_{i = 1..v} P(v > B >= v - i) / i.
  Source: Steinke, Nasr and Jagielski 2023, theorem 5.2 and appendix D.
- a Gaussian trade-off: the same guesses, against the curve f(x) = Phi(Phi^-1(1 - x) - mu) of mu-GDP. With
  g(x) = Phi(Phi^-1(x) - mu), r_v = alpha v / m and h_v = alpha (k - v) / m, the recursion for i = v - 1 .. 0
      h_i = max(h_(i+1), g(r_(i+1))),   r_i = r_(i+1) + i / (k - i) (h_i - h_(i+1))
  refutes mu at level alpha if r_0 + h_0 > k / m. Source: Mahloujifar, Melis and Chaudhuri 2025, algorithm 3.
- normal scores, estimate: mu is the difference of the two means over the pooled standard deviation.
- normal scores, bound: mu at least the lower end of its confidence interval, the root of
      (estimate - mu)^2 = z^2 (1 / n_in + 1 / n_out + mu^2 / (2 (m - 2))).

The last three hold only for a Gaussian mechanism; the last two need scores that are normal with equal variances, which
`OneRunResult.normality` tests. epsilon of mu at delta is that of the Gaussian mechanism.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
from typing_extensions import Doc

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.audit import LARGEST_MU, area_under_curve, epsilon_of, gaussian_mu, normal_limits
from opusim.accounting.guarantee import NoGuarantee

_SHARES = (0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Shares of canaries to guess; the plan takes the one with the highest ceiling at the claimed epsilon."""
_LARGEST_EPSILON = 1e3
_LARGEST_CLAIM = 100.0
"""Epsilon of the ceilings if a larger one, or none, is claimed; no number of canaries comes near it."""
_TOLERANCE = 1e-7
FEWEST_CANARIES = 20
NOT_NORMAL = 1e-4
"""p-value below which scores count as not normal. Scores of sampled steps are never exactly normal."""


class Method(StrEnum):
    """How the scores of one run are read."""

    ANY_MECHANISM = "guesses, any mechanism"
    GAUSSIAN_TRADE_OFF = "guesses, Gaussian trade-off"
    NORMAL_BOUND = "normal scores, bound"
    NORMAL_ESTIMATE = "normal scores, estimate"

    @property
    def guesses(self) -> bool:
        """Whether it guesses the coins."""
        return self in (Method.ANY_MECHANISM, Method.GAUSSIAN_TRADE_OFF)

    @property
    def assumes(self) -> str:
        """What must hold for it to be right."""
        return {
            Method.ANY_MECHANISM: "Steinke et al.; assumes nothing of the mechanism",
            Method.GAUSSIAN_TRADE_OFF: "Mahloujifar et al.; assumes a Gaussian trade-off curve, which a theorem gives",
        }.get(self, "assumes normal scores of equal variance")

    @property
    def is_bound(self) -> bool:
        """Whether the number is a lower confidence limit."""
        return self is not Method.NORMAL_ESTIMATE


class Law(StrEnum):
    """What is known of the audited mechanism's noise."""

    ANY = "any"
    GAUSSIAN = "gaussian"
    """By a theorem the mechanism is at most as revealing as the Gaussian one with the claimed epsilon."""

    @property
    def methods(self) -> tuple[Method, ...]:
        """The ways in which scores may be read."""
        return tuple(Method) if self is Law.GAUSSIAN else (Method.ANY_MECHANISM,)


@dataclass(frozen=True, kw_only=True)
class OneRunPlan:
    """What is fixed before any score is known."""

    adversary: Annotated[str, Doc("What the attacker sees and knows.")]
    canaries: Annotated[int, Doc("m, at least 20.")]
    delta: Annotated[float, Doc("The claim's delta, in [0, 1).")]
    claimed: Annotated[
        float | None,
        Doc(
            "The epsilon to refute, above 0, or None if no finite one is claimed. Ceilings and the number of guesses "
            "are computed for it."
        ),
    ]
    confidence: Annotated[float, Doc("1 - alpha of each bound, in (0, 1).")] = 0.95
    law: Annotated[Law, Doc("Gaussian if a theorem says so; otherwise only the first bound is made.")] = (
        Law.ANY
    )
    readings: Annotated[
        tuple[Method, ...] | None,
        Doc(
            "How the scores are read, of the law's methods; None takes all. Bounds share an error, so each one that "
            "is left out lends its share to the others; it must be left out before any score is known."
        ),
    ] = None
    elsewhere: Annotated[
        tuple[tuple[float, float], ...],
        Doc(
            "The same claim at other deltas, as (delta, epsilon). Normal scores are compared with the statement that "
            "allows the least mu: sampled steps cost less at large deltas than a Gaussian mechanism does."
        ),
    ] = ()
    weaker_mu: Annotated[
        float | None,
        Doc(
            "mu that ideal scores would show if the mechanism had half of its noise, for `OneRunBound.power`; None if "
            "it is not known."
        ),
    ] = None
    draws: Annotated[float | None, Doc("q T, how often a canary is expected to be drawn, or None.")] = None
    weaker_normality: Annotated[
        float | None,
        Doc(
            "p-value that the test of normality typically gives if the mechanism had half of its noise, or None."
        ),
    ] = None
    weaker_right: Annotated[
        tuple[tuple[Method, float], ...],
        Doc("Share of right guesses with half of the noise, by method; by default that of normal scores."),
    ] = ()

    def __post_init__(self) -> None:
        checks.integer(minimum=FEWEST_CANARIES, canaries=self.canaries)
        checks.in_unit_interval(closed="left", delta=self.delta)
        checks.in_unit_interval(closed="neither", confidence=self.confidence)
        if self.claimed is not None:
            checks.positive(claimed=self.claimed)
        if self.weaker_mu is not None:
            checks.positive(weaker_mu=self.weaker_mu)
        for delta, epsilon in self.elsewhere:
            checks.in_unit_interval(closed="neither", elsewhere=delta)
            checks.positive(elsewhere=epsilon)
        if self.law is Law.GAUSSIAN and self.delta == 0:
            raise NoGuarantee("law = 'gaussian': no Gaussian mechanism has delta = 0; give a delta above 0")
        if self.readings is not None:
            for method in self.readings:
                checks.choice(self.law.methods, readings=method)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The ways in which the scores are read."""
        return self.law.methods if self.readings is None else self.readings

    @property
    def normal_share(self) -> float:
        """Probability that the scores that half of the noise gives pass the test of normality; 1 if it is not known.

        -2 log(p / 2) is taken for noncentral chi-squared with two degrees of freedom, shifted by its typical value.
        """
        typical = 1.0 if self.weaker_normality is None else self.weaker_normality
        if not 0 < typical < 1:
            return typical
        least, shift = (-2 * math.log(p / 2) for p in (NOT_NORMAL, typical))
        return float(numerics.noncentral_chi_squared_cdf(least, 2, shift))

    @property
    def refused(self) -> bool:
        """Whether the scores that half of the noise gives mostly fail the test of normality."""
        return self.normal_share < 0.5

    @property
    def strictest(self) -> tuple[float, float] | None:
        """The statement, as (delta, epsilon), that allows the least mu; None without a claim or with delta = 0."""
        if self.claimed is None or self.delta == 0:
            return None
        stated = ((self.delta, self.claimed), *self.elsewhere)
        return min(stated, key=lambda one: gaussian_mu(one[1], one[0]))

    @property
    def allowed_mu(self) -> float:
        """The mu that `strictest` allows; infinite without one."""
        return math.inf if self.strictest is None else gaussian_mu(self.strictest[1], self.strictest[0])

    def guesses(self, method: Method) -> int:
        """Return a method's number of guesses, fixed by m and the claim; 0 for one that does not guess."""
        if not method.guesses:
            return 0
        counts = sorted({max(2, 2 * round(share * self.canaries / 2)) for share in _SHARES})
        # the largest of those with equal ceilings
        return max(reversed(counts), key=lambda count: self.ceiling(method, count))

    def ceiling(self, method: Method, guesses: int | None = None) -> float:
        """Return what a perfect attack on a Gaussian mechanism of the claimed epsilon would give; see `ceiling`."""
        epsilon = min(self.claimed or _LARGEST_CLAIM, _LARGEST_CLAIM)
        guesses = self.guesses(method) if guesses is None else guesses
        return ceiling(
            method, self.canaries, epsilon, self.delta, confidence=self.confidence, guesses=guesses
        )

    def power(self, method: Method) -> float | None:
        """Return the probability with which a bound from ideal scores refutes the claim if the noise is halved.

        The count of right guesses is taken for binomial, and the estimate of mu for normal. Normal scores must also
        pass the test of normality (`normal_share`). None for an estimate, without a claim, or if `weaker_mu` is None.
        """
        mu, m, level = self.weaker_mu, self.canaries, 1 - self.confidence
        if not method.is_bound or self.claimed is None or mu is None:
            return None
        if method is Method.NORMAL_BOUND:
            allowed, z = self.allowed_mu, float(numerics.normal_quantile(self.confidence))
            needed = allowed + z * _standard_error(allowed, m)
            return self.normal_share * float(numerics.normal_cdf((mu - needed) / _standard_error(mu, m)))
        guesses = self.guesses(method)
        own, claimed = gaussian_mu(self.claimed, self.delta) if self.delta else 0.0, self.claimed

        def refuted(correct: int) -> bool:
            if method is Method.ANY_MECHANISM:
                return _p_value(m, guesses, correct, claimed, self.delta) <= level
            return _refutes_mu(own, m, guesses, correct, level)

        # the least number of right guesses that refutes; one more than all if none does
        least = bisect.bisect_left(range(guesses + 1), True, key=refuted)
        right = dict(self.weaker_right).get(method)
        right = _ideal_accuracy(mu, guesses / m) if right is None else right
        return float(numerics.binomial.sf(least - 1, guesses, right))

    @property
    def power_of_all(self) -> float | None:
        """Probability that any bound refutes the claim if the noise is halved, or None; see `power`.

        Scores that fail the test of normality, taken for independent of the rest, leave it to the guesses.
        """
        powers = {method: self.power(method) for method in self.methods}
        guessed = max(
            (power for method, power in powers.items() if method.guesses and power is not None), default=None
        )
        normal = powers.get(Method.NORMAL_BOUND)
        if normal is None or guessed is None:
            return guessed if normal is None else normal
        return max(guessed, normal + (1 - self.normal_share) * guessed)


@dataclass(frozen=True, kw_only=True)
class OneRunBound:
    """One reading of the scores.

    Attributes:
        method: How the scores were read.
        epsilon: The bound or the estimate, at least 0.
        ceiling: What ideal scores would give at the claimed epsilon, with the same number of canaries.
        guesses: Number of canaries that were guessed; 0 if the method does not guess.
        correct: Number of right guesses.
        interval: Ends of the confidence interval of an estimate, each one-sided. A bound has none.
        power: Probability of refuting the claim with ideal scores if the noise is halved; see `OneRunPlan.power`.
    """

    method: Method
    epsilon: float
    ceiling: float
    guesses: int = 0
    correct: int = 0
    interval: tuple[float, float] | None = None
    power: float | None = None


@dataclass(frozen=True, kw_only=True)
class OneRunResult:
    """All readings of the scores of one run; never a guarantee.

    Attributes:
        plan: The plan of the audit.
        n_in: Canaries that were in.
        bounds: One for each method of the plan.
        normality: p-value of the test that the scores are normal with equal variances; below `NOT_NORMAL` the two
            readings of normal scores are not to be relied on.
        auc: Probability that a canary that was in scores higher than one that was not, ties counted half.
    """

    plan: OneRunPlan
    n_in: int
    bounds: tuple[OneRunBound, ...]
    normality: float
    auc: float

    def bound(self, method: Method) -> OneRunBound:
        """Return the reading of a method; raise KeyError if the plan does not have it."""
        return {bound.method: bound for bound in self.bounds}[method]

    @property
    def e_value(self) -> float | None:
        """The e-value of the claim: p^(-1/2) / 2, p being the guesses' p-value for any mechanism; None without a claim.

        E-values of independent runs may be multiplied, whatever delta is (Vovk and Wang 2021).
        """
        claimed, found = self.plan.claimed, {bound.method: bound for bound in self.bounds}
        guessed = found.get(Method.ANY_MECHANISM)
        if claimed is None or guessed is None:
            return None
        p_value = _p_value(self.plan.canaries, guessed.guesses, guessed.correct, claimed, self.plan.delta)
        return 0.5 / math.sqrt(max(p_value, 1e-300))

    @property
    def n_out(self) -> int:
        """Canaries that were out."""
        return self.plan.canaries - self.n_in

    @property
    def strongest(self) -> OneRunBound:
        """The largest bound; estimates do not count."""
        return max((one for one in self.bounds if one.method.is_bound), key=lambda one: one.epsilon)

    @property
    def epsilon_lower(self) -> float:
        """The largest bound on epsilon."""
        return self.strongest.epsilon

    @property
    def ceiling(self) -> float:
        """The ceiling of the strongest bound."""
        return self.strongest.ceiling

    @property
    def refuting(self) -> tuple[OneRunBound, ...]:
        """The bounds that exceed the claim; those under normality only if the scores look normal."""
        return tuple(
            bound
            for bound in self.bounds
            if self.exceeds(bound)
            and (bound.method is not Method.NORMAL_BOUND or self.normality >= NOT_NORMAL)
        )

    def exceeds(self, bound: OneRunBound) -> bool:
        """Return whether a bound exceeds the claim; one of normal scores must exceed its strictest statement."""
        if not bound.method.is_bound or self.plan.claimed is None:
            return False
        if bound.method is Method.NORMAL_BOUND:
            return gaussian_mu(bound.epsilon, self.plan.delta) > self.plan.allowed_mu
        return bound.epsilon > self.plan.claimed

    def at_strictest(self, bound: OneRunBound) -> tuple[float, float, float] | None:
        """Return delta and epsilon of the plan's strictest statement, and epsilon of a bound of normal scores there.

        Returns None if that statement is the claim itself, or if the bound does not assume normal scores.
        """
        strictest = self.plan.strictest
        if strictest is None or strictest[0] == self.plan.delta or bound.method is not Method.NORMAL_BOUND:
            return None
        return (*strictest, epsilon_of(gaussian_mu(bound.epsilon, self.plan.delta), strictest[0]))


def audit_one_run(scores: np.ndarray, inside: np.ndarray, plan: OneRunPlan) -> OneRunResult:
    """Return the bounds on epsilon from one run's scores of m canaries, higher where one seems in, and coins.

    Raises ValueError for other shapes than the plan's, a score that is not finite, or fewer than two canaries in or
    out.
    """
    checks.shape((plan.canaries,), scores=scores, inside=inside)
    checks.finite(scores=scores)
    inside = np.asarray(inside, dtype=bool)
    n_in = int(inside.sum())
    if not 2 <= n_in <= plan.canaries - 2:
        raise ValueError(
            f"inside: {n_in} of {plan.canaries} canaries are in; at least two must be in and out"
        )
    parts = scores[inside], scores[~inside]
    bounds = []
    for method in plan.methods:
        facts: dict[str, Any] = {
            "method": method,
            "ceiling": plan.ceiling(method),
            "power": plan.power(method),
        }
        if method.guesses:
            k = plan.guesses(method)
            right = int(correct_guesses(scores, inside, k))
            found = guesses_bound(
                method, plan.canaries, k, right, delta=plan.delta, confidence=plan.confidence
            )
            bounds.append(OneRunBound(epsilon=found, guesses=k, correct=right, **facts))
            continue
        limits = normal_limits(*parts, confidence=plan.confidence)
        value, least, most = (epsilon_of(mu, plan.delta) for mu in limits)
        if method is Method.NORMAL_BOUND:
            bounds.append(OneRunBound(epsilon=least, **facts))
        else:
            bounds.append(OneRunBound(epsilon=value, interval=(least, most), **facts))
    # Normality with equal variances: twice the smaller of the p-values of the test of D'Agostino and Pearson on the
    # residuals (skewness and kurtosis) and of the two-sided F test on the ratio of the variances.
    variances, normality = [float(np.var(part, ddof=1)) for part in parts], 0.0
    if min(variances) > 0:
        shape = numerics.normality_p_value(np.concatenate([part - part.mean() for part in parts]))
        ratio = variances[0] / variances[1]
        other = numerics.variance_ratio_p_value(ratio, len(parts[0]) - 1, len(parts[1]) - 1)
        normality = min(1.0, 2 * min(shape, other))
    return OneRunResult(
        plan=plan, n_in=n_in, bounds=tuple(bounds), normality=normality, auc=area_under_curve(*parts)
    )


def correct_guesses(scores: np.ndarray, inside: np.ndarray, guesses: int) -> np.ndarray:
    """Return how many of k guesses are right: "in" for the highest half, "out" for the lowest half.

    Scores and coins have shape (m,) or (repeats, m); ties are broken by position, which no coin depends on.
    """
    half = guesses // 2
    order = np.argsort(scores, axis=-1, kind="stable")
    sorted_coins = np.take_along_axis(np.asarray(inside, dtype=bool), order, axis=-1)
    top = sorted_coins[..., sorted_coins.shape[-1] - half :]
    return np.asarray((~sorted_coins[..., :half]).sum(axis=-1) + top.sum(axis=-1))


@functools.lru_cache(maxsize=4096)
def guesses_bound(
    method: Method, canaries: int, guesses: int, correct: int, *, delta: float, confidence: float = 0.95
) -> float:
    """Return the largest epsilon, at least 0, that v correct of k guesses about m canaries refute; k is fixed before.

    Raises ValueError if the numbers do not fit each other, or the method does not guess.
    """
    checks.integer(minimum=1, canaries=canaries, guesses=guesses)
    checks.integer(minimum=0, correct=correct)
    checks.choice((Method.ANY_MECHANISM, Method.GAUSSIAN_TRADE_OFF), method=method)
    if not correct <= guesses <= canaries:
        raise ValueError(
            f"correct = {correct}, guesses = {guesses}, canaries = {canaries}: must not decrease in this order"
        )
    level = 1 - confidence
    if method is Method.ANY_MECHANISM:
        return _largest(lambda e: _p_value(canaries, guesses, correct, e, delta) <= level, _LARGEST_EPSILON)
    mu = _largest(lambda mu: _refutes_mu(mu, canaries, guesses, correct, level), LARGEST_MU)
    return epsilon_of(mu, delta)


def _p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of `correct` right guesses or more under (epsilon, delta); see the module."""
    rate = float(numerics.logistic(epsilon))
    tail = float(numerics.binomial.sf(correct - 1, guesses, rate))
    if delta == 0 or not correct:
        return tail
    masses = numerics.binomial.pmf(np.arange(correct - 1, -1, -1), guesses, rate)
    steepest = float(np.max(np.cumsum(masses) / np.arange(1, correct + 1)))
    return min(1.0, tail + 2 * canaries * delta * steepest)


def _refutes_mu(mu: float, canaries: int, guesses: int, correct: int, level: float) -> bool:
    """Whether the guesses refute mu-GDP at a level; see the module."""
    r, h = level * correct / canaries, level * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        above = max(h, float(numerics.normal_cdf(numerics.normal_quantile(r) - mu)))
        if above == h:  # then nothing changes any more
            break
        r, h = min(1.0, r + i / (guesses - i) * (above - h)), above
    return r + h > guesses / canaries


def _largest(refuted: Callable[[float], bool], limit: float) -> float:
    """Return the largest number that is refuted, from below; 0 if 0 is not refuted."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high < limit and refuted(high):
        low, high = high, 2 * high
    while high - low > _TOLERANCE * max(high, 1.0):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _standard_error(mu: float, canaries: int) -> float:
    """Standard error of an estimate of mu from normal scores, half of them of canaries that were in."""
    return math.sqrt(4 / canaries + mu * mu / (2 * (canaries - 2)))


@functools.lru_cache(maxsize=1024)
def ceiling(
    method: Method,
    canaries: int,
    epsilon: float,
    delta: float,
    *,
    confidence: float = 0.95,
    guesses: int = 0,
) -> float:
    """Return what a method gives for ideal scores: N(mu, 1) for canaries in, N(0, 1) for others, and median counts.

    mu is that of the Gaussian mechanism of this epsilon. With delta = 0 no Gaussian mechanism exists, and the ideal
    attack makes each guess right with probability e^epsilon / (1 + e^epsilon). Guesses are even, from 2 to the number
    of canaries.
    """
    if delta == 0:
        right = round(guesses * float(numerics.logistic(epsilon)))
        return guesses_bound(method, canaries, guesses, right, delta=0.0, confidence=confidence)
    mu = gaussian_mu(epsilon, delta)
    if method is Method.NORMAL_ESTIMATE:
        return epsilon
    if method is Method.NORMAL_BOUND:
        z = float(numerics.normal_quantile(confidence))
        return epsilon_of(max(mu - z * _standard_error(mu, canaries), 0.0), delta)
    right = round(guesses * _ideal_accuracy(mu, guesses / canaries))
    return guesses_bound(method, canaries, guesses, right, delta=delta, confidence=confidence)


def _ideal_accuracy(mu: float, share: float) -> float:
    """Share of right guesses if the highest and lowest scores, `share` of all, are guessed."""

    def guessed(threshold: float) -> float:  # share of scores above it, half of them N(mu, 1)
        return float(numerics.normal_cdf(mu - threshold) + numerics.normal_cdf(-threshold)) / 2

    threshold = float(numerics.find_root(lambda t: guessed(t) - share / 2, -40.0, mu + 40.0))
    return float(numerics.normal_cdf(mu - threshold)) / 2 / guessed(threshold)
