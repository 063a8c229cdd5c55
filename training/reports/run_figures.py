"""Figures of runs: learning curves, alignment with backpropagation, signal and noise."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from opusim.files import write_file
from training.networks import objectives
from training.networks.objectives import BITS_PER_BYTE, LOSS_FIGURE, MAIN_FIGURES
from training.runs.run import Run

# Okabe and Ito's colours, ordered so that neighbours also differ in lightness when printed in grey
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
_DPI = 130
_MIN_ACCURACY_RANGE = 2.0
"""Smallest range of an accuracy axis, in percentage points."""


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


def png_bytes(figure: Figure) -> bytes:
    """Return the figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> bytes:
    """Write the figure as PNG and return its bytes."""
    content = png_bytes(figure)
    write_file(path, content)
    return content


def main_figure(run: Run) -> objectives.Figure:
    """Return the figure that a table shows of a run: that of its target, for a text bits per byte."""
    is_text = "bytes_per_token" in run.facts["data"].get("origin", {})
    return BITS_PER_BYTE if is_text and run.config.loss == "cross-entropy" else MAIN_FIGURES[run.form.target]


def learning_curves(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    """Draw accuracy against epochs, on validation records if every run held some out, else on training records.

    Runs without class numbers show the figure of their target; runs of different targets show their losses.

    Returns:
        The figure, or None if no run wrote figures (release mode).
    """
    shown = {main_figure(run) for run in runs}
    main = shown.pop() if len(shown) == 1 else LOSS_FIGURE
    held_out = all(f"validation_{main.key}" in record for run in runs for record in run.metrics)
    part = "validation" if held_out else "train"
    if not any(f"{part}_{main.key}" in record for run in runs for record in run.metrics):
        main = LOSS_FIGURE
    key, scale = f"{part}_{main.key}", 100 if main.share else 1
    if not any(key in record for run in runs for record in run.metrics):
        return None
    figure, axes = new_figure()
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        epochs = [record["epoch"] for record in run.metrics]
        values = [scale * record[key] for record in run.metrics if key in record]
        axes.plot(epochs[: len(values)], values, label=name, markevery=_sparse(len(values)), **style(number))
    unit = " [%]" if main.share else ""
    axes.set(ylabel=f"{'validation' if held_out else 'training'} {main.label}{unit}")
    _epoch_axis(axes)
    low, high = axes.get_ylim()
    if main.share and high - low < _MIN_ACCURACY_RANGE:
        half = _MIN_ACCURACY_RANGE / 2
        middle = min(max((low + high) / 2, half), 100 - half)
        axes.set_ylim(middle - half, middle + half)
    axes.legend(frameon=False)
    return figure


def alignment_curves(run: Run) -> Figure | None:
    """Draw the cosine between each layer's update and its backpropagation gradient (PDFA paper, Figure 2 right).

    Returns:
        The figure, or None if the run has no observations.
    """
    observed = [record for record in run.metrics if record.get("alignment")]
    if not observed:
        return None
    figure, axes = new_figure()
    epochs = [record["epoch"] for record in observed]
    part = "layer" if "layers" in run.facts["network"] else "point"
    for layer in range(len(observed[0]["alignment"])):
        values = [record["alignment"][layer] for record in observed]
        axes.plot(epochs, values, label=f"{part} {layer + 1}", markevery=_sparse(len(values)), **style(layer))
    lowest = min(min(record["alignment"]) for record in observed)
    axes.set(ylabel="cosine with the gradient", ylim=(min(-0.05, 1.1 * lowest), 1.05))
    _epoch_axis(axes)
    axes.legend(frameon=False)
    return figure


def noise_curves(run: Run) -> Figure | None:
    """Draw the mean norm of the signal that each hidden layer receives (for bp: of the error), and of its noise.

    Returns:
        The figure, or None if the run has no observations or without noise.
    """
    observed = [record for record in run.metrics if record.get("signal_norm")]
    if not observed or not any(any(record["noise_norm"]) for record in observed):
        return None
    figure, axes = new_figure()
    epochs = [record["epoch"] for record in observed]
    for layer in range(len(observed[0]["signal_norm"])):
        look = style(layer)
        every = _sparse(len(epochs))
        signal = [record["signal_norm"][layer] for record in observed]
        noise = [record["noise_norm"][layer] for record in observed]
        place = "error" if run.config.trainer.kind == "bp" else f"layer {layer + 1}"
        axes.plot(epochs, signal, label=f"signal, {place}", markevery=every, **look)
        hollow = {**look, "linestyle": ":", "markerfacecolor": "white"}
        axes.plot(epochs, noise, label=f"noise, {place}", markevery=every, **hollow)
    axes.set(ylabel="mean norm per record", yscale="log")
    _epoch_axis(axes)
    axes.legend(frameon=False)
    return figure


def _epoch_axis(axes: Axes) -> None:
    """Label whole epochs; a single epoch gets half an epoch on either side."""
    axes.set(xlabel="epoch")
    epochs = [float(x) for line in axes.lines for x in np.asarray(line.get_xdata())]
    if epochs and min(epochs) == max(epochs):
        axes.set(xlim=(epochs[0] - 0.5, epochs[0] + 0.5), xticks=[epochs[0]])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _sparse(length: int) -> int:
    """Return the distance between markers that keeps a curve readable."""
    return max(1, length // 12)
