"""Does photonic DFA learn as well as digital DFA and backpropagation, and what does the device's noise do to it?

`make demo` runs this: real data (scikit-learn's 8x8 digits), four feedbacks, five seeds each, then photonic DFA at
more and more noise. It prints a table and leaves runs/demo/report.html.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

import training
from benchmarks.results_file import save_results
from training.reports import run_figures as figures
from training.runs.run import Run

DEVICE_FILE = Path("examples/opu.toml")
FOLDER = Path("runs/demo")
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


def run_once(kind: str, seed: int, name: str, device: dict[str, Any] | None = None) -> Run:
    config = {
        **CONFIG,
        "seed": seed,
        "trainer": {"kind": kind},
    }
    if kind == "pdfa":
        config["device"] = {"name": str(DEVICE_FILE), **(device or {})}
    return training.train(config, folder=FOLDER / name)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error, in percent."""
    return 100 * statistics.mean(values), 100 * statistics.stdev(values) / len(values) ** 0.5


def compare_feedbacks(console: Console) -> tuple[dict[str, list[float]], list[Run]]:
    accuracies: dict[str, list[float]] = {}
    shown = []
    for kind, name in KINDS.items():
        with console.status(f"training by {name}, {len(SEEDS)} seeds"):
            runs = [run_once(kind, seed, f"{kind}-{seed}") for seed in SEEDS]
        accuracies[kind] = [test_accuracy(run) for run in runs]
        shown.append(runs[0])
    return accuracies, shown


def sweep_noise(console: Console) -> dict[float, list[float]]:
    results = {}
    for sigma in SIGMAS:
        with console.status(f"photonic DFA, noise sigma {sigma:g}"):
            runs = [
                run_once("pdfa", seed, f"sigma-{sigma:g}-{seed}", {"noise": {"sigma": sigma}})
                for seed in SEEDS
            ]
        results[sigma] = [test_accuracy(run) for run in runs]
    return results


def test_accuracy(run: Run) -> float:
    summary = run.summary
    if summary is None:
        raise RuntimeError(f"run {run.folder.path} did not finish")
    return float(summary["test_accuracy"])


def print_tables(
    console: Console, accuracies: dict[str, list[float]], noise: dict[float, list[float]]
) -> None:
    table = Table(
        "feedback", "test accuracy [%]", title=f"digits, mean of {len(SEEDS)} seeds ± standard error"
    )
    for kind, name in KINDS.items():
        mean, error = mean_and_error(accuracies[kind])
        name += ", sigma of the device file" if kind == "pdfa" else ""
        table.add_row(name, f"{mean:.2f} ± {error:.2f}")
    console.print(table)
    table = Table("noise sigma", "test accuracy [%]", title="photonic DFA at more noise")
    for sigma, values in noise.items():
        mean, error = mean_and_error(values)
        table.add_row(f"{sigma:g}", f"{mean:.2f} ± {error:.2f}")
    console.print(table)


def draw_noise(noise: dict[float, list[float]], accuracies: dict[str, list[float]]) -> bytes:
    figure, axes = figures.new_figure(7.2, 3.8)
    means, errors = zip(*(mean_and_error(values) for values in noise.values()), strict=True)
    axes.errorbar(range(len(noise)), means, errors, capsize=3, label="photonic DFA", **figures.style(0))
    for number, kind in enumerate(("bp", "dfa"), start=1):
        level, _ = mean_and_error(accuracies[kind])
        look = figures.style(number)
        axes.axhline(
            level, color=look["color"], linestyle=look["linestyle"], label=f"{KINDS[kind]} (no noise)"
        )
    axes.set_xticks(range(len(noise)), [f"{sigma:g}" for sigma in noise])
    axes.set(
        xlabel="standard deviation of the device's noise [units of the projection]",
        ylabel="test accuracy [%]",
    )
    axes.legend(frameon=False, loc="lower left")
    return figures.save_figure(figure, FOLDER / "figures" / "noise.png")


def main(save: bool = False) -> None:
    """Train, print the tables, write the report; --save renews benchmarks/results/demo_digits.json."""
    started = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 100)
    shutil.rmtree(FOLDER, ignore_errors=True)
    accuracies, shown = compare_feedbacks(console)
    noise = sweep_noise(console)
    print_tables(console, accuracies, noise)
    draw_noise(noise, accuracies)
    names = [f"{KINDS[run.config.trainer.kind]}, seed {run.config.seed}" for run in shown]
    report = training.write_comparison(
        shown,
        FOLDER / "report.html",
        title="Digits: photonic DFA beside digital DFA and backpropagation",
        names=names,
        extra_pictures=[
            ("Photonic DFA against the device's noise, mean of five seeds", FOLDER / "figures" / "noise.png")
        ],
    )
    seconds = time.perf_counter() - started
    if save:
        results = {
            "config": CONFIG,
            "seconds": seconds,
            "test_accuracy": accuracies,
            "noise": {f"{sigma:g}": values for sigma, values in noise.items()},
        }
        save_results("demo_digits", results)
    print(f"report: {report.resolve()}   ({seconds:.0f} s)")
    print(f"change noise.sigma in {DEVICE_FILE} and run `make demo` again to see what noise does")


if __name__ == "__main__":
    typer.run(main)
