"""The noise of readings of one constant input: its smallest variance, its correlations, and what speaks against a law.

The lower limit and its conditions are `opusim.noise.gaussian_readings`'s: of the smallest eigenvalue where there are
readings enough, so that it holds for correlated outputs too, else of the smallest output's variance. Where successive
readings correlate by phi, what a reading adds that its predecessor does not tell is the one-step prediction variance,
(1 - phi^2) times the variance, and that is reported. A variance alone proves nothing: the tests must not speak against
the law, and it stays an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opusim import checks
from opusim.noise import gaussianity_statistics, smallest_variance, variance_lower_limit
from opusim.noise.gaussian_readings import standardised

LIMIT = 5.0
"""Standard errors from which a test speaks against a property."""


@dataclass(frozen=True, kw_only=True)
class PropertyTest:
    """A property that a law needs, tested.

    Attributes:
        text: the property.
        standard_errors: how far the statistic lies from what the property implies.
        holds: whether that is below `LIMIT`.
    """

    text: str
    standard_errors: float
    holds: bool


@dataclass(frozen=True, kw_only=True)
class ReadingNoise:
    """What readings of one input say of the noise.

    Attributes:
        readings: how many.
        n_outputs: outputs of each.
        mean_std: root mean variance over outputs, units of the reading.
        smallest_std: smallest standard deviation of an output, estimate.
        smallest_std_low: its lower limit at confidence 1 - beta, for Gaussian readings only.
        beta: see there.
        uses_eigenvalue: whether the limit is of the smallest eigenvalue, which correlated outputs may share.
        successive: correlation of successive readings.
        tests: of the properties that a Gaussian certificate needs.
    """

    readings: int
    n_outputs: int
    mean_std: float
    smallest_std: float
    smallest_std_low: float
    beta: float
    uses_eigenvalue: bool
    successive: float
    tests: tuple[PropertyTest, ...]

    @property
    def is_gaussian(self) -> bool:
        """Whether no test speaks against independent Gaussian readings."""
        return all(test.holds for test in self.tests)


def evaluate_readings(samples: np.ndarray, *, beta: float) -> ReadingNoise:
    """Evaluates readings of one input.

    Args:
        samples: shape (readings, n_outputs), finite, at least 30 readings, in order of time.
        beta: probability that the lower limit is too high, in (0, 1).

    Raises:
        ValueError: too few readings, or a beta out of range.
    """
    checks.shape((None, None), samples=samples)
    checks.finite(samples=samples)
    checks.integer(readings=len(samples), minimum=30, remedy="take more readings")
    values = np.asarray(samples, dtype=np.float64)
    variances, found = values.var(axis=0, ddof=1), gaussianity_statistics(values)
    use_eigenvalue = values.shape[1] + 2 <= len(values)
    fresh = max(0.0, 1 - found.successive**2) if abs(found.successive_errors) > LIMIT else 1.0
    smallest = smallest_variance(values, independent_outputs=not use_eigenvalue)
    return ReadingNoise(
        readings=len(values),
        n_outputs=values.shape[1],
        mean_std=float(np.sqrt(variances.mean())),
        smallest_std=float(np.sqrt(variances.min())),
        smallest_std_low=variance_lower_limit(fresh * smallest, readings=len(values), beta=beta) ** 0.5,
        beta=beta,
        uses_eigenvalue=use_eigenvalue,
        successive=found.successive,
        tests=(
            _test("fourth moment of a Gaussian", found.fourth_moment),
            _test("successive readings do not correlate", found.successive_errors),
            _outputs_uncorrelated(standardised(values)),
            _not_quantised(found.distinct),
        ),
    )


def _test(text: str, standard_errors: float) -> PropertyTest:
    return PropertyTest(text=text, standard_errors=standard_errors, holds=bool(abs(standard_errors) < LIMIT))


def _outputs_uncorrelated(standard: np.ndarray) -> PropertyTest:
    """Neighbouring outputs' correlations average 0, and so do those of outputs at distance 2."""
    if standard.shape[1] < 3:
        return _test("outputs do not correlate", 0.0)
    worst = 0.0
    for distance in (1, 2):
        pairs = standard[:, distance:] * standard[:, :-distance]
        worst = max(worst, abs(float(np.mean(pairs))) * pairs.size**0.5)
    return _test("outputs do not correlate", worst)


def _not_quantised(distinct: float) -> PropertyTest:
    """More than half of the readings of an output are distinct."""
    return PropertyTest(
        text="readings are not quantised",
        standard_errors=float("inf") if distinct <= 0.5 else 0.0,
        holds=distinct > 0.5,
    )
