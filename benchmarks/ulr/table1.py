"""Does DP-ULR repeat Table 1 of its paper on MNIST, and what does its proven form reach at the epsilon of DP-SGD?

784-128-64-32-10 GELU, cross-entropy, 25 epochs, Adam, C = 1, the rate lowered by 0.85 every ten epochs; batches of 64,
200, 500 and sigma_0 of 0.5, 1, 2, 4, 8, three seeds. Required: within two points of the paper's accuracy on the 10,000
test images (its "valid acc."), or above it. Batches are shuffled, as in the paper; its remedy is extra noise (appendix
A.4). It states neither sigma nor K. Here K = 30, and `search` tries sigma and the learning rate with one other seed on
54,000 records, in one cell of each batch size: pairs for 5 epochs, then the two that were best on average for all 25.
For the batch of 64 three slower ones were added once its first cells were seen to fall short of the paper. A batch size
takes the pair with the best accuracy on the 6,000 other records.

`published` and `opacus` train the cells (DP-SGD by Opacus as in the paper: SGD, learning rate 0.1, which falls as
above, batches of a fixed size). The paper puts GELU behind each of its four layers; here the last one has none.
`proven` trains the form whose guarantee is proven, clipped records and central noise on Poisson batches, at the proven
epsilon of DP-SGD (trainer bp with the same protection). Each trains the cells that the results lack, and resumes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.markdown import compared, with_error
from benchmarks.options import listed, program, seeds_of
from benchmarks.results_file import keep_row, rows_of, selected
from benchmarks.runs import train_or_read
from benchmarks.speed.steps import ghost_training, paper_model
from opusim.training.data import load_dataset
from opusim.training.data.samplers import ShuffledEpochsSampler
from opusim.training.runs.run import evaluate_split

MODULE, FOLDER = "benchmarks.ulr.table1", Path("runs/ulr-table1")
PAPER = {
    (64, 0.5): (86.12, 94.14), (64, 1.0): (82.73, 91.20), (64, 2.0): (78.80, 78.32),
    (64, 4.0): (72.14, 68.73), (64, 8.0): (58.65, 32.07),
    (200, 0.5): (91.98, 90.68), (200, 1.0): (90.11, 90.77), (200, 2.0): (87.11, 90.95),
    (200, 4.0): (84.45, 89.63), (200, 8.0): (80.05, 79.14),
    (500, 0.5): (94.19, 87.98), (500, 1.0): (92.04, 87.98), (500, 2.0): (90.31, 88.00),
    (500, 4.0): (87.63, 87.97), (500, 8.0): (84.53, 88.16),
}  # fmt: skip
"""Test accuracy of DP-ULR and of DP-SGD in the paper's Table 1, by batch and sigma_0."""
EPOCHS, COPIES = 25, 30
DECAY, DECAY_EPOCHS = 0.85, 10
SEARCH_SEED, SEARCH_EPOCHS = 100, 5
SEARCH_CELLS = ((500, 0.5), (200, 2.0), (64, 8.0))
SIGMAS, RATES = (0.5, 1.0, 2.0), (0.003, 0.01)
BEST_TWO = ((1.0, 0.003), (2.0, 0.01))
FINALISTS = {500: BEST_TWO, 200: BEST_TWO, 64: (*BEST_TWO, (2.0, 0.003), (1.0, 0.001), (2.0, 0.001))}
"""Pairs of sigma and learning rate that are trained for all epochs, by batch size."""
ROWS_PER_PASS = 4000  # small batches take several copies together
BASE: dict[str, Any] = {
    "epochs": EPOCHS,
    "threads": 1,
    "data": {"name": "mnist", "validation_fraction": 0.0},
    "model": {"hidden": [128, 64, 32], "activation": "gelu"},
}
PROVEN_BATCH, PROVEN_COPIES = 1000, 10
ORTHOGONAL = {"copies": 128, "directions": "orthogonal", "rows_per_pass": 16 * PROVEN_BATCH}
PROVEN_TRAINERS: dict[str, dict[str, Any]] = {
    "ulr": {"kind": "ulr", "copies": PROVEN_COPIES, "sigma": 0.3},
    "ulr, 128 orthogonal": {"kind": "ulr", "sigma": 0.3, **ORTHOGONAL},
    "bp": {"kind": "bp"},
}
WIDTHS = {"small": [128, 64, 32], "medium": [288, 144, 72], "large": [512, 256, 128]}
"""Hidden layers of 1, 2.5 and 5 times the parameters; the paper names only these factors."""

WIDTH_BATCHES = (64, 128, 256)
WIDTHS_PAPER = {
    ("small", 64): (58.65, 32.07), ("medium", 64): (59.53, 43.81), ("large", 64): (41.42, 24.78),
    ("small", 128): (74.24, 70.53), ("medium", 128): (69.00, 67.98), ("large", 128): (67.75, 66.15),
    ("small", 256): (80.94, 86.03), ("medium", 256): (78.48, 84.96), ("large", 256): (78.28, 85.13),
}  # fmt: skip
"""Test accuracy of DP-ULR and of DP-SGD in the paper's Table C1, by width and batch."""
PROVEN_EPSILONS, PROVEN_SEEDS = (3.0, 1.0), (0, 1, 2)


def published_config(batch: int, target: float, seed: int, *, sigma: float, lr: float) -> dict[str, Any]:
    falling = {"schedule": "step", "gamma": DECAY, "step_size": DECAY_EPOCHS / EPOCHS}
    published = {"form": "published", "copies": COPIES, "sigma": sigma, "target_std": target}
    return {
        **BASE,
        "seed": seed,
        "optimizer": {"name": "adam", "lr": lr, **falling},
        "sampler": {"batch_size": batch, "drop_last": True},
        "trainer": {"kind": "ulr", **published, "rows_per_pass": ROWS_PER_PASS},
    }


def proven_config(kind: str, epsilon: float, seed: int) -> dict[str, Any]:
    return {
        **BASE,
        "epochs": 10,
        "seed": seed,
        "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
        "sampler": {"scheme": "poisson", "batch_size": PROVEN_BATCH},
        "trainer": PROVEN_TRAINERS[kind],
        "protection": {"kind": "record", "epsilon": epsilon},
    }


def figures_of(run: Any) -> dict[str, Any]:
    """Accuracy, time and curve of a finished run."""
    return {
        "test": 100 * run.summary["test_accuracy"],
        "train": 100 * run.metrics[-1]["train_accuracy"],
        "train_curve": [round(100 * record["train_accuracy"], 2) for record in run.metrics],
        "seconds": sum(record["wall_s"] for record in run.folder.read_timing()),
        "guarantees": [[g.status.value, str(g.epsilon), g.formula_value] for g in run.guarantees],
    }


def search() -> None:
    """Try sigma and the learning rate on validation records: all pairs for a few epochs, finalists for all of them."""
    for (sigma, lr), cell in itertools.product(itertools.product(SIGMAS, RATES), SEARCH_CELLS):
        try_pair(*cell, sigma=sigma, lr=lr, epochs=SEARCH_EPOCHS)
    for batch, target in SEARCH_CELLS:
        for sigma, lr in FINALISTS[batch]:
            try_pair(batch, target, sigma=sigma, lr=lr, epochs=EPOCHS)


def try_pair(batch: int, target: float, *, sigma: float, lr: float, epochs: int) -> None:
    """Train a cell without its validation records; the rate falls at the same shares of the training."""
    pair = {"batch": batch, "target_std": target, "sigma": sigma, "lr": lr, "epochs": epochs}
    if rows_of("ulr_search", **pair):
        return
    config = published_config(batch, target, SEARCH_SEED, sigma=sigma, lr=lr)
    config |= {"epochs": epochs, "data": {"name": "mnist", "validation_fraction": 0.1}}
    run = train_or_read(config, FOLDER / f"search-{batch}-{target:g}-{sigma:g}-{lr:g}-{epochs}")
    found = 100 * run.metrics[-1]["validation_accuracy"]
    keep_row("ulr_search", pair, validation=found)


def chosen(batch: int) -> dict[str, float]:
    """The setting of a batch size: its finalist with the best validation accuracy.

    Raises:
        ValueError: A finalist was not trained yet.
    """
    rows = rows_of("ulr_search", batch=batch, epochs=EPOCHS)
    found = {(row["sigma"], row["lr"]): row["validation"] for row in rows}
    if not set(FINALISTS[batch]) <= set(found):
        raise ValueError(f"batch {batch}: the search is not complete; run python -m {MODULE} search")
    sigma, lr = max(FINALISTS[batch], key=lambda pair: found[pair])
    return {"sigma": sigma, "lr": lr}


def published(batches: str = "500,200,64", targets: str = "0.5,1,2,4,8", seeds: str = "0,1,2") -> None:
    """Train the cells of DP-ULR."""
    for seed, target, batch in _cells(batches, targets, seeds):
        cell = {"batch": batch, "target_std": target, "seed": seed}
        if rows_of("ulr_published", **cell):
            continue
        setting = chosen(batch)
        config = published_config(batch, target, seed, **setting)
        tag = f"published-{batch}-{target:g}-{seed}-{setting['sigma']:g}-{setting['lr']:g}"
        run = train_or_read(config, FOLDER / tag)
        keep_row("ulr_published", cell, copies=COPIES, **setting, **figures_of(run))


def opacus(batches: str = "500,200,64", targets: str = "0.5,1,2,4,8", seeds: str = "0,1,2") -> None:
    """Train the cells of DP-SGD by Opacus."""
    for seed, target, batch in _cells(batches, targets, seeds):
        cell = {"batch": batch, "target_std": target, "seed": seed}
        if not rows_of("ulr_opacus", **cell):
            keep_row("ulr_opacus", cell, **dp_sgd(batch, target, seed))


def _cells(batches: str, targets: str, seeds: str) -> Iterable[tuple[int, float, int]]:
    """Return seed, sigma_0 and batch of the cells of Table 1 that options name."""
    known_batches, known_targets = (sorted(set(values)) for values in zip(*PAPER, strict=True))
    wanted = listed("--targets", targets, known_targets), listed("--batches", batches, known_batches)
    return itertools.product(seeds_of(seeds), *wanted)


def dp_sgd(batch: int, noise: float, seed: int, hidden: Sequence[int] = (128, 64, 32)) -> dict[str, Any]:
    """DP-SGD by Opacus, SGD at 0.1, falling: accuracy after every epoch, the last one's and the best."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    torch.set_num_threads(1)
    data = load_dataset("mnist", validation_fraction=0.0, split_seed=0)
    if data.test is None:
        raise ValueError("mnist has no test records")
    torch.manual_seed(seed)  # Opacus draws its noise from torch's default generator
    model = paper_model(seed, hidden)
    train_step, sgd = ghost_training(model, batch=batch, lr=0.1, momentum=0.0, noise_multiplier=noise)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, DECAY_EPOCHS, DECAY)
    sampler = ShuffledEpochsSampler(n_records=len(data.train), seed=seed, batch_size=batch, drop_last=True)
    started = time.perf_counter()
    curves: dict[str, list[float]] = {"test": [], "train": []}
    for epoch in range(EPOCHS):
        for step in range(sampler.steps_per_epoch):
            index = sampler.indices(epoch * sampler.steps_per_epoch + step)
            train_step(data.train.x[index], data.train.y[index])
        schedule.step()
        for name, split in (("test", data.test), ("train", data.train)):
            found = 100 * evaluate_split(model, split, "cross-entropy")["accuracy"]
            curves[name].append(round(found, 2))
    test, seconds = curves["test"], time.perf_counter() - started
    found = {"test": test[-1], "best": max(test), "test_curve": test}
    return {**found, "train_curve": curves["train"], "seconds": seconds}


def proven(epsilons: str = "3,1", seeds: str = "0,1,2", trainers: str = ";".join(PROVEN_TRAINERS)) -> None:
    """Train the proven form and DP-SGD at equal proven epsilon; `trainers` are separated by semicolons."""
    levels = listed("--epsilons", epsilons, PROVEN_EPSILONS)
    kinds = listed("--trainers", trainers, tuple(PROVEN_TRAINERS))
    for seed, epsilon, kind in itertools.product(seeds_of(seeds), levels, kinds):
        cell = {"trainer": kind, "epsilon": epsilon, "seed": seed}
        if rows_of("ulr_proven", **cell):
            continue
        tag = f"proven-{kind.replace(', ', '-').replace(' ', '-')}-{epsilon:g}-{seed}"
        run = train_or_read(proven_config(kind, epsilon, seed), FOLDER / tag)
        keep_row("ulr_proven", cell, **figures_of(run))


def widths(batches: str = ",".join(map(str, WIDTH_BATCHES)), seeds: str = "0,1,2") -> None:
    """Train DP-ULR and DP-SGD at sigma_0 = 8 for the widths of Table C1; batches of 128 and 256 take 200's setting.

    The small network at batches of 64 is a cell of Table 1 and is taken from there.
    """
    sizes = listed("--batches", batches, WIDTH_BATCHES)
    for seed, batch, (name, hidden) in itertools.product(seeds_of(seeds), sizes, WIDTHS.items()):
        cell = {"width": name, "batch": batch, "seed": seed}
        if selected(width_rows(), **cell):
            continue
        config = published_config(batch, 8.0, seed, **chosen(64 if batch == 64 else 200))
        config["model"] = {**config["model"], "hidden": hidden}
        run = train_or_read(config, FOLDER / f"widths-{name}-{batch}-{seed}")
        other = dp_sgd(batch, 8.0, seed, hidden=hidden)
        accuracy = 100 * float((run.summary or {})["test_accuracy"])
        keep_row("ulr_widths", cell, hidden=hidden, ulr=accuracy, dp_sgd=other["best"])


def width_rows() -> list[dict[str, Any]]:
    """Return the cells of Table C1 that were trained, those that Table 1 shares with it first."""
    dp_sgd = {row["seed"]: row["best"] for row in rows_of("ulr_opacus", batch=64, target_std=8.0)}
    ulr = {row["seed"]: row["test"] for row in rows_of("ulr_published", batch=64, target_std=8.0)}
    cells = [{"width": "small", "batch": 64, "seed": seed} for seed in ulr if seed in dp_sgd]
    shared = [{**cell, "ulr": ulr[cell["seed"]], "dp_sgd": dp_sgd[cell["seed"]]} for cell in cells]
    others = [row for row in rows_of("ulr_widths") if not any(selected([row], **cell) for cell in cells)]
    return [*shared, *others]


def fall(key: str, batch: int) -> float:
    """Return by how much a mean accuracy falls from the small network to the large one; NaN without both."""
    small, large = (
        [row[key] for row in selected(width_rows(), width=width, batch=batch)] for width in ("small", "large")
    )
    return statistics.fmean(small) - statistics.fmean(large) if small and large else math.nan


def tests(part: str, batch: int, target: float) -> list[float]:
    """Return the test accuracies of a cell of Table 1, those of DP-SGD at the best epoch, as in the paper."""
    key = "test" if part == "published" else "best"
    return [row[key] for row in rows_of(f"ulr_{part}", batch=batch, target_std=target)]


def leads(*, paper: bool = False) -> set[tuple[int, float]]:
    """Return the cells in which DP-ULR is ahead: by more than two standard errors, or in the paper's table."""
    if paper:
        return {cell for cell, (ulr, dp_sgd) in PAPER.items() if ulr > dp_sgd}
    return {cell for cell in PAPER if compared(tests("published", *cell), tests("opacus", *cell)) > 0}


def places(cells: set[tuple[int, float]]) -> str:
    """Say at which batches and values of sigma_0 some cells lie."""
    parts = []
    for batch in dict.fromkeys(batch for batch, _ in PAPER):
        mine = [f"{target:g}" for size, target in PAPER if size == batch and (size, target) in cells]
        at = f"at batch {batch} with sigma_0 = {', '.join(mine)}"
        parts.append(at if mine else f"never at batch {batch}")
    return "; ".join(parts)


def proven_table_rows() -> list[tuple[str, ...]]:
    """Return a line for each trainer and epsilon of the proven form, as text."""
    proven = rows_of("ulr_proven")
    rows = []
    for epsilon, trainer in sorted(dict.fromkeys((r["epsilon"], r["trainer"]) for r in proven)):
        mine = [r for r in proven if (r["epsilon"], r["trainer"]) == (epsilon, trainer)]
        seconds = statistics.mean(r["seconds"] for r in mine)
        tests = [r["test"] for r in mine]
        rows.append((trainer, f"{epsilon:g}", with_error(tests), str(len(tests)), f"{seconds:.0f}"))
    return rows


if __name__ == "__main__":
    program(search, published, opacus, proven, widths)
