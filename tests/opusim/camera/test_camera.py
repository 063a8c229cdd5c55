"""Digital numbers of a camera: laws and twins of single pixels, points of operation, EMVA 1288's variances, drift."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri
from scipy.stats import poisson

from opusim.camera.exposure import OperatingPoint
from opusim.camera.speckle import MOST_TAU, STEPS_PER_TAU, grid_point, medium_weights
from opusim.camera.stages import fill_counts, fill_numbers
from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_device
from opusim.errors import ConfigError, NoiseUnknown
from tests.opusim.common import SILENT, covariance_of_media, refuses, ternary, z_of_variance
from tests.oracles import naive_camera


def counts_at(rate: float, w: np.ndarray) -> np.ndarray:
    counts = np.empty(w.size)
    fill_counts(counts, np.full(w.size, rate), w.astype(np.float32))
    return counts


def total_variation(rate: float) -> float:
    """Of the kernel's law from Poisson's, from the w at which its counts step up: no sampling."""
    n = np.arange(max(0, int(rate - 9 * rate**0.5 - 5)), int(rate + 9 * rate**0.5 + 25))
    low, high = np.full(n.size, -9.5), np.full(n.size, 9.5)
    for _ in range(60):
        middle = (low + high) / 2
        reached = counts_at(rate, middle) >= n
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    masses = np.diff(ndtr(high))
    return float(0.5 * np.sum(np.abs(masses - poisson.pmf(n[:-1], rate))))


@pytest.mark.parametrize("rate", [0.05, 1.0, 6.0, 11.99, 12.0, 20.0, 64.0, 100.0, 699.0, 701.0, 2544.0])
def test_the_counts_law_is_within_the_stated_distance(rate: float) -> None:
    assert total_variation(rate) < 1e-6


def test_counts_equal_the_naive_twins_and_grow_with_rate_and_w(seed: int) -> None:
    random = np.random.default_rng(seed)
    w = random.standard_normal(4000).astype(np.float32)
    rates = random.exponential(80.0, 4000)
    counts = np.empty(4000)
    fill_counts(counts, rates, w)
    pairs = zip(rates, w.astype(float), strict=True)
    wrong = counts != [naive_camera.count(rate, value) for rate, value in pairs]
    assert not np.any(wrong)
    w = np.linspace(-5, 5, 1001)
    for rate in (0.3, 12.0, 80.0):
        assert np.all(np.diff(counts_at(rate, w)) >= 0)
    low, high = counts_at(11.9999, w), counts_at(12.0001, w)
    assert np.mean(low != high) < 0.01  # no seam where the method changes
    assert np.all(counts_at(0.0, w) == 0)
    far = ndtri(1e-12)
    assert counts_at(20.0, np.array([far]))[0] == poisson.ppf(ndtr(float(np.float32(far))), 20)
    assert counts_at(20.0, np.array([9.4]))[0] < 400


def test_numbers_go_through_the_stages_in_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = 300
    rates, offset = random.exponential(30.0, size), random.normal(0, 2, size)
    w, z = random.standard_normal((2, size)).astype(np.float32)
    got = np.empty(size)
    fill_numbers(got, rates, offset, w, z, (1.0, 55.0, 2.7, 3.3, 20.0, 180.0))
    fixed = {"well": 55.0, "read": 2.7, "black": 20.0, "gain": 3.3, "top": 180.0}
    parts = zip(rates, w.astype(float), z.astype(float), offset, strict=True)
    expected = [naive_camera.digital_number(r, a, b, fixed | {"offset": o}) for r, a, b, o in parts]
    np.testing.assert_array_equal(got, expected)


def test_each_stage_switches_off_alone() -> None:
    rates, none = np.array([0.4, 70.0, 5000.0]), np.zeros(3)
    quiet, empty = np.empty(3), np.empty(0, np.float32)
    fill_numbers(quiet, rates, none, empty, empty, (0.0, np.inf, 0.0, 2.7, 10.0, -1.0))
    np.testing.assert_allclose(quiet, 10 + 2.7 * rates, rtol=1e-15)
    fill_numbers(quiet, rates, none, empty, empty, (0.0, 60.0, 0.0, 2.7, 10.0, -1.0))
    np.testing.assert_allclose(quiet, 10 + 2.7 * np.minimum(rates, 60), rtol=1e-15)
    fill_numbers(quiet, rates, none, empty, empty, (0.0, np.inf, 0.0, 2.7, 10.0, 4095.0))
    np.testing.assert_array_equal(quiet, [11, 199, 4095])
    z = np.array([-1.5, 0.0, 2.0], np.float32)
    fill_numbers(quiet, rates, none, z, z, (0.0, np.inf, 3.0, 2.7, 10.0, -1.0))
    np.testing.assert_allclose(quiet, 10 + 2.7 * (rates + 3.0 * z), rtol=1e-15)
    fill_numbers(quiet, rates, none, z, z, (1.0, np.inf, 0.0, 1.0, 0.0, -1.0))
    np.testing.assert_array_equal(quiet, poisson.ppf(ndtr(z.astype(float)), rates))


X = torch.tensor([[1, 0, -1, 0], [0, 1, 1, -1]]).float()
WINDOW = {"n_inputs": 4, "n_outputs": 50}
EXACT = {"anchor": {"frames": 0}}


LIGHT = {"anchor_flux_per_s": 125.0, "exposure_us": 100_000, "bias_flux_per_s": 10.0}


@pytest.mark.parametrize(
    ("point", "described"),
    [
        (OperatingPoint(), {}),
        (OperatingPoint(temperature_c=47.0), {"dark": {"temperature_c": 47.0}}),
        (OperatingPoint(light=0.27), {"light": {"anchor_flux_per_s": 0.27 * 1250}}),
        (OperatingPoint(exposure=0.27), {"light": {"exposure_us": 0.27 * 200_000}}),
        (OperatingPoint(), {"light": {"ambient_flux_per_s": 40.0}}),
        (OperatingPoint(bias_e=2.7), {"light": {"bias_flux_per_s": 2.7 / 0.8 / 0.2}}),
        (
            OperatingPoint(temperature_c=0.0, light=0.1, exposure=0.5, bias_e=1.6),
            {"light": LIGHT, "dark": {"temperature_c": 0.0}},
        ),
    ],
)
def test_a_point_is_the_device_described_so(point: OperatingPoint, described: dict[str, Any]) -> None:
    ambient = {"light": {"ambient_flux_per_s": described.get("light", {}).get("ambient_flux_per_s")}}
    with open_device("camera_low_light", **WINDOW, camera=EXACT | ambient) as device:
        law = device.count_law(X)
    with open_device("camera_low_light", **WINDOW, camera=EXACT | described) as device:
        np.testing.assert_allclose(law.rates(point), device.frame_rates(X), rtol=1e-12)
        assert law.std(point) == pytest.approx(float(device.reading_variance(X).mean().sqrt()), rel=1e-12)
        assert law.dark_e(point) == pytest.approx(device.exposure.dark_current_e)


def test_what_has_no_law_or_lies_out_of_range_is_refused() -> None:
    for wrong in ({"light": 0.0}, {"exposure": -1.0}, {"bias_e": -0.1}):
        refuses(ValueError, next(iter(wrong)), OperatingPoint, **wrong)
    silent = EXACT | {"sensor": {"shot_noise": False}}
    with open_device("camera_low_light", **WINDOW, camera=silent) as device:
        refuses(ConfigError, "counts have no law; switch it on", device.count_law, X)
    moving = EXACT | {"drift": {"decorrelation_s": 1e5, "seconds_per_step": 1.0}}
    with open_device("camera_low_light", **WINDOW, camera=moving) as device:
        refuses(NoiseUnknown, "its medium drifts", device.count_law, X)
    with drifting() as device:
        assert device.stated_noise is None
        refuses(NoiseUnknown, "its medium drifts", lambda: device.noise)
    with drifting(n_outputs=20) as device:
        refuses(ValueError, "decorrelation times: must lie in", device.drift_to, (MOST_TAU + 1) * TAU_S)
    refuses(ValueError, "time = -1", grid_point, -1.0)


def test_no_guarantee_rests_on_ambient_light() -> None:
    point = OperatingPoint(exposure=0.5)
    lit = EXACT | {"light": {"ambient_flux_per_s": 40.0}}
    with open_device("camera_low_light", **WINDOW, camera=EXACT) as device:
        dark = device.count_law(X)
    with open_device("camera_low_light", **WINDOW, camera=lit) as device:
        law = device.count_law(X)
    np.testing.assert_allclose(law.credited_rates(point), dark.rates(point), rtol=1e-12)
    ambient = np.broadcast_to(0.5 * law.ambient_e, (4, 2, 50))
    np.testing.assert_allclose(law.rates(point) - dark.rates(point), ambient)
    assert law.std(point) > dark.std(point)


GRID = list(product([2.0, 20.0, 200.0], [0.7, 2.7], [0.0, 25.0, 55.0], [12, 16]))[::5]
"""Exposure [ms], gain [DN/e-], temperature [degrees Celsius], bits of the converter."""


def open_at(exposure_ms: float, gain: float, temperature_c: float, bits: int, seed: int, **sensor: object):
    camera = {"light": {"exposure_us": 1e3 * exposure_ms}, "dark": {"temperature_c": temperature_c}}
    camera["sensor"] = {"gain_dn_per_e": gain, "adc_bits": bits, "full_well_e": 4e5, **sensor}
    camera["anchor"] = {"frames": 0}
    return open_device("camera_low_light", n_inputs=20, n_outputs=600, seed=seed, camera=camera)


@pytest.mark.compiled
@pytest.mark.parametrize("point", GRID)
def test_a_frames_variance_is_the_closed_form(point: tuple, seed: int) -> None:
    exposure_ms, gain, temperature_c, _ = point
    with open_at(*point, seed) as device:
        dn = device.flat_frames(200, photons=60.0).astype(float)
        dark = 30.0 * 2 ** ((temperature_c - 25) / 6.5) * exposure_ms * 1e-3
        rate = 0.8 * 60 * device.exposure.response + dark
        variance = gain**2 * (rate + 1.6**2) + 1 / 12
        assert abs(z_of_variance(dn, variance)) < 5 < abs(z_of_variance(dn, variance * 1.1))
        mean = dn.mean(0) - 100 - gain * (rate + device.exposure.offset_e)
        assert abs(mean.mean()) < 5 * np.sqrt(variance.mean() / dn.size)


@pytest.mark.compiled
@pytest.mark.parametrize("point", GRID)
def test_a_readings_variance_is_that_of_the_formula(point: tuple, seed: int) -> None:
    exposure_ms, gain, temperature_c, _ = point
    x = ternary(1, 20, seed)
    with open_at(*point, seed) as device:
        y = device.project(x.repeat(300, 1)).double().numpy()
        variance = device.reading_variance(x).numpy()
        frames = torch.cat([x > 0, x <= 0, x < 0, x >= 0]).float()
        field = device.speckle.fields(frames).double().numpy()
        share = device.speckle.anchor - device.speckle.fields(torch.ones(1, 20)).double().numpy()[:, 0]
        field[:, 1::2] += share[:, None, :]  # reference mirrors are on in complements
        electrons = device.exposure.gain_e * np.sum(field**2, axis=0)  # (4, outputs)
        dark = 30.0 * 2 ** ((temperature_c - 25) / 6.5) * exposure_ms * 1e-3
        anchor = gain * device.exposure.gain_e * np.sum(device.speckle.anchor**2, axis=0)
        four = gain * gain * electrons.sum(0) + 4 * (gain**2 * (dark + 1.6**2) + 1 / 12)
        expected = four / (4 * anchor) * device.recovery.column_norm**2
    np.testing.assert_allclose(variance[0], expected, rtol=1e-5)
    assert abs(z_of_variance(y, expected)) < 5 < abs(z_of_variance(y, expected * 1.1))


@pytest.mark.compiled
@pytest.mark.parametrize("bits", [8, 12])
def test_with_everything_but_rounding_off_the_error_is_at_most_half_a_step(bits: int, seed: int) -> None:
    with open_at(200.0, 0.05, 25.0, bits, seed, shot_noise=False, read_noise_e=0.0) as device:
        dn = device.flat_frames(2, photons=900.0)
        rate = 0.05 * (720 * device.exposure.response + 6 + device.exposure.offset_e) + 100
        assert np.array_equal(dn[0], dn[1])
        assert np.abs(dn[0] - rate).max() <= 0.5 + 1e-5


TAU_S = 10.0
LAGS = (0.1, 1.0, 3.0, 10.0, 100.0)
STARTS = (0.0, 2.7, 37.3, 1000.9)


def drifting(n_inputs: int = 60, n_outputs: int = 500) -> CameraDevice:
    drift = {"decorrelation_s": TAU_S, "seconds_per_step": 1.0}
    camera = {"sensor": SILENT, "anchor": {"frames": 0}, "drift": drift}
    return open_device("camera", n_inputs=n_inputs, n_outputs=n_outputs, camera=camera)


def entries(device: CameraDevice, time: float) -> np.ndarray:
    """Every entry of P and Q at a time, in units of the decorrelation time."""
    device.drift_to(time * TAU_S)
    return device.speckle.fields(torch.eye(device.n_inputs)).double().numpy().ravel()


def test_grid_points_have_the_correlation_of_the_law_and_move_it_little(seed: int) -> None:
    random = np.random.default_rng(seed)
    points = [grid_point(start + lag) for start in STARTS for lag in (0.0, 1e-3, *LAGS)]
    points += [int(point) for point in random.integers(0, 2**31, 20)]
    points += [point + 1 for point in points]
    for one in points:
        assert covariance_of_media(one, one) == pytest.approx(1, abs=1e-9)
        assert len(medium_weights(one)) <= 18
        for other in points:
            expected = math.exp(-abs(one - other) / STEPS_PER_TAU)
            assert covariance_of_media(one, other) == pytest.approx(expected, abs=1.5e-7)
    times = np.random.default_rng(seed).uniform(0, 5, 200)
    pairs = zip(times[::2], times[1::2], strict=True)
    apart = [covariance_of_media(grid_point(a), grid_point(b)) - math.exp(-abs(a - b)) for a, b in pairs]
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
