"""How many hyperplanes does MNIST take (Figures 4 and 5 of the convex paper)?

Accuracy by epochs of the convex model with P = 16 to 512 hyperplanes and of a ReLU network of width 200, batches of
1,000: without noise (Figure 4) and by Poisson DP-SGD at sigma = 5 and 15 (Figure 5; sigma is the multiplier here).
Two products of size records x features x (10 P) fill a step, so P and the epochs set the time: 20 epochs, and P to 256,
take minutes; `--epochs 100 --largest 512` takes hours.
Learning rates are those that `benchmarks.convex.accuracy search` chose, not the paper's grid. Accuracy is that on 6,000
training records that are held out, after each epoch, and on the test records at the end; one seed. A second call
resumes.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import typer

from benchmarks.convex.rows import BASE, ROWS
from benchmarks.markdown import command, markdown
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from training.config.reading import merged

MODULE, NAME, FOLDER = "benchmarks.convex.hyperplanes", "convex_hyperplanes", Path("runs/convex-hyperplanes")
COUNTS, NOISES, EPOCHS, SEED, LARGEST = (16, 32, 64, 128, 256, 512), (0.0, 5.0, 15.0), 20, 0, 256
CONVEX, NETWORK = "convex, Poisson DP-SGD", "ReLU network, DP-SGD"
RATES = {CONVEX: 1.9, NETWORK: 0.3}


def configuration(row: str, hyperplanes: int | None, noise: float, epochs: int) -> dict[str, Any]:
    """Return the configuration of one curve."""
    config = merged(merged(BASE, ROWS[row].config), {"seed": SEED, "epochs": epochs})
    config = merged(config, {"data": {"name": "mnist", "validation_fraction": 0.1}})
    config = merged(config, {"optimizer": {"lr": RATES[row]}, "sampler": {"batch_size": 1000}})
    if hyperplanes is not None:
        config = merged(config, {"trainer": {"hyperplanes": hyperplanes, "clip": 0.7}})
    if noise:
        return merged(config, {"protection": {"noise_multiplier": noise}})
    config["protection"] = {"kind": "none"}
    config["sampler"] = {"batch_size": 1000}
    return config


def main(
    noise: str = ",".join(f"{value:g}" for value in NOISES), epochs: int = EPOCHS, largest: int = LARGEST
) -> None:
    """Train what is missing, the smallest models first, and save each curve as it ends."""
    cases: list[tuple[str, int | None]] = [
        *((CONVEX, p) for p in COUNTS if p <= largest),
        (NETWORK, None),
    ]
    for (row, hyperplanes), level in itertools.product(cases, map(float, noise.split(","))):
        key = {"row": row, "hyperplanes": hyperplanes, "noise": level, "epochs": epochs}
        curves = load_results(NAME).get("curves", [])
        if any(all(curve[name] == key[name] for name in key) for curve in curves):
            continue
        tag = f"{row.split(',')[0]}-{hyperplanes}-{level:g}-{epochs}".replace(" ", "-")
        run = train_or_read(configuration(row, hyperplanes, level, epochs), FOLDER / tag)
        held_out = [round(100 * record["validation_accuracy"], 2) for record in run.metrics]
        test = 100 * (run.summary or {})["test_accuracy"]
        save_results(NAME, {"curves": [*curves, {**key, "held_out": held_out, "test": test}]})
        print(f"{tag}: {test:.2f} %", flush=True)


def left(*noises: float) -> int:
    """Return how many curves of some noise levels are not in the results."""
    curves = load_results(NAME).get("curves", [])
    done = {(curve["hyperplanes"], curve["noise"]) for curve in curves if curve["epochs"] == EPOCHS}
    planned = (*(p for p in COUNTS if p <= LARGEST), None)
    return len(set(itertools.product(planned, noises)) - done)


def page_table() -> str:
    """Return the ends of the curves; empty without results."""
    found = load_results(NAME)
    rows = [
        (
            curve["row"].split(",")[0],
            "" if curve["hyperplanes"] is None else str(curve["hyperplanes"]),
            f"{curve['noise']:g}",
            str(curve["epochs"]),
            f"{curve['held_out'][len(curve['held_out']) // 4]:.2f}",
            f"{curve['held_out'][-1]:.2f}",
            f"{curve['test']:.2f}",
        )
        for curve in found.get("curves", [])
    ]
    text = f"Accuracy by hyperplanes and epochs, MNIST, one seed ({found.get('date')}, {command(MODULE)})."
    header = ("model", "P", "sigma", "epochs", "held out, a quarter [%]", "held out, end [%]", "test [%]")
    return f"{text}\n\n" + markdown(header, rows) if rows else ""


if __name__ == "__main__":
    typer.run(main)
