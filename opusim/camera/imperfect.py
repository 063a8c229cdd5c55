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

from opusim.camera.exposure import FRAME_SIGNS, FRAMES_PER_TERNARY, Exposure
from opusim.camera.speckle import grid_point, medium_weights
from opusim.camera.stages import fill_counts, pixel_normals
from opusim.description.camera import PixelSettings
from opusim.noise import LightPower
from opusim.plugins import Deferred
from opusim.randomness.streams import NoiseStream, SeededStream

signal = Deferred("scipy.signal")

_DCNU_PLANE, _FAULT_PLANE = 18, 19  # counter words that no medium uses


@dataclass(frozen=True, kw_only=True)
class LaserLaw:
    """How a laser's power fluctuates.

    Attributes:
        law: name of the law of W, a key of `opusim.noise.POWER_LAWS`.
        rms: relative standard deviation from frame to frame, at least 0.
        correlation: rho of successive frames, in [0, 1).
        drift_rms: relative standard deviation of the slow part, at least 0; 0 is off.
        drift_per_step: time that passes in a step, in units of the slow part's correlation time.
    """

    law: str
    rms: float
    correlation: float = 0.0
    drift_rms: float = 0.0
    drift_per_step: float = 0.0

    @property
    def power(self) -> LightPower:
        """The law of W in a frame, drift included.

        Raises:
            ValueError: both parts together exceed the law's largest standard deviation.
        """
        square = self.rms**2 + self.drift_rms**2
        if self.law == "log_normal":
            square += (self.rms * self.drift_rms) ** 2
        return LightPower(law=self.law, rms=math.sqrt(square))


class Laser:
    """A laser with a state: where its slow drift is.

    Args:
        law: see `LaserLaw`.
        seed: of the drift, or None to draw one from the operating system's entropy.
    """

    def __init__(self, law: LaserLaw, seed: int | None) -> None:
        self.law = law
        self._slow = SeededStream(int.from_bytes(os.urandom(8)) if seed is None else seed, "laser drift")
        self._fast = LightPower(law=law.law, rms=law.rms)
        self.mean = 1.0
        self.seek(0)

    def seek(self, step: int) -> None:
        """Move the drift to a training step; `mean` is the mean power there."""
        law = self.law
        if law.drift_rms == 0:
            return
        h = 0.0
        for epoch, weight in medium_weights(grid_point(step * law.drift_per_step)):
            self._slow.seek(epoch)
            h += weight * float(self._slow.normal((1,)))
        self.mean = float(LightPower(law=law.law, rms=law.drift_rms).of_normal(h))

    def powers(self, frames: int, stream: NoiseStream) -> np.ndarray:
        """Return the powers of frames that are exposed in turn, float64, shape (frames,).

        Args:
            frames: at least 1.
            stream: source of the noise; takes one reading of it.
        """
        g = frame_normals(frames, self.law.correlation, stream)
        if self.law.law == "gaussian":
            return np.maximum(0.0, self.mean + self.law.rms * g)
        return self.mean * self._fast.of_normal(g)

    def covariance(self, frames: int) -> np.ndarray:
        """Return the covariance of the powers of successive frames around the drift, shape (frames, frames)."""
        apart = np.abs(np.subtract.outer(np.arange(frames), np.arange(frames)))
        shared = np.where(apart == 0, 1.0, self.law.correlation**apart)
        if self.law.law == "gaussian":
            return np.asarray(self.law.rms**2 * shared)
        return np.asarray(self.mean**2 * np.expm1(self._fast.log_std**2 * shared))


def frame_normals(frames: int, correlation: float, stream: NoiseStream) -> np.ndarray:
    """Return standard normal numbers of frames that are exposed in turn, float64, shape (frames,).

    Args:
        frames: at least 1.
        correlation: rho, in [0, 1); numbers of frames k apart correlate by rho^k.
        stream: source of the noise; takes one reading of it.
    """
    g: np.ndarray = stream.normal((frames,)).double().numpy()
    if correlation > 0:
        g[1:] *= math.sqrt(1 - correlation**2)
        g = signal.lfilter([1.0], [1.0, -correlation], g)
    return g


def dead_pixels(faults: PixelSettings, seed: int, pixels: np.ndarray) -> np.ndarray:
    """Return whether each pixel is dead; computed from the sensor's seed and the pixel's number."""
    return np.asarray(ndtr(pixel_normals(seed, _FAULT_PLANE, pixels)) > 1 - faults.dead_share)


def dark_scale(faults: PixelSettings, seed: int, pixels: np.ndarray) -> np.ndarray:
    """Return the dark current of each pixel as a multiple of the sensor's, float64, at least 0."""
    s = math.sqrt(math.log1p(faults.dcnu**2))
    scale = np.exp(s * pixel_normals(seed, _DCNU_PLANE, pixels) - 0.5 * s * s)
    scale[ndtr(pixel_normals(seed, _FAULT_PLANE, pixels)) < faults.hot_share] *= faults.hot_factor or 1.0
    return np.where(dead_pixels(faults, seed, pixels), 0.0, scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossTalk:
    """How electrons spread to the neighbouring pixels.

    Attributes:
        share: of a pixel's electrons that each of the two neighbours collects, in [0, 0.25].
        response: relative sensitivity of all pixels that are looked at, shape (pixels,).
        places: of each output, and of its left and right neighbour, among those pixels, shape (3, n_outputs).
    """

    share: float
    response: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Pointing:
    """How the image is displaced from frame to frame.

    Attributes:
        rms: standard deviation of D, pixels, in (0, 0.2].
        correlation: of D in successive frames, in [0, 1).
        places: as for `CrossTalk`.
    """

    rms: float
    correlation: float
    places: np.ndarray


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

    Attributes:
        laser: the laser's power, or None if it is constant.
        dark_scale: dark current of each output's pixel as a multiple of the sensor's, shape (n_outputs,).
        crosstalk: cross-talk, or None if there is none; fields then have all its pixels on their last axis.
        nonlinearity: q, in [0, 0.25]; the sensor's saturation is finite if it is above 0.
        dropped: probability that a frame is lost.
        repeated: probability that a frame repeats the one before.
        pointing: displacement of the image, or None if it rests; not together with cross-talk; fields then have all its
            pixels on their last axis.
    """

    laser: Laser | None = None
    dark_scale: np.ndarray
    crosstalk: CrossTalk | None = None
    nonlinearity: float = 0.0
    dropped: float = 0.0
    repeated: float = 0.0
    pointing: Pointing | None = None

    @property
    def dark_charge_e(self) -> np.ndarray:
        """Dark charge of each pixel."""
        return self.dark_current_e * self.dark_scale

    @property
    def mean_power(self) -> float:
        """Mean power of a frame now, relative to the described light."""
        return 1.0 if self.laser is None else self.laser.mean

    def parts(self) -> Iterator[tuple[float, np.ndarray | slice, np.ndarray]]:
        """See `Exposure.parts`; on average, if the image vibrates."""
        if self.pointing is not None:
            m = self.pointing.rms * math.sqrt(2 / math.pi)  # the mean of |D|
            for share, place in zip((1 - m, m / 2, m / 2), self.pointing.places, strict=True):
                yield share, place, self.gain_e
            return
        if self.crosstalk is None:
            yield from super().parts()
            return
        c, talk = self.crosstalk.share, self.crosstalk
        gain = self.light.anchor_e / (2.0 * self.mirrors) * talk.response
        for share, place in zip((1 - 2 * c, c, c), talk.places, strict=True):
            yield share, place, np.where(self.response > 0, gain[place], 0.0)

    def power_covariance(self, frames: int) -> np.ndarray | None:
        """See `Exposure.power_covariance`."""
        return None if self.laser is None else self.laser.covariance(frames)

    def moments(self, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Exposure.moments`; with a nonlinear read-out, rounding counts as 1/12 DN^2 and no end is met.

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

    @property
    def least_slope(self) -> float:
        """Least slope of the read-out below saturation: 1 - 2 q."""
        return 1.0 - 2.0 * self.nonlinearity

    def expose(self, field: torch.Tensor, stream: NoiseStream) -> torch.Tensor:
        """See `Exposure.expose`; takes up to three readings of the stream."""
        return torch.from_numpy(self._numbers(self._light_now(field.numpy()), stream))

    def expose_uniform(self, photons: float, frames: int, stream: NoiseStream) -> np.ndarray:
        """See `Exposure.expose_uniform`; the laser's power scales the photons, cross-talk leaves them uniform."""
        light = self.light.quantum_efficiency * photons * self.response
        return self._numbers(np.broadcast_to(light, (frames, light.size)), stream)

    def recover(
        self,
        y: torch.Tensor,
        field: torch.Tensor,
        total: np.ndarray,
        decode: np.ndarray,
        shift: np.ndarray,
        stream: NoiseStream,
    ) -> None:
        """See `Exposure.recover`; a row's frames are exposed in the order p, a - p, n, a - n."""
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
        if self.pointing is None:
            return self.light_of(intensity)
        return np.stack([self.gain_e * intensity[:, place] for place in self.pointing.places])

    def _numbers(self, light: np.ndarray, stream: NoiseStream) -> np.ndarray:
        """Digital numbers of frames that are exposed in turn; light as `_light_now` gives it, or without its places."""
        frames, sensor = light.shape[-2], self.sensor
        shot, read = self._normal(2, frames, stream)
        if self.pointing is not None and light.ndim == 3:
            d = self.pointing.rms * frame_normals(frames, self.pointing.correlation, stream)[:, None]
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
