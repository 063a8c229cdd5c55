"""Calibrate a device from its frames, and compare a device with its certificate.

`calibrate` takes readings of constant inputs and, at a camera, frames under uniform light. It tests what the device's
law needs, and writes limits of its constants and of its noise into a `Certificate`. `compare` and `require_noise` check
a device against an earlier certificate; `opusim.calibration.report` shows a calibration.

`certify_counts` certifies the law of a camera's counts: limits of its dark charge and of its light.

**Third cumulants.** Digital numbers of Poisson counts of gain K, with added Gaussian noise of variance c, have the
third cumulant K (v - c) at the variance v, whatever the light. A straight line through the third cumulants of all
levels against their variances has the slope K, the gain that photon transfer finds. Counts whose variance is not
Poisson's but proportional to the light, as noise reduction in the camera and image intensifiers leave them, have
another slope: their variance yields a wrong gain with every line straight. A third cumulant of F frames at P pixels has
the variance (6 v^3 + 18 K^2 v^2 + K^4 v) / (F P) to leading order, which weighs the levels and gives the error.

**Tails.** Frames of the same pixels, means and gain are simulated by the certified law. If c of the simulated numbers
lie beyond a limit that the c-th of them sets, the number of measured ones beyond it is negative binomial (c, 1/2),
without any further assumption. Numbers near a pixel's mean are compared in the same way.

**Codes.** A converter's numbers take every code within the noise of its pixels. A code that is expected m times, by the
pixels' means and variance, is missing by chance with probability exp(-m).

**Power.** Counts under a light whose power fluctuates by a named law are certified by taking the power out of frames
and testing what is left. In a frame of power w = 1 + c, pixel j reads b_j + w D_j + noise of variance v_j + c s_j, with
D_j its light [DN] and s_j = K D_j. The powers c are found by weighted least squares over pixels and taken off, and what
is left is scaled to the variance at mean power. The power itself hides the noise along D / sqrt v; that component is
drawn anew from N(0, 1) by a fixed seed, so that every test of independence sees independent readings if they are
independent except for the power. Each frame of a reading has its own power.

The powers are tested separately: their law (logarithms, if it is log-normal), equal spread at all levels and at the
anchor, and independence from frame to frame, on which the chi-squared limit of their spread rests.

**Frames.** A reading is scale sum_f w_f I_f over its frames f. Light of L_f described electrons gives a mean of k L_f
DN, with k from the anchor, and a variance v(k L_f) on the straight line of flat frames; so a reading has the variance
scale^2 sum_f w_f^2 v(k L_f), less what coarse rounding may hide of it. Sample variances of n readings over it follow
chi-squared laws over n - 1. Up to a tenth less is tolerated: the line and the described light are known to a few per
cent.

**Limits** (`certify_counts`). A certified count law scales the described light of every output by one ratio, so light
that is spread over the outputs in another way would exceed it at some outputs. With a_j the mean of output j over F_a
frames of the anchor, z_j where its line of means under uniform light starts (its own offset and response drop out), K
the gain, r the ratio and L_j its described light,
    a_j - z_j = K r L_j + noise of variance v_j / F_a + (variance of z_j),
whose squares add up to chi-squared. The temporal variance v_j lies on the flat frames' straight line v(m): other values
show a gain that has changed, or light that varies at each output separately, as it does if the medium moves.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import chdtr, nbdtr, ndtri, pdtrc, stdtr, stdtrit
from scipy.stats import chi2, f, norm

from opusim import checks
from opusim.calibration.frames import (
    GROUPS,
    PIXELS_LOOKED_AT,
    Estimate,
    dark_noise_dn,
    decorrelation_time,
    root_mean,
    sparse_patterns,
)
from opusim.calibration.photon_transfer import LightNoise, PhotonTransfer, Plan, take_photon_transfer
from opusim.calibration.reading_noise import (
    ReadingNoise,
    cut_tails,
    evaluate_readings,
    independence_p_values,
    largest_deviate_p_value,
    missing_numbers,
    near_limit,
    shape_p_values,
    third_cumulant,
    weak_inputs,
)
from opusim.camera.from_description import camera_sections, dark_charge_e, sensor_of
from opusim.description.camera import PowerSettings
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import reference_vectors
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import (
    Certificate,
    FluctuatingCountLaw,
    GaussianLaw,
    Limits,
    PhotonCountLaw,
    TestedProperty,
    TrustedProperty,
)
from opusim.errors import ConfigError, NoiseBelowCertificate
from opusim.noise import FluctuatingCountNoise, GaussianNoise, MeasuredNoise, PhotonCountNoise
from opusim.p_values import FAMILY_ALARM, PropertyTest, bonferroni, decide, gamma_p_value, normal_p_value
from opusim.progress import Progress, Show
from opusim.tables import Shown

_LEAST_DN2 = 1.0  # variance of a level from which rounding changes no third cumulant
_LEAST_FRAMES = 8
_SEED = 20261128
_BEYOND = (1000, 300, 100, 30)  # simulated numbers beyond the limits
_MOST_BEYOND = 0.02  # share of all simulated numbers
_LEAST_SHARE = 0.5  # of the expected numbers of a code, which rest on a Gaussian law at each pixel
_LEAST_EXPECTED = 2.0


@dataclass(frozen=True, kw_only=True)
class ThirdCumulants:
    """The slope of frames' third cumulants, which tests the counts' law.

    Attributes:
        ratio: slope of the third cumulants over the gain, 1 for Poisson counts.
        error: its standard error; infinite if fewer than three levels show it.
    """

    ratio: float
    error: float

    @property
    def p_value(self) -> float:
        """Two-sided p-value of Poisson counts; 1 if no level shows any."""
        return normal_p_value((self.ratio - 1) / self.error)


def third_cumulants(transfer: PhotonTransfer) -> ThirdCumulants:
    """Return the slope of the third cumulants, from levels whose noise is above a DN."""
    gain = transfer.estimates(0.5)["gain_dn_per_e"]
    gain_error = transfer.error_of(gain)[0]
    variances, cumulants, weights = [], [], []
    levels = [*transfer.light.looked_at[transfer.used()], *transfer.dark.looked_at]
    for level in levels if transfer.light.frames >= _LEAST_FRAMES else []:
        dn = level.astype(np.float64)
        rest = dn - dn.mean(axis=1, keepdims=True) - dn.mean(axis=0) + dn.mean()
        if np.mean(np.square(rest)) <= _LEAST_DN2:
            continue
        frames, pixels = rest.shape
        v = float(np.sum(np.square(rest))) / ((frames - 1) * (pixels - 1))
        third = float(np.sum(rest**3)) * frames / ((frames - 1) * (frames - 2))
        v_e = v / gain.value**2
        squares = 6 * v_e**3 * frames**2 / ((frames - 1) * (frames - 2)) + 18 * v_e**2 + v_e
        variances.append(v)
        cumulants.append(third * pixels / ((pixels - 1) * (pixels - 2)))
        weights.append(frames * pixels / (squares * gain.value**6))
    if len(variances) < 3 or gain.value <= 0:
        return ThirdCumulants(ratio=1.0, error=np.inf)
    x, y, w = (np.array(values) for values in (variances, cumulants, weights))
    x = x - w @ x / w.sum()
    leverage = float(w @ np.square(x))
    slope = float((w * x) @ y) / leverage / gain.value
    error = np.hypot(leverage**-0.5, slope * gain_error) / gain.value
    return ThirdCumulants(ratio=slope, error=float(error))


@dataclass(frozen=True, kw_only=True, eq=False)
class Tails:
    """Measured frames beside simulated ones of the certified law.

    Attributes:
        numbers: number of measured values, and of simulated ones.
        frames: of each pixel and level.
        far_p_value: of the numbers beyond limits; 1 if too few frames show them.
        near_p_value: of the numbers near their pixel's mean.
        limit: nearest of the farthest limits, standard deviations; 0 without any.
    """

    numbers: int
    frames: int
    far_p_value: float
    near_p_value: float
    limit: float


def tails(transfer: PhotonTransfer, power_varies: bool) -> Tails:
    """Compare the flat frames with simulated ones, with each frame's power from its mean if it varies."""
    frames = transfer.light.frames
    random, measured, simulated = np.random.default_rng(_SEED), [], []
    found = transfer.estimates(0.5)
    gain, black = found["gain_dn_per_e"].value, found["black_level_dn"].value
    read = gain * found["read_noise_e"].value
    if frames >= _LEAST_FRAMES and gain > 0:
        variances = transfer.light.variances()
        for level in transfer.used():
            if variances[level] > _LEAST_DN2:
                dn = transfer.light.looked_at[level]
                # simulated frames with the measured pixels' means and gain, and each frame's power if that varies
                means = dn.mean(axis=0, dtype=np.float64)
                rate = max((float(means.mean()) - black) / gain, 0.0)
                rates = np.full((len(dn), 1), rate)
                if power_varies:
                    shared = (dn.mean(axis=1, dtype=np.float64) - means.mean())[:, None]
                    rates *= np.maximum(1 + shared / (gain * rate or 1), 0)
                counts = random.poisson(np.broadcast_to(rates, dn.shape))
                values = means + gain * (counts - rate)
                values = values + read * random.standard_normal(dn.shape)
                like = np.rint(values) if transfer.is_rounded else values
                measured.append(_standard(dn, random, transfer.is_rounded))
                simulated.append(_standard(like, random, transfer.is_rounded))
    if not measured:
        return Tails(numbers=0, frames=frames, far_p_value=1.0, near_p_value=1.0, limit=0.0)
    seen, drawn = np.concatenate(measured), np.sort(np.concatenate(simulated))
    far, farthest = [], [0.0, 0.0]  # the farthest limit of each side
    for side, sign in enumerate((1.0, -1.0)):
        ordered = drawn[::-1] if sign > 0 else drawn
        for count in (count for count in _BEYOND if count <= _MOST_BEYOND * drawn.size):
            limit = float(ordered[count - 1])
            beyond = int(np.count_nonzero(sign * seen > sign * limit))
            above = 1.0 - float(nbdtr(beyond - 1, count, 0.5)) if beyond else 1.0
            far.append(2 * min(float(nbdtr(beyond, count, 0.5)), above))
            farthest[side] = max(farthest[side], abs(limit))
    within = near_limit(frames)
    near, expected = (float(np.count_nonzero(np.abs(values) < within)) for values in (seen, drawn))
    return Tails(
        numbers=seen.size,
        frames=frames,
        far_p_value=bonferroni(min(far, default=1.0), max(len(far), 1)),
        near_p_value=normal_p_value((near - expected) / max(near + expected, 1.0) ** 0.5),
        limit=min(farthest) if all(farthest) else 0.0,
    )


def _standard(dn: np.ndarray, random: np.random.Generator, is_rounded: bool) -> np.ndarray:
    """Return numbers less frame and pixel means, over their pixel's deviation; random fractions undo rounding."""
    values = dn + (random.random(dn.shape) - 0.5 if is_rounded else 0.0)
    rest = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    return np.asarray(rest / np.sqrt(np.mean(np.square(rest), axis=0))).ravel()


def codes_p_values(transfer: PhotonTransfer) -> dict[str, float]:
    """Return the p-values of codes that never occur; a statistic's name says how far codes lie apart."""
    levels = [*transfer.light.looked_at[:-1], *transfer.dark.looked_at]
    step = 0
    for level in levels:
        codes = np.unique(np.rint(level).astype(np.int64))
        step = int(np.gcd.reduce(np.append(np.diff(codes), step)))
    found = {f"all codes lie {step} apart": 0.0} if step > 1 else {}
    missing = [_missing_p_value(np.rint(level).astype(np.int64)) for level in levels]
    return found | {"codes that never occur": bonferroni(min(missing), len(missing))}


def _missing_p_value(codes: np.ndarray) -> float:
    """Return the p-value of codes that never occur at a level although the pixels' means and noise allow them."""
    variance = float(codes.var(axis=0, ddof=1).mean())
    if variance < _LEAST_DN2:
        return 1.0
    counts = np.bincount((codes - codes.min()).ravel())
    places = np.rint(codes.mean(axis=0)).astype(np.int64) - codes.min()
    reach = int(4 * variance**0.5) + 1
    kernel = np.exp(-np.square(np.arange(-reach, reach + 1)) / (2 * variance))
    at_means = len(codes) * np.bincount(places, minlength=counts.size)
    expected = _LEAST_SHARE * np.convolve(at_means, kernel / kernel.sum())[reach : reach + counts.size]
    judged = expected > _LEAST_EXPECTED
    empty = int(np.count_nonzero(counts[judged] == 0))
    return float(pdtrc(empty - 1, np.sum(np.exp(-expected[judged])))) if empty else 1.0


# Power

_POWER_SEED = 20261126
_SMALLEST = 1e-9  # share of the largest singular value below which a direction is dropped
_CLEAR = 0.05  # largest share of the frame means' variance from their own noise, in tests of the power
_MOST_RMS = 0.1  # beyond, the chi-squared limit of a log-normal power is off
_LEAST_POWERS = 20  # least powers of a level in tests of the law
_LEAST_WEIGHT = 0.02  # least variance of an output in weights, as a share of the median


def without_power(samples: np.ndarray, light: np.ndarray, shot: np.ndarray) -> np.ndarray:
    """Return frames or readings of one setting as they would be at mean power, float64, shape (readings, n_outputs).

    `light` is what a power of 1 adds to a reading, D, for each of its frames, (frames, n_outputs), and `shot` what it
    adds to a reading's variance.
    """
    mean = samples.mean(axis=0, dtype=np.float64)
    rest, used = samples - mean, light[np.any(light != 0, axis=1)]
    variance = rest.var(axis=0, ddof=1)
    for _ in range(2):  # the first weights hold the power's own variance
        scale = _deviations(variance)
        powers = np.linalg.lstsq((used / scale).T, (rest / scale).T, rcond=_SMALLEST)[0].T
        left = rest - powers @ used
        freedom = max(len(samples) - 1, 1) * (1 - np.linalg.matrix_rank(used) / samples.shape[1])
        variance = np.sum(np.square(left), axis=0) / freedom
    changed = variance + powers @ shot[np.any(light != 0, axis=1)]
    left *= np.sqrt(variance / np.maximum(changed, 0.01 * variance + 1e-300))
    scale = _deviations(variance)
    basis, sizes, _ = np.linalg.svd((used / scale).T, full_matrices=False)
    basis = basis[:, sizes > _SMALLEST * sizes[:1].sum()]  # (n_outputs, directions)
    standard = left / scale
    fresh = np.random.default_rng(_POWER_SEED).standard_normal((len(samples), basis.shape[1]))
    standard += (fresh - standard @ basis) @ basis.T
    return np.asarray(mean + standard * scale)


def _deviations(variance: np.ndarray) -> np.ndarray:
    """Return square roots of variances, each at least a share of the median: numbers of few codes may not vary."""
    return np.asarray(np.sqrt(np.maximum(variance, _LEAST_WEIGHT * np.median(variance) + 1e-300)))


def readings_without_power(device: CameraDevice, inputs: torch.Tensor, samples: np.ndarray) -> np.ndarray:
    """Return readings (inputs, readings, n_outputs) without the powers of their frames, under the described light."""
    exposure, scale = device.exposure, device.recovery.decode()[0]
    light = (device.frame_rates(inputs) - exposure.dark_e).transpose(1, 0, 2)  # (inputs, frames, n_outputs)
    unit = exposure.gain_dn * scale
    signed = light * unit * device.recovery.weights[:, None]
    parts = zip(samples, signed, np.square(unit) * light, strict=True)
    steady = [without_power(part, change, shot) for part, change, shot in parts]
    return np.stack(steady).astype(samples.dtype)


def frames_without_power(transfer: PhotonTransfer, levels: np.ndarray) -> list[np.ndarray]:
    """Return the looked-at frames of some levels of the light series at mean power; the first level has no light."""
    frames, gain = transfer.light.looked_at, transfer.estimates(0.5)["gain_dn_per_e"].value
    dark = frames[0].mean(axis=0, dtype=np.float64)
    found = []
    for level in levels:
        light = np.maximum(frames[level].mean(axis=0, dtype=np.float64) - dark, 0.0)[None]
        found.append(without_power(frames[level], light, gain * light) if level > 0 else frames[level])
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedPower:
    """Powers of frames at the settings that show them, and the law that the description names.

    Attributes:
        settings: the description's section.
        noise: variances of frame means at all settings, the anchor last.
        flat: power of each frame at levels of flat light, relative to the level's mean, shape (levels, frames).
        anchor: the same for frames of the anchor, shape (frames,).
    """

    settings: PowerSettings
    noise: LightNoise
    flat: np.ndarray
    anchor: np.ndarray

    @classmethod
    def of(
        cls, settings: PowerSettings, transfer: PhotonTransfer, noise: LightNoise, anchor: np.ndarray
    ) -> NamedPower:
        """Take the powers from the means of frames at settings whose own noise is far below the power's.

        `noise` has variances of frame means at the series' used levels and at the anchor, `anchor` each frame's light.
        """
        used = transfer.used()
        r2 = noise.estimate**2
        clear = noise.own < _CLEAR * r2 * np.square(noise.light)
        kept = used[clear[:-1]]
        means = transfer.light.frame_means[kept] - transfer.zero()
        flat = means / means.mean(axis=1, keepdims=True) if kept.size else means
        return cls(settings=settings, noise=noise, flat=flat, anchor=anchor / anchor.mean())

    @property
    def obstacles(self) -> list[str]:
        """Reasons why no limit of this power can be certified, whatever frames say."""
        found = []
        if self.settings.drift_rms is not None:
            found.append(
                "the power drifts (light.power.drift_rms), and a calibration sees one state of the drift"
            )
        if self.noise.estimate > _MOST_RMS:
            found.append(
                f"the power varies by more than {_MOST_RMS:.0%}, where the limit of its spread is not exact"
            )
        return found

    def property_p_values(self) -> dict[str, dict[str, float]]:
        """Return the P-values of the named law, of one spread at all settings, and of independent frames."""
        z = np.log(np.maximum(self.flat, 1e-9)) if self.settings.law == "log_normal" else self.flat
        noise = self.noise
        ratios = noise.frame_variances / (noise.own + np.square(noise.estimate * noise.light))
        tails = [
            2 * min(chi2.sf(d * x, d), chi2.cdf(d * x, d)) for x, d in zip(ratios, noise.freedom, strict=True)
        ]
        spreads = {"a setting": bonferroni(min(tails), len(tails))}
        if self.flat.size:
            rest = int(noise.freedom[:-1].sum())
            pooled = float(noise.freedom[:-1] @ ratios[:-1]) / rest
            ratio, freedom = float(ratios[-1]) / pooled, (int(noise.freedom[-1]), rest)
            spreads["anchor"] = min(1.0, 2 * min(f.sf(ratio, *freedom), f.cdf(ratio, *freedom)))
        found: dict[str, dict[str, float]] = {"the power has one spread at every light": spreads}
        if len(z) and z.shape[1] >= _LEAST_POWERS:
            parts = [level[:, None] for level in z]
            shape = shape_p_values(parts)["each output is Gaussian"]
            found[f"the power of a frame is {self.settings.law.replace('_', '-')}"] = shape
            between = independence_p_values([*parts, np.log(np.maximum(self.anchor, 1e-9))[:, None]])
            name = "readings do not repeat or follow from earlier ones"
            found["the power of a frame does not follow from earlier ones"] = between[name]
        return found


TOLERANCE = 0.1
FULL = 0.7
"""Share of the saturation above which an output's described light may be clipped."""
_SURELY = 8.0
"""Standard errors of the line by which the law of a single output is lowered."""


def input_p_values(
    device: CameraDevice, transfer: PhotonTransfer, inputs: torch.Tensor, samples: np.ndarray, dn_per_e: float
) -> dict[str, float]:
    """Return the one-sided p-value of each input's variance in the mean over outputs, and of the quietest output.

    `samples` are readings (inputs, readings, n_outputs) at mean power, without a reference beam; `dn_per_e` is the mean
    digital number for each described electron of light.
    """
    exposure, recovery = device.exposure, device.recovery
    light_e = np.maximum((device.frame_rates(inputs) - exposure.dark_e) / exposure.mean_power, 0.0)
    light_dn = max(dn_per_e, 0.0) * light_e  # (frames, inputs, n_outputs)
    rounding = exposure.sensor.rounding_limit_dn2(light_e + np.min(exposure.dark_e))
    stated = recovery.variance(np.maximum(transfer.variance_at(light_dn) - rounding, 0.0))
    start, slope = recovery.variance(np.ones_like(light_dn)), recovery.variance(light_dn)
    kept = np.all(light_e < FULL * exposure.sensor.saturation_e, axis=0)
    freedom, variances = samples.shape[1] - 1, samples.var(axis=1, ddof=1, dtype=np.float64)
    found: dict[str, float] = {}
    for number, here in enumerate(kept):
        if not np.any(here):
            continue
        variance, law = variances[number, here], np.maximum(stated[number, here], 1e-300)
        means = np.array([[start[number, here].mean(), slope[number, here].mean()]])
        line, degrees = transfer.error_of(transfer.sums_of_line(means)[0])
        least, own = (1 - TOLERANCE) * law, float(variance.mean()) * (2 / (freedom * variance.size)) ** 0.5
        error = max(float(np.hypot(own, (1 - TOLERANCE) * line)), 1e-300)
        found[f"input {number + 1}"] = float(stdtr(degrees, (variance.mean() - least.mean()) / error))
        surely = least * max(0.0, 1 - _SURELY * line / float(law.mean()))
        ratios = freedom * variance / np.maximum(surely, 1e-300)
        quietest = float(chdtr(freedom, ratios.min()))
        found[f"quietest output of input {number + 1}"] = bonferroni(quietest, variance.size)
    return found or {"no output below saturation": 1.0}


_ANCHOR_FRAMES = 100
_PARTS_OF_BETA = 12
"""Two limits each of the gain, the anchor, its zero, the mean dark charge and a pixel's deviation from it; one each of
the light's noise and of the spread over pixels."""
_MOST_PIXELS = 1_000_000
"""Most outputs, and groups of outputs, whose dark charges all lie within their limits."""
_BRIGHTEST = 8.0
"""Standard deviations above its mean that no frame of a Gaussian light reaches (1e-15 a frame)."""
_AS_NOISY = "readings of every input are as noisy as flat frames state"
_BLACK = "the black level does not vary from frame to frame"
_POISSON = "the third cumulants of frames are those of Poisson counts"
_TAILS = "frames have the tails of Poisson counts"
_CODES = "every code of the converter occurs"
_SPREAD = "the anchor's light is spread over the outputs as described"
_UNKNOWN_SPREAD = (
    "light is spread over the outputs in another way than described (unequal responses, another medium): the law "
    "credits dark charge and gain, and labels only whose rates the run measures (protection.rate_frames)"
)
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
"""Remedies by the beginning of the failed property; the first match counts."""
_HOLOGRAMS = (
    "readings are holograms (camera.reference_beam), and no frame that is tested holds the reference's light"
)
_UNEVEN_NOISE = (
    "noise of the read-out differs over pixels or is shared ({keys}), and limits take pixels for alike"
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
        tests: tests of the limits' premises.
        light_noise: relative standard deviation of the light from frame to frame; its limits are the certified ones, at
            the share of beta, which are wider than those of other constants.
        remarks: the assumed law, and why none is certified.
        trust: properties whose faults frames show only above some size.
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

    Light that varies is certified only if the description names the law of its power (``camera.light.power``);
    `samples` are the inputs' readings at mean power, shape (inputs, readings, n_outputs).
    """
    share = beta / _PARTS_OF_BETA
    taken, blank = device.anchor_frames(_ANCHOR_FRAMES), device.flat_frames(_ANCHOR_FRAMES)
    blank_dn, saturation_e = float(blank.mean(dtype=np.float64)), device.exposure.sensor.saturation_e
    described_e = device.anchor_light_e
    kept = np.flatnonzero(described_e < FULL * saturation_e)
    if kept.size < 30:
        raise ValueError(
            f"the anchor of {kept.size} outputs lies below {FULL:.0%} of saturation: at least 30 are needed; dim "
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
    level = tests[0].level
    trust = (
        third_cumulant(third.error, level),
        cut_tails(beside.limit, beside.frames, "frames"),
        missing_numbers(max(beside.numbers, 1), beside.frames, level / 2, samples=2, of="frames"),
        weak_inputs(TOLERANCE, samples[0].size, level / (2 * len(samples))),
    )

    # Limits are certified if every needed test holds and nothing else forbids it.
    failed = [test.text for test in tests if test.needed and not test.holds]
    unknown_spread = len(failed) == 1 and failed[0].startswith(_SPREAD)
    if unknown_spread:
        tests = tuple(replace(test, needed=test.needed and test.text != failed[0]) for test in tests)
        failed = []
    failed += [_HOLOGRAMS] if device.is_holographic else []
    uneven = () if camera is None or camera.pixels is None else camera.pixels.uneven_keys
    if uneven:
        keys = ", ".join(f"camera.pixels.{key}" for key in uneven)
        failed += [_UNEVEN_NOISE.format(keys=keys)]
    failed += [] if power is None else power.obstacles
    failed += _impossible(transfer, share)
    # most electrons of ambient light at an output, which no law credits
    ambient_e = float(device.exposure.light.ambient_e * np.max(device.exposure.response))
    return CountCertificate(
        law=(
            None
            if failed
            else _law(transfer, means, described, light, power, share, ambient_e).model_copy(
                update={"light_spread": "unknown" if unknown_spread else None}
            )
        ),
        tests=tests,
        light_noise=Estimate(value=light.estimate, low=light.lower(share), high=light.upper(share)),
        remarks=(
            *_remarks(power, light.upper(share), ambient_e, failed),
            *((_UNKNOWN_SPREAD,) if unknown_spread and not failed else ()),
        ),
        trust=trust,
    )


def _impossible(transfer: PhotonTransfer, share: float) -> list[str]:
    """Return the constants with values that no camera has, or that are too uncertain for a law."""
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
    """Return as remarks the assumed law and, if none is certified, why, with a remedy."""
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

    Frames (frames, n_outputs) show the anchor at mean power; its described light lies well below saturation at `kept`.
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
        _SPREAD: {
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
        "gain_dn_per_e_low": gain.low,
        "gain_dn_per_e_high": gain.high,
    }
    if power is None:
        excess = 1 + _BRIGHTEST * limit
        return PhotonCountLaw(**limits, light_ratio_high=float(highest) * excess, frame_ratio_high=excess)
    return FluctuatingCountLaw(
        **limits,
        light_ratio_high=float(highest),
        power_law=power.settings.law,
        power_rms_low=power.noise.lower(share),
        power_rms_high=power.noise.upper(share),
    )


_BLANK_FRAMES = 100
_OTHER_FRAMES = 500  # frames of a camera besides its series, about: pilots, the anchor and blanks
_STANDARD_ERRORS = 5.0  # by which a number must differ from an older one, or from the description
_UNLIKE = 0.05  # largest relative difference from the description without a remark


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Calibration(Shown):
    """What a calibration took and found.

    Attributes:
        certificate: the summary that is kept.
        readings: readings of the first constant input, shape (readings, n_outputs).
        reading_noise: evaluation of the readings of all inputs.
        transfer: the flat series of a camera; None if the device is no camera.
    """

    certificate: Certificate
    readings: np.ndarray
    reading_noise: ReadingNoise
    transfer: PhotonTransfer | None = None

    def _shown(self) -> dict[str, object]:
        return {"certificate": self.certificate, "readings": f"{self.readings.shape[0]} of each input"}


def calibrate(
    device: NoisyDevice,
    *,
    plan: Plan | None = None,
    readings: int = 500,
    confidence: float = 0.95,
    beta: float = 1e-6,
    progress: Show = True,
) -> Calibration:
    """Calibrate an open device.

    A camera's constants come from frames under uniform light (`photon_transfer`), and its law is a count law; a device
    whose noise is described as Gaussian is certified by its readings of several inputs. No law is certified if a test
    speaks against a property that it needs.

    Args:
        device: open; a window of a few thousand outputs is enough.
        plan: how many flat frames; None for the default.
        readings: of each of the constant inputs (`constant_inputs`), at least 30.
        confidence: of each single interval, in (0, 1).
        beta: probability that the certified law's numbers are wrong, in [1e-11, 0.5].
        progress: whether to show a bar of the frames; see `opusim.progress.Show`.

    Raises:
        ValueError: a number out of range, or frames that cannot be evaluated.
        ConfigError: the device is served by another machine, and its law is one of counts.
        DeviceError: the device fails.
    """
    checks.in_range(1e-11, 0.5, beta=beta)
    checks.integer(readings=readings, minimum=30)
    counts = isinstance(device.stated_noise, PhotonCountNoise | FluctuatingCountNoise)
    if counts and device.identity[0] != device.name:
        raise ConfigError(
            device.name,
            "kind",
            "is served, and a law of counts needs frames, which only its own machine takes; calibrate it there "
            "before it is served, and start its server with --certificate",
        )
    opened, plan = device.usage.frames, plan or Plan()
    inputs = constant_inputs(device.n_inputs)
    transfer, described = None, {}
    with Progress("calibrate", "frames", show=progress) as bar:
        bar.follow(frames_of(plan, device, readings), lambda: device.usage.frames - opened)
        # successive readings of one vector, of the number type that the device gives
        samples = np.stack(
            [device.project(x.expand(readings, -1).contiguous()).cpu().numpy() for x in inputs]
        )
        if isinstance(device, CameraDevice):
            transfer, noise, content = _of_camera(device, inputs, samples, plan, confidence, beta)
            described = described_constants(device.description)
        else:
            noise, content = _of_readings(device, inputs, samples, confidence, beta)
    taken = samples[0]
    estimates: dict[str, Estimate] = content.pop("estimates")
    known = {key: each for key, each in estimates.items() if np.all(np.isfinite([*vars(each).values()]))}
    # constants that differ from the described ones, and those that frames do not tell
    remarks, width = content.pop("remarks"), 2 * float(norm.isf((1 - confidence) / 2))
    for key, each in estimates.items():
        stated = described.get(key, each.value)
        error = (each.high - each.low) / width
        if key not in known:
            remarks.append(f"no {key}: frames do not tell it")
        elif abs(each.value - stated) > max(_STANDARD_ERRORS * error, _UNLIKE * abs(stated)):
            remarks.append(
                f"{key} is {each.value:.5g} by these frames and {stated:.5g} by the description; find out why, or put "
                "the measured number there and calibrate again"
            )
    name, digest = device.identity
    certificate = Certificate(
        device=name,
        description_digest=digest,
        date=time.strftime("%Y-%m-%d"),
        n_inputs=device.n_inputs,
        n_outputs=device.n_outputs,
        frames=device.usage.frames - opened,
        confidence=confidence,
        beta=beta,
        estimates={key: Limits(**vars(each), described=described.get(key)) for key, each in known.items()},
        tests=[
            TestedProperty(
                text=test.text,
                standard_errors=min(_MOST_DEVIATE, test.standard_errors),  # also of a statistic that is NaN
                holds=test.holds,
                needed=test.needed,
            )
            for test in content.pop("tests")
        ],
        remarks=remarks,
        **content,
    )
    return Calibration(certificate=certificate, readings=taken, reading_noise=noise, transfer=transfer)


def described_constants(description: DeviceDescription) -> dict[str, float]:
    """Return a camera description's constants under the keys of the estimates; those that are off are left out."""
    camera = camera_sections(description)[0]
    sensor, seconds = sensor_of(camera, description.frames), camera.light.exposure_us * 1e-6
    described = {
        "quantum_efficiency": camera.light.quantum_efficiency,
        "gain_dn_per_e": sensor.gain_dn_per_e,
        "black_level_dn": sensor.black_level_dn,
        "read_noise_e": sensor.read_noise_e,
        "dark_current_e_per_s": dark_charge_e(camera, camera.light.exposure_us) / seconds,
        "saturation_e": sensor.saturation_e,
        "prnu": camera.sensor.prnu,
        "dsnu_e": camera.sensor.dsnu_e,
        "decorrelation_s": math.inf if camera.drift is None else camera.drift.decorrelation_s,
    }
    if camera.pixels is not None and camera.pixels.dcnu:
        described["dark_spread_e_per_s"] = camera.pixels.dcnu * described["dark_current_e_per_s"]
    return {key: value for key, value in described.items() if math.isfinite(value)}


def _of_camera(
    device: CameraDevice,
    inputs: torch.Tensor,
    samples: np.ndarray,
    plan: Plan,
    confidence: float,
    beta: float,
) -> tuple[PhotonTransfer, ReadingNoise, dict[str, Any]]:
    """Evaluate readings of a camera and its frames under uniform light; return what its certificate states."""
    camera = camera_sections(device.description)[0]
    if camera.light.power is not None:
        samples = readings_without_power(device, inputs, samples)
    noise = evaluate_readings(samples, beta=beta, alarm=FAMILY_ALARM / 2, gaussian=False)
    transfer = take_photon_transfer(
        device.flat_frames,
        plan,
        exposure_us=camera.light.exposure_us,
        is_rounded=camera.sensor.adc_bits is not None,
    )
    found = certify_counts(device, transfer, beta, inputs, samples)
    estimates, remarks = transfer.estimates(confidence), [*found.remarks]
    blank = device.flat_frames(_BLANK_FRAMES)
    try:
        estimates["dark_noise_dn"] = dark_noise_dn(
            blank, confidence=confidence, is_rounded=transfer.is_rounded
        )
    except ValueError as error:
        remarks.append(f"no dark_noise_dn: {error}")
    if camera.drift is not None and camera.drift.hops_per_s:
        remarks.append("no decorrelation_s: the laser hops between modes (camera.drift.hops_per_s)")
    elif camera.drift is not None:  # the decorrelation time, from frames of one pattern at two times
        patterns = sparse_patterns(device.n_inputs, min(64, 2 * device.n_inputs))
        elapsed_s, call_s = camera.drift.decorrelation_s / 3, 0.0
        if camera.drift.within_call:  # the frames of `again` are later than the first by the time of a call
            call_s = device.description.frames.period_us(device.n_outputs) * 1e-6 * len(patterns)
        device.drift_to(0.0)
        first, again = (device.intensities(patterns) for _ in range(2))
        device.drift_to(elapsed_s + call_s)
        later = device.intensities(patterns)
        device.drift_to(0.0)
        estimates["decorrelation_s"] = decorrelation_time(
            first, again, later, elapsed_s=elapsed_s, confidence=confidence
        )
    simulated = [_SIMULATED] if device.description.is_simulated else []
    content = {
        "noise": found.law if all(test.holds for test in noise.tests if test.needed) else None,
        "estimates": estimates | {"light_noise": found.light_noise},
        "tests": (*found.tests, *noise.tests),
        "remarks": [*remarks, _BIAS, _STUDENT, *simulated],
        "trust": [*found.trust, *noise.trust(gaussian=False)],
    }
    return transfer, noise, content


def _of_readings(
    device: NoisyDevice, inputs: torch.Tensor, samples: np.ndarray, confidence: float, beta: float
) -> tuple[ReadingNoise, dict[str, Any]]:
    """Evaluate readings of a device that shows no frames; return what its certificate states."""
    noise, stated = evaluate_readings(samples, beta=beta), device.stated_noise
    if isinstance(stated, MeasuredNoise):  # variances only; the tests decide on the law
        stated = None
    gaussian = stated is None or isinstance(stated, GaussianNoise)
    certified = gaussian and noise.is_gaussian and noise.smallest_std_low > 0
    remarks = [*noise.assumptions, *([_NO_LAW] if stated is None else []), _SCALE]
    remarks += [_SIMULATED] if device.description.is_simulated else []
    estimates: dict[str, Estimate] = {}
    # The spread of B's entries, from the mean readings of the dense random input minus the blank ones: their mean
    # square over outputs is |x|^2 times the entries' variance plus the noise of two means.
    nothing, dense = samples[1].astype(np.float64), samples[2].astype(np.float64)
    if dense.shape[1] >= GROUPS:
        own = (nothing.var(axis=0, ddof=1) + dense.var(axis=0, ddof=1)) / len(dense)
        squares = np.square(dense.mean(axis=0) - nothing.mean(axis=0)) - own
        estimates["entry_std"] = root_mean(squares / float(inputs[2].square().sum()), confidence)
    return noise, {
        "noise": GaussianLaw(std=noise.smallest_std_low) if certified else None,
        "estimates": estimates,
        "tests": noise.tests,
        "remarks": remarks,
        "trust": [*noise.trust(gaussian=True)],
    }


def frames_of(plan: Plan, device: NoisyDevice, readings: int) -> int:
    """Return about how many frames a calibration takes: readings of constant inputs, a camera's series and pilots."""
    taken = len(constant_inputs(device.n_inputs)) * readings * device.description.frames.frames_per_projection
    if device.description.camera is None:
        return taken
    dark_series = 1 if plan.temperatures_c is None else 2
    return taken + plan.frames * (plan.light_levels + 1 + dark_series * plan.dark_levels) + _OTHER_FRAMES


_COUNTS = PhotonCountLaw, FluctuatingCountLaw
_MOST_DEVIATE = 999.0
"""Most standard errors that are written; they also stand for infinity and NaN."""
_BIAS = "bias light, if there is any, counts as dark current: both are counts that no data change"
_STUDENT = "limits rest on Student's law of the grouped jackknife, tested at 90 %, not in its far tails"
_NO_LAW = "the device's description states no law: only the tests support the Gaussian one"
_SCALE = (
    "the law bounds noise in units of the reading, not the distance of two inputs' noise-free readings: that grows "
    "with entry_std, 1 where entries of B have the variance 1 that this project takes for granted"
)
_SIMULATED = "a certificate of a simulated device validates the simulation only"


def constant_inputs(n_inputs: int) -> torch.Tensor:
    """Return the inputs at which noise is measured, ternary, shape (5, n_inputs); they do not depend on data.

    Plus and minus one in turn; zeros, the darkest; a random vector without a zero; a random vector with one entry in
    ten; ones, the brightest.
    """
    turns = torch.ones(n_inputs)
    turns[1::2] = -1
    dense, sparse = reference_vectors(2, n_inputs)
    sparse[torch.arange(n_inputs) % 10 != 0] = 0
    return torch.stack([turns, torch.zeros(n_inputs), dense, sparse, torch.ones(n_inputs)])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number of a certificate together with a new measurement.

    Attributes:
        name: of the number.
        certified: its certified value.
        measured: its new value.
        standard_errors: their difference in joint standard errors.
    """

    name: str
    certified: float
    measured: float
    standard_errors: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is below five standard errors."""
        return abs(self.standard_errors) < _STANDARD_ERRORS


def compare(certificate: Certificate, measured: Calibration) -> tuple[Comparison, ...]:
    """Compare every estimate of a certificate with the new one."""
    found, rows = measured.certificate.estimates, []
    for name, old in certificate.estimates.items():
        if name not in found:
            continue
        new = found[name]
        widths = (old.high - old.low) / norm.isf((1 - certificate.confidence) / 2) / 2
        new_width = (new.high - new.low) / norm.isf((1 - measured.certificate.confidence) / 2) / 2
        error = max((widths**2 + new_width**2) ** 0.5, 1e-300)
        rows.append(
            Comparison(
                name=name,
                certified=old.value,
                measured=new.value,
                standard_errors=float(
                    np.clip((new.value - old.value) / error, -_MOST_DEVIATE, _MOST_DEVIATE)
                ),
            )
        )
    return tuple(rows)


def require_noise(certificate: Certificate, measured: Calibration) -> None:
    """Refuse a device whose noise is weaker than certified, beyond what chance allows at the new measurement's beta.

    Raises:
        NoiseBelowCertificate: the certificate's noise law cannot be relied on any more.
        ConfigError: the certificate has no law, or the law of another kind of device.
    """
    law, noise, fresh = certificate.noise, measured.reading_noise, measured.certificate.noise
    if law is None:
        raise ConfigError(certificate.device, "certificate", "certifies no law, so there is nothing to check")
    failed = [test.text for test in measured.certificate.tests if test.needed and not test.holds]
    refused = [text for text in measured.certificate.remarks if text.startswith("no law is certified")]
    reason = ""
    if failed:
        reason = f"tests now speak against the certified law: {'; '.join(failed)}; calibrate again"
    elif fresh is None and refused:
        reason = refused[0]
    elif isinstance(law, GaussianLaw):
        # an upper limit of the smallest standard deviation, from the output with the smallest sample variance
        n = noise.readings - 1
        beyond = chi2.ppf(noise.beta / (noise.inputs * noise.n_outputs), n)
        high = float(noise.smallest_std * (n / beyond) ** 0.5)
        if high < law.std:
            reason = (
                f"the smallest standard deviation is at most {high:.6g}, certified is {law.std:.6g}; stop private work "
                "and calibrate again"
            )
    elif isinstance(law, _COUNTS) and isinstance(fresh, _COUNTS) and type(law) is type(fresh):
        if fresh.dark_e_high < law.dark_e_low:
            reason = (
                f"the dark charge is at most {fresh.dark_e_high:.6g} electrons, certified is {law.dark_e_low:.6g}; "
                "warm the sensor to its temperature"
            )
        elif fresh.light_spread and not law.light_spread:
            reason = (
                "light is spread over the outputs in another way than certified; bring medium and camera back"
            )
        elif fresh.light_ratio_low > law.light_ratio_high:
            reason = (
                f"the light is at least {fresh.light_ratio_low:.6g} of the described, certified is at most "
                f"{law.light_ratio_high:.6g}; dim the laser"
            )
        # frames would be brighter than certified more often than beta allows
        elif (
            isinstance(law, FluctuatingCountLaw)
            and isinstance(fresh, FluctuatingCountLaw)
            and (fresh.power_law != law.power_law or fresh.power_rms_low > law.power_rms_high)
        ):
            reason = (
                f"the light's power is {fresh.power_law} of at least {fresh.power_rms_low:.4g} rms, certified is "
                f"{law.power_law} of at most {law.power_rms_high:.4g}; steady the laser"
            )
        reason += ", or calibrate again" if reason else ""
    else:
        raise ConfigError(
            certificate.device, "certificate", f"certifies the law {law.law!r}, which this device cannot show"
        )
    if reason:
        raise NoiseBelowCertificate(f"{certificate.device}: {reason}")
