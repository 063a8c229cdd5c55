"""The noise of readings of one constant input: its smallest variance, its correlations, and what speaks against a law.

With n = readings - 1 and S the sample covariance, n min_j S_jj / chi2_(n, 1 - beta) is a lower limit of the smallest
variance at confidence 1 - beta, without a union over outputs (the output with the smallest true variance alone
decides), for Gaussian readings that are not quantised and do not depend on each other; with n_outputs < n,
lambda_min(S) in its place holds for correlated outputs too. Where successive readings correlate by phi, what a reading
adds that its predecessor does not tell is the one-step prediction variance, (1 - phi^2) times the variance, and that
is reported. A variance alone proves nothing: the tests must not speak against the law, and it stays an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opusim import checks

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
    from scipy.stats import chi2

    checks.shape((None, None), samples=samples)
    checks.finite(samples=samples)
    checks.integer(readings=len(samples), minimum=30, remedy="take more readings")
    checks.in_range(1e-300, 1 - 1e-12, beta=beta)
    values = np.asarray(samples, dtype=np.float64)
    n, outputs = len(values) - 1, values.shape[1]
    centred = values - values.mean(axis=0)
    variances = np.sum(np.square(centred), axis=0) / n
    standard = centred / np.sqrt(np.where(variances > 0, variances, 1.0))
    successive = float(np.mean(standard[1:] * standard[:-1])) + 1 / len(values)
    use_eigenvalue = outputs + 2 <= n
    smallest = (
        float(np.linalg.eigvalsh(centred.T @ centred / n)[0]) if use_eigenvalue else float(variances.min())
    )
    fresh = max(0.0, 1 - successive**2) if abs(successive) * standard.size**0.5 > LIMIT else 1.0
    return ReadingNoise(
        readings=len(values),
        n_outputs=outputs,
        mean_std=float(np.sqrt(variances.mean())),
        smallest_std=float(np.sqrt(variances.min())),
        smallest_std_low=float(np.sqrt(fresh * max(smallest, 0.0) * n / chi2.isf(beta, n))),
        beta=beta,
        uses_eigenvalue=use_eigenvalue,
        successive=successive,
        tests=(
            _fourth_moment(standard),
            _successive(successive, standard.size),
            _outputs_uncorrelated(standard),
            _not_quantised(values),
        ),
    )


def _test(text: str, standard_errors: float) -> PropertyTest:
    return PropertyTest(text=text, standard_errors=standard_errors, holds=bool(abs(standard_errors) < LIMIT))


def _fourth_moment(standard: np.ndarray) -> PropertyTest:
    """Mean fourth power of standardised Gaussian samples is 3 (n - 1)/(n + 1), its error sqrt(24 / size)."""
    n = len(standard)
    excess = float(np.mean(standard**4)) * (n / (n - 1)) ** 2 - 3 * (n - 1) / (n + 1)
    return _test("fourth moment of a Gaussian", excess / (24 / standard.size) ** 0.5)


def _successive(correlation: float, size: int) -> PropertyTest:
    return _test("successive readings do not correlate", correlation * size**0.5)


def _outputs_uncorrelated(standard: np.ndarray) -> PropertyTest:
    """Neighbouring outputs' correlations average 0, and so do those of outputs at distance 2."""
    if standard.shape[1] < 3:
        return _test("outputs do not correlate", 0.0)
    worst = 0.0
    for distance in (1, 2):
        pairs = standard[:, distance:] * standard[:, :-distance]
        worst = max(worst, abs(float(np.mean(pairs))) * pairs.size**0.5)
    return _test("outputs do not correlate", worst)


def _not_quantised(values: np.ndarray) -> PropertyTest:
    """More than half of the readings of an output are distinct."""
    distinct = np.mean([np.unique(column).size for column in values.T[:64]]) / len(values)
    return PropertyTest(
        text="readings are not quantised",
        standard_errors=float("inf") if distinct <= 0.5 else 0.0,
        holds=bool(distinct > 0.5),
    )
