"""Lower bounds on epsilon from an attack's scores in two worlds, and the verdict on a guarantee.

A score is higher if the attack takes the target for present. At a threshold fixed beforehand, with one-sided
Clopper-Pearson limits at alpha/2 for each error rate, any (epsilon, delta)-DP mechanism obeys
    TPR <= e^epsilon FPR + delta   and   1 - FPR <= e^epsilon (1 - TPR) + delta,
so epsilon >= log((1 - FNR_up - delta) / FPR_up) and log((1 - FPR_up - delta) / FNR_up), with confidence 1 - alpha.
The threshold is chosen on one half of the scores and used on the other. The sharper estimator for mu-GDP,
mu >= Phi^-1(1 - FNR_up) - Phi^-1(FPR_up), holds only for a mechanism that is known to be Gaussian. Where the scores
without noise are known too, the noise that was drawn gives the largest bound (`audit_drawn_noise`).
Source: Nasr et al. 2021 and 2023; Clopper and Pearson 1934.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.guarantee import Guarantee, NoGuarantee

LARGEST_MU = 1e3
"""mu of scores that separate the worlds entirely."""
_FALSE_RATES, _DRAWS = 25, 400


class Estimator(StrEnum):
    """How a lower bound is computed."""

    CLOPPER_PEARSON = "Clopper-Pearson"
    """Valid for any mechanism."""
    GAUSSIAN = "Gaussian trade-off"
    """Valid only for a mechanism that is mu-GDP by a theorem."""
    DRAWN_NOISE = "drawn Gaussian noise"
    """Valid only for scores that are a known number of their world plus Gaussian noise."""


class Verdict(StrEnum):
    """What an audit says about a guarantee."""

    REFUTED = "refuted"
    CONSISTENT = "consistent"
    PROVES_NOTHING = "proves nothing"


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """What is fixed before any score is known.

    Attributes:
        threat_model: What the attacker sees and knows.
        pair: The two worlds.
        delta: The claim's delta, in [0, 1).
        confidence: 1 - alpha, in (0, 1).
        estimator: How the bound is computed.
        mechanism_law: The law of the audited noise: "gaussian" if a theorem makes the mechanism mu-GDP.
        seed: Seed of the split into halves.
    """

    threat_model: str
    pair: str
    delta: float
    confidence: float = 0.95
    estimator: Estimator = Estimator.CLOPPER_PEARSON
    mechanism_law: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.in_unit_interval(closed="neither", confidence=self.confidence)
        checks.in_unit_interval(closed="left", delta=self.delta)
        other_law = self.mechanism_law != "gaussian" or self.delta == 0
        if self.estimator is not Estimator.CLOPPER_PEARSON and other_law:
            raise NoGuarantee(
                f"estimator = {self.estimator.value!r}: needs mechanism_law = 'gaussian' and delta above 0, got "
                f"{self.mechanism_law!r} and {self.delta}; for any other use {Estimator.CLOPPER_PEARSON.value!r}"
            )


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """A lower bound on epsilon from an attack; never a guarantee.

    Attributes:
        epsilon_lower: At least 0, at most the ceiling.
        ceiling: The bound of a perfect attack with that many scores.
        n_in: Scores with the target that the bound rests on (the threshold was chosen on others).
        n_out: Scores without the target.
        threshold: The score from which the attack says "in".
        false_positives: Number of n_out scores that reached it.
        false_negatives: Number of n_in scores that did not.
        plan: The plan of the audit.
    """

    epsilon_lower: float
    ceiling: float
    n_in: int
    n_out: int
    threshold: float
    false_positives: int
    false_negatives: int
    plan: AuditPlan

    def __post_init__(self) -> None:
        checks.integer(minimum=1, n_in=self.n_in, n_out=self.n_out)
        if not self.epsilon_lower >= 0:
            raise ValueError(f"epsilon_lower = {self.epsilon_lower}: must be at least 0")

    def verdict(self, guarantee: Guarantee) -> Verdict:
        """Return refuted if the bound exceeds the claim at the same delta; nothing is proven if it stays far below."""
        if guarantee.delta != self.plan.delta:
            raise ValueError(
                f"guarantee.delta = {guarantee.delta}: the audit was made at {self.plan.delta}; audit at the claim's"
            )
        if self.epsilon_lower > guarantee.epsilon:
            return Verdict.REFUTED
        return Verdict.CONSISTENT if self.epsilon_lower >= guarantee.epsilon / 2 else Verdict.PROVES_NOTHING

    def describe(self, guarantee: Guarantee) -> str:
        """Return the verdict as a sentence, with everything that the number rests on."""
        found = (
            f"epsilon is at least {self.epsilon_lower:.3g} with confidence {self.plan.confidence:g} "
            f"({self.plan.estimator.value}, {self.n_in} + {self.n_out} scores, ceiling {self.ceiling:.3g}, "
            f"{self.plan.threat_model}, {self.plan.pair})"
        )
        endings = {
            Verdict.REFUTED: f"the {guarantee.status.value} epsilon {guarantee.epsilon:.3g} is refuted",
            Verdict.CONSISTENT: f"this agrees with the {guarantee.status.value} epsilon {guarantee.epsilon:.3g}",
            Verdict.PROVES_NOTHING: f"far below the {guarantee.status.value} epsilon {guarantee.epsilon:.3g}, "
            "this proves nothing: a better attack may exist",
        }
        return f"{found}; {endings[self.verdict(guarantee)]}."


def audit(scores_in: np.ndarray, scores_out: np.ndarray, plan: AuditPlan) -> AuditResult:
    """Return the lower bound on epsilon from at least 4 independent scores of each of the two worlds.

    Raises ValueError for too few scores, or one that is not finite.
    """
    checks.shape((None,), scores_in=scores_in, scores_out=scores_out)
    checks.finite(scores_in=scores_in, scores_out=scores_out)
    for name, scores in (("scores_in", scores_in), ("scores_out", scores_out)):
        if len(scores) < 4:
            raise ValueError(f"{name} has {len(scores)} entries: at least 4 are needed, two for each half")
    generator = np.random.default_rng(plan.seed)
    (choose_in, use_in), (choose_out, use_out) = (
        np.split(scores[generator.permutation(len(scores))], [len(scores) // 2])
        for scores in (scores_in, scores_out)
    )
    # Take the threshold with the largest bound on the first half. At a score itself it would misjudge fresh scores next
    # to that score, so candidates lie midway between two scores; among equal bounds the widest gap wins.
    points = np.unique(np.concatenate([choose_in, choose_out]))
    candidates = np.concatenate([points[:1], (points[:-1] + points[1:]) / 2])
    widths = np.concatenate([[0.0], np.diff(points)])
    misses = np.searchsorted(np.sort(choose_in), candidates)
    alarms = len(choose_out) - np.searchsorted(np.sort(choose_out), candidates)
    # All thresholds of the Gaussian estimator estimate the same mu, so the largest bound is often luck at few errors.
    # A hundredth of the level gives few errors less weight; the full level is used only if that leaves no bound.
    for share in (0.01, 1.0) if plan.estimator is Estimator.GAUSSIAN else (1.0,):
        level = share * (1 - plan.confidence) / 2
        miss, alarm = (
            _upper_limits(np.arange(trials + 1), trials, level)[events]
            for trials, events in ((len(choose_in), misses), (len(choose_out), alarms))
        )
        strengths = _strength(miss, alarm, plan)
        if strengths.max() > 0:
            break
    best = np.flatnonzero(strengths == strengths.max())
    threshold = float(candidates[best[np.argmax(widths[best])]])
    # errors at that threshold on the other half
    positives, negatives = int(np.sum(use_out >= threshold)), int(np.sum(use_in < threshold))
    sizes = len(use_in), len(use_out)
    return AuditResult(
        epsilon_lower=lower_bound(negatives, positives, *sizes, plan),
        ceiling=lower_bound(0, 0, *sizes, plan),
        n_in=sizes[0],
        n_out=sizes[1],
        threshold=threshold,
        false_positives=positives,
        false_negatives=negatives,
        plan=plan,
    )


def audit_drawn_noise(
    scores_in: np.ndarray, scores_out: np.ndarray, values: tuple[float, float], plan: AuditPlan
) -> AuditResult:
    """Return the lower bound on epsilon from scores that are a known number of their world plus Gaussian noise.

    The drawn noise is score minus number. Its n values with standard deviation s have sum of squares Q = s^2 chi^2_n,
    so with confidence 1 - alpha, s <= sqrt(Q / q) with q the alpha quantile of chi^2_n, and mu is at least the distance
    of the two numbers over sqrt(Q / q). Errors are counted at the threshold midway between the numbers. Raises
    ValueError for no scores, or one that is not finite.
    """
    checks.shape((None,), scores_in=scores_in, scores_out=scores_out)
    checks.finite(scores_in=scores_in, scores_out=scores_out)
    distance, threshold = max(values[0] - values[1], 0.0), (values[0] + values[1]) / 2
    squares = float(np.sum((scores_in - values[0]) ** 2) + np.sum((scores_out - values[1]) ** 2))
    count = len(scores_in) + len(scores_out)
    largest = math.sqrt(squares / float(numerics.chi_squared.ppf(1 - plan.confidence, count)))
    mu = min(distance / largest, LARGEST_MU) if largest > 0 else LARGEST_MU * (distance > 0)
    return AuditResult(
        epsilon_lower=epsilon_of(mu, plan.delta),
        ceiling=epsilon_of(LARGEST_MU, plan.delta),
        n_in=len(scores_in),
        n_out=len(scores_out),
        threshold=threshold,
        false_positives=int(np.sum(scores_out >= threshold)),
        false_negatives=int(np.sum(scores_in < threshold)),
        plan=plan,
    )


def lower_bound(false_negatives: int, false_positives: int, n_in: int, n_out: int, plan: AuditPlan) -> float:
    """Return the bound, at least 0, from misses among n_in and false alarms among n_out at a given threshold."""
    level = (1 - plan.confidence) / 2
    miss = clopper_pearson_upper(false_negatives, n_in, level)
    alarm = clopper_pearson_upper(false_positives, n_out, level)
    strength = float(_strength(np.array(miss), np.array(alarm), plan))
    if plan.estimator is Estimator.GAUSSIAN:
        return numerics.gaussian_bounds(strength, plan.delta).lower
    return strength


def _strength(miss: np.ndarray, alarm: np.ndarray, plan: AuditPlan) -> np.ndarray:
    """Return what upper limits of both error rates prove: epsilon, or mu for the Gaussian estimator; at least 0."""
    with np.errstate(divide="ignore"):
        if plan.estimator is Estimator.GAUSSIAN:
            return np.maximum(-numerics.normal_quantile(miss) - numerics.normal_quantile(alarm), 0.0)
        gain_in, gain_out = np.maximum(1 - miss - plan.delta, 0.0), np.maximum(1 - alarm - plan.delta, 0.0)
        return np.maximum(0.0, np.maximum(np.log(gain_in / alarm), np.log(gain_out / miss)))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of epsilon from an attack's scores taken at face value; never a bound.

    Attributes:
        epsilon: The estimate, at least 0.
        low: Lower end of its interval, 95 % confidence.
        high: Upper end; None without one, as when the attack made no error of one kind.
    """

    epsilon: float
    low: float
    high: float | None


def estimated(scores_in: np.ndarray, scores_out: np.ndarray, result: AuditResult) -> Estimate:
    """Return the epsilon that all scores of both worlds show, without the margin of a bound.

    Under the Gaussian law mu is the difference of the means over the pooled standard deviation, for scores that are
    normal, such as log-likelihood ratios of that law. Otherwise it follows from the error rates at the bound's
    threshold, with half an error in place of none; the interval takes Clopper-Pearson limits of each.
    """
    plan = result.plan
    if plan.estimator is Estimator.GAUSSIAN:
        mus = normal_limits(scores_in, scores_out, confidence=0.975)
        found, low, high = (epsilon_of(mu, plan.delta) for mu in mus)
        return Estimate(epsilon=found, low=low, high=high)
    counts = (result.false_negatives, result.n_in), (result.false_positives, result.n_out)
    level = 0.0125  # for each end of each rate
    most = [clopper_pearson_upper(events, trials, level) for events, trials in counts]
    least = [1 - clopper_pearson_upper(trials - events, trials, level) for events, trials in counts]
    seen = [max(events, 0.5) / trials for events, trials in counts]  # half an error stands for none
    found, low, high = (
        float(_strength(np.array(miss), np.array(alarm), plan)) for miss, alarm in (seen, most, least)
    )
    return Estimate(epsilon=found, low=low, high=high if math.isfinite(high) else None)


def detection_probability(
    statements: Sequence[tuple[float, float]], claimed: float, n_in: int, n_out: int, plan: AuditPlan
) -> float:
    """Return the probability with which the best attack on another mechanism refutes a claim at the plan's delta.

    The statements, (delta, epsilon) pairs that are tight for it, bound the true positive rate by the least e^epsilon
    FPR + delta and 1 - e^-epsilon (1 - FPR - delta). The best attack is assumed to reach that bound, or the rate of the
    Gaussian mechanism with the statements' largest mu if that is lower. Counts of errors among the n_in and n_out
    scores that the bound rests on are drawn at 25 false positive rates; the largest probability is returned.
    """
    mus = [gaussian_mu(epsilon, delta) for delta, epsilon in statements if delta > 0]
    if plan.estimator is Estimator.DRAWN_NOISE:
        ratio = max(mus, default=0.0) / gaussian_mu(claimed, plan.delta)
        law = numerics.chi_squared(n_in + n_out)
        return float(law.cdf(ratio**2 * law.ppf(1 - plan.confidence)))
    alarms = np.geomspace(0.5 / n_out, 0.5, _FALSE_RATES)
    deltas, epsilons = (np.array(values)[:, None] for values in zip(*statements, strict=True))
    growth = np.exp(np.minimum(epsilons, 700.0))
    hits = np.minimum(growth * alarms + deltas, 1 - (1 - alarms - deltas) / growth).min(axis=0).clip(0.0, 1.0)
    if mus:
        hits = np.minimum(hits, numerics.normal_cdf(numerics.normal_quantile(alarms) + max(mus)))
    generator, level = np.random.default_rng(plan.seed), (1 - plan.confidence) / 2
    limits = []
    for trials, rates in ((n_in, 1 - hits), (n_out, alarms)):
        events, places = np.unique(
            generator.binomial(trials, rates, (_DRAWS, _FALSE_RATES)), return_inverse=True
        )
        limits.append(_upper_limits(events, trials, level)[places].reshape(_DRAWS, _FALSE_RATES))
    least = claimed if plan.estimator is Estimator.CLOPPER_PEARSON else gaussian_mu(claimed, plan.delta)
    return float((_strength(limits[0], limits[1], plan) > least).mean(axis=0).max())


def clopper_pearson_upper(events: int, trials: int, level: float) -> float:
    """Return the rate at which `events` or fewer in `trials` have probability `level`: an upper limit on the rate."""
    checks.in_unit_interval(closed="neither", level=level)
    checks.integer(minimum=1, trials=trials)
    if not 0 <= events <= trials:
        raise ValueError(f"events = {events}: must lie in [0, {trials}]")
    return float(_upper_limits(np.array(events), trials, level))


def _upper_limits(events: np.ndarray, trials: int, level: float) -> np.ndarray:
    """Clopper-Pearson limits; 1 if every trial is an event."""
    inside = np.minimum(events, trials - 1)
    return np.where(events == trials, 1.0, numerics.beta_quantile(1 - level, inside + 1, trials - inside))


def area_under_curve(first: np.ndarray, second: np.ndarray) -> float:
    """Return the probability that a score of `first` exceeds one of `second`, ties counted half; NaN without scores."""
    if not len(first) or not len(second):
        return math.nan
    ordered = np.sort(second)
    ranks = np.searchsorted(ordered, first, side="left") + np.searchsorted(ordered, first, side="right")
    return float(np.mean(ranks) / 2 / len(ordered))


def normal_limits(
    scores_in: np.ndarray, scores_out: np.ndarray, *, confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return the estimate of mu and its interval's ends, each one-sided at the confidence, all at least 0.

    Scores with the target, or of canaries that were in, and the others are at least 2 each.
    """
    n, k = len(scores_in), len(scores_out)
    squares = np.sum((scores_in - scores_in.mean()) ** 2) + np.sum((scores_out - scores_out.mean()) ** 2)
    spread = math.sqrt(float(squares) / (n + k - 2))
    difference = float(scores_in.mean() - scores_out.mean())
    if spread == 0:
        value = 0.0 if difference <= 0 else LARGEST_MU
        return value, value, value
    found = min(difference / spread, LARGEST_MU)
    z, a, b = float(numerics.normal_quantile(confidence)), 1 / n + 1 / k, 1 / (2 * (n + k - 2))
    shrink = 1 - z * z * b
    centre, reach = found / shrink, z * math.sqrt(found * found * b / shrink + a) / math.sqrt(shrink)
    return max(found, 0.0), max(centre - reach, 0.0), max(centre + reach, 0.0)


@functools.lru_cache(maxsize=1024)
def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the mu whose Gaussian mechanism has this epsilon >= 0 at this delta in (0, 1)."""
    return float(numerics.find_root(lambda mu: epsilon_of(mu, delta) - epsilon, 0.0, LARGEST_MU, xtol=1e-10))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the epsilon at delta of the Gaussian mechanism with this mu, rounded down."""
    return numerics.gaussian_bounds(mu, delta).lower if mu > 0 else 0.0
