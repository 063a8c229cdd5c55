"""The drifting medium: a stationary Ornstein-Uhlenbeck process, at any two times and for ever."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from opusim.camera.speckle import MOST_TAU, STEPS_PER_TAU, grid_point, medium_weights
from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_device
from opusim.errors import NoiseUnknown

TAU_S = 10.0
LAGS = (0.1, 1.0, 3.0, 10.0, 100.0)
STARTS = (0.0, 2.7, 37.3, 1000.9)


def drifting(n_inputs: int = 60, n_outputs: int = 500) -> CameraDevice:
    silent = {"shot_noise": False, "full_well_e": None, "read_noise_e": 0.0, "adc_bits": None}
    camera = {
        "sensor": silent,
        "anchor": {"frames": 0},
        "drift": {"decorrelation_s": TAU_S, "seconds_per_step": 1.0},
    }
    return open_device("camera", n_inputs=n_inputs, n_outputs=n_outputs, camera=camera)


def entries(device: CameraDevice, time: float) -> np.ndarray:
    """Every entry of P and Q at a time, in units of the decorrelation time."""
    device.drift_to(time * TAU_S)
    return device.speckle.fields(torch.eye(device.n_inputs)).double().numpy().ravel()


def inner(one: int, other: int) -> float:
    """Covariance of the medium at two grid points, exact: media of different epochs are independent."""
    left, right = dict(medium_weights(one)), dict(medium_weights(other))
    return sum(weight * right.get(epoch, 0.0) for epoch, weight in left.items())


def test_every_two_grid_points_have_the_correlation_of_the_law(seed: int) -> None:
    random = np.random.default_rng(seed)
    points = [grid_point(start + lag) for start in STARTS for lag in (0.0, 1e-3, *LAGS)]
    points += [int(point) for point in random.integers(0, 2**31, 20)]
    points += [point + 1 for point in points]
    for one in points:
        assert inner(one, one) == pytest.approx(1, abs=1e-9)
        assert len(medium_weights(one)) <= 18
        for other in points:
            expected = math.exp(-abs(one - other) / STEPS_PER_TAU)
            assert inner(one, other) == pytest.approx(expected, abs=1.5e-7)


def test_the_grid_moves_the_correlation_by_no_more_than_stated(seed: int) -> None:
    times = np.random.default_rng(seed).uniform(0, 5, 200)
    apart = [
        inner(grid_point(a), grid_point(b)) - math.exp(-abs(a - b))
        for a, b in zip(times[::2], times[1::2], strict=True)
    ]
    assert np.abs(apart).max() < 2.5e-4


@pytest.mark.compiled
@pytest.mark.parametrize("start", STARTS)
def test_the_medium_is_stationary_and_decorrelates_by_the_law(start: float) -> None:
    with drifting() as device:
        values = {lag: entries(device, start + lag) for lag in (0.0, *LAGS)}
    first = values[0.0]
    for lag, later in values.items():
        n, rho = first.size, math.exp(-lag)
        assert abs(later.mean()) < 5 / math.sqrt(n)
        assert abs(np.mean(later**2) - 1) < 5 * math.sqrt(2 / n)
        error = math.sqrt((1 + rho**2) / n)
        found = float(np.mean(first * later))
        assert abs(found - rho) < 5 * error + 2.5e-4
        # the fault that froze after three tau: cos(theta) R + sin(theta) R' at both, cos(theta) = exp(-t / tau)
        two = [math.exp(-start), math.exp(-start - lag)]
        frozen = two[0] * two[1] + math.sqrt((1 - two[0] ** 2) * (1 - two[1] ** 2))
        assert start * lag == 0 or abs(frozen - rho) > 5 * error + 2.5e-4


def test_a_drifting_camera_states_no_boxes() -> None:
    with drifting() as device:
        assert device.stated_noise is None
        with pytest.raises(NoiseUnknown, match="its medium drifts"):
            _ = device.noise


def test_times_out_of_range_are_named() -> None:
    with (
        drifting(n_outputs=20) as device,
        pytest.raises(ValueError, match="decorrelation times: must lie in"),
    ):
        device.drift_to((MOST_TAU + 1) * TAU_S)
    with pytest.raises(ValueError, match="time = -1"):
        grid_point(-1.0)
