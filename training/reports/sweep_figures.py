"""Figures of a sweep: accuracy and epsilon against noise, accuracy against epsilon, and the cost of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from training.reports.drawing import LINES, new_figure, style
from training.reports.line_chart import COLOURS
from training.sweeps import curves
from training.sweeps.curves import Curve, Level, SweepResult, axis_label

_LOG_SCALE_RATIO = 20.0
"""Ratio of the largest to the smallest x above which an axis is logarithmic."""
_MIN_TICK_DISTANCE = 0.05
"""Smallest distance of labelled ticks, as a share of the axis."""
_INFINITY_SPACING = 1.35
"""Factor between the infinities of different curves, which would hide each other."""
_LONG_LABEL = 40
"""Length of a label, in characters, above which a legend has one column."""
_PUBLISHED_MARKS = "x+1234*"
"""Marks of accuracies that others published."""
_KINDS = {
    "proven": {"linestyle": "-", "label": "proven"},
    "claimed": {"linestyle": "--", "label": "claimed by the paper's formula"},
    "audited": {"linestyle": ":", "label": "found by an audit, at least"},
}


def accuracy_noise(result: SweepResult) -> Figure | None:
    """Draw accuracy against noise: mean over seeds and its standard error, with references as level lines."""
    drawn, key = curves.accuracy_against_noise(result), result.noise_key
    if not drawn or key is None:
        return None
    figure, axes = new_figure(7.2, 4.2)
    for curve in drawn:
        _draw(axes, curve, result.series.index(curve.name))
    _draw_references(axes, curves.references(result), len(result.series))
    _noise_axis(axes, drawn, key)
    axes.set(ylabel="test accuracy [%]")
    _legend(axes)
    return figure


def epsilon_noise(result: SweepResult) -> Figure | None:
    """Draw claimed, proven and audited epsilon against noise; infinity has its own tick at the top."""
    drawn, key = curves.epsilon_against_noise(result), result.noise_key
    if not drawn or key is None:
        return None
    figure, axes = new_figure(7.2, 4.6)
    finite = [level.mean for curve in drawn for level in curve.levels if 0 < level.mean < math.inf]
    low, high = (min(finite), max(finite)) if finite else (0.1, 10.0)
    infinity = high * max(10.0, (high / low) ** 0.2)
    infinite = [curve for curve in drawn if any(math.isinf(level.mean) for level in curve.levels)]
    for curve in drawn:
        heights = [
            infinity * _INFINITY_SPACING ** infinite.index(curve)
            if math.isinf(level.mean)
            else max(level.mean, low / 2)
            for level in curve.levels
        ]
        look = style(result.series.index(curve.name)) | {"linestyle": _KINDS[curve.kind]["linestyle"]}
        if curve.kind != "proven":
            look["markerfacecolor"] = "white"
        label = f"{curve.name}: {_KINDS[curve.kind]['label']}"
        axes.plot([level.x for level in curve.levels], heights, label=label, **look)
    axes.set(yscale="log", ylabel="ε", ylim=(low / 2, infinity * _INFINITY_SPACING ** len(infinite) * 1.5))
    if infinite:
        _mark_infinity(axes, infinity * _INFINITY_SPACING ** ((len(infinite) - 1) / 2), high)
    _noise_axis(axes, drawn, key)
    _legend(axes)
    return figure


def accuracy_epsilon(result: SweepResult) -> Figure | None:
    """Draw accuracy against proven and claimed epsilon: mean over seeds and its standard error.

    References are level lines, and accuracies that others published single marks. Settings without a finite guarantee
    are drawn at infinity, on the right.
    """
    drawn = curves.accuracy_against_epsilon(result)
    if not drawn:
        return None
    figure, axes = new_figure(7.2, 4.6)
    finite = [level.x for curve in drawn for level in curve.levels if math.isfinite(level.x)]
    infinity = max(finite) * max(4.0, (max(finite) / min(finite)) ** 0.15)
    both = {curve.name for curve in drawn if curve.kind == "claimed"}
    for curve in drawn:
        look = style(result.series.index(curve.name)) | {"linestyle": _KINDS[curve.kind]["linestyle"]}
        if curve.kind == "claimed":
            look["markerfacecolor"] = "white"
        label = f"{curve.name}: {_KINDS[curve.kind]['label']}" if curve.name in both else curve.name
        for ends, levels in (("", _finite(curve.levels)), ("none", _infinite(curve.levels))):
            if levels:
                x = [min(level.x, infinity) for level in levels]
                mean, error = [level.mean for level in levels], [level.error for level in levels]
                line = look | ({"linestyle": ends} if ends else {})
                axes.errorbar(x, mean, error, capsize=3, label=label, **line)
                label = "_nolegend_"
    _draw_references(axes, curves.references(result), len(result.series))
    for curve, mark in zip(curves.published(result), itertools.cycle(_PUBLISHED_MARKS), strict=False):
        x, mean = [level.x for level in curve.levels], [level.mean for level in curve.levels]
        axes.plot(x, mean, mark, color="black", markersize=9, markeredgewidth=1.4, zorder=4, label=curve.name)
        finite += x
    _scale(axes, finite, log_ratio=3.0)
    if any(_infinite(curve.levels) for curve in drawn):
        _mark_infinite_side(axes, infinity, max(finite))
    axes.set(xlabel="ε (proven unless stated otherwise)", ylabel="test accuracy [%]")
    _legend(axes)
    return figure


def cost(result: SweepResult) -> Figure | None:
    """Draw device energy, device time and wall time of one run, a bar for each series."""
    drawn = curves.costs(result)
    kinds = [
        kind
        for kind in dict.fromkeys(c.kind for c in drawn)
        if any(c.levels[0].mean for c in drawn if c.kind == kind)
    ]
    if not kinds:
        return None
    names = list(dict.fromkeys(curve.name for curve in drawn))
    figure = Figure(figsize=(7.2, 0.9 + 0.34 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        found = [curve for curve in drawn if curve.kind == kind]
        places = [names.index(curve.name) for curve in found]
        label, unit = _scaled(kind, max(curve.levels[0].mean for curve in found))
        means = [curve.levels[0].mean / unit for curve in found]
        axes.barh(places, means, color=[COLOURS[place % len(COLOURS)] for place in places], height=0.6)
        for place, mean in zip(places, means, strict=True):
            axes.annotate(
                _amount(mean), (mean, place), (3, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.set(xlabel=label, xlim=(0, max(max(means), 1e-12) * 1.3))
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.label.set_size(9)
        axes.tick_params(axis="x", labelsize=8)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return figure


def _draw(axes: Axes, curve: Curve, number: int) -> None:
    x = [level.x for level in curve.levels]
    mean = [level.mean for level in curve.levels]
    error = [level.error for level in curve.levels]
    axes.errorbar(x, mean, error, capsize=3, label=curve.name, **style(number))


def _draw_references(axes: Axes, references: Sequence[Curve], first: int) -> None:
    for number, curve in enumerate(references, start=first):
        colour, line = COLOURS[number % len(COLOURS)], LINES[(number + 1) % len(LINES)]
        level = curve.levels[0]
        axes.axhline(level.mean, color=colour, linestyle=line, linewidth=1.4, label=curve.name)
        if level.error:
            ends = level.mean - level.error, level.mean + level.error
            axes.axhspan(*ends, color=colour, alpha=0.12, linewidth=0)


def _noise_axis(axes: Axes, drawn: Sequence[Curve], key: str) -> None:
    """Label the lower axis in the key's unit; for a temperature, the upper one with the noise that it gives."""
    levels = {level.x: level for curve in drawn for level in curve.levels}
    _scale(axes, list(levels))
    axes.set_xlabel(axis_label(key))
    stds = {x: level.std for x, level in sorted(levels.items()) if level.std is not None}
    if key.split(".")[-1] == "temperature_c" and len(stds) > 1:
        upper = axes.secondary_xaxis("top")
        upper.xaxis.set_major_locator(FixedLocator(list(stds)))
        upper.set_xticklabels([f"{std:.3g}" for std in stds.values()])
        upper.set_xlabel("standard deviation of the device's noise [units of the projection]")


def _scale(axes: Axes, values: Sequence[float], *, log_ratio: float = _LOG_SCALE_RATIO) -> None:
    """Use a logarithmic axis for wide ranges (linear near 0 if 0 is a value), with ticks at the values."""
    positive = sorted({value for value in values if value > 0})
    if len(positive) > 1 and positive[-1] / positive[0] >= log_ratio and min(values) >= 0:
        if min(values) == 0:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
            axes.set_xlim(left=-0.25 * positive[0])
        else:
            axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    ticks = sorted(set(values))
    if len(ticks) <= 8:
        kept = _legible(ticks, math.log if axes.get_xscale() == "log" else float)
        axes.set_xticks(kept, [f"{tick:g}" for tick in kept])


def _legible(ticks: Sequence[float], place: Callable[[float], float]) -> list[float]:
    """Return the ticks whose labels do not overlap the one before, by their places on the axis."""
    least = _MIN_TICK_DISTANCE * (place(ticks[-1]) - place(ticks[0]))
    kept = [ticks[0]]
    for tick in ticks[1:]:
        if place(tick) - place(kept[-1]) >= least:
            kept.append(tick)
    return kept


def _mark_infinity(axes: Axes, infinity: float, high: float) -> None:
    """Mark infinity as a separate tick above a gap in the axis."""
    axes.axhline(math.sqrt(infinity * high), color="0.5", linewidth=0.8, linestyle=(0, (2, 3)))
    ticks = [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= high]
    axes.set_yticks([*ticks, infinity], [*(_power(tick) for tick in ticks), "∞"])
    axes.yaxis.set_minor_locator(NullLocator())


def _scaled(kind: str, largest: float) -> tuple[str, float]:
    """Return an axis label in the unit that suits its largest value, and that unit in joules or seconds."""
    name, _, base = kind.rstrip("]").partition(" [")
    units = {"J": ((1e6, 1e6, "MJ"), (1e4, 1e3, "kJ")), "s": ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"))}
    for limit, size, unit in units.get(base, ()):
        if largest >= limit:
            return f"{name} [{unit}]", size
    return kind, 1.0


def _amount(value: float) -> str:
    """Format three digits, without powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _finite(levels: Sequence[Level]) -> list[Level]:
    return [level for level in levels if math.isfinite(level.x)]


def _infinite(levels: Sequence[Level]) -> list[Level]:
    return [level for level in levels if math.isinf(level.x)]


def _mark_infinite_side(axes: Axes, infinity: float, largest: float) -> None:
    """Mark infinity as a separate tick to the right of a logarithmic axis, after a gap."""
    axes.set_xscale("log")
    axes.axvline(math.sqrt(infinity * largest), color="0.5", linewidth=0.8, linestyle=(0, (2, 3)))
    low = axes.get_xlim()[0]
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= largest]
    axes.set_xticks([*ticks, infinity], [*(_power(tick) for tick in ticks), "∞"])
    axes.xaxis.set_minor_locator(NullLocator())


def _power(value: float) -> str:
    """Format a tick of a logarithmic axis in digits, or as a power of ten if there are many."""
    return f"{value:g}" if 1e-3 <= value < 1e4 else f"$10^{{{round(math.log10(value))}}}$"


def _legend(axes: Axes) -> None:
    """Put the legend below the axes, where it covers no curve."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if max(len(label) for label in labels) > _LONG_LABEL else 2
    axes.figure.legend(
        handles, labels, frameon=False, fontsize=8.5, loc="outside lower center", ncols=columns
    )
