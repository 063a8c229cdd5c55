"""Exposure by a real instrument: laser power that fluctuates, pixels that differ, frames that do not arrive.

Order of the stages, with those of `opusim.camera.stages` between them:
laser power of the frame -> displacement of the image -> cross-talk of photo-electrons -> dark current of each pixel
(non-uniform, hot) -> count -> full well -> nonlinear read-out -> offset, read noise, gain, black level, converter ->
dropped and repeated frames.

Cross-talk spreads single electrons, so counts stay independent Poisson counts: of mixed rates,
    light_j = (1 - 2 c) L_j + c (L_(j-1) + L_(j+1)),        neighbours by the pixels' numbers.
Dark current is I exp(s z_j - s^2 / 2) at pixel j, s^2 = log(1 + dcnu^2), times `hot_factor` at hot pixels; dead pixels
see neither light nor dark current. A vibrating image is displaced by a number D of pixels common to the frame, D = 0 on
average, normal, cut at 1, and a pixel collects from where it was and from the neighbour on that side,
    light_j = (1 - |D|) L_j + |D| L_(j +- 1),       on average (1 - m) L_j + m (L_(j-1) + L_(j+1)) / 2,  m = E |D|.
The read-out N (1 - q N / N_sat) is a function of the count and changes no
guarantee. A dropped frame is black; a repeated one shows the numbers of the frame before, so that readings are no
longer independent, and no law is stated.

**Power.** The laser's power in each frame is one number W for all pixels, fluctuating from frame to frame and drifting
slowly:
    log_normal   W = exp(s g - s^2 / 2) exp(s' h - s'^2 / 2),   s^2 = log(1 + rms^2), s'^2 = log(1 + drift_rms^2)
    gaussian     W = max(0, 1 + rms g + drift_rms h)

g is a standard normal number of the frame. Frames that one call takes are exposed in turn, and the numbers g of frames
k apart correlate by rho^k, rho = exp(-frame period / correlation time); frames of different calls are independent. h is
a stationary Ornstein-Uhlenbeck process of the training step, computed at any time without its past by the media
weights of `opusim.camera.speckle`, so that a resumed run finds the same drift. In every frame W has the stated law, of
the relative variance (1 + rms^2)(1 + drift_rms^2) - 1 or rms^2 + drift_rms^2, which is all that a guarantee uses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from typing_extensions import override

from opusim.camera.exposure import FRAME_SIGNS, FRAMES_PER_TERNARY, Exposure
from opusim.camera.speckle import grid_point, medium_weights
from opusim.camera.stages import fill_counts, frame_normals, pixel_normals
from opusim.description.camera import PixelSettings
from opusim.noise import LightPower
from opusim.randomness.streams import NoiseStream, SeededStream

_DCNU_PLANE, _FAULT_PLANE = 18, 19  # counter words that no medium uses


class Laser:
    """A laser whose power fluctuates, and the state of its slow drift.

    Attributes:
        mean: mean power at the training step of the last `seek`.

    Args:
        law: name of the law of W, a key of `opusim.noise.POWER_LAWS`.
        rms: relative standard deviation from frame to frame, at least 0.
        correlation: rho of successive frames, in [0, 1).
        drift_rms: relative standard deviation of the slow part, at least 0; 0 is off.
        drift_per_step: time that passes in a step, in units of the slow part's correlation time.
        seed: of the drift, or None to draw one from the operating system's entropy.
    """

    def __init__(
        self,
        law: str,
        rms: float,
        *,
        correlation: float,
        drift_rms: float,
        drift_per_step: float,
        seed: int | None,
    ) -> None:
        self._law, self._rms, self._correlation = law, rms, correlation
        self._drift_rms, self._drift_per_step = drift_rms, drift_per_step
        self._slow = SeededStream(int.from_bytes(os.urandom(8)) if seed is None else seed, "laser drift")
        self._fast = LightPower(law=law, rms=rms)
        self.mean = 1.0
        self.seek(0)

    @property
    def power(self) -> LightPower:
        """The law of W in a frame, drift included.

        Raises:
            ValueError: both parts together exceed the law's largest standard deviation.
        """
        square = self._rms**2 + self._drift_rms**2
        if self._law == "log_normal":
            square += (self._rms * self._drift_rms) ** 2
        return LightPower(law=self._law, rms=math.sqrt(square))

    def seek(self, step: int) -> None:
        """Move the drift to a training step; `mean` is the mean power there."""
        if self._drift_rms == 0:
            return
        h = 0.0
        for epoch, weight in medium_weights(grid_point(step * self._drift_per_step)):
            self._slow.seek(epoch)
            h += weight * float(self._slow.normal((1,)))
        self.mean = float(LightPower(law=self._law, rms=self._drift_rms).of_normal(h))

    def powers(self, frames: int, stream: NoiseStream) -> np.ndarray:
        """Return the powers of frames that are exposed in turn, float64, shape (frames,).

        Args:
            frames: at least 1.
            stream: source of the noise; takes one reading of it.
        """
        g = frame_normals(frames, self._correlation, stream)
        if self._law == "gaussian":
            return np.maximum(0.0, self.mean + self._rms * g)
        return self.mean * self._fast.of_normal(g)

    def covariance(self, frames: int) -> np.ndarray:
        """Return the covariance of the powers of successive frames around the drift, shape (frames, frames)."""
        apart = np.abs(np.subtract.outer(np.arange(frames), np.arange(frames)))
        shared = np.where(apart == 0, 1.0, self._correlation**apart)
        if self._law == "gaussian":
            return np.asarray(self._rms**2 * shared)
        return np.asarray(self.mean**2 * np.expm1(self._fast.log_std**2 * shared))


def dead_pixels(faults: PixelSettings, seed: int, pixels: np.ndarray) -> np.ndarray:
    """Return whether each pixel is dead; computed from the sensor's seed and the pixel's number."""
    return np.asarray(ndtr(pixel_normals(seed, _FAULT_PLANE, pixels)) > 1 - faults.dead_share)


def dark_scale(faults: PixelSettings, seed: int, pixels: np.ndarray) -> np.ndarray:
    """Return the dark current of each pixel as a multiple of the sensor's, float64, at least 0."""
    s = math.sqrt(math.log1p(faults.dcnu**2))
    scale = np.exp(s * pixel_normals(seed, _DCNU_PLANE, pixels) - 0.5 * s * s)
    scale[ndtr(pixel_normals(seed, _FAULT_PLANE, pixels)) < faults.hot_share] *= faults.hot_factor or 1.0
    return np.where(dead_pixels(faults, seed, pixels), 0.0, scale)


def with_neighbours(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels with their neighbours, increasing, and the places of each pixel and of its two neighbours there.

    The neighbours are the pixels of the numbers before and after; pixel 0 is its own left neighbour.
    """
    around = np.stack([pixels, np.maximum(pixels - 1, 0), pixels + 1])
    wide = np.unique(around)
    return wide, np.searchsorted(wide, around)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImperfectExposure(Exposure):
    """An `Exposure` with the faults of a real instrument; those that are off change nothing.

    The sensor's saturation is finite if the nonlinearity is above 0.

    Attributes:
        laser: the laser's power, or None if it is constant.
        crosstalk: share of a pixel's electrons that each of the two neighbours collects, in [0, 0.25].

        dropped: probability that a frame is lost.
        repeated: probability that a frame repeats the one before.
        pointing_rms: standard deviation of the image's displacement D, pixels, in [0, 0.2]; not together with
            cross-talk.
        pointing_correlation: of D in successive frames, in [0, 1).
        places: with either of them, of each output, and of its left and right neighbour, among the pixels that fields
            then have on their last axis, shape (3, n_outputs).
        wide_response: with cross-talk, relative sensitivity of those pixels, shape (pixels,).
    """

    laser: Laser | None = None
    crosstalk: float = 0.0
    dropped: float = 0.0
    repeated: float = 0.0
    pointing_rms: float = 0.0
    pointing_correlation: float = 0.0
    places: np.ndarray | None = None
    wide_response: np.ndarray | float = 1.0

    @property
    @override
    def mean_power(self) -> float:
        return 1.0 if self.laser is None else self.laser.mean

    @override
    def parts(self) -> Iterator[tuple[float, np.ndarray | slice, np.ndarray]]:
        """On average, if the image vibrates."""
        if self.places is None:
            yield from super().parts()
        elif self.pointing_rms:
            m = self.pointing_rms * math.sqrt(2 / math.pi)  # the mean of |D|
            for share, place in zip((1 - m, m / 2, m / 2), self.places, strict=True):
                yield share, place, self.gain_e
        else:
            c, gain = self.crosstalk, self.light.anchor_e / (2.0 * self.mirrors) * self.wide_response
            for share, place in zip((1 - 2 * c, c, c), self.places, strict=True):
                yield share, place, np.where(self.response > 0, np.asarray(gain)[place], 0.0)

    @override
    def power_covariance(self, frames: int) -> np.ndarray | None:
        return None if self.laser is None else self.laser.covariance(frames)

    @override
    def moments(self, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """With a nonlinear read-out, rounding counts as 1/12 DN^2 and no end is met.

        With f(N) = N - c N^2 and N ~ Poisson(m): E f = m - c (m + m^2), Var f = m - 2 c (2 m^2 + m) + c^2 (4 m^3 +
        6 m^2 + m).
        """
        if self.nonlinearity == 0:
            return super().moments(rates)
        sensor, c = self.sensor, self.nonlinearity / self.sensor.saturation_e
        shot, gain = float(sensor.shot_noise), sensor.gain_dn_per_e
        mean = rates - c * (shot * rates + np.square(rates))
        variance = rates - 2 * c * (2 * rates**2 + rates) + c * c * (4 * rates**3 + 6 * rates**2 + rates)
        rest = sensor.variance_dn2(0.0)
        return sensor.black_level_dn + gain * (mean + self.offset_e), gain**2 * shot * variance + rest

    @override
    def expose(self, field: torch.Tensor, stream: NoiseStream) -> torch.Tensor:
        """Takes up to three readings of the stream."""
        return torch.from_numpy(self._numbers(self._light_now(field.numpy()), stream))

    @override
    def expose_uniform(self, photons: float, frames: int, stream: NoiseStream) -> np.ndarray:
        """The laser's power scales the photons, cross-talk leaves them uniform."""
        light = self.light.quantum_efficiency * photons * self.response
        return self._numbers(np.broadcast_to(light, (frames, light.size)), stream)

    @override
    def recover(
        self,
        y: torch.Tensor,
        field: torch.Tensor,
        total: np.ndarray,
        decode: np.ndarray,
        shift: np.ndarray,
        stream: NoiseStream,
    ) -> None:
        """A row's frames are exposed in the order p, a - p, n, a - n."""
        rows = y.shape[0]
        shown = field.numpy().reshape(2, 2, rows, -1)  # part, sign, row, pixel
        frames = np.stack([shown, total[:, None, None, :] - shown], axis=2)
        in_turn = frames.transpose(0, 3, 1, 2, 4).reshape(2, FRAMES_PER_TERNARY * rows, -1)
        numbers = self._numbers(self._light_now(in_turn), stream)
        signed = np.tensordot(FRAME_SIGNS, numbers.reshape(rows, FRAMES_PER_TERNARY, -1), axes=(0, 1))
        y.copy_(torch.from_numpy(decode[0] * signed - shift[:, None] * decode[1]))

    def _light_now(self, field: np.ndarray) -> np.ndarray:
        """Electrons of light at power 1 of fields of shape (2, frames, pixels).

        Shape (frames, n_outputs), or (3, frames, n_outputs) if the image vibrates: of each place that a pixel sees.
        """
        intensity = np.sum(np.square(field, dtype=np.float64), axis=0)
        if self.places is None or not self.pointing_rms:
            return self.light_of(intensity)
        return np.stack([self.gain_e * intensity[:, place] for place in self.places])

    def _numbers(self, light: np.ndarray, stream: NoiseStream) -> np.ndarray:
        """Digital numbers of frames that are exposed in turn; light as `_light_now` gives it, or without its places."""
        frames, sensor = light.shape[-2], self.sensor
        shot, read = self._normal(2, frames, stream)
        if light.ndim == 3:
            d = self.pointing_rms * frame_normals(frames, self.pointing_correlation, stream)[:, None]
            aside = np.where(d < 0, light[1], light[2])
            light = light[0] + np.minimum(np.abs(d), 1.0) * (aside - light[0])
        power = np.ones(frames) if self.laser is None else self.laser.powers(frames, stream)
        rates = np.ascontiguousarray(power[:, None] * light + self.dark_e)  # the kernel takes flat views
        counts = rates
        if sensor.shot_noise:
            counts = np.empty(rates.shape)
            fill_counts(counts.reshape(-1), rates.reshape(-1), shot.reshape(-1))
        if sensor.full_well_e is not None:
            counts = np.minimum(counts, sensor.full_well_e)
        if self.nonlinearity:
            counts = counts * (1.0 - self.nonlinearity * np.minimum(counts / sensor.saturation_e, 1.0))
        numbers = counts + self.offset_e
        if sensor.read_noise_e > 0:
            numbers += sensor.read_noise_e * read
        numbers = sensor.black_level_dn + sensor.gain_dn_per_e * numbers
        if sensor.adc_bits is not None:
            numbers = np.clip(np.rint(numbers), 0.0, sensor.top_dn)
        arrived = numbers.astype(np.float32)
        if self.dropped or self.repeated:  # some frames are black, some repeat the one before
            lost, again = stream.normal((2, frames)).double().numpy()
            arrived[lost < ndtri(self.dropped)] = 0.0
            for frame in np.flatnonzero(again < ndtri(self.repeated)).tolist():
                arrived[frame] = arrived[max(frame - 1, 0)]
        return arrived
