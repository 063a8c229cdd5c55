"""Do hyperplanes and noise from the `gaussian` device learn like those from a seed (MNIST)?

P = 32, 5 epochs of batches of 125, proven last-iterate epsilon 4.76; every seed of the device's row is another device.
Required: the means agree within five standard errors of their difference.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import command
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read

MODULE, NAME = "benchmarks.convex.device", "convex_device"
FOLDER, SEEDS, EPSILON, SIGMA = Path("runs/convex-device"), range(3), 4.76, 0.5


def configuration(source: str, seed: int) -> dict[str, Any]:
    """A run whose hyperplanes and noise come from a seed or from a device."""
    device = {"name": "gaussian", "noise": {"sigma": SIGMA}, "medium": {"seed": 1000 + seed}}
    return {
        "threads": 1,
        "seed": seed,
        "epochs": 5,
        "data": {"name": "mnist", "validation_fraction": 0.0},
        "trainer": {"kind": "convex", "hyperplanes": 32, "clip": 0.7, "gates": source},
        "optimizer": {"lr": 1.9, "momentum": 0.0},
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": 125},
        "protection": {
            "kind": "last-iterate",
            "epsilon": EPSILON,
            "noise": "device" if source == "device" else "digital",
        },
        **({"device": device} if source == "device" else {}),
    }


def page_text() -> str:
    """Return what the results page says; empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    text = "; ".join(
        f"{name} {row['test']:.2f} ± {row['test_standard_error']:.2f}" for name, row in found["rows"].items()
    )
    return (
        f"Hyperplanes and noise from a seed or from the `gaussian` device (sigma {found['sigma']:g}), "
        f"{found['data']} at epsilon {found['epsilon']:g}, {found['seeds']} seeds each, test accuracy [%]: {text} "
        f"({command(MODULE)})."
    )


def main() -> None:
    """Train both rows, print and save."""
    rows: dict[str, dict[str, Any]] = {}
    for source in ("seed", "device"):
        runs = [train_or_read(configuration(source, seed), FOLDER / f"{source}-{seed}") for seed in SEEDS]
        test = [100 * (run.summary or {})["test_accuracy"] for run in runs]
        rows[source] = {
            "test": statistics.mean(test),
            "test_standard_error": statistics.stdev(test) / math.sqrt(len(test)),
            "each": test,
            "status": runs[0].guarantees[0].status.value,
            "proven_epsilon": max(run.guarantees[0].epsilon for run in runs),
            "frames": (runs[0].summary or {})["frames"],
        }
        print(source, rows[source], flush=True)
    difference = rows["device"]["test"] - rows["seed"]["test"]
    error = math.hypot(*(row["test_standard_error"] for row in rows.values()))
    save_results(
        NAME,
        {
            "data": "mnist",
            "epsilon": EPSILON,
            "sigma": SIGMA,
            "seeds": len(SEEDS),
            "rows": rows,
            "difference": difference,
            "standard_error": error,
            "within_bar": abs(difference) < 5 * error,
        },
    )


if __name__ == "__main__":
    main()
