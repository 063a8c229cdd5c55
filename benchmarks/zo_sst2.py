"""Zeroth order against DP-SGD with 1000 private sentences: SST-2, a linear head on frozen sentence embeddings.

The DP-ZO paper finds zeroth-order training comparable with DP-SGD at n = 1000 (Table 1), and pure epsilon 4 well above
chance (Table 3). Here both train the same head of 770 parameters on the same cached embeddings (benchmarks/sst2.py),
with the paper's steps and batches: ZO 10,000 and 75,000 steps of expected batch 16 (pure epsilon: 2,000 of 20), DP-SGD
200 steps of 64. Under pure privacy the noise grows with the number of steps and the signal only adds up, so 400 steps
of 250 are trained as well ("short", ours). Noise is calibrated to epsilon at delta 1e-5 (pure: 0) by our accountants.
The loop drives the trainers themselves, without run folders. A seed draws its 1000 training sentences (the same for all
methods), batches, noise and directions. Evaluated on dev and test together, 2,693 sentences.

Learning rates: ZO's is a times the rate at which the noise moves a logit by 1; a, like DP-SGD's rate, was the best of a
few on the pilot seed, which is none of the five; like the paper's, this search is not in epsilon.

Every result is written as it comes; a second call goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from accounting import RecordCentral, ZoGaussian, ZoLaplace, calibrate
from benchmarks.results_file import load_results, save_results
from benchmarks.sst2 import N_TRAIN, NORM, embeddings
from opusim.randomness import SeededStream, derive_seed
from training.config import load_config
from training.data.samplers import make_sampler
from training.feedback.options import feedback_options
from training.feedback.trainer import FeedbackTrainer
from training.networks.network import FullyConnected, LayerShape, build_model
from training.optimizers import make_optimizer, set_learning_rate
from training.protections.record import RecordProtection
from training.trainer import Trainer
from training.zo.scalar_noise import GaussianScalars, LaplaceScalars
from training.zo.trainer import ScalarRelease, ZoTrainer

NAME = "zo_sst2"
DELTA, EPSILONS, SEEDS, PILOT = 1e-5, (0.5, 1.0, 4.0), (0, 1, 2, 3, 4), 100
PHI, CLIP = 0.01, 0.05
FACTORS, RATES = (0.125, 0.5, 2.0), (0.03, 0.1, 0.3, 1.0, 3.0)
METHODS: dict[str, dict[str, Any]] = {
    "zo, gaussian": {"steps": 10_000, "batch": 16, "delta": DELTA, "epsilons": EPSILONS},
    "zo, laplace": {"steps": 10_000, "batch": 16, "delta": DELTA, "epsilons": EPSILONS},
    "zo, gaussian, 75000 steps": {"steps": 75_000, "batch": 16, "delta": DELTA, "epsilons": EPSILONS},
    "zo, laplace, 75000 steps": {"steps": 75_000, "batch": 16, "delta": DELTA, "epsilons": EPSILONS},
    "zo, laplace, pure": {"steps": 2_000, "batch": 20, "delta": 0.0, "epsilons": (4.0,)},
    "zo, laplace, pure, short": {"steps": 400, "batch": 250, "delta": 0.0, "epsilons": EPSILONS},
    "dp-sgd": {"steps": 200, "batch": 64, "delta": DELTA, "epsilons": EPSILONS},
}


def noise_for(method: str, epsilon: float) -> float:
    """The least noise multiplier (or scale) that reaches epsilon."""
    plan = METHODS[method]
    common = {
        "sampling_probability": plan["batch"] / N_TRAIN,
        "divisor": plan["batch"],
        "steps": plan["steps"],
    }
    mechanism: Any
    if method == "dp-sgd":
        mechanism = RecordCentral(noise_multiplier=1.0, clip_norm=1.0, **common)
    elif "laplace" in method:
        mechanism = ZoLaplace(scale=10.0, clip_norm=CLIP, **common)
    else:
        mechanism = ZoGaussian(noise_multiplier=10.0, clip_norm=CLIP, **common)
    return float(calibrate(mechanism, target_epsilon=epsilon, delta=plan["delta"])[0].noise)


def make(method: str, noise: float, rate: float, seed: int) -> tuple[Trainer, Any]:
    """The trainer, and the configuration of its learning rate."""
    plan = METHODS[method]
    generator = torch.Generator().manual_seed(seed)
    head = build_model(
        384, [LayerShape(n_outputs=2, activation="identity", bias=True)], generator=generator, gain=0.01
    )
    network = FullyConnected(head)
    stream = SeededStream(seed, "central-noise")
    if method == "dp-sgd":
        config = load_config({"trainer": {"kind": "bp"}, "optimizer": {"lr": rate, "momentum": 0.0}})
        protection = RecordProtection(
            clip_norm=1.0, noise_multiplier=noise, divisor=plan["batch"], noise=stream
        )
        optimizer = make_optimizer(network.parameters, config.optimizer)
        return FeedbackTrainer(
            network, optimizer, feedback_options(config), protection=protection
        ), config.optimizer
    config = load_config(
        {
            "trainer": {"kind": "zo", "perturbation": PHI},
            "optimizer": {"lr": rate, "schedule": "linear"},
        }
    )
    law = LaplaceScalars if "laplace" in method else GaussianScalars
    release = ScalarRelease(clip=CLIP, divisor=plan["batch"], scale=noise * CLIP, noise=law(stream))
    return (
        ZoTrainer(network, config.trainer, config.optimizer, release, root=derive_seed(seed, "directions")),
        config.optimizer,
    )


def zo_rate(method: str, noise: float, factor: float) -> float:
    """Factor times the rate at which the noise of all steps moves a logit by about 1, the rate falling linearly."""
    plan = METHODS[method]
    spread = noise * (math.sqrt(2) if "laplace" in method else 1.0) * CLIP / (2 * PHI * plan["batch"])
    return factor / (spread * NORM * math.sqrt(plan["steps"] / 3))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).double().mean())


def trained(method: str, epsilon: float, setting: float, seed: int, data: dict[str, Any]) -> dict[str, Any]:
    """One training: accuracy on dev and on dev and test together, seconds."""
    plan = METHODS[method]
    noise = data["noise"].setdefault(f"{method}, {epsilon:g}", None) or noise_for(method, epsilon)
    data["noise"][f"{method}, {epsilon:g}"] = noise
    rate = setting if method == "dp-sgd" else zo_rate(method, noise, setting)
    trainer, optimizer = make(method, noise, rate, seed)
    chosen = torch.from_numpy(np.random.default_rng(seed).permutation(len(data["train"][1]))[:N_TRAIN])
    x, y = data["train"][0][chosen], data["train"][1][chosen]
    sampler = make_sampler("poisson", N_TRAIN, plan["batch"], derive_seed(seed, "batches"))
    started = time.perf_counter()
    for step in range(plan["steps"]):
        index = sampler.indices(step)
        set_learning_rate(trainer.optimizer, optimizer, step / plan["steps"])
        trainer.step(x[index], y[index], step=step, observe=False, records=index)
    seconds = time.perf_counter() - started
    dev = accuracy(trainer.model, *data["dev"])
    both = accuracy(trainer.model, *data["dev+test"])
    return {"noise": noise, "rate": rate, "dev": dev, "accuracy": both, "seconds": seconds}


def cells() -> list[tuple[str, float]]:
    return [(method, epsilon) for method, plan in METHODS.items() for epsilon in plan["epsilons"]]


def settings_of(method: str) -> tuple[float, ...]:
    return RATES if method == "dp-sgd" else FACTORS


def reference(data: dict[str, Any]) -> list[float]:
    """Non-private logistic regression on the same embeddings, one accuracy a seed."""
    from sklearn.linear_model import LogisticRegression

    found = []
    for seed in SEEDS:
        chosen = np.random.default_rng(seed).permutation(len(data["train"][1]))[:N_TRAIN]
        model = LogisticRegression(max_iter=2000).fit(data["train"][0][chosen], data["train"][1][chosen])
        found.append(float(model.score(*data["dev+test"])))
    return found


def measure(results: dict[str, Any]) -> None:
    """Do what is not done yet, and save after each training."""
    torch.set_num_threads(1)
    names = {"train": ("train",), "dev": ("dev",), "dev+test": ("dev", "test")}
    data: dict[str, Any] = {key: embeddings(*files) for key, files in names.items()}
    data["noise"] = {}
    if "reference" not in results:
        results["reference"] = reference(data)
    pilots, runs = results.setdefault("pilots", {}), results.setdefault("runs", {})
    for method, epsilon in sorted(cells(), key=lambda cell: METHODS[cell[0]]["steps"]):
        pilot = pilots.setdefault(f"{method}, {epsilon:g}", {})
        for setting in settings_of(method):
            if f"{setting:g}" not in pilot:
                pilot[f"{setting:g}"] = trained(method, epsilon, setting, PILOT, data)
                save_results(NAME, results)
        best = max(pilot, key=lambda key: float(pilot[key]["dev"]))
        for seed in SEEDS:
            key = f"{method}, {epsilon:g}, seed {seed}"
            if key not in runs or runs[key]["rate"] != pilot[best]["rate"]:
                runs[key] = trained(method, epsilon, float(best), seed, data)
                save_results(NAME, results)


def print_table(results: dict[str, Any]) -> None:
    table = Table(
        title="SST-2, 1000 training sentences, head on frozen embeddings: accuracy on dev and test [%]"
    )
    for column in ("epsilon", "method", "delta", "mean", "standard error", "seeds", "minus DP-SGD (paired)"):
        table.add_column(column)
    for epsilon in EPSILONS:
        for method, plan in METHODS.items():
            row = summary(results, method, epsilon)
            if row is not None:
                table.add_row(f"{epsilon:g}", method, f"{plan['delta']:g}", *row)
    Console(width=130).print(table)
    if results.get("reference"):
        Console().print(
            f"not private, logistic regression: {100 * statistics.fmean(results['reference']):.1f} %"
        )


def summary(results: dict[str, Any], method: str, epsilon: float) -> tuple[str, ...] | None:
    """Mean, standard error, seeds, and the paired difference from DP-SGD; None where nothing was run."""
    runs = results.get("runs", {})

    def of(name: str) -> dict[int, float]:
        keys = {seed: f"{name}, {epsilon:g}, seed {seed}" for seed in SEEDS}
        return {seed: 100 * runs[key]["accuracy"] for seed, key in keys.items() if key in runs}

    mine, theirs = of(method), of("dp-sgd")
    if not mine:
        return None
    both = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    difference = (
        "" if method == "dp-sgd" or len(both) < 2 else "{:+.2f} +- {:.2f}".format(*mean_and_error(both))
    )
    mean, error = mean_and_error(list(mine.values()))
    return f"{mean:.2f}", f"{error:.2f}", str(len(mine)), difference


def mean_and_error(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "show"], nargs="?", default="show")
    results = {k: v for k, v in load_results(NAME).items() if k in ("reference", "pilots", "runs")}
    if parser.parse_args().what == "measure":
        measure(results)
    print_table(results)


if __name__ == "__main__":
    main()
