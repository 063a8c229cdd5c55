"""What is left of the accuracy if the choice of settings is paid for as well?

The search of `opusim tune bp` for the linear model on components of FashionMNIST: a Poisson number of trials of mean 3
on 54,000 records, the rate drawn from three values, scores that are noised counts of the 6,000 other records. Epsilon 3
at delta 1e-5 is that of the whole search. The test set is looked at once, for the trial that the score chose.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from benchmarks.markdown import command, markdown, section
from benchmarks.options import seeds_of
from benchmarks.private_accuracy.records import BASE, COMPONENTS_GRID, ROWS
from benchmarks.results_file import load_results, save_results
from benchmarks.tuned_rows import shown_accuracy
from opusim.description.section import merged
from opusim.training.config import load_config
from opusim.training.runs.run import load_run
from opusim.training.sweeps.tuning import Search

MODULE, NAME = "benchmarks.private_accuracy.paid", "private_accuracy_paid"
ROW, EPSILON, MEAN = "fashion-mnist, linear on components, DP-SGD", 3.0, 3.0
CHOICES = {"optimizer.lr": [f"{rate:g}" for rate in COMPONENTS_GRID["optimizer.lr"]]}
FOLDER = Path("runs/private_accuracy_paid")


def search(seed: int) -> dict[str, Any]:
    """Start one search, or resume it; returns what it found."""
    config = merged(merged(BASE, ROWS[ROW].config), {"seed": seed, "protection": {"epsilon": EPSILON}})
    config = merged(config, {"optimizer": {"averaged_tail": COMPONENTS_GRID["optimizer.averaged_tail"][0]}})
    folder = FOLDER / str(seed)
    found = Search(load_config(config), CHOICES, mean=MEAN, folder=folder).run()
    trials = [load_run(path).guarantees[0].epsilon for path in sorted(folder.glob("trial-*"))]
    test = None if found.run is None else 100 * (found.run.summary or {})["test_accuracy"]
    return {
        "seed": seed,
        "epsilon": found.guarantee.epsilon,
        "trial_epsilon": max(trials, default=None),
        "trials": found.trials,
        "settings": list(found.settings),
        "score": None if found.score is None else 100 * found.score,
        "test": test,
    }


app = typer.Typer(add_completion=False)


@app.command()
def main(seeds: str = "0") -> None:
    """Run searches of some seeds, such as 0,1,2, one after another."""
    for seed in seeds_of(seeds):
        others = [row for row in load_results(NAME).get("rows", []) if row["seed"] != seed]
        rows = sorted([*others, search(seed)], key=lambda row: int(row["seed"]))
        save_results(NAME, {"row": ROW, "mean": MEAN, "choices": CHOICES, "rows": rows})


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results.get("rows"):
        return ""
    cells = load_results("private_accuracy_records")["cells"]
    unpaid = next(cell for cell in cells if (cell["row"], cell["epsilon"]) == (ROW, EPSILON))
    text = (
        f"`{ROW}` at epsilon {EPSILON:g}, delta 1e-5 ({results['date']}, {command(MODULE)}). Above, its settings are "
        f"chosen on held-out records *without paying*: {shown_accuracy(unpaid)} %. Here the choice of the rate from "
        f"{', '.join(CHOICES['optimizer.lr'])} is *paid for* by `opusim tune bp`, {MEAN:g} trials expected, one search "
        "a line: epsilon covers all trials and their noised scores, and a tenth of the records only score. The third "
        "way is to *transfer* settings from another data set, which costs nothing: the rows of MNIST above."
    )
    rows = [
        (
            str(row["trials"]),
            "none" if row["trial_epsilon"] is None else f"{row['trial_epsilon']:.2f}",
            f"{row['epsilon']:.2f}",
            ", ".join(row["settings"]) or "none",
            *("none" if row[key] is None else f"{row[key]:.2f}" for key in ("score", "test")),
        )
        for row in results["rows"]
    ]
    header = ("trials drawn", "epsilon of a trial", "of the search", "chosen", "noised score [%]", "test [%]")
    return section("Settings that are paid for", text, markdown(header, rows))


if __name__ == "__main__":
    app()
