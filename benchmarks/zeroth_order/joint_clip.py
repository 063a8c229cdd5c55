"""How close does zeroth order come to DP-SGD if loss differences are clipped jointly (SST-2, a linear head)?

With one direction z per step, a record's difference l(theta + phi z) - l(theta - phi z) = 2 phi z g is clipped by
itself. Its size |z g| varies, and a tight clip keeps only its sign: E sign(z g) z = 0.80 g / |g|, so a scalar carries
0.80 of the signal of a clipped gradient g at the same noise. With n directions whose differences are clipped jointly to
2 phi sqrt(n) C, a step releases n scalars for the epsilon of one (ZoGaussian with joint_clip). The vector of a
record's differences is 2 phi Z g, of norm about 2 phi sqrt(n) |g|, so this acts like DP-SGD's clip C, the share of the
signal is E |Z g| / (sqrt(n) |g|) = 0.995 for n = 50, the mean noise on an entry is DP-SGD's, and rates mean the same.

What is left is the choice of directions: a step's mean update has variance |G|^2 / n per entry for the batch's gradient
G. Beside the noise that epsilon demands, it falls with the number of directions of all steps, whether these are many
steps or many directions. So zeroth order takes 1,500 steps of 16 with 50 directions here, the loss pairs of the paper's
75,000 steps of 16, and DP-SGD its 200 steps of 64, on the head and the sentences of `sst2_head.py`. The head is linear,
so a step evaluates all directions in one product; a test compares it with the trainer's step.

Both are also given what is public, since zeroth order profits from few dimensions and from a good start:
- "public span": features less the mean, in the first 64 principal directions, of 2,000 sentences without labels, none
  of the private ones;
- "public start": the head starts at the difference of the embeddings of "It was great." and "It was terrible.", the
  paper's class words, with no data at all; its threshold is their middle, or the public mean.
"averaged" evaluates the mean of the parameters of the last half of all steps: post-processing of the same releases.
The rate, one of three for each, and whether to average are chosen with six pilot seeds on training sentences that those
seeds leave out, never on dev or test. Every training is saved as it ends; a second call resumes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import softplus

from benchmarks.bare import feedback_trainer
from benchmarks.markdown import command, difference, markdown, section, with_error
from benchmarks.options import listed
from benchmarks.results_file import load_results, save_results
from benchmarks.zeroth_order.sentences import N_TRAIN, NORM, embed, embeddings
from benchmarks.zeroth_order.sst2_head import (
    DELTA,
    EPSILONS,
    PHI,
    SEEDS,
    sentences_of,
)
from opusim.accounting import ZoGaussian, calibrate_noise
from opusim.randomness.streams import SeededStream, derive_seed
from opusim.training.config import load_config
from opusim.training.data.samplers import make_sampler
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import FeedbackConfig
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer, set_learning_rate
from opusim.training.protections.record import RecordGradients

MODULE, NAME = "benchmarks.zeroth_order.joint_clip", "zo_joint_clip"
DIRECTIONS, CLIP, RATES, PILOTS = 50, 1.0, (0.3, 1.0, 3.0), tuple(range(100, 106))
"""RATES are those of 200 steps; more steps take less each, so that the sum is the same."""
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

    @property
    def steps(self) -> int:
        """Number of steps."""
        return ZO_SIZES[0] if self.zo else SGD_SIZES[0]

    @property
    def batch(self) -> int:
        """Expected size of a batch."""
        return ZO_SIZES[1] if self.zo else SGD_SIZES[1]


SGD_SIZES, ZO_SIZES = (200, 64), (1500, 16)
"""Steps, and expected records of a batch."""
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
def noise_for(epsilon: float, steps: int, batch: int) -> float:
    """Return the least multiplier of joint clips that reaches epsilon; DP-SGD of these sizes has the same."""
    mechanism = ZoGaussian(
        noise_multiplier=1.0,
        sampling_probability=batch / N_TRAIN,
        divisor=batch,
        steps=steps,
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
    axes, centre = torch.eye(x.shape[1]), torch.zeros(x.shape[1])
    if plan.span:
        centre = x[public].mean(dim=0)
        axes = torch.linalg.svd(x[public] - centre, full_matrices=False)[2][:SPAN].T

    def seen(features: Tensor) -> Tensor:
        return (features - centre) @ axes

    start = torch.zeros(1, axes.shape[1] + 1)
    if plan.start:
        terrible, great = seen(words)
        weight = 2 * START * (great - terrible) / (great - terrible).square().sum()
        middle = (
            torch.zeros(len(weight)) if plan.span else (great + terrible) / 2
        )  # the public mean is the origin
        start = torch.cat([weight, -(weight @ middle)[None]])[None]
    looked_at = (x[rest], y[rest]) if seed in PILOTS else data["dev+test"]
    return Task(
        private=(seen(x[chosen]), y[chosen]), looked_at=(seen(looked_at[0]), looked_at[1]), start=start
    )


def zo_update(
    weight: Tensor, x: Tensor, y: Tensor, z: Tensor, noise: Tensor, *, clip: float, divisor: float
) -> Tensor:
    """Return (1 / n) sum_j s_j z_j of one step with joint clips, for a logit that is linear in the parameters.

    Args:
        weight: The parameters, shape (d,).
        x: Features of the batch, shape (batch, d).
        y: Labels 0 or 1, shape (batch,).
        z: Directions, shape (n, d).
        noise: On the sum of each direction, shape (n,).
        clip: C, of the norm of a record's differences.
        divisor: B.
    """
    sign, logits, moved = (1 - 2 * y)[:, None], (x @ weight)[:, None], PHI * x @ z.T
    plus, minus = softplus(sign * (logits + moved)), softplus(sign * (logits - moved))
    differences = plus.double() - minus.double()  # (batch, n)
    norms = torch.linalg.vector_norm(differences, dim=1, keepdim=True)
    sums = (differences * (clip / norms.clamp_min(clip))).sum(dim=0) + noise
    return (sums / (2 * PHI * divisor)).float() @ z / len(z)


def zo_walk(task: Task, noise: float, rate: float, seed: int) -> Iterator[Tensor]:
    """Yield the parameters after each step of zeroth order, shape (features + 1,)."""
    steps, batch = ZO_SIZES
    x, y = task.private
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    weight, generator = task.start[0].clone(), torch.Generator().manual_seed(derive_seed(seed, "joint clip"))
    sampler = make_sampler("poisson", N_TRAIN, batch, derive_seed(seed, "batches"))
    clip, rate = 2 * PHI * math.sqrt(DIRECTIONS) * CLIP, rate * SGD_SIZES[0] / steps
    for step in range(steps):
        index = sampler.indices(step)
        z = torch.randn(DIRECTIONS, len(weight), generator=generator)
        drawn = noise * clip * torch.randn(DIRECTIONS, generator=generator, dtype=torch.float64)
        update = zo_update(weight, x[index], y[index], z, drawn, clip=clip, divisor=batch)
        weight = weight - rate * (1 - step / steps) * update
        yield weight


def sgd_walk(task: Task, noise: float, rate: float, seed: int) -> Iterator[Tensor]:
    """Yield the difference of DP-SGD's two outputs after each step, shape (features + 1,).

    The outputs' gradients are g and -g. A clip of sqrt(2) C lets |g| be C, and the difference then moves like one logit
    with that clip at twice the rate.
    """
    linear, (x, y) = nn.Linear(task.start.shape[1] - 1, 2), task.private
    half = torch.cat([-task.start / 2, task.start / 2])
    with torch.no_grad():
        linear.weight.copy_(half[:, :-1])
        linear.bias.copy_(half[:, -1])
    network, (steps, batch) = FullyConnected(nn.Sequential(linear)), SGD_SIZES
    optimizer = {"lr": rate / 2, "momentum": 0.0, "schedule": "linear"}
    config = load_config({"trainer": {"kind": "bp"}, "optimizer": optimizer})
    stream = SeededStream(seed, "central-noise")
    clip = math.sqrt(2) * CLIP
    protection = RecordGradients(clip_norm=clip, noise_multiplier=noise, divisor=batch, noise=stream)
    made = make_optimizer(network.parameters, config.optimizer)
    trainer = feedback_trainer(
        ClosedForm(network, config.trainer_as(FeedbackConfig)), made, protection=protection
    )
    sampler = make_sampler("poisson", N_TRAIN, batch, derive_seed(seed, "batches"))
    for step in range(steps):
        index = sampler.indices(step)
        set_learning_rate(trainer.optimizer, config.optimizer, step / steps)
        trainer.step(x[index], y[index], step=step, observe=False, records=index)
        whole = torch.cat([linear.weight.detach(), linear.bias.detach()[:, None]], dim=1)
        yield whole[1] - whole[0]


def trained(plan: Plan, noise: float, rate: float, seed: int, task: Task) -> dict[str, float]:
    """One training: accuracy of the last parameters and of the mean of the last half, in per cent, and seconds."""
    started, mean = time.process_time(), torch.zeros(task.start.shape[1])
    for step, weight in enumerate((zo_walk if plan.zo else sgd_walk)(task, noise, rate, seed)):
        if 2 * step >= plan.steps:
            mean += weight * (2 / plan.steps)
    seconds = time.process_time() - started
    x, y = task.looked_at
    found = {
        kind: 100 * float(((x @ part[:-1] + part[-1] > 0) == (y == 1)).double().mean())
        for kind, part in zip(KINDS, (weight, mean), strict=True)
    }
    return {**found, "seconds": round(seconds, 2)}


def measure(only: str = "", epsilons: str = "1,0.5,4") -> None:
    """Choose rates with the pilots, train with the other seeds, and save after each cell.

    Args:
        only: Names of plans, separated by semicolons, each taken with its counterpart; empty for all.
        epsilons: Separated by commas.
    """
    plans, wanted = listed("--only", only, tuple(PLANS)), listed("--epsilons", epsilons, EPSILONS)
    torch.set_num_threads(1)
    data = {"train": embeddings("train"), "dev+test": embeddings("dev", "test")}
    cells: dict[str, Any] = load_results(NAME).get("cells", {})
    words = NORM * embed(list(CLASSES))
    for epsilon in wanted:
        for name, plan in PLANS.items():
            if name not in {*plans, *map(counterpart, plans)}:
                continue
            cell = cells.setdefault(
                key_of(name, epsilon), {"noise": noise_for(epsilon, plan.steps, plan.batch), "pilots": {}}
            )
            _fill(cell, plan, data, words, save=lambda: save_results(NAME, {"cells": cells}))
            print(
                key_of(name, epsilon),
                cell["rate"],
                cell["kind"],
                with_error(figures(cell), ".1f"),
                flush=True,
            )


def counterpart(name: str) -> str:
    """Return the name of DP-SGD under the same conditions."""
    return name.replace("zo, joint clip", BASELINE)


def _fill(cell: dict[str, Any], plan: Plan, data: dict[str, Any], words: Tensor, save: Any) -> None:
    """Do what a cell lacks: pilots by rate, then the runs of the best rate."""
    pilots = cell["pilots"]
    for rate in RATES:
        if f"{rate:g}" not in pilots:
            found = [
                trained(plan, cell["noise"], rate, seed, task_of(plan, seed, data, words)) for seed in PILOTS
            ]
            pilots[f"{rate:g}"] = {
                kind: round(statistics.fmean(run[kind] for run in found), 2) for kind in KINDS
            }
            save()
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


def left() -> int:
    """Return how many trainings of all plans, pilots aside, are not in the results."""
    cells = load_results(NAME).get("cells", {})
    return sum(
        len(SEEDS) - len(figures(cells.get(key_of(name, epsilon), {}), "last"))
        for name in PLANS
        for epsilon in EPSILONS
    )


def page_rows() -> list[tuple[str, ...]]:
    """Return a line for each plan and epsilon."""
    cells, rows = load_results(NAME).get("cells", {}), []
    for epsilon in EPSILONS:
        rival = load_results("zo_sst2").get("cells", {}).get(key_of(BASELINE, epsilon), {}).get("runs", {})
        theirs = [100 * rival[str(seed)]["accuracy"] for seed in SEEDS if str(seed) in rival]
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
                    with_error(mine, ".1f"),
                    difference(mine, theirs) if plan.zo else "",
                    difference(mine, same) if plan.zo else "",
                    f"{cell['rate']:g}, {cell['kind']}",
                    f"{statistics.fmean(run['seconds'] for run in cell['runs'].values()):.1f}",
                )
            )
    return rows


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    rows, found = page_rows(), load_results(NAME)
    text = (
        f"{ZO_SIZES[0]:,} steps of {ZO_SIZES[1]} with {DIRECTIONS} directions, clipped jointly, and DP-SGD of "
        f"{SGD_SIZES[0]} steps of {SGD_SIZES[1]}, at proven epsilon and delta 1e-5. Mean of seeds and standard error "
        f"on dev and test together ({found.get('date')}, {command(MODULE)}; the proof: [zeroth order]"
        "(../../docs/zeroth-order.md#what-is-guaranteed)). Public: the mean and "
        f"{SPAN} principal directions of {PUBLIC:,} "
        "other sentences without labels; a start at the embeddings of the class words. The rate, and whether the "
        "parameters of the last half of all steps are averaged, were chosen with other seeds on training sentences "
        "that these leave out, which no epsilon covers."
    )
    header = (
        "epsilon",
        "trained by",
        "accuracy [%]",
        "minus DP-SGD of the table above",
        "minus DP-SGD, same start and features",
        "rate, parameters",
        "s",
    )
    return section("Several directions, clipped jointly", text, markdown(header, rows)) if rows else ""


if __name__ == "__main__":
    typer.run(measure)
