"""What zeroth-order training releases: one noised sum of clipped loss differences for each direction.

A step draws a secret Poisson(q) batch and n public directions, and releases for each direction
s_j = sum_i clip(l_i^+ - l_i^-, C) + noise. A record that is added, removed or made null moves every s_j by at most C.
Counting n directions as n steps with batches of their own would state too small an epsilon: they share one batch. If a
record's n differences are clipped jointly, to Euclidean norm C, the record moves all s_j together by at most C.

The directions may have any law, such as a low rank, as long as, given all earlier releases, they are independent of the
data: then the bounds hold for every fixed choice of them, and so for the release together with the directions. Here
they are functions of a public seed, the step's number and the direction's, the same for all records of a batch. Each of
these would break it: a new seed because a loss is not finite, directions that depend on the record, a subspace from
gradients without noise.
Source: Tang et al., "Private Fine-tuning of Large Language Models with Zeroth-order Optimization" (DP-ZO).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from typing_extensions import Doc

from opusim.accounting import numerics
from opusim.accounting.guarantee import Adjacency, EpsilonBounds, NoGuarantee
from opusim.accounting.mechanism import (
    Absent,
    CertifiedMechanism,
    Count,
    DeviceNoise,
    ExactlyRounded,
    Hypotheses,
    Mechanism,
    Positive,
    SamplingProbability,
    StatedRelation,
    counted,
)
from opusim.accounting.mechanisms.records import NEW_DRAWS, STANDARDISED, STATED_DIVISOR
from opusim.accounting.theorems import SEED_IS_SECRET, Theorem

_CHECKED = (
    NEW_DRAWS,
    "each record's loss difference, or the vector of all its differences, is clipped to the stated bound before the "
    "sum, and one that is not finite counts as the bound; it is rounded toward zero so that the sum is exact",
    STATED_DIVISOR,
    STANDARDISED,
    "the noise is fresh for each scalar, from a stream separate from the directions'",
)
_TRUSTED = (
    "batches stay secret: realised sizes, step times and the sampler's state are not released",
    "a record's loss depends on that record only: no layer mixes the records of a batch, and the machine computes a "
    "record's loss alike, to the last digit, whatever the number of records in the batch",
    SEED_IS_SECRET,
)
_CUT_PROBABILITY = 2.0**-63
"""Probability that opusim 0.2 cut a release run's Laplace number: it was made of four normal numbers, whose radii came
from 64 random bits each and end at sqrt(2 log 2^65) = 9.49, which the exact law exceeds with probability 2^-65."""
_LARGEST_STEP_EPSILON = 100.0
"""Pure epsilon of a step beyond which its loss is not composed: delta would save nothing, and doubles overflow."""
_ROUNDING = 1e-9
"""Relative error of binomial tails, about ten times the largest seen at 10^9 steps."""

ZEROTH_ORDER_GAUSSIAN = Theorem(
    name="zeroth-order-gaussian",
    title="Poisson-sampled Gaussian noise on clipped loss differences",
    statement="The n scalars of a step together are one Gaussian mechanism of sensitivity C sqrt(n), so a step is the "
    "Poisson-sampled Gaussian mechanism with multiplier z / sqrt(n). If a record's n differences are clipped jointly, "
    "the sensitivity is C and the multiplier z.",
    proof="Given all earlier releases the directions, of any law or rank, are independent of the data: functions of a "
    "public seed and the step's number, the same for all records. They share one batch, so for every choice of them a "
    "record moves the vector of n sums by its own vector of clipped differences, whose norm is at most C sqrt(n), or C "
    "after a joint clip; theorem sampled-gaussian covers the rest, in both directions.",
    reference="DP-ZO, Theorem 3.1 (Tang et al.); Zhu, Dong and Wang 2022",
    code="opusim.accounting.mechanisms.zeroth_order.ZoGaussian",
    page="forward-only.md, What is guaranteed",
    checked_by_code=_CHECKED,
    trusted=_TRUSTED,
)
ZEROTH_ORDER_LAPLACE = Theorem(
    name="zeroth-order-laplace",
    title="Poisson-sampled Laplace noise on clipped loss differences",
    statement="The n scalars of a step have the pure epsilon n / b, so T steps cost T log(1 + q (e^(n/b) - 1)) at "
    "delta = 0. At delta > 0 and n = 1 the privacy loss distribution of the Poisson-sampled Laplace "
    "mechanism is composed; for n > 1 that of the pair which dominates every mechanism of pure epsilon n / "
    "b, randomized response.",
    proof="Pure epsilons of the n scalars add up, and sampling leaves log(1 + q (e^x - 1)) of a pure epsilon x. The "
    "loss +-x of randomized response with odds e^x dominates the loss of any x-DP mechanism, and its "
    "composition is binomial.",
    reference="DP-ZO, Theorem 3.1 and Appendix A (Tang et al.); Kairouz, Oh and Viswanath 2015",
    code="opusim.accounting.mechanisms.zeroth_order.composed_pure_epsilon",
    page="forward-only.md, What is guaranteed",
    checked_by_code=_CHECKED,
    trusted=_TRUSTED,
)


@dataclass(frozen=True, kw_only=True)
class ZoScalars(Mechanism):
    """Common to both laws: sum over a Poisson batch of clipped loss differences, plus noise, for each direction.

    The directions of one step share one batch, so they are released together: sampling amplifies their joint release
    once, and they do not compose like steps with batches of their own.
    """

    sampling_probability: SamplingProbability
    clip_norm: Annotated[Positive, Doc("C > 0, the largest magnitude of a record's loss difference.")]
    divisor: Annotated[
        Positive, Doc("The stated batch size that divides the noisy sum, above 0; post-processing.")
    ]
    directions: Annotated[Count, Doc("Scalars released from each batch, at least 1.")] = 1
    relation: StatedRelation = Adjacency.ADD_OR_REMOVE_ONE
    exactly_rounded: ExactlyRounded = True

    audited: ClassVar[bool] = True
    device_assumption = (
        "the device's noise is Gaussian, independent of data and between draws, at least as strong as stated"
    )
    rounded = "number"

    @property
    def public_records(self) -> float | None:
        """The divisor over q: the number of records whose batches have the divisor's size on average."""
        return self.divisor / self.sampling_probability

    def known_batch(self) -> Self:
        """Return the same mechanism with q = 1."""
        return replace(self, sampling_probability=1.0)

    def _batches(self) -> str:
        """The sampling, in a few words."""
        return (
            f"{counted(self.directions, 'direction')} on each Poisson batch (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}, divided by {self.divisor:g}"
        )


@dataclass(frozen=True, kw_only=True)
class ZoGaussian(ZoScalars, CertifiedMechanism):
    """Zeroth-order training, Gaussian: clipped loss differences summed over a Poisson batch, plus N(0, (z C)^2)."""

    noise_multiplier: Annotated[Positive, Doc("z > 0, the noise's standard deviation over clip_norm.")]
    joint_clip: Annotated[
        bool,
        Doc("Whether clip_norm bounds the norm of a record's differences along all directions of a step."),
        Absent(False),
    ] = False
    device_noise: DeviceNoise = False

    kind: ClassVar[str] = "zo_gaussian"
    noise_field: ClassVar[str | None] = "noise_multiplier"
    theorem = ZEROTH_ORDER_GAUSSIAN

    @property
    def spread(self) -> float:
        """The most that one record moves a step's scalars, in units of C: 1 if clipped jointly, else sqrt(n)."""
        return 1.0 if self.joint_clip else math.sqrt(self.directions)

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"loss differences {'jointly ' if self.joint_clip else ''}clipped to {self.clip_norm:g}, "
            f"{'device' if self.device_noise else 'Gaussian'} noise with multiplier {self.noise_multiplier:g}, "
            f"{self._batches()}"
        )

    def as_noise(self) -> numerics.NoisySum:
        """See Mechanism.as_noise; all directions of a step share one batch."""
        return numerics.NoisySum(
            law="gaussian",
            scale=self.noise_multiplier / self.spread,
            probability=self.sampling_probability,
            steps=self.steps,
        )


@dataclass(frozen=True, kw_only=True)
class ZoLaplace(ZoScalars):
    """Zeroth-order training, Laplace: clipped loss differences summed over a Poisson batch, plus Laplace noise."""

    scale: Annotated[Positive, Doc("b > 0, the Laplace scale over clip_norm.")]

    kind: ClassVar[str] = "zo_laplace"
    noise_field: ClassVar[str | None] = "scale"
    noise_law = "laplace"
    theorem = ZEROTH_ORDER_LAPLACE

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"loss differences clipped to {self.clip_norm:g}, Laplace noise with scale {self.scale:g}, "
            f"{self._batches()}"
        )

    def as_noise(self) -> numerics.NoisySum:
        """See Mechanism.as_noise.

        Raises:
            NoGuarantee: There are several directions.
        """
        if self.directions > 1:
            raise NoGuarantee(
                f"trainer.directions = {self.directions}: Laplace noise on several scalars of a batch has only a "
                "pure epsilon, which prices no choice between trials; take 1, or trainer.law = 'gaussian'"
            )
        return super().as_noise()

    @classmethod
    def hypotheses(cls, mechanisms: Sequence[Self], *, delta: float, bounds: EpsilonBounds) -> Hypotheses:
        """Return how much the tails that opusim 0.2 cut off add to delta."""
        cut = [one for one in mechanisms if not one.exactly_rounded]
        if not cut:
            return (), ()
        tails = (
            "the generator of a release run of opusim 0.2 cut the tails of Laplace noise, beyond 90 scales, for each "
            f"number with probability 2^-63 = 1.1e-19; this adds {cut_delta(cut, bounds.upper):.1g} to delta = "
            f"{delta:g}"
        )
        return (), (tails,)

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return epsilon of all steps in both directions."""
        one_shift = [
            numerics.NoisySum(
                law="laplace",
                scale=mechanism.scale / mechanism.directions,
                probability=mechanism.sampling_probability,
                steps=mechanism.steps,
            )
            for mechanism in mechanisms
        ]  # for n > 1 only its pure epsilon is right
        pure = numerics.noise_bounds(one_shift, Adjacency.ADD_OR_REMOVE_ONE, 0.0)
        if delta == 0 or not 0 < pure.upper < math.inf:
            return pure
        if all(mechanism.directions == 1 for mechanism in mechanisms):
            return numerics.noise_bounds(one_shift, Adjacency.ADD_OR_REMOVE_ONE, delta)
        loosest = max(mechanism.directions / mechanism.scale for mechanism in mechanisms)
        if loosest > _LARGEST_STEP_EPSILON:
            return pure
        likeliest = max(mechanism.sampling_probability for mechanism in mechanisms)
        step = sampled_pure_epsilon(loosest, likeliest)
        composed = composed_pure_epsilon(step, sum(mechanism.steps for mechanism in mechanisms), delta)
        upper = min(composed, pure.upper)
        return EpsilonBounds(lower=0.0, upper=upper, method="distribution of the loss of a pure mechanism")


def cut_delta(mechanisms: Sequence[ZoLaplace], epsilon: float) -> float:
    """Return the delta of the tails that opusim 0.2 cut off: (1 + e^epsilon) 2^-63 for each number, at most 1.

    Exact noise, of this epsilon, and the generator's differ with probability 2^-63 a number, so the runs differ in
    total variation by at most the sum tau of these, and P'(S) <= P(S) + tau <= e^epsilon Q(S) + tau <= e^epsilon (Q'(S)
    + tau) + tau.
    """
    numbers = sum(mechanism.steps * mechanism.directions for mechanism in mechanisms)
    log_delta = math.log(numbers * _CUT_PROBABILITY) + (
        epsilon if epsilon > 40 else math.log1p(math.exp(epsilon))
    )
    return min(1.0, math.exp(min(log_delta, 0.0)))


def sampled_pure_epsilon(epsilon: float, sampling_probability: float) -> float:
    """Return log(1 + q (e^epsilon - 1)), what Poisson sampling leaves of a pure epsilon (Balle et al. 2018)."""
    return math.log1p(sampling_probability * math.expm1(epsilon))


def composed_pure_epsilon(step_epsilon: float, steps: int, delta: float) -> float:
    """Return epsilon(delta) of steps that are each purely private, whatever their law.

    The loss of randomized response, +-step_epsilon with odds e^step_epsilon, dominates theirs (Kairouz et al. 2015), so
    delta is P(K > j) - e^epsilon Q(K > j), K binomial and j the successes whose loss is at most epsilon. Raises
    NoGuarantee if the step's epsilon is beyond what doubles can follow.
    """
    if not step_epsilon <= _LARGEST_STEP_EPSILON:
        raise NoGuarantee(
            f"step_epsilon = {step_epsilon:g}: is beyond {_LARGEST_STEP_EPSILON:g}; use more noise or delta = 0"
        )
    truth = numerics.binomial(steps, numerics.logistic(step_epsilon))
    other = numerics.binomial(steps, numerics.logistic(-step_epsilon))

    def delta_at_most(epsilon: float) -> float:
        """Delta, rounded up."""
        successes = math.floor((epsilon / step_epsilon + steps) / 2)
        log_other = epsilon + float(other.logsf(successes))
        return float(truth.sf(successes)) * (1 + _ROUNDING) - math.exp(min(log_other, 0.0))

    low, high = 0.0, steps * step_epsilon
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at_most(middle) <= delta else (middle, high)
    return high
