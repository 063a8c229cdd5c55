"""What does the protection of whole users cost, against that of records? What do clipping rules change?

FashionMNIST: 60,000 training records of 3,000 users with 20 each, dealt at random. A network 784-128-10 (tanh) learns
by SGD with momentum 0.9 through `make_private`, clip 1, q = 0.05, 100 steps, so that every row of the table expects
3,000 rows of records in a step.

- users: a user with all its records has epsilon 3 at delta 1e-5; each step takes all 20 records of a drawn user.
- records: a record has epsilon 3 at delta 1e-5.
- conversion: a record has epsilon 3 / 20 at delta 1e-5 (e^0.15 - 1) / (e^3 - 1), so that every group of 20 records has
  epsilon 3 at delta 1e-5 (group privacy; Vadhan 2017, Lemma 2.2).
- per_layer, automatic, adaptive: as records, by these rules of `make_private(..., clipping=...)` with their defaults.

Learning rates were chosen on 6,000 held-out records of 300 users, by one other seed; no guarantee covers the choice.
Step times: processor seconds of one thread, both kinds of loop in turn on the same 500 rows (25 users of 20).
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from benchmarks.options import program, seeds_of
from benchmarks.results_file import keep_row, rows_of
from benchmarks.timing import interleaved_turns
from opusim.training.data import load_dataset

MODULE, NAME = "benchmarks.private_accuracy.users", "private_accuracy_users"
USERS, EACH, RATE, STEPS, CLIP = 3000, 20, 0.05, 100, 1.0
EPSILON, DELTA = 3.0, 1e-5
RULES = {
    "per_layer": "records, clipped by layer",
    "automatic": "records, automatic clipping",
    "adaptive": "records, adaptive bound",
}
ROWS = {
    "users": "users of 20 records",
    "records": "records",
    "conversion": "groups of 20 by conversion",
    **RULES,
}
RATES = {"users": (0.03, 0.1, 0.3), "records": (0.3, 1.0, 3.0), "conversion": (0.3, 1.0, 3.0)}
RATES |= dict.fromkeys(RULES, (1.0, 3.0))
TUNING_SEED, MOST = 9, 1.1
TIMED_USERS, REPEATS = 25, 60


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(784, 128), nn.Tanh(), nn.Linear(128, 10))


def convolutions(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1)),
            *(nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten()),
            *(nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
        )


def budget(row: str) -> tuple[float, float]:
    """Return epsilon and delta of a row's own unit."""
    if row != "conversion":
        return EPSILON, DELTA
    epsilon = EPSILON / EACH
    return epsilon, DELTA * math.expm1(epsilon) / math.expm1(EPSILON)


def loop(
    folder: str,
    row: str,
    model: nn.Module,
    records: TensorDataset,
    *,
    lr: float,
    seed: int,
    rate: float = RATE,
    **options: Any,
) -> opusim.PrivateTraining:
    """Return a private loop of a row; records are in a random order, so that neighbours form users."""
    units = len(records) // EACH if row == "users" else len(records)
    epsilon, delta = budget(row)
    return opusim.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(records, batch_size=round(rate * units)),
        max_grad_norm=CLIP,
        target_epsilon=epsilon,
        target_delta=delta,
        epochs=round(STEPS * rate),
        folder=folder,
        seed=seed,
        sample_rate=rate,
        user_ids=[n // EACH for n in range(len(records))] if row == "users" else None,
        records_per_user=EACH if row == "users" else None,
        fixed_batches=False,
        clipping=row if row in RULES else "flat",
        **options,
    )


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return 100 * float((model(x).argmax(dim=1) == y).double().mean())


def trained(row: str, lr: float, seed: int, *, tuning: bool = False) -> dict[str, Any]:
    """Train once, and return the accuracy on test records, or on held-out ones, and what the statement says."""
    found = load_dataset("fashion-mnist", validation_fraction=0.0, split_seed=0)
    order = torch.randperm(len(found.train), generator=torch.Generator().manual_seed(0))
    x, y = found.train.x[order], found.train.y[order]
    test = found.test
    assert test is not None
    held = 300 * EACH if tuning else 0
    shown = (x[:held], y[:held]) if tuning else (test.x, test.y)
    model, started = network(seed), time.process_time()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        records = TensorDataset(x[held:], y[held:])
        private = stack.enter_context(loop(f"{folder}/loop", row, model, records, lr=lr, seed=seed))
        while private.step < STEPS:
            for inputs, labels in private.data_loader:
                private.optimizer.zero_grad()
                private.criterion(model(inputs), labels).backward()
                private.optimizer.step()
        (stated,) = private.statement().guarantees
        noise = private.settings.noise_multiplier
    return {
        "row": row,
        "lr": lr,
        "seed": seed,
        "accuracy": accuracy(model, *shown),
        "epsilon": stated.epsilon,
        "delta": stated.delta,
        "unit": stated.unit.value,
        "status": stated.status.value,
        "noise_multiplier": noise,
        "cpu_s": round(time.process_time() - started, 1),
    }


def tune() -> None:
    """Train each row once at each rate, on all but the held-out users."""
    torch.set_num_threads(1)
    for row in ROWS:
        for lr in RATES[row]:
            if not rows_of(NAME, "tuning", row=row, lr=lr):
                keep_row(NAME, trained(row, lr, TUNING_SEED, tuning=True), "tuning")


def measure(seeds: str = "0,1,2") -> None:
    """Train each row at its rate by some seeds."""
    torch.set_num_threads(1)
    for seed, row in itertools.product(seeds_of(seeds), ROWS):
        if not rows_of(NAME, "runs", row=row, seed=seed):
            best = max(rows_of(NAME, "tuning", row=row), key=lambda one: float(one["accuracy"]))
            keep_row(NAME, trained(row, best["lr"], seed), "runs")


def speed() -> None:
    """Time a step of users against one of records, on the same rows."""
    torch.set_num_threads(1)
    count, generator = TIMED_USERS * EACH, torch.Generator().manual_seed(0)
    records = TensorDataset(
        torch.randn(count, 784, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    )
    models: dict[str, Callable[[int], nn.Module]] = {"784-128-10": network, "convolutions": convolutions}
    for (name, build), mode in itertools.product(models.items(), ("experiment", "release")):
        with tempfile.TemporaryDirectory() as folder:
            work: dict[str, Callable[[], object]] = {}
            for row in ("records", "users"):
                seed = 0 if mode == "experiment" else None
                options: dict[str, Any] = {"mode": mode, "rate": 1.0, "lr": 0.1, "seed": seed}
                work[row] = step_of(loop(f"{folder}/{row}", row, build(0), records, **options))
            seconds = interleaved_turns(work, repeats=REPEATS, clock=time.process_time)
        ratios = [b / a for a, b in zip(seconds["records"], seconds["users"], strict=True)]
        entry = {f"{row}_ms": 1000 * statistics.median(found) for row, found in seconds.items()}
        cell = {"model": name, "mode": mode}
        keep_row(NAME, cell, "steps", ratio=statistics.median(ratios), **entry)


def step_of(private: opusim.PrivateTraining) -> Callable[[], object]:
    """Return what takes one whole step, the reading of its records included; the data set has one step an epoch."""

    def step() -> None:
        for inputs, labels in private.data_loader:
            private.optimizer.zero_grad()
            private.criterion(private.module(inputs), labels).backward()
            private.optimizer.step()

    return step


if __name__ == "__main__":
    program(tune, measure, speed)
