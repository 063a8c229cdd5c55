"""Does a record-protected module learn as well here as by DP-SGD of Opacus, and what does a photonic device cost?

FashionMNIST: 50,000 private records, 10,000 held out for validation. A convolutional network (`conv-small` with 8
channels and group norm) and a vision transformer (`vit-small` of two blocks of width 32 on patches of 7 x 7, positions
fixed, because Opacus has no rule for them). Poisson batches of 500 expected records, two epochs, Adam, epsilon 3 and 8
at delta 1e-5, three seeds of parameters, batches and noise.

- bp: backpropagation under `protection.kind = "record"`, that is DP-SGD.
- pdfa: feedback in four bit planes through the `gaussian` device (sigma 0.1) under the same protection.
- opacus: DP-SGD by Opacus (extra `baselines`), `make_private_with_epsilon` with its default accountant and gradients of
  single records by hooks. Same initial parameters, clip, batch size, steps and optimizer.

Seconds are processor time of one thread, from the search for the noise to the last accuracy. Required: bp of opusim at
most one standard error of the paired differences below Opacus.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from benchmarks.markdown import verdict, with_error
from benchmarks.results_file import load_results, save_results
from opusim.training.data import Dataset, load_dataset
from opusim.training.networks.models import ConvolutionalNetwork, VisionTransformer
from opusim.training.runs.run import evaluate_split

MODULE, NAME = "benchmarks.any_module.private", "any_module_private"
SHAPE, CLASSES, SEEDS = (1, 28, 28), 10, range(3)
EPSILONS, DELTA = (3.0, 8.0), 1e-5
BATCH, EPOCHS = 500, 2
POINTS = {"conv-small": {"rate": 0.03, "clip": 1.0}, "vit-small": {"rate": 0.01, "clip": 0.3}}
"""The best on validation records, by bp with seed 0 at epsilon 3 (searched at e037478d)."""
TOOLS = ("bp", "opacus", "pdfa")
TITLES = {
    "bp": "opusim, bp",
    "opacus": "Opacus, DP-SGD",
    "pdfa": "opusim, pdfa through the `gaussian` device",
}


def convolutional() -> nn.Module:
    return ConvolutionalNetwork(SHAPE, CLASSES, width=8, norm="group")


def transformer() -> nn.Module:
    model = VisionTransformer(SHAPE, CLASSES, width=32, depth=2, patch=7)
    model.positions.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"conv-small": convolutional, "vit-small": transformer}
ALIGNED = ("vit-small",)
"""Models whose head can start as the feedback matrix; that of conv-small sees more than the channels of a point."""
Outcome = dict[str, Any]


@cache
def images() -> Dataset:
    found = load_dataset("fashion-mnist", validation_fraction=1 / 6, split_seed=0)
    return replace(found, record_shape=SHAPE)


def new_model(name: str, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]()


def configuration(tool: str, name: str, epsilon: float, seed: int) -> dict[str, Any]:
    """Return the configuration of a run by opusim."""
    point = POINTS[name]
    config: dict[str, Any] = {
        "seed": seed,
        "epochs": EPOCHS,
        "threads": 1,
        "data": {"n_classes": CLASSES},
        "trainer": {"kind": tool},
        "optimizer": {"name": "adam", "lr": point["rate"]},
        "sampler": {"batch_size": BATCH, "scheme": "poisson"},
        "protection": {"kind": "record", "epsilon": epsilon, "delta": DELTA, "clip_norm": point["clip"]},
    }
    if tool == "pdfa":
        config["trainer"]["encoding"] = "planes"
        config["device"] = {"name": "gaussian", "noise": {"sigma": 0.1}}
        if name in ALIGNED:
            config["model"] = {"initial_output": "feedback"}
    return config


def by_opusim(tool: str, name: str, epsilon: float, seed: int) -> Outcome:
    """Train by opusim, in a run folder that is not kept."""
    config = configuration(tool, name, epsilon, seed)
    with tempfile.TemporaryDirectory() as folder:
        run = opusim.train(config, data=images(), model=new_model(name, seed), folder=f"{folder}/run")
        (guarantee,) = run.guarantees
        summary = run.summary or {}
        return {
            "validation": 100 * summary["validation_accuracy"],
            "test": 100 * summary["test_accuracy"],
            "epsilon": guarantee.epsilon,
            "status": guarantee.status.value,
            "relation": str(guarantee.adjacency),
            "noise_multiplier": run.config.protection.noise_multiplier,
            "steps": summary["steps"],
            "frames": summary["frames"],
        }


def by_opacus(name: str, epsilon: float, seed: int) -> Outcome:
    """Train by Opacus as its documentation shows."""
    from opacus import PrivacyEngine

    model = new_model(name, seed)
    torch.manual_seed(seed)  # of Opacus's batches and noise
    records = TensorDataset(images().train.x.view(-1, *SHAPE), images().train.y)
    engine, trained = PrivacyEngine(), [p for p in model.parameters() if p.requires_grad]
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(trained, lr=POINTS[name]["rate"]),
        data_loader=DataLoader(records, batch_size=BATCH),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=POINTS[name]["clip"],
    )
    steps, validation = 0, 0.0
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
            steps += 1
        for part in ("train", "validation"):  # as a run of opusim does after every epoch
            validation = accuracy(model, part)
    return {
        "validation": validation,
        "test": accuracy(model, "test"),
        "epsilon": float(engine.get_epsilon(DELTA)),
        "noise_multiplier": optimizer.noise_multiplier,
        "steps": steps,
    }


def accuracy(model: nn.Module, part: str) -> float:
    """Return a model's accuracy on a part of the data set, per cent."""
    flat = nn.Sequential(nn.Unflatten(1, SHAPE), model)
    return 100 * evaluate_split(flat, getattr(images(), part), "cross-entropy")["accuracy"]


def key_of(tool: str, name: str, epsilon: float, seed: int) -> str:
    point = POINTS[name]
    return f"{tool}, {name}, epsilon {epsilon:g}, rate {point['rate']:g}, clip {point['clip']:g}, seed {seed}"


def cells() -> Iterator[tuple[str, float]]:
    """Yield model and epsilon of each column of the table."""
    yield from itertools.product(MODELS, EPSILONS)


def measure() -> None:
    """Train every run that the results lack; the rows with a requirement first."""
    warnings.filterwarnings("ignore", category=UserWarning)  # of Opacus, about its hooks
    torch.set_num_threads(1)
    results = load_results(NAME) or {"runs": {}}
    results["settings"] = {
        "records": len(images().train),
        "batch": BATCH,
        "epochs": EPOCHS,
        "delta": DELTA,
        "parameters": {name: sum(p.numel() for p in new_model(name, 0).parameters()) for name in MODELS},
    }
    images()  # read before the first run is timed
    for tools in (TOOLS[:2], TOOLS[2:]):
        for seed, (name, epsilon), tool in itertools.product(SEEDS, cells(), tools):
            key = key_of(tool, name, epsilon, seed)
            if key not in results["runs"]:
                started = time.process_time()
                opacus = tool == "opacus"
                found = by_opacus(name, epsilon, seed) if opacus else by_opusim(tool, name, epsilon, seed)
                results["runs"][key] = found | {"seconds": round(time.process_time() - started, 1)}
                save_results(NAME, results)
                print(f"{key}: {results['runs'][key]}", flush=True)


def outcomes(results: dict[str, Any], tool: str, name: str, epsilon: float) -> dict[int, Outcome]:
    """Return the runs of a cell by seed, as far as they are measured."""
    keys = {seed: key_of(tool, name, epsilon, seed) for seed in SEEDS}
    return {seed: results["runs"][key] for seed, key in keys.items() if key in results["runs"]}


def differences(
    results: dict[str, Any], first: str, second: str, *, names: Collection[str] = tuple(MODELS)
) -> list[float]:
    """Return one tool minus another in points, for every model, epsilon and seed that both have finished."""
    found = []
    for name, epsilon in cells():
        ours, theirs = (outcomes(results, tool, name, epsilon) for tool in (first, second))
        if name in names:
            found += [ours[seed]["test"] - theirs[seed]["test"] for seed in ours.keys() & theirs.keys()]
    return found


def judgement(results: dict[str, Any]) -> str:
    """Return how the requirement is met by all finished pairs, and what else a user sees."""
    found = differences(results, "bp", "opacus")
    mean, error = statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5
    ratios = []
    for cell in cells():
        both = (outcomes(results, tool, *cell).values() for tool in ("bp", "opacus"))
        ours, theirs = (statistics.median(each["seconds"] for each in runs) for runs in both)
        ratios.append(ours / theirs)
    lost = [
        f"Through the device {name} loses {with_error(differences(results, 'bp', 'pdfa', names=(name,)))} points to bp."
        for name in MODELS
    ]
    return (
        f"opusim's bp minus Opacus, {len(found)} pairs of the same model, epsilon and seed: {mean:+.2f} ± {error:.2f} "
        f"points. The requirement, at most one standard error below Opacus, is {verdict(mean >= -error)}. A run by "
        f"opusim takes {min(ratios):.2f} to {max(ratios):.2f} of Opacus's processor time. {' '.join(lost)}"
    )


if __name__ == "__main__":
    measure()
