"""How close does zeroth order come to DP-SGD if loss differences are clipped jointly (SST-2, a linear head)?

With one direction z per step, a record's difference l(theta + phi z) - l(theta - phi z) = 2 phi z g is clipped alone.
Its size |z g| varies, and a tight clip keeps only its sign: E sign(z g) z = 0.80 g / |g|, so a scalar carries 0.80 of
the signal of a clipped gradient g at the same noise. With n directions whose differences are clipped jointly to
2 phi sqrt(n) C, a step releases n scalars for the epsilon of one (ZoGaussian with joint_clip). The vector of a
record's differences is 2 phi Z g, of norm about 2 phi sqrt(n) |g|, so this acts like DP-SGD's clip C, the share of the
signal is E |Z g| / (sqrt(n) |g|) = 0.995 for n = 50, the mean noise on an entry is DP-SGD's, and rates mean the same.

Here both train the head of `sst2_head.py` on its sentences with the steps, batches and noise multiplier of DP-SGD, 200
steps of 64. Both are also given what is public, since zeroth order profits from few dimensions and from a good start:
- "public span": only the first 64 principal directions of 2,000 sentences without labels, none of the private ones;
- "public start": the head starts at the difference of the embeddings of "It was great." and "It was terrible.", the
  paper's class words, with no data at all.
"averaged" evaluates the mean of the parameters of the last half of all steps: post-processing of the same releases.
DP-SGD chooses its rate, and whether to average, with the pilot seeds of `sst2_head.py` on training sentences that those
seeds leave out, never on dev or test; zeroth order takes them over, and has no search of its own. Every training is
saved as it ends; a second call resumes.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import typer
from torch import Tensor, nn

from accounting import ZoGaussian, calibrate_noise
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.zeroth_order.sentences import N_TRAIN, NORM, embed, embeddings
from benchmarks.zeroth_order.sst2_head import (
    DELTA,
    EPSILONS,
    PHI,
    PILOTS,
    SEEDS,
    Head,
    accuracy,
    sentences_of,
    shown,
)
from opusim.randomness.streams import SeededStream, derive_seed
from training.config import load_config
from training.data.samplers import make_sampler
from training.feedback.config import FeedbackConfig
from training.feedback.trainer import FeedbackTrainer
from training.networks.base import ModuleNetwork
from training.networks.network import FullyConnected
from training.networks.optimizers import make_optimizer, set_learning_rate
from training.protections.record import RecordGradients
from training.zeroth_order.trainer import GaussianScalars, ScalarRelease, ZoTrainer

MODULE, NAME = "benchmarks.zeroth_order.joint_clip", "zo_joint_clip"
STEPS, BATCH, DIRECTIONS, RATES = 200, 64, 50, (0.03, 0.1, 0.3, 1.0, 3.0)
CLIP, RATE_OF_LOGIT = math.sqrt(0.5), 2.0
"""DP-SGD's head has two outputs with gradients g and -g. A clip of 1 lets |g| be CLIP, and their difference then moves
like one logit of that clip at RATE_OF_LOGIT times the rate."""
PUBLIC, SPAN, CLASSES, START = 2000, 64, ("It was terrible.", "It was great."), 2.0
"""START: the logit of each class's own words under the public start."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to train.

    Attributes:
        zo: Whether by zeroth order; else by DP-SGD.
        span: Whether features are cut to the public span.
        start: Whether the head has the public start.
    """

    zo: bool
    span: bool = False
    start: bool = False


PLANS = {
    f"{name}{text}": Plan(zo=zo, span=span, start=start)
    for text, span, start in (
        ("", False, False),
        (", public span", True, False),
        (", public start", False, True),
        (", public span and start", True, True),
    )
    for name, zo in (("dp-sgd", False), ("zo, joint clip", True))
}
BASELINE = "dp-sgd"


@cache
def noise_for(epsilon: float) -> float:
    """Return the least multiplier of joint clips that reaches epsilon, which is that of DP-SGD."""
    mechanism = ZoGaussian(
        noise_multiplier=1.0,
        sampling_probability=BATCH / N_TRAIN,
        divisor=BATCH,
        steps=STEPS,
        clip_norm=1.0,
        directions=DIRECTIONS,
        joint_clip=True,
    )
    return float(calibrate_noise(mechanism, target_epsilon=epsilon, delta=DELTA)[0].noise)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one training sees.

    Attributes:
        private: Features and labels of the 1000 sentences.
        looked_at: Features and labels on which accuracy is measured.
        start: The head's first weights and bias, shape (1, features + 1).
    """

    private: tuple[Tensor, Tensor]
    looked_at: tuple[Tensor, Tensor]
    start: Tensor


def task_of(plan: Plan, seed: int, data: dict[str, tuple[Tensor, Tensor]], words: Tensor) -> Task:
    """Return the sentences of a seed as a plan sees them; a pilot looks at training sentences that it leaves out.

    Args:
        plan: How it trains.
        seed: One of `SEEDS` or `PILOTS`.
        data: Embeddings and labels, "train" and "dev+test".
        words: Embeddings of the two `CLASSES`, shape (2, 384).
    """
    x, y = data["train"]
    chosen, others = sentences_of(seed, {"train": data["train"]})
    public, rest = others[:PUBLIC], others[PUBLIC:]
    axes = torch.eye(x.shape[1])
    if plan.span:
        axes = torch.linalg.svd(x[public] - x[public].mean(dim=0), full_matrices=False)[2][:SPAN].T
    start = torch.zeros(1, axes.shape[1] + 1)
    if plan.start:
        terrible, great = words @ axes
        weight = 2 * START * (great - terrible) / (great - terrible).square().sum()
        start = torch.cat([weight, -(weight @ (great + terrible) / 2)[None]])[None]
    looked_at = (x[rest], y[rest]) if seed in PILOTS else data["dev+test"]
    return Task(
        private=(x[chosen] @ axes, y[chosen]), looked_at=(looked_at[0] @ axes, looked_at[1]), start=start
    )


def zo_trainer(task: Task, noise: float, rate: float, seed: int) -> tuple[ZoTrainer, Any]:
    """Return zeroth order with joint clips, and the configuration of its rate."""
    n_features = task.start.shape[1] - 1
    model = Head(n_features)
    with torch.no_grad():
        model.linear.weight.copy_(task.start[:, :-1])
        model.linear.bias.copy_(task.start[0, -1:])
    options = {"kind": "zo", "perturbation": PHI, "directions": DIRECTIONS}
    config = load_config(
        {"trainer": options, "optimizer": {"lr": RATE_OF_LOGIT * rate, "schedule": "linear"}}
    )
    clip = 2 * PHI * math.sqrt(DIRECTIONS) * CLIP
    stream = GaussianScalars(SeededStream(seed, "central-noise"))
    release = ScalarRelease(clip=clip, divisor=BATCH, scale=noise * clip, noise=stream, joint=True)
    root = derive_seed(seed, "directions")
    network = ModuleNetwork(model, n_features)
    return ZoTrainer(network, config.trainer, config.optimizer, release, root=root), config.optimizer


def dp_sgd_trainer(task: Task, noise: float, rate: float, seed: int) -> tuple[FeedbackTrainer, Any]:
    """Return DP-SGD of the same head with two outputs, and the configuration of its rate."""
    linear = nn.Linear(task.start.shape[1] - 1, 2)
    with torch.no_grad():  # the difference of the two outputs is the logit
        linear.weight.copy_(torch.cat([-task.start[:, :-1] / 2, task.start[:, :-1] / 2]))
        linear.bias.copy_(torch.cat([-task.start[0, -1:] / 2, task.start[0, -1:] / 2]))
    network = FullyConnected(nn.Sequential(linear))
    optimizer = {"lr": rate, "momentum": 0.0, "schedule": "linear"}
    config = load_config({"trainer": {"kind": "bp"}, "optimizer": optimizer})
    protection = RecordGradients(
        clip_norm=1.0, noise_multiplier=noise, divisor=BATCH, noise=SeededStream(seed, "central-noise")
    )
    made = make_optimizer(network.parameters, config.optimizer)
    trainer = FeedbackTrainer(network, made, config.trainer_as(FeedbackConfig), protection=protection)
    return trainer, config.optimizer


def trained(plan: Plan, noise: float, rate: float, seed: int, task: Task) -> dict[str, float]:
    """One training: accuracy of the last parameters and of the mean of the last half, in per cent, and seconds."""
    trainer, optimizer = (zo_trainer if plan.zo else dp_sgd_trainer)(task, noise, rate, seed)
    (x, y), sampler = task.private, make_sampler("poisson", N_TRAIN, BATCH, derive_seed(seed, "batches"))
    started = time.process_time()
    parameters = list(trainer.model.parameters())
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(STEPS):
        index = sampler.indices(step)
        set_learning_rate(trainer.optimizer, optimizer, step / STEPS)
        trainer.step(x[index], y[index], step=step, observe=False, records=index)
        if 2 * step >= STEPS:
            for total, parameter in zip(sums, parameters, strict=True):
                total.add_(parameter.detach(), alpha=2 / STEPS)
    seconds = time.process_time() - started
    last = 100 * accuracy(trainer.model, *task.looked_at)
    with torch.no_grad():
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.copy_(total)
    return {
        "last": last,
        "averaged": 100 * accuracy(trainer.model, *task.looked_at),
        "seconds": round(seconds, 2),
    }


def measure(only: str = "", epsilons: str = "1,0.5,4") -> None:
    """Choose rates with the pilots, train with the other seeds, and save after each cell.

    Args:
        only: One plan of zeroth order by its name, with its counterpart; empty for all.
        epsilons: Separated by commas.
    """
    torch.set_num_threads(1)
    data = {"train": embeddings("train"), "dev+test": embeddings("dev", "test")}
    cells: dict[str, Any] = load_results(NAME).get("cells", {})
    words = NORM * embed(list(CLASSES))
    for epsilon in map(float, epsilons.split(",")):
        for name, plan in PLANS.items():
            if only and name not in (only, counterpart(only)):
                continue
            cell = cells.setdefault(key_of(name, epsilon), {"noise": noise_for(epsilon)})
            theirs = cells[key_of(counterpart(name), epsilon)]
            _fill(cell, theirs, plan, data, words, save=lambda: save_results(NAME, {"cells": cells}))
            print(key_of(name, epsilon), cell["rate"], cell["kind"], shown(figures(cell)), flush=True)


def counterpart(name: str) -> str:
    """Return the name of DP-SGD under the same conditions."""
    return name.replace("zo, joint clip", BASELINE)


def _fill(
    cell: dict[str, Any], theirs: dict[str, Any], plan: Plan, data: dict[str, Any], words: Tensor, save: Any
) -> None:
    """Do what a cell lacks: the pilots of DP-SGD by rate, then the runs at the best rate of DP-SGD's cell."""
    for rate in () if plan.zo else RATES:
        if f"{rate:g}" not in cell.setdefault("pilots", {}):
            found = [
                trained(plan, cell["noise"], rate, seed, task_of(plan, seed, data, words)) for seed in PILOTS
            ]
            cell["pilots"][f"{rate:g}"] = {
                kind: round(statistics.fmean(run[kind] for run in found), 2) for kind in KINDS
            }
            save()
    pilots = theirs["pilots"]
    best = max(pilots, key=lambda rate: float(max(pilots[rate].values())))
    cell |= {"rate": float(best), "kind": max(KINDS, key=lambda kind: float(pilots[best][kind]))}
    runs = cell.setdefault("runs", {})
    for seed in SEEDS:
        if str(seed) not in runs:
            task = task_of(plan, seed, data, words)
            runs[str(seed)] = trained(plan, cell["noise"], cell["rate"], seed, task)
            save()


KINDS = ("last", "averaged")
"""Which parameters are evaluated: the last, or the mean over the last half of all steps."""


def key_of(name: str, epsilon: float) -> str:
    """Name of a cell in the results."""
    return f"{name}, {epsilon:g}"


def figures(cell: dict[str, Any], kind: str = "") -> list[float]:
    """Return the accuracies of a cell's runs by seed, of the kind that its pilots chose unless one is named."""
    return [
        cell["runs"][str(seed)][kind or cell["kind"]] for seed in SEEDS if str(seed) in cell.get("runs", {})
    ]


def page_rows() -> list[tuple[str, ...]]:
    """Return a line for each plan and epsilon."""
    cells, rows = load_results(NAME).get("cells", {}), []
    for epsilon in EPSILONS:
        theirs = figures(cells.get(key_of(BASELINE, epsilon), {"kind": "last"}))
        for name, plan in PLANS.items():
            cell = cells.get(key_of(name, epsilon), {})
            if not figures(cell, "last"):
                continue
            same = figures(cells.get(key_of(counterpart(name), epsilon), {"kind": "last"}))
            mine = figures(cell)
            rows.append(
                (
                    f"{epsilon:g}",
                    name,
                    shown(mine),
                    _paired(mine, theirs) if name != BASELINE else "",
                    _paired(mine, same) if plan.zo else "",
                    f"{cell['rate']:g}, {cell['kind']}",
                    f"{statistics.fmean(run['seconds'] for run in cell['runs'].values()):.1f}",
                )
            )
    return rows


def _paired(mine: list[float], theirs: list[float]) -> str:
    return (
        shown([a - b for a, b in zip(mine, theirs, strict=True)], "+.1f") if len(mine) == len(theirs) else ""
    )


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    rows, found = page_rows(), load_results(NAME)
    text = (
        f"{STEPS} steps of {BATCH}, {DIRECTIONS} directions a step, clipped jointly: the noise multiplier and the "
        "proven epsilon at delta 1e-5 are those of DP-SGD. Mean of seeds and standard error on dev and test together "
        f"({found.get('date')}, {command(MODULE)}). Public: the span of {SPAN} principal directions of {PUBLIC:,} "
        "other sentences without labels; a start at the embeddings of the class words. DP-SGD's rate, and "
        "whether the parameters of the last half of all steps are averaged, were chosen with other seeds on training "
        "sentences that these leave out, which no epsilon covers; zeroth order takes both over."
    )
    header = (
        "epsilon",
        "trained by",
        "accuracy [%]",
        "minus DP-SGD",
        "minus DP-SGD with the same",
        "rate, parameters",
        "s",
    )
    return section("Several directions, clipped jointly", text, markdown(header, rows)) if rows else ""


if __name__ == "__main__":
    typer.run(measure)
