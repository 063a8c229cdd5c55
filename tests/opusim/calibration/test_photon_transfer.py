"""Photon transfer and the noise of coarse dark frames are found from frames, as often as their limits say."""

import numpy as np
import pytest

from opusim.calibration.frames import Estimate, Level, dark_noise_dn, jackknife, take_series
from opusim.calibration.photon_transfer import PhotonTransfer, Plan, take_photon_transfer
from opusim.devices.registry import open_device
from tests.opusim.common import refuses

CONFIDENCE = 0.9
PRESETS = ("camera", "camera_low_light")


def calibrated(name: str, seed: int, **camera: object) -> tuple[dict[str, Estimate], dict[str, float]]:
    """Estimates of one cheap calibration of a sensor of its own, and what was configured."""
    anchor = {"frames": 0, "lowest": 1e-6, "highest": None, "most_saturated": 0.5}  # no anchor is looked at
    settings = {"anchor": anchor} | camera
    places = {"n_inputs": 2, "n_outputs": 1200, "seed": seed, "medium": {"seed": seed}}
    with open_device(name, camera=settings, **places) as device:
        section, light = device.description.camera, device.description.camera.light
        warm = section.dark.temperature_c + 15.0
        plan = Plan(frames=12, light_levels=10, dark_levels=4, temperatures_c=(warm - 15, warm))
        transfer = take_photon_transfer(device.flat_frames, plan, exposure_us=light.exposure_us)
        truth = {
            "quantum_efficiency": light.quantum_efficiency,
            "dark_current_e_per_s": section.dark.doubling.dark_current_ref_e_per_s,
            "doubling_k": section.dark.doubling.doubling_k,
            "saturation_e": device.exposure.sensor.saturation_e,
        }
        keys = ("gain_dn_per_e", "black_level_dn", "read_noise_e", "prnu", "dsnu_e")
        return transfer.estimates(CONFIDENCE), truth | {key: getattr(section.sensor, key) for key in keys}


def rate_fits(hits: np.ndarray, rate: float) -> bool:
    """Two-sided, five standard errors of a share."""
    return bool(abs(hits.mean() - rate) <= 5 * np.sqrt(rate * (1 - rate) / hits.size))


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_limits_cover_each_configured_constant_at_their_rate(name: str, seed: int) -> None:
    runs = [calibrated(name, seed + number) for number in range(400)]
    for key in runs[0][1]:
        hits = np.array([found[key].covers(truth[key]) for found, truth in runs])
        assert rate_fits(hits, CONFIDENCE), (key, hits.mean())
        wrong = np.array([f[key].covers(truth[key] + 2.0 * (f[key].high - f[key].low)) for f, truth in runs])
        assert not rate_fits(wrong, CONFIDENCE), key


@pytest.mark.compiled
@pytest.mark.parametrize("name", PRESETS)
def test_one_calibration_finds_each_constant(name: str, seed: int) -> None:
    found, truth = calibrated(name, seed)
    assert set(found) == set(truth)
    for key, estimate in found.items():
        width = estimate.high - estimate.low
        assert abs(estimate.value - truth[key]) < 2 * width, key
        assert width < 0.3 * truth[key], key


def jackknife_hits(seed: int, truth: float) -> np.ndarray:
    """Whether each of 2,000 intervals of a ratio of means, 2.7, covers a number."""
    random = np.random.default_rng(seed)
    hits = []
    for _ in range(2000):
        sums = np.stack([random.normal(1.0, 0.1, 40), random.normal(2.7, 1.0, 40)], axis=1)
        found = jackknife(sums, lambda s: {"ratio": s[1] / s[0]}, confidence=CONFIDENCE)["ratio"]
        hits.append(found.covers(truth))
    return np.array(hits)


@pytest.mark.compiled
@pytest.mark.slow
def test_jackknife_limits_hold_at_their_rate(seed: int) -> None:
    assert rate_fits(jackknife_hits(seed, 2.7), CONFIDENCE)
    assert not rate_fits(jackknife_hits(seed, 2.7 * 1.1), CONFIDENCE)


@pytest.mark.compiled
def test_levels_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ValueError, match="do not saturate the sensor"):
        take_photon_transfer(lambda count, **level: np.full((count, 100), 4.0), Plan(), exposure_us=400.0)
    few, dark = lambda count, **level: np.zeros((count, 79)), [Level(photons=0.0)]
    refuses(ValueError, "pixels = 79: must be at least 80", take_series, few, dark, frames=2)

    def dim(count: int, photons: float, **level: object) -> np.ndarray:
        return np.full((count, 80), min(photons, 9.0))

    flat = take_series(dim, [Level(photons=float(p)) for p in range(12)], frames=2)
    refuses(ValueError, "light has 0 levels", PhotonTransfer(light=flat, dark=flat, exposure_us=400.0).used)


CONFIDENCE, RUNS = 0.9, 400
TOLERANCE = 5 * (CONFIDENCE * (1 - CONFIDENCE) / RUNS) ** 0.5
CASES = [(0.2, 4.2, 0.25), (0.245, 4.0, 0.19), (0.5, 4.0, 0.3), (0.7, 4.3, 0.0), (0.9, 4.0, 0.2)]
"""Noise, mean over pixels and its standard deviation over pixels, DN; the last one lies above the steps."""


def rounded(noise: float, mean: float, pattern: float, random: np.random.Generator) -> np.ndarray:
    means = mean + pattern * random.standard_normal(1200)
    return np.rint(means + noise * random.standard_normal((12, 1200)))


@pytest.mark.parametrize(("noise", "mean", "pattern"), CASES)
def test_one_series_finds_the_noise(noise: float, mean: float, pattern: float, seed: int) -> None:
    found = dark_noise_dn(rounded(noise, mean, pattern, np.random.default_rng(seed)), confidence=1 - 1e-6)
    assert found.covers(noise)
    assert found.high - found.low < 0.6 * noise


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "mean", "pattern"), CASES)
def test_limits_cover_the_noise_at_their_rate(noise: float, mean: float, pattern: float, seed: int) -> None:
    """Two-sided; below the steps the variance less 1/12 fails (planted)."""
    hits = []
    for number in range(RUNS):
        frames = rounded(noise, mean, pattern, np.random.default_rng([seed, number]))
        by_variance = max(frames.var(axis=0, ddof=1).mean() - 1 / 12, 0.0) ** 0.5
        found = dark_noise_dn(frames, confidence=CONFIDENCE)
        hits.append((found.covers(noise), found.low <= by_variance <= found.high))
    covered, planted = np.mean(hits, axis=0)
    assert abs(covered - CONFIDENCE) < TOLERANCE, covered
    if noise < 0.5:
        assert planted < CONFIDENCE - TOLERANCE, planted


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("name", ["camera", "camera_low_light"])
def test_limits_cover_the_presets_dark_noise_at_their_rate(name: str, seed: int) -> None:
    """Of 400 sensors each; a noise that is 10 % larger is missed (planted)."""
    hits = []
    for number in range(RUNS):
        anchor = {"frames": 0, "lowest": 1e-6, "highest": None, "most_saturated": 0.5}
        medium = {"seed": seed + number}
        places = {"n_inputs": 2, "n_outputs": 1200, "seed": seed + number, "medium": medium}
        with open_device(name, camera={"anchor": anchor}, **places) as device:
            found = dark_noise_dn(device.flat_frames(12), confidence=CONFIDENCE)
            sensor, dark_e = device.exposure.sensor, device.exposure.dark_current_e
        truth = sensor.gain_dn_per_e * (dark_e + sensor.read_noise_e**2) ** 0.5
        hits.append((found.covers(truth), found.covers(1.1 * truth)))
    covered, planted = np.mean(hits, axis=0)
    assert abs(covered - CONFIDENCE) < TOLERANCE, covered
    assert planted < CONFIDENCE - TOLERANCE, planted


def test_without_a_converter_the_variance_tells_or_frames_are_refused(seed: int) -> None:
    frames = 0.2 * np.random.default_rng(seed).standard_normal((12, 1200))
    found = dark_noise_dn(frames, confidence=1 - 1e-6, is_rounded=False)
    assert found.covers(0.2)
    assert not found.covers(0.2 * 1.1)
    refuses(ValueError, "fewer than 30 pixels show", dark_noise_dn, np.full((12, 1200), 4.0), confidence=0.9)
    random = np.random.default_rng(seed)
    refuses(ValueError, "sides of one step", dark_noise_dn, rounded(0.1, 4.5, 0.05, random), confidence=0.9)
