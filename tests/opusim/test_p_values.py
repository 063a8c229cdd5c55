"""p-values against closed forms, and what is no number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from opusim.p_values import (
    bonferroni,
    chi_squared_p_value,
    cosine_p_value,
    decide,
    gamma_p_value,
    normal_p_value,
)
from opusim.training.attacks.mechanism.checks import noise_checks


def test_cosines_have_their_exact_law() -> None:
    for r in (0.0, 0.1, -0.5, 0.9):
        assert cosine_p_value(r, 3) == pytest.approx(1 - abs(r))  # uniform on the sphere (Archimedes)
        assert cosine_p_value(r, 2) == pytest.approx(1 - 2 * math.asin(abs(r)) / math.pi)
    assert cosine_p_value(1.0, 50) == 0.0


def test_variances_have_their_exact_law() -> None:
    for total in (0.3, 2.0, 9.0):
        tails = (1 - math.exp(-total / 2), math.exp(-total / 2))  # chi-squared of two degrees
        assert chi_squared_p_value(total, 2) == pytest.approx(2 * min(tails))
    law = stats.gamma(3.7, scale=0.4)
    assert gamma_p_value(0.9, law.mean(), law.var()) == pytest.approx(2 * law.cdf(0.9))
    assert gamma_p_value(2.9, law.mean(), law.var()) == pytest.approx(2 * law.sf(2.9))


def test_normal_deviates_have_both_tails() -> None:
    assert normal_p_value(-1.959963985) == pytest.approx(0.05, rel=1e-8) == normal_p_value(1.959963985)
    assert 0 < normal_p_value(35.0) < 1e-260


def test_what_is_no_number_is_never_a_good_p_value() -> None:
    assert bonferroni(0.4, 3) == 1.0
    assert math.isnan(bonferroni(math.nan, 3))
    assert math.isnan(chi_squared_p_value(math.nan, 10))
    assert math.isnan(float(cosine_p_value(math.nan, 10)))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_property_with_a_statistic_that_is_no_number_does_not_hold(order: tuple[str, str]) -> None:
    p_values = {"a": 0.7, "b": math.nan}
    (found,) = decide({"readings are independent": {name: p_values[name] for name in order}})
    assert not found.holds


def test_noise_that_is_no_number_raises_every_alarm_of_the_self_test_that_sees_it() -> None:
    noise = np.random.default_rng(3).normal(size=(2, 40, 50))
    noise[1, 7, 3] = math.nan
    quiet = [check.name for check in noise_checks(noise) if not math.isnan(check.p_value)]
    assert quiet == []
