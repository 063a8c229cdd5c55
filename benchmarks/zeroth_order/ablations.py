"""What do records, clip, batch and steps change (Tables 7, 8, 9, 11, 15, 19, 20 and Figure 6 of the DP-ZO paper)?

A head on frozen embeddings learns SST-2 sentences (`sst2_head.py`), in batches of 16 and 10,000 steps unless they are
studied. `records`: 250 to 6,920 (all) training sentences, Gaussian noise at epsilon 1, Laplace noise at pure epsilon 4,
and DP-SGD at epsilon 1; and without privacy, which is without noise and clip, on shuffled batches, as in the paper.
`clip`: C from 0.01 to 1 at sigma = 15.9. `batch` and `steps`: epsilon 1. Rate and clip (C = 0.01; the paper's is 0.05)
are those that `sst2_head` chose at 1,000 sentences and epsilon 1; they are not chosen again. The rate without privacy
is the best of `FREE_RATES` at 1,000 sentences, with three other seeds, on training sentences that these leave out.
Draws docs/zo_figure6.png.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.options import listed
from benchmarks.results_file import load_results, save_results
from benchmarks.zeroth_order.sentences import embeddings
from benchmarks.zeroth_order.sst2_head import PILOTS, accuracy, dp_sgd, least_noise, spread, zo_head, zo_rate
from opusim.randomness.streams import SeededStream, derive_seed
from opusim.training.data.samplers import make_sampler
from opusim.training.engine.algorithm import Trainer
from opusim.training.networks.functions import LOSS_VALUES
from opusim.training.networks.optimizers import set_learning_rate
from opusim.training.runs.drawing import new_figure, save_figure, style

MODULE, NAME = "benchmarks.zeroth_order.ablations", "zo_ablations"
SEEDS, FACTOR, CLIP, RATE, POINTS = (0, 1, 2), 1.0, 0.01, 0.3, 20
FREE_RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
DELTA, EPSILON, PURE_EPSILON, SIGMA = 1e-5, 1.0, 4.0, 15.9
PICTURE = Path(__file__).parents[2] / "docs" / "zo_figure6.png"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training: its study, the law of its noise, its sizes.

    Attributes:
        law: "gaussian", "laplace" (pure epsilon), "none" (no privacy: no noise and an infinite clip) or "dp-sgd".
        noise: The noise in units of the clip; None for the least that reaches epsilon.
    """

    study: str
    law: str = "gaussian"
    records: int = 1000
    batch: int = 16
    steps: int = 10_000
    clip: float = CLIP
    noise: float | None = None

    @property
    def key(self) -> str:
        return f"{self.study}, {self.law}, n {self.records}, C {self.clip:g}, batch {self.batch}, {self.steps} steps"

    def multiplier(self) -> float:
        """Return the noise in units of the clip."""
        if self.noise is not None:
            return self.noise
        if self.law == "none":
            return 0.0
        epsilon, delta = (PURE_EPSILON, 0.0) if self.law == "laplace" else (EPSILON, DELTA)
        sizes = {"batch": self.batch, "steps": self.steps, "records": self.records}
        return least_noise(self.law, epsilon, delta=delta, **sizes)


LAWS = {
    "gaussian": "DP-ZO, Gaussian noise",
    "laplace": "DP-ZO, Laplace noise",
    "dp-sgd": "DP-SGD",
    "none": "ZO, no privacy",
}
COLUMNS = {
    "records": "n = {0.records:,}",
    "clip": "C = {0.clip:g}",
    "batch": "batch {0.batch}",
    "steps": "{0.steps:,} steps",
}
"""What a study's cells are told apart by."""
CELLS = (
    *(Cell(study="clip", clip=clip, noise=SIGMA) for clip in (1.0, 0.1, 0.05, 0.01)),
    *(Cell(study="records", records=n) for n in (250, 500, 1000, 5000, 6920)),
    *(Cell(study="records", law="none", records=n, clip=math.inf) for n in (250, 500, 1000, 5000, 6920)),
    *(Cell(study="records", law="laplace", records=n, batch=20, steps=2000) for n in (1000, 5000)),
    *(
        Cell(study="records", law="dp-sgd", records=n, batch=64, steps=200)
        for n in (250, 500, 1000, 5000, 6920)
    ),
    *(Cell(study="batch", batch=batch) for batch in (16, 32, 64, 128)),
    *(Cell(study="steps", steps=steps) for steps in (10_000, 20_000, 40_000, 80_000)),
)


FREE = Cell(study="records", law="none", clip=math.inf)
"""With which the rate without privacy is chosen."""


def make(cell: Cell, rate: float | None, seed: int) -> tuple[Trainer, Any]:
    """Return the trainer, and the configuration of its learning rate, which follows the noise if none is given."""
    stream, noise = SeededStream(seed, "central-noise"), cell.multiplier()
    if cell.law == "dp-sgd":
        return dp_sgd(noise, RATE, stream, batch=cell.batch)
    if rate is None:
        rate = zo_rate(FACTOR, spread(cell.law, noise, cell.clip), batch=cell.batch, steps=cell.steps)
    return zo_head(cell.law, noise, cell.clip, rate, seed, cell.batch)


def trained(
    cell: Cell, seed: int, data: dict[str, tuple[Tensor, Tensor]], rate: float | None = None
) -> dict[str, Any]:
    """One training: accuracy on dev and test, of a pilot seed on the other sentences; the training loss; seconds."""
    trainer, optimizer = make(cell, rate, seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data["train"][1])))
    x, y = (part[order[: cell.records]] for part in data["train"])
    others = tuple(part[order[cell.records :]] for part in data["train"])
    scheme = "shuffled-epochs" if cell.law == "none" else "poisson"
    sampler = make_sampler(scheme, cell.records, cell.batch, derive_seed(seed, "batches"))
    started, losses = time.process_time(), []
    for step in range(cell.steps):
        index = sampler.indices(step)
        set_learning_rate(trainer.optimizer, optimizer, step / cell.steps)
        trainer.step(x[index], y[index], step=step, observe=False, records=index)
        if (step + 1) % (cell.steps // POINTS) == 0:
            with torch.no_grad():
                losses.append(round(float(LOSS_VALUES["cross-entropy"](trainer.model(x), y).mean()), 4))
    looked_at = others if seed in PILOTS else data["dev+test"]
    figures = {"accuracy": 100 * accuracy(trainer.model, *looked_at), "losses": losses}
    return {**figures, "seconds": round(time.process_time() - started, 1)}


def free_rate(data: dict[str, tuple[Tensor, Tensor]]) -> float:
    """Return the best learning rate without privacy, of those that are tried once and kept."""
    for rate in FREE_RATES:
        results = load_results(NAME)
        pilots = results.get("pilots", {})
        if f"{rate:g}" not in pilots:
            found = [trained(FREE, seed, data, rate)["accuracy"] for seed in PILOTS]
            pilots = {**pilots, f"{rate:g}": statistics.fmean(found)}
            save_results(NAME, {"pilots": pilots, "cells": results.get("cells", {})})
            print(f"no privacy, rate {rate:g}: {pilots[f'{rate:g}']:.1f} % held out", flush=True)
    return max(FREE_RATES, key=lambda rate: float(pilots[f"{rate:g}"]))


def main(study: str = "") -> None:
    """Do what is not done yet, of one study or of all, and save after each training."""
    studies = listed("--study", study, tuple(dict.fromkeys(cell.study for cell in CELLS)))
    torch.set_num_threads(1)
    data = {"train": embeddings("train"), "dev+test": embeddings("dev", "test")}
    for cell in (each for each in CELLS if each.study in studies):
        for seed in SEEDS:
            if str(seed) not in load_results(NAME).get("cells", {}).get(cell.key, {}):
                run = trained(cell, seed, data, free_rate(data) if cell.law == "none" else None)
                print(f"{cell.key}, seed {seed}: {run['accuracy']:.1f} %", flush=True)
                results = load_results(NAME)
                cells = results.get("cells", {})
                cells = {**cells, cell.key: {**cells.get(cell.key, {}), str(seed): run}}
                save_results(NAME, {"pilots": results.get("pilots", {}), "cells": cells})
    if "records" in studies:
        draw()


def draw() -> None:
    """Draw the mean training loss by steps, a colour for each number of records, dashed without privacy."""
    figure, axes = new_figure()
    counts = sorted({cell.records for cell, _ in accuracies("records")})
    for cell, _ in accuracies("records"):
        if cell.law in ("gaussian", "none"):
            values = losses(cell)
            axes.plot(
                [cell.steps * (at + 1) / len(values) for at in range(len(values))],
                values,
                color=style(counts.index(cell.records))["color"],
                linestyle="-" if cell.law == "gaussian" else "--",
                label=f"n = {cell.records:,}" if cell.law == "gaussian" else None,
            )
    axes.set(xlabel="step (solid: epsilon 1, dashed: no privacy)", ylabel="training loss")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, PICTURE)


def losses(cell: Cell) -> list[float]:
    """Return the mean training loss of a cell's runs, at `POINTS` equally spaced steps."""
    runs = load_results(NAME)["cells"][cell.key].values()
    return [statistics.fmean(values) for values in zip(*(run["losses"] for run in runs), strict=True)]


def accuracies(study: str) -> list[tuple[Cell, list[float]]]:
    """Return the cells of a study that were trained, with their accuracies in per cent."""
    found = load_results(NAME).get("cells", {})
    return [
        (cell, [run["accuracy"] for run in found[cell.key].values()])
        for cell in CELLS
        if cell.study == study and cell.key in found
    ]


def by_column(
    study: str, laws: Sequence[str], records: Sequence[int] | None = None
) -> dict[tuple[str, str], list[float]]:
    """Return a study's accuracies in per cent by law of noise and column; of some numbers of records, or all."""
    return {
        (cell.law, COLUMNS[study].format(cell)): values
        for cell, values in accuracies(study)
        if cell.law in laws and (records is None or cell.records in records)
    }


def loss_curves() -> dict[int, list[float]]:
    """Return the mean training losses under Gaussian noise by records."""
    cells = [cell for cell, _ in accuracies("records") if cell.law == "gaussian"]
    return {cell.records: losses(cell) for cell in cells}


if __name__ == "__main__":
    typer.run(main)
