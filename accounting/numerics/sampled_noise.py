"""Epsilon of Poisson-sampled Gaussian and Laplace steps: the pairs of distributions, and the Renyi bound behind them.

With standard deviation z (in units of C) and sampling probability q the pairs are, in both directions,

    add_or_remove_one, zero_out:  (1 - q) N(0, z^2) + q N(1, z^2)   against   N(0, z^2)
    replace_one:                  (1 - q) N(0, z^2) + q N(1, z^2)   against   (1 - q) N(0, z^2) + q N(-1, z^2)

and likewise with Laplace noise for the first two. dp_accounting's RDP and PLD accountants read a replace_one
event differently, so an event never goes to both: the Renyi bound for replace_one is built here
from add_or_remove_one through the data set without the record, by the weak triangle inequality (Mironov 2017,
Proposition 11, p = q = 2): D_a(P || R) <= (a - 1/2) / (a - 1) D_2a(P || Q) + D_(2a-1)(Q || R).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import dp_accounting
import numpy as np
from dp_accounting import rdp
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_mechanism import (
    AdjacencyType,
    GaussianPrivacyLoss,
    LaplacePrivacyLoss,
    MonotonePrivacyLoss,
)

from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency
from accounting.mechanisms import Gaussian, Mechanism, PoissonGaussian, PoissonLaplace
from accounting.numerics.loss_bounds import LARGEST_LOSS, EpsilonBounds, NoisyStep, compose_bounds, resolution

_ORDERS = (
    *(1 + k / 20 for k in range(2, 20)), *(2 + k / 10 for k in range(90)), *range(11, 64), 80, 96, 128, 192, 256, 512
)  # fmt: skip
_LEAST, _MOST, _RAREST = 1e-3, 1e5, 1e-9  # noise and sampling probability that doubles can follow
_RELATIONS = {
    Adjacency.ADD_OR_REMOVE_ONE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    Adjacency.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_ENOUGH = 3.0  # bins per deviation below which the Renyi bound is computed as well


def sampled_noise_bounds(mechanisms: Sequence[Mechanism], delta: float) -> EpsilonBounds:
    """Bounds on epsilon(delta) of all mechanisms together, delta in (0, 1).

    Parameters beyond what doubles can follow are moved toward more epsilon: noise above 1e5 counts as 1e5, a sampling
    probability below 1e-9 as 1e-9, and noise below 1e-3 as none.

    Raises:
        NoGuarantee: Neither accountant has an answer.
    """
    if any(mechanism.noise < _LEAST for mechanism in mechanisms):
        return EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers for so little noise")
    followed = [_followed(mechanism) for mechanism in mechanisms]
    with np.errstate(all="ignore"):  # what overflows ends as infinity or is refused
        bounds = _bounds(followed, delta)
    if followed != list(mechanisms):
        return EpsilonBounds(lower=0.0, upper=bounds.upper, method=bounds.method)
    return bounds


def _followed(mechanism: Mechanism) -> Mechanism:
    changed = mechanism.with_noise(_MOST) if mechanism.noise > _MOST else mechanism
    if isinstance(changed, PoissonGaussian | PoissonLaplace) and changed.sampling_probability < _RAREST:
        changed = replace(changed, sampling_probability=_RAREST)
    return changed


def _bounds(mechanisms: Sequence[Mechanism], delta: float) -> EpsilonBounds:
    try:
        parts = [_noisy_step(mechanism) for mechanism in mechanisms]
    except NoGuarantee:
        parts = []
    bounds = compose_bounds(parts, delta) if parts else None
    if bounds is not None and math.isfinite(bounds.upper) and resolution(parts) >= _ENOUGH:
        return bounds
    renyi = renyi_epsilon(mechanisms, delta)
    if bounds is not None and bounds.upper <= renyi:
        return bounds
    lower = min(bounds.lower, renyi) if bounds is not None else 0.0
    return EpsilonBounds(lower=lower, upper=renyi, method="Renyi divergences")


def renyi_epsilon(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """Epsilon(delta) from Renyi divergences of Gaussian mechanisms; never from an order that failed.

    Raises:
        NoGuarantee: A mechanism is not Gaussian (dp_accounting has no Renyi divergence for it).
    """
    curve = sum((_renyi_curve(mechanism) for mechanism in mechanisms), np.zeros(len(_ORDERS)))
    usable = np.isfinite(curve) & (
        curve > 0
    )  # a failed order is scored 0 or less, which would win the minimum
    if not usable.any():
        return math.inf
    orders = np.array(_ORDERS, dtype=float)[usable]
    return float(rdp.compute_epsilon(orders, curve[usable], delta)[0])


def _renyi_curve(mechanism: Mechanism) -> np.ndarray:
    if not isinstance(mechanism, PoissonGaussian | Gaussian):
        raise NoGuarantee(
            f"mechanism {mechanism.kind!r}: no Renyi divergence is known for it here; use delta = 0 or fewer steps"
        )
    orders = np.array(_ORDERS, dtype=float)
    if mechanism.adjacency is not Adjacency.REPLACE_ONE:
        return one_way_curve(mechanism, orders)
    doubled, below = one_way_curve(mechanism, 2 * orders), one_way_curve(mechanism, 2 * orders - 1)
    return np.where((doubled > 0) & (below > 0), (orders - 0.5) / (orders - 1) * doubled + below, np.nan)


def one_way_curve(mechanism: PoissonGaussian | Gaussian, orders: np.ndarray) -> np.ndarray:
    """Renyi divergences for add_or_remove_one at the orders, the larger of both directions; an order may have failed.

    Args:
        mechanism: All steps together.
        orders: Above 1.

    Returns:
        Of the orders' shape; NaN, infinite, 0 or below where dp_accounting has no value.
    """
    accountant = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _orders_may_fail():
        accountant.compose(mechanism.event())
    return np.asarray(accountant.rdp, dtype=float)


@contextmanager
def _orders_may_fail() -> Iterator[None]:
    """dp_accounting warns of orders that overflow or do not converge; the caller drops them."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _noisy_step(mechanism: Mechanism) -> NoisyStep:
    if isinstance(mechanism, PoissonLaplace):
        return _laplace_step(mechanism)
    if isinstance(mechanism, PoissonGaussian | Gaussian):
        return _gaussian_step(mechanism)
    raise NoGuarantee(f"mechanism {mechanism.kind!r}: is not additive noise; state it apart")


def _gaussian_step(mechanism: PoissonGaussian | Gaussian) -> NoisyStep:
    z, replaces = mechanism.noise_multiplier, mechanism.adjacency is Adjacency.REPLACE_ONE
    q = getattr(mechanism, "sampling_probability", 1.0)
    relation = _RELATIONS[mechanism.adjacency]
    shift = 2 if replaces else 1

    def loss(direction: AdjacencyType) -> MonotonePrivacyLoss:
        return GaussianPrivacyLoss(z, sampling_prob=q, adjacency_type=direction)

    def upper(interval: float) -> distributions.PrivacyLossDistribution:
        return distributions.from_gaussian_mechanism(
            z, sampling_prob=q, value_discretization_interval=interval, neighboring_relation=relation
        )

    chi = math.sqrt(math.expm1(1 / z**2)) if z > 0.05 else math.inf
    return NoisyStep(
        loss=loss,
        upper=upper,
        directions=(AdjacencyType.REPLACE,) if replaces else (AdjacencyType.REMOVE, AdjacencyType.ADD),
        deviation=shift * min(q * chi, 1 / z),
        steps=mechanism.steps,
    )


def _laplace_step(mechanism: PoissonLaplace) -> NoisyStep:
    b, q = mechanism.scale, mechanism.sampling_probability
    if b * LARGEST_LOSS < 1:
        raise NoGuarantee(f"poisson_laplace: no distribution of the loss for scale = {b:g}; it is too large")
    if mechanism.adjacency is Adjacency.REPLACE_ONE:
        raise NoGuarantee(
            "poisson_laplace: no distribution of the loss for replace_one; the closed form is used"
        )

    def loss(direction: AdjacencyType) -> MonotonePrivacyLoss:
        return LaplacePrivacyLoss(b, sampling_prob=q, adjacency_type=direction)

    def upper(interval: float) -> distributions.PrivacyLossDistribution:
        return distributions.from_laplace_mechanism(
            b, sampling_prob=q, value_discretization_interval=interval
        )

    return NoisyStep(
        loss=loss,
        upper=upper,
        directions=(AdjacencyType.REMOVE, AdjacencyType.ADD),
        deviation=min(q * math.expm1(min(1 / b, 500)), 1 / b),
        steps=mechanism.steps,
    )
