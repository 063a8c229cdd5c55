"""Does a network learn through every other device as through B x + N(0, sigma^2) with the same noise?

FashionMNIST, 784-512-512-10 tanh, photonic DFA in the hardware order, 15 epochs, batch 256, SGD 0.01 with momentum 0.9,
threshold 0.15, three seeds: the physical twin at two presets, and lightonml's simulated device. sigma is the root mean
square over outputs of the device's own noise for vectors with one 1 and one -1. Required: mean test accuracies within
one point of the `gaussian` device.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.markdown import standard_error
from benchmarks.options import listed
from benchmarks.pdfa.table1 import BASE, CLASSES, SEEDS, WIDTH
from benchmarks.results_file import load_results, save_results, selected
from benchmarks.runs import in_parallel, train_or_read
from opusim import open_device

MODULE, NAME, FOLDER = "benchmarks.devices.learning", "device_learning", Path("runs/devices")
DEVICES = ("camera", "camera_low_light", "lightonml_simulated")
BAR = 1.0


def noise_of(name: str) -> float:
    """Root mean square noise of the device's readings of vectors with one 1 and one -1."""
    x = torch.zeros(CLASSES * (CLASSES - 1), CLASSES)
    pairs = [(i, j) for i in range(CLASSES) for j in range(CLASSES) if i != j]
    for row, (i, j) in enumerate(pairs):
        x[row, i], x[row, j] = 1, -1
    with open_device(name, n_inputs=CLASSES, n_outputs=2 * WIDTH) as device:
        return float(device.reading_variance(x).mean().sqrt())


def devices(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each device, and the Gaussian one with its noise, by their labels."""
    found: dict[str, dict[str, Any]] = {name: {"name": name} for name in names}
    for name in names:
        found[f"gaussian as {name}"] = {"name": "gaussian", "noise": {"sigma": noise_of(name)}}
    return found


def run_once(label: str, device: dict[str, Any], seed: int) -> dict[str, Any]:
    """Test accuracy of one run, percent."""
    data = {**BASE["data"], "split_seed": seed}
    config = {**BASE, "seed": seed, "data": data, "device": device}
    config["trainer"] = {"kind": "pdfa"}
    run = train_or_read(config, FOLDER / f"{label}-{seed}")
    seconds = sum(record["wall_s"] for record in run.folder.read_timing())
    return {
        "device": label,
        "seed": seed,
        "test": 100 * (run.summary or {})["test_accuracy"],
        "seconds": seconds,
    }


def rows_of(runs: list[dict[str, Any]], sigmas: dict[str, float]) -> list[dict[str, Any]]:
    """Return each device and the Gaussian one over the seeds that both have, and their paired difference."""
    rows = []
    for name, sigma in sigmas.items():
        both = (selected(runs, device=label) for label in (name, f"gaussian as {name}"))
        twin, gaussian = ({run["seed"]: run["test"] for run in mine} for mine in both)
        if seeds := sorted(twin.keys() & gaussian.keys()):
            differences = [twin[seed] - gaussian[seed] for seed in seeds]
            row = {"device": name, "sigma": sigma, "seeds": seeds}
            row["difference_standard_error"] = standard_error(differences)
            means = {
                "twin": statistics.mean(twin[seed] for seed in seeds),
                "gaussian": statistics.mean(gaussian[seed] for seed in seeds),
                "difference": statistics.mean(differences),
            }
            rows.append(row | means)
    return rows


def main(
    jobs: Annotated[int, typer.Option(help="Runs at a time, a thread each.")] = 2,
    device: Annotated[str, typer.Option(help="Measure only this one; all by default.")] = "",
) -> None:
    """Train through each device and the Gaussian one; runs that were made are read back."""
    known = devices(listed("--device", device, DEVICES))
    runs = [run for run in load_results(NAME).get("runs", []) if run["device"] not in known]
    work = itertools.product(known.items(), SEEDS)
    for run in in_parallel(run_once, ((*each, seed) for each, seed in work), jobs=jobs):
        runs = sorted([*runs, run], key=lambda each: (each["device"], each["seed"]))
        sigmas = {name: noise_of(name) for name in DEVICES}
        save_results(NAME, {"bar": BAR, "rows": rows_of(runs, sigmas), "runs": runs})
        print(run, flush=True)


if __name__ == "__main__":
    typer.run(main)
