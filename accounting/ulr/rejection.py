"""The sampled Gaussian mechanism with rejection of small batches: a bound in both directions, at any noise and order.

D has N records, D' one more. Batches are drawn with probability q a record, and drawn again below L records;
X ~ Bin(N, q). A batch of D' without the new record has the law of a batch of D; with it, with probability

    qt = q P(X >= L - 1) / (q P(X >= L - 1) + (1 - q) P(X >= L)),

the others are a batch J' of D of size at least L - 1. Binomial laws are log-concave, so (X | X >= L) lies between
(X | X >= L - 1) and that plus 1 in stochastic order: J' can be coupled to an accepted batch J of D as J itself, or as J
without one uniform element, the latter with probability rho = E[X | X >= L] - E[X | X >= L - 1]. Between f(J) and
f(J' and the new record) then lie at most C, or at most 2 C. Divergences are jointly convex, so in each direction

    a step is dominated by the mixture (1 - rho) SGM(qt, z) + rho SGM(qt, z / 2),

SGM being the Poisson-sampled Gaussian mechanism; its hockey-stick divergences are the mixture's, so it composes as a
privacy loss distribution. qt and rho fall as N grows, so N may be a lower limit of the data set's size.
Source: docs/ulr.md, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting import rdp
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss, MonotonePrivacyLoss
from scipy.special import logsumexp
from scipy.stats import binom

from accounting.guarantee import Adjacency, Guarantee
from accounting.mechanisms import PoissonGaussian
from accounting.numerics.loss_bounds import EpsilonBounds, NoisyStep, compose_upper
from accounting.numerics.sampled_noise import one_way_curve
from accounting.statement import about_relation, proven_guarantee, stated
from accounting.ulr.mechanisms import RejectionGaussian
from opusim import checks

ORDERS = (*(1 + k / 20 for k in range(2, 40)), *range(3, 64), 80, 96, 128, 192, 256)
_LEAST, _MOST = 2e-3, 1e5
"""Noise that doubles can follow: less counts as none, more as this much."""
_CHECKED = (
    "each record's contribution is clipped to norm C before the sum, across all layers together",
    "every record enters a batch independently with probability q, and the batch is drawn again below N_B records",
    "the sum is divided by a public constant, never by the batch's own size",
    "the noise of every step is fresh and isotropic",
)
_TRUSTED = (
    "batches stay secret, and so does how often one was drawn again",
    "the data set has at least n_records records, a public number",
    "neither the noise nor the seed that it came from is ever revealed",
)
_DIRECTIONS = (AdjacencyType.REMOVE, AdjacencyType.ADD)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The pair of a step: (1 - share) SGM(probability, z) + share SGM(probability, z / 2).

    Attributes:
        probability: qt.
        share: rho.
    """

    probability: float
    share: float


def mixture_of(sampling_probability: float, n_records: int, min_batch_size: int) -> Mixture:
    """Qt and rho of the module's docstring, at N = n_records.

    Args:
        sampling_probability: q in (0, 1].
        n_records: N.
        min_batch_size: L, at least 1, at most N.
    """
    q, n, least = sampling_probability, n_records, min_batch_size
    if q == 1:
        return Mixture(probability=1.0, share=0.0)
    law = binom(n, q)
    below, from_least = law.logsf(least - 2), law.logsf(least - 1)
    if not math.isfinite(from_least):  # no double holds so rare a batch: the worst pair there could be
        return Mixture(probability=1.0, share=1.0)
    probability = 1 / (1 + (1 - q) / q * math.exp(min(from_least - below, 0.0)))
    # E[X | X >= L] - E[X | X >= L - 1] = p (E[X | X >= L] - (L - 1)), p = P(X = L - 1 | X >= L - 1)
    mean = (
        n * q * math.exp(binom(n - 1, q).logsf(least - 2) - from_least)
    )  # E[X 1(X >= L)] = N q P(Bin(N-1) >= L-1)
    share = math.exp(law.logpmf(least - 1) - below) * (mean - (least - 1))
    return Mixture(probability=probability, share=min(max(share, 0.0), 1.0))


def guarantees(
    mechanisms: Sequence[RejectionGaussian], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """Epsilon of all steps together, add_or_remove_one, both directions.

    Args:
        mechanisms: At least one.
        delta: In [0, 1).
        enforced: Whether the training code checked what code can check.
    """
    checks.in_unit_interval(closed="left", delta=delta)
    return [
        proven_guarantee(
            mechanisms,
            bounds=rejection_bounds(mechanisms, delta),
            delta=delta,
            adjacency=Adjacency.ADD_OR_REMOVE_ONE,
            source="docs/ulr.md, section 3: Poisson sampling with rejection as a mixture of two sampled Gaussians",
            assumptions=(
                *stated(_CHECKED, _TRUSTED, enforced=enforced),
                *about_relation(Adjacency.ADD_OR_REMOVE_ONE, enforced=enforced),
            ),
        )
    ]


def rejection_bounds(mechanisms: Sequence[RejectionGaussian], delta: float) -> EpsilonBounds:
    """An upper bound on epsilon(delta) of all steps; the lower bound is 0."""
    if delta == 0 or any(mechanism.noise_multiplier < _LEAST for mechanism in mechanisms):
        return EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers for so little noise")
    with np.errstate(all="ignore"):
        found = compose_upper([_noisy_step(mechanism) for mechanism in mechanisms], delta)
        renyi = _renyi_epsilon(mechanisms, delta)
    if found is None or not found.upper <= renyi:
        return EpsilonBounds(lower=0.0, upper=renyi, method="Renyi divergences")
    return found


def renyi_curve(mechanism: RejectionGaussian, orders: Sequence[float] = ORDERS) -> np.ndarray:
    """The larger direction's Renyi divergence of one step, NaN where an order failed.

    log[(1 - rho) e^((a - 1) D_a(z)) + rho e^((a - 1) D_a(z / 2))] / (a - 1).
    """
    mixture = mixture_of(mechanism.sampling_probability, mechanism.n_records, mechanism.min_batch_size)
    grid = np.asarray(orders, dtype=float)
    curves = []
    z = min(mechanism.noise_multiplier, _MOST)
    for noise in (z, z / 2):
        sampled = PoissonGaussian(noise_multiplier=noise, sampling_probability=mixture.probability)
        curve = one_way_curve(sampled, grid)
        curves.append(np.where(np.isfinite(curve) & (curve > 0), curve, np.nan) * (grid - 1))
    weights = np.array([[1 - mixture.share], [mixture.share]])
    return np.asarray(logsumexp(np.array(curves), b=weights, axis=0) / (grid - 1))


def _renyi_epsilon(mechanisms: Sequence[RejectionGaussian], delta: float) -> float:
    total = sum((mechanism.steps * renyi_curve(mechanism) for mechanism in mechanisms), np.zeros(len(ORDERS)))
    usable = np.isfinite(total)
    if not usable.any():
        return math.inf
    orders = np.asarray(ORDERS, dtype=float)[usable]
    return float(rdp.compute_epsilon(orders, total[usable], delta)[0])


def _noisy_step(mechanism: RejectionGaussian) -> NoisyStep:
    mixture = mixture_of(mechanism.sampling_probability, mechanism.n_records, mechanism.min_batch_size)
    z, q = min(mechanism.noise_multiplier, _MOST), max(mixture.probability, 1e-9)

    def loss(direction: AdjacencyType) -> MonotonePrivacyLoss:
        """The wider of the two."""
        return GaussianPrivacyLoss(z / 2, sampling_prob=q, adjacency_type=direction)

    def upper(interval: float) -> distributions.PrivacyLossDistribution:
        pmfs = [_mixed_pmf(z, q, mixture.share, direction, interval) for direction in _DIRECTIONS]
        return distributions.PrivacyLossDistribution(*pmfs)

    chi = math.sqrt(math.expm1(1 / z**2)) if z > 0.05 else math.inf
    return NoisyStep(
        loss=loss,
        upper=upper,
        directions=_DIRECTIONS,
        deviation=min(q * chi, 1 / z),
        steps=mechanism.steps,
    )


def _mixed_pmf(z: float, q: float, share: float, direction: AdjacencyType, interval: float) -> pld_pmf.PLDPmf:
    """dp_accounting's pessimistic distribution from the mixture's own hockey-stick divergences."""
    losses = [GaussianPrivacyLoss(noise, sampling_prob=q, adjacency_type=direction) for noise in (z, z / 2)]
    bounds = [loss.connect_dots_bounds() for loss in losses]
    low = math.floor(min(bound.epsilon_lower for bound in bounds) / interval)
    high = math.ceil(max(bound.epsilon_upper for bound in bounds) / interval)
    grid = np.arange(low, high + 1)
    deltas = [np.asarray(loss.get_delta_for_epsilon(grid * interval)) for loss in losses]
    mixed = (1 - share) * deltas[0] + share * deltas[1]
    return pld_pmf.create_pmf_pessimistic_connect_dots(interval, grid, mixed)
