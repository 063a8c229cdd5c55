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

Runs are ordinary run folders under runs/own_bench; a second call resumes where the first one stopped.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from opusim import open_device
from opusim.devices.bench import BenchDevice
from opusim.devices.camera import CameraDevice
from opusim.tables import print_table

MODULE, NAME, FOLDER = "benchmarks.devices.own_bench", "own_bench", Path("runs/own_bench")
OWN = Path(__file__).parents[2] / "tests" / "support" / "own_bench"
SEEDS, EPOCHS, BAR = (0, 1, 2), 15, 2.0
COLUMNS, COLUMN_INPUTS, COLUMN_OUTPUTS = "own_bench_columns", (4, 10, 30, 90), 1600


@dataclass(frozen=True)
class Bench:
    """The optical path of a training run, and the twins that it is compared with.

    Attributes:
        through: the bench in words.
        columns: of each device's label, the bench first and the `camera` twin second.
        arguments: of the command.
    """

    through: str
    columns: Mapping[str, str]
    arguments: tuple[str, ...] = ()


BENCHES = {
    NAME: Bench(
        "an optical bench in software behind doubles of ALP4lib and pylablib, by the code and the description of the "
        'page "Bring your own instrument"',
        {"own": "own bench", "camera": "`camera`"},
    ),
    "own_bench_slmsuite": Bench(
        "slmsuite's simulated modulator and camera, with the sensor of `camera_low_light`",
        {
            "slmsuite": "slmsuite's pair",
            "camera": "`camera`",
            "calibrated": "twin calibrated from its frames",
        },
        ("--slmsuite",),
    ),
}
"""By the name of the results."""


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


def _columns(bench: Bench) -> tuple[str, ...]:
    return "seed", *(f"{text} [%]" for text in bench.columns.values())


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    parts = []
    for name, bench in BENCHES.items():
        results = load_results(name)
        rows = rows_of(results.get("runs", []), bench.columns)
        if not rows:
            continue
        difference = float(rows[-1][1]) - float(rows[-1][2])
        met = "met" if abs(difference) <= results["bar"] else "not met"
        text = (
            f"Digits, 64-512-512-10, photonic DFA, {results['epochs']} epochs ({results['date']}, "
            f"{command(MODULE, *bench.arguments)}): through {bench.through}. Required: within {results['bar']:g} "
            f"points: {met}, {difference:+.2f}."
        )
        parts += [text, markdown(_columns(bench), rows)]
    return section("A bench of one's own", *parts) if parts else ""


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


def columns_table() -> str:
    """Return the table of correlations for the page on one's own instrument."""
    results = load_results(COLUMNS)
    found = {(row["device"], row["inputs"]): row for row in results["rows"]}
    rows = []
    for n in COLUMN_INPUTS:
        own, twin = (found[label, n] for label in ("own", "camera"))
        rows.append(
            (
                str(n),
                f"{own['law']:.4f}",
                *(f"{each['mean']:.4f} ± {each['error']:.4f}" for each in (own, twin)),
            )
        )
    return markdown(("inputs", "−1 / (M − 1)", "own bench", "`camera`"), rows)


def measure_columns() -> None:
    """Measure, save and print the correlations."""
    rows = [column_correlation(label, n) for label in ("own", "camera") for n in COLUMN_INPUTS]
    save_results(COLUMNS, {"outputs": COLUMN_OUTPUTS, "seeds": SEEDS, "rows": rows})
    print(columns_table())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--slmsuite", action="store_true", help="ask it of slmsuite's simulated pair")
    parser.add_argument("--columns", action="store_true", help="measure how entries of a row of B correlate")
    options = parser.parse_args()
    sys.path.insert(0, str(OWN))
    if options.columns:
        measure_columns()
        return
    name = "own_bench_slmsuite" if options.slmsuite else NAME
    bench, runs = BENCHES[name], list[dict[str, Any]]()
    for seed in SEEDS:
        for label in bench.columns:
            runs.append(run_once(label, seed, options.epochs))
            print(runs[-1], flush=True)
            save_results(name, {"bar": BAR, "epochs": options.epochs, "runs": runs})
    print_table("digits, test accuracy", _columns(bench), rows_of(runs, bench.columns))


if __name__ == "__main__":
    main()
