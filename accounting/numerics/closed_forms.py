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
from scipy.special import ndtri as normal_quantile
from scipy.stats import beta, normaltest
from scipy.stats import binom as binomial
from scipy.stats import chi2 as chi_squared
from scipy.stats import f as f_law

from opusim import checks
from opusim.accounting.guarantee import EpsilonBounds

__all__ = [
    "beta_quantile",
    "binomial",
    "chi_squared",
    "find_root",
    "gaussian_bounds",
    "log_normal_cdf",
    "logistic",
    "normal_cdf",
    "normal_quantile",
    "normality_p_value",
    "renyi_to_epsilon",
    "response_bounds",
    "variance_ratio_p_value",
]

_ROUNDING = 2e-14
"""What a response's share in a transform may change delta by: 2^19 doubles, raised to the number of steps."""

beta_quantile = beta.ppf
"""Quantile of a beta law, called as beta_quantile(probability, a, b)."""


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
    lower = max(epsilon * (1 - 1e-9) - 1e-9, 0.0) if mu >= 1e-9 else 0.0
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
    if not _ROUNDING * steps <= delta / 2:  # a transform of so many steps would round delta away
        return EpsilonBounds(lower=0.0, upper=pure, method="closed form")
    other = (1 - keep) / (n_classes - 1)
    masses = {1: keep, 0: (n_classes - 2) * other, -1: other}
    loss = PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, step_epsilon)
    composed = loss if steps == 1 else loss.self_compose(steps)
    slack = _ROUNDING * steps if steps > 1 else 0.0
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


def normality_p_value(values: np.ndarray) -> float:
    """Return the p-value of normality by skewness and kurtosis (D'Agostino and Pearson 1973).

    Args:
        values: At least 20, not all equal, shape (n,).
    """
    return float(normaltest(values).pvalue)


def variance_ratio_p_value(ratio: float, above: int, below: int) -> float:
    """Return the two-sided p-value of a ratio of two sample variances of normal values whose true variances are equal.

    Args:
        ratio: Above 0.
        above: Degrees of freedom of the numerator.
        below: Degrees of freedom of the denominator.
    """
    return float(min(1.0, 2 * min(f_law.cdf(ratio, above, below), f_law.sf(ratio, above, below))))
