"""What readings of one constant input say of Gaussian noise: a lower limit of it, and what speaks against the law.

With n = readings - 1, S the sample covariance and v the unit vector that minimises v^T Sigma v for the true Sigma,
lambda_min(S) <= v^T S v = lambda_min(Sigma) chi2_n / n, so n lambda_min(S) / chi2_(n, 1 - beta) is a lower limit of
lambda_min(Sigma) at confidence 1 - beta, without a union over outputs. The smallest sample variance takes the place of
lambda_min(S) where outputs are independent. Both hold for Gaussian readings that are not quantised and do not depend
on each other, and for no others. Source: docs/privacy.md, section 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opusim import checks

_COLUMNS_LOOKED_AT = 64


def smallest_variance(samples: np.ndarray, *, independent_outputs: bool) -> float:
    """The smallest sample variance of an output, or lambda_min(S), the smallest in any direction.

    Args:
        samples: readings of one input, shape (readings, n_outputs), finite.
        independent_outputs: whether outputs are known to be independent; else n_outputs + 2 readings are needed.

    Returns:
        Squared units of the reading, at least 0.

    Raises:
        ValueError: too few readings.
    """
    checks.shape((None, None), samples=samples)
    readings, outputs = samples.shape
    least = 3 if independent_outputs else outputs + 2
    checks.integer(
        readings=readings, minimum=least, remedy=f"{outputs} outputs need as many to bound their noise"
    )
    centred = np.asarray(samples, dtype=np.float64) - np.mean(samples, axis=0)
    n = readings - 1
    if independent_outputs:
        return float(np.min(np.sum(np.square(centred), axis=0)) / n)
    return max(float(np.linalg.eigvalsh(centred.T @ centred / n)[0]), 0.0)


def variance_lower_limit(variance: float, *, readings: int, beta: float) -> float:
    """Limit n variance / chi2_(n, 1 - beta), n = readings - 1, which the true smallest variance exceeds but for beta.

    Args:
        variance: from `smallest_variance`, at least 0.
        readings: how many it rests on, at least 2.
        beta: in (0, 1).
    """
    from scipy.stats import chi2

    checks.non_negative(variance=variance)
    checks.integer(readings=readings, minimum=2)
    checks.in_range(1e-300, 1 - 1e-12, beta=beta)
    n = readings - 1
    return float(variance * n / chi2.isf(beta, n))


@dataclass(frozen=True, kw_only=True)
class GaussianityStatistics:
    """How readings differ from independent Gaussian ones that are not quantised.

    Attributes:
        fourth_moment: mean fourth power of the standardised readings less a Gaussian's, in standard errors.
        successive: correlation of successive readings, averaged over outputs.
        successive_errors: the same in standard errors.
        distinct: share of an output's readings that are distinct, averaged over at most 64 outputs.
        size: readings times outputs.
    """

    fourth_moment: float
    successive: float
    successive_errors: float
    distinct: float
    size: int


def gaussianity_statistics(samples: np.ndarray) -> GaussianityStatistics:
    """The statistics that a certificate of Gaussian readings is tested by.

    The mean fourth power of a standardised Gaussian sample is 3 (n - 1) / (n + 1), its error sqrt(24 / size); a
    correlation's error is 1 / sqrt(size), and taking off the mean makes it -1 / n.

    Args:
        samples: readings of one input in order of time, shape (n, n_outputs), at least 3.
    """
    checks.shape((None, None), samples=samples)
    checks.integer(readings=len(samples), minimum=3)
    standard, n = standardised(samples), len(samples)
    excess = float(np.mean(standard**4)) - 3 * (n - 1) / (n + 1)
    successive = float(np.mean(standard[1:] * standard[:-1])) + 1 / n
    columns = np.asarray(samples).T[:_COLUMNS_LOOKED_AT]
    return GaussianityStatistics(
        fourth_moment=excess / (24 / standard.size) ** 0.5,
        successive=successive,
        successive_errors=successive * standard.size**0.5,
        distinct=float(np.mean([np.unique(column).size for column in columns]) / n),
        size=standard.size,
    )


def standardised(samples: np.ndarray) -> np.ndarray:
    """Each output's readings less their mean over their root mean square, float64; zeros where nothing varies."""
    centred = np.asarray(samples, dtype=np.float64) - np.mean(samples, axis=0)
    spread = np.sqrt(np.mean(np.square(centred), axis=0))
    return np.asarray(centred / np.where(spread > 0, spread, 1.0))
