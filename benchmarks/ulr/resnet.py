"""Does likelihood ratio training work on convolutions and a residual block: ResNet-5 on CIFAR-10, a few epochs?

Convolutions of 8, 16, 32 and 32 kernels, 3 x 3 at stride 1, ReLU, a residual connection around the last, one linear
layer (section 4.3 of the DP-ULR paper); 2 x 2 average pooling behind the first two convolutions, of which the paper
says nothing, keeps an epoch within minutes on a processor. No protection, antithetic pairs. Reported: accuracy by
epoch, seconds an epoch, and the same network by backpropagation (autograd) for as many epochs. Nothing is required.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

import opusim
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from training.data import Dataset, load_dataset
from training.data.samplers import ShuffledEpochsSampler
from training.runs.folder import RunFolder
from training.runs.run import evaluate_split

MODULE, NAME, FOLDER = "benchmarks.ulr.resnet", "ulr_resnet", Path("runs/ulr-resnet")
BATCH, COPIES, SIGMA, LR = 64, 2, 0.3, 0.002


class Residual(nn.Module):
    """x + convolution(x)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of x, (batch, channels, height, width)."""
        return x + self.convolution(x)


def resnet5(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (3, 32, 32)),
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        Residual(32), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )  # fmt: skip


def by_likelihood_ratios(data: Dataset, epochs: int, seed: int) -> dict[str, Any]:
    config = {
        "epochs": epochs,
        "seed": seed,
        "threads": 1,
        "optimizer": {"name": "adam", "lr": LR},
        "sampler": {"batch_size": BATCH, "drop_last": True},
        "trainer": {"kind": "ulr", "copies": COPIES, "sigma": SIGMA},
        "checkpoint": {"every_steps": 200},
    }
    folder, model = RunFolder(FOLDER / f"{epochs}-{seed}"), resnet5(seed)
    if not folder.started:
        run = opusim.train(config, data=data, model=model, folder=folder.path)
    elif folder.finished:
        run = opusim.load_run(folder.path, model=model)
    else:
        run = opusim.train(data=data, model=model, folder=folder.path, resume=True)
    return {
        "train_accuracy": [100 * record["train_accuracy"] for record in run.metrics],
        "test": 100 * (run.summary or {})["test_accuracy"],
        "epoch_s": [record["wall_s"] for record in run.folder.read_timing()],
    }


def by_backpropagation(data: Dataset, epochs: int, seed: int) -> dict[str, Any]:
    if data.test is None:
        raise ValueError("cifar-10 has no test records")
    model = resnet5(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    sampler = ShuffledEpochsSampler(n_records=len(data.train), seed=seed, batch_size=BATCH, drop_last=True)
    seconds = []
    for epoch in range(epochs):
        started = time.perf_counter()
        for step in range(sampler.steps_per_epoch):
            index = sampler.indices(epoch * sampler.steps_per_epoch + step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.train.x[index]), data.train.y[index]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    return {"test": 100 * evaluate_split(model, data.test, "cross-entropy")["accuracy"], "epoch_s": seconds}


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    rows = [
        (name, f"{found[name]['test']:.2f}", f"{statistics.mean(found[name]['epoch_s']):.0f}")
        for name in ("ulr", "backpropagation")
    ]
    text = (
        f"{found['epochs']} epochs, batch {found['batch']}, Adam at {found['lr']:g}, K = {found['copies']} antithetic "
        f"pairs, sigma = {found['sigma']:g}, one seed, no protection, one thread of a shared machine "
        f"({found['date']}, {command(MODULE)}). Nothing is required."
    )
    header = ("trainer", "test [%]", "seconds an epoch")
    return section("ResNet-5 on CIFAR-10", text, markdown(header, rows))


def main(epochs: int = 3, seed: int = 0) -> None:
    torch.set_num_threads(1)
    data = load_dataset("cifar-10", validation_fraction=0.0, split_seed=0)
    found = {
        "ulr": by_likelihood_ratios(data, epochs, seed),
        "backpropagation": by_backpropagation(data, epochs, seed),
    }
    for name, figures in found.items():
        epoch_s = sum(figures["epoch_s"]) / epochs
        print(f"{name:16} {figures['test']:.2f} % after {epochs} epochs, {epoch_s:.0f} s an epoch")
    save_results(
        NAME,
        {"epochs": epochs, "seed": seed, "batch": BATCH, "copies": COPIES, "sigma": SIGMA, "lr": LR, **found},
    )


if __name__ == "__main__":
    typer.run(main)
