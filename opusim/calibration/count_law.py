"""Test the law of counts in frames: its shape beyond mean and variance, and a light whose power fluctuates.

**Third cumulants.** Digital numbers of Poisson counts of gain K, with Gaussian noise of variance c behind them, have
the third cumulant K (v - c) at the variance v, whatever the light. A straight line through the third cumulants of all
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
drawn anew from N(0, 1) by a fixed seed, so that every test of independence sees independent readings if, but for the
power, they are. Each frame of a reading has a power.

The powers are tested by themselves: their law (logarithms, if it is log-normal), equal spread at all levels and at the
anchor, and independence from frame to frame, on which the chi-squared limit of their spread rests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import nbdtr, pdtrc
from scipy.stats import chi2, f

from opusim.calibration.independence import independence_p_values, near_limit
from opusim.calibration.photon_transfer import LightNoise, PhotonTransfer
from opusim.calibration.reading_noise import shape_p_values
from opusim.description.camera import PowerSettings
from opusim.devices.camera import CameraDevice
from opusim.p_values import bonferroni, normal_p_value

_LEAST_DN2 = 1.0  # variance of a level from which rounding changes no third cumulant
_LEAST_FRAMES = 8
_SEED = 20261128
_BEYOND = (1000, 300, 100, 30)  # simulated numbers beyond the limits
_MOST_BEYOND = 0.02  # share of all simulated numbers
_LEAST_SHARE = 0.5  # of the expected numbers of a code, which rest on a Gaussian law at each pixel
_LEAST_EXPECTED = 2.0


@dataclass(frozen=True, kw_only=True)
class ThirdCumulants:
    """What third cumulants of frames say of the counts' law.

    Attributes:
        ratio: slope of the third cumulants over the gain, 1 for Poisson counts.
        error: its standard error; infinite if fewer than three levels show it.
    """

    ratio: float
    error: float

    @property
    def p_value(self) -> float:
        """Two-sided, of Poisson counts; 1 if no level shows any."""
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
        numbers: how many numbers there are of each.
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
    """Compare the flat frames with simulated ones.

    Args:
        transfer: the flat series.
        power_varies: whether the simulation takes each frame's power from its mean.
    """
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
                # frames of the pixels, means and gain of the measured ones, each of its frame's power if that varies
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
    """Return numbers less what their frame and pixel share, over their pixel's deviation; rounding is filled in."""
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
    """Return the p-value of the codes that no number of a level has, where pixels' means and noise let them occur."""
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
_SMALLEST = 1e-9  # share of the largest singular value below which a direction is none
_CLEAR = 0.05  # share of the frame means' variance that their own noise may have in tests of the power
_MOST_RMS = 0.1  # beyond, the chi-squared limit of a log-normal power is off
_LEAST_POWERS = 20  # of a level, in tests of the law
_LEAST_WEIGHT = 0.02  # least variance of an output in weights, as a share of the median


def without_power(samples: np.ndarray, light: np.ndarray, shot: np.ndarray) -> np.ndarray:
    """Return frames or readings as they would be at mean power.

    Args:
        samples: one setting, shape (readings, n_outputs).
        light: what a power of 1 adds to a reading, D, for each of its frames: shape (frames, n_outputs).
        shot: what it adds to a reading's variance, of that shape, at least 0.

    Returns:
        float64, shape (readings, n_outputs).
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
    """Square roots, of small variances no smaller than a share of the median's: numbers of few codes may not vary."""
    return np.asarray(np.sqrt(np.maximum(variance, _LEAST_WEIGHT * np.median(variance) + 1e-300)))


def readings_without_power(device: CameraDevice, inputs: torch.Tensor, samples: np.ndarray) -> np.ndarray:
    """Return readings of constant inputs without the powers of their frames; light as the description says.

    Args:
        device: open, with a laser whose power fluctuates.
        inputs: float32, shape (inputs, n_inputs).
        samples: shape (inputs, readings, n_outputs).
    """
    exposure, scale = device.exposure, device.recovery.decode()[0]
    light = (device.frame_rates(inputs) - exposure.dark_e).transpose(1, 0, 2)  # (inputs, frames, n_outputs)
    unit = exposure.sensor.gain_dn_per_e * scale
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
        anchor: the same of frames of the anchor, shape (frames,).
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

        Args:
            settings: the description's section.
            transfer: the flat series.
            noise: variances of frame means at its used levels, and at the anchor.
            anchor: mean light of each frame of the anchor, DN.
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
        """Why no limit of this power can be certified, whatever frames say."""
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

    def limits(self, share: float) -> tuple[float, float]:
        """Return limits of rms, each passed with probability at most share, for Gaussian powers of frames."""
        return self.noise.lower(share), self.noise.upper(share)
