"""Certify the law of a camera's counts: limits of its dark charge and of its light, and the tests that they rest on.

A certified count law scales the described light of every output by one ratio, so light that is spread over the outputs
in another way would exceed it at some outputs. With a_j the mean of output j over F_a frames of the anchor, z_j where
its line of means under uniform light starts (its own offset and response drop out), K the gain, r the ratio and L_j its
described light,
    a_j - z_j = K r L_j + noise of variance v_j / F_a + (variance of z_j),
whose squares add up to chi-squared. The temporal variance v_j lies on the flat frames' straight line v(m): other values
show a gain that has changed, or light that varies at each output separately, as it does if the medium moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from opusim.calibration.estimates import Estimate
from opusim.calibration.flat_series import PIXELS_LOOKED_AT
from opusim.calibration.independence import independence_p_values, largest_deviate_p_value
from opusim.calibration.photon_transfer import LightNoise, PhotonTransfer
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import PhotonCountLaw
from opusim.p_values import FAMILY_ALARM, PropertyTest, decide, gamma_p_value

_FULL = 0.7
"""Share of the saturation above which an output's described anchor is left out, since it may be clipped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorLight:
    """Frames of the anchor at the outputs whose described anchor lies well below saturation.

    Attributes:
        frames: DN, shape (frames, n_outputs), of all outputs.
        described_e: described light of each output, electrons, shape (n_outputs,).
        kept: outputs that are looked at, indices.
    """

    frames: np.ndarray
    described_e: np.ndarray
    kept: np.ndarray

    @classmethod
    def of(cls, frames: np.ndarray, described_e: np.ndarray, saturation_e: float) -> AnchorLight:
        """Leave out the outputs that may be clipped.

        Raises:
            ValueError: fewer than 30 outputs are left.
        """
        kept = np.flatnonzero(described_e < _FULL * saturation_e)
        if kept.size < 30:
            raise ValueError(
                f"the anchor of {kept.size} outputs lies below {_FULL:.0%} of saturation: at least 30 are needed; dim "
                "the light, or open more outputs"
            )
        return cls(frames=frames, described_e=described_e, kept=kept)

    @property
    def means(self) -> np.ndarray:
        """Mean of each frame over the kept outputs, DN, shape (frames,)."""
        return np.asarray(self.frames[:, self.kept].mean(axis=1, dtype=np.float64))

    @property
    def described(self) -> float:
        """Mean described light of the kept outputs, electrons."""
        return float(self.described_e[self.kept].mean())

    def property_p_values(self, transfer: PhotonTransfer) -> dict[str, dict[str, float]]:
        """Return the P-values of light that is spread over the outputs as described, and of its variance."""
        looked_at = self.kept[self.kept < PIXELS_LOOKED_AT]
        start, start_variance = transfer.starts()
        lit = self.frames[:, looked_at].mean(axis=0, dtype=np.float64) - start[looked_at]
        described = self.described_e[looked_at]
        ratio = float(lit.mean() / described.mean())
        own = transfer.variance_at(np.maximum(ratio, 0.0) * described) / len(self.frames)
        deviates = (lit - ratio * described) / np.sqrt(own + start_variance)
        freedom = looked_at.size - 1
        return {
            "the anchor's light is spread over the outputs as described": {
                "squared differences": gamma_p_value(
                    float(np.sum(np.square(deviates))), freedom, 2 * freedom
                ),
                "largest of an output": largest_deviate_p_value(np.abs(deviates)),
            },
            "the anchor's variance lies on the line of flat frames": {
                "excess": transfer.excess_p_value(self.frames, self.kept)
            },
        }


_ANCHOR_FRAMES = 100
_PARTS_OF_BETA = (
    9  # two limits each of the gain, the anchor, its zero and the dark charge, one of the light's noise
)
_BRIGHTEST = (
    8.0  # standard deviations above its mean that no frame of a Gaussian light reaches (1e-15 a frame)
)


@dataclass(frozen=True, kw_only=True)
class CountCertificate:
    """What frames say of a camera's counts.

    Attributes:
        law: the certified limits; None if a test speaks against them.
        tests: of what the limits rest on.
        light_noise: relative standard deviation of the light from frame to frame, its upper limit at the share of beta.
        remarks: the assumed law, and why none is certified.
    """

    law: PhotonCountLaw | None
    tests: tuple[PropertyTest, ...]
    light_noise: Estimate
    remarks: tuple[str, ...]


def certify_counts(device: CameraDevice, transfer: PhotonTransfer, beta: float) -> CountCertificate:
    """Return the limits that hold together with probability 1 - beta (Bonferroni over one-sided limits).

    Raises:
        ValueError: too few frames for this beta.
    """
    share = beta / _PARTS_OF_BETA
    anchor, blank = device.anchor_frames(_ANCHOR_FRAMES), device.flat_frames(_ANCHOR_FRAMES)
    light = transfer.light_noise().and_frames(anchor, float(blank.mean(dtype=np.float64)))
    anchor_light = AnchorLight.of(anchor, device.anchor_light_e, device.exposure.sensor.saturation_e)
    tests = _tests(transfer, light, anchor_light)
    limit = light.upper(share)
    remarks = [
        "assumed law: independent Poisson counts, one light for all frames, that no data, no pattern and no automatic "
        f"exposure changes; no frame exceeds the mean by more than {_BRIGHTEST:g} times light_noise's upper limit. "
        "The tests do not see a light that changes after calibration, or depends on patterns that were not tried"
    ]
    if failed := [test.text for test in tests if not test.holds]:
        remarks.append(
            f"no law is certified, because frames speak against: {'; '.join(failed)}. Limits of constants do not allow "
            "for that; steady the light and calibrate again"
        )
    law = None if failed else _law(transfer, anchor_light, brightest=1 + _BRIGHTEST * limit, share=share)
    return CountCertificate(
        law=law,
        tests=tests,
        light_noise=Estimate(value=light.estimate, low=0.0, high=limit),
        remarks=tuple(remarks),
    )


def _tests(transfer: PhotonTransfer, light: LightNoise, anchor: AnchorLight) -> tuple[PropertyTest, ...]:
    looked_at = transfer.light.looked_at[transfer.used()]
    frames = [*looked_at, anchor.frames[:, : looked_at.shape[2]]]
    independence = {
        f"frames: {name}": values for name, values in independence_p_values(frames, ranked=True).items()
    }
    steady = {"light does not vary from frame to frame": {"means of frames": light.p_value}}
    straight = transfer.property_p_values() | anchor.property_p_values(transfer)
    return decide(steady | straight | independence, alarm=FAMILY_ALARM / 2)


def _law(transfer: PhotonTransfer, anchor: AnchorLight, *, brightest: float, share: float) -> PhotonCountLaw:
    found, means = transfer.unbent(1 - 2 * share), anchor.means
    seconds = transfer.exposure_us * 1e-6
    margin = -stdtrit(means.size - 1, share) * means.std(ddof=1) / means.size**0.5
    dark, gain, zero = found["dark_current_e_per_s"], found["gain_dn_per_e"], found["zero_dn"]
    if gain.low <= 0:
        raise ValueError("beta: is too small for these frames; take more frames or pixels")
    return PhotonCountLaw(
        dark_e_low=max(0.0, dark.low * seconds),
        dark_e_high=max(0.0, dark.high * seconds),
        light_ratio_low=float(max(0.0, means.mean() - margin - zero.high) / gain.high / anchor.described),
        light_ratio_high=float((means.mean() + margin - zero.low) / gain.low / anchor.described) * brightest,
    )
