"""Which readings of eqs. 8 to 10 of the PDFA paper come near its Table 1, and which do not?

The named options of the configuration, three seeds each, DFA and TDFA at sigma 0 and 0.2 (paper: 84.20 and 81.66,
84.20 and 80.80). "kept" is what `table1.py` runs; each other row changes one thing, or takes the equations to the
letter. Every run is saved as it ends; a second call resumes.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import typer
from joblib import Parallel, delayed

from benchmarks.markdown import markdown, with_error
from benchmarks.pdfa.table1 import PAPER, SEEDS, SIGMAS, configuration
from benchmarks.results_file import keep_row, rows_of
from benchmarks.runs import train_or_read
from opusim.description.section import merged

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
    "eqs. 8 to 10 to the letter": merged(
        BACKWARD_CLIP,
        {"trainer": {"scale": "ball", "clip_width": "layer", "signal_gain": 1.0, "sigma": "sigma"}},
    ),
}


def run_one(reading: str, row: str, column: str, seed: int) -> dict[str, Any]:
    changes = READINGS[reading]
    trainer = changes.get("trainer", {})
    if "sigma" in trainer:
        changes = merged(changes, {"trainer": {"sigma": float(column)}})
    path = FOLDER / f"{list(READINGS).index(reading)}-{row}-{column}-{seed}"
    run = train_or_read(merged(configuration(row, column, seed), changes), path)
    summary = run.summary or {}
    return {
        "reading": reading,
        "row": row,
        "column": column,
        "seed": seed,
        "validation": 100 * summary["validation_accuracy"],
        "test": 100 * summary["test_accuracy"],
    }


def tests(reading: str, row: str, column: str) -> list[float]:
    """Return the test accuracies of a cell, by seed."""
    return [found["test"] for found in rows_of(NAME, reading=reading, row=row, column=column)]


def seeds() -> str:
    """Say how many seeds every cell has."""
    cells = itertools.product(READINGS, ROWS, COLUMNS)
    least = min(len(tests(*cell)) for cell in cells)
    return f"{least} seed{'s' if least != 1 else ''} each"


def largest_move() -> float:
    """Return by how much a reading moves the mean of a cell at most; 0 without results."""
    moves = [
        abs(statistics.fmean(found) - statistics.fmean(kept))
        for reading, row, column in itertools.product(READINGS, ROWS, COLUMNS)
        if (found := tests(reading, row, column)) and (kept := tests("kept", row, column))
    ]
    return max(moves, default=0.0)


def table() -> str:
    """Return the table: the paper, then each reading."""
    columns = list(itertools.product(ROWS, COLUMNS))
    paper = (f"{PAPER[row][1 + SIGMAS.index(float(column))]:.2f}" for row, column in columns)
    lines = [(name, *(with_error(tests(name, *column)) for column in columns)) for name in READINGS]
    header = ("reading", *(f"{row}, sigma {column}" for row, column in columns))
    return markdown(header, [("*the paper*", *paper), *lines])


def main(jobs: int = 2) -> None:
    """Train what is missing, and save each run as it ends."""
    cells = itertools.product(READINGS, ROWS, COLUMNS, SEEDS)
    keys = ("reading", "row", "column", "seed")
    missing = [cell for cell in cells if not rows_of(NAME, **dict(zip(keys, cell, strict=True)))]
    for found in Parallel(n_jobs=jobs, return_as="generator_unordered")(
        delayed(run_one)(*task) for task in missing
    ):
        keep_row(NAME, found)


if __name__ == "__main__":
    typer.run(main)
