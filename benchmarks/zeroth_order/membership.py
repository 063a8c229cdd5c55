"""Does zeroth-order training reveal who was in the data, without noise and with it (Table 6 of the DP-ZO paper)?

A linear head on SST-2 embeddings (`sentences.py`), 1000 training sentences, and 32 canaries a run, each with a feature
of its own, as large as an embedding or five times as large, or with a token of its own; a fair coin for each says
whether it is trained on. An attacker who has the first and the last model scores each canary by how far its loss fell.
ZO takes 4,000 steps of 64, DP-SGD 200 of 64, on the same head; without noise neither clips. The area under the curve is
over all canaries of all runs, its standard error the one of ranks at 1/2. A canary of an embedding's size is what one
unusual sentence would be; five times it is an attacker who may write what no sentence could.

The paper makes each canary with one new token. "token" does this: the canary is another training sentence behind a
token of its own, whose entry in the encoder's table is drawn like the other entries, with a random label. Its feature
is what the encoder makes of that, and the head that is trained has no weight of its own for it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.bare import feedback_trainer, zo_trainer
from benchmarks.options import program
from benchmarks.results_file import load_results, save_results
from benchmarks.zeroth_order.sentences import (
    N_TRAIN,
    NORM,
    embed_by,
    embeddings,
    load_encoder,
    read_sentences,
)
from benchmarks.zeroth_order.sst2_head import least_noise
from opusim.randomness.streams import SeededStream, derive_seed
from opusim.training.config import load_config
from opusim.training.data.samplers import make_sampler
from opusim.training.engine.algorithm import Trainer
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import FeedbackConfig
from opusim.training.networks.network import FullyConnected, LayerShape, build_sequential
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.record import RecordGradients
from opusim.training.zeroth_order.trainer import ScalarRelease
from tests.support.canaries import Canaries, Scores, auc_error, own_features, pooled, record_losses

MODULE = "benchmarks.zeroth_order.membership"
NAME = "zo_membership"
DELTA, CANARIES, SIZES = 1e-5, 32, ("1", "5", "token")
EPSILONS = (math.inf, 10.0, 4.0, 1.0, 0.5)
PHI, CLIP = 0.01, 0.05
PLANS = {"zo": {"steps": 4000, "batch": 64, "rate": 0.02}, "dp-sgd": {"steps": 200, "batch": 64, "rate": 0.3}}
PAPER = {"zo": (71.4, 58.8, 55.6, 54.5, 53.2), "dp-sgd": (100.0, 71.9, 61.5, 55.0, 54.8)}
"""Table 6."""


def noise_for(method: str, epsilon: float) -> float:
    plan = PLANS[method]
    sizes = {"batch": int(plan["batch"]), "steps": int(plan["steps"])}
    return 0.0 if math.isinf(epsilon) else least_noise(method, epsilon, **sizes)


def make(method: str, noise: float, seed: int, n_features: int) -> Trainer:
    plan = PLANS[method]
    shape = LayerShape(n_outputs=2, activation="identity", bias=True)
    network = FullyConnected(
        build_sequential(n_features, [shape], generator=torch.Generator().manual_seed(seed), gain=0.01)
    )
    stream = SeededStream(seed, "central-noise")
    if method == "dp-sgd":
        config = load_config({"trainer": {"kind": "bp"}, "optimizer": {"lr": plan["rate"], "momentum": 0.0}})
        protection = RecordGradients(
            clip_norm=1.0 if noise else 1e9, noise_multiplier=noise, divisor=plan["batch"], noise=stream
        )
        optimizer = make_optimizer(network.parameters, config.optimizer)
        return feedback_trainer(
            ClosedForm(network, config.trainer_as(FeedbackConfig)), optimizer, protection=protection
        )
    config = load_config({"trainer": {"kind": "zo", "perturbation": PHI}, "optimizer": {"lr": plan["rate"]}})
    release = ScalarRelease(
        clip=CLIP if noise else None, divisor=plan["batch"], scale=noise * CLIP, noise=stream
    )
    return zo_trainer(network, config, release, root=derive_seed(seed, "directions"))


@cache
def token_canaries(seed: int) -> Canaries:
    """Return canaries that are sentences outside a seed's training sentences, each behind a token of its own."""
    tokenizer, model = load_encoder()
    train = read_sentences("train").text
    order = np.random.default_rng(seed).permutation(len(train))[N_TRAIN : N_TRAIN + CANARIES]
    tokens = [f"newtoken{number}" for number in range(CANARIES)]
    known, first = model.get_input_embeddings().weight.detach().clone(), len(tokenizer)
    tokenizer.add_tokens(tokens)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    generator = torch.Generator().manual_seed(derive_seed(seed, "new tokens"))
    with torch.no_grad():
        drawn = torch.randn(CANARIES, known.shape[1], generator=generator)
        model.get_input_embeddings().weight[first:] = known.mean(dim=0) + known.std(dim=0) * drawn
    texts = [f"{token} {train[place]}" for token, place in zip(tokens, order, strict=True)]
    coins = own_features(384, CANARIES, size=1.0, n_classes=2, seed=seed)
    return replace(coins, x=NORM * embed_by(tokenizer, model, texts))


def one_run(method: str, noise: float, size: str, seed: int, data: dict[str, Any]) -> dict[str, Any]:
    """Train once; scores by coin, and the accuracy on other sentences."""
    own = 0 if size == "token" else CANARIES
    canaries = (
        own_features(384, CANARIES, size=float(size) * NORM, n_classes=2, seed=seed)
        if own
        else token_canaries(seed)
    )
    chosen = torch.from_numpy(np.random.default_rng(seed).permutation(len(data["train"][1]))[:N_TRAIN])
    x = torch.cat([data["train"][0][chosen], torch.zeros(N_TRAIN, own)], dim=1)
    x, y = canaries.joined(x, data["train"][1][chosen])
    trainer = make(method, noise, seed, x.shape[1])
    before = record_losses(trainer.model, canaries.x, canaries.y)
    plan = PLANS[method]
    sampler = make_sampler("poisson", len(x), plan["batch"], derive_seed(seed, "batches"))
    for step in range(int(plan["steps"])):
        index = sampler.indices(step)
        trainer.step(x[index], y[index], step=step, observe=False, records=index)
    scores = canaries.scores(before, record_losses(trainer.model, canaries.x, canaries.y))
    test_x, test_y = data["test"]
    with torch.no_grad():
        output = trainer.model(torch.cat([test_x, torch.zeros(len(test_x), own)], dim=1))
    accuracy = float((output.argmax(dim=1) == test_y).double().mean())
    return {"first": scores.first.tolist(), "second": scores.second.tolist(), "accuracy": accuracy}


def measure(runs: int = 20) -> None:
    """Do what is not done yet, and save after each run."""
    torch.set_num_threads(1)
    results = load_results(NAME).get("cells", {})
    data = {"train": embeddings("train"), "test": embeddings("dev", "test")}
    for seed, method, epsilon, size in itertools.product(range(runs), PLANS, EPSILONS, SIZES):
        cell = results.setdefault(key_of(method, epsilon, size), {"runs": {}})
        if "noise" not in cell:
            cell["noise"] = noise_for(method, epsilon)
        if str(seed) not in cell["runs"]:
            cell["runs"][str(seed)] = one_run(method, cell["noise"], size, seed, data)
            save_results(NAME, {"cells": results})


def key_of(method: str, epsilon: float, size: str) -> str:
    return f"{method}, {epsilon:g}, size {size}"


def together(cell: dict[str, Any]) -> Scores:
    """The scores of all runs of a cell."""
    runs = cell["runs"].values()
    return pooled([Scores(first=np.array(run["first"]), second=np.array(run["second"])) for run in runs])


def table_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return method, canaries, epsilon and the area in per cent with its standard error at one half."""
    rows: list[tuple[str, ...]] = []
    for method, size, epsilon in itertools.product(PLANS, SIZES, EPSILONS):
        if cell := results.get(key_of(method, epsilon, size)):
            scores = together(cell)
            area = f"{100 * scores.auc:.1f} ± {100 * auc_error(scores):.1f}"
            rows.append((method, size, f"{epsilon:g}", area))
    return rows


if __name__ == "__main__":
    program(measure)
