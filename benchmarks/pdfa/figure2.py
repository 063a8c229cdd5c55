"""How do accuracy grow and alignment fall under four feedbacks and the device's noise (Figure 2 of the PDFA paper)?

Left, as printed: training curves of BP, DFA, TDFA and PDFA on FashionMNIST, without clipping (dashed) and with it at
increasing noise, one seed of the runs of `table1.py`: accuracy on the held-out records after each epoch. Fewer epochs
than 15 are the first ones of that training, whose rate is constant. Right: the cosine between the update and that of
backpropagation after 15 epochs, by layer and noise, mean of the three seeds of `table1.py`; the paper shows the second
layer. Every curve is saved as it ends; a second call resumes. Draws docs/pdfa_figure2.png.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import typer

from benchmarks.markdown import command, markdown, section
from benchmarks.pdfa.table1 import BASE, PAPER, SIGMAS, configuration
from benchmarks.pdfa.table1 import NAME as TABLE1
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from training.reports.drawing import save_figure, style

MODULE, NAME, FOLDER = "benchmarks.pdfa.figure2", "pdfa_figure2", Path("runs/pdfa-figure2")
COLUMNS, SEED, LAYERS = ("non-private", "0", "0.05", "0.2"), 0, ("layer 1", "layer 2")
NAMES = {"bp": "BP", "dfa": "DFA", "tdfa": "ternarized DFA", "pdfa": "photonic DFA"}
PICTURE = Path(__file__).parents[2] / "docs" / "pdfa_figure2.png"


def main(epochs: int = BASE["epochs"]) -> None:
    """Train what is missing, save each curve as it ends, and draw."""
    for column, row in itertools.product(COLUMNS, PAPER):
        curves = load_results(NAME).get("curves", [])
        key = {"row": row, "column": column, "epochs": epochs}
        if any(all(curve[name] == key[name] for name in key) for curve in curves):
            continue
        config = {**configuration(row, column, SEED), "epochs": epochs}
        run = train_or_read(config, FOLDER / f"{row}-{column}-{epochs}")
        held_out = [round(100 * record["validation_accuracy"], 2) for record in run.metrics]
        save_results(NAME, {"curves": [*curves, {**key, "held_out": held_out}]})
        print(f"{row}, {column}: {held_out[-1]:.2f} %", flush=True)
    draw(epochs)


def curve(row: str, column: str, epochs: int) -> list[float]:
    """Return a cell's held-out accuracies by epoch; empty if it was not trained."""
    for found in load_results(NAME).get("curves", []):
        if (found["row"], found["column"], found["epochs"]) == (row, column, epochs):
            return list(found["held_out"])
    return []


def alignment(row: str, column: str, layer: int) -> float | None:
    """Return the mean cosine of a cell's last epoch in one hidden layer; None without results."""
    runs = [
        run["alignment"][layer]
        for run in load_results(TABLE1).get("runs", [])
        if (run["row"], run["column"]) == (row, column) and run["alignment"]
    ]
    return statistics.fmean(runs) if runs else None


def draw(epochs: int) -> None:
    """Draw the curves, and the alignment by noise."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, epochs)
    _draw_alignment(right)
    save_figure(figure, PICTURE)


def _draw_curves(axes: Any, epochs: int) -> None:
    """Draw one colour a feedback, lighter at more noise, dashed without clip and noise."""
    noisy = [column for column in COLUMNS if column != "non-private"]
    for number, row in enumerate(PAPER):
        for column in COLUMNS:
            values = curve(row, column, epochs)
            plain = column == "non-private"
            axes.plot(
                range(1, len(values) + 1),
                values,
                color=style(number)["color"],
                linestyle="--" if plain else "-",
                alpha=1.0 if plain else 1.0 - 0.75 * noisy.index(column) / (len(noisy) - 1),
                label=NAMES[row] if column == noisy[0] else None,
            )
    axes.set(xlabel="epoch", ylabel="held-out accuracy [%]", xticks=range(1, epochs + 1))
    axes.set_title(f"dashed: no clip, no noise; lighter: sigma {', '.join(noisy)}", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _draw_alignment(axes: Any) -> None:
    for (number, row), layer in itertools.product(enumerate(("dfa", "tdfa", "pdfa"), start=1), (0, 1)):
        values = [alignment(row, f"{sigma:g}", layer) for sigma in SIGMAS]
        if None not in values:
            axes.plot(
                range(len(SIGMAS)),
                values,
                color=style(number)["color"],
                linestyle=":" if layer == 0 else "-",
                marker="o",
                markersize=3,
                label=f"{NAMES[row]}, {LAYERS[layer]}",
            )
    axes.set_xticks(range(len(SIGMAS)), [f"{sigma:g}" for sigma in SIGMAS])
    axes.set(xlabel="sigma", ylabel="cosine with backpropagation's update", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def left(epochs: int = 0) -> int:
    """Return how many curves of the longest training with results, or of some epochs, are not in the results."""
    curves = load_results(NAME).get("curves", [])
    longest = epochs or max((found["epochs"] for found in curves), default=BASE["epochs"])
    return sum(not curve(row, column, longest) for row, column in itertools.product(PAPER, COLUMNS))


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    found = load_results(NAME)
    rows = [
        (
            NAMES[one["row"]],
            one["column"],
            str(one["epochs"]),
            ", ".join(f"{value:.1f}" for value in one["held_out"]),
            *(
                "" if (value := alignment(one["row"], one["column"], layer)) is None else f"{value:.2f}"
                for layer in (0, 1)
            ),
        )
        for one in found.get("curves", [])
    ]
    text = (
        f"Accuracy on held-out records after each epoch, one seed ({found.get('date')}, {command(MODULE)}; "
        "[the figure](../../docs/pdfa_figure2.png)); cosine of the update with backpropagation's after 15 epochs by "
        "hidden layer, mean of the three seeds of Table 1."
    )
    header = ("feedback", "sigma", "epochs", "held out, by epoch [%]", *LAYERS)
    return section("Figure 2 of the PDFA paper (FashionMNIST)", text, markdown(header, rows)) if rows else ""


if __name__ == "__main__":
    typer.run(main)
