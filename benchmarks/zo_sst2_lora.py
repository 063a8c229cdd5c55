"""Zeroth order against DP-SGD on SST-2 once more: LoRA in the top layer of the encoder, over cached frozen ones.

The lower five layers of all-MiniLM-L6-v2 (benchmarks/sst2.py) are frozen, so their outputs are computed once and kept;
the top layer gets low-rank updates (rank 8) of its query and value projections, and the mean over tokens goes to a head
of two classes: 13,058 trained parameters. ZO takes 2,000 steps of 16, DP-SGD (Opacus, per-sample gradients of the same
parameters, Poisson batches) 200 of 64, at epsilon 4 and delta 1e-5. Rates are the best of a few on the pilot seed.

A forward pass of 16 sentences through one layer takes some 30 ms a thread: a ZO run takes minutes, and every result is
written as it comes; a second call goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accounting import RecordCentral, ZoGaussian, calibrate
from benchmarks.console import print_table
from benchmarks.results_file import load_results, save_results
from benchmarks.sst2 import CACHE, MAX_TOKENS, N_TRAIN, NORM, load_encoder, read_sentences
from benchmarks.zo_sst2 import DELTA, PILOTS, SEEDS, shown
from opusim.randomness import SeededStream, derive_seed
from training.config import load_config
from training.data.samplers import make_sampler
from training.optimizers import set_learning_rate
from training.zo.network import ModuleNetwork
from training.zo.scalar_noise import GaussianScalars
from training.zo.trainer import ScalarRelease, ZoTrainer

NAME, EPSILON, RANK, LENGTH = "zo_sst2_lora", 4.0, 8, 40
PHI, CLIP = 0.01, 0.05
PLANS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"steps": 200, "batch": 64, "rates": (0.03, 0.1, 0.3)},
    "zo": {"steps": 2000, "batch": 16, "rates": (1e-3, 3e-3)},
}


class LowRank(nn.Module):
    """A linear layer with a trained low-rank update; the layer itself stays."""

    def __init__(self, inner: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, inner.out_features, bias=False)
        with torch.no_grad():
            self.down.weight.normal_(std=inner.in_features**-0.5, generator=generator)
            self.up.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.inner(x) + self.up(self.down(x))


class Top(nn.Module):
    """The last layer with its updates, the mean over tokens and a head: from hidden states to class scores."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        _, encoder = load_encoder()
        self.layer = encoder.encoder.layer[-1].requires_grad_(False)
        attention = self.layer.attention.self
        attention.query, attention.value = (
            LowRank(attention.query, generator),
            LowRank(attention.value, generator),
        )
        self.head = nn.Linear(encoder.config.hidden_size, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # (batch, length, width + 1), last: whether there is a token
        hidden, there = x[..., :-1], x[..., -1]
        mask = ((there - 1) * 1e9)[:, None, None, :]
        out = self.layer(hidden, attention_mask=mask)
        out = out[0] if isinstance(out, tuple) else out
        mean = (out * there[..., None]).sum(dim=1) / there.sum(dim=1, keepdim=True)
        return self.head(NORM * nn.functional.normalize(mean, dim=1))


def hidden_states(*names: str) -> tuple[Tensor, Tensor]:
    """Outputs of the fifth layer (n, LENGTH, 385), the last entry telling where there is a token; and labels."""
    sentences = read_sentences(*names)
    file = CACHE / f"sst2-hidden-{'-'.join(names)}.npy"
    if not file.exists():
        tokenizer, model = load_encoder()
        parts = []
        with torch.no_grad():
            for start in range(0, len(sentences.text), 64):
                batch = tokenizer(
                    sentences.text[start : start + 64], padding="max_length", truncation=True,
                    max_length=min(LENGTH, MAX_TOKENS), return_tensors="pt",
                )  # fmt: skip
                states = model(**batch, output_hidden_states=True).hidden_states[-2]
                parts.append(torch.cat([states, batch["attention_mask"].unsqueeze(2)], dim=2).half())
        CACHE.mkdir(parents=True, exist_ok=True)
        np.save(file, torch.cat(parts).numpy())
    return torch.from_numpy(np.load(file)), sentences.y


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        right = [
            (model(a.float()).argmax(1) == b).sum() for a, b in zip(x.split(256), y.split(256), strict=True)
        ]
    return float(torch.stack(right).sum() / len(y))


def zeroth_order(x: Tensor, y: Tensor, rate: float, seed: int) -> nn.Module:
    plan = PLANS["zo"]
    start = ZoGaussian(
        noise_multiplier=4.0, sampling_probability=plan["batch"] / N_TRAIN, clip_norm=CLIP, divisor=plan["batch"],
        steps=plan["steps"],
    )  # fmt: skip
    noise = calibrate(start, target_epsilon=EPSILON, delta=DELTA)[0].noise_multiplier
    config = load_config(
        {"trainer": {"kind": "zo", "perturbation": PHI}, "optimizer": {"lr": rate, "schedule": "linear"}}
    )
    stream = GaussianScalars(SeededStream(seed, "central-noise"))
    release = ScalarRelease(clip=CLIP, divisor=plan["batch"], scale=noise * CLIP, noise=stream)
    network = ModuleNetwork(Top(seed), x.shape[1])
    root = derive_seed(seed, "directions")
    trainer = ZoTrainer(network, config.trainer, config.optimizer, release, root=root)
    sampler = make_sampler("poisson", len(x), plan["batch"], derive_seed(seed, "batches"))
    for step in range(plan["steps"]):
        index = sampler.indices(step)
        set_learning_rate(trainer.optimizer, config.optimizer, step / plan["steps"])
        trainer.step(x[index].float(), y[index], step=step, observe=False, records=index)
    return trainer.model


def dp_sgd(x: Tensor, y: Tensor, rate: float, seed: int) -> nn.Module:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    warnings.simplefilter("ignore")
    plan = PLANS["dp-sgd"]
    start = RecordCentral(
        noise_multiplier=1.0, sampling_probability=plan["batch"] / N_TRAIN, clip_norm=1.0, divisor=plan["batch"],
        steps=plan["steps"],
    )  # fmt: skip
    noise = calibrate(start, target_epsilon=EPSILON, delta=DELTA)[0].noise_multiplier
    top = Top(seed).train()  # its hooks ask for training mode
    for module in top.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = GradSampleModule(top)
    optimizer = DPOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate),
        noise_multiplier=noise, max_grad_norm=1.0, expected_batch_size=plan["batch"],
        generator=torch.Generator().manual_seed(derive_seed(seed, "noise") >> 1),
    )  # fmt: skip
    sampler = make_sampler("poisson", len(x), plan["batch"], derive_seed(seed, "batches"))
    for step in range(plan["steps"]):
        index = sampler.indices(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index].float()), y[index]).backward()
        optimizer.step()
    inner: nn.Module = model._module
    return inner


def trained(method: str, rate: float, seed: int, data: dict[str, Any]) -> dict[str, float]:
    chosen = torch.from_numpy(np.random.default_rng(seed).permutation(len(data["train"][1]))[:N_TRAIN])
    started = time.perf_counter()
    train = zeroth_order if method == "zo" else dp_sgd
    model = train(data["train"][0][chosen], data["train"][1][chosen], rate, seed)
    seconds = time.perf_counter() - started
    dev, both = accuracy(model, *data["dev"]), accuracy(model, *data["dev+test"])
    return {"rate": rate, "dev": dev, "accuracy": both, "seconds": seconds}


def measure(results: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    names = {"train": ("train",), "dev": ("dev",), "dev+test": ("dev", "test")}
    data = {key: hidden_states(*files) for key, files in names.items()}
    for method, plan in PLANS.items():
        cell = results.setdefault(method, {"pilots": {}, "runs": {}})
        for rate in plan["rates"]:
            if f"{rate:g}" not in cell["pilots"]:
                cell["pilots"][f"{rate:g}"] = trained(method, rate, PILOTS[0], data)
                save_results(NAME, {"epsilon": EPSILON, "delta": DELTA, "cells": results})
        best = max(plan["rates"], key=lambda rate: cell["pilots"][f"{rate:g}"]["dev"])
        for seed in SEEDS:
            if str(seed) not in cell["runs"]:
                cell["runs"][str(seed)] = trained(method, best, seed, data)
                save_results(NAME, {"epsilon": EPSILON, "delta": DELTA, "cells": results})


COLUMNS = ("method", "accuracy [%]", "seeds", "minus DP-SGD, paired", "seconds")


def table_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A method a row."""
    rows: list[tuple[str, ...]] = []
    theirs = results.get("dp-sgd", {}).get("runs", {})
    for method, cell in results.items():
        values = [100 * run["accuracy"] for run in cell["runs"].values()]
        both = [
            100 * (run["accuracy"] - theirs[s]["accuracy"]) for s, run in cell["runs"].items() if s in theirs
        ]
        if values:
            difference = shown(both, "+.1f") if both and method != "dp-sgd" else ""
            seconds = statistics.fmean(run["seconds"] for run in cell["runs"].values())
            rows.append((method, shown(values), str(len(values)), difference, f"{seconds:.0f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "show"], nargs="?", default="show")
    results = load_results(NAME).get("cells", {})
    if parser.parse_args().what == "measure":
        measure(results)
    title = f"SST-2, LoRA in the top layer, epsilon {EPSILON:g}: dev and test together"
    print_table(title, COLUMNS, table_rows(results))


if __name__ == "__main__":
    main()
