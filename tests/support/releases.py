"""Release runs of every entry point whose noise `opusim audit --mechanism` does not read, and the law of that noise.

`RELEASES` holds one row for each: it makes a fresh release run and returns what was released beyond the data, divided
by its stated standard deviation, read from what the run releases. The records of a row make what is released without
noise known: features that are 0 for all records, or a value that is computed here.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opusim import training
from opusim.accounting.ledger import read_ledger
from opusim.training.attacks.mechanism.checks import noise_checks, shared
from opusim.training.config import load_config
from opusim.training.convex.trainer import GatedRelu
from opusim.training.engine.plan import load_data
from opusim.training.runs.run import Run, evaluate_split
from opusim.training.runs.storage import read_array
from opusim.training.sweeps import tuning
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent
from tests.support.private_loops import private_loop

LEVEL = 1e-9
"""Probability of any alarm of two release runs, whose noise no seed repeats."""
_USED, _UNUSED = 8, 48
"""Features that records have, and features that are 0 for all records."""
_CLASSES = 5


def alarms(runs: np.ndarray) -> set[str]:
    """Return the checks that tell the noise of two or more runs from independent N(0, 1).

    Runs are in units of the stated standard deviation, shape (runs, rows, columns); with steps, a row each.
    """
    return {check.name for check in shared(noise_checks(runs), LEVEL) if check.alarm}


def _records(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Records of which most features are 0."""
    generator = np.random.default_rng(5)
    used = generator.normal(size=(count, _USED))
    return np.hstack([used, np.zeros((count, _UNUSED))]).astype(np.float32), np.arange(count) % _CLASSES


def private_steps(folder: Path, **options: Any) -> tuple[np.ndarray, list[list[int]]]:
    """Return the noise of the steps of a private loop in release mode, and the records of each batch."""
    x, y = (torch.from_numpy(each) for each in _records(40))
    data = TensorDataset(x, y, torch.arange(len(x)))
    linear, clip, size, rate = nn.Linear(_USED + _UNUSED, _CLASSES), 0.7, 2, 0.5
    optimizer = torch.optim.SGD(linear.parameters(), lr=rate)
    given = (linear, optimizer, nn.CrossEntropyLoss(), DataLoader(data, size))
    chosen = {"mode": "release", "seed": None, "max_grad_norm": clip, "noise_multiplier": 1.3, **options}
    noise, batches = [], []
    with private_loop(folder, given, **chosen) as private:
        model, optimizer, criterion, loader = private
        for features, labels, numbers in loader:
            before = linear.weight.detach().double().clone()
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
            moved = (before - linear.weight.detach().double())[:, _USED:]
            noise.append((moved * size / rate / (clip * 1.3)).numpy().ravel())
            batches.append(numbers.tolist())
    return np.array(noise), batches


def _last_iterate(folder: Path) -> np.ndarray:
    """The last model's weights of features that no record has; they start at 0, and nothing else moves them."""
    x, y = np.abs(_records(100)[0]), _records(100)[1]
    gates, rate, divisor, batches, z = 4, 0.5, 10, 10, 2.0
    model = GatedRelu(x.shape[1], _CLASSES, torch.ones(gates, x.shape[1]), centre=False)
    config = {
        **_common("convex", "last-iterate"),
        "trainer": {"kind": "convex", "hyperplanes": gates, "centre": False, "clip": 0.3},
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": divisor},
        "optimizer": {"lr": rate, "momentum": 0.0},
        "protection": {"kind": "last-iterate", "noise_multiplier": z},
    }
    run = training.train(config, data=(x, y), model=model, folder=folder)
    weights = run.model.weight.detach().double().numpy()[_USED:]
    final = batches - 1  # squared, in units of a step's noise: what the default adds to the last step
    return np.asarray(weights / (rate * z * 0.3 / divisor * math.sqrt(batches + final))).reshape(-1, 60)


def _labels_released(folder: Path, **section: Any) -> np.ndarray:
    """One noisy linear model, whitened: the noise that the largest of all leverages asks for.

    One record sticks out, so that its leverage is far above the others'.
    """
    generator = np.random.default_rng(3)
    x = generator.normal(size=(300, 39))
    x[17] *= 30.0
    y, ridge = np.arange(300) % _CLASSES, 0.05
    config = {
        **_common("ridge", "label-release"),
        "trainer": {"kind": "ridge", "ridge": ridge},
        "protection": {"kind": "label-release", "epsilon": 2.0, "rounds": 0, **section},
    }
    del config["epochs"], config["model"]
    if section.get("noise") == "device":
        config["device"] = {"name": "gaussian", "noise": {"sigma": 0.3}}
    training.train(config, data=(x.astype(np.float32), y), folder=folder)
    mechanism: Any = read_ledger(folder / "ledger.jsonl").mechanisms[0]
    h = np.column_stack([x.astype(np.float32), np.ones(len(x))]).astype(np.float64)
    s = h.T @ h
    s += ridge * np.trace(s) / len(s) * np.eye(len(s))
    factor = np.linalg.cholesky(s)
    largest = float(np.linalg.norm(np.linalg.solve(factor, h.T), axis=0).max())
    clean = np.linalg.solve(s, h.T @ (np.eye(_CLASSES)[y] - 1 / _CLASSES)).T
    noise = (read_array(folder / "labels.safetensors") - clean) @ factor
    return np.asarray(noise / (math.sqrt(2) * largest / mechanism.mu)).reshape(-1, 40)


def _scalars(law: str) -> Callable[[Path], np.ndarray]:
    """The scalars of zeroth-order training of a model whose loss does not depend on its weights, as normal numbers."""

    def noise(folder: Path) -> np.ndarray:
        count, clip, scale, size = 24, 0.05, 1.5, 4
        config = {
            **_common("zo", "record"),
            "trainer": {"kind": "zo", "law": law, "directions": count},
            "sampler": {"scheme": "poisson", "batch_size": size},
            "protection": {"kind": "record", "noise_multiplier": scale, "clip_norm": clip},
        }
        x, y = np.zeros((40, 6), dtype=np.float32), np.arange(40) % _CLASSES
        linear = nn.Linear(6, _CLASSES, bias=False)
        run = training.train(config, data=(x, y), model=linear, folder=folder)
        perturbation = run.config.trainer.perturbation
        scalars = np.array([entry.scalars for entry in LogContent.read(folder / LOG_FILE).entries])
        drawn = scalars * 2 * perturbation * size / (clip * scale)
        return np.asarray(drawn if law == "gaussian" else stats.norm.ppf(stats.laplace.cdf(drawn)))

    return noise


class _EnoughScores(Exception):
    """Ends a search whose scores are known."""


@cache
def _scored_run(folder: Path) -> tuple[Run, float]:
    """The run that all trials of a search are given, and its accuracy on the held-out records."""
    config = load_config(_SEARCH)
    run = training.train(config.replaced(protection={"epsilon": 0.1}), folder=folder)
    held_out = load_data(run.config, None).validation
    return run, float(evaluate_split(run.model, held_out, run.config.loss)["accuracy"])


_SEARCH: dict[str, Any] = {
    "mode": "release", "epochs": 1, "threads": 1, "data": {"name": "digits", "validation_fraction": 0.2},
    "trainer": {"kind": "convex", "hyperplanes": 8}, "optimizer": {"lr": 1.5, "momentum": 0.0},
    "sampler": {"scheme": "disjoint-cyclic", "batch_size": 100},
    "protection": {"kind": "last-iterate", "epsilon": 0.5},
}  # fmt: skip


def _scores(folder: Path) -> np.ndarray:
    """The scores of a search all of whose trials are one run; 60 of a mean of 130 trials, 6 deviations below it."""
    run, accuracy = _scored_run(folder.parent / "scored")
    scores: dict[str, float] = {}

    def watch(done: int, trials: int) -> None:
        if done == min(trials, 60):
            scores.update(json.loads((folder / "tuning.json").read_text())["scores"])
            raise _EnoughScores

    search = tuning.Search(load_config(_SEARCH), {"trainer.clip": ["0.5"]}, mean=130.0, folder=folder)
    with pytest.MonkeyPatch.context() as patch, suppress(_EnoughScores):
        patch.setattr(tuning, "train", lambda *_, **__: run)
        patch.setattr(tuning, "_require_within", lambda *_: None)
        search.run(watch)
    (mechanism,) = read_ledger(folder).mechanisms
    held_out = len(load_data(run.config, None).validation)
    noise = (np.array(list(scores.values())) - accuracy) * held_out * mechanism.mu
    return np.asarray(noise.reshape(6, 10))


def _common(trainer: str, protection: str) -> dict[str, Any]:
    return {
        "mode": "release", "epochs": 1, "threads": 1, "model": {},
        "data": {"n_classes": _CLASSES, "validation_fraction": 0.0, "standardise": False},
        "trainer": {"kind": trainer}, "protection": {"kind": protection},
    }  # fmt: skip


RELEASES: Mapping[str, Callable[[Path], np.ndarray]] = {
    "make_private": lambda folder: private_steps(folder)[0],
    "make_private, in parts": lambda folder: private_steps(folder, max_physical_batch_size=1)[0],
    "last-iterate": _last_iterate,
    "label-release": _labels_released,
    "label-release, device": lambda folder: _labels_released(folder, noise="device"),
    "zo, gaussian": _scalars("gaussian"),
    "zo, laplace": _scalars("laplace"),
    "tune": _scores,
}
"""By entry point: a fresh release run in a folder, and its noise, shape (rows, columns)."""
