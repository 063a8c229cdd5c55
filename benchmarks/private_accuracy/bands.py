"""Does noise that is correlated over steps (protection.bands) make training that protects whole records more accurate?

DP-SGD of a linear model on the pixels of FashionMNIST, 10 epochs, delta 1e-5, one record against an empty place,
secret Poisson batches from as many subsets as bands, constant divisor, momentum 0.9 and a constant rate for each batch.
- `tune`: one run for each batch size, number of bands and epsilon; accuracy on 10 % of the training records, held out.
- `measure`: for each epsilon the best number of bands above 1 on those records, with its batch size, and the best batch
  size of independent noise; trained on all 60,000 records with other seeds, test accuracy. The choice is not paid for.
- `predict`: what calibrated noise leaves in the parameters, over that of independent noise, without any training.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy.signal
import typer

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.tuned_rows import RowPlan, TunedRows, shown_accuracy
from opusim.accounting import RecordCentral
from opusim.accounting.composition import calibrate_noise
from opusim.training.config.sections import OptimizerConfig
from opusim.training.protections.record import banded_coefficients, weights_of_gradients

MODULE, NAME = "benchmarks.private_accuracy.bands", "private_accuracy_bands"
EPSILONS = (8.0, 3.0, 1.0)
RECORDS, EPOCHS, DELTA = 54_000, 10, 1e-5
RATES = {1024: 4.0, 4096: 8.0}
"""Rate by batch size: the larger batches take a quarter of the steps."""
BANDS = (1, 2, 4, 8, 16)
BASE: dict[str, Any] = {
    "threads": 1,
    "epochs": EPOCHS,
    "data": {"name": "fashion-mnist"},
    "model": {"hidden": []},
    "optimizer": {"name": "sgd", "momentum": 0.9},
    "sampler": {"scheme": "poisson"},
    "trainer": {"kind": "bp"},
    "protection": {"kind": "record", "clip_norm": 0.1},
}


def row_name(batch: int, bands: int) -> str:
    """Return the name of a row."""
    return f"batch {batch}, bands {bands}"


def _plan(batch: int, bands: int) -> RowPlan:
    config = {
        "sampler": {"batch_size": batch},
        "optimizer": {"lr": RATES[batch]},
        "protection": {"bands": bands},
    }
    return RowPlan(config=config, grid={}, epsilons=EPSILONS)


PLACES = {
    row_name(batch, bands): (batch, bands) for batch in RATES for bands in BANDS if bands * batch <= RECORDS
}
TABLE = TunedRows(
    module=MODULE,
    name=NAME,
    folder=Path("runs/private_accuracy_bands"),
    base=BASE,
    rows={name: _plan(*place) for name, place in PLACES.items()},
    seeds=(0, 1, 2, 3, 4),
    measured={"data": {"validation_fraction": 0.0}},
)


def _cell_name(row: str, epsilon: float) -> str:
    return f"{row}, epsilon {epsilon:g}"


def validation(row: str, epsilon: float) -> float | None:
    """Return the accuracy of a trial on held-out records, per cent, or None if it was not made."""
    for trial in load_results(NAME).get("trials", []):
        if (trial["row"], trial["epsilon"]) == (row, epsilon):
            return float(trial["validation"])
    return None


def chosen(epsilon: float) -> tuple[str, ...]:
    """Return the best row of independent noise and the best one of correlated noise, on held-out records."""
    found = {row: validation(row, epsilon) for row in PLACES}
    known = {row: value for row, value in found.items() if value is not None}
    best = []
    for correlated in (False, True):
        rows = [row for row in known if (PLACES[row][1] > 1) == correlated]
        best += [max(rows, key=lambda row: known[row])] if rows else []
    return tuple(best)


@cache
def noise_left(batch: int, bands: int, epsilon: float) -> float:
    """Return the root mean square of calibrated noise in the parameters over the run, in units of its own."""
    q = batch / RECORDS
    steps, optimizer = EPOCHS * max(1, round(1 / q)), OptimizerConfig(**BASE["optimizer"], lr=RATES[batch])
    c = banded_coefficients(bands, steps, optimizer) if bands > 1 else (1.0,)
    run = RecordCentral(
        noise_multiplier=2.0,
        sampling_probability=q,
        clip_norm=1.0,
        divisor=1.0,
        steps=steps,
        correlation=c,
    )
    multiplier = calibrate_noise(run, target_epsilon=epsilon, delta=DELTA)[0].noise_multiplier
    left = scipy.signal.lfilter([1.0], c, weights_of_gradients(steps, optimizer)[:, ::-1], axis=1)
    return multiplier * float(np.linalg.norm(left))


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results.get("predicted"):
        return ""
    cells = {(cell["row"], cell["epsilon"]): cell for cell in results.get("cells", [])}
    rows = []
    for row in PLACES:
        for epsilon in EPSILONS:
            cell, found = cells.get((row, epsilon)), validation(row, epsilon)
            left = results["predicted"].get(_cell_name(row, epsilon))
            if cell is found is left is None:
                continue
            rows.append(
                (
                    *map(str, PLACES[row]),
                    f"{epsilon:g}",
                    "-" if left is None else f"{left:.3f}",
                    "-" if found is None else f"{found:.2f}",
                    "-" if cell is None else shown_accuracy(cell),
                )
            )
    names = ("batch", "bands", "epsilon", "noise in the parameters", "validation [%]", "test [%]")
    text = (
        f"A linear model on the pixels of FashionMNIST, {EPOCHS} epochs ({results['date']}, "
        f"{command(MODULE, 'predict')}, then `tune` and `measure`). Noise in the parameters: its root mean square over "
        "the run as the accountant and the factorisation predict it, over that of independent noise at the same "
        "epsilon and batch. Validation: one seed, 10 % of the training records held out, so an accuracy has a standard "
        "error of 0.5 points. Test: mean of the seeds and its standard error, for the best batch of independent noise "
        "and the best batch and number of bands above 1, chosen on the validation records; the choice is not paid for. "
        "A dash stands for a run that was not made yet."
    )
    return section("Correlated noise", text, markdown(names, rows))


app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def predict() -> None:
    """Compute the noise in the parameters of every row that lacks it."""
    for epsilon in EPSILONS:
        for row, place in PLACES.items():
            known, name = load_results(NAME).get("predicted", {}), _cell_name(row, epsilon)
            if name not in known:
                found = noise_left(*place, epsilon) / noise_left(place[0], 1, epsilon)
                _save(predicted={**known, name: found})
                print(f"{name}: {found:.3f}", flush=True)


@app.command()
def tune(rows: str = "", epsilon: float = 0.0) -> None:
    """Make one run for each row and epsilon, the largest epsilon first."""
    for each in EPSILONS:
        if epsilon in (0.0, each):
            for row in PLACES:
                if rows in row and validation(row, each) is None:
                    trial = TABLE.run_once(row, each, {}, TABLE.tuning_seed)
                    kept = ("row", "epsilon", "validation", "seconds")
                    _save(trials=[*load_results(NAME).get("trials", []), {key: trial[key] for key in kept}])
                    print(f"{row}, {each:g}: {trial['validation']:.2f}", flush=True)


@app.command()
def measure(epsilon: float = 0.0, seeds: int = len(TABLE.seeds)) -> None:
    """Train the chosen rows with the first of the other seeds and look at the test set."""
    runs = [run for run in load_results(NAME).get("runs", []) if run["row"] in chosen(run["epsilon"])]
    for each in EPSILONS:
        for seed in TABLE.seeds[:seeds]:
            for row in chosen(each) if epsilon in (0.0, each) else ():
                if (row, each, seed) not in [(run["row"], run["epsilon"], run["seed"]) for run in runs]:
                    runs.append(TABLE.run_once(row, each, {}, seed))
                    _save(runs=runs, cells=TABLE.cells_of(runs))
                    print(f"{row}, {each:g}, seed {seed}: {runs[-1]['test']:.2f}", flush=True)


def _save(**parts: Any) -> None:
    kept = load_results(NAME)
    known = {key: kept[key] for key in ("predicted", "trials", "runs", "cells") if key in kept}
    save_results(NAME, {"configuration": BASE, **known, **parts})


if __name__ == "__main__":
    app()
