"""Cameras with a planted fault, or light of a named law: certified about the truth, or refused for what is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim import load_description, open_device
from opusim.calibration.calibrate import (
    Calibration,
    calibrate,
    codes_p_values,
    require_noise,
    tails,
    third_cumulants,
    without_power,
)
from opusim.calibration.photon_transfer import PhotonTransfer, Plan, take_photon_transfer
from opusim.calibration.reading_noise import cut_tails, independence_p_values
from opusim.camera.from_description import Laser
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import FluctuatingCountLaw, load_certificate
from opusim.errors import NoiseBelowCertificate
from opusim.noise import FluctuatingCountNoise
from opusim.p_values import FAMILY_ALARM
from opusim.randomness.streams import NoiseStream
from tests.opusim.common import refuses
from tests.support.planted_cameras import CAMERAS, PlantedCamera, SensorFault, half_variance

pytestmark = pytest.mark.compiled

LEVEL = FAMILY_ALARM / 2 / 16  # of one property of frames
WIDE = "12 bits in words of 16"
PLAN = Plan(frames=32, light_levels=8, dark_levels=3)
Counts = Any


def calibrated(fault: str, number: int = 1) -> Calibration:
    device = PlantedCamera(CAMERAS[fault], number, n_inputs=12, n_outputs=500, seed=number)
    with device.open():
        return calibrate(device, plan=PLAN, readings=40)


def refusal(found: Calibration) -> str:
    assert found.certificate.noise is None
    return next(text for text in found.certificate.remarks if text.startswith("no law is certified"))


@pytest.mark.slow
def test_a_sound_planted_camera_is_certified_beside_its_description() -> None:
    found = calibrated("sound").certificate
    assert found.noise is not None
    gain = found.estimates["gain_dn_per_e"]
    assert gain.described == 1.0
    assert gain.low < 1.0 < gain.high
    assert not [text for text in found.remarks if "by the description" in text]
    assert {entry.unit for entry in found.trust} >= {"of the variance", "readings", "of all"}


def test_more_electrons_than_photons_gamma_and_a_drifting_black_level_are_named() -> None:
    """Counts of half the variance pass for twice as many at half the gain: a quantum efficiency of 1.6."""
    found = calibrated("half of the Poisson variance")
    assert found.certificate.estimates["quantum_efficiency"].value == pytest.approx(1.6, rel=0.05)
    text = refusal(found)
    assert "the quantum efficiency is at least 1." in text
    assert "switch off the camera's noise reduction and check the meter" in text
    told = [text for text in found.certificate.remarks if "by the description" in text]
    assert any(text.startswith("quantum_efficiency is 1.6") for text in told)
    found = calibrated("drifting black level")
    text = refusal(found)
    assert "the black level does not vary from frame to frame" in text
    assert "light does not vary" not in text
    assert "black-level clamp" in text
    assert found.certificate.estimates["light_noise"].high < 0.01  # its variance is taken off
    # A falling variance line made statistics NaN, which ended in an error of the certificate's own fields.
    text = refusal(calibrated("gamma 0.45"))
    assert "switch off the camera's gamma" in text


@pytest.mark.parametrize("fault", [WIDE, pytest.param(f"{WIDE}, repeated", marks=pytest.mark.slow)])
def test_numbers_at_the_upper_end_of_wide_words_are_refused(fault: str) -> None:
    text = refusal(calibrated(fault))
    assert "every code of the converter occurs" in text
    assert "shifted to the lowest bits" in text
    assert ("all codes lie 16 apart" in text) == (fault == WIDE)


def series(random: np.random.Generator, counts: Counts = None, *, clip: float = np.inf) -> PhotonTransfer:
    """A flat series of a sensor of 400 electrons, gain 2 and no fixed pattern."""

    def take(count: int, photons: float = 0.0, exposure_us: float | None = None, **_: Any) -> np.ndarray:
        rate = 0.5 * photons + 6.0 * (exposure_us or 1e5) / 1e5
        rates = np.full((count, 800), rate)
        electrons = random.poisson(rates) if counts is None else counts(random, rates)
        electrons = np.clip(electrons, rate - clip * rate**0.5, rate + clip * rate**0.5)
        electrons = np.minimum(electrons, 400) + 1.5 * random.standard_normal(rates.shape)
        return np.rint(50 + 2 * electrons).astype(np.float32)

    return take_photon_transfer(take, Plan(frames=64, light_levels=8, dark_levels=3), exposure_us=1e5)


def cascade(random: np.random.Generator, rates: np.ndarray) -> np.ndarray:
    return random.poisson(random.poisson(rates)).astype(float)


def test_cumulants_tails_and_codes_of_counts_tell(seed: int) -> None:
    """Slopes of 2^0.5 and 1.25 times the gain, by theory; one of Poisson counts."""
    random = np.random.default_rng(seed)
    for counts, slope in ((None, 1.0), (half_variance, 2**0.5), (cascade, 1.25)):
        found = third_cumulants(series(random, counts))
        assert abs(found.ratio - slope) < 5 * found.error * max(slope, 1) ** 3
        assert (found.p_value < LEVEL) == (counts is not None)
    random = np.random.default_rng(seed)
    sound, cut = tails(series(random), False), tails(series(random, clip=3.0), False)
    assert sound.far_p_value > LEVEL > cut.far_p_value
    assert 2.0 < cut_tails(sound.limit, 64).size < 3.0 < sound.limit < 4.5
    assert min(codes_p_values(series(np.random.default_rng(seed))).values()) == 1.0


@pytest.mark.slow
def test_missing_noise_at_bright_inputs_of_a_camera_is_refused() -> None:
    """Above 60 electrons a pixel's counts keep a tenth of their deviation, in readings but not in flat frames."""

    class Dimmed(PlantedCamera):
        def _read_rows(self, y: Any, x: Any) -> None:
            self._fault = SensorFault(counts=quiet)
            self.__dict__.pop("exposure", None)
            super()._read_rows(y, x)
            self._fault = SensorFault()
            self.__dict__.pop("exposure", None)

    def quiet(random: np.random.Generator, rates: np.ndarray) -> np.ndarray:
        return np.where(rates > 60, rates + 0.1 * (random.poisson(rates) - rates), random.poisson(rates))

    with Dimmed(None, 3, n_inputs=12, n_outputs=500, seed=3).open() as device:
        text = refusal(calibrate(device, plan=PLAN, readings=40))
    assert "readings of every input are as noisy as flat frames state" in text


@pytest.mark.slow
def test_a_constant_that_frames_do_not_tell_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dark current of 0 has no doubling: NaN ended in an error of the certificate's own fields."""
    plain = PhotonTransfer.estimates

    def without(self: PhotonTransfer, confidence: float) -> dict[str, Any]:
        found = plain(self, confidence)
        nan = type(found["prnu"])(value=np.nan, low=np.nan, high=np.nan)
        return found | {"doubling_k": nan}

    monkeypatch.setattr(PhotonTransfer, "estimates", without)
    found = calibrated("sound").certificate
    assert "doubling_k" not in found.estimates
    assert "no doubling_k: frames do not tell it" in found.remarks


@pytest.mark.slow
def test_few_noisy_pixels_are_not_taken_for_a_saturated_sensor() -> None:
    """The noise of pilot frames of a warm sensor passed for light that no longer doubles."""
    warm = {"dark": {"temperature_c": 60.0}}
    with open_device("camera_low_light", n_inputs=2, n_outputs=80, seed=1, camera=warm) as device:
        for _ in range(10):
            photons = [level.photons for level in _light_levels(device)]
            assert max(photons) == pytest.approx(20 * 4000 / 0.8, rel=0.5)


def _light_levels(device: Any) -> Any:
    plan = Plan(frames=2, light_levels=6, dark_levels=3)
    return take_photon_transfer(device.flat_frames, plan, exposure_us=200_000.0).light.levels


@pytest.mark.slow
@pytest.mark.parametrize("name", ["camera", "camera_low_light", "gaussian"])
def test_three_hundred_sound_calibrations_are_refused_at_the_stated_rate(name: str, seed: int) -> None:
    """All tests of a calibration share one level: at 5 %, at most 24 of 300 sound ones may fail any of them."""
    alarms = 0
    for number in range(300):
        medium: dict[str, Any] = {} if name == "gaussian" else {"medium": {"seed": number}}
        with open_device(name, n_inputs=12, n_outputs=400, seed=seed + number, **medium) as device:
            plan = Plan(frames=16, light_levels=8, dark_levels=3)
            tests = calibrate(device, plan=plan, readings=40).certificate.tests
        needed = [test.standard_errors for test in tests if test.needed]
        alarms += max(needed) > _deviate(0.05 / len(needed))
    assert alarms <= 24


def _deviate(p_value: float) -> float:
    from scipy.special import ndtri

    return -float(ndtri(p_value / 2))


FRAMES = Plan(frames=64)


class OtherLaser(Laser):
    fault = ""  # correlated, heavy (one frame in ten is six times as far off), or anchor (brighter frames vary more)

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


class OddCamera(CameraDevice):  # a camera with noise that all outputs of a frame share and that is no light
    offset_dn = 0.0
    odd = np.random.default_rng(5)

    def anchor_frames(self, count: int) -> np.ndarray:
        return super().anchor_frames(count) + self._offset(count)

    def flat_frames(self, count: int, **level: Any) -> np.ndarray:
        return super().flat_frames(count, **level) + self._offset(count)

    def _offset(self, count: int) -> np.ndarray:
        return np.rint(self.offset_dn * self.odd.standard_normal((count, 1))).astype(np.float32)


def powered(
    seed: int, fault: str = "", offset_dn: float = 0.0, outputs: int = 500, beta: float = 1e-6, **power: Any
) -> tuple[Calibration, CameraDevice]:
    settings = {"law": "log_normal", "rms": 0.01} | power
    description = load_description("camera_low_light", {"camera": {"light": {"power": settings}}})
    device = OddCamera(description, n_inputs=12, n_outputs=outputs, seed=seed)
    device.offset_dn, device.odd = offset_dn, np.random.default_rng([seed, 5])
    laser = OtherLaser.__new__(OtherLaser)
    vars(laser).update(vars(device._laser) | {"fault": fault})
    device._laser = laser
    with device:
        return calibrate(device, plan=FRAMES, readings=100, beta=beta), device


def failures(found: Calibration) -> str:
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
    found, device = powered(seed, law=power_law, rms=rms)
    law = found.certificate.noise
    assert covers(law, device, rms), failures(found)
    printed = found.certificate.estimates["light_noise"]
    assert (printed.low, printed.high) == (law.power_rms_low, law.power_rms_high)
    shared = law.dark_of_groups(16)
    assert shared[0] < device.exposure.dark_current_e < shared[1]
    assert 0 < 4 * shared[2] < law.dark_e_high - law.dark_mean_e_high + 1e-9
    assert law.power_rms_high < 1.4 * rms
    assert law.light_ratio_high < 1.15
    assert any("assumed law: given the light's power" in remark for remark in found.certificate.remarks)


def test_a_certificate_is_written_read_and_attached(tmp_path: Path, seed: int) -> None:
    found, device = powered(seed)
    found.certificate.write(tmp_path / "c.toml")
    read = load_certificate(tmp_path / "c.toml")
    assert read == found.certificate
    with device:
        described = device.noise
        device.attach_certificate(read)
        noise = device.noise
        assert isinstance(noise, FluctuatingCountNoise)
        assert noise.beta == 1e-6
        assert noise.power_rms > described.power_rms
        assert np.all(np.asarray(noise.rate_low) < np.asarray(described.rate_low))
        assert np.all(np.asarray(noise.rate_high) > np.asarray(described.rate_high))
    require_noise(read, found)
    louder, _ = powered(seed, rms=0.02)
    refuses(NoiseBelowCertificate, r"rms, certified is log_normal of at most", require_noise, read, louder)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("correlated", "the power of a frame does not follow from earlier ones"),
        pytest.param("heavy", "the power of a frame is log-normal", marks=pytest.mark.slow),
        pytest.param("anchor", "the power has one spread at every light", marks=pytest.mark.slow),
    ],
)
def test_a_power_of_another_law_is_refused_by_name(fault: str, text: str, seed: int) -> None:
    found, _ = powered(seed, fault=fault)
    assert found.certificate.noise is None
    assert text in failures(found)


@pytest.mark.slow
def test_common_noise_that_is_no_light_is_refused(seed: int) -> None:
    found, _ = powered(seed, offset_dn=3.0)
    assert found.certificate.noise is None
    assert "outputs do not correlate" in failures(found)


@pytest.mark.slow
def test_light_that_drifts_is_refused_by_name(seed: int) -> None:
    found, _ = powered(seed, drift_rms=0.01, drift_s=1e4, seconds_per_step=1.0)
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
        found, device = powered(seed + number, outputs=128, beta=0.05)
        if failures(found):
            refused += 1
        else:
            missed += not covers(found.certificate.noise, device, 0.01)
    assert refused <= FAMILY_ALARM * runs + 5 * (FAMILY_ALARM * runs) ** 0.5
    assert missed <= 0.05 * runs + 5 * (0.05 * 0.95 * runs) ** 0.5
