"""Epsilon of Poisson-sampled Gaussian and Laplace noise: dominating pairs, closed forms, and Renyi bounds.

With standard deviation z (in units of C) and sampling probability q the pairs are, in both directions,

    add_or_remove_one, zero_out:  (1 - q) N(0, z^2) + q N(1, z^2)   against   N(0, z^2)
    replace_one:                  (1 - q) N(0, z^2) + q N(1, z^2)   against   (1 - q) N(0, z^2) + q N(-1, z^2)

and likewise with Laplace noise, which has a closed form at delta = 0 (theorem sampled-laplace).

dp_accounting's RDP and PLD accountants read a replace_one event differently, so an event never goes to both: the Renyi
bound for replace_one is built here from add_or_remove_one through the data set without the record, by the weak triangle
inequality (Mironov 2017, Proposition 11, p = q = 2):
D_a(P || R) <= (a - 1/2) / (a - 1) D_2a(P || Q) + D_(2a-1)(Q || R).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import dp_accounting
import numpy as np
from dp_accounting import rdp
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy.special import logsumexp

from opusim.accounting.guarantee import Adjacency, EpsilonBounds, NoGuarantee
from opusim.accounting.numerics.loss_laws import LARGEST_LOSS, Direction, GaussianLaw, LaplaceLaw, MixedLaw
from opusim.accounting.numerics.sampled_noise import (
    NoisyStep,
    compose_bounds,
    composed_curve,
    gaussian_bounds,
    renyi_to_epsilon,
)

_ORDERS = (
    *(1 + k / 20 for k in range(2, 20)), *(2 + k / 10 for k in range(90)), *range(11, 64), 80, 96, 128, 192, 256, 512
)  # fmt: skip
_MIXTURE_ORDERS = (*(1 + k / 20 for k in range(2, 40)), *range(3, 64), 80, 96, 128, 192, 256)
_LEAST_NOISE, _MOST_NOISE, _RAREST_SAMPLING = 1e-3, 1e5, 1e-9  # what doubles can follow
_PURE_ROUNDING = 1e-14
"""What rounding may change a closed form by, relatively."""
_TIGHT = 1.01
"""Ratio of the bounds of the loss distribution up to which the Renyi bound need not be computed as well."""
_SMALL_EPSILON_DELTA = 0.1
"""Delta at whose epsilon a whole curve is computed as well, so that it is sharp at small epsilon, too."""
_SMALL = 1e-3
"""Epsilon that may lie between them besides."""


@dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A sum over a Poisson batch of contributions of norm at most 1, plus noise, released `steps` times.

    Attributes:
        law: Of the noise.
        scale: Standard deviation of Gaussian noise, scale b of Laplace noise; above 0.
        probability: q in (0, 1], the sampling probability; 1 for all records.
        steps: At least 1.
    """

    law: Literal["gaussian", "laplace"]
    scale: float
    probability: float = 1.0
    steps: int = 1

    @classmethod
    def of_mu(cls, mu: float, steps: int) -> Self:
        """Return the Gaussian noise on all records that is mu-GDP at each step if a record is replaced.

        Args:
            mu: Above 0, finite.
            steps: At least 1.
        """
        return cls(law="gaussian", scale=2 / mu, steps=steps)


@dataclass(frozen=True, kw_only=True)
class GaussianMixture:
    """The pair (1 - share) SGM(probability, noise) + share SGM(probability, noise / 2) of sampled Gaussian mechanisms.

    Attributes:
        noise: z above 0.
        probability: q in (0, 1].
        share: Weight of the part with half the noise, in [0, 1].
        steps: At least 1.
    """

    noise: float
    probability: float
    share: float
    steps: int = 1


def noise_bounds(sums: Sequence[NoisySum], adjacency: Adjacency, delta: float) -> EpsilonBounds:
    """Return bounds on epsilon(delta) of all sums together.

    Args:
        sums: At least one.
        adjacency: Their relation.
        delta: In [0, 1).

    Raises:
        NoGuarantee: The numerics have no answer.
    """
    shift = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    if delta > 0 and all(one.law == "gaussian" and one.probability == 1 for one in sums):
        mu = math.hypot(*(math.sqrt(one.steps) * shift / one.scale for one in sums))
        return gaussian_bounds(mu, delta)
    pure = sum(_pure_epsilon(one, adjacency) for one in sums)
    if delta == 0:
        return EpsilonBounds(lower=pure, upper=pure, method="closed form")
    pure *= 1 + _PURE_ROUNDING
    try:
        bounds = _sampled_bounds(sums, adjacency, delta)
    except NoGuarantee:
        if math.isinf(pure):
            raise
        return EpsilonBounds(lower=0.0, upper=pure, method="closed form for delta = 0")
    if bounds.upper <= pure:
        return bounds
    return EpsilonBounds(lower=min(bounds.lower, pure), upper=pure, method="closed form for delta = 0")


def _pure_epsilon(one: NoisySum, adjacency: Adjacency) -> float:
    """Epsilon at delta = 0 of all steps of a Laplace sum; infinite for Gaussian noise."""
    if one.law == "gaussian":
        return math.inf
    q, exponent = one.probability, 1 / one.scale
    # log(1 - q + q e^t) without overflow, small values kept
    up = math.log1p(q * math.expm1(exponent)) if exponent < 500 else exponent + math.log(q)
    if adjacency is Adjacency.REPLACE_ONE:
        up -= math.log1p(q * math.expm1(-exponent)) if q < 1 else -exponent
    return one.steps * up


def _sampled_bounds(sums: Sequence[NoisySum], adjacency: Adjacency, delta: float) -> EpsilonBounds:
    """Bounds on epsilon(delta) for delta in (0, 1).

    Parameters beyond what doubles can follow move toward more epsilon: noise above 1e5 counts as 1e5, a sampling
    probability below 1e-9 as 1e-9, and noise below 1e-3 as none.
    """
    if any(one.scale < _LEAST_NOISE for one in sums):
        return EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers for so little noise")
    followed = [
        replace(one, scale=min(one.scale, _MOST_NOISE), probability=max(one.probability, _RAREST_SAMPLING))
        for one in sums
    ]
    with np.errstate(all="ignore"):  # what overflows ends as infinity or is refused
        bounds = _bounds(followed, adjacency, delta)
    if followed != list(sums):
        return EpsilonBounds(lower=0.0, upper=bounds.upper, method=bounds.method)
    return bounds


def _bounds(sums: Sequence[NoisySum], adjacency: Adjacency, delta: float) -> EpsilonBounds:
    """Bounds of the loss distribution, or the Renyi bound if that is sharper or doubles cannot follow.

    Raises:
        NoGuarantee: Some noise is not Gaussian, and only a Renyi divergence could help.
    """
    try:
        parts = [_noisy_step(one, adjacency) for one in sums]
    except NoGuarantee:
        parts = []
    bounds = compose_bounds(parts, delta) if parts else None
    if bounds is not None and bounds.upper <= _TIGHT * bounds.lower + _SMALL:
        return bounds
    orders = np.array(_ORDERS, dtype=float)
    curve = sum((_renyi_curve(one, adjacency, orders) for one in sums), np.zeros(len(orders)))
    # a failed order is scored 0 or less, which would win the minimum
    usable = np.isfinite(curve) & (curve > 0)
    renyi = renyi_to_epsilon(orders[usable], curve[usable], delta) if usable.any() else math.inf
    if bounds is not None and bounds.upper <= renyi:
        return bounds
    lower = min(bounds.lower, renyi) if bounds is not None else 0.0
    return EpsilonBounds(lower=lower, upper=renyi, method="Renyi divergences")


@dataclass(frozen=True, kw_only=True)
class NoiseCurves:
    """What a noisy sum reveals, in both directions, from above.

    Attributes:
        renyi: The divergence at each Renyi order that was asked for; infinite where it is not known.
        inner: epsilon(delta) at the delta that was asked for.
        deltas: delta(epsilon) at each epsilon that was asked for.
    """

    renyi: np.ndarray
    inner: float
    deltas: np.ndarray


@functools.lru_cache(maxsize=64)
def noise_curves(
    one: NoisySum,
    adjacency: Adjacency,
    *,
    orders: tuple[float, ...],
    delta: float,
    epsilons: tuple[float, ...],
) -> NoiseCurves:
    """Return the Renyi curve of a sum, and points of its curve delta(epsilon).

    The points come from the privacy loss distribution. Where doubles cannot follow, they come from the Renyi curve.

    Args:
        one: All steps.
        adjacency: The relation.
        orders: Renyi orders, above 1.
        delta: Where epsilon is wanted, above 0; from 1 on it is 0.
        epsilons: Where delta is wanted, at least 0.

    Raises:
        NoGuarantee: The numerics have no answer for this law and relation.
    """
    grid = np.array(orders)
    nothing = NoiseCurves(renyi=np.full(len(grid), math.inf), inner=math.inf, deltas=np.ones(len(epsilons)))
    if one.scale < _LEAST_NOISE:
        return nothing
    one = replace(one, scale=min(one.scale, _MOST_NOISE), probability=max(one.probability, _RAREST_SAMPLING))
    with np.errstate(all="ignore"):
        curve = _renyi_curve(one, adjacency, grid) if one.law == "gaussian" else nothing.renyi
        renyi = np.where(np.isfinite(curve) & (curve > 0), curve, math.inf)
        found = composed_curve([_noisy_step(one, adjacency)], [min(delta, 0.5), _SMALL_EPSILON_DELTA])
    if found is not None:
        inner = 0.0 if delta >= 1 else found.epsilon(delta)
        return NoiseCurves(renyi=renyi, inner=inner, deltas=found.deltas(np.array(epsilons)))
    usable = np.isfinite(renyi)
    if not usable.any():
        return nothing
    deltas = [compute_delta(grid[usable], renyi[usable], epsilon)[0] for epsilon in epsilons]
    inner = 0.0 if delta >= 1 else renyi_to_epsilon(grid[usable], renyi[usable], delta)
    return NoiseCurves(renyi=renyi, inner=inner, deltas=np.array(deltas))


def _renyi_curve(one: NoisySum, adjacency: Adjacency, orders: np.ndarray) -> np.ndarray:
    if one.law != "gaussian":
        raise NoGuarantee(
            "Laplace noise: no Renyi divergence is known for it here; use delta = 0 or fewer steps"
        )
    if adjacency is not Adjacency.REPLACE_ONE:
        return one_way_curve(one, orders)
    doubled, below = one_way_curve(one, 2 * orders), one_way_curve(one, 2 * orders - 1)
    return np.where((doubled > 0) & (below > 0), (orders - 0.5) / (orders - 1) * doubled + below, np.nan)


def one_way_curve(one: NoisySum, orders: np.ndarray) -> np.ndarray:
    """Return Renyi divergences of Gaussian noise for add_or_remove_one, the larger of both directions.

    Args:
        one: All steps together.
        orders: Above 1.

    Returns:
        Of the orders' shape; NaN, infinite, 0 or below if dp_accounting has no value at an order.
    """
    accountant = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    step = dp_accounting.PoissonSampledDpEvent(one.probability, dp_accounting.GaussianDpEvent(one.scale))
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # orders may overflow or not converge; the caller drops them
    try:
        with np.errstate(all="ignore"):
            accountant.compose(dp_accounting.SelfComposedDpEvent(step, one.steps))
    finally:
        logger.setLevel(level)
    return np.asarray(accountant.rdp, dtype=float)


def _noisy_step(one: NoisySum, adjacency: Adjacency) -> NoisyStep:
    replaces = adjacency is Adjacency.REPLACE_ONE
    if one.law == "gaussian":
        ways: tuple[Direction, ...] = ("replace",) if replaces else ("remove", "add")
        laws = [GaussianLaw(noise=one.scale, probability=one.probability, direction=way) for way in ways]
        return NoisyStep(laws=tuple(laws), steps=one.steps)
    if one.scale * LARGEST_LOSS < 1:
        raise NoGuarantee(f"Laplace noise: its loss exceeds what doubles can follow at scale = {one.scale:g}")
    if replaces:
        raise NoGuarantee("Laplace noise: its loss has no known distribution for replace_one; use delta = 0")
    remove = LaplaceLaw(scale=one.scale, probability=one.probability, direction="remove")
    return NoisyStep(laws=(remove, replace(remove, direction="add")), steps=one.steps)


def mixture_bounds(mixtures: Sequence[GaussianMixture], delta: float) -> EpsilonBounds:
    """Return an upper bound on epsilon(delta) of all mixtures together, in both directions; the lower bound is 0.

    Args:
        mixtures: At least one.
        delta: In [0, 1).
    """
    if delta == 0 or any(one.noise < 2 * _LEAST_NOISE for one in mixtures):
        return EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers for so little noise")
    steps = []
    for one in mixtures:
        z, q = min(one.noise, _MOST_NOISE), max(one.probability, _RAREST_SAMPLING)
        laws = [
            [GaussianLaw(noise=noise, probability=q, direction=way) for noise in (z, z / 2)]
            for way in ("remove", "add")
        ]
        mixed = (MixedLaw(parts=((1 - one.share, all_), (one.share, half))) for all_, half in laws)
        steps.append(NoisyStep(laws=tuple(mixed), steps=one.steps))
    with np.errstate(all="ignore"):
        found = composed_curve(steps, [delta])
        upper = math.inf if found is None else found.epsilon(delta)
        total = sum(
            (one.steps * mixture_renyi_curve(one) for one in mixtures), np.zeros(len(_MIXTURE_ORDERS))
        )
        usable = np.isfinite(total)
        orders = np.asarray(_MIXTURE_ORDERS, dtype=float)[usable]
        renyi = renyi_to_epsilon(orders, total[usable], delta) if usable.any() else math.inf
    if found is None or math.isinf(upper) or not upper <= renyi:
        return EpsilonBounds(lower=0.0, upper=renyi, method="Renyi divergences")
    return EpsilonBounds(lower=0.0, upper=upper, method=found.method)


def mixture_renyi_curve(one: GaussianMixture, orders: Sequence[float] = _MIXTURE_ORDERS) -> np.ndarray:
    """Return the larger direction's Renyi divergence of one step, NaN if an order failed.

    log[(1 - rho) e^((a - 1) D_a(z)) + rho e^((a - 1) D_a(z / 2))] / (a - 1), rho being the share.
    """
    grid = np.asarray(orders, dtype=float)
    curves = []
    z = min(one.noise, _MOST_NOISE)
    for noise in (z, z / 2):
        curve = one_way_curve(NoisySum(law="gaussian", scale=noise, probability=one.probability), grid)
        curves.append(np.where(np.isfinite(curve) & (curve > 0), curve, np.nan) * (grid - 1))
    weights = np.array([[1 - one.share], [one.share]])
    return np.asarray(logsumexp(np.array(curves), b=weights, axis=0) / (grid - 1))
