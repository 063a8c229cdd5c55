"""How much accuracy does photonic DFA keep if a camera's shot noise protects the labels (FashionMNIST)?

Two ways to show every label once to the camera twin with a dimmed laser: the counts are kept, or only their argmax over
groups of pixels. The records, the network and the point (learning rate, epochs, flat prior) are those that
`benchmarks.pdfa.private` chose for randomized response on its validation records, so that the
figures compare; nothing is tuned here. Kept counts are read at 60 °C, where dark charge exceeds read noise, which earns
no privacy and costs accuracy; `counts, 25 °C` shows what that costs. The argmax takes the device as described.

Runs are ordinary run folders under runs/counts; a second call resumes where the first one stopped.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import typer

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import private_accuracy, train_or_read
from opusim.description.section import merged
from opusim.tables import print_table

MODULE, NAME, FOLDER = "benchmarks.pdfa.counts", "pdfa_counts", Path("runs/counts")
COLUMN_NAMES = (
    "kept of each label",
    "epsilon",
    "seeds",
    "test [%]",
    "randomized response [%]",
)
SEEDS, EPSILONS = (0, 1, 2, 3, 4), (8.0, 3.0, 1.0)
WARM: dict[str, Any] = {"name": "camera_low_light", "camera": {"dark": {"temperature_c": 60.0}}}
COLD: dict[str, Any] = {"name": "camera_low_light"}
BASE: dict[str, Any] = {
    "threads": 1,
    "epochs": 10,
    "data": {"name": "fashion-mnist", "components": 64},
    "model": {"hidden": [128]},
    "optimizer": {"name": "sgd", "momentum": 0.9, "averaged_tail": 0.5, "lr": 0.04},
    "sampler": {"batch_size": 256, "scheme": "shuffled-epochs"},
    "trainer": {"kind": "pdfa"},
    "protection": {"kind": "label-readout", "flat_prior": 0.3},
}
ROWS: dict[str, dict[str, Any]] = {
    "counts": {"protection": {"noise": "counts"}, "device": WARM},
    "argmax": {"protection": {"noise": "argmax"}, "device": COLD},
    "counts, 25 °C": {"protection": {"noise": "counts"}, "device": COLD},
}
COMPARED = "label, randomized response"
"""Row of the results of `benchmarks.pdfa.private`."""


def configuration(row: str, epsilon: float, seed: int) -> dict[str, Any]:
    """The run of one row, epsilon and seed."""
    return merged(merged(BASE, ROWS[row]), {"seed": seed, "protection": {"epsilon": epsilon}})


def run_once(row: str, epsilon: float, seed: int) -> dict[str, Any]:
    """Train one run, resume it, or read it back."""
    tag = f"{row}-{epsilon:g}-{seed}".replace(", ", "-").replace(" °C", "c")
    run = train_or_read(configuration(row, epsilon, seed), FOLDER / tag)
    (guarantee,) = run.guarantees
    return {
        "row": row,
        "epsilon": epsilon,
        "seed": seed,
        **private_accuracy(run),
        "mechanism": guarantee.mechanism,
    }


def measure(rows: str = "", epsilons: str = "8 3 1", seeds: int = len(SEEDS)) -> None:
    """Train every row with several seeds, one seed of all rows after another, and print the table."""
    runs = load_results(NAME).get("runs", [])
    done = {(run["row"], run["epsilon"], run["seed"]) for run in runs}
    wanted = [
        (row, float(epsilon), seed)
        for seed in SEEDS[:seeds]
        for epsilon in epsilons.split()
        for row in ROWS
        if row in rows.split("; ") or not rows
    ]
    for task in wanted:
        if task in done:
            continue
        found = run_once(*task)
        runs.append(found)
        runs.sort(key=lambda run: (list(ROWS).index(run["row"]), -run["epsilon"], run["seed"]))
        save_results(NAME, {"configuration": BASE, "runs": runs, "cells": cells_of(runs)})
        print(f"{len(runs)} runs; {task}: {found['test']:.2f}", flush=True)
    print_table("Test accuracy", COLUMN_NAMES, table_rows(cells_of(runs)))


def cells_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard error over seeds, by row and epsilon."""
    cells = []
    for row in ROWS:
        for epsilon in EPSILONS:
            test = [run["test"] for run in runs if (run["row"], run["epsilon"]) == (row, epsilon)]
            if len(test) > 1:
                error = statistics.stdev(test) / len(test) ** 0.5
                mean = statistics.mean(test)
                cells.append(
                    {"row": row, "epsilon": epsilon, "seeds": len(test), "test": mean, "error": error}
                )
    return cells


def table_rows(cells: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each cell, with the accuracy of randomized response at the same epsilon."""
    others = load_results("pdfa_private").get("cells", [])

    def compared(epsilon: float) -> str:
        found = [cell["test"] for cell in others if (cell["row"], cell["epsilon"]) == (COMPARED, epsilon)]
        return f"{found[0]:.2f}" if found else ""

    return [
        (
            cell["row"],
            f"{cell['epsilon']:g}",
            str(cell["seeds"]),
            f"{cell['test']:.2f} ± {cell['error']:.2f}",
            compared(cell["epsilon"]),
        )
        for cell in cells
    ]


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results.get("cells"):
        return ""
    text = (
        "54,000 records whose labels a simulated camera counts once, with the laser dimmed to the epsilon; test "
        f"accuracy, mean over seeds and its standard error ({results['date']}, {command(MODULE)}). The network and its "
        "settings are those of randomized response, whose means over three seeds stand on the right; nothing was "
        "tuned. Counts are read at 60 °C unless another temperature is named. All statements are proven under a device "
        "model. These runs credited the dark charge of the doubling rule; at 60 °C a third less is credited now, and "
        "counts need a dimmer laser for the same epsilon. They were not measured again."
    )
    title = "Labels protected by shot noise (FashionMNIST, delta 1e-5)"
    return section(title, text, markdown(COLUMN_NAMES, table_rows(results["cells"])))


if __name__ == "__main__":
    typer.run(measure)
