"""Cameras whose light or dark charge varies over frames or outputs: constants stay right, or no law is certified."""

from typing import Any

import numpy as np
import pytest
import torch

from opusim import load_description, open_device
from opusim.calibration.calibrate import Calibration, calibrate
from opusim.calibration.frames import Level, jackknife, sums_of, take_series
from opusim.calibration.photon_transfer import LightNoise, PhotonTransfer, Plan
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import PhotonCountLaw
from tests.opusim.common import changed, refuses

pytestmark = pytest.mark.compiled

PLAN = Plan(frames=32)
NAMES = pytest.mark.parametrize("name", [pytest.param("camera", marks=pytest.mark.slow), "camera_low_light"])
SIGNS = np.array([1.0, -1.0, -1.0, 1.0])  # of the four frames of a reading
STEADY = "light does not vary from frame to frame"


def anchor_at(device: CameraDevice, light: np.ndarray) -> np.ndarray:
    """Frames of the anchor whose light is multiplied by a factor of each frame and output."""
    field = torch.from_numpy(device.speckle.anchor.astype(np.float32))[:, None, :]
    return device.exposure.expose(field * torch.from_numpy(np.sqrt(light)).float(), device._stream).numpy()


class UnsteadyCamera(CameraDevice):
    spread = 0.0  # of the light of each frame, relative
    where = ("flat", "anchor", "project")  # sources of light that vary, each by itself
    by_pixel = False  # each pixel's light varies by itself
    power = np.random.default_rng(3)

    def drawn(self, *shape: int) -> np.ndarray:
        return np.maximum(1 + self.spread * self.power.standard_normal(shape), 0)

    def flat_frames(self, count: int, *, photons: float = 0.0, **level: object) -> np.ndarray:
        if "flat" not in self.where or photons == 0 or self.spread == 0:
            return super().flat_frames(count, photons=photons, **level)
        if self.by_pixel:
            frames = super().flat_frames(count, photons=photons, **level)
            light = photons * self.exposure.light.quantum_efficiency * self.exposure.sensor.gain_dn_per_e
            return np.rint(frames + light * (self.drawn(*frames.shape) - 1)).astype(np.float32)
        one = super().flat_frames
        return np.concatenate([one(1, photons=photons * float(w), **level) for w in self.drawn(count)])

    def anchor_frames(self, count: int) -> np.ndarray:
        if "anchor" not in self.where:
            return super().anchor_frames(count)
        return anchor_at(self, self.drawn(count, 1))

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        y = super()._project(x)
        if "project" not in self.where or self.spread == 0:
            return y
        light = self.frame_rates(x) - self.exposure.dark_e  # (4, batch, n_outputs)
        change = (SIGNS[:, None, None] * (self.drawn(4, len(x), 1) - 1) * light).sum(0)
        change *= self.exposure.sensor.gain_dn_per_e * self.recovery.decode()[0]
        return y + torch.from_numpy(change).float()


def calibrated(name: str, seed: int, **faults: object) -> tuple[Calibration, UnsteadyCamera]:
    with UnsteadyCamera(load_description(name), n_inputs=12, n_outputs=1000, seed=seed) as device:
        for key, value in (faults | {"power": np.random.default_rng([seed, 3])}).items():
            setattr(device, key, value)
        return calibrate(device, plan=PLAN, readings=100), device


def failed(found: Calibration) -> list[str]:
    return [test.text for test in found.certificate.tests if test.needed and not test.holds]


@NAMES
def test_unsteady_light_is_measured_and_gets_no_certificate(name: str, seed: int) -> None:
    spread = 0.01 if name == "camera" else 0.003
    found, device = calibrated(name, seed, spread=spread)
    assert found.certificate.noise is None
    assert any(STEADY in text for text in failed(found))
    assert any(text.startswith("frames: outputs do not correlate") for text in failed(found))
    estimates, sensor = found.certificate.estimates, device.exposure.sensor
    light = estimates["light_noise"]
    assert 0.8 * spread < light.value < 1.2 * spread
    assert spread < light.high < 1.6 * spread
    for key in ("gain_dn_per_e", "read_noise_e"):
        width = estimates[key].high - estimates[key].low
        assert abs(estimates[key].value - getattr(sensor, key)) < 2 * width, key
    assert any("no law is certified" in remark for remark in found.certificate.remarks)


@pytest.mark.parametrize(
    "where", ["anchor", *(pytest.param(w, marks=pytest.mark.slow) for w in ("flat", "project"))]
)
def test_each_source_of_unsteady_light_is_seen_by_itself(where: str, seed: int) -> None:
    found, _ = calibrated("camera", seed, spread=0.01, where=(where,))
    assert found.certificate.noise is None
    assert any(("outputs do not" if where == "project" else STEADY) in text for text in failed(found))


@pytest.mark.slow
def test_steady_light_is_certified_about_the_truth(seed: int) -> None:
    for name in ("camera", "camera_low_light"):
        found, device = calibrated(name, seed)
        law = found.certificate.noise
        assert law is not None, failed(found)
        assert law.light_ratio_low < 1 < law.light_ratio_high
        assert law.dark_e_low < device.exposure.dark_current_e < law.dark_e_high
        assert found.certificate.estimates["light_noise"].high < 1e-3


def test_bent_transfers_and_drifts_are_seen_and_a_steady_drift_moves_no_slope(seed: int) -> None:
    """Light that varies at each pixel by itself: nothing is common, only the curvature tells."""
    found, _ = calibrated("camera_low_light", seed, spread=0.03, by_pixel=True, where=("flat",))
    assert found.certificate.noise is None
    assert any(text.startswith("the variance is a straight line in the mean") for text in failed(found))
    # Levels are visited there and back, so a linear drift in time does not look like dark current.
    still, drifting = (transfer_of(seed, drift_dn=d) for d in (0.0, 2.0))
    slopes = [np.polyfit(np.arange(6), part.dark.means(), 1)[0] for part in (still, drifting)]
    assert abs(slopes[1] - slopes[0]) < 0.1  # a drift of 2 DN a level, unseen, adds 2
    assert drifting.light_noise().p_value < 1e-9 < 1e-5 < still.light_noise().p_value


def transfer_of(seed: int, spread: float = 0, *, common: bool = True, drift_dn: float = 0, dark: float = 0):
    """Photon transfer of Gaussian counts of gain 1, 500 electrons a level, with dark levels at 20."""
    random, time = np.random.default_rng(seed), [0]
    dark_rate = 1e-3 * (1 + dark * random.standard_normal(400))

    def take(count: int, *, photons: float, exposure_us: float | None = None, **_: object) -> np.ndarray:
        time[0] += 1
        light = photons * (1 + spread * random.standard_normal((count, 1 if common else 400)))
        rate = np.broadcast_to(light + 20 + dark_rate * float(exposure_us or 0), (count, 400))
        frames = rate + np.sqrt(np.maximum(rate, 0)) * random.standard_normal(rate.shape)
        return np.minimum(frames + drift_dn * time[0], 20000.0)

    lights = [Level(photons=float(p), exposure_us=1.0) for p in [*np.linspace(0, 5000, 11), 1e6]]
    levels = [Level(photons=100.0, exposure_us=float(t)) for t in np.linspace(1e3, 1e5, 6)]
    light, dark_series = (take_series(take, each, frames=16) for each in (lights, levels))
    return PhotonTransfer(light=light, dark=dark_series, exposure_us=1.0, is_rounded=False)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [400])
def test_limits_hold_at_their_rate_whatever_the_light_does(runs: int, seed: int) -> None:
    """A gain of 1 under light of 2 %, common to all pixels or of each pixel; the straight line misses the latter."""
    confidence = 0.9
    tolerance = 5 * (confidence * (1 - confidence) / runs) ** 0.5
    for common in (True, False):
        hits = []
        for number in range(runs):
            transfer = transfer_of(seed + number, 0.02, common=common)
            found = transfer._jackknife(confidence)
            hits.append((found["unbent_gain"].covers(1.0), found["gain_dn_per_e"].covers(1.0)))
        unbent_rate, straight_rate = np.mean(hits, axis=0)
        assert abs(unbent_rate - confidence) < tolerance, (common, unbent_rate)
        assert bool(abs(straight_rate - confidence) < tolerance) is common, straight_rate


def test_dark_levels_off_their_line_and_uneven_dark_current_are_seen(seed: int) -> None:
    text = "the dark mean is a straight line in the exposure"
    steady, varying = (transfer_of(seed, spread).property_p_values()[text] for spread in (0.0, 0.5))
    assert varying["residuals"] < 1e-9 < 1e-5 < steady["residuals"]
    # The certified dark charge is a mean; a pixel with less would be less private.
    text = "dark current is the same at all pixels"
    same, varied = (transfer_of(seed, dark=spread).property_p_values()[text] for spread in (0.0, 0.2))
    assert varied["spread over pixels"] < 1e-6 < 1e-5 < same["spread over pixels"]


@pytest.mark.slow
def test_the_upper_limit_of_light_noise_is_passed_as_rarely_as_it_says(seed: int) -> None:
    random, runs, beta = np.random.default_rng(seed), 2000, 0.05
    own, light, spread = np.array([0.01, 0.03, 0.1]), np.array([10.0, 40.0, 100.0]), 0.003
    freedom = np.array([15, 15, 31])
    passed, alarms, limits = 0, 0, []
    for _ in range(runs):
        chi2 = random.chisquare(freedom) / freedom
        settings = {"freedom": freedom, "own": own, "light": light}
        noisy = LightNoise(frame_variances=chi2 * (own + np.square(spread * light)), **settings)
        still = LightNoise(frame_variances=chi2 * own, freedom=freedom, own=own, light=light)
        limits.append(noisy.upper(beta))
        passed += limits[-1] < spread
        alarms += still.p_value < beta
    tolerance = 5 * (beta * (1 - beta) / runs) ** 0.5
    assert abs(passed / runs - beta) < tolerance
    assert abs(alarms / runs - beta) < tolerance
    assert np.mean(np.array(limits) < 1.2 * spread) > beta + tolerance  # planted: a truth that is larger


def test_sums_of_series_are_those_of_halves_and_groups(seed: int) -> None:
    """Two halves put together are the variance over all frames, frame means taken off."""
    random = np.random.default_rng(seed)
    frames = random.standard_normal((11, 90)) + 5 * random.standard_normal((11, 1))
    parts = iter([frames[:6], frames[6:]])
    series = take_series(lambda count, **level: next(parts), [Level(photons=0.0)], frames=11, groups=10)
    rest = frames - frames.mean(axis=1, keepdims=True)
    assert series.variances()[0] == pytest.approx(rest.var(axis=0, ddof=1).mean() * 90 / 89)
    assert series.means()[0] == pytest.approx(frames.mean())
    found = jackknife(series.sums[:, 0], lambda total: {"v": total[2] / total[0]}, confidence=0.999)["v"]
    assert found.covers(1.0)
    frames = np.random.default_rng(seed).standard_normal((9, 120))
    parts = iter([frames[:4], frames[4:]])
    whole = take_series(lambda count, **level: next(parts), [Level(photons=0.0)], frames=8, groups=10)
    found = sums_of(frames, np.arange(120), 10)
    np.testing.assert_allclose(found[:, :2], whole.sums[:, 0, :2])
    kept = np.flatnonzero(np.arange(120) % 7)
    found = sums_of(frames, kept, 10)
    means = frames[:, kept].mean(axis=0)
    np.testing.assert_allclose(found[:, 1], [means[kept % 10 == group].sum() for group in range(10)])
    rest = frames[:, kept] - frames[:, kept].mean(axis=1, keepdims=True)
    wanted = rest.var(axis=0, ddof=1).mean() * kept.size / (kept.size - 1)
    assert found[:, 2].sum() / kept.size == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["camera", "camera_low_light"])
def test_steady_cameras_are_refused_at_the_stated_rate_at_most(name: str, seed: int) -> None:
    """Of 300 sensors each: no refusal, and limits that cover the truth."""
    least = []
    for number in range(300):
        found, device = calibrated(name, seed + number)
        law = found.certificate.noise
        assert law is not None, (number, failed(found))
        assert law.light_ratio_low < 1 < law.light_ratio_high
        assert law.dark_e_low < device.exposure.dark_current_e < law.dark_e_high
        least.append(max(test.standard_errors for test in found.certificate.tests if test.needed))
    from scipy.stats import norm

    tests = sum(test.needed for test in found.certificate.tests)
    rate = np.mean(2 * norm.sf(np.array(least)) * tests < 0.05)
    assert rate < 0.05 + 5 * (0.05 * 0.95 / 300) ** 0.5


SPREAD = "the anchor's light is spread over the outputs as described"
VARIANCE = "the anchor's variance lies on the line of flat frames"
DARK = "dark current is the same at all pixels"
LOST_DN, COLD = 7.0, 3


class LowBlackLevel(CameraDevice):
    """The black level lies 3 DN below the converter's lower end, where blank frames are clipped."""

    def flat_frames(self, count: int, **level: float | None) -> np.ndarray:
        return np.maximum(super().flat_frames(count, **level) - LOST_DN, 0)

    def anchor_frames(self, count: int) -> np.ndarray:
        return np.maximum(super().anchor_frames(count) - LOST_DN, 0)


class OtherAnchor(CameraDevice):  # the anchor's light is multiplied by a factor of each frame and output
    def light(self, count: int) -> np.ndarray:
        raise NotImplementedError

    def anchor_frames(self, count: int) -> np.ndarray:
        return anchor_at(self, self.light(count))


def one_bright_output(self: CameraDevice, count: int) -> np.ndarray:
    factors = np.ones((count, self.n_outputs))
    factors[:, 7] = 1.25
    return factors


def boiling(self: CameraDevice, count: int) -> np.ndarray:
    return 1 + 0.06 * np.random.default_rng(5).standard_normal((count, self.n_outputs))


EDGE = {"light": lambda self, count: np.linspace(0.9, 1.1, self.n_outputs)[None].repeat(count, axis=0)}
Vignetting = changed(OtherAnchor, **EDGE)  # the beam is brighter on one side, with the described mean
OneBrightOutput = changed(OtherAnchor, light=one_bright_output)
BoilingMedium = changed(
    OtherAnchor, light=boiling
)  # light varies at each output by itself from frame to frame


class ColdPixels(CameraDevice):  # a few pixels have no dark current
    def flat_frames(self, count: int, **level: float | None) -> np.ndarray:
        frames = super().flat_frames(count, **level)
        dark_free = super().flat_frames(count, **level | {"exposure_us": 1.0})
        frames[:, :COLD] = dark_free[:, :COLD]
        return frames


def calibration_of(
    kind: type, name: str, seed: int, frames: int = 32, outputs: int = 1000, **sections: Any
) -> Any:
    with kind(load_description(name, dict(sections)), n_inputs=12, n_outputs=outputs, seed=seed) as device:
        return calibrate(device, plan=Plan(frames=frames), readings=60)


@pytest.mark.slow
def test_a_clipped_black_level_moves_no_limit(seed: int) -> None:
    """The blank frames' mean, 3 DN too high, would hide 6 % of the anchor's light."""
    found = calibration_of(LowBlackLevel, "camera", seed, frames=128, outputs=2000)
    law = found.certificate.noise
    assert law is not None, failed(found)
    assert law.light_ratio_low < 1 < law.light_ratio_high
    anchor_dn = 48.0
    assert law.light_ratio_high * (1 - 3 / anchor_dn) < 1  # planted: with the clipped frames' mean taken off


@NAMES
@pytest.mark.parametrize("kind", [pytest.param(Vignetting, marks=pytest.mark.slow), OneBrightOutput])
def test_light_spread_otherwise_earns_no_law_of_an_outputs_light(kind: type, name: str, seed: int) -> None:
    found = calibration_of(kind, name, seed).certificate
    assert [test.text for test in found.tests if not test.holds and test.text.startswith(SPREAD)]
    law = found.noise
    assert isinstance(law, PhotonCountLaw)
    assert law.light_spread == "unknown"
    assert law.gain_dn_per_e_low < load_description(name).camera.sensor.gain_dn_per_e < law.gain_dn_per_e_high  # type: ignore[union-attr,operator]
    with open_device(name, n_inputs=4, n_outputs=30) as device:
        described = device.described_noise
        assert np.min(found.certified(described).rate_high) > 1e11  # type: ignore[attr-defined]
    assert any("protection.rate_frames" in remark for remark in found.remarks)


def test_light_that_varies_at_each_output_by_itself_is_refused(seed: int) -> None:
    """Nothing correlates: the variance tells, and means scatter by more than their frames' noise."""
    found = calibration_of(BoilingMedium, "camera", seed)
    assert found.certificate.noise is None
    assert f"{VARIANCE} (excess)" in failed(found)


@NAMES
def test_a_few_pixels_without_dark_current_are_refused(name: str, seed: int) -> None:
    found = calibration_of(ColdPixels, name, seed)
    assert found.certificate.noise is None
    assert any(text.startswith(DARK) for text in failed(found))


@NAMES
def test_a_sound_camera_is_certified_also_where_the_anchor_is_clipped(name: str, seed: int) -> None:
    """A tenth of the outputs may be full; they are left out, so that the mean is not understated."""
    gain = {"camera": 0.045, "camera_low_light": 8.0}[name]
    full = {"sensor": {"gain_dn_per_e": gain}, "anchor": {"most_saturated": 0.2}}
    found = calibration_of(CameraDevice, name, seed, camera=full)
    law = found.certificate.noise
    assert law is not None, failed(found)
    assert law.light_ratio_low < 1 < law.light_ratio_high


def test_the_smallest_beta_that_is_taken_gives_limits(seed: int) -> None:
    with CameraDevice(load_description("camera"), n_inputs=12, n_outputs=1000, seed=seed) as device:
        refuses(ValueError, "beta = 5e-12", calibrate, device, plan=Plan(frames=32), readings=30, beta=5e-12)
        law = calibrate(device, plan=Plan(frames=32), readings=30, beta=1e-11).certificate.noise
    assert law.light_ratio_low < 1 < law.light_ratio_high
