"""What a camera's own counts are worth: from temperature to sigma to epsilon, and from epsilon back.

The case is one reading of every record's one-hot label, kept and reused, as for devices of Gaussian law
(`device_privacy.levels`). Epsilon is accounted on the electron counts of the frames that depend on the label, whose
rates a simulated device knows, by the exact divergence of Poisson laws. So it covers whoever sees the frames; sigma,
the noise of the recovered projection, is what learning sees. Dark charge and bias light add counts that no label
changes; less laser light or a shorter exposure leaves fewer counts to tell labels apart.
Source: docs/privacy.md, section 9; opusim.camera.exposure for the rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from accounting.devices.readings import known_counts_guarantee
from accounting.guarantee import Guarantee
from accounting.tables import guarantee_rows, number, print_rows
from opusim import checks
from opusim.camera.exposure import CountLaw, OperatingPoint
from opusim.description.schema import DeviceDescription
from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_described
from opusim.errors import ConfigError

LIGHTS = (1.0, 0.1, 0.01, 0.001)
"""Multiples of the described laser light that tables and figures show."""
LEAST_SHARE = 1e-12
"""Of the light or the exposure: where the search ends."""
_MOST_BIAS_E = 1e12
_TABLE_STEPS = 10
_A_TARGET = 55
"""Evaluations of epsilon that a target takes on average, in four searches."""
_FIGURE = 100
"""Evaluations of epsilon that the curves of the figure take."""
_LABEL_FRAMES = (
    2  # a one-hot vector and its complement; the frames of its empty negative part are the same for all
)
_CLOSE = 1e-4  # of the logarithm of a knob


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelCounts:
    """Label readings of a camera.

    Attributes:
        name: Of the device.
        law: Of the readings of all labels.
        delta: At which epsilon is stated, in (0, 1).
        on_evaluation: Called before each evaluation of epsilon, which takes some 10 to 50 ms.
    """

    name: str
    law: CountLaw
    delta: float
    on_evaluation: Callable[[], None] = lambda: None

    @cached_property
    def temperatures_c(self) -> tuple[float, float] | None:
        """Between which the sensor works; None where its dark current is off."""
        dark = self.law.dark
        return None if dark is None else (dark.temperature_min_c, dark.temperature_max_c)

    def guarantee(self, point: OperatingPoint) -> Guarantee:
        """Of one reading of every label."""
        self.on_evaluation()
        counts = self.law.rates(point)[:_LABEL_FRAMES].transpose(1, 0, 2)
        return known_counts_guarantee(counts.reshape(len(counts), -1), delta=self.delta)

    def epsilon(self, point: OperatingPoint) -> float:
        """Of one reading of every label, at delta."""
        return self.guarantee(point).epsilon

    def temperature_for(self, target: float, light: float) -> float | None:
        """The least temperature whose epsilon is at most the target; None where no temperature does."""
        if self.temperatures_c is None:
            return None
        low, high = self.temperatures_c

        def at(temperature_c: float) -> OperatingPoint:
            return OperatingPoint(temperature_c=temperature_c, light=light)

        return self._solve(at, low, high, target)

    def share_for(self, target: float, knob: Literal["light", "exposure"]) -> float | None:
        """The largest multiple of laser light or exposure, at most 1, whose epsilon is at most the target."""
        found = self._solve(lambda t: _with_share(knob, math.exp(-t)), 0.0, -math.log(LEAST_SHARE), target)
        return None if found is None else math.exp(-found)

    def bias_for(self, target: float) -> float | None:
        """The least bias light in a frame, electrons, whose epsilon is at most the target."""
        found = self._solve(
            lambda t: OperatingPoint(bias_e=math.expm1(t)), 0.0, math.log1p(_MOST_BIAS_E), target
        )
        return None if found is None else math.expm1(found)

    def _solve(
        self, at: Callable[[float], OperatingPoint], low: float, high: float, target: float
    ) -> float | None:
        """The least knob in [low, high] whose epsilon is at most the target; epsilon falls as the knob rises."""
        from scipy.optimize import brentq

        def excess(knob: float) -> float:
            return min(math.log(max(self.epsilon(at(knob)), 1e-300) / target), 700.0)

        if excess(low) <= 0:
            return low
        if excess(high) > 0:
            return None
        knob = float(brentq(excess, low, high, xtol=_CLOSE))
        while excess(knob) > 0:  # the root lies within xtol on either side; the answer keeps the promise
            knob = min(knob + _CLOSE, high)
        return knob


def label_counts(
    description: DeviceDescription,
    *,
    n_classes: int,
    n_outputs: int,
    delta: float,
    on_evaluation: Callable[[], None] = lambda: None,
) -> LabelCounts:
    """The readings of a camera device's labels.

    Args:
        description: A device with a camera.
        n_classes: Labels, at least 2: inputs of the device.
        n_outputs: Outputs of a reading.
        delta: In (0, 1).
        on_evaluation: See LabelCounts.

    Raises:
        ConfigError: The device has no camera, or no shot noise.
    """
    with open_described(description, n_inputs=n_classes, n_outputs=n_outputs) as device:
        if not isinstance(device, CameraDevice):
            raise ConfigError(
                description.name, "kind", f"{description.kind!r} counts no photons; use 'camera'"
            )
        law = device.count_law(torch.eye(n_classes))
        return LabelCounts(name=description.name, law=law, delta=delta, on_evaluation=on_evaluation)


def evaluations(n_targets: int, *, figure: bool) -> int:
    """About how many evaluations of epsilon `print_account` takes."""
    drawn = _FIGURE + _A_TARGET // 2 * n_targets if figure else 0
    return _TABLE_STEPS * len(LIGHTS) + _A_TARGET * n_targets + drawn


def print_account(counts: LabelCounts, targets: Sequence[float], figure: Path | None) -> None:
    """Print both directions and the statement behind them, and draw the figure if there is a file for it.

    Raises:
        ConfigError: A figure is asked for and the device has no dark current.
        ValueError: A target is not above 0.
    """
    for target in targets:
        checks.positive(target_epsilon=target)
    print_rows(temperature_rows(counts))
    print_rows(target_rows(counts, targets))
    print_rows(guarantee_rows([counts.guarantee(OperatingPoint())]), without=["notes"])
    if figure is not None:
        from training.device_privacy.figure import temperature_epsilon_figure

        temperature_epsilon_figure(counts, targets).savefig(figure, dpi=110)
        print(f"figure: {figure}")


def temperature_rows(counts: LabelCounts, steps: int = _TABLE_STEPS) -> list[dict[str, str]]:
    """From temperature to sigma to epsilon, at the described light and at less of it, as words for a table."""
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
    """From epsilon back: which temperature reaches it, or which light, exposure or bias light."""
    return [row for target in targets for row in _ways_to(counts, target)]


def _ways_to(counts: LabelCounts, target: float) -> list[dict[str, str]]:
    return [
        *(_by_temperature(counts, target, light) for light in _useful_lights(counts, target)),
        _by_share(counts, target, "light", "laser light"),
        _by_share(counts, target, "exposure", "exposure"),
        _by_bias(counts, target),
    ]


def _by_share(
    counts: LabelCounts, target: float, knob: Literal["light", "exposure"], way: str
) -> dict[str, str]:
    found, law = counts.share_for(target, knob), counts.law
    if found is None:
        left = number(counts.epsilon(_with_share(knob, LEAST_SHARE)))
        return _row(
            counts, target, way, f"none: even {LEAST_SHARE:g} of the described proves no less than {left}"
        )
    anchor_e = law.recovery.unit_dn / law.sensor.gain_dn_per_e
    texts = {
        "light": f"{found:.3g} of the described: an anchor frame of {found * anchor_e:.3g} e⁻",
        "exposure": f"{found * law.exposure_us:.3g} µs instead of {law.exposure_us:g}",
    }
    return _row(counts, target, way, texts[knob], _with_share(knob, found))


def _by_bias(counts: LabelCounts, target: float) -> dict[str, str]:
    bias, well = counts.bias_for(target), counts.law.sensor.saturation_e
    if bias is None or bias > well:
        wanted = f"more than {_MOST_BIAS_E:g} e⁻" if bias is None else f"{bias:.3g} e⁻ a frame"
        return _row(counts, target, "bias light", f"none: it takes {wanted}, a pixel holds {well:.5g}")
    return _row(counts, target, "bias light", f"{bias:.3g} e⁻ a frame", OperatingPoint(bias_e=bias))


def _with_share(knob: Literal["light", "exposure"], share: float) -> OperatingPoint:
    return OperatingPoint(light=share) if knob == "light" else OperatingPoint(exposure=share)


def _useful_lights(counts: LabelCounts, target: float) -> list[float]:
    """The described light, and the most light at which some temperature reaches the target."""
    if counts.temperatures_c is None:
        return []
    hottest = OperatingPoint(temperature_c=counts.temperatures_c[1])
    reached = (light for light in LIGHTS if counts.epsilon(replace(hottest, light=light)) <= target)
    return sorted({1.0, next(reached, 1.0)}, reverse=True)


def _by_temperature(counts: LabelCounts, target: float, light: float) -> dict[str, str]:
    way = "temperature" if light == 1 else f"temperature, at {light:g} of the light"
    found = counts.temperature_for(target, light)
    if found is not None:
        return _row(counts, target, way, f"{found:.2f} °C", OperatingPoint(temperature_c=found, light=light))
    low, high = counts.temperatures_c or (math.nan, math.nan)
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
