"""Does a network learn through a bench of one's own as through the camera twin?

The bench is an optical bench in software that shares no code with opusim's camera (tests/support/own_bench): mirrors
and camera behind doubles of ALP4lib and pylablib, driven by the code and the description of the page "Bring your own
instrument". Digits, 64-512-512-10, photonic DFA with default settings, three seeds, another medium for each. Required:
mean test accuracy within two points of the `camera` twin.

Runs are ordinary run folders under runs/own_bench; a second call resumes where the first one stopped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.runs import train_or_read
from opusim.tables import print_table

MODULE, NAME, FOLDER = "benchmarks.devices.own_bench", "own_bench", Path("runs/own_bench")
OWN = Path(__file__).parents[2] / "tests" / "support" / "own_bench"
COLUMN_NAMES = ("seed", "own bench [%]", "`camera` [%]")
SEEDS, EPOCHS, BAR = (0, 1, 2), 15, 2.0


def device_of(label: str, seed: int) -> dict[str, Any]:
    """Return the section ``[device]`` of a run."""
    if label == "camera":
        return {"name": "camera", "medium": {"seed": seed}}
    import optical_bench  # its folder is put on the path by main

    optical_bench.use(optical_bench.OpticalBench(seed=seed + 1))
    return {"name": str(OWN / "my_bench.toml"), "bench": {"setup": str(FOLDER / f"setup-{seed}")}}


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


def rows_of(runs: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return a line for each seed, and the means, as text."""
    found = {(run["device"], run["seed"]): run["test"] for run in runs}
    seeds = sorted({seed for _, seed in found if all((label, seed) in found for label in ("own", "camera"))})
    pairs = [(found["own", seed], found["camera", seed]) for seed in seeds]
    rows = [(str(seed), f"{own:.2f}", f"{twin:.2f}") for seed, (own, twin) in zip(seeds, pairs, strict=True)]
    if pairs:
        rows.append(("mean", *(f"{statistics.mean(each):.2f}" for each in zip(*pairs, strict=True))))
    return rows


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    rows = rows_of(results.get("runs", []))
    if not rows:
        return ""
    difference = float(rows[-1][1]) - float(rows[-1][2])
    met = "met" if abs(difference) <= results["bar"] else "not met"
    text = (
        f"Digits, 64-512-512-10, photonic DFA, {results['epochs']} epochs ({results['date']}, {command(MODULE)}): "
        "through an optical bench in software behind doubles of ALP4lib and pylablib, by the code and the description "
        f'of the page "Bring your own instrument". Required: within {results["bar"]:g} points: {met}, '
        f"{difference:+.2f}."
    )
    return section("A bench of one's own", text, markdown(COLUMN_NAMES, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    sys.path.insert(0, str(OWN))
    runs: list[dict[str, Any]] = []
    for seed in SEEDS:
        for label in ("own", "camera"):
            runs.append(run_once(label, seed, options.epochs))
            print(runs[-1], flush=True)
            save_results(NAME, {"bar": BAR, "epochs": options.epochs, "runs": runs})
    print_table("digits, test accuracy", COLUMN_NAMES, rows_of(runs))


if __name__ == "__main__":
    main()
