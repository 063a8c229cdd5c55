"""Labels shown once to a camera: photon counts that are kept, and both protections by a camera.

Each record's one-hot label is one binary frame, taken with the laser dimmed until the counts cost the run's epsilon.
Kept counts give training the log-likelihood of every class by the counts' own law, read noise and rounding included.
Light that fluctuates is accounted for up to a power that a frame exceeds with a small probability, which is taken off
delta. `opusim.training.protections.argmax_labels` keeps only the brightest group of pixels.
Source: docs/privacy-labels.md, sections 7 and 9 (photon counts of known inputs, light that varies in common).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.special import logsumexp
from torch import Tensor
from typing_extensions import override

from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.counts import LabelCounts
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.training.protections.argmax_labels import (
    FRAMES_AT_ONCE,
    KEY,
    RATES_SHARE,
    ArgmaxReadout,
    LabelFrames,
    MeasuredRates,
    read_argmax,
)
from opusim.training.protections.base import calibrated_once
from opusim.training.protections.noisy_labels import LABEL_STEP, OneLookProtection, Pay

_PIXELS_COMPARED = 2048
"""Number of pixels from which the kept ones are chosen."""
_PIXELS_EXCHANGED, _EXCHANGES = 256, 60
"""Most pixels for which single ones are exchanged, and most exchanges."""
_START_LIGHT = 1e-3
"""Where the search for the light of kept counts starts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CountsReadout:
    """One frame of each label; the counts of some pixels, the outputs' integers, are kept and released."""

    frames: LabelFrames
    pixels: np.ndarray
    mechanism: LabelCounts

    @classmethod
    def within(cls, frames: LabelFrames, *, epsilon: float, delta: float) -> CountsReadout:
        """Return the readout with the most light, at most the described, within epsilon; may raise NoGuarantee."""
        power_error, measured = frames.power_error(delta), frames.measured
        if measured is None:
            pixels, low, high = equidistant_pixels(frames.light), None, frames.light
        else:
            pixels = measured.usable[equidistant_pixels(frames.light[:, measured.usable])]
            low, high = measured.limits()
        start = LabelCounts.of(
            high[:, pixels],
            frames.dark[pixels],
            beta=frames.beta,
            certificate=frames.certificate,
            power_error=power_error,
            light_low=None if low is None else low[:, pixels],
        )
        described = frames.excess * frames.brightest(power_error)
        found = calibrated_once(
            replace(start, brightest=_START_LIGHT * described), epsilon=epsilon, delta=delta
        )
        mechanism = replace(found, brightest=min(found.brightest, described))
        return cls(frames=frames, pixels=pixels, mechanism=mechanism)

    @property
    def light(self) -> float:
        """Multiple of the described light."""
        frames = self.frames
        return self.mechanism.brightest / (frames.excess * frames.brightest(self.mechanism.power_error))

    def log_likelihood(self, labels: Tensor) -> np.ndarray:
        """Show every label once; return log P(kept counts | class), shape (n, k), largest 0.

        Under light that fluctuates it is the mean over the power of the frame.
        """
        powers, weights = self.frames.powers
        laws = [self.frames.numbers(self.frames.rates(self.light * w), self.pixels) for w in powers]
        scores = []
        for part in labels.split(FRAMES_AT_ONCE):
            numbers = self.frames.taken(part, self.light)[:, self.pixels]
            found = logsumexp(
                [
                    law.log_likelihood(numbers) + math.log(weight)
                    for law, weight in zip(laws, weights, strict=True)
                ],
                axis=0,
            )
            scores.append(found - found.max(axis=1, keepdims=True))
        return np.concatenate(scores)


def read_counts(readout: CountsReadout, labels: Tensor, *, pay: Pay) -> Tensor:
    """Pay, show every label once and keep its counts; return log-likelihoods, float32, shape (n, k), largest 0."""
    pay(readout.mechanism)
    scores = readout.log_likelihood(labels)
    if readout.frames.measured is not None:
        again = measured_rates(readout.frames, readout.frames.measured.count, readout.frames.measured.beta)
        readout.frames.measured.require_same(again, readout.pixels, readout.frames.device.name)
    return torch.from_numpy(scores).float()


def measured_rates(frames: LabelFrames, count: int, beta: float) -> MeasuredRates:
    """Measure the rates of the labels' patterns at all pixels, in `count` frames each, with error `beta`.

    Raises ConfigError if the light fluctuates or fills the pixels, or the numbers are not linear.
    """
    device = frames.device
    if frames.law.nonlinearity:
        reason = "bends numbers, and rates are measured from linear ones; leave protection.rate_frames out"
        raise ConfigError(device.name, "camera.pixels.nonlinearity", reason)
    if frames.power is not None and frames.power.rms > 0:
        reason = "fluctuates, and rates are measured under steady light; leave protection.rate_frames out"
        raise ConfigError(device.name, "camera.light.power", reason)
    rates = MeasuredRates.of(device, len(frames.light), count=count, gain=frames.gain(), beta=beta)
    if rates.usable.size < 2:
        raise ConfigError(
            device.name,
            "camera.light.anchor_flux_per_s",
            "fills the pixels with labels' patterns; dim the laser",
        )
    return rates


def equidistant_pixels(light: np.ndarray) -> np.ndarray:
    """Return the pixels whose frames of the labels are most nearly equidistant, from which training gains most.

    The farthest two labels determine epsilon, but training uses all pairs. With d_i the squared distance of a pair at
    pixel i, the pixels raise the mean over pairs of sum d_i relative to its largest: a linear programme over shares of
    pixels, rounded, then exchanges of single pixels. The choice depends on the medium only. Light, in expected
    electrons, has shape (labels, pixels).
    """
    some = light[:, :_PIXELS_COMPARED]
    first, second = np.triu_indices(len(some), 1)
    distances = np.square(some[first] - some[second])  # (pairs, pixels)
    chosen = _programme(distances) > 0.5
    best = float(_evenness(distances[:, chosen].sum(axis=1)))
    for _ in range(_EXCHANGES if some.shape[1] <= _PIXELS_EXCHANGED else 0):
        better, gained = _exchanged(distances, chosen)
        if gained <= best:
            break
        chosen, best = better, gained
    return np.flatnonzero(chosen) if best > _evenness(distances.sum(axis=1)) else np.arange(some.shape[1])


def _programme(distances: np.ndarray) -> np.ndarray:
    """Return shares in [0, 1] of pixels with the least largest distance, at half of all pixels' mean distance."""
    pairs, pixels = distances.shape
    mean = distances.mean(axis=0)
    found = linprog(
        np.append(np.zeros(pixels), 1.0),
        A_ub=np.hstack([distances, -np.ones((pairs, 1))]),
        b_ub=np.zeros(pairs),
        A_eq=np.append(mean, 0.0)[None],
        b_eq=[mean.sum() / 2],
        bounds=[(0, 1)] * pixels + [(0, None)],
    )
    return np.zeros(pixels) if found.x is None else np.asarray(found.x[:pixels])


def _evenness(totals: np.ndarray) -> np.ndarray:
    """Mean over pairs of a distance, relative to the largest; pairs first."""
    return np.asarray(totals.mean(axis=0) / np.maximum(totals.max(axis=0), 1e-300))


def _exchanged(distances: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the best choice that adds, removes or exchanges one pixel, and its evenness."""
    total, on, off = distances[:, chosen].sum(axis=1), np.flatnonzero(chosen), np.flatnonzero(~chosen)
    without = np.concatenate([total[:, None], total[:, None] - distances[:, on]], axis=1)
    more = np.concatenate([np.zeros((len(total), 1)), distances[:, off]], axis=1)
    values = _evenness(without[:, :, None] + more[:, None, :])
    values[0, 0] = -np.inf
    removed, added = np.unravel_index(int(np.argmax(values)), values.shape)
    better = chosen.copy()
    if removed:
        better[on[removed - 1]] = False
    if added:
        better[off[added - 1]] = True
    return better, float(values[removed, added])


# Protections by a camera

Readout = TypeVar("Readout", CountsReadout, ArgmaxReadout)
_LAST: dict[tuple[type, bytes, float, float], dict[str, Any]] = {}
"""Result of the last search, without the camera: by readout, fingerprint of the frames, epsilon and delta."""


class _CameraProtection(OneLookProtection, ABC, Generic[Readout]):
    """Labels that a camera counts, with the laser dimmed to the run's epsilon."""

    readout: type[Readout]
    """How the labels are read."""

    @cached_property
    def mechanism(self) -> Mechanism:
        """See OneLookProtection.mechanism; a device that cannot count labels is refused before the run begins."""
        description = self.plan.description
        if description is None or description.camera is None:
            name = "none" if description is None else repr(description.name)
            reason = (
                f"{self.options.noise!r} needs a device that counts photons, and this run's is {name}; take "
                "--device camera_low_light, or 'digital'"
            )
            raise ConfigError("configuration", KEY, reason)
        with self.plan.opened_device() as device:
            return self._readout(self._frames(device)).mechanism

    def _frames(self, device: NoisyDevice | None) -> LabelFrames:
        if device is None:
            raise ConfigError("configuration", KEY, f"{self.options.noise!r} needs a device; use 'digital'")
        return LabelFrames.of(device, self.dataset.n_classes)

    def _readout(self, frames: LabelFrames) -> Readout:
        """Return the readout; the last search is reused for a camera that sees the labels alike.

        A run opens its device for its statement and again for its labels.
        """
        epsilon, delta = self.options.epsilon, self.options.delta
        wanted = self.readout, frames.fingerprint, epsilon, delta
        if wanted not in _LAST:
            found = self.readout.within(frames, epsilon=epsilon, delta=delta)
            _LAST.clear()
            _LAST[wanted] = {
                each.name: getattr(found, each.name) for each in fields(found) if each.name != "frames"
            }
        return self.readout(frames=frames, **_LAST[wanted])

    @override
    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        frames = self._frames(device)
        frames.device.seek(LABEL_STEP)
        return self._read(frames, self.dataset.train.y.cpu(), pay)

    def work_before(self) -> DeviceWork:
        """See Protection.work_before; one frame of each label, and those that measure rates before and after."""
        labels, k = len(self.dataset.train), self.dataset.n_classes
        measured = 2 * (k + 1) * (getattr(self.options, "rate_frames", None) or 0)
        return DeviceWork(frames=labels + measured, calls=math.ceil(labels / FRAMES_AT_ONCE))

    @abstractmethod
    def _read(self, frames: LabelFrames, labels: Tensor, pay: Pay) -> Tensor:
        """Read every label once; see OneLookProtection.look."""


class LabelCountsProtection(_CameraProtection[CountsReadout]):
    """Labels: a camera's counts of each, kept."""

    readout = CountsReadout
    _measured: MeasuredRates | None = None

    @override
    def _frames(self, device: NoisyDevice | None) -> LabelFrames:
        """Return the camera's frames; measure its rates at the first opening, if rate_frames is given."""
        frames, count = super()._frames(device), self.options.rate_frames
        if count is None:
            return frames
        if self._measured is None:
            beta = RATES_SHARE / 2 * max(self.options.delta - frames.beta, 0.0)
            self._measured = measured_rates(frames, count, beta)
        return frames.with_light(self._measured)

    def _read(self, frames: LabelFrames, labels: Tensor, pay: Pay) -> Tensor:
        return read_counts(self._readout(frames), labels, pay=pay)


class LabelArgmaxProtection(_CameraProtection[ArgmaxReadout]):
    """Labels: the brightest group of a camera's pixels for each, and no counts."""

    readout = ArgmaxReadout

    def _read(self, frames: LabelFrames, labels: Tensor, pay: Pay) -> Tensor:
        return read_argmax(self._readout(frames), labels, self.source(), pay=pay)
