"""Confidence limits of any smooth function of per-pixel sums, without a law of the noise: the grouped jackknife.

Pixels are independent and fall into G groups. With theta the estimate from all of them, theta_g the one without group g
and theta_. the mean of those, the estimate G theta - (G - 1) theta_. has its first-order bias removed, its standard
error is s with s^2 = (G - 1)/G sum (theta_g - theta_.)^2, and (estimate - truth)/s is close to Student's t with
G - 1 degrees of freedom (Quenouille 1956, Tukey 1958; Miller 1974). Tests count how often the limits hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from opusim import checks

Statistic = Callable[[np.ndarray], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number from frames with two-sided confidence limits.

    Attributes:
        value: the estimate.
        low: lower limit.
        high: upper limit; each is passed with probability (1 - confidence) / 2.
    """

    value: float
    low: float
    high: float

    def covers(self, truth: float) -> bool:
        """Whether the truth lies within the limits."""
        return self.low <= truth <= self.high

    def root(self) -> Estimate:
        """The estimate of the square root; what is negative becomes 0, which keeps the limits' rate."""
        return Estimate(**{key: max(value, 0.0) ** 0.5 for key, value in vars(self).items()})


def jackknife(sums: np.ndarray, statistic: Statistic, *, confidence: float) -> dict[str, Estimate]:
    """Estimates of a statistic's numbers from sums over groups of pixels.

    Args:
        sums: sums of each group of pixels, shape (groups, ...), at least 10 groups.
        statistic: takes the sums over groups, shape (...), to named numbers.
        confidence: of each interval by itself, in (0, 1).

    Raises:
        ValueError: too few groups, or a confidence out of range.
    """
    from scipy.stats import t

    groups = len(sums)
    checks.integer(groups=groups, minimum=10, remedy="record more pixels")
    checks.in_range(0.01, 1 - 1e-12, confidence=confidence)
    total = np.sum(sums, axis=0)
    whole = statistic(total)
    without = [statistic(total - part) for part in sums]
    quantile = float(t.isf((1 - confidence) / 2, groups - 1))
    found = {}
    for name, theta in whole.items():
        values = np.array([part[name] for part in without])
        error = float(np.sqrt((groups - 1) / groups * np.sum(np.square(values - values.mean()))))
        value = float(groups * theta - (groups - 1) * values.mean())
        found[name] = Estimate(value=value, low=value - quantile * error, high=value + quantile * error)
    return found
