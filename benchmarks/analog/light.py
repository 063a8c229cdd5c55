"""What do phase bits, splitters and temperature cost a network on chips of light, and what does noise in training give?

A network 64-64-10 with ReLU on digits, 60 epochs of Adam 0.002, then 60 more at 0.001 falling to 0, clean or with the
noise of the chip it goes to (`opusim.noise_aware`). It is put on `mzi_mesh` with 3 to 8 phase bits, on rectangular and
triangular meshes with splitters that are off by 0 to 0.06 rad, and on `microring_bank` up to 0.25 K away from the
temperature of its calibration. Mean accuracy on the 359 test records over 4 chips.

`python -m benchmarks.analog.light` measures and draws docs/analog_light.png; `--draw` only draws.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from opusim import convert, load_description, noise_aware
from opusim.files import to_toml
from opusim.training.config.sections import DataConfig
from opusim.training.data import Dataset
from opusim.training.data.catalogue import build_dataset

MODULE, NAME = "benchmarks.analog.light", "analog_light"
PICTURE = Path(__file__).parents[2] / "docs" / "analog_light.png"
BITS, SPLITTERS_RAD, WARMER_K = (3, 4, 5, 6, 8), (0.0, 0.01, 0.02, 0.04, 0.06), (0.0, 0.05, 0.1, 0.15, 0.25)
SWEEPS = {
    "bits": ("mzi_mesh", BITS, "phase bits", lambda value: {"mesh": {"phase_bits": value}}),
    "splitters": (
        *("mzi_mesh", SPLITTERS_RAD, "splitter angle, standard deviation [rad]"),
        lambda value: {"mesh": {"splitter_rad": value}},
    ),
    "splitters, triangular": (
        *("mzi_mesh", SPLITTERS_RAD, "splitter angle, standard deviation [rad]"),
        lambda value: {"mesh": {"splitter_rad": value, "layout": "triangular"}},
    ),
    "temperature": (
        *("microring_bank", WARMER_K, "kelvin above the calibration"),
        lambda value: {"rings": {"temperature_c": 25.0 + value}},
    ),
}
TRAININGS, CHIPS, EPOCHS = ("clean", "chip's noise"), 4, 60


def train(model: nn.Module, data: Dataset, rate: float, *, falling: bool) -> nn.Module:
    """Train in place, batches of 64."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = EPOCHS * len(torch.arange(len(data.train.x)).split(64))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.0 if falling else rate)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data.train.x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.train.x[rows]), data.train.y[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def accuracy(model: nn.Module, data: Dataset) -> float:
    """Test accuracy, percent."""
    if data.test is None:
        raise RuntimeError("the data set has no test records")
    with torch.no_grad():
        return 100 * float((model(data.test.x).argmax(1) == data.test.y).float().mean())


def measure() -> dict[str, Any]:
    """Return mean accuracies over the chips for each sweep and training."""
    torch.set_num_threads(1)
    data = build_dataset(DataConfig(name="digits"))
    torch.manual_seed(1)
    start = train(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), data, 2e-3, falling=False)
    clean = train(copy.deepcopy(start), data, 1e-3, falling=True)
    found: dict[str, Any] = {"digital": round(accuracy(clean, data), 2)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chip.toml"
        for name, (device, values, _, changes) in SWEEPS.items():
            curves: dict[str, list[float]] = {training: [] for training in TRAININGS}
            for value in values:
                path.write_text(to_toml(load_description(device, changes(value)).dump()))
                aware = train(noise_aware(copy.deepcopy(start), path, seed=1), data, 1e-3, falling=True)
                for training, model in zip(TRAININGS, (clean, aware), strict=True):
                    chips = []
                    for chip in range(CHIPS):
                        with convert(model, path, seed=chip) as analog:
                            chips.append(accuracy(analog, data))
                    curves[training].append(round(statistics.mean(chips), 2))
                print(name, value, {training: curve[-1] for training, curve in curves.items()}, flush=True)
            found[name] = curves
    return found


def picture(found: Mapping[str, Any]) -> Figure:
    """Draw a panel for each quantity that is swept."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for name, (device, values, label, _) in SWEEPS.items():
        axes = panels[{"bits": 0, "temperature": 2}.get(name, 1)]
        for number, training in enumerate(TRAININGS):
            triangular = name.endswith("triangular")
            style = {"color": f"C{number}", "linestyle": "--" if triangular else "-", "marker": "o"}
            shown = f"{training}{', triangular' if triangular else ''}"
            axes.plot(values, found[name][training], label=shown, **style)
        axes.set(xlabel=label, title=device)
    panels[0].set_ylabel("test accuracy [%]")
    for axes in panels:
        axes.axhline(found["digital"], color="k", linewidth=0.8, linestyle=":", label="digital")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def page_section() -> str:
    """Return the section of the results page, empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    text = (
        f"A network 64-64-10 on digits, {found['digital']:g} % digital, mean accuracy over {CHIPS} chips [%] "
        f"({found['date']}, {command(MODULE)}; [the figure](../../docs/analog_light.png)). The standard error of an "
        "accuracy of 97 % on the 359 test records is 0.9 points."
    )
    tables = [
        markdown(
            (f"{device}: {label}", *map(str, values)),
            [
                (
                    f"{training}{', triangular' if 'triangular' in name else ''}",
                    *map(str, found[name][training]),
                )
                for training in TRAININGS
            ],
        )
        for name, (device, values, label, _) in SWEEPS.items()
    ]
    return section("Chips of light", text, "\n\n".join(tables))


def main() -> None:
    """Measure, save and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    if not parser.parse_args().draw:
        save_results(NAME, measure())
    picture(load_results(NAME)).savefig(PICTURE, dpi=90)


if __name__ == "__main__":
    main()
