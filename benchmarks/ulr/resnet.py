"""Does likelihood ratio training work on ResNet-5 and CIFAR-10 (Figure 4 of the DP-ULR paper)?

Convolutions of 8, 16, 32 and 32 kernels, 3 x 3 at stride 1, ReLU, a residual connection around the last, one linear
layer (section 4.3 of the DP-ULR paper); 2 x 2 average pooling behind the first two convolutions, of which the paper
says nothing, keeps an epoch within minutes on a processor. x + convolution(x) is written as one convolution to whose
first kernels the identity is added, which is the same function with the same gradients.

`plain` trains without protection: the estimate with independent noise, with noise matched to each record's Jacobian,
with ten orthogonal copies of that, both with a tenth of sigma, which smooths the loss less, and backpropagation.
`private` trains the paper's published form, the proven form and DP-SGD at the paper's batch of 64 and noise of 1, at a
larger batch and at more noise. Three seeds at the paper's batch, and for DP-SGD; one for the other batch, and without
protection for what lies between plain `ulr` and the best estimate. `search` compares values of sigma, of the clip and
of the published form's K: a quarter of the records train, and the others are held out.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.options import listed, program
from benchmarks.results_file import keep_row, rows_of
from benchmarks.runs import train_or_read
from opusim.training.runs.run import Run

MODULE, NAME, FOLDER = "benchmarks.ulr.resnet", "ulr_resnet", Path("runs/ulr-resnet")
EPOCHS, BATCH, COPIES, SIGMA, LR = 8, 64, 2, 0.3, 0.002
DELTA, SEEDS = 1e-5, (0, 1, 2)
KEYS = ("form", "trainer", "batch", "noise", "epochs", "seed")
Cell = tuple[str, str, int, float, int, int]
SEARCHED, HELD_OUT, SEARCH_EPOCHS, SEARCH_SEEDS = "ulr_resnet_search", 0.744, 3, (100, 101, 102)
ORTHOGONAL: dict[str, Any] = {"kind": "ulr", "sigma": SIGMA, "shape": "matched", "directions": "orthogonal"}
PLAIN: dict[str, dict[str, Any]] = {
    "ulr": {"kind": "ulr", "copies": COPIES, "sigma": SIGMA},
    "ulr, matched": {"kind": "ulr", "copies": COPIES, "sigma": SIGMA, "shape": "matched"},
    "ulr, matched, 10 orthogonal": {**ORTHOGONAL, "copies": 10},
    "ulr, matched, sigma 0.03": {"kind": "ulr", "copies": COPIES, "sigma": 0.03, "shape": "matched"},
    "ulr, matched, 10 orthogonal, sigma 0.03": {**ORTHOGONAL, "copies": 10, "sigma": 0.03},
    "backpropagation": {"kind": "bp"},
}
PUBLISHED: dict[str, Any] = {"kind": "ulr", "form": "published", "copies": COPIES, "sigma": SIGMA}
BEST, BEST_EPOCHS = "ulr, matched, 10 orthogonal, sigma 0.03", 4
FORMS = {"DP-SGD": "backpropagation", "proven": BEST, "published": "ulr"}
"""Forms of private training, and what they train with."""
BATCHES, NOISES = (64, 500), (1.0, 4.0)
"""Sampling rates and noise levels of the private runs; the paper names only DP-SGD's, 64 and 1."""
SEARCHES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{std:g}": ("plain", {**PLAIN["ulr, matched"], "sigma": std}) for std in (0.01, 0.03, 0.1, 0.3)},
    **{clip: ("proven", {**PLAIN[BEST], "clip": clip}) for clip in ("joint", "module")},
    **{f"K = {copies}": ("published", {**PUBLISHED, "copies": copies}) for copies in (COPIES, 5 * COPIES)},
}
"""Values that `search` compares, with form and trainer: sigma, then the clip and K at the paper's batch and noise."""


def resnet5(seed: int) -> nn.Sequential:
    """Return the network with first weights of this seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 32, 32)),
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )  # fmt: skip
    residual = model[9].weight
    with torch.no_grad():
        residual.add_(nn.init.dirac_(torch.empty_like(residual)))
    return model


def plain_config(trainer: dict[str, Any], epochs: int, seed: int) -> dict[str, Any]:
    return {
        "epochs": epochs,
        "seed": seed,
        "threads": 1,
        "data": {"name": "cifar-10", "validation_fraction": 0.0},
        "optimizer": {"name": "adam", "lr": LR, "schedule": "cosine"},
        "sampler": {"batch_size": BATCH, "drop_last": True},
        "trainer": trainer,
        "checkpoint": {"every_steps": 100},
    }


def private_config(form: str, batch: int, noise: float, epochs: int, seed: int) -> dict[str, Any]:
    """Return the configuration of a private run: "published", "proven" or "DP-SGD"."""
    config = plain_config(PLAIN[FORMS[form]], epochs, seed)
    if form == "published":
        config["sampler"] = {"batch_size": batch, "drop_last": True}
        return {**config, "trainer": {**PUBLISHED, "target_std": noise}}
    config["sampler"] = {"scheme": "poisson", "batch_size": batch}
    if form == "proven":  # noisy modules do not shrink the exact estimate of the last one
        config["trainer"] = {**config["trainer"], "clip": "module"}
    return {**config, "protection": {"kind": "record", "noise_multiplier": noise, "delta": DELTA}}


def trained(config: dict[str, Any], name: str) -> Run:
    """Return the run of a configuration: read back, resumed or started."""
    tag = f"{name}-{config['epochs']}-{config['seed']}".replace(", ", "-").replace(" ", "-")
    return train_or_read(config, FOLDER / tag, model=resnet5(config["seed"]))


def figures_of(run: Run) -> dict[str, Any]:
    """Return the accuracy, the curve, the times and the guarantees of a finished run."""
    return {
        "test": 100 * (run.summary or {})["test_accuracy"],
        "train_curve": [round(100 * record["train_accuracy"], 2) for record in run.metrics],
        "epoch_s": [round(record["wall_s"], 1) for record in run.folder.read_timing()],
        "guarantees": [[g.status.value, str(g.epsilon), g.formula_value] for g in run.guarantees],
    }


def plain(seeds: str = ",".join(map(str, SEEDS)), names: str = ";".join(PLAIN)) -> None:
    """Train without protection; `names` are separated by semicolons."""
    wanted = listed("--names", names, tuple(PLAIN)), listed("--seeds", seeds, SEEDS)
    for form, name, batch, noise, epochs, seed in planned():
        cell = dict(zip(KEYS, (form, name, batch, noise, epochs, seed), strict=True))
        if form == "plain" and name in wanted[0] and seed in wanted[1] and not rows_of(NAME, **cell):
            keep_row(NAME, cell, **figures_of(trained(plain_config(PLAIN[name], epochs, seed), name)))


def private(seeds: str = ",".join(map(str, SEEDS)), forms: str = ",".join(FORMS)) -> None:
    """Train with the noise of each form, for each batch and noise level."""
    wanted = listed("--forms", forms, tuple(FORMS)), listed("--seeds", seeds, SEEDS)
    for form, name, batch, noise, epochs, seed in planned():
        cell = dict(zip(KEYS, (form, name, batch, noise, epochs, seed), strict=True))
        if form in wanted[0] and seed in wanted[1] and not rows_of(NAME, **cell):
            run = trained(private_config(form, batch, noise, epochs, seed), f"{form}-{batch}-{noise:g}")
            keep_row(NAME, cell, **figures_of(run))


def search(seeds: str = ",".join(map(str, SEARCH_SEEDS))) -> None:
    """Train on a quarter of the records with each value of `SEARCHES`, and keep the accuracy on the others."""
    wanted = listed("--seeds", seeds, SEARCH_SEEDS)
    for seed, (value, (form, trainer)) in itertools.product(wanted, SEARCHES.items()):
        cell = {"form": form, "value": value, "seed": seed}
        if rows_of(SEARCHED, **cell):
            continue
        if form == "plain":
            config = plain_config(trainer, SEARCH_EPOCHS, seed)
        else:
            config = private_config(form, BATCHES[0], NOISES[0], SEARCH_EPOCHS, seed)
            config["trainer"] = {**config["trainer"], **trainer}
        config["data"] = {"name": "cifar-10", "validation_fraction": HELD_OUT}
        run = trained(config, f"search-{form}-{value}")
        keep_row(SEARCHED, cell, held_out=100 * run.metrics[-1]["validation_accuracy"])


def planned() -> list[Cell]:
    """Return the trainings of benchmarks/papers/README.md, those with all seeds first."""
    cells: list[Cell] = [("plain", BEST, BATCH, 0.0, BEST_EPOCHS, seed) for seed in SEEDS]
    for seed, name in itertools.product(SEEDS, PLAIN):
        if seed == SEEDS[0] or name in ("ulr", "backpropagation"):
            cells.append(("plain", name, BATCH, 0.0, EPOCHS, seed))
    for seed, form, batch, noise in itertools.product(SEEDS, FORMS, BATCHES, NOISES):
        if seed == SEEDS[0] or form == "DP-SGD" or batch == BATCHES[0]:
            cells.append((form, FORMS[form], batch, noise, EPOCHS, seed))
    return cells


def means() -> list[dict[str, Any]]:
    """Return a row for each training with the accuracies of all its seeds, `tests`."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows_of(NAME):
        found.setdefault(tuple(row[key] for key in KEYS[:-1]), []).append(row)
    groups = [found[key] for key in sorted(found, key=lambda key: (key[0] != "plain", key))]
    return [{**rows[0], "tests": [row["test"] for row in rows]} for rows in groups]


if __name__ == "__main__":
    program(plain, private, search)
