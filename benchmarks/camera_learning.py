"""Does a network learn through the physical twin as well as through B x + N(0, sigma^2) with the same noise?

FashionMNIST, 784-512-512-10 tanh, photonic DFA in the hardware order, 15 epochs, batch 256, SGD 0.01 with momentum
0.9, threshold 0.15, three seeds. sigma is the root mean square over outputs of the twin's own noise for vectors with
one 1 and one -1. The bar: test accuracies of `camera` and `gaussian` within one point.

Runs are ordinary run folders under runs/camera; a second call goes on where the first one stopped.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from joblib import Parallel, delayed
from rich.console import Console
from rich.table import Table

from benchmarks.pdfa_table1 import BASE, CLASSES, SEEDS, WIDTH
from benchmarks.results_file import save_results
from benchmarks.runs import train_or_read
from opusim import open_device

FOLDER = Path("runs/camera")
TWINS = ("camera", "camera_low_light")
BAR = 1.0


def noise_of(name: str) -> float:
    """Root mean square noise of the twin's readings of vectors with one 1 and one -1."""
    x = torch.zeros(CLASSES * (CLASSES - 1), CLASSES)
    pairs = [(i, j) for i in range(CLASSES) for j in range(CLASSES) if i != j]
    for row, (i, j) in enumerate(pairs):
        x[row, i], x[row, j] = 1, -1
    with open_device(name, n_inputs=CLASSES, n_outputs=2 * WIDTH) as device:
        return float(device.reading_variance(x).mean().sqrt())


def accuracy(label: str, device: dict[str, Any], seed: int) -> tuple[str, float]:
    """Test accuracy of one run, percent."""
    data = {**BASE["data"], "split_seed": seed}
    config = {**BASE, "seed": seed, "data": data, "device": device}
    config["trainer"] = {**BASE["trainer"], "kind": "pdfa"}
    run = train_or_read(config, FOLDER / f"{label}-{seed}")
    return label, 100 * (run.summary or {})["test_accuracy"]


def main() -> None:
    sigmas = {name: noise_of(name) for name in TWINS}
    devices: dict[str, dict[str, Any]] = {name: {"name": name} for name in TWINS}
    devices |= {
        f"gaussian as {name}": {"name": "gaussian", "noise": {"sigma": s}} for name, s in sigmas.items()
    }
    work = [(label, device, seed) for seed in SEEDS for label, device in devices.items()]
    results = Parallel(n_jobs=2)(delayed(accuracy)(*item) for item in work)
    rows = []
    table = Table(title="FashionMNIST test accuracy, %, mean of three seeds")
    for column in ("twin", "its noise", "through the twin", "gaussian, same noise", "difference", "bar"):
        table.add_column(column)
    for name, sigma in sigmas.items():
        found = {label: [v for key, v in results if key == label] for label in (name, f"gaussian as {name}")}
        twin, gaussian = (statistics.mean(values) for values in found.values())
        rows.append({"device": name, "sigma": sigma, "twin": twin, "gaussian": gaussian, "runs": found})
        cells = (f"{sigma:.3f}", f"{twin:.2f}", f"{gaussian:.2f}", f"{twin - gaussian:+.2f}", f"{BAR:g}")
        table.add_row(name, *cells)
    Console().print(table)
    save_results("camera_learning", {"bar": BAR, "seeds": SEEDS, "rows": rows})


if __name__ == "__main__":
    main()
