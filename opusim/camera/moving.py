"""A medium that moves from frame to frame of a call.

Entries of P and Q are stationary Ornstein-Uhlenbeck processes (`opusim.camera.speckle`). Frame k of a call is exposed k
frame periods T after the call began, and sees the medium of that time; the medium rests during an exposure. No matrix
is formed for a frame, only one for the end of each block of 128 to 1,024 frames, whose beginning is the end of the
block before. Between the times 0 and D of a block's ends, in units of tau, a process x given its ends is Gaussian
(Ornstein-Uhlenbeck bridge),
    E x(t) = x(0) sinh(D - t) / sinh(D) + x(D) sinh(t) / sinh(D),
    Cov[x(s), x(t)] = 2 sinh(s) sinh(D - t) / sinh(D),   s <= t,
and entries are independent, so that the fields u_k = sum_i R_i(t_k) a_ki of frames with mirror amplitudes a_k, given
the fields at both ends, are Gaussian with the mean above and the covariances
    <a_k, a_l> Cov[x(t_k), x(t_l)]
of their real parts and of their imaginary parts, at every output (over M for a field of M modes). They are drawn by a
Cholesky factor of this matrix.
Different blocks are independent given the ends (Markov property). So all frames of a call, of successive calls and of
training steps follow one Ornstein-Uhlenbeck process, up to the rounding of the ends' times to 2^-24 tau.

The motion adds noise to readings, which depends on what is shown and on tau. No law of a device credits it.

**Mode hops** (`Hops`). At the times of a Poisson process the laser hops to another of its modes, and the medium of the
new wavelength correlates with that of the old one by
    rho = (1 + (hop / width)^2)^(-1/2),
so that intensities correlate by rho^2: a Lorentzian, whose half width is `spectral_width_pm`, as a medium has whose
light takes paths of exponentially distributed lengths. Successive hops are taken to decorrelate independently, rho^n
after n of them; to first order in (hop / width)^2 that is the mean over hops up and down. An Ornstein-Uhlenbeck process
loses the factor rho within the time log(1 / rho), so a hop is a jump of the medium's own time,
    time of the medium = t / tau + log(1 / rho) (hops until t),
and two media correlate by rho^n exp(-|t - s| / tau), with n hops between t and s. The phase that a hop gives to all
fields alike is left out; intensities do not tell it.

Sources: for the bridge Gillespie, Phys. Rev. E 54, 2084 (1996), conditioned on both ends; for hops Heumier and
Carlsten, Mode Hopping in Semiconductor Lasers, ILX Lightwave application note 8 (jumps of 0.3 nm at erratic times); for
the correlation Goodman, Speckle Phenomena in Optics (2007): the Fourier transform of the path lengths' distribution.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from opusim.camera.speckle import PARTS_OF_A_STEP, STEPS_PER_TAU, Speckle, grid_point
from opusim.description.camera import DriftSettings
from opusim.processes import pause
from opusim.randomness.streams import NoiseStream, SeededStream

_LEAST_FRAMES, _MOST_FRAMES, _FRAMES_PER_ROOT = 128, 1024, 50
"""Frames of a block, in proportion to the root of the mirrors: its end then costs about as much as its frames."""
_HOPS_AT_ONCE, _MOST_HOPS = 1024, 2**24  # the latter take 128 MiB
_JITTER = 1e-12
"""Added variance, relative to the largest, with which frames without light and repeated ones have a factor."""


def bridge(times: np.ndarray, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of a stationary Ornstein-Uhlenbeck process of variance 1 and tau 1 given its values at 0 and end.

    That is the weights of the two values in the mean at times in [0, end], shape (2, n), and the covariance (n, n).
    """
    if end == 0:
        return np.stack([np.ones(times.size), np.zeros(times.size)]), np.zeros((times.size, times.size))
    whole, passed, left = (
        -np.expm1(-2 * span) for span in (end, times, end - times)
    )  # 1 - e^-2t: no overflow
    weights = np.stack([np.exp(-times) * left, np.exp(times - end) * passed]) / whole
    early, late = np.minimum.outer(passed, passed), np.minimum.outer(left, left)
    return weights, np.exp(-np.abs(np.subtract.outer(times, times))) * early * late / whole


def motion(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of the process given its value at 0: that value's weights e^-t, and the covariance.

    Cov[x(s), x(t)] = e^-|s - t| - e^-(s + t).
    """
    apart, total = np.abs(np.subtract.outer(times, times)), np.add.outer(times, times)
    return np.exp(-times), np.exp(-apart) * -np.expm1(apart - total)


class Hops:
    """Mode hops of a laser, at times that are computed from a seed.

    Attributes:
        jump: log(1 / rho), by which a hop moves the medium's own time, in units of the decorrelation time.

    Args:
        drift: with `hops_per_s`, `hop_pm` and `spectral_width_pm`.
        seed: of the times.
    """

    def __init__(self, drift: DriftSettings, seed: int) -> None:
        per_s, hop, width = drift.hops_per_s or 0.0, drift.hop_pm or 0.0, drift.spectral_width_pm or 1.0
        self.jump = 0.5 * math.log1p((hop / width) ** 2)
        self._rate = per_s * drift.decorrelation_s
        self._stream = SeededStream(seed, "mode hops")
        self._times = np.zeros(1)  # time 0, then those of the hops: in units of the decorrelation time

    def moved(self, times: np.ndarray) -> np.ndarray:
        """Return by how much hops have moved the medium's own time until these times, all in its units."""
        last = float(np.max(times))
        if self._rate * last > _MOST_HOPS:
            raise ValueError(
                f"time = {last:g} decorrelation times: some {self._rate * last:.3g} hops come before, and at most "
                f"{_MOST_HOPS} may; begin a new medium, or lower drift.hops_per_s"
            )
        blocks = [self._times]
        while blocks[-1][-1] <= last:
            normals = self._stream.normal((2, _HOPS_AT_ONCE)).double().numpy()
            waits = 0.5 * np.square(normals).sum(axis=0) / self._rate  # exponential: chi-squared of 2 degrees
            blocks.append(blocks[-1][-1] + np.cumsum(waits))
        self._times = np.concatenate(blocks)
        return np.asarray(self.jump * (np.searchsorted(self._times, times, side="right") - 1))

    def own_time(self, time: float) -> float:
        """Return the medium's own time."""
        return time + float(self.moved(np.array(time)))


class Motion:
    """The time of a medium that moves while frames are taken.

    Args:
        frame: frame period in units of the decorrelation time, above 0.
        hops: mode hops of the laser, or None.
    """

    def __init__(self, frame: float, hops: Hops | None = None) -> None:
        self.frame, self._hops = frame, hops
        self._time = 0.0

    def ahead(self, frames: int) -> np.ndarray:
        """Return how far the medium's own time moves until each of the next frames, shape (frames,), from 0 on."""
        steps = self.frame * np.arange(frames)
        if self._hops is None:
            return steps
        hopped = self._hops.moved(self._time + steps)
        return steps + (hopped - hopped[0])

    def move_to(self, speckle: Speckle, time: float) -> None:
        """Set the time of the next frame, in units of the decorrelation time, and move the medium there."""
        point = self._point(time)
        self._time = time
        speckle.move_to(point)

    def _point(self, time: float) -> float:
        """Return the grid point of the medium at a time."""
        return grid_point(time if self._hops is None else self._hops.own_time(time), PARTS_OF_A_STEP)

    def pass_frames(self, speckle: Speckle, frames: float) -> None:
        """Let some frame periods pass in which no frame shows the medium."""
        self.move_to(speckle, self._time + frames * self.frame)

    def fields(
        self,
        speckle: Speckle,
        patterns: torch.Tensor,
        rows: np.ndarray,
        complement: np.ndarray,
        stream: NoiseStream,
    ) -> torch.Tensor:
        """Return the fields (2 modes, frames, n_outputs) of frames in turn from the present time on; the time passes.

        Frame k shows pattern rows[k] of (patterns, n_inputs), or its complement in the anchor. The stream gives one
        reading for every block of frames. ValueError: the medium is too old; see `opusim.camera.speckle.grid_point`.
        """
        out = torch.empty((len(speckle.law.planes), rows.size, speckle.n_outputs), dtype=torch.float32)
        at_once = int(_FRAMES_PER_ROOT * speckle.law.mirrors**0.5)
        at_once = min(max(at_once, _LEAST_FRAMES), _MOST_FRAMES)
        for start in range(0, rows.size, at_once):
            pause()
            some = slice(start, start + at_once)
            wanted, place = np.unique(rows[some], return_inverse=True)
            shown = patterns[torch.from_numpy(wanted).to(patterns.device)]
            place, flip = place.reshape(-1), complement[some]
            after = self._time + place.size * self.frame
            end = speckle.at(self._point(after))
            span = (end.point - speckle.point) / STEPS_PER_TAU
            weights, covariance = bridge(np.minimum(self.ahead(place.size), span), span)
            part = torch.zeros((len(out), place.size, speckle.n_outputs))
            for state, weight in zip((speckle, end), weights, strict=True):
                if weight.any():
                    field = state.fields_of(shown, place, flip)
                    part.add_(field.mul_(torch.from_numpy(weight.astype(np.float32))[:, None]))
            covariance = covariance * overlaps(speckle, shown, place, flip)
            largest = float(covariance.diagonal().max())
            if largest > 0:
                root = np.linalg.cholesky(covariance + _JITTER * largest * np.eye(place.size))
                part.add_(torch.from_numpy(root.astype(np.float32)) @ speckle.normals(place.size, stream))
            out[:, some] = part
            self._time = after
            speckle.become(end)
        return out


def overlaps(
    speckle: Speckle, patterns: torch.Tensor, rows: np.ndarray, complement: np.ndarray
) -> np.ndarray:
    """Return the inner products of the mirrors' amplitudes in frames, float64, (frames, frames); see `Motion.fields`.

    A frame has the amplitudes v + S x, its complement l - S x, with v and l those of the blank frame and of the anchor.
    """
    swing = speckle.swings(patterns)  # (patterns, n_inputs)
    ends = torch.from_numpy(speckle.ends).to(swing.device)  # (2, mirrors)
    both = (swing @ swing.T).cpu().numpy()[rows][:, rows]
    beside = (swing @ ends[:, : swing.shape[1]].T).cpu().numpy()[rows]
    of_ends = (ends @ ends.T).cpu().numpy()
    sign, which = np.where(complement, -1.0, 1.0), complement.astype(np.int64)
    mixed = sign[:, None] * beside[:, which]
    return np.asarray(np.outer(sign, sign) * both + mixed + mixed.T + of_ends[which][:, which])
