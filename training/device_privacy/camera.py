"""The privacy of a camera's photon counts: from temperature to sigma to epsilon, and from epsilon back.

As for devices of Gaussian law (`device_privacy.levels`), the device reads every record's one-hot label once, and the
readings are kept and reused. Epsilon is accounted on the electron counts of the frames that depend on the label. A
simulated device knows their rates, so the divergence of the Poisson laws is exact. Epsilon therefore holds even against
an attacker who sees the frames; sigma, the noise of the recovered projection, is what learning sees. Dark charge and
bias light add counts that do not depend on the label; less laser light or a shorter exposure leaves fewer that do.
Ambient light is in sigma and in no epsilon: it may be gone tomorrow. Light that fluctuates is accounted for as in
training, up to a power that a frame exceeds with a small probability; sigma is then that at constant power. Under a
certificate its limits take the place of the description's numbers, and the laser's light is all that may be changed: a
certificate holds at one exposure, temperature and bias light. What is kept of labels is then what training would keep.
Source: docs/privacy-devices.md; opusim.camera.exposure for the rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np
import torch
from scipy.optimize import brentq

from accounting import numerics
from accounting.composition import guarantees
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee
from accounting.mechanisms.counts import (
    LabelArgmax,
    argmax_epsilon,
    at_brightest,
    known_counts_epsilon,
    known_counts_guarantee,
)
from opusim.camera.exposure import CountLaw, OperatingPoint
from opusim.description.schema import DeviceDescription
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import Certificate, FluctuatingCountLaw, PhotonCountLaw
from opusim.devices.registry import open_described
from opusim.errors import ConfigError
from opusim.noise import FluctuatingCountNoise, LightPower
from training.protections.argmax_labels import (
    NO_LIGHT,
    POWER_SHARE,
    ArgmaxReadout,
    Cell,
    LabelFrames,
    confusion,
    confusion_at,
    label_groups,
    largest_epsilon,
    own_light,
    shared_range,
)
from training.protections.counted_labels import CountsReadout, equidistant_pixels

MIN_SHARE = 1e-12
"""Smallest share of the light or the exposure that is searched."""
MAX_BIAS_E = 1e12
"""Largest bias light that is searched, electrons per frame."""
_LEAST_EPSILON = 1e-9
"""What an argmax that tells nothing is stated as."""
Kept = Literal["reading", "counts", "argmax"]
_TOLERANCE = 1e-4
"""Tolerance of the searches, in the knob or its logarithm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelCounts:
    """A camera's readings of all labels.

    Attributes:
        name: Name of the device.
        law: Law of the readings.
        delta: Delta at which epsilon is stated, in (0, 1).
        kept: What is kept of each label. reading: the frames of a projection at all outputs. counts: one frame of it,
            at the pixels that `label-readout` keeps. argmax: the brightest group of pixels of that frame.
        on_evaluation: Called before each evaluation of epsilon, which takes 2 to 40 ms; the argmax takes up to 1 s.
        frames: How training sees the labels, if one frame of each is kept.
        power: Law of the laser's power in a frame, of the largest spread that a certificate allows; None if constant.
        certificate: Whose limits count in place of the description's numbers, or None.
    """

    name: str
    law: CountLaw
    delta: float
    kept: Kept = "reading"
    on_evaluation: Callable[[], None] = lambda: None
    frames: LabelFrames | None = None
    power: LightPower | None = None
    certificate: Certificate | None = None

    @cached_property
    def temperatures_c(self) -> tuple[float, float] | None:
        """Lowest and highest temperature of the sensor, or None if it has no dark current."""
        dark = self.law.dark
        return None if dark is None else (dark.temperature_min_c, dark.temperature_max_c)

    @property
    def limits(self) -> PhotonCountLaw | FluctuatingCountLaw | None:
        """The certificate's limits, or None without one."""
        law = None if self.certificate is None else self.certificate.noise
        return law if isinstance(law, PhotonCountLaw | FluctuatingCountLaw) else None

    @property
    def _beta(self) -> float:
        """Probability that the certificate is wrong, 0 without one."""
        return 0.0 if self.certificate is None else self.certificate.beta

    def guarantee(self, point: OperatingPoint) -> Guarantee:
        """Return the guarantee of one reading of every label."""
        self.on_evaluation()
        if self.kept == "argmax":
            answer = LabelArgmax(
                step_epsilon=max(self._argmax_epsilon(point, all_powers=True), _LEAST_EPSILON),
                n_classes=self.law.light_e.shape[1],
                power_error=self._power_error,
                beta=self._beta,
                certificate="" if self.certificate is None else self.certificate.digest,
            )
            spent = self._power_error or self._beta
            return guarantees([answer], delta=self.delta if spent else 0.0)[0]
        return known_counts_guarantee(
            self._credited(point), delta=self.delta, beta=self._beta, power_error=self._power_error
        )

    def _credited(self, point: OperatingPoint) -> np.ndarray:
        """Expected counts of each label that a guarantee rests on, shape (labels, pixels of all frames)."""
        rates, dark = (self._limiting_rates(p) for p in (point, replace(point, light=NO_LIGHT)))
        frames = (
            1 if self.kept == "counts" else len(rates) // 2
        )  # the negative part, of the second half, is empty
        some = slice(None) if self.kept == "reading" else self._pixels
        counts = rates[:frames][:, :, some].transpose(1, 0, 2)
        return at_brightest(
            counts.reshape(len(counts), -1),
            brightest=self._brightest(frames),
            dark_low=dark[:frames, 0, some].ravel() if self._power_error else 0.0,
        )

    def _limiting_rates(self, point: OperatingPoint) -> np.ndarray:
        """Return the largest light and least dark charge that the description or the certificate allows, electrons."""
        limits = self.limits
        if limits is None:
            return self.law.credited_rates(point)
        return np.asarray(limits.light_ratio_high * point.light * self.law.light_e + limits.dark_e_low)

    def _argmax_epsilon(self, point: OperatingPoint, *, all_powers: bool) -> float:
        """Pure epsilon of an answer, in the brightest frames or in all that may come."""
        frames, groups = self._seen, self._pixels

        def limits(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
            if frames.certified is not None:
                return confusion(frames, groups, cell)
            lights = {max(light, NO_LIGHT) for light in (cell.least, cell.most)}
            rates = [self.law.rates(replace(point, light=light))[0] for light in sorted(lights)]
            return confusion_at(self.law, groups, rates[0], rates[-1])

        most = self._brightest(1) * point.light
        whole = shared_range(frames, groups.shape[1], most, least=0.0 if self._power_error else most)
        if not all_powers:
            return argmax_epsilon(*limits(whole.worst), symmetrised=True)
        return largest_epsilon(limits, whole, own_light(frames.light, groups))

    @property
    def _seen(self) -> LabelFrames:
        if self.frames is None:
            raise ValueError("frames: are needed for what is kept of one frame; use label_counts")
        return self.frames

    @property
    def _power_error(self) -> float:
        """Share of delta that light that fluctuates takes, as in training."""
        fluctuates = self.power is not None and self.power.rms > 0
        return POWER_SHARE * max(self.delta - self._beta, 0.0) if fluctuates else 0.0

    @property
    def _left(self) -> float:
        """What the certificate and the light leave of delta."""
        return self.delta - self._power_error - self._beta

    def _brightest(self, frames: int) -> float:
        """Relative power that none of some frames exceeds, but for that probability."""
        return 1.0 if self.power is None else self.power.limit(self._power_error / frames)

    def readout(self, target: float) -> ArgmaxReadout | CountsReadout:
        """Return what training would keep of one frame of each label at an epsilon.

        Raises:
            ConfigError: No light reaches it.
        """
        kind = ArgmaxReadout if self.kept == "argmax" else CountsReadout
        return kind.within(self._seen, epsilon=target, delta=self.delta)

    @cached_property
    def _pixels(self) -> np.ndarray:
        """Outputs that are kept, or those of each group."""
        light = self.law.light_e[0]
        return label_groups(light) if self.kept == "argmax" else equidistant_pixels(light)

    def epsilon(self, point: OperatingPoint) -> float:
        """Return epsilon of one reading of every label, at delta; of the argmax the pure one, over all powers."""
        if point not in self._known:
            self.on_evaluation()
            self._known[point] = (
                self._argmax_epsilon(point, all_powers=True)
                if self.kept == "argmax"
                else known_counts_epsilon(
                    self._credited(point),
                    delta=self.delta,
                    beta=self._beta,
                    power_error=self._power_error,
                )
            )
        return self._known[point]

    @cached_property
    def _known(self) -> dict[OperatingPoint, float]:
        """What `epsilon` returned."""
        return {}

    def may_reach(self, target: float, point: OperatingPoint) -> bool:
        """Return whether epsilon is at most the target; of the argmax in the brightest frames, which are not all."""
        if self.kept == "argmax":
            return self._epsilon_below(point, []) <= target
        return self.epsilon(point) <= target

    def _epsilon_below(self, point: OperatingPoint, pairs: Sequence[tuple[int, int]]) -> float:
        """Epsilon of some ordered pairs of labels, at most that of all; of the argmax in its brightest frames."""
        self.on_evaluation()
        if self.kept == "argmax":
            return self._argmax_epsilon(point, all_powers=False)
        rates = self._credited(point)
        return max(self._pair_epsilon(rates[i], rates[j]) for i, j in pairs)

    def _pair_epsilon(self, a: np.ndarray, b: np.ndarray) -> float:
        """Epsilon of the first label against the second."""
        upper = numerics.poisson_upper(a, b, self._left)
        return upper if math.isfinite(upper) else numerics.renyi_upper(np.stack([a, b]), self._left)

    def _worst_pair(self, point: OperatingPoint) -> list[tuple[int, int]]:
        """The ordered labels that are told apart best; none of the argmax, which has no pairs."""
        if self.kept == "argmax":
            return []
        return [numerics.worst_patterns(self._credited(point), self._left)]

    def temperature_for(self, target: float, light: float) -> float | None:
        """Return the lowest temperature with epsilon at most the target, or None if there is none."""
        if self.temperatures_c is None:
            return None
        low, high = self.temperatures_c

        def at(temperature_c: float) -> OperatingPoint:
            return OperatingPoint(temperature_c=temperature_c, light=light)

        return self._solve(at, low, high, target)

    def share_for(self, target: float, knob: Literal["light", "exposure"]) -> float | None:
        """Return the largest multiple (at most 1) of light or exposure with epsilon at most the target, or None."""
        found = self._solve(lambda t: with_share(knob, math.exp(-t)), 0.0, -math.log(MIN_SHARE), target)
        return None if found is None else math.exp(-found)

    def bias_for(self, target: float) -> float | None:
        """Return the least bias light, in electrons per frame, with epsilon at most the target, or None."""
        found = self._solve(
            lambda t: OperatingPoint(bias_e=math.expm1(t)), 0.0, math.log1p(MAX_BIAS_E), target
        )
        return None if found is None else math.expm1(found)

    def _solve(
        self, at: Callable[[float], OperatingPoint], low: float, high: float, target: float
    ) -> float | None:
        """Return the least knob in [low, high] with epsilon at most the target, which falls as the knob rises.

        The search looks at the pairs of labels that are worst where it ended before, until no other pair is.
        """
        pairs = self._worst_pair(at(low))

        @cache
        def excess(knob: float, n_pairs: int) -> float:
            below = self._epsilon_below(at(knob), pairs[:n_pairs])
            return min(math.log(max(below, 1e-300) / target), 700.0)

        while True:
            if excess(low, len(pairs)) <= 0:
                knob = low
            elif excess(high, len(pairs)) > 0:
                return None
            else:
                knob = float(brentq(excess, low, high, args=(len(pairs),), xtol=_TOLERANCE))
                if excess(knob, len(pairs)) > 0:  # the root lies within xtol on either side
                    knob = min(knob + _TOLERANCE, high)
            others = [pair for pair in self._worst_pair(at(knob)) if pair not in pairs]
            if not others:
                break
            pairs += others
        more = _TOLERANCE
        while self.epsilon(at(knob)) > target:  # other powers may tell more
            if knob >= high:
                return None
            knob, more = min(knob + more, high), 4 * more
        return knob


def label_counts(
    description: DeviceDescription,
    *,
    n_classes: int,
    n_outputs: int,
    delta: float,
    kept: Kept = "reading",
    on_evaluation: Callable[[], None] = lambda: None,
    certificate: Certificate | None = None,
) -> LabelCounts:
    """Return the law of a camera's readings of all labels.

    Args:
        description: A device with a camera.
        n_classes: Number of labels, at least 2; the inputs of the device.
        n_outputs: Number of outputs of a reading.
        delta: Delta at which epsilon is stated, in (0, 1).
        kept: See LabelCounts.
        on_evaluation: See LabelCounts.
        certificate: The device's certificate, or None.

    Raises:
        ConfigError: The device has no camera, or no shot noise, the certificate is not its own, or training would
            refuse to keep that of its labels.
        NoGuarantee: delta does not exceed the certificate's beta.
    """
    if certificate is not None and delta <= certificate.beta:
        raise NoGuarantee(
            f"delta = {delta:g}: must exceed beta = {certificate.beta:g}, the certificate's own error; raise delta, "
            "or calibrate with a smaller --beta"
        )
    with open_described(description, n_inputs=n_classes, n_outputs=n_outputs) as device:
        if not isinstance(device, CameraDevice):
            raise ConfigError(
                description.name, "kind", f"{description.kind!r} counts no photons; use 'camera'"
            )
        if certificate is not None:
            device.attach_certificate(certificate)
        frames = None if kept == "reading" else LabelFrames.of(device, n_classes)
        law = device.count_law(torch.eye(n_classes), at_mean_power=True) if frames is None else frames.law
        credited = law if certificate is None else device.noise
        power = credited.power if isinstance(credited, CountLaw | FluctuatingCountNoise) else None
        return LabelCounts(
            name=description.name,
            law=law,
            delta=delta,
            kept=kept,
            on_evaluation=on_evaluation,
            frames=frames,
            power=power,
            certificate=certificate,
        )


def with_share(knob: Literal["light", "exposure"], share: float) -> OperatingPoint:
    """Return the described operating point with a multiple of its light or exposure."""
    return OperatingPoint(light=share) if knob == "light" else OperatingPoint(exposure=share)
