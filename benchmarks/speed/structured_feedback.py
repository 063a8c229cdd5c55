"""What does a feedback matrix of Hadamard transforms cost, and does a network learn as well through it?

Time: B e for 64 rows of 16,384 numbers to 16,384 outputs, next to the product with a stored float32 matrix, one thread,
processor time. Required: 20 times faster. Accuracy: `dfa` on digits, 15 epochs, three seeds, each with either matrix.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved
from opusim.tables import print_table
from training import train
from training.feedback.structured import HadamardProjection

MODULE, NAME = "benchmarks.speed.structured_feedback", "structured_feedback"
WIDTH, BATCH, REQUIRED = 16384, 64, 20.0
SEEDS, EPOCHS = (1, 2, 3), 15


def measure_speed(repeats: int) -> dict[str, Any]:
    """Processor seconds of both products, and their ratio."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    matrix = torch.randn(WIDTH, 256, generator=generator).repeat(1, WIDTH // 256)
    projection = HadamardProjection(WIDTH, WIDTH, 1)
    seconds = interleaved(
        {"hadamard": lambda: projection.read(x), "dense": lambda: x @ matrix},
        repeats=repeats,
        warm_up=1,
        clock=time.process_time,
    )
    return {"seconds": seconds, "times_faster": seconds["dense"] / seconds["hadamard"]}


def measure_accuracy(folder: Path) -> dict[str, list[float]]:
    """Test accuracy of each matrix's runs, by seed."""
    return {
        name: [_accuracy(name, seed, folder / f"{name}-{seed}") for seed in SEEDS]
        for name in ("gaussian", "hadamard")
    }


def _accuracy(name: str, seed: int, folder: Path) -> float:
    section = {"kind": "dfa", "projection": name, "feedback_seed": seed}
    config = {"trainer": section, "data": {"name": "digits"}, "epochs": EPOCHS, "seed": seed, "threads": 1}
    return float(train(config, folder=folder).evaluate()["accuracy"])


def speed_rows() -> list[Row]:
    """Return the ratio of the products and the accuracies."""
    found = load_results(NAME)
    if not found:
        return []
    accuracy = found["accuracy"]
    means = {name: 100 * statistics.mean(values) for name, values in accuracy.items()}
    ranges = {name: f"{100 * min(v):.1f} to {100 * max(v):.1f}" for name, v in accuracy.items()}
    return [
        (
            f"a feedback matrix of Hadamard transforms, {WIDTH:,} to {WIDTH:,}, batch {BATCH}, 1 thread(s)",
            f"{found['times_faster']:.0f} times faster than the product with a stored float32 matrix",
            command(MODULE),
        ),
        (
            f"accuracy of `dfa` on digits through it, {EPOCHS} epochs, {len(SEEDS)} seeds",
            f"{means['hadamard']:.1f} % ({ranges['hadamard']}), through the Gaussian matrix "
            f"{means['gaussian']:.1f} % ({ranges['gaussian']})",
            command(MODULE),
        ),
    ]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    speed = measure_speed(parser.parse_args().repeats)
    with tempfile.TemporaryDirectory() as name:
        accuracy = measure_accuracy(Path(name))
    save_results(NAME, {"required": REQUIRED, "batch": BATCH, **speed, "accuracy": accuracy})
    print_table("Structured feedback", ("work", "found", "command"), speed_rows())


if __name__ == "__main__":
    main()
