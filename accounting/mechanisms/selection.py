"""Choosing the best of a random number of trials by a noised score.

With Q the density of a trial's (output, score) and a(y) = Q(score > y), a search over K ~ Poisson(m) trials releases
the density A(y) = m e^(-m a(y)) Q(y). Theorem private-selection bounds it for trials that are mu-GDP, and theorem
selection-of-noisy-sums for others, such as sampled Gaussian noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from typing_extensions import Doc

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.composition import calibrate_noise, guarantees
from opusim.accounting.guarantee import Adjacency, EpsilonBounds, NoGuarantee, Release, Unit
from opusim.accounting.mechanism import (
    Absent,
    CertifiedMechanism,
    ExactlyRounded,
    Hypotheses,
    Mechanism,
    Positive,
)
from opusim.accounting.theorems import SEED_IS_SECRET, Theorem

_ORDERS = (
    *(1 + k / 10 for k in range(1, 10)), *(2 + k / 2 for k in range(20)), *map(float, range(12, 33)),
    *(40.0, 48.0, 64.0, 96.0, 128.0, 256.0),
)  # fmt: skip
"""Renyi orders; few, since dp_accounting takes long for fractional ones."""
_SEARCHED = (
    "the number of trials is Poisson, drawn once, before any trial and independent of the data",
    "every trial draws its settings independently from the same law, which does not depend on the data",
)
_ONE_RELEASE = "only the best trial's model and score are released; with no trial, nothing is"
_NOT_REPEATED = "the search is not repeated after seeing its outcome"

PRIVATE_SELECTION = Theorem(
    name="private-selection",
    title="private selection with a Poisson number of trials",
    statement="The best of K ~ Poisson(m) trials, each mu-GDP in output and score, is (epsilon, delta)-DP for the "
    "least of three epsilons. (1) epsilon^ + m delta(0) with m delta(epsilon^) = delta, delta(.) being that"
    " of mu-GDP. (2) Refined: the epsilon at which m E_Q'[sup_a e^(-m a) (r - e^(epsilon - m g(a)))_+] = "
    "delta, r = dQ/dQ', g(a) = Phi(mu + Phi^-1(a)) - a. (3) The Renyi divergence of a trial plus m "
    "delta(log(1 + 1/(lambda - 1))) + log(m) / (lambda - 1). Several searches add their epsilons at equal "
    "shares of delta.",
    proof="(1) is Theorem 5.1 at e1 = 0, always its best choice. (2) mu-GDP bounds the other world's tail pointwise "
    "by a + g(a); what remains is a convex function of r, so the Gaussian pair dominates it; it is summed over "
    "a grid, each cell at its worst corner. (3) is Theorem 6 of Papernot and Steinke.",
    reference="Koskela, Redberg and Wang 2024; Papernot and Steinke 2022",
    code="opusim.accounting.mechanisms.selection.selection_bounds",
    page="convex.md, section 4",
    checked_by_code=(
        *_SEARCHED,
        "a trial's score is part of what makes it mu-GDP: Gaussian noise hides the held-out records in it",
        _ONE_RELEASE,
    ),
    trusted=(_NOT_REPEATED, SEED_IS_SECRET),
)
NOISY_SUMS = Theorem(
    name="selection-of-noisy-sums",
    title="private selection with a Poisson number of trials of noisy sums",
    statement="Let K ~ Poisson(m) trials release models whose privacy losses are dominated by noisy sums, and scores"
    " that are mu-GDP in the held-out records, which no training sees. Let delta(.) be the largest delta of the trials'"
    " settings, and R(.) their largest Renyi divergence, each in both directions. The best trial is (epsilon, "
    "delta)-DP for the larger of two epsilons: that of theorem private-selection at mu, and the lesser of (1) epsilon^ "
    "+ m delta(0) with m delta(epsilon^) = delta, and (2) R(lambda) + m delta(log(1 + 1/(lambda - 1))) + log(m) / "
    "(lambda - 1), converted to epsilon. Several searches add their epsilons at equal shares of delta.",
    proof="A record is in the training set or held out, under both neighbours. If it is held out, models have the same "
    "law and the score is mu-GDP. If it is in the training set, a score is computed from the model, public numbers and "
    "other records, so that it costs nothing. A trial names its settings, so a hockey-stick divergence of the trial is "
    "the mean over settings, and e^((lambda - 1) R) likewise: both are at most the largest. (1) The other world's tail "
    "a'(y) = Q'(score > y) exceeds a(y) by at most delta(0), so A - e^(epsilon^ + m delta(0)) A' is at most m (Q - "
    "e^epsilon^ Q'). (2) is Theorem 6 of Papernot and Steinke.",
    reference="Koskela, Redberg and Wang 2024; Papernot and Steinke 2022",
    code="opusim.accounting.mechanisms.selection.models_bounds",
    page="privacy-records.md, section 6",
    checked_by_code=(
        *_SEARCHED,
        "Gaussian noise on the number of held-out records that a model classifies rightly hides each of them",
        "a record that is held out enters no training, and whether it is does not depend on other records",
        "a trial spends at most what was paid for it: the steps and the noise in its ledger are compared",
        _ONE_RELEASE,
    ),
    trusted=(_NOT_REPEATED, SEED_IS_SECRET),
)


@dataclass(frozen=True, kw_only=True)
class NoisyTrial:
    """Settings that a trial may have: the noisy sum that dominates all that its training releases.

    Attributes:
        law: Law of the noise.
        scale: Its standard deviation, or scale b for Laplace noise, over the largest norm C that one record adds.
        probability: q in (0, 1], the sampling probability.
        steps: At least 1.
        what: The mechanism in words, or empty.
    """

    law: Literal["gaussian", "laplace"]
    scale: float
    probability: float
    steps: int
    what: str = ""

    def __post_init__(self) -> None:
        checks.positive(scale=self.scale)
        checks.in_unit_interval(closed="right", probability=self.probability)
        checks.integer(minimum=1, steps=self.steps)

    @classmethod
    def of(cls, whole: Mechanism) -> Self:
        """Return the trial that releases a mechanism, all of its steps.

        Raises:
            NoGuarantee: No noisy sum dominates it.
        """
        return cls(**asdict(whole.as_noise()), what=whole.describe())

    @classmethod
    def from_text(cls, text: str) -> NoisyTrial:
        """Return the trial that LAW,SCALE,Q,STEPS names.

        Raises:
            ValueError: The text has another form.
        """
        parts = text.split(",")
        if len(parts) == 4 and parts[0] in ("gaussian", "laplace"):
            law: Any = parts[0]
            try:
                return cls(law=law, scale=float(parts[1]), probability=float(parts[2]), steps=int(parts[3]))
            except ValueError as error:
                raise ValueError(f"--trial {text}: {error}") from error
        raise ValueError(
            f"--trial {text}: must be LAW,SCALE,Q,STEPS with the law gaussian or laplace, such as gaussian,4,0.1,400"
        )

    def as_noise(self) -> numerics.NoisySum:
        """Return the noise in numbers."""
        return numerics.NoisySum(
            law=self.law, scale=self.scale, probability=self.probability, steps=self.steps
        )

    def describe(self) -> str:
        """Return what a trial releases, in a few words."""
        return self.what or (
            f"{self.law.capitalize()} noise of scale {self.scale:g}, q = {self.probability:g}, {self.steps:,} steps"
        )


@dataclass(frozen=True, kw_only=True)
class PrivateSelection(CertifiedMechanism):
    """The best of K ~ Poisson(m) trials, each private with its score; a step counts whole searches.

    A trial is mu-GDP, or one of several noisy sums; then mu is that of its score only. `noise` is the scale of the
    first noisy sum if there is one; `with_noise` scales all of them and keeps the score's noise.
    """

    mean: Annotated[Positive, Doc("m > 0, expected number of trials.")]
    mu: Annotated[Positive, Doc("mu > 0 of one trial with its score; with --trial, of its score only.")]
    trials: Annotated[
        tuple[NoisyTrial, ...],
        Doc(
            "LAW,SCALE,Q,STEPS: noise of the settings that a trial may have, scale over C; none if it is mu-GDP."
        ),
        Absent(()),
    ] = ()
    adjacency: Annotated[Adjacency, Doc("the trials' relation."), Absent(Adjacency.REPLACE_ONE)] = (
        Adjacency.REPLACE_ONE
    )
    release: Annotated[Release, Doc("what is released of the best trial."), Absent(Release.LAST_ITERATE)] = (
        Release.LAST_ITERATE
    )
    unit: Annotated[Unit, Doc("what is protected."), Absent(Unit.RECORD)] = Unit.RECORD  # type: ignore[misc]
    rests_on: Annotated[str, Doc("name of the theorem that a trial rests on, or empty."), Absent("")] = ""
    device_noise: Annotated[bool, Doc("Whether the trials' noise is a device's, of Gaussian law.")] = False
    exactly_rounded: ExactlyRounded = True

    kind: ClassVar[str] = "private_selection"
    audited: ClassVar[bool] = True
    noise_field: ClassVar[str | None] = "mu"
    noise_is_inverse: ClassVar[bool] = True
    rounded = "score"

    @property
    def theorem(self) -> Theorem:
        """The theorem that proves its guarantee."""
        return NOISY_SUMS if self.trials else PRIVATE_SELECTION

    @property
    def is_rounded(self) -> bool:
        """See Mechanism.is_rounded; scores are rounded whatever the noise of the trials."""
        return self.exactly_rounded

    @property
    def noise(self) -> float:
        """See the class and `Mechanism.noise`."""
        return self.trials[0].scale if self.trials else super().noise

    def with_noise(self, noise: float) -> Self:
        """See the class and `Mechanism.with_noise`."""
        if not self.trials:
            return super().with_noise(noise)
        factor = noise / self.trials[0].scale
        scaled = (replace(trial, scale=factor * trial.scale, what="") for trial in self.trials)
        return replace(self, trials=tuple(scaled))

    def describe(self) -> str:
        """Return what ran, in a few words."""
        searches = "" if self.steps == 1 else f", {self.steps:,} searches"
        best = f"the best of a Poisson number of trials (mean {self.mean:g})"
        if not self.trials:
            return f"{best}, each {self.mu:.4g}-GDP{searches}"
        each = "; or ".join(trial.describe() for trial in self.trials)
        return f"{best}, scores {self.mu:.4g}-GDP{searches}, each trial: {each}"

    @classmethod
    def common_adjacency(cls, mechanisms: Sequence[Self]) -> Adjacency:
        """Return the relation of all searches.

        Raises:
            NoGuarantee: Their units, relations, releases or the theorems of their trials differ.
        """
        for name in ("unit", "adjacency", "release", "rests_on"):
            if len({getattr(one, name) for one in mechanisms}) > 1:
                raise NoGuarantee(f"searches: {name} differs between them; state each separately")
        return mechanisms[0].adjacency

    @classmethod
    def hypotheses(cls, mechanisms: Sequence[Self], *, delta: float, bounds: EpsilonBounds) -> Hypotheses:
        """Return what is taken on trust of trials, and of scores if the number of records is not public."""
        first = mechanisms[0]
        whose = (
            f"of theorem {first.rests_on}, on which each trial rests,"
            if first.rests_on
            else "of the trials' own theorem"
        )
        trusted = [f"the assumptions {whose} hold"]
        if first.adjacency is Adjacency.ADD_OR_REMOVE_ONE:  # else batches have one shape
            trusted.append(
                "the machine classifies a held-out record alike, whatever the number of records evaluated"
            )
        return (), tuple(trusted)

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return the sum of all searches' least bounds at equal shares of delta."""
        share, found = delta / sum(mechanism.steps for mechanism in mechanisms), []
        for one in mechanisms:  # of each search the larger epsilon: that of its scores or that of its models
            cost = selection_bounds(one.mu, one.mean, share)
            if one.trials:
                models = models_bounds(one.trials, adjacency, one.mean, share)
                cost = max(models, cost, key=lambda each: each.upper)
            found.append(cost)
        epsilon = math.fsum(one.steps * cost.upper for one, cost in zip(mechanisms, found, strict=True))
        lower = 0.0 if math.isfinite(epsilon) else math.inf
        return EpsilonBounds(lower=lower, upper=epsilon, method=found[0].method)


def models_bounds(
    trials: Sequence[NoisyTrial], adjacency: Adjacency, mean: float, delta: float
) -> EpsilonBounds:
    """Return the epsilon of the best of K ~ Poisson(m) trials, of these settings, for a record of the training set."""
    sums = [trial.as_noise() for trial in trials]
    if all(_is_gaussian(one) for one in sums):
        mus = (_shift(adjacency) * math.sqrt(one.steps) / one.scale for one in sums)
        return selection_bounds(max(mus), mean, delta)
    if delta == 0:
        return EpsilonBounds(lower=math.inf, upper=math.inf, method="no numbers")
    orders = np.array(_ORDERS)
    wanted: dict[str, Any] = {
        "orders": _ORDERS,
        "delta": delta / mean,
        "epsilons": (0.0, *np.log1p(1 / (orders - 1)).tolist()),
    }
    curves = [numerics.noise_curves(one, adjacency, **wanted) for one in sums]
    deltas = np.max([curve.deltas for curve in curves], axis=0)
    spent = np.max([curve.renyi for curve in curves], axis=0) + mean * deltas[1:]
    spent += max(math.log(mean), 0.0) / (orders - 1)
    usable = np.isfinite(spent)
    candidates = {
        "curve of delta": max(curve.inner for curve in curves) + mean * float(deltas[0]),
        "Renyi divergence": numerics.renyi_to_epsilon(orders[usable], spent[usable], delta)
        if usable.any()
        else math.inf,
    }
    method = min(candidates, key=lambda name: candidates[name])
    lower = 0.0 if math.isfinite(candidates[method]) else math.inf
    return EpsilonBounds(lower=lower, upper=candidates[method], method=method)


@dataclass(frozen=True, kw_only=True)
class PricedSearch:
    """A search that costs at most an epsilon, and the mechanism of a trial's training for each setting, in order."""

    selection: PrivateSelection
    trials: tuple[Mechanism, ...]


def priced_search(
    trials: Sequence[Mechanism], *, mean: float, epsilon: float, delta: float, device_noise: bool = False
) -> PricedSearch:
    """Return the search whose trials and scores have the least noise that stays within epsilon.

    The mechanisms are those of a trial's whole training, for each setting that it may have, m is the expected number of
    trials, and the search for the noise, maybe a device's, starts at theirs. Raises NoGuarantee if no theorem prices a
    choice between these trials, or no noise is enough.
    """
    sums = [trial.as_noise() for trial in trials]
    stated = [guarantees([trial], delta=delta)[0] for trial in dict.fromkeys(trials)]
    if len({(one.unit, one.adjacency, one.release, one.theorem) for one in stated}) > 1:
        raise NoGuarantee("--choose: the trials differ in what they protect or release; choose other keys")
    start = PrivateSelection(
        mean=mean,
        mu=0.5,
        adjacency=stated[0].adjacency,
        release=stated[0].release,
        unit=stated[0].unit,
        rests_on=stated[0].theorem or "",
        device_noise=device_noise,
    )
    search = _calibrated(start, epsilon, delta)
    if all(_is_gaussian(one) for one in sums):
        scales = [_shift(search.adjacency) * math.sqrt(one.steps) / search.mu for one in sums]
    else:
        shapes = [replace(one, scale=1.0) for one in sums]  # without the noise that trainers start from
        found = {one: _affordable(search, [one], epsilon, delta)[0] for one in dict.fromkeys(shapes)}
        if len(found) > 1:
            found = dict(zip(found, _affordable(search, list(found.values()), epsilon, delta), strict=True))
        scales = [found[one].scale for one in shapes]
    noisy = tuple(
        trial.with_noise(trial.noise * scale / one.scale * (1 + 1e-9))
        for trial, one, scale in zip(trials, sums, scales, strict=True)
    )
    if not all(_is_gaussian(one) for one in sums):
        search = replace(search, trials=tuple(dict.fromkeys(NoisyTrial.of(trial) for trial in noisy)))
    return PricedSearch(selection=search, trials=noisy)


@lru_cache(maxsize=64)
def _calibrated(search: PrivateSelection, epsilon: float, delta: float) -> PrivateSelection:
    """Return the search with the least noise, from a cache if it was calibrated before."""
    return calibrate_noise(search, target_epsilon=epsilon, delta=delta)[0]


def _affordable(
    search: PrivateSelection, sums: Sequence[numerics.NoisySum], epsilon: float, delta: float
) -> list[numerics.NoisySum]:
    """Return sums with the least noise, in the given proportion, that keep the search within epsilon."""
    trials = tuple(NoisyTrial(**asdict(one)) for one in sums)
    return [trial.as_noise() for trial in _calibrated(replace(search, trials=trials), epsilon, delta).trials]


def _is_gaussian(one: numerics.NoisySum) -> bool:
    """Whether a sum is mu-GDP."""
    return one.law == "gaussian" and one.probability == 1


def _shift(adjacency: Adjacency) -> float:
    """Return by how much a neighbour moves a sum, in units of C."""
    return 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0


def selection_bounds(mu: float, mean: float, delta: float) -> EpsilonBounds:
    """Return the least epsilon of the three bounds at mu > 0 and mean m > 0."""
    if delta == 0 or mu > 25:  # e^loss overflows doubles
        return EpsilonBounds(lower=math.inf, upper=math.inf, method="no numbers")
    candidates = {
        "Theorem 5.1": theorem_epsilon(mu, mean, delta),
        "refined bound": refined_epsilon(mu, mean, delta),
        "Renyi divergence": renyi_epsilon(mu, mean, delta),
    }
    method = min(candidates, key=lambda name: candidates[name])
    return EpsilonBounds(lower=0.0, upper=candidates[method], method=method)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta(epsilon) of mu-GDP: Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    first = float(numerics.normal_cdf(mu / 2 - epsilon / mu))
    return max(
        first - math.exp(min(epsilon + float(numerics.log_normal_cdf(-mu / 2 - epsilon / mu)), 0.0)), 0.0
    )


def theorem_epsilon(mu: float, mean: float, delta: float) -> float:
    """Return Theorem 5.1 at its best, e1 = 0: epsilon^ + m delta(0), where m delta(epsilon^) = delta."""
    inner = (
        numerics.gaussian_bounds(mu, delta / mean).upper if delta < mean * gaussian_delta(mu, 0.0) else 0.0
    )
    return inner + mean * gaussian_delta(mu, 0.0)


def renyi_epsilon(mu: float, mean: float, delta: float) -> float:
    """Return Papernot and Steinke 2022, Theorem 6, converted to epsilon by dp_accounting.

    A trial's Renyi divergence lambda mu^2 / 2 grows by m delta(log(1 + 1 / (lambda - 1))) + log(m) / (lambda - 1).
    """
    orders = 1 + np.logspace(-1.5, 2.5, 400)
    spent = [
        order * mu**2 / 2
        + mean * gaussian_delta(mu, math.log1p(1 / (order - 1)))
        + max(math.log(mean), 0.0) / (order - 1)
        for order in orders.tolist()
    ]
    return numerics.renyi_to_epsilon(orders, np.array(spent), delta)


def refined_epsilon(mu: float, mean: float, delta: float) -> float:
    """Return the refined bound solved for epsilon, by bisection from above."""
    low, high = 0.0, theorem_epsilon(mu, mean, delta)
    if refined_delta(mu, mean, high) > delta:
        return math.inf  # for large mu the cells cost more than the refinement gains
    while high - low > 1e-4 * max(high, 1e-2):
        middle = (low + high) / 2
        low, high = (middle, high) if refined_delta(mu, mean, middle) > delta else (low, middle)
    return high


def refined_delta(mu: float, mean: float, epsilon: float) -> float:
    """Return the refined bound m E[sup_a e^(-m a) (r - e^(epsilon - m g(a)))_+], grid cells at their worst corners."""
    slopes, levels, turns = _lines(mu, mean)
    x = np.linspace(-mu - 9, mu + 9, 8001)
    scale = math.exp(min(epsilon, 600.0))
    ratio = np.exp(mu * x - mu**2 / 2)[1:] / scale  # at each cell's right end: what follows rises with r
    best = np.searchsorted(turns, ratio)
    worst = np.maximum(scale * slopes[best] * (ratio - levels[best]), 0.0)
    # the smaller of both tails: in doubles Phi is 1 from 8.3 on, where r is largest
    masses = np.where(x[:-1] > 0, -np.diff(numerics.normal_cdf(-x)), np.diff(numerics.normal_cdf(x)))
    inside = float(np.sum(masses * worst)) + float(numerics.normal_cdf(x[0]) * worst[0])
    # beyond the grid the sum is at most E[r; x large]
    return mean * (inside + float(numerics.normal_cdf(mu - x[-1])))


@lru_cache
def _lines(mu: float, mean: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The upper envelope of the lines e^(-m a) (u - e^(-m g(a))) of u: slopes, levels, and where neighbours cross.

    Every line stands for a cell of a, at its worst corner; the cells cover [0, 1].
    """
    a = np.concatenate([[0.0], numerics.normal_cdf(np.linspace(-9, 9, 8001)), [1.0]])
    with np.errstate(divide="ignore"):
        other = np.concatenate([[0.0], numerics.normal_cdf(np.linspace(-9, 9, 8001) + mu), [1.0]])
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
