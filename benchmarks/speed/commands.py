"""How long does the command take to start, and a short run to end, against an earlier tree?

`opusim --help` over a process that imports typer and rich; `opusim train pdfa --data digits --epochs 1` over the same
command of commit 02c3c03, which stands in a git worktree in a temporary folder for the time of the measurement. All
four are processes of their own, in turn; medians of wall time, and of processor time for machines with other work.
Required: at most 1.8 and at most 0.5.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.markdown import Row, command
from benchmarks.results_file import FOLDER, load_results, save_results
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.commands", "commands"
ROOT = FOLDER.parents[1]
BEFORE = "02c3c03"
START = "from opusim.training.cli import main; main()"
IMPORTS, HELP = "import typer, rich", "opusim --help"
RUN, RUN_BEFORE = "opusim train pdfa, one epoch of digits", f"the same at {BEFORE}"
RATIOS = {HELP: (IMPORTS, 1.8), RUN: (RUN_BEFORE, 0.5)}
"""What each piece of work is measured against, and the ratio that is required."""


@contextlib.contextmanager
def worktree(folder: Path) -> Iterator[Path]:
    """The tree of the earlier commit, removed afterwards."""
    path = folder / BEFORE
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(path), BEFORE], check=True)
    try:
        yield path
    finally:
        subprocess.run([*git, "remove", "--force", str(path)], check=True)


def seconds_of(call: list[str], tree: Path, folder: Path) -> dict[str, float]:
    """Wall and processor time of one process whose packages come from a tree."""
    settings = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    used, started = os.times(), time.perf_counter()
    done = subprocess.run(call, cwd=folder, env=settings, capture_output=True, text=True)
    wall, now = time.perf_counter() - started, os.times()
    if done.returncode:
        raise RuntimeError(f"{' '.join(call)} ended with {done.returncode}: {done.stderr[-500:]}")
    busy = now.children_user + now.children_system - used.children_user - used.children_system
    return {"wall": wall, "processor": busy}


def measure(folder: Path, before: Path, repeats: int, warm_up: int) -> dict[str, dict[str, float]]:
    """Median seconds of each piece of work; the first repeats compile kernels and do not count."""
    train = ["train", "pdfa", "--data", "digits", "--epochs", "1", "--set", "threads=1", "--quiet"]
    work: dict[str, tuple[list[str], Path]] = {
        IMPORTS: (["-c", IMPORTS], ROOT),
        HELP: (["-c", START, "--help"], ROOT),
        RUN: (["-c", START, *train], ROOT),
        RUN_BEFORE: (["-c", START, *train], before),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in work}
    for repeat in range(-warm_up, repeats):
        for number, (name, (arguments, tree)) in enumerate(work.items()):
            out = ["--out", str(folder / f"{repeat}-{number}")] if "train" in arguments else []
            taken = seconds_of([sys.executable, *arguments, *out], tree, folder)
            if repeat >= 0:
                found[name].append(taken)
    return {
        name: {clock: statistics.median(taken[clock] for taken in values) for clock in ("wall", "processor")}
        for name, values in found.items()
    }


def ratios_of(seconds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each piece of work over what it is measured against, by clock."""
    return {
        name: {clock: seconds[name][clock] / seconds[reference][clock] for clock in seconds[name]}
        for name, (reference, _) in RATIOS.items()
    }


def table_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each ratio, as text."""
    rows = []
    for name, (reference, most) in RATIOS.items():
        times = (f"{results['seconds'][each]['wall']:.2f} s" for each in (name, reference))
        ratios = (f"{results['ratios'][name][clock]:.2f}" for clock in ("wall", "processor"))
        rows.append((name, reference, *times, *ratios, f"{most:g}"))
    return rows


def speed_rows() -> list[Row]:
    """Return the ratios of wall time."""
    found = load_results(NAME).get("ratios", {})
    return [
        (f"time of `{name}`", f"{ratios['wall']:.2f} of {RATIOS[name][0]}", command(MODULE))
        for name, ratios in found.items()
    ]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, worktree(Path(name)) as before:
        seconds = measure(Path(name), before, options.repeats, options.warm_up)
    results = {"repeats": options.repeats, "seconds": seconds, "ratios": ratios_of(seconds)}
    header = (
        "work",
        "against",
        "its time",
        "their time",
        "ratio",
        "processor time, ratio",
        "required at most",
    )
    print_table("Start and end of commands", header, table_rows(results))
    save_results(NAME, results)


if __name__ == "__main__":
    main()
