"""What does a network lose on an analog device in a second to a year, and what does training with noise give back?

FashionMNIST, on one thread: 784-256-10 with ReLU, and two convolutions (8 channels 5 x 5, 16 channels 3 x 3, strides 2)
with a linear layer. Each is trained clean with Adam 0.002 for 3 epochs, batch 128, then for 3 more at 0.001 falling to
0 by a cosine: clean again, or with the noise of weights and outputs that each device states for one day after
programming, and weights limited to 2.5 standard deviations of their row (`opusim.noise_aware`). The networks are put on
chips and evaluated on the 10,000 test images; drift is compensated by one factor for each layer. Required: training
with noise gives back at least half of what the clean network loses at one day.

Results are written after each chip; a second call measures what is missing.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import nn

from benchmarks.markdown import command, markdown, section, verdict
from benchmarks.results_file import load_results, save_results
from opusim import convert, noise_aware
from opusim.tables import print_table
from training.config.data import DataConfig
from training.data import Dataset, Split
from training.data.catalogue import build_dataset

MODULE, NAME = "benchmarks.analog.lifetimes", "analog_lifetimes"
NETWORKS = ("cnn", "mlp")
DEVICES = ("pcm", "hermes", "reram")
TIMES_S = {"1 s": 1.0, "1 h": 3600.0, "1 d": 86_400.0, "1 y": 31_557_600.0}
TRAININGS = ("clean", "device noise")
EPOCHS = (3, 3)
CHIPS = 2
CLIP = 2.5
"""Limit of weights in training with noise, standard deviations of their row."""
SHARE_GIVEN_BACK = 0.5
STANDARD_ERROR = 0.32
"""Of an accuracy of 88 % on 10,000 test images, in points."""
_AT_ONCE = 1000


def network(name: str) -> nn.Sequential:
    """Return a fresh network on images of shape (1, 28, 28)."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    first, second = nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.Conv2d(8, 16, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(784, 10))


def images(split: Split, data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of mean 0 and standard deviation 1 over the training set, and their labels."""
    x = (split.x - data.train.x.mean()) / data.train.x.std()
    return x.reshape(-1, 1, 28, 28), split.y


def train(
    model: nn.Module, data: Dataset, epochs: int, rate: float, *, falling: bool, seed: int
) -> nn.Module:
    """Train in place; the seed gives the order of the records."""
    torch.manual_seed(seed)
    x, y = images(data.train, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = epochs * len(torch.arange(len(x)).split(128))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.0 if falling else rate)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def trained(name: str, data: Dataset, noise: str | None, epochs: tuple[int, int], seed: int) -> nn.Module:
    """Return a network that was trained clean and then, clean or with the noise of a device, to the end."""
    torch.manual_seed(seed)
    model = train(network(name), data, epochs[0], 2e-3, falling=False, seed=seed)
    if noise is not None:
        noise_aware(model, noise, after_s=TIMES_S["1 d"], clip=CLIP, seed=seed)
    return train(model, data, epochs[1], 1e-3, falling=True, seed=seed + 1)


def accuracy(model: nn.Module, data: Dataset) -> float:
    """Test accuracy, percent."""
    x, y = images(data.test, data)
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in x.split(_AT_ONCE)])
    return 100 * float((found == y).float().mean())


def on_chip(model: nn.Module, data: Dataset, device: str, chip: int) -> dict[str, float]:
    """Test accuracy on one chip at every time."""
    found, elapsed = {}, 0.0
    with convert(model, device, seed=chip) as analog:
        for time, seconds in TIMES_S.items():
            analog.wait(seconds - elapsed)
            elapsed = seconds
            found[time] = round(accuracy(analog, data), 2)
    return found


def measure(epochs: tuple[int, int], chips: int, *, save: bool) -> list[dict[str, Any]]:
    """Return a row for each network, training, device and chip; those of an earlier call are kept."""
    torch.set_num_threads(1)
    settings = {"epochs": list(epochs)}
    earlier = load_results(NAME) if save else {}
    rows = list(earlier.get("rows", [])) if earlier.get("settings") == settings else []
    data = build_dataset(DataConfig(name="fashion-mnist"))
    known = {(row["network"], row["training"], row["device"], row["chip"]) for row in rows}
    for name in NETWORKS:
        clean = None
        for device in DEVICES:
            for training in TRAININGS:
                missing = [chip for chip in range(chips) if (name, training, device, chip) not in known]
                if not missing:
                    continue
                if training == "clean":
                    model = clean = clean or trained(name, data, None, epochs, seed=1)
                else:
                    model = trained(name, data, device, epochs, seed=1)
                digital = round(accuracy(model, data), 2)
                for chip in missing:
                    row = {
                        "network": name,
                        "training": training,
                        "device": device,
                        "chip": chip,
                        "digital": digital,
                        "accuracy": on_chip(model, data, device, chip),
                    }
                    rows.append(row)
                    print(row, flush=True)
                    if save:
                        save_results(NAME, {"settings": settings, "rows": rows})
    return rows


def means(rows: list[dict[str, Any]], name: str, device: str, training: str) -> dict[str, float]:
    """Return the accuracy in digital memory and, averaged over chips, at every time; empty without rows."""
    wanted = (name, device, training)
    own = [row for row in rows if (row["network"], row["device"], row["training"]) == wanted]
    if not own:
        return {}
    at_times = {time: statistics.mean(row["accuracy"][time] for row in own) for time in TIMES_S}
    return {"digital": own[0]["digital"], **at_times}


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each network, device and training: means over chips."""
    lines = []
    for name in NETWORKS:
        for device in DEVICES:
            for training in TRAININGS:
                found = means(rows, name, device, training)
                if found:
                    lines.append((name, device, training, *(f"{value:.2f}" for value in found.values())))
    return lines


def given_back(rows: list[dict[str, Any]], name: str, device: str) -> tuple[float, float] | None:
    """Return what the clean network loses at one day, in points, and the share of it that training with noise regains.

    Returns None without both trainings.
    """
    clean, noisy = (means(rows, name, device, training) for training in TRAININGS)
    if not clean or not noisy:
        return None
    lost = clean["digital"] - clean["1 d"]
    return lost, (noisy["1 d"] - clean["1 d"]) / lost if lost else 0.0


def page_section() -> str:
    """Return the section of the results page, empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    rows = found["rows"]
    chips = 1 + max(row["chip"] for row in rows)
    header = ("network", "device", "training", "digital [%]", *(f"{time} [%]" for time in TIMES_S))
    shares = []
    for name in NETWORKS:
        for device in DEVICES:
            back = given_back(rows, name, device)
            if back is not None:
                lost, share = back
                what = (
                    f"{100 * share:.0f} % ({verdict(share >= SHARE_GIVEN_BACK)})"
                    if lost > 2 * STANDARD_ERROR
                    else "not resolved"
                )
                shares.append((name, device, f"{lost:.2f}", what))
    epochs = found["settings"]["epochs"]
    text = (
        f"FashionMNIST, {epochs[0]} epochs clean and {epochs[1]} more with or without the device's own noise at "
        f"one day, one training seed, chips: {chips} ({found['date']}, {command(MODULE)}). The standard "
        f"error of an accuracy is {STANDARD_ERROR} points. [The figure](../../docs/analog_lifetimes.png) "
        "shows them."
    )
    lost_header = (
        "network",
        "device",
        "clean network loses at one day [points]",
        "of which noise in training regains",
    )
    required = "Required: half. A loss of less than two standard errors is not resolved."
    body = "\n\n".join([markdown(header, table(rows)), required, markdown(lost_header, shares)])
    return section("Accuracy over time", text, body)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, nargs=2, default=EPOCHS)
    parser.add_argument("--chips", type=int, default=CHIPS)
    parser.add_argument("--no-save", action="store_true", help="leave the results file as it is")
    given = parser.parse_args()
    rows = measure(tuple(given.epochs), given.chips, save=not given.no_save)
    header = ("network", "device", "training", "digital", *TIMES_S)
    print_table("Test accuracy, percent", header, table(rows))


if __name__ == "__main__":
    main()
