"""The stated mean and variance of digital numbers and readings are those that they have, rounding included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm, poisson

from opusim.camera.stages import Sensor
from opusim.devices.registry import open_device

SENSORS = {
    "eight bits": Sensor(
        gain_dn_per_e=0.01889, shot_noise=True, read_noise_e=13.0, black_level_dn=4.0, adc_bits=8
    ),
    "no read noise": Sensor(gain_dn_per_e=0.2937, shot_noise=True, black_level_dn=2.0, adc_bits=6),
    "no counts": Sensor(gain_dn_per_e=0.02, read_noise_e=17.0, black_level_dn=4.3, adc_bits=8),
    "clipped below": Sensor(gain_dn_per_e=1.0, shot_noise=True, read_noise_e=1.6, adc_bits=12),
    "full well": Sensor(
        gain_dn_per_e=0.5, shot_noise=True, read_noise_e=1.2, black_level_dn=9.0, adc_bits=8, full_well_e=60.0
    ),
    "no converter": Sensor(gain_dn_per_e=0.5, shot_noise=True, read_noise_e=1.2, full_well_e=60.0),
}
RATES = np.array([0.0, 0.05, 2.7, 31.0, 110.0])
OFFSETS = np.array([0.0, 3.7, -11.3, 20.0])


def by_masses(sensor: Sensor, rate: float, offset: float) -> tuple[float, float]:
    """The naive twin: every count and every number, one after the other."""
    numbers = np.arange(2**sensor.adc_bits) if sensor.adc_bits else None
    mean = square = 0.0
    counts = range(int(rate + 12 * math.sqrt(rate) + 40)) if sensor.shot_noise else [rate]
    for count in counts:
        mass = float(poisson.pmf(count, rate)) if sensor.shot_noise else 1.0
        well = math.inf if sensor.full_well_e is None else sensor.full_well_e
        centre = sensor.black_level_dn + sensor.gain_dn_per_e * (min(count, well) + offset)
        std = sensor.gain_dn_per_e * sensor.read_noise_e
        if numbers is None:
            mean, square = mean + mass * centre, square + mass * (centre**2 + std**2)
            continue
        if std == 0:
            law = (numbers == np.clip(np.rint(centre), 0, numbers[-1])).astype(float)
        else:
            below = norm.cdf((numbers[:-1] + 0.5 - centre) / std)
            law = np.diff(np.concatenate([[0.0], below, [1.0]]))
        mean, square = mean + mass * float(law @ numbers), square + mass * float(law @ numbers**2)
    return mean, square - mean**2


@pytest.mark.parametrize("name", SENSORS)
def test_moments_are_those_of_the_law(name: str) -> None:
    sensor = SENSORS[name]
    mean, variance = sensor.moments(RATES[:, None], OFFSETS)
    for i, rate in enumerate(RATES):
        for j, offset in enumerate(OFFSETS):
            expected = by_masses(sensor, float(rate), float(offset))
            assert mean[i, j] == pytest.approx(expected[0], abs=2e-6)
            assert variance[i, j] == pytest.approx(expected[1], abs=2e-6)


def test_far_from_ends_and_above_the_steps_they_are_the_closed_form() -> None:
    sensor = Sensor(gain_dn_per_e=1.0, shot_noise=True, read_noise_e=1.6, black_level_dn=100.0, adc_bits=12)
    mean, variance = sensor.moments(RATES, 0.3)
    np.testing.assert_allclose(mean, 100.3 + RATES, atol=1e-9)
    np.testing.assert_allclose(variance, sensor.variance_dn2(RATES), atol=1e-8)


def test_a_full_pixel_does_not_vary() -> None:
    mean, variance = SENSORS["full well"].moments(1e9, 0.0)
    assert mean == pytest.approx(39.0, abs=1e-6)
    assert variance == pytest.approx(SENSORS["full well"].moments(1e4, 0.0)[1], abs=1e-9)


def test_the_rounding_limit_holds_at_every_offset_and_rate() -> None:
    sensor = SENSORS["eight bits"]
    rates = np.concatenate([np.linspace(0.05, 300, 400), np.geomspace(300, 5000, 50)])
    offsets = np.linspace(0, 1 / sensor.gain_dn_per_e, 60)
    apart = np.abs(sensor.moments(rates[:, None], offsets)[1] - sensor.variance_dn2(rates)[:, None])
    assert apart.max() <= sensor.rounding_limit_dn2(0.05)
    assert apart.max() > 0.3 * sensor.rounding_limit_dn2(0.05)


def scatter_z(values: np.ndarray, variance: np.ndarray) -> float:
    """Standard errors between readings' variance and a stated one, by the readings' own fourth moment."""
    square = np.square(values - values.mean(axis=0)) * len(values) / (len(values) - 1) / variance
    return float((square.mean() - 1) / (square.std() / math.sqrt(square.size)))


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["camera", "camera_low_light"])
@pytest.mark.parametrize("blank", [True, False])
def test_readings_have_the_stated_mean_and_variance(name: str, blank: bool, seed: int) -> None:
    x = torch.zeros(1, 20) if blank else torch.ones(1, 20)
    with open_device(name, n_inputs=20, n_outputs=500, seed=seed) as device:
        y = device.project(x.repeat(800, 1)).double().numpy()
        variance, mean = device.reading_variance(x).numpy()[0], device.reading_mean(x).numpy()[0]
        low, high = device.noise.variance_bounds()
        closed = device.recovery.variance(device.exposure.sensor.variance_dn2(device.frame_rates(x)))[0]
    assert abs(scatter_z(y, variance)) < 5
    assert abs(scatter_z(y, variance * 1.1)) > 5
    z = (y.mean(axis=0) - mean) / np.sqrt(variance / len(y))
    assert abs(z.mean()) < 5 / math.sqrt(z.size)
    assert abs(np.mean(z**2) - 1) < 5 * math.sqrt(2 / z.size)
    assert np.all((low <= variance) & (variance <= high))
    if name == "camera" and blank:  # what the closed form said
        assert abs(scatter_z(y, closed)) > 5


@pytest.mark.compiled
def test_blank_frames_have_the_stated_moments(seed: int) -> None:
    with open_device("camera", n_inputs=4, n_outputs=500, seed=seed) as device:
        frames = device.flat_frames(2000).astype(float)
        exposure = device.exposure
        mean, variance = exposure.sensor.moments(exposure.dark_e, exposure.offset_e)
        closed = exposure.sensor.black_level_dn + exposure.sensor.gain_dn_per_e * (
            exposure.dark_e + exposure.offset_e
        )
    errors = (frames.mean(axis=0) - mean) / np.sqrt(variance / len(frames))
    assert abs(np.mean(errors**2) - 1) < 5 * math.sqrt(2 / errors.size)
    biased = (frames.mean(axis=0) - closed) / np.sqrt(variance / len(frames))
    assert abs(np.mean(biased**2) - 1) > 5 * math.sqrt(2 / errors.size)


def test_a_clipped_dark_frame_lowers_the_stated_least_variance() -> None:
    camera = {"sensor": {"black_level_dn": 0.0, "dsnu_e": 0.0}}
    with open_device("camera_low_light", n_inputs=4, n_outputs=50, camera=camera) as device:
        low, _ = device.noise.variance_bounds()
        assert np.all(low <= device.reading_variance(torch.zeros(1, 4)).numpy()[0])
        dark = device.exposure.sensor.moments(device.exposure.dark_e)[1].mean()
        assert dark < device.exposure.sensor.variance_dn2(device.exposure.dark_e).mean()
