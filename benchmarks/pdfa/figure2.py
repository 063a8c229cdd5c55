"""How do accuracy grow and alignment fall under four feedbacks and the device's noise (Figure 2 of the PDFA paper)?

Draws docs/pdfa_figure2.png from the runs of `table1.py` (FashionMNIST, 15 epochs), means of its seeds. Left, a panel
for each of BP, DFA and PDFA, which the paper draws over each other, and of TDFA: accuracy on the held-out records after
each epoch, without clipping and noise (dashed), and with clipping at increasing noise (lighter). Right: the cosine
between the update and that of backpropagation after the last epoch, by layer and noise; the paper shows the second
layer.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from benchmarks.pdfa.table1 import COLUMNS, PAPER, SIGMAS
from benchmarks.pdfa.table1 import NAME as TABLE1
from benchmarks.results_file import rows_of
from opusim.training.runs.drawing import save_figure, style

MODULE = "benchmarks.pdfa.figure2"
LAYERS = ("layer 1", "layer 2")
NAMES = {"bp": "BP", "dfa": "DFA", "tdfa": "ternarized DFA", "pdfa": "photonic DFA"}
PICTURE = Path(__file__).parents[2] / "docs" / "pdfa_figure2.png"


def curve(row: str, column: str) -> list[float]:
    """Return the mean held-out accuracy by epoch of a cell of Table 1; empty without results."""
    runs = [run["held_out"] for run in rows_of(TABLE1, "runs", row=row, column=column) if "held_out" in run]
    return [statistics.fmean(values) for values in zip(*runs, strict=True)]


def alignment(row: str, column: str, layer: int) -> float | None:
    """Return the mean cosine of a cell's last epoch in one hidden layer; None without results."""
    runs = [run["alignment"] for run in rows_of(TABLE1, "runs", row=row, column=column)]
    return statistics.fmean(found[layer] for found in runs) if any(runs) else None


def draw() -> None:
    """Draw the curves, and the alignment by noise."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2))
    panels = left.subplots(2, 2, sharex=True, sharey=True)
    for number, (axes, row) in enumerate(zip(panels.flat, PAPER, strict=True)):
        _draw_curves(axes, row, style(number)["color"])
    for axes in panels[1]:
        axes.set_xlabel("epoch")
    for axes in panels[:, 0]:
        axes.set_ylabel("held-out accuracy [%]")
    _draw_alignment(right.subplots())
    save_figure(figure, PICTURE)


def _draw_curves(axes: Any, row: str, color: str) -> None:
    """Draw one line a column of the table, lighter at more noise, dashed without clip and noise."""
    for number, column in enumerate(COLUMNS):
        values, plain = curve(row, column), column == "non-private"
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=color,
            linestyle="--" if plain else "-",
            alpha=1.0 if plain else 1.0 - 0.8 * (number - 1) / (len(SIGMAS) - 1),
            label="no clip, no noise" if plain else f"sigma = {column}",
        )
    axes.set_title(NAMES[row], fontsize=10)
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="lower right")


def _draw_alignment(axes: Any) -> None:
    for (number, row), layer in itertools.product(enumerate(PAPER), (0, 1)):
        values = [alignment(row, f"{sigma:g}", layer) for sigma in SIGMAS]
        if row != "bp" and None not in values:
            look = {"color": style(number)["color"], "linestyle": ":" if layer == 0 else "-"}
            label = f"{NAMES[row]}, {LAYERS[layer]}"
            axes.plot(range(len(SIGMAS)), values, marker="o", markersize=3, label=label, **look)
    axes.set_xticks(range(len(SIGMAS)), [f"{sigma:g}" for sigma in SIGMAS])
    axes.set(xlabel="sigma", ylabel="cosine with backpropagation's update", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    draw()
