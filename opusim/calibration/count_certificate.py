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
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri, stdtrit

from opusim.calibration.estimates import Estimate
from opusim.calibration.flat_series import PIXELS_LOOKED_AT
from opusim.calibration.gaussian_shape import codes_p_values, tails, third_cumulants
from opusim.calibration.independence import independence_p_values, largest_deviate_p_value
from opusim.calibration.light_power import NamedPower, frames_without_power, without_power
from opusim.calibration.photon_transfer import LightNoise, PhotonTransfer
from opusim.calibration.rare_faults import (
    Trusted,
    cut_tails,
    missing_numbers,
    third_cumulant,
    weak_inputs,
)
from opusim.calibration.reading_noise import TOLERANCE, input_p_values
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import FluctuatingCountLaw, PhotonCountLaw
from opusim.p_values import FAMILY_ALARM, PropertyTest, decide, gamma_p_value

_FULL = 0.7
"""Share of the saturation above which an output's described anchor is left out, since it may be clipped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorLight:
    """Frames of the anchor at the outputs whose described anchor lies well below saturation.

    Attributes:
        frames: DN, shape (frames, n_outputs), of all outputs, at mean power.
        taken: the same as they were taken.
        described_e: described light of each output, electrons, shape (n_outputs,).
        kept: outputs that are looked at, indices.
    """

    frames: np.ndarray
    taken: np.ndarray
    described_e: np.ndarray
    kept: np.ndarray

    @classmethod
    def of(
        cls,
        frames: np.ndarray,
        described_e: np.ndarray,
        saturation_e: float,
        steady: np.ndarray | None = None,
    ) -> AnchorLight:
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
        level = frames if steady is None else steady
        return cls(frames=level, taken=frames, described_e=described_e, kept=kept)

    @property
    def means(self) -> np.ndarray:
        """Mean of each frame over the kept outputs, DN, shape (frames,)."""
        return np.asarray(self.taken[:, self.kept].mean(axis=1, dtype=np.float64))

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
_PARTS_OF_BETA = 12
"""Two limits each of the gain, the anchor, its zero, the mean dark charge and a pixel's deviation from it; one each of
the light's noise and of the spread over pixels."""
_MOST_PIXELS = 1_000_000
"""Outputs of a window, and groups of them, of which every one's dark charge lies within its limits."""
_BRIGHTEST = (
    8.0  # standard deviations above its mean that no frame of a Gaussian light reaches (1e-15 a frame)
)


@dataclass(frozen=True, kw_only=True)
class CountCertificate:
    """What frames say of a camera's counts.

    Attributes:
        law: the certified limits; None if a test speaks against them.
        tests: of what the limits rest on.
        light_noise: relative standard deviation of the light from frame to frame; its limits are the certified ones, at
            the share of beta, which are wider than those of other constants.
        remarks: the assumed law, and why none is certified.
        trust: what frames show from a certain size on.
    """

    law: PhotonCountLaw | FluctuatingCountLaw | None
    tests: tuple[PropertyTest, ...]
    light_noise: Estimate
    remarks: tuple[str, ...]
    trust: tuple[Trusted, ...]


def certify_counts(
    device: CameraDevice, transfer: PhotonTransfer, beta: float, inputs: torch.Tensor, samples: np.ndarray
) -> CountCertificate:
    """Return the limits that hold together with probability 1 - beta (Bonferroni over one-sided limits).

    Light that varies is certified only if the description names the law of its power (``camera.light.power``).

    Args:
        device: open.
        transfer: its flat series.
        beta: probability that a limit is wrong.
        inputs: constant inputs, float32, shape (inputs, n_inputs).
        samples: their readings at mean power, shape (inputs, readings, n_outputs).
    """
    share = beta / _PARTS_OF_BETA
    anchor, blank = device.anchor_frames(_ANCHOR_FRAMES), device.flat_frames(_ANCHOR_FRAMES)
    blank_dn, saturation_e = float(blank.mean(dtype=np.float64)), device.exposure.sensor.saturation_e
    camera, power = device.description.camera, None
    if camera is None or camera.light.power is None:
        light = transfer.light_noise().and_frames(anchor, blank_dn)
        anchor_light = AnchorLight.of(anchor, device.anchor_light_e, saturation_e)
    else:
        steady = _steady_anchor(anchor, blank, transfer)
        light = transfer.light_noise().and_frames(anchor, blank_dn, steady)
        anchor_light = AnchorLight.of(anchor, device.anchor_light_e, saturation_e, steady)
        power = NamedPower.of(camera.light.power, transfer, light, anchor.mean(axis=1) - blank_dn)
    shape = _FrameShape.of(transfer, transfer.black_noise(blank), power is not None)
    if not device.is_holographic:
        dn_per_e = (float(anchor_light.means.mean()) - transfer.zero()) / anchor_light.described
        shape.p_values[_AS_NOISY] = input_p_values(device, transfer, inputs, samples, dn_per_e)
    tests, light = _tests(transfer, light, anchor_light, power, shape)
    obstacles = [*_HOLOGRAMS] if device.is_holographic else []
    obstacles += [] if power is None else power.obstacles
    obstacles += _impossible(transfer, share)
    trust = shape.trust(tests[0].level, samples)
    return _conclude(tests, transfer, light, anchor_light, power, share, _ambient_e(device), obstacles, trust)


_AS_NOISY = "readings of every input are as noisy as flat frames state"
_BLACK = "the black level does not vary from frame to frame"
_POISSON = "the third cumulants of frames are those of Poisson counts"
_TAILS = "frames have the tails of Poisson counts"
_CODES = "every code of the converter occurs"


@dataclass(frozen=True, kw_only=True, eq=False)
class _FrameShape:
    """What frames say of the counts' law beyond mean and variance.

    Attributes:
        p_values: of each property.
        black: means of frames without light.
        error: relative standard error of the third cumulants.
        numbers: how many numbers were compared with simulated ones.
        frames: of each pixel and level.
        limit: cut of the tails that shows, standard deviations.
    """

    p_values: dict[str, dict[str, float]]
    black: LightNoise
    error: float
    numbers: int
    frames: int
    limit: float

    @classmethod
    def of(cls, transfer: PhotonTransfer, black: LightNoise, power_varies: bool) -> _FrameShape:
        """Compare frames with the law of Poisson counts."""
        third, beside = third_cumulants(transfer), tails(transfer, power_varies)
        found = {
            _BLACK: {"means of frames without light": black.excess_p_value},
            _POISSON: {"third cumulants": third.p_value},
            _TAILS: {"far from the mean": beside.far_p_value, "near the mean": beside.near_p_value},
        }
        if transfer.is_rounded:
            found[_CODES] = codes_p_values(transfer)
        return cls(
            p_values=found,
            black=black,
            error=third.error,
            numbers=beside.numbers,
            frames=beside.frames,
            limit=beside.limit,
        )

    def trust(self, level: float, samples: np.ndarray) -> tuple[Trusted, ...]:
        """Return the smallest faults that these frames show.

        Args:
            level: of a property's test.
            samples: readings of constant inputs, shape (inputs, readings, n_outputs).
        """
        share = level / 2
        return (
            third_cumulant(self.error, level),
            cut_tails(self.limit, self.frames, "frames"),
            missing_numbers(max(self.numbers, 1), self.frames, share, samples=2, of="frames"),
            weak_inputs(TOLERANCE, samples[0].size, level / (2 * len(samples))),
        )


def _impossible(transfer: PhotonTransfer, share: float) -> list[str]:
    """Return constants of frames that no camera has, or that are too uncertain for a law."""
    found = transfer.estimates(1 - 2 * share)
    efficiency, gain = found["quantum_efficiency"], found["gain_dn_per_e"]
    if gain.high <= 0:
        return ["the variance of frames falls as the light rises"]
    if efficiency.low > 1:
        return [
            f"the quantum efficiency is at least {efficiency.low:.3g}, and no pixel counts more electrons than photons"
        ]
    if transfer.unbent(1 - 2 * share)["gain_dn_per_e"].low <= 0:
        return [f"the gain has no lower limit above 0 at a probability of {share:.2g}"]
    return []


def _steady_anchor(anchor: np.ndarray, blank: np.ndarray, transfer: PhotonTransfer) -> np.ndarray:
    """Frames of the anchor at mean power, whose light at each output is that above the blank frames."""
    light = np.maximum(anchor.mean(axis=0, dtype=np.float64) - blank.mean(axis=0, dtype=np.float64), 0.0)
    gain = transfer.estimates(0.5)["gain_dn_per_e"].value
    return without_power(anchor, light[None], gain * light[None]).astype(anchor.dtype)


def _ambient_e(device: CameraDevice) -> float:
    """Most electrons of ambient light at an output, which no law credits."""
    exposure = device.exposure
    return float(exposure.light.ambient_e * np.max(exposure.response))


def _conclude(
    tests: tuple[PropertyTest, ...],
    transfer: PhotonTransfer,
    light: LightNoise,
    anchor: AnchorLight,
    power: NamedPower | None,
    share: float,
    ambient_e: float,
    obstacles: list[str],
    trust: tuple[Trusted, ...],
) -> CountCertificate:
    """Certify limits if every needed test holds and nothing else forbids it."""
    limit = light.upper(share)
    failed = [test.text for test in tests if test.needed and not test.holds] + obstacles
    remarks = [_assumed(power, limit), _UNEVEN]
    if ambient_e:
        remarks.append(
            f"the described ambient light, {ambient_e:.4g} electrons, is taken off the dark charge: it may be gone"
        )
    if failed:
        remarks.append(
            f"no law is certified, because frames speak against: {'; '.join(failed)}. Limits of constants do not allow "
            f"for that; {_remedy(failed)}, and calibrate again"
        )
    law = None if failed else _law(transfer, anchor, light, power, share=share, ambient_e=ambient_e)
    return CountCertificate(
        law=law,
        tests=tests,
        light_noise=Estimate(value=light.estimate, low=light.lower(share), high=limit),
        remarks=tuple(remarks),
        trust=trust,
    )


_REMEDIES = {
    _BLACK: "let the sensor's temperature settle and switch on the camera's black-level clamp",
    "the variance of frames falls": "switch off the camera's gamma and tone curve",
    "the variance is a straight line": "switch off the camera's gamma and tone curve",
    _CODES: "have the driver give the converter's own numbers, shifted to the lowest bits",
    "the quantum efficiency is": "switch off the camera's noise reduction and check the meter that gives the photons",
    _POISSON: "switch off the camera's noise reduction, binning and intensifier",
    _TAILS: "switch off the camera's noise reduction and defect correction",
    "the gain has no lower limit": "take more frames or pixels",
    _AS_NOISY: "switch off whatever changes the gain or the noise of bright frames",
}
"""What helps against a fault, by the beginning of the property that fails; the first that fails counts."""


def _remedy(failed: list[str]) -> str:
    """Return what to do about the fault that explains the others."""
    for beginning, remedy in _REMEDIES.items():
        if any(text.startswith(beginning) for text in failed):
            return remedy
    return "steady the light"


_HOLOGRAMS = (
    "readings are holograms (camera.reference_beam), and no frame that is tested holds the reference's light",
)
_UNEVEN = (
    "the dark charge's limits hold at each of up to 1,000,000 outputs and groups of outputs, if dark currents differ "
    "by a normal law over pixels; more frames narrow them"
)


def _assumed(power: NamedPower | None, limit: float) -> str:
    """Return the law that a certificate takes for granted."""
    unseen = "The tests do not see a light that changes after calibration, or depends on patterns that were not tried"
    if power is None:
        return (
            "assumed law: independent Poisson counts, one light for all frames, that no data, no pattern and no "
            f"automatic exposure changes; no frame leaves the mean by more than {_BRIGHTEST:g} times light_noise's "
            f"upper limit. {unseen}"
        )
    name = power.settings.law.replace("_", "-")
    return (
        f"assumed law: given the light's power in a frame, independent Poisson counts; the power is {name}, "
        f"independent from frame to frame during calibration, of at most {limit:.4g} rms, and no data, no pattern and "
        f"no automatic exposure changes it. Its tail beyond the frames taken is assumed, not seen. {unseen}"
    )


_STEADY = "light does not vary from frame to frame"


def _tests(
    transfer: PhotonTransfer,
    light: LightNoise,
    anchor: AnchorLight,
    power: NamedPower | None,
    shape: _FrameShape,
) -> tuple[tuple[PropertyTest, ...], LightNoise]:
    """Return the tests, and the light's noise: beside that of the black level, if that varies."""
    used = transfer.used()
    levels = list(transfer.light.looked_at[used]) if power is None else frames_without_power(transfer, used)
    frames = [*levels, anchor.frames[:, : levels[0].shape[1]]]
    independence = {
        f"frames: {name}": values for name, values in independence_p_values(frames, ranked=True).items()
    }
    named = {} if power is None else power.property_p_values()
    others = shape.p_values | named | transfer.property_p_values() | anchor.property_p_values(transfer)
    alarm = FAMILY_ALARM / 2
    if shape.black.excess_p_value < alarm / (1 + len(others) + len(independence)):
        light = light.beside(shape.black.common)
    properties = {_STEADY: {"means of frames": light.p_value}} | others | independence
    tests = decide(properties, alarm=alarm, not_needed=() if power is None else (_STEADY,))
    return tests, light


def _law(
    transfer: PhotonTransfer,
    anchor: AnchorLight,
    light: LightNoise,
    power: NamedPower | None,
    *,
    share: float,
    ambient_e: float,
) -> PhotonCountLaw | FluctuatingCountLaw:
    found, means = transfer.unbent(1 - 2 * share), anchor.means
    seconds, limit = transfer.exposure_us * 1e-6, light.upper(share)
    margin = -stdtrit(means.size - 1, share) * means.std(ddof=1) / means.size**0.5
    dark, gain, zero = found["dark_current_e_per_s"], found["gain_dn_per_e"], found["zero_dn"]
    shared = dict.fromkeys(("zero_dn", "dark_current_e_per_s"), 0.0)
    if power is not None:
        deviate = -float(ndtri(share))
        shared = {key: deviate * error for key, error in transfer.power_errors(limit).items()}
    zero_more, dark_more = shared["zero_dn"], shared["dark_current_e_per_s"]
    lowest = (means.mean() - margin - zero.high - zero_more) / gain.high / anchor.described
    highest = (means.mean() + margin - zero.low + zero_more) / gain.low / anchor.described
    uneven = -float(ndtri(share / _MOST_PIXELS)) * transfer.dark_spread_limit(share) / gain.low
    limits: dict[str, Any] = {
        "dark_e_low": max(0.0, (dark.low - dark_more - uneven) * seconds - ambient_e),
        "dark_e_high": max(0.0, (dark.high + dark_more + uneven) * seconds),
        "dark_mean_e_low": max(0.0, (dark.low - dark_more) * seconds - ambient_e),
        "dark_mean_e_high": max(0.0, (dark.high + dark_more) * seconds),
        "dark_deviation_e": uneven * seconds,
        "light_ratio_low": max(0.0, float(lowest)),
    }
    if power is None:
        return PhotonCountLaw(**limits, light_ratio_high=float(highest) * (1 + _BRIGHTEST * limit))
    rms_low, rms_high = power.limits(share)
    return FluctuatingCountLaw(
        **limits,
        light_ratio_high=float(highest),
        power_law=power.settings.law,
        power_rms_low=rms_low,
        power_rms_high=rms_high,
    )
