"""What matplotlib's figures share: their look, a canvas without a display, and PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from opusim.files import write_file
from opusim.tables import png_bytes
from training.reports.line_chart import COLOURS

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
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, linewidth=0.6)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> bytes:
    """Write the figure as PNG and return its bytes."""
    content = png_bytes(figure)
    write_file(path, content)
    return content
