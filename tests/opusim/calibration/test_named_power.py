"""Certificates under a light whose law is named: certified about the truth, or refused for what is wrong with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim.calibration.calibrate import Calibration, calibrate, require_noise, without_power
from opusim.calibration.photon_transfer import Plan
from opusim.calibration.reading_noise import independence_p_values
from opusim.camera.from_description import Laser
from opusim.description.schema import load_description
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import FluctuatingCountLaw, load_certificate
from opusim.errors import NoiseBelowCertificate
from opusim.noise import FluctuatingCountNoise
from opusim.p_values import FAMILY_ALARM
from opusim.randomness.streams import NoiseStream

pytestmark = pytest.mark.compiled

PLAN = Plan(frames=64)


class OtherLaser(Laser):
    """A laser that is not as the description says.

    Attributes:
        fault: correlated, heavy (one frame in ten is six times as far off), or anchor (brighter frames vary more).
    """

    fault = ""

    def powers(self, frames: int, stream: NoiseStream) -> np.ndarray:
        w = super().powers(frames, stream)
        more = stream.normal((frames,)).double().numpy()
        if self.fault == "correlated":
            w[1:] = 1 + 0.8 * (w[1:] - 1) + 0.6 * (w[:-1] - 1)
        if self.fault == "heavy":
            w = 1 + (w - 1) * np.where(more > 1.2, 6.0, 1.0)
        if self.fault == "anchor" and frames == 100:
            w = 1 + 2 * (w - 1)
        return w


class OddCamera(CameraDevice):
    """A camera with noise that all outputs of a frame share and that is no light."""

    offset_dn = 0.0
    odd = np.random.default_rng(5)

    def anchor_frames(self, count: int) -> np.ndarray:
        return super().anchor_frames(count) + self._offset(count)

    def flat_frames(self, count: int, **level: Any) -> np.ndarray:
        return super().flat_frames(count, **level) + self._offset(count)

    def _offset(self, count: int) -> np.ndarray:
        return np.rint(self.offset_dn * self.odd.standard_normal((count, 1))).astype(np.float32)


def calibrated(
    seed: int,
    *,
    fault: str = "",
    offset_dn: float = 0.0,
    outputs: int = 500,
    beta: float = 1e-6,
    **power: Any,
) -> tuple[Calibration, CameraDevice]:
    settings = {"law": "log_normal", "rms": 0.01} | power
    description = load_description("camera_low_light", {"camera": {"light": {"power": settings}}})
    device = OddCamera(description, n_inputs=12, n_outputs=outputs, seed=seed)
    device.offset_dn, device.odd = offset_dn, np.random.default_rng([seed, 5])
    assert device._laser is not None
    laser = OtherLaser.__new__(OtherLaser)
    vars(laser).update(vars(device._laser) | {"fault": fault})
    device._laser = laser
    with device:
        return calibrate(device, plan=PLAN, readings=100, beta=beta), device


def failed(found: Calibration) -> str:
    return "; ".join(test.text for test in found.certificate.tests if test.needed and not test.holds)


def covers(law: object, device: CameraDevice, rms: float) -> bool:
    assert isinstance(law, FluctuatingCountLaw), law
    dark = device.exposure.dark_current_e
    return (
        law.power_rms_low < rms < law.power_rms_high
        and law.light_ratio_low < 1 < law.light_ratio_high
        and law.dark_e_low < dark < law.dark_e_high
    )


@pytest.mark.parametrize("power_law", ["log_normal", pytest.param("gaussian", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rms", [0.003, pytest.param(0.03, marks=pytest.mark.slow)])
def test_light_of_a_named_law_is_certified_about_the_truth(power_law: str, rms: float, seed: int) -> None:
    found, device = calibrated(seed, law=power_law, rms=rms)
    law = found.certificate.noise
    assert covers(law, device, rms), failed(found)
    assert isinstance(law, FluctuatingCountLaw)
    printed = found.certificate.estimates["light_noise"]
    assert (printed.low, printed.high) == (law.power_rms_low, law.power_rms_high)
    shared = law.dark_of_groups(16)
    assert shared[0] < device.exposure.dark_current_e < shared[1]
    assert 0 < 4 * shared[2] < law.dark_e_high - law.dark_mean_e_high + 1e-9
    assert law.power_rms_high < 1.4 * rms
    assert law.light_ratio_high < 1.15
    assert any("assumed law: given the light's power" in remark for remark in found.certificate.remarks)


def test_a_certificate_is_written_read_and_attached(tmp_path: Path, seed: int) -> None:
    found, device = calibrated(seed)
    found.certificate.write(tmp_path / "c.toml")
    read = load_certificate(tmp_path / "c.toml")
    assert read == found.certificate
    with device:
        described = device.noise
        device.attach_certificate(read)
        noise = device.noise
        assert isinstance(noise, FluctuatingCountNoise)
        assert isinstance(described, FluctuatingCountNoise)
        assert noise.beta == 1e-6
        assert noise.power_rms > described.power_rms
        assert np.all(np.asarray(noise.rate_low) < np.asarray(described.rate_low))
        assert np.all(np.asarray(noise.rate_high) > np.asarray(described.rate_high))
    require_noise(read, found)
    louder, _ = calibrated(seed, rms=0.02)
    with pytest.raises(NoiseBelowCertificate, match=r"rms, certified is log_normal of at most"):
        require_noise(read, louder)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("correlated", "the power of a frame does not follow from earlier ones"),
        pytest.param("heavy", "the power of a frame is log-normal", marks=pytest.mark.slow),
        pytest.param("anchor", "the power has one spread at every light", marks=pytest.mark.slow),
    ],
)
def test_a_power_of_another_law_is_refused_by_name(fault: str, text: str, seed: int) -> None:
    found, _ = calibrated(seed, fault=fault)
    assert found.certificate.noise is None
    assert text in failed(found)


@pytest.mark.slow
def test_common_noise_that_is_no_light_is_refused(seed: int) -> None:
    found, _ = calibrated(seed, offset_dn=3.0)
    assert found.certificate.noise is None
    assert "outputs do not correlate" in failed(found)


@pytest.mark.slow
def test_light_that_drifts_is_refused_by_name(seed: int) -> None:
    found, _ = calibrated(seed, drift_rms=0.01, drift_s=1e4, seconds_per_step=1.0)
    assert found.certificate.noise is None
    assert any("light.power.drift_rms" in remark for remark in found.certificate.remarks)


def test_only_the_power_is_taken_off(seed: int) -> None:
    """Poisson counts under a power: independent once it is off. Without that, or with a pair of copies: not."""
    random = np.random.default_rng(seed)
    light = random.exponential(300.0, (1, 300)) + 30

    def p_value(frames: np.ndarray, *, steady: bool = True) -> float:
        parts = [without_power(frames, light, light)] if steady else [frames]
        return min(min(found.values()) for found in independence_p_values(parts, ranked=True).values())

    power = 1 + 0.02 * random.standard_normal((200, 1))
    frames = random.poisson(power * light).astype(np.float64)
    assert p_value(frames) > 1e-5
    assert p_value(frames, steady=False) < 1e-9
    copies = np.array(frames)
    copies[:, 1] = np.rint(copies[:, 0] * light[0, 1] / light[0, 0])
    assert p_value(copies) < 1e-9
    assert p_value(frames + 3 * random.standard_normal((200, 1))) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("runs", [400])
def test_limits_hold_together_at_the_stated_rate(runs: int, seed: int) -> None:
    """At beta = 0.05, 128 outputs; failures are at most binomial, since Bonferroni's share is an upper limit.

    A sound calibration is refused with probability FAMILY_ALARM at most, and then states no limits.
    """
    missed = refused = 0
    for number in range(runs):
        found, device = calibrated(seed + number, outputs=128, beta=0.05)
        if failed(found):
            refused += 1
        else:
            missed += not covers(found.certificate.noise, device, 0.01)
    assert refused <= FAMILY_ALARM * runs + 5 * (FAMILY_ALARM * runs) ** 0.5
    assert missed <= 0.05 * runs + 5 * (0.05 * 0.95 * runs) ** 0.5
