"""Noisy gradient descent on a convex objective that releases only its last iterate: what is proven, what is claimed.

Step t is v <- (1 - eta_t lambda) v - eta_t (sum of the batch's gradients / b + N(0, (z C / b)^2)), C being the
residual's bound; the last step also adds N(0, (f eta z C / b)^2), eta being the first rate. Batches are fixed and
disjoint. Proven (theorem convex-last-iterate): constants derived from the objective that the code enforces, any
schedule of rates, extra noise at the end, expansion c below, at or above 1. Claimed: Lemma 3.2 and Theorem 2.8 of the
paper, with every hypothesis that fails named. The relation is replace_one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Self

import numpy as np
from typing_extensions import Doc

from accounting import numerics
from accounting.convex.constants import check_objective, clips_a_softmax, log_expansion
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Assumption, Guarantee, Release, Status
from accounting.mechanisms import (
    CertifiedMechanism,
    Count,
    NonNegative,
    Positive,
    certificate_errors,
    counted,
    described,
    proven_guarantee,
    spend_certificates,
)
from accounting.theorems import DEVICE_NOISE_IS_GAUSSIAN, NOISE_IS_SECRET, Theorem
from opusim import checks

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
    code="accounting.convex.mechanisms.proven_mu",
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
    device_noise: Annotated[bool, Doc("Whether the noise is a device's, of Gaussian law.")] = False

    kind: ClassVar[str] = "convex"
    audited: ClassVar[bool] = True
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
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return the proven guarantee of all runs together, then the paper's claim."""
        return [_proven(mechanisms, delta, enforced), _claimed(mechanisms, delta)]


def mu_of_schedule(shifts: np.ndarray, noises: np.ndarray, log_factors: np.ndarray) -> float:
    """Return the least mu of the recursion in theorem convex-last-iterate.

    Args:
        shifts: s_t >= 0 of each step, shape (T,).
        noises: w_t >= 0, standard deviation of each step's noise, shape (T,).
        log_factors: log c_t of each step, any sign, shape (T,).

    Returns:
        mu; infinite if a shift is followed by no noise.
    """
    later = np.concatenate([np.cumsum(log_factors[::-1])[::-1][1:], [0.0]])  # log d_t
    scale = np.exp(later - later.max())  # a common factor cancels
    starts = np.flatnonzero(shifts > 0)  # a stretch lasts from one shift to the step before the next
    if not starts.size:
        return 0.0
    rises = (shifts * scale)[starts]
    lengths = np.add.reduceat((noises * scale) ** 2, starts)
    rises, lengths = _convex(rises, lengths)
    if np.any((lengths == 0) & (rises > 0)):
        return math.inf
    moving = lengths > 0
    return math.sqrt(float(np.sum(rises[moving] ** 2 / lengths[moving])))


def _convex(rises: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of the greatest convex function below the staircase: neighbours are pooled until slopes rise.

    Increments are pooled, not sums, so a late shift that is small against the first ones keeps its digits.
    """
    pooled: list[tuple[float, float]] = []
    for rise, length in zip(rises.tolist(), lengths.tolist(), strict=True):
        while pooled and pooled[-1][0] * length >= rise * pooled[-1][1]:
            rise, length = rise + pooled[-1][0], length + pooled[-1][1]
            pooled.pop()
        pooled.append((rise, length))
    return np.array([rise for rise, _ in pooled]), np.array([length for _, length in pooled])


def cyclic_descent_mu(mu0: float, batches: int, epochs: int, log_factor: float) -> float:
    """Return Theorem 2.8 for one learning rate and one noise, in a form that is stable for c below, at and above 1.

    Args:
        mu0: L / (b sigma), the mu of a single step.
        batches: k >= 1, steps of an epoch.
        epochs: E >= 1.
        log_factor: log c of a step.

    Returns:
        mu0 sqrt(1 + (E - 1) / k) at c = 1; mu0 at c = 0.
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


def proven_mu(mechanism: ConvexLastIterate) -> float:
    """Return mu of the last iterate, for replacing a record at any position.

    Lengths are counted in units of C / b, where a replaced record shifts a step by 2 eta_t and the noise is eta_t z.
    A record's shift is moved to the end of its epoch, where less noise is left to absorb it, and taken as large as the
    largest one that an epoch's positions leave there: an upper bound for every position, exact for the last one if
    the rate is constant and c at most 1.

    Raises:
        NoGuarantee: The learning rate is too high for the objective.
    """
    rates = learning_rates(mechanism)
    factors = log_expansion(
        mechanism.objective, mechanism.clip, mechanism.n_classes, rates, mechanism.regularisation
    )
    noises = rates.copy()  # at a noise multiplier of 1
    noises[-1] = math.hypot(noises[-1], mechanism.final_noise * mechanism.learning_rate)
    k, e = mechanism.batches, mechanism.epochs
    mu = mu_of_schedule(_end_of_epoch_shifts(2 * rates, factors, k), noises, factors)
    if mechanism.schedule == "constant":
        mu = min(mu, cyclic_descent_mu(2.0, k, e, float(factors[0])))
    return mu * math.sqrt(mechanism.steps) / mechanism.noise_multiplier


def _end_of_epoch_shifts(shifts: np.ndarray, factors: np.ndarray, batches: int) -> np.ndarray:
    """The largest shift of each epoch, carried to the epoch's last step; 0 at all other steps."""
    by_epoch, logs = shifts.reshape(-1, batches), factors.reshape(-1, batches)
    after = np.cumsum(logs[:, ::-1], axis=1)[:, ::-1]
    until_end = np.concatenate([after[:, 1:], np.zeros((len(logs), 1))], axis=1)
    worst = np.zeros_like(by_epoch)
    worst[:, -1] = np.max(by_epoch * np.exp(until_end), axis=1)
    return worst.reshape(-1)


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


def _proven(mechanisms: Sequence[ConvexLastIterate], delta: float, enforced: bool) -> Guarantee:
    too_fast = None
    try:
        mu = math.hypot(*(proven_mu(mechanism) for mechanism in mechanisms))
    except NoGuarantee as refused:
        mu, too_fast = math.inf, str(refused)
    bounds, reason = spend_certificates(
        delta, certificate_errors(mechanisms), lambda left: numerics.gaussian_bounds(mu, left)
    )
    device = any(mechanism.device_noise for mechanism in mechanisms)
    return proven_guarantee(
        mechanisms,
        theorem=LAST_ITERATE,
        bounds=bounds,
        delta=delta,
        adjacency=Adjacency.REPLACE_ONE,
        assumptions=LAST_ITERATE.assumptions(
            enforced=enforced, trusted=(DEVICE_NOISE_IS_GAUSSIAN,) if device else ()
        ),
        device_model=device,
        reason=too_fast or reason,
        release=Release.LAST_ITERATE,
        detail=f"mu-GDP with mu = {mu:.6g}",
    )


def _claimed(mechanisms: Sequence[ConvexLastIterate], delta: float) -> Guarantee:
    value = numerics.gaussian_bounds(
        math.hypot(*(claimed_mu(mechanism) for mechanism in mechanisms)), delta
    ).upper
    hypotheses = _hypotheses(mechanisms)
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


def _hypotheses(mechanisms: Sequence[ConvexLastIterate]) -> tuple[Assumption, ...]:
    """The hypotheses of the paper's theorem, each checked against this run."""
    one_gate = all(mechanism.hyperplanes == 1 for mechanism in mechanisms)
    convex = not any(clips_a_softmax(m.objective, m.clip, m.n_classes) for m in mechanisms)
    constant = all(mechanism.schedule == "constant" for mechanism in mechanisms)
    return (
        Assumption(
            text="gradients are (|x|^2 + lambda)-Lipschitz (Lemma 3.2; the true constant is the number of open gates "
            "times |x|^2, plus lambda)",
            holds=one_gate,
        ),
        Assumption(text="clipped gradients are those of a convex function", holds=convex),
        Assumption(text="one learning rate in all steps", holds=constant),
    )
