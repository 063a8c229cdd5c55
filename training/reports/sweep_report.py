"""Write a sweep's results: the table as CSV and JSON, figures as PNG with their data, one self-contained HTML page.

Figures: accuracy and epsilon against noise, accuracy against epsilon, and the cost of a run.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from opusim.accounting.explanation import SEED_REBUILDS, guarantee_rows, number
from opusim.files import write_file
from opusim.tables import blank_figure, data_url, duration, energy, html_page
from opusim.training.reports.run_report import distinct, train_again
from opusim.training.runs.drawing import COLOURS, LINES, beside_guessing, new_figure, save_figure, style
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import record_json, write_json
from opusim.training.sweeps import sweep as curves
from opusim.training.sweeps.sweep import (
    SCHEMA_VERSION,
    Curve,
    Level,
    Point,
    Row,
    SweepResult,
    audited_epsilon,
    axis_label,
    curve_rows,
)

_NOTHING = "–"
_LOG_SCALE_RATIO = 20.0
"""Ratio of the largest to the smallest x above which an axis is logarithmic."""
_MIN_TICK_DISTANCE = 0.05
"""Smallest distance of labelled ticks, as a share of the axis."""
_NEAR_CHANCE = 3.0
"""Accuracies below this many times chance are drawn next to its line."""
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


def write_sweep(result: SweepResult, spec_text: str) -> Path:
    """Write table, figures and report into the sweep's folder, and return the HTML file."""
    records = [_as_text(record) for record in sweep_records(result)]
    _write_csv(result.folder.table_file, records)
    document = {
        "schema_version": SCHEMA_VERSION,
        "title": result.spec.title,
        "runs": [
            {
                "series": point.series,
                "values": point.values,
                "row": record_json(row, SCHEMA_VERSION) if row else None,
            }
            for point in result.points
            for row in [result.rows.get(point.identity)]
        ],
    }
    write_json(result.folder.data_file, document)
    rows, columns = list(result.rows.values()), _columns(records)
    page = html_page(
        "sweep.html",
        title=result.spec.title,
        pictures=_pictures(result),
        settings=setting_rows(result),
        guarantees=_guarantees(result) or [{"series": "", "status": "no run has figures yet"}],
        runs=[
            {key: record.get(key, "") for key in columns}
            | {"again": train_again(point.config.trainer.kind, result.folder.run_path(point), point.identity)}
            for record, point in zip(records, result.points, strict=True)
        ],
        total=len({point.identity for point in result.points}),
        finished=sum(row.status != "failed" for row in rows),
        failed=sum(row.status == "failed" for row in rows),
        modes=sorted({point.config.mode for point in result.points}),
        rebuilds=SEED_REBUILDS,
        versions=distinct(
            [
                (name, RunFolder(result.folder.run_path(point)).read_facts()["versions"])
                for name in [*result.series, *result.references]
                for point, _ in result.finished(name)[:1]
            ]
        ),
        spec=spec_text,
    )
    write_file(result.folder.report_file, page.encode())
    return result.folder.report_file


def setting_rows(result: SweepResult) -> list[dict[str, str]]:
    """Return a row for each setting, over seeds: accuracy, three kinds of epsilon, cost; no empty column."""
    keys = [key for key in dict.fromkeys(k for p in result.points for k in p.values) if key != "seed"]
    groups: dict[tuple[str, ...], list[tuple[Point, Row | None]]] = {}
    for point in result.points:
        setting = (point.series, *(str(point.values.get(key, "")) for key in keys))
        groups.setdefault(setting, []).append((point, result.rows.get(point.identity)))
    rows, guessing = [], curves.chance(result)
    for setting, found in groups.items():
        done = [row for _, row in found if row is not None and row.status != "failed"]
        audited = [audited_epsilon(result.folder.path / "runs" / row.identity) for row in done]
        accuracies = [100 * row.accuracy for row in done if row.accuracy is not None]
        accuracy = f"{statistics.fmean(accuracies):.2f}" if accuracies else _NOTHING
        if len(accuracies) > 1:
            accuracy += f" ± {statistics.stdev(accuracies) / len(accuracies) ** 0.5:.2f}"
        if accuracies:
            accuracy += beside_guessing(statistics.fmean(accuracies), guessing)
        rows.append(
            {
                "series": setting[0],
                **dict(zip(keys, setting[1:], strict=True)),
                "runs": f"{len(done)}/{len(found)}",
                "accuracy [%]": accuracy,
                "ε proven": _epsilons([row.proven_epsilon for row in done]),
                "ε claimed": _epsilons([row.claimed_epsilon for row in done]),
                "ε audited": _epsilons(audited),
                "frames": _mean([row.figures.get("frames") for row in done], "{:,.0f}".format),
                "device energy": _mean([row.figures.get("joules") for row in done], energy),
                "device time": _mean([row.figures.get("seconds") for row in done], duration),
                "wall time": _mean([row.wall_s for row in done], duration),
            }
        )
    told = [key for key in rows[0] if any(row[key] not in ("", _NOTHING) for row in rows)]
    return [{key: row[key] for key in told} for row in rows]


def sweep_records(result: SweepResult) -> list[dict[str, Any]]:
    """Return one mapping per run of a sweep: its series, its value on each axis, its figures (None if unknown)."""
    axes = dict.fromkeys(key for point in result.points for key in point.values)
    records = []
    for point in result.points:
        row = result.rows.get(point.identity)
        record: dict[str, Any] = {"series": point.series} | {key: point.values.get(key) for key in axes}
        if row is None:
            records.append(record | {"status": "not run"})
            continue
        figures = {
            "accuracy": row.accuracy,
            "epsilon_proven": row.proven_epsilon,
            "epsilon_claimed": row.claimed_epsilon,
            "epsilon_audited": audited_epsilon(result.folder.run_path(point)),
            "device_frames": row.figures.get("frames"),
            "device_joules": row.figures.get("joules"),
            "device_seconds": row.figures.get("seconds"),
            "wall_seconds": row.wall_s,
        }
        records.append(record | figures | {"status": row.status, "reason": row.reason, "run": row.identity})
    return records


def _as_text(record: Mapping[str, Any]) -> dict[str, str]:
    """Return one run's record for the CSV file and the page's long table; numbers of figures have six digits."""
    figures = list(record)[list(record).index("accuracy") :] if "accuracy" in record else []

    def text(key: str, value: object) -> str:
        is_figure = key in figures and isinstance(value, float | int)
        return "" if value is None else f"{value:.6g}" if is_figure else str(value)

    return {key: text(key, value) for key, value in record.items()}


def _pictures(result: SweepResult) -> list[dict[str, str]]:
    """Draw each figure that has something to show, and write its data next to it."""
    on_noise = curves.accuracy_against_noise(result)
    drawn: dict[str, tuple[str, Figure | None, Sequence[Curve]]] = {
        "accuracy-noise": (
            "Accuracy against noise: mean over seeds and its standard error",
            accuracy_noise(result),
            on_noise,
        ),
        "epsilon-noise": (
            "Epsilon against noise: claimed by a paper's formula, proven, and found by an audit",
            epsilon_noise(result),
            curves.epsilon_against_noise(result),
        ),
        "accuracy-epsilon": (
            "Accuracy against epsilon: mean over seeds and its standard error; infinite epsilons on the right",
            accuracy_epsilon(result),
            [*curves.accuracy_against_epsilon(result), *curves.published(result)],
        ),
        "cost": ("Mean cost of one run of each series", cost(result), curves.costs(result)),
    }
    pictures = []
    for name, (caption, figure, data) in drawn.items():
        if figure is not None:
            content = save_figure(figure, result.folder.figures / f"{name}.png")
            _write_csv(result.folder.figures / f"{name}.csv", curve_rows(data))
            pictures.append({"caption": caption, "source": data_url(content)})
    return pictures


def _columns(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for record in records for key in record))


def _write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(records), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_file(path, text.getvalue().encode())


def _guarantees(result: SweepResult) -> list[dict[str, str]]:
    """Return the statements about each series at its weakest setting, the one with the least noise."""

    def weakness(run: tuple[Point, Row]) -> tuple[float, float]:
        """Order runs by proven epsilon, then by decreasing noise of the run's setting."""
        point, row = run
        values = {key.split(".")[-1]: value for key, value in point.values.items()}
        keys = ("sigma", "noise_multiplier", "temperature_c")
        noise = next((float(values[key]) for key in keys if key in values), 0.0)
        return row.proven_epsilon or 0.0, -(noise if row.noise_std is None else row.noise_std)

    found = []
    for name in [*result.series, *result.references]:
        runs = result.finished(name)
        if runs:
            point, row = max(runs, key=weakness)
            stored = point.config.mode == "experiment"
            setting = ", ".join(f"{key} = {value}" for key, value in point.values.items() if key != "seed")
            found += [
                {"series": name, "setting": setting, **statement}
                for statement in guarantee_rows(row.guarantees, seed_stored=stored)
            ]
    return found


def _mean(values: Sequence[float | None], shown: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return shown(statistics.fmean(known)) if known else _NOTHING


def _epsilons(values: Sequence[float | None]) -> str:
    """Format one epsilon, or the range over the runs of a setting."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return _NOTHING
    if math.isclose(known[0], known[-1], rel_tol=1e-3) or known[0] == known[-1]:
        return number(known[0])
    return f"{number(known[0])} to {number(known[-1])}"


# Figures


def accuracy_noise(result: SweepResult) -> Figure | None:
    """Draw accuracy against noise: mean over seeds and its standard error; references and single settings as levels."""
    drawn, key = curves.accuracy_against_noise(result), result.noise_key
    if not drawn or key is None:
        return None
    figure, axes = new_figure(7.2, 4.2)
    for curve in drawn:
        x, mean = [level.x for level in curve.levels], [level.mean for level in curve.levels]
        look = style(result.series.index(curve.name))
        axes.errorbar(x, mean, _errors(curve.levels), capsize=3, label=curve.name, **look)
    levels = curves.references(result, drawn)
    _draw_references(axes, levels, len(result.series))
    left_out = [name for name in result.series if name not in {curve.name for curve in (*drawn, *levels)}]
    if left_out:
        axes.set_title(f"without {', '.join(left_out)}: {key} is no axis there", fontsize=8.5)
    _noise_axis(axes, drawn, key)
    _accuracy_axis(axes, drawn, result)
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
        _mark_infinity(axes, "y", infinity * _INFINITY_SPACING ** ((len(infinite) - 1) / 2), high)
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
        for ends, finite_side in (("", True), ("none", False)):
            levels = [level for level in curve.levels if math.isfinite(level.x) is finite_side]
            if levels:
                x = [min(level.x, infinity) for level in levels]
                mean = [level.mean for level in levels]
                line = look | ({"linestyle": ends} if ends else {})
                axes.errorbar(x, mean, _errors(levels), capsize=3, label=label, **line)
                label = "_nolegend_"
    _draw_references(axes, curves.references(result), len(result.series))
    for curve, mark in zip(curves.published(result), itertools.cycle(_PUBLISHED_MARKS), strict=False):
        x, mean = [level.x for level in curve.levels], [level.mean for level in curve.levels]
        axes.plot(x, mean, mark, color="black", markersize=9, markeredgewidth=1.4, zorder=4, label=curve.name)
        finite += x
    infinite = any(math.isinf(level.x) for curve in drawn for level in curve.levels)
    if infinite:
        axes.set_xscale("log")
    _scale(axes, finite, log_ratio=1.0 if infinite else 3.0)
    if infinite:
        _mark_infinity(axes, "x", infinity, max(finite))
    axes.set(xlabel="ε (proven unless stated otherwise)")
    _accuracy_axis(axes, drawn, result)
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
    figure = blank_figure(7.2, 0.9 + 0.34 * len(names))
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        found = [curve for curve in drawn if curve.kind == kind]
        places = [names.index(curve.name) for curve in found]
        label, unit = _scaled(kind, max(curve.levels[0].mean for curve in found))
        means = [curve.levels[0].mean / unit for curve in found]
        axes.barh(places, means, color=[COLOURS[place % len(COLOURS)] for place in places], height=0.6)
        for place, mean in zip(places, means, strict=True):
            text = f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"  # three digits, without powers of ten
            axes.annotate(text, (mean, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set(xlabel=label, xlim=(0, max(max(means), 1e-12) * 1.3))
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.label.set_size(9)
        axes.tick_params(axis="x", labelsize=8)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return figure


def _draw_references(axes: Axes, references: Sequence[Curve], first: int) -> None:
    for place, curve in enumerate(references, start=first):
        colour, line = COLOURS[place % len(COLOURS)], LINES[(place + 1) % len(LINES)]
        level = curve.levels[0]
        axes.axhline(level.mean, color=colour, linestyle=line, linewidth=1.4, label=curve.name)
        if level.error:
            ends = level.mean - level.error, level.mean + level.error
            axes.axhspan(*ends, color=colour, alpha=0.12, linewidth=0)


def _errors(levels: Sequence[Level]) -> list[float] | None:
    """Return the standard errors, or None if every level is one seed, which has none."""
    return [level.error for level in levels] if any(level.n > 1 for level in levels) else None


def _accuracy_axis(axes: Axes, drawn: Sequence[Curve], result: SweepResult) -> None:
    """Label the axis of accuracies, and mark chance: as a line if a curve comes near it, else in the label."""
    chance, label = curves.chance(result), "test accuracy [%]"
    if chance is not None:
        near = min(level.mean for curve in drawn for level in curve.levels) < _NEAR_CHANCE * chance
        if near:
            axes.axhline(
                chance, color="0.4", linestyle=(0, (1, 2)), linewidth=1.2, label=f"chance, {chance:.3g} %"
            )
        else:
            label += f"; chance is {chance:.3g}"
    axes.set(ylabel=label)


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
        place = dict(zip(ticks, axes.xaxis.get_transform().transform(np.array(ticks)), strict=True))
        least, kept = _MIN_TICK_DISTANCE * (place[ticks[-1]] - place[ticks[0]]), ticks[:1]
        for tick in ticks[1:]:  # labels do not overlap the one before
            if place[tick] - place[kept[-1]] >= least:
                kept.append(tick)
        axes.set_xticks(kept, [f"{tick:g}" for tick in kept])


def _mark_infinity(axes: Axes, side: str, infinity: float, largest: float) -> None:
    """Mark infinity as a separate tick of a logarithmic axis, "x" or "y", after a gap."""
    axis, line = (axes.xaxis, axes.axvline) if side == "x" else (axes.yaxis, axes.axhline)
    line(math.sqrt(infinity * largest), color="0.5", linewidth=0.8, linestyle=(0, (2, 3)))
    low = axis.get_view_interval()[0]
    ticks = [tick for tick in axis.get_ticklocs() if low <= tick <= largest]
    if len(ticks) < 2 and low > 0:  # less than a decade, in which the usual ticks lie outside
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(largest)) + 1)
        ticks = [
            m * 10.0**power
            for power in powers
            for m in (1, 1.5, 2, 3, 5, 7)
            if low <= m * 10.0**power <= largest
        ]
    axis.set_ticks([*ticks, infinity], labels=[*(_power(tick) for tick in ticks), "∞"])
    axis.set_minor_locator(NullLocator())


def _scaled(kind: str, largest: float) -> tuple[str, float]:
    """Return an axis label in the unit that suits its largest value, and that unit in joules or seconds."""
    name, _, base = kind.rstrip("]").partition(" [")
    units = {"J": ((1e6, 1e6, "MJ"), (1e4, 1e3, "kJ")), "s": ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"))}
    for limit, size, unit in units.get(base, ()):
        if largest >= limit:
            return f"{name} [{unit}]", size
    return kind, 1.0


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
