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

from opusim.calibration.count_law import (
    NamedPower,
    Tails,
    codes_p_values,
    frames_without_power,
    tails,
    third_cumulants,
    without_power,
)
from opusim.calibration.frames import PIXELS_LOOKED_AT, Estimate
from opusim.calibration.independence import (
    cut_tails,
    independence_p_values,
    largest_deviate_p_value,
    missing_numbers,
    third_cumulant,
    weak_inputs,
)
from opusim.calibration.photon_transfer import LightNoise, PhotonTransfer
from opusim.calibration.reading_noise import TOLERANCE, input_p_values
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import FluctuatingCountLaw, PhotonCountLaw, TrustedProperty
from opusim.p_values import FAMILY_ALARM, PropertyTest, decide, gamma_p_value

_FULL = 0.7
"""Share of the saturation above which an output's described anchor is left out, since it may be clipped."""
_ANCHOR_FRAMES = 100
_PARTS_OF_BETA = 12
"""Two limits each of the gain, the anchor, its zero, the mean dark charge and a pixel's deviation from it; one each of
the light's noise and of the spread over pixels."""
_MOST_PIXELS = 1_000_000
"""Outputs of a window, and groups of them, of which every one's dark charge lies within its limits."""
_BRIGHTEST = 8.0
"""Standard deviations above its mean that no frame of a Gaussian light reaches (1e-15 a frame)."""
_AS_NOISY = "readings of every input are as noisy as flat frames state"
_BLACK = "the black level does not vary from frame to frame"
_POISSON = "the third cumulants of frames are those of Poisson counts"
_TAILS = "frames have the tails of Poisson counts"
_CODES = "every code of the converter occurs"
_STEADY = "light does not vary from frame to frame"
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
_HOLOGRAMS = (
    "readings are holograms (camera.reference_beam), and no frame that is tested holds the reference's light"
)
_UNEVEN = (
    "the dark charge's limits hold at each of up to 1,000,000 outputs and groups of outputs, if dark currents differ "
    "by a normal law over pixels; more frames narrow them"
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
    trust: tuple[TrustedProperty, ...]


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
    taken, blank = device.anchor_frames(_ANCHOR_FRAMES), device.flat_frames(_ANCHOR_FRAMES)
    blank_dn, saturation_e = float(blank.mean(dtype=np.float64)), device.exposure.sensor.saturation_e
    described_e = device.anchor_light_e
    kept = np.flatnonzero(described_e < _FULL * saturation_e)
    if kept.size < 30:
        raise ValueError(
            f"the anchor of {kept.size} outputs lies below {_FULL:.0%} of saturation: at least 30 are needed; dim "
            "the light, or open more outputs"
        )
    # Frames of the anchor at mean power, whose light at each output is that above the blank frames.
    camera, power, anchor = device.description.camera, None, taken
    settings = None if camera is None else camera.light.power
    if settings is not None:
        lit = np.maximum(taken.mean(axis=0, dtype=np.float64) - blank.mean(axis=0, dtype=np.float64), 0.0)
        gain = transfer.estimates(0.5)["gain_dn_per_e"].value
        anchor = without_power(taken, lit[None], gain * lit[None]).astype(taken.dtype)
    light = transfer.light_noise().and_frames(taken, blank_dn, anchor)
    if settings is not None:
        power = NamedPower.of(settings, transfer, light, taken.mean(axis=1) - blank_dn)
    means = taken[:, kept].mean(axis=1, dtype=np.float64)  # of each frame of the anchor
    described = float(described_e[kept].mean())

    # What frames say of the counts' law beyond mean and variance, and of its limits.
    black = transfer.black_noise(blank)
    third, beside = third_cumulants(transfer), tails(transfer, power is not None)
    properties = {
        _BLACK: {"means of frames without light": black.excess_p_value},
        _POISSON: {"third cumulants": third.p_value},
        _TAILS: {"far from the mean": beside.far_p_value, "near the mean": beside.near_p_value},
    }
    if transfer.is_rounded:
        properties[_CODES] = codes_p_values(transfer)
    if not device.is_holographic:
        dn_per_e = (float(means.mean()) - transfer.zero()) / described
        properties[_AS_NOISY] = input_p_values(device, transfer, inputs, samples, dn_per_e)
    properties |= {} if power is None else power.property_p_values()
    properties |= transfer.property_p_values() | anchor_p_values(anchor, described_e, kept, transfer)
    used = transfer.used()
    levels = list(transfer.light.looked_at[used]) if power is None else frames_without_power(transfer, used)
    frames = [*levels, anchor[:, : levels[0].shape[1]]]
    for name, values in independence_p_values(frames, ranked=True).items():
        properties[f"frames: {name}"] = values
    if black.excess_p_value < FAMILY_ALARM / 2 / (1 + len(properties)):
        light = light.beside(black.common)
    tests = decide(
        {_STEADY: {"means of frames": light.p_value}} | properties,
        alarm=FAMILY_ALARM / 2,
        not_needed=() if power is None else (_STEADY,),
    )
    trust = _trust(third.error, beside, tests[0].level, samples)

    # Limits are certified if every needed test holds and nothing else forbids it.
    failed = [test.text for test in tests if test.needed and not test.holds]
    failed += [_HOLOGRAMS] if device.is_holographic else []
    failed += [] if power is None else power.obstacles
    failed += _impossible(transfer, share)
    # most electrons of ambient light at an output, which no law credits
    ambient_e = float(device.exposure.light.ambient_e * np.max(device.exposure.response))
    return CountCertificate(
        law=None if failed else _law(transfer, means, described, light, power, share, ambient_e),
        tests=tests,
        light_noise=Estimate(value=light.estimate, low=light.lower(share), high=light.upper(share)),
        remarks=_remarks(power, light.upper(share), ambient_e, failed),
        trust=trust,
    )


def _trust(
    third_error: float, beside: Tails, level: float, samples: np.ndarray
) -> tuple[TrustedProperty, ...]:
    """Return the smallest faults that these frames and readings show, at the level of a property's test."""
    return (
        third_cumulant(third_error, level),
        cut_tails(beside.limit, beside.frames, "frames"),
        missing_numbers(max(beside.numbers, 1), beside.frames, level / 2, samples=2, of="frames"),
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


def _remarks(power: NamedPower | None, limit: float, ambient_e: float, failed: list[str]) -> tuple[str, ...]:
    """Return the law that a certificate takes for granted, and why none is certified, with what helps."""
    unseen = "The tests do not see a light that changes after calibration, or depends on patterns that were not tried"
    if power is None:
        assumed = (
            "assumed law: independent Poisson counts, one light for all frames, that no data, no pattern and no "
            f"automatic exposure changes; no frame leaves the mean by more than {_BRIGHTEST:g} times light_noise's "
            f"upper limit. {unseen}"
        )
    else:
        name = power.settings.law.replace("_", "-")
        assumed = (
            f"assumed law: given the light's power in a frame, independent Poisson counts; the power is {name}, "
            f"independent from frame to frame during calibration, of at most {limit:.4g} rms, and no data, no pattern "
            f"and no automatic exposure changes it. Its tail beyond the frames taken is assumed, not seen. {unseen}"
        )
    remarks = [assumed, _UNEVEN]
    if ambient_e:
        remarks.append(
            f"the described ambient light, {ambient_e:.4g} electrons, is taken off the dark charge: it may be gone"
        )
    if failed:
        helps = (
            remedy
            for beginning, remedy in _REMEDIES.items()
            if any(text.startswith(beginning) for text in failed)
        )
        remarks.append(
            f"no law is certified, because frames speak against: {'; '.join(failed)}. Limits of constants do not allow "
            f"for that; {next(helps, 'steady the light')}, and calibrate again"
        )
    return tuple(remarks)


def anchor_p_values(
    frames: np.ndarray, described_e: np.ndarray, kept: np.ndarray, transfer: PhotonTransfer
) -> dict[str, dict[str, float]]:
    """Return the P-values of light that is spread over the outputs as described, and of its variance.

    Args:
        frames: the anchor at mean power, DN, shape (frames, n_outputs).
        described_e: described light of each output, electrons, shape (n_outputs,).
        kept: outputs whose described anchor lies well below saturation, indices.
        transfer: the flat series.
    """
    looked_at = kept[kept < PIXELS_LOOKED_AT]
    start, start_variance = transfer.starts()
    lit = frames[:, looked_at].mean(axis=0, dtype=np.float64) - start[looked_at]
    described = described_e[looked_at]
    ratio = float(lit.mean() / described.mean())
    own = transfer.variance_at(np.maximum(ratio, 0.0) * described) / len(frames)
    deviates = (lit - ratio * described) / np.sqrt(own + start_variance)
    freedom = looked_at.size - 1
    return {
        "the anchor's light is spread over the outputs as described": {
            "squared differences": gamma_p_value(float(np.sum(np.square(deviates))), freedom, 2 * freedom),
            "largest of an output": largest_deviate_p_value(np.abs(deviates)),
        },
        "the anchor's variance lies on the line of flat frames": {
            "excess": transfer.excess_p_value(frames, kept)
        },
    }


def _law(
    transfer: PhotonTransfer,
    means: np.ndarray,
    described: float,
    light: LightNoise,
    power: NamedPower | None,
    share: float,
    ambient_e: float,
) -> PhotonCountLaw | FluctuatingCountLaw:
    found = transfer.unbent(1 - 2 * share)
    seconds, limit = transfer.exposure_us * 1e-6, light.upper(share)
    margin = -stdtrit(means.size - 1, share) * means.std(ddof=1) / means.size**0.5
    dark, gain, zero = found["dark_current_e_per_s"], found["gain_dn_per_e"], found["zero_dn"]
    shared = dict.fromkeys(("zero_dn", "dark_current_e_per_s"), 0.0)
    if power is not None:
        deviate = -float(ndtri(share))
        shared = {key: deviate * error for key, error in transfer.power_errors(limit).items()}
    zero_more, dark_more = shared["zero_dn"], shared["dark_current_e_per_s"]
    lowest = (means.mean() - margin - zero.high - zero_more) / gain.high / described
    highest = (means.mean() + margin - zero.low + zero_more) / gain.low / described
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
