"""What the last iterate of noisy cyclic gradient descent guarantees, and what the paper claims of it.

Proven (docs/convex.md, section 3): constants derived from the objective that the code enforces, any schedule of rates,
extra noise at the end, c below, at or above 1. Claimed: Lemma 3.2 and Theorem 2.8 of the paper, with every hypothesis
that fails here by name. Replacing one record, the last model alone released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from accounting.convex_constants import clips_a_softmax, log_expansion
from accounting.convex_mechanisms import ConvexLastIterate
from accounting.convex_shifts import mu_general, mu_of_schedule
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Assumption, Guarantee, Release, Status
from accounting.proven import proven_guarantee, stated
from accounting.standard import gaussian_bounds

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
