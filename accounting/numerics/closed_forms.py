"""Epsilon in closed form: mu-GDP, randomized response, Renyi curves; and the functions of scipy used elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting import get_epsilon_gaussian
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import compute_epsilon
from scipy.optimize import brentq as find_root
from scipy.special import expit as logistic
from scipy.special import log_ndtr as log_normal_cdf
from scipy.special import ndtr as normal_cdf
from scipy.stats import beta, norm
from scipy.stats import binom as binomial

from accounting.guarantee import EpsilonBounds
from accounting.numerics.privacy_loss import ROUNDING
from opusim import checks

__all__ = [
    "beta_quantile",
    "binomial",
    "find_root",
    "gaussian_bounds",
    "log_normal_cdf",
    "logistic",
    "normal_cdf",
    "normal_quantile",
    "renyi_to_epsilon",
    "response_bounds",
]

beta_quantile = beta.ppf
"""Quantile of a beta law, called as beta_quantile(probability, a, b)."""
normal_quantile = norm.ppf
"""Quantile of N(0, 1)."""


def gaussian_bounds(mu: float, delta: float) -> EpsilonBounds:
    """Return epsilon of mu-GDP, exact up to the root search.

    Args:
        mu: At least 0. From 1e8 on, where doubles fail, epsilon is infinite; below 1e-9 the bound of 1e-9 is used.
        delta: In [0, 1); epsilon is infinite at 0.
    """
    checks.in_unit_interval(closed="left", delta=delta)
    if delta == 0 or not mu < 1e8:
        return EpsilonBounds(lower=math.inf, upper=math.inf, method="exact Gaussian trade-off")
    with np.errstate(all="ignore"):  # dp_accounting takes the logarithm of 0 if delta exceeds mu
        epsilon = float(get_epsilon_gaussian(1.0 / max(mu, 1e-9), delta))
    lower = epsilon if mu >= 1e-9 else 0.0
    return EpsilonBounds(lower=lower, upper=epsilon * (1 + 1e-9) + 1e-9, method="exact Gaussian trade-off")


def response_bounds(
    keep: float, n_classes: int, step_epsilon: float, steps: int, delta: float
) -> EpsilonBounds:
    """Return epsilon of k-ary randomized response, drawn independently several times for one label.

    The loss takes the values step_epsilon, 0 and -step_epsilon, so its distribution is composed without discretisation.

    Args:
        keep: Probability that a label stays, in (1 / k, 1).
        n_classes: k, at least 2.
        step_epsilon: log(keep (k - 1) / (1 - keep)).
        steps: Number of responses, at least 1.
        delta: In (0, 1).
    """
    pure = steps * step_epsilon
    if not ROUNDING * steps <= delta / 2:  # a transform of so many steps would round delta away
        return EpsilonBounds(lower=0.0, upper=pure, method="closed form")
    other = (1 - keep) / (n_classes - 1)
    masses = {1: keep, 0: (n_classes - 2) * other, -1: other}
    loss = PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, step_epsilon)
    composed = loss if steps == 1 else loss.self_compose(steps)
    slack = ROUNDING * steps if steps > 1 else 0.0
    epsilon = min(float(composed.get_epsilon_for_delta(delta - slack)) * (1 + 1e-9), pure)
    lower = min(float(composed.get_epsilon_for_delta(delta + slack)) * (1 - 1e-6), epsilon)
    return EpsilonBounds(lower=lower, upper=epsilon, method="exact distribution of the loss")


def renyi_to_epsilon(
    orders: Sequence[float] | np.ndarray, curve: Sequence[float] | np.ndarray, delta: float
) -> float:
    """Return dp_accounting's conversion of a Renyi curve to epsilon(delta).

    Args:
        orders: Renyi orders, above 1.
        curve: The divergence at each order, finite.
        delta: In (0, 1).
    """
    return float(compute_epsilon(orders, curve, delta)[0])
