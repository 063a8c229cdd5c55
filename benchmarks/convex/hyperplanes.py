"""How many hyperplanes does MNIST take (Figures 4 and 5 of the convex paper)?

Accuracy by epochs of the convex model with P = 16 to 512 hyperplanes and of a ReLU network of width 200, cross-entropy,
SGD without momentum, batches of 1,000: without noise and clip (Figure 4), and by Poisson DP-SGD with a clip of 1 at
sigma = 5 and 15 (Figure 5; sigma is the multiplier here). Two products of size records x features x (10 P) fill a step,
so P and the epochs set the time. For each noise, the learning rates of the network and of the convex model (at P = 64,
for all P) are chosen from `RATES`, the paper's grid of half powers of ten, by the accuracy on 6,000 held-out training
records, with another seed. Accuracy is that on the held-out records after each epoch, and on the test records at the
end; three seeds. The curves are drawn in docs/convex_hyperplanes.png.
"""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import typer

from benchmarks.convex.rows import BASE, ROWS
from benchmarks.options import listed, seeds_of
from benchmarks.results_file import keep_row, rows_of
from benchmarks.runs import train_or_read
from opusim.description.section import merged
from opusim.training.runs.drawing import save_figure, style

MODULE, NAME, FOLDER = "benchmarks.convex.hyperplanes", "convex_hyperplanes", Path("runs/convex-hyperplanes")
COUNTS, NOISES, EPOCHS, SEEDS = (16, 32, 64, 128, 256, 512), (0.0, 5.0, 15.0), 20, (0, 1, 2)
CONVEX, NETWORK = "convex, Poisson DP-SGD", "ReLU network, DP-SGD"
RATES = {
    CONVEX: (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0),
    NETWORK: (0.03, 0.1, 0.3, 1.0, 3.0),
}
SEARCHED, SEARCH_SEED = {CONVEX: 64, NETWORK: None}, 100
"""Hyperplanes, and the seed, with which the rates are chosen."""
CLIP = 1.0
KEYS = ("row", "hyperplanes", "noise", "rate", "epochs", "seed")
Case = tuple[str, int | None, float, float, int, int]
PICTURE = Path(__file__).parents[2] / "docs" / "convex_hyperplanes.png"


def configuration(
    row: str, hyperplanes: int | None, noise: float, rate: float, epochs: int, seed: int
) -> dict[str, Any]:
    """Return the configuration of one curve."""
    config = merged(merged(BASE, ROWS[row].config), {"seed": seed, "epochs": epochs})
    config = merged(config, {"data": {"name": "mnist", "validation_fraction": 0.1}})
    config = merged(config, {"optimizer": {"lr": rate, "momentum": 0.0}, "sampler": {"batch_size": 1000}})
    if hyperplanes is not None:
        clip = CLIP if noise else None
        config = merged(
            config, {"trainer": {"hyperplanes": hyperplanes, "objective": "softmax", "clip": clip}}
        )
    if noise:
        protection = {"noise_multiplier": noise} | ({"clip_norm": CLIP} if hyperplanes is None else {})
        return merged(config, {"protection": protection})
    config["protection"] = {"kind": "none"}
    config["sampler"] = {"batch_size": 1000}
    return config


def main(
    noise: str = ",".join(f"{value:g}" for value in NOISES),
    epochs: int = EPOCHS,
    largest: int = COUNTS[-1],
    seeds: str = ",".join(map(str, SEEDS)),
) -> None:
    """Choose rates, train what is missing, the smallest models first, save each curve as it ends, and draw."""
    cases = [*((CONVEX, p) for p in COUNTS if p <= largest), (NETWORK, None)]
    levels = listed("--noise", noise, NOISES)
    for level, (row, hyperplanes) in itertools.product(levels, SEARCHED.items()):
        for rate in RATES[row]:
            keep("rates", (row, hyperplanes, level, rate, epochs, SEARCH_SEED))
    for seed, (row, hyperplanes), level in itertools.product(seeds_of(seeds), cases, levels):
        rate = rate_of(row, level, epochs)
        if rate is not None:
            keep("curves", (row, hyperplanes, level, rate, epochs, seed))
    draw(epochs)


def keep(part: str, case: Case) -> None:
    """Train a case and add its figures to a part of the results, unless they stand there."""
    cell = dict(zip(KEYS, case, strict=True))
    if rows_of(NAME, part, **cell):
        return
    tag = "-".join(f"{value}" for value in case).replace(", ", "-").replace(" ", "-")
    run = train_or_read(configuration(*case), FOLDER / tag)
    figures: dict[str, Any] = {
        "held_out": [round(100 * record["validation_accuracy"], 2) for record in run.metrics]
    }
    if part == "curves":
        figures["test"] = 100 * (run.summary or {})["test_accuracy"]
    keep_row(NAME, cell, part, **figures)


def rate_of(row: str, noise: float, epochs: int) -> float | None:
    """Return the rate with the best held-out accuracy at the end; None before all were tried."""
    trials = rows_of(NAME, "rates", row=row, noise=noise, epochs=epochs)
    found = {trial["rate"]: trial["held_out"][-1] for trial in trials}
    return max(found, key=lambda rate: found[rate]) if set(RATES[row]) <= set(found) else None


def cells(epochs: int) -> dict[tuple[float, int | None], list[dict[str, Any]]]:
    """Return the curves with the chosen rates of all seeds by noise and hyperplanes, None for the network.

    The smallest models come first.
    """
    found: dict[tuple[float, int | None], list[dict[str, Any]]] = {}
    curves = rows_of(NAME, "curves", epochs=epochs)
    rates = {cell: rate_of(*cell, epochs) for cell in {(curve["row"], curve["noise"]) for curve in curves}}
    for curve in curves:
        if curve["rate"] == rates[curve["row"], curve["noise"]]:
            found.setdefault((curve["noise"], curve["hyperplanes"]), []).append(curve)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1] or math.inf)))


def ends() -> dict[tuple[float, int | None], list[float]]:
    """Return the test accuracies at the end of the curves by noise and hyperplanes, None for the network."""
    return {cell: [curve["test"] for curve in curves] for cell, curves in cells(EPOCHS).items()}


def rises() -> str:
    """Say at how many doublings of the hyperplanes the accuracy without noise rises."""
    found = ends()
    means = [statistics.fmean(found[0.0, p]) for p in COUNTS if (0.0, p) in found]
    rising = [more > fewer for fewer, more in itertools.pairwise(means)]
    return f"{sum(rising)} of {len(rising)}"


def draw(epochs: int) -> None:
    """Draw the held-out accuracy by epoch, a panel for each noise level, the mean of the seeds."""
    from matplotlib.figure import Figure

    found = cells(epochs)
    noises = list(dict.fromkeys(noise for noise, _ in found))
    figure = Figure(figsize=(4 * len(noises), 3.8), layout="constrained")
    for axes, noise in zip(figure.subplots(1, len(noises), squeeze=False)[0], noises, strict=True):
        for (level, hyperplanes), curves in found.items():
            if level == noise:
                number = len(COUNTS) if hyperplanes is None else COUNTS.index(hyperplanes)
                mean = np.mean([curve["held_out"] for curve in curves], axis=0)
                label = "ReLU network" if hyperplanes is None else f"P = {hyperplanes}"
                axes.plot(range(1, len(mean) + 1), mean, label=label, **(style(number) | {"markersize": 3}))
        axes.set(xlabel="epoch", title=f"sigma = {noise:g}" if noise else "without noise")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("held-out accuracy [%]")
    figure.axes[-1].legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, PICTURE)


if __name__ == "__main__":
    typer.run(main)
