"""The laser's power in each frame: one number W for all pixels, fluctuating from frame to frame and drifting slowly.

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
from dataclasses import dataclass

import numpy as np

from opusim.camera.speckle import grid_point, medium_weights
from opusim.noise import LightPower
from opusim.plugins import Deferred
from opusim.randomness.streams import NoiseStream, SeededStream

signal = Deferred("scipy.signal")


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
