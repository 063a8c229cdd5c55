"""Faults that a mean over outputs hides from certified light and dark charge: each is refused, or moves no limit."""

import numpy as np
import pytest
import torch

from opusim.calibration.calibrate import Calibration, calibrate
from opusim.calibration.frames import Level, sums_of, take_series
from opusim.calibration.photon_transfer import Plan
from opusim.description.schema import load_description
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import PhotonCountLaw
from opusim.devices.registry import open_device

pytestmark = pytest.mark.compiled

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


class OtherAnchor(CameraDevice):
    """The anchor's light is multiplied by a factor of each frame and output."""

    def light(self, count: int) -> np.ndarray:
        raise NotImplementedError

    def anchor_frames(self, count: int) -> np.ndarray:
        field = torch.from_numpy(self.speckle.anchor.astype(np.float32))[:, None, :]
        roots = torch.from_numpy(np.sqrt(self.light(count)).astype(np.float32))
        return self.exposure.expose(field * roots, self._stream).numpy()


class Vignetting(OtherAnchor):
    """The beam is brighter on one side, with the described mean."""

    def light(self, count: int) -> np.ndarray:
        return np.broadcast_to(np.linspace(0.9, 1.1, self.n_outputs), (count, self.n_outputs))


class OneBrightOutput(OtherAnchor):
    """One output sees a quarter more light than described."""

    def light(self, count: int) -> np.ndarray:
        factors = np.ones((count, self.n_outputs))
        factors[:, 7] = 1.25
        return factors


class BoilingMedium(OtherAnchor):
    """The light of each output varies by itself from frame to frame."""

    def light(self, count: int) -> np.ndarray:
        return 1 + 0.06 * np.random.default_rng(5).standard_normal((count, self.n_outputs))


class ColdPixels(CameraDevice):
    """A few pixels have no dark current."""

    def flat_frames(self, count: int, **level: float | None) -> np.ndarray:
        frames = super().flat_frames(count, **level)
        dark_free = super().flat_frames(count, **level | {"exposure_us": 1.0})
        frames[:, :COLD] = dark_free[:, :COLD]
        return frames


def calibrated(
    kind: type[CameraDevice],
    name: str,
    seed: int,
    *,
    frames: int = 32,
    outputs: int = 1000,
    **sections: object,
) -> Calibration:
    with kind(load_description(name, dict(sections)), n_inputs=12, n_outputs=outputs, seed=seed) as device:
        return calibrate(device, plan=Plan(frames=frames), readings=60)


def failed(found: Calibration) -> list[str]:
    return [test.text for test in found.certificate.tests if test.needed and not test.holds]


@pytest.mark.slow
def test_a_clipped_black_level_moves_no_limit(seed: int) -> None:
    """The blank frames' mean, 3 DN too high, would hide 6 % of the anchor's light."""
    found = calibrated(LowBlackLevel, "camera", seed, frames=128, outputs=2000)
    law = found.certificate.noise
    assert law is not None, failed(found)
    assert law.light_ratio_low < 1 < law.light_ratio_high
    anchor_dn = 48.0
    assert law.light_ratio_high * (1 - 3 / anchor_dn) < 1  # planted: with the clipped frames' mean taken off


@pytest.mark.parametrize("name", [pytest.param("camera", marks=pytest.mark.slow), "camera_low_light"])
@pytest.mark.parametrize("kind", [pytest.param(Vignetting, marks=pytest.mark.slow), OneBrightOutput])
def test_light_that_is_spread_in_another_way_earns_no_law_of_an_outputs_light(
    kind: type[CameraDevice], name: str, seed: int
) -> None:
    found = calibrated(kind, name, seed).certificate
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
    found = calibrated(BoilingMedium, "camera", seed)
    assert found.certificate.noise is None
    assert f"{VARIANCE} (excess)" in failed(found)


@pytest.mark.parametrize("name", [pytest.param("camera", marks=pytest.mark.slow), "camera_low_light"])
def test_a_few_pixels_without_dark_current_are_refused(name: str, seed: int) -> None:
    found = calibrated(ColdPixels, name, seed)
    assert found.certificate.noise is None
    assert any(text.startswith(DARK) for text in failed(found))


@pytest.mark.parametrize("name", [pytest.param("camera", marks=pytest.mark.slow), "camera_low_light"])
def test_a_sound_camera_is_certified_also_where_the_anchor_is_clipped(name: str, seed: int) -> None:
    """A tenth of the outputs may be full; they are left out, so that the mean is not understated."""
    gain = {"camera": 0.045, "camera_low_light": 8.0}[name]
    full = {"sensor": {"gain_dn_per_e": gain}, "anchor": {"most_saturated": 0.2}}
    found = calibrated(CameraDevice, name, seed, camera=full)
    law = found.certificate.noise
    assert law is not None, failed(found)
    assert law.light_ratio_low < 1 < law.light_ratio_high


def test_sums_over_some_pixels_are_those_of_their_groups(seed: int) -> None:
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


def test_the_smallest_beta_that_is_taken_gives_limits(seed: int) -> None:
    with CameraDevice(load_description("camera"), n_inputs=12, n_outputs=1000, seed=seed) as device:
        with pytest.raises(ValueError, match="beta = 5e-12"):
            calibrate(device, plan=Plan(frames=32), readings=30, beta=5e-12)
        law = calibrate(device, plan=Plan(frames=32), readings=30, beta=1e-11).certificate.noise
    assert law.light_ratio_low < 1 < law.light_ratio_high
