"""What does differential privacy cost a small GPT: DP-SGD, and photonic feedback alignment under the same protection?

Tiny Shakespeare from $OPUSIM_DATA as bytes; a record is a stretch of 65 bytes, and the last tenth is held out. Three of
nanoGPT's blocks (`benchmarks.known_models.gpt`) of width 96 by `opusim.train`: Adam at nanoGPT's rate, Poisson batches
of 256 expected records, 5 epochs, `protection.kind = "record"` with its defaults and the epsilon of the row at delta
1e-5. Nothing was tuned.

    OPUSIM_DATA=... python -m benchmarks.known_models.private    (resumes; some 10 minutes of a core a run)
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.known_models.gpt import GPT, RATE, SMALL
from benchmarks.options import seeds_of
from benchmarks.results_file import FOLDER, load_results, save_results
from benchmarks.runs import train_or_read

MODULE, NAME = "benchmarks.known_models.private", "known_private"
SETTING = dataclasses.replace(SMALL, layers=3, width=96)
TRAINERS, EPSILONS = ("bp", "pdfa"), (None, 8.0, 3.0)
SEEDS, EPOCHS, BATCH, DELTA = 3, 5, 256, 1e-5


def configuration(trainer: str, epsilon: float | None, seed: int) -> dict[str, Any]:
    """Return the configuration of a run; epsilon None for no protection."""
    text = Path(os.environ.get("OPUSIM_DATA", "data")) / "tinyshakespeare" / "input.txt"
    private = {"kind": "record", "epsilon": epsilon, "delta": DELTA}
    return {
        "trainer": {"kind": trainer},
        "data": {"name": f"text:{text}", "context": SETTING.context},
        "sampler": {"scheme": "poisson", "batch_size": BATCH},
        "protection": {"kind": "none"} if epsilon is None else private,
        "optimizer": {"name": "adam", "lr": RATE},
        "epochs": EPOCHS,
        "seed": seed,
        "threads": 1,
    } | ({"device": {"name": "gaussian"}} if trainer == "pdfa" else {})


def figures(trainer: str, epsilon: float | None, seed: int) -> dict[str, Any]:
    """Train a run, or read it, and return its losses on held-out text, epoch by epoch, and what it states."""
    torch.manual_seed(seed)
    path = FOLDER / "cache" / "known-models" / f"{NAME}-{trainer}-{epsilon or 'plain'}-{seed}"
    run = train_or_read(configuration(trainer, epsilon, seed), path, model=GPT(SETTING, 256))
    guarantee = None if epsilon is None else run.guarantees[0]
    return {
        "validation": [epoch["validation_loss"] for epoch in run.metrics if "validation_loss" in epoch],
        "epsilon": None if guarantee is None else guarantee.epsilon,
        "status": None if guarantee is None else guarantee.status.value,
    }


def runs_of(results: dict[str, Any], trainer: str, epsilon: float | None) -> list[dict[str, Any]]:
    """Return the finished runs of a trainer and epsilon, seed by seed."""
    found = (results["runs"].get(f"{trainer}, {epsilon}, seed {seed}") for seed in range(SEEDS))
    return [run for run in found if run]


def main(
    seeds: Annotated[str, typer.Option(help="Seeds of the runs, separated by commas.")] = "0,1,2",
) -> None:
    """Train every run that the results lack; runs that were begun resume."""
    results = load_results(NAME) or {"runs": {}}
    for seed, epsilon, trainer in itertools.product(seeds_of(seeds), EPSILONS, TRAINERS):
        key = f"{trainer}, {epsilon}, seed {seed}"
        if key not in results["runs"]:
            results["runs"][key] = figures(trainer, epsilon, seed)
            save_results(NAME, results)
            print(f"{key}: {results['runs'][key]['validation'][-1]:.3f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
