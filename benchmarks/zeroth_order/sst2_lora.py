"""Does zeroth order keep up with DP-SGD on SST-2 when it trains LoRA in the encoder's top layer?

The lower five layers of all-MiniLM-L6-v2 (`sentences.py`) are frozen, so their outputs are computed once and kept;
the top layer gets low-rank updates (rank 8) of its query and value projections, and the mean over tokens goes to a head
of one logit: 12,673 trained parameters. ZO takes 2,000 steps of 16, DP-SGD (Opacus, per-sample gradients of the same
parameters, Poisson batches) 200 of 64, at delta 1e-5, with the same sentences, batches and initial factors. ZO's factor
of its rate (see `sst2_head.py`) and DP-SGD's rate are the best of four with one pilot seed on 2,000 training
sentences that the pilot leaves out.

A forward pass of 16 sentences through one layer takes some 30 ms a thread: a ZO run takes minutes. Every result is
saved as it comes; a second call resumes where the first one stopped.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bare import zo_trainer
from benchmarks.results_file import load_results, save_results
from benchmarks.zeroth_order.sentences import CACHE, MAX_TOKENS, NORM, load_encoder, read_sentences
from benchmarks.zeroth_order.sst2_head import (
    BASELINE,
    DELTA,
    PHI,
    PILOTS,
    SEEDS,
    key_of,
    least_noise,
    sentences_of,
    zo_rate,
)
from opusim.randomness.streams import SeededStream, derive_seed
from opusim.training.config import load_config
from opusim.training.data.samplers import make_sampler
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.optimizers import set_learning_rate
from opusim.training.zeroth_order.trainer import ScalarRelease

MODULE = "benchmarks.zeroth_order.sst2_lora"
NAME, RANK, LENGTH, HELD_OUT = "zo_sst2_lora", 8, 40, 2000
EPSILONS, CLIP = (4.0,), 0.05
PLANS: dict[str, dict[str, Any]] = {
    BASELINE: {"steps": 200, "batch": 64, "rates": (0.03, 0.1, 0.3, 1.0)},
    "zo, gaussian": {"steps": 2000, "batch": 16, "rates": (0.03, 0.1, 0.3, 1.0)},
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
        self.head = nn.Linear(encoder.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # (batch, length, width + 1), last: whether there is a token
        hidden, there = x[..., :-1], x[..., -1]
        mask = ((there - 1) * 1e9)[:, None, None, :]
        out = self.layer(hidden, attention_mask=mask)
        out = out[0] if isinstance(out, tuple) else out
        mean = (out * there[..., None]).sum(dim=1) / there.sum(dim=1, keepdim=True)
        logit = self.head(NORM * nn.functional.normalize(mean, dim=1))
        return torch.cat([torch.zeros_like(logit), logit], dim=1)


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


def noise_for(method: str, epsilon: float) -> float:
    """The least noise multiplier that reaches epsilon."""
    return least_noise(method, epsilon, batch=PLANS[method]["batch"], steps=PLANS[method]["steps"])


def zeroth_order(x: Tensor, y: Tensor, noise: float, factor: float, seed: int) -> nn.Module:
    plan = PLANS["zo, gaussian"]
    rate = zo_rate(factor, noise * CLIP, batch=plan["batch"], steps=plan["steps"])
    config = load_config(
        {"trainer": {"kind": "zo", "perturbation": PHI}, "optimizer": {"lr": rate, "schedule": "linear"}}
    )
    stream = SeededStream(seed, "central-noise")
    release = ScalarRelease(clip=CLIP, divisor=plan["batch"], scale=noise * CLIP, noise=stream)
    network = AnyModule(Top(seed), n_inputs=x.shape[1])
    root = derive_seed(seed, "directions")
    trainer = zo_trainer(network, config, release, root=root)
    sampler = make_sampler("poisson", len(x), plan["batch"], derive_seed(seed, "batches"))
    for step in range(plan["steps"]):
        index = sampler.indices(step)
        set_learning_rate(trainer.optimizer, config.optimizer, step / plan["steps"])
        trainer.step(x[index].float(), y[index], step=step, observe=False, records=index)
    return trainer.model


def dp_sgd(x: Tensor, y: Tensor, noise: float, rate: float, seed: int) -> nn.Module:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    warnings.simplefilter("ignore")
    plan = PLANS[BASELINE]
    top = Top(seed).train()  # its hooks ask for training mode
    for module in top.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = GradSampleModule(top)
    optimizer = DPOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        expected_batch_size=plan["batch"],
        generator=torch.Generator().manual_seed(derive_seed(seed, "noise") >> 1),
    )
    sampler = make_sampler("poisson", len(x), plan["batch"], derive_seed(seed, "batches"))
    for step in range(plan["steps"]):
        index = sampler.indices(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index].float()), y[index]).backward()
        optimizer.step()
    inner: nn.Module = model._module
    return inner


def trained(method: str, noise: float, rate: float, seed: int, data: dict[str, Any]) -> dict[str, float]:
    """One training of a pilot seed or another: accuracy where it is looked at, seconds."""
    x, y = data["train"]
    chosen, others = sentences_of(seed, data)
    started = time.process_time()
    train = dp_sgd if method == BASELINE else zeroth_order
    model = train(x[chosen], y[chosen], noise, rate, seed).eval()
    seconds = time.process_time() - started
    if seed in PILOTS:
        held_out = others[:HELD_OUT]
        return {"held out": accuracy(model, x[held_out], y[held_out]), "seconds": seconds}
    return {"accuracy": accuracy(model, *data["dev+test"]), "seconds": seconds}


def measure(results: dict[str, Any]) -> None:
    """Do what is not done yet, and save after each training."""
    torch.set_num_threads(1)
    data = {"train": hidden_states("train"), "dev+test": hidden_states("dev", "test")}
    for epsilon in EPSILONS:
        for method in PLANS:
            cell = results.setdefault(key_of(method, epsilon), {"pilots": {}, "runs": {}})
            cell["noise"] = cell.get("noise") or noise_for(method, epsilon)
            _fill(cell, method, data, results)


def _fill(cell: dict[str, Any], method: str, data: dict[str, Any], results: dict[str, Any]) -> None:
    """Search, then the seeds."""
    rates = {f"{rate:g}": rate for rate in PLANS[method]["rates"]}
    for name in rates.keys() - cell["pilots"].keys():
        cell["pilots"][name] = trained(method, cell["noise"], rates[name], PILOTS[0], data)
        save_results(NAME, {"delta": DELTA, "cells": results})
    cell["setting"] = max(rates.values(), key=lambda rate: cell["pilots"][f"{rate:g}"]["held out"])
    for seed in SEEDS:
        if str(seed) not in cell["runs"]:
            cell["runs"][str(seed)] = trained(method, cell["noise"], cell["setting"], seed, data)
            print(method, seed, cell["runs"][str(seed)], flush=True)
            save_results(NAME, {"delta": DELTA, "cells": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure"])
    parser.parse_args()
    measure(load_results(NAME).get("cells", {}))


if __name__ == "__main__":
    main()
