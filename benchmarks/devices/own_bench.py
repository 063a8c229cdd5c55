"""Does a network learn through a bench of one's own as through the camera twin?

The bench is an optical bench in software that shares no code with opusim's camera (tests/support/own_bench): mirrors
and camera behind doubles of ALP4lib and pylablib, driven by the code and the description of the page "Bring your own
instrument". Digits, 64-512-512-10, photonic DFA with default settings, three seeds, another medium for each. Required:
mean test accuracy within two points of the `camera` twin.

`--slmsuite` asks the same of slmsuite's simulated modulator and camera, with the sensor of `camera_low_light`
(tests/support/own_bench/slmsuite_bench.py), and of the twin that `opusim device calibrate --recorded` makes of that
camera's frames; it needs the environment of `make adapters`.

`--columns` measures how entries of B in one row correlate, on the optical bench and on the `camera` twin. The fields of
all inputs and of the reference add up to the anchor's field, which readings are relative to, so that they correlate by
-1 / (M - 1), with M the mirrors of the anchor over those of an input.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.results_file import save_results
from benchmarks.runs import train_or_read
from opusim import open_device
from opusim.devices.bench import BenchDevice
from opusim.devices.camera import CameraDevice

MODULE, NAME, FOLDER = "benchmarks.devices.own_bench", "own_bench", Path("runs/own_bench")
OWN = Path(__file__).parents[2] / "tests" / "support" / "own_bench"
SEEDS, EPOCHS, BAR = (0, 1, 2), 15, 2.0
COLUMNS, COLUMN_INPUTS, COLUMN_OUTPUTS = "own_bench_columns", (4, 10, 30, 90), 1600


BENCHES = {
    NAME: {"own": "own bench", "camera": "`camera`"},
    "own_bench_slmsuite": {
        "slmsuite": "slmsuite's pair",
        "camera": "`camera`",
        "calibrated": "twin calibrated from its frames",
    },
}
"""What a table calls each device, the bench first and the `camera` twin second, by the name of the results."""


def device_of(label: str, seed: int) -> dict[str, Any]:
    """Return the section ``[device]`` of a run."""
    if label == "camera":
        return {"name": "camera", "medium": {"seed": seed}}
    if label == "calibrated":
        return {"name": str(_calibrated()), "medium": {"seed": seed}}
    # their folder is put on the path by main
    if label == "own":
        optics = import_module("optical_bench")
        optics.use(optics.OpticalBench(seed=seed + 1))
    else:
        pair = import_module("slmsuite_bench")
        pair.slm.source["phase_sim"] = pair.diffuser(seed)
    name = {"own": "my_bench", "slmsuite": "slmsuite_bench"}[label]
    return {"name": str(OWN / f"{name}.toml"), "bench": {"setup": str(FOLDER / f"setup-{label}-{seed}")}}


def _calibrated() -> Path:
    """Return the description that the documented command makes of frames of slmsuite's camera."""
    folder = FOLDER / "calibrated"
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        import_module("slmsuite_bench").record(FOLDER / "frames.npz")
        call = f"device calibrate camera_low_light --recorded {FOLDER}/frames.npz --out {folder}"
        subprocess.run([sys.executable, "-m", "opusim", *call.split()], check=True)
    return folder / "camera_low_light_measured.toml"


def run_once(label: str, seed: int, epochs: int) -> dict[str, Any]:
    """Return the test accuracy of a run, per cent, and its test loss."""
    config = {
        "epochs": epochs,
        "seed": seed,
        "data": {"name": "digits", "split_seed": seed},
        "trainer": {"kind": "pdfa"},
        "device": device_of(label, seed),
    }
    summary = train_or_read(config, FOLDER / f"{label}-{seed}").summary or {}
    return {
        "device": label,
        "seed": seed,
        "test": 100 * summary["test_accuracy"],
        "test_loss": summary["test_loss"],
    }


def rows_of(runs: list[dict[str, Any]], labels: Iterable[str]) -> list[tuple[str, ...]]:
    """Return a line for each seed that all devices have, and the means, as text."""
    found = {(run["device"], run["seed"]): run["test"] for run in runs}
    seeds = [seed for seed in SEEDS if all((label, seed) in found for label in labels)]
    accuracies = [[found[label, seed] for label in labels] for seed in seeds]
    rows = [
        (str(seed), *(f"{each:.2f}" for each in row)) for seed, row in zip(seeds, accuracies, strict=True)
    ]
    if rows:
        rows.append(("mean", *(f"{statistics.mean(each):.2f}" for each in zip(*accuracies, strict=True))))
    return rows


def column_correlation(label: str, n_inputs: int) -> dict[str, Any]:
    """Return the mean correlation of two entries of a row of B over media, with its standard error, and the law's."""
    products, mirrors = [], 0.0
    for seed in SEEDS:
        choice = device_of(label, seed)
        with open_device(choice.pop("name"), n_inputs=n_inputs, n_outputs=COLUMN_OUTPUTS, **choice) as device:
            if isinstance(device, BenchDevice):
                b, mirrors = device.measure_matrix().double(), device.setup.layout.mirrors_of_anchor
            elif isinstance(device, CameraDevice):
                b, mirrors = device.matrix().double(), float(device.recovery.mirrors)
        # of the pairs of a row: sum of products over their number; rows are independent
        pairs = (b.sum(dim=1) ** 2 - (b**2).sum(dim=1)) / (n_inputs * (n_inputs - 1))
        products.append(pairs / b.square().mean())
    found = torch.cat(products)
    return {
        "device": label,
        "inputs": n_inputs,
        "law": -1 / (mirrors - 1),
        "mean": float(found.mean()),
        "error": float(found.std() / len(found) ** 0.5),
    }


def main(
    epochs: int = EPOCHS,
    slmsuite: Annotated[bool, typer.Option("--slmsuite", help="Ask it of slmsuite's pair.")] = False,
    columns: Annotated[bool, typer.Option("--columns", help="Measure correlations of a row of B.")] = False,
) -> None:
    """Train through each device, or read the runs that were made."""
    sys.path.insert(0, str(OWN))
    if columns:
        found = [column_correlation(label, n) for label in ("own", "camera") for n in COLUMN_INPUTS]
        save_results(COLUMNS, {"outputs": COLUMN_OUTPUTS, "seeds": SEEDS, "rows": found})
        return
    name, runs = "own_bench_slmsuite" if slmsuite else NAME, list[dict[str, Any]]()
    for seed, label in itertools.product(SEEDS, BENCHES[name]):
        runs.append(run_once(label, seed, epochs))
        print(runs[-1], flush=True)
        save_results(name, {"bar": BAR, "epochs": epochs, "runs": runs})


if __name__ == "__main__":
    typer.run(main)
