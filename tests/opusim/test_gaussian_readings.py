"""The lower limit of Gaussian noise and the statistics that speak against the law, by themselves."""

import numpy as np
import pytest
from scipy.stats import chi2

from opusim.noise import gaussianity_statistics, smallest_variance, variance_lower_limit


def test_the_limit_is_passed_with_probability_beta() -> None:
    for readings, beta in ((3, 0.2), (50, 1e-6)):
        limit = variance_lower_limit(2.7, readings=readings, beta=beta)
        assert chi2.sf((readings - 1) * 2.7 / limit, readings - 1) == pytest.approx(beta)
    assert variance_lower_limit(0.0, readings=9, beta=0.1) == 0
    for wrong in ({"readings": 1, "beta": 0.1}, {"readings": 9, "beta": 0.0}, {"readings": 9, "beta": 1.0}):
        with pytest.raises(ValueError, match=r"readings = 1|beta = "):
            variance_lower_limit(1.0, **wrong)


def test_the_smallest_direction_is_below_the_smallest_output(seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((40, 3)) @ np.array(
        [[1, 0.9, 0], [0, 0.4, 0], [0, 0, 2]]
    )
    output = smallest_variance(values, independent_outputs=True)
    assert output == pytest.approx(values.var(axis=0, ddof=1).min())
    assert smallest_variance(values, independent_outputs=False) == pytest.approx(
        np.linalg.eigvalsh(np.cov(values.T))[0]
    )
    assert smallest_variance(values, independent_outputs=False) < 0.5 * output
    with pytest.raises(ValueError, match="readings = 4.*3 outputs need as many"):
        smallest_variance(values[:4], independent_outputs=False)
    assert smallest_variance(values[:4], independent_outputs=True) > 0


def test_statistics_of_gaussian_readings_are_standard(seed: int) -> None:
    """Means 0 and errors 1 over 600 samples at five standard errors; a uniform law and a slow drift are seen."""
    random = np.random.default_rng(seed)
    found = [gaussianity_statistics(random.standard_normal((50, 40))) for _ in range(600)]
    for values in ([f.fourth_moment for f in found], [f.successive_errors for f in found]):
        assert abs(np.mean(values)) < 5 * np.std(values) / 600**0.5
        assert abs(np.std(values) - 1) < 0.25
    assert all(f.distinct == 1 for f in found)
    assert gaussianity_statistics(random.random((50, 40))).fourth_moment < -5
    drift = random.standard_normal((50, 40)) + np.linspace(0, 3, 50)[:, None]
    assert gaussianity_statistics(drift).successive_errors > 5
    assert gaussianity_statistics(np.zeros((50, 2))).distinct == 1 / 50
