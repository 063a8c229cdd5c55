"""The test of each single output against a certified law: its false alarms, and the losses that it finds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opusim.devices.baseline import SingleOutputTest

GAUSSIAN = math.sqrt(2)


def variances(rng: np.random.Generator, readings: int, true: np.ndarray) -> np.ndarray:
    return true * rng.chisquare(readings - 1, true.size) / (readings - 1)


@pytest.mark.parametrize(("readings", "outputs"), [(512, 64), (32, 1000)])
def test_an_output_without_noise_alarms_in_one_look_and_is_named(
    readings: int, outputs: int, seed: int
) -> None:
    rng, true = np.random.default_rng(seed), np.ones(outputs)
    true[5] = 0.0
    test = SingleOutputTest(outputs, readings, GAUSSIAN, math.log(1e12))
    assert not test.observe(variances(rng, readings, np.ones(outputs)))
    assert test.observe(variances(rng, readings, true))
    assert test.output == 5
    assert test.suspect_looks == 1


def test_false_alarms_are_as_rare_as_stated(seed: int) -> None:
    """At p = 0.05 in 50 looks, 200 trials alarm at most 10 + 5 standard errors (15) times; weaker noise always does."""
    rng, alarms = np.random.default_rng(seed), {1.0: 0, 0.7: 0}
    for true in alarms:
        for _ in range(200):
            test = SingleOutputTest(16, 32, GAUSSIAN, math.log(50 / 0.05))
            alarms[true] += any(test.observe(variances(rng, 32, np.full(16, true))) for _ in range(50))
    assert alarms[1.0] <= 10 + 5 * math.sqrt(200 * 0.05 * 0.95)
    assert alarms[0.7] == 200


@pytest.mark.parametrize("looks", [1, 8])
def test_the_stated_smallest_loss_is_found(looks: int, seed: int) -> None:
    """Found with probability 0.99: of 300 trials 297 +- 5 standard errors; a third of that loss is not."""
    rng, level = np.random.default_rng(seed), math.log(1e12)
    loss = SingleOutputTest(64, 512, GAUSSIAN, level).smallest(looks)
    assert 0 < loss < 0.6
    found = {}
    for share in (loss, loss / 3):
        true = np.ones(64)
        true[7] = 1 - share
        tests = [SingleOutputTest(64, 512, GAUSSIAN, level) for _ in range(300)]
        found[share] = sum(
            any(test.observe(variances(rng, 512, true)) for _ in range(looks)) for test in tests
        )
    assert found[loss] >= 297 - 5 * math.sqrt(300 * 0.01 * 0.99)
    assert found[loss / 3] < 150


def test_few_readings_of_scattered_squares_find_no_single_output() -> None:
    assert math.isnan(SingleOutputTest(1000, 4, 4.0, math.log(1e12)).smallest(1))
