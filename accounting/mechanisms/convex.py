"""Noisy gradient descent on a convex objective that releases only its last iterate: what is proven, what is claimed.

Step t is v <- (1 - eta_t lambda) v - eta_t (sum of the batch's gradients / b + N(0, (z C / b)^2)), C being the
residual's bound; the last step also adds N(0, (f eta z C / b)^2), eta being the first rate. Batches are fixed and
disjoint. Proven (theorem convex-last-iterate): constants derived from the objective that the code enforces, any
schedule of rates, extra noise at the end, expansion c below, at or above 1. Claimed: Lemma 3.2 and Theorem 2.8 of the
paper, with every hypothesis that fails named. The relation is replace_one.

**How far a step pushes two models.** With features of norm at most 1 the gradient of one record is a residual r(z, y)
of its logits z, spread over the features. For the objectives of this package

| objective | residual | sensitivity L | smoothness beta |
| --- | --- | --- | --- |
| squared | clip_C(z - e_y) | 2 C | 1 |
| margin | clip_C(z - nearest point of the box z_y >= 1, z_c <= 0) | 2 C | 1 |
| one-against-rest | sigmoid(z_c) - [c = y], each entry clipped to C / sqrt(k) | 2 C | 1/4 |
| softmax | softmax(z) - e_y | 2 sqrt(2) | 1/2 |
| softmax, clipped | clip_C(softmax(z) - e_y) | 2 C | no gradient of a convex function for k >= 3 |

beta is the Hessian's bound: the Hessian of one record is (Hessian in the logits) kron x x^T, of rank one in the
features, so it is not block-diagonal over gates as Lemma 3.2 of the paper takes it to be. The first two residuals are
gradients of Huber functions of a distance to a convex set, hence 1-Lipschitz and monotone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, ClassVar, Self

import numpy as np
from typing_extensions import Doc

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.composition import calibrate_noise
from opusim.accounting.guarantee import (
    Adjacency,
    Assumption,
    EpsilonBounds,
    Guarantee,
    NoGuarantee,
    Release,
    Status,
)
from opusim.accounting.mechanism import (
    CertifiedMechanism,
    Count,
    DeviceNoise,
    NonNegative,
    Positive,
    counted,
    described,
)
from opusim.accounting.theorems import NOISE_IS_SECRET, Theorem

OBJECTIVES = ("squared", "margin", "one-against-rest", "softmax")
_SMOOTHNESS = {"squared": 1.0, "margin": 1.0, "one-against-rest": 0.25, "softmax": 0.5}
SCHEDULES = ("constant", "linear", "cosine")

LAST_ITERATE = Theorem(
    name="convex-last-iterate",
    title="shifted interpolation",
    statement="Let X_t = phi_t(X_(t-1)) + N(0, w_t^2 I) and X'_t = phi'_t(X'_(t-1)) + N(0, w_t^2 I) with X_0 = X'_0, "
    "every phi c_t-Lipschitz and |phi_t(x) - phi'_t(x)| <= s_t everywhere. Then X_T is mu-GDP with mu^2 = "
    "min sum_t (a_t / w_t)^2 over z_t = c_t z_(t-1) + s_t - a_t >= 0, z_0 = z_T = 0, a_t >= 0.",
    proof="Let X~_t = phi'_t(X~_(t-1)) + d_t + Z_t, where d_t points to phi_t(X_(t-1)) and has length at most a_t. By"
    " induction |X~_t - X_t| <= z_t, so X~_T = X_T. Given X~_(t-1), d_t + Z_t is a mixture of Gaussians with "
    "means of length at most a_t, so no test tells X~_t from X'_t better than a shift by a_t does; Gaussian "
    "trade-offs add (a_t / w_t)^2. Discounted to the end by d_t = c_(t+1) ... c_T, the shifts form a staircase "
    "over the noise's variance, and the best schedule is the greatest convex function below it, so mu is exact,"
    " not a search.",
    reference="Bok, Su and Altschuler 2024, here for any c_t, s_t and w_t",
    code="opusim.accounting.mechanisms.convex.proven_mu",
    page="convex.md, section 3",
    checked_by_code=(
        "the learning rate stays below 2 / (beta + lambda), with beta of the objective at features of norm 1",
        "every record's features are divided by their own norm over all gates, so that they have norm at most 1",
        "batches are disjoint, the same in every epoch and in the same order; the sum is divided by the constant b",
        "Gaussian noise, fresh at each step, is added to every weight; no momentum, no weight average",
        "gates, centring, initial weights and constants do not depend on the data",
    ),
    trusted=(
        "only the last model is released: no intermediate model, no loss, accuracy or choice that depends on them",
        NOISE_IS_SECRET,
    ),
)


@dataclass(frozen=True, kw_only=True)
class ConvexLastIterate(CertifiedMechanism):
    """Noisy cyclic gradient descent on a gated ReLU model, fixed disjoint batches; only the last model is released.

    A step of this mechanism is a whole run, each with fresh noise.
    """

    objective: Annotated[str, Doc("squared, margin, one-against-rest or softmax.")]
    learning_rate: Annotated[Positive, Doc("eta > 0, below 2 / (beta + lambda).")]
    batches: Annotated[Count, Doc("k, steps of an epoch; 1 for full batches.")]
    epochs: Annotated[Count, Doc("E.")]
    noise_multiplier: Annotated[
        Positive, Doc("z > 0, standard deviation of the noise on a batch's sum over C; the paper's sigma.")
    ]
    clip: Annotated[
        float | None, Doc("Bound of a record's residual; softmax and one-against-rest need none.")
    ] = None
    regularisation: Annotated[NonNegative, Doc("lambda >= 0 of lambda/2 |v|^2.")] = 0.0
    schedule: Annotated[str, Doc("constant, linear (to 0) or cosine.")] = "constant"
    final_noise: Annotated[NonNegative, Doc("f >= 0, in units of one step's noise at the first rate.")] = 0.0
    n_classes: Annotated[int, Doc("Logits of a record."), partial(checks.integer, minimum=2)] = 10
    hyperplanes: Annotated[Count, Doc("P, gates of a record; only the paper's claim depends on it.")] = 128
    device_noise: DeviceNoise = False

    kind: ClassVar[str] = "convex"
    audited: ClassVar[bool] = True
    release = Release.LAST_ITERATE
    theorem = LAST_ITERATE
    noise_field: ClassVar[str | None] = "noise_multiplier"

    def __post_init__(self) -> None:
        check_objective(self.objective, self.clip)
        checks.choice(SCHEDULES, schedule=self.schedule)
        super().__post_init__()

    def describe(self) -> str:
        """Return what ran, in a few words."""
        runs = "" if self.steps == 1 else f", {counted(self.steps, 'run')}"
        source = "device" if self.device_noise else "Gaussian"
        final = f" and {self.final_noise:g} times a step's at the end" if self.final_noise else ""
        return (
            f"noisy cyclic gradient descent, {self.objective} objective, {counted(self.epochs, 'epoch')} of "
            f"{counted(self.batches, 'batch') if self.batches == 1 else f'{self.batches:,} batches'}, {source} noise "
            f"with multiplier {self.noise_multiplier:g}{final}, rate {self.learning_rate:g} ({self.schedule}), "
            f"lambda {self.regularisation:g}{runs}"
        )

    def as_noise(self) -> numerics.NoisySum:
        """See Mechanism.as_noise; the last iterate of each run is mu-GDP.

        Raises:
            NoGuarantee: The learning rate is too large.
        """
        return numerics.NoisySum.of_mu(proven_mu(self) / math.sqrt(self.steps), self.steps)

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return epsilon of the last iterates of all runs; infinite if a learning rate is too large."""
        return numerics.gaussian_bounds(_mu_of_runs(mechanisms)[0], delta)

    @classmethod
    def detail(cls, mechanisms: Sequence[Self]) -> str:
        """Return mu."""
        return f"mu-GDP with mu = {_mu_of_runs(mechanisms)[0]:.6g}"

    @classmethod
    def why_infinite(cls, mechanisms: Sequence[Self], delta: float) -> str:
        """Return which learning rate is too large, if one is."""
        return _mu_of_runs(mechanisms)[1] or super().why_infinite(mechanisms, delta)

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return the proven guarantee of all runs together, then the paper's claim."""
        proven = super().guarantees(mechanisms, delta=delta, enforced=enforced)
        return [*proven, _claimed(mechanisms, delta)]


def _mu_of_runs(mechanisms: Sequence[ConvexLastIterate]) -> tuple[float, str]:
    """Return mu of all runs and "", or infinity and which learning rate is too large."""
    try:
        return math.hypot(*(proven_mu(mechanism) for mechanism in mechanisms)), ""
    except NoGuarantee as refused:
        return math.inf, str(refused)


def check_objective(objective: str, clip: float | None) -> None:
    """Refuse (ValueError) an unknown objective, or one whose residual nothing bounds, not even a clip C > 0."""
    checks.choice(OBJECTIVES, objective=objective)
    if clip is not None:
        checks.positive(clip=clip)
    elif objective in ("squared", "margin"):
        raise ValueError(
            f"clip is missing: nothing else bounds the residual of {objective!r}; give one above 0"
        )


def residual_bound(objective: str, clip: float | None, n_classes: int) -> float:
    """Return C, the largest norm of one record's gradient without the regulariser; the sensitivity is L = 2 C."""
    check_objective(objective, clip)
    own = {"softmax": math.sqrt(2.0), "one-against-rest": math.sqrt(n_classes)}.get(objective, math.inf)
    return own if clip is None else min(own, clip)


def smoothness(objective: str) -> float:
    """Return beta, the Lipschitz constant of one record's gradient without the regulariser, at features of norm 1."""
    return _SMOOTHNESS[objective]


def log_expansion(
    objective: str, clip: float | None, n_classes: int, rate: np.ndarray, regularisation: float
) -> np.ndarray:
    """Return log c of each step: |step(a) - step(b)| <= c |a - b| for any two models and any batch.

    c = max(|1 - eta lambda|, |1 - eta (beta + lambda)|) for a gradient of a convex function; for clipped softmax of k =
    three classes and more c = q (1 - 8 kappa_k (eta / q) C / (4 - eta / q))^(-1/2), q = 1 - eta lambda. Raises
    NoGuarantee if a rate eta is 2 / (beta + lambda) or more, so that steps push models apart.
    """
    beta = smoothness(objective)
    largest = float(np.max(rate))
    if not largest < 2 / (beta + regularisation):
        raise NoGuarantee(
            f"learning_rate = {largest:g}: must be below 2 / (beta + regularisation) = "
            f"{2 / (beta + regularisation):g}, beta being {beta:g} for {objective!r}; lower it"
        )
    shrink = _log_distance_from_one(rate * regularisation)
    if not clips_a_softmax(objective, clip, n_classes):
        return np.maximum(shrink, _log_distance_from_one(rate * (beta + regularisation)))
    step = rate / np.exp(shrink)
    if not float(np.max(rate * regularisation)) < 1 or not float(np.max(step)) < 4:
        raise NoGuarantee(f"learning_rate = {largest:g}: must keep eta / (1 - eta lambda) below 4; lower it")
    share = 8 * softmax_gap(n_classes) * step * (clip or math.inf) / (4 - step)
    if not float(np.max(share)) < 1:
        raise NoGuarantee(
            f"learning_rate = {largest:g} and clip = {clip:g}: no bound on how far a step of clipped softmax pushes "
            "two models apart; lower either"
        )
    return np.asarray(shrink - 0.5 * np.log1p(-share))


def _log_distance_from_one(x: np.ndarray) -> np.ndarray:
    """The logarithm of |1 - x|, x at least 0; exact for small x."""
    with np.errstate(divide="ignore"):
        return np.where(x < 0.5, np.log1p(-np.minimum(x, 0.5)), np.log(np.abs(1 - x)))


def clips_a_softmax(objective: str, clip: float | None, n_classes: int) -> bool:
    """Return whether clipped gradients are those of no convex function: softmax of three or more classes, clipped."""
    return objective == "softmax" and clip is not None and clip < math.sqrt(2.0) and n_classes > 2


@lru_cache
def softmax_gap(n_classes: int) -> float:
    """Return kappa_k = max over distributions pi on the k - 1 wrong classes of (S3 - S2^2) / (4 (1 + S2)^(3/2)).

    S_m = sum of pi^m. At a maximum the positive entries take at most two values (Lagrange: they solve one quadratic),
    so the search covers their counts and one number. The result is rounded up by 1e-4 of itself.
    """
    checks.integer(minimum=2, n_classes=n_classes)
    wrong, best = n_classes - 1, 0.0
    for many in range(1, wrong):  # entries of the first value, then of the second
        for few in {1, wrong - many} | set(range(1, min(4, wrong - many) + 1)):
            mass = np.linspace(0, 1, 20_001)
            first, second = mass / many, (1 - mass) / few
            s2, s3 = (many * first**m + few * second**m for m in (2, 3))
            best = max(best, float(np.max((s3 - s2**2) / (4 * (1 + s2) ** 1.5))))
    return best * (1 + 1e-4)


def mu_of_schedule(shifts: np.ndarray, noises: np.ndarray, log_factors: np.ndarray) -> float:
    """Return the least mu of the recursion in theorem convex-last-iterate; infinite if a shift has no noise after it.

    Each step has a shift s_t >= 0, noise of standard deviation w_t >= 0, and log c_t of any sign, shape (T,).
    """
    later = np.concatenate([np.cumsum(log_factors[::-1])[::-1][1:], [0.0]])  # log d_t
    scale = np.exp(later - later.max())  # a common factor cancels
    starts = np.flatnonzero(shifts > 0)  # a stretch lasts from one shift to the step before the next
    if not starts.size:
        return 0.0
    rises = (shifts * scale)[starts]
    lengths = np.add.reduceat((noises * scale) ** 2, starts)
    # the greatest convex function below the staircase: neighbouring stretches are pooled until slopes rise; increments
    # are pooled, not sums, so a late shift that is small against the first ones keeps its digits
    pooled: list[tuple[float, float]] = []
    for rise, length in zip(rises.tolist(), lengths.tolist(), strict=True):
        while pooled and pooled[-1][0] * length >= rise * pooled[-1][1]:
            rise, length = rise + pooled[-1][0], length + pooled[-1][1]
            pooled.pop()
        pooled.append((rise, length))
    rises, lengths = np.array(pooled).T
    if np.any((lengths == 0) & (rises > 0)):
        return math.inf
    moving = lengths > 0
    return math.sqrt(float(np.sum(rises[moving] ** 2 / lengths[moving])))


def cyclic_descent_mu(mu0: float, batches: int, epochs: int, log_factor: float) -> float:
    """Return Theorem 2.8 for one learning rate and one noise, in a form that is stable for c below, at and above 1.

    mu0 = L / (b sigma) is the mu of a single step, k = `batches` are the steps of one of E = `epochs`, and `log_factor`
    is log c of a step. The result is mu0 sqrt(1 + (E - 1) / k) at c = 1, and mu0 at c = 0.
    """
    k, e, a = batches, epochs, -log_factor
    if e <= 1 or a == math.inf:
        return mu0
    if abs(a) * k * e < 1e-7:
        return mu0 * math.sqrt(1 + (e - 1) / k) * (1 + 1e-7)
    if a < 0:  # each shift is absorbed within its own epoch
        return mu0 * math.sqrt(1 + (e - 1) * math.expm1(2 * a) / math.expm1(2 * k * a))
    forgotten = math.exp(-(2 * k - 2) * a) * -math.expm1(-2 * a) / math.expm1(-k * a) ** 2
    return mu0 * math.sqrt(1 + forgotten * math.tanh(k * (e - 1) * a / 2))


def learning_rates(mechanism: ConvexLastIterate) -> np.ndarray:
    """Return eta_t of every step, shape (T,): eta, eta (1 - p) or eta (1 + cos(pi p)) / 2 at progress p = t / T."""
    steps = mechanism.batches * mechanism.epochs
    p = np.arange(steps) / steps
    shares = {"constant": np.ones(steps), "linear": 1 - p, "cosine": (1 + np.cos(math.pi * p)) / 2}
    return np.asarray(mechanism.learning_rate * shares[mechanism.schedule])


@lru_cache(maxsize=16)  # a guarantee asks for it twice
def proven_mu(mechanism: ConvexLastIterate) -> float:
    """Return mu of the last iterate, for replacing a record at any position.

    Lengths are counted in units of C / b, where a replaced record shifts a step by 2 eta_t and the noise is eta_t z. A
    record's shift is moved to the end of its epoch, where less noise is left to absorb it, and replaced by the largest
    over the epoch's positions: an upper bound for every position, exact for the last one if the rate is constant and c
    at most 1. Raises NoGuarantee if the learning rate is too high for the objective.
    """
    rates = learning_rates(mechanism)
    factors = log_expansion(
        mechanism.objective, mechanism.clip, mechanism.n_classes, rates, mechanism.regularisation
    )
    noises = rates.copy()  # at a noise multiplier of 1
    noises[-1] = math.hypot(noises[-1], mechanism.final_noise * mechanism.learning_rate)
    k, e = mechanism.batches, mechanism.epochs
    by_epoch, logs = 2 * rates.reshape(-1, k), factors.reshape(-1, k)
    after = np.cumsum(logs[:, ::-1], axis=1)[:, ::-1]
    until_end = np.concatenate([after[:, 1:], np.zeros((len(logs), 1))], axis=1)
    shifts = np.zeros_like(by_epoch)  # the largest of each epoch, carried to its last step; 0 at all others
    shifts[:, -1] = np.max(by_epoch * np.exp(until_end), axis=1)
    mu = mu_of_schedule(shifts.reshape(-1), noises, factors)
    if mechanism.schedule == "constant":
        mu = min(mu, cyclic_descent_mu(2.0, k, e, float(factors[0])))
    return mu * math.sqrt(mechanism.steps) / mechanism.noise_multiplier


def claimed_mu(mechanism: ConvexLastIterate) -> float:
    """Return mu of Theorem 2.8 with Lemma 3.2 taken as given: beta = |x|^2 + lambda, |x| at most 1, clipping harmless.

    The extra noise at the end is left out, since the theorem does not cover it.
    """
    eta, lam = mechanism.learning_rate, mechanism.regularisation
    factor = max(abs(1 - eta * lam), abs(1 - eta * (1 + lam)))
    log_factor = math.log(factor) if factor else -math.inf
    mu0 = 2 / mechanism.noise_multiplier
    one = cyclic_descent_mu(mu0, mechanism.batches, mechanism.epochs, log_factor)
    return one * math.sqrt(mechanism.steps)


def _claimed(mechanisms: Sequence[ConvexLastIterate], delta: float) -> Guarantee:
    value = numerics.gaussian_bounds(
        math.hypot(*(claimed_mu(mechanism) for mechanism in mechanisms)), delta
    ).upper
    hypotheses = (
        Assumption(
            text="gradients are (|x|^2 + lambda)-Lipschitz (Lemma 3.2; the true constant is the number of open gates "
            "times |x|^2, plus lambda)",
            holds=all(mechanism.hyperplanes == 1 for mechanism in mechanisms),
        ),
        Assumption(
            text="clipped gradients are those of a convex function",
            holds=not any(clips_a_softmax(m.objective, m.clip, m.n_classes) for m in mechanisms),
        ),
        Assumption(
            text="one learning rate in all steps",
            holds=all(mechanism.schedule == "constant" for mechanism in mechanisms),
        ),
    )
    failed = [hypothesis for hypothesis in hypotheses if hypothesis.holds is False]
    return Guarantee(
        epsilon=math.inf if failed else value,
        delta=delta,
        unit=mechanisms[0].unit,
        adjacency=Adjacency.REPLACE_ONE,
        release=Release.LAST_ITERATE,
        status=Status.CLAIMED,
        mechanism=described(mechanisms),
        source="Lemma 3.2 and Theorem 2.8 of Approximating Two-Layer ReLU Networks for Hidden State Analysis",
        assumptions=hypotheses,
        formula_value=value,
        reason="the paper's hypotheses do not all hold here" if failed else None,
    )


@dataclass(frozen=True, kw_only=True)
class PricedDescent:
    """A descent that reaches an epsilon, with what it costs and how noisy it is.

    Attributes:
        mechanism: The descent with its noise.
        epsilon: Its cost, at most the target.
        weight_noise: Standard deviation of all noise on a weight at lambda = 0, in units of C / records: the most that
            a test record's logit can move. It ranks descents of one learning rate, batch and length by utility.
    """

    mechanism: ConvexLastIterate
    epsilon: float
    weight_noise: float


def priced_descents(
    mechanism: ConvexLastIterate, *, target_epsilon: float, delta: float, epochs: tuple[int, ...]
) -> list[PricedDescent]:
    """Return the least noise at each of some numbers of epochs; fewer epochs need less noise."""
    found = []
    for number in epochs:
        one, guarantee = calibrate_noise(
            replace(mechanism, epochs=number), target_epsilon=target_epsilon, delta=delta
        )
        rates = learning_rates(one)
        shares = math.hypot(math.sqrt(float(rates @ rates)), one.final_noise * one.learning_rate)
        noise = shares * one.noise_multiplier * one.batches
        found.append(PricedDescent(mechanism=one, epsilon=guarantee.epsilon, weight_noise=noise))
    return found


def least_regularisation(
    mechanism: ConvexLastIterate, *, target_epsilon: float, delta: float
) -> ConvexLastIterate:
    """Return the least lambda with which this noise reaches the target, as the paper does; may raise NoGuarantee."""
    checks.positive(target_epsilon=target_epsilon)

    def costs(regularisation: float) -> float:
        return _epsilon(replace(mechanism, regularisation=regularisation), delta)

    # beyond 1 / eta - beta / 2 the steepest direction overshoots, and c grows again
    low, high = 0.0, 1 / mechanism.learning_rate - smoothness(mechanism.objective) / 2
    if high <= 0 or costs(high) > target_epsilon:
        raise NoGuarantee(
            f"target_epsilon = {target_epsilon:g}: no regularisation up to {max(high, 0.0):g} reaches it with "
            f"noise_multiplier = {mechanism.noise_multiplier:g}; use more noise or fewer epochs"
        )
    if costs(low) <= target_epsilon:
        return replace(mechanism, regularisation=low)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2 if low else high / 2
        low, high = (middle, high) if costs(middle) > target_epsilon else (low, middle)
        if high < 1e-12:
            break
    return replace(mechanism, regularisation=high)


def most_epochs(mechanism: ConvexLastIterate, *, target_epsilon: float, delta: float) -> ConvexLastIterate:
    """Return the most epochs that this noise allows within the target, up to 2^20 steps; may raise NoGuarantee."""
    checks.positive(target_epsilon=target_epsilon)

    def exceeds(epochs: int) -> bool:
        return not _epsilon(replace(mechanism, epochs=epochs), delta) <= target_epsilon

    if exceeds(1):
        raise NoGuarantee(
            f"target_epsilon = {target_epsilon:g}: one epoch with noise_multiplier = {mechanism.noise_multiplier:g} "
            "costs more; use more noise"
        )
    largest = max(2**20 // mechanism.batches, 1)
    fits = 1  # the largest number known to fit
    while fits < largest and not exceeds(min(2 * fits, largest)):
        fits = min(2 * fits, largest)
    above = range(fits + 1, min(2 * fits, largest + 1))
    return replace(mechanism, epochs=fits + bisect.bisect_left(above, True, key=exceeds))


def _epsilon(mechanism: ConvexLastIterate, delta: float) -> float:
    return numerics.gaussian_bounds(proven_mu(mechanism), delta).upper
