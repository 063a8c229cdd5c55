"""How do accuracy grow and alignment fall under four feedbacks and the device's noise (Figure 2 of the PDFA paper)?

Left, as printed: training curves of BP, DFA, TDFA and PDFA, without clipping (dashed) and with it at increasing noise,
one seed: accuracy on the held-out records after each epoch. By default 784-512-512-10 of `table1.py` is 64-512-512-10
on scikit-learn's digits, batches of 32, which takes a minute; `--data fashion-mnist` trains the paper's own curves with
`table1.py`'s configuration. Right: the cosine between the update and that of backpropagation after 15 epochs of
FashionMNIST, by layer and noise, mean of the three seeds of `table1.py`; the paper shows the second layer. Every curve
is saved as it ends; a second call resumes. Draws docs/pdfa_figure2.png.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import typer

from benchmarks.markdown import command, markdown, section
from benchmarks.pdfa.table1 import NAME as TABLE1
from benchmarks.pdfa.table1 import PAPER, SIGMAS, WIDTH, configuration
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from training.config.reading import merged
from training.reports.drawing import save_figure, style

MODULE, NAME, FOLDER = "benchmarks.pdfa.figure2", "pdfa_figure2", Path("runs/pdfa-figure2")
COLUMNS, SEED, LAYERS = ("non-private", "0", "0.2"), 0, ("layer 1", "layer 2")
EPOCHS, DIGITS_BATCH = {"fashion-mnist": 15, "digits": 30}, 32
NAMES = {"bp": "BP", "dfa": "DFA", "tdfa": "ternarized DFA", "pdfa": "photonic DFA"}
PICTURE = Path(__file__).parents[2] / "docs" / "pdfa_figure2.png"


def curve_configuration(data: str, row: str, column: str) -> dict[str, Any]:
    """Return the configuration of one curve."""
    config = merged(configuration(row, column, SEED), {"epochs": EPOCHS[data]})
    if data == "digits":
        config["data"] = {"name": "digits", "split_seed": SEED}
        config["sampler"] = {"batch_size": DIGITS_BATCH, "drop_last": True}
        if column != "non-private":
            gain = DIGITS_BATCH / (1.0 if row == "bp" else WIDTH**0.5)
            config["trainer"] = {**config["trainer"], "signal_gain": gain}
    return config


def main(data: str = "digits") -> None:
    """Train what is missing on digits or fashion-mnist, save each curve as it ends, and draw."""
    for column, row in itertools.product(COLUMNS, PAPER):
        curves = load_results(NAME).get("curves", [])
        key = {"data": data, "row": row, "column": column}
        if any(all(curve[name] == key[name] for name in key) for curve in curves):
            continue
        run = train_or_read(curve_configuration(data, row, column), FOLDER / f"{data}-{row}-{column}")
        held_out = [round(100 * record["validation_accuracy"], 2) for record in run.metrics]
        test = round(100 * (run.summary or {})["test_accuracy"], 2)
        save_results(NAME, {"curves": [*curves, {**key, "held_out": held_out, "test": test}]})
        print(f"{data}, {row}, {column}: {held_out[-1]:.2f} %", flush=True)
    draw(data)


def curves_of(data: str) -> dict[tuple[str, str], list[float]]:
    """Return the held-out accuracies by epoch of a data set, by feedback and column."""
    return {
        (found["row"], found["column"]): found["held_out"]
        for found in load_results(NAME).get("curves", [])
        if found["data"] == data
    }


def shown_data() -> str:
    """Return the data set of the most complete curves: the paper's, if they are there."""
    return max(EPOCHS, key=lambda data: (len(curves_of(data)), data == "fashion-mnist"))


def alignment(row: str, column: str, layer: int) -> float | None:
    """Return the mean cosine of a cell's last epoch in one hidden layer; None without results."""
    runs = [
        run["alignment"][layer]
        for run in load_results(TABLE1).get("runs", [])
        if (run["row"], run["column"]) == (row, column) and run["alignment"]
    ]
    return statistics.fmean(runs) if runs else None


def draw(data: str) -> None:
    """Draw the curves, and the alignment by noise."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, data)
    _draw_alignment(right)
    save_figure(figure, PICTURE)


def _draw_curves(axes: Any, data: str) -> None:
    """Draw one colour a feedback, lighter at more noise, dashed without clip and noise."""
    noisy, curves = [column for column in COLUMNS if column != "non-private"], curves_of(data)
    for number, row in enumerate(PAPER):
        for column in COLUMNS:
            values = curves.get((row, column), [])
            plain = column == "non-private"
            axes.plot(
                range(1, len(values) + 1),
                values,
                color=style(number)["color"],
                linestyle="--" if plain else "-",
                alpha=1.0 if plain else 1.0 - 0.75 * noisy.index(column) / (len(noisy) - 1),
                label=NAMES[row] if column == noisy[0] else None,
            )
    axes.set(xlabel=f"epoch, {data}", ylabel="held-out accuracy [%]")
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
    axes.set(xlabel="sigma, fashion-mnist", ylabel="cosine with backpropagation's update", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def left() -> int:
    """Return how many curves of the data set that the page shows are not in the results."""
    return len(PAPER) * len(COLUMNS) - len(curves_of(shown_data()))


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    found = load_results(NAME)
    data, every = shown_data(), 5
    rows = [
        (
            NAMES[row],
            column,
            ", ".join(f"{value:.1f}" for value in [held_out[0], *held_out[every - 1 :: every]]),
            *("" if (value := alignment(row, column, layer)) is None else f"{value:.2f}" for layer in (0, 1)),
        )
        for (row, column), held_out in curves_of(data).items()
    ]
    text = (
        f"Accuracy on held-out records of {data} after the first epoch and every {every} of {EPOCHS[data]}, one seed "
        f"({found.get('date')}, {command(MODULE)}; [the figure](../../docs/pdfa_figure2.png)); cosine of the update "
        "with backpropagation's after 15 epochs of FashionMNIST by hidden layer, mean of the three seeds of Table 1."
    )
    header = ("feedback", "sigma", "held out [%]", *LAYERS)
    return section("Figure 2 of the PDFA paper", text, markdown(header, rows)) if rows else ""


if __name__ == "__main__":
    typer.run(main)
