"""The twin's variance against EMVA 1288's closed form, and the recovered projection's against Var[y], over a grid."""

from itertools import product

import numpy as np
import pytest
import torch

from opusim.devices.registry import open_device

pytestmark = pytest.mark.compiled

GRID = list(product([2.0, 20.0, 200.0], [0.7, 2.7], [0.0, 25.0, 55.0], [12, 16]))[::5]
"""Exposure [ms], gain [DN/e-], temperature [degrees Celsius], bits of the converter."""


def open_at(exposure_ms: float, gain: float, temperature_c: float, bits: int, seed: int, **sensor: object):
    camera = {
        "light": {"exposure_us": 1e3 * exposure_ms},
        "sensor": {"gain_dn_per_e": gain, "adc_bits": bits, "full_well_e": 4e5, **sensor},
        "dark": {"temperature_c": temperature_c},
        "anchor": {"frames": 0},
    }
    return open_device("camera_low_light", n_inputs=20, n_outputs=600, seed=seed, camera=camera)


def z_of_variance(values: np.ndarray, variance: np.ndarray) -> float:
    """Standard errors between the mean squared deviation and its law's, from the sample's own fourth moment."""
    square = np.square(values - values.mean(axis=0)) * len(values) / (len(values) - 1) / variance
    return float((square.mean() - 1) / (square.std() / np.sqrt(square.size)))


@pytest.mark.parametrize(("exposure_ms", "gain", "temperature_c", "bits"), GRID)
def test_a_frames_variance_is_the_closed_form(
    exposure_ms: float, gain: float, temperature_c: float, bits: int, seed: int
) -> None:
    with open_at(exposure_ms, gain, temperature_c, bits, seed) as device:
        dn = device.flat_frames(200, photons=60.0).astype(float)
        dark = 30.0 * 2 ** ((temperature_c - 25) / 6.5) * exposure_ms * 1e-3
        rate = 0.8 * 60 * device.exposure.response + dark
        variance = gain**2 * (rate + 1.6**2) + 1 / 12
        assert abs(z_of_variance(dn, variance)) < 5
        assert abs(z_of_variance(dn, variance * 1.1)) > 5
        mean = dn.mean(0) - 100 - gain * (rate + device.exposure.offset_e)
        assert abs(mean.mean()) < 5 * np.sqrt(variance.mean() / dn.size)


@pytest.mark.parametrize(("exposure_ms", "gain", "temperature_c", "bits"), GRID)
def test_a_readings_variance_is_that_of_the_formula(
    exposure_ms: float, gain: float, temperature_c: float, bits: int, seed: int
) -> None:
    x = torch.randint(-1, 2, (1, 20), generator=torch.Generator().manual_seed(seed)).float()
    with open_at(exposure_ms, gain, temperature_c, bits, seed) as device:
        y = device.project(x.repeat(300, 1)).double().numpy()
        variance = device.reading_variance(x).numpy()
        frames = torch.cat(
            [x.clamp(min=0), 1 - x.clamp(min=0), x.neg().clamp(min=0), 1 - x.neg().clamp(min=0)]
        )
        field = device.speckle.fields(frames).double().numpy()
        share = device.speckle.anchor - device.speckle.fields(torch.ones(1, 20)).double().numpy()[:, 0]
        field[:, 1::2] += share[:, None, :]  # reference mirrors are on in complements
        electrons = device.exposure.gain_e * np.sum(field**2, axis=0)  # (4, outputs)
        dark = 30.0 * 2 ** ((temperature_c - 25) / 6.5) * exposure_ms * 1e-3
        anchor = gain * device.exposure.gain_e * np.sum(device.speckle.anchor**2, axis=0)
        four = gain * gain * electrons.sum(0) + 4 * (gain**2 * (dark + 1.6**2) + 1 / 12)
        expected = four / (4 * anchor) * device.recovery.column_norm**2
    np.testing.assert_allclose(variance[0], expected, rtol=1e-5)
    assert abs(z_of_variance(y, expected)) < 5
    assert abs(z_of_variance(y, expected * 1.1)) > 5


@pytest.mark.parametrize("bits", [8, 12])
def test_with_everything_but_rounding_off_the_error_is_at_most_half_a_step(bits: int, seed: int) -> None:
    with open_at(200.0, 0.05, 25.0, bits, seed, shot_noise=False, read_noise_e=0.0) as device:
        dn = device.flat_frames(2, photons=900.0)
        rate = 0.05 * (720 * device.exposure.response + 6 + device.exposure.offset_e) + 100
        assert np.array_equal(dn[0], dn[1])
        assert np.abs(dn[0] - rate).max() <= 0.5 + 1e-5
