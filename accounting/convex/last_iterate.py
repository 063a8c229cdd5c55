"""What the last iterate of noisy cyclic gradient descent guarantees, and what the paper claims of it.

Proven (docs/convex.md, section 3): constants derived from the objective that the code enforces, any schedule of rates,
extra noise at the end, c below, at or above 1. Claimed: Lemma 3.2 and Theorem 2.8 of the paper, with every hypothesis
that fails here by name. Replacing one record, the last model alone released.

Privacy of the last iterate of a noisy recursion, by shifted interpolation (Bok, Su and Altschuler 2024).

    X_t = phi_t(X_(t-1)) + N(0, w_t^2 I),   X'_t = phi'_t(X'_(t-1)) + N(0, w_t^2 I),   X_0 = X'_0,

where every phi is c_t-Lipschitz and |phi_t(x) - phi'_t(x)| <= s_t everywhere. Then X_T is mu-GDP with

    mu^2 = min sum_t (a_t / w_t)^2   over   z_t = c_t z_(t-1) + s_t - a_t >= 0,  z_0 = z_T = 0,  a_t >= 0

(docs/convex.md, section 3, has the proof for any c_t, s_t and w_t). Discounted to the end, with
d_t = c_(t+1) ... c_T, the shifts arrive as a staircase F(V) over the noise's variance V and the schedule a is a curve
below it; the shortest one is the greatest convex function below F, so `mu_of_schedule` is exact, not a search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from accounting.convex.constants import clips_a_softmax, log_expansion
from accounting.convex.mechanisms import ConvexLastIterate
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Assumption, Guarantee, Release, Status
from accounting.standard import gaussian_bounds
from accounting.statement import proven_guarantee, stated


def mu_of_schedule(shifts: np.ndarray, noises: np.ndarray, log_factors: np.ndarray) -> float:
    """The least mu of the recursion above.

    Args:
        shifts: s_t >= 0 of each step, shape (T,).
        noises: w_t >= 0, standard deviation of each step's noise, shape (T,).
        log_factors: log c_t of each step, any sign, shape (T,).

    Returns:
        mu, infinite where a shift is followed by no noise.
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

    Increments are pooled, not sums, so a late shift that is small beside the first ones keeps its digits.
    """
    pooled: list[tuple[float, float]] = []
    for rise, length in zip(rises.tolist(), lengths.tolist(), strict=True):
        while pooled and pooled[-1][0] * length >= rise * pooled[-1][1]:
            rise, length = rise + pooled[-1][0], length + pooled[-1][1]
            pooled.pop()
        pooled.append((rise, length))
    return np.array([rise for rise, _ in pooled]), np.array([length for _, length in pooled])


def mu_general(mu0: float, batches: int, epochs: int, log_factor: float) -> float:
    """Theorem 2.8 for one learning rate and one noise, in a form that is stable for any c: below 1, at 1 and above.

    Args:
        mu0: L / (b sigma), the mu of one step alone.
        batches: k >= 1, steps of an epoch.
        epochs: E >= 1.
        log_factor: log c of a step.

    Returns:
        mu0 sqrt(1 + (E - 1) / k) at c = 1; mu0 where c = 0.
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


_CHECKED = (
    "the learning rate stays below 2 / (beta + lambda), with beta of the objective at features of norm 1",
    "every record's features are divided by their own norm over all gates, so that they have norm at most 1",
    "batches are disjoint, the same in every epoch and in the same order; the sum is divided by the constant b",
    "Gaussian noise, fresh at each step, is added to every weight; no momentum, no weight average",
    "gates, centring, initial weights and constants do not depend on the data",
)
_TRUSTED = (
    "the last model alone is released: no intermediate model, no loss, accuracy or choice that depends on them",
    "neither the noise nor its seed is revealed, and nobody attacks the rounding of floating-point numbers",
)
_DEVICE_LAW = (
    "the device's noise is Gaussian, independent of data and between entries, at least as strong as stated"
)


def learning_rates(mechanism: ConvexLastIterate) -> np.ndarray:
    """eta_t of every step, shape (T,): eta, eta (1 - p) or eta (1 + cos(pi p)) / 2 at progress p = t / T."""
    steps = mechanism.batches * mechanism.epochs
    p = np.arange(steps) / steps
    shares = {"constant": np.ones(steps), "linear": 1 - p, "cosine": (1 + np.cos(math.pi * p)) / 2}
    return np.asarray(mechanism.learning_rate * shares[mechanism.schedule])


def proven_mu(mechanism: ConvexLastIterate) -> float:
    """Mu of one run's last iterate, for replacing a record at any position.

    Lengths are counted in units of C / b, where a replaced record shifts a step by 2 eta_t and the noise is eta_t z.
    A record's shift is moved to the end of its epoch, where less noise is left to absorb it, and taken as large as the
    largest one that an epoch's positions leave there: an upper bound for every position, exact for the last one where
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
        mu = min(mu, mu_general(2.0, k, e, float(factors[0])))
    return mu * math.sqrt(mechanism.steps) / mechanism.noise_multiplier


def _end_of_epoch_shifts(shifts: np.ndarray, factors: np.ndarray, batches: int) -> np.ndarray:
    """The largest shift of each epoch as it has become by the epoch's end; 0 at all other steps."""
    by_epoch, logs = shifts.reshape(-1, batches), factors.reshape(-1, batches)
    after = np.cumsum(logs[:, ::-1], axis=1)[:, ::-1]
    until_end = np.concatenate([after[:, 1:], np.zeros((len(logs), 1))], axis=1)
    worst = np.zeros_like(by_epoch)
    worst[:, -1] = np.max(by_epoch * np.exp(until_end), axis=1)
    return worst.reshape(-1)


def claimed_mu(mechanism: ConvexLastIterate) -> float:
    """Theorem 2.8 with Lemma 3.2 taken as given: beta = |x|^2 + lambda with |x| at most 1, clipping harmless.

    The noise that comes at the end is left out, which the theorem does not know.
    """
    eta, lam = mechanism.learning_rate, mechanism.regularisation
    factor = max(abs(1 - eta * lam), abs(1 - eta * (1 + lam)))
    log_factor = math.log(factor) if factor else -math.inf
    mu0 = 2 / mechanism.noise_multiplier
    one = mu_general(mu0, mechanism.batches, mechanism.epochs, log_factor)
    return one * math.sqrt(mechanism.steps)


def guarantees(
    mechanisms: Sequence[ConvexLastIterate], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """The proven guarantee of all runs together, then the paper's claim.

    Args:
        mechanisms: At least one.
        delta: In [0, 1).
        enforced: Whether the training code checked what code can check.
    """
    return [_proven(mechanisms, delta, enforced), _claimed(mechanisms, delta)]


def _proven(mechanisms: Sequence[ConvexLastIterate], delta: float, enforced: bool) -> Guarantee:
    reason = None
    try:
        mu = math.hypot(*(proven_mu(mechanism) for mechanism in mechanisms))
    except NoGuarantee as refused:
        mu, reason = math.inf, str(refused)
    device = any(mechanism.device_noise for mechanism in mechanisms)
    return proven_guarantee(
        mechanisms,
        bounds=gaussian_bounds(mu, delta),
        delta=delta,
        adjacency=Adjacency.REPLACE_ONE,
        source="docs/convex.md, section 3: shifted interpolation (Bok, Su and Altschuler 2024), mu-GDP with mu = "
        f"{mu:.6g}",
        assumptions=stated(_CHECKED, (*_TRUSTED, _DEVICE_LAW) if device else _TRUSTED, enforced=enforced),
        device_model=device,
        reason=reason,
        release=Release.LAST_ITERATE,
    )


def _claimed(mechanisms: Sequence[ConvexLastIterate], delta: float) -> Guarantee:
    value = gaussian_bounds(math.hypot(*(claimed_mu(mechanism) for mechanism in mechanisms)), delta).upper
    hypotheses = _hypotheses(mechanisms)
    failed = [hypothesis for hypothesis in hypotheses if hypothesis.holds is False]
    return Guarantee(
        epsilon=math.inf if failed else value,
        delta=delta,
        unit=mechanisms[0].unit,
        adjacency=Adjacency.REPLACE_ONE,
        release=Release.LAST_ITERATE,
        status=Status.CLAIMED,
        mechanism="; ".join(mechanism.describe() for mechanism in mechanisms),
        source="Lemma 3.2 and Theorem 2.8 of Approximating Two-Layer ReLU Networks for Hidden State Analysis",
        assumptions=hypotheses,
        formula_value=value,
        reason="the paper's hypotheses do not all hold here" if failed else None,
    )


def _hypotheses(mechanisms: Sequence[ConvexLastIterate]) -> tuple[Assumption, ...]:
    """What the paper's theorem asks for, and whether this run has it."""
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
