"""Labels shown once to a camera: photon counts that are kept, or only the brightest group of pixels.

Each record's one-hot label is one binary frame, taken with the laser dimmed until the counts cost the run's epsilon.
Kept counts give training the log-likelihood of every class by the counts' own law, read noise and rounding included.
For the argmax, each label has a group of pixels that it lights most; only the group with the largest sum is kept, and
the frames are discarded in the function that takes them.
Source: docs/privacy.md, section 9 (photon counts of known inputs, the argmax of counts).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy.optimize import brentq, linear_sum_assignment, linprog
from torch import Tensor

from accounting.devices.counts import LabelArgmax, LabelCounts, argmax_epsilon, confusion_matrix
from accounting.labels.observations import UniformSource
from accounting.mechanisms import Mechanism
from opusim import checks
from opusim.camera.exposure import CountLaw, OperatingPoint
from opusim.camera.number_law import NumberLaw, number_law
from opusim.devices.base import NoisyDevice
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import PhotonCountLaw
from opusim.errors import ConfigError
from opusim.noise import PhotonCountNoise
from opusim.randomness.streams import SystemUniforms
from training.protections.base import calibrated_once
from training.protections.noisy_labels import LABEL_STEP, OneLookProtection, Pay
from training.protections.planning import epsilon_of

LEAST_LIGHT = 1e-9
"""Smallest multiple of the described light that is searched."""
_MOST_PER_GROUP = 32
_PIXELS_COMPARED = 2048
"""Pixels among which those of the groups are chosen."""
_PIXELS_EXCHANGED, _EXCHANGES = 256, 60
"""Most pixels among which single ones are exchanged, and how often."""
_FRAMES_AT_ONCE = 4096
_START_LIGHT = 1e-3
"""Where the search for the light of kept counts starts."""
_TOLERANCE = 1e-4
_KEY = "protection.noise"


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelFrames:
    """How a camera sees the labels: one frame of each one-hot vector.

    Attributes:
        device: The open camera.
        law: Of its counts; the first frame of a reading is the one-hot vector's own.
        dark: Least expected electrons without light that are credited at each pixel, shape (pixels,).
        certified: Limits of the device's certificate, or None without one.
        beta: Probability that these are wrong, 0 without one.
        certificate: Digest of the certificate, or empty.
    """

    device: CameraDevice
    law: CountLaw
    dark: np.ndarray
    certified: PhotonCountLaw | None = None
    beta: float = 0.0
    certificate: str = ""

    @classmethod
    def of(cls, device: NoisyDevice, n_classes: int) -> LabelFrames:
        """Return how an open device sees the labels, within the limits of its certificate if it has one.

        Raises:
            ConfigError: It is no simulated camera, its light fluctuates, or it states no law of its counts.
        """
        if not isinstance(device, CameraDevice) or device.stated_noise is None:
            reason = (
                f"device {device.name!r} counts no photons at rates that are known; use a camera without drift and "
                "lost frames, or 'digital'"
            )
            raise ConfigError("configuration", _KEY, reason)
        if device.is_holographic:
            reason = (
                f"device {device.name!r} reads holograms, and counts are kept of frames without a reference beam; "
                "remove camera.reference_beam, or use 'digital'"
            )
            raise ConfigError("configuration", _KEY, reason)
        law = device.count_law(torch.eye(n_classes))
        stated, certificate = device.noise, device.certificate
        if not isinstance(stated, PhotonCountNoise):
            raise ConfigError(
                "configuration", _KEY, f"{stated.law!r} is no law of photon counts; use 'digital'"
            )
        found = cls(device=device, law=law, dark=np.asarray(stated.rate_low)[0])
        if certificate is None or not isinstance(certificate.noise, PhotonCountLaw):
            return found
        return replace(
            found, certified=certificate.noise, beta=certificate.beta, certificate=certificate.digest
        )

    @property
    def excess(self) -> float:
        """Most light, as a multiple of the law's, that the certificate allows; 1 without one."""
        return 1.0 if self.certified is None else self.certified.light_ratio_high

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


# Counts that are kept


@dataclass(frozen=True, kw_only=True, eq=False)
class CountsReadout:
    """A frame of each label, of which the counts of some pixels are kept.

    Attributes:
        frames: The camera.
        pixels: Outputs that are kept, integers.
        mechanism: What is released.
    """

    frames: LabelFrames
    pixels: np.ndarray
    mechanism: LabelCounts

    @classmethod
    def within(cls, frames: LabelFrames, *, epsilon: float, delta: float) -> CountsReadout:
        """Return the readout with the most light, at most the described, that stays within epsilon.

        Raises:
            NoGuarantee: No light does.
        """
        pixels = equidistant_pixels(frames.light)
        start = LabelCounts.of(
            frames.light[:, pixels], frames.dark[pixels], beta=frames.beta, certificate=frames.certificate
        )
        found = calibrated_once(
            replace(start, brightest=_START_LIGHT * frames.excess), epsilon=epsilon, delta=delta
        )
        mechanism = replace(found, brightest=min(found.brightest, frames.excess))
        return cls(frames=frames, pixels=pixels, mechanism=mechanism)

    @property
    def light(self) -> float:
        """Multiple of the described light."""
        return self.mechanism.brightest / self.frames.excess

    def log_likelihood(self, labels: Tensor) -> np.ndarray:
        """Show every label once; return log P(kept counts | class), shape (n, k), largest 0."""
        law, scores = self.frames.numbers(self.frames.rates(self.light), self.pixels), []
        for part in labels.split(_FRAMES_AT_ONCE):
            found = law.log_likelihood(self.frames.taken(part, self.light)[:, self.pixels])
            scores.append(found - found.max(axis=1, keepdims=True))
        return np.concatenate(scores)


def read_counts(readout: CountsReadout, labels: Tensor, *, pay: Pay) -> Tensor:
    """Show every label once and keep its counts.

    Args:
        readout: What is read, and its light.
        labels: Class numbers, shape (n,).
        pay: Takes what is released, before a frame is taken.

    Returns:
        The log-likelihood of every class, float32, shape (n, k), largest 0.
    """
    pay(readout.mechanism)
    return torch.from_numpy(readout.log_likelihood(labels)).float()


def equidistant_pixels(light: np.ndarray) -> np.ndarray:
    """Return the pixels whose frames of the labels are most nearly equidistant: those that training gains by.

    Epsilon is that of the farthest two labels, and what is learnt rests on all pairs. With d_i the squared distance of
    a pair at pixel i, the pixels raise the mean over pairs of sum d_i relative to its largest: a linear programme over
    shares of pixels, rounded, then exchanges of single pixels. The choice depends on the medium only.

    Args:
        light: Expected electrons of light, shape (labels, pixels).
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
    """Shares in [0, 1] of pixels that make the largest pair's distance least, at a mean of half of all pixels'."""
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


# The argmax


@dataclass(frozen=True, kw_only=True, eq=False)
class ArgmaxReadout:
    """One answer of a camera to each label: the brightest group of pixels, under a secret permutation of the labels.

    Attributes:
        frames: The camera.
        groups: Pixels of each label, integers, shape (labels, pixels of a group).
        light: Multiple of the described light.
        mechanism: What is released.
        keep: Mean diagonal of the confusion matrix as described: the probability that a label stays.
    """

    frames: LabelFrames
    groups: np.ndarray
    light: float
    mechanism: LabelArgmax
    keep: float

    @classmethod
    def within(cls, frames: LabelFrames, *, epsilon: float) -> ArgmaxReadout:
        """Return the readout with the most light, at most the described, that stays within epsilon.

        Raises:
            ConfigError: The camera has fewer outputs than labels, or even `LEAST_LIGHT` gives more than epsilon.
        """
        groups = label_groups(frames.light)

        def excess(log_light: float) -> float:
            return argmax_epsilon(*confusion(frames, groups, math.exp(log_light)), symmetrised=True) - epsilon

        high, low = 0.0, 0.0
        while excess(low) > 0:
            high, low = low, low - 1.0
            if low < math.log(LEAST_LIGHT):
                limits = "" if frames.certified is None else " within the limits of device.certificate"
                raise ConfigError(
                    "configuration",
                    "protection.epsilon",
                    f"{epsilon:g} is below what any light gives{limits}; allow more, or use {_KEY} = 'digital'",
                )
        found = low if low == high else float(brentq(excess, low, high, xtol=_TOLERANCE))
        while excess(found) > 0:
            found -= _TOLERANCE
        light = math.exp(found)
        mechanism = LabelArgmax(
            step_epsilon=argmax_epsilon(*confusion(frames, groups, light), symmetrised=True),
            n_classes=len(groups),
            beta=frames.beta,
            certificate=frames.certificate,
        )
        rates = frames.rates(light)
        own = confusion_at(frames.law, groups, rates, rates)[0]
        return cls(
            frames=frames,
            groups=groups,
            light=light,
            mechanism=mechanism,
            keep=float(np.trace(own)) / len(own),
        )

    def answers(self, labels: Tensor, source: UniformSource) -> np.ndarray:
        """Show every label once and return the answers, integers, shape (n,); the frames do not leave this function.

        Args:
            labels: Class numbers, shape (n,).
            source: Of the permutations and of what breaks ties.
        """
        found = []
        for part in labels.split(_FRAMES_AT_ONCE):
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
    """Show every label once and keep its answer only.

    Args:
        readout: What is read, and its light.
        labels: Class numbers, shape (n,).
        source: Of the permutations and of what breaks ties; the operating system's own for a release.
        pay: Takes what is released, before a frame is taken.

    Returns:
        The log-likelihood of every class, float32, shape (n, k).
    """
    pay(readout.mechanism)
    return torch.from_numpy(readout.log_likelihood(readout.answers(labels, source))).float()


def label_groups(light: np.ndarray) -> np.ndarray:
    """Return the pixels of each label, equally many: an assignment of the largest light beyond the other labels'.

    Args:
        light: Expected electrons of light, shape (labels, pixels).

    Raises:
        ConfigError: There are fewer pixels than labels.
    """
    checks.shape((None, None), light=light)
    labels, pixels = light.shape
    if pixels < labels:
        reason = (
            f"'argmax' needs an output for each of {labels} labels, and there are {pixels}; widen the network"
        )
        raise ConfigError("configuration", _KEY, reason)
    some = light[:, :_PIXELS_COMPARED]
    size = min(some.shape[1] // labels, _MOST_PER_GROUP)
    contrast = some - (some.sum(axis=0) - some) / (labels - 1)
    rows, columns = linear_sum_assignment(np.repeat(contrast, size, axis=0), maximize=True)
    return np.sort(columns[np.argsort(rows)].reshape(labels, size), axis=1)


def confusion(frames: LabelFrames, groups: np.ndarray, light: float) -> tuple[np.ndarray, np.ndarray]:
    """Return limits of the confusion matrix of the argmax over all dark and light that a certificate allows.

    Args:
        frames: The camera.
        groups: Pixels of each label, shape (labels, pixels of a group).
        light: Multiple of the described light.
    """
    rates, certified = frames.rates(light), frames.certified
    if certified is None:
        return confusion_at(frames.law, groups, rates, rates)
    lowest = certified.dark_e_low + certified.light_ratio_low * light * frames.light
    highest = certified.dark_e_high + certified.light_ratio_high * light * frames.light
    return confusion_at(frames.law, groups, np.minimum(lowest, rates), np.maximum(highest, rates))


def confusion_at(
    law: CountLaw, groups: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return limits of the confusion matrix of the argmax over boxes of rates, from `lowest` to `highest`.

    Args:
        law: The camera's stages.
        groups: Pixels of each label, shape (labels, pixels of a group).
        lowest: Expected electrons of each label's frame, shape (labels, pixels).
        highest: The same, at least as large.

    Raises:
        ConfigError: The camera sees ambient light, of which no amount is the worst for every matrix.
    """
    if np.any(law.ambient_e):
        raise ConfigError(
            "configuration",
            "camera.light.ambient_flux_per_s",
            f"{float(np.max(law.ambient_e)):.4g} electrons a frame may be gone tomorrow, and the argmax would tell "
            "more or less then; switch the light off, or keep the counts, whose guarantee does not credit it",
        )
    pixels, places = groups.ravel(), list(np.arange(groups.size).reshape(groups.shape))
    rates = lowest if lowest is highest else np.concatenate([lowest, highest])
    sums = number_law(rates[:, pixels], law.offset_e[pixels], law.sensor, law.nonlinearity).sums(places)
    return confusion_matrix(sums[: len(lowest)], sums[-len(highest) :])


# Protections


class _CameraProtection(OneLookProtection, ABC):
    """Labels that a camera counts, with the laser dimmed to the run's epsilon."""

    @cached_property
    def mechanism(self) -> Mechanism:
        """See OneLookProtection.mechanism; a device that cannot count labels is refused before the run begins."""
        description = self._plan.description
        if description is None or description.camera is None:
            name = "none" if description is None else repr(description.name)
            reason = (
                f"{self.section.noise!r} needs a device that counts photons, and this run's is {name}; take "
                "--device camera_low_light, or 'digital'"
            )
            raise ConfigError("configuration", _KEY, reason)
        with self._plan.opened_device() as device:
            return self._released(self._frames(device))

    def _frames(self, device: NoisyDevice | None) -> LabelFrames:
        if device is None:
            raise ConfigError("configuration", _KEY, f"{self.section.noise!r} needs a device; use 'digital'")
        return LabelFrames.of(device, self._plan.dataset.n_classes)

    @abstractmethod
    def _released(self, frames: LabelFrames) -> Mechanism:
        """What a camera releases at the run's epsilon."""

    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        """See OneLookProtection.look."""
        frames = self._frames(device)
        frames.device.seek(LABEL_STEP)
        return self._read(frames, self._plan.dataset.train.y.cpu(), pay)

    @abstractmethod
    def _read(self, frames: LabelFrames, labels: Tensor, pay: Pay) -> Tensor:
        """Read every label once; see OneLookProtection.look."""


class LabelCountsProtection(_CameraProtection):
    """Labels: a camera's counts of each, kept."""

    def _readout(self, frames: LabelFrames) -> CountsReadout:
        return CountsReadout.within(frames, epsilon=epsilon_of(self.section), delta=self.section.delta)

    def _released(self, frames: LabelFrames) -> LabelCounts:
        return self._readout(frames).mechanism

    def _read(self, frames: LabelFrames, labels: Tensor, pay: Pay) -> Tensor:
        return read_counts(self._readout(frames), labels, pay=pay)


class LabelArgmaxProtection(_CameraProtection):
    """Labels: the brightest group of a camera's pixels for each, and no counts."""

    def _released(self, frames: LabelFrames) -> LabelArgmax:
        return ArgmaxReadout.within(frames, epsilon=epsilon_of(self.section)).mechanism

    def _read(self, frames: LabelFrames, labels: Tensor, pay: Pay) -> Tensor:
        readout = ArgmaxReadout.within(frames, epsilon=epsilon_of(self.section))
        seed = self._plan.config.seed_for("labels")
        source: UniformSource = SystemUniforms() if seed is None else np.random.default_rng(seed)
        return read_argmax(readout, labels, source, pay=pay)
