"""Does photonic DFA learn as well as digital DFA and backpropagation, and what does the device's noise do to it?

`make demo` runs this: real data (scikit-learn's 8x8 digits), four feedbacks, five seeds each, then photonic DFA at
increasing noise. It prints a table and writes runs/demo/report.html.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import typer
from joblib import cpu_count

from benchmarks.results_file import save_results
from benchmarks.runs import in_parallel
from opusim import load_run, train, write_comparison
from opusim.progress import Progress
from opusim.tables import print_table
from opusim.training.runs import drawing as figures

DEVICE_FILE = Path("examples/opu.toml")
NAME, FOLDER = "demo_digits", Path("runs/demo")
COLUMN_NAMES = ("feedback", "test accuracy [%]")
SEEDS = range(5)
SIGMAS = (0.0, 1.0, 3.0, 10.0, 30.0)
KINDS = {
    "bp": "backpropagation",
    "dfa": "digital DFA",
    "tdfa": "digital DFA, ternary error",
    "pdfa": "photonic DFA",
}
CONFIG: dict[str, Any] = {
    "epochs": 30,
    "threads": 1,
    "data": {"name": "digits"},
    "model": {"hidden": [256, 256]},
    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
    "sampler": {"batch_size": 32},
}


def run_once(kind: str, seed: int, name: str, device: dict[str, Any] | None = None) -> Path:
    """Train once; returns the run's folder."""
    config = {**CONFIG, "seed": seed, "trainer": {"kind": kind}}
    if kind == "pdfa":
        config["device"] = {"name": str(DEVICE_FILE), **(device or {})}
    return train(config, folder=FOLDER / name).folder.path


def run_all() -> None:
    """Make all runs, one on each core at a time; each writes its own folder."""
    runs: list[tuple[Any, ...]] = [(kind, seed, f"{kind}-{seed}") for kind in KINDS for seed in SEEDS]
    for sigma in SIGMAS:
        noise = {"noise": {"sigma": sigma}}
        runs += [("pdfa", seed, f"sigma-{sigma:g}-{seed}", noise) for seed in SEEDS]
    with Progress("demo", "runs") as progress:
        progress.start(len(runs))
        for _ in in_parallel(run_once, runs, jobs=cpu_count()):
            progress.advance()


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error, in percent."""
    return 100 * statistics.mean(values), 100 * statistics.stdev(values) / len(values) ** 0.5


def test_accuracy(name: str) -> float:
    """Return the test accuracy of a finished run."""
    return float((load_run(FOLDER / name).summary or {})["test_accuracy"])


def table_rows(accuracies: dict[str, list[float]], noise: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Return a line for each feedback, then for each noise of the device."""
    names = accuracies | {f"pdfa, sigma {sigma}": values for sigma, values in noise.items()}
    return [(name, "{:.2f} ± {:.2f}".format(*mean_and_error(values))) for name, values in names.items()]


def draw_noise(noise: dict[float, list[float]], accuracies: dict[str, list[float]]) -> bytes:
    figure, axes = figures.new_figure(7.2, 3.8)
    means, errors = zip(*(mean_and_error(values) for values in noise.values()), strict=True)
    axes.errorbar(range(len(noise)), means, errors, capsize=3, label="photonic DFA", **figures.style(0))
    for number, kind in enumerate(("bp", "dfa"), start=1):
        level, _ = mean_and_error(accuracies[kind])
        look, label = figures.style(number), f"{KINDS[kind]} (no noise)"
        axes.axhline(level, color=look["color"], linestyle=look["linestyle"], label=label)
    axes.set_xticks(range(len(noise)), [f"{sigma:g}" for sigma in noise])
    axes.set_xlabel("standard deviation of the device's noise [units of the projection]")
    axes.set_ylabel("test accuracy [%]")
    axes.legend(frameon=False, loc="lower left")
    return figures.save_figure(figure, FOLDER / "figures" / "noise.png")


def main(save: bool = False) -> None:
    """Train, print the tables, write the report; --save renews benchmarks/results/demo_digits.json."""
    started = time.perf_counter()
    shutil.rmtree(FOLDER, ignore_errors=True)
    run_all()
    accuracies = {kind: [test_accuracy(f"{kind}-{seed}") for seed in SEEDS] for kind in KINDS}
    noise = {sigma: [test_accuracy(f"sigma-{sigma:g}-{seed}") for seed in SEEDS] for sigma in SIGMAS}
    named = {f"{sigma:g}": values for sigma, values in noise.items()}
    print_table(f"digits, mean of {len(SEEDS)} seeds", COLUMN_NAMES, table_rows(accuracies, named))
    draw_noise(noise, accuracies)
    shown = [load_run(FOLDER / f"{kind}-{SEEDS[0]}") for kind in KINDS]
    names = [f"{name}, seed {SEEDS[0]}" for name in KINDS.values()]
    title = "Digits: photonic DFA compared with digital DFA and backpropagation"
    caption = "Photonic DFA against the device's noise, mean of five seeds"
    pictures = [(caption, FOLDER / "figures" / "noise.png")]
    page = FOLDER / "report.html"
    report = write_comparison(shown, page, title=title, names=names, extra_pictures=pictures)
    seconds = time.perf_counter() - started
    if save:
        figures_ = {"seconds": seconds, "test_accuracy": accuracies, "noise": named}
        save_results(NAME, {"config": CONFIG, **figures_})
    print(f"report: {report.resolve()}   ({seconds:.0f} s)")
    print(f"change noise.sigma in {DEVICE_FILE} and run `make demo` again to see what noise does")


if __name__ == "__main__":
    typer.run(main)
