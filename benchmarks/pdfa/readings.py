"""Which readings of eqs. 8 and 9 of the PDFA paper come near its Table 1, and which do not?

The named options of the configuration, one seed each, DFA and TDFA at sigma 0 and 0.2 (paper: 84.20 and 81.66, 84.20
and 80.80). "kept" is what `table1.py` runs with three seeds; each other row changes one thing, or takes
the equations to the letter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from joblib import Parallel, delayed

from benchmarks.markdown import command, markdown, section
from benchmarks.pdfa.table1 import BATCH, PAPER, SIGMAS, WIDTH, configuration
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from opusim.tables import print_table
from training.config.reading import merged

MODULE, NAME, FOLDER = "benchmarks.pdfa.readings", "pdfa_readings", Path("runs/readings")
COLUMNS = ("0", "0.2")
ROWS = ("dfa", "tdfa")
BACKWARD_CLIP = {"model": {"tau_h_max": None}, "trainer": {"tau_h_max": 1.0, "through_clip": False}}
READINGS: dict[str, dict[str, Any]] = {
    "kept": {},
    "slope of clipped neurons is phi' (eq. 8)": {"trainer": {"through_clip": False}},
    "average over the batch (eq. 8) instead of a sum over sqrt(512)": {"trainer": {"signal_gain": 1.0}},
    "FashionMNIST's own pixel constants": {"data": {"mean": 0.2860, "std": 0.3530}},
    "Be shortened to the ball, not normalised": {"trainer": {"scale": "ball"}},
    "each entry of g has standard deviation sigma": {"trainer": {"sigma": "sigma"}},
    "clip of hidden activations in the update only": merged(
        BACKWARD_CLIP, {"trainer": {"clipped_layers": "hidden"}}
    ),
    "clip of all activations in the update only": BACKWARD_CLIP,
    "eqs. 8 and 9 to the letter": merged(
        BACKWARD_CLIP,
        {"trainer": {"scale": "ball", "clip_width": "layer", "signal_gain": 1.0, "sigma": "sigma"}},
    ),
}


def run_one(reading: str, row: str, column: str) -> dict[str, Any]:
    changes = READINGS[reading]
    trainer = changes.get("trainer", {})
    if "sigma" in trainer:
        changes = merged(changes, {"trainer": {"sigma": float(column)}})
    path = FOLDER / f"{list(READINGS).index(reading)}-{row}-{column}"
    run = train_or_read(merged(configuration(row, column, 0), changes), path)
    summary = run.summary or {}
    paper = PAPER[row][1 + SIGMAS.index(float(column))]
    return {
        "reading": reading,
        "row": row,
        "column": column,
        "validation": 100 * summary["validation_accuracy"],
        "test": 100 * summary["test_accuracy"],
        "paper": paper,
    }


def table(found: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the lines: the paper, then each reading."""
    names = list(dict.fromkeys(row["reading"] for row in found))
    columns = list(dict.fromkeys((row["row"], row["column"]) for row in found))
    cells = {(row["reading"], row["row"], row["column"]): row for row in found}
    paper = (f"{cells[(names[0], *column)]['paper']:.2f}" for column in columns)
    lines = [(name, *(f"{cells[(name, *column)]['test']:.2f}" for column in columns)) for name in names]
    header = ("reading", *(f"{row}, sigma {column}" for row, column in columns))
    return header, [("*the paper*", *paper), *lines]


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results:
        return ""
    text = (
        f"Test accuracy of one seed under other readings of eqs. 8 and 9 ({results['date']}, {command(MODULE)}). Each "
        "is a named option of the configuration."
    )
    return section("What the paper leaves unsaid", text, markdown(*table(results["rows"])))


def main(jobs: int = 2) -> None:
    """Train what is missing and print the table."""
    tasks = [(reading, row, column) for reading in READINGS for row in ROWS for column in COLUMNS]
    results = Parallel(n_jobs=jobs)(delayed(run_one)(*task) for task in tasks)
    save_results(NAME, {"width": WIDTH, "batch": BATCH, "seed": 0, "rows": results})
    print_table("Readings of eqs. 8 and 9", *table(results))


if __name__ == "__main__":
    typer.run(main)
