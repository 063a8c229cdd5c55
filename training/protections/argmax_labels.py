"""Labels shown once to a camera; only the brightest group of pixels of each frame is kept.

Each label has a group of pixels that it lights most. Under a secret permutation of each record's labels only the group
with the largest sum is kept, and the frames are discarded in the function that takes them. The guarantee covers light
that fluctuates, up to a power that a frame exceeds with a small probability, which is taken off delta. A certificate
limits the light and dark charge that all outputs share, and the differences of groups from that. Cells cover the shared
part, so that only the differences can favour one group over another.
A camera sees each one-hot vector as a binary frame, with the laser dimmed (`LabelFrames`).
Source: docs/privacy-labels.md, sections 8 and 9 (the argmax of counts, light that varies in common).
"""

from __future__ import annotations

import hashlib
import heapq
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from scipy.optimize import brentq, linear_sum_assignment
from scipy.stats import chi2
from torch import Tensor

from opusim import checks
from opusim.accounting.mechanisms.counts import LabelArgmax, argmax_epsilon, confusion_matrix
from opusim.accounting.mechanisms.labels import UniformSource
from opusim.camera.exposure import CountLaw, OperatingPoint
from opusim.camera.stages import NumberLaw, number_law, spread_error
from opusim.devices.base import NoisyDevice
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import FluctuatingCountLaw, PhotonCountLaw
from opusim.errors import ConfigError, DeviceFault
from opusim.noise import FluctuatingCountNoise, LightPower, PhotonCountNoise
from opusim.training.protections.noisy_labels import Pay

RATES_SHARE = 0.1
"""Share of the delta that a certificate leaves: the probability that limits measured before or after are wrong."""
_ALARM = 1e-4
_SPARE = 1.5
"""Largest ratio of two chi-squared limits of one variance, from at least 500 frames."""
_FULL = 0.9
"""Share of the converter's or the well's range above which a pattern's mean may be clipped."""
_NUMBERS_AT_ONCE = 2**22


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRates:
    """Rates of a few known patterns at each pixel of a camera, measured with limits: no medium or response is assumed.

    Each pattern is shown R times at the described light, and R frames are taken without light. With K the gain [DN/e-],
    v the variance of a frame without light [DN^2] and x the mean number that a pattern adds, the difference D of the
    two means is that of Poisson counts and Gaussian noise, a sub-gamma number: at each side

        P(|D - x| > sqrt(2 t (2 v + K x) / R) + K t / (3 R)) <= e^-t

    (Boucheron, Lugosi and Massart 2013, section 2.4); v is at most its chi-squared limit, and rounding moves a mean by
    at most exp(-2 pi^2 v) / pi. Limits in electrons are divided by the lower limit of K: at another K the light is less
    by one factor for all pixels, which is dimming (theorem measured-rates).

    **Drift.** The patterns are shown again after the labels, and the run ends unless the limits of that measurement lie
    within the stated ones. The stated limits are therefore wider, to allow for the difference of two measurements of
    steady rates: drift beyond them is found with probability 1 - beta, and steady rates end a run with probability
    `_ALARM` at most.

    Attributes:
        light_dn: D of each pattern, shape (patterns, pixels).
        dark_dn: mean number without light, shape (pixels,).
        variance_dn2: upper limit of v, shape (pixels,).
        full: highest mean number of a pattern at each pixel, as a share of the range, shape (pixels,).
        count: R.
        gain: limits of K, DN per electron.
        beta: probability that a limit is wrong, in (0, 1).
    """

    light_dn: np.ndarray
    dark_dn: np.ndarray
    variance_dn2: np.ndarray
    full: np.ndarray
    count: int
    gain: tuple[float, float]
    beta: float

    @classmethod
    def of(
        cls, device: CameraDevice, patterns: int, *, count: int, gain: tuple[float, float], beta: float
    ) -> Self:
        """Measure R frames of the first unit vectors, one at a time, and frames without light.

        `count` is R, at least 500, `gain` has limits of K, and `beta` bounds the probability that any limit
        of the measurement is wrong; half of it is for the variances.
        """
        width = device.n_outputs
        sums, squares = np.zeros((patterns + 1, width)), np.zeros(width)
        at_once = max(1, _NUMBERS_AT_ONCE // width)
        for start in range(0, count, at_once):
            part = min(at_once, count - start)
            for pattern, row in enumerate(torch.eye(patterns, device.n_inputs)):
                frames = device.dimmed_frames(row.expand(part, -1), 1.0)
                sums[pattern] += frames.sum(axis=0, dtype=np.float64)
            dark = device.flat_frames(part).astype(np.float64)
            sums[-1] += dark.sum(axis=0)
            squares += np.square(dark).sum(axis=0)
        means = sums / count
        variance = np.maximum(squares - count * np.square(means[-1]), 0.0)  # times R - 1
        sensor = device.exposure.sensor
        top_dn = sensor.black_level_dn + sensor.gain_dn_per_e * sensor.saturation_e
        return cls(
            light_dn=means[:-1] - means[-1],
            dark_dn=means[-1],
            variance_dn2=variance / chi2.ppf(beta / (2 * width), count - 1),
            full=means.max(axis=0) / top_dn,
            count=count,
            gain=gain,
            beta=beta,
        )

    @property
    def usable(self) -> np.ndarray:
        """Numbers of the pixels that no pattern fills."""
        return np.flatnonzero(self.full < _FULL)

    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the stated lower and upper limits of light, electrons, each of shape (patterns, pixels)."""
        t, alarm = (math.log(4 * self.light_dn.size / p) for p in (self.beta, _ALARM))
        spare = _SPARE * self.variance_dn2
        low, high = (
            self._moved(self._moved(self.light_dn, side, alarm, 2, spare), side, t, 1, spare)
            for side in (-1, 1)
        )
        return np.maximum(low, 0.0) / self.gain[0], np.maximum(high, 0.0) / self.gain[0]

    def _moved(
        self, from_dn: np.ndarray, side: int, t: float, measurements: int, variance_dn2: np.ndarray
    ) -> np.ndarray:
        """Return the limit of x on one side of D, DN: the farthest x that D does not exclude.

        It lies s beyond the terms that do not depend on x, s^2 = (2 t / R) (2 v + K (D +- s)).
        """
        gain, share = self.gain[1], 2 * t * measurements / self.count
        rounding = 2 * np.exp(-2 * math.pi**2 * variance_dn2 / _SPARE) / math.pi
        start = from_dn + side * (gain * t / (3 * self.count) + rounding)
        constant = 4 * share * (2 * variance_dn2 + gain * np.maximum(start, 0.0))
        s = (side * share * gain + np.sqrt((share * gain) ** 2 + constant)) / 2
        return np.asarray(start + side * s)

    def require_same(self, again: MeasuredRates, pixels: np.ndarray, name: str) -> None:
        """Raise DeviceFault if kept pixels' rates, measured again after the labels, lie beyond the stated limits."""
        stated, t = self.limits(), math.log(4 * again.light_dn.size / again.beta)
        # limits of x as measured now, in electrons
        low, high = (
            again._moved(again.light_dn, side, t, 1, again.variance_dn2) / self.gain[0] for side in (-1, 1)
        )
        beyond = (np.maximum(low, 0.0) < stated[0]) | (high > stated[1])
        beyond = beyond[:, pixels]
        if beyond.any():
            change = float(np.mean(again.light_dn[:, pixels]) / np.mean(self.light_dn[:, pixels])) - 1
            raise DeviceFault(
                f"device {name!r}: rates of the labels' patterns left their limits at {int(beyond.any(axis=0).sum())} "
                f"of {pixels.size} pixels while labels were shown (mean light {change:+.2%}); nothing was kept of the "
                "labels. Let laser and medium settle, and begin again"
            )


FRAMES_AT_ONCE = 4096
POWER_SHARE = 0.1
"""Share of the delta that certificates leave: the probability that a frame of fluctuating light is too bright."""
_NODES = 7
"""Powers over which a likelihood under light that fluctuates is averaged."""
KEY = "protection.noise"


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelFrames:
    """How a camera sees the labels: one frame of each one-hot vector.

    Attributes:
        device: The open camera.
        law: Law of its counts; the first frame of a reading is the one-hot vector's own.
        dark: Least expected electrons without light that are credited at each pixel, shape (pixels,).
        certified: Limits of the device's certificate, or None without one.
        power: Law of the laser's power in a frame, of the largest spread that the certificate allows; None if it is
            constant.
        beta: Probability that a limit of the certificate or of `measured` is wrong; 0 without them.
        certificate: Digest of the certificate, or empty.
        measured: Measured rates of the labels' patterns; None if `light` is that of the description.
    """

    device: CameraDevice
    law: CountLaw
    dark: np.ndarray
    certified: PhotonCountLaw | FluctuatingCountLaw | None = None
    power: LightPower | None = None
    beta: float = 0.0
    certificate: str = ""
    measured: MeasuredRates | None = None

    @classmethod
    def of(cls, device: NoisyDevice, n_classes: int) -> LabelFrames:
        """Return the labels' frames of an open device, within the limits of its certificate if it has one.

        Raises ConfigError if it is no simulated camera, reads holograms, its light drifts slowly, or it states no law
        of its counts.
        """
        if not isinstance(device, CameraDevice) or device.stated_noise is None:
            reason = (
                f"device {device.name!r} counts no photons at rates that are known; use a camera without drift and "
                "lost frames, or 'digital'"
            )
            raise ConfigError("configuration", KEY, reason)
        if device.is_holographic:
            reason = (
                f"device {device.name!r} reads holograms, and counts are kept of frames without a reference beam; "
                "remove camera.reference_beam, or use 'digital'"
            )
            raise ConfigError("configuration", KEY, reason)
        _require_steady_mean(device)
        pixels = None if device.description.camera is None else device.description.camera.pixels
        if pixels is not None and pixels.uneven_keys:
            reason = (
                "makes noise that differs over pixels or that they share, and the law of the argmax is for equal and "
                f"independent pixels; remove the key, or use {KEY} = 'digital'"
            )
            raise ConfigError(device.name, f"camera.pixels.{pixels.uneven_keys[0]}", reason)
        law = device.count_law(torch.eye(n_classes), at_mean_power=True)
        stated, certificate = device.noise, device.certificate
        if not isinstance(stated, PhotonCountNoise | FluctuatingCountNoise):
            raise ConfigError(
                "configuration", KEY, f"{stated.law!r} is no law of photon counts; use 'digital'"
            )
        power = stated.power if isinstance(stated, FluctuatingCountNoise) else None
        found = cls(device=device, law=law, dark=np.asarray(stated.rate_low)[0], power=power)
        if certificate is None or not isinstance(certificate.noise, PhotonCountLaw | FluctuatingCountLaw):
            return found
        return replace(
            found, certified=certificate.noise, beta=certificate.beta, certificate=certificate.digest
        )

    def gain(self) -> tuple[float, float]:
        """Return limits of the gain, DN per electron: the certificate's, or the described one twice.

        Raises ConfigError for a certificate of an earlier version.
        """
        limits, described = self.certified, self.law.sensor.gain_dn_per_e
        if limits is None:
            return described, described
        if limits.gain_dn_per_e_low is None or limits.gain_dn_per_e_high is None:
            raise ConfigError(
                self.device.name,
                "certificate.noise.gain_dn_per_e_low",
                "is missing; calibrate the device again",
            )
        return limits.gain_dn_per_e_low, limits.gain_dn_per_e_high

    def with_light(self, rates: MeasuredRates) -> LabelFrames:
        """Return this camera with light as measured in place of the described one, and offsets to match."""
        law, gain = self.law, self.law.sensor.gain_dn_per_e
        unlit = law.rates(OperatingPoint(light=NO_LIGHT))[0, 0]
        measured = replace(
            law,
            light_e=np.maximum(rates.light_dn, 0.0)[None] / gain,
            offset_e=(rates.dark_dn - law.sensor.black_level_dn) / gain - unlit,
        )
        return replace(self, law=measured, measured=rates, beta=self.beta + 2 * rates.beta)

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest of all fields but the device; equal if two openings of a camera see the labels alike."""
        parts = self.law, self.dark, self.certified, self.power, self.beta, self.certificate, self.measured
        return hashlib.blake2b(pickle.dumps(parts)).digest()

    @property
    def excess(self) -> float:
        """Largest mean light that the certificate allows, as a multiple of the law's; 1 without a certificate.

        For measured light, the largest light of a frame, as a multiple of the mean over frames.
        """
        limits = self.certified
        if limits is None:
            return 1.0
        if self.measured is None:
            require_known_light(self.device.name, limits)
            return limits.light_ratio_high
        return limits.frame_ratio_high or math.inf

    def power_error(self, delta: float) -> float:
        """Return the probability, a share of delta, that a frame is brighter than accounted for; 0 for constant light.

        Each label is shown in one frame, so the union bound over the frames of a record has one term.
        """
        if self.power is None or self.power.rms == 0:
            return 0.0
        return POWER_SHARE * max(delta - self.beta, 0.0)

    def brightest(self, power_error: float) -> float:
        """Return w_max: the relative power that a frame exceeds with at most this probability; 1 for constant light."""
        return 1.0 if self.power is None else self.power.limit(power_error)

    @cached_property
    def powers(self) -> tuple[np.ndarray, np.ndarray]:
        """Relative powers of a frame as described and their probabilities, by Gauss-Hermite quadrature."""
        if self.law.power is None:
            return np.ones(1), np.ones(1)
        normals, weights = np.polynomial.hermite_e.hermegauss(_NODES)
        return self.law.power.of_normal(normals), weights / weights.sum()

    @cached_property
    def light(self) -> np.ndarray:
        """Expected electrons of light of each label's frame as described, shape (labels, pixels)."""
        return self.law.light_e[0]

    def rates(self, light: float) -> np.ndarray:
        """Return the expected electrons of each label's frame as described, shape (labels, pixels)."""
        return self.law.rates(OperatingPoint(light=light))[0]

    def numbers(self, rates: np.ndarray, pixels: np.ndarray) -> NumberLaw:
        """Return the law of the digital numbers of some pixels at rates of all."""
        law = self.law
        return number_law(rates[:, pixels], law.offset_e[pixels], law.sensor, law.nonlinearity)

    def taken(self, labels: Tensor, light: float) -> np.ndarray:
        """Take a frame of each label, digital numbers, shape (n, pixels)."""
        return self.device.dimmed_frames(torch.eye(self.device.n_inputs)[labels], light)


def require_known_light(name: str, limits: PhotonCountLaw | FluctuatingCountLaw | None) -> None:
    """Refuse a certificate that leaves the light of single outputs open, where no frames measure it."""
    if limits is not None and limits.light_spread:
        reason = (
            "leaves the light of single outputs open (light_spread = 'unknown'); let a run measure its labels' rates: "
            f"{KEY} = 'counts' with protection.rate_frames, such as 1000"
        )
        raise ConfigError(name, "certificate.noise.light_spread", reason)


def _require_steady_mean(device: CameraDevice) -> None:
    """Refuse light whose mean drifts: the drift is that of training steps, and labels are shown outside them."""
    camera = device.description.camera
    if camera is not None and camera.light.power is not None and camera.light.power.drift_rms is not None:
        reason = (
            "drifts from training step to training step, and labels are shown before the first one; steady the laser "
            f"and leave drift_rms out, or use {KEY} = 'digital'"
        )
        raise ConfigError(device.name, "camera.light.power.drift_rms", reason)


LEAST_LIGHT = 1e-9
"""Smallest multiple of the described light that is searched."""
NO_LIGHT = 1e-300
"""Replaces a light of 0, which a camera's operating point does not take."""
_MOST_PER_GROUP = 32
_PIXELS_COMPARED = 2048
"""Number of pixels from which groups are chosen."""
_TOLERANCE = 1e-4
_CELL_TOLERANCE, _MOST_CELLS = 0.005, 400
"""Largest relative excess of the cells' epsilon over that of a point, and largest number of cells."""
_MOST_SPREAD_ERROR = 1e-7
"""Largest distance between the laws of a group's sum at one total rate; beyond it, each output has its own limits."""

Matrices = tuple[np.ndarray, np.ndarray]
"""Lower and upper limits of a confusion matrix, each of shape (labels, groups)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ArgmaxReadout:
    """One answer of a camera to each label: the brightest group of pixels, under a secret permutation of the labels.

    Attributes:
        frames: The camera.
        groups: Pixels of each label, integers, shape (labels, pixels of a group).
        light: Multiple of the described light.
        mechanism: What is released.
        keep: Mean diagonal of the confusion matrix as described, over the powers of the light: the probability that a
            label stays.
    """

    frames: LabelFrames
    groups: np.ndarray
    light: float
    mechanism: LabelArgmax
    keep: float

    @classmethod
    def within(cls, frames: LabelFrames, *, epsilon: float, delta: float = 0.0) -> ArgmaxReadout:
        """Return the readout with the most light, at most the described, that stays within the answer's epsilon.

        Fluctuating light takes a share of the run's delta. Raises ConfigError if the camera has fewer outputs than
        labels, even `LEAST_LIGHT` gives more than epsilon, or the light fluctuates and delta does not exceed the
        certificate's beta.
        """
        require_known_light(frames.device.name, frames.certified)
        power_error = frames.power_error(delta)
        brightest = frames.brightest(power_error)
        if math.isinf(brightest):
            least = f"the beta = {frames.beta:g} of device.certificate" if frames.beta else "0"
            reason = (
                f"{delta:g} leaves nothing for light that fluctuates, which exceeds every power at times; set it above "
                f"{least}"
            )
            raise ConfigError("configuration", "protection.delta", reason)
        # The largest groups, and under a certificate smaller ones too: it only limits each pixel's dark charge, and
        # what that may reveal grows with the size of a group, as does the light that the group collects.
        choices = [label_groups(frames.light)]
        while frames.certified is not None and choices[-1].shape[1] > 1:
            choices.append(label_groups(frames.light, most=choices[-1].shape[1] // 2))
        searches = [
            _Search(frames, groups, epsilon, brightest, fluctuates=power_error > 0) for groups in choices
        ]
        found = [search for search in searches if search.light is not None]
        if not found:
            limits, way = "", "allow that much"
            if frames.certified is not None:
                limits = " within the limits of device.certificate"
                way = "allow that much, calibrate with more --frames and --outputs, which narrows the limits,"
            lowest = min(search.least_epsilon for search in searches)
            reason = f"{epsilon:g} is below what any light gives{limits}, {lowest:.3g}; {way} or use {KEY} = 'digital'"
            raise ConfigError("configuration", "protection.epsilon", reason)
        best = max(found, key=lambda search: search.keep)
        light, worst = best.within_all_powers()
        mechanism = LabelArgmax(
            step_epsilon=worst,
            n_classes=len(best.groups),
            beta=frames.beta,
            certificate=frames.certificate,
            power_error=power_error,
        )
        # the mean diagonal of the confusion matrix as described, averaged over the powers of a frame
        powers, weights = frames.powers
        keep = float(weights @ [_kept_at(frames, best.groups, light * float(power)) for power in powers])
        return cls(frames=frames, groups=best.groups, light=light, mechanism=mechanism, keep=keep)

    def answers(self, labels: Tensor, source: UniformSource) -> np.ndarray:
        """Show every label once and return the answers, integers, shape (n,); the frames do not leave this function.

        The source gives the permutations and breaks ties.
        """
        found = []
        for part in labels.split(FRAMES_AT_ONCE):
            rows, k = np.arange(len(part)), len(self.groups)
            moved = np.argsort(source.random((len(part), k)), axis=1)  # s: label to shown label
            shown = torch.from_numpy(moved[rows, part.numpy()])
            numbers = self.frames.taken(shown, self.light).astype(np.float64)
            sums = numbers[:, self.groups].sum(axis=2) + source.random((len(part), k))
            found.append(np.argmax(moved == np.argmax(sums, axis=1)[:, None], axis=1))
        return np.concatenate(found)

    def log_likelihood(self, answers: np.ndarray) -> np.ndarray:
        """Return log P(answer | label), shape (n, k)."""
        k = len(self.groups)
        same = np.arange(k)[None, :] == answers[:, None]
        return np.where(same, math.log(self.keep), math.log((1 - self.keep) / (k - 1)))


def read_argmax(readout: ArgmaxReadout, labels: Tensor, source: UniformSource, *, pay: Pay) -> Tensor:
    """Show every label once and keep its answer only; return the log-likelihood of every class, float32, (n, k).

    The source gives the permutations and breaks ties; it is the operating system's for a release. `pay` comes first.
    """
    pay(readout.mechanism)
    return torch.from_numpy(readout.log_likelihood(readout.answers(labels, source))).float()


class _Search:
    """The most light, at most the described, with which some groups of pixels stay within an epsilon.

    Attributes:
        groups: Pixels of each label, shape (labels, pixels of a group).
        light: Multiple of the described light, or None if even `LEAST_LIGHT` gives more than epsilon.

    Args:
        frames: The camera.
        groups: The groups.
        epsilon: Above 0.
        brightest: w_max, the relative power that is allowed for.
        fluctuates: Whether the light fluctuates. Its brightest frames and, under a certificate, the least dark charge
            are searched first.
    """

    def __init__(
        self, frames: LabelFrames, groups: np.ndarray, epsilon: float, brightest: float, *, fluctuates: bool
    ) -> None:
        self.groups = groups
        self._frames, self._epsilon, self._brightest = frames, epsilon, brightest
        self._fluctuates = fluctuates
        self._electrons = own_light(frames.light, groups)
        self.light = self._found()

    @property
    def least_epsilon(self) -> float:
        """Epsilon at `LEAST_LIGHT`."""
        return self._excess(math.log(LEAST_LIGHT)) + self._epsilon

    @cached_property
    def keep(self) -> float:
        """Share of labels that stay at mean power."""
        return 0.0 if self.light is None else _kept_at(self._frames, self.groups, self.light)

    def within_all_powers(self) -> tuple[float, float]:
        """Return the light at which no power that is allowed for gives more than epsilon, and the largest epsilon."""
        log_light, less = math.log(self.light or LEAST_LIGHT), _TOLERANCE
        while (worst := self._worst(math.exp(log_light))) > self._epsilon:
            log_light, less = log_light - max(less, math.log(worst / self._epsilon)), 2 * less
        return math.exp(log_light), worst

    def _worst(self, light: float) -> float:
        return largest_epsilon(self._limits, self._shared(light), self._electrons)

    def _shared(self, light: float) -> Cell:
        least = 0.0 if self._fluctuates else light
        return shared_range(self._frames, self.groups.shape[1], light * self._brightest, least=least)

    def _limits(self, cell: Cell) -> Matrices:
        return confusion(self._frames, self.groups, cell)

    def _excess(self, log_light: float) -> float:
        worst = self._shared(math.exp(log_light)).worst
        return argmax_epsilon(*self._limits(worst), symmetrised=True) - self._epsilon

    def _found(self) -> float | None:
        high, low = 0.0, 0.0
        while self._excess(low) > 0:
            high, low = low, low - 1.0
            if low < math.log(LEAST_LIGHT):
                return None
        return math.exp(low if low == high else float(brentq(self._excess, low, high, xtol=_TOLERANCE)))


def own_light(light: np.ndarray, groups: np.ndarray) -> float:
    """Return the mean electrons of light of an output of each group, shape (labels, pixels), under its own label."""
    return float(np.mean([row[group].mean() for row, group in zip(light, groups, strict=True)]))


def label_groups(light: np.ndarray, *, most: int = _MOST_PER_GROUP) -> np.ndarray:
    """Return equally many pixels for each label: those with most light beyond the mean light of the other labels.

    Light, in expected electrons, has shape (labels, pixels). Raises ConfigError if there are fewer pixels than labels.
    """
    checks.shape((None, None), light=light)
    labels, pixels = light.shape
    if pixels < labels:
        reason = (
            f"'argmax' needs an output for each of {labels} labels, and there are {pixels}; widen the network"
        )
        raise ConfigError("configuration", KEY, reason)
    some = light[:, :_PIXELS_COMPARED]
    size = min(some.shape[1] // labels, most)
    contrast = some - (some.sum(axis=0) - some) / (labels - 1)
    rows, columns = linear_sum_assignment(np.repeat(contrast, size, axis=0), maximize=True)
    return np.sort(columns[np.argsort(rows)].reshape(labels, size), axis=1)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A range of what all outputs of a frame share.

    Attributes:
        least: Least light, a multiple of the described one, at least 0.
        most: Largest light.
        dark_low: Least dark charge of every output under a certificate, electrons. Without one, the difference from
            the described charge: 0, or below 0 if the law of the dark current is a rule of thumb, whose credited charge
            is less.
        dark_high: Largest dark charge, likewise; 0 without a certificate.
    """

    least: float
    most: float
    dark_low: float = 0.0
    dark_high: float = 0.0

    @property
    def worst(self) -> Cell:
        """The brightest frames at the least dark charge, where an answer usually reveals most."""
        return replace(self, least=self.most, dark_high=self.dark_low)

    @property
    def dark_laws(self) -> tuple[Cell, ...]:
        """The cells whose dark charge is the credited and the described one; this cell if they are the same."""
        if self.dark_low >= 0 or self.dark_low == self.dark_high:
            return (self,)
        return replace(self, dark_high=self.dark_low), replace(self, dark_low=0.0)

    def halves(self, electrons: float) -> tuple[Cell, Cell]:
        """Return the halves along the wider range in electrons; a light of 1 has `electrons` of them at an output."""
        if (self.most - self.least) * electrons > self.dark_high - self.dark_low:
            light = (self.least + self.most) / 2
            return replace(self, most=light), replace(self, least=light)
        dark = (self.dark_low + self.dark_high) / 2
        return replace(self, dark_low=dark), replace(self, dark_high=dark)


def shared_range(
    frames: LabelFrames,
    size: int,
    light: float,
    *,
    least: float | None = None,
    point: OperatingPoint | None = None,
) -> Cell:
    """Return what all outputs of a frame, in groups of a size, may share at a camera's operating point.

    Light is a multiple of the described, before the factor of a certificate, from `least`, or `light` itself, to
    `light`.
    """
    certified, dimmed = frames.certified, light if least is None else least
    if certified is None:
        here = OperatingPoint() if point is None else point
        uncredited = frames.law.dark_e(here) - frames.law.credited_dark_e(here)
        return Cell(least=dimmed, most=light, dark_low=-uncredited)
    dark_low, dark_high, _ = certified.dark_of_groups(size)
    # the mean is at least `light_ratio_low`, none exceeds `light_ratio_high`, or falls below the mean by more than that
    darkest = max(0.0, 2 * certified.light_ratio_low - certified.light_ratio_high)
    return Cell(
        least=darkest * dimmed,
        most=certified.light_ratio_high * light,
        dark_low=dark_low,
        dark_high=dark_high,
    )


def confusion(frames: LabelFrames, groups: np.ndarray, cell: Cell) -> Matrices:
    r"""Return limits of the confusion matrix of the argmax over all light and dark charge of a cell.

    Under a certificate output j of group g has dark charge D + e_j, with D shared and independent normal e_j. Let the
    group have n outputs. The law of its sum of numbers depends on sum e_j only, within `spread_error`, and \|sum e_j\|
    <= n u with u = `dark_deviation_e` / sqrt(n); limits of each e_j would give n `dark_deviation_e`. Entry (a, y) of
    the matrix rises with the rates of group y and falls with those of others, so its limits have the group at D + u and
    all others at D - u or the other way round. If the read-out bends or clips, u is the limit of one output. Without a
    certificate the cell's D is the difference from the described dark charge.
    """
    certified, law = frames.certified, frames.law
    if certified is None:
        return described_confusion(law, groups, cell, OperatingPoint())
    deviation, single = (certified.dark_of_groups(size)[2] for size in (groups.shape[1], 1))
    brightest = cell.most * frames.light + cell.dark_high
    most = float(np.max(brightest)) + single
    errors = [spread_error(law.sensor, law.offset_e[group], most, law.nonlinearity) for group in groups]
    if max(errors) > _MOST_SPREAD_ERROR:
        deviation, errors = single, [0.0]
    lowest = np.maximum(cell.least * frames.light + cell.dark_low - deviation, 0.0)
    lower, upper = confusion_at(law, groups, lowest, brightest + deviation)
    off = math.fsum(errors)
    return np.clip(lower - off, 0.0, 1.0), np.clip(upper + off, 0.0, 1.0)


def described_confusion(law: CountLaw, groups: np.ndarray, cell: Cell, point: OperatingPoint) -> Matrices:
    """Return limits of the confusion matrix over a cell, of a camera as described, at a point except for its light."""
    ends, described = ((cell.least, cell.dark_low), (cell.most, cell.dark_high)), law.dark_e(point)
    lowest, highest = (
        law.rates_with(replace(point, light=max(light, NO_LIGHT)), described + dark)[0]
        for light, dark in ends
    )
    return confusion_at(law, groups, lowest, lowest if ends[0] == ends[1] else highest)


def largest_epsilon(limits: Callable[[Cell], Matrices], whole: Cell, electrons: float) -> float:
    """Return a bound of the epsilon of the symmetrised argmax over all points of a cell.

    Without a certificate the dark charge is the credited or the described one, and the larger epsilon is returned. No
    argument shows where an answer reveals most, so the cell with the largest bound is halved until its bound is within
    0.5 % of the epsilon at a point, or until `_MOST_CELLS` are bounded; the largest bound holds in either case.
    `limits` maps a cell to limits of the confusion matrix; `electrons`, the light of an output at a light of 1,
    compares ranges of light and dark charge.
    """
    if len(whole.dark_laws) > 1:
        return max(largest_epsilon(limits, each, electrons) for each in whole.dark_laws)

    def bound(cell: Cell) -> float:
        return argmax_epsilon(*limits(cell), symmetrised=True)

    turn, reached, tried = 1, 0.0, set[Cell]()
    cells = [(-bound(whole), 0, whole)]
    while turn < _MOST_CELLS and whole != whole.worst:
        largest, _, cell = cells[0]
        if cell.worst not in tried:
            tried.add(cell.worst)
            reached = max(reached, bound(cell.worst))
        if -largest <= (1 + _CELL_TOLERANCE) * reached + 1e-9:
            break
        heapq.heappop(cells)
        for half in cell.halves(electrons):
            heapq.heappush(cells, (-bound(half), turn, half))
            turn += 1
    return -cells[0][0]


def _kept_at(frames: LabelFrames, groups: np.ndarray, light: float) -> float:
    rates = frames.rates(light)
    return float(np.trace(confusion_at(frames.law, groups, rates, rates)[0])) / len(groups)


def confusion_at(
    law: CountLaw, groups: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return limits of the confusion matrix of the argmax over boxes of rates, from `lowest` to `highest`.

    Rates, expected electrons of each label's frame, have shape (labels, pixels), groups (labels, pixels of a group).
    Raises ConfigError if the camera sees ambient light: no amount of it is the worst case for every matrix.
    """
    if np.any(law.ambient_e):
        raise ConfigError(
            "configuration",
            "camera.light.ambient_flux_per_s",
            f"{float(np.max(law.ambient_e)):.4g} electrons a frame may change, and with them what the argmax reveals; "
            "switch the light off, or keep the counts, whose guarantee does not credit it",
        )
    pixels, places = groups.ravel(), list(np.arange(groups.size).reshape(groups.shape))
    rates = lowest if lowest is highest else np.concatenate([lowest, highest])
    sums = number_law(rates[:, pixels], law.offset_e[pixels], law.sensor, law.nonlinearity).sums(places)
    sums = sums[:, :, np.any(sums > 0, axis=(0, 1))]  # places without mass change nothing
    return confusion_matrix(sums[: len(lowest)], sums[-len(highest) :])
