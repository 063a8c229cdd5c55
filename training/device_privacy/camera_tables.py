"""Tables and a figure of a camera's privacy: from temperature to sigma to epsilon, and from epsilon to the settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from opusim.training.reports.device_privacy import MAX_BIAS_E, MIN_SHARE, LabelCounts, with_share

from opusim.accounting.composition import guarantees
from opusim.accounting.explanation import guarantee_rows, number, print_rows
from opusim.camera.exposure import OperatingPoint
from opusim.errors import ConfigError
from opusim.plugins import Deferred

if TYPE_CHECKING:
    from matplotlib.figure import Figure

drawing = Deferred("matplotlib.figure")

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
    """Print both tables and the statement behind them, and draw the figure if a file is given.

    Raises:
        ConfigError: A figure is requested and the device has no dark current.
    """
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
    found, law = counts.share_for(target, knob), counts.law
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
        share, text = wanted_us / law.exposure_us, f"{wanted_us:.3g} µs instead of {law.exposure_us:g}"
    return _row(counts, target, way, text, with_share(knob, share))


def _rounded(value: float, digits: Context) -> float:
    return float(digits.create_decimal_from_float(value))


def _by_certified_light(counts: LabelCounts, target: float) -> dict[str, str]:
    """Return the light, which is all that a certificate lets vary; of one frame that which training would take."""
    if counts.kept == "reading":
        return _by_share(counts, target, "light", "laser light")
    try:
        found = counts.readout(target)
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

    Dotted lines are the targets, dots the lowest temperatures that reach them.

    Raises:
        ConfigError: The device has no dark current.
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
    figure: Figure = drawing.Figure(figsize=(11, 4.6), layout="constrained")
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
