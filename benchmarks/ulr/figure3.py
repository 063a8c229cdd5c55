"""How do accuracy and the formulas' epsilon grow with the epochs (Figure 3 of the DP-ULR paper)?

MNIST, sigma_0 = 1, 4, 8 and batches of 64, 200, 500, means of the seeds of `benchmarks.ulr.table1`. Above: accuracy on
the training records, over the epoch for DP-ULR and after it for DP-SGD. Below: what the paper's eq. 11 and the Renyi
accountant of Poisson-sampled DP-SGD give for the epochs so far at delta 1e-5, whether their conditions hold or not,
with N_B = q N in eq. 11 (less lowers its first term). Neither is a guarantee of these runs, whose batches are shuffled
(docs/forward-only.md). Draws docs/ulr_figure3.png.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting import rdp

from benchmarks.results_file import rows_of
from benchmarks.ulr.table1 import EPOCHS
from opusim.accounting.mechanisms.ulr import PublishedUlr, published_value
from opusim.training.runs.drawing import save_figure, style

TARGETS, BATCHES, DELTA = (1.0, 4.0, 8.0), (64, 200, 500), 1e-5
N_RECORDS, MODULES, LARGEST_MODULE = 60_000, 4, 785 * 128
PICTURE = Path(__file__).parents[2] / "docs" / "ulr_figure3.png"


def ulr_epsilon(batch: int, target: float, epochs: int, *, rejected: bool = True) -> float:
    """Eq. 11 after some epochs, its conditions left aside; unless `rejected`, in effect its second term only."""
    run = PublishedUlr(
        target_std=target,
        sampling_probability=batch / N_RECORDS,
        n_records=N_RECORDS,
        min_batch_size=batch if rejected else 1,
        modules=MODULES,
        largest_module=LARGEST_MODULE,
        steps=epochs * (N_RECORDS // batch),
    )
    return published_value([run], DELTA, checked=False)


def dp_sgd_epsilon(batch: int, target: float, epochs: int) -> float:
    """The Renyi accountant's epsilon of DP-SGD on Poisson batches of that mean size."""
    step = dp.PoissonSampledDpEvent(batch / N_RECORDS, dp.GaussianDpEvent(target))
    accountant = rdp.RdpAccountant().compose(step, epochs * (N_RECORDS // batch))
    return float(accountant.get_epsilon(DELTA))


def curve(part: str, batch: int, target: float) -> list[float]:
    """Return the mean training accuracy of a cell, epoch by epoch; empty where it was not trained."""
    runs = [row["train_curve"] for row in rows_of(f"ulr_{part}", batch=batch, target_std=target)]
    return [statistics.fmean(values) for values in zip(*runs, strict=True)]


def ratios_at_end() -> tuple[list[float], list[float]]:
    """Return the formula's epsilon at the end over that of its second term, and over the Renyi accountant's."""
    cells = list(itertools.product(BATCHES, TARGETS))
    formula = [ulr_epsilon(*cell, EPOCHS) for cell in cells]
    second = [ulr_epsilon(*cell, EPOCHS, rejected=False) for cell in cells]
    accounted = [dp_sgd_epsilon(*cell, EPOCHS) for cell in cells]
    first, last = ([a / b for a, b in zip(formula, other, strict=True)] for other in (second, accounted))
    return first, last


def fallen(part: str) -> set[tuple[int, float]]:
    """Return the cells whose curve ends more than a point below its best epoch."""
    cells = itertools.product(BATCHES, TARGETS)
    return {cell for cell in cells if (values := curve(part, *cell)) and max(values) - values[-1] > 1}


def draw() -> None:
    """Two rows of panels, one column for each sigma_0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, len(TARGETS), sharex=True, sharey="row")
    for column, target in enumerate(TARGETS):
        _accuracies(axes[0][column], target)
        _epsilons(axes[1][column], target)
        axes[0][column].set_title(f"sigma_0 = {target:g}")
        axes[1][column].set_xlabel("epoch")
    axes[0][0].set_ylabel("training accuracy [%]")
    axes[1][0].set_ylabel("formula's epsilon at delta 1e-5")
    axes[0][0].legend(frameon=False, fontsize=8)
    save_figure(figure, PICTURE)


def _accuracies(axes: Any, target: float) -> None:
    for number, batch in enumerate(BATCHES):
        look = style(number)
        for part, name, line in (("published", "DP-ULR", "-"), ("opacus", "DP-SGD", "--")):
            values, label = curve(part, batch, target), f"{name}, batch {batch}"
            epochs = np.arange(1, len(values) + 1)
            axes.plot(epochs, values, color=look["color"], linestyle=line, label=label)


def _epsilons(axes: Any, target: float) -> None:
    epochs = np.arange(1, EPOCHS + 1)
    for number, batch in enumerate(BATCHES):
        for epsilon, line in ((ulr_epsilon, "-"), (dp_sgd_epsilon, "--")):
            values = [epsilon(batch, target, int(e)) for e in epochs]
            axes.plot(epochs, values, color=style(number)["color"], linestyle=line)
    axes.set_yscale("log")


if __name__ == "__main__":
    draw()
