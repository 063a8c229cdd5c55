"""Phase-shifting holography: what is read, its noise, its errors, its law, and who may rest on it."""

from typing import Any

import numpy as np
import pytest
import torch

from opusim.calibration.calibrate import calibrate
from opusim.calibration.photon_transfer import Plan
from opusim.camera.exposure import ReferenceBeam
from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_device
from opusim.errors import ConfigError, NoiseUnknown
from opusim.medium.transmission import IMAGINARY_PLANE, REAL_PLANE
from opusim.noise import FluctuatingCountNoise, PhotonCountNoise
from opusim.randomness.streams import noise_stream
from tests.opusim.common import (
    SILENT,
    binary_rows,
    boxes_hold,
    moments_agree,
    refuses,
    ternary,
)

MIRRORS = {"stuck_on": 0.05, "stuck_off": 0.05, "contrast": 50.0}
POWER = {"law": "log_normal", "rms": 0.05}
PLACES = {"n_inputs": 20, "n_outputs": 60, "seed": 3}


def holographic(steps: int = 4, beam: Any = None, window: Any = None, **camera: Any) -> CameraDevice:
    frames, places = {"frames_per_projection": 2 * steps}, PLACES | (window or {})
    settings = {"reference_beam": {"steps": steps} | (beam or {})}
    return open_device("camera_holography", frames=frames, camera=settings | camera, **places)


SOUND = {"sensor": SILENT | {"prnu": 0.0}, "anchor": {"frames": 0}}


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"mirrors": MIRRORS}, {"pixels": {"crosstalk": 0.05}}, {"beam": {"step_error": 0.05}}),
        {"light": {"bias_flux_per_s": 40.0, "ambient_flux_per_s": 40.0}},
    ],
)
def test_without_noise_readings_are_the_product(steps: int, changes: dict[str, Any], seed: int) -> None:
    x = ternary(6, 20, seed)
    with holographic(steps, sensor=SILENT, **changes) as twin:
        ideal = x.double() @ twin.matrix().double().T
        torch.testing.assert_close(twin.project(x).double(), ideal, rtol=0, atol=1e-4)
        torch.testing.assert_close(twin.reading_mean(x), ideal, rtol=0, atol=1e-4)


@pytest.mark.parametrize("steps", [3, 4])
def test_sound_optics_read_the_real_part_of_the_medium(steps: int) -> None:
    """And steps that are too long by e read Re(conj(c) R), c = 2/K sum of cos(phi_k) exp(i phi_k')."""
    with holographic(steps, **SOUND) as twin:
        p, q = (twin.speckle.dense(plane).T for plane in (REAL_PLANE, IMAGINARY_PLANE))
        torch.testing.assert_close(twin.matrix(), p, rtol=0, atol=1e-5)
        phases = (np.pi / 4 if steps == 4 else 0.0) + 2 * np.pi * np.arange(steps) / steps
    error = 0.05
    longer = phases[0] + (phases - phases[0]) * (1 + error)
    c = 2 / steps * np.sum(np.cos(phases) * np.exp(1j * longer))
    with holographic(steps, {"step_error": error}, **SOUND) as twin:
        torch.testing.assert_close(twin.matrix(), c.real * p + c.imag * q, rtol=0, atol=1e-5)
        assert not torch.allclose(twin.matrix(), p, atol=1e-2)


@pytest.mark.compiled
@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("changes", [{}, {"light": {"power": POWER | {"correlation_us": 500_000.0}}}])
def test_moments_of_readings_are_as_stated(steps: int, changes: dict[str, Any], seed: int) -> None:
    x = ternary(2, 20, seed)
    with holographic(steps, **changes) as twin:
        mean, variance = twin.reading_mean(x), twin.reading_variance(x)
        assert moments_agree(twin, x, mean, variance)
        assert not moments_agree(twin, x, mean, 1.25 * variance)
        assert not moments_agree(twin, x, mean + 0.5 * variance.sqrt(), variance)


@pytest.mark.parametrize("steps", [3, 4])
def test_temperature_sets_the_noise_that_readings_have(steps: int, seed: int) -> None:
    with holographic(steps) as cold, holographic(steps, dark={"temperature_c": 55.0}) as warm:
        law = cold.temperature_law(ternary(5, 20, seed))
        stated = float(warm.reading_variance(ternary(5, 20, seed)).mean())
    assert law.std(55.0) == pytest.approx(stated**0.5, rel=2e-3)
    assert law.std(50.0) != pytest.approx(stated**0.5, rel=2e-3)


def test_noise_of_a_strong_reference_is_one_over_the_steps_and_gain() -> None:
    """Var[y] tends to 1 / (K g), the shot noise of the reference alone, which tells inputs apart no more."""
    wide = {"full_well_e": None, "adc_bits": None, "read_noise_e": 0.0, "prnu": 0.0, "dsnu_e": 0.0}
    for steps in (3, 4):
        with holographic(steps, {"flux_per_s": 1e9}, sensor=wide, dark=None) as twin:
            expected = 1 / (steps * twin.exposure.gain_e)
            variance = twin.reading_variance(ternary(3, 20, 1)).numpy()
            np.testing.assert_allclose(variance, np.broadcast_to(expected, variance.shape), rtol=0.02)


@pytest.mark.compiled
def test_outputs_of_a_reading_do_not_correlate_unless_light_or_path_do(seed: int) -> None:
    count, x = 3000, torch.ones(1, 20)

    def common(twin: CameraDevice) -> float:
        """Square of the sum over outputs of standardised noise, with signs of the signal, in standard errors from 1."""
        y = twin.project(x.expand(count, -1).contiguous()).double()
        z = (y - y.mean(0)) / y.std(0)
        sums = (z * y.mean(0).sign()).mean(1) * 60**0.5
        return float((sums.var() - 1) * (count / 2) ** 0.5)

    with holographic() as still, holographic(vibration={"phase_rms_rad": 0.3}) as shaken:
        assert abs(common(still)) < 5
        assert common(shaken) > 10


@pytest.mark.parametrize("changes", [{}, {"mirrors": MIRRORS}, {"beam": {"step_error": 0.1}}])
def test_rates_of_all_frames_lie_in_the_boxes(changes: dict[str, Any]) -> None:
    with holographic(3, window={"n_inputs": 8, "n_outputs": 50}, **changes) as twin:
        assert isinstance(twin.noise, PhotonCountNoise)
        rates, _ = boxes_hold(twin, binary_rows(8), tight=0.8)
    assert rates.shape == (6, 256, 50)


def test_counts_keep_their_exact_rates_at_any_light() -> None:
    """Field and reference come from one laser: all their light scales, and the frames of nothing tell no label."""
    with holographic() as twin:
        law, x = twin.count_law(torch.eye(20)[:3]), torch.eye(20)[:3]
        exposure = twin.exposure
        np.testing.assert_allclose(law.light_e + exposure.dark_e, twin.frame_rates(x), rtol=1e-12)
        np.testing.assert_array_equal(law.light_e[4:, 0], law.light_e[4:, 1])
        assert np.ptp(law.light_e[:4], axis=1).min() > 0
        bright = exposure.light_of(np.full(60, twin.speckle.law.mirrors * 2.0 * 2.0))
        np.testing.assert_allclose(law.light_e[4, 0], bright, rtol=1e-6)


def test_fluctuating_light_and_vibration_have_the_law_that_covers_them() -> None:
    with holographic(light={"power": POWER}) as unsteady:
        assert isinstance(unsteady.noise, FluctuatingCountNoise)
    x, told = torch.eye(20), "camera.vibration moves the light of all outputs"
    for vibration in ({"phase_rms_rad": 0.1}, {"pointing_rms_pixels": 0.05}):
        with holographic(vibration=vibration) as shaken:
            assert shaken.stated_noise is None
            refuses(NoiseUnknown, told, lambda twin=shaken: twin.noise)
            refuses(NoiseUnknown, told, shaken.count_law, x)
            refuses(NoiseUnknown, told, shaken.reading_variance, x)


def test_no_certificate_rests_on_frames_without_the_reference() -> None:
    with holographic(window={"n_outputs": 100}) as twin:
        certificate = calibrate(twin, plan=Plan(frames=32), readings=30).certificate
    assert certificate.noise is None
    assert any("no frame that is tested holds the reference's light" in text for text in certificate.remarks)


@pytest.mark.compiled
def test_a_vibrating_path_shrinks_the_matrix_and_its_phases_have_their_law(seed: int) -> None:
    s, count = 0.6, 4000
    with holographic(sensor=SILENT, vibration={"phase_rms_rad": s}) as shaken, holographic() as still:
        b, x = shaken.matrix(), ternary(1, 20, seed)
        ratio = float((b * still.matrix()).sum() / still.matrix().square().sum())
        assert abs(ratio - np.exp(-(s**2) / 2)) < 0.01
        y = shaken.project(x.expand(count, -1).contiguous()).double()
        errors = y.std(0) / count**0.5
        assert float(((y.mean(0) - (x @ b.T).double()[0]) / errors).abs().max()) < 6
        assert float(((y.mean(0) - (x @ still.matrix().T).double()[0]) / errors).abs().max()) > 6
    beam = ReferenceBeam(amplitude=2.0, steps=4, phase_rms=s, correlation=0.8)
    rest = ReferenceBeam(amplitude=2.0, steps=4).fields()
    shown = beam.shown(torch.zeros(2, 2 * count, 1).double(), noise_stream("experiment", seed, "path"))
    phases = torch.atan2(shown[1], shown[0])[..., 0].T.numpy()  # (rows, frames), in turn
    psi = np.angle(np.exp(1j * (phases - np.tile(np.arctan2(rest[1], rest[0]), 2)))).ravel()
    effective = psi.size * (1 - 0.8**2) / (1 + 0.8**2)
    assert abs(np.mean(psi**2) / s**2 - 1) < 5 * (2 / effective) ** 0.5
    follows = np.mean(psi[1:] * psi[:-1]) / np.mean(psi**2)
    assert abs(follows - 0.8) < 5 * ((1 - 0.8**2) / psi.size) ** 0.5 < abs(follows - 0.7)


BOTH = {"pixels": {"crosstalk": 0.1}, "vibration": {"pointing_rms_pixels": 0.1}}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("camera_holography", {"reference_beam": {"steps": 3}}, "a camera shows 6 for a ternary vector with"),
        ("camera_holography", {"reference_beam": {"steps": 5}}, "camera.reference_beam.steps"),
        ("camera_low_light", {"vibration": {"phase_rms_rad": 0.1}}, "is a phase to a reference beam"),
        ("camera_holography", {"reference_beam": {"flux_per_s": 30_000.0}}, "outputs are full in a frame"),
        ("camera_holography", {"speckle_modes": 2}, "= 2: a reference beam interferes with one mode"),
        ("camera_holography", BOTH, "both mix neighbouring pixels"),
    ],
)
def test_descriptions_that_cannot_be_are_refused_by_name(name: str, changes: dict, words: str) -> None:
    refuses(ConfigError, words, open_device, name, camera=changes, **PLACES)
