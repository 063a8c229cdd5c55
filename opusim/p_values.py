"""P-values of statistics whose laws are known, and decisions on a family of tests at a stated rate of false alarms.

All are two-sided; a statistic that is NaN has the p-value NaN.

For independent a and b in R^d, b of law N(0, I), the cosine r of their angle has r^2 ~ Beta(1/2, (d - 1)/2) for every a
(Fisher 1915). That is the law of a correlation whose means are known to be 0; with estimated means d is one less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import betainc, erfc, gammainc, gammaincc, ndtri


def normal_p_value(z: float) -> float:
    """P(|N(0, 1)| >= |z|)."""
    return float(erfc(abs(z) * 0.5**0.5))


def cosine_p_value(cosine: np.ndarray | float, dimensions: np.ndarray | float) -> np.ndarray:
    """P(|cosine| of two independent directions in d dimensions >= |r|); in one dimension it is 1 or -1."""
    half = np.maximum((np.asarray(dimensions) - 1) / 2, 1e-9)
    return np.asarray(betainc(half, 0.5, 1 - np.minimum(np.square(cosine), 1.0)))


def gamma_p_value(value: float, mean: float, variance: float) -> float:
    """Return twice the smaller tail of the gamma law with the given mean and variance, at most 1."""
    shape, scaled = mean**2 / variance, value * mean / variance
    return bonferroni(min(gammaincc(shape, scaled), gammainc(shape, scaled)), 2)


def chi_squared_p_value(sum_of_squares: float, degrees: float) -> float:
    """Return twice the smaller tail of chi-squared, the law of a sum of `degrees` squares of N(0, 1), at most 1."""
    return gamma_p_value(sum_of_squares, degrees, 2 * degrees)


def bonferroni(p_value: np.ndarray | float, tests: int) -> float:
    """Return the smallest p-value of `tests` tests times their number, at most 1; NaN stays NaN."""
    return min(tests * float(p_value), 1.0)  # in this order: min(1.0, nan) is 1.0


def doubt(p_value: float) -> float:
    """Return a key for `min` that finds the smallest p-value; NaN counts as the smallest."""
    return -1.0 if math.isnan(p_value) else p_value


FAMILY_ALARM = 1e-4
"""Probability that a sound device fails any test of a family."""


@dataclass(frozen=True, kw_only=True)
class PropertyTest:
    """The test of a property that a law needs.

    Attributes:
        text: the property, and the statistic that speaks against it most.
        p_value: probability of a statistic at least as far off if the property holds, corrected for the number of
            statistics of this property.
        level: p-value below which the property does not hold.
        needed: whether the certified law needs the property.
    """

    text: str
    p_value: float
    level: float
    needed: bool = True

    @property
    def holds(self) -> bool:
        """Whether the p-value is at least the level."""
        return self.p_value >= self.level

    @property
    def standard_errors(self) -> float:
        """The two-sided Gaussian deviate of the p-value, at least 0; infinite for a p-value of 0."""
        return abs(float(ndtri(self.p_value / 2)))


def decide(
    properties: Mapping[str, Mapping[str, float]],
    *,
    alarm: float = FAMILY_ALARM,
    not_needed: Collection[str] = (),
) -> tuple[PropertyTest, ...]:
    """Test each property by Bonferroni: its smallest p-value times its statistics, at level alarm / properties.

    `alarm` is the probability that any property is rejected although all hold; the law does without some of them.
    """
    level, found = alarm / max(len(properties), 1), []
    for text, p_values in properties.items():
        worst = min(p_values, key=lambda name: doubt(p_values[name]))
        p_value = bonferroni(p_values[worst], len(p_values))
        shown = text if p_value >= level else f"{text} ({worst})"
        found.append(PropertyTest(text=shown, p_value=p_value, level=level, needed=text not in not_needed))
    return tuple(found)
