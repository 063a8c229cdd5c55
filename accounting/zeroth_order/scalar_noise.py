"""Zeroth-order training: a noised sum of clipped loss differences for each direction.

A step draws a secret Poisson(q) batch and n public directions, and releases for each direction
s_j = sum_i clip(l_i^+ - l_i^-, C) + noise. A record that is added, removed or made null moves every s_j by at most C.

Gaussian: the n scalars together are one Gaussian mechanism of sensitivity C sqrt(n), so a step is the Poisson-sampled
Gaussian of multiplier z / sqrt(n); steps are composed by privacy loss distributions in both directions.

Laplace: the n scalars have the pure epsilon n / b, so a step costs log(1 + q (e^(n/b) - 1)) and T steps T times that
(delta = 0). At delta > 0 and n = 1 the privacy loss distribution of the Poisson-sampled Laplace is composed; for n > 1
it is that of the pair which dominates every mechanism of pure epsilon n / b, randomized response.

Whoever counts n directions as n steps with batches of their own states too little: they share one batch.
Source: Tang et al., Private Fine-tuning of Large Language Models with Zeroth-order Optimization, Theorem 3.1 and
Appendix A; Zhu et al. 2022 for sampled pairs; Kairouz et al. 2015 for the pair of a pure mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Guarantee
from accounting.mechanisms import PoissonGaussian, PoissonLaplace
from accounting.numerics.loss_bounds import EpsilonBounds
from accounting.standard import noise_bounds
from accounting.statement import about_relation, proven_guarantee, stated, weaker
from accounting.zeroth_order.mechanisms import ZoGaussian, ZoLaplace

_CHECKED = (
    "every record enters every batch independently with probability q, drawn afresh at each step",
    "each record's loss difference is clipped to the stated bound before the sum, and one that is not finite counts as "
    "the bound",
    "the sum is divided by the stated constant, never by a realised size, and an empty batch takes its noisy step",
    "the features were standardised with public constants, not with statistics of the data",
    "the noise is fresh for each scalar, from a stream apart from the directions'",
)
_TRUSTED = (
    "batches stay secret: realised sizes, step times and the sampler's state are not released",
    "a record's loss depends on that record alone: no layer mixes the records of a batch",
    "neither the noise nor its seed is revealed, and nobody attacks the rounding of floating-point numbers",
)
_DEVICE_LAW = (
    "the device's noise is Gaussian, independent of data and between draws, at least as strong as stated"
)
_CUT = 2.0**-63
"""Probability that a release run's Laplace number is cut: it is made of four normal numbers, whose radii come from 64
random bits each and end at sqrt(2 log 2^65) = 9.49, which the exact law exceeds with probability 2^-65."""
_LOOSEST = 100.0
"""Pure epsilon of a step beyond which its loss is not composed: delta would save nothing, and doubles overflow."""
_ROUNDING = 1e-9
"""Relative error of binomial tails, some ten times what was seen at 10^9 steps."""


def gaussian_guarantees(
    mechanisms: Sequence[ZoGaussian], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """Epsilon of all steps together in both directions; zero_out unless all are for add_or_remove_one.

    Args:
        mechanisms: At least one.
        delta: In [0, 1); 0 has no finite answer.
        enforced: Whether the training code checked what code can check.
    """
    sampled = [
        PoissonGaussian(
            noise_multiplier=mechanism.noise_multiplier / math.sqrt(mechanism.directions),
            sampling_probability=mechanism.sampling_probability,
            steps=mechanism.steps,
        )
        for mechanism in mechanisms
    ]
    device = any(mechanism.device_noise for mechanism in mechanisms)
    relation = weaker(mechanism.relation for mechanism in mechanisms)
    return [
        proven_guarantee(
            mechanisms,
            bounds=noise_bounds(sampled, relation, delta),
            delta=delta,
            adjacency=relation,
            source="DP-ZO, Theorem 3.1: Poisson-sampled Gaussian noise on clipped loss differences (Tang et al.)",
            assumptions=(
                *stated(_CHECKED, (*_TRUSTED, _DEVICE_LAW) if device else _TRUSTED, enforced=enforced),
                *about_relation(relation, enforced=enforced),
            ),
            device_model=device,
        )
    ]


def laplace_guarantees(
    mechanisms: Sequence[ZoLaplace], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """Epsilon of all steps together in both directions; zero_out unless all are for add_or_remove_one.

    Args:
        mechanisms: At least one.
        delta: In [0, 1); closed form at 0.
        enforced: Whether the training code checked what code can check.
    """
    relation = weaker(mechanism.relation for mechanism in mechanisms)
    bounds = _laplace_bounds(mechanisms, delta)
    return [
        proven_guarantee(
            mechanisms,
            bounds=bounds,
            delta=delta,
            adjacency=relation,
            source="DP-ZO, Theorem 3.1: Poisson-sampled Laplace noise on clipped loss differences (Tang et al.)",
            assumptions=(
                *stated(_CHECKED, (*_TRUSTED, _tails(mechanisms, bounds.upper, delta)), enforced=enforced),
                *about_relation(relation, enforced=enforced),
            ),
        )
    ]


def cut_delta(mechanisms: Sequence[ZoLaplace], epsilon: float) -> float:
    """(1 + e^epsilon) 2^-63 for each number: what cut tails add to delta in release mode, at most 1.

    Exact noise and the generator's differ with probability 2^-63 a number, so the runs differ in total variation by at
    most the sum tau of these, and P'(S) <= P(S) + tau <= e^epsilon Q(S) + tau <= e^epsilon (Q'(S) + tau) + tau.

    Args:
        mechanisms: At least one.
        epsilon: Of exact Laplace noise, at least 0, maybe infinite.
    """
    numbers = sum(mechanism.steps * mechanism.directions for mechanism in mechanisms)
    log_delta = math.log(numbers * _CUT) + (epsilon if epsilon > 40 else math.log1p(math.exp(epsilon)))
    return min(1.0, math.exp(min(log_delta, 0.0)))


def _tails(mechanisms: Sequence[ZoLaplace], epsilon: float, delta: float) -> str:
    return (
        "the generator of a release run cuts the tails of Laplace noise, beyond 90 scales, for each number with "
        f"probability 2^-63 = 1.1e-19; this adds {cut_delta(mechanisms, epsilon):.1g} to delta = {delta:g}"
    )


def _laplace_bounds(mechanisms: Sequence[ZoLaplace], delta: float) -> EpsilonBounds:
    one_shift = [
        PoissonLaplace(
            scale=mechanism.scale / mechanism.directions,
            sampling_probability=mechanism.sampling_probability,
            steps=mechanism.steps,
        )
        for mechanism in mechanisms
    ]  # for n > 1 right in its closed form alone
    pure = noise_bounds(one_shift, Adjacency.ADD_OR_REMOVE_ONE, 0.0)
    if delta == 0 or not 0 < pure.upper < math.inf:
        return pure
    if all(mechanism.directions == 1 for mechanism in mechanisms):
        return noise_bounds(one_shift, Adjacency.ADD_OR_REMOVE_ONE, delta)
    loosest = max(mechanism.directions / mechanism.scale for mechanism in mechanisms)
    if loosest > _LOOSEST:
        return pure
    likeliest = max(mechanism.sampling_probability for mechanism in mechanisms)
    step = sampled_pure_epsilon(loosest, likeliest)
    composed = composed_pure_epsilon(step, sum(mechanism.steps for mechanism in mechanisms), delta)
    upper = min(composed, pure.upper)
    return EpsilonBounds(lower=0.0, upper=upper, method="distribution of the loss of a pure mechanism")


def sampled_pure_epsilon(epsilon: float, sampling_probability: float) -> float:
    """log(1 + q (e^epsilon - 1)): what Poisson sampling leaves of a pure epsilon (Balle et al. 2018)."""
    return math.log1p(sampling_probability * math.expm1(epsilon))


def composed_pure_epsilon(step_epsilon: float, steps: int, delta: float) -> float:
    """Epsilon(delta) of steps that are each purely private, whatever their law.

    The loss of randomized response, +-step_epsilon with odds e^step_epsilon, dominates theirs (Kairouz et al. 2015), so
    delta is P(K > j) - e^epsilon Q(K > j), K binomial and j the successes whose loss is at most epsilon.

    Args:
        step_epsilon: Above 0, at most 100.
        steps: At least 1.
        delta: In (0, 1).

    Raises:
        NoGuarantee: The step's epsilon is beyond what doubles can follow.
    """
    from scipy.special import expit
    from scipy.stats import binom

    if not step_epsilon <= _LOOSEST:
        raise NoGuarantee(
            f"step_epsilon = {step_epsilon:g}: is beyond {_LOOSEST:g}; use more noise or delta = 0"
        )
    truth, other = binom(steps, expit(step_epsilon)), binom(steps, expit(-step_epsilon))

    def most(epsilon: float) -> float:
        """Delta, rounded up."""
        successes = math.floor((epsilon / step_epsilon + steps) / 2)
        log_other = epsilon + float(other.logsf(successes))
        return float(truth.sf(successes)) * (1 + _ROUNDING) - math.exp(min(log_other, 0.0))

    low, high = 0.0, steps * step_epsilon
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if most(middle) <= delta else (middle, high)
    return high
