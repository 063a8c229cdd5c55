"""Lower limit of Gaussian noise from readings of one constant input.

With n = readings - 1, S the sample covariance and v the unit vector that minimises v^T Sigma v for the true Sigma,
lambda_min(S) <= v^T S v = lambda_min(Sigma) chi2_n / n, so n lambda_min(S) / chi2_(n, 1 - beta) is a lower limit of
lambda_min(Sigma) at confidence 1 - beta, without a union over outputs. The smallest sample variance takes the place of
lambda_min(S) where outputs are independent. Both hold for Gaussian readings that are not quantised and do not depend
on each other, and for no others (`opusim.calibration.reading_noise` tests that). Source: docs/privacy.md, section 9.
"""

from __future__ import annotations

import numpy as np

from opusim import checks


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
