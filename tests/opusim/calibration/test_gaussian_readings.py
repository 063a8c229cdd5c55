"""The lower limit of Gaussian noise."""

import numpy as np
import pytest
from scipy.stats import chi2

from opusim.calibration.reading_noise import smallest_variance, variance_lower_limit


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
