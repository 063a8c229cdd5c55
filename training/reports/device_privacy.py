"""The privacy of a device's noise: from sigma or temperature to epsilon, and from epsilon back; tables and a figure.

The device reads every record's one-hot label once, and the readings are kept and reused. Noise of Gaussian law is the
Gaussian mechanism with mu = max_ab ||B_a - B_b|| / sigma over the device's own matrix B. Accounting gives a sigma; the
device's description gives the temperature that produces it, if there is one.

Epsilon of a camera is accounted on the electron counts of the frames that depend on the label. A simulated device knows
their rates, so the divergence of the Poisson laws is exact. Epsilon therefore holds even against an attacker who sees
the frames; sigma, the noise of the recovered projection, is what learning sees. Dark charge and bias light add counts
that do not depend on the label; less laser light or a shorter exposure leaves fewer that do. Ambient light is in sigma
and in no epsilon: it may be gone tomorrow. Light that fluctuates is accounted for as in training, up to a power that a
frame exceeds with a small probability; sigma is then that at constant power. Under a certificate its limits take the
place of the description's numbers, and the laser's light is all that may be changed: a certificate holds at one
exposure, temperature and bias light. What is kept of labels is then what training would keep.
Source: docs/privacy-labels.md, sections 4 (labels read once) and 6 to 10; opusim.temperature and
opusim.camera.exposure for the laws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from scipy.optimize import brentq

from opusim.accounting import numerics
from opusim.accounting.composition import calibrate_noise, guarantees
from opusim.accounting.explanation import guarantee_rows, number, print_rows
from opusim.accounting.guarantee import Guarantee, NoGuarantee
from opusim.accounting.mechanisms.counts import (
    LabelArgmax,
    argmax_epsilon,
    at_brightest,
    known_counts_epsilon,
    known_counts_guarantee,
)
from opusim.accounting.mechanisms.labels import LabelReadout, label_distance
from opusim.camera.exposure import CountLaw, OperatingPoint
from opusim.description.schema import DeviceDescription
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import Certificate, FluctuatingCountLaw, PhotonCountLaw
from opusim.devices.registry import open_described
from opusim.errors import ConfigError
from opusim.noise import FluctuatingCountNoise, LightPower
from opusim.tables import blank_figure
from opusim.temperature import TemperatureLaw
from opusim.training.protections.argmax_labels import (
    NO_LIGHT,
    POWER_SHARE,
    ArgmaxReadout,
    Cell,
    LabelFrames,
    confusion,
    described_confusion,
    label_groups,
    largest_epsilon,
    own_light,
    require_known_light,
    shared_range,
)
from opusim.training.protections.base import creditable_law
from opusim.training.protections.counted_labels import CountsReadout, equidistant_pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class DeviceLevel:
    """One noise level of a device.

    Attributes:
        sigma: Standard deviation of a reading's noise, projection units.
        epsilon: Epsilon of one reading of every label, at delta.
        temperature_c: The temperature that gives sigma, or None if there is none.
        remark: How the device reaches sigma, or what to add if it does not.
    """

    sigma: float
    epsilon: float
    temperature_c: float | None
    remark: str


def device_levels(
    description: DeviceDescription,
    *,
    n_classes: int,
    n_outputs: int,
    targets: Sequence[float],
    delta: float,
    certificate: Certificate | None = None,
) -> list[DeviceLevel]:
    """Return the level of the device as described or certified, then the level that each target epsilon requires.

    A reading of a device of Gaussian law has `n_outputs` outputs for each of `n_classes` labels, its inputs. A
    certificate's lower limit takes the described noise's place, and its beta is taken off delta. Raises ConfigError if
    the device has no Gaussian law, its matrix is not known, or the certificate is not its own.
    """
    settings = description.noise
    if settings is None:
        raise ConfigError(
            description.name,
            "noise",
            f"a device of kind {description.kind!r} has no Gaussian sigma and no photon counts, and no theorem credits "
            "other noise: its status is none; protect runs by central noise, such as --protect record, or take "
            "'gaussian', 'gaussian_temperature', 'camera' or 'camera_low_light'",
        )
    with open_described(
        description, n_inputs=n_classes, n_outputs=n_outputs, certificate=certificate
    ) as device:
        distance = label_distance(device.require("matrix").matrix().cpu().double().numpy())
        own = (
            settings.value()
            if certificate is None
            else creditable_law(device, credit=_credit(certificate)).min_std
        )
    temperature, levels = settings.temperature_law, []
    reading = LabelReadout(mu=1.0, device_law=True, **_credit(certificate))
    if own > 0:
        (guarantee,) = guarantees([replace(reading, mu=distance / own)], delta=delta)
        now = None if temperature is None else temperature.temperature_c
        remark = "as described" if certificate is None else f"as certified on {certificate.date}"
        levels.append(DeviceLevel(sigma=own, epsilon=guarantee.epsilon, temperature_c=now, remark=remark))
    for target in targets:
        found, guarantee = calibrate_noise(reading, target_epsilon=target, delta=delta)
        sigma = distance / found.mu
        wanted, remark = _way_to(sigma, own, None if temperature is None else temperature.law())
        levels.append(
            DeviceLevel(sigma=sigma, epsilon=guarantee.epsilon, temperature_c=wanted, remark=remark)
        )
    return levels


def level_rows(levels: Sequence[DeviceLevel]) -> list[dict[str, str]]:
    """Return a table row for each level."""
    return [
        {
            "epsilon": number(level.epsilon),
            "sigma": f"{level.sigma:.6g}",
            "temperature": "none" if level.temperature_c is None else f"{level.temperature_c:.2f} °C",
            "remark": level.remark,
        }
        for level in levels
    ]


def _credit(certificate: Certificate | None) -> dict[str, Any]:
    """Return the keywords of a mechanism that rests on a certificate."""
    return {} if certificate is None else {"beta": certificate.beta, "certificate": certificate.digest}


def _way_to(sigma: float, own: float, law: TemperatureLaw | None) -> tuple[float | None, str]:
    """Return the temperature that gives a sigma, or None, and a remark."""
    if sigma <= own:
        return None, "the device has more noise than required"
    digital = f"digital noise of standard deviation {math.sqrt(sigma**2 - own**2):.6g} makes up the rest"
    if law is None:
        return None, f"the description sets sigma directly: set noise.sigma, or {digital}"
    try:
        return law.temperature_c(sigma), "temperature is enough"
    except ValueError as error:
        return None, f"{error}; {digital}"


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
        """The certificate's limits, or None without one.

        Raises:
            ConfigError: They leave the light of single outputs open.
        """
        law = None if self.certificate is None else self.certificate.noise
        found = law if isinstance(law, PhotonCountLaw | FluctuatingCountLaw) else None
        require_known_light(self.name, found)
        return found

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
        # the negative part, of the second half, is empty
        frames = 1 if self.kept == "counts" else len(rates) // 2
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
        frames, groups = self.seen, self._pixels

        def limits(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
            if frames.certified is not None:
                return confusion(frames, groups, cell)
            return described_confusion(self.law, groups, cell, point)

        most = self._brightest(1) * point.light
        least = 0.0 if self._power_error else most
        whole = shared_range(frames, groups.shape[1], most, least=least, point=point)
        if not all_powers:
            return argmax_epsilon(*limits(whole.worst), symmetrised=True)
        return largest_epsilon(limits, whole, own_light(frames.light, groups))

    @property
    def seen(self) -> LabelFrames:
        """How training sees the labels, if one frame of each is kept."""
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
                    self._credited(point), delta=self.delta, beta=self._beta, power_error=self._power_error
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
        rates, found = self._credited(point), []
        for i, j in pairs:  # the first label against the second
            upper = numerics.poisson_upper(rates[i], rates[j], self._left)
            renyi = not math.isfinite(upper)
            found.append(numerics.renyi_upper(rates[[i, j]], self._left) if renyi else upper)
        return max(found)

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
    """Return the law of a camera's readings of all labels; see LabelCounts.

    A reading has `n_outputs` outputs for each of `n_classes` labels. Raises ConfigError if the device has no camera, or
    no shot noise, the certificate is not its own, or training would refuse to keep that of its labels, and NoGuarantee
    if delta does not exceed the certificate's beta.
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


LIGHTS = (1.0, 0.1, 0.01, 0.001)
"""Multiples of the described laser light in tables and figures."""
_TABLE_STEPS, _FIGURE_STEPS = 10, 25
"""Temperatures in the table and in the figure."""
_EVALUATIONS_PER_TARGET = 55
"""Evaluations of epsilon for a target, on average, in four searches."""
_EVALUATIONS_PER_FIGURE = 100
"""Evaluations of epsilon for the curves of the figure."""
_DOWN, _UP = (Context(prec=3, rounding=rounding) for rounding in (ROUND_FLOOR, ROUND_CEILING))
"""Settings are printed with three digits, rounded so that epsilon stays within the target."""


def evaluations(n_targets: int, *, figure: bool) -> int:
    """Estimate the number of evaluations of epsilon that `print_account` makes."""
    drawn = _EVALUATIONS_PER_FIGURE + _EVALUATIONS_PER_TARGET // 2 * n_targets if figure else 0
    return _TABLE_STEPS * len(LIGHTS) + _EVALUATIONS_PER_TARGET * n_targets + drawn


def print_account(counts: LabelCounts, targets: Sequence[float], figure: Path | None) -> None:
    """Print both tables and the statement behind them, and draw the figure if a file is given."""
    if counts.kept != "argmax" and counts.certificate is None:
        print_rows(temperature_rows(counts))
    print_rows(target_rows(counts, targets))
    print_rows(guarantee_rows([counts.guarantee(OperatingPoint())]), without=["notes"])
    if figure is not None:
        temperature_epsilon_figure(counts, targets).savefig(figure, dpi=110)
        print(f"figure: {figure}")


def temperature_rows(counts: LabelCounts, steps: int = _TABLE_STEPS) -> list[dict[str, str]]:
    """Return table rows from temperature to sigma to epsilon, at the described light and at less of it."""
    ends = counts.temperatures_c
    temperatures: Sequence[float | None] = [None] if ends is None else np.linspace(*ends, steps).tolist()
    rows = []
    for temperature in temperatures:
        here = OperatingPoint(temperature_c=temperature)
        row = {
            "°C": "off" if temperature is None else f"{temperature:.1f}",
            "dark charge, e⁻": f"{counts.law.dark_e(here):.4g}",
            "sigma": f"{counts.law.std(here):.4g}",
        }
        for light in LIGHTS:
            name = "epsilon" if light == 1 else f"at {light:g} of the light"
            row[name] = number(counts.epsilon(replace(here, light=light)))
        rows.append(row)
    return rows


def target_rows(counts: LabelCounts, targets: Sequence[float]) -> list[dict[str, str]]:
    """Return table rows from epsilon to the temperature, light, exposure or bias light that reaches it."""
    rows = []
    for target in targets:
        if counts.certificate is not None:
            rows.append(_by_certified_light(counts, target))
            continue
        if counts.temperatures_c is not None:
            # the described light, and the largest light at which some temperature reaches the target
            hottest = OperatingPoint(temperature_c=counts.temperatures_c[1])
            reached = (light for light in LIGHTS if counts.may_reach(target, replace(hottest, light=light)))
            lights = sorted({1.0, next(reached, 1.0)}, reverse=True)
            rows += [_by_temperature(counts, target, light) for light in lights]
        rows.append(_by_share(counts, target, "light", "laser light"))
        rows.append(_by_share(counts, target, "exposure", "exposure"))
        if counts.kept != "argmax":
            rows.append(_by_bias(counts, target))
    return rows


def _by_share(
    counts: LabelCounts, target: float, knob: Literal["light", "exposure"], way: str
) -> dict[str, str]:
    law = counts.law
    if knob == "exposure" and law.averages:
        text = "not searched: frames average the laser's power, whose law is that of the described exposure"
        return _row(counts, target, way, text)
    found = counts.share_for(target, knob)
    if found is None:
        left = number(counts.epsilon(with_share(knob, MIN_SHARE)))
        return _row(
            counts, target, way, f"none: even {MIN_SHARE:g} of the described {way} still gives {left}"
        )
    if knob == "light":
        share, anchor_e = _rounded(found, _DOWN), law.recovery.unit_dn / law.sensor.gain_dn_per_e
        text = f"{share:.3g} of the described light: an anchor frame of {share * anchor_e:.3g} e⁻"
    else:
        wanted_us = _rounded(found * law.exposure_us, _DOWN)
        if wanted_us < law.shortest_us:
            short = f"none: it takes {wanted_us:.3g} µs, and the camera exposes {law.shortest_us:g} at least"
            return _row(counts, target, way, short)
        share, text = wanted_us / law.exposure_us, f"{wanted_us:.3g} µs instead of {law.exposure_us:g}"
    return _row(counts, target, way, text, with_share(knob, share))


def _rounded(value: float, digits: Context) -> float:
    return float(digits.create_decimal_from_float(value))


def _by_certified_light(counts: LabelCounts, target: float) -> dict[str, str]:
    """Return the light, which is all that a certificate lets vary; of one frame that which training would take."""
    if counts.kept == "reading":
        return _by_share(counts, target, "light", "laser light")
    try:
        # what training would keep of one frame of each label
        kind = ArgmaxReadout if counts.kept == "argmax" else CountsReadout
        found = kind.within(counts.seen, epsilon=target, delta=counts.delta)
    except ConfigError as error:
        return _row(counts, target, "laser light", f"none: {error.reason}")
    epsilon = guarantees([found.mechanism], delta=counts.delta)[0].epsilon
    row = _row(counts, target, "laser light", f"{found.light:.3g} of the described light")
    sigma = counts.law.std(OperatingPoint(light=found.light))
    return row | {"sigma": f"{sigma:.4g}", "epsilon": number(epsilon)}


def _by_bias(counts: LabelCounts, target: float) -> dict[str, str]:
    bias, well = counts.bias_for(target), counts.law.sensor.saturation_e
    if bias is None or bias > well:
        wanted = f"more than {MAX_BIAS_E:g} e⁻" if bias is None else f"{bias:.3g} e⁻ a frame"
        return _row(counts, target, "bias light", f"none: it takes {wanted}, but a pixel holds {well:.5g}")
    bias = _rounded(bias, _UP)
    return _row(counts, target, "bias light", f"{bias:.3g} e⁻ a frame", OperatingPoint(bias_e=bias))


def _by_temperature(counts: LabelCounts, target: float, light: float) -> dict[str, str]:
    way = "temperature" if light == 1 else f"temperature, at {light:g} of the light"
    found = counts.temperature_for(target, light)
    low, high = counts.temperatures_c or (math.nan, math.nan)
    if found is not None:
        warm = min(float(Decimal(found).quantize(Decimal("0.01"), ROUND_CEILING)), high)
        return _row(counts, target, way, f"{warm:.2f} °C", OperatingPoint(temperature_c=warm, light=light))
    ends = [number(counts.epsilon(OperatingPoint(temperature_c=t, light=light))) for t in (low, high)]
    return _row(counts, target, way, f"none: {low:g} to {high:g} °C give {ends[0]} to {ends[1]}")


def _row(
    counts: LabelCounts, target: float, way: str, setting: str, point: OperatingPoint | None = None
) -> dict[str, str]:
    return {
        "target epsilon": f"{target:g}",
        "by": way,
        "setting": setting,
        "sigma": "" if point is None else f"{counts.law.std(point):.4g}",
        "epsilon": "" if point is None else number(counts.epsilon(point)),
    }


def temperature_epsilon_figure(counts: LabelCounts, targets: Sequence[float]) -> Figure:
    """Draw the noise of a reading and epsilon against temperature, at the described light and at less of it.

    Dotted lines are the targets, dots the lowest temperatures that reach them. Raises ConfigError without dark current.
    """
    if counts.kept == "argmax":
        raise ConfigError(counts.name, "figure", "draws kept counts, not their argmax; leave it out")
    if counts.temperatures_c is None:
        raise ConfigError(
            counts.name,
            "camera.dark",
            "is off, so epsilon does not depend on the temperature; leave the figure out",
        )
    temperatures = np.linspace(*counts.temperatures_c, _FIGURE_STEPS)
    figure = blank_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    for light, color in zip(LIGHTS, ("C0", "C1", "C2", "C3"), strict=True):
        points = [OperatingPoint(temperature_c=float(t), light=light) for t in temperatures]
        label = "described light" if light == 1 else f"{light:g} of it"
        left.plot(temperatures, [counts.law.std(point) for point in points], color=color, label=label)
        right.plot(temperatures, [counts.epsilon(point) for point in points], color=color, label=label)
        for target in targets:
            found = counts.temperature_for(target, light)
            if found is not None and found > counts.temperatures_c[0]:
                right.plot(found, target, "o", color=color)
                right.annotate(
                    f"{found:.0f} °C", (found, target), xytext=(5, 4), textcoords="offset points", fontsize=9
                )
    for target in targets:
        right.axhline(target, color="0.5", linestyle=":", linewidth=1)
    left.set(yscale="log", xlabel="sensor temperature, °C", ylabel="standard deviation, projection units")
    left.set_title("Noise of a reading")
    right.set(yscale="log", xlabel="sensor temperature, °C", ylabel=f"epsilon at delta = {counts.delta:g}")
    right.set_title("Epsilon of one reading of every label, from photon counts")
    left.legend()
    _, labels, outputs = counts.law.light_e.shape
    figure.suptitle(f"{counts.name}: {labels} labels, {outputs:,} outputs")
    return figure
