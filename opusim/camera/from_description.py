"""Build the parts of a camera from its description, and describe it as text and as laws of readings.

**A real instrument** (`ImperfectExposure`): laser power that fluctuates, pixels that differ, frames that do not arrive.
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
Read noise differs from pixel to pixel (log-normal, of a stated root mean square), pixels of a row and of a column share
noise that is drawn anew in every frame (EMVA 1288 release 4.0 separates these three parts), and telegraph pixels jump
between two levels +- A / 2: a stationary Markov chain whose level correlates by exp(-frame period / correlation time)
from frame to frame of a call (Wang et al., IEDM 2006). Gains differ from pixel to pixel as those of a CMOS sensor's
amplifiers do, K_j = K (1 + gain_spread z_j) (Huang et al., Nature Methods 10, 653, 2013, map gain, offset and variance
of each pixel): numbers are b + K_j (electrons), so that a pixel's variance over its mean is K_j, and K under PRNU.
All of it comes after the count and earns nothing. The read-out N (1 - q N / N_sat) is a function of the count and
changes no guarantee. A dropped frame is black; a repeated one shows the numbers of the frame before, so that readings
are no longer independent, and no law is stated.

**Power.** The laser's power in each frame is one number W for all pixels, fluctuating from frame to frame and drifting
slowly:
    log_normal   W = exp(s g - s^2 / 2) exp(s' h - s'^2 / 2),   s^2 = log(1 + rms^2), s'^2 = log(1 + drift_rms^2)
    gaussian     W = max(0, 1 + rms g + drift_rms h)

g is a standard normal number of the frame. Frames that one call takes are exposed in turn, and the numbers g of frames
k apart correlate by rho^k, rho = exp(-frame period / correlation time); frames of different calls are independent. With
`averages` the stated rms and correlation time tau are those of the power at an instant, 1 + rms x with an
Ornstein-Uhlenbeck process x of the spectrum 4 tau / (1 + (2 pi f tau)^2), and W is its mean over an exposure t = a tau:
    Var W = rms^2 2 (a - 1 + e^-a) / a^2,      Cov[W_k, W_(k+n)] = rms^2 ((1 - e^-a) / a)^2 e^a rho^n,      n >= 1,
so that a long exposure sees rms sqrt(2 / a) (Papoulis, Probability, Random Variables and Stochastic Processes: time
averages of a stationary process). h is a stationary Ornstein-Uhlenbeck process of the training step, computed at any
time without its past by the media weights of `opusim.camera.speckle`, so that a resumed run finds the same drift. In
every frame W has the stated law, of the relative variance (1 + rms^2)(1 + drift_rms^2) - 1 or rms^2 + drift_rms^2,
which is all that a guarantee uses.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from typing_extensions import override

from opusim import checks
from opusim.camera.exposure import FRAME_SIGNS, MOST_SATURATED, Exposure, Recovery, ReferenceBeam
from opusim.camera.speckle import FaultyMirrors, Speckle, SpeckleLaw, grid_point, medium_weights
from opusim.camera.stages import Sensor, fill_counts, frame_normals, pixel_normals
from opusim.description.camera import (
    FRAMES_PER_TERNARY,
    CameraSettings,
    PixelSettings,
    PowerSettings,
    ReferenceBeamSettings,
    TransferSettings,
)
from opusim.description.schema import DeviceDescription, FrameSettings, MediumSettings
from opusim.errors import ConfigError, NoiseUnknown
from opusim.noise import FluctuatingCountNoise, LightPower, PhotonCountNoise
from opusim.plugins import Deferred
from opusim.randomness.streams import NoiseStream, SeededStream, derive_seed
from opusim.tables import unit_of

signal = Deferred("scipy.signal")

_DCNU_PLANE, _FAULT_PLANE, _READ_PLANE, _TELEGRAPH_PLANE = 18, 19, 21, 22  # counter words that no medium uses
_GAIN_PLANE = 23


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
        exposure: a, the exposure in units of the correlation time, over which a frame averages, and the time from its
            end to the next one; None if frames do not average.
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
        exposure: tuple[float, float] | None = None,
        seed: int | None,
    ) -> None:
        self._law, self._at_once, self._correlation, self._exposure = law, rms, correlation, exposure
        self._rms = rms if exposure is None else rms * math.sqrt(_averaged(exposure[0]))
        self._drift_rms, self._drift_per_step = drift_rms, drift_per_step
        self._slow = SeededStream(int.from_bytes(os.urandom(8)) if seed is None else seed, "laser drift")
        self._fast = LightPower(law=law, rms=self._rms)
        self.mean = 1.0
        self.seek(0)

    @property
    def power(self) -> LightPower:
        """The law of W in a frame, drift included; ValueError if both exceed the law's largest standard deviation."""
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
            self._slow.seek(int(epoch))
            h += weight * float(self._slow.normal((1,)))
        self.mean = float(LightPower(law=self._law, rms=self._drift_rms).of_normal(h))

    def powers(self, frames: int, stream: NoiseStream) -> np.ndarray:
        """Return the powers of frames that are exposed in turn, float64; takes one reading of the stream."""
        if self._exposure is not None:
            # Means of x over exposures in turn, exact. Given x_0 at its beginning, an exposure's mean m and its end x_1
            # are Gaussian with the means x_0 (1 - e^-a) / a and x_0 e^-a, the variances (2 a - 3 + 4 e^-a - e^-2a) /
            # a^2 and 1 - e^-2a, and the covariance (1 - e^-a)^2 / a.
            a, pause = self._exposure
            first, own, between, begin = stream.normal((4, frames)).double().numpy()
            fall, end, kept = -math.expm1(-a), math.sqrt(-math.expm1(-2 * a)), math.exp(-pause)
            variance = 2 * a / 3 if a < 1e-3 else (2 * a - 3 + 4 * math.exp(-a) - math.exp(-2 * a)) / a**2
            slope = fall**2 / a / end
            x = kept * end * first + math.sqrt(-math.expm1(-2 * pause)) * between  # new at the next beginning
            x = signal.lfilter([1.0], [1.0, -kept * math.exp(-a)], np.concatenate([begin[:1], x[:-1]]))
            mean = x * fall / a + slope * first + math.sqrt(max(variance - slope**2, 0.0)) * own
            return np.maximum(0.0, self.mean + self._at_once * mean)
        g = frame_normals(frames, self._correlation, stream)
        if self._law == "gaussian":
            return np.maximum(0.0, self.mean + self._rms * g)
        return self.mean * self._fast.of_normal(g)

    def exposed(self, factor: float) -> Laser:
        """Return the laser as frames of `factor` times the described exposure see it."""
        if self._exposure is None:
            return self
        other, (a, pause) = copy.copy(self), self._exposure
        other._exposure = a * factor, max(a + pause - a * factor, 0.0)
        other._rms = self._at_once * math.sqrt(_averaged(a * factor))
        return other

    def covariance(self, frames: int) -> np.ndarray:
        """Return the covariance of the powers of successive frames around the drift, shape (frames, frames)."""
        apart = np.abs(np.subtract.outer(np.arange(frames), np.arange(frames)))
        shared = np.where(apart == 0, 1.0, self._correlation**apart)
        if self._exposure is not None:
            a, pause = self._exposure
            between = (
                (math.expm1(-a) / a) ** 2 * math.exp(-pause) * self._correlation ** np.maximum(apart - 1, 0)
            )
            return np.asarray(self._at_once**2 * np.where(apart == 0, _averaged(a), between))
        if self._law == "gaussian":
            return np.asarray(self._rms**2 * shared)
        return np.asarray(self.mean**2 * np.expm1(self._fast.log_std**2 * shared))


def _averaged(a: float) -> float:
    """Return the variance of means of x over exposures of a correlation times: 2 (a - 1 + e^-a) / a^2."""
    if a < 1e-3:  # the formula loses digits
        return 1 - a / 3 + a * a / 12
    return 2 * (a + math.expm1(-a)) / a**2


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
class UnevenReadOut:
    """A read-out whose gain or noise differs over pixels, or whose noise pixels share.

    Attributes:
        gain_scale: gain of each pixel over the sensor's, above 0, shape (n_outputs,).
        read_scale: read noise of each pixel over its root mean square, shape (n_outputs,).
        row_e: standard deviation of the rows' noise, electrons, at least 0.
        column_e: of the columns' noise.
        rows: number of each pixel's row, from 0, shape (n_outputs,).
        columns: number of each pixel's column.
        levels_e: distance of the two levels of each pixel, electrons, shape (n_outputs,); 0: no telegraph pixel.
        correlation: of a level in successive frames, in [0, 1).
    """

    gain_scale: np.ndarray
    read_scale: np.ndarray
    row_e: float
    column_e: float
    rows: np.ndarray
    columns: np.ndarray
    levels_e: np.ndarray
    correlation: float

    @classmethod
    def of(
        cls, faults: PixelSettings, row_pixels: int | None, seed: int, pixels: np.ndarray, correlation: float
    ) -> Self:
        """Return the read-out of some pixels, computed from the sensor's seed and their numbers."""
        s = math.sqrt(math.log1p((faults.read_noise_spread or 0.0) ** 2))
        jumps = ndtr(pixel_normals(seed, _TELEGRAPH_PLANE, pixels)) < (faults.telegraph_share or 0.0)
        rows, columns = (0 * pixels, pixels) if row_pixels is None else np.divmod(pixels, row_pixels)
        return cls(
            gain_scale=1.0 + (faults.gain_spread or 0.0) * pixel_normals(seed, _GAIN_PLANE, pixels),
            read_scale=np.exp(s * pixel_normals(seed, _READ_PLANE, pixels) - s * s),  # of mean square 1
            row_e=faults.row_noise_e or 0.0,
            column_e=faults.column_noise_e or 0.0,
            rows=np.unique(rows, return_inverse=True)[1].reshape(-1),
            columns=np.unique(columns, return_inverse=True)[1].reshape(-1),
            levels_e=np.where(jumps, faults.telegraph_e or 0.0, 0.0),
            correlation=correlation,
        )

    def gaussian_e(self, read_noise_e: float) -> np.ndarray:
        """Return the standard deviation of the Gaussian noise of each pixel, electrons: read, row and column noise."""
        return np.sqrt(np.square(read_noise_e * self.read_scale) + self.row_e**2 + self.column_e**2)

    def electrons(self, frames: int, stream: NoiseStream) -> np.ndarray:
        """Return row and column noise and levels of frames in turn, electrons; takes a reading for each that is on."""
        total = np.zeros((frames, self.rows.size))
        for std, line in ((self.row_e, self.rows), (self.column_e, self.columns)):
            if std:
                total += std * stream.normal((frames, int(line.max()) + 1)).double().numpy()[:, line]
        jumping = np.flatnonzero(self.levels_e)
        if jumping.size:
            z = stream.normal((frames, jumping.size)).double().numpy()
            switch = np.where(ndtr(z) < (1 - self.correlation) / 2, -1.0, 1.0)
            switch[0] = np.sign(z[0])  # the first level is one of both
            total[:, jumping] += 0.5 * self.levels_e[jumping] * np.cumprod(switch, axis=0)
        return total

    def covariance_e2(self, weights: np.ndarray) -> np.ndarray:
        """Return sum over frames f != g of w_f w_g Cov of the levels in frames f and g, electrons^2, (n_outputs,)."""
        apart = np.abs(np.subtract.outer(np.arange(weights.size), np.arange(weights.size)))
        shared = np.where(apart == 0, 0.0, self.correlation**apart)
        return np.asarray(np.square(self.levels_e) / 4 * (weights @ shared @ weights))


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
        places: with cross-talk or displacement, places of each output and of its left and right neighbour on the last
            axis of fields, shape (3, n_outputs).
        wide_response: with cross-talk, relative sensitivity of the pixels of that axis, shape (pixels,).
        uneven: noise of the read-out that differs over pixels or that they share, or None.
    """

    laser: Laser | None = None
    crosstalk: float = 0.0
    dropped: float = 0.0
    repeated: float = 0.0
    pointing_rms: float = 0.0
    pointing_correlation: float = 0.0
    places: np.ndarray | None = None
    wide_response: np.ndarray | float = 1.0
    uneven: UnevenReadOut | None = None

    @property
    @override
    def gain_dn(self) -> np.ndarray | float:
        return super().gain_dn if self.uneven is None else self.sensor.gain_dn_per_e * self.uneven.gain_scale

    @property
    @override
    def mean_power(self) -> float:
        return 1.0 if self.laser is None else self.laser.mean

    @override
    def parts(self) -> Iterator[tuple[float, np.ndarray | slice, np.ndarray]]:
        """Yield the parts on average, if the image vibrates."""
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
    def shared_variance_dn2(self, weights: np.ndarray) -> np.ndarray | float:
        if self.uneven is None:
            return 0.0
        return np.square(self.gain_dn) * self.uneven.covariance_e2(weights)

    @override
    def moments(self, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """With a nonlinear or uneven read-out, rounding counts as 1/12 DN^2 and no end is met.

        With f(N) = N - c N^2 and N ~ Poisson(m): E f = m - c (m + m^2), Var f = m - 2 c (2 m^2 + m) + c^2 (4 m^3 +
        6 m^2 + m).
        """
        if self.nonlinearity == 0 and self.uneven is None:
            return super().moments(rates)
        sensor, c = self.sensor, self.nonlinearity / self.sensor.saturation_e
        shot, gain = float(sensor.shot_noise), self.gain_dn
        mean = rates - c * (shot * rates + np.square(rates))
        variance = rates - 2 * c * (2 * rates**2 + rates) + c * c * (4 * rates**3 + 6 * rates**2 + rates)
        rest = sensor.variance_dn2(0.0)
        if self.uneven is not None:
            squares = (
                np.square(self.uneven.gaussian_e(sensor.read_noise_e)) + np.square(self.uneven.levels_e) / 4
            )
            rest = rest + np.square(gain) * squares - (sensor.gain_dn_per_e * sensor.read_noise_e) ** 2
        return sensor.black_level_dn + gain * (mean + self.offset_e), np.square(gain) * shot * variance + rest

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
        components = field.shape[0]
        shown = field.numpy().reshape(components, 2, rows, -1)  # part, sign, row, pixel
        frames = np.stack([shown, total[:, None, None, :] - shown], axis=2)
        in_turn = frames.transpose(0, 3, 1, 2, 4).reshape(components, FRAMES_PER_TERNARY * rows, -1)
        numbers = self._numbers(self._light_now(in_turn), stream)
        signed = np.tensordot(FRAME_SIGNS, numbers.reshape(rows, FRAMES_PER_TERNARY, -1), axes=(0, 1))
        y.copy_(torch.from_numpy(decode[0] * signed - shift[:, None] * decode[1]))

    def _light_now(self, field: np.ndarray) -> np.ndarray:
        """Electrons of light at power 1 of fields of shape (2 modes, frames, pixels).

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
            own = 1.0 if self.uneven is None else self.uneven.read_scale
            numbers += sensor.read_noise_e * own * read
        if self.uneven is not None:
            numbers += self.uneven.electrons(frames, stream)
        numbers = sensor.black_level_dn + self.gain_dn * numbers
        if sensor.adc_bits is not None:
            numbers = np.clip(np.rint(numbers), 0.0, sensor.top_dn)
        arrived = numbers.astype(np.float32)
        if self.dropped or self.repeated:  # some frames are black, some repeat the one before
            lost, again = stream.normal((2, frames)).double().numpy()
            arrived[lost < ndtri(self.dropped)] = 0.0
            for frame in np.flatnonzero(again < ndtri(self.repeated)).tolist():
                arrived[frame] = arrived[max(frame - 1, 0)]
        return arrived


_PRNU_PLANE, _DSNU_PLANE = 16, 17  # counter words that no medium uses


def speckle_of(description: DeviceDescription, n_inputs: int, n_outputs: int) -> Speckle:
    """Return the medium as the camera sees it in a window of n_inputs mirrors, with the faults of the mirrors.

    The number of reference mirrors gives them their share of the window: share / (1 - share) n_inputs, rounded. With a
    reference beam no pixel is masked. With cross-talk, or an image that vibrates, its pixels are those of the outputs
    and their neighbours (`with_neighbours`).

    Raises:
        ConfigError: the anchor would have fewer than two mirrors.
    """
    camera, medium = camera_sections(description)
    share, masks = camera.anchor.reference_share, camera.reference_beam is None
    law = SpeckleLaw(
        n_inputs=n_inputs,
        reference=round(n_inputs * share / (1 - share)),
        seed=medium.seed,
        lowest=camera.anchor.lowest if masks else 0.0,
        highest=math.inf if camera.anchor.highest is None or not masks else camera.anchor.highest,
        grain_correlation=camera.grain_correlation,
        grain_pixels=camera.grain_pixels or 1,
        dense_limit_mib=medium.dense_limit_mib,
        row_pixels=camera.sensor.row_pixels,
        modes=camera.speckle_modes or 1,
    )
    if law.mirrors < 2:
        reason = (
            f"a window of {n_inputs} input has an anchor of one mirror; raise reference_share to 0.5 or more"
        )
        raise ConfigError(description.name, "camera.anchor.reference_share", reason)
    pixels, vibration, mirrors = None, camera.vibration, camera.mirrors
    spreads = camera.pixels is not None and camera.pixels.crosstalk > 0
    if spreads or (vibration is not None and vibration.pointing_rms_pixels):
        pixels, _ = with_neighbours(Speckle(law, n_outputs, description.name).pixels)
        n_outputs = pixels.size
    if mirrors is None:
        return Speckle(law, n_outputs, description.name, pixels)
    seed = derive_seed(medium.seed, "stuck mirrors")
    return FaultyMirrors(law, mirrors, seed, n_outputs, description.name, pixels)


def reference_beam_of(
    description: DeviceDescription,
    camera: CameraSettings,
    beam: ReferenceBeamSettings,
    mirrors: int,
    n_outputs: int,
) -> ReferenceBeam:
    """Return a reference beam of a camera.

    Its intensity over the anchor's, which is 2 `mirrors` in mirror units, is the ratio of their fluxes.
    """
    vibration = camera.vibration
    return ReferenceBeam(
        amplitude=math.sqrt(2 * mirrors * beam.flux_per_s / camera.light.anchor_flux_per_s),
        steps=beam.steps,
        step_error=beam.step_error,
        phase_rms=0.0 if vibration is None else vibration.phase_rms_rad,
        correlation=_frame_correlation(
            description, n_outputs, None if vibration is None else vibration.correlation_us
        ),
    )


def _frame_correlation(description: DeviceDescription, n_outputs: int, time_us: float | None) -> float:
    """Return the correlation of successive frames of a process with a correlation time; None: they are independent."""
    return 0.0 if time_us is None else math.exp(-description.frames.period_us(n_outputs) / time_us)


def laser_of(description: DeviceDescription, power: PowerSettings, n_outputs: int, seed: int | None) -> Laser:
    """Return a laser whose power fluctuates; the seed of its slow drift is drawn if it is None."""
    drift_s, tau_us, exposure, camera = power.drift_s, power.correlation_us, None, description.camera
    if power.averages and tau_us is not None and camera is not None:
        exposed_us = camera.light.exposure_us
        exposure = exposed_us / tau_us, (description.frames.period_us(n_outputs) - exposed_us) / tau_us
    return Laser(
        power.law,
        power.rms,
        correlation=_frame_correlation(description, n_outputs, power.correlation_us),
        drift_rms=power.drift_rms or 0.0,
        drift_per_step=0.0 if drift_s is None else (power.seconds_per_step or 0.0) / drift_s,
        exposure=exposure,
        seed=seed,
    )


def exposure_of(
    description: DeviceDescription,
    mirrors: int,
    pixels: np.ndarray,
    exposure_us: float | None = None,
    temperature_c: float | None = None,
    laser: Laser | None = None,
) -> Exposure:
    """Return the camera's stages at some pixels, by increasing number; None: exposure and temperature as described."""
    camera, medium = camera_sections(description)
    light = camera.light
    if exposure_us is not None:
        checks.positive(exposure_us=exposure_us)
        light.check_exposure(exposure_us)
        laser = None if laser is None else laser.exposed(exposure_us / light.exposure_us)
        light = light.model_copy(update={"exposure_us": exposure_us})
    seed = derive_seed(medium.seed, "fixed pattern")

    def response(places: np.ndarray) -> np.ndarray:
        return 1.0 + camera.sensor.prnu * pixel_normals(seed, _PRNU_PLANE, places)

    stages: dict[str, Any] = {
        "light": light,
        "sensor": sensor_of(camera, description.frames),
        "mirrors": mirrors,
        "dark_current_e": dark_charge_e(camera, light.exposure_us, temperature_c),
        "credited_dark_e": dark_charge_e(camera, light.exposure_us, temperature_c, credited=True),
        "response": response(pixels),
        "offset_e": camera.sensor.dsnu_e * pixel_normals(seed, _DSNU_PLANE, pixels),
    }
    vibration = camera.vibration
    faulty: dict[str, Any] = {}
    if vibration is not None and vibration.pointing_rms_pixels:
        faulty = {
            "pointing_rms": vibration.pointing_rms_pixels,
            "pointing_correlation": _frame_correlation(description, pixels.size, vibration.correlation_us),
            "places": with_neighbours(pixels)[1],
        }
    is_plain = laser is None and camera.pixels is None and camera.transfer is None
    if is_plain and camera.speckle_modes in (None, 1) and not faulty:
        return Exposure(**stages)
    faults, transfer = camera.pixels or PixelSettings(), camera.transfer or TransferSettings()
    seed_of_faults = derive_seed(medium.seed, "pixel faults")
    if faults.crosstalk:
        # with the neighbours; a dead pixel collects nothing and gives nothing away
        wide, places = with_neighbours(pixels)
        sensitive = np.where(dead_pixels(faults, seed_of_faults, wide), 0.0, response(wide))
        faulty = {"crosstalk": faults.crosstalk, "wide_response": sensitive, "places": places}
    if faults.uneven_keys:
        correlation = _frame_correlation(description, pixels.size, faults.telegraph_us)
        row_pixels = camera.sensor.row_pixels
        faulty["uneven"] = UnevenReadOut.of(faults, row_pixels, seed_of_faults, pixels, correlation)
    stages["response"] = np.where(dead_pixels(faults, seed_of_faults, pixels), 0.0, stages["response"])
    return ImperfectExposure(
        **stages,
        laser=laser,
        dark_scale=dark_scale(faults, seed_of_faults, pixels),
        nonlinearity=faults.nonlinearity,
        dropped=transfer.dropped,
        repeated=transfer.repeated,
        **faulty,
    )


def sensor_of(camera: CameraSettings, frames: FrameSettings) -> Sensor:
    """Return the stages after the light, without the fixed pattern, in the numbers that the link sends."""
    sensor = Sensor(**camera.sensor.model_dump(exclude={"prnu", "dsnu_e", "row_pixels"}))
    return sensor if frames.packed_bits is None else sensor.sent_in(frames.packed_bits)


def dark_charge_e(
    camera: CameraSettings, exposure_us: float, temperature_c: float | None = None, *, credited: bool = False
) -> float:
    """Return the dark charge of a frame (that a guarantee may rest on), electrons: current times exposure; 0 if off."""
    law = camera.dark_law()
    if camera.dark is None or law is None:
        return 0.0
    wanted = camera.dark.temperature_c if temperature_c is None else temperature_c
    return (law.credited() if credited else law).current_e_per_s(wanted) * exposure_us * 1e-6


def camera_sections(description: DeviceDescription) -> tuple[CameraSettings, MediumSettings]:
    """Return the two sections that a twin needs; ConfigError if one is missing."""
    if description.camera is None or description.medium is None:
        key = "medium" if description.medium is None else "camera"
        raise ConfigError(description.name, key, "missing; a camera needs [medium] and [camera]")
    return description.camera, description.medium


def number_rows(description: DeviceDescription) -> list[tuple[str, ...]]:
    """Return key, value, unit, status and source of every number."""
    rows: list[tuple[str, ...]] = []
    for key, value in description.numbers().items():
        origin = description.provenance.get(key)
        status, source = (origin.status, origin.source) if origin else ("", "")
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        rows.append((key, shown, unit_of(key), status or ("off" if value == 0 else ""), source))
    return rows


def noise_line(description: DeviceDescription) -> str:
    """Return the noise of a reading as text."""
    noise, camera, frames = description.noise, description.camera, description.frames
    if camera is not None:
        # the light budget of a mean pixel, each stage's share of its variance, and the data on the link
        light, sensor = camera.light, sensor_of(camera, frames)
        dark = dark_charge_e(camera, light.exposure_us)
        shot = sensor.variance_dn2(1.0) - sensor.variance_dn2(0.0)  # DN² per electron
        parts = {
            "photon shot noise": shot * light.anchor_e,
            "bias light": shot * light.bias_e,
            **({"ambient light": shot * light.ambient_e} if light.ambient_e else {}),
            "dark current": shot * dark,
            "read noise": (sensor.gain_dn_per_e * sensor.read_noise_e) ** 2,
            "rounding": 0.0 if sensor.adc_bits is None else 1 / 12,
        }
        total = sum(float(part) for part in parts.values())
        shares = (
            ", ".join(f"{name} {float(part) / total:.3%}" for name, part in parts.items())
            if total
            else "none"
        )
        at = "" if camera.dark is None else f" at {camera.dark.temperature_c:g} °C"
        sent = (
            ""
            if frames.packing is None
            else f"\nsent as {frames.packing}: {sensor.adc_bits} of the converter's {camera.sensor.adc_bits} bits; DN "
            "are those that arrive"
        )
        return (
            f"a mean pixel of the anchor frame: {light.anchor_e:.4g} e⁻ of light, {light.bias_e:.4g} e⁻ of bias light, "
            f"{dark:.4g} e⁻ of dark charge{at}; {sensor.gain_dn_per_e * light.anchor_e:.4g} DN above black, saturated "
            f"at {sensor.saturation_e:.5g} e⁻\nvariance of a frame there: {total:.4g} DN²: {shares}\n"
            "noise: Poisson counts, whose rates depend on what is shown; a reading takes four frames"
            f"{sent}"
        )
    if description.crossbar is not None:
        rounded = "" if description.crossbar.converter.adc_bits is None else ", then rounded by the converter"
        return f"noise: Gaussian, its standard deviation depends on input and weights{rounded}"
    if noise is None:
        if not description.is_simulated:
            return "noise: the hardware's own, which `opusim device calibrate` measures"
        return (
            "noise: none"
            if description.kind == "ideal"
            else f"noise: as the kind {description.kind!r} defines it"
        )
    line = f"noise: Gaussian, standard deviation {noise.value():.6g} projection units at each output"
    if noise.temperature_law is not None:
        temperature_c, law = noise.temperature_law.temperature_c, noise.temperature_law.law()
        share = law.dark_share(temperature_c)
        line += f"; at {temperature_c:g} °C the dark current makes {share:.3%} of its variance"
        if law.thermal_e2_per_k:
            line += f", thermal noise {law.thermal_share(temperature_c):.3%}"
    return line


_UNUSED = 1.5
"""Range of the converter over the full well from which the gain looks forgotten."""
_CUT, _UNCUT = 2.0, 3.0
"""Standard deviations of the read noise between code 0 and a dark frame: fewer need a caution, so many are advised."""


def cautions(description: DeviceDescription) -> list[str]:
    """Return what looks unintended in a camera's numbers, a line each.

    A gain that leaves a third of the converter's range unused at the full well, and read noise that code 0 cuts in dark
    frames, which makes the measured anchor too dark and entries of B too large.
    """
    camera = description.camera
    if camera is None or not camera.sensor.adc_bits:
        return []
    sensor, light = camera.sensor, camera.light
    top, gain, black = 2**camera.sensor.adc_bits - 1, sensor.gain_dn_per_e, sensor.black_level_dn
    dark_e = light.bias_e + light.ambient_e + dark_charge_e(camera, light.exposure_us)
    full, found, gains = gain * (sensor.full_well_e or math.inf), [], [gain]
    if top - black > _UNUSED * full:
        gains.append(gain * (top - black) / full)
        found.append(
            f"camera.sensor.gain_dn_per_e = {gain:.3g} puts full well at {black + full:,.0f} of {top:,} DN; set it to "
            f"{gains[-1]:.3g}, so that all {sensor.adc_bits} bits count"
        )
    noise, lift = gains[-1] * sensor.read_noise_e, gains[-1] * dark_e
    if _CUT * noise > black + lift:
        at = f" at the gain {gains[-1]:.3g}" if found else ""
        found.append(
            f"camera.sensor.read_noise_e = {sensor.read_noise_e:g} is {noise:.3g} DN{at}, and dark frames lie at "
            f"{black + lift:.3g} DN: noise is cut at code 0, and entries of B are not N(0, 1); set "
            f"camera.sensor.black_level_dn to {math.ceil(_UNCUT * noise - lift)}"
        )
    return found


# Laws of readings

_FALLS_FROM_DN = 0.23
"""Noise from which `Sensor.rounding_limit_dn2` falls as noise grows: sqrt(2) / (2 pi), rounded up."""


def count_boxes(exposure: Exposure, recovery: Recovery, largest_fields: np.ndarray) -> PhotonCountNoise:
    """Return the counts of a reading's frames at each output, with boxes of rates.

    Rates lie between bias light with dark current, and those of the largest fields with ambient light; fields,
    (frames, pixels), have the neighbours that cross-talk needs. Readings are decoded with the exact anchor.
    """
    high = exposure.dark_e + exposure.light_of(np.square(largest_fields))
    low = np.broadcast_to(exposure.floor_e, high.shape)
    scale, weight = recovery.decode()[0], count_weights(exposure, recovery)
    slope = 1.0 - 2.0 * exposure.nonlinearity  # the least one below saturation
    frames = float(np.sum(np.square(recovery.weights)))
    # Least and largest variance of a number beyond K^2 rate, DN squared (`Sensor.rounding_limit_dn2`). Where dark
    # frames reach the converter's lower end, their exact variance is the least. It is below 0 where steps are so coarse
    # that rounding hides the counts' own noise.
    # For an uneven read-out the least variance takes the pixel of the least noise in DN and one frame's level, at every
    # pixel (more Gaussian noise hides more of the rounding), or 0 where dark frames may reach the lower end; the
    # largest takes each pixel's own noise and the levels' covariance.
    sensor, uneven = exposure.sensor, exposure.uneven if isinstance(exposure, ImperfectExposure) else None
    beyond: np.ndarray | float = 0.0
    shot = np.square(exposure.gain_dn) * exposure.floor_e * float(sensor.shot_noise)
    if uneven is not None:
        noise_e, levels_e = (
            uneven.gain_scale * each for each in (uneven.gaussian_e(sensor.read_noise_e), uneven.levels_e)
        )
        sensor = replace(sensor, read_noise_e=float(noise_e.min()))
        squares = frames * (np.square(noise_e) - noise_e.min() ** 2 + np.square(levels_e) / 4)
        shared = np.square(uneven.gain_scale) * uneven.covariance_e2(recovery.weights)
        beyond = np.square(scale * sensor.gain_dn_per_e) * (squares + np.maximum(shared, 0.0))
    middle, limit = sensor.variance_dn2(0.0), sensor.rounding_limit_dn2(exposure.floor_e)
    exact = sensor.moments(exposure.floor_e, exposure.offset_e)[1]
    if uneven is not None:
        if sensor.adc_bits is not None and sensor.gain_dn_per_e * sensor.read_noise_e < _FALLS_FROM_DN:
            limit = np.full_like(limit, 0.25)
        if np.ptp(uneven.gain_scale):  # rounding differs with the gain
            limit, exact = np.full_like(limit, 0.25 * (sensor.adc_bits is not None)), middle + shot
        reach = 8.5 * noise_e.max() + levels_e - uneven.gain_scale * exposure.offset_e
        exact = np.where(sensor.black_level_dn < sensor.gain_dn_per_e * reach, 0.0, exact)
    rest = np.minimum(middle - limit, exact - shot)
    counts = np.square(slope * exposure.gain_dn) * exposure.floor_e
    hidden = np.divide(-rest, counts, out=np.zeros_like(rest), where=(rest < 0) & (counts > 0))
    shown = np.maximum(1.0 - hidden, 0.0)  # share of the counts' variance that rounding never hides
    most = frames * np.square(scale) * (middle + limit) + beyond
    most = most + (1 - slope**2 * shown) * np.sum(np.square(weight) * high, axis=0)
    return PhotonCountNoise(
        rate_low=low,
        rate_high=high,
        weight=slope * np.sqrt(shown) * weight,
        added_variance=frames * np.square(scale) * np.maximum(rest, 0.0),
        added_variance_high=most,
    )


def count_weights(exposure: Exposure, recovery: Recovery) -> np.ndarray:
    """Return what one more electron in each frame adds to a reading, without nonlinearity: (frames, n_outputs)."""
    return np.asarray(exposure.gain_dn * recovery.decode()[0] * recovery.weights[:, None])


def under_power(boxes: PhotonCountNoise, power: LightPower, weight: np.ndarray) -> FluctuatingCountNoise:
    """Return the law whose counts at mean power have these boxes, with `count_weights`, or more, of the power."""
    light = np.asarray(boxes.rate_high) - np.asarray(boxes.rate_low)
    totals = [np.sum(np.abs(each) * light, axis=0) for each in (weight, np.asarray(boxes.weight))]
    beyond = power.rms**2 * np.maximum(np.square(totals[0]) - np.square(totals[1]), 0.0)
    return FluctuatingCountNoise(
        rate_low=boxes.rate_low,
        rate_high=boxes.rate_high,
        power_law=power.law,
        power_rms=power.rms,
        weight=boxes.weight,
        added_variance=boxes.added_variance,
        added_variance_high=np.asarray(boxes.added_variance_high) + beyond,
    )


def rescaled(
    law: PhotonCountNoise | FluctuatingCountNoise, factor: np.ndarray
) -> PhotonCountNoise | FluctuatingCountNoise:
    """Return the law of readings that are `factor` times as large at each output: the same counts in other units."""
    square, most = np.square(factor), law.added_variance_high
    return replace(
        law,
        weight=None if law.weight is None else law.weight * factor,
        added_variance=law.added_variance * square,
        added_variance_high=None if most is None else most * square,
    )


def require_fixed_rates(name: str, settings: CameraSettings) -> None:
    """Refuse a law for a whole run of a medium that drifts, of frames that may be lost, or of a bench that vibrates."""
    if settings.drift is not None:
        raise NoiseUnknown(
            f"device {name!r}: its medium drifts, so no box holds its rates for a whole run; switch "
            "camera.drift off to state a law"
        )
    require_lawful_readings(name, settings)


def require_lawful_readings(name: str, settings: CameraSettings) -> None:
    """Refuse moments of readings that may lack a frame, whose frames vibrate, or whose cross-talk mixes a motion."""
    transfer, vibration, drift = settings.transfer, settings.vibration, settings.drift
    if drift is not None and drift.within_call and settings.pixels is not None and settings.pixels.crosstalk:
        raise NoiseUnknown(
            f"device {name!r}: camera.drift.within_call adds noise that camera.pixels.crosstalk mixes over pixels, and "
            "it has no law here; switch one of them off to state moments"
        )
    if vibration is not None and (vibration.pointing_rms_pixels or vibration.phase_rms_rad):
        raise NoiseUnknown(
            f"device {name!r}: camera.vibration moves the light of all outputs together from frame to frame, "
            "and its noise has no law here; still the bench, or set pointing_rms_pixels and phase_rms_rad to 0"
        )
    if transfer is not None and (transfer.dropped or transfer.repeated):
        raise NoiseUnknown(
            f"device {name!r}: camera.transfer drops or repeats frames, so a reading may hold another's frame "
            "and has no law; mend the transfer, or set dropped and repeated to 0"
        )


def require_unsaturated(
    name: str, settings: CameraSettings, exposure: Exposure, shares: Mapping[float, float]
) -> None:
    """Refuse frames that are full at more outputs than the description allows, by `saturated_shares`."""
    allowed = settings.anchor.most_saturated or MOST_SATURATED
    worst = max(shares, key=shares.__getitem__)
    if shares[worst] <= allowed:
        return
    frame = "the anchor" if worst == 1 else f"a frame with {worst:.0%} of the mirrors on"
    sensor, light = exposure.sensor, exposure.light
    raise ConfigError(
        name,
        "camera.sensor",
        f"{100 * shares[worst]:.1f} % of the outputs are full in {frame}, at most {100 * allowed:g} % may be: a "
        f"pixel ends at {sensor.saturation_e:.4g} electrons, the anchor has {light.anchor_e:.4g} on average; lower "
        "sensor.gain_dn_per_e, light.exposure_us or light.anchor_flux_per_s, or raise sensor.adc_bits "
        "(anchor.most_saturated lets more pass, but entries of B are then not N(0, 1))",
    )
