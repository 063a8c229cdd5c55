"""Where does zeroth-order training fail? MNIST from scratch: a fully connected network of 110 thousand parameters.

A step along a random direction sees one of the gradient's 110,000 coordinates' worth of information, so from random
weights progress is slow, with noise or without; a pretrained model needs few directions, these weights need them all.
784-128-64-10 with tanh, batches of 256 (expected, Poisson), so many epochs for all: zeroth order without privacy and at
epsilon 4, backpropagation, and backpropagation with clipped records and noise (DP-SGD) at epsilon 4, delta 1e-5. The
rates are the best of a few for seed 0, whose runs count too. Runs are kept in benchmarks/results/cache.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.markdown import command, markdown, section, with_error
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from benchmarks.zeroth_order.sentences import CACHE
from opusim.tables import print_table

MODULE = "benchmarks.zeroth_order.mnist"
NAME, EPOCHS = "zo_mnist", 10
RATES = {
    "zo": (1e-3, 3e-3, 1e-2),
    "zo, epsilon 4": (1e-3, 3e-3, 1e-2),
    "bp": (0.1,),
    "dp-sgd, epsilon 4": (0.5,),
}


def config(method: str, rate: float, seed: int) -> dict[str, Any]:
    kind = "zo" if method.startswith("zo") else "bp"
    protection: dict[str, Any] = {"kind": "record", "epsilon": 4.0} if "epsilon" in method else {}
    return {
        "epochs": EPOCHS,
        "seed": seed,
        "threads": 1,
        "data": {"name": "mnist"},
        "model": {"hidden": [128, 64]},
        "sampler": {"scheme": "poisson", "batch_size": 256},
        "trainer": {"kind": kind} | ({"perturbation": 1e-3} if kind == "zo" else {}),
        "optimizer": {"lr": rate, "momentum": 0.0},
        "protection": protection,
        "checkpoint": {"keep": 1},
    }


def accuracy(method: str, rate: float, seed: int) -> dict[str, float]:
    folder = CACHE / "zo-mnist" / f"{method.replace(', ', '-').replace(' ', '-')}-{rate:g}-{seed}"
    run = train_or_read(config(method, rate, seed), folder)
    summary = run.summary or {}
    return {"validation": summary["validation_accuracy"], "test": summary["test_accuracy"]}


def measure(results: dict[str, Any], seeds: int) -> None:
    for method, rates in RATES.items():
        cell = results.setdefault(method, {})
        for rate in rates:
            cell.setdefault(f"{rate:g}, seed 0", None)
            cell[f"{rate:g}, seed 0"] = cell[f"{rate:g}, seed 0"] or accuracy(method, rate, 0)
            save_results(NAME, {"epochs": EPOCHS, "cells": results})
        best = max(rates, key=lambda rate: cell[f"{rate:g}, seed 0"]["validation"])
        for seed in range(1, seeds):
            cell.setdefault(f"{best:g}, seed {seed}", None)
            cell[f"{best:g}, seed {seed}"] = cell[f"{best:g}, seed {seed}"] or accuracy(method, best, seed)
            save_results(NAME, {"epochs": EPOCHS, "cells": results})


COLUMN_NAMES = ("method", "rate", "test accuracy [%]", "seeds")


def table_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A method a row, at its best rate."""
    rows: list[tuple[str, ...]] = []
    for method, rates in RATES.items():
        cell = {key: value for key, value in results.get(method, {}).items() if value}
        begun = [rate for rate in rates if f"{rate:g}, seed 0" in cell]
        if not begun:
            continue
        best = max(begun, key=lambda rate: cell[f"{rate:g}, seed 0"]["validation"])
        tests = [100 * value["test"] for key, value in cell.items() if key.startswith(f"{best:g},")]
        rows.append((method, f"{best:g}", with_error(tests, ".1f"), str(len(tests))))
    return rows


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    rows = table_rows(results.get("cells", {}))
    text = (
        f"784-128-64-10 from random weights, {results.get('epochs')} epochs, batches of 256; mean of seeds and "
        f"standard error ({results.get('date')}, {command(MODULE, 'measure')})."
    )
    title = "Where zeroth order fails: MNIST from scratch"
    return section(title, text, markdown(COLUMN_NAMES, rows)) if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "show"], nargs="?", default="show")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    results = load_results(NAME).get("cells", {})
    if options.what == "measure":
        measure(results, options.seeds)
    print_table(f"MNIST from scratch, {EPOCHS} epochs", COLUMN_NAMES, table_rows(results))


if __name__ == "__main__":
    main()
