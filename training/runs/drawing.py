"""Figures of runs and reports: line charts as SVG, learning curves, and what matplotlib's figures share.

Importing and starting matplotlib takes longer than a short run's steps, so that reports of runs have line charts of
their own. Figures with error bars, shared axes or annotations are matplotlib's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from opusim.files import FIGURES, require_writable, write_file
from opusim.tables import Shown, blank_figure, png_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opusim.training.runs.folder import StoredRun

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's, ordered so that neighbours also differ in lightness when printed in grey."""
_DASHES = ("", "7 3", "7 3 2 3", "2 3")
_WIDTH, _PLOT_HEIGHT = 640.0, 310.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 14.0, 12.0, 46.0
"""Pixels around the plot."""
_LEGEND_LINE, _LEGEND_KEY, _LETTER, _WIDE_LETTER = 19.0, 34.0, 6.7, 7.7
"""Pixels: height of a row of the legend, width of a line's sample, a letter's mean width and a digit's."""
_MARGIN = 0.05
"""Share of the range of values that an axis adds on either side."""
_TICKS = 7
"""Most ticks of an axis, about."""
_LEAST_WIDTH = 1e-9
"""Range of values, relative to the largest, from which they are drawn as different."""
_MOST_DIGITS = 15
"""Significant digits that float64 holds."""
_MARKERS_PER_LINE = 12
_OUTLINES = (
    "M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0",
    "M-2.8,-2.8h5.6v5.6h-5.6z",
    "M0,-3.4L3.2,2.6H-3.2z",
    "M0,-3.8L3.2,0L0,3.8L-3.2,0z",
    "M0,3.4L3.2,-2.6H-3.2z",
    "M-1.2,-3.4h2.4v2.2h2.2v2.4h-2.2v2.2h-2.4v-2.2h-2.2v-2.4h2.2z",
    "M-3,-3L3,3M-3,3L3,-3",
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Attributes:
        x: Positions of its values.
        y: The values, finite, one for each position.
        label: Its text in the legend.
        number: Chooses colour, marker and dashes, each of which distinguishes neighbours on its own.
        hollow: Whether it is dotted and its markers are empty, to accompany another line of the same number.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str
    number: int
    hollow: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class LineChart(Shown):
    """Lines over whole numbers, such as epochs.

    Attributes:
        lines: At least one, each with at least one value.
        x_label: Label of the axis of whole numbers.
        y_label: Label of the axis of values.
        y_limits: Ends of the axis of values; None takes those of the values and a margin.
        logarithmic: Whether the axis of values is logarithmic, unless a value is 0 or below.
    """

    lines: Sequence[Line]
    x_label: str
    y_label: str
    y_limits: tuple[float, float] | None = None
    logarithmic: bool = False

    @cached_property
    def x_limits(self) -> tuple[float, float]:
        """Ends of the axis of whole numbers; a single one gets a half on either side."""
        low, high = min(min(line.x) for line in self.lines), max(max(line.x) for line in self.lines)
        margin = _MARGIN * (high - low) or 0.5
        return low - margin, high + margin

    @cached_property
    def is_logarithmic(self) -> bool:
        """Whether the axis of the values is logarithmic."""
        return self.logarithmic and all(y > 0 for line in self.lines for y in line.y)

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Ends of the axis of the values."""
        if self.y_limits is not None:
            return self.y_limits
        values = [math.log10(y) if self.is_logarithmic else y for line in self.lines for y in line.y]
        low, high = min(values), max(values)
        size = 1.0 if self.is_logarithmic else max(abs(low), abs(high))
        width = high - low if high - low > _LEAST_WIDTH * size else size
        margin = _MARGIN * (width or 1.0)
        ends = low - margin, high + margin
        return (10 ** ends[0], 10 ** ends[1]) if self.is_logarithmic else ends

    @cached_property
    def y_ticks(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten.

        On a logarithmic axis powers of ten; if fewer than three fit, 2 and 5 times them, too; if fewer than two of
        these fit, the same as on a linear axis.
        """
        low, high = self.limits
        if not self.is_logarithmic:
            return _multiples(low, high, _nice_step(high - low))
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = max(1, len(decades) // _TICKS)
        ticks = [10.0**k for k in decades if k % every == 0 and low <= 10.0**k <= high]
        if len(ticks) > 2:
            return ticks
        ticks = [tick for k in decades for share in (1, 2, 5) if low <= (tick := share * 10.0**k) <= high]
        return ticks if len(ticks) > 1 else _multiples(low, high, _nice_step(high - low))

    def _shown(self) -> dict[str, object]:
        return {"y": repr(self.y_label), "x": repr(self.x_label), "lines": len(self.lines)}

    def _repr_html_(self) -> str:
        """Return the chart for a notebook."""
        return self.svg().decode()

    def savefig(self, path: str | Path) -> None:
        """Write the chart, as a figure of matplotlib does.

        Args:
            path: A file whose name ends in .png, .pdf or .svg.

        Raises:
            ConfigError: It ends otherwise, or cannot be written.
        """
        require_writable(Path(path), "savefig", FIGURES)
        if Path(path).suffix.lower() == ".svg":
            write_file(Path(path), self.svg())
            return
        figure, axes = new_figure()
        for line in self.lines:
            hollow = {"linestyle": ":", "markerfacecolor": "white"} if line.hollow else {}
            every = max(1, len(line.x) // _MARKERS_PER_LINE)
            axes.plot(line.x, line.y, label=line.label, markevery=every, **style(line.number) | hollow)
        axes.set(xlabel=self.x_label, ylabel=self.y_label, ylim=self.limits)
        axes.set_yscale("log" if self.is_logarithmic else "linear")
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False, fontsize=8.5)
        figure.savefig(path, dpi=130)

    def svg(self) -> bytes:
        """Return the chart as an SVG file."""
        # The legend, in as many rows as its lines need; the plot begins below it.
        legend: list[str] = []
        x, y = _LEFT, _TOP + 4
        for line in self.lines:
            label = _fitting(line.label)
            width = _LEGEND_KEY + _LETTER * (len(label) + 2)
            if x > _LEFT and x + width > _WIDTH - _RIGHT:
                x, y = _LEFT, y + _LEGEND_LINE
            legend += [_path(f"M{x:.1f},{y:.1f}h26", line), _marker(x + 13, y, line)]
            legend.append(_text(x + _LEGEND_KEY, y + 4, label))
            x += width
        top = y - 4 + _LEGEND_LINE
        bottom, right, middle = top + _PLOT_HEIGHT, _WIDTH - _RIGHT, top + _PLOT_HEIGHT / 2
        # The grid, the numbers at its lines, and what the axes show; the plot is right of its longest number.
        texts = [_number(tick, self.y_ticks) for tick in self.y_ticks]
        left = max(_LEFT, 28 + _WIDE_LETTER * max(map(len, texts)))
        low, high = self.x_limits

        def across(value: float) -> float:
            return left + (value - low) / (high - low) * (right - left)

        axes: list[str] = []
        for tick in _multiples(low, high, max(1.0, _nice_step(high - low))):  # whole numbers
            axes.append(f'<path d="M{across(tick):.1f},{top:g}V{bottom:g}" stroke="#ddd"/>')
            axes.append(_text(across(tick), bottom + 17, f"{tick:.0f}", anchor="middle"))
        for tick, text in zip(self.y_ticks, texts, strict=True):
            axes.append(f'<path d="M{left:g},{self._y(tick, top):.1f}H{right:g}" stroke="#ddd"/>')
            axes.append(_text(left - 7, self._y(tick, top) + 4, text, anchor="end"))
        axes.append(f'<path d="M{left:g},{top:g}V{bottom:g}H{right:g}" fill="none" stroke="#333"/>')
        axes.append(_text((left + right) / 2, bottom + 37, self.x_label, anchor="middle"))
        turned = f' transform="rotate(-90 14 {middle:g})"'
        axes.append(_text(14, middle, self.y_label, anchor="middle", more=turned))
        # The lines, each with a few markers.
        drawn: list[str] = []
        for line in self.lines:
            points = [(across(x), self._y(y, top)) for x, y in zip(line.x, line.y, strict=True)]
            drawn.append(_path("M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points), line))
            drawn += [_marker(x, y, line) for x, y in points[:: max(1, len(points) // _MARKERS_PER_LINE)]]
        height = bottom + _BOTTOM
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" '
            f'height="{height:g}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="12">',
            f'<rect width="{_WIDTH:g}" height="{height:g}" fill="white"/>',
            *legend,
            *axes,
            *drawn,
            "</svg>\n",
        ]
        return "\n".join(parts).encode()

    def _y(self, value: float, top: float) -> float:
        """Place of a value; one outside of the limits stands at the nearer end."""
        low, high = self.limits
        value = min(max(value, low), high)
        if self.is_logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return top + _PLOT_HEIGHT * (1 - (value - low) / (high - low))


def _nice_step(width: float) -> float:
    """Return the least of 1, 2 and 5 times the powers of ten that divides a width into few enough parts."""
    power = 10.0 ** math.floor(math.log10(width / _TICKS))
    return next(share * power for share in (1, 2, 5, 10) if width / (share * power) <= _TICKS)


def _multiples(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of a step in a range."""
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(tick: float, ticks: Sequence[float]) -> str:
    """Return a tick as text, with the digits that distinguish it from its neighbours."""
    gaps = [abs(b - a) for a, b in pairwise(ticks)] or [abs(tick)]
    gap, largest = min(gaps), max(abs(each) for each in ticks)
    tick = tick if abs(tick) > 1e-3 * gap else 0.0
    if 1e-4 <= largest < 1e6 and gap > 0.2 * max(gaps):
        digits = max(0, -math.floor(math.log10(gap) + 1e-9))
        text = f"{tick:.{digits}f}"
    elif gap > 0.2 * max(gaps):
        text = f"{tick:.{min(_MOST_DIGITS, math.ceil(math.log10(largest / gap)) + 1)}g}"
    else:  # a logarithmic axis
        text = f"{tick:g}"
    return text.replace("-", "\u2212")


def _path(commands: str, line: Line) -> str:
    dash = "2 3" if line.hollow else _DASHES[line.number % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{commands}" fill="none" stroke="{_colour(line)}" stroke-width="1.8"{dashes}/>'


def _marker(x: float, y: float, line: Line) -> str:
    outline = _OUTLINES[line.number % len(_OUTLINES)]
    fill = "white" if line.hollow else _colour(line)
    return (
        f'<path transform="translate({x:.1f} {y:.1f})" d="{outline}" fill="{fill}" stroke="{_colour(line)}"/>'
    )


def _colour(line: Line) -> str:
    return COLOURS[line.number % len(COLOURS)]


def _fitting(label: str) -> str:
    """Return a label; the middle of one that is longer than a row of the legend is left out."""
    most = int((_WIDTH - _LEFT - _RIGHT - _LEGEND_KEY) / _WIDE_LETTER)
    half = (most - 1) // 2
    return label if len(label) <= most else f"{label[:half]}\u2026{label[-half:]}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)  # XML refuses the others
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor={quoteattr(anchor)}{more}>{escape(shown)}</text>'


# Figures of matplotlib

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")


def style(number: int) -> dict[str, Any]:
    """Return colour, marker and line of the n-th series; each of them distinguishes neighbours on its own."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def new_figure(width: float = 6.4, height: float = 3.8) -> tuple[Figure, Axes]:
    """Make a figure with one pair of axes, drawn without a display; sizes in inches."""
    figure = blank_figure(width, height)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, linewidth=0.6)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> bytes:
    """Write the figure as PNG and return its bytes."""
    content = png_bytes(figure)
    write_file(path, content)
    return content


_MIN_ACCURACY_RANGE = 2.0
"""Smallest range of an accuracy axis, in percentage points."""


@dataclass(frozen=True, kw_only=True)
class MainFigure:
    """The figure that tables show for a target: its name in metrics after "test_", in tables, and if it is a share."""

    key: str
    label: str
    share: bool = False

    def shown(self, value: float | None, *, digits: int = 2) -> str:
        """Return a value as text, or a dash if there is none."""
        if value is None:
            return "–"
        return f"{100 * value:.{digits}f} %" if self.share else f"{value:.{digits + 2}g}"


def beside_guessing(accuracy: float, guessing: float | None) -> str:
    """Return the remark, or "", after an accuracy in percent no better than guessing one class (None: no classes)."""
    if guessing is None or accuracy > guessing:
        return ""
    return f" (no better than guessing: {guessing:.3g} %)"


MAIN_FIGURES: Mapping[str, MainFigure] = {
    "class": MainFigure(key="accuracy", label="accuracy", share=True),
    "tokens": MainFigure(key="bits_per_token", label="bits per token"),
    "real": MainFigure(key="rmse", label="RMSE"),
    "labels": MainFigure(key="accuracy", label="accuracy", share=True),
}
BITS_PER_BYTE = MainFigure(key="bits_per_byte", label="bits per byte")
"""The figure of tokens that are pieces of a text."""
LOSS_FIGURE = MainFigure(key="loss", label="loss")
"""A figure that every target has."""


def main_figure(run: StoredRun) -> MainFigure:
    """Return the figure that a table shows of a run: that of its target, for a text bits per byte."""
    is_text = "bytes_per_token" in run.facts["data"].get("origin", {})
    return BITS_PER_BYTE if is_text and run.config.loss == "cross-entropy" else MAIN_FIGURES[run.target]


def learning_curves(runs: Sequence[StoredRun], names: Sequence[str]) -> LineChart | None:
    """Draw accuracy against epochs, on validation records if every run held some out, else on training records.

    Runs without class numbers show the figure of their target; runs of different targets show their losses. Returns
    None if no run wrote figures (release mode).
    """
    shown = {main_figure(run) for run in runs}
    main = shown.pop() if len(shown) == 1 else LOSS_FIGURE
    held_out = all(f"validation_{main.key}" in record for run in runs for record in run.metrics)
    part = "validation" if held_out else "train"
    if not any(f"{part}_{main.key}" in record for run in runs for record in run.metrics):
        main = LOSS_FIGURE
    key, scale = f"{part}_{main.key}", 100 if main.share else 1
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        drawn = [(record["epoch"], scale * record[key]) for record in run.metrics if key in record]
        if drawn:
            epochs, values = zip(*drawn, strict=True)
            lines.append(Line(x=epochs, y=values, label=name, number=number))
    if not lines:
        return None
    unit = " [%]" if main.share else ""
    chart = LineChart(
        lines=lines,
        x_label="epoch",
        y_label=f"{'validation' if held_out else 'training'} {main.label}{unit}",
    )
    low, high = chart.limits
    if not main.share or high - low >= _MIN_ACCURACY_RANGE:
        return chart
    half = _MIN_ACCURACY_RANGE / 2
    middle = min(max((low + high) / 2, half), 100 - half)
    return replace(chart, y_limits=(middle - half, middle + half))


_LEAST_ALIGNMENT, _MOST_ALIGNMENT = -0.05, 1.05
"""Ends of the axis of cosines, unless one is lower."""


def alignment_curves(run: StoredRun) -> LineChart | None:
    """Draw the cosine between each layer's update and its backpropagation gradient (PDFA paper, Figure 2 right).

    Returns None if the run has no observations.
    """
    observed = [record for record in run.metrics if record.get("alignment")]
    if not observed:
        return None
    epochs = [record["epoch"] for record in observed]
    part = "layer" if "layers" in run.facts["network"] else "point"
    lines = [
        Line(
            x=epochs,
            y=[record["alignment"][layer] for record in observed],
            label=f"{part} {layer + 1}",
            number=layer,
        )
        for layer in range(len(observed[0]["alignment"]))
    ]
    lowest = min(min(line.y) for line in lines)
    return LineChart(
        lines=lines,
        x_label="epoch",
        y_label="cosine with the gradient",
        y_limits=(min(_LEAST_ALIGNMENT, 1.1 * lowest), _MOST_ALIGNMENT),
    )


def noise_curves(run: StoredRun) -> LineChart | None:
    """Draw the mean norm of the signal that each hidden layer receives (for bp: of the error), and of its noise.

    Of a module, the signal to noise of the reading at each feedback point. Returns None if the run has no observations
    or noise.
    """
    if ratios := [record for record in run.metrics if record.get("signal_to_noise")]:
        lines = [
            Line(
                x=[record["epoch"] for record in ratios],
                y=[record["signal_to_noise"][point] for record in ratios],
                label=f"point {point + 1}",
                number=point,
            )
            for point in range(len(ratios[0]["signal_to_noise"]))
        ]
        return LineChart(lines=lines, x_label="epoch", y_label="signal to noise", logarithmic=True)
    observed = [record for record in run.metrics if record.get("signal_norm")]
    if not observed or not any(any(record["noise_norm"]) for record in observed):
        return None
    epochs = [record["epoch"] for record in observed]
    lines = []
    for layer in range(len(observed[0]["signal_norm"])):
        place = "error" if run.config.trainer.kind == "bp" else f"layer {layer + 1}"
        for what, key in (("signal", "signal_norm"), ("noise", "noise_norm")):
            values = [record[key][layer] for record in observed]
            lines.append(
                Line(x=epochs, y=values, label=f"{what}, {place}", number=layer, hollow=what == "noise")
            )
    return LineChart(lines=lines, x_label="epoch", y_label="mean norm per record", logarithmic=True)
