"""The least noise for a target: it meets the target, a little less does not, wherever the search begins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from opusim.accounting.composition import calibrate_noise, guarantees
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanisms.labels import LabelReadout
from opusim.accounting.mechanisms.records import Gaussian, PoissonGaussian

RUN = PoissonGaussian(noise_multiplier=1.0, sampling_probability=0.1, steps=30)
DELTA = 1e-5


def epsilon(mechanism: Gaussian | PoissonGaussian, delta: float = DELTA) -> float:
    return min(one.epsilon for one in guarantees([mechanism], delta=delta) if one.is_proven)


@pytest.mark.parametrize("target", [0.3, 1.0, 6.0])
@pytest.mark.parametrize("start", [1e-5, 0.02, 0.7, 5.0, 900.0, 1e7])
def test_the_answer_is_within_its_tolerance_wherever_the_search_begins(start: float, target: float) -> None:
    begun = Gaussian(noise_multiplier=start, steps=3)
    found, stated = calibrate_noise(begun, target_epsilon=target, delta=DELTA)
    assert stated.epsilon == epsilon(found) <= target
    assert epsilon(replace(found, noise_multiplier=found.noise_multiplier * (1 - 3e-4))) > target
    assert found == replace(begun, noise_multiplier=found.noise_multiplier)


def test_the_target_is_met_by_sampled_noise() -> None:
    found, stated = calibrate_noise(RUN, target_epsilon=1.0, delta=DELTA)
    assert stated.epsilon == epsilon(found) <= 1.0
    assert epsilon(replace(found, noise_multiplier=found.noise_multiplier * (1 - 3e-4))) > 1.0


@pytest.mark.parametrize("start", [1e-3, 0.01, 0.03, 50.0])
def test_the_least_noise_is_a_hundredth(start: float) -> None:
    found, stated = calibrate_noise(Gaussian(noise_multiplier=start), target_epsilon=1e8, delta=DELTA)
    assert found.noise_multiplier == pytest.approx(0.01, rel=1e-12)
    assert stated.epsilon <= 1e8


def test_the_most_noise_is_a_million() -> None:
    found, stated = calibrate_noise(Gaussian(noise_multiplier=1.0), target_epsilon=1e-9, delta=0.5)
    assert found.noise_multiplier < 10
    assert stated.epsilon <= 1e-9
    hard = Gaussian(noise_multiplier=1.0, steps=10**12)
    assert epsilon(replace(hard, noise_multiplier=1e6)) > 0.1
    with pytest.raises(NoGuarantee, match=r"target_epsilon = 0.1: gaussian with noise up to 1e\+06"):
        calibrate_noise(hard, target_epsilon=0.1, delta=DELTA)


def test_gaussian_noise_has_no_epsilon_at_a_delta_of_0() -> None:
    with pytest.raises(NoGuarantee, match="at delta = 0; its epsilon is infinite at delta = 0 whatever"):
        calibrate_noise(RUN, target_epsilon=3.0, delta=0.0)
    for target in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="target_epsilon = "):
            calibrate_noise(RUN, target_epsilon=target, delta=DELTA)


def test_noise_that_is_the_inverse_of_a_field_is_calibrated_too() -> None:
    found, stated = calibrate_noise(LabelReadout(mu=3.0), target_epsilon=1.0, delta=DELTA)
    assert stated.epsilon <= 1.0 < guarantees([replace(found, mu=found.mu * 1.0003)], delta=DELTA)[0].epsilon
