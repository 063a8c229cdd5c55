"""Does zeroth order keep up with DP-SGD on 1000 private sentences (SST-2, a linear head on frozen embeddings)?

Both train the same head, one logit from 384 cached features (`sentences.py`), with the paper's steps and batches: ZO
10,000 and 75,000 steps of expected batch 16 (pure epsilon, 4 to 10,450: 2,000 of 20), DP-SGD 200 steps of 64. (DP-SGD
has the logit as a difference of two outputs: by symmetry a record's gradients of both are g and -g, so that clipping
and noise do to the difference what they do to one logit.) Under pure privacy the noise grows with the number of steps
while the signal only adds up, so 200 steps of all sentences are trained as well ("whole batch", ours), by DP-SGD with
Laplace noise too: gradients clipped in the 1-norm, the noise on every entry. A seed draws its 1000 training sentences
(the same for all methods), batches, noise and directions. Evaluated on dev and test together, 2,693 sentences.

Settings: ZO's rate is a times that at which the noise moves a logit by 1; a and the clip, like DP-SGD's rate, were the
best of a few with three pilot seeds, none of the five, on the training sentences that a pilot does not train on; the
75,000 steps take those of the 10,000. Like the paper's, this search is not in epsilon. What counts is clip / phi, in
units of a directional slope.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bare import feedback_trainer, zo_trainer
from benchmarks.markdown import difference
from benchmarks.options import program
from benchmarks.results_file import load_results, save_results
from benchmarks.zeroth_order.sentences import N_TRAIN, NORM, embeddings
from opusim.accounting import RecordCentral, ZoGaussian, ZoLaplace, calibrate_noise
from opusim.randomness.streams import SeededStream, derive_seed
from opusim.training.config.run import RunConfig, load_config
from opusim.training.data.samplers import make_sampler
from opusim.training.engine.algorithm import Trainer
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import FeedbackConfig
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.network import FullyConnected, LayerShape, build_sequential
from opusim.training.networks.optimizers import make_optimizer, set_learning_rate
from opusim.training.protections.record import RecordGradients
from opusim.training.zeroth_order.trainer import ScalarRelease

MODULE = "benchmarks.zeroth_order.sst2_head"
NAME, BASELINE = "zo_sst2", "dp-sgd"
DELTA, EPSILONS, SEEDS, PILOTS = 1e-5, (0.5, 1.0, 4.0), (0, 1, 2, 3, 4), (100, 101, 102)
PURE_EPSILONS = (4.0, 10.0, 15.0, 10450.0)
PHI = 0.01
Setting = tuple[float, ...]
SETTINGS: tuple[Setting, ...] = tuple((a, clip) for clip in (0.01, 0.05) for a in (0.3, 1.0, 3.0))
RATES: tuple[Setting, ...] = ((0.03,), (0.1,), (0.3,), (1.0,), (3.0,))
LONG = ", 75000 steps"
WHOLE = {"steps": 200, "batch": N_TRAIN, "delta": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    BASELINE: {"steps": 200, "batch": 64, "delta": DELTA, "epsilons": EPSILONS},
    "zo, gaussian": {"steps": 10_000, "batch": 16, "delta": DELTA, "epsilons": EPSILONS},
    "zo, laplace": {"steps": 10_000, "batch": 16, "delta": DELTA, "epsilons": EPSILONS},
    f"zo, gaussian{LONG}": {"steps": 75_000, "batch": 16, "delta": DELTA, "epsilons": EPSILONS},
    f"zo, laplace{LONG}": {"steps": 75_000, "batch": 16, "delta": DELTA, "epsilons": EPSILONS},
    "zo, laplace, pure": {"steps": 2_000, "batch": 20, "delta": 0.0, "epsilons": PURE_EPSILONS},
    "zo, laplace, pure, whole batch": {**WHOLE, "epsilons": (0.5, 1.0, *PURE_EPSILONS)},
    f"{BASELINE}, laplace, pure": {**WHOLE, "epsilons": PURE_EPSILONS},
}


class Head(nn.Module):
    """One logit: the score of class 1 against 0 for class 0; starts at zero."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_features, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        logit = self.linear(x)
        return torch.cat([torch.zeros_like(logit), logit], dim=1)


class LaplaceSgd:
    """DP-SGD of pure epsilon: records' gradients clipped to C in the 1-norm, Laplace(b C) on every entry of their sum.

    A record moves the sum by at most C in the 1-norm, so a step has pure epsilon 1 / b, that of `ZoLaplace`'s scalar.
    """

    def __init__(
        self, *, scale: float, clip: float, divisor: float, rate: float, stream: SeededStream
    ) -> None:
        self.model = Head(384)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        self._clip, self._divisor, self._scale, self._stream = clip, divisor, scale * clip, stream

    def step(self, x: Tensor, y: Tensor, *, step: int, **_: Any) -> None:
        """Do one update."""
        self._stream.seek(step)
        with torch.no_grad():
            residual = torch.sigmoid(self.model.linear(x)) - y[:, None]
        gradients = residual * torch.cat([x, torch.ones(len(x), 1)], dim=1)
        factors = self._clip / gradients.abs().sum(dim=1, keepdim=True).clamp_min(self._clip)
        squares = self._stream.normal((gradients.shape[1], 4)).double().square()
        noise = (squares @ torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)) * self._scale
        update = (((gradients * factors).sum(dim=0) + noise) / self._divisor).float()
        self.model.linear.weight.grad, self.model.linear.bias.grad = update[None, :-1], update[-1:]
        self.optimizer.step()


def least_noise(
    law: str, epsilon: float, *, batch: int, steps: int, delta: float = DELTA, records: int = N_TRAIN
) -> float:
    """Return the least noise in units of the clip that reaches epsilon; law: `BASELINE`, "laplace" or Gaussian."""
    common = {"sampling_probability": batch / records, "divisor": batch, "steps": steps, "clip_norm": 1.0}
    mechanism: Any
    if "laplace" in law:
        mechanism = ZoLaplace(scale=10.0, **common)
    else:
        kind, start = (RecordCentral, 1.0) if law == BASELINE else (ZoGaussian, 10.0)
        mechanism = kind(noise_multiplier=start, **common)
    return float(calibrate_noise(mechanism, target_epsilon=epsilon, delta=delta)[0].noise)


def noise_for(method: str, epsilon: float) -> float:
    """Return the least noise of a method that reaches epsilon."""
    plan = METHODS[method]
    return least_noise(method, epsilon, batch=plan["batch"], steps=plan["steps"], delta=plan["delta"])


def make(method: str, noise: float, setting: Setting, seed: int) -> tuple[Trainer | LaplaceSgd, Any]:
    """The trainer, and the configuration of its learning rate."""
    stream = SeededStream(seed, "central-noise")
    if method == BASELINE:
        return dp_sgd(noise, setting[0], stream, batch=METHODS[BASELINE]["batch"])
    factor, clip = setting
    batch, steps = METHODS[method]["batch"], METHODS[method]["steps"]
    if not method.startswith(BASELINE):
        law = "laplace" if "laplace" in method else "gaussian"
        rate = zo_rate(factor, spread(law, noise, clip), batch=batch, steps=steps)
        return zo_head(law, noise, clip, rate, seed, batch)
    clip *= math.sqrt(2 * 384 / math.pi)  # a gradient's 1-norm over its 2-norm, which is like a slope
    rate = zo_rate(factor, spread("laplace", noise, clip), batch=batch, steps=steps)
    made = LaplaceSgd(scale=noise, clip=clip / (2 * PHI), divisor=batch, rate=rate, stream=stream)
    return made, zo_config(rate).optimizer


def zo_config(rate: float) -> RunConfig:
    """Return the configuration of zeroth order at a rate that falls linearly."""
    optimizer = {"lr": rate, "schedule": "linear"}
    return load_config({"trainer": {"kind": "zo", "perturbation": PHI}, "optimizer": optimizer})


def spread(law: str, noise: float, clip: float) -> float:
    """Return the standard deviation of a step's noise."""
    return noise * (math.sqrt(2) if law == "laplace" else 1.0) * clip


def zo_head(law: str, noise: float, clip: float, rate: float, seed: int, batch: int) -> tuple[Trainer, Any]:
    """Return zeroth order of the head, and the configuration of its learning rate; no privacy by the law "none"."""
    config, network = zo_config(rate), AnyModule(Head(384), n_inputs=384, only_trained=True)
    stream = SeededStream(seed, "central-noise")
    private: dict[str, Any] = {"clip": clip, "scale": noise * clip, "noise": stream}
    if law == "none":
        private = {"clip": None, "scale": 0.0, "noise": None}
    release = ScalarRelease(divisor=batch, law="laplace" if law == "laplace" else "gaussian", **private)
    return zo_trainer(network, config, release, root=derive_seed(seed, "directions")), config.optimizer


def dp_sgd(noise: float, rate: float, stream: SeededStream, *, batch: int) -> tuple[Trainer, Any]:
    """Return DP-SGD of the head, and the configuration of its learning rate."""
    shape = LayerShape(n_outputs=2, activation="identity", bias=True)
    model = build_sequential(384, [shape], generator=torch.Generator().manual_seed(0), gain=0.0)
    network = FullyConnected(model)
    config = load_config({"trainer": {"kind": "bp"}, "optimizer": {"lr": rate, "momentum": 0.0}})
    protection = RecordGradients(clip_norm=1.0, noise_multiplier=noise, divisor=batch, noise=stream)
    optimizer = make_optimizer(network.parameters, config.optimizer)
    source = ClosedForm(network, config.trainer_as(FeedbackConfig))
    return feedback_trainer(source, optimizer, protection=protection), config.optimizer


def zo_rate(factor: float, spread: float, *, batch: int, steps: int) -> float:
    """Factor times the rate at which the noise of all steps moves a logit by about 1, the rate falling linearly."""
    return factor / (spread / (2 * PHI * batch) * NORM * math.sqrt(steps / 3))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).double().mean())


def trained(method: str, noise: float, setting: Setting, seed: int, data: dict[str, Any]) -> dict[str, Any]:
    """One training of a pilot seed or another: accuracy where it is looked at, seconds."""
    plan = METHODS[method]
    trainer, optimizer = make(method, noise, setting, seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data["train"][1])))
    chosen, others = order[:N_TRAIN], order[N_TRAIN:]  # the seed's training sentences, and the others
    x, y = data["train"][0][chosen], data["train"][1][chosen]
    pilot = {"held out": (data["train"][0][others], data["train"][1][others])}
    looked_at = pilot if seed in PILOTS else {"accuracy": data["dev+test"]}
    sampler = make_sampler("poisson", N_TRAIN, plan["batch"], derive_seed(seed, "batches"))
    started = time.process_time()
    for step in range(plan["steps"]):
        index = sampler.indices(step)
        set_learning_rate(trainer.optimizer, optimizer, step / plan["steps"])
        trainer.step(x[index], y[index], step=step, observe=False, records=index)
    seconds = time.process_time() - started
    return {name: accuracy(trainer.model, *part) for name, part in looked_at.items()} | {"seconds": seconds}


def chosen_setting(cells: dict[str, Any], method: str, epsilon: float, data: dict[str, Any]) -> Setting:
    """The best of a few on held-out training sentences; a long training takes that of its short one."""
    method = method.removesuffix(LONG)
    cell = cells.setdefault(key_of(method, epsilon), {"pilots": {}, "runs": {}})
    cell["noise"] = cell.get("noise") or noise_for(method, epsilon)
    for setting in RATES if method == BASELINE else SETTINGS:
        name = " ".join(f"{value:g}" for value in setting)
        if name not in cell["pilots"]:
            found = [trained(method, cell["noise"], setting, seed, data)["held out"] for seed in PILOTS]
            cell["pilots"][name] = statistics.fmean(found)
            save_results(NAME, {"cells": cells})
    best = max(cell["pilots"], key=lambda name: float(cell["pilots"][name]))
    return tuple(float(value) for value in best.split())


def measure(only: str = "") -> None:
    """Do what is not done yet, of one method or of all, and save after each training."""
    torch.set_num_threads(1)
    results = load_results(NAME)
    data: dict[str, Any] = {"train": embeddings("train"), "dev+test": embeddings("dev", "test")}
    cells = results.setdefault("cells", {})
    planned = [(method, e) for method, plan in METHODS.items() for e in reversed(plan["epsilons"])]
    for method, epsilon in planned:
        if only and method != only:
            continue
        setting = chosen_setting(cells, method, epsilon, data)
        cell = cells.setdefault(key_of(method, epsilon), {"runs": {}})
        cell["noise"] = cell.get("noise") or noise_for(method, epsilon)
        if cell.get("setting") != list(setting):
            cell |= {"setting": list(setting), "runs": {}}
        for seed in SEEDS:
            if str(seed) not in cell["runs"]:
                cell["runs"][str(seed)] = trained(method, cell["noise"], setting, seed, data)
                print(key_of(method, epsilon), seed, cell["runs"][str(seed)], flush=True)
                save_results(NAME, {"cells": cells})


def key_of(method: str, epsilon: float) -> str:
    return f"{method}, {epsilon:g}"


def accuracies(method: str, epsilon: float) -> list[float]:
    """Return the accuracies of a cell in per cent, by seed."""
    runs = load_results(NAME).get("cells", {}).get(key_of(method, epsilon), {}).get("runs", {})
    return [100 * runs[seed]["accuracy"] for seed in sorted(runs, key=int)]


def lead(method: str, other: str, epsilon: float) -> str:
    """Return how far a method is ahead of another one, seed by seed."""
    return difference(accuracies(method, epsilon), accuracies(other, epsilon))


if __name__ == "__main__":
    program(measure)
