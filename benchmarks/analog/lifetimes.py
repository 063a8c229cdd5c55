"""What does a network lose on an analog device in a second to a year, and what does training with noise give back?

FashionMNIST, 784-256-10 with ReLU, Adam 0.001, batch 128, 10 epochs, on one thread: trained clean, and with Gaussian
weight noise of 5 % of each row's largest weight. Each network is put on chips of three devices and evaluated on the
10,000 test images; drift is compensated by one factor for each layer. Required: training with weight noise gives back
at least half of what the clean network loses at one day.

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
DEVICES = ("pcm", "hermes", "reram")
TIMES_S = {"1 s": 1.0, "1 h": 3600.0, "1 d": 86_400.0, "1 y": 31_557_600.0}
WEIGHT_NOISE = {"clean": 0.0, "weight noise": 0.05}
CHIPS = 3
SHARE_GIVEN_BACK = 0.5


def standardised(split: Split, mean: float, std: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (split.x.flatten(1) - mean) / std, split.y


def trained(data: Dataset, noise: float, epochs: int, seed: int) -> nn.Module:
    """Train a network; the seed gives its start and the order of the records."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    if noise:
        noise_aware(model, noise, seed=seed)
    x, y = standardised(data.train, *moments(data))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def moments(data: Dataset) -> tuple[float, float]:
    return float(data.train.x.mean()), float(data.train.x.std())


def accuracy(model: nn.Module, data: Dataset) -> float:
    """Test accuracy, percent."""
    x, y = standardised(data.test, *moments(data))
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).float().mean())


def on_chip(model: nn.Module, data: Dataset, device: str, chip: int) -> dict[str, float]:
    """Test accuracy on one chip at every time."""
    found, elapsed = {}, 0.0
    with convert(model, device, seed=chip) as analog:
        for time, seconds in TIMES_S.items():
            analog.wait(seconds - elapsed)
            elapsed = seconds
            found[time] = round(accuracy(analog, data), 2)
    return found


def measure(epochs: int, chips: int, *, save: bool) -> list[dict[str, Any]]:
    """Return a row for each training, device and chip; those of an earlier call are kept."""
    torch.set_num_threads(1)
    settings = {"epochs": epochs, "weight_noise": WEIGHT_NOISE}
    earlier = load_results(NAME) if save else {}
    rows = list(earlier.get("rows", [])) if earlier.get("settings") == settings else []
    data = build_dataset(DataConfig(name="fashion-mnist"))
    for training, noise in WEIGHT_NOISE.items():
        known = {(row["device"], row["chip"]) for row in rows if row["training"] == training}
        missing = [(name, chip) for name in DEVICES for chip in range(chips) if (name, chip) not in known]
        if not missing:
            continue
        model = trained(data, noise, epochs, seed=1)
        digital = round(accuracy(model, data), 2)
        for name, chip in missing:
            row = {"training": training, "device": name, "chip": chip, "digital": digital}
            rows.append({**row, "accuracy": on_chip(model, data, name, chip)})
            print(rows[-1], flush=True)
            if save:
                save_results(NAME, {"settings": settings, "rows": rows})
    return rows


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each device and training: means over chips."""
    lines = []
    for name in DEVICES:
        for training in WEIGHT_NOISE:
            own = [row for row in rows if (row["device"], row["training"]) == (name, training)]
            if own:
                means = (statistics.mean(row["accuracy"][time] for row in own) for time in TIMES_S)
                digital = f"{own[0]['digital']:.2f}"
                lines.append((name, training, digital, *(f"{mean:.2f}" for mean in means), str(len(own))))
    return lines


def given_back(rows: list[dict[str, Any]], name: str) -> float | None:
    """Return the share of the clean network's loss at one day that weight noise in training gives back."""
    means: dict[str, float] = {}
    for training in WEIGHT_NOISE:
        own = [row for row in rows if (row["device"], row["training"]) == (name, training)]
        if not own:
            return None
        means[training] = statistics.mean(row["accuracy"]["1 d"] for row in own)
        means[f"{training}, digital"] = own[0]["digital"]
    lost = means["clean, digital"] - means["clean"]
    return (means["weight noise"] - means["clean"]) / lost if lost > 0 else None


def page_section() -> str:
    """Return the section of the results page, empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    rows = found["rows"]
    header = ("device", "training", "digital [%]", *(f"{time} [%]" for time in TIMES_S), "chips")
    shares = []
    for name in DEVICES:
        share = given_back(rows, name)
        if share is not None:
            shares.append(f"{name} {100 * share:.0f} % ({verdict(share >= SHARE_GIVEN_BACK)})")
    text = (
        f"FashionMNIST, 784-256-10, {found['settings']['epochs']} epochs, one training seed, means over chips "
        f"({found['date']}, {command(MODULE)}). Weight noise is 5 % of each row's largest weight. Share of the clean "
        f"network's loss at one day that it gives back, required 50 %: {', '.join(shares)}."
    )
    return section("Accuracy over time", text, markdown(header, table(rows)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--chips", type=int, default=CHIPS)
    parser.add_argument("--no-save", action="store_true", help="leave the results file as it is")
    given = parser.parse_args()
    rows = measure(given.epochs, given.chips, save=not given.no_save)
    header = ("device", "training", "digital", *TIMES_S, "chips")
    print_table("Test accuracy, percent", header, table(rows))


if __name__ == "__main__":
    main()
