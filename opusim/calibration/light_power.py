"""Certify counts under a light whose power fluctuates by a named law: take the power out of frames, test what is left.

In a frame of power w = 1 + c, pixel j reads b_j + w D_j + noise of variance v_j + c s_j, with D_j its light [DN] and
s_j = K D_j. The powers c are found by weighted least squares over pixels and taken off, and what is left is scaled to
the variance at mean power. The power itself hides the noise along D / sqrt v; that component is drawn anew from N(0, 1)
by a fixed seed, so that every test of independence sees independent readings if, but for the power, they are. Each
frame of a reading has a power.

The powers are tested by themselves: their law (logarithms, if it is log-normal), equal spread at all levels and at the
anchor, and independence from frame to frame, on which the chi-squared limit of their spread rests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import chi2, f

from opusim.calibration.gaussian_shape import shape_p_values
from opusim.calibration.independence import independence_p_values
from opusim.calibration.photon_transfer import LightNoise, PhotonTransfer
from opusim.description.camera import PowerSettings
from opusim.devices.camera import CameraDevice
from opusim.p_values import bonferroni

_SEED = 20261126
_SMALLEST = 1e-9  # share of the largest singular value below which a direction is none
_CLEAR = 0.05  # share of the frame means' variance that their own noise may have in tests of the power
_MOST_RMS = 0.1  # beyond, the chi-squared limit of a log-normal power is off
_LEAST_FRAMES = 20  # of a level, in tests of the law
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
    fresh = np.random.default_rng(_SEED).standard_normal((len(samples), basis.shape[1]))
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
        found: dict[str, dict[str, float]] = {"the power has one spread at every light": self._spreads()}
        if len(z) and z.shape[1] >= _LEAST_FRAMES:
            parts = [level[:, None] for level in z]
            shape = shape_p_values(parts)["each output is Gaussian"]
            found[f"the power of a frame is {self.settings.law.replace('_', '-')}"] = shape
            between = independence_p_values([*parts, np.log(np.maximum(self.anchor, 1e-9))[:, None]])
            name = "readings do not repeat or follow from earlier ones"
            found["the power of a frame does not follow from earlier ones"] = between[name]
        return found

    def _spreads(self) -> dict[str, float]:
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
        return spreads

    def limits(self, share: float) -> tuple[float, float]:
        """Return limits of rms, each passed with probability at most share, for Gaussian powers of frames."""
        return self.noise.lower(share), self.noise.upper(share)
