"""The masses of a digital number against its moments, drawn frames and sums of drawn frames."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from opusim.camera.exposure import Exposure
from opusim.camera.stages import Sensor, number_law, spread_error
from opusim.description.camera import LightSettings
from opusim.randomness.streams import SeededStream

SENSOR = Sensor(
    gain_dn_per_e=1.0, shot_noise=True, full_well_e=4000.0, read_noise_e=1.6, black_level_dn=20.0, adc_bits=12
)
SENSORS = [
    SENSOR,
    replace(SENSOR, gain_dn_per_e=0.3),
    replace(SENSOR, gain_dn_per_e=2.7, black_level_dn=0.0),
    replace(SENSOR, read_noise_e=0.0),
    replace(SENSOR, full_well_e=12.0, adc_bits=5),
    replace(SENSOR, black_level_dn=0.0, adc_bits=4),
]
RATES = np.array([[0.0, 0.4, 6.3, 25.0], [3.0, 0.1, 9.1, 30.0]])
OFFSETS = np.array([0.0, -0.7, 1.3, 0.2])


@pytest.mark.parametrize("sensor", SENSORS)
def test_the_masses_have_the_exact_moments(sensor: Sensor) -> None:
    law = number_law(RATES, OFFSETS, sensor)
    codes = law.first + np.arange(law.masses.shape[2])
    mean, variance = sensor.moments(RATES, OFFSETS)
    np.testing.assert_allclose(law.masses.sum(axis=2), 1.0, rtol=1e-9)
    np.testing.assert_allclose(law.masses @ codes, mean, atol=1e-5)
    np.testing.assert_allclose(law.masses @ codes**2 - (law.masses @ codes) ** 2, variance, atol=1e-4)
    assert law.first >= 0
    assert codes[-1] <= sensor.top_dn


@pytest.mark.parametrize("sensor", SENSORS)
def test_drawn_frames_have_the_masses(sensor: Sensor, seed: int) -> None:
    n = 40_000
    exposure = Exposure(
        light=LightSettings(anchor_flux_per_s=1.0, quantum_efficiency=1.0, exposure_us=1.0),
        sensor=sensor,
        mirrors=2,
        dark_current_e=0.0,
        response=np.ones(4),
        offset_e=OFFSETS,
    )
    field = torch.from_numpy(np.sqrt(RATES[0] / exposure.gain_e).astype(np.float32))
    shown = torch.stack([field, torch.zeros(4)])[:, None, :].expand(2, n, -1)
    numbers = exposure.expose(shown, SeededStream(seed, "frames")).numpy()

    def deviation(rates: np.ndarray) -> float:
        """Largest deviation of a frequent code, in standard errors."""
        law, worst = number_law(rates, OFFSETS, sensor), 0.0
        for pixel in range(4):
            found = np.bincount(numbers[:, pixel].astype(int) - law.first, minlength=law.masses.shape[2])
            p = law.masses[0, pixel]
            common = (p * n > 50) & (p < 1 - 50 / n)
            error = np.sqrt(p * (1 - p) / n)
            worst = max(worst, *(np.abs(found / n - p)[common] / error[common]), 0.0)
        return float(worst)

    limit = norm.isf(norm.sf(5.0) / 400)
    assert deviation(RATES) < limit
    assert deviation(RATES * 1.2) > limit  # planted: 20 % more light


def test_sums_are_convolved_and_likelihoods_added(seed: int) -> None:
    law = number_law(RATES, OFFSETS, SENSOR)
    sums = law.sums([np.array([0, 2]), np.array([1, 3])])
    codes = law.first + np.arange(law.masses.shape[2])
    totals = 2 * law.first + np.arange(sums.shape[2])
    means = law.masses @ codes
    np.testing.assert_allclose(
        sums @ totals, np.stack([means[:, [0, 2]], means[:, [1, 3]]], axis=1).sum(axis=2)
    )
    np.testing.assert_allclose(sums.sum(axis=2), 1.0, rtol=1e-9)
    numbers = np.array([[20.0, 21.0, 27.0, 44.0], [22.0, 20.0, 30.0, 50.0]])
    expected = [
        [sum(np.log(law.masses[i, j, int(row[j]) - law.first]) for j in range(4)) for i in range(2)]
        for row in numbers
    ]
    np.testing.assert_allclose(law.log_likelihood(numbers), expected)


def test_numbers_without_masses_are_refused() -> None:
    for sensor in (replace(SENSOR, adc_bits=None), replace(SENSOR, shot_noise=False)):
        with pytest.raises(ValueError, match="needs shot noise and a converter"):
            number_law(RATES, OFFSETS, sensor)


def distance(sensor: Sensor, offsets: np.ndarray) -> float:
    """Total variation between the laws of a group's sum with its rate spread evenly, and over half of its pixels."""
    even, uneven = np.full((1, offsets.size), 4.0), np.where(np.arange(offsets.size) % 2, 7.5, 0.5)[None]
    law = number_law(np.concatenate([even, uneven]), offsets, sensor)
    first, second = law.sums([np.arange(offsets.size)])[:, 0]
    return float(np.abs(first - second).sum() / 2)


@pytest.mark.parametrize("gain", [1.0, 2.0, 0.7, 1.3])
@pytest.mark.parametrize("read_noise_e", [1.6, 2.5])
def test_the_sum_of_a_group_depends_on_its_total_rate(gain: float, read_noise_e: float) -> None:
    sensor = replace(SENSOR, gain_dn_per_e=gain, read_noise_e=read_noise_e, black_level_dn=100.0)
    offsets = np.array([0.0, -0.7, 1.3, 0.2, 0.9, -1.1])
    assert distance(sensor, offsets) <= spread_error(sensor, offsets, 7.5) + 1e-12


def test_coarse_rounding_and_ends_let_the_spread_over_pixels_show() -> None:
    offsets = np.array([0.0, -0.7, 1.3, 0.2, 0.9, -1.1])
    coarse = replace(SENSOR, gain_dn_per_e=0.3, read_noise_e=0.3, black_level_dn=100.0)
    fine = replace(coarse, read_noise_e=4.0)
    shown = distance(coarse, offsets)
    assert (
        spread_error(fine, offsets, 7.5) < shown <= spread_error(coarse, offsets, 7.5)
    )  # planted: coarse steps
    for ended in (
        replace(SENSOR, black_level_dn=0.0),
        replace(SENSOR, full_well_e=20.0),
        replace(SENSOR, adc_bits=6),
    ):
        assert spread_error(ended, offsets, 7.5) == np.inf
    assert spread_error(replace(SENSOR, black_level_dn=100.0), offsets, 7.5, nonlinearity=0.1) == np.inf
