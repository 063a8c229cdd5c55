"""Does a network learn through every other device as through B x + N(0, sigma^2) with the same noise?

FashionMNIST, 784-512-512-10 tanh, photonic DFA in the hardware order, 15 epochs, batch 256, SGD 0.01 with momentum
0.9, threshold 0.15, three seeds: the physical twin at two presets, and lightonml's simulated device. sigma is the root
mean square over outputs of the device's own noise for vectors with one 1 and one -1. Required: mean test accuracies
within one point of the `gaussian` device.

Runs are ordinary run folders under runs/devices; a second call resumes where the first one stopped, and the results
are written after each run. `--device` measures one of them again and keeps the others' figures.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from joblib import Parallel, delayed

from benchmarks.markdown import command, lines_of, markdown, section
from benchmarks.pdfa.table1 import BASE, CLASSES, SEEDS, WIDTH
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from opusim import open_device
from opusim.tables import print_table

MODULE, NAME, FOLDER = "benchmarks.devices.learning", "device_learning", Path("runs/devices")
COLUMN_NAMES = ("device", "sigma", "through it [%]", "Gaussian device [%]", "difference")
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
        found[gaussian_label(name)] = {"name": "gaussian", "noise": {"sigma": noise_of(name)}}
    return found


def gaussian_label(name: str) -> str:
    return f"gaussian as {name}"


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
        twin, gaussian = (
            {run["seed"]: run["test"] for run in runs if run["device"] == label}
            for label in (name, gaussian_label(name))
        )
        seeds = sorted(twin.keys() & gaussian.keys())
        if not seeds:
            continue
        differences = [twin[seed] - gaussian[seed] for seed in seeds]
        row = {
            "device": name,
            "sigma": sigma,
            "seeds": seeds,
            "twin": statistics.mean(twin[seed] for seed in seeds),
            "gaussian": statistics.mean(gaussian[seed] for seed in seeds),
            "difference": statistics.mean(differences),
            "difference_standard_error": math.nan,
        }
        if len(seeds) > 1:
            row["difference_standard_error"] = statistics.stdev(differences) / len(seeds) ** 0.5
        rows.append(row)
    return rows


def table_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each device, as text."""
    difference = "{difference:+.2f} ± {difference_standard_error:.2f}"
    return lines_of(rows, "{device}", "{sigma:.3f}", "{twin:.2f}", "{gaussian:.2f}", difference)


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    rows = table_rows(results.get("rows", []))
    if not rows:
        return ""
    seeds = len({run["seed"] for run in results["runs"]})
    text = (
        f"FashionMNIST, 784-512-512-10, photonic DFA in the hardware order, 15 epochs, means of {seeds} seeds "
        f"({results['date']}, {command(MODULE)}): each device and B x + N(0, sigma²) with the device's own noise. "
        f"Required: within {results['bar']:g} point."
    )
    return section("Learning through every device", text, markdown(COLUMN_NAMES, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--device", choices=DEVICES, action="append", help="measure only this one")
    options = parser.parse_args()
    known = devices(options.device or DEVICES)
    kept = [] if not options.device else load_results(NAME).get("runs", [])
    runs = [run for run in kept if run["device"] not in known]
    work = [(label, device, seed) for seed in SEEDS for label, device in known.items()]
    jobs = Parallel(n_jobs=options.jobs, return_as="generator_unordered")
    for run in jobs(delayed(run_once)(*item) for item in work):
        runs = sorted([*runs, run], key=lambda each: (each["device"], each["seed"]))
        sigmas = {name: noise_of(name) for name in DEVICES}
        save_results(NAME, {"bar": BAR, "rows": rows_of(runs, sigmas), "runs": runs})
        print(run, flush=True)
    print_table("FashionMNIST test accuracy", COLUMN_NAMES, table_rows(load_results(NAME)["rows"]))


if __name__ == "__main__":
    main()
