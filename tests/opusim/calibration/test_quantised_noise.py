"""The noise of dark frames from their codes, where the converter's steps are coarser than the noise."""

import numpy as np
import pytest

from opusim.calibration.frames import dark_noise_dn
from opusim.devices.registry import open_device

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
        with open_device(
            name, n_inputs=2, n_outputs=1200, seed=seed + number, medium=medium, camera={"anchor": anchor}
        ) as device:
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
    with pytest.raises(ValueError, match="fewer than 30 pixels show more than one code"):
        dark_noise_dn(np.full((12, 1200), 4.0), confidence=0.9)
    random = np.random.default_rng(seed)
    with pytest.raises(ValueError, match="both sides of one step only"):
        dark_noise_dn(rounded(0.1, 4.5, 0.05, random), confidence=0.9)
